"""The slots of a cache: their lengths, which slots take part in a step, and where a step's tokens are written."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear

from kvsweep.compression.cache_rows import CacheShape
from kvsweep.compression.config import ring
from kvsweep.kernels.implementation import Operations
from kvsweep.kernels.reference import Attended, joined
from kvsweep.kernels.row_format import ROW_BLOCK, TOKEN_BLOCK, filled_tokens, whole_blocks

# A chunk's rows are copied for each of its tokens, for this many tokens at a time: little extra memory is needed.
_COPIED_TOKENS = 16


def uploaded(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Copy whole numbers to the device, [count]; the host does not wait."""
    return torch.tensor(numbers, dtype=torch.int64, pin_memory=device.type == "cuda").to(device, non_blocking=True)


@dataclass(frozen=True, kw_only=True)
class Piece:
    """`count` tokens in each of neighbouring slots: a whole decode step, or one slot's part of a feeding step."""

    slots: slice
    tokens: slice
    count: int


class Chunks:
    """The next `counts[slot]` tokens of each of several slots, slot by slot.

    On the device: the `slots`, and the `sizes` and `starts` of their chunks, [slots] each; for each token `slot_of`,
    its slot, [tokens].
    """

    def __init__(self, counts: Mapping[int, int], device: torch.device) -> None:
        self.counts = counts
        self.slots = uploaded(list(counts), device)
        self.sizes = uploaded(list(counts.values()), device)
        self.starts = self.sizes.cumsum(0) - self.sizes
        self.slot_of = self._per_token(self.slots)
        self._index = torch.arange(len(self.slot_of), device=device) - self._per_token(self.starts)  # in its chunk

    def _per_token(self, numbers: Tensor) -> Tensor:
        return numbers.repeat_interleave(self.sizes, output_size=sum(self.counts.values()))

    def places(self, first: Tensor) -> Tensor:
        """Number each token, [tokens], from its slot's number in `first` [all slots] on."""
        return first[self.slot_of] + self._index


class Slots:
    """The part of `compression.cache.SlotCache` that its storage, layers and recorders use.

    `positions` is the original position of each row, [slots, layers or 1, kv_heads or 1, capacity]. Host and device
    both have the lengths, so the host never waits. `linear` multiplies in a step; with `invariant` its bits do not
    depend on the batch. For a step's tokens, [tokens] each: `step_slots` is the slot, `write_at` the row in it,
    `step_positions` the original position, `step_lengths` the rows that the token sees; `step_tokens` is their number.
    """

    needs_mass = False  # True if a recorder needs the attention that each row receives
    pieces: list[Piece]  # the parts of the current step
    reach: int  # rows of a window's ring buffer that attention reads

    def __init__(
        self,
        shape: CacheShape,
        operations: Operations,
        *,
        slots: int,
        capacity: int,
        device: torch.device,
        per_head: bool = False,
        invariant: bool = False,
    ) -> None:
        self.shape = shape
        self.slots = slots
        self.capacity = capacity
        self.device = device
        self.operations = operations
        self.invariant = invariant
        self.ragged: bool = operations.RAGGED
        self.linear: Callable[..., Tensor] = operations.linear if invariant else linear
        self._live = 0
        self.device_live = torch.zeros((), dtype=torch.int64, device=device)
        self.slot_ids = torch.arange(slots, device=device)
        self._unseen: Tensor | None = None
        self.lengths = np.zeros(slots, dtype=np.int64)
        self.device_lengths = torch.zeros(slots, dtype=torch.int64, device=device)
        heads = (shape.layers, shape.kv_heads) if per_head else (1, 1)
        self.positions = torch.zeros(slots, *heads, capacity, dtype=torch.int64, device=device)

    @property
    def live(self) -> int:  # slots that take part in a step
        return self._live

    @live.setter
    def live(self, count: int) -> None:
        self._live = count
        self.device_live.fill_(count)

    @property
    def longest(self) -> int:
        return int(self.lengths[: self.live].max(initial=0))

    def rows_read(self, slots: slice) -> int:
        """Rows of each of these slots that attention reads: at least the longest slot's length."""
        if self.ragged:  # the kernel stops at each slot's own length
            return self.capacity
        longest = int(self.lengths[slots].max(initial=0))
        if not self.invariant:
            return longest
        # torch's sums round alike over whole blocks of rows, however many dead rows follow.
        return min(whole_blocks(longest, ROW_BLOCK), self.capacity)

    def unseen(self, rows: int) -> Tensor:
        """`kernels.reference.unseen_rows` of the current step, made once for all layers."""
        if self._unseen is None or self._unseen.shape[-1] != rows:
            self._unseen = self.operations.unseen_rows(self.step_lengths, rows)
        return self._unseen

    def begin_step(self, positions: Tensor) -> None:
        """Make room for one token per live slot, at original `positions` [live]; the layers then write its row."""
        self.count_step()
        self.place_step(positions)

    def count_step(self) -> None:
        """The host's part of `begin_step`: add one row to each live slot."""
        self.lengths[: self.live] += 1

    def place_step(self, positions: Tensor) -> None:
        """The device's part of `begin_step`, for at least the live slots; a free slot writes its row 0.

        Of the host's numbers only the count of `positions` is used here, so that a CUDA graph can replay this part.
        """
        whole = slice(len(positions))
        slots = self.slot_ids[whole]
        # A graph's bucket may have more slots than live ones. Row 0 of a free slot is nobody's, and the next sequence
        # that takes the slot sets its length.
        write_at = torch.where(slots < self.device_live, self.device_lengths[whole], 0)
        self.device_lengths[whole] = write_at + 1
        self._place([Piece(slots=whole, tokens=whole, count=1)], slots, write_at, positions)

    def begin_chunks(self, chunks: Chunks, positions: Tensor) -> None:
        """Make room for these tokens, at original `positions` [tokens].

        The layers then write and attend as in a step; each token sees the rows up to its own. Raises ValueError for
        more rows than a slot's capacity, and for several tokens of a slot in a model with linear layers.
        """
        if "linear" in self.shape.kinds and max(chunks.counts.values()) > 1:
            raise ValueError("a slot of a model with linear layers takes one token per step")
        pieces = list[Piece]()
        begin = 0
        for slot, count in chunks.counts.items():
            if self.lengths[slot] + count > self.capacity:
                full = f"slot {slot} holds {self.lengths[slot]} of {self.capacity} rows"
                raise ValueError(f"{full}: it has no room for {count}.")
            pieces.append(Piece(slots=slice(slot, slot + 1), tokens=slice(begin, begin + count), count=count))
            begin += count
        self.lengths[list(chunks.counts)] += list(chunks.counts.values())
        write_at = chunks.places(self.device_lengths)
        self.device_lengths[chunks.slots] += chunks.sizes
        self._place(pieces, chunks.slot_of, write_at, positions)

    def _place(self, pieces: list[Piece], slots: Tensor, write_at: Tensor, positions: Tensor) -> None:
        """Store each token's slot, row in the slot, and original position for the step, [tokens] each."""
        self.pieces = pieces
        self.step_slots = slots
        self.write_at = write_at
        self.step_positions = positions
        self.step_lengths = write_at + 1
        self._unseen = None
        self.step_tokens = len(slots)
        # Filled up once for all of torch's products, whose rounding depends on the number of tokens; Triton's does not.
        if self.invariant and not self.ragged:
            self.step_tokens = filled_tokens(len(slots))
            if "linear" in self.shape.kinds:  # whose products of few tokens round differently from those of a block
                self.step_tokens = whole_blocks(len(slots), TOKEN_BLOCK)
        if self.shape.window:
            rows = ring(self.shape.window)
            # Until a text is as long as the ring, its later places are empty. Kernels stop by themselves.
            self.reach = rows if self.ragged else min(rows, whole_blocks(int(positions.max()) + 1, ROW_BLOCK))
        # Two indices with slices between them put the tokens first: [tokens, layers or 1, kv_heads or 1].
        self.positions[slots, :, :, write_at] = positions[:, None, None]

    def observe(self, layer: int, piece: Piece, query: Tensor, mass: Tensor | None) -> None:
        """Record a layer's attention of a piece: query [tokens, q_heads, head_dim], mass [tokens, kv_heads, rows]."""

    def attend_in_steps(
        self, rows_of: Callable[[slice], Iterable[Tensor]], query: Tensor, lengths: Tensor, how: Mapping[str, Any]
    ) -> Attended:
        """Attend in decode steps, one for each token, so that the result rounds as in single steps.

        query [tokens, q_heads, head_dim], lengths [tokens]. `rows_of` returns keys, values and scales, if there are
        any, for a few of the tokens.
        """
        parts = []
        for begin in range(0, len(query), _COPIED_TOKENS):
            few = slice(begin, begin + _COPIED_TOKENS)
            keys, values, *scales = rows_of(few)
            part = self.operations.decode_attention(query[few], keys, values, lengths[few], scales=scales, **how)
            parts.append(part)
        return joined(parts)

    def _set_length(self, slot: int, length: int) -> None:
        self.lengths[slot] = length
        self.device_lengths[slot] = length
