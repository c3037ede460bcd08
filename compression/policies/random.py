"""Random scores, a baseline for every policy: for all heads at once, or per head (Random Attention, 2609.03430)."""

from dataclasses import dataclass

from kvsweep.compression.policy import BudgetPolicy, CacheView, HeadPolicy
from kvsweep.kernels.implementation import Tensor


@dataclass(frozen=True, kw_only=True)
class Random(BudgetPolicy):
    """DynTS with random numbers in place of predicted importance, drawn again at each eviction (paper, ablations).

    With `question="free"`, as in the authors' code, any token outside the window may go; else the answer stays too.
    """

    def scores(self, view: CacheView) -> Tensor:
        numbers = view.uniform()
        return numbers if self.question_rule == "free" else numbers.masked_fill(view.answer, float("inf"))


@dataclass(frozen=True, kw_only=True)
class RandomHead(HeadPolicy):
    """Uniform numbers, drawn again at every eviction per layer and key head (released code, mode random_pp)."""

    QUESTION = "pinned"

    def scores(self, view: CacheView) -> Tensor:
        return view.uniform()
