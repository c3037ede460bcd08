"""G-KV (arXiv 2512.00504): R-KV whose rows remember how much attention they had at earlier evictions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvsweep.compression.policies.observation import newest_attention
from kvsweep.compression.policies.rkv import RKV
from kvsweep.compression.policy import CacheView, check_fraction
from kvsweep.compression.signals import RowMemory, Signal

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class GKV(RKV):
    """mix * memory - (1 - mix) * redundancy, per layer and head (gkv/model/compression/score_based.py).

    Importance is the attention of the window's queries over all rows that each sees: the largest of each group of
    heads, averaged over the queries, divided by the largest row's. A row's memory is its importance, or `decay` times
    what it remembers from the eviction before if that is more. Redundancy is R-KV's, divided by the largest row's. How
    sure: read in the released code, with its similarity in plain torch; its Triton kernel spares one similar row per
    block instead.

    Attributes:
        decay: share of a memory that lasts to the next eviction, in [0, 1].

    Raises:
        ValueError: decay outside [0, 1].
    """

    VARIANTS: ClassVar[tuple[str, ...]] = ("original",)
    MEMORY: ClassVar[RowMemory] = RowMemory("gkv")

    observation_window: int = 16
    pooling: int = 1
    mix: float = 0.5
    decay: float = 0.8

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fraction("decay", self.decay)

    @property
    def signals(self) -> tuple[Signal, ...]:
        """The observation window's queries and the memory."""
        return (*super().signals, self.MEMORY)

    def head_scores(self, view: CacheView) -> Tensor:
        """[layers, kv_heads, rows outside the window] memory less redundancy."""
        from torch.nn.functional import max_pool1d

        pooled = max_pool1d(self._remembered(view), self.pooling, stride=1, padding=self.pooling // 2)
        redundancy = self._redundancy(view)[..., : -self.observation_window]
        return self._mixed(pooled, redundancy / redundancy.amax(dim=-1, keepdim=True))

    def written(self, view: CacheView) -> Mapping[Signal, Tensor]:
        """The memory of the rows outside the window, before pooling; those in the window remember nothing yet."""
        from torch.nn.functional import pad

        return {self.MEMORY: pad(self._remembered(view), (0, self.observation_window), value=float("nan"))}

    def _remembered(self, view: CacheView) -> Tensor:
        attention = newest_attention(view, self._queries, self.observation_window)
        grouped = attention.unflatten(1, (view.keys[0].shape[0], -1)).amax(dim=2)
        importance = grouped.mean(dim=2)[..., : -self.observation_window]
        importance = importance / importance.amax(dim=-1, keepdim=True)
        # fmax takes the importance where nothing is remembered, which is NaN.
        return importance.fmax(self.decay * view.signals[self.MEMORY][..., : -self.observation_window])
