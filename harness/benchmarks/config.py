"""The configuration of a benchmark."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from kvsweep.harness.grading.answers import AnswerFrom, AnswerKind
from kvsweep.messages.errors import UserError

OptionOrder = Literal["balanced", "simple_evals", "nemo_skills"]
FieldName = Literal["id", "problem", "answer", "group", "wrong_1", "wrong_2", "wrong_3"]
FIELDS: tuple[FieldName, ...] = ("id", "problem", "answer")

# Options in columns: `answer` is the text of the right option, and these columns hold the wrong ones.
WRONG_OPTIONS: tuple[FieldName, ...] = ("wrong_1", "wrong_2", "wrong_3")
# Settings that belong to one dataset only.
_OfDataset = Literal["hub_id", "revision", "split", "hub_config", "columns", "answer_after", "keep_if"]
Text = Annotated[str, Field(min_length=1)]
StrictCount = Annotated[int, Field(ge=1, strict=True)]


@dataclass(frozen=True, kw_only=True)
class BenchmarkConfig:
    """A benchmark. conf/benchmark/base/problems.yaml describes the fields; a contradiction raises UserError."""

    name: str
    title: str
    answer_kind: AnswerKind = "integer"
    source: Literal["toy", "file", "hub"]
    task: Text | None = None
    count: StrictCount = 120
    hub_id: Text | None = None
    revision: Text | None = None
    split: Text | None = None
    path: Text | None = None
    columns: Mapping[FieldName, Text | None] = field(default_factory=lambda: {name: name for name in FIELDS})
    answer_after: Text | None = None
    keep_if: Mapping[str, str] | None = None
    leave_out_faulty: bool = False
    hub_config: Text | None = None
    fallback: Mapping[_OfDataset, Any] | None = None
    licence: Text | None = None
    option_seed: int = 0
    option_order: OptionOrder = "balanced"
    prompt: Text = "bare"
    answer_from: AnswerFrom = "after_think"
    expected_hash: Text | None = None
    expected_count: StrictCount | None = None
    limit: StrictCount | None = None

    def __post_init__(self) -> None:
        needed = {"toy": "task", "file": "path", "hub": "hub_id"}[self.source]
        # A path comes before any source.
        if self.path is None and getattr(self, needed) is None:
            raise UserError(f"benchmark.source={self.source} needs benchmark.{needed}; set it, or set benchmark.path.")
        if 0 < len(self.columns.keys() & set(WRONG_OPTIONS)) < len(WRONG_OPTIONS):
            raise UserError(
                f"benchmark.columns={self.columns!r} must name all of {', '.join(WRONG_OPTIONS)} or none; add them."
            )
        if self.has_options and self.answer_kind != "letter":
            raise UserError(
                f"benchmark.answer_kind={self.answer_kind} must be letter where columns name options; set it."
            )
        if self.has_options and self.answer_after is not None:
            raise UserError(
                f"benchmark.answer_after={self.answer_after!r} cannot be set where columns name options, which are "
                "compared by their letters; set it to null."
            )

    @property
    def has_options(self) -> bool:
        return set(WRONG_OPTIONS) <= self.columns.keys()
