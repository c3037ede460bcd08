"""The memory of a cache's rows: all in the model's precision, or quantized ("packed") except for the newest.

The cache decides which slots step, which rows stay and how long a slot is; a storage holds the rows and attends.
"""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kvsweep.compression.cache_rows import Prefill
from kvsweep.compression.config import CacheConfig
from kvsweep.compression.slots import Piece, Slots
from kvsweep.kernels.fp8 import DTYPES, row_scales, scale_of, to_fp8, widened
from kvsweep.kernels.packing import column_scales, pack_rows, rotation
from kvsweep.kernels.pointwise import write_rows
from kvsweep.kernels.reference import Attended, whole_kivi_rows, whole_rows


class Storage(ABC):
    """The rows of all slots and layers."""

    tensors: Sequence[Tensor]  # memory of the rows, [slots, ...] each
    columns: Sequence[Tensor] = ()  # other numbers of a slot, [slots, ...] each
    longest_chunk: int | None = None  # the most tokens of a slot that one step may write; None: no limit

    def __init__(self, cache: Slots) -> None:
        self.cache: Slots = weakref.proxy(cache)  # a strong reference would keep the rows until Python collects garbage

    @abstractmethod
    def admit(self, slot: int, prefill: Prefill) -> None:
        """Write a prompt's rows into a slot; its memory is zero before."""

    def place(self) -> None:  # noqa: B027
        """Make room for the rows of a step's tokens, unless they lie behind the older rows."""

    @abstractmethod
    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Write a layer's rows of a step, [tokens or more, kv_heads, 1, head_dim]."""

    def attend(self, layer: int, query: Tensor, how: Mapping[str, Any]) -> tuple[Tensor, list[Tensor | None]]:
        """Attend with one query per token, [tokens or more, q_heads, head_dim], each over the rows up to its own.

        `how` has the layer's `scaling`, `sinks` and `softcap`. Returns output [tokens or more, q_heads, head_dim], zero
        beyond the step's tokens, and for each piece its attention mass [tokens, kv_heads, rows] if the cache needs it.
        """
        how = {**how, "return_mass": self.cache.needs_mass}
        outputs, masses = [], []
        for piece in self.cache.pieces:
            output, mass = self._attend(layer, piece, query[piece.tokens], how)
            outputs.append(output)
            masses.append(mass)
        return filled(outputs, len(query)), masses

    @abstractmethod
    def _attend(self, layer: int, piece: Piece, query: Tensor, how: Mapping[str, Any]) -> Attended:
        """Attend with the queries of one piece, [tokens, q_heads, head_dim]."""

    @abstractmethod
    def keep(self, slot: int, keep: Tensor) -> None:
        """Move the kept rows of a slot to the front; `keep` is [kept] or [layers, kv_heads, kept]."""

    @abstractmethod
    def read(self, layer: int, slot: int, length: int) -> tuple[Tensor, Tensor]:
        """Return a layer's keys and values of a slot, [kv_heads, length, head_dim], as attention reads them."""


class WholeRows(Storage):
    """Every row in the model's precision: per layer, keys and values are [slots, kv_heads, capacity, head_dim].

    Dead rows must be finite: attention gives them a weight of zero, and zero times NaN is NaN.
    """

    whole_layers = 0  # the first layers, whose rows keep the model's precision whatever dtype the others have

    def __init__(self, cache: Slots, dtype: torch.dtype | None = None) -> None:
        super().__init__(cache)
        self.tensors = self._memory(cache.shape.head_dim, dtype or cache.shape.dtype)
        self.keys, self.values = self.tensors[::2], self.tensors[1::2]
        self.scales: list[Tensor] = []  # of the keys and the values of each layer in turn, if rows have scales
        self._heads = torch.arange(cache.shape.kv_heads, device=cache.device)

    def _memory(self, width: int, dtype: torch.dtype) -> list[Tensor]:
        """Allocate [slots, kv_heads, capacity, width] for the keys and the values of each layer in turn."""
        cache = self.cache
        size = (cache.slots, cache.shape.kv_heads, cache.capacity, width)
        whole = 2 * self.whole_layers
        dtypes = [cache.shape.dtype] * whole + [dtype] * (2 * cache.shape.layers - whole)
        return [torch.zeros(size, dtype=layer_dtype, device=cache.device) for layer_dtype in dtypes]

    def place(self) -> None:
        """Find the lines of a layer's [slots * kv_heads * capacity] rows that the step writes, [tokens * kv_heads]."""
        cache, heads = self.cache, self._heads
        # The first row of each token's slot and head.
        first = (cache.step_slots[:, None] * len(heads) + heads) * cache.capacity
        self.lines = (first + cache.write_at[:, None]).flatten()

    def admit(self, slot: int, prefill: Prefill) -> None:
        for layer, pair in enumerate(prefill.rows):
            for memory, numbers in self._stored(layer, *pair):
                memory[slot, :, : prefill.length] = numbers

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        tokens = len(self.cache.write_at)
        for memory, numbers in self._stored(layer, keys[:tokens, :, 0], values[:tokens, :, 0]):
            write_rows(memory, numbers, self.lines)

    def _stored(self, layer: int, *pair: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each memory of a layer with the numbers that it takes for keys and values, [..., head_dim] each."""
        return zip((self.keys[layer], self.values[layer]), pair, strict=True)

    def _rows(self, layer: int, slots: slice | int, rows: int) -> list[Tensor]:
        """The first rows of a layer's keys and values, then their scales if they have scales."""
        memories = self.keys[layer], self.values[layer], *self.scales[2 * layer : 2 * layer + 2]
        return [memory[slots, :, :rows] for memory in memories]

    def _attend(self, layer: int, piece: Piece, query: Tensor, how: Mapping[str, Any]) -> Attended:
        cache = self.cache
        rows_read = cache.rows_read(piece.slots)
        keys, values, *scales = self._rows(layer, piece.slots, rows_read)
        lengths = cache.step_lengths[piece.tokens]
        if piece.count == 1:
            if not cache.ragged and len(cache.pieces) == 1:  # a whole step: its mask serves all layers
                how = {**how, "unseen": cache.unseen(rows_read)}
            return cache.operations.decode_attention(query, keys, values, lengths, scales=scales, **how)
        # The Triton kernel of a chunk has no arguments for sinks and a softcap: None is left out, and layers that have
        # either attend in decode steps, below, whose kernel takes both.
        arguments = {name: value for name, value in how.items() if value is not None}
        is_beyond_kernel = cache.ragged and arguments.keys() & {"sinks", "softcap"}
        if not cache.invariant and not is_beyond_kernel:
            rows = self.read(layer, piece.slots.start, int(cache.lengths[piece.slots.start]))
            return cache.operations.chunk_attention(query, *rows, **arguments)

        def copied(few: slice) -> list[Tensor]:
            copies = [rows.expand(len(lengths[few]), -1, -1, -1) for rows in (keys, values, *scales)]
            # torch's product would copy expanded rows itself, into another memory layout, and may then round
            # differently.
            return copies if cache.ragged else [rows.contiguous() for rows in copies]

        return cache.attend_in_steps(copied, query, lengths, how)

    def keep(self, slot: int, keep: Tensor) -> None:
        self.cache.operations.compact_layers([tensor[slot] for tensor in self.tensors], keep)

    def read(self, layer: int, slot: int, length: int) -> tuple[Tensor, Tensor]:
        keys, values = self._rows(layer, slot, length)
        return keys, values


class Fp8Rows(WholeRows):
    """Every row as 8-bit floating-point numbers (`kernels.fp8`), written once and never rounded again.

    An eviction moves codes and scales. A step attends over the codes, its own rows among them; a prompt attends to
    itself before its rows are stored.
    """

    def __init__(self, cache: Slots, config: CacheConfig) -> None:
        self.whole_layers = config.whole_layers
        super().__init__(cache, torch.uint8)  # torch copies and gathers rows of bytes, but not of every float8
        self.dtype = DTYPES[config.format]
        self._codes = list(self.tensors)  # keys and values of each layer in turn
        # The same memory as numbers; that of whole layers has no codes.
        numbers = [codes.view(self.dtype) if codes.dtype == torch.uint8 else codes for codes in self._codes]
        self.keys, self.values = numbers[::2], numbers[1::2]
        self._row_scales = self._memory(1, torch.float32) if config.scale == "token" else []
        self.scales = self._of_layers(config) if config.is_calibrated else self._row_scales
        self.tensors = [*self._codes, *self._row_scales]

    def _of_layers(self, config: CacheConfig) -> list[Tensor]:
        """Return each layer's scale of keys and of values, one number as [slots, kv_heads, capacity, 1].

        All slots and heads share the memory of `capacity` numbers, because kernels read scales that lie side by side.
        """
        rows = config.largest_rows(self.cache.shape.layers)
        largest = torch.stack([rows["keys"], rows["values"]], dim=1).float().flatten()  # keys and values in turn
        scales = scale_of(largest.to(self.cache.device), self.dtype)
        size = self._codes[0].shape[:3]  # slots, kv_heads, capacity
        return [scale.repeat(size[2], 1).expand(*size, 1) for scale in scales]

    def _rows(self, layer: int, slots: slice | int, rows: int) -> list[Tensor]:
        rows_and_scales = super()._rows(layer, slots, rows)
        # The memory of scales has a place for each layer, but a whole layer's rows have none.
        return rows_and_scales[:2] if layer < self.whole_layers else rows_and_scales

    def _stored(self, layer: int, *pair: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        if layer < self.whole_layers:
            yield from super()._stored(layer, *pair)
            return
        for index, rows in enumerate(pair, 2 * layer):  # keys, then values: the memories of all layers in turn
            scale = None
            if self._row_scales:
                scale = row_scales(rows, self.dtype)
                yield self._row_scales[index], scale
            elif self.scales:
                scale = self.scales[index][0, 0, 0]  # the number that the whole layer shares
            yield self._codes[index], to_fp8(rows, self.dtype, scale).view(torch.uint8)

    def keep(self, slot: int, keep: Tensor) -> None:
        # Apart, since they have other widths; `_row_scales` may be empty.
        for memory in filter(None, (self._codes, self._row_scales)):
            self.cache.operations.compact_layers([tensor[slot] for tensor in memory], keep)

    def read(self, layer: int, slot: int, length: int) -> tuple[Tensor, Tensor]:
        """Return the stored numbers in the model's precision."""
        keys, values, *scales = self._rows(layer, slot, length)
        key_scale, value_scale = scales or (None, None)
        dtype = self.cache.shape.dtype
        keys = widened(keys, key_scale, torch.float32).to(dtype)
        return keys, widened(values, value_scale, torch.float32).to(dtype)


class _Packing(Storage):
    """Quantized rows, except the `newest` tokens: [slots, layers, 2, kv_heads, room, head_dim]."""

    step_places: Tensor  # in `newest`, of a step's tokens, [tokens]

    def __init__(self, cache: Slots, config: CacheConfig) -> None:
        super().__init__(cache)
        shape = cache.shape
        self.room = config.whole_rows  # rows of `newest`
        self.formats: Any = config.row_formats(shape.head_dim)  # how keys, then values, are quantized
        self.residual = config.residual
        self.longest_chunk = config.residual  # so that no row of a chunk is quantized before the next chunk
        size = (cache.slots, shape.layers, 2, shape.kv_heads, self.room, shape.head_dim)
        self.newest = torch.zeros(size, dtype=shape.dtype, device=cache.device)
        # [head_dim, head_dim] that rotate rows for storing, and back; None if rows are stored as they are.
        self._forth: Tensor | None = None
        self._back: Tensor | None = None
        if config.scheme in ("rotated", "kvarn"):
            forth, back = rotation(shape.head_dim)
            self._forth = forth.to(cache.device, shape.dtype)
            self._back = back.to(cache.device, shape.dtype)

    def admit(self, slot: int, prefill: Prefill) -> None:
        for layer, rows in enumerate(prefill.rows):
            self._write_all(slot, layer, self._multiplied(torch.stack(rows), self._forth))

    @abstractmethod
    def _write_all(self, slot: int, layer: int, rows: Tensor) -> None:
        """Write all rows of a slot, [2, kv_heads, length, head_dim]: those that are old quantized."""

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Write the rows, rotated, into `newest`."""
        # [tokens or more, 2, kv_heads, head_dim]
        rows = self._multiplied(torch.cat([keys, values], dim=2), self._forth).transpose(1, 2)
        # Two indices of tokens with slices between them put the tokens first: [tokens, 2, kv_heads, head_dim].
        self.newest[self.cache.step_slots, layer, :, :, self.step_places] = rows[: len(self.step_places)]

    def read(self, layer: int, slot: int, length: int) -> tuple[Tensor, Tensor]:
        keys, values = self._multiplied(self._whole(layer, slot, length), self._back)
        return keys, values

    @abstractmethod
    def _whole(self, layer: int, slot: int, length: int) -> Tensor:
        """Return the rows of a slot as they are stored, [2, kv_heads, length, head_dim]."""

    def attend(self, layer: int, query: Tensor, how: Mapping[str, Any]) -> tuple[Tensor, list[Tensor | None]]:
        """Attend over the packed and the newest rows; if rows are rotated, rotate the query and the output too.

        `_back` is symmetric and the inverse of `_forth`: with it a query has the same products with rotated keys as
        before with plain ones, and an output of rotated values is turned back.
        """
        output, masses = super().attend(layer, self._multiplied(query, self._back), how)
        return self._multiplied(output, self._back), masses

    def _multiplied(self, rows: Tensor, by: Tensor | None) -> Tensor:
        return rows if by is None else self.cache.linear(rows.reshape(-1, rows.shape[-1]), by).view(rows.shape)

    def _places(self, first: int, end: int) -> Tensor:  # in `newest`
        return torch.arange(first, end, device=self.newest.device) % self.room

    def _bytes(self, *size: int) -> Tensor:
        """Allocate bytes, [slots, layers, kv_heads, *size]."""
        return self.newest.new_zeros(*self.newest.shape[:2], self.newest.shape[3], *size, dtype=torch.uint8)

    def _attend_at_own_step(
        self, query: Tensor, packed: Tensor, whole: Tensor, counts: Tensor, lengths: Tensor, how: Mapping[str, Any]
    ) -> Attended:
        """Attend over a slot's rows [2, kv_heads, rows, head_dim]: each token sees a row as it was at its own step.

        A row is in full precision until it is one of the token's `counts` quantized rows, [tokens, kv_heads or 1].
        """
        rows = torch.arange(packed.shape[2], device=counts.device)

        def seen(few: slice) -> Tensor:
            is_packed = (rows < counts[few][..., None])[None, ..., None]  # [1, tokens, kv_heads, rows, 1]
            return torch.where(is_packed, packed[:, None], whole[:, None]).contiguous()

        return self.cache.attend_in_steps(seen, query, lengths, how)


class PackedRows(_Packing):
    """The newest `residual` tokens in the model's precision, all older rows quantized.

    A row is quantized once, when its token is `residual` tokens old; an eviction moves its bytes unchanged.
    `scheme=rotated` stores rows rotated (`kernels.packing.rotation`) after their rotary embedding, rotates the query of
    a step in the same way, and rotates the output back.

    Attributes:
        packed: bytes of the keys and of the values, [slots, layers, kv_heads, capacity, bytes] each.
        newest: the token at position p lies at p % residual, where an eviction leaves it.
        counts: packed rows of each slot, [slots, 1, 1], or [slots, layers, kv_heads] where each head keeps rows of its
            own. They come first: rows lie in the order of their positions.

    """

    def __init__(self, cache: Slots, config: CacheConfig) -> None:
        super().__init__(cache, config)
        self.packed = [self._bytes(cache.capacity, row_format.row_bytes) for row_format in self.formats]
        self.counts = torch.zeros(cache.positions.shape[:3], dtype=torch.int64, device=cache.device)
        self.tensors = (*self.packed, self.newest)
        self.columns = (self.counts,)

    def admit(self, slot: int, prefill: Prefill) -> None:
        super().admit(slot, prefill)
        self.counts[slot] = max(0, prefill.length - self.residual)

    def _write_all(self, slot: int, layer: int, rows: Tensor) -> None:
        """Quantize all rows except the newest tokens' rows, which go to `newest`."""
        length = rows.shape[-2]
        old = max(0, length - self.residual)
        for memory, packed in zip(self.packed, self._pack(rows[..., :old, :]), strict=True):
            memory[slot, layer, :, :old] = packed
        self.newest[slot, layer, :, :, self._places(old, length)] = rows[..., old:, :]

    def place(self) -> None:
        """Quantize the rows that the new tokens make too old; the new rows take their places."""
        cache = self.cache
        self.step_places = cache.step_positions % self.room
        self._leaving = []  # of each piece: packed rows at each token, rows that may leave `newest`, their numbers
        for piece in cache.pieces:
            slots = piece.slots
            counts = self.counts[slots][..., None]
            # Each token makes at most one row too old, so that as many rows behind the packed ones may leave.
            behind = counts + torch.arange(piece.count, device=counts.device)  # [slots, layers, kv_heads, leaving]
            now = cache.step_positions[piece.tokens].view(-1, 1, 1, 1, piece.count)  # [slots, 1, 1, 1, tokens]
            # Each slot's length with all its tokens, [slots, 1, 1, 1].
            lengths = cache.step_lengths[piece.tokens].view(-1, piece.count)[:, -1, None, None, None]
            rows = behind.clamp(max=cache.capacity - 1)  # beyond the rows that are written, any row that exists
            positions = cache.positions[slots].gather(-1, rows)
            # If an eviction has dropped older rows, the next rows are younger, and fewer are quantized.
            # [slots, layers, kv_heads, leaving, tokens]: true from the token on at which the row is packed.
            is_packed = (behind < lengths)[..., None] & (positions[..., None] + self.residual <= now)
            counts = counts + is_packed.sum(-2)  # packed rows at each token, [slots, layers, kv_heads, tokens]
            # From here on each layer and head has its entries, also where all keep the same rows and share those above.
            shape = -1, cache.shape.layers, cache.shape.kv_heads, -1
            rows = rows.expand(*shape)[..., None]
            places = (positions % self.residual).expand(*shape)[..., None]
            places = places[:, :, None].expand(-1, -1, 2, -1, -1, self.newest.shape[-1])
            numbers = self.newest[slots].gather(4, places)  # [slots, layers, 2, kv_heads, leaving, head_dim]
            # A row that stays is also written behind the packed rows, where nothing reads it.
            for memory, packed in zip(self.packed, self._pack(numbers.unbind(2)), strict=True):
                memory[slots].scatter_(3, rows.expand(packed.shape), packed)
            self._leaving.append((counts, rows, numbers))
            self.counts[slots] = counts[..., -1]

    def _attend(self, layer: int, piece: Piece, query: Tensor, how: Mapping[str, Any]) -> Attended:
        cache = self.cache
        stored = self._rows(layer, piece.slots, cache.rows_read(piece.slots))
        lengths = cache.step_lengths[piece.tokens]
        if piece.count == 1:
            return cache.operations.packed_attention(query, *stored, lengths, formats=self.formats, **how)
        # What `place` has noted: the packed rows at each token, the rows that may leave, and their numbers until then.
        all_counts, all_rows, all_numbers = self._leaving[cache.pieces.index(piece)]
        # This piece is one slot's. Where all heads keep the same rows, one count serves all layers.
        counts = all_counts[0, min(layer, all_counts.shape[1] - 1)]  # [kv_heads or 1, tokens]
        rows = all_rows[0, layer]  # [kv_heads, leaving, 1]
        numbers = all_numbers[0, layer]  # [2, kv_heads, leaving, head_dim]
        packed = torch.cat(whole_rows(*stored, formats=self.formats))  # [2, kv_heads, rows, head_dim]
        # The rows as they were before this chunk: those that it has packed are still whole.
        has_left = rows < counts[..., -1, None, None]
        # Any other row is written as `packed` has it; those beyond the rows read become the last, which has not left.
        rows = rows.clamp(max=packed.shape[2] - 1).expand(numbers.shape)
        whole = packed.scatter(2, rows, torch.where(has_left, numbers, packed.gather(2, rows)))
        return self._attend_at_own_step(query, packed, whole, counts.T, lengths, how)

    def keep(self, slot: int, keep: Tensor) -> None:
        """Compact the packed rows. Rows in `newest` stay in place; the cache moves their positions."""
        # `keep` also names rows that are not packed. Bytes moved for them lie behind the packed rows and are not read.
        for memory in self.packed:
            self.cache.operations.compact_layers(list(memory[slot]), keep)
        self.counts[slot] = (keep < self.counts[slot, ..., None]).sum(-1)

    def _whole(self, layer: int, slot: int, length: int) -> Tensor:
        return torch.cat(whole_rows(*self._rows(layer, slice(slot, slot + 1), length), formats=self.formats))

    def _rows(self, layer: int, slots: slice, rows: int) -> tuple[Tensor, ...]:
        """The first `rows` rows of a layer, as `packed_attention` takes them: bytes, newest, positions, counts."""
        # Where all heads keep the same rows, the first index serves all layers, and is expanded over heads.
        kv_heads = self.newest.shape[3]
        index = min(layer, self.counts.shape[1] - 1)
        packed = (memory[slots, layer, :, :rows] for memory in self.packed)
        positions = self.cache.positions[slots, index, :, :rows].expand(-1, kv_heads, -1)
        return *packed, self.newest[slots, layer], positions, self.counts[slots, index].expand(-1, kv_heads)

    def _pack(self, rows: Iterable[Tensor]) -> list[Tensor]:
        """Return the bytes of keys and values, [..., head_dim] each."""
        return [pack_rows(numbers, row_format) for numbers, row_format in zip(rows, self.formats, strict=True)]


class KiviRows(_Packing):
    """The newest rows in the model's precision; older keys quantized per channel, older values per token.

    KIVI (2402.02750, section 3): a zero and a step for each channel of `group` neighbouring keys. `group` rows are
    quantized together as soon as `residual` rows follow them. KIVI itself does not evict; here an eviction makes new
    groups of the kept rows, and quantizes again the keys that do not form a group from before. Values move unchanged.

    `scheme=kvarn` (KVarN, 2606.03458) does so with rotated rows, and first divides the keys of a group by a scale for
    each token, and its values by a scale for each channel (`kernels.packing.column_scales`). Its values are quantized
    again as the keys are. Its authors' port leaves the first group whole, which is not done here.

    Attributes:
        keys: the bytes of a channel of each group, [slots, layers, kv_heads, groups, head_dim, bytes].
        values: the bytes of as many values, [slots, layers, kv_heads, rows, bytes].
        newest: row i lies at i % room.
        scales: KVarN's, of keys and of values, [slots, layers, kv_heads, groups, 1, group or head_dim], float16.

    """

    def __init__(self, cache: Slots, config: CacheConfig) -> None:
        super().__init__(cache, config)
        self.group = config.group
        groups = cache.capacity // self.group
        self.keys = self._bytes(groups, cache.shape.head_dim, self.formats[0].row_bytes)
        self.values = self._bytes(groups * self.group, self.formats[1].row_bytes)
        widths = (self.group, cache.shape.head_dim) if config.scheme == "kvarn" else ()  # scales of keys, of values
        self._unit = 1.0  # makes the rotation one that changes no length: its entries are then head_dim ** -0.5
        if self._forth is not None:  # the entries' size is read on the CPU: a cache on torch's meta device has none
            self._unit = cache.shape.head_dim**-0.5 / float(rotation(cache.shape.head_dim)[0][0, 0])
        self.scales = [self._bytes(groups, 1, 2 * width).view(torch.float16) for width in widths]
        self.tensors = (self.keys, self.values, self.newest, *self.scales)

    def place(self) -> None:
        """Quantize the groups that the new tokens complete; the new rows take their places."""
        cache = self.cache
        self.step_places = cache.write_at % self.room
        self._leaving = dict[int, tuple[int, Tensor]]()  # by slot: the first row that leaves `newest`, and the rows
        for piece in cache.pieces:
            for slot in range(*piece.slots.indices(cache.slots)):
                length = int(cache.lengths[slot])  # with the new tokens
                first, end = self._packed_rows(length - piece.count), self._packed_rows(length)
                if first == end:  # the new tokens complete no group
                    continue
                rows = self.newest[slot].index_select(-2, self._places(first, end))
                self._leaving[slot] = (first, rows)
                for layer, layer_rows in enumerate(rows):
                    self._pack(slot, layer, first, layer_rows)

    def _attend(self, layer: int, piece: Piece, query: Tensor, how: Mapping[str, Any]) -> Attended:
        cache = self.cache
        lengths = cache.step_lengths[piece.tokens]
        rows_read = cache.rows_read(piece.slots)
        counts = (lengths - self.residual).clamp(min=0) // self.group * self.group
        stored, options = self._rows(layer, piece.slots, rows_read)
        if piece.count == 1:
            output, mass = cache.operations.kivi_attention(query, *stored, counts, lengths, **options, **how)
            return output, None if mass is None else mass[..., :rows_read]  # whole groups may reach beyond them
        # The slot's rows as they are packed at the last of its tokens.
        packed = torch.cat(whole_kivi_rows(*stored, counts[-1:], **options))[:, :, :rows_read]
        whole = packed.clone()
        if piece.slots.start in self._leaving:  # the rows that this chunk has packed, as they were before
            first, rows = self._leaving[piece.slots.start]
            whole[:, :, first : first + rows.shape[-2]] = rows[layer]
        return self._attend_at_own_step(query, packed, whole, counts[:, None], lengths, how)

    def keep(self, slot: int, keep: Tensor) -> None:
        """Write the kept rows again, in new groups, then put back the bytes of what an eviction must not change.

        That is each value that was packed before, if there are no scales, and each group with all its rows in place.
        """
        length = int(self.cache.lengths[slot])
        packed_before, packed_now = self._packed_rows(length), self._packed_rows(keep.shape[-1])
        groups = packed_now // self.group
        # [slots, layers, kv_heads, groups, ...]: what a group keeps if all its rows stay in place.
        grouped = [self.keys, *self.scales]
        if self.scales:
            grouped.append(self.values.unflatten(3, (-1, self.group)))
        # Where each kept row lay, [layers, kv_heads, kept].
        for layer, sources in enumerate(keep.expand(*self.keys.shape[1:3], -1)):
            groups_before = [memory[slot, layer].clone() for memory in grouped]
            values_before = self.values[slot, layer].clone()
            rows = self._whole(layer, slot, length)
            kept_rows = rows.gather(2, sources[None, ..., None].expand(2, -1, -1, rows.shape[-1]))
            self._write_all(slot, layer, kept_rows)
            packed_sources = sources[:, :packed_now, None]  # of the rows that are packed now
            was_packed = packed_sources < packed_before
            if not self.scales:  # with scales, a value's bytes are valid only in their group
                # A row that was not packed has no earlier bytes: any that exist are gathered, and none of them is kept.
                at = packed_sources.clamp(max=values_before.shape[1] - 1).expand(-1, -1, values_before.shape[-1])
                values = self.values[slot, layer, :, :packed_now]
                values.copy_(values_before.gather(1, at).where(was_packed, values))
            in_place = (packed_sources == torch.arange(packed_now, device=keep.device)[:, None]) & was_packed
            group_stays = in_place.unflatten(1, (-1, self.group)).all(2)[..., None]  # [kv_heads, groups, 1, 1]
            # Groups of which all rows stay in place get their earlier bytes back.
            for memory, before in zip(grouped, groups_before, strict=True):
                written = memory[slot, layer, :, :groups]
                written.copy_(before[:, :groups].where(group_stays, written))

    def _whole(self, layer: int, slot: int, length: int) -> Tensor:
        counts = torch.tensor([self._packed_rows(length)], device=self.newest.device)
        stored, options = self._rows(layer, slice(slot, slot + 1), length)
        return torch.cat(whole_kivi_rows(*stored, counts, **options))[:, :, :length]

    def _packed_rows(self, length: int) -> int:
        return max(0, length - self.residual) // self.group * self.group

    def _rows(self, layer: int, slots: slice, rows: int) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]:
        """Return a layer's groups of the first `rows` rows and all newest rows; then their formats and scales."""
        groups = min(-(-rows // self.group), self.keys.shape[3])  # rounded up, as far as there are groups
        values = self.values[slots, layer, :, : groups * self.group]
        options = {"formats": self.formats, "scales": [scale[slots, layer, :, :groups] for scale in self.scales]}
        return (self.keys[slots, layer, :, :groups], values, self.newest[slots, layer]), options

    def _write_all(self, slot: int, layer: int, rows: Tensor) -> None:
        count = self._packed_rows(rows.shape[-2])
        self._pack(slot, layer, 0, rows[..., :count, :])
        self.newest[slot, layer].index_copy_(-2, self._places(count, rows.shape[-2]), rows[..., count:, :])

    def _pack(self, slot: int, layer: int, first: int, rows: Tensor) -> None:
        """Quantize whole groups of rows [2, kv_heads, rows, head_dim], and write them from row `first` on."""
        end = first + rows.shape[-2]
        groups = slice(first // self.group, end // self.group)
        tiles = rows.unflatten(2, (-1, self.group))
        keys, values = tiles[0].transpose(-1, -2), tiles[1]  # a channel's keys lie side by side
        if self.scales and first < end:
            # KVarN's limits are those of a rotation that changes no length.
            key_scales = column_scales(keys * self._unit).half()
            value_scales = column_scales(values * self._unit).half()
            self.scales[0][slot, layer, :, groups] = key_scales
            self.scales[1][slot, layer, :, groups] = value_scales
            keys, values = keys / key_scales, values / value_scales
        self.keys[slot, layer, :, groups] = pack_rows(keys, self.formats[0])
        self.values[slot, layer, :, first:end] = pack_rows(values.flatten(1, 2), self.formats[1])


def filled(outputs: Sequence[Tensor], tokens: int) -> Tensor:
    """Join numbers of a step's parts, [tokens of the part, ...] each, filled up with zeros to `tokens` tokens."""
    output = outputs[0] if len(outputs) == 1 else torch.cat(list(outputs))
    beyond = tokens - len(output)
    return torch.cat([output, output.new_zeros(beyond, *output.shape[1:])]) if beyond else output
