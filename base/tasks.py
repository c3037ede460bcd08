"""The status files of a sweep's tasks, `<run_directory>/status/<task>.json`, and their one reader."""

import json
import os
import platform
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, Self

import msgspec

from kvsweep.base.escape import file_name
from kvsweep.base.files import make_folder, read_file, replace_text
from kvsweep.base.records import Count, Seconds, content_hash, decode

State = Literal["queued", "running", "done", "failed", "stopped"]
STATUS_FOLDER = "status"
# A file system shared over a network may show a change half a minute late.
LOST_AFTER_S = 60.0


class CellProgress(msgspec.Struct, kw_only=True):
    """One cell within a task: its names for people, and how many of its completions are stored.

    `random_weights`: no Pass@1, the answers mean nothing. `packed`: was any row packed; None where none ever is.
    """

    model: str
    benchmark: str
    policy: str
    finished: Count
    expected: Count
    random_weights: bool = False
    packed: bool | None = None


class TaskStatus(msgspec.Struct, kw_only=True):
    """The status file of one task, `<run_directory>/status/<task>.json`.

    Attributes:
        state: as the task wrote it last; a task that was killed still says "running".
        heartbeat: seconds since the epoch at the last sign of life.
        tokens: live tokens decoded since `started`.
        pace: live tokens per second over the last minute.
        made: completions, or rows of replayed texts, stored since `started`.
        tokens_left: an estimate of the tokens to decode until all completions are stored.
        error: the last lines of the error that ended the task.
        replays: whether the task replays texts, which are counted in place of completions.
        command: the command that tries again; finished work is not repeated.
    """

    task: str
    state: State
    shard: str
    command: str
    cells: dict[str, CellProgress]
    started: Seconds = 0.0
    heartbeat: Seconds = 0.0
    host: str = ""
    pid: Count = 0
    scheduler_job: str | None = None
    tokens: Count = 0
    pace: Seconds = 0.0
    tokens_left: Count = 0
    made: Count = 0
    error: str | None = None
    replays: bool = False

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read one task's file; raises ValueError where it is none."""
        return decode(read_file(path), cls)

    def write(self, run_directory: Path) -> None:
        path = self.path(run_directory, self.task)
        make_folder(path.parent)
        replace_text(path, json.dumps(msgspec.to_builtins(self)) + "\n")

    @staticmethod
    def path(run_directory: Path, task: str) -> Path:
        return run_directory / STATUS_FOLDER / f"{task}.json"

    @property
    def is_gone(self) -> bool:
        """True if the process that wrote this status ran on this machine and has ended."""
        return bool(self.pid) and self.host == platform.node() and not is_alive(self.pid)

    def seen(self, now: float) -> State:
        """The state seen from outside: a task that says "running" without a sign of life has stopped."""
        if self.state != "running":
            return self.state
        return "stopped" if self.is_gone or now - self.heartbeat >= LOST_AFTER_S else "running"


def task_name(model: str, benchmark: str, cell_ids: Iterable[str], shard: str) -> str:
    """The name of a task's file. A rerun of the same cells and shard has the same name, and replaces the old file."""
    names = (file_name(model), file_name(benchmark), shard.replace("/", "of"))
    return "-".join([*names, content_hash([sorted(cell_ids), shard])[:8]])


def policy_label(settings: Mapping[str, Any]) -> str:
    """A policy's name and the settings that tell a grid's cells apart: `dynts 0.3 w64 b5000`."""
    prefixes = {"keep_ratio": "", "local_window": "w", "budget": "b"}
    values = [f"{prefix}{settings[key]}" for key, prefix in prefixes.items() if settings.get(key) is not None]
    return " ".join([str(settings["name"]), *values])


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        pass
    return True


def read_tasks(run_directory: Path, on_bad: Callable[[Path], object] = lambda path: None) -> list[TaskStatus]:
    """The tasks of a run directory, each with its state as seen from outside; a file that is none goes to `on_bad`.

    A task that waits has stopped if the command that queued it has ended on this machine without submitting it.
    """
    now, tasks = time.time(), []
    for path in sorted((run_directory / STATUS_FOLDER).glob("*.json")):
        try:
            task = TaskStatus.read(path)
        except (ValueError, OSError, RecursionError):
            on_bad(path)
            continue
        task.state = task.seen(now)
        if task.state == "queued" and task.is_gone and not scheduler_jobs(run_directory, task):
            task.state, task.error = "stopped", "the command that queued this task ended before the task began."
        tasks.append(task)
    return tasks


def job_file(run_directory: Path, task: str) -> Path:
    """The file that names a task's SLURM jobs, a line each; in a sequential sweep a job for each round."""
    return TaskStatus.path(run_directory, task).with_suffix(".job")


def noted_jobs(run_directory: Path, task: str) -> list[str]:
    """The SLURM jobs that were submitted for a task, in the order in which they work on the task."""
    with suppress(OSError, UnicodeDecodeError):
        return read_file(job_file(run_directory, task)).decode().split()
    return []


def scheduler_jobs(run_directory: Path, task: TaskStatus) -> list[str]:
    """The SLURM jobs of a task: those that were submitted for it, else the one that it runs in."""
    # The file is newer than what the last run of the same task left in its status.
    noted = noted_jobs(run_directory, task.task) if task.state == "queued" or task.scheduler_job is None else []
    return noted or [job for job in [task.scheduler_job] if job]
