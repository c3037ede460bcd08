"""Graded outputs of any engine, recognized by what is in the file and not by its name.

Known are rows (JSON lines, a JSON list, CSV, Parquet) of a problem's id, a draw and a grade, samples of
lm-evaluation-harness, and logs of inspect_ai (`.eval` and JSON).
"""

import codecs
import csv
import io
import json
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvsweep.errors import UserError
from kvsweep.escape import visible
from kvsweep.files import MOST_BYTES, open_file, read_file, read_lines
from kvsweep.records import MOST

_PROBLEM = ("problem_id", "doc_id", "id", "question_id", "problem")
_DRAW = ("draw", "epoch", "sample", "repeat")
_CORRECT = ("correct", "is_correct", "right", "passed", "score", "exact_match", "acc")
_GOLD, _PROMPT, _ENDING = (
    ("gold", "target", "answer"),
    ("prompt", "prompt_hash", "input"),
    ("stop_reason", "finish_reason"),
)
_VALUES: dict[Any, float] = {"c": 1.0, "i": 0.0, "true": 1.0, "false": 0.0, "1": 1.0, "0": 0.0, "1.0": 1.0, "0.0": 0.0}
_CUT_OFF = ("length", "max_tokens", "model_length", "truncated")
MOST_ROWS = 10_000_000
Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """One graded answer: `correct` is 1 right, 0 wrong, None without a grade; gold and prompt are None if unknown."""

    problem: str
    draw: int
    correct: float | None
    gold: str | None
    prompt: str | None
    truncated: bool


def read_outputs(path: Path, *, correct: str | None = None, where: Mapping[str, str] | None = None) -> list[Answer]:
    """Read a file of graded outputs; `correct` names the grade's column, `where` the values of the rows to take.

    A file that cannot be understood, a grade that is neither right nor wrong, and a pair of problem and draw that
    occurs twice raise a UserError.
    """
    found: list[Answer] = []
    try:
        for number, row in enumerate(_rows(path), start=1):
            if number > MOST_ROWS:
                raise UserError(f"{path} has more than {MOST_ROWS:,} rows: give a part of it.")
            if all(str(row.get(name)) == value for name, value in (where or {}).items()):
                found.append(_answer(row, f"{path} row {number}", correct))
    except NotImplementedError as error:
        convert = f"inspect log convert {path.name} --to json --output-dir json"
        raise UserError(f"{path} is compressed as this Python cannot read: give what `{convert}` writes.") from error
    except (csv.Error, zipfile.BadZipFile, UnicodeDecodeError, RecursionError) as error:
        raise UserError(
            f"{path} cannot be read ({visible(str(error)):.80}): give rows of id, draw and correct."
        ) from error
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error}): name a file of graded outputs.") from error
    if not found:
        raise UserError(f"{path} has no row of a graded output{' with that --where' if where else ''}: check the file.")
    _check(path, found)
    return found


def _check(path: Path, answers: Sequence[Answer]) -> None:
    pairs = Counter((one.problem, one.draw) for one in answers)
    (problem, draw), count = pairs.most_common(1)[0]
    if count > 1:
        twice = f"{path} has draw {draw} of problem {visible(problem)!r:.60} {count} times"
        raise UserError(f"{twice}: give a column draw, or choose rows by --where KEY=VALUE.")
    names = {one.problem for one in answers}
    spelled = Counter(" ".join(name.split()) for name in names)
    name, count = spelled.most_common(1)[0]
    if count > 1:
        raise UserError(
            f"{path} has problems whose ids differ in spaces alone, {visible(name)!r:.60}: correct the ids."
        )


def _rows(path: Path) -> Iterator[Row]:
    with open_file(path, linked=True) as file:
        start = file.read(4)
    if start == b"PAR1":
        yield from _parquet(path)
    elif start[:2] == b"PK":
        yield from _zip(path)
    else:
        yield from _text(path)


def _parquet(path: Path) -> Iterator[Row]:
    from pyarrow import ArrowException, parquet

    try:
        for batch in parquet.ParquetFile(path).iter_batches():
            yield from batch.to_pylist()
    except ArrowException as error:
        raise UserError(f"{path} is no Parquet file that can be read: write it again.") from error


def _zip(path: Path) -> Iterator[Row]:
    """The samples of a log of inspect_ai, a zip with a JSON file for each."""
    with zipfile.ZipFile(path) as log:
        parts = [part for part in log.infolist() if part.filename.startswith("samples/")]
        if not parts:
            raise UserError(f"{path} is a zip without samples/: give a log of inspect_ai, or unpack it.")
        for part in parts:
            if part.file_size > MOST_BYTES:
                raise UserError(f"{path} has a sample of more than {MOST_BYTES:,} bytes: give a smaller log.")
            yield _json(log.read(part), f"{path} {part.filename}")


def _text(path: Path) -> Iterator[Row]:
    with open_file(path, linked=True) as file:
        first = file.readline(MOST_BYTES).removeprefix(codecs.BOM_UTF8).strip()
    if first.startswith(b"{") and _is_object(first):
        for number, line in enumerate(read_lines(path, linked=True), start=1):
            if line.strip():
                yield _json(line.removeprefix(codecs.BOM_UTF8), f"{path}:{number}")
    elif first.startswith((b"{", b"[")):
        yield from _whole(path)
    else:
        with open_file(path, linked=True) as file:
            yield from csv.DictReader(io.TextIOWrapper(file, encoding="utf-8-sig", newline=""), strict=True)


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def _whole(path: Path) -> Iterator[Row]:
    """A JSON list of rows, or a JSON log of inspect_ai."""
    try:
        found = json.loads(read_file(path, linked=True))
    except ValueError as error:
        raise UserError(f"{path} is no JSON that can be read: write a row a line.") from error
    rows = found.get("samples") if isinstance(found, dict) else found
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise UserError(f"{path} holds no list of rows: give one JSON object a line.")
    yield from rows


def _json(line: bytes, place: str) -> Row:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise UserError(f"{place} is no JSON object: correct or delete it.") from error
    if not isinstance(row, dict):
        raise UserError(f"{place} is no JSON object: correct or delete it.")
    return row


def _answer(row: Row, place: str, correct: str | None) -> Answer:
    problem, draw = _first(row, _PROBLEM), _first(row, _DRAW)
    if isinstance(problem, bool) or not isinstance(problem, str | int) or problem == "":
        raise UserError(f"{place} has no problem's id: name it {', '.join(_PROBLEM[:3])}.")
    try:
        number = int(draw if draw is not None else 0)
        if not 0 <= number <= MOST or isinstance(draw, float | bool):
            raise ValueError
    except (TypeError, ValueError):
        raise UserError(f"{place} has the draw {visible(str(draw)):.40}: write a whole number from 0.") from None
    ending = _first(row, _ENDING)
    if ending is None and isinstance(output := row.get("output"), dict):
        ending = next((choice.get("stop_reason") for choice in output.get("choices") or []), None)
    gold, prompt = (_first(row, names) for names in (_GOLD, _PROMPT))
    return Answer(
        problem=str(problem),
        draw=number,
        correct=_grade(row, place, correct),
        gold=None if gold is None else json.dumps(gold, sort_keys=True, default=str),
        prompt=None if prompt is None else json.dumps(prompt, sort_keys=True, default=str),
        truncated=ending in _CUT_OFF,
    )


def _first(row: Row, names: Sequence[str]) -> Any:
    return next((row[name] for name in names if row.get(name) is not None), None)


def _grade(row: Row, place: str, asked: str | None) -> float | None:
    """Right or wrong, by the column that is asked for, the one score of a sample, or a column of a usual name."""
    scores = row.get("scores")
    if isinstance(scores, dict):  # inspect_ai's
        grades = {name: one.get("value") if isinstance(one, dict) else one for name, one in scores.items()}
    elif isinstance(metrics := row.get("metrics"), list):  # lm-evaluation-harness's
        grades = {name: row.get(name) for name in metrics}
    else:
        grades = {name: row[name] for name in _CORRECT if name in row}
        grades = dict(list(grades.items())[:1])
    if asked is not None:
        grades = {asked: grades.get(asked, row.get(asked))} if asked in grades or asked in row else {}
    if len(grades) != 1:
        named = f"has the grades {', '.join(map(visible, grades))}" if grades else "has no grade"
        raise UserError(f"{place} {named}: name one with --correct NAME, as 1 right and 0 wrong.")
    [(name, value)] = grades.items()
    if value is None or value == "":
        return None
    if isinstance(value, bool | int | float) and value in (0, 1):
        return float(value)
    if str(value).strip().lower() not in _VALUES:
        raise UserError(
            f"{place} has {name}={visible(str(value)):.40}, which is neither right nor wrong: write 1 or 0."
        )
    return _VALUES[str(value).strip().lower()]
