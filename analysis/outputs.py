"""Graded outputs of any engine, recognized by what is in the file and not by its name.

Known are rows (JSON lines, a JSON list, CSV, Parquet) of a problem's id, a draw and a grade, samples of
lm-evaluation-harness, logs of inspect_ai (`.eval` and JSON), details of lighteval, and results.jsonl of NeMo Evaluator.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from sys import intern
from typing import Any

from kvsweep.errors import UserError
from kvsweep.escape import visible
from kvsweep.records import MOST, Pair
from kvsweep.row_files import rows_of_file

_PROBLEM = ("problem_id", "doc_id", "id", "problem_idx", "question_id", "problem")
_DRAW = ("draw", "epoch", "sample", "repeat")
_CORRECT = ("correct", "is_correct", "right", "passed", "score", "reward", "exact_match", "acc")
_GOLD = ("gold", "target", "expected_answer")  # `answer` is the model's own in as many files
_PROMPT = ("prompt", "input")
_ENDING = ("stop_reason", "finish_reason")
_TEXT = ("text", "completion", "response", "model_response", "output_text")
_MEANINGS = {"id": _PROBLEM, "draw": _DRAW, "gold": _GOLD, "prompt": _PROMPT, "prompt_hash": ("prompt_hash",)}
_MEANINGS |= {"stop_reason": _ENDING, "text": _TEXT}
_VALUES = dict.fromkeys(("1", "1.0", "true", "c", "correct", "right", "yes", "pass", "passed"), 1.0)
_VALUES |= dict.fromkeys(("0", "0.0", "false", "i", "incorrect", "wrong", "no", "fail", "failed"), 0.0)
_CUT_OFF = ("length", "max_tokens", "model_length", "truncated")
MOST_ROWS = 10_000_000
Values = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """One answer: `correct` is 1 right, 0 wrong, None without a grade; gold and prompt as in the file, or None.

    `grade` names the score that `correct` is where a file names its scores; `text` tells equal texts of a file.
    """

    problem: str
    draw: int
    correct: float | None
    grade: str | None
    text: int | None
    gold: Any
    prompt: Any
    prompt_hash: Any
    truncated: bool

    @property
    def key(self) -> Pair:
        return self.problem, self.draw

    @property
    def outcome(self) -> str | None:
        """The outcome as a sweep names it."""
        if self.correct is None:
            return None
        return "correct" if self.correct else "truncated" if self.truncated else "wrong"


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

    def takes(self, row: Values) -> bool:
        return all(str(row.get(name)) == value for name, value in self.where.items())

    def renamed(self, row: Values, place: str) -> Values:
        if lacking := [column for column in self.columns.values() if column not in row]:
            raise UserError(f"{place} has no column {visible(lacking[0])}: it has {visible(', '.join(row)):.200}.")
        return {**row, **{_MEANINGS[meaning][0]: row[column] for meaning, column in self.columns.items()}}


_ALL = Asked()


def read_outputs(path: Path, asked: Asked = _ALL) -> list[Answer]:
    """Read a file of outputs.

    What cannot be understood, a missing grade where rows must be graded, and a pair of problem and draw that occurs
    twice raise a UserError.
    """
    found = [answer for answer, _ in read_texts(path, asked)]
    if not found:
        among = " with that --where" if asked.where else ""
        raise UserError(f"{path} has no row of a graded output{among}: check the file.")
    _check(path, found)
    return found


def read_texts(path: Path, asked: Asked = _ALL) -> Iterator[tuple[Answer, str | None]]:
    """Yield the answers of `read_outputs` one by one, each with its text; None where the row has none."""
    for number, row in enumerate(rows_of_file(path, key="samples"), start=1):
        if number > MOST_ROWS:
            raise UserError(f"{path} has more than {MOST_ROWS:,} rows: give a part of it.")
        for sample in filter(asked.takes, _samples(row.values)):
            known = asked.renamed(sample, row.where)
            text = text if isinstance(text := _first(known, _TEXT), str) else None
            yield _answer(known, row.where, asked, text), text


def _check(path: Path, answers: Sequence[Answer]) -> None:
    pairs = Counter(one.key for one in answers)
    (problem, draw), count = pairs.most_common(1)[0]
    if count > 1:
        twice = f"{path} has draw {draw} of problem {visible(problem)!r:.60} {count} times"
        raise UserError(f"{twice}: name the draw's column, --column draw=NAME, or choose rows by --where KEY=VALUE.")
    problems, draws = len({one.problem for one in answers}), len({one.draw for one in answers})
    if problems * draws > MOST_ROWS:
        many = f"{path} has {problems:,} problems and {draws:,} different draws"
        raise UserError(f"{many}, as if each row had its own number: name the draw's column, --column draw=NAME.")
    spelled = Counter(" ".join(name.split()) for name in {one.problem for one in answers})
    name, count = spelled.most_common(1)[0]
    if count > 1:
        raise UserError(f"{path} has problems whose ids differ in spaces alone, {visible(name)!r:.60}: correct them.")


def _samples(row: Values) -> Iterator[Values]:
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


def _of_lighteval(doc: Values, response: Values, metric: Values) -> Iterator[Values]:
    """The samples of one problem, which have one metric together."""
    texts, golds, gold = response.get("text"), doc.get("choices"), doc.get("gold_index")
    texts = texts if isinstance(texts, list) and texts else [None]
    known = {"id": doc.get("id"), "prompt": doc.get("query"), "scores": metric if len(texts) == 1 else {}}
    if isinstance(gold, int) and isinstance(golds, list) and gold in range(len(golds)):
        known["gold"] = golds[gold]
    for draw, text in enumerate(texts):
        yield {**known, "draw": draw, "text": text}


def _of_inspect_ai(row: Values, choice: Values) -> Values:
    """A sample whose message may have its thinking as a part of its own, which stands before the answer here."""
    message = choice.get("message")
    content = message.get("content") if isinstance(message, dict) else None
    if isinstance(content, list):
        parts = [part for part in content if isinstance(part, dict)]
        thinking = [f"<think>{part['reasoning']}</think>\n" for part in parts if part.get("reasoning")]
        content = "".join([*thinking, *(str(part["text"]) for part in parts if part.get("text"))])
    ending = _first(row, _ENDING)
    return {**row, "text": content, "stop_reason": choice.get("stop_reason") if ending is None else ending}


def _first_object(value: Any) -> Values:
    return next((one for one in value if isinstance(one, dict)), {}) if isinstance(value, list) else {}


def _answer(row: Values, place: str, asked: Asked, text: str | None) -> Answer:
    problem, draw = _first(row, _PROBLEM), _first(row, _DRAW)
    ids = {name: row[name] for name in _PROBLEM[:-1] if row.get(name) is not None}
    if len(ids) > 1 and len({*map(str, ids.values())}) > 1 and "id" not in asked.columns:
        raise UserError(f"{place} has the ids {visible(str(ids)):.200}: name the problem's, --column id=NAME.")
    if isinstance(problem, float) and problem.is_integer():  # a column with a missing value, as pandas writes it
        problem = int(problem)
    if isinstance(problem, bool) or not isinstance(problem, str | int) or problem == "":
        named = f"name it {', '.join(_PROBLEM[:3])}, or --column id=NAME"
        raise UserError(f"{place} has no problem's id: {named}; it has {visible(', '.join(map(str, row))):.200}.")
    try:
        number = float(draw if draw is not None else 0)
        if not 0 <= number <= MOST or not number.is_integer() or isinstance(draw, bool):
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        raise UserError(f"{place} has the draw {visible(str(draw)):.40}: write a whole number from 0.") from None
    correct, grade = _grade(row, place, asked)
    return Answer(
        problem=str(problem),
        draw=int(number),
        correct=correct,
        grade=grade,
        text=None if text is None else hash(text),
        gold=_first(row, _GOLD),
        prompt=_first(row, _PROMPT),
        prompt_hash=row.get("prompt_hash"),
        truncated=_first(row, _ENDING) in _CUT_OFF,
    )


def _first(row: Values, names: Sequence[str]) -> Any:
    # A missing number is NaN, which is not itself, as pandas writes it.
    return next((row[name] for name in names if row.get(name) is not None and row[name] == row[name]), None)


def _grade(row: Values, place: str, asked: Asked) -> tuple[float | None, str | None]:
    """Right or wrong, by the column that is asked for, the one score of a sample, or a column of a usual name.

    The score's name and its filter, as far as the row has them, are given too.
    """
    usual = {name: row[name] for name in _CORRECT if name in row}
    scores, metrics = row.get("scores"), row.get("metrics")
    if isinstance(scores, dict):  # inspect_ai's
        named = {name: one.get("value") if isinstance(one, dict) else one for name, one in scores.items()}
    else:  # lm-evaluation-harness's
        names = metrics if isinstance(metrics, list) else ()
        named = {name: row.get(name) for name in names if isinstance(name, str)}
    grades = named or dict([*usual.items()][:1])
    if (name := asked.correct) is not None:
        grades = {name: named.get(name, row.get(name))} if name in named or name in row else {}
    elif len(usual) + len(named) > 1 and len({_value(one) for one in (grades | usual).values()}) > 1:
        grades |= usual
    if len(grades) != 1:
        if row.get("error") or (asked.correct is None and not asked.graded):
            return None, None
        found = f"has the grades {', '.join(map(visible, grades))}" if grades else "has no grade"
        raise UserError(f"{place} {found}: name one with --correct NAME (1 right, 0 wrong), or give --grades ours.")
    [(name, value)] = grades.items()
    grade = _value(value)
    if isinstance(grade, str):
        if asked.graded:
            neither = f"{place} has {name}={visible(grade):.40}, which is neither right nor wrong"
            raise UserError(f"{neither}: write 1 or 0, or give --grades ours.")
        grade = None
    parts = name if name in named else None, row.get("filter") if row.get("filter") != "none" else None
    return grade, intern(" ".join(str(part) for part in parts if part)) or None


def _value(value: Any) -> float | str | None:
    """A grade as 1, 0 or None; another text where it is none of them."""
    if isinstance(value, bool | int | float):
        return float(value) if value in (0, 1) else str(value)
    return None if value is None or value == "" else _VALUES.get(str(value).strip().lower(), str(value))
