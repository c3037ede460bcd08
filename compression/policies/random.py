"""Chance, which any scoring must beat: for all heads at once, or per head (Random Attention, arXiv 2609.03430)."""

from dataclasses import dataclass

from kvsweep.compression.policy import BudgetPolicy, CacheView, HeadPolicy
from kvsweep.kernels.implementation import Tensor


@dataclass(frozen=True, kw_only=True)
class Random(BudgetPolicy):
    """DynTS's rule with chance in place of the predicted importance, drawn anew at each eviction (paper, ablations).

    With `question="free"`, as the authors have it, any token outside the window may go; else the answer stays as well.
    """

    def scores(self, view: CacheView) -> Tensor:
        numbers = view.uniform()
        return numbers if self.question_rule == "free" else numbers.masked_fill(view.answer, float("inf"))


@dataclass(frozen=True, kw_only=True)
class RandomHead(HeadPolicy):
    """Uniform numbers, drawn anew at every eviction for each layer and key head (released code, mode random_pp)."""

    QUESTION = "pinned"

    def scores(self, view: CacheView) -> Tensor:
        return view.uniform()
