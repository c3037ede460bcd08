"""G-KV (arXiv 2512.00504): R-KV that also remembers each token's attention at earlier evictions."""

from collections.abc import Mapping
from dataclasses import dataclass

from kvsweep.compression.policies.observation import (
    ObservationPolicy,
    Pooling,
    newest_attention,
)
from kvsweep.compression.policies.rkv import LessRedundancy
from kvsweep.compression.policy import (
    CacheView,
    Count,
    Fraction,
    RowMemory,
    Signal,
)
from kvsweep.kernels.implementation import Tensor, functional


@dataclass(frozen=True, kw_only=True)
class GKV(LessRedundancy, ObservationPolicy):
    """mix * memory - (1 - mix) * redundancy, per layer and head (gkv/model/compression/score_based.py).

    Importance is the attention of the window's queries over all rows that each query sees: the largest in each group of
    heads, averaged over queries, divided by the largest row's. A row's memory is its importance or, if larger, `decay`
    times its memory at the eviction before. Redundancy is R-KV's, divided by the largest row's. Tested against the
    released code in plain torch; the released Triton kernel instead spares one similar row per block.
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
        """Return the memory of the rows outside the window, before pooling; rows of the window have no memory yet."""
        return {self.MEMORY: functional.pad(self._remembered(view), (0, self.observation_window), value=float("nan"))}

    def _remembered(self, view: CacheView) -> Tensor:
        attention = newest_attention(view, self._queries, self.observation_window)
        grouped = attention.unflatten(1, (view.keys[0].shape[0], -1)).amax(dim=2)
        importance = grouped.mean(dim=2)[..., : -self.observation_window]
        importance = importance / importance.amax(dim=-1, keepdim=True)
        # NaN stands where nothing is remembered; fmax then takes the importance.
        return importance.fmax(self.decay * view.signals[self.MEMORY][..., : -self.observation_window])
