"""The bytes of a packed row. Importing this does not import torch."""

from dataclasses import dataclass
from functools import cached_property

# A zero and a step per group, in float16.
_GROUP_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class RowFormat:
    """A key or value of one head as bytes: first its levels, then a zero per group, then a step per group.

    A number is zero + step * level. The bits of 8 // bits levels share a byte: byte j holds the levels of the numbers
    j, j + level_bytes, j + 2 * level_bytes and so on, from the lowest bit up. Zeros and steps are float16.

    Attributes:
        bits: of a level: 8, 4 or 2.
        group: neighbouring numbers that share a zero and a step.
        head_dim: numbers in a row.

    Raises:
        ValueError: a head that does not divide into groups, or whose levels do not fill whole words of 4 bytes.
    """

    bits: int
    group: int
    head_dim: int

    def __post_init__(self) -> None:
        if self.head_dim % self.group:
            raise ValueError(
                f"cache.group={self.group} does not divide the {self.head_dim} numbers of a head: choose a divisor."
            )
        if self.head_dim * self.bits % 32:
            raise ValueError(
                f"cache.bits={self.bits} needs heads of a multiple of {32 // self.bits} numbers, and the model's have "
                f"{self.head_dim}: choose more bits."
            )

    @cached_property
    def groups(self) -> int:
        """Groups in a row."""
        return self.head_dim // self.group

    @cached_property
    def level_bytes(self) -> int:
        """Bytes of a row's levels."""
        return self.head_dim * self.bits // 8

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of a packed row: head_dim * bits / 8 + 4 * groups."""
        return self.level_bytes + _GROUP_BYTES * self.groups

    @property
    def top(self) -> int:
        """The highest level."""
        return 2**self.bits - 1


# Of a key and of a value.
RowForms = tuple[RowFormat, RowFormat]
