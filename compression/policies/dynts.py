"""DynTS (arXiv 2601.18383): keep the thinking tokens that a small head predicts the answer will look at.

Its ablations each change one part of the rule (one more is in `compression.policies.random`); the oracle knows labels.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from kvsweep.compression import artifacts
from kvsweep.compression.policy import BudgetPolicy, CacheView, PredictedImportance, Question, Signal
from kvsweep.kernels.implementation import Tensor, torch


@dataclass(frozen=True, kw_only=True)
class DynTS(BudgetPolicy):
    """Question and answer tokens first, then thinking tokens by predicted importance (paper section 4, released code).

    `predictor` is the directory of an importance predictor for this model, which scores no question token. A question
    that is neither pinned nor on top scores 0.
    """

    ARTIFACTS: ClassVar[Mapping[str, str]] = {"predictor": "kvsweep predictor train"}
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


@dataclass(frozen=True, kw_only=True)
class NoQuestion(DynTS):
    """The question's tokens score 0, below every predicted importance, and are the first to go."""

    QUESTION: ClassVar[Question] = "free"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.question_rule != "free":
            other = f"policy.question={self.question_rule} contradicts policy={self.name}, which evicts the question"
            raise ValueError(f"{other}: choose free, or leave the policy out.")


@dataclass(frozen=True, kw_only=True)
class NoWindow(DynTS):
    """Only the last token is certain to stay; the window's room goes to the predictor's choice."""

    newest_kept = 1


@dataclass(frozen=True, kw_only=True)
class Bottom(DynTS):
    """The lowest scores stay. Question and answer go first, as in the authors' code; else (not "free") they stay."""

    QUESTION: ClassVar[Question] = "free"

    def scores(self, view: CacheView) -> Tensor:
        end = -float("inf") if self.question_rule == "free" else float("inf")
        return self.importance(view).neg().masked_fill(view.question | view.answer, end)


@dataclass(frozen=True, kw_only=True)
class Oracle(DynTS):
    """DynTS with the true importance of the full cache's text for the same problem and draw in place of predictions.

    Labels are known of the full cache's text alone: tokens from the first difference on, and texts without labels
    (wrong, cut off, never closed), have the head's score. `labels` is a file of `kvsweep predictor oracle`.
    """

    ARTIFACTS: ClassVar[Mapping[str, str]] = {**DynTS.ARTIFACTS, "labels": "kvsweep predictor oracle"}

    labels: str | None

    def importance(self, view: CacheView) -> Tensor:
        """[length] true importance where the text is the labelled one and labelled, predicted importance elsewhere."""
        predicted, tensors = super().importance(view), artifacts.load_once(str(self.labels))
        pair = f"{view.problem_id}/{view.draw}"
        if f"ids/{pair}" not in tensors:
            return predicted
        ids, label = (tensors[f"{part}/{pair}"].to(predicted.device) for part in ("ids", "labels"))
        common = min(len(ids), len(view.text_ids))
        same = int((ids[:common] == view.text_ids[:common]).long().cumprod(dim=0).sum())
        true = label[view.positions.clamp(max=len(label) - 1)].to(predicted.dtype)
        known = (view.positions < same) & ~true.isnan()
        return torch.where(known, true, predicted)


def save_labels(place: str, traces: Mapping[str, tuple[Tensor, Tensor]], card: Mapping[str, Any]) -> None:
    """Write `{problem_id/draw: (token ids [length], labels [length], NaN where there is none)}`."""
    tensors = {f"ids/{pair}": ids for pair, (ids, _) in traces.items()}
    tensors |= {f"labels/{pair}": labels.float() for pair, (_, labels) in traces.items()}
    artifacts.save("labels", place, tensors, card)
