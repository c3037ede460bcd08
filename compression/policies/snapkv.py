"""SnapKV (arXiv 2404.14469): the rows that the newest queries attend to, with their neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvsweep.compression.policies.observation import ObservationPolicy
from kvsweep.compression.policy import CacheView

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class SnapKV(ObservationPolicy):
    """Attention of the observation window, averaged over its queries, smoothed, averaged over each group of heads.

    Section 4 and the released code (snapkv/monkeypatch/snapkv_utils.py), whose softmax runs over all rows a query sees;
    average pooling. There the cache is pruned once, after the prefill; here at every eviction. The DynTS code's form
    sums the attention of one or two more queries over layers and heads and does not pool.
    """

    VARIANTS: ClassVar[tuple[str, ...]] = ("original", "dynts_code")

    observation_window: int = 32
    pooling: int = 5

    def head_scores(self, view: CacheView) -> Tensor:
        """[layers, kv_heads, rows outside the window] pooled attention."""
        return self.attention(view).mean(dim=2)

    def token_scores(self, view: CacheView) -> Tensor:
        """[length] summed attention."""
        return self.summed_attention(view)
