"""DynTS's ablations that change one part of its rule (the random one is `compression.policies.random`)."""

from dataclasses import dataclass
from typing import ClassVar

from kvsweep.compression.policies.dynts import DynTS
from kvsweep.compression.policy import CacheView, Question
from kvsweep.kernels.lazy_torch import Tensor


@dataclass(frozen=True, kw_only=True)
class NoQuestion(DynTS):
    """The question's tokens score 0, below every predicted importance, and are the first to go."""

    QUESTION: ClassVar[Question] = "free"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.question_rule != "free":
            raise ValueError(
                f"policy.question={self.question_rule} contradicts policy={self.name}, which evicts the question: "
                "choose free, or leave the policy out."
            )


@dataclass(frozen=True, kw_only=True)
class NoWindow(DynTS):
    """Only the last token is certain to stay; the window's room goes to the predictor's choice."""

    newest_kept = 1


@dataclass(frozen=True, kw_only=True)
class Bottom(DynTS):
    """The lowest scores stay.

    In the authors' code question and answer, whose scores are infinite, are thus the first to go (`question="free"`).
    With the question pinned or on top, question and answer stay and the order of the thinking tokens alone is reversed.
    """

    QUESTION: ClassVar[Question] = "free"

    def scores(self, view: CacheView) -> Tensor:
        """The predicted importance negated for the thinking; question and answer first to go, or the answer pinned."""
        end = -float("inf") if self.question_rule == "free" else float("inf")
        return self.importance(view).neg().masked_fill(view.question | view.answer, end)
