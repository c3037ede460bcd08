"""Recorders: the memory of each signal, for all slots of a cache.

The slot cache calls its recorders as texts grow and as rows are evicted. When a slot is copied or swapped, the
recordings in `Recorder.tensors` are copied or swapped with it.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from compression.rows import CacheShape, Prefill


class Recorder:
    """Memory of one signal. `tensors` hold it, [slots, ...] each."""

    needs_mass = False

    def __init__(self, *tensors: Tensor) -> None:
        self.tensors = tensors

    def admit(self, slot: int, prefill: Prefill) -> None:
        """Begin a sequence in a slot whose prompt is prefilled."""

    def on_token(self, rows: Tensor, at: Tensor, hidden: Tensor) -> None:
        """Take in a step that wrote row `at` [live] of slots `rows` [live].

        The hidden states, [live or more, hidden_size], may go on beyond the live slots.
        """

    def on_attention(self, layer: int, positions: Tensor, query: Tensor, mass: Tensor | None) -> None:
        """Take in attention: positions [live], query [live, q_heads, head_dim], mass [live, kv_heads, rows]."""

    def evict(self, slot: int, keep: Tensor) -> None:
        """Forget the rows of a slot that are not in `keep`, [kept] or [layers, kv_heads, kept]."""

    def read(self, slot: int, length: int, newest: int) -> Tensor:
        """Return the signal of a slot's `length` live rows; `newest` is the position of the last."""
        raise NotImplementedError


class ScoreRecorder(Recorder):
    """One number per row: `score` of the last hidden state of the step that wrote the row."""

    def __init__(self, score: Callable[[Tensor], Tensor], slots: int, capacity: int, device: torch.device) -> None:
        self.score, self.scores = score, torch.full((slots, capacity), torch.nan, device=device)
        super().__init__(self.scores)

    def admit(self, slot: int, prefill: Prefill) -> None:
        """Give the prompt's rows no score."""
        self.scores[slot] = torch.nan

    def on_token(self, rows: Tensor, at: Tensor, hidden: Tensor) -> None:
        """Score the rows that the step wrote."""
        self.scores[rows, at] = self.score(hidden)[: len(rows)].float()

    def evict(self, slot: int, keep: Tensor) -> None:
        """Move the kept rows' scores to the front."""
        keep_columns(self.scores[slot], keep)

    def read(self, slot: int, length: int, newest: int) -> Tensor:
        """Return the scores, [length]."""
        return self.scores[slot, :length]


class MassRecorder(Recorder):
    """The attention probability that each row has received so far, per layer and key head."""

    needs_mass = True

    def __init__(
        self, causal_mass: Callable[..., Tensor], shape: CacheShape, slots: int, capacity: int, device: torch.device
    ) -> None:
        self.causal_mass = causal_mass
        self.total = torch.zeros(slots, shape.layers, shape.kv_heads, capacity, device=device)
        super().__init__(self.total)

    def admit(self, slot: int, prefill: Prefill) -> None:
        """Begin with what the prompt's queries pay to its rows."""
        self.total[slot] = 0
        for layer, (query, (key, _)) in enumerate(zip(prefill.queries, prefill.rows, strict=True)):
            self.total[slot, layer, :, : prefill.length] = self.causal_mass(query, key, scaling=prefill.scaling)

    def on_attention(self, layer: int, positions: Tensor, query: Tensor, mass: Tensor | None) -> None:
        """Add what the step's queries pay."""
        assert mass is not None
        self.total[: mass.shape[0], layer, :, : mass.shape[-1]] += mass

    def evict(self, slot: int, keep: Tensor) -> None:
        """Move the kept rows' sums to the front; rows that are written next start at zero."""
        keep_columns(self.total[slot], keep)
        self.total[slot, ..., keep.shape[-1] :] = 0

    def read(self, slot: int, length: int, newest: int) -> Tensor:
        """Return the sums, [layers, kv_heads, length]."""
        return self.total[slot, :, :, :length]


class QueryRecorder(Recorder):
    """The queries of the newest `window` tokens, in a ring: the query of position p lies at p % window."""

    def __init__(self, shape: CacheShape, slots: int, window: int, device: torch.device) -> None:
        size = (slots, shape.layers, shape.q_heads, window, shape.head_dim)
        self.ring, self.window = torch.zeros(size, dtype=shape.dtype, device=device), window
        self.rows = torch.arange(slots, device=device)
        super().__init__(self.ring)

    def admit(self, slot: int, prefill: Prefill) -> None:
        """Begin with the prompt's newest queries."""
        positions = torch.arange(max(0, prefill.length - self.window), prefill.length, device=self.ring.device)
        for layer, query in enumerate(prefill.queries):
            self.ring[slot, layer, :, positions % self.window] = query[:, positions]

    def on_attention(self, layer: int, positions: Tensor, query: Tensor, mass: Tensor | None) -> None:
        """Write the step's queries over the oldest."""
        self.ring[self.rows[: len(positions)], layer, :, positions % self.window] = query

    def read(self, slot: int, length: int, newest: int) -> Tensor:
        """Return the queries, [layers, q_heads, window, head_dim], oldest first."""
        order = torch.arange(newest + 1 - self.window, newest + 1, device=self.ring.device) % self.window
        return self.ring[slot, :, :, order]


def keep_columns(columns: Tensor, keep: Tensor) -> None:
    """Move the kept entries of per-row numbers [..., capacity] to the front, in place.

    `keep` is [kept], or [layers, kv_heads, kept] for numbers of that shape. Numbers [capacity], one per row for all
    heads, lose their meaning when each head keeps rows of its own, and become NaN.
    """
    kept = keep.shape[-1]
    if keep.dim() == 1:
        columns[..., :kept] = columns[..., keep]
    elif columns.dim() == 1:
        columns.fill_(torch.nan)
    else:
        columns[..., :kept] = columns.gather(-1, keep)
