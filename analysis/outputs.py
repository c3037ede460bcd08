"""Graded outputs of any engine, recognized by what is in the file and not by its name.

Known are rows (JSON lines, a JSON list, CSV, Parquet) of a problem's id, a draw and a grade, samples of
lm-evaluation-harness, logs of inspect_ai (`.eval` and JSON), details of lighteval, results.jsonl of NeMo Evaluator, a
file a draw of sgl-eval and NeMo-Skills, and the state of llama.cpp's llama-eval.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from sys import intern
from typing import Annotated, Any, NamedTuple

import pandas as pd
from pydantic import Field, TypeAdapter, ValidationError

from kvsweep.analysis.questions import GOLD, PROMPT, Questions, described
from kvsweep.errors import UserError
from kvsweep.escape import is_text, visible
from kvsweep.records import MOST, Pair
from kvsweep.row_files import rows_of_file
from kvsweep.thinking import DEFAULT_TAGS, Thinking, ending, joined, thinking_of, without_end

_PROBLEM = ("problem_id", "doc_id", "id", "problem_idx", "question_id", "problem")
_DRAW = ("draw", "epoch", "sample", "repeat")
_CORRECT = ("correct", "is_correct", "right", "passed", "score", "reward", "exact_match", "acc", "symbolic_correct")
_ENDING = ("stop_reason", "finish_reason")
_TEXT = ("text", "completion", "response", "model_response", "output_text", "generation")
_MEANINGS = {"id": _PROBLEM, "draw": _DRAW, "gold": GOLD, "prompt": PROMPT, "prompt_hash": ("prompt_hash",)}
_MEANINGS |= {"stop_reason": _ENDING, "text": _TEXT}
_ANSWERS = {*_DRAW, *_CORRECT, *_ENDING, *_TEXT, "scores", "metrics", "error", "output", "generation", "prediction"}
_ANSWERS |= {"reasoning", "reasoning_content"}
_NUMBER = TypeAdapter(Annotated[int, Field(ge=0, le=MOST)])
_VALUES = dict.fromkeys(("1", "1.0", "true", "c", "correct", "right", "yes", "pass", "passed"), 1.0)
_VALUES |= dict.fromkeys(("0", "0.0", "false", "i", "incorrect", "wrong", "no", "fail", "failed", "n"), 0.0)
MOST_ROWS = 10_000_000
Values = Mapping[str, Any]
Outputs = Mapping[str, Sequence["Answer"]]
Source = Path | Sequence[Path]  # a setting's file or folder, or its files
_KEYS = ("samples", "task_states.cases")  # of inspect_ai and llama-eval
_ROWS = (".jsonl", ".json", ".csv", ".parquet", ".eval")
_WHOLE_FLOAT = re.compile(r"^(\d+)\.0$")  # an id in a CSV file, from a column that has a missing value
_REPEAT = re.compile(r"-rs(\d+)$")  # the draw in the name of a file of NeMo-Skills and sgl-eval


class Answer(NamedTuple):
    """One answer: `correct` is 1 right, 0 wrong, None without a grade; gold and prompt as in the file, or None.

    `column` is the one that `correct` was read from; `grade` names the score where a file names its scores. `text`
    tells equal texts of a file. `thinking` is what the text shows of it, where texts are graded. `ending` is None where
    the file does not say it, and the file's own reason where that is neither "stop" nor "length"
    (kvsweep.thinking.ending).
    """

    problem: str
    draw: int
    correct: float | None
    column: str | None
    grade: str | None
    text: int | None
    gold: Any
    prompt: Any
    thinking: Thinking | None
    ending: str | None

    @property
    def key(self) -> Pair:
        return self.problem, self.draw

    @property
    def truncated(self) -> bool:
        return self.ending == "length"

    @property
    def outcome(self) -> str | None:
        """The outcome as a sweep names it."""
        wrong = "truncated" if self.truncated else "wrong"
        return None if self.correct is None else "correct" if self.correct else wrong


@dataclass(frozen=True, kw_only=True)
class Asked:
    """How files are read: `correct` names the grade, `where` has the values of the rows to take.

    `columns` has the names of columns by what they mean ("text"), `ignored` names columns that are not read. Without
    `graded` a row may lack a grade.
    """

    correct: str | None = None
    where: Mapping[str, str] = field(default_factory=dict)
    columns: Mapping[str, str] = field(default_factory=dict)
    ignored: Sequence[str] = ()
    graded: bool = True

    def __post_init__(self) -> None:
        if unknown := sorted(self.columns.keys() - _MEANINGS.keys()):
            raise UserError(f"--column {unknown[0]}=... is unknown: choose from {', '.join(_MEANINGS)}.")

    def renamed(self, row: Values, place: str) -> Values | None:
        """The row with the columns that are known by name; None if it is not to be taken."""
        if any(str(row.get(name)) != value for name, value in self.where.items()):
            return None
        if lacking := [column for column in self.columns.values() if column not in row]:
            raise UserError(f"{place} has no column {visible(lacking[0])}: it has {visible(', '.join(row)):.200}.")
        kept = {name: value for name, value in row.items() if name not in self.ignored}
        return {**kept, **{_MEANINGS[meaning][0]: row[column] for meaning, column in self.columns.items()}}

    def question(self, row: Values) -> Values:
        """The columns of a renamed row that are no part of the answer."""
        own = {*_ANSWERS, self.correct, *self.where, *self.columns.values()}
        return {name: value for name, value in described(row).items() if name not in own}


_ALL = Asked()


def named(source: Source) -> str:
    """A setting's file or folder in a sentence."""
    return str(source) if isinstance(source, Path) else " and ".join(map(str, source))


def files_of(source: Source, asked: Asked) -> list[tuple[Path, int]]:
    """The files of a setting, each with the draw of its rows that name none: the file's own, or its place."""
    paths = [source] if isinstance(source, Path) else source
    found = [file for path in paths for file in (_outputs_in(path, asked) if path.is_dir() else [path])]
    own = [match and int(match[1]) for match in (_REPEAT.search(file.stem) for file in found)]
    whole = len({*own} - {None}) == len(found) > 1
    return [(file, own[n] or 0 if whole else n) for n, file in enumerate(found)]


def _outputs_in(folder: Path, asked: Asked) -> list[Path]:
    """The one file of outputs below a folder, or its files of one draw each."""
    files = sorted(path for path in folder.rglob("*") if path.suffix in _ROWS and path.is_file())
    repeats = [path for path in files if _REPEAT.search(path.stem)]
    found = repeats or _without_copies([path for path in files if _begins_with_outputs(path, asked)], asked)
    if len(found) != 1 and (not repeats or len({path.name for path in found}) < len(found)):
        several = f"{len(found)} files of outputs{': ' * bool(found)}{', '.join(str(one) for one in found[:4])}"
        raise UserError(f"{folder} has {several}: name a file, or a folder with the files of one setting.")
    return found


def _without_copies(files: list[Path], asked: Asked) -> list[Path]:
    """The file that says most, if all have the same problems and draws, and no two a different grade or text; else all.

    NeMo Evaluator writes each answer into three files.
    """
    if len(files) < 2:
        return files
    read = [[answer for answer, _ in read_texts(path, asked)] for path in files]
    known = [sum(value is not None for value in (one.correct, one.text, one.gold, one.prompt)) for one, *_ in read]
    said = [{one.key: (one.correct, one.text) for one in answers} for answers in read]
    most = said[known.index(max(known))]
    pairs = (pair for own in said for key in own.keys() & most for pair in zip(own[key], most[key], strict=True))
    same = all(own.keys() == most.keys() for own in said) and all(None in pair or pair[0] == pair[1] for pair in pairs)
    return [files[known.index(max(known))]] if same else files


def _begins_with_outputs(path: Path, asked: Asked) -> bool:
    with suppress(UserError):
        return next(read_texts(path, asked), None) is not None
    return False


def read_outputs(path: Source, asked: Asked = _ALL, questions: Questions | None = None) -> list[Answer]:
    """Read a setting's outputs, and what they say of their questions into `questions`.

    What cannot be understood, a missing grade where rows must be graded, and a pair of problem and draw that occurs
    twice raise a UserError.
    """
    found = [answer for answer, _ in read_texts(path, asked, questions)]
    if not found:
        raise UserError(
            f"{named(path)} has no row of a graded output{' with that --where' * bool(asked.where)}: check it."
        )
    pairs = Counter(one.key for one in found)
    (problem, draw), count = pairs.most_common(1)[0]
    problems, draws = (len({*side}) for side in zip(*pairs, strict=True))
    way = "choose rows by --where KEY=VALUE, or name the draw's column by --column draw=NAME, or add one that counts"
    if count > 1:
        way = _telling(path, asked, (problem, draw)) or way
        raise UserError(f"{named(path)} has draw {draw} of problem {visible(problem)!r:.60} {count} times: {way}.")
    if problems * draws > MOST_ROWS:
        raise UserError(f"{named(path)} numbers its rows, {problems:,} problems and {draws:,} different draws: {way}.")
    return found


def _telling(path: Source, asked: Asked, key: Pair) -> str | None:
    """How to choose among the rows of one problem and draw, by the column that tells them apart; None if none does.

    Its values are those of the whole file: a text, a number or a time has others at other problems.
    """
    rows_read = (row for file, _ in files_of(path, asked) for row in rows_of_file(file, keys=_KEYS))
    samples = [sample for row in rows_read for sample in _samples(row.values, asked)]
    known = [row for sample in samples if (row := asked.renamed(sample, "")) is not None]
    rows = [row for row in known if _answer(row, "", asked, None, key[1]).key == key]
    metrics = {name for row in rows for name in _list(row.get("metrics")) if isinstance(name, str)}
    for name in rows[0].keys() - _ANSWERS - metrics - {asked.correct}:
        values, everywhere = ({str(row.get(name)) for row in side} for side in (rows, known))
        if len(values) == len(rows) and values == everywhere:
            draw = f"--column draw={visible(name):.60}, or " if all(one.isdecimal() for one in values) else ""
            shown = " or ".join(f"--where {visible(f'{name}={value}'):.80}" for value in sorted(values))
            return f"these rows differ in {visible(name):.40}: give {draw}{shown}"
    return None


def read_texts(
    path: Source, asked: Asked = _ALL, questions: Questions | None = None
) -> Iterator[tuple[Answer, str | None]]:
    """Yield the answers of `read_outputs` one by one, each with its text; None where the row has none."""
    rows = ((row, draw) for file, draw in files_of(path, asked) for row in rows_of_file(file, keys=_KEYS))
    for number, (row, draw) in enumerate(rows, start=1):
        if number > MOST_ROWS:
            raise UserError(f"{named(path)} has more than {MOST_ROWS:,} rows: give a part of it.")
        for sample in _samples(row.values, asked):
            if (known := asked.renamed(sample, row.where)) is not None:
                text = text if isinstance(text := _first(known, _TEXT), str) else None
                answer = _answer(known, row.where, asked, text, draw)
                if questions is not None:
                    questions.add(answer.problem, asked.question(known), row.where)
                yield answer, text


def copied(answers: Iterable[tuple[str, Hashable, float | None]]) -> str | None:
    """Say in how many problems all draws are copies of one text, if they are in most; else None.

    An answer is its problem, its text and its grade. Two draws may both say "C", so a text that two problems have is no
    sign of a copy, unless no problem has two texts and the problems have different ones. Nor are texts whose grades
    differ in more than 1 of 20 problems: something else than the text decides.
    """
    texts, owners = defaultdict[str, list[tuple[Hashable, float | None]]](list), dict[Hashable, str | None]()
    for problem, text, grade in answers:
        texts[problem].append((text, grade))
        owners[text] = problem if owners.setdefault(text, problem) == problem else None
    several = [found for found in texts.values() if len(found) > 1]
    same = [found for found in several if len({text for text, _ in found}) == 1 and found[0][0] is not None]
    all_same = len(same) == len(several) and len(owners) > 1
    own = same if all_same else [found for found in same if owners[found[0][0]] is not None]
    mixed = sum(len({grade for _, grade in found}) > 1 for found in own)
    are = 2 * len(own) > len(several) and 20 * mixed <= len(own)
    return f"{len(own):,} of {len(several):,} problems" if are else None


def draws_differ(answers: Iterable[Answer]) -> bool:
    """Whether some problem has draws of different grades or texts."""
    first: dict[str, Answer] = {}
    pairs = ((one, first.setdefault(one.problem, one)) for one in answers)
    return any((one.correct, one.text) != (other.correct, other.text) for one, other in pairs)


def first_draws(answers: Sequence[Answer]) -> list[Answer]:
    """The first answer of each problem."""
    first: dict[str, int] = {}
    for one in answers:
        first[one.problem] = min(one.draw, first.get(one.problem, one.draw))
    return [one for one in answers if one.draw == first[one.problem]]


def graded(outputs: Outputs) -> pd.DataFrame:
    """The answers of all files in the columns of a run's: the file as cell_id, problem_id, draw, correct, outcome."""
    rows = [(name, a.problem, a.draw, a.correct, a.outcome) for name, found in outputs.items() for a in found]
    return pd.DataFrame(rows, columns=["cell_id", "problem_id", "draw", "correct", "outcome"])


def _samples(row: Values, asked: Asked) -> Iterator[Values]:
    """A row of a known program as rows of one answer each, with text and ending where a plain row has them."""
    doc, response, metric = (row.get(name) for name in ("doc", "model_response", "metric"))
    if isinstance(doc, dict) and isinstance(response, dict) and isinstance(metric, dict):
        yield from _of_lighteval(doc, response, metric)
    elif isinstance(output := row.get("output"), dict):
        yield _of_inspect_ai(row, next(_objects(output.get("choices")), {}))
    elif isinstance(row.get("grader_log"), dict) and "task_id" in row:
        yield _of_llama_eval(row)
    elif isinstance(row.get("symbolic_correct"), bool) and _thought(row):
        yield {**row, "text": _with_thought(row, row.get("generation"))}
    elif isinstance(row.get("resps"), list) and _first(row, _TEXT) is None:
        yield from _of_lm_eval(row, asked)
    else:
        yield row


def _of_lm_eval(row: Values, asked: Asked) -> Iterator[Values]:
    """The answers of one request, whose metrics are those of a filter's one; log-likelihoods are no texts."""
    requests = row["resps"]
    repeats = requests[0] if len(requests) == 1 and isinstance(requests[0], list) else requests
    texts = [text for text in repeats if isinstance(text, str)]
    if len(texts) < 2 or asked.graded:
        yield {**row, "text": next(iter(texts), None)}
        return
    metrics = {*_CORRECT, "metrics", *(name for name in _list(row.get("metrics")) if isinstance(name, str))}
    plain = {name: value for name, value in row.items() if name not in metrics}
    yield from ({**plain, "draw": draw, "text": text} for draw, text in enumerate(texts))


def _of_lighteval(doc: Values, response: Values, metric: Values) -> Iterator[Values]:
    """The samples of one problem, which have one metric together."""
    texts, gold = _list(response.get("text")) or [None], doc.get("gold_index")
    known = {"id": doc.get("id"), "prompt": doc.get("query"), "scores": metric if len(texts) == 1 else {}}
    if isinstance(gold, int) and gold in range(len(golds := _list(doc.get("choices")))):
        known["gold"] = golds[gold]
    yield from ({**known, "draw": draw, "text": text} for draw, text in enumerate(texts))


def _of_inspect_ai(row: Values, choice: Values) -> Values:
    """A sample whose message may have its thinking as a part of its own, which stands before the answer here."""
    content, reason = next(_objects([choice.get("message")]), {}).get("content"), choice.get("stop_reason")
    if isinstance(content, list):
        thinking = "\n".join(str(part["reasoning"]) for part in _objects(content) if part.get("reasoning"))
        content = "".join(str(part["text"]) for part in _objects(content) if part.get("text"))
        if thinking:
            content = joined(thinking, content, DEFAULT_TAGS, ended=ending(reason) != "length")
    epoch = row.get("epoch")  # the first one is 1
    numbered = {"draw": epoch - 1} if isinstance(epoch, int) and epoch > 0 else {}
    return {**row, **numbered, "text": content, "stop_reason": _first(row, _ENDING) or reason}


def _of_llama_eval(row: Values) -> Values:
    """A case; one that is pending or ended in an error has no grade. Older versions number it in its name alone."""
    numbers = re.search(r"(\d+)_(\d+)$", str(row["task_id"]))
    draw, problem = map(int, numbers.groups()) if numbers else (None, row["task_id"])
    ended = row.get("status") == "ok"
    known = {"id": row.get("problem_idx", problem), "draw": row.get("chunk_idx", draw)}
    known |= {
        "prompt": row.get("prompt"),
        "gold": row.get("expected"),
        "correct": row.get("correct") if ended else None,
    }
    return {**known, "text": _with_thought(row, row.get("response")) if ended else None}


def _thought(row: Values) -> str | None:
    thought = row.get("reasoning_content")
    return thought if isinstance(thought, str) and thought else None


def _with_thought(row: Values, text: Any) -> str | None:
    """A text and its thinking, where a server has split the two."""
    own, thought = text if isinstance(text, str) else None, _thought(row)
    return (
        own if thought is None else joined(thought, own, DEFAULT_TAGS, ended=ending(_first(row, _ENDING)) != "length")
    )


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _objects(value: Any) -> Iterator[Values]:
    return (one for one in _list(value) if isinstance(one, dict))


def _answer(row: Values, place: str, asked: Asked, text: str | None, default: int) -> Answer:
    problem, gold = _first(row, _PROBLEM), _first(row, GOLD)
    ids = {name: row[name] for name in _PROBLEM[:-1] if row.get(name) is not None}
    if len({*map(str, ids.values())}) > 1 and "id" not in asked.columns:
        raise UserError(f"{place} has the ids {visible(str(ids)):.200}: name the problem's, --column id=NAME.")
    if isinstance(problem, float) and problem.is_integer():  # a column with a missing value, as pandas writes it
        problem = int(problem)
    problem = " ".join(str(problem).split()) if type(problem) in (str, int) else ""
    problem = _WHOLE_FLOAT.sub(r"\1", problem)
    if not is_text(problem):
        raise UserError(
            f"{place} has half a character (a lone surrogate) in its id {visible(problem)!r:.60}: correct it."
        )
    if not problem:
        named = f"name it {', '.join(_PROBLEM[:3])}, or --column id=NAME"
        if written := visible(str(_first(row, _PROBLEM) or "")):
            named = f"{written:.60} is neither text nor a whole number; {named}"
        raise UserError(f"{place} has no problem's id: {named}; it has {visible(', '.join(map(str, row))):.200}.")
    gold = gold[0] if isinstance(gold, list) and len(gold) == 1 else gold
    same, thinking = None if text is None else hash(text), None
    if text is not None and not asked.graded:
        thinking = thinking_of(text) or thinking_of(without_end(text), named=False)
    reason = _first(row, _ENDING)
    told = gold, _first(row, PROMPT), thinking, ending(reason) or (reason and intern(visible(str(reason))[:40]))
    correct, column, grade = _grade(row, place, asked)
    return Answer(problem, _draw(row, place, default), correct, column, grade, same, *told)


def _draw(row: Values, place: str, default: int) -> int:
    draw = _first(row, _DRAW)
    try:
        return _NUMBER.validate_python(str(default if draw is None else draw))
    except ValidationError:
        name = next(name for name in _DRAW if row.get(name) == draw)
        mend = f"write a whole number from 0, or leave the column out by --ignore {name}"
        raise UserError(f"{place} has {name}={visible(str(draw)):.40}, which is no draw: {mend}.") from None


def _first(row: Values, names: Sequence[str]) -> Any:
    # A missing number is NaN, which is not itself, as pandas writes it.
    return next((row[name] for name in names if row.get(name) is not None and row[name] == row[name]), None)


def _grade(row: Values, place: str, asked: Asked) -> tuple[float | None, str | None, str | None]:
    """Right or wrong by the column asked for, the one score, or a usual column; its name; score and filter in words."""
    usual = {name: row[name] for name in _CORRECT if name in row}
    # Those of inspect_ai, or else the columns that lm-evaluation-harness names.
    named = {name: row.get(name) for name in _list(row.get("metrics")) if isinstance(name, str)}
    for scores in _objects([row.get("scores")]):
        named = {name: one.get("value") if isinstance(one, dict) else one for name, one in scores.items()}
    grades = named or dict([*usual.items()][:1])
    if (name := asked.correct) is not None:
        grades = {name: named.get(name, row.get(name))} if name in named or name in row else {}
    elif len({_value(one) for one in (grades | usual).values()}) > 1:
        grades |= usual
    if len(grades) != 1:
        if row.get("error") or (asked.correct is None and not asked.graded):
            return None, None, None
        found = f"has the grades {', '.join(map(visible, grades))}" if grades else "has no grade"
        raise UserError(f"{place} {found}: name one with --correct NAME (1 right, 0 wrong), or give --grades ours.")
    [(name, value)] = grades.items()
    grade = _value(value)
    if isinstance(grade, str) and asked.graded:
        neither = f"{place} has {name}={visible(grade):.40}, which is neither right nor wrong"
        raise UserError(f"{neither}: write 1 or 0, or give --grades ours.")
    parts = name if name in named else None, row.get("filter") if row.get("filter") != "none" else None
    full_name = intern(" ".join(str(part) for part in parts if part)) or None
    return None if isinstance(grade, str) else grade, intern(name), full_name


def _value(value: Any) -> float | str | None:
    """A grade as 1, 0 or None; another text where it is none of them."""
    missing = value is None or value == "" or value != value  # NaN
    return None if missing else _VALUES.get(str(value).strip().lower(), str(value))
