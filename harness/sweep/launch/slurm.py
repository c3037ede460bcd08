"""`launcher=slurm`: one array of SLURM tasks for each round; submitit talks to SLURM."""

import io
import shutil
from collections.abc import Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, field
from functools import cache
from math import ceil
from typing import Annotated, Any, ClassVar

import submitit
from pydantic import Field

from kvsweep.base.command_line import counted
from kvsweep.base.errors import UserError
from kvsweep.base.tasks import noted_jobs
from kvsweep.harness.sweep.launch.launcher import AtLeastOne, Launcher, RunJobs, Task, logs, queue
from kvsweep.harness.sweep.plan.job import Job
from kvsweep.harness.sweep.watch.scheduler import note_job, tasks_now, waiting_jobs


@dataclass(frozen=True, kw_only=True)
class Slurm(Launcher):
    """Submits an array a round, which waits for the one before; conf/launcher/slurm.yaml describes each setting."""

    waits: ClassVar[bool] = False
    parallel: AtLeastOne | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    gpus: Annotated[int, Field(ge=0)] = 0
    cpus: AtLeastOne = 1
    memory_gb: Annotated[float, Field(gt=0, description="a number of gigabytes")] | None = None
    timeout_min: AtLeastOne = 240
    max_requeues: Annotated[int, Field(ge=0)] = 20
    signal_delay_s: AtLeastOne = 120
    setup: Sequence[str] = ()
    additional: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.signal_delay_s >= self.timeout_min * 60:
            limit = f"the time limit of {self.timeout_min} minutes (launcher.timeout_min)"
            too_long = f"launcher.signal_delay_s={self.signal_delay_s} is not below {limit}"
            raise UserError(f"{too_long}: a task would be stopped as it starts.")

    def check(self, jobs: Sequence[Job]) -> None:
        """Refuse a machine that cannot submit; the machine that runs the tasks checks their implementation."""
        for directory in {job.run_directory.absolute() for job in jobs}:
            if {"%", "\\"} & set(str(directory)):
                raise UserError(f"SLURM reads % and \\ in results_dir={directory.parent} as a pattern: take another.")
        if shutil.which("srun") is None:
            mend = "submit from a login node of a SLURM cluster"
            raise UserError(f"launcher=slurm finds no srun on this machine: {mend}.")

    def start(self, rounds: Sequence[Sequence[Task]]) -> None:
        ahead = _jobs_ahead([job for tasks in rounds for task in tasks for job in task])
        queued = queue(rounds[0])
        for tasks in rounds:
            try:
                submitted = self._submit(tasks, ahead)
            except BaseException:
                for path in queued:
                    path.unlink(missing_ok=True)
                raise
            ahead, queued = [submitted[0].job_id.partition("_")[0]], []
            print(f"submitted {counted(len(tasks), 'task')} as job {ahead[0]}")

    def _submit(self, tasks: Sequence[Task], ahead: Sequence[str]) -> list[submitit.Job[None]]:
        """Hand the tasks to SLURM as one array, which waits for the end of the jobs `ahead`."""
        additional = dict(self.additional)
        if ahead:
            own = [str(additional["dependency"])] if "dependency" in additional else []
            additional["dependency"] = ",".join([*own, f"afterany:{':'.join(ahead)}"])
        parameters: dict[str, Any] = {
            **{name: getattr(self, name) for name in ("partition", "account", "qos", "signal_delay_s")},
            "job_name": "kvsweep",
            "gpus_per_node": self.gpus or None,
            "cpus_per_task": self.cpus,
            "mem": None if self.memory_gb is None else f"{ceil(self.memory_gb * 1024)}M",
            "time": self.timeout_min,
            "array_parallelism": self.parallel or 1000,
            "setup": list(self.setup) or None,
            "additional_parameters": additional or None,
        }
        executor = submitit.SlurmExecutor(folder=logs(tasks), max_num_timeout=self.max_requeues)
        executor.update_parameters(**{name: value for name, value in parameters.items() if value is not None})
        errors = submitit.core.utils
        try:
            with redirect_stderr(io.StringIO()):  # submitit prints what sbatch says, and so does the error
                submitted = executor.map_array(RunJobs(), [list(task) for task in tasks])
        except (FileNotFoundError, errors.FailedJobError, errors.FailedSubmissionError) as error:
            raise UserError(f"launcher=slurm cannot submit: {error}") from error
        for task, entry in zip(tasks, submitted, strict=True):
            for job in task:
                note_job(job.run_directory, job.status("queued").task, entry.job_id)
        return submitted


def _jobs_ahead(jobs: Sequence[Job]) -> list[str]:
    """The SLURM jobs that wait or run with cells of these jobs; prints a note of what happens to them."""
    ahead: dict[str, None] = {}
    ask = cache(waiting_jobs)
    for directory in dict.fromkeys(job.run_directory for job in jobs):
        cells = {cell.cell_id for job in jobs if job.run_directory == directory for cell in job.cells}
        for task in tasks_now(directory, ask):
            if task.state in ("queued", "running") and cells & task.cells.keys():
                if task.scheduler_job is None:
                    ahead[f"process {task.pid} on {task.host}"] = None
                    continue
                waiting = [job for job in noted_jobs(directory, task.task) if job in (ask() or {})]
                ahead |= dict.fromkeys(job.partition("_")[0] for job in waiting or [task.scheduler_job])
    found = [job for job in ahead if job.isdigit()]
    if found:
        print(f"note: job {', '.join(found)} works on the same cells; the new tasks wait until it has ended.")
    if other := ", ".join(place for place in ahead if not place.isdigit()):
        print(f"note: {other} works on the same cells; tasks that meet it there will fail: submit again then.")
    return found
