"""Graded outputs of any engine, recognized by what is in the file and not by its name.

Known are rows (JSON lines, a JSON list, CSV, Parquet) of a problem's id, a draw and a grade, samples of
lm-evaluation-harness, logs of inspect_ai (`.eval` and JSON), details of lighteval, and results.jsonl of NeMo Evaluator.
"""

import codecs
import io
import json
import struct
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvsweep.errors import UserError
from kvsweep.escape import visible
from kvsweep.files import MOST_BYTES, open_file, read_file, read_lines
from kvsweep.records import MOST, Pair
from kvsweep.row_files import csv_rows, json_file, json_lines, json_row, parquet_rows

_PROBLEM = ("problem_id", "doc_id", "id", "problem_idx", "question_id", "problem")
_DRAW = ("draw", "epoch", "sample", "repeat")
_CORRECT = ("correct", "is_correct", "right", "passed", "score", "reward", "exact_match", "acc")
_GOLD = ("gold", "target", "expected_answer", "answer")
_PROMPT = ("prompt", "prompt_hash", "input")
_ENDING = ("stop_reason", "finish_reason")
_TEXT = ("text", "completion", "response", "model_response", "output_text")
_MEANINGS = {"id": _PROBLEM, "draw": _DRAW, "gold": _GOLD, "prompt": _PROMPT, "stop_reason": _ENDING, "text": _TEXT}
_VALUES: dict[Any, float] = {"c": 1.0, "i": 0.0, "true": 1.0, "false": 0.0, "1": 1.0, "0": 0.0, "1.0": 1.0, "0.0": 0.0}
_CUT_OFF = ("length", "max_tokens", "model_length", "truncated")
MOST_ROWS = 10_000_000
# The number of the method in a zip, and the length of what stands before a member's name.
_ZSTD, _ZIP_HEADER = 93, 30
Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """One answer: `correct` is 1 right, 0 wrong, None without a grade; gold and prompt are None if unknown."""

    problem: str
    draw: int
    correct: float | None
    gold: str | None
    prompt: str | None
    truncated: bool

    @property
    def key(self) -> Pair:
        return self.problem, self.draw


@dataclass(frozen=True, kw_only=True)
class Asked:
    """How files are read: `correct` names the grade, `where` has the values of the rows to take.

    `columns` has the names of columns by what they mean ("text"). Without `graded` a row may lack a grade.
    """

    correct: str | None = None
    where: Mapping[str, str] = field(default_factory=dict)
    columns: Mapping[str, str] = field(default_factory=dict)
    graded: bool = True

    def __post_init__(self) -> None:
        if unknown := sorted(self.columns.keys() - _MEANINGS.keys()):
            raise UserError(f"--column {unknown[0]}=... is unknown: choose from {', '.join(_MEANINGS)}.")

    def takes(self, row: Row) -> bool:
        return all(str(row.get(name)) == value for name, value in self.where.items())

    def renamed(self, row: Row, place: str) -> Row:
        if lacking := [column for column in self.columns.values() if column not in row]:
            raise UserError(f"{place} has no column {visible(lacking[0])}: it has {visible(', '.join(row)):.200}.")
        return {**row, **{_MEANINGS[meaning][0]: row[column] for meaning, column in self.columns.items()}}


_ALL = Asked()


def read_outputs(path: Path, asked: Asked = _ALL) -> list[Answer]:
    """Read a file of outputs.

    A file that cannot be understood, a grade that is neither right nor wrong, or none where the rows must be graded,
    and a pair of problem and draw that occurs twice raise a UserError.
    """
    found = [answer for answer, _ in read_texts(path, asked)]
    if not found:
        among = " with that --where" if asked.where else ""
        raise UserError(f"{path} has no row of a graded output{among}: check the file.")
    _check(path, found)
    return found


def read_texts(path: Path, asked: Asked = _ALL) -> Iterator[tuple[Answer, str | None]]:
    """Yield the answers of `read_outputs` one by one, each with its text; None where the row has none."""
    number = 0
    try:
        for row in _rows(path):
            for sample in _samples(row):
                number += 1
                if number > MOST_ROWS:
                    raise UserError(f"{path} has more than {MOST_ROWS:,} rows: give a part of it.")
                if asked.takes(sample):
                    place = f"{path} row {number}"
                    known = asked.renamed(sample, place)
                    yield _answer(known, place, asked), _text_of(known)
    except (zipfile.BadZipFile, UnicodeDecodeError, RecursionError) as error:
        raise UserError(
            f"{path} cannot be read ({visible(str(error)):.80}): give rows of id, draw and correct."
        ) from error
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error}): name a file of graded outputs.") from error


def _check(path: Path, answers: Sequence[Answer]) -> None:
    pairs = Counter(one.key for one in answers)
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
        yield from (row.values for row in parquet_rows(path))
    elif start[:2] == b"PK":
        yield from _zip(path)
    else:
        yield from _text(path)


def _zip(path: Path) -> Iterator[Row]:
    """The samples of a log of inspect_ai, a zip with a JSON file for each."""
    with zipfile.ZipFile(path) as log:
        parts = [part for part in log.infolist() if part.filename.startswith("samples/")]
        if not parts:
            raise UserError(f"{path} is a zip without samples/: give a log of inspect_ai, or unpack it.")
        for part in parts:
            if part.file_size > MOST_BYTES:
                raise UserError(f"{path} has a sample of more than {MOST_BYTES:,} bytes: give a smaller log.")
            yield json_row(_member(path, log, part), f"{path} {part.filename}").values


def _member(path: Path, log: zipfile.ZipFile, part: zipfile.ZipInfo) -> bytes:
    """The bytes of a zip's member; Python before 3.14 cannot read those that zstd has packed, as inspect_ai does."""
    if part.compress_type != _ZSTD:
        try:
            return log.read(part)
        except NotImplementedError as error:
            raise UserError(f"{path} is compressed in an unknown way: pack it anew.") from error
    from pyarrow import ArrowException, decompress

    with open_file(path, linked=True) as file:
        file.seek(part.header_offset)
        header = file.read(_ZIP_HEADER)
        file.seek(part.header_offset + _ZIP_HEADER + sum(struct.unpack("<HH", header[-4:])))
        packed = file.read(part.compress_size)
    try:
        data = bytes(decompress(packed, part.file_size, "zstd", asbytes=True))
    except ArrowException as error:
        raise zipfile.BadZipFile(f"{part.filename} does not unpack") from error
    if zlib.crc32(data) != part.CRC:
        raise zipfile.BadZipFile(f"{part.filename} has another checksum")
    return data


def _text(path: Path) -> Iterator[Row]:
    with open_file(path, linked=True) as file:
        first = file.readline(MOST_BYTES).removeprefix(codecs.BOM_UTF8).strip()
    if first.startswith(b"{") and _is_object(first):
        without_marks = (line.removeprefix(codecs.BOM_UTF8) for line in read_lines(path, linked=True))
        yield from (row.values for row in json_lines(without_marks, path))
    elif first.startswith((b"{", b"[")):
        yield from _whole(path)
    else:
        with open_file(path, linked=True) as file, io.TextIOWrapper(file, encoding="utf-8-sig", newline="") as lines:
            yield from (row.values for row in csv_rows(lines, path))


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def _whole(path: Path) -> Iterator[Row]:
    """A JSON list of rows, or a JSON log of inspect_ai."""
    found = json_file(read_file(path, linked=True), path)
    rows = found.get("samples") if isinstance(found, dict) else found
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise UserError(f"{path} holds no list of rows: give one JSON object a line.")
    yield from rows


def _samples(row: Row) -> Iterator[Row]:
    """A row of a known program as rows of one answer each, with text and ending where a plain row has them."""
    doc, response, metric = (row.get(name) for name in ("doc", "model_response", "metric"))
    if isinstance(doc, dict) and isinstance(response, dict) and isinstance(metric, dict):
        yield from _of_lighteval(doc, response, metric)
    elif isinstance(output := row.get("output"), dict):
        yield _of_inspect_ai(row, _first_object(output.get("choices")))
    elif isinstance(text := row.get("resps"), list) and _first(row, _TEXT) is None:  # lm-evaluation-harness's
        while isinstance(text, list) and text:
            text = text[0]
        yield {**row, "text": text}
    else:
        yield row


def _of_lighteval(doc: Row, response: Row, metric: Row) -> Iterator[Row]:
    """The samples of one problem, which have one metric together."""
    texts, golds, gold = response.get("text"), doc.get("choices"), doc.get("gold_index")
    texts = texts if isinstance(texts, list) and texts else [None]
    known = {"id": doc.get("id"), "prompt": doc.get("query"), "scores": metric if len(texts) == 1 else {}}
    if isinstance(gold, int) and isinstance(golds, list) and gold in range(len(golds)):
        known["gold"] = golds[gold]
    for draw, text in enumerate(texts):
        yield {**known, "draw": draw, "text": text}


def _of_inspect_ai(row: Row, choice: Row) -> Row:
    """A sample whose message may have its thinking as a part of its own, which stands before the answer here."""
    message = choice.get("message")
    content = message.get("content") if isinstance(message, dict) else None
    if isinstance(content, list):
        parts = [part for part in content if isinstance(part, dict)]
        thinking = [f"<think>{part['reasoning']}</think>\n" for part in parts if part.get("reasoning")]
        content = "".join([*thinking, *(str(part["text"]) for part in parts if part.get("text"))])
    ending = _first(row, _ENDING)
    return {**row, "text": content, "stop_reason": choice.get("stop_reason") if ending is None else ending}


def _first_object(value: Any) -> Row:
    return next((one for one in value if isinstance(one, dict)), {}) if isinstance(value, list) else {}


def _text_of(row: Row) -> str | None:
    """What the model wrote, thinking before the answer."""
    found = _first(row, _TEXT)
    return found if isinstance(found, str) else None


def _answer(row: Row, place: str, asked: Asked) -> Answer:
    problem, draw = _first(row, _PROBLEM), _first(row, _DRAW)
    if isinstance(problem, bool) or not isinstance(problem, str | int) or problem == "":
        raise UserError(f"{place} has no problem's id: name it {', '.join(_PROBLEM[:3])}.")
    try:
        number = int(draw if draw is not None else 0)
        if not 0 <= number <= MOST or isinstance(draw, float | bool):
            raise ValueError
    except (TypeError, ValueError):
        raise UserError(f"{place} has the draw {visible(str(draw)):.40}: write a whole number from 0.") from None
    gold, prompt = (_first(row, names) for names in (_GOLD, _PROMPT))
    return Answer(
        problem=str(problem),
        draw=number,
        correct=_grade(row, place, asked),
        gold=None if gold is None else json.dumps(gold, sort_keys=True, default=str),
        prompt=None if prompt is None else json.dumps(prompt, sort_keys=True, default=str),
        truncated=_first(row, _ENDING) in _CUT_OFF,
    )


def _first(row: Row, names: Sequence[str]) -> Any:
    return next((row[name] for name in names if row.get(name) is not None), None)


def _grade(row: Row, place: str, asked: Asked) -> float | None:
    """Right or wrong, by the column that is asked for, the one score of a sample, or a column of a usual name."""
    scores = row.get("scores")
    if isinstance(scores, dict):  # inspect_ai's
        grades = {name: one.get("value") if isinstance(one, dict) else one for name, one in scores.items()}
    elif isinstance(metrics := row.get("metrics"), list):  # lm-evaluation-harness's
        grades = {name: row.get(name) for name in metrics if isinstance(name, str)}
    else:
        grades = {name: row[name] for name in _CORRECT if name in row}
        grades = dict(list(grades.items())[:1])
    if (name := asked.correct) is not None:
        grades = {name: grades.get(name, row.get(name))} if name in grades or name in row else {}
    if len(grades) != 1:
        if asked.correct is None and not asked.graded:
            return None
        named = f"has the grades {', '.join(map(visible, grades))}" if grades else "has no grade"
        raise UserError(
            f"{place} {named}: name one with --correct NAME, as 1 right and 0 wrong, or give --grades ours."
        )
    [(name, value)] = grades.items()
    if value is None or value == "":
        return None
    if isinstance(value, bool | int | float) and value in (0, 1):
        return float(value)
    grade = _VALUES.get(str(value).strip().lower())
    if grade is None and asked.graded:
        neither = f"{place} has {name}={visible(str(value)):.40}, which is neither right nor wrong"
        raise UserError(f"{neither}: write 1 or 0, or give --grades ours.")
    return grade
