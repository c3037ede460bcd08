"""DynTS's ablations (arXiv 2601.18383): each changes one part of the rule. `random.Random` is another ablation."""

from dataclasses import dataclass
from typing import ClassVar

from kvsweep.compression.policies.dynts import DynTS
from kvsweep.compression.policy import CacheView, Question
from kvsweep.kernels.implementation import Tensor


@dataclass(frozen=True, kw_only=True)
class NoQuestion(DynTS):
    """Question tokens score 0, below every predicted importance, so they are evicted first."""

    QUESTION: ClassVar[Question] = "free"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.question_rule != "free":
            other = f"policy.question={self.question_rule} contradicts policy={self.name}, which evicts the question"
            raise ValueError(f"{other}: choose free, or leave the policy out.")


@dataclass(frozen=True, kw_only=True)
class NoWindow(DynTS):
    """Only the last token stays for certain; the predictor also chooses the rows of the local window."""

    newest_kept = 1


@dataclass(frozen=True, kw_only=True)
class Bottom(DynTS):
    """Keep the lowest scores. Question and answer go first, as in the authors' code; unless "free" they stay."""

    QUESTION: ClassVar[Question] = "free"

    def scores(self, view: CacheView) -> Tensor:
        end = -float("inf") if self.question_rule == "free" else float("inf")
        return self.importance(view).neg().masked_fill(view.question | view.answer, end)
