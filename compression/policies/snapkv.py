"""SnapKV (arXiv 2404.14469): the rows that the newest queries attend to, with their neighbours."""

from dataclasses import dataclass

from torch import Tensor

from compression.policies.observation import ObservationPolicy
from compression.policy import CacheView


@dataclass(frozen=True, kw_only=True)
class SnapKV(ObservationPolicy):
    """Attention of the observation window, averaged over its queries, smoothed, averaged over each group of heads.

    Section 4 and the released code, whose softmax runs over all rows a query sees; average pooling. Done once after
    the prefill there, at every eviction here.
    """

    observation_window: int = 32
    pooling: int = 5

    def head_scores(self, view: CacheView) -> Tensor:
        """[layers, kv_heads, rows outside the window] pooled attention."""
        return self.attention(view).mean(dim=2)
