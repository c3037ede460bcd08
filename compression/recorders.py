"""Recorders: the memory of each signal, for all slots of a cache.

The slot cache calls its recorders as texts grow and as rows are evicted. When a slot is copied or swapped, the
recordings in `Recorder.tensors` are copied or swapped with it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from kvsweep.compression.predictor import load_predictor
from kvsweep.compression.rows import CacheShape, Prefill
from kvsweep.kernels.implementation import Operations
from kvsweep.kernels.reference import attention_weights, capped


@dataclass(frozen=True, kw_only=True)
class Memory:
    """What a recorder must know of the cache to allocate its tensors."""

    shape: CacheShape
    slots: int
    capacity: int
    device: torch.device
    operations: Operations
    linear: Callable[..., Tensor] = functional.linear

    def per_row(self, fill: float = 0, dtype: torch.dtype = torch.float32) -> Tensor:
        """A number per row, [slots, layers, kv_heads, capacity]."""
        size = (self.slots, self.shape.layers, self.shape.kv_heads, self.capacity)
        return torch.full(size, fill, dtype=dtype, device=self.device)


class Recorder:
    """Memory of one signal. `tensors` hold it, [slots, ...] each."""

    needs_mass = False

    def __init__(self, *tensors: Tensor) -> None:
        self.tensors = tensors

    def admit(self, slot: int, prefill: Prefill) -> None:
        """Begin a sequence in a slot whose prompt is prefilled."""

    def on_row(self, slots: Tensor, at: Tensor, positions: Tensor) -> None:
        """Prepare for a step that will write row `at` of `slots`, at original `positions`, [tokens] each."""

    def on_token(self, slots: Tensor, at: Tensor, hidden: Tensor) -> None:
        """Take in a step that wrote row `at` [tokens] of `slots` [tokens].

        The hidden states, [tokens or more, hidden_size], may go on beyond the step's tokens.
        """

    def on_attention(self, layer: int, slots: slice, positions: Tensor, query: Tensor, mass: Tensor | None) -> None:
        """Take in the attention of the same number of tokens in each of some slots, in their order.

        positions [slots, tokens], query [slots, tokens, q_heads, head_dim], mass [slots, tokens, kv_heads, rows].
        """

    def write(self, slot: int, values: Tensor) -> None:
        """Take in what a policy writes at an eviction, a number for each live row, [layers, kv_heads, length]."""
        raise NotImplementedError

    def evict(self, slot: int, keep: Tensor) -> None:
        """Forget the rows of a slot that are not in `keep`, [kept] or [layers, kv_heads, kept]."""

    def read(self, slot: int, length: int, newest: int) -> Tensor:
        """Return the signal of a slot's `length` live rows; `newest` is the position of the last."""
        raise NotImplementedError


class ScoreRecorder(Recorder):
    """One number per row: `score` of the last hidden state of the step that wrote the row."""

    def __init__(self, score: Callable[[Tensor], Tensor], memory: Memory) -> None:
        self.score = score
        self.scores = torch.full((memory.slots, memory.capacity), torch.nan, device=memory.device)
        super().__init__(self.scores)

    @classmethod
    def of_predictor(cls, directory: str, memory: Memory) -> "ScoreRecorder":
        predictor = load_predictor(directory, dtype=memory.shape.dtype).to(memory.device)
        return cls(partial(predictor, linear=memory.linear), memory)

    def admit(self, slot: int, prefill: Prefill) -> None:
        self.scores[slot] = torch.nan

    def on_token(self, slots: Tensor, at: Tensor, hidden: Tensor) -> None:
        """Score the rows that the step wrote."""
        self.scores[slots, at] = self.score(hidden)[: len(slots)].float()

    def evict(self, slot: int, keep: Tensor) -> None:
        keep_columns(self.scores[slot], keep)

    def read(self, slot: int, length: int, newest: int) -> Tensor:
        return self.scores[slot, :length]


class MassRecorder(Recorder):
    """The attention probability that each row has received so far, per layer and key head.

    What came before a step counts `decay` times what the step pays.
    """

    needs_mass = True

    def __init__(self, decay: float, memory: Memory) -> None:
        self.decay = decay
        self.causal_mass = memory.operations.causal_mass if decay == 1 else partial(decayed_mass, decay=decay)
        self.total = memory.per_row()
        super().__init__(self.total)

    def admit(self, slot: int, prefill: Prefill) -> None:
        self.total[slot] = 0
        layers = zip(prefill.queries, prefill.rows, prefill.sinks, strict=True)
        for layer, (query, (key, _), sinks) in enumerate(layers):
            if sinks is None and prefill.softcap is None:
                received = self.causal_mass(query, key, scaling=prefill.scaling)
            else:
                how: dict[str, Any] = {"scaling": prefill.scaling, "sinks": sinks, "softcap": prefill.softcap}
                received = decayed_mass(query, key, decay=self.decay, **how)
            self.total[slot, layer, :, : prefill.length] = received

    def on_attention(self, layer: int, slots: slice, positions: Tensor, query: Tensor, mass: Tensor | None) -> None:
        """Add what each token's queries pay, one token after the other: sums in another order would round otherwise."""
        assert mass is not None
        total = self.total[slots, layer, :, : mass.shape[-1]]
        for paid in mass.unbind(dim=1):
            if self.decay != 1:
                total *= self.decay
            total += paid

    def evict(self, slot: int, keep: Tensor) -> None:
        keep_columns(self.total[slot], keep)
        self.total[slot, ..., keep.shape[-1] :] = 0

    def read(self, slot: int, length: int, newest: int) -> Tensor:
        return self.total[slot, :, :, :length]


class UseRecorder(Recorder):
    """The query that last paid each row at least `threshold`, and the longest interval between two such queries.

    A row that is written begins as if the query before its own had used it, the prompt's rows as if its last query had
    (LazyEviction, temp_cacheobs.py).
    """

    needs_mass = True

    def __init__(self, threshold: float, memory: Memory) -> None:
        self.threshold = threshold
        self.last, self.interval = (memory.per_row(dtype=torch.int32) for _ in range(2))
        super().__init__(self.last, self.interval)

    def admit(self, slot: int, prefill: Prefill) -> None:
        self.last[slot], self.interval[slot] = prefill.length - 1, 0

    def on_row(self, slots: Tensor, at: Tensor, positions: Tensor) -> None:
        """Begin a row."""
        self.last[slots, :, :, at] = (positions[:, None, None] - 1).int()
        self.interval[slots, :, :, at] = 0

    def on_attention(self, layer: int, slots: slice, positions: Tensor, query: Tensor, mass: Tensor | None) -> None:
        """Note the rows that each token's queries use; a row that is yet to be written gets no attention."""
        assert mass is not None
        part = slots, layer, slice(None), slice(mass.shape[-1])
        now = positions[..., None, None].int()  # [slots, tokens, 1, 1]
        used, before = mass >= self.threshold, self.last[part][:, None]
        last = torch.cat([before, torch.where(used, now, before)], dim=1).cummax(dim=1).values
        longest = torch.where(used, now - last[:, :-1], 0).amax(dim=1)
        self.interval[part] = torch.maximum(self.interval[part], longest)
        self.last[part] = last[:, -1]

    def evict(self, slot: int, keep: Tensor) -> None:
        keep_columns(self.last[slot], keep)
        keep_columns(self.interval[slot], keep)

    def read(self, slot: int, length: int, newest: int) -> Tensor:
        return torch.stack([self.last[slot, :, :, :length], self.interval[slot, :, :, :length]])


class MemoryRecorder(Recorder):
    """A number per row, layer and key head that a policy writes at an eviction; NaN until then."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory.per_row(torch.nan)
        super().__init__(self.memory)

    def admit(self, slot: int, prefill: Prefill) -> None:
        self.memory[slot] = torch.nan

    def write(self, slot: int, values: Tensor) -> None:
        self.memory[slot, ..., : values.shape[-1]] = values

    def evict(self, slot: int, keep: Tensor) -> None:
        keep_columns(self.memory[slot], keep)
        self.memory[slot, ..., keep.shape[-1] :] = torch.nan

    def read(self, slot: int, length: int, newest: int) -> Tensor:
        return self.memory[slot, :, :, :length]


class QueryRecorder(Recorder):
    """The queries of the newest `window` tokens, in a ring: the query of position p lies at p % window."""

    def __init__(self, window: int, memory: Memory) -> None:
        shape, device = memory.shape, memory.device
        size = (memory.slots, shape.layers, shape.q_heads, window, shape.head_dim)
        self.ring, self.window = torch.zeros(size, dtype=shape.dtype, device=device), window
        self.rows = torch.arange(memory.slots, device=device)
        super().__init__(self.ring)

    def admit(self, slot: int, prefill: Prefill) -> None:
        positions = torch.arange(max(0, prefill.length - self.window), prefill.length, device=self.ring.device)
        for layer, query in enumerate(prefill.queries):
            self.ring[slot, layer, :, positions % self.window] = query[:, positions]

    def on_attention(self, layer: int, slots: slice, positions: Tensor, query: Tensor, mass: Tensor | None) -> None:
        """Write the newest queries over the oldest."""
        places = positions[:, -self.window :] % self.window  # [slots, tokens]
        self.ring[self.rows[slots, None], layer, :, places] = query[:, -self.window :]

    def read(self, slot: int, length: int, newest: int) -> Tensor:
        order = torch.arange(newest + 1 - self.window, newest + 1, device=self.ring.device) % self.window
        return self.ring[slot, :, :, order]


def decayed_mass(
    query: Tensor,
    key: Tensor,
    *,
    scaling: float,
    decay: float,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    block: int = 512,
) -> Tensor:
    """Causal attention that each key of a prompt receives, a query's weight `decay` times that of the next.

    query [q_heads, length, head_dim], key [kv_heads, length, head_dim]; returns [kv_heads, length], summed over queries
    and each group of query heads. Blocks of queries whose weight float32 cannot tell from 0 are left out.
    """
    kv_heads, length, _ = key.shape
    grouped, keys = query.float().unflatten(0, (kv_heads, -1)), key.float()[:, None]
    positions = torch.arange(length, device=key.device)
    total = torch.zeros(kv_heads, length, device=key.device)
    for end in range(length, 0, -block):
        rows = positions[max(0, end - block) : end]
        weights = decay ** (length - 1 - rows).double()
        if not weights.float().any():
            break
        logits = torch.matmul(grouped[:, :, rows], keys[:, :, :end].transpose(-1, -2)) * scaling
        logits = capped(logits, softcap).masked_fill(positions[:end] > rows[:, None], float("-inf"))
        paid = attention_weights(logits, None if sinks is None else sinks.view(kv_heads, -1, 1, 1))
        total[:, :end] += (paid * weights.float()[:, None]).sum(dim=(1, 2))
    return total


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
