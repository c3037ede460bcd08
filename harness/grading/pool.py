"""Worker processes that judge rows and cannot hang or fill the machine.

A worker is killed when a row overruns its time, and its memory is limited, so that a hostile text costs its own row
alone. The workers are plain subprocesses that talk in lines of JSON: `multiprocessing`, and with it pebble, would
import the caller's main module, and torch with it, in each of them.
"""

import importlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Self

from kvsweep.base.command_line import guard_streams
from kvsweep.base.errors import UserError
from kvsweep.base.records import Outcome
from kvsweep.harness.grading.answers import AnswerKind

_START_LIMIT_S = 60.0
# The longest wait for a worker; what passes beyond it passes while this process stands still.
_LOOK_S = 0.5

# What one worker may take of the machine: a power tower must not take all of it.
_WORKER_BYTES = 4 << 30
_OVERRAN: dict[str, Any] = {"answer": None, "outcome": "grader_timeout"}


@dataclass(frozen=True, kw_only=True)
class Job:
    """One row to judge: the arguments of `harness.grading.answers.judge`."""

    text: str
    stop_reason: str
    gold: str
    kind: AnswerKind
    rule: dict[str, Any] | None = None


def serve(function: str) -> None:
    """The main loop of a worker: a line for a job in, a line for its verdict out, until the input ends."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = _WORKER_BYTES if hard == resource.RLIM_INFINITY else min(_WORKER_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    # A worker whose parent has ended dies without a word when it replies.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    # A library that prints must not write between the replies.
    replies = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)
    guard_streams()
    module, _, name = function.partition(":")
    judge_row = getattr(importlib.import_module(module), name)
    print("{}", file=replies, flush=True)
    for line in sys.stdin.buffer:
        try:
            answer, outcome, *why = judge_row(*json.loads(line))
            reply = {"answer": answer, "outcome": outcome, "why": why}
        except MemoryError:
            reply = _OVERRAN
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), file=replies, flush=True)


class _Worker:
    """A worker process, which judges one row at a time."""

    def __init__(self, function: str) -> None:
        path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
        self._function, self._started = function, False
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", f"from kvsweep.harness.grading.pool import serve; serve({function!r})"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            process_group=0,  # Ctrl-C reaches the terminal's whole group; the parent decides when a worker ends
            env={**os.environ, "PYTHONPATH": path},
        )

    def judge(self, job: Job, seconds: float) -> dict[str, Any] | None:
        """The reply to a job; None if the process has ended, or has taken more than so many seconds."""
        assert self._process.stdin is not None
        if not self._started and self._receive(_START_LIMIT_S) is None:
            raise RuntimeError(f"a grading worker for {self._function} did not start; its error is above")
        self._started = True
        with suppress(BrokenPipeError):  # of a process that has ended the output ends, too
            self._process.stdin.write(json.dumps(astuple(job)).encode() + b"\n")
            self._process.stdin.flush()
        return self._receive(seconds)

    def _receive(self, seconds: float) -> dict[str, Any] | None:
        """The next line of the output. Time in which this process is stopped does not count."""
        assert self._process.stdout is not None
        output, line, waited = self._process.stdout.fileno(), b"", 0.0
        poll = select.poll()
        poll.register(output, select.POLLIN)
        while not line.endswith(b"\n"):
            start = time.monotonic()
            # Rounded up: woken a moment early, the loop would spin.
            ready = poll.poll(min(_LOOK_S, seconds - waited) * 1000 + 1)
            waited += min(time.monotonic() - start, 2 * _LOOK_S)
            piece = os.read(output, 1 << 16) if ready else b""
            if not piece and (ready or waited >= seconds):
                return None
            line += piece
        return dict(json.loads(line))

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> None:
        """Kill the process, wait until it is gone, and close its pipes."""
        with suppress(BrokenPipeError), self._process:
            self._process.kill()


class Pool:
    """At most `workers` grading processes: started when first needed, reused for every call, killed when one overruns.

    A row has `timeout_s` seconds; then its worker is killed. When all other rows are judged, the row gets a second try,
    and is `grader_timeout` if it overruns that too. A row whose worker dies of itself counts the same. Time in which
    this process is stopped does not count. `function`, as `module:name`, judges a row in the worker: of (text,
    stop_reason, gold, kind, rule) it makes (answer, outcome) or more.
    """

    def __init__(
        self, *, workers: int = 2, timeout_s: float = 5.0, function: str = "kvsweep.harness.grading.answers:judge"
    ) -> None:
        if workers < 1:
            raise UserError(f"workers={workers} must be 1 or more; leave it out for the default of 2.")
        if not 0 < timeout_s < float("inf"):
            raise UserError(f"timeout={timeout_s} must be a number of seconds above 0; leave it out for 5.")
        self._limit, self._timeout_s, self._function = workers, timeout_s, function
        self._workers: list[_Worker] = []
        self._idle: list[_Worker] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        while self._workers:
            self._workers.pop().end()
        self._idle.clear()

    def judge(self, jobs: Sequence[Job]) -> list[dict[str, Any]]:
        """Judge rows, one reply a job, in order: `answer`, `outcome` and `why` (all else), or `error` if it raised."""
        threads = ThreadPoolExecutor(self._limit)
        try:
            replies = dict(enumerate(threads.map(self._try, jobs)))
            lost = [index for index, reply in replies.items() if reply is None]
            replies |= zip(lost, threads.map(self._try, [jobs[index] for index in lost]), strict=True)
        except BaseException:
            for worker in self._workers:
                worker.kill()
            threads.shutdown()  # no thread uses a worker from here on
            self.close()
            raise
        threads.shutdown()
        return [reply or _OVERRAN for reply in replies.values()]

    def verdict(self, job: Job) -> tuple[str | None, Outcome]:
        """Judge one row: the answer that was read from it, and its outcome. Raises RuntimeError: the judge raised."""
        [reply] = self.judge([job])
        if "error" in reply:
            raise RuntimeError(f"grading failed: {reply['error']}")
        return reply["answer"], reply["outcome"]

    def _try(self, job: Job) -> dict[str, Any] | None:
        """The reply of an idle worker, or of a new one; None if the worker overran or died, and is gone."""
        try:
            worker = self._idle.pop()
        except IndexError:
            worker = _Worker(self._function)
            self._workers.append(worker)
        reply = worker.judge(job, self._timeout_s)
        if reply is None:
            self._workers.remove(worker)
            worker.end()
        else:
            self._idle.append(worker)
        return reply
