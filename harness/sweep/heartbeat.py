"""The status file that each task keeps while it runs."""

import json
import os
import platform
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from analysis.records import STATUS_FOLDER, UserError, content_hash

State = Literal["queued", "running", "done", "failed", "stopped"]
HEARTBEAT_S = 5.0

# A file system shared over a network may show a change half a minute late.
LOST_AFTER_S = 60.0
_ERROR_LINES = 12


@dataclass(kw_only=True)
class CellProgress:
    """One cell within a task: its name for people, and how many of its completions are there."""

    model: str
    benchmark: str
    policy: str
    finished: int
    expected: int


@dataclass(kw_only=True)
class TaskStatus:
    """One task's file.

    Attributes:
        state: as the task last said it; `seen` also knows of tasks that died without a word.
        heartbeat: seconds since the epoch at the last sign of life.
        tokens: live tokens decoded since `started`.
        made: completions stored since `started`.
        error: the last lines of what made it fail.
        command: what to run to try again; finished work is not repeated.
    """

    task: str
    state: State
    shard: str
    command: str
    cells: dict[str, CellProgress]
    started: float = 0.0
    heartbeat: float = 0.0
    host: str = ""
    pid: int = 0
    scheduler_job: str | None = None
    tokens: int = 0
    made: int = 0
    error: str | None = None

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read one task's file; raises ValueError, KeyError or TypeError where it is none."""
        row = json.loads(path.read_text())
        return cls(**{**row, "cells": {k: CellProgress(**v) for k, v in row["cells"].items()}})

    def write(self, run_directory: Path) -> None:
        """Replace the task's file; readers see the old one or the new one, whole."""
        folder = run_directory / STATUS_FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.task}.json"
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        temporary.write_text(json.dumps(asdict(self)) + "\n")
        temporary.replace(path)

    def seen(self, now: float) -> State:
        """The state as it looks from outside: a task that says it is running and gives no sign of life has stopped."""
        if self.state != "running":
            return self.state
        if self.host == platform.node() and not Path(f"/proc/{self.pid}").exists() and Path("/proc/self").exists():
            return "stopped"
        return "running" if now - self.heartbeat < LOST_AFTER_S else "stopped"


def task_name(model: str, benchmark: str, cell_ids: Iterable[str], shard: str) -> str:
    """The same for the same cells and shard, so that a rerun takes over its predecessor's file."""
    return f"{model}-{benchmark}-{shard.replace('/', 'of')}-{content_hash([sorted(cell_ids), shard])[:8]}"


class Reporter:
    """Keeps a task's file up to date while it runs. A context manager: what ends it, ends the file's story too.

    A status that cannot be written does not stop the work: the results themselves say so soon enough.

    Attributes:
        counters: each says how many live tokens one of the task's engines has decoded.
    """

    def __init__(self, run_directory: Path, status: TaskStatus) -> None:
        self.status, self._run_directory = status, run_directory
        self.counters: list[Callable[[], int]] = []
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def __enter__(self) -> Self:
        self.status.state, self.status.error = "running", None
        self.status.host, self.status.pid = platform.node(), os.getpid()
        self.status.scheduler_job = scheduler_job()
        self.status.started = time.time()
        self._write()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        self._thread.join()
        if error is None:
            self.status.state = "done"
        elif isinstance(error, Exception):
            self.status.state, self.status.error = "failed", last_lines(error)
        else:
            self.status.state = "stopped"
        self._write()

    def stored(self, cell_id: str) -> None:
        """Count one completion of a cell."""
        self.status.cells[cell_id].finished += 1
        self.status.made += 1

    def _beat(self) -> None:
        while not self._end.wait(HEARTBEAT_S):
            self._write()

    def _write(self) -> None:
        self.status.heartbeat, self.status.tokens = time.time(), sum(count() for count in self.counters)
        with suppress(OSError):
            self.status.write(self._run_directory)


def last_lines(error: BaseException) -> str:
    """What to show of an error: one sentence for a user's mistake, the end of the traceback for anything else."""
    if isinstance(error, UserError):
        return str(error)
    return "\n".join("".join(traceback.format_exception(error)).rstrip().splitlines()[-_ERROR_LINES:])


def scheduler_job() -> str | None:
    """The SLURM job that this process runs in, as squeue names it."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID")


def policy_label(settings: Mapping[str, Any]) -> str:
    """A policy and the settings that tell a grid's cells apart, short: `dynts 0.3 w64 b5000`."""
    parts = [str(settings["name"])]
    for key, prefix in (("keep_ratio", ""), ("local_window", "w"), ("budget", "b")):
        if settings.get(key) is not None:
            parts.append(f"{prefix}{settings[key]}")
    return " ".join(parts)
