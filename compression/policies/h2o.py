"""H2O (arXiv 2306.14048): keep the tokens that have received the most attention so far."""

from dataclasses import dataclass

from kvsweep.compression.policies.observation import newest_attention
from kvsweep.compression.policy import AttentionMass, BudgetPolicy, CacheView, Fraction, HeadPolicy, RecentQueries
from kvsweep.kernels.implementation import Tensor


@dataclass(frozen=True, kw_only=True)
class H2O(HeadPolicy):
    """Score: attention summed over all queries so far, including the prompt's (heavy hitters, section 4).

    The query heads of a group are summed. The newest tokens take the share `recent` of the kept rows, rounded.
    """

    recent: Fraction = 0.5

    signals = (AttentionMass(),)

    @property
    def newest_kept(self) -> int:
        return round(self.recent * self.size)

    def scores(self, view: CacheView) -> Tensor:
        return view.signals[AttentionMass()]


@dataclass(frozen=True, kw_only=True)
class H2ODynTSCode(BudgetPolicy):
    """H2O as in the DynTS code: only the newest query's attention, averaged over layers and heads."""

    signals = (RecentQueries(1),)

    def scores(self, view: CacheView) -> Tensor:
        return newest_attention(view, RecentQueries(1), 1)[:, :, 0].mean(dim=(0, 1))
