"""H2O (arXiv 2306.14048): keep the tokens that received most attention so far."""

from dataclasses import dataclass

from kvsweep.compression.policies.observation import newest_attention
from kvsweep.compression.policy import AttentionMass, BudgetPolicy, CacheView, Fraction, HeadPolicy, RecentQueries
from kvsweep.kernels.implementation import Tensor


@dataclass(frozen=True, kw_only=True)
class H2O(HeadPolicy):
    """Heavy hitters by attention accumulated over all queries so far, the prompt's among them (section 4).

    Query heads of a group are summed. The share `recent` of the rows, rounded, goes to the newest tokens.
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
    """H2O as the DynTS code has it: the attention of the newest query alone, averaged over layers and heads."""

    signals = (RecentQueries(1),)

    def scores(self, view: CacheView) -> Tensor:
        return newest_attention(view, RecentQueries(1), 1)[:, :, 0].mean(dim=(0, 1))
