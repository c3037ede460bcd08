"""From stored completions to grades: read the answer, compare it with the gold, name the outcome.

Grading is a pass of its own over a cell's files, so it can be repeated without a model. Every row, however
simple its answer kind, is judged in a worker process that is killed when it overruns its time: one way for
all kinds. The workers are plain subprocesses that talk in lines of JSON: `multiprocessing` would import the
caller's main module, and torch with it, in each of them.
"""

import argparse
import contextlib
import importlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self, TypeVar, get_args

import yaml

from harness.predictor.segment import find_segments
from harness.records import (
    CELL_FILE,
    COMPLETIONS_FILE,
    GRADES_FILE,
    OUTCOMES,
    PROBLEMS_FILE,
    Completion,
    Grade,
    Outcome,
    Problem,
    UserError,
    read_rows,
)

AnswerKind = Literal["integer"]
ANSWER_KINDS: tuple[AnswerKind, ...] = get_args(AnswerKind)


_MAX_ANSWER_CHARS = 500
_ROWS_PER_MESSAGE = 16
_START_LIMIT_S = 60.0


# --- Reading an answer --------------------------------------------------------------------------------------


def answer_part(text: str) -> str | None:
    """What follows the thinking: the text after the first `</think>`, or after the last if thinking reopened.

    None if the thinking was never closed. The first `<think>` may be missing: some chat templates hold it.
    """
    found = find_segments(text)
    return None if found is None else text[found.answer_start :]


# A backslash takes its next character along, so that the escaped braces of \{1,2\} do not count.
_BRACES = re.compile(r"\\boxed\s*+\{|\\.|[{}]", re.DOTALL)
_NOT_BLANK = re.compile(r"\S")


def last_box(text: str) -> str | None:
    r"""The content of the last `\boxed{...}` that is neither empty nor inside another; braces must balance.

    None if there is no box, or if the last one is never closed: an earlier box does not stand in for it. One
    pass over the text, without recursion.
    """
    open_braces: list[tuple[int, bool]] = []
    last = (0, 0)
    for match in _BRACES.finditer(text):
        token = match.group()
        if token == "{" or token.startswith("\\boxed"):
            open_braces.append((match.end(), token != "{"))
        elif token == "}" and open_braces:
            start, is_box = open_braces.pop()
            # A box that encloses the last one closes after it, and so takes its place.
            if is_box and _NOT_BLANK.search(text, start, match.start()):
                last = (start, match.start())
    unclosed = any(is_box and start > last[1] for start, is_box in open_braces)
    return None if unclosed else text[slice(*last)].strip() or None


_SPACE = r"\s|~|\\[ ,;:!]|\\q?quad(?![A-Za-z])|\\?\$"
_TEXT = r"\\(?:text(?:bf|it|rm|normal)?|math(?:bf|rm)|mbox)\s*+"
_UNIT = rf"{_TEXT}\{{[^{{}}]*+\}}"
# An option label, or what the value is the value of: "(B) 5", "x = 5", "m+n = 5".
_LABEL = rf"{_TEXT}\{{\s*+\(?[A-E]\)\s*+\}}|\([A-E]\)|[A-Za-z]\s*+(?:\+\s*+[A-Za-z]\s*+)*+="
_DIGITS = r"[1-9][0-9]{0,2}(?:(?:,(?:\\[!,])?|\{,\}(?:\\!)?|\\,)[0-9]{3})++(?![0-9])|[0-9]++"
_DEGREES = r"°|\\degrees?(?![A-Za-z])|\^\s*+(?:\\circ|\{\s*+\\circ\s*+\})"
_POWER = r"\^(?:[23]|\{[23]\})"
_INTEGER = re.compile(
    rf"(?:{_SPACE})*+(?:{_LABEL})?(?:{_SPACE})*+"
    rf"(?P<sign>[-+\u2212]?)\s*+(?P<digits>{_DIGITS})(?:\.0*+)?"
    rf"(?P<units>(?:{_SPACE}|\\?%|{_DEGREES}|{_UNIT}(?:{_POWER})?)*+)"
)
_UNIT_WORDS = re.compile(rf"{_TEXT}\{{([^{{}}]*+)\}}")
_WRAPPED = re.compile(rf"(?:{_TEXT}|\\boxed\s*+)?\{{(?P<inside>.*)\}}", re.DOTALL)
_WORDS = re.compile(r"(?:[^\W\d_]|[ .,/()°²³-])*+")
# Words that make another number, or no number, of the integer before them.
# fmt: off
_NOT_UNITS = frozenset({
    "i", "e", "j", "pi", "hundred", "hundreds", "thousand", "thousands", "million", "millions",
    "billion", "billions", "trillion", "trillions", "dozen", "dozens", "half", "halves", "third",
    "thirds", "quarter", "quarters", "tenth", "tenths", "hundredth", "hundredths", "squared",
    "cubed", "factorial", "times", "mod", "modulo", "base", "or", "and", "not", "to", "plus",
    "minus", "over", "per",
})
# fmt: on


def parse_integer(text: str) -> str | None:
    r"""The canonical decimal text of an integer as answers write it, or None if it is not one.

    Read through: leading zeros, `27.0`, thousands separators (`1,625`, `1{,}625`, `10,\!080`), `$`, `\%`,
    degrees, units in `\text{}` after the number, a leading option label or `x =`, and `\text{27}` or braces
    around the whole. Nothing is calculated and no number is searched for: `\frac{4}{2}`, `2^3`, `27 or 28`
    and `3 \text{ million}` are not integers, and neither is a text of more than 500 characters.
    """
    text = text.strip()
    if len(text) > _MAX_ANSWER_CHARS:
        return None
    while (match := _INTEGER.fullmatch(text)) is None:
        wrapped = _WRAPPED.fullmatch(text)
        if wrapped is None:
            return None
        text = wrapped["inside"].strip()
    if not all(_is_unit(words) for words in _UNIT_WORDS.findall(match["units"])):
        return None
    digits = re.sub(r"[^0-9]", "", match["digits"]).lstrip("0") or "0"
    return f"-{digits}" if match["sign"] in ("-", "\u2212") and digits != "0" else digits


def _is_unit(words: str) -> bool:
    return bool(_WORDS.fullmatch(words)) and _NOT_UNITS.isdisjoint(re.findall("[a-z]+", words.lower()))


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """One kind of answer: how to read it after the thinking, how to write its gold, and when both are equal.

    `extract` returns None where no answer is given, and the text as it stands where one is given that is not
    of this kind.
    """

    extract: Callable[[str], str | None]
    gold: Callable[[str], str | None]
    equal: Callable[[str, str], bool]


def _extract_integer(answer_text: str) -> str | None:
    box = last_box(answer_text)
    return None if box is None else parse_integer(box) or box[:_MAX_ANSWER_CHARS]


_KINDS: dict[AnswerKind, _Kind] = {
    "integer": _Kind(
        extract=_extract_integer,
        gold=parse_integer,
        equal=lambda answer, gold: answer == parse_integer(gold),
    ),
}


def extract_answer(text: str, kind: AnswerKind) -> str | None:
    r"""The answer that a completion gives after its thinking, or None if it gives none.

    For kind "integer": the last box, as canonical decimal text if it holds an integer and as it stands (at
    most 500 characters) if not. Time grows linearly with the text.
    """
    answer_text = answer_part(text)
    return None if answer_text is None else _KINDS[kind].extract(answer_text)


def canonical_gold(gold: str, kind: AnswerKind) -> str | None:
    """A reference answer in the form its kind compares ("027" is "27"), or None if it is not of the kind."""
    return _KINDS[kind].gold(gold)


def judge(text: str, stop_reason: str, gold: str, kind: AnswerKind) -> tuple[str | None, Outcome]:
    """The answer and the outcome of one completion; at the token limit it is truncated, whatever it holds."""
    if stop_reason == "length":
        return None, "truncated"
    answer = extract_answer(text, kind)
    if answer is None:
        return None, "no_answer"
    return answer, "correct" if _KINDS[kind].equal(answer, gold) else "wrong"


def grade(completion: Completion, problem_gold: str, kind: AnswerKind) -> Grade:
    """Grade one completion here, without a worker and its time limit; `Grader` grades stored cells."""
    answer, outcome = judge(completion.text, completion.stop_reason, problem_gold, kind)
    return _grade_row(completion, problem_gold, answer, outcome)


def _grade_row(completion: Completion, gold: str, answer: str | None, outcome: Outcome) -> Grade:
    return Grade(
        problem_id=completion.problem_id,
        draw=completion.draw,
        answer=answer,
        gold=gold,
        outcome=outcome,
        correct=int(outcome == "correct"),
    )


# --- Workers ------------------------------------------------------------------------------------------------


def serve(function: str) -> None:
    """The main loop of a worker: lines of jobs in, one line of verdict a job out, until the input ends."""
    # Ctrl-C reaches the whole process group; the parent decides when a worker ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A library that prints must not write between the replies.
    replies = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)
    module, _, name = function.partition(":")
    judge_row = getattr(importlib.import_module(module), name)
    print("{}", file=replies, flush=True)
    for line in sys.stdin.buffer:
        for job in json.loads(line):
            try:
                answer, outcome = judge_row(*job)
                reply = {"answer": answer, "outcome": outcome}
            except Exception as error:
                reply = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(reply), file=replies, flush=True)


class _Worker:
    """A worker process, and the jobs it has been sent and not yet answered."""

    def __init__(self, function: str) -> None:
        path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", f"from harness.grading import serve; serve({function!r})"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout.fileno()
        self._received = b""
        self.pending: deque[int] = deque()
        self.started = False
        self.deadline = time.monotonic() + _START_LIMIT_S

    @property
    def pid(self) -> int:
        return self._process.pid

    def fileno(self) -> int:
        return self._output

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def send(self, indices: Sequence[int], jobs: Sequence["_Job"]) -> None:
        self.pending.extend(indices)
        message = json.dumps([(job.text, job.stop_reason, job.gold, job.kind) for job in jobs])
        # A worker that died says so by its closed output, to the reader, who knows which job it was at.
        with contextlib.suppress(BrokenPipeError):
            self._input.write(message.encode() + b"\n")
            self._input.flush()

    def receive(self) -> list[dict[str, Any]] | None:
        """The replies that have arrived; None if the process has ended."""
        piece = os.read(self._output, 1 << 16)
        if not piece:
            return None
        *lines, self._received = (self._received + piece).split(b"\n")
        return [json.loads(line) for line in lines]

    def end(self) -> None:
        """Kill the process and wait until it is gone; its work is worth nothing by then."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        # Closing flushes what it did not live to read.
        with contextlib.suppress(BrokenPipeError):
            self._input.close()


@dataclass(frozen=True, kw_only=True)
class _Job:
    text: str
    stop_reason: str
    gold: str
    kind: AnswerKind


@dataclass(frozen=True, kw_only=True)
class CellSummary:
    """The result of grading one cell: how many of its rows were graded now, and all rows' outcomes."""

    directory: Path
    graded: int
    outcomes: Counter[Outcome] = field(default_factory=Counter)

    @property
    def rows(self) -> int:
        """How many rows the cell has."""
        return self.outcomes.total()


class Grader:
    """A pool of grading workers: started when first needed, reused for every cell, killed when one overruns.

    Args:
        workers: how many processes at most.
        timeout_s: seconds that one row may take; then its worker is killed, the row is `grader_timeout`, and
            the rows behind it go to a fresh worker. A row whose worker dies of itself counts the same.
        function: `module:name` of what judges a row, called in the worker with (text, stop_reason, gold,
            kind) and returning (answer, outcome).

    Raises:
        UserError: a number out of range.
    """

    def __init__(self, *, workers: int = 2, timeout_s: float = 5.0, function: str = "harness.grading:judge") -> None:
        if workers < 1:
            raise UserError(f"workers={workers} must be 1 or more; leave it out for the default of 2.")
        if not 0 < timeout_s < float("inf"):
            raise UserError(f"timeout={timeout_s} must be a number of seconds above 0; leave it out for 5.")
        self._limit, self._timeout_s, self._function = workers, timeout_s, function
        self._workers: list[_Worker] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End the workers; a later call starts new ones."""
        for worker in self._workers:
            worker.end()
        self._workers.clear()

    @property
    def worker_pids(self) -> list[int]:
        """The process ids of the workers that run now."""
        return [worker.pid for worker in self._workers]

    def grade_cell(self, directory: Path, *, kind: AnswerKind | None = None, regrade: bool = False) -> CellSummary:
        """Grade the completions of a cell folder that have no grade yet, or all of them.

        Reads `completions.jsonl`, and the golds from `problems.jsonl`; writes `grades.jsonl` as a whole, in
        the order of the completions, by a temporary file. A grade whose gold has changed since is made anew;
        a grade without a completion is dropped. Of completions with the same problem and draw the first
        counts.

        Args:
            directory: the cell's folder.
            kind: the answer kind; if None it is `benchmark.answer_kind` of the folder's `cell.yaml`.
            regrade: grade every row, whether it has a grade or not.

        Raises:
            UserError: a file is missing, broken, or does not fit the others.
        """
        completions = _by_key(directory / COMPLETIONS_FILE, Completion)
        if not completions:
            return CellSummary(directory=directory, graded=0)
        kind = kind or read_answer_kind(directory)
        golds = _read_golds(directory / PROBLEMS_FILE, kind)
        for completion in completions.values():
            if completion.problem_id not in golds:
                raise UserError(
                    f"{directory / COMPLETIONS_FILE} holds problem {completion.problem_id!r}, and "
                    f"{PROBLEMS_FILE} does not; restore it, or delete the folder and run the cell again."
                )
        old = _by_key(directory / GRADES_FILE, Grade)
        grades = {
            key: row
            for key, row in old.items()
            if not regrade and key in completions and row.gold == golds[completions[key].problem_id]
        }
        missing = [completion for key, completion in completions.items() if key not in grades]
        for row in self._grade(missing, golds, kind):
            grades[row.key] = row
        ordered = [grades[key] for key in completions]
        if missing or list(old.values()) != ordered:
            _write_grades(directory / GRADES_FILE, ordered)
        outcomes = Counter(row.outcome for row in ordered)
        return CellSummary(directory=directory, graded=len(missing), outcomes=outcomes)

    def _grade(self, completions: Sequence[Completion], golds: dict[str, str], kind: AnswerKind) -> Iterator[Grade]:
        jobs = [
            _Job(text=row.text, stop_reason=row.stop_reason, gold=golds[row.problem_id], kind=kind)
            for row in completions
        ]
        try:
            replies = self._judge(jobs)
        except BaseException:
            # Their replies to this call must not be taken for those to the next.
            self.close()
            raise
        for completion, job, reply in zip(completions, jobs, replies, strict=True):
            if "error" in reply:
                raise RuntimeError(f"grading problem {completion.problem_id!r} failed: {reply['error']}")
            yield _grade_row(completion, job.gold, reply["answer"], reply["outcome"])

    def _judge(self, jobs: Sequence[_Job]) -> list[dict[str, Any]]:
        """The workers' replies in the order of the jobs. The one loop that sends, waits, and kills."""
        replies: dict[int, dict[str, Any]] = {}
        waiting = deque(
            range(start, min(start + _ROWS_PER_MESSAGE, len(jobs))) for start in range(0, len(jobs), _ROWS_PER_MESSAGE)
        )
        while len(replies) < len(jobs):
            while waiting and (worker := self._idle_worker()) is not None:
                indices = waiting.popleft()
                if worker.started:
                    worker.deadline = time.monotonic() + self._timeout_s
                worker.send(indices, [jobs[index] for index in indices])
            busy = [worker for worker in self._workers if worker.pending]
            readable = _wait(busy, until=min(worker.deadline for worker in busy))
            for worker in busy:
                received = worker.receive() if worker in readable else []
                if received is None or (not received and time.monotonic() >= worker.deadline):
                    lost, *rest = self._drop(worker)
                    replies[lost] = {"answer": None, "outcome": "grader_timeout"}
                    if rest:
                        waiting.append(range(rest[0], rest[-1] + 1))
                    continue
                for reply in received:
                    worker.deadline = time.monotonic() + self._timeout_s
                    if worker.started:
                        replies[worker.pending.popleft()] = reply
                    worker.started = True
        return [replies[index] for index in range(len(jobs))]

    def _idle_worker(self) -> _Worker | None:
        for worker in [worker for worker in self._workers if not worker.pending]:
            if worker.is_alive():
                return worker
            self._drop(worker)
        if len(self._workers) == self._limit:
            return None
        self._workers.append(_Worker(self._function))
        return self._workers[-1]

    def _drop(self, worker: _Worker) -> list[int]:
        """End a worker that hangs or has died; the jobs it leaves, the one it was at first."""
        self._workers.remove(worker)
        worker.end()
        if not worker.started:
            raise RuntimeError(f"a grading worker for {self._function} did not start; its error is above")
        return list(worker.pending)


def _wait(workers: Sequence[_Worker], *, until: float) -> list[_Worker]:
    """The workers with something to read, as soon as one has, or at `until` on the monotonic clock."""
    poll = select.poll()
    for worker in workers:
        poll.register(worker.fileno(), select.POLLIN)
    # Rounded up: woken a moment early, the loop would spin.
    ready = {fd for fd, _ in poll.poll(max(0.0, until - time.monotonic()) * 1000 + 1)}
    return [worker for worker in workers if worker.fileno() in ready]


# --- A cell's files -----------------------------------------------------------------------------------------


def read_answer_kind(directory: Path) -> AnswerKind:
    """The answer kind that a cell folder's `cell.yaml` names under `benchmark.answer_kind`.

    Raises:
        UserError: no such file, not YAML, or no kind that this version grades.
    """
    path = directory / CELL_FILE
    try:
        cell = yaml.safe_load(path.read_text(encoding="utf-8"))
        kind = cell["benchmark"]["answer_kind"]
    except FileNotFoundError:
        raise UserError(f"{directory} holds no {CELL_FILE}; name a cell's folder.") from None
    except (yaml.YAMLError, UnicodeDecodeError, KeyError, TypeError):
        raise UserError(f"{path} names no benchmark.answer_kind; restore the file or run the cell again.") from None
    if kind not in ANSWER_KINDS:
        raise UserError(
            f"{path} names answer_kind {kind!r}, which must be one of {', '.join(ANSWER_KINDS)}; "
            "grade it with the version that ran it."
        )
    return kind


def _read_golds(path: Path, kind: AnswerKind) -> dict[str, str]:
    if not path.exists():
        raise UserError(f"{path} is missing, and with it the reference answers; run the cell again.")
    golds = {problem.id: problem.gold for problem in _rows(path, Problem)}
    for problem_id, gold in golds.items():
        if canonical_gold(gold, kind) is None:
            raise UserError(f"{path} has the gold {gold!r} for {problem_id!r}, which is no {kind}; correct it.")
    return golds


_Row = TypeVar("_Row", Completion, Grade, Problem)
_KeyedRow = TypeVar("_KeyedRow", Completion, Grade)


def _by_key(path: Path, row_type: type[_KeyedRow]) -> dict[tuple[str, int], _KeyedRow]:
    rows: dict[tuple[str, int], _KeyedRow] = {}
    for row in _rows(path, row_type):
        rows.setdefault(row.key, row)
    return rows


def _rows(path: Path, row_type: type[_Row]) -> Iterator[_Row]:
    for number, fields in enumerate(read_rows(path), start=1):
        try:
            yield row_type.from_dict(fields)
        except (TypeError, KeyError, AttributeError):
            raise UserError(
                f"{path} row {number} is no whole {row_type.__name__.lower()}; delete its line and run again."
            ) from None


def _write_grades(path: Path, grades: Sequence[Grade]) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        for row in grades:
            file.write(json.dumps(row.to_dict()) + "\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


# --- The command --------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Grade every cell below a folder (`kvsweep-grade`); returns 0, or 2 after a user's mistake."""
    arguments = _parser().parse_args(argv)
    try:
        _grade_run(arguments.dir, arguments.workers, arguments.timeout, arguments.all)
    except UserError as error:
        print(f"kvsweep-grade: error: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvsweep-grade",
        description="Grade the stored completions of every cell below DIR, without a model.",
    )
    parser.add_argument("dir", metavar="DIR", type=Path, help="a run's folder, or one cell's")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="grading processes (default: 2)")
    parser.add_argument("--timeout", type=float, default=5.0, metavar="S", help="seconds a row may take (default: 5)")
    parser.add_argument("--all", action="store_true", help="grade again the rows that have a grade")
    return parser


def _grade_run(root: Path, workers: int, timeout_s: float, regrade: bool) -> None:
    if not root.is_dir():
        raise UserError(f"{root} is no folder; give the folder of a run, such as results/runs/demo.")
    cells = sorted(path.parent for path in root.rglob(CELL_FILE))
    if not cells:
        raise UserError(f"{root} holds no folder with a {CELL_FILE}, so no cell; give the folder of a run.")
    summaries = []
    with Grader(workers=workers, timeout_s=timeout_s) as grader:
        for directory in cells:
            summaries.append(grader.grade_cell(directory, regrade=regrade))
            print(_summary_line(str(directory.relative_to(root)), summaries[-1]))
    total = CellSummary(
        directory=root,
        graded=sum(summary.graded for summary in summaries),
        outcomes=sum((summary.outcomes for summary in summaries), Counter()),
    )
    print(_summary_line(f"total of {len(cells)} cells", total))


def _summary_line(label: str, summary: CellSummary) -> str:
    counts = ", ".join(f"{outcome} {summary.outcomes[outcome]}" for outcome in OUTCOMES)
    return f"{label}: {summary.rows} rows, {summary.graded} graded now: {counts}"


if __name__ == "__main__":
    sys.exit(main())
