"""From stored completions to grades: `harness.grading.answers` judges each, in workers that cannot hang or fill the machine.

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
import resource
import select
import signal
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import yaml

from analysis.records import (
    CELL_FILE,
    COMPLETIONS_FILE,
    GRADES_FILE,
    OUTCOMES,
    PROBLEMS_FILE,
    Completion,
    Grade,
    Outcome,
    Problem,
    Shard,
    UserError,
    latest_rows,
    read_rows,
    replace_text,
    shard_files,
)
from harness.grading.answers import ANSWER_KINDS, AnswerKind, canonical_gold

LENIENT_GRADES_FILE = "grades.lenient.jsonl"  # its shards: grades.lenient-1of4.jsonl
_ROWS_PER_MESSAGE = 16
_START_LIMIT_S = 60.0

# What one worker may take of the machine: a power tower must not take all of it.
_WORKER_BYTES = 4 << 30


def _grade_row(completion: Completion, gold: str, answer: str | None, outcome: Outcome) -> Grade:
    return Grade(
        problem_id=completion.problem_id,
        draw=completion.draw,
        answer=answer,
        gold=gold,
        outcome=outcome,
        correct=int(outcome == "correct"),
    )


def serve(function: str) -> None:
    """The main loop of a worker: lines of jobs in, one line of verdict a job out, until the input ends."""
    resource.setrlimit(resource.RLIMIT_AS, (_WORKER_BYTES, _WORKER_BYTES))
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
            except MemoryError:
                reply = {"answer": None, "outcome": "grader_timeout"}
            except Exception as error:
                reply = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(reply), file=replies, flush=True)


class _Worker:
    """A worker process, and the jobs it has been sent and not yet answered."""

    def __init__(self, function: str) -> None:
        path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", f"from harness.grading.grader import serve; serve({function!r})"],
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

    def send(self, indices: Sequence[int], jobs: Sequence["Job"]) -> None:
        self.pending.extend(indices)
        message = json.dumps([(job.text, job.stop_reason, job.gold, job.kind, job.rule) for job in jobs])
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
class Job:
    """One row to judge: the arguments of `harness.grading.answers.judge`."""

    text: str
    stop_reason: str
    gold: str
    kind: AnswerKind
    rule: dict[str, Any] | None = None


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

    def __add__(self, other: "CellSummary") -> "CellSummary":
        return replace(self, graded=self.graded + other.graded, outcomes=self.outcomes + other.outcomes)


class Grader:
    """A pool of grading workers: started when first needed, reused for every cell, killed when one overruns.

    Args:
        workers: how many processes at most.
        timeout_s: seconds that one row may take; then its worker is killed, the row is `grader_timeout`, and
            the rows behind it go to a fresh worker. A row whose worker dies of itself counts the same.
        function: `module:name` of what judges a row, called in the worker with (text, stop_reason, gold,
            kind, rule) and returning (answer, outcome).

    Raises:
        UserError: a number out of range.
    """

    def __init__(
        self, *, workers: int = 2, timeout_s: float = 5.0, function: str = "harness.grading.answers:judge"
    ) -> None:
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

    def grade_cell(
        self,
        directory: Path,
        *,
        kind: AnswerKind | None = None,
        regrade: bool = False,
        lenient: bool = False,
        shard: Shard | None = None,
    ) -> CellSummary:
        """Grade the completions of a cell folder that have no grade yet, or all of them.

        Reads `completions.jsonl`, and the golds from `problems.jsonl`; writes `grades.jsonl` as a whole, in
        the order of the completions, by a temporary file; a shard's completions have grades of their own. A
        grade whose gold has changed since is made anew; a grade without a completion is dropped. Of
        completions with the same problem and draw the last counts, as for every reader.

        Args:
            directory: the cell's folder.
            kind: the answer kind; if None it is `benchmark.answer_kind` of the folder's `cell.yaml`.
            regrade: grade every row, whether it has a grade or not.
            lenient: grade by the looser rule (`harness.grading.answers.Rule`) into `grades.lenient.jsonl`, which no report
                reads, and leave `grades.jsonl` as it is.
            shard: whose completions to grade; None for all.

        Raises:
            UserError: a file is missing, broken, or does not fit the others.
        """
        total = CellSummary(directory=directory, graded=0)
        for part in shard_files(directory, COMPLETIONS_FILE):
            if shard in (None, part):
                total += self._grade_shard(directory, part, kind, regrade=regrade, lenient=lenient)
        return total

    def _grade_shard(
        self, directory: Path, shard: Shard, kind: AnswerKind | None, *, regrade: bool, lenient: bool
    ) -> CellSummary:
        stored = latest_rows([directory / shard.file(COMPLETIONS_FILE)], Completion)
        completions = {row.key: row for row in stored}
        if not completions:
            return CellSummary(directory=directory, graded=0)
        kind = kind or read_answer_kind(directory)
        rule = read_rule(directory, lenient=lenient)
        grades_file = shard.file(LENIENT_GRADES_FILE if lenient else GRADES_FILE)
        golds = _read_golds(directory / PROBLEMS_FILE, kind)
        for completion in completions.values():
            if completion.problem_id not in golds:
                raise UserError(
                    f"{directory / shard.file(COMPLETIONS_FILE)} holds problem {completion.problem_id!r}, and "
                    f"{PROBLEMS_FILE} does not; restore it, or delete the folder and run the cell again."
                )
        old = latest_rows([directory / grades_file], Grade)
        grades = {
            row.key: row for row in old if not regrade and row.key in completions and row.gold == golds[row.problem_id]
        }
        missing = [completion for key, completion in completions.items() if key not in grades]
        for row in self._grade(missing, golds, kind, rule):
            grades[row.key] = row
        ordered = [grades[key] for key in completions]
        replace_text(directory / grades_file, "".join(row.to_line() for row in ordered))
        outcomes = Counter(row.outcome for row in ordered)
        return CellSummary(directory=directory, graded=len(missing), outcomes=outcomes)

    def _grade(
        self, completions: Sequence[Completion], golds: dict[str, str], kind: AnswerKind, rule: dict[str, Any]
    ) -> Iterator[Grade]:
        jobs = [
            Job(text=row.text, stop_reason=row.stop_reason, gold=golds[row.problem_id], kind=kind, rule=rule)
            for row in completions
        ]
        try:
            replies = self.judge(jobs)
        except BaseException:
            # Their replies to this call must not be taken for those to the next.
            self.close()
            raise
        for completion, job, reply in zip(completions, jobs, replies, strict=True):
            if "error" in reply:
                raise RuntimeError(f"grading problem {completion.problem_id!r} failed: {reply['error']}")
            yield _grade_row(completion, job.gold, reply["answer"], reply["outcome"])

    def judge(self, jobs: Sequence[Job]) -> list[dict[str, Any]]:
        """Judge rows in the workers; one reply a job, in order: `answer` and `outcome`, or `error` if it raised.

        The one loop that sends, waits, and kills.
        """
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


def read_answer_kind(directory: Path) -> AnswerKind:
    """The answer kind that a cell folder's `cell.yaml` names under `benchmark.answer_kind`.

    Raises:
        UserError: no such file, not YAML, or no kind that this version grades.
    """
    path = directory / CELL_FILE
    try:
        kind = _read_cell(directory)["benchmark"]["answer_kind"]
    except (KeyError, TypeError):
        raise UserError(f"{path} names no benchmark.answer_kind; restore the file or run the cell again.") from None
    if kind not in ANSWER_KINDS:
        raise UserError(
            f"{path} names answer_kind {kind!r}, which must be one of {', '.join(ANSWER_KINDS)}; "
            "grade it with the version that ran it."
        )
    return kind


def read_rule(directory: Path, *, lenient: bool = False) -> dict[str, Any]:
    """How a cell's completions are read, as `harness.grading.answers.judge` takes it: the tags, and where answers stand.

    Raises:
        UserError: `cell.yaml` is missing or broken.
    """
    cell = _read_cell(directory)
    model, benchmark = (cell.get(name) if isinstance(cell, dict) else None for name in ("model", "benchmark"))
    model, benchmark = (part if isinstance(part, dict) else {} for part in (model, benchmark))
    tags = {name: model[f"think_{name}"] for name in ("start", "end") if model.get(f"think_{name}")}
    # A cell from before the setting was there read its answers after the thinking.
    return {"answer_from": benchmark.get("answer_from", "after_think"), "tags": tags, "lenient": lenient}


def _read_cell(directory: Path) -> Any:
    path = directory / CELL_FILE
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{directory} holds no {CELL_FILE}; name a cell's folder.") from None
    except (yaml.YAMLError, UnicodeDecodeError):
        raise UserError(f"{path} names no benchmark.answer_kind; restore the file or run the cell again.") from None


def _read_golds(path: Path, kind: AnswerKind) -> dict[str, str]:
    if not path.exists():
        raise UserError(f"{path} is missing, and with it the reference answers; run the cell again.")
    golds = {problem.id: problem.gold for problem in read_rows(path, Problem)}
    for problem_id, gold in golds.items():
        if canonical_gold(gold, kind) is None:
            raise UserError(f"{path} has the gold {gold!r} for {problem_id!r}, which is no {kind}; correct it.")
    return golds


def main(argv: Sequence[str] | None = None) -> int:
    """Grade every cell below a folder (`kvsweep-grade`); returns 0, or 2 after a user's mistake."""
    arguments = _parser().parse_args(argv)
    try:
        _grade_run(
            arguments.dir, arguments.workers, arguments.timeout, regrade=arguments.all, lenient=arguments.lenient
        )
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
    parser.add_argument(
        "--lenient",
        action="store_true",
        help=f"the looser rule of the DynTS code, for comparison: into {LENIENT_GRADES_FILE}, which no report reads",
    )
    return parser


def _grade_run(root: Path, workers: int, timeout_s: float, *, regrade: bool, lenient: bool) -> None:
    if not root.is_dir():
        raise UserError(f"{root} is no folder; give the folder of a run, such as results/runs/demo.")
    cells = sorted(path.parent for path in root.rglob(CELL_FILE))
    if not cells:
        raise UserError(f"{root} holds no folder with a {CELL_FILE}, so no cell; give the folder of a run.")
    summaries = []
    with Grader(workers=workers, timeout_s=timeout_s) as grader:
        for directory in cells:
            summaries.append(grader.grade_cell(directory, regrade=regrade, lenient=lenient))
            print(_summary_line(str(directory.relative_to(root)), summaries[-1]))
    total = sum(summaries, start=CellSummary(directory=root, graded=0))
    print(_summary_line(f"{'lenient, ' if lenient else ''}total of {len(cells)} cells", total))


def _summary_line(label: str, summary: CellSummary) -> str:
    counts = ", ".join(f"{outcome} {summary.outcomes[outcome]}" for outcome in OUTCOMES)
    return f"{label}: {summary.rows} rows, {summary.graded} graded now: {counts}"


if __name__ == "__main__":
    sys.exit(main())
