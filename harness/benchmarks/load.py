"""Turn rows of data into checked problems with prompt and gold. A fault is refused before a model loads."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from types import UnionType
from typing import Any, NamedTuple

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvsweep.harness.benchmarks.config import FIELDS, WRONG_OPTIONS, BenchmarkConfig, FieldName
from kvsweep.harness.benchmarks.golds import SOLUTION_END, read_gold, text_fault, text_warning
from kvsweep.harness.benchmarks.options import (
    LETTERS,
    check_letter,
    check_lists,
    check_options,
    option_orders,
)
from kvsweep.harness.benchmarks.sources import FileRow, read_source
from kvsweep.harness.settings import CONF
from kvsweep.messages.errors import UserError
from kvsweep.run_files.row_types import Problem, content_hash

PROMPTS = CONF / "prompt"


class Prompt(NamedTuple):
    """A template that asks a problem; `name` is `benchmark.prompt`."""

    name: str
    template: jinja2.Template

    def ask(self, problem: str, options: Mapping[str, str]) -> str:
        """Return a problem's prompt, with its options by letter; refuses a template that fails or does not fit."""
        values: dict[str, Any] = {"problem": problem}
        if options:  # else a template that names them fails, as an undefined name does
            values["options"] = options
        try:
            prompt = self.template.render(values)
        except Exception as error:  # a template is a program and can raise anything
            usable = "problem and options" if options else "problem alone"
            raise UserError(
                f"benchmark.prompt={self.name} cannot ask this benchmark ({type(error).__name__}: "
                f"{str(error)[:80]!r}); choose a prompt that uses {usable}."
            ) from None
        if problem not in prompt:
            raise UserError(f"benchmark.prompt={self.name} leaves the problem out; put {{{{ problem }}}} into it.")
        return prompt


def read_prompt(name: str) -> Prompt:
    """Read a template by its name in conf/prompt, or by its path; raises UserError if there is none."""
    try:
        path = PROMPTS / f"{name}.jinja"
        if not path.is_file():
            path = Path(name)
        if not path.is_file():  # reading a pipe or a device might never end
            raise FileNotFoundError
        text = path.read_text(encoding="utf-8-sig").rstrip("\n")
        template = ImmutableSandboxedEnvironment(
            undefined=jinja2.StrictUndefined, keep_trailing_newline=True
        ).from_string(text)
    except Exception as error:  # Python's compiler, too, can refuse what jinja2 makes of a template
        choices = ", ".join(sorted(path.stem for path in PROMPTS.glob("*.jinja")))
        raise UserError(
            f"benchmark.prompt={name!r:.80} is neither a name nor a readable file, or is no template "
            f"({type(error).__name__}); choose one of {choices}, or give a path."
        ) from None
    return Prompt(name=name, template=template)


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """A loaded, checked benchmark."""

    name: str
    problems: tuple[Problem, ...]  # the first `limit` of `count`, in the data's order
    questions: tuple[str, ...]  # the texts of these problems, without prompt and options
    content_hash: str  # over (id, prompt, gold) of every problem of the set
    count: int
    origin: str  # where the problems came from, and whether a hub dataset is not pinned


def load_problems(config: BenchmarkConfig, *, only_estimated: bool = False) -> Benchmark:
    """Load a benchmark from its path, else from its source, and check every problem.

    If a sweep is `only_estimated`, `expected_count` stand-ins take the place of a hub dataset that cannot be had.
    """
    rows, origin, config = read_source(config, only_estimated=only_estimated)
    rows = _filtered(rows, config, origin)
    problems, questions = _problems(rows, config, origin)
    problems_hash = content_hash([[problem.id, problem.prompt, problem.gold] for problem in problems])
    for name, value in {"expected_count": len(rows), "expected_hash": problems_hash}.items():
        expected = getattr(config, name)
        # A local file in place of the hub's data set may be any part of it.
        if config.source == "hub" and config.path is None and expected not in (None, value):
            raise UserError(
                f"{origin} holds {len(rows)} problems of content hash {problems_hash}, not benchmark.{name}={expected};"
                f" set benchmark.revision to the right commit, or benchmark.{name}={value} to take the data as it is."
            )
    return Benchmark(
        name=config.name,
        problems=tuple(problems[: config.limit]),
        questions=tuple(questions[: config.limit]),
        content_hash=problems_hash,
        count=len(problems),
        origin=origin,
    )


def question_hash(text: str) -> str:
    """Return a hash of a question's text: a head's card names the questions of its traces by it."""
    return content_hash(" ".join(text.split()))


def _filtered(rows: list[FileRow], config: BenchmarkConfig, origin: str) -> list[FileRow]:
    """Return the rows that `keep_if` accepts; raises UserError if there is none."""
    if not rows:
        raise UserError(f"{origin} holds no problems; give data with at least one.")
    for column, text in (config.keep_if or {}).items():
        rows = [row for row in rows if column in row.values and text in str(row.values[column])]
        if not rows:
            raise UserError(f"{origin} has no row with {text!r} in column {column!r}; correct benchmark.keep_if.")
    return rows


def _columns(rows: list[FileRow], config: BenchmarkConfig, origin: str) -> dict[FieldName, str]:
    """Return the column of each field: the configured one, or else one of the field's name.

    Raises UserError, with the columns that there are, if no column has a field; only ids need none.
    """
    existing = set[str]().union(*(row.values for row in rows))
    columns = dict[FieldName, str]()
    for name in (*FIELDS, *config.columns):
        configured = config.columns.get(name, name)
        if configured in existing:
            columns[name] = configured
        elif configured and name in existing:
            columns[name] = name
        elif name != "id":
            raise UserError(
                f"{origin} has no column {configured!r}, its columns are {', '.join(map(repr, rows[0].values))}; "
                f"name the right one with benchmark.columns.{name}=NAME."
            )
    return columns


def _problems(rows: list[FileRow], config: BenchmarkConfig, origin: str) -> tuple[list[Problem], list[str]]:
    """Return the problems and the texts of their questions.

    Raises UserError for a row that cannot be asked, or is an earlier one again.
    """
    columns = _columns(rows, config, origin)
    config = _of_local_file(rows, columns["answer"], config)
    if config.leave_out_faulty and not config.has_options:  # of options, any text is an answer
        rows = _with_comparable_answers(rows, columns["answer"], config)
    template = read_prompt(config.prompt)
    texts = [_text(row, columns["problem"], "problem text", str) for row in rows]
    _warn_of_lost_backslash(rows, columns["problem"])
    ids = _ids(rows, texts, columns.get("id"))
    # The number of the choice behind each letter, by problem; empty without options.
    orders = option_orders(ids, config.option_seed, config.option_order) if config.has_options else {}
    first_rows = dict[tuple[str, ...], str]()  # place of the first row of each problem with its options
    problems = []
    for row, text, problem_id in zip(rows, texts, ids, strict=True):
        options = dict[str, str]()
        if config.has_options:
            choices = [_text(row, columns[name], "option", _TEXT_OR_NUMBER) for name in ("answer", *WRONG_OPTIONS)]
            check_options(choices, row)
            order = orders[problem_id]
            for letter, number in zip(LETTERS, order, strict=True):
                options[letter] = choices[number]
            gold = LETTERS[order.index(0)]  # 0 is the right option
        else:
            # Beside a question for a letter, any list may be its options; beside others many are none, such as tags.
            check_lists(row, text, named=config.answer_kind != "letter")
            gold = _gold(row, columns["answer"], config)
        content = (text, *sorted(options.values()))  # sorted: another id gives the same options other letters
        if content in first_rows:
            raise UserError(
                f"{row.where} has the problem of {first_rows[content]} again, under another id; delete one."
            )
        first_rows[content] = row.where
        prompt = template.ask(text, options)
        if config.answer_kind == "letter" and not options:
            check_letter(row, prompt, gold)
        group = str(_value(row, columns["group"], "group")) if "group" in columns else None
        problems.append(Problem(id=problem_id, prompt=prompt, gold=gold, group=group))
    return problems, texts


def _of_local_file(rows: list[FileRow], column: str, config: BenchmarkConfig) -> BenchmarkConfig:
    """Drop `answer_after` if a local file replaces a hub dataset and every row has only the answer."""
    if config.source != "hub" or config.path is None:
        return config
    after = config.answer_after or ""
    has_solutions = any(after in str(row.values.get(column)) for row in rows)
    return config if has_solutions else replace(config, answer_after=None)


def _with_comparable_answers(rows: list[FileRow], column: str, config: BenchmarkConfig) -> list[FileRow]:
    """Return the rows whose answer can be compared; a note names the others' number and the first of them."""
    comparable = list[FileRow]()
    faults = list[UserError]()
    for row in rows:
        try:
            _gold(row, column, config)
        except UserError as fault:
            faults.append(fault)
        else:
            comparable.append(row)
    if faults:
        print(
            f"benchmark {config.name}: {len(faults)} of {len(rows)} problems are left out (leave_out_faulty), the "
            f"first because {faults[0]}",
            file=sys.stderr,
        )
    return comparable


def _ids(rows: list[FileRow], texts: list[str], column: str | None) -> list[str]:
    """Return each row's id, without a column of ids a hash of its text; raises UserError if two rows have the same."""
    first_rows = dict[str, str]()  # place of the row that has an id
    for row, text in zip(rows, texts, strict=True):
        problem_id = content_hash(text) if column is None else _id(row, column)
        if problem_id in first_rows:
            repeated = "problem text" if column is None else f"id {problem_id!r}"
            raise UserError(
                f"{row.where} has the {repeated} of {first_rows[problem_id]} again; ids must differ, so change or "
                "delete one."
            )
        first_rows[problem_id] = row.where
    return list(first_rows)  # in the order of the rows


def _id(row: FileRow, column: str) -> str:
    value = row.values.get(column)
    # Some writers turn an integer column with missing values into floats.
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return _text(row, column, "id", _TEXT_OR_NUMBER)


_TEXT_OR_NUMBER = str | int | float | Decimal


def _text(row: FileRow, column: str, meaning: str, kind: UnionType | type) -> str:
    """Return a row's value as text; raises UserError for a value that is missing, of another kind, or no whole text."""
    value = _value(row, column, meaning)
    if isinstance(value, bool) or not isinstance(value, kind):
        expected = "text" if kind is str else "text or a number"
        raise UserError(f"{row.where} has the {meaning} {value!r:.60}, which is not {expected}; correct it.")
    text = str(value)
    fault = text_fault(text)
    if fault:
        raise UserError(f"{row.where} {fault}; correct it.")
    return text.strip()


def _warn_of_lost_backslash(rows: list[FileRow], column: str) -> None:
    """Name the first problem that has lost a backslash. A published benchmark is asked as published."""
    for row in rows:
        fault = text_warning(row.values[column])
        if fault:
            print(f"{row.where} {fault}; the problem is asked as it is.", file=sys.stderr)
            return


def _gold(row: FileRow, column: str, config: BenchmarkConfig) -> str:
    """Return a row's gold in comparable form, what stands behind `answer_after`; refuses one that none can equal."""
    value = _value(row, column, "answer")
    place = f"{row.where} has the answer {value!r:.60}, which"
    after = config.answer_after
    if after is None:
        if SOLUTION_END in str(value):
            raise UserError(
                f"{place} is a worked solution with {SOLUTION_END} before its answer; set "
                f"""'benchmark.answer_after="{SOLUTION_END}"' to take what follows."""
            )
    else:
        _, sign, value = str(value).rpartition(after)  # behind the last one: a solution may contain more
        if not sign:
            raise UserError(f"{place} lacks benchmark.answer_after={after!r}; correct the row or the setting.")
    try:
        return read_gold(value, config.answer_kind)
    except ValueError as error:
        raise UserError(
            f"{place} {error}; write the answer alone, name what stands before it with benchmark.answer_after, or "
            "delete the row."
        ) from None


def _value(row: FileRow, column: str, meaning: str) -> object:
    """Return a row's value; raises UserError, which calls it by its `meaning`, if it is missing or blank."""
    value = row.values.get(column)
    if value is None or value != value or not str(value).strip():  # NaN differs from itself
        raise UserError(f"{row.where} has no {meaning} in column {column!r}; fill it in or delete the row.")
    return value
