"""The configuration of a benchmark."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from analysis.records import UserError
from harness.grading.answers import AnswerFrom, AnswerKind

Source = Literal["toy", "file", "hub"]
FieldName = Literal["id", "problem", "answer", "wrong_1", "wrong_2", "wrong_3"]
FIELDS: tuple[FieldName, ...] = ("id", "problem", "answer")

# Where a question's options are columns, `answer` is the text of the right option, and these hold the other texts.
WRONG_OPTIONS: tuple[FieldName, ...] = ("wrong_1", "wrong_2", "wrong_3")
Text = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=1, strict=True)]


@dataclass(frozen=True, kw_only=True)
class BenchmarkConfig:
    """Where a benchmark's problems come from and how they are asked; the fields of `conf/benchmark/*.yaml`.

    Attributes:
        name: short name, a results column.
        title: name on pictures, such as AIME'24.
        answer_kind: how answers are read and compared.
        source: "toy" (uses `task`, `count`), "file" (`path`) or "hub" (`hub_id`, `revision`, `split`).
        task: the toy task.
        count: how many toy problems there are.
        hub_id: dataset on the Hugging Face hub, owner/name.
        revision: commit of that dataset, 40 hex digits; None takes the newest commit and prints a note.
        split: split of the hub dataset, or of a local folder of several splits.
        path: local file (JSONL, JSON, CSV, Parquet) or `datasets` folder, which replaces the source.
        columns: the data's names for id, problem and answer. Where the data has no column of that name, the column
            called id, problem or answer is taken. If no row has an id, or the id column is None, a problem's id is
            the hash of its text, which does not depend on the order of the rows. wrong_1 to wrong_3 name the columns
            of a multiple-choice question's wrong options; the right option is the answer.
        keep_if: column and text. Only the rows whose column holds that text are taken, such as a year in a URL.
        hub_config: the hub dataset's configuration, where it has several.
        fallback: a second hub dataset, taken when the first cannot be had: its hub_id, and those of revision, split,
            hub_config, columns and keep_if that differ.
        licence: the terms of the data's owner, for the reader.
        option_seed: fixes the order of the options together with the problem's id. Another seed gives other prompts,
            and so another `content_hash` and another cell.
        prompt: a template of conf/prompt, or a path to one. `bare` asks the problem text alone (DynTS), `boxed` adds
            DeepSeek's instruction to box the answer; `simple_evals`, `boxed_letter` and `dynts` are for options.
        answer_from: "after_think" reads answers after the thinking, "whole_text" is for models that do not think.
        expected_hash: `content_hash` that the hub dataset must have; None checks nothing.
        expected_count: problems that the hub dataset must have; for a path it is only recorded.
        limit: use the first so many problems; None for all.

    Raises:
        UserError: fields contradict each other. `settings.build` refuses a value that a field does not allow.
    """

    name: str
    title: str
    answer_kind: AnswerKind = "integer"
    source: Source
    task: Text | None = None
    count: Count = 120
    hub_id: Text | None = None
    revision: Text | None = None
    split: Text | None = None
    path: Text | None = None
    columns: Mapping[FieldName, Text | None] = field(default_factory=lambda: {name: name for name in FIELDS})
    keep_if: Mapping[str, str] | None = None
    hub_config: Text | None = None
    fallback: Mapping[Literal["hub_id", "revision", "split", "hub_config", "columns", "keep_if"], Any] | None = None
    licence: Text | None = None
    option_seed: int = 0
    prompt: Text = "bare"
    answer_from: AnswerFrom = "after_think"
    expected_hash: Text | None = None
    expected_count: Count | None = None
    limit: Count | None = None

    def __post_init__(self) -> None:
        needed = {"toy": "task", "file": "path", "hub": "hub_id"}[self.source]
        if self.path is None and getattr(self, needed) is None:
            raise UserError(f"benchmark.source={self.source} needs benchmark.{needed}; set it, or set benchmark.path.")
        if nulls := [name for name, column in self.columns.items() if column is None and name != "id"]:
            raise UserError(f"benchmark.columns.{nulls[0]} is null, which only id may be; name the column.")
        if 0 < len(self.columns.keys() & set(WRONG_OPTIONS)) < len(WRONG_OPTIONS):
            raise UserError(
                f"benchmark.columns={self.columns!r} must name all of {', '.join(WRONG_OPTIONS)} or none; add them."
            )
        if self.has_options and self.answer_kind != "letter":
            raise UserError(
                f"benchmark.answer_kind={self.answer_kind} must be letter where columns name options; set it."
            )
        if self.fallback is not None and "hub_id" not in self.fallback:
            raise UserError(f"benchmark.fallback={self.fallback!r} names no hub_id; add one or set it to null.")

    @property
    def has_options(self) -> bool:
        """True if columns of the data hold the options of a multiple-choice question."""
        return set(WRONG_OPTIONS) <= self.columns.keys()
