"""Benchmarks: from a toy task, a local file or a hub dataset to checked problems with prompts and golds.

Every mistake in the data is one sentence that names the place, before a model loads.
"""

import math
from dataclasses import dataclass

from analysis.records import Problem, UserError, content_hash
from harness.benchmarks.config import _FIELDS, _WRONG, BenchmarkConfig
from harness.benchmarks.prompts import LETTERS, _ask, _read_prompt, option_orders
from harness.benchmarks.sources import _read_source, _Row
from harness.grading.answers import AnswerKind, canonical_gold


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """A loaded, checked benchmark.

    Attributes:
        problems: what to run: the first `limit` of the set, in the data's order.
        content_hash: of (id, prompt, gold) of the whole set before `limit`, in the data's order.
        count: problems in the whole set.
        expected_count: what the configuration says `count` should be.
        origin: where the problems came from, for provenance; an unpinned hub dataset is called so.
    """

    name: str
    title: str
    answer_kind: AnswerKind
    problems: tuple[Problem, ...]
    content_hash: str
    count: int
    expected_count: int | None
    origin: str


def load_problems(config: BenchmarkConfig) -> Benchmark:
    """Load a benchmark from its path, else from its source, and check every problem of it.

    Raises:
        UserError: the data cannot be had, or one of its problems is incomplete, duplicate or of another kind.
    """
    rows, origin, config = _read_source(config)
    problems = _problems(_kept(rows, config, origin), config, origin)
    found = content_hash([[problem.id, problem.prompt, problem.gold] for problem in problems])
    if config.source == "hub" and config.path is None and config.expected_count not in (None, len(problems)):
        raise UserError(
            f"{origin} holds {len(problems)} problems, not benchmark.expected_count={config.expected_count}; "
            f"set benchmark.revision to the right commit, or benchmark.expected_count={len(problems)}."
        )
    if config.source == "hub" and config.path is None and config.expected_hash not in (None, found):
        raise UserError(
            f"{origin} has the content hash {found}, not benchmark.expected_hash={config.expected_hash}; "
            "set benchmark.revision to the right commit, or benchmark.expected_hash=null to take it as it is."
        )
    return Benchmark(
        name=config.name,
        title=config.title,
        answer_kind=config.answer_kind,
        problems=tuple(problems[: config.limit]),
        content_hash=found,
        count=len(problems),
        expected_count=config.expected_count,
        origin=origin,
    )


def _kept(rows: list[_Row], config: BenchmarkConfig, origin: str) -> list[_Row]:
    for column, text in (config.keep_if or {}).items():
        if config.path is not None and not any(column in row.values for row in rows):
            continue  # A local file holds the problems themselves, and no more.
        rows = [row for row in rows if text in str(row.values.get(column))]
        if not rows:
            raise UserError(f"{origin} has no row with {text!r} in column {column!r}; correct benchmark.keep_if.")
    return rows


def _problems(rows: list[_Row], config: BenchmarkConfig, origin: str) -> list[Problem]:
    if not rows:
        raise UserError(f"{origin} holds no problems; give data with at least one.")
    id_column, problem_column, answer_column = (
        _resolve(name, config.columns.get(name, name), rows, origin) for name in _FIELDS
    )
    wrong_columns = [_resolve(name, config.columns[name], rows, origin) for name in _WRONG if config.has_options]
    template = _read_prompt(config.prompt)
    texts, seen = [], dict[str, str]()
    for row in rows:
        text = _problem_text(row, problem_column)
        problem_id = content_hash(text) if id_column is None else _problem_id(row, id_column)
        if problem_id in seen:
            raise UserError(_duplicate_message(row.where, seen[problem_id], id_column and problem_id))
        seen[problem_id] = row.where
        texts.append(text)
    orders = option_orders(list(seen), config.option_seed) if config.has_options else {}
    problems = []
    for row, text, problem_id in zip(rows, texts, seen, strict=True):
        if config.has_options:
            choices = [_option_text(row, column) for column in (answer_column, *wrong_columns)]
            order = orders[problem_id]
            options = {letter: choices[choice] for letter, choice in zip(LETTERS, order, strict=True)}
            gold = LETTERS[order.index(0)]
        else:
            options, gold = {}, _gold(row, answer_column, config.answer_kind)
        problems.append(Problem(id=problem_id, prompt=_ask(template, config.prompt, text, options), gold=gold))
    return problems


def _option_text(row: _Row, column: str | None) -> str:
    value = row.values.get(str(column))
    if _is_missing(value):
        raise UserError(f"{row.where} has no option in column {column!r}; fill it in or delete the row.")
    return _whole_text(str(value), row)


def _resolve(name: str, column: str | None, rows: list[_Row], origin: str) -> str | None:
    """The column that holds a field; None for an id that no row has."""
    if column is None:
        return None
    for candidate in (column, name):
        if any(candidate in row.values for row in rows):
            return candidate
    if name == "id":
        return None
    found = ", ".join(dict.fromkeys(repr(key) for row in rows for key in row.values))
    raise UserError(
        f"{origin} has no column {column!r}, its columns are {found or '(none)'}; "
        f"name the right one with benchmark.columns.{name}=NAME."
    )


def _problem_text(row: _Row, column: str | None) -> str:
    value = row.values.get(str(column))
    if _is_missing(value):
        raise UserError(f"{row.where} has no problem text in column {column!r}; fill it in or delete the row.")
    if not isinstance(value, str):
        raise UserError(f"{row.where} has the problem {value!r:.60}, which is not text; correct it.")
    return _whole_text(value, row)


def _problem_id(row: _Row, column: str) -> str:
    value = row.values.get(column)
    if _is_missing(value):
        raise UserError(f"{row.where} has no id in column {column!r}; give every problem one, or none any.")
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise UserError(f"{row.where} has the id {value!r:.60}, which is no text or number; correct it.")
    # A column of integers with a gap comes as floats from some writers.
    return str(int(value)) if isinstance(value, float) and value.is_integer() else _whole_text(str(value), row)


def _whole_text(text: str, row: _Row) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UserError(f"{row.where} has half a character (a lone surrogate), which is no text; correct it.") from None
    return text.strip()


def _gold(row: _Row, column: str | None, kind: AnswerKind) -> str:
    value = row.values.get(str(column))
    if _is_missing(value):
        raise UserError(f"{row.where} has no answer in column {column!r}; fill it in or delete the row.")
    gold = canonical_gold(str(value), kind)
    if gold is None:
        raise UserError(f"{row.where} has the answer {str(value)!r:.60}, which is no {kind}; correct it.")
    return gold


def _is_missing(value: object) -> bool:
    return (
        value is None
        or (isinstance(value, str) and not value.strip())
        or (isinstance(value, float) and math.isnan(value))
    )


def _duplicate_message(where: str, earlier: str, problem_id: str | None) -> str:
    if problem_id is None:
        return f"{where} has the problem text of {earlier} again; delete one, or give all problems ids."
    return f"{where} has the id {problem_id!r} of {earlier} again; ids must differ, so change one."
