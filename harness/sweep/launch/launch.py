"""Start jobs: in this process, as several processes of this machine, or as one SLURM array; submitit does the work."""

import io
import os
import platform
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product, zip_longest
from pathlib import Path
from typing import Annotated, Any, Literal

import submitit
from pydantic import Field
from submitit.helpers import Checkpointable
from tqdm import tqdm

from kvsweep.base.command_line import FAILED, guard_streams, say
from kvsweep.base.errors import UserError, plain_disk_errors
from kvsweep.base.records import Shard, TaskStatus
from kvsweep.harness.sweep.plan.job import Job, checked_implementation
from kvsweep.harness.sweep.run.store import most_open_cells
from kvsweep.harness.sweep.watch.scheduler import job_file, note_jobs, noted_jobs, read_tasks, waiting_jobs
from kvsweep.kernels.implementation import check_available

_AtLeastOne = Annotated[int, Field(ge=1)]


@dataclass(frozen=True, kw_only=True)
class LauncherConfig:
    """How the jobs of a sweep are started. `conf/launcher/slurm.yaml` describes each field.

    `inline` runs one job after the other in this process, `local` up to `parallel` processes of this machine. `slurm`
    submits one array, and the command returns once the array is submitted. Sequential jobs (`until=decided`) are run
    round by round: `local` starts processes for each round, and `slurm` submits an array for each, which waits for the
    array before it.

    Raises:
        UserError: the signal would come before the task starts.
    """

    kind: Literal["inline", "local", "slurm"] = "inline"
    shards: _AtLeastOne = 1
    cells_per_task: _AtLeastOne | None = None
    parallel: _AtLeastOne | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    gpus: Annotated[int, Field(ge=0)] = 0
    cpus: _AtLeastOne = 1
    memory_gb: float | None = None
    timeout_min: _AtLeastOne = 240
    max_requeues: Annotated[int, Field(ge=0)] = 20
    signal_delay_s: _AtLeastOne = 120
    setup: Sequence[str] = ()
    additional: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.signal_delay_s >= self.timeout_min * 60:
            raise UserError(
                f"launcher.signal_delay_s={self.signal_delay_s} is not below the time limit of {self.timeout_min} "
                "minutes (launcher.timeout_min): a task would be stopped as it starts."
            )


class RunJobs(Checkpointable):
    """The function of one task. A task that the time limit stops is queued again, and resumes from its files.

    Raises:
        RuntimeError: a job failed; the scheduler then calls the task failed.
    """

    def __call__(self, jobs: Sequence[Job]) -> None:
        """Work through the jobs."""
        from kvsweep.harness.sweep.run.execute import run  # imports torch, which the submitting process does not need

        guard_streams()
        if failed := run(jobs):
            raise RuntimeError(f"{len(failed)} of {len(jobs)} jobs failed") from failed[0]


def launch(jobs: Sequence[Job], launcher: LauncherConfig) -> None:
    """Run the jobs as the launcher says, and print the results or where to look for them.

    Exits with code 1 if a process of `launcher=local` fails.

    Raises:
        Exception: that of the first job that failed in this process, after all jobs have ended.
    """
    directories = list(dict.fromkeys(job.run_directory for job in jobs))
    if not any(job.unfinished_cells() for job in jobs):
        cells = len({(job.run_directory, cell.cell_id) for job in jobs for cell in job.cells})
        print(f"nothing to do: all {cells} cells are done")
        for directory in directories:
            print(f"results: {directory}\nreport:  kvsweep-report {directory}")
        return
    rounds = [split(part, launcher) for part in by_round(jobs)]
    if launcher.kind != "slurm":
        for job in jobs:
            checked_implementation(job.impl, check_available)
    elif shutil.which("srun") is None:
        raise UserError("launcher=slurm finds no srun on this machine: submit from a login node of a SLURM cluster.")
    ahead = jobs_ahead(jobs) if launcher.kind == "slurm" else []
    queued = [path for task in rounds[0] for job in task if (path := _queue(job))]
    if launcher.kind == "slurm":
        for tasks in rounds:
            try:
                submitted = submit(tasks, launcher, ahead)
            except BaseException:
                for path in queued:
                    path.unlink(missing_ok=True)
                raise
            ahead, queued = [submitted[0].job_id.partition("_")[0]], []
            print(f"submitted {len(submitted)} tasks as job {ahead[0]}")
        for directory in directories:
            print(f"progress: kvsweep-status {directory} --watch\nreport:   kvsweep-report {directory}")
        return
    if launcher.kind == "local":
        for tasks in rounds:
            tasks = [task for task in tasks if any(job.unfinished_cells() for job in task)]
            if tasks and (failed := run_local(tasks, launcher)):
                sys.exit(say("kvsweep", f"{failed} of {len(tasks)} tasks failed: kvsweep-status says which.", FAILED))
    else:
        from kvsweep.harness.sweep.run.execute import run

        if failures := run([job for tasks in rounds for task in tasks for job in task]):
            raise failures[0]
    from kvsweep.analysis.report.tables import summary_table  # imports pandas

    for directory in directories:
        print(summary_table(directory))
        print(f"results: {directory}\nreport:  kvsweep-report {directory}")


def by_round(jobs: Sequence[Job]) -> list[list[Job]]:
    """The first round of every job, then the second round of those that have one, and so on."""
    rounds = zip_longest(*(job.in_rounds() for job in jobs))
    return [[job for job in part if job is not None] for part in rounds]


def split(jobs: Sequence[Job], launcher: LauncherConfig) -> list[list[Job]]:
    """The tasks: every job's shards, with small jobs together where the launcher asks for it.

    A job with more cells than a process may hold open becomes several jobs.

    Raises:
        UserError: two settings split the cells, or a sequential job, which decides its cells together, has too many.
    """
    tasks: list[list[Job]] = [[]]
    most = most_open_cells()
    for job in jobs:
        shards = [Shard(index=i, count=launcher.shards) for i in range(1, launcher.shards + 1)]
        if job.shard.count > 1:
            if len(shards) > 1:
                raise UserError(
                    f"shard={job.shard} and launcher.shards={launcher.shards} both split the cells: give one of them."
                )
            shards = [job.shard]
        if job.rounds and len(job.cells) > most:
            raise UserError(
                f"until=decided with {len(job.cells)} cells needs a file open for each, and the limit allows {most}: "
                "raise `ulimit -n`, make the grid smaller, or leave out until=decided."
            )
        parts = [replace(job, cells=job.cells[i : i + most]) for i in range(0, len(job.cells), most)]
        for part, shard in product(parts, shards):
            tasks[-1].append(replace(part, shard=shard))
            if sum(len(one.cells) for one in tasks[-1]) >= (launcher.cells_per_task or 1):
                tasks.append([])
    return [task for task in tasks if task]


def _queue(job: Job) -> Path | None:
    """Write the status that the job is queued, unless the job runs already or has nothing left to do."""
    if not job.unfinished_cells():
        return None
    status = job.status("queued")
    status.host, status.pid = platform.node(), os.getpid()
    with suppress(OSError, ValueError):
        if TaskStatus.read(TaskStatus.path(job.run_directory, status.task)).seen(time.time()) == "running":
            return None
    with plain_disk_errors(job.run_directory):
        job_file(job.run_directory, status.task).unlink(missing_ok=True)
        status.write(job.run_directory)
    return TaskStatus.path(job.run_directory, status.task)


def jobs_ahead(jobs: Sequence[Job]) -> list[str]:
    """The SLURM jobs that wait or run with cells of these jobs; prints a note of what happens to them."""
    ahead: dict[str, None] = {}
    ask = cache(waiting_jobs)
    for directory in dict.fromkeys(job.run_directory for job in jobs):
        cells = {cell.cell_id for job in jobs if job.run_directory == directory for cell in job.cells}
        for task in read_tasks(directory, ask):
            if task.state in ("queued", "running") and cells & task.cells.keys():
                if task.scheduler_job is None:
                    ahead[f"process {task.pid} on {task.host}"] = None
                    continue
                waiting = [job for job in noted_jobs(directory, task.task) if job in (ask() or {})]
                ahead |= dict.fromkeys(job.partition("_")[0] for job in waiting or [task.scheduler_job])
    found = [job for job in ahead if job.isdigit()]
    if found:
        print(f"note: job {', '.join(found)} works on the same cells; the new tasks wait until it has ended.")
    if other := [place for place in ahead if not place.isdigit()]:
        print(
            f"note: {', '.join(other)} works on the same cells; tasks that meet it there will fail: submit again then."
        )
    return found


def submit(
    tasks: Sequence[Sequence[Job]], launcher: LauncherConfig, ahead: Sequence[str] = ()
) -> list[submitit.Job[None]]:
    """Hand the tasks to SLURM as one array, which waits for the end of the jobs `ahead`; returns at once.

    Raises:
        UserError: this machine has no sbatch, or sbatch refuses the job.
    """
    additional = dict(launcher.additional)
    if ahead:
        own = [str(additional["dependency"])] if "dependency" in additional else []
        additional["dependency"] = ",".join([*own, f"afterany:{':'.join(ahead)}"])
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
        "additional_parameters": additional or None,
    }
    executor = submitit.SlurmExecutor(folder=_logs(tasks), max_num_timeout=launcher.max_requeues)
    executor.update_parameters(**{name: value for name, value in parameters.items() if value is not None})
    try:
        with redirect_stderr(io.StringIO()):  # submitit prints what sbatch says, and so does the error
            submitted = executor.map_array(RunJobs(), [list(task) for task in tasks])
    except (FileNotFoundError, submitit.core.utils.FailedJobError, submitit.core.utils.FailedSubmissionError) as error:
        raise UserError(f"launcher=slurm cannot submit: {error}") from error
    note_jobs(
        (job.run_directory, job.status("queued").task, entry.job_id)
        for task, entry in zip(tasks, submitted, strict=True)
        for job in task
    )
    return submitted


def run_local(tasks: Sequence[Sequence[Job]], launcher: LauncherConfig) -> int:
    """Run the tasks as processes of this machine, at most `parallel` at once; returns how many failed."""
    executor = submitit.LocalExecutor(folder=_logs(tasks))
    executor.update_parameters(timeout_min=60 * 24 * 365, setup=list(launcher.setup) or None)
    waiting, running, failed = [list(task) for task in tasks], list[submitit.Job[None]](), 0
    # The processes share the cores; a process with more threads than cores is many times slower than one thread.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tqdm(total=len(waiting), unit="task", desc="launcher=local") as progress:
        try:
            while waiting or running:
                while waiting and len(running) < (launcher.parallel or os.cpu_count() or 1):
                    with _stderr_in(_logs(tasks) / "launcher.err"):
                        running.append(executor.submit(RunJobs(), waiting.pop(0)))
                for process in [process for process in running if process.done()]:
                    running.remove(process)
                    progress.update()
                    if process.exception() is not None:
                        failed += 1
                        tqdm.write(f"note: a task failed; its output is {process.paths.stderr}", file=sys.stderr)
                time.sleep(0.2)
        except BaseException:
            for process in running:
                process.cancel()
            raise
    return failed


@contextmanager
def _stderr_in(path: Path) -> Iterator[None]:
    """Let the processes that are started meanwhile write their errors to a file.

    submitit starts a process beside each task, and Ctrl-C would make each of them print a traceback to the terminal.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    terminal = os.dup(2)
    with path.open("a") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(terminal, 2)
        os.close(terminal)


def _logs(tasks: Sequence[Sequence[Job]]) -> Path:
    """The folder in which submitit keeps its scripts, pickles and outputs."""
    return tasks[0][0].run_directory / "logs"
