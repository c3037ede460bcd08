"""The precision in which a cache stores its rows. Importing this does not import torch."""

from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from kvsweep.kernels.row_format import RowFormat


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """How the rows of a cache are stored.

    Attributes:
        bits: of a stored number; 16 stores every row in the model's own precision, and the other fields do nothing.
        group: neighbouring numbers of a row that share a zero and a step.
        residual: newest tokens of a text whose rows stay in the model's own precision.
    """

    bits: Literal[16, 8, 4, 2] = 16
    group: Annotated[int, Field(ge=1)] = 32
    residual: Annotated[int, Field(ge=1, description="a number of tokens")] = 128

    def form(self, head_dim: int) -> RowFormat | None:
        """The bytes of a packed row, None where no row is packed."""
        return None if self.bits == 16 else RowFormat(bits=self.bits, group=self.group, head_dim=head_dim)

    def bytes_per_slot(self, *, layers: int, kv_heads: int, head_dim: int, itemsize: int, capacity: int) -> int:
        """Bytes of keys and values that one slot of `capacity` rows takes.

        Unpacked: 2 * layers * kv_heads * capacity * head_dim * itemsize. Packed: 2 * layers * kv_heads * (capacity *
        row_bytes + residual * head_dim * itemsize), where row_bytes = head_dim * bits / 8 + 4 * head_dim / group.
        """
        form, whole = self.form(head_dim), head_dim * itemsize
        one = capacity * form.row_bytes + self.residual * whole if form else capacity * whole
        return 2 * layers * kv_heads * one

    def identity(self) -> dict[str, Any]:
        """The settings that change completions, for `cell_id`: none where no row is packed."""
        return {} if self.bits == 16 else {"cache": asdict(self)}


UNPACKED = CacheConfig()
