"""SnapKV (arXiv 2404.14469) and CAOTE (arXiv 2504.14051): the rows that the newest queries attend to or would miss."""

from dataclasses import dataclass

from kvsweep.compression.policies.observation import DynTSCodeObservation, ObservationPolicy, Pooling
from kvsweep.compression.policy import CacheView, Count
from kvsweep.kernels.lazy_torch import Tensor, torch


@dataclass(frozen=True, kw_only=True)
class SnapKV(ObservationPolicy):
    """Attention of the observation window, averaged over its queries, smoothed, averaged over each group of heads.

    Section 4 and the released code (snapkv/monkeypatch/snapkv_utils.py), whose softmax runs over all rows a query sees;
    average pooling. There the cache is pruned once, after the prefill; here at every eviction.
    """

    observation_window: Count = 32
    pooling: Pooling = 5

    def scores(self, view: CacheView) -> Tensor:
        return self.attention(view).mean(dim=2)


@dataclass(frozen=True, kw_only=True)
class SnapKVDynTSCode(DynTSCodeObservation):
    """SnapKV as the DynTS code has it: attention summed over queries, averaged over layers and heads, not pooled."""

    observation_window: Count = 32

    def scores(self, view: CacheView) -> Tensor:
        return self.summed_attention(view)


@dataclass(frozen=True, kw_only=True)
class CAOTE(ObservationPolicy):
    """a / (1 - a) * |v - o|: the error of the output o = sum of a * v if the row alone goes, per layer and head.

    The attention a is that of the observation window over the rows before it, averaged over queries and over each group
    of heads. The formula is the paper's (section 3); window, softmax and the clamp of a to [1e-6, 1 - 1e-6] are
    held to Random-Attention's engine (kvcompress/engine/cache_utils.py, mode caote), not in the authors' own code.
    """

    observation_window: Count = 64
    pooling: Pooling = 1

    def scores(self, view: CacheView) -> Tensor:
        weights = self.attention(view, past_only=True).mean(dim=2).clamp(1e-6, 1 - 1e-6)
        values = torch.stack(list(view.values))[:, :, : weights.shape[-1]].to(weights.dtype)
        output = (weights[..., None] * values).sum(dim=-2, keepdim=True)
        return weights / (1 - weights) * (values - output).norm(dim=-1)
