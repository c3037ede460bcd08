"""The start of a sweep's tasks as arrays of SLURM jobs (`launcher=slurm`)."""

import io
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, field
from functools import cache
from math import ceil
from typing import Annotated, Any, ClassVar

import submitit
from pydantic import Field

from kvsweep import task_status
from kvsweep.command_line import counted
from kvsweep.errors import UserError
from kvsweep.harness.sweep import slurm_queue
from kvsweep.harness.sweep.job import Job
from kvsweep.harness.sweep.launch import AtLeastOne, Launcher, Round, RunJobs, Task, Work, environment, logs, queue

# Where a site sets SBATCH_EXPORT=NONE, srun would pass on nothing of what the script sets for the task.
_PASS_ON = "export SLURM_EXPORT_ENV=ALL"
# The options whose variables of sbatch (SBATCH_ACCOUNT for account) have another name.
_VARIABLES = {"time": "timelimit", "mem": "mem_per_node", "array_parallelism": "array_inx", "signal_delay_s": "signal"}


@dataclass(frozen=True, kw_only=True)
class Slurm(Launcher):
    """Submits an array of tasks; conf/launcher/slurm.yaml describes each setting."""

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

    def start(self, rounds: Sequence[Round]) -> None:
        first, _ = rounds[0]
        _check_array(max(len(tasks) for tasks, _ in rounds))
        ahead, queued = _jobs_ahead([share.job for task in first for share in task]), queue(first)
        for tasks, work in rounds:
            try:
                submitted = self._submit(tasks, work, ahead)
            except BaseException:
                for path in queued:
                    path.unlink(missing_ok=True)
                raise
            ahead, queued = [submitted[0].job_id.partition("_")[0]], []
            print(f"submitted {counted(len(tasks), 'task')} as job {ahead[0]}")

    def _submit(self, tasks: Sequence[Task], work: Work, ahead: Sequence[str]) -> list[submitit.Job[None]]:
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
            "setup": [_PASS_ON, *self.setup],
            "additional_parameters": additional or None,
        }
        # As PYTHONSAFEPATH does, for a task that may not inherit this environment.
        python = f"{shlex.quote(sys.executable)} -P"
        executor = submitit.SlurmExecutor(folder=logs(tasks), max_num_timeout=self.max_requeues, python=python)
        executor.update_parameters(**{name: value for name, value in parameters.items() if value is not None})
        errors = submitit.core.utils
        overruled = _overruled([*(name for name, value in parameters.items() if value is not None), *additional])
        try:
            # submitit prints what sbatch says, and so does the error.
            with redirect_stderr(io.StringIO()), environment(dict.fromkeys(overruled)):
                submitted = executor.map_array(RunJobs(work), [list(task) for task in tasks])
        except (FileNotFoundError, errors.FailedJobError, errors.FailedSubmissionError) as error:
            raise UserError(f"launcher=slurm cannot submit: {error}") from error
        for task, entry in zip(tasks, submitted, strict=True):
            for share in task:
                task_status.note_job(share.job.run_directory, share.task, entry.job_id)
        return submitted


def _overruled(names: Iterable[str]) -> list[str]:
    """The variables by which sbatch would set these options otherwise than the script does; prints a note of each."""
    variables = [f"SBATCH_{_VARIABLES.get(name, name).upper().replace('-', '_')}" for name in names]
    found = [variable for variable in variables if variable in os.environ]
    for variable in found:
        print(f"note: {variable}={os.environ[variable]} does not count; the launcher's settings do.", file=sys.stderr)
    return found


def _check_array(tasks: int) -> None:
    """Refuse more tasks than SLURM takes as one array, before any is queued."""
    most = most_array_tasks() if tasks > 1 else None
    if most is not None and tasks > most:
        limit = f"{tasks} tasks are more than this SLURM takes as one array, {most} (MaxArraySize)"
        mend = "set launcher.cells_per_task, so that a task takes several jobs, or fewer launcher.shards"
        raise UserError(f"launcher=slurm cannot submit: {limit}: {mend}.")


def _jobs_ahead(jobs: Sequence[Job]) -> list[str]:
    """The SLURM jobs that wait or run with cells of these jobs; prints a note of what happens to them."""
    ahead: dict[str, None] = {}
    ask = cache(slurm_queue.waiting_jobs)
    for directory in dict.fromkeys(job.run_directory for job in jobs):
        cells = {cell.cell_id for job in jobs if job.run_directory == directory for cell in job.cells}
        for task in slurm_queue.tasks_now(directory, ask):
            if task.state in ("queued", "running") and cells & task.cells.keys():
                if task.scheduler_job is None:
                    ahead[f"process {task.pid} on {task.host}"] = None
                    continue
                listed = ask(slurm_queue.owner_of(directory, task.task)) or {}
                waiting = [job for job in task_status.noted_jobs(directory, task.task) if job in listed]
                ahead |= dict.fromkeys(job.partition("_")[0] for job in waiting or [task.scheduler_job])
    found = [job for job in ahead if job.isdigit()]
    if found:
        print(f"note: job {', '.join(found)} works on the same cells; the new tasks wait until it has ended.")
    if other := ", ".join(place for place in ahead if not place.isdigit()):
        print(f"note: {other} works on the same cells; tasks that meet it there will fail: submit again then.")
    return found


def most_array_tasks() -> int | None:
    """The most tasks that SLURM takes as one array; None where SLURM cannot be asked or does not say."""
    found = re.search(
        r"^MaxArraySize\s*=\s*(\d+)\s*$", slurm_queue.said_by("scontrol", "show", "config") or "", re.MULTILINE
    )
    # An array counts from 0, and the setting is one above the highest index.
    return int(found[1]) if found else None
