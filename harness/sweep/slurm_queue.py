"""What SLURM's queue says about a run's tasks, in words that tell a user what to do."""

import os
import re
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

from kvsweep.harness.provenance import said_by
from kvsweep.run_files.task_status import LOGS, TaskStatus, end_of, noted_jobs, read_tasks, scheduler_jobs

# SLURM's reasons in words that tell a user what to do; other reasons are shown unchanged.
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


# State and reason of each job, by its id.
Queue = dict[str, tuple[str, str]]


def owner_of(run_directory: Path, task: str) -> int:
    """Return the user id of the user who started a task."""
    return TaskStatus.path(run_directory, task).stat().st_uid


def waiting_jobs(owner: int) -> Queue | None:
    """Return a user's jobs in SLURM's queue by id, such as 12_3: state and reason; None if SLURM does not answer."""
    # A user's variables for squeue, such as SQUEUE_STATES, would hide jobs.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SQUEUE_")}
    words = ("squeue", "--noheader", "--all", "--array", "--format=%i|%T|%r", f"--user={owner}")
    output = said_by(*words, env=environment)
    if output is None:
        return None
    rows = re.findall(r"^(.+?)\|(.+?)\|(.*)", output, re.MULTILINE)  # such as 12_3|PENDING|Resources
    return {job: (state, reason) for job, state, reason in rows}


def cluster() -> str:
    """Return the name of the cluster that this machine belongs to, "" if SLURM does not answer."""
    configuration = said_by("scontrol", "show", "config") or ""
    return "".join(re.findall(r"^ClusterName *= *(.*\S)", configuration, re.MULTILINE))


def tasks_now(run_directory: Path, ask: Callable[[int], Queue | None] = waiting_jobs) -> list[TaskStatus]:
    """Read a run directory's tasks, and correct the states of those under SLURM from its queue, which `ask` returns.

    A waiting task has the reason in `error`. A task without a job in the queue has stopped, unless it still gives signs
    of life: its job number may be left over from an earlier job. The queue of another cluster says nothing of a task.
    An unfinished task that has jobs gets as `scheduler_job` the one in the queue, else the last.
    """
    tasks = read_tasks(run_directory)
    unfinished = [task for task in tasks if task.state not in ("done", "failed")]
    # Before the queue is asked: a job that is submitted meanwhile is in the queue for certain.
    jobs_of_task = {task.task: scheduler_jobs(run_directory, task) for task in unfinished}
    ask = cache(ask)
    this_cluster = cache(cluster)
    for task in unfinished:
        jobs = jobs_of_task[task.task]
        if not jobs:
            continue
        task.scheduler_job = jobs[-1]  # which says most of how the task ended
        if task.cluster and task.cluster != this_cluster():
            if task.state == "queued":
                task.error = f"on the cluster {task.cluster}, whose queue this machine does not see: ask there."
            continue
        owner = owner_of(run_directory, task.task)
        queue = ask(owner)
        entries = queue or {}
        in_queue = [job for job in jobs if job in entries]
        # SLURM may hide other users' jobs, so a waiting task of theirs may be in the queue unseen.
        has_left = task.state == "stopped" or (task.state == "queued" and owner == os.getuid())
        if in_queue:
            task.scheduler_job = in_queue[0]
            _show_queue(run_directory, task, *entries[in_queue[0]])
        elif queue is not None and has_left:
            _show_left(run_directory, task)
    return tasks


def _show_left(run_directory: Path, task: TaskStatus) -> None:
    """Set a task whose job has left the queue to stopped, with the end of the job's output.

    If the task has ended since its file was read, it gets the state that the file has now.
    """
    with suppress(ValueError, OSError):
        now = TaskStatus.read(TaskStatus.path(run_directory, task.task))
        if now.state not in ("queued", "running"):
            task.state, task.error = now.state, now.error
            return
    began = "while it ran" if task.started else "before it began"
    job = task.scheduler_job
    reason = f"job {job} left SLURM's queue {began}: cancelled, killed, out of time or memory, or its node is gone."
    output = end_of(run_directory / LOGS / f"{job}_0_log.err")  # submitit's name for the errors of a job's process 0
    task.state = "stopped"
    task.error = f"{reason} Its output ends:\n{output}" if output else reason


def _show_queue(run_directory: Path, task: TaskStatus, state: str, reason: str) -> None:
    """Set a task that is not at work to queued, with the state of its job in words: SLURM will start or requeue it.

    `state` and `reason` are those that squeue prints of the job.
    """
    is_job_of_task = task.scheduler_job in noted_jobs(run_directory, task.task)  # else a shell's job, which may be over
    if state == "SUSPENDED" and is_job_of_task:
        error = "suspended in SLURM: scontrol resume lets it go on."
    elif task.state == "running":  # the task's signs of life say more than the queue
        return
    elif state == "COMPLETING":
        error = "completing in SLURM: the job ends, or it is queued again."
    elif state in ("PENDING", "REQUEUED"):
        # squeue writes some reasons in parentheses, and some with details behind a comma.
        words = REASONS.get(reason.partition(",")[0].strip("()"), reason)
        error = f"{state.lower()} in SLURM: {words}."
    elif is_job_of_task:
        silent = "and the task gives no sign of life: it begins, or its machine stands still"
        error = f"{state.lower()} in SLURM, {silent}."
    else:
        return
    task.state, task.error = "queued", error
