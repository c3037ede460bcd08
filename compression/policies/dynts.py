"""DynTS (arXiv 2601.18383): keep the thinking tokens that a small predictor finds important for the answer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from kvsweep.compression.policy import (
    BudgetPolicy,
    CacheView,
    PredictedImportance,
    Question,
    Signal,
)
from kvsweep.kernels.implementation import Tensor


@dataclass(frozen=True, kw_only=True)
class DynTS(BudgetPolicy):
    """Keep question and answer tokens first, then thinking tokens by predicted importance (section 4, released code).

    `predictor` is the folder of an importance predictor for this model. The predictor scores no question token: a
    question token that competes (`question=free`) scores 0.
    """

    ARTIFACTS: ClassVar[Mapping[str, str]] = {"predictor": "kvsweep predictor all"}
    QUESTION: ClassVar[Question] = "pinned"
    THINKS: ClassVar[bool] = True

    predictor: str | None

    @property
    def signals(self) -> tuple[Signal, ...]:
        return (PredictedImportance(str(self.predictor)),)

    def scores(self, view: CacheView) -> Tensor:
        return self.importance(view).masked_fill(view.question, 0.0).masked_fill(view.answer, float("inf"))

    def importance(self, view: CacheView) -> Tensor:
        """Return predicted importance, [length]; NaN at prompt tokens."""
        return view.signals[self.signals[0]]
