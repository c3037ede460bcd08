"""Benchmarks: from a toy task, a local file or a hub dataset to checked problems with prompts and golds.

Every mistake in the data is one sentence that names the place, before a model loads.
"""

import csv
import hashlib
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import jinja2

from harness.answers import ANSWER_KINDS, AnswerFrom, AnswerKind, canonical_gold
from harness.paths import CONF
from harness.records import Problem, UserError, content_hash

Source = Literal["toy", "file", "hub"]

PROMPTS = CONF / "prompt"
LETTERS = "ABCD"

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


@dataclass(frozen=True, kw_only=True)
class _Row:
    where: str
    values: dict[str, Any]


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


# --- Sources ------------------------------------------------------------------------------------------------


def _read_source(config: BenchmarkConfig) -> tuple[list[_Row], str, BenchmarkConfig]:
    """The rows, where they came from, and the configuration that fits them: the fallback's if that was taken."""
    if config.path is not None:
        path = Path(config.path).expanduser()
        return _read_path(path, config.split), str(path), config
    if config.source == "toy":
        return _read_toy(config), f"toy task {config.task}", config
    try:
        return _read_hub(config), _hub_origin(config), config
    except UserError as first:
        if config.fallback is None:
            raise
        # A revision or a column's name belongs to one dataset alone.
        own = {"revision": None, "hub_config": None, "keep_if": None, "columns": {}, **config.fallback}
        second = replace(config, fallback=None, **own)
        try:
            rows = _read_hub(second)
        except UserError:
            raise first from None
        print(f"benchmark {config.name}: {config.hub_id} could not be had, {second.hub_id} is used.", file=sys.stderr)
        return rows, _hub_origin(second), second


def _hub_origin(config: BenchmarkConfig) -> str:
    parts = (f"{config.hub_id}@{config.revision or 'unpinned'}", config.hub_config, config.split)
    named = zip(("", "configuration ", "split "), parts, strict=True)
    return ", ".join(f"{name}{part}" for name, part in named if part)


def _read_toy(config: BenchmarkConfig) -> list[_Row]:
    from harness.toy import tasks

    assert config.task is not None
    try:
        toys = tasks.problems(config.task, count=config.count)
    except ValueError as error:
        raise UserError(f"benchmark.task={config.task} is not possible: {error}.") from None
    return [
        _Row(
            where=f"toy task {config.task}, problem {toy.id}",
            values={"id": toy.id, "problem": toy.question, "answer": toy.answer},
        )
        for toy in toys
    ]


def _read_hub(config: BenchmarkConfig) -> list[_Row]:
    import datasets

    try:
        # The name of a configuration is left out where there is none: a dataset of files knows no None.
        name = {} if config.hub_config is None else {"name": config.hub_config}
        data = datasets.load_dataset(config.hub_id, split=config.split, revision=config.revision, **name)
    except Exception as error:  # The errors of four libraries come through here, without a common base.
        raise UserError(_hub_message(config, error)) from error
    if config.revision is None:
        print(
            f"benchmark {config.name}: {config.hub_id} is not pinned to a revision; the newest one is used.",
            file=sys.stderr,
        )
    return _dataset_rows(data, str(config.hub_id))


def _hub_message(config: BenchmarkConfig, error: Exception) -> str:
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if "GatedRepoError" in kinds or "gated" in str(error).lower():
        reason = "is gated; accept its terms on its hub page and run `hf auth login` (once `huggingface-cli login`)"
    elif "DatasetNotFoundError" in kinds:
        reason = "is not on the hub or not open to you; check the names, run `hf auth login` if it is private"
    elif "ConnectionError" in kinds:
        reason = "cannot be reached and is not in the local cache; check the network"
    else:
        reason = f"did not load ({type(error).__name__}); check benchmark.split and benchmark.revision"
    revision = config.revision or "newest"
    place = f"Dataset {config.hub_id} (revision={revision}, split={config.split})"
    return f"{place} {reason}, or give benchmark.path=FILE."


def _dataset_rows(data: Any, name: str) -> list[_Row]:
    if isinstance(data, Mapping):
        raise UserError(f"{name} has the splits {', '.join(data)}; choose one with benchmark.split=NAME.")
    return [_Row(where=f"{name} row {number}", values=dict(row)) for number, row in enumerate(data, start=1)]


def _read_path(path: Path, split: str | None) -> list[_Row]:
    readers: dict[str, Callable[[Path], list[_Row]]] = {
        ".jsonl": _read_jsonl,
        ".json": _read_json,
        ".csv": _read_csv,
        ".parquet": _read_parquet,
    }
    try:
        if not path.exists():
            raise UserError(f"benchmark.path={path} does not exist; give a file of problems.")
        if path.is_dir():
            return _read_folder(path, split)
        if path.suffix.lower() not in readers:
            raise UserError(f"benchmark.path={path} must end in one of {', '.join(readers)}; convert it.")
        return readers[path.suffix.lower()](path)
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8 text; save it in that encoding.") from None
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise UserError(f"{path} cannot be read ({reason}); check the file and its rights.") from None


def _read_jsonl(path: Path) -> list[_Row]:
    rows = []
    with path.open(encoding="utf-8-sig", newline="\n") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                rows.append(_Row(where=f"{path}:{number}", values=_parse_object(line, f"{path}:{number}")))
    return rows


def _parse_object(line: str, where: str) -> dict[str, Any]:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise UserError(f"{where} is not a JSON object; correct or delete that line.")
    return values


def _read_json(path: Path) -> list[_Row]:
    try:
        items = json.loads(path.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError:
        raise
    except json.JSONDecodeError as error:
        raise UserError(f"{path}:{error.lineno} is not JSON; correct it, or call it .jsonl.") from None
    except (ValueError, RecursionError):
        raise UserError(f"{path} is not JSON that can be read; correct it.") from None
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise UserError(f"{path} must be a JSON list of objects, one a problem; correct it.")
    return [_Row(where=f"{path} item {number}", values=item) for number, item in enumerate(items, start=1)]


def _read_csv(path: Path) -> list[_Row]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        rows, first_line = [], 2
        try:
            for values in reader:
                # Otherwise a stray comma would shift the answer into another column.
                if None in values or None in values.values():
                    raise UserError(f"{path}:{first_line} has not the header's count of cells; quote its commas.")
                rows.append(_Row(where=f"{path}:{first_line}", values=values))
                first_line = reader.line_num + 1
        except csv.Error:
            raise UserError(f"{path}:{first_line} is not a CSV row; correct its quotes.") from None
    return rows


def _read_parquet(path: Path) -> list[_Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
    except pyarrow.ArrowException:
        raise UserError(f"{path} is not a Parquet file that can be read; write it again.") from None
    return _dataset_rows(table.to_pylist(), str(path))


def _read_folder(path: Path, split: str | None) -> list[_Row]:
    """A folder that `datasets` saved, or one of data files that it can load."""
    import datasets

    saved = (path / "dataset_dict.json").exists() or (path / "state.json").exists()
    try:
        data = datasets.load_from_disk(str(path)) if saved else datasets.load_dataset(str(path))
    except Exception as error:  # As with the hub: no common base.
        raise UserError(
            f"benchmark.path={path} is no folder datasets can load ({type(error).__name__}); give a file."
        ) from error
    if not isinstance(data, Mapping):
        return _dataset_rows(data, str(path))
    name = next(iter(data)) if len(data) == 1 else split
    if name not in data:
        raise UserError(f"benchmark.split={split} is not in {path}, which has {', '.join(data)}; choose one of these.")
    return _dataset_rows(data[name], str(path))


# --- Problems -----------------------------------------------------------------------------------------------


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


def option_orders(ids: Sequence[str], seed: int) -> dict[str, tuple[int, ...]]:
    """For each question the order of its options: 0 is the right one, 1 to 3 are the others, as A, B, C, D.

    The right ones take the letters in turn, in the order of a hash of (seed, id), so that each letter is right equally
    often, to within one; the others follow in the order of a hash of (seed, id, number). So it depends on the seed and
    on which questions there are, and on neither their order nor the machine.
    """
    ranked = sorted(ids, key=lambda problem_id: _digest(seed, problem_id))
    orders = {}
    for rank, problem_id in enumerate(ranked):
        wrong = sorted((1, 2, 3), key=lambda number: _digest(seed, problem_id, number))
        place = rank % len(LETTERS)
        orders[problem_id] = (*wrong[:place], 0, *wrong[place:])
    return orders


def _digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _option_text(row: _Row, column: str | None) -> str:
    value = row.values.get(str(column))
    if _is_missing(value):
        raise UserError(f"{row.where} has no option in column {column!r}; fill it in or delete the row.")
    return _whole_text(str(value), row)


def _read_prompt(name: str) -> jinja2.Template:
    choices = ", ".join(sorted(p.stem for p in PROMPTS.glob("*.jinja")))
    try:
        known = PROMPTS / f"{name}.jinja"
        path = known if known.is_file() else Path(name).expanduser()
        text = path.read_text(encoding="utf-8").rstrip("\n")
        return jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True).from_string(text)
    except (OSError, ValueError, RuntimeError, jinja2.TemplateError) as error:
        reason = (
            "is no template" if isinstance(error, jinja2.TemplateError) else "is neither a name nor a readable file"
        )
        raise UserError(
            f"benchmark.prompt={name!r:.80} {reason} ({type(error).__name__}); choose one of {choices}, or give a path."
        ) from None


def _ask(template: jinja2.Template, name: str, text: str, options: dict[str, str]) -> str:
    try:
        prompt = template.render(problem=text, **({"options": options} if options else {}))
    except Exception as error:  # A template is a program: it can raise anything.
        raise UserError(
            f"benchmark.prompt={name} cannot ask this benchmark ({type(error).__name__}: {str(error)[:80]!r}); choose "
            f"a prompt that uses problem{' and options' if options else ' alone'}."
        ) from None
    if text not in prompt:
        raise UserError(f"benchmark.prompt={name} leaves the problem out; put {{{{ problem }}}} into the template.")
    return prompt


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


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UserError(f"benchmark.{name}={value} must be one of {', '.join(choices)}; choose one of these.")


def _check_count(name: str, value: object, *, may_be_null: bool) -> None:
    if may_be_null and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        way_out = "correct it or set it to null" if may_be_null else "correct it"
        raise UserError(f"benchmark.{name}={value} must be a whole number of 1 or more; {way_out}.")
