"""The byte format of a quantized ("packed") row. Importing this module does not import torch."""

from dataclasses import dataclass
from typing import Literal

from kvsweep.messages.errors import UserError

_FIELDS = 4  # bytes of a step and a zero, both float16


@dataclass(frozen=True, kw_only=True)
class RowFormat:
    """A quantized key or value of one head: for each group of numbers the levels, then a step, then a zero.

    A number is zero + step * level. A byte holds 8 // bits levels, the first one in its lowest bits. Step and zero are
    float16. A group of 4 or 2 bits has the layout of an fbgemm row, which torch unpacks on the CPU. Raises UserError
    if groups do not divide the head, or do not fill whole words of 4 bytes.
    """

    bits: int  # of a level: 8, 4 or 2
    group: int  # neighbouring numbers that share a zero and a step
    head_dim: int  # numbers of a row

    def __post_init__(self) -> None:
        if self.head_dim % self.group:
            undivided = f"cache.group={self.group} does not divide the {self.head_dim} numbers of a head"
            raise UserError(f"{undivided}: choose a divisor.")
        if self.group * self.bits % 32:
            unfilled = f"cache.group={self.group} does not fill whole words of 4 bytes with {self.bits} bits a number"
            raise UserError(f"{unfilled}: choose a multiple of {32 // self.bits}.")

    @property
    def group_bytes(self) -> int:
        return self.group * self.bits // 8 + _FIELDS

    @property
    def row_bytes(self) -> int:
        """Bytes of a quantized row: head_dim * bits / 8 + 4 * head_dim / group."""
        return self.head_dim // self.group * self.group_bytes

    @property
    def top(self) -> int:  # the highest level
        return 2**self.bits - 1


RowFormats = tuple[RowFormat, RowFormat]  # of a key and of a value
Fp8Format = Literal["e4m3", "e5m2"]  # 8 bits of a floating-point number: of the exponent, of the mantissa


# Rows per block of attention. If the number of rows is a multiple of this, a slot's rows are added in the same order,
# whatever the number of dead rows behind them.
ROW_BLOCK = 32
# Tokens of a matrix product (`kernels.reference.linear`). A product of fewer than 16 tokens may use another routine of
# the BLAS library, which rounds differently; so does a product of fewer than 4 in float32 on every processor tried.
TOKEN_BLOCK = 16
FEW_TOKENS = 4
HEAD_BLOCK = 4  # query heads per key head; zeros fill them up


def filled_tokens(count: int) -> int:
    """The tokens that a product of `count` tokens computes."""
    return whole_blocks(count, FEW_TOKENS if count < TOKEN_BLOCK else TOKEN_BLOCK)


def whole_blocks(count: int, block: int) -> int:
    """Return the smallest multiple of `block` that is at least `count`."""
    return -(-count // block) * block
