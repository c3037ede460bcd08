"""What policies want recorded while a sequence is written: numbers per token, attention mass, the newest queries.

A policy names its signals; the cache holds one recorder for each, for all slots, and calls it as the text grows and as
rows are evicted; slots that are copied or change places take their recordings along. Policies that name the same signal
share its recorder.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from compression.predictor import load_predictor
from kernels.implementation import Operations


@dataclass(frozen=True, kw_only=True)
class CacheShape:
    """What decides the size of a cache: layers, heads per layer, width of a head, precision."""

    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype


class Prefill:
    """What the prefill of one prompt leaves behind; the attention function fills it, layer by layer.

    A long prompt may come in chunks, each announced by `begin_chunk`.

    Attributes:
        rows: each layer's keys and values, [kv_heads, length, head_dim].
        queries: each layer's queries, [q_heads, length, head_dim]; empty unless `keep_queries`.
        scaling: factor of the model's attention logits, once observed.
    """

    def __init__(self, *, keep_queries: bool = True) -> None:
        self.rows: list[tuple[Tensor, Tensor]] = []
        self.queries: list[Tensor] = []
        self.keep_queries, self.scaling = keep_queries, 1.0
        self._layer = 0

    def begin_chunk(self) -> None:
        """The next layer observed is the first again, of the tokens that follow."""
        self._layer = 0

    def observe(self, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> None:
        """Take in one layer of one prompt, [1, heads, length, head_dim] each: the chunk's queries, all keys so far."""
        layer, self._layer, self.scaling = self._layer, self._layer + 1, scaling
        self.rows[layer : layer + 1] = [(key[0], value[0])]
        if self.keep_queries:
            self.queries[layer : layer + 1] = [torch.cat([*self.queries[layer : layer + 1], query[0]], dim=1)]

    @property
    def length(self) -> int:
        """Tokens of the prompt."""
        return self.rows[0][0].shape[1] if self.rows else 0


class PaddedPrefill:
    """The prefill of several prompts in one forward, each padded behind its end, where causal attention never looks."""

    def __init__(self, prefills: Sequence[Prefill], lengths: Sequence[int]) -> None:
        self.parts = list(zip(prefills, lengths, strict=True))

    def observe(self, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> None:
        """Take in one layer of all prompts, [prompts, heads, longest, head_dim] each."""
        for row, (prefill, length) in enumerate(self.parts):
            one = slice(row, row + 1), slice(None), slice(length)
            prefill.observe(query[one], key[one], value[one], scaling)


class Recorder:
    """A signal's memory for all slots. `tensors` are its own, [slots, ...] each."""

    needs_mass = False

    def __init__(self, *tensors: Tensor) -> None:
        self.tensors = tensors

    def admit(self, slot: int, prefill: Prefill) -> None:
        """Begin a sequence in a slot, its prompt prefilled."""

    def on_token(self, rows: Tensor, at: Tensor, hidden: Tensor) -> None:
        """A step wrote row `at` [live] of slots `rows` [live]; their last hidden states are [live, hidden_size]."""

    def on_attention(self, layer: int, positions: Tensor, query: Tensor, mass: Tensor | None) -> None:
        """A layer attended: positions [live], query [live, q_heads, head_dim], mass [live, kv_heads, longest]."""

    def evict(self, slot: int, keep: Tensor) -> None:
        """Rows of a slot were evicted: keep [kept] or [layers, kv_heads, kept]."""

    def read(self, slot: int, length: int, newest: int) -> Tensor:
        """The signal of a slot's `length` live rows; `newest` is the position of the last."""
        raise NotImplementedError


class Signal(ABC):
    """Names something to record. Frozen and hashable: equal signals share a recorder."""

    @abstractmethod
    def allocate(
        self, shape: CacheShape, slots: int, capacity: int, device: torch.device, operations: Operations
    ) -> Recorder:
        """Make the recorder."""


@dataclass(frozen=True)
class PredictedImportance(Signal):
    """An importance predictor's score of each token, [length]; NaN at prompt tokens, which are never fed to it.

    The score comes from the hidden state of the step that wrote the token's row.
    """

    directory: str

    def allocate(
        self, shape: CacheShape, slots: int, capacity: int, device: torch.device, operations: Operations
    ) -> Recorder:
        """Load the predictor and make a column for its scores."""
        predictor = load_predictor(Path(self.directory), dtype=shape.dtype).to(device)
        return _Scores(predictor, torch.full((slots, capacity), torch.nan, device=device))


class _Scores(Recorder):
    def __init__(self, score: Callable[[Tensor], Tensor], column: Tensor) -> None:
        super().__init__(column)
        self.score, self.column = score, column

    def admit(self, slot: int, prefill: Prefill) -> None:
        self.column[slot] = torch.nan

    def on_token(self, rows: Tensor, at: Tensor, hidden: Tensor) -> None:
        self.column[rows, at] = self.score(hidden).float()

    def evict(self, slot: int, keep: Tensor) -> None:
        keep_columns(self.column[slot], keep)

    def read(self, slot: int, length: int, newest: int) -> Tensor:
        return self.column[slot, :length]


@dataclass(frozen=True)
class AttentionMass(Signal):
    """Attention probability each row has received so far, [layers, kv_heads, length], summed over queries and groups.

    The prompt's own prefill counts. What an evicted row received is gone with it (H2O, 2306.14048, section 4).
    """

    def allocate(
        self, shape: CacheShape, slots: int, capacity: int, device: torch.device, operations: Operations
    ) -> Recorder:
        """Make a running sum per row."""
        total = torch.zeros(slots, shape.layers, shape.kv_heads, capacity, device=device)
        return _Mass(total, operations.causal_mass)


class _Mass(Recorder):
    needs_mass = True

    def __init__(self, total: Tensor, causal_mass: Callable[..., Tensor]) -> None:
        super().__init__(total)
        self.total, self.causal_mass = total, causal_mass

    def admit(self, slot: int, prefill: Prefill) -> None:
        self.total[slot] = 0
        for layer, (query, (key, _)) in enumerate(zip(prefill.queries, prefill.rows, strict=True)):
            self.total[slot, layer, :, : prefill.length] = self.causal_mass(query, key, scaling=prefill.scaling)

    def on_attention(self, layer: int, positions: Tensor, query: Tensor, mass: Tensor | None) -> None:
        assert mass is not None
        self.total[: mass.shape[0], layer, :, : mass.shape[-1]] += mass

    def evict(self, slot: int, keep: Tensor) -> None:
        keep_columns(self.total[slot], keep)
        self.total[slot, ..., keep.shape[-1] :] = 0  # the next rows start from nothing

    def read(self, slot: int, length: int, newest: int) -> Tensor:
        return self.total[slot, :, :, :length]


@dataclass(frozen=True)
class RecentQueries(Signal):
    """The rotated queries of the newest `window` tokens, [layers, q_heads, window, head_dim], oldest first."""

    window: int

    def allocate(
        self, shape: CacheShape, slots: int, capacity: int, device: torch.device, operations: Operations
    ) -> Recorder:
        """Make a ring of queries per layer."""
        size = (slots, shape.layers, shape.q_heads, self.window, shape.head_dim)
        return _Ring(torch.zeros(size, dtype=shape.dtype, device=device))


class _Ring(Recorder):
    def __init__(self, ring: Tensor) -> None:
        super().__init__(ring)
        self.ring, self.window = ring, ring.shape[3]
        self.rows = torch.arange(ring.shape[0], device=ring.device)

    def admit(self, slot: int, prefill: Prefill) -> None:
        positions = torch.arange(max(0, prefill.length - self.window), prefill.length, device=self.ring.device)
        for layer, query in enumerate(prefill.queries):
            self.ring[slot, layer, :, positions % self.window] = query[:, positions]

    def on_attention(self, layer: int, positions: Tensor, query: Tensor, mass: Tensor | None) -> None:
        self.ring[self.rows[: len(positions)], layer, :, positions % self.window] = query

    def read(self, slot: int, length: int, newest: int) -> Tensor:
        order = torch.arange(newest + 1 - self.window, newest + 1, device=self.ring.device) % self.window
        return self.ring[slot, :, :, order]


def keep_columns(columns: Tensor, keep: Tensor) -> None:
    """Move the kept entries of per-row numbers [..., capacity] to the front, in place.

    `keep` is [kept], or [layers, kv_heads, kept] for numbers of that shape; numbers that are one per row for all heads
    mean nothing once the heads keep different rows, and become NaN.
    """
    kept = keep.shape[-1]
    if keep.dim() == 1:
        columns[..., :kept] = columns[..., keep]
    elif columns.dim() == 1:
        columns.fill_(torch.nan)
    else:
        columns[..., :kept] = columns.gather(-1, keep)
