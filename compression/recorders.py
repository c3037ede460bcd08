"""Recorders: the memory of each signal, for all slots of a cache.

The slot cache calls its recorders as texts grow and rows are evicted. `Recorder.tensors` move with their slot.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from kvsweep.compression import artifacts
from kvsweep.compression.cache_rows import Prefill
from kvsweep.compression.policy import AttentionMass, LastUse, PredictedImportance, RecentQueries, RowMemory, Signal
from kvsweep.compression.slots import Slots
from kvsweep.kernels.reference import attention_weights, capped


class ImportancePredictor(nn.Module):
    """Multilayer perceptron without biases, Softplus after each layer (DynTS section 4; released widths 8192, 2048, 1).

    Input is the model's last hidden state after the final norm. A layer of width 1 follows the hidden `widths`.
    """

    def __init__(self, hidden_size: int, widths: Sequence[int] = (8192, 2048)) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.widths = tuple(widths)
        sizes = [hidden_size, *self.widths, 1]
        self.layers = nn.ModuleList(nn.Linear(i, o, bias=False) for i, o in itertools.pairwise(sizes))

    def forward(self, hidden: Tensor, linear: Callable[..., Tensor] = functional.linear) -> Tensor:
        """Map hidden states [..., hidden_size] to positive importance scores [...]; `linear` computes the products."""
        # Softplus of x is -logsigmoid(-x), and a product of -x is minus the product. torch's softplus rounds the last
        # few numbers of a tensor differently from the others.
        negative = -hidden
        for weight in self.parameters():
            # With one column the product rounds differently for each number of tokens; with 16 columns it does not.
            columns = weight if len(weight) > 1 else weight.expand(16, -1)
            negative = functional.logsigmoid(linear(negative, columns))
        return -negative[..., 0]


def save_predictor(predictor: ImportancePredictor, directory: Path, card: Mapping[str, Any]) -> None:
    """Write the weights (in their own dtype) and the card, with the predictor's widths, into `directory`."""
    widths = {"hidden_size": predictor.hidden_size, "widths": list(predictor.widths)}
    artifacts.save("predictor", directory, predictor.state_dict(), {**widths, **card})


def load_predictor(directory: str | Path, *, dtype: torch.dtype = torch.float32) -> ImportancePredictor:
    """Load a predictor that `save_predictor` wrote, for inference."""
    card = artifacts.read_card("predictor", directory)
    predictor = ImportancePredictor(card["hidden_size"], card["widths"])
    predictor.load_state_dict(artifacts.load(directory))
    return predictor.to(dtype).eval().requires_grad_(False)


class Recorder:
    """The memory of one signal: `tensors`, [slots, ...] each."""

    needs_mass = False
    of_tokens = False  # True: where all heads keep the same rows, a policy reads one number per row

    def __init__(self, *tensors: Tensor) -> None:
        self.tensors = tensors

    def admit(self, slot: int, prefill: Prefill) -> None:
        """Start a sequence in a slot, from its prefilled prompt."""

    def on_row(self, slots: Tensor, at: Tensor, positions: Tensor) -> None:
        """Prepare for a step that will write row `at` of `slots`, at original `positions`; [tokens] each."""

    def on_token(self, slots: Tensor, at: Tensor, hidden: Tensor) -> None:
        """Record a step that wrote row `at` of `slots`, [tokens] each, with `hidden` [tokens or more, width]."""

    def on_attention(self, layer: int, slots: slice, positions: Tensor, query: Tensor, mass: Tensor | None) -> None:
        """Record the attention of some slots, each with the same number of tokens, in order."""

    def write(self, slot: int, values: Tensor) -> None:
        """Store the numbers that a policy writes at an eviction, one per live row: [layers, kv_heads, length]."""
        raise NotImplementedError

    def evict(self, slot: int, keep: Tensor) -> None:
        """Drop the rows of a slot that are not in `keep`, [kept] or [layers, kv_heads, kept]."""

    def read(self, slot: int, length: int, newest: int) -> Tensor:
        """Return the signal of a slot's `length` live rows; `newest` is the position of the last row."""
        raise NotImplementedError


class RowRecorder(Recorder):
    """Numbers per row, [slots, ..., capacity] each; a row without a number holds `fill`."""

    fill: float = torch.nan
    dtypes: Sequence[torch.dtype] = (torch.float32,)  # of each tensor

    def __init__(self, signal: Any, cache: Slots) -> None:
        """Allocate a number per row, layer and key head: [slots, layers, kv_heads, capacity]."""
        size = (cache.slots, cache.shape.layers, cache.shape.kv_heads, cache.capacity)
        super().__init__(*[torch.full(size, self.fill, dtype=dtype, device=cache.device) for dtype in self.dtypes])

    def admit(self, slot: int, prefill: Prefill) -> None:
        for numbers in self.tensors:
            numbers[slot] = self.fill

    def evict(self, slot: int, keep: Tensor) -> None:
        for numbers in self.tensors:
            keep_columns(numbers[slot], keep)
            numbers[slot, ..., keep.shape[-1] :] = self.fill

    def read(self, slot: int, length: int, newest: int) -> Tensor:
        return self.tensors[0][slot, ..., :length]


class ScoreRecorder(RowRecorder):
    """`score` of the last hidden state in the step that wrote a row, in the shape of the cache's `positions`."""

    of_tokens = True

    def __init__(self, score: Callable[[Tensor], Tensor], cache: Slots) -> None:
        self.score = score
        self.tensors = (torch.full(cache.positions.shape, self.fill, device=cache.device),)

    def on_token(self, slots: Tensor, at: Tensor, hidden: Tensor) -> None:
        scores = self.score(hidden)[: len(slots)].float()
        self.tensors[0][slots, :, :, at] = scores[:, None, None]


def importance_recorder(signal: PredictedImportance, cache: Slots) -> ScoreRecorder:
    if cache.device.type == "meta":  # only bytes are counted; the predictor may not exist yet
        return ScoreRecorder(torch.Tensor.sum, cache)
    predictor = load_predictor(signal.directory, dtype=cache.shape.dtype).to(cache.device)
    return ScoreRecorder(partial(predictor, linear=cache.linear), cache)


class MassRecorder(RowRecorder):
    """The attention that each row has received, per layer and key head; each step multiplies old sums by `decay`."""

    needs_mass = True
    fill = 0.0

    def __init__(self, signal: AttentionMass, cache: Slots) -> None:
        super().__init__(signal, cache)
        self.decay = signal.decay
        self.causal_mass = cache.operations.causal_mass
        self.total = self.tensors[0]

    def admit(self, slot: int, prefill: Prefill) -> None:
        super().admit(slot, prefill)
        how: dict[str, Any] = {"scaling": prefill.scaling}
        layers = zip(prefill.queries, prefill.rows, prefill.sinks, strict=True)
        for layer, (query, (key, _), sinks) in enumerate(layers):
            if self.decay == 1 and sinks is None and prefill.softcap is None:  # what the kernel of a prompt knows
                received = self.causal_mass(query, key, **how)
            else:
                received = decayed_mass(query, key, decay=self.decay, sinks=sinks, softcap=prefill.softcap, **how)
            self.total[slot, layer, :, : prefill.length] = received

    def on_attention(self, layer: int, slots: slice, positions: Tensor, query: Tensor, mass: Tensor | None) -> None:
        """Add the attention of each token's queries, token by token: another order of the sum rounds differently."""
        assert mass is not None
        total = self.total[slots, layer, :, : mass.shape[-1]]
        for paid in mass.unbind(dim=1):
            if self.decay != 1:
                total *= self.decay
            total += paid


class UseRecorder(RowRecorder):
    """The last query that paid each row at least `threshold`, and the longest interval between two such queries.

    A new row counts as used by the query before it, a prompt's rows by its last query (LazyEviction, temp_cacheobs.py).
    """

    needs_mass = True
    fill = 0
    dtypes = (torch.int32, torch.int32)

    def __init__(self, signal: LastUse, cache: Slots) -> None:
        super().__init__(signal, cache)
        self.threshold = signal.threshold
        self.last, self.interval = self.tensors

    def admit(self, slot: int, prefill: Prefill) -> None:
        self.last[slot], self.interval[slot] = prefill.length - 1, 0

    def on_row(self, slots: Tensor, at: Tensor, positions: Tensor) -> None:
        self.last[slots, :, :, at] = (positions[:, None, None] - 1).int()  # the query before the row's own token
        self.interval[slots, :, :, at] = 0

    def on_attention(self, layer: int, slots: slice, positions: Tensor, query: Tensor, mass: Tensor | None) -> None:
        """Record the rows that each token's queries use; a row that is not written yet gets no attention."""
        assert mass is not None
        rows_read = slots, layer, slice(None), slice(mass.shape[-1])
        now = positions[..., None, None].int()  # [slots, tokens, 1, 1]
        is_used = mass >= self.threshold  # [slots, tokens, kv_heads, rows]
        before = self.last[rows_read][:, None]
        # The last use before the first token, then after each token: positions grow, so the latest is the largest.
        last = torch.cat([before, torch.where(is_used, now, before)], dim=1).cummax(dim=1).values
        longest = torch.where(is_used, now - last[:, :-1], 0).amax(dim=1)  # of the intervals that these uses end
        self.interval[rows_read] = torch.maximum(self.interval[rows_read], longest)
        self.last[rows_read] = last[:, -1]

    def read(self, slot: int, length: int, newest: int) -> Tensor:
        return torch.stack([numbers[slot, :, :, :length] for numbers in self.tensors])


class MemoryRecorder(RowRecorder):
    """A number per row, layer and key head that a policy writes at an eviction; NaN before."""

    def write(self, slot: int, values: Tensor) -> None:
        self.tensors[0][slot, ..., : values.shape[-1]] = values


class QueryRecorder(Recorder):
    """The queries of the newest `window` tokens in a ring buffer: the query at position p lies at p % window."""

    def __init__(self, signal: RecentQueries, cache: Slots) -> None:
        shape, self.window = cache.shape, signal.window
        size = (cache.slots, shape.layers, shape.q_heads, self.window, shape.head_dim)
        self.ring = torch.zeros(size, dtype=shape.dtype, device=cache.device)
        self.slot_ids = cache.slot_ids
        super().__init__(self.ring)

    def admit(self, slot: int, prefill: Prefill) -> None:
        positions = torch.arange(max(0, prefill.length - self.window), prefill.length, device=self.ring.device)
        for layer, query in enumerate(prefill.queries):
            self.ring[slot, layer, :, positions % self.window] = query[:, positions]

    def on_attention(self, layer: int, slots: slice, positions: Tensor, query: Tensor, mass: Tensor | None) -> None:
        # Of more tokens than the ring holds, the older ones would be written to the same places.
        places = positions[:, -self.window :] % self.window  # [slots, tokens]
        self.ring[self.slot_ids[slots, None], layer, :, places] = query[:, -self.window :]

    def read(self, slot: int, length: int, newest: int) -> Tensor:
        order = torch.arange(newest + 1 - self.window, newest + 1, device=self.ring.device) % self.window
        return self.ring[slot, :, :, order]


RECORDERS: Mapping[type[Signal], Callable[[Any, Slots], Recorder]] = {
    PredictedImportance: importance_recorder,
    AttentionMass: MassRecorder,
    RecentQueries: QueryRecorder,
    LastUse: UseRecorder,
    RowMemory: MemoryRecorder,
}


def recorder_of(signal: Signal, cache: Slots) -> Recorder:
    """Return the recorder of a signal, with memory for all slots of a cache."""
    make = RECORDERS.get(type(signal))
    return make(signal, cache) if make else signal.allocate(cache)


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
    """Return the causal attention that each key of a prompt receives, weighted: each query `decay` times the next.

    query [q_heads, length, head_dim], key [kv_heads, length, head_dim]; returns [kv_heads, length], summed over queries
    and each group of query heads. Blocks of queries with a weight that float32 rounds to 0 are left out.
    """
    kv_heads, length, _ = key.shape
    grouped = query.float().unflatten(0, (kv_heads, -1))  # [kv_heads, group, length, head_dim]
    keys = key.float()[:, None]
    head_sinks = None if sinks is None else sinks.view(kv_heads, -1, 1, 1)
    positions = torch.arange(length, device=key.device)
    total = torch.zeros(kv_heads, length, device=key.device)
    for end in range(length, 0, -block):  # from the newest queries, which weigh most, to the oldest
        queries = positions[max(0, end - block) : end]
        weights = decay ** (length - 1 - queries).double()
        if not weights.float().any():
            break
        logits = torch.matmul(grouped[:, :, queries], keys[:, :, :end].transpose(-1, -2)) * scaling
        logits = capped(logits, softcap).masked_fill(positions[:end] > queries[:, None], float("-inf"))
        paid = attention_weights(logits, head_sinks)
        total[:, :end] += (paid * weights.float()[:, None]).sum(dim=(1, 2))
    return total


def keep_columns(columns: Tensor, keep: Tensor) -> None:
    """Move the kept entries of per-row numbers [..., capacity] to the front, in place.

    `keep` is [kept], or [layers, kv_heads, kept] for numbers of that shape.
    """
    columns[..., : keep.shape[-1]] = columns[..., keep] if keep.dim() == 1 else columns.gather(-1, keep)
