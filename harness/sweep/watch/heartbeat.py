"""The status file that each task keeps while it runs."""

import os
import platform
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Self

from kvsweep.base.errors import UserError
from kvsweep.base.tasks import TaskStatus

HEARTBEAT_S = 5.0
# Signs of life over which the pace is measured: a minute.
_BEATS = 12


class Reporter:
    """Keeps a task's status file up to date while the task runs, and writes how the task ended. A context manager.

    A status that cannot be written stops no task. Each of `counters` returns an engine's live tokens so far, and
    `tokens_left` the tokens to come.
    """

    def __init__(self, run_directory: Path, status: TaskStatus) -> None:
        self.status, self._run_directory = status, run_directory
        self.counters: list[Callable[[], int]] = []
        self.tokens_left: Callable[[], int] = lambda: 0
        self._beats: deque[tuple[float, int]] = deque(maxlen=_BEATS)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def __enter__(self) -> Self:
        self.status.state, self.status.error = "running", None
        self.status.host, self.status.pid = platform.node(), os.getpid()
        array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
        # As squeue names the job.
        self.status.scheduler_job = f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID")
        self.status.started = time.time()
        self._write()
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._end.set()
        self._thread.join()
        if error is None:
            self.status.state = "done"
        elif isinstance(error, Exception):
            self.status.state, self.status.error = "failed", last_lines(error)
        else:
            self.status.state = "stopped"
        self._write()

    def stored(self, cell_id: str, packed: bool | None = None) -> None:
        cell = self.status.cells[cell_id]
        cell.finished += 1
        cell.packed = packed if cell.packed is None else cell.packed or packed
        self.status.made += 1

    def _beat(self) -> None:
        while not self._end.wait(HEARTBEAT_S):
            self._write()

    def _write(self) -> None:
        self.status.heartbeat, self.status.tokens = time.time(), sum(count() for count in self.counters)
        self.status.tokens_left = self.tokens_left()
        if self.counters:
            self._beats.append((self.status.heartbeat, self.status.tokens))
            (then, before), (now, tokens) = self._beats[0], self._beats[-1]
            self.status.pace = (tokens - before) / (now - then) if now > then else 0.0
        with suppress(OSError):
            self.status.write(self._run_directory)


def last_lines(error: BaseException) -> str:
    """The text to show of an error: one sentence for a user's mistake, the end of the traceback for any other error."""
    lines = "".join(traceback.format_exception(error)).rstrip().splitlines()
    return str(error) if isinstance(error, UserError) else "\n".join(lines[-12:])
