"""The bases of policies that score rows by the attention of the newest queries."""

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from kvsweep.compression.policy import BudgetPolicy, CacheView, Count, HeadPolicy, RecentQueries, Signal
from kvsweep.kernels.implementation import Tensor, functional, torch


def _odd(width: int) -> int:
    if width % 2 == 0:
        raise ValueError(f"policy.pooling={width} is out of range: it must be odd.")
    return width


Pooling = Annotated[int, Field(ge=1), AfterValidator(_odd)]


@dataclass(frozen=True, kw_only=True)
class Observation(BudgetPolicy):
    """Scores from the queries of the newest `observation_window` tokens."""

    observation_window: Count

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.observation_window > self.size:
            allowed = f"at most the {self.size} tokens that stay at an eviction"
            raise ValueError(f"policy.observation_window={self.observation_window} is out of range: {allowed}.")

    @property
    def signals(self) -> tuple[Signal, ...]:
        return (self._queries,)

    @property
    def _queries(self) -> RecentQueries:
        return RecentQueries(self.observation_window)


@dataclass(frozen=True, kw_only=True)
class ObservationPolicy(HeadPolicy, Observation):
    """Scores per layer and head, pooled over `pooling` neighbours; the window's own rows stay for certain."""

    pooling: Pooling

    @property
    def newest_kept(self) -> int:
        return self.observation_window

    def attention(self, view: CacheView, **how: Any) -> Tensor:
        """Pooled attention [layers, kv_heads, group, rows outside the window]; `how` as in `observation_scores`."""
        score = partial(view.operations.observation_scores, scaling=view.scaling, pooling=self.pooling, **how)
        return torch.stack([score(*rows) for rows in zip(view.signals[self._queries], view.keys, strict=True)])


@dataclass(frozen=True, kw_only=True)
class DynTSCodeObservation(Observation):
    """Scores as the DynTS code has them: one per token; the local window stays for certain.

    That code starts to sum one query early: it takes one more than the window's at the first eviction, later two more.
    """

    def summed_attention(self, view: CacheView) -> Tensor:
        """[length] attention of the newest queries, averaged over layers and query heads, summed over the queries."""
        newest = self.observation_window + (2 if view.evicted_before else 1)
        return newest_attention(view, self._queries, newest).sum(dim=2).mean(dim=(0, 1))

    @property
    def _queries(self) -> RecentQueries:
        return RecentQueries(self.observation_window + 2)


def newest_attention(view: CacheView, recorded: RecentQueries, newest: int) -> Tensor:
    """[layers, q_heads, newest, length] causal attention of the newest queries over all rows, float32 at least."""
    layers = []
    for queries, keys in zip(view.signals[recorded], view.keys, strict=True):
        kv_heads, length, head_dim = keys.shape
        grouped = queries[:, -newest:].reshape(kv_heads, -1, head_dim)
        wide = torch.promote_types(keys.dtype, torch.float32)
        logits = torch.matmul(grouped.to(wide), keys.to(wide).transpose(-1, -2)) * view.scaling
        logits = logits.reshape(-1, newest, length)
        later = torch.ones(newest, length, dtype=torch.bool, device=keys.device).triu(diagonal=length - newest + 1)
        layers.append(logits.masked_fill(later, float("-inf")).softmax(dim=-1))
    return torch.stack(layers)


@dataclass(frozen=True, kw_only=True)
class TOVA(HeadPolicy):
    """Attention of the last query alone, averaged over all heads of a layer; each layer keeps rows of its own.

    Section 3.2 and the released code (src/tova_cache.py), where a row goes at every step; here many at the budget. With
    `keep_last` the last row stays for certain, as in kvpress.
    """

    keep_last: bool = False

    signals = (RecentQueries(1),)

    @property
    def newest_kept(self) -> int:
        return int(self.keep_last)

    def scores(self, view: CacheView) -> Tensor:
        attention = newest_attention(view, RecentQueries(1), 1)[:, :, 0].mean(dim=1)
        return attention[:, None].expand(-1, view.keys[0].shape[0], -1)


@dataclass(frozen=True, kw_only=True)
class LongFlow(HeadPolicy):
    """Attention of the newest query times the 1-norm of the value, summed over the heads of a layer.

    All heads of a layer keep the same rows. Held to the released kernel (triton_kernel/attention.py), where a row goes
    at every step and the newest competes too; here many rows go at the budget, and the newest stays. The code's pruning
    of long prompts by SnapKV is left out.
    """

    signals = (RecentQueries(1),)

    newest_kept = 1

    def scores(self, view: CacheView) -> Tensor:
        values = torch.stack(list(view.values)).float().abs().sum(dim=-1)  # [layers, kv_heads, length]
        attention = newest_attention(view, RecentQueries(1), 1)[:, :, 0]
        grouped = attention.unflatten(1, (values.shape[1], -1)).sum(dim=2)
        return (grouped * values).sum(dim=1, keepdim=True).expand_as(values)


@dataclass(frozen=True, kw_only=True)
class SnapKV(ObservationPolicy):
    """Attention of the observation window, averaged over its queries, smoothed, averaged over each group of heads.

    Section 4 and the released code (snapkv/monkeypatch/snapkv_utils.py), whose softmax runs over all rows a query sees;
    average pooling. There the cache is pruned once, after the prefill; here at every eviction.
    """

    observation_window: Count = 32
    pooling: Pooling = 5

    def scores(self, view: CacheView) -> Tensor:
        return self.attention(view).mean(dim=2)


@dataclass(frozen=True, kw_only=True)
class SnapKVDynTSCode(DynTSCodeObservation):
    """SnapKV as the DynTS code has it: attention summed over queries, averaged over layers and heads, not pooled."""

    observation_window: Count = 32

    def scores(self, view: CacheView) -> Tensor:
        return self.summed_attention(view)


@dataclass(frozen=True, kw_only=True)
class CAOTE(ObservationPolicy):
    """a / (1 - a) * |v - o|: the error of the output o = sum of a * v if the row alone goes, per layer and head.

    The attention a is that of the observation window over the rows before it, averaged over queries and over each group
    of heads. The formula is the paper's (section 3); window, softmax and clamp are held to Random-Attention's engine
    (kvcompress/engine/cache_utils.py, mode caote), not to the authors' own code.
    """

    observation_window: Count = 64
    pooling: Pooling = 1

    def scores(self, view: CacheView) -> Tensor:
        weights = self.attention(view, past_only=True).mean(dim=2).clamp(1e-6, 1 - 1e-6)
        values = torch.stack(list(view.values))[:, :, : weights.shape[-1]].to(weights.dtype)
        output = (weights[..., None] * values).sum(dim=-2, keepdim=True)
        return weights / (1 - weights) * (values - output).norm(dim=-1)


@dataclass(frozen=True, kw_only=True)
class RPC(ObservationPolicy):
    """Reasoning Path Compression: at each eviction int((budget + 1 - local_window) * keep_ratio) rows more stay.

    Trigger and size grow together, so that about `keep_ratio` of the text stays. The published P, R and c (1024, 32, 4)
    are budget P + R - 1, local_window and observation_window R, keep_ratio 1 / c.

    Scores (rpc/rpc_utils.py): softmax of the window's queries over the rows between question and window, averaged over
    the queries and all heads of a layer, mean-pooled. All heads of a layer keep the same rows. Held to the released
    code, which counts the newest query twice and leaves out the oldest of the window.
    """

    QUESTION = "on_top"

    observation_window: Count = 32
    pooling: Pooling = 7

    def trigger(self, question_length: int, evictions: int = 0) -> int | None:
        return self.budget + self._on_top(question_length) + evictions * self._growth

    def length_after(self, length: int, question_length: int, evictions: int = 0) -> int:
        grown = evictions * self._growth
        return super().length_after(length - grown, question_length) + grown

    def capacity(self, question_length: int, max_new_tokens: int) -> int:
        """The most rows of the longest text, found by going through its evictions."""
        unpruned = question_length + max_new_tokens
        written = length = fullest = question_length
        for evictions in range(max_new_tokens):
            due = max(self.trigger(question_length, evictions) or 0, length) + 1
            written += due - length
            if written > unpruned:
                break
            fullest, length = max(fullest, due), self.length_after(due, question_length, evictions)
            if length == due:
                return unpruned
        return max(fullest, unpruned - written + due)

    def scores(self, view: CacheView) -> Tensor:
        """[layers, kv_heads, rows outside the window] pooled attention, the same for all heads of a layer."""
        how = {"scaling": view.scaling, "past_only": True, "pooling": self.pooling}
        score, layers = partial(view.operations.observation_scores, **how), []
        for layer, (queries, keys) in enumerate(zip(view.signals[self._queries], view.keys, strict=True)):
            kept = 0 if self.question_rule == "free" else int(view.question[layer, 0].sum())
            apart = min(kept, view.length - self.observation_window)
            scores = score(torch.cat([queries[:, 1:], queries[:, -1:]], dim=1), keys[:, apart:])
            layers.append(functional.pad(scores.mean(dim=(0, 1)), (apart, 0)).expand(len(keys), -1))
        return torch.stack(layers)

    @property
    def _growth(self) -> int:
        return self.size - self.local_window
