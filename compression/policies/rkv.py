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
from kvsweep.compression.policy import CacheView, Count, Fraction
from kvsweep.compression.signals import RowMemory, Signal
from kvsweep.kernels.lazy_torch import Tensor, functional, torch


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
    window, mean over queries, max-pooled. The redundancy is computed over all rows; then the window's rows, which stay
    for certain, are left out. The weight `mix` is 0.07 in the authors' code, 0.1 in their paper.
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
    to the released code with its similarity in plain torch; its Triton kernel spares one similar row per block instead.
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
