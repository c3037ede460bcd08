"""SLURM's word on the tasks of a sweep: which still wait in its queue, for what, and which have left it."""

import getpass
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from kvsweep.base.files import replace_text
from kvsweep.base.tasks import TaskStatus, job_file, noted_jobs, read_tasks, scheduler_jobs

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
        asked = ["squeue", "--noheader", "--array", "--format=%i|%T|%r", f"--user={getpass.getuser()}"]
        said = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, KeyError, subprocess.SubprocessError):
        return None
    rows = [line.split("|", 2) for line in said.splitlines() if line.count("|") >= 2]
    return {job: (state, reason) for job, state, reason in rows}


def note_job(run_directory: Path, task: str, job: str) -> None:
    noted = [*noted_jobs(run_directory, task), job]
    replace_text(job_file(run_directory, task), "".join(f"{one}\n" for one in noted))


def tasks_now(run_directory: Path, ask: Callable[[], Queue | None] = waiting_jobs) -> list[TaskStatus]:
    """Read the tasks of a run directory, and correct the state of those under SLURM by its queue, which `ask` returns.

    A task that waits has the reason in `error`. A task whose job has left the queue has stopped.
    """
    tasks = read_tasks(run_directory)
    unfinished = [task for task in tasks if task.state not in ("done", "failed")]
    jobs = {task.task: found for task in unfinished if (found := scheduler_jobs(run_directory, task))}
    queue = ask() if jobs else None
    for task in unfinished:
        if noted := jobs.get(task.task):
            task.scheduler_job = next((job for job in noted if job in (queue or {})), noted[-1])
            if queue is not None:
                _correct(run_directory, task, task.scheduler_job, queue.get(task.scheduler_job))
    return tasks


def _correct(run_directory: Path, task: TaskStatus, job: str, found: tuple[str, str] | None) -> None:
    if found is None:
        with suppress(ValueError, OSError):  # the task may have ended since its file was read
            if (now := TaskStatus.read(TaskStatus.path(run_directory, task.task))).state not in ("queued", "running"):
                task.state, task.error = now.state, now.error
                return
        began = "while it ran" if task.started else "before it began"
        reason = f"job {job} left SLURM's queue {began}: cancelled, killed, out of time or memory, or its node is gone."
        task.state, task.error = "stopped", reason
    elif found[0] == "SUSPENDED":
        task.state, task.error = "queued", "suspended in SLURM: scontrol resume lets it go on."
    elif found[0] in ("PENDING", "REQUEUED") and task.state != "running":
        state, reason = found
        words = REASONS.get(reason.partition(",")[0].strip("()"), reason)
        task.state, task.error = "queued", f"{state.lower()} in SLURM: {words}."
