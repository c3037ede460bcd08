"""LongFlow: keep the tokens that contribute most to the newest attention output."""

from dataclasses import dataclass

from kvsweep.compression.policies.observation import newest_attention
from kvsweep.compression.policy import CacheView, HeadPolicy, RecentQueries
from kvsweep.kernels.implementation import Tensor, torch


@dataclass(frozen=True, kw_only=True)
class LongFlow(HeadPolicy):
    """Attention of the newest query times the 1-norm of the value, summed over the heads of a layer.

    All heads of a layer keep the same rows. Tested against the released kernel (triton_kernel/attention.py). There one
    row is evicted at every step, and the newest row competes; here many rows are evicted at the budget, and the newest
    stays. We leave out the code's pruning of long prompts by SnapKV.
    """

    signals = (RecentQueries(1),)

    newest_kept = 1

    def scores(self, view: CacheView) -> Tensor:
        values = torch.stack(list(view.values)).float().abs().sum(dim=-1)  # [layers, kv_heads, length]
        attention = newest_attention(view, RecentQueries(1), 1)[:, :, 0]
        grouped = attention.unflatten(1, (values.shape[1], -1)).sum(dim=2)
        return (grouped * values).sum(dim=1, keepdim=True).expand_as(values)
