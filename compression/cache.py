"""The slot cache: one fixed block of memory for the keys and values of all sequences being decoded.

A slot has `capacity` rows of keys and values per layer, which `compression.storage` keeps whole or packed. It holds one
sequence; its first `length` rows are live. An eviction moves the kept rows to the front and lowers the length; the next
tokens overwrite the freed rows. So a slot never needs more than its `capacity`, which depends on the budget and not on
the length of the text.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear
from transformers.cache_utils import Cache, CacheLayerMixin

from kvsweep.compression.config import UNPACKED, CacheConfig, LayerKind
from kvsweep.compression.fixed_layers import LinearLayer, WindowLayer
from kvsweep.compression.policy import Selection
from kvsweep.compression.recorders import Memory, keep_columns
from kvsweep.compression.rows import CacheShape, Prefill
from kvsweep.compression.signals import Signal
from kvsweep.compression.storage import KiviRows, PackedRows, Piece, Storage, WholeRows
from kvsweep.kernels.blocks import ROW_BLOCK, TOKEN_BLOCK, whole_blocks
from kvsweep.kernels.implementation import Implementation, operations


class SlotLayer(CacheLayerMixin):
    """One full layer of a slot cache, with the interface that transformers' attention modules expect of a cache layer.

    `keys` and `values` are the layer's memory, [slots, kv_heads, capacity, head_dim], unless rows are packed.
    """

    def __init__(self, cache: "SlotCache", index: int) -> None:
        super().__init__()
        if isinstance(cache.storage, WholeRows):
            self.keys, self.values = cache.storage.keys[index], cache.storage.values[index]
        self.is_initialized = True
        self._cache, self._index = cache, index

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write the row of each token of the step, [tokens or more, kv_heads, 1, head_dim]; return the new rows."""
        self._cache.storage.write(self._index, key_states, value_states)
        return key_states, value_states

    def attend(self, query: Tensor, how: Mapping[str, Any]) -> Tensor:
        """Attend (`Storage.attend`), and let the recorders take in what each token attended to."""
        cache = self._cache
        output, masses = cache.storage.attend(self._index, query, how)
        for piece, mass in zip(cache.pieces, masses, strict=True):
            cache.observe(self._index, piece, query[piece.tokens], mass)
        return output

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the cache has allocated the memory."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Refuse: slot attention masks by each slot's length."""
        raise NotImplementedError("a slot cache has a length per slot, which no single mask size can express")

    def get_seq_length(self) -> int:
        """Rows of the longest slot. After an eviction a text is longer, so callers must pass position_ids."""
        return self._cache.longest

    def get_max_length(self) -> int:
        """Rows per slot."""
        return self._cache.capacity


class SlotCache(Cache):
    """The slots of all layers, with each slot's length, the original positions of its rows, and the recorded signals.

    The first `live` slots take part in a step. A caller that ends a sequence copies the last live slot over it (`copy`)
    and lowers `live`, so that no step computes anything for finished sequences.

    Args:
        shape: layers, heads, width and precision of the rows.
        slots: sequences decoded at once.
        capacity: rows per slot.
        device: where the memory lies.
        signals: the signals to record.
        per_head: whether some policy keeps different rows in each layer and head; if so, each has its own positions.
        impl: the implementation that attends, scores and evicts.
        invariant: whether each slot gets the same bits whatever the other slots hold; the caller then steps with a
            multiple of `kernels.blocks.TOKEN_BLOCK` tokens.
        config: the precision of the stored rows.

    Raises:
        ValueError: heads of this width cannot be packed so, or not with this implementation.
    """

    def __init__(
        self,
        shape: CacheShape,
        *,
        slots: int,
        capacity: int,
        device: torch.device,
        signals: Iterable[Signal] = (),
        per_head: bool = False,
        impl: Implementation = "torch",
        invariant: bool = False,
        config: CacheConfig = UNPACKED,
    ) -> None:
        self.operations, self.invariant = operations(impl), invariant
        self.ragged: bool = self.operations.RAGGED
        # Multiplies in a step: with `invariant` the operation whose bits do not depend on the batch.
        self.linear: Callable[..., Tensor] = self.operations.linear if invariant else linear
        self.slots, self.capacity = slots, capacity
        # Number of live slots and lengths, each on the host and on the device: so the host never waits for the device.
        self._live, self.device_live = 0, torch.zeros((), dtype=torch.int64, device=device)
        self.slot_ids = torch.arange(slots, device=device)
        self.lengths = np.zeros(slots, dtype=np.int64)
        self.device_lengths = torch.zeros(slots, dtype=torch.int64, device=device)
        heads = (shape.layers, shape.kv_heads) if per_head else (1, 1)
        self.positions = torch.zeros(slots, *heads, capacity, dtype=torch.int64, device=device)
        sizes: dict[str, Any] = {"shape": shape, "slots": slots, "capacity": capacity, "device": device}
        memory = Memory(**sizes, operations=self.operations, linear=self.linear)
        self.recorders = {signal: signal.allocate(memory) for signal in signals}
        self.needs_mass = any(recorder.needs_mass for recorder in self.recorders.values())
        config.check_implementation(impl)
        schemes: dict[str, Callable[..., Storage]]
        schemes = {"kivi": KiviRows, "plain": PackedRows, "rotated": PackedRows, "whole": WholeRows}
        scheme = schemes[config.scheme if config.is_packed else "whole"]
        self.storage: Storage = scheme(self, shape, capacity, device, config)
        self.shape = shape
        # The layers that policies see, and the others.
        self.slot_layers = [SlotLayer(self, index) for index in range(shape.layers)]
        self.windows = [WindowLayer(self, shape, device) for _ in range(shape.kinds.count("window"))]
        self.linears = [LinearLayer(self, shape, device) for _ in range(shape.kinds.count("linear"))]
        kinds: dict[LayerKind, Iterator[Any]] = {
            "full": iter(self.slot_layers),
            "window": iter(self.windows),
            "linear": iter(self.linears),
        }
        self.kept_layers: list[Any] = [next(kinds[kind]) for kind in shape.layer_kinds]
        super().__init__(layers=list(self.kept_layers))

    @staticmethod
    def bytes_per_slot(shape: CacheShape, capacity: int, config: CacheConfig = UNPACKED) -> int:
        """Bytes that one slot takes: its rows (`CacheConfig.bytes_per_slot`) and what has a fixed size."""
        sizes = {"layers": shape.layers, "kv_heads": shape.kv_heads, "head_dim": shape.head_dim}
        rows = config.bytes_per_slot(**sizes, itemsize=shape.dtype.itemsize, capacity=capacity)
        return rows + shape.fixed_bytes

    @property
    def kv_bytes(self) -> int:
        """Bytes of memory that the rows, windows and states of all slots hold."""
        return sum(tensor.untyped_storage().nbytes() for tensor in (*self.storage.tensors, *self._fixed()))

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor:
        """The inputs of a linear layer's convolution, of each token's slot."""
        return self.kept_layers[layer_idx].read(0)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor:
        """The recurrent state of a linear layer, of each token's slot."""
        return self.kept_layers[layer_idx].read(1)

    @property
    def live(self) -> int:
        """The number of slots that take part in a step."""
        return self._live

    @live.setter
    def live(self, count: int) -> None:
        self._live = count
        self.device_live.fill_(count)

    @property
    def longest(self) -> int:
        """Rows of the longest live slot."""
        return self._longest(slice(self.live))

    def _longest(self, slots: slice) -> int:
        return int(self.lengths[slots].max(initial=0))

    def seen(self, slots: slice) -> int:
        """Rows of each of these slots that attention is given, at least those of the longest slot among them."""
        if self.ragged:
            return self.capacity
        longest = self._longest(slots)
        return min(whole_blocks(longest, ROW_BLOCK), self.capacity) if self.invariant else longest

    def admit(self, prefill: Prefill) -> int:
        """Copy a prefilled prompt into the first slot after the live ones and make the slot live; return the slot.

        An empty `Prefill` begins a sequence all of whose tokens are still to come.
        """
        slot, length = self.live, prefill.length
        self.live += 1
        self._set_length(slot, length)
        self.positions[slot, ..., :length] = torch.arange(length, device=self.positions.device)
        self.storage.admit(slot, prefill)
        for window, rows in zip(self.windows, prefill.windows if length else [None] * len(self.windows), strict=True):
            window.admit(slot, rows, length)
        for layer, states in zip(self.linears, prefill.states if length else [None] * len(self.linears), strict=True):
            layer.admit(slot, states)
        for recorder in self.recorders.values():
            recorder.admit(slot, prefill)
        return slot

    def begin_step(self, positions: Tensor) -> None:
        """Make room for one token per live slot, at original `positions` [live]; the layers then write its row."""
        self.count_step()
        self.place_step(positions)

    def count_step(self) -> None:
        """The host's part of `begin_step`: each live slot is one row longer."""
        self.lengths[: self.live] += 1

    def place_step(self, positions: Tensor) -> None:
        """The device's part of `begin_step`, for at least the live slots; a free slot among them writes its row 0.

        Nothing here depends on a number that the host knows but the number of `positions`, so that a CUDA graph can
        replay it.
        """
        slots = self.slot_ids[: len(positions)]
        write_at = torch.where(slots < self.device_live, self.device_lengths[: len(slots)], 0)
        self.device_lengths[: len(slots)] = write_at + 1
        whole = slice(len(slots))
        self._place([Piece(slots=whole, tokens=whole, count=1)], slots, write_at, positions)

    @property
    def longest_chunk(self) -> int | None:
        """The most tokens of a slot that one step may feed; None where there is no limit."""
        return 1 if self.linears else self.storage.longest_chunk

    def begin_chunks(self, counts: Mapping[int, int], positions: Tensor) -> None:
        """Make room for the next `counts[slot]` tokens of each slot, at original `positions` [tokens], slot by slot.

        The layers then write and attend as in a step, each token over the rows up to its own.

        Raises:
            ValueError: a slot would hold more than its capacity, or take more tokens than `longest_chunk`.
        """
        pieces, begin = list[Piece](), 0
        if self.linears and any(count > 1 for count in counts.values()):
            raise ValueError("a slot of a model with linear layers takes one token per step")
        for slot, count in counts.items():
            if self.lengths[slot] + count > self.capacity:
                raise ValueError(
                    f"slot {slot} holds {self.lengths[slot]} of {self.capacity} rows: it has no room for {count}."
                )
            pieces.append(Piece(slots=slice(slot, slot + 1), tokens=slice(begin, begin + count), count=count))
            begin += count
        device = positions.device
        at, sizes = torch.tensor(list(counts), device=device), torch.tensor(list(counts.values()), device=device)
        first = self.device_lengths[at] - (sizes.cumsum(0) - sizes)
        write_at = first.repeat_interleave(sizes) + torch.arange(begin, device=device)
        self.lengths[list(counts)] += list(counts.values())
        self.device_lengths[at] += sizes
        self._place(pieces, at.repeat_interleave(sizes), write_at, positions)

    def _place(self, pieces: list[Piece], slots: Tensor, write_at: Tensor, positions: Tensor) -> None:
        """Note the tokens of a step: the slot of each, its row there, and its original position, [tokens] each."""
        self.pieces, self.step_slots, self.write_at, self.step_positions = pieces, slots, write_at, positions
        self.step_lengths = write_at + 1
        # Tokens that are computed, the step's own first.
        self.step_tokens = whole_blocks(len(slots), TOKEN_BLOCK) if self.invariant and not self.ragged else len(slots)
        if self.windows:
            ring = self.shape.ring
            self.reach = ring if self.ragged else min(ring, whole_blocks(int(positions.max()) + 1, ROW_BLOCK))
        self.positions[slots, :, :, write_at] = positions[:, None, None]
        self.storage.place()
        for recorder in self.recorders.values():
            recorder.on_row(slots, write_at, positions)

    def observe(self, layer: int, piece: Piece, query: Tensor, mass: Tensor | None) -> None:
        """Record a layer's attention of a piece: query [tokens, q_heads, head_dim], mass [tokens, kv_heads, rows]."""
        by_slot = (-1, piece.count)
        positions, query = self.step_positions[piece.tokens].unflatten(0, by_slot), query.unflatten(0, by_slot)
        for recorder in self.recorders.values():
            recorder.on_attention(
                layer, piece.slots, positions, query, None if mass is None else mass.unflatten(0, by_slot)
            )

    def end_step(self, hidden: Tensor) -> None:
        """Record the last hidden states [tokens or more, hidden_size] of the tokens that this step wrote."""
        for recorder in self.recorders.values():
            recorder.on_token(self.step_slots, self.write_at, hidden)

    def evict(self, slot: int, selection: Selection) -> None:
        if not self.slot_layers:
            raise ValueError("a model without a layer of full attention has no rows to evict: choose policy=full")
        keep = selection.keep
        self.storage.keep(slot, keep)
        keep_columns(self.positions[slot], keep)
        for signal, recorder in self.recorders.items():
            if signal in selection.written:
                recorder.write(slot, selection.written[signal])
            recorder.evict(slot, keep)
        self._set_length(slot, keep.shape[-1])

    def held(self, slot: int, text_length: int, *, per_head: bool) -> list[int]:
        """How much of each position 0 .. text_length - 1 of the text the slot holds, as runs `[percent, count, ...]`.

        Percent of the (layer, kv head) pairs that hold the position, rounded to a multiple of 10.
        """
        positions = self.positions[slot, ..., : int(self.lengths[slot])]
        positions = positions.flatten(0, 1) if per_head else positions[0, :1]
        pairs = len(positions)
        holding = torch.bincount(positions.flatten(), minlength=text_length)
        runs = torch.unique_consecutive((20 * holding + pairs) // (2 * pairs) * 10, return_counts=True)
        return torch.stack(runs, dim=1).flatten().tolist()

    def copy(self, source: int, target: int) -> None:
        length = int(self.lengths[source])
        self.storage.copy(source, target, length)
        for column in self._columns():
            column[target] = column[source]
        self._set_length(target, length)

    def swap(self, one: int, other: int) -> None:
        for tensor in (*self.storage.tensors, *self._columns(), self.device_lengths):
            tensor[[one, other]] = tensor[[other, one]]
        self.lengths[[one, other]] = self.lengths[[other, one]]

    def _columns(self) -> Iterator[Tensor]:
        yield self.positions
        yield from self.storage.columns
        yield from self._fixed()
        for recorder in self.recorders.values():
            yield from recorder.tensors

    def _fixed(self) -> Iterator[Tensor]:
        for window in self.windows:
            yield from window.tensors
        for layer in self.linears:
            yield from layer.tensors

    def _set_length(self, slot: int, length: int) -> None:
        self.lengths[slot] = length
        self.device_lengths[slot] = length
