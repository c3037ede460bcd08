"""Where jobs run: in this process, several at once on this machine, or as one SLURM array. The work is submitit's."""

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import submitit
from submitit.helpers import Checkpointable
from tqdm import tqdm

from analysis.records import Shard, UserError
from harness.sweep.job import Job


@dataclass(frozen=True, kw_only=True)
class LauncherConfig:
    """How the jobs of a sweep are started (`conf/launcher/`).

    Attributes:
        kind: `inline`: one after the other in this process; `local`: up to `parallel` processes of this machine;
            `slurm`: one array, and this command returns once it is submitted.
        shards: parts that every job is split into, each a task of its own.
        cells_per_task: put small jobs together into one task until it has at least so many cells; None: a job a task.
        parallel: tasks that run at once; None for no limit of our own.
        timeout_min: minutes a task may run before it is stopped and, `max_requeues` times, queued again.
        signal_delay_s: how many seconds before the time limit a task is told of it.
        setup: shell lines that run before each task, such as loading a module.
        additional: any other `#SBATCH` parameter, by sbatch's own name.

    Raises:
        UserError: a number out of range.
    """

    kind: Literal["inline", "local", "slurm"] = "inline"
    shards: int = 1
    cells_per_task: int | None = None
    parallel: int | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    gpus: int = 0
    cpus: int = 1
    memory_gb: float | None = None
    timeout_min: int = 240
    max_requeues: int = 20
    signal_delay_s: int = 120
    setup: Sequence[str] = ()
    additional: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        least = {"shards": 1, "cells_per_task": 1, "parallel": 1, "gpus": 0, "cpus": 1, "timeout_min": 1}
        least |= {"max_requeues": 0, "signal_delay_s": 1}
        for name, bound in least.items():
            value = getattr(self, name)
            if value is not None and value < bound:
                raise UserError(f"launcher.{name}={value} is out of range: it must be at least {bound}.")
        if self.signal_delay_s >= self.timeout_min * 60:
            raise UserError(
                f"launcher.signal_delay_s={self.signal_delay_s} is not below the time limit of {self.timeout_min} "
                "minutes (launcher.timeout_min): a task would be stopped as it starts."
            )


class Task(Checkpointable):
    """Some jobs for one process. Stopped by a time limit it is queued again as it is, and goes on from its files.

    Raises:
        RuntimeError: a job failed, so that the scheduler is told as well.
    """

    def __call__(self, jobs: Sequence[Job]) -> None:
        """Work through the jobs."""
        from harness.sweep.run import run

        if failed := run(jobs):
            raise RuntimeError(f"{len(failed)} of {len(jobs)} jobs failed") from failed[0]


def split(jobs: Sequence[Job], launcher: LauncherConfig) -> list[list[Job]]:
    """The tasks: every job's shards, small jobs together where asked for."""
    parts = [part for job in jobs for part in shards_of(job, launcher.shards)]
    tasks: list[list[Job]] = [[]]
    for part in parts:
        tasks[-1].append(part)
        if sum(len(job.cells) for job in tasks[-1]) >= (launcher.cells_per_task or 1):
            tasks.append([])
    return [task for task in tasks if task]


def shards_of(job: Job, count: int) -> list[Job]:
    """The job's shards.

    Raises:
        UserError: the job is one shard of several already.
    """
    if count == 1:
        return [job]
    if job.shard.count > 1:
        raise UserError(f"shard={job.shard} and launcher.shards={count} both split the cells: give one of them.")
    return [job.of_shard(Shard(index=i, count=count)) for i in range(1, count + 1)]


def submit(tasks: Sequence[Sequence[Job]], launcher: LauncherConfig) -> list[submitit.Job[None]]:
    """Hand the tasks to SLURM as one array; returns at once.

    Raises:
        UserError: this machine has no sbatch, or it refuses the job.
    """
    executor = submitit.SlurmExecutor(folder=_folder(tasks), max_num_timeout=launcher.max_requeues)
    executor.update_parameters(**_slurm_parameters(launcher))
    try:
        return executor.map_array(Task(), [list(task) for task in tasks])
    except (FileNotFoundError, submitit.core.utils.FailedJobError, submitit.core.utils.FailedSubmissionError) as error:
        raise UserError(f"launcher=slurm cannot submit: {error}") from error


def run_local(tasks: Sequence[Sequence[Job]], launcher: LauncherConfig) -> int:
    """Run the tasks as processes of this machine, at most `parallel` at once; returns how many failed."""
    executor = submitit.LocalExecutor(folder=_folder(tasks))
    executor.update_parameters(timeout_min=60 * 24 * 365, setup=list(launcher.setup) or None)
    waiting, running, failed = [list(task) for task in tasks], list[submitit.Job[None]](), 0
    # Each process gets its share of the cores; more threads than cores are many times slower than one.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tqdm(total=len(waiting), unit="task", desc="launcher=local") as progress:
        try:
            while waiting or running:
                while waiting and len(running) < (launcher.parallel or os.cpu_count() or 1):
                    running.append(executor.submit(Task(), waiting.pop(0)))
                for job in [job for job in running if job.done()]:
                    running.remove(job)
                    progress.update()
                    if job.exception() is not None:
                        failed += 1
                        tqdm.write(f"note: a task failed; its output is {job.paths.stderr}", file=sys.stderr)
                time.sleep(0.2)
        except BaseException:
            for job in running:
                job.cancel()
            raise
    return failed


def _folder(tasks: Sequence[Sequence[Job]]) -> Path:
    """Where submitit keeps its scripts, pickles and outputs."""
    folder = tasks[0][0].run_directory / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _slurm_parameters(launcher: LauncherConfig) -> dict[str, Any]:
    parameters = {
        "job_name": "kvsweep",
        "partition": launcher.partition,
        "account": launcher.account,
        "qos": launcher.qos,
        "gpus_per_node": launcher.gpus or None,
        "cpus_per_task": launcher.cpus,
        "mem": None if launcher.memory_gb is None else f"{launcher.memory_gb:g}GB",
        "time": launcher.timeout_min,
        "signal_delay_s": launcher.signal_delay_s,
        "array_parallelism": launcher.parallel or 1000,
        "setup": list(launcher.setup) or None,
        "additional_parameters": dict(launcher.additional) or None,
    }
    return {name: value for name, value in parameters.items() if value is not None}
