"""DynTS (arXiv 2601.18383): keep the thinking tokens that a small head predicts the answer will look at."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from kvsweep.base.files import digests
from kvsweep.compression.policy import BudgetPolicy, CacheView, Question
from kvsweep.compression.predictor_card import WEIGHTS_FILE, read_card
from kvsweep.compression.signals import PredictedImportance, Signal

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class DynTS(BudgetPolicy):
    """Question and answer tokens first, then thinking tokens by predicted importance (paper section 4, released code).

    The predictor scores no question token. A question that is neither pinned nor on top scores 0, as in the authors'
    ablation without question (dynts-noque).

    Attributes:
        predictor: directory of a saved importance predictor for this model.

    Raises:
        ValueError: no predictor given, or none saved there.
    """

    QUESTION: ClassVar[Question] = "pinned"

    predictor: str | None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.predictor is None:
            raise ValueError(
                "policy.predictor is not set and this model comes with none: give the directory of a trained "
                "importance predictor, or choose a policy that needs none."
            )
        if not (Path(self.predictor) / WEIGHTS_FILE).is_file():
            raise ValueError(
                f"policy.predictor={self.predictor} holds no {WEIGHTS_FILE}: give a predictor's directory."
            )
        read_card(Path(self.predictor))

    @property
    def signals(self) -> tuple[Signal, ...]:
        """The predicted importance of every generated token."""
        return (self._importance,)

    def scores(self, view: CacheView) -> Tensor:
        """The answer pinned, predicted importance for the thinking, 0 for the question."""
        return self.importance(view).masked_fill(view.question, 0.0).masked_fill(view.answer, float("inf"))

    def importance(self, view: CacheView) -> Tensor:
        """[length] predicted importance, NaN at prompt tokens."""
        return view.signals[self._importance]

    def files(self) -> dict[Path, str]:
        """The predictor's weights."""
        path = Path(str(self.predictor)) / WEIGHTS_FILE
        return {path: digests([path])[0]}

    def identity(self) -> dict[str, Any]:
        """The fields, with the predictor's weights hashed in place of its path."""
        return {**super().identity(), "predictor": next(iter(DynTS.files(self).values()))}

    @property
    def _importance(self) -> PredictedImportance:
        assert self.predictor is not None
        return PredictedImportance(self.predictor)
