"""R-KV (arXiv 2505.24133): rows that the newest queries attend to and that repeat no other row."""

from dataclasses import dataclass

import torch
from torch import Tensor

from compression.policies.observation import ObservationPolicy
from compression.policy import CacheView


@dataclass(frozen=True, kw_only=True)
class RKV(ObservationPolicy):
    """mix * importance - (1 - mix) * redundancy, per layer and head (section 3, released code).

    Importance: logits of the window's queries, the largest of each group of heads, softmax over the rows before the
    window, mean over queries, max-pooled. Redundancy: `kernels.reference.redundancy` of the keys before the window.

    Attributes:
        mix: weight of importance (the paper's lambda), in [0, 1].
        threshold: cosine above which two keys count as similar.

    Raises:
        ValueError: mix outside [0, 1].
    """

    observation_window: int = 8
    pooling: int = 7
    mix: float = 0.1
    threshold: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.mix <= 1:
            raise ValueError(f"policy.mix={self.mix} is out of range: a weight from 0 to 1.")

    def head_scores(self, view: CacheView) -> Tensor:
        """[layers, kv_heads, rows outside the window] importance less redundancy."""
        importance = self.attention(view, past_only=True, pool_logits=True, pool="max")[:, :, 0]
        older = [keys[:, : -self.observation_window] for keys in view.keys]
        repeated = torch.stack([view.operations.redundancy(keys, threshold=self.threshold) for keys in older])
        return self.mix * importance - (1 - self.mix) * repeated
