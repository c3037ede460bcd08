"""DynTS's ablation without thinking tokens (arXiv 2601.18383): the question and a sliding window."""

from dataclasses import dataclass
from typing import ClassVar

from kvsweep.compression.policies.window import Window
from kvsweep.compression.policy import Question


@dataclass(frozen=True, kw_only=True)
class QuestionWindow(Window):
    """Keep the question and the newest `local_window` tokens, and no other thinking token.

    An eviction leaves question_length + local_window rows, whatever the keep_ratio: fewer than the other policies hold.
    The trigger counts the question, as in the source: Robin930/DynTS inference/window.py, sink_type=question.
    """

    QUESTION: ClassVar[Question] = "on_top"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.question_rule != "on_top":
            other = f"policy.question={self.question_rule} contradicts policy={self.name}, which keeps the question"
            raise ValueError(f"{other}: choose on_top, or leave the policy out.")

    @property
    def size(self) -> int:
        return self.local_window

    def length_after(self, length: int, question_length: int, evictions: int = 0) -> int:
        return min(length, question_length + self.local_window)

    def _on_top(self, question_length: int) -> int:
        return 0  # trigger and capacity count the question
