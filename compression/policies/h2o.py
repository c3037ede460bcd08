"""H2O (arXiv 2306.14048) and InertiaKV (arXiv 2609.03515): the rows that received most attention, so far or lately."""

from dataclasses import dataclass

from kvsweep.compression.policies.observation import newest_attention
from kvsweep.compression.policy import BudgetPolicy, CacheView, Fraction, HeadPolicy
from kvsweep.compression.signals import AttentionMass, RecentQueries, Signal
from kvsweep.kernels.lazy_torch import Tensor


@dataclass(frozen=True, kw_only=True)
class H2O(HeadPolicy):
    """Heavy hitters by attention accumulated over all queries so far, the prompt's among them (section 4).

    Query heads of a group are summed. The share `recent` of the rows, rounded, goes to the newest tokens, as half of
    them does with the authors.
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


@dataclass(frozen=True, kw_only=True)
class Inertia(HeadPolicy):
    """Attention accumulated over all queries so far, each step's weighing `decay` times the next one's.

    With decay 1 these are H2O's scores, with decay 0 those of the newest query (TOVA's, per head). Query heads of a
    group are summed. How sure: the recursion m = decay * m + (1 - decay) * attention is known from a summary; neither
    paper nor code was read. Its factor 1 - decay changes no order and is left out; decay is the paper's alpha, 0.8
    there. That the local window stays is our choice.
    """

    decay: Fraction = 0.8

    @property
    def signals(self) -> tuple[Signal, ...]:
        return (AttentionMass(self.decay),)

    def scores(self, view: CacheView) -> Tensor:
        return view.signals[AttentionMass(self.decay)]
