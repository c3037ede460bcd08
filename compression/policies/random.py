"""Chance, which any scoring must beat: once for all heads, or for each alone (Random Attention, arXiv 2609.03430)."""

from dataclasses import dataclass

from kvsweep.compression.policy import BudgetPolicy, CacheView, HeadPolicy
from kvsweep.kernels.lazy_torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Random(BudgetPolicy):
    """DynTS's rule with chance in place of the predicted importance, drawn anew at each eviction (paper, ablations).

    In the authors' code chance may evict any token outside the window, question and answer too (`question="free"`).
    With the question pinned or on top the answer stays as well, as DynTS has it.
    """

    def scores(self, view: CacheView) -> Tensor:
        numbers = view.uniform()
        return numbers if self.question_rule == "free" else numbers.masked_fill(view.answer, float("inf"))


@dataclass(frozen=True, kw_only=True)
class RandomHead(HeadPolicy):
    """Uniform numbers, drawn anew at every eviction for each layer and key head (released code, mode random_pp).

    The question and the newest rows stay. How sure: read in the released code; the numbers come from a counter here.
    """

    QUESTION = "pinned"

    def scores(self, view: CacheView) -> Tensor:
        return view.uniform()
