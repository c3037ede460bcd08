"""Graded outputs of any engine as one table, recognized by what is in the file and not by its name.

`FORMATS` lists the programs that are known, and rows of a problem's id, a draw and a grade. A format's reader turns a
row into rows of one answer each. A column of their table has a meaning if its name and its values fit.
"""

import itertools
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from kvsweep.analysis.answers import plain
from kvsweep.messages.errors import UserError
from kvsweep.messages.escape import as_text, is_text, visible
from kvsweep.run_files.other_rows import rows_of_file
from kvsweep.run_files.thinking import DEFAULT_TAGS, ending, joined

# Columns that describe a question, whatever else a file holds.
PROMPT, GOLD = ("prompt", "input"), ("gold", "target", "expected_answer")  # `answer` is as often the model's own
ASKED = {*PROMPT, "question", "problem", "messages", "query", "instruction", "prompt_hash", "doc"}
OF_QUESTION = {*ASKED, *GOLD, "choices", "options", "expected", "ground_truth", "reference", "reference_answer"}
OF_QUESTION |= {"correct_answer"}
# The usual names of a column, by its meaning.
_NAMES: Mapping[str, Sequence[str]] = {
    "id": ("problem_id", "doc_id", "id", "problem_idx", "question_id", "problem"),
    "draw": ("draw", "epoch", "sample", "repeat"),
    "gold": GOLD,
    "prompt": PROMPT,
    "prompt_hash": ("prompt_hash",),
    "stop_reason": ("stop_reason", "finish_reason"),
    "text": ("text", "completion", "response", "model_response", "output_text", "generation"),
}
_GRADES = ("correct", "is_correct", "right", "passed", "score", "reward", "exact_match", "acc", "symbolic_correct")
_OF_ANSWER = {*_NAMES["draw"], *_GRADES, *_NAMES["stop_reason"], *_NAMES["text"], "scores", "metrics", "error"}
_OF_ANSWER |= {"output", "prediction", "reasoning", "reasoning_content"}
_GRADE_WORDS = dict.fromkeys(("1", "1.0", "true", "c", "correct", "right", "yes", "pass", "passed"), 1.0)
_GRADE_WORDS |= dict.fromkeys(("0", "0.0", "false", "i", "incorrect", "wrong", "no", "fail", "failed", "n"), 0.0)
# By these fields a program says that a request failed or that an answer does not count, unless they say nothing.
_FAILURES = {"error", "errors", "error_message", "exception", "invalidation", "invalidated"}
_NOTHING = {"", "0", "0.0", "false", "no", "none", "null", "nan", "ok"}
_FAILED_ENDS = {"error", "abort", "aborted", "cancelled", "canceled", "timeout"}
MOST_ROWS = 10_000_000
_KEYS = ("samples", "task_states.cases")  # of inspect_ai and llama-eval
_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet", ".eval")
_WHOLE_ID = re.compile(r"^(\d{1,15})\.0$")  # a whole number that became a float, because its column lacks a value
_REPEAT = re.compile(r"-rs(\d+)$")  # the draw in the name of a file of NeMo-Skills and sgl-eval
PAIR = ["problem_id", "draw"]
Row = Mapping[str, Any]
Column = Any  # a pandas Series, which mypy does not know by its values


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How files are read: `correct` names the grade, `where` has the values of the rows to take, by column.

    `columns` has the names of columns by what they mean ("text"), `ignored` names columns that are not read. Without
    `graded` the files' grades need not be clear. With `by_rows` a problem's draws are its rows in their order. `group`
    names the column that variants of one question share.
    """

    correct: str | None = None
    where: Mapping[str, Collection[str]] = field(default_factory=dict)
    columns: Mapping[str, str] = field(default_factory=dict)
    ignored: Sequence[str] = ()
    graded: bool = True
    by_rows: bool = False
    group: str | None = None

    def __post_init__(self) -> None:
        for meaning in self.columns:
            if meaning not in _NAMES:
                raise UserError(f"--column {meaning}=... is unknown: choose from {', '.join(_NAMES)}.")


class Outputs(NamedTuple):
    """A setting's outputs, a row an answer in both tables.

    `answers`: place (FILE:LINE), problem_id, draw, correct (1 right, 0 wrong, NaN: no answer is known), sign (of a
    request that failed), text, ending ("stop", "length", the file's own word, or none), gold, prompt, and group with
    `Reading.group`. `questions` has the columns that may describe the question, `columns` names all. `grade` is the
    column of the grades, `score` its name with the filter where a file names its scores.
    """

    files: Sequence[Path]
    rows: int  # before --where
    answers: pd.DataFrame
    questions: pd.DataFrame
    columns: set[str]
    grade: str | None
    score: str | None


# --- formats -------------------------------------------------------------------------------------------------


def _of_rows(row: Row, graded: bool) -> Iterator[Row]:
    yield row


def _of_lighteval(row: Row, graded: bool) -> Iterator[Row]:
    """The samples of one problem, which have one metric together."""
    doc = row["doc"]
    # A row without a text is one answer.
    texts = _list(row["model_response"].get("text")) or [None]
    shared = {"id": doc.get("id"), "prompt": doc.get("query")}
    # A metric of several texts is the mean of their grades, or the like, and grades none of them.
    if len(texts) == 1:
        shared["scores"] = row["metric"]
    golds = _list(doc.get("choices"))
    gold_index = doc.get("gold_index")
    # Some tasks have no index here, or a list of them.
    if gold_index in range(len(golds)):
        shared["gold"] = golds[gold_index]
    for draw, text in enumerate(texts):
        yield {**shared, "draw": draw, "text": text}


def _of_inspect_ai(row: Row, graded: bool) -> Iterator[Row]:
    """A sample, whose message may have its thinking as a part; its first epoch is 1."""
    choice = _object(next(iter(_list(row["output"].get("choices"))), None))
    text = _object(choice.get("message")).get("content")
    thinking = None
    if isinstance(text, list):
        parts = [*map(_object, text)]
        thinking = "\n".join(str(part["reasoning"]) for part in parts if part.get("reasoning"))
        text = "".join(str(part["text"]) for part in parts if part.get("text")) or None
    answer = {**row, "text": text, "reasoning_content": thinking}
    answer["stop_reason"] = row.get("stop_reason") or choice.get("stop_reason")
    epoch = row.get("epoch")
    if isinstance(epoch, int) and epoch > 0:
        # `epoch` is emptied, because it would be read as the draw too.
        answer |= {"epoch": None, "draw": epoch - 1}
    yield answer


def _of_llama_eval(row: Row, graded: bool) -> Iterator[Row]:
    """A case; one that is pending or has failed has no answer."""
    # The grader's log is emptied: what it says of errors is no sign that the answer failed.
    case = {**row, "draw": row.get("chunk_idx"), "gold": row.get("expected"), "grader_log": None}
    if row.get("status") != "ok":
        case["error"] = str(row.get("status"))
    yield case


def _of_lm_eval(row: Row, graded: bool) -> Iterator[Row]:
    """The answers of one request; its metrics grade the one that a filter took. Log-likelihoods are no texts."""
    repeats = row["resps"]
    # The repeats may be in a list within the list.
    if len(repeats) == 1 and isinstance(repeats[0], list):
        repeats = repeats[0]
    texts = [text for text in repeats if isinstance(text, str)]
    if len(texts) < 2 or graded:
        # The first text, or none. A field of the row with this name has precedence.
        yield {"text": [*texts, None][0], **row}
        return
    # The metrics grade one of these texts, so the others would get its grade.
    metrics = {*_GRADES, "metrics", *_metrics(row)}
    ungraded = {name: value for name, value in row.items() if name not in metrics}
    for draw, text in enumerate(texts):
        yield {**ungraded, "draw": draw, "text": text}


class Format(NamedTuple):
    """A program's rows: the fields that mark them, with their types; their reader; the columns of their question.

    The reader also gets `Reading.graded`, which only lm_eval's needs: whether the file's grades are to count.
    """

    marks: Mapping[str, type]
    read: Callable[[Row, bool], Iterator[Row]]
    question: Collection[str]  # none: all columns that are no part of the answer


FORMATS = (
    # lighteval
    Format({"doc": dict, "model_response": dict, "metric": dict}, _of_lighteval, ("prompt", "gold")),
    # inspect_ai
    Format({"output": dict}, _of_inspect_ai, ("input", "target", "choices")),
    # llama-eval
    Format({"grader_log": dict, "task_id": str}, _of_llama_eval, ("prompt", "gold")),
    # sgl-eval, NeMo-Skills
    Format({"symbolic_correct": bool}, _of_rows, ("expected_answer", "problem")),
    # lm-evaluation-harness
    Format({"resps": list}, _of_lm_eval, ("doc", "target", "prompt_hash")),
    # kvsweep
    Format({"schema": int}, _of_rows, ("gold",)),
    # Any other rows.
    Format({}, _of_rows, ()),
)


def _format_of(row: Row) -> Format:
    """The first format whose fields the row has; the last one has none."""
    for program in FORMATS:
        has_marks = all(isinstance(row.get(name), kind) for name, kind in program.marks.items())
        if has_marks:
            break
    return program


def _list(value: Any) -> list[Any]:
    if isinstance(value, list):
        return value
    return []


def _object(value: Any) -> Row:
    if isinstance(value, dict):
        return value
    return {}


def _metrics(row: Row) -> list[str]:
    """The names of the columns that lm_eval's row has for its metrics."""
    return [name for name in _list(row.get("metrics")) if isinstance(name, str)]


# --- files ---------------------------------------------------------------------------------------------------


def read_outputs(paths: Sequence[Path], reading: Reading, most: int = MOST_ROWS) -> Outputs:
    """Read a setting's files and folders, at most so many rows of each file.

    What cannot be understood, or stands twice, raises a UserError.
    """
    files = list[Path]()
    for path in paths:
        files += _outputs_in(path, reading) if path.is_dir() else [path]
    # The draw of the rows that name none is that of the file's name, or the file's place.
    draws = list[int]()
    for file in files:
        draws += map(int, _REPEAT.findall(file.stem))
    # The names do not count if there is one file, or if they do not give each another draw.
    if len(files) == 1 or len({*draws}) < len(files):
        draws = [*range(len(files))]
    rows = []
    origins = []  # of each row: its place in a file, the draw if it names none, the sign of a failure
    metrics = dict[str, None]()  # the columns that rows name as metrics, each once and in their order
    questions = list[Collection[str]]()  # of each file: the columns of its program's question
    program = FORMATS[-1]
    for file, draw in zip(files, draws, strict=True):
        file_rows = itertools.islice(rows_of_file(file, keys=_KEYS), most)
        for number, (place, values) in enumerate(file_rows):
            # A file's first row decides its format.
            if number == 0:
                program = _format_of(values)
                questions.append(program.question)
            for row in program.read(values, reading.graded):
                metrics |= dict.fromkeys(_metrics(row))
                rows.append(row)
                origins.append((place, draw, _failure(row, reading.ignored)))
    names = " and ".join(map(str, files))
    if len(rows) >= MOST_ROWS:
        raise UserError(f"{names} has {MOST_ROWS:,} rows or more: give a part of it.")
    answers = pd.DataFrame(origins, columns=["place", "draw", "sign"], dtype=object)
    try:
        table = pd.DataFrame(rows, dtype=object)
        # One program that names none compares all columns.
        of_question = set[str]().union(*questions) if all(questions) else ()
        return _outputs(files, table, answers, metrics, of_question, reading)
    except _Refusal as refusal:
        raise UserError(f"{names} {refusal}.") from None
    except UnicodeEncodeError as error:
        raise UserError(f"{names} has a name that is no text ({error}): rename it.") from error


def _outputs_in(folder: Path, reading: Reading) -> list[Path]:
    """The one file of outputs below a folder, or its files of one draw each."""
    files = sorted(path for path in folder.rglob("*") if path.suffix in _SUFFIXES and path.is_file())
    repeats = [path for path in files if _REPEAT.search(path.stem)]
    outputs = [*repeats]
    if not repeats:
        for path in files:
            with suppress(UserError):
                # The first row need not be one that `where` takes.
                read_outputs([path], replace(reading, where={}), most=1)
                outputs.append(path)
    # NeMo Evaluator writes each answer into three files, of which this one is read.
    results = [path for path in outputs if path.name == "results.jsonl"]
    if len(results) == 1:
        return results
    # A name that stands in two folders shows that they are of two settings.
    names = {path.name for path in repeats}
    if len(outputs) != max(1, len(names)):
        shown = ", ".join(map(str, outputs[:4])) or "none"
        raise UserError(
            f"{folder} has {len(outputs)} files of outputs: name a file, or a folder with one setting's files "
            f"({shown})."
        )
    return outputs


class _Refusal(Exception):
    """What is wrong with a setting's rows, without the name of its files."""


# --- columns -------------------------------------------------------------------------------------------------


def _outputs(
    files: Sequence[Path],
    table: pd.DataFrame,
    answers: pd.DataFrame,
    metrics: Collection[str],
    of_question: Collection[str],
    reading: Reading,
) -> Outputs:
    """Give each column of `table` its meaning; `answers` has the place, draw and sign of each of its rows.

    `metrics` are the columns of metrics, `of_question` those of the question if the program's are known.
    """
    rows = table
    for name, values in reading.where.items():
        rows = rows[each(_column(rows, name), str).isin([*values])]
    if not len(rows):
        condition = " with that --where" if reading.where else ""
        raise _Refusal(f"has no row of a graded output{condition}: check it")
    rows = rows.drop(columns=[*reading.ignored], errors="ignore")
    answers = answers.loc[rows.index]
    # In this order: draws need the problems, texts the endings, and grades the signs of failure.
    answers = answers.assign(problem_id=_problems(rows, answers, reading))
    answers["draw"] = _draws(rows, answers, reading)
    answers["ending"] = _endings(rows, reading)
    answers["text"] = _texts(rows, answers, reading)
    answers["gold"] = each(_meaning("gold", rows, reading), _of_one)
    # A row's `prompt` and `input` may be two parts of its question, so they need not agree as `_meaning` demands.
    prompt = reading.columns.get("prompt")
    answers["prompt"] = _first(rows, PROMPT) if prompt is None else _column(rows, prompt)
    answers["correct"], grade, score = _grades(rows, answers, metrics, reading)
    # Endings and empty texts are signs too, beside the fields that `_failure` has read.
    answers["sign"] = _signs(answers)
    answers.loc[answers["sign"].notna(), "correct"] = float("nan")
    for name in ("sign", "text", "ending", "gold", "prompt"):
        # None is the only sign of what is missing, in place of NaN.
        answers[name] = answers[name].astype(object).where(answers[name].notna(), None)
    if reading.group is not None:
        answers["group"] = each(_column(rows, reading.group), str)
    no_question = {*_OF_ANSWER, *metrics, *reading.where, *reading.columns.values(), reading.correct, reading.group}
    _refuse_repeated(rows, answers, no_question)
    questions = rows.drop(columns=[*no_question], errors="ignore")
    # Where a program's columns of the question are known, no other describes it.
    if of_question:
        questions = questions[questions.columns.intersection([*of_question])]
    questions = questions.assign(gold=answers["gold"], prompt=answers["prompt"])
    questions["prompt_hash"] = _meaning("prompt_hash", rows, reading)
    for column in questions:
        questions[column] = each(questions[column].dropna(), plain)
    return Outputs(files, len(table), answers, questions, {*map(str, table)}, grade, score)


def each(column: Column, read: Callable[[Any], Any]) -> Column:
    """A column of objects: pandas' own texts cannot hold half a character."""
    return pd.Series([read(value) for value in column], index=column.index, dtype=object)


def _of_one(value: Any) -> Any:
    if isinstance(value, list) and len(value) == 1:
        return value[0]
    return value


def _column(rows: pd.DataFrame, name: str) -> Column:
    if name not in rows:
        raise _Refusal(f"has no column {visible(name)}: it has {visible(', '.join(map(str, rows))):.200}")
    return rows[name]


def _first(rows: pd.DataFrame, names: Sequence[str]) -> Column:
    """The first value that each row has under these names, or none."""
    # The last column, which no file has, is empty.
    filled = rows.reindex(columns=[*names, None]).bfill(axis=1).iloc[:, 0]
    return filled.astype(object).where(filled.notna(), None)


def _meaning(
    meaning: str,
    rows: pd.DataFrame,
    reading: Reading,
    fits: Callable[[Column], bool] = lambda column: True,
    read: Callable[[Any], Any] = plain,
    otherwise: Sequence[str] = (),
) -> Column:
    """The column that was named for a meaning, or those of the usual names whose values fit it and are the same.

    Values are the same if `read` makes them equal. Where no column fits, the first values that stand `otherwise`, or
    none.
    """
    if meaning in reading.columns:
        return _column(rows, reading.columns[meaning])
    fitting = []
    for name in _NAMES[meaning]:
        if name in rows and rows[name].notna().any() and fits(rows[name]):
            fitting.append(name)
    # The columns must agree where a row has a value in both.
    for name in fitting[1:]:
        first_name = fitting[0]
        both = rows[[first_name, name]].dropna()
        if not each(both[first_name], read).equals(each(both[name], read)):
            raise _Refusal(
                f"has {first_name} and {name}, which differ, and each may be the {meaning}: name it by --column "
                f"{meaning}=NAME"
            )
    return _first(rows, fitting or otherwise)


def _problems(rows: pd.DataFrame, answers: pd.DataFrame, reading: Reading) -> Column:
    """Each row's problem id as text."""

    def has_ids(column: Column) -> bool:
        # More than three words are no id but the question.
        return all(0 < len(_id(value).split()) < 4 for value in column)

    # Where no column has ids alone, the question itself may be the id.
    column = _meaning("id", rows, reading, has_ids, otherwise=_NAMES["id"])
    problems = each(column, _id)
    for row, problem in problems.items():
        if not problem or not is_text(problem):
            raise _Refusal(
                f"has no problem's id in {answers['place'][row]} ({visible(str(column[row]))!r:.60}), text or a whole "
                f"number: name it {', '.join(_NAMES['id'][:3])}, or --column id=NAME; it has "
                f"{visible(', '.join(map(str, rows))):.200}"
            )
    return problems


def _id(value: Any) -> str:
    """A problem's id as text; "" for what is neither text nor a whole number."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    # Not `isinstance`, for which True is a whole number.
    if type(value) not in (str, int):
        return ""
    text = " ".join(str(value).split())
    return _WHOLE_ID.sub(r"\1", text)


def _draws(rows: pd.DataFrame, answers: pd.DataFrame, reading: Reading) -> Column:
    """Each row's draw, from 0: that of its column, else its file's."""
    if reading.by_rows:
        return answers.groupby("problem_id").cumcount()
    column = _meaning("draw", rows, reading, lambda column: _are_draws(column, answers["problem_id"]))
    numbers = each(column.dropna(), _whole)
    # Only a column that --column names can have other values: else `_are_draws` has refused it.
    for row in numbers.index[numbers.isna()]:
        raise _Refusal(
            f"has {reading.columns['draw']}={visible(str(column[row])):.40}, which is no draw: write a whole number "
            "from 0, or give --draws rows"
        )
    return numbers.reindex(answers.index).fillna(answers["draw"]).astype(int)


def _whole(value: Any) -> int | None:
    number = _id(value)
    return int(number) if number.isdecimal() else None


def _are_draws(column: Column, problems: Column) -> bool:
    """Whether a column has whole numbers alone that repeat over problems; one that counts the rows does not."""
    numbers = each(column.dropna(), _whole)
    if numbers.isna().any():
        return False
    # Draws of one problem cannot repeat over problems.
    return problems.nunique() == 1 or problems[numbers.index].groupby(numbers).nunique().max() > 1


def _endings(rows: pd.DataFrame, reading: Reading) -> Column:
    """How each text ended, by the column whose words say so; a word that is unknown stays."""

    def has_endings(column: Column) -> bool:
        return any(map(ending, column))

    def read(reason: Any) -> Any:
        if not reason:
            return reason
        return ending(reason) or visible(str(reason))[:40]

    column = _meaning("stop_reason", rows, reading, has_endings, ending, otherwise=_NAMES["stop_reason"])
    return each(column, read)


def _texts(rows: pd.DataFrame, answers: pd.DataFrame, reading: Reading) -> Column:
    """The texts, with the thinking in front that a server has split off."""

    def varies(name: str) -> bool:
        return each(rows[name], str).groupby(answers["problem_id"]).nunique().max() > 1

    # Usual columns with a text in some row.
    names = [name for name in _NAMES["text"] if name in rows and str in {*map(type, rows[name])}]
    if len(names) > 1:
        # A question has one text in all draws of its problem.
        names = [*filter(varies, names)] or names
    texts = _meaning("text", rows, reading, lambda column: column.name in names, str)
    texts = each(texts, lambda text: text if isinstance(text, str) else None)
    for row, thought in _first(rows, ["reasoning_content"]).items():
        # The server may have split it off and left it in the text too.
        if isinstance(thought, str) and thought not in (texts[row] or ""):
            texts[row] = joined(thought, texts[row], DEFAULT_TAGS, ended=answers["ending"][row] != "length")
    return each(texts, lambda text: text and as_text(text))  # pandas refuses half a character


def _grades(
    rows: pd.DataFrame, answers: pd.DataFrame, metrics: Collection[str], reading: Reading
) -> tuple[Column, str | None, str | None]:
    """Return each row's grade (1, 0 or NaN), the name of the column that has it, and its name as a score.

    The column is the one that --correct names. Else all scores and usual columns that fit must have the same grades.
    """
    # Apart from the rows: a score may have the name of a column with another meaning, such as text or draw.
    objects = each(_first(rows, ["scores"]), _object)
    score_table = pd.DataFrame([*objects], index=rows.index, dtype=object)
    scores: dict[str, Column] = {**score_table.drop(columns=[*reading.ignored], errors="ignore")}
    for name in metrics:
        if name in rows:
            scores[name] = rows[name]
    columns: dict[Any, Column] = {**rows, **scores}
    names = [*scores, *_GRADES] if reading.correct is None else [reading.correct]
    fitting = {}
    faults = []  # of columns with a word that is no grade
    for name in names:
        # Rows that `where` leaves out may have other scores.
        if name not in columns or (name in scores and columns[name].isna().all()):
            continue
        # The grade of a failed request does not count.
        grades = each(columns[name].where(answers["sign"].isna()), _grade)
        words = grades[grades.map(type).eq(str)]  # what `_grade` has not understood
        if words.empty:
            fitting[name] = grades.astype(float)
        else:
            wrong = f"{visible(name)}={visible(words.iloc[0]):.40} in {answers['place'][words.index[0]]}"
            faults.append(f"has {wrong}, which is neither right nor wrong: write 1 or 0, or give --grades ours")
    grade = next(iter(fitting), None)
    # `equals` takes a missing grade, which is NaN, for the same as another.
    if grade is None or not all(map(fitting[grade].equals, fitting.values())):
        needs_no_grade = not reading.graded and reading.correct is None
        all_failed = answers["sign"].notna().all()
        if needs_no_grade or all_failed:
            return pd.Series(float("nan"), index=rows.index), None, None
        hint = "name one with --correct NAME (1 right, 0 wrong), or give --grades ours"
        if fitting:
            raise _Refusal(f"has the grades {', '.join(map(visible, fitting))}, which differ: {hint}")
        if faults:
            raise _Refusal(faults[0])
        raise _Refusal(f"has no grade: {hint}; it has {visible(', '.join(map(str, rows))):.200}")
    # The name of a filter that does nothing is "none".
    filters = sorted({*map(str, _first(rows, ["filter"]).dropna())} - {"none"})
    score_parts = [grade, *filters] if grade in scores else filters
    return fitting[grade], grade, " ".join(score_parts) or None


def _grade(value: Any) -> float | str | None:
    """A grade as 1, 0 or None; another text where it is none of them. inspect_ai has it in an object."""
    if isinstance(value, dict):
        value = value.get("value")
    if value is None or value == "" or value != value:  # NaN
        return None
    return _GRADE_WORDS.get(str(value).strip().lower(), str(value))


def _signs(answers: pd.DataFrame) -> Column:
    """By what each row says that no answer is known; none where it says nothing."""
    failed_ends = answers["ending"].where(answers["ending"].isin(_FAILED_ENDS))
    signs = answers["sign"].fillna(failed_ends)
    if answers["text"].notna().any():
        # The thinking may have taken all tokens.
        empty = each(answers["text"], lambda text: not (text or "").strip()) & answers["ending"].ne("length")
        signs = signs.mask(signs.isna() & empty, "an empty text")
    return signs


def _failure(row: Row, ignored: Collection[str] = ()) -> str | None:
    """The field, at any depth, by which a row says that it failed; None if it says no such thing."""
    if "outcome" not in ignored and row.get("outcome") == "grader_timeout":  # of kvsweep
        return "grader_timeout"
    for name, value in row.items():
        if name in _FAILURES and name not in ignored and _says(value):
            return name
        # A question's object may have fields of these names that say nothing of the answer.
        if isinstance(value, dict) and name not in OF_QUESTION and name not in ignored:
            # `ignored` names columns, so no field within one.
            inner = _failure(value)
            if inner is not None:
                return f"{name}.{inner}"
    return None


def _says(value: Any) -> bool:
    """Whether a field of a failure says something; a list or an object does if any of its values does."""
    if isinstance(value, dict):
        value = [*value.values()]
    if isinstance(value, list):
        return any(map(_says, value))
    return str(value).strip().lower() not in _NOTHING


def _refuse_repeated(rows: pd.DataFrame, answers: pd.DataFrame, no_question: Collection[Any]) -> None:
    """Raise _Refusal for an answer that stands twice; it names a column that tells the rows apart.

    Such a column, of tasks or filters, has the same values at every problem. A text or a time has others elsewhere in
    the file, and is not named.
    """
    counts: Any = answers.groupby(PAIR).size()
    if counts.max() == 1:
        return
    problem, draw = counts.idxmax()
    of_pair = answers["problem_id"].eq(problem) & answers["draw"].eq(draw)
    hint = "choose rows by --where KEY=VALUE, name the draw's column by --column draw=NAME, or give --draws rows"
    for name in map(str, rows):
        texts = each(rows[name], str)
        values = {*texts[of_pair]}
        tells_apart = len(values) == of_pair.sum() and values == {*texts}
        if tells_apart and name not in no_question:
            hint += f"; these rows differ in {visible(name):.40}: {visible(', '.join(sorted(values))):.80}"
            break
    raise _Refusal(f"has draw {draw} of problem {visible(problem)!r:.60} {counts.max()} times: {hint}")
