"""SLURM's word on the tasks of a sweep: which still wait in its queue, for what, and which have left it."""

import getpass
import platform
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from kvsweep.base.records import STATUS_FOLDER, TaskStatus, replace_text

ASK = ("squeue", "--noheader", "--array", "--format=%i|%T|%r")
# SLURM's reasons in words that a user can act on; its other reasons are shown as they are.
REASONS = {
    "Resources": "no processors, memory or GPUs are free yet",
    "Priority": "other jobs go first",
    "Dependency": "the job that works on the same cells goes first",
    "JobArrayTaskLimit": "other tasks of the array go first (launcher.parallel)",
    "BeginTime": "SLURM has queued the task again, and the task goes on from its files",
    "Nodes required for job are DOWN": "the nodes that it needs are down, drained or taken; the task goes on by itself",
    "NodeDown": "the node is down; the task goes on when a node is there",
    "ReqNodeNotAvail": "the node is down or reserved; the task goes on when it is back",
    "PartitionDown": "the partition is down: wait, or scancel and submit with another launcher.partition",
    "PartitionInactive": "the partition is inactive: wait, or scancel and submit with another launcher.partition",
    "PartitionTimeLimit": "the partition allows less time: scancel, and submit with a lower launcher.timeout_min",
    "PartitionNodeLimit": "the partition has no node that is large enough: scancel, and ask for less",
    "BadConstraints": "no node can serve the task: scancel, and ask for less",
    "DependencyNeverSatisfied": "the job that it waits for failed: scancel and submit again",
    "JobHeldUser": "the job is held: scontrol release lets it go",
    "launch failed requeued held": "the node failed to start the task: scontrol release lets it go",
    "JobHeldAdmin": "an administrator holds the job: ask there",
}


Queue = dict[str, tuple[str, str]]


def waiting_jobs() -> Queue | None:
    """This user's jobs in SLURM's queue by id, as 12_3: state and reason; None where SLURM cannot be asked."""
    try:
        ended = subprocess.run([*ASK, f"--user={getpass.getuser()}"], capture_output=True, text=True, timeout=20)
    except (OSError, KeyError, subprocess.TimeoutExpired):
        return None
    if ended.returncode:
        return None
    rows = [line.split("|", 2) for line in ended.stdout.splitlines() if line.count("|") >= 2]
    return {job: (state, reason) for job, state, reason in rows}


def job_file(run_directory: Path, task: str) -> Path:
    """The file that names the SLURM jobs of a task, a line each; the task itself writes its status file.

    A task of a sequential sweep has a job for each round.
    """
    return TaskStatus.path(run_directory, task).with_suffix(".job")


def note_jobs(jobs: Iterable[tuple[Path, str, str]]) -> None:
    """Add (run directory, task, SLURM job) of tasks that were submitted."""
    for run_directory, task, job in jobs:
        noted = [*noted_jobs(run_directory, task), job]
        replace_text(job_file(run_directory, task), "".join(f"{one}\n" for one in noted))


def noted_jobs(run_directory: Path, task: str) -> list[str]:
    """The SLURM jobs of a task, in the order in which they work on the task."""
    with suppress(OSError, UnicodeDecodeError):
        return job_file(run_directory, task).read_text(encoding="utf-8").split()
    return []


def read_tasks(run_directory: Path, ask: Callable[[], Queue | None] = waiting_jobs) -> list[TaskStatus]:
    """Read the tasks of a run directory, each with its state as seen from outside; a file that is none is left out.

    `ask` tells SLURM's queue. It is called if a task needs it.
    """
    now, tasks = time.time(), []
    for path in sorted((run_directory / STATUS_FOLDER).glob("*.json")):
        with suppress(ValueError, OSError, RecursionError):
            task = TaskStatus.read(path)
            task.state = task.seen(now)
            tasks.append(task)
    _refresh(run_directory, tasks, ask)
    return tasks


def _refresh(run_directory: Path, tasks: Sequence[TaskStatus], ask: Callable[[], Queue | None]) -> None:
    """Correct the state of tasks that are queued, or run under SLURM, by what SLURM and this machine say; in place.

    A task that waits has the reason in `error`. A task whose job has left the queue has stopped.
    """
    unfinished = [task for task in tasks if task.state not in ("done", "failed")]
    jobs = {task.task: found for task in unfinished if (found := _jobs(run_directory, task))}
    queue = ask() if jobs else None
    for task in unfinished:
        if noted := jobs.get(task.task):
            task.scheduler_job = next((job for job in noted if job in (queue or {})), noted[-1])
        job = task.scheduler_job
        if task.state == "queued" and job is None and _is_gone(task):
            task.state, task.error = "stopped", "the command that queued this task ended before the task began."
        elif queue is not None and job is not None:
            _correct(run_directory, task, job, queue.get(job))


def _correct(run_directory: Path, task: TaskStatus, job: str, found: tuple[str, str] | None) -> None:
    if found is None:
        with suppress(ValueError, OSError):  # the task may have ended since its file was read
            if (now := TaskStatus.read(TaskStatus.path(run_directory, task.task))).state not in ("queued", "running"):
                task.state, task.error = now.state, now.error
                return
        began = "while it ran" if task.started else "before it began"
        reason = f"job {job} left SLURM's queue {began}: cancelled, killed, out of time, or its node is gone."
        task.state, task.error = "stopped", reason
    elif found[0] in ("PENDING", "REQUEUED", "SUSPENDED") and task.state != "running":
        state, reason = found
        words = REASONS.get(reason.partition(",")[0].strip("()"), reason)
        task.state, task.error = "queued", f"{state.lower()} in SLURM: {words}."


def _jobs(run_directory: Path, task: TaskStatus) -> list[str]:
    # The file is newer than what the last run of the same task left in its status.
    noted = noted_jobs(run_directory, task.task) if task.state == "queued" or task.scheduler_job is None else []
    return noted or [job for job in [task.scheduler_job] if job]


def _is_gone(task: TaskStatus) -> bool:
    """True if the process that queued the task ran on this machine and has ended."""
    return bool(task.pid) and task.host == platform.node() and not Path(f"/proc/{task.pid}").exists()
