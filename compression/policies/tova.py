"""TOVA (arXiv 2401.06104): the rows that the last query attends to."""

from dataclasses import dataclass

from kvsweep.compression.policies.observation import newest_attention
from kvsweep.compression.policy import CacheView, HeadPolicy
from kvsweep.compression.signals import RecentQueries
from kvsweep.kernels.lazy_torch import Tensor


@dataclass(frozen=True, kw_only=True)
class TOVA(HeadPolicy):
    """Attention of the last query alone, averaged over all heads of a layer; each layer keeps rows of its own.

    Section 3.2 and the released code (src/tova_cache.py). There a row goes at every step; here many at the budget.

    Attributes:
        keep_last: whether the last row stays for certain, as in kvpress; in the released code it may go.
    """

    keep_last: bool = False

    signals = (RecentQueries(1),)

    @property
    def newest_kept(self) -> int:
        return int(self.keep_last)

    def scores(self, view: CacheView) -> Tensor:
        attention = newest_attention(view, RecentQueries(1), 1)[:, :, 0].mean(dim=1)
        return attention[:, None].expand(-1, view.keys[0].shape[0], -1)
