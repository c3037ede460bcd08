"""R-KV (arXiv 2505.24133): rows that the newest queries attend to and that repeat no other row.

G-KV (arXiv 2512.00504) is R-KV whose rows remember how much attention they had at earlier evictions.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from kvsweep.compression.policies.observation import (
    DynTSCodeObservation,
    Observation,
    ObservationPolicy,
    Pooling,
    newest_attention,
)
from kvsweep.compression.policy import CacheView, Count, Fraction, HeadPolicy, RowMemory, Signal
from kvsweep.kernels.implementation import Tensor, functional, torch


@dataclass(frozen=True, kw_only=True)
class LessRedundancy(Observation):
    """mix * importance (pooled over `pooling`) - (1 - mix) * redundancy (keys of a cosine above `threshold`)."""

    observation_window: Count = 8
    pooling: Pooling = 7
    mix: Fraction
    threshold: float = 0.5

    def mixed(self, importance: Tensor, redundancy: Tensor) -> Tensor:
        return self.mix * importance - (1 - self.mix) * redundancy

    def redundancy(self, view: CacheView) -> Tensor:  # [layers, kv_heads, length]
        return torch.stack([view.operations.redundancy(keys, threshold=self.threshold) for keys in view.keys])

    def max_pooled(self, scores: Tensor) -> Tensor:
        return functional.max_pool1d(scores, self.pooling, stride=1, padding=self.pooling // 2)


@dataclass(frozen=True, kw_only=True)
class RKV(LessRedundancy, ObservationPolicy):
    """Importance less redundancy, per layer and head (rkv/compression/r1_kv.py).

    Importance: logits of the window's queries, the largest of each group of heads, softmax over the rows before the
    window, mean over queries, max-pooled. Redundancy is computed over all rows. The paper has `mix` 0.1.
    """

    mix: Fraction = 0.07

    def scores(self, view: CacheView) -> Tensor:
        importance = self.attention(view, past_only=True, pool_logits=True, pool="max")[:, :, 0]
        return self.mixed(importance, self.redundancy(view)[..., : -self.observation_window])


@dataclass(frozen=True, kw_only=True)
class RKVDynTSCode(LessRedundancy, DynTSCodeObservation):
    """R-KV as the DynTS code has it: summed attention, max-pooled, less redundancy averaged over layers and heads."""

    mix: Fraction = 0.1

    def scores(self, view: CacheView) -> Tensor:
        """[rows outside the local window] scores; of all rows where the window covers them all and none competes."""
        outside = view.length - (self.local_window if self.local_window < view.length else 0)
        attention = self.summed_attention(view)[None, :outside] / self.observation_window
        return self.mixed(self.max_pooled(attention)[0], self.redundancy(view).mean(dim=(0, 1))[:outside])


@dataclass(frozen=True, kw_only=True)
class GKV(LessRedundancy, ObservationPolicy):
    """mix * memory - (1 - mix) * redundancy, per layer and head (gkv/model/compression/score_based.py).

    Importance is the attention of the window's queries over all rows that each sees: the largest of each group of
    heads, averaged over the queries, divided by the largest row's. A row's memory is its importance, or `decay` times
    what it remembers from the eviction before if that is more. Redundancy is R-KV's, divided by the largest row's. Held
    to the released code in plain torch; its Triton kernel spares one similar row per block instead.
    """

    MEMORY = RowMemory("gkv")

    observation_window: Count = 16
    pooling: Pooling = 1
    mix: Fraction = 0.5
    decay: Fraction = 0.8

    @property
    def signals(self) -> tuple[Signal, ...]:
        return (*super().signals, self.MEMORY)

    def scores(self, view: CacheView) -> Tensor:
        redundancy = self.redundancy(view)[..., : -self.observation_window]
        return self.mixed(self.max_pooled(self._remembered(view)), redundancy / redundancy.amax(dim=-1, keepdim=True))

    def written(self, view: CacheView) -> Mapping[Signal, Tensor]:
        """The memory of the rows outside the window, before pooling; those in the window remember nothing yet."""
        return {self.MEMORY: functional.pad(self._remembered(view), (0, self.observation_window), value=float("nan"))}

    def _remembered(self, view: CacheView) -> Tensor:
        attention = newest_attention(view, self._queries, self.observation_window)
        grouped = attention.unflatten(1, (view.keys[0].shape[0], -1)).amax(dim=2)
        importance = grouped.mean(dim=2)[..., : -self.observation_window]
        importance = importance / importance.amax(dim=-1, keepdim=True)
        # fmax takes the importance where nothing is remembered, which is NaN.
        return importance.fmax(self.decay * view.signals[self.MEMORY][..., : -self.observation_window])


@dataclass(frozen=True, kw_only=True)
class VaSE(ObservationPolicy):
    """Large values protected, the rest drawn without replacement in proportion to the newest queries' attention.

    Released code, mode range_sink_sample_attn: a value's size is its range (largest less smallest component); the sinks
    count as largest; attention is the softmax over the rows before the window, averaged over queries, smoothed,
    averaged over each group of heads. Of all rows that stay, the share `large` goes to large values. The draw is by
    exponential races on counter-based numbers, which have the same probabilities.
    """

    SINKS = 4

    observation_window: Count = 64
    pooling: Pooling = 5
    large: Fraction = 0.25

    def scores(self, view: CacheView) -> Tensor:
        """[layers, kv_heads, rows outside the window]: infinite where protected, else the draw's order."""
        weights = self.weights(view)
        # The largest of weight-scaled exponentials draws without replacement in proportion to the weights.
        uniform = view.uniform()[..., : weights.shape[-1]].clamp(min=1e-12)
        race = weights.double().log() - (-uniform.double().log()).log()
        return race.masked_fill(self.protected(view), float("inf"))

    def weights(self, view: CacheView) -> Tensor:
        """[layers, kv_heads, rows outside the window] what a row's chance of being drawn is proportional to."""
        return self.attention(view, past_only=True).mean(dim=2)

    def protected(self, view: CacheView) -> Tensor:
        """[layers, kv_heads, rows outside the window] true at the rows of the largest values."""
        outside = view.length - self.observation_window
        values = torch.stack(list(view.values))[:, :, :outside].float()
        spread = values.amax(dim=-1) - values.amin(dim=-1)
        spread = spread.masked_fill(view.positions[..., :outside] < self.sinks_kept, float("inf"))
        largest = spread.sort(dim=-1, descending=True, stable=True).indices[..., : round(self.large * self.size)]
        return torch.zeros_like(spread, dtype=torch.bool).scatter(-1, largest, True)


@dataclass(frozen=True, kw_only=True)
class LagKV(HeadPolicy):
    """Parts of `lag` rows, each ranked by its spread after scaling to the range of the next part; needs no attention.

    Equations 5 to 8, held to kvpress's lagkv_press.py. A part's keys are scaled, channel by channel, so that the next
    part's lie in [0, 1]; the deviation over channels goes through a softmax over the part; keys and values are
    averaged. A row's score is its rank within its part, from 0 to below 1. Sinks, the last whole part and what follows
    it score 1. A cache too short for two parts keeps its newest rows.
    """

    SINKS = 4

    lag: Count = 128

    newest_kept = 0

    def scores(self, view: CacheView) -> Tensor:
        scores = torch.ones(len(view.keys), view.keys[0].shape[0], view.length, device=view.keys[0].device)
        first = self.sinks_kept
        parts = (view.length - first) // self.lag
        if parts < 2:
            scores[..., first:] = torch.arange(view.length - first) / (view.length - first)
            return scores
        ranked = slice(first, first + (parts - 1) * self.lag)
        for layer, (keys, values) in enumerate(zip(view.keys, view.values, strict=True)):
            spread = (self._spread(keys, parts) + self._spread(values, parts)) / 2
            best_first = spread.sort(dim=-1, descending=True, stable=True).indices
            rank = self.lag - 1 - best_first.argsort(dim=-1)
            scores[layer, :, ranked] = rank.flatten(1) / self.lag
        return scores

    def _spread(self, rows: Tensor, parts: int) -> Tensor:
        """[kv_heads, parts - 1, lag] of rows [kv_heads, length, head_dim]."""
        first = self.sinks_kept
        split = rows[:, first : first + parts * self.lag].double().unflatten(1, (parts, self.lag))
        low, high = split[:, 1:].aminmax(dim=-2, keepdim=True)
        # A channel that is constant in the next part would divide by zero.
        return ((split[:, :-1] - low) / (high - low).clamp(min=1e-12)).std(dim=-1).softmax(dim=-1)
