"""DynTS (arXiv 2601.18383): keep the thinking tokens that a small head predicts the answer will attend to."""

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
    """Question and answer tokens first, then thinking tokens by predicted importance (paper section 4, released code).

    `predictor` is the directory of an importance predictor for this model, which scores no question token. A question
    that is neither pinned nor on top scores 0.
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
        """[length] predicted importance, NaN at prompt tokens."""
        return view.signals[self.signals[0]]
