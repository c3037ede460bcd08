"""DynTS (arXiv 2601.18383): keep the thinking tokens that a small head predicts the answer will look at."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from kvsweep.compression.policy import BudgetPolicy, CacheView, Question
from kvsweep.compression.signals import PredictedImportance, Signal
from kvsweep.kernels.lazy_torch import Tensor


@dataclass(frozen=True, kw_only=True)
class DynTS(BudgetPolicy):
    """Question and answer tokens first, then thinking tokens by predicted importance (paper section 4, released code).

    The predictor scores no question token. A question that is neither pinned nor on top scores 0, as in the authors'
    ablation without question (dynts-noque).

    Attributes:
        predictor: directory of a saved importance predictor for this model.
    """

    ARTIFACTS: ClassVar[Mapping[str, str]] = {"predictor": "kvsweep-predictor train"}
    QUESTION: ClassVar[Question] = "pinned"
    THINKS: ClassVar[bool] = True

    predictor: str | None

    @property
    def signals(self) -> tuple[Signal, ...]:
        return (self._importance,)

    def scores(self, view: CacheView) -> Tensor:
        """The answer pinned, predicted importance for the thinking, 0 for the question."""
        return self.importance(view).masked_fill(view.question, 0.0).masked_fill(view.answer, float("inf"))

    def importance(self, view: CacheView) -> Tensor:
        """[length] predicted importance, NaN at prompt tokens."""
        return view.signals[self._importance]

    @property
    def _importance(self) -> PredictedImportance:
        return PredictedImportance(str(self.predictor))
