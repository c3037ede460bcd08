"""CAOTE (arXiv 2504.14051): keep the tokens whose eviction would change the attention output most."""

from dataclasses import dataclass

from kvsweep.compression.policies.observation import ObservationPolicy, Pooling
from kvsweep.compression.policy import CacheView, Count
from kvsweep.kernels.implementation import Tensor, torch


@dataclass(frozen=True, kw_only=True)
class CAOTE(ObservationPolicy):
    """a / (1 - a) * |v - o|: how much the output o = sum of a * v changes if only this row goes, per layer and head.

    a is the attention of the observation window over the rows before it, averaged over queries and over each group of
    heads. The formula is the paper's (section 3). Window, softmax and clamp are tested against Random-Attention's
    engine (kvcompress/engine/cache_utils.py, mode caote), not against the authors' code.
    """

    observation_window: Count = 64
    pooling: Pooling = 1

    def scores(self, view: CacheView) -> Tensor:
        weights = self.attention(view, past_only=True).mean(dim=2).clamp(1e-6, 1 - 1e-6)
        values = torch.stack(list(view.values))[:, :, : weights.shape[-1]].to(weights.dtype)
        output = (weights[..., None] * values).sum(dim=-2, keepdim=True)
        return weights / (1 - weights) * (values - output).norm(dim=-1)
