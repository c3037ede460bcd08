"""Random tokens beside the window: the ablation that any scoring must beat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvsweep.compression.policy import BudgetPolicy, CacheView

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Random(BudgetPolicy):
    """DynTS's rule with chance in place of the predicted importance, drawn anew at each eviction (paper, ablations).

    In the authors' code chance may evict any token outside the window, question and answer too (`question="free"`).
    With the question pinned or on top the answer stays as well, as DynTS has it.
    """

    def scores(self, view: CacheView) -> Tensor:
        """Uniform numbers; the answer pinned where the question is."""
        numbers = view.uniform()
        return numbers if self.question_rule == "free" else numbers.masked_fill(view.answer, float("inf"))
