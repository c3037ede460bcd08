"""R-KV (arXiv 2505.24133): keep the tokens that the newest queries attend to and that do not repeat other tokens."""

from dataclasses import dataclass

from kvsweep.compression.policies.observation import DynTSCodeObservation, Observation, ObservationPolicy, Pooling
from kvsweep.compression.policy import CacheView, Count, Fraction
from kvsweep.kernels.implementation import Tensor, functional, torch


@dataclass(frozen=True, kw_only=True)
class LessRedundancy(Observation):
    """mix * importance (pooled over `pooling`) - (1 - mix) * redundancy (keys with cosine above `threshold`)."""

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
    """Importance minus redundancy, per layer and head (rkv/compression/r1_kv.py).

    Importance: logits of the window's queries, the largest in each group of heads, softmax over the rows before the
    window, mean over queries, max-pooled. Redundancy is computed over all rows. The paper sets `mix` to 0.1.
    """

    mix: Fraction = 0.07

    def scores(self, view: CacheView) -> Tensor:
        importance = self.attention(view, past_only=True, pool_logits=True, pool="max")[:, :, 0]
        return self.mixed(importance, self.redundancy(view)[..., : -self.observation_window])


@dataclass(frozen=True, kw_only=True)
class RKVDynTSCode(LessRedundancy, DynTSCodeObservation):
    """R-KV as in the DynTS code: summed attention, max-pooled, minus redundancy averaged over layers and heads."""

    mix: Fraction = 0.1

    def scores(self, view: CacheView) -> Tensor:
        """Scores of the rows outside the local window; of all rows if the window covers them and none competes."""
        outside = view.length - (self.local_window if self.local_window < view.length else 0)
        attention = self.summed_attention(view)[None, :outside] / self.observation_window
        return self.mixed(self.max_pooled(attention)[0], self.redundancy(view).mean(dim=(0, 1))[:outside])
