"""TOVA (arXiv 2401.06104): keep the tokens that the newest query attends to."""

from dataclasses import dataclass

from kvsweep.compression.policies.observation import newest_attention
from kvsweep.compression.policy import CacheView, HeadPolicy, RecentQueries
from kvsweep.kernels.implementation import Tensor


@dataclass(frozen=True, kw_only=True)
class TOVA(HeadPolicy):
    """Attention of only the last query, averaged over all heads of a layer; each layer keeps its own rows.

    Section 3.2 and the released code (src/tova_cache.py). That code evicts one row at every step; here many rows are
    evicted at the budget. `keep_last`: the last row always stays, as in kvpress.
    """

    keep_last: bool = False

    signals = (RecentQueries(1),)

    @property
    def newest_kept(self) -> int:
        return int(self.keep_last)

    def scores(self, view: CacheView) -> Tensor:
        attention = newest_attention(view, RecentQueries(1), 1)[:, :, 0].mean(dim=1)
        return attention[:, None].expand(-1, view.keys[0].shape[0], -1)
