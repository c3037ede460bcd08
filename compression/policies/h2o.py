"""H2O (arXiv 2306.14048) and InertiaKV (arXiv 2609.03515): the rows that received most attention, so far or lately."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from kvsweep.compression.policies.observation import newest_attention
from kvsweep.compression.policy import (
    AttentionMass,
    BudgetPolicy,
    CacheView,
    Fraction,
    HeadPolicy,
    LastUse,
    Question,
    RecentQueries,
    Signal,
)
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


@dataclass(frozen=True, kw_only=True)
class Inertia(HeadPolicy):
    """Attention accumulated over all queries so far, each step's weighing `decay` times the next one's.

    With decay 1 these are H2O's scores, with decay 0 those of the newest query. Query heads of a group are summed. How
    sure: m = decay * m + (1 - decay) * attention is known from a summary; neither paper nor code was read. The factor
    1 - decay changes no order and is left out; decay is the paper's alpha. That the local window stays is our choice.
    """

    decay: Fraction = 0.8

    @property
    def signals(self) -> tuple[Signal, ...]:
        return (AttentionMass(self.decay),)

    def scores(self, view: CacheView) -> Tensor:
        return view.signals[AttentionMass(self.decay)]


@dataclass(frozen=True, kw_only=True)
class RaaS(HeadPolicy):
    """The rows that were used last stay, per layer and head (Algorithm 1): a cache of least recently used rows.

    A step uses a row if it pays the row at least `threshold`, here summed over each group of query heads. Here rows
    stay one by one, the local window stays, and many rows go at the budget; there rows stay in pages of 16, and one
    goes. How sure: the rule of the paper's first version, from summaries; in the final one a step uses half the rows.
    """

    QUESTION: ClassVar[Question] = "pinned"

    threshold: Annotated[float, Field(gt=0)] = 1e-4

    @property
    def signals(self) -> tuple[Signal, ...]:
        return (LastUse(self.threshold),)

    def scores(self, view: CacheView) -> Tensor:
        """The position of the query that used the row last."""
        last, _ = view.signals[LastUse(self.threshold)]
        return last.double()


@dataclass(frozen=True, kw_only=True)
class LazyEviction(RaaS):
    """The rows that are likely to be used again, from their last use and the longest interval between two uses.

    2 / (1 + exp(1 + age / (interval + 1e-5))), where age is the time since the last use, and 2 / (1 + exp(interval -
    1)) more if the row was ever used. The local window stays. Held to a copy of the released code (kv_utils.py,
    temp_cacheobs.py), which compares each query head's attention with the threshold; here a group's are summed.
    """

    QUESTION: ClassVar[Question] = "free"

    def scores(self, view: CacheView) -> Tensor:
        last, interval = view.signals[LastUse(self.threshold)].double()
        age = view.positions[..., -1:] - last
        again = 2 / (1 + (interval - 1).exp())
        return 2 / (1 + (1 + age / (interval + 1e-5)).exp()) + again.masked_fill(interval == 0, 0)
