"""SnapKV (arXiv 2404.14469): keep the tokens that the newest queries attend to."""

from dataclasses import dataclass

from kvsweep.compression.policies.observation import DynTSCodeObservation, ObservationPolicy, Pooling
from kvsweep.compression.policy import CacheView, Count
from kvsweep.kernels.implementation import Tensor


@dataclass(frozen=True, kw_only=True)
class SnapKV(ObservationPolicy):
    """Attention of the observation window, averaged over its queries, mean-pooled, averaged over each group of heads.

    Section 4 and the released code (snapkv/monkeypatch/snapkv_utils.py): its softmax runs over all rows that a query
    sees. The released code prunes once, after the prefill; this policy prunes at every eviction.
    """

    observation_window: Count = 32
    pooling: Pooling = 5

    def scores(self, view: CacheView) -> Tensor:
        return self.attention(view).mean(dim=2)


@dataclass(frozen=True, kw_only=True)
class SnapKVDynTSCode(DynTSCodeObservation):
    """SnapKV as in the DynTS code: attention summed over queries, averaged over layers and heads, not pooled."""

    observation_window: Count = 32

    def scores(self, view: CacheView) -> Tensor:
        return self.summed_attention(view)
