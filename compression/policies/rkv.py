"""R-KV (arXiv 2505.24133): rows that the newest queries attend to and that repeat no other row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvsweep.compression.policies.observation import ObservationPolicy
from kvsweep.compression.policy import CacheView, check_fraction

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class RKV(ObservationPolicy):
    """mix * importance - (1 - mix) * redundancy, per layer and head (rkv/compression/r1_kv.py).

    Importance: logits of the window's queries, the largest of each group of heads, softmax over the rows before the
    window, mean over queries, max-pooled. Redundancy: `kernels.reference.redundancy` of all keys, the window's among
    them, whose own entries are then cut off. The DynTS code's form takes SnapKV's summed attention, max-pooled, for
    importance and averages redundancy over layers and heads.

    Attributes:
        mix: weight of importance (the paper's lambda), in [0, 1]: 0.07 in the authors' code, 0.1 in their paper.
        threshold: cosine above which two keys count as similar.

    Raises:
        ValueError: mix outside [0, 1].
    """

    VARIANTS: ClassVar[tuple[str, ...]] = ("original", "dynts_code")

    observation_window: int = 8
    pooling: int = 7
    mix: float = 0.07
    threshold: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fraction("mix", self.mix, "a weight ")

    def head_scores(self, view: CacheView) -> Tensor:
        """[layers, kv_heads, rows outside the window] importance less redundancy."""
        importance = self.attention(view, past_only=True, pool_logits=True, pool="max")[:, :, 0]
        return self._mixed(importance, self._redundancy(view)[..., : -self.observation_window])

    def token_scores(self, view: CacheView) -> Tensor:
        """[rows outside the local window] importance less redundancy."""
        from torch.nn.functional import max_pool1d

        # Where the window covers all rows none competes, and the scores are there to be looked at.
        outside = view.length - (self.local_window if self.local_window < view.length else 0)
        attention = self.summed_attention(view)[None, :outside] / self.observation_window
        importance = max_pool1d(attention, self.pooling, stride=1, padding=self.pooling // 2)[0]
        return self._mixed(importance, self._redundancy(view).mean(dim=(0, 1))[:outside])

    def _mixed(self, importance: Tensor, redundancy: Tensor) -> Tensor:
        return self.mix * importance - (1 - self.mix) * redundancy

    def _redundancy(self, view: CacheView) -> Tensor:
        import torch

        return torch.stack([view.operations.redundancy(keys, threshold=self.threshold) for keys in view.keys])
