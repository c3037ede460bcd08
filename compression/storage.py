"""The memory of a cache's rows: all in the model's own precision, or all but the newest packed.

The cache says which slots step, which rows stay and how long a slot is; a storage holds the rows and attends over them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvsweep.compression.rows import CacheShape, Prefill
from kvsweep.kernels.implementation import Operations
from kvsweep.kernels.packing import pack_rows, rotation
from kvsweep.kernels.reference import whole_rows
from kvsweep.kernels.row_format import RowFormat

_Attended = tuple[Tensor, Tensor | None]


class Slots(Protocol):
    """The cache as its storage sees it, with the attributes that `compression.cache.SlotCache` explains."""

    slots: int
    slot_ids: Tensor
    positions: Tensor
    write_at: Tensor
    step_lengths: Tensor
    needs_mass: bool
    operations: Operations
    linear: Callable[..., Tensor]

    @property
    def seen(self) -> int:
        """Rows of each slot that attention is given."""


class Storage(ABC):
    """The rows of all slots and layers.

    Attributes:
        columns: numbers that go with a slot, [slots, ...] each.
    """

    def __init__(self, cache: Slots, *columns: Tensor) -> None:
        self.cache, self.columns = cache, columns

    @property
    @abstractmethod
    def tensors(self) -> list[Tensor]:
        """The memory of the rows, [slots, ...] each."""

    @abstractmethod
    def admit(self, slot: int, prefill: Prefill) -> None:
        """Write a prompt's rows into a slot."""

    @abstractmethod
    def place(self, positions: Tensor) -> None:
        """Make room for the rows of a step's tokens, at original `positions` [slots]."""

    @abstractmethod
    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write a layer's rows of a step, [slots or more, kv_heads, 1, head_dim]; return what `attend` is given."""

    @abstractmethod
    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> _Attended:
        """Attend with one query per token, [tokens, q_heads, head_dim], the step's slots first.

        Returns output [tokens, q_heads, head_dim], zero beyond the slots, and mass [slots, kv_heads, rows] if the cache
        needs it.
        """

    @abstractmethod
    def keep(self, slot: int, keep: Tensor) -> None:
        """Move the kept rows of a slot to its front; `keep` is [kept] or [layers, kv_heads, kept]."""

    @abstractmethod
    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` rows of one slot over another."""

    @abstractmethod
    def read(self, layer: int, slot: int, length: int) -> tuple[Tensor, Tensor]:
        """Return a layer's keys and values of a slot, [kv_heads, length, head_dim], as attention sees them."""


class WholeRows(Storage):
    """Every row in the model's own precision: per layer, keys and values are [slots, kv_heads, capacity, head_dim].

    Dead rows must be finite, since attention gives them a weight of zero, and zero times NaN is NaN.
    """

    def __init__(self, cache: Slots, shape: CacheShape, capacity: int, device: torch.device) -> None:
        super().__init__(cache)
        size = (cache.slots, shape.kv_heads, capacity, shape.head_dim)
        self.keys, self.values = (
            [torch.zeros(size, dtype=shape.dtype, device=device) for _ in range(shape.layers)] for _ in range(2)
        )

    @property
    def tensors(self) -> list[Tensor]:
        """The keys and the values of each layer in turn."""
        return [tensor for layer in zip(self.keys, self.values, strict=True) for tensor in layer]

    def admit(self, slot: int, prefill: Prefill) -> None:
        for layer, rows in enumerate(prefill.rows):
            self.keys[layer][slot, :, : prefill.length], self.values[layer][slot, :, : prefill.length] = rows
        self.wipe(slot, prefill.length)

    def place(self, positions: Tensor) -> None:
        """Nothing to make: a new row lies behind the slot's rows."""

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        cache, own = self.cache, (self.keys[layer], self.values[layer])
        stepping = len(cache.write_at)
        for rows, new in zip(own, (keys, values), strict=True):
            rows[cache.slot_ids[:stepping], :, cache.write_at] = new[:stepping, :, 0]
        return own[0][:stepping, :, : cache.seen], own[1][:stepping, :, : cache.seen]

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> _Attended:
        cache = self.cache
        output, mass = cache.operations.decode_attention(
            query[: len(keys)], keys, values, cache.step_lengths, scaling=scaling, return_mass=cache.needs_mass
        )
        return _filled(output, len(query)), mass

    def keep(self, slot: int, keep: Tensor) -> None:
        self.cache.operations.compact_layers([tensor[slot] for tensor in self.tensors], keep)

    def copy(self, source: int, target: int, length: int) -> None:
        for tensor in self.tensors:
            tensor[target, :, :length] = tensor[source, :, :length]
        self.wipe(target, length)

    def read(self, layer: int, slot: int, length: int) -> tuple[Tensor, Tensor]:
        return self.keys[layer][slot, :, :length], self.values[layer][slot, :, :length]

    def wipe(self, slot: int, length: int) -> None:
        """Zero a slot's rows from `length` on, where an earlier sequence may have left NaN."""
        for tensor in self.tensors:
            tensor[slot, :, length:] = 0


class PackedRows(Storage):
    """The rows of the newest `residual` tokens of a text in the model's own precision, all older rows packed.

    A row is packed when its token is `residual` tokens old, and never again: so its bytes depend on its own sequence
    alone, and an eviction moves them as they are. Rows are stored rotated (`kernels.packing.rotation`), their rotary
    embedding on; the query of a step is rotated as the keys are, and the output back.

    Attributes:
        packed: keys and values as bytes, [slots, layers, 2, kv_heads, capacity, row_bytes].
        newest: those of the newest tokens, [slots, layers, 2, kv_heads, residual, head_dim]; the token at position p
            lies at p % residual, where an eviction leaves it.
        counts: packed rows of each slot, [slots, 1, 1], or [slots, layers, kv_heads] where each head keeps rows of its
            own. They come first: rows lie in the order of their positions.
    """

    def __init__(
        self, cache: Slots, shape: CacheShape, capacity: int, device: torch.device, form: RowFormat, residual: int
    ) -> None:
        self.counts = torch.zeros(cache.positions.shape[:3], dtype=torch.int64, device=device)
        super().__init__(cache, self.counts)
        self.form, self.residual = form, residual
        size = (cache.slots, shape.layers, 2, shape.kv_heads)
        self.packed = torch.zeros(*size, capacity, form.row_bytes, dtype=torch.uint8, device=device)
        self.newest = torch.zeros(*size, residual, shape.head_dim, dtype=shape.dtype, device=device)
        self._forth, self._back = (m.to(device, shape.dtype) for m in rotation(shape.head_dim))

    @property
    def tensors(self) -> list[Tensor]:
        return [self.packed, self.newest]

    def admit(self, slot: int, prefill: Prefill) -> None:
        """Pack all rows but those of the newest tokens, which go to `newest`."""
        old = max(0, prefill.length - self.residual)
        # An earlier sequence may have left NaN in places of `newest` that this prompt does not fill.
        self.counts[slot], self.newest[slot] = old, 0
        lie = torch.arange(old, prefill.length, device=self.newest.device) % self.residual
        for layer, (keys, values) in enumerate(prefill.rows):
            rows = self._rotated(torch.stack([keys, values]), self._forth)
            self.packed[slot, layer, :, :, :old] = pack_rows(rows[..., :old, :], self.form)
            self.newest[slot, layer, :, :, lie] = rows[..., old:, :]

    def place(self, positions: Tensor) -> None:
        """Pack the row that each new token replaces in `newest`: that of the token `residual` positions before."""
        stepping = len(positions)
        slots, counts = self.cache.slot_ids[:stepping], self.counts[:stepping]
        self._lie = positions % self.residual
        oldest = self.cache.positions[:stepping].gather(-1, counts[..., None])[..., 0]
        # If an eviction has dropped that row, the oldest row in `newest` is younger and stays there.
        leaves = (oldest + self.residual <= positions[:, None, None]) & (counts < self.cache.write_at[:, None, None])
        leaving = pack_rows(self.newest[slots, :, :, :, self._lie], self.form)[..., None, :]
        # A slot that packs nothing also writes the row behind its packed rows, where nobody reads.
        to = counts[:, :, None, :, None, None].expand(leaving.shape)
        self.packed[:stepping].scatter_(4, to, leaving)
        counts += leaves

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        rows = self._rotated(torch.cat([keys, values], dim=2), self._forth)  # [slots or more, kv_heads, 2, head_dim]
        stepping = len(self._lie)
        slots = self.cache.slot_ids[:stepping]
        self.newest[slots, layer, :, :, self._lie] = rows[:stepping].transpose(1, 2)
        return keys, values

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> _Attended:
        cache, stepping = self.cache, len(self._lie)
        output, mass = cache.operations.packed_attention(
            self._rotated(query, self._back)[:stepping],
            *self._rows(layer, slice(stepping), cache.seen),
            cache.step_lengths,
            form=self.form,
            scaling=scaling,
            return_mass=cache.needs_mass,
        )
        return self._rotated(_filled(output, len(query)), self._back), mass

    def keep(self, slot: int, keep: Tensor) -> None:
        """Compact the packed rows. Rows in `newest` stay where they are; the cache moves their positions."""
        # `keep` also names rows that are not packed; the bytes that move for them lie behind the packed rows, unread.
        self.cache.operations.compact_layers(list(self.packed[slot].flatten(0, 1)), keep)
        self.counts[slot] = (keep < self.counts[slot, ..., None]).sum(-1)

    def copy(self, source: int, target: int, length: int) -> None:
        self.packed[target, ..., :length, :] = self.packed[source, ..., :length, :]
        self.newest[target] = self.newest[source]

    def read(self, layer: int, slot: int, length: int) -> tuple[Tensor, Tensor]:
        rows = whole_rows(*self._rows(layer, slice(slot, slot + 1), length), form=self.form)
        keys, values = self._rotated(rows[:, 0], self._back)
        return keys, values

    def _rows(self, layer: int, slots: slice, seen: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The first `seen` rows of a layer, as `packed_attention` is given them: packed, newest, positions, counts."""
        kv_heads, index = self.newest.shape[3], min(layer, self.counts.shape[1] - 1)
        return (
            self.packed[slots, layer, :, :, :seen],
            self.newest[slots, layer],
            self.cache.positions[slots, index, :, :seen].expand(-1, kv_heads, -1),
            self.counts[slots, index].expand(-1, kv_heads),
        )

    def _rotated(self, rows: Tensor, by: Tensor) -> Tensor:
        # With `invariant` the number of rows is a multiple of TOKEN_BLOCK, or the rows are those of a single slot.
        return self.cache.linear(rows.reshape(-1, rows.shape[-1]), by).view(rows.shape)


def _filled(output: Tensor, tokens: int) -> Tensor:
    """Append zeros to an output per slot, up to the number of tokens."""
    return pad(output, (0, 0, 0, 0, 0, tokens - len(output))) if tokens > len(output) else output
