"""Worker processes that judge rows and cannot hang or fill the machine.

A worker is killed when a row overruns its time, and its memory is limited, so that a hostile text costs its own row
alone. The workers are plain subprocesses that talk in lines of JSON: `multiprocessing`, and with it pebble, would
import the caller's main module, and torch with it, in each of them.
"""

import contextlib
import importlib
import json
import math
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from kvsweep.base.command_line import guard_streams
from kvsweep.base.errors import UserError
from kvsweep.base.records import Outcome
from kvsweep.harness.grading.answers import AnswerKind

_ROWS_PER_MESSAGE = 16
_START_LIMIT_S = 60.0
# The longest wait of the pool; what passes beyond it passes while this process stands still.
_LOOK_S = 0.5

# What one worker may take of the machine: a power tower must not take all of it.
_WORKER_BYTES = 4 << 30


@dataclass(frozen=True, kw_only=True)
class Job:
    """One row to judge: the arguments of `harness.grading.answers.judge`."""

    text: str
    stop_reason: str
    gold: str
    kind: AnswerKind
    rule: dict[str, Any] | None = None


def serve(function: str) -> None:
    """The main loop of a worker: lines of jobs in, one line of verdict a job out, until the input ends."""
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
        for job in json.loads(line):
            try:
                answer, outcome, *why = judge_row(*job)
                reply = {"answer": answer, "outcome": outcome, "why": why}
            except MemoryError:
                reply = {"answer": None, "outcome": "grader_timeout"}
            except Exception as error:
                reply = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(reply), file=replies, flush=True)


class _Worker:
    """A worker process, and the jobs it has been sent and not yet answered."""

    def __init__(self, function: str, deadline: float) -> None:
        path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", f"from kvsweep.harness.grading.pool import serve; serve({function!r})"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            process_group=0,  # Ctrl-C reaches the terminal's whole group; the parent decides when a worker ends
            env={**os.environ, "PYTHONPATH": path},
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout.fileno()
        self._received = b""
        self.pending: deque[int] = deque()
        self.started = False
        self.deadline = deadline

    def fileno(self) -> int:
        return self._output

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def send(self, indices: Sequence[int], jobs: Sequence["Job"]) -> None:
        self.pending.extend(indices)
        message = json.dumps([(job.text, job.stop_reason, job.gold, job.kind, job.rule) for job in jobs])
        # If the worker has died, its output is closed: `receive` finds that, and the job that it died at.
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
        """Kill the process and wait until it is gone; its replies are no longer read."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        # Closing writes what is still in the buffer, to a process that is gone.
        with contextlib.suppress(BrokenPipeError):
            self._input.close()


class Pool:
    """Grading workers: started when first needed, reused for every call, killed when one overruns.

    Args:
        workers: how many processes at most.
        timeout_s: seconds that one row may take; then its worker is killed, and the rows behind it go to a fresh
            worker. The row itself gets a second try, and is `grader_timeout` if it overruns that too. A row whose
            worker dies of itself counts the same. Time in which this process is stopped does not count.
        function: `module:name` of what judges a row, called in the worker with (text, stop_reason, gold,
            kind, rule) and returning (answer, outcome) or more.
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
        self._now = 0.0  # seconds in which this process was awake and waited

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        for worker in self._workers:
            worker.end()
        self._workers.clear()

    def judge(self, jobs: Sequence[Job]) -> list[dict[str, Any]]:
        """Judge rows in the workers; one reply a job, in order.

        A reply holds `answer`, `outcome` and `why` (what else the function returned), or `error` if it raised.
        This is the one loop that sends, waits, and kills.
        """
        replies: dict[int, dict[str, Any]] = {}
        tried: set[int] = set()
        size = max(1, min(_ROWS_PER_MESSAGE, math.ceil(len(jobs) / self._limit)))  # so that every worker has some
        waiting = deque(range(start, min(start + size, len(jobs))) for start in range(0, len(jobs), size))
        while len(replies) < len(jobs):
            while waiting and (worker := self._idle_worker()) is not None:
                indices = waiting.popleft()
                if worker.started:
                    worker.deadline = self._now + self._timeout_s
                worker.send(indices, [jobs[index] for index in indices])
            busy = [worker for worker in self._workers if worker.pending]
            start = time.monotonic()
            readable = _wait(busy, min(_LOOK_S, min(worker.deadline for worker in busy) - self._now))
            self._now += min(time.monotonic() - start, 2 * _LOOK_S)
            for worker in busy:
                received = worker.receive() if worker in readable else []
                if received is None or (not received and self._now >= worker.deadline):
                    lost, *rest = self._drop(worker)
                    if lost in tried:
                        replies[lost] = {"answer": None, "outcome": "grader_timeout"}
                    else:
                        tried.add(lost)
                        waiting.append(range(lost, lost + 1))
                    if rest:
                        waiting.append(range(rest[0], rest[-1] + 1))
                    continue
                for reply in received:
                    worker.deadline = self._now + self._timeout_s
                    if worker.started:
                        replies[worker.pending.popleft()] = reply
                    worker.started = True
        return [replies[index] for index in range(len(jobs))]

    def verdict(self, job: Job) -> tuple[str | None, Outcome]:
        """Judge one row: the answer that was read from it, and its outcome. Raises RuntimeError: the judge raised."""
        [reply] = self.judge([job])
        if "error" in reply:
            raise RuntimeError(f"grading failed: {reply['error']}")
        return reply["answer"], reply["outcome"]

    def _idle_worker(self) -> _Worker | None:
        for worker in [worker for worker in self._workers if not worker.pending]:
            if worker.is_alive():
                return worker
            self._drop(worker)
        if len(self._workers) == self._limit:
            return None
        self._workers.append(_Worker(self._function, self._now + _START_LIMIT_S))
        return self._workers[-1]

    def _drop(self, worker: _Worker) -> list[int]:
        """End a worker that hangs or has died; the jobs it leaves, the one it was at first."""
        self._workers.remove(worker)
        worker.end()
        if not worker.started:
            raise RuntimeError(f"a grading worker for {self._function} did not start; its error is above")
        return list(worker.pending)


def _wait(workers: Sequence[_Worker], seconds: float) -> list[_Worker]:
    """The workers with something to read, as soon as one has, or after so many seconds."""
    poll = select.poll()
    for worker in workers:
        poll.register(worker.fileno(), select.POLLIN)
    # Rounded up: woken a moment early, the loop would spin.
    ready = {fd for fd, _ in poll.poll(max(0.0, seconds) * 1000 + 1)}
    return [worker for worker in workers if worker.fileno() in ready]
