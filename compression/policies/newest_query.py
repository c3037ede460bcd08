"""TOVA (arXiv 2401.06104) and LongFlow (arXiv 2603.11504): the rows that the newest query attends to or takes from."""

from dataclasses import dataclass

from kvsweep.compression.policies.observation import newest_attention
from kvsweep.compression.policy import CacheView, HeadPolicy
from kvsweep.compression.signals import RecentQueries
from kvsweep.kernels.lazy_torch import Tensor, torch


@dataclass(frozen=True, kw_only=True)
class TOVA(HeadPolicy):
    """Attention of the last query alone, averaged over all heads of a layer; each layer keeps rows of its own.

    Section 3.2 and the released code (src/tova_cache.py). There a row goes at every step; here many at the budget. With
    `keep_last` the last row stays for certain, as in kvpress; in the released code it may go.
    """

    keep_last: bool = False

    signals = (RecentQueries(1),)

    @property
    def newest_kept(self) -> int:
        return int(self.keep_last)

    def scores(self, view: CacheView) -> Tensor:
        attention = newest_attention(view, RecentQueries(1), 1)[:, :, 0].mean(dim=1)
        return attention[:, None].expand(-1, view.keys[0].shape[0], -1)


@dataclass(frozen=True, kw_only=True)
class LongFlow(HeadPolicy):
    """Attention of the newest query times the 1-norm of the value, summed over the heads of a layer.

    All heads of a layer keep the same rows. In the released code (models/ours.py) one row goes at every step, in whose
    place the next is written; here many rows go at the budget, and the newest stays. Scores and the row that goes are
    held to the released kernel (triton_kernel/attention.py), where the newest row competes too. Its pruning of long
    prompts by SnapKV is left out.
    """

    signals = (RecentQueries(1),)

    newest_kept = 1

    def scores(self, view: CacheView) -> Tensor:
        values = torch.stack(list(view.values)).float().abs().sum(dim=-1)  # [layers, kv_heads, length]
        attention = newest_attention(view, RecentQueries(1), 1)[:, :, 0]
        grouped = attention.unflatten(1, (values.shape[1], -1)).sum(dim=2)
        return (grouped * values).sum(dim=1, keepdim=True).expand_as(values)
