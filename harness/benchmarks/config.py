"""The configuration of a benchmark."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from analysis.records import UserError
from harness.grading.answers import ANSWER_KINDS, AnswerFrom, AnswerKind

Source = Literal["toy", "file", "hub"]
_FIELDS = ("id", "problem", "answer")

# Of a multiple-choice question whose options are columns, `answer` is the right one's text and these are the others'.
_WRONG = ("wrong_1", "wrong_2", "wrong_3")


@dataclass(frozen=True, kw_only=True)
class BenchmarkConfig:
    """Where a benchmark's problems come from and how they are asked; the fields of `conf/benchmark/*.yaml`.

    Args:
        name: short name, a results column.
        title: name on pictures, such as AIME'24.
        answer_kind: how answers are read and compared.
        source: "toy" (uses `task`, `count`), "file" (`path`) or "hub" (`hub_id`, `revision`, `split`).
        task: the toy task.
        count: how many toy problems there are.
        hub_id: dataset on the Hugging Face hub, owner/name.
        revision: commit of that dataset, 40 hex digits; None takes whatever is newest, and says so.
        split: split of the hub dataset, or of a local folder of several splits.
        path: local file (JSONL, JSON, CSV, Parquet) or `datasets` folder; given, it replaces the source.
        columns: the data's names for id, problem and answer. Where the data has no such column, one called
            id, problem or answer is taken. If no row has an id, or the id column is None, a problem's id is
            the hash of its text, so that it does not depend on the order of the rows. With wrong_1 to wrong_3 the
            data holds a multiple-choice question's options, the right one as the answer.
        keep_if: column and text: of the data only rows whose column holds that text, such as a year in a URL.
        hub_config: the hub dataset's configuration, where it has several.
        fallback: a second source, tried when the first cannot be had: hub_id, and what of revision, split,
            hub_config, columns and keep_if differs.
        licence: what the data's owner allows, for the reader.
        option_seed: with the problem's id it fixes the order of the options, and so is part of the prompts, of
            `content_hash` and of the cell's identity.
        prompt: a template of conf/prompt, or a path to one: `bare` asks the problem text alone (DynTS), `boxed` adds
            DeepSeek's instruction to box the answer; for options `simple_evals`, `boxed_letter` or `dynts`.
        answer_from: "after_think" reads answers after the thinking, "whole_text" is for models that do not think.
        expected_hash: `content_hash` that the hub dataset must have; None checks nothing.
        expected_count: problems that the hub dataset must have; for a path it is only recorded.
        limit: use the first so many problems; None for all.

    Raises:
        UserError: a field has a value that is not allowed.
    """

    name: str
    title: str
    answer_kind: AnswerKind = "integer"
    source: Source
    task: str | None = None
    count: int = 120
    hub_id: str | None = None
    revision: str | None = None
    split: str | None = None
    path: str | None = None
    columns: Mapping[str, str | None] = field(default_factory=lambda: {name: name for name in _FIELDS})
    keep_if: Mapping[str, str] | None = None
    hub_config: str | None = None
    fallback: Mapping[str, Any] | None = None
    licence: str | None = None
    option_seed: int = 0
    prompt: str = "bare"
    answer_from: AnswerFrom = "after_think"
    expected_hash: str | None = None
    expected_count: int | None = None
    limit: int | None = None

    def __post_init__(self) -> None:
        _check_choice("answer_kind", self.answer_kind, ANSWER_KINDS)
        _check_choice("source", self.source, get_args(Source))
        _check_choice("answer_from", self.answer_from, get_args(AnswerFrom))
        for name in ("count", "expected_count", "limit"):
            _check_count(name, getattr(self, name), may_be_null=name != "count")
        if self.prompt is None:
            raise UserError("benchmark.prompt=null names no prompt; choose bare, or another template of conf/prompt.")
        if isinstance(self.option_seed, bool) or not isinstance(self.option_seed, int):
            raise UserError(f"benchmark.option_seed={self.option_seed!r} must be a whole number; correct it.")
        for name in ("task", "hub_id", "revision", "split", "path", "hub_config", "licence", "prompt", "expected_hash"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, str) and value.strip()):
                raise UserError(f"benchmark.{name}={value!r} must be text; quote it or leave it null.")
        needed = {"toy": "task", "file": "path", "hub": "hub_id"}[self.source]
        if self.path is None and getattr(self, needed) is None:
            raise UserError(f"benchmark.source={self.source} needs benchmark.{needed}; set it, or set benchmark.path.")
        if not isinstance(self.columns, Mapping) or not all(
            key in (*_FIELDS, *_WRONG) and (isinstance(value, str) or (value is None and key == "id"))
            for key, value in self.columns.items()
        ):
            raise UserError(
                f"benchmark.columns={self.columns!r} must map {', '.join((*_FIELDS, *_WRONG))} to column names, "
                "of which only id may be null; correct the mapping."
            )
        if 0 < len(self.columns.keys() & set(_WRONG)) < len(_WRONG):
            raise UserError(
                f"benchmark.columns={self.columns!r} must name all of {', '.join(_WRONG)} or none; add them."
            )
        if self.has_options and self.answer_kind != "letter":
            raise UserError(
                f"benchmark.answer_kind={self.answer_kind} must be letter where columns name options; set it."
            )
        known = {"hub_id", "revision", "split", "hub_config", "columns", "keep_if"}
        if self.fallback is not None and not (
            isinstance(self.fallback, Mapping) and "hub_id" in self.fallback and set(self.fallback) <= known
        ):
            raise UserError(
                f"benchmark.fallback={self.fallback!r} must hold a hub_id, and may hold "
                f"{', '.join(sorted(known - {'hub_id'}))}; correct it or set it to null."
            )
        pairs = self.keep_if.items() if isinstance(self.keep_if, Mapping) else [(self.keep_if, "")]
        if self.keep_if is not None and not all(isinstance(k, str) and isinstance(v, str) for k, v in pairs):
            raise UserError(
                f"benchmark.keep_if={self.keep_if!r} must map a column to text; correct it or set it to null."
            )

    @property
    def has_options(self) -> bool:
        """Whether the data holds the options of a multiple-choice question in columns of their own."""
        return set(_WRONG) <= self.columns.keys()


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UserError(f"benchmark.{name}={value} must be one of {', '.join(choices)}; choose one of these.")


def _check_count(name: str, value: object, *, may_be_null: bool) -> None:
    if may_be_null and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        way_out = "correct it or set it to null" if may_be_null else "correct it"
        raise UserError(f"benchmark.{name}={value} must be a whole number of 1 or more; {way_out}.")
