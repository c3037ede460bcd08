"""The status files of a sweep's tasks, `<run_directory>/status/<task>.json`: their only writer and only reader."""

import json
import os
import platform
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, Self

import msgspec

from kvsweep.messages.errors import UserError
from kvsweep.messages.escape import file_name
from kvsweep.run_files.row_types import Count, Seconds, content_hash, decode
from kvsweep.run_files.safe_files import make_folder, open_file, read_file, replace_text

State = Literal["queued", "running", "done", "failed", "stopped"]
STATUS_FOLDER = "status"
LOGS = "logs"  # beside it, what the tasks write
# A network file system may show a change half a minute late.
LOST_AFTER_S = 60.0
HEARTBEAT_S = 5.0
# The pace is measured over this many signs of life: a minute.
_BEATS = 12
# How much of an error or output a status shows, from its end.
_SHOWN_LINES, _SHOWN_BYTES = 12, 4096


class CellProgress(msgspec.Struct, kw_only=True):
    """One cell's progress within a task: its names for people, and how many of its completions are stored.

    `not_finite`: completions that ended because logits were NaN or infinite. `random_weights`: no Pass@1, because the
    answers mean nothing.
    """

    model: str
    benchmark: str
    policy: str
    finished: Count
    expected: Count
    random_weights: bool = False
    not_finite: Count = 0


class TaskStatus(msgspec.Struct, kw_only=True):
    """The status file of one task, `<run_directory>/status/<task>.json`."""

    task: str
    state: State  # as the task last wrote it; a killed task still says "running"
    shard: str
    command: str  # the command that tries again; finished work is not repeated
    cells: dict[str, CellProgress]
    started: Seconds = 0.0
    heartbeat: Seconds = 0.0  # seconds since the epoch at the last sign of life
    host: str = ""
    pid: Count = 0
    process: str = ""  # its `process_mark`
    scheduler_job: str | None = None
    cluster: str = ""  # the SLURM that has the job
    tokens: Count = 0  # live tokens decoded since `started`
    pace: Seconds = 0.0  # live tokens per second over the last minute
    tokens_left: Count = 0  # an estimate of the tokens to decode until all completions are stored
    made: Count = 0  # completions, or rows of replayed texts, stored since `started`
    error: str | None = None  # the last lines of the error that ended the task
    note: str = ""  # why its tracker gets no more values
    replays: bool = False  # True: the task replays completions, which are counted instead

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read one task's file; raises ValueError if it is not a status."""
        return decode(read_file(path), cls)

    def write(self, run_directory: Path) -> None:
        path = self.path(run_directory, self.task)
        make_folder(path.parent)
        replace_text(path, json.dumps(msgspec.to_builtins(self)) + "\n")

    @staticmethod
    def path(run_directory: Path, task: str) -> Path:
        return run_directory / STATUS_FOLDER / f"{task}.json"

    def sign(self) -> None:
        """Record that this process works on the task."""
        self.host, self.pid, self.process = platform.node(), os.getpid(), process_mark(os.getpid())

    @property
    def lives(self) -> bool | None:
        """True if the process that wrote this status is at work; None if only its signs of life can tell.

        A process number means nothing on another machine, after a restart, or in another namespace (a container). A
        machine may hide other users' processes (hidepid).
        """
        # A mark is "MACHINE NAMESPACE START", so that what lies before the last space is the place.
        reader_place, _, _ = process_mark(os.getpid()).rpartition(" ")
        writer_place, _, _ = self.process.rpartition(" ")
        if not self.process or writer_place != reader_place:
            return None
        mark_now = process_mark(self.pid)
        if not mark_now and _is_of_another_user(self.pid):
            return None
        return mark_now == self.process

    def seen(self, path: Path) -> State:
        """Return the state as seen from outside, for the status in this file.

        A task that says "running" has stopped if its process has ended. If this machine cannot know that, the task has
        stopped after LOST_AFTER_S without a sign of life, by the writer's clock and by the file system's.
        """
        if self.state != "running" or self.lives:
            return self.state
        now = time.time()
        signs_of_life = [self.heartbeat, path.stat().st_mtime]
        is_silent = all(abs(now - sign) >= LOST_AFTER_S for sign in signs_of_life)  # a clock may be ahead
        # `lives` is False, or None if this machine cannot know.
        return "stopped" if self.lives is False or is_silent else "running"


def task_name(model: str, benchmark: str, cell_ids: Iterable[str], shard: str) -> str:
    """Return the name of a task's file. A rerun of the same cells and shard has the same name and file."""
    names = (file_name(model), file_name(benchmark), shard.replace("/", "of"))
    return "-".join([*names, content_hash([sorted(cell_ids), shard])[:8]])


def policy_label(settings: Mapping[str, Any]) -> str:
    """A policy's name and the settings that tell a grid's cells apart: `dynts 0.3 w64 b5000`."""
    prefixes = {"keep_ratio": "", "local_window": "w", "budget": "b"}
    values = [f"{prefix}{settings[key]}" for key, prefix in prefixes.items() if settings.get(key) is not None]
    return " ".join([str(settings["name"]), *values])


def process_mark(pid: int) -> str:
    """Return a mark that no other process has: machine start, namespace, own start; "" if there is no such process."""
    with suppress(OSError, IndexError):
        # Behind the name in parentheses come the state, which is the third field, and the others from the fourth on.
        _, _, behind_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
        state, *fields = behind_name.split()
        if state == "Z":  # a process that nobody has waited for is dead
            return ""
        start = fields[22 - 4]  # the 22nd
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = Path("/proc/self/ns/pid").readlink()
        return f"{machine} {namespace} {start}"
    return ""


def _is_of_another_user(pid: int) -> bool:
    """True if a process with this number runs and this user may not signal it."""
    try:
        os.kill(pid, 0)
    except OSError as error:
        return isinstance(error, PermissionError)
    return False


def read_tasks(run_directory: Path, on_bad: Callable[[Path], object] = lambda path: None) -> list[TaskStatus]:
    """Return a run directory's tasks, with states as seen from outside; an invalid file goes to `on_bad`.

    A waiting task has stopped if the command that queued it has ended on this machine without submitting it.
    """
    tasks = []
    for path in sorted((run_directory / STATUS_FOLDER).glob("*.json")):
        try:
            task = TaskStatus.read(path)
            task.state = task.seen(path)
        except (ValueError, OSError, RecursionError):
            on_bad(path)
            continue
        if task.state == "queued" and task.lives is False and not scheduler_jobs(run_directory, task):
            task.state = "stopped"
            task.error = "the command that queued this task ended before the task began."
        tasks.append(task)
    return tasks


def job_file(run_directory: Path, task: str) -> Path:
    """Return the file with a task's SLURM jobs, one per line; in a sequential sweep one job per round."""
    return TaskStatus.path(run_directory, task).with_suffix(".job")


def noted_jobs(run_directory: Path, task: str) -> list[str]:
    """Return the SLURM jobs submitted for a task, in the order in which they work on it."""
    with suppress(OSError, UnicodeDecodeError):
        return read_file(job_file(run_directory, task)).decode().split()
    return []


def note_job(run_directory: Path, task: str, job: str) -> None:
    with open_file(job_file(run_directory, task), "ab") as file:
        file.write(f"{job}\n".encode())


def scheduler_jobs(run_directory: Path, task: TaskStatus) -> list[str]:
    """Return a task's SLURM jobs: that which it runs or ran in, or those submitted for it if it waits."""
    working = [task.scheduler_job] if task.scheduler_job else []
    # A waiting task's status may be that of an earlier run, which names that run's job.
    if working and task.state != "queued":
        return working
    # Without a note it was not submitted, but works in the job of the shell that started it.
    return noted_jobs(run_directory, task.task) or working


class Reporter:
    """Keeps a task's status file current while the task runs, and records how it ended. A context manager.

    A status that cannot be written does not stop the task. Each of `counters` returns an engine's live tokens so far;
    `tokens_left` returns the tokens still to decode.
    """

    def __init__(self, run_directory: Path, status: TaskStatus) -> None:
        self.status, self._run_directory = status, run_directory
        self.counters: list[Callable[[], int]] = []
        self.tokens_left: Callable[[], int] = lambda: 0
        self._beats: deque[tuple[float, int]] = deque(maxlen=_BEATS)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def __enter__(self) -> Self:
        """Write that the task runs, and go on writing signs of life."""
        self.status.state = "running"
        self.status.error = None
        self.status.sign()
        array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
        # As squeue names the job.
        self.status.scheduler_job = f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID")
        self.status.cluster = os.environ.get("SLURM_CLUSTER_NAME", "")
        self.status.started = time.time()
        self._write()
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Write how the task ended: done, failed with an error, or stopped from outside."""
        self._end.set()
        self._thread.join()
        if error is None:
            self.status.state = "done"
        elif isinstance(error, Exception):
            self.status.state = "failed"
            self.status.error = last_lines(error)
        else:
            self.status.state = "stopped"
        self._write()

    def stored(self, cell_id: str) -> None:
        self.status.cells[cell_id].finished += 1
        self.status.made += 1

    def _beat(self) -> None:
        while not self._end.wait(HEARTBEAT_S):
            self._write()

    def _write(self) -> None:
        """Write the status with a sign of life, and the pace since the oldest of the last ones."""
        now = time.time()
        tokens = sum(count() for count in self.counters)
        self.status.heartbeat = now
        self.status.tokens = tokens
        self.status.tokens_left = self.tokens_left()
        if self.counters:
            self._beats.append((now, tokens))
            earlier, earlier_tokens = self._beats[0]
            self.status.pace = (tokens - earlier_tokens) / (now - earlier) if now > earlier else 0.0
        with suppress(OSError):
            self.status.write(self._run_directory)


def end_of(output: Path) -> str:
    """Return the last lines of a process's output, such as its last error; "" if it wrote nothing."""
    with suppress(OSError), open_file(output) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _SHOWN_BYTES))
        lines = file.read().decode(errors="replace").rstrip().splitlines()
        return "\n".join(lines[-_SHOWN_LINES:])
    return ""


def last_lines(error: BaseException) -> str:
    """Return an error as text: one sentence for a user's mistake, else the end of the traceback."""
    if isinstance(error, UserError):
        return str(error)
    lines = "".join(traceback.format_exception(error)).rstrip().splitlines()
    return "\n".join(lines[-_SHOWN_LINES:])
