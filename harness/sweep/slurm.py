"""Start a sweep's tasks as arrays of SLURM jobs (`launcher=slurm`)."""

import io
import os
import re
import shlex
import sys
from collections.abc import Iterable, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, field
from functools import cache
from math import ceil
from pathlib import Path
from typing import Any, ClassVar

import submitit
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from kvsweep.harness.sweep import slurm_queue
from kvsweep.harness.sweep.cell_store import CellLockedError
from kvsweep.harness.sweep.job import Job
from kvsweep.harness.sweep.launch import (
    Launcher,
    Round,
    RunJobs,
    Task,
    Work,
    jobs_of,
    logs,
    queue,
)
from kvsweep.messages.command_line import counted
from kvsweep.messages.errors import UserError
from kvsweep.run_files import task_status
from kvsweep.run_files.row_types import Shard
from kvsweep.run_files.safe_files import replace_text

# Where a site sets SBATCH_EXPORT=NONE, srun would pass on nothing of what the script sets for the task.
_PASS_ON = "export SLURM_EXPORT_ENV=ALL"
# The options, beside a launcher's settings, that a script has once for all, or that would hide the job from kvsweep.
_FIXED = [
    *("array", "nodes", "ntasks_per_node", "signal", "output", "error", "open_mode", "chdir", "wrap"),
    *("clusters", "parsable", "quiet", "test_only", "wait"),
]
# What else sbatch's options and variables (SBATCH_TIMELIMIT) call the same thing.
_OTHER_NAMES = {
    "time": ["timelimit"],
    "mem": ["mem_per_node", "mem_per_cpu", "mem_per_gpu"],
    "gpus_per_node": ["gpus", "gpus_per_task", "gpus_per_socket", "gres"],
    "array": ["array_inx"],
}
# sbatch ends an option at a line's end, and reads % and \\ in a file's name as a pattern.
_NO_VALUE = re.compile(r"[\x00-\x1f\x7f%\\]")
# SLURM's variables that name no job, but the cluster and the user.
_OF_NO_JOB = {"SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT"}


@dataclass(frozen=True, kw_only=True)
class Slurm(Launcher):
    """Submits an array of tasks; conf/launcher/slurm.yaml describes each setting."""

    waits: ClassVar[bool] = False
    parallel: PositiveInt | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    gpus: NonNegativeInt = 0
    cpus: PositiveInt = 1
    memory_gb: PositiveFloat | None = None
    timeout_min: PositiveInt = 240
    max_requeues: NonNegativeInt = 20
    signal_delay_s: PositiveInt = 120
    setup: Sequence[str] = ()
    python: str | None = None
    srun_args: Sequence[str] = ()
    additional: dict[str, str | bool | int | float | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.signal_delay_s >= self.timeout_min * 60:
            limit = f"the time limit of {self.timeout_min} minutes (launcher.timeout_min)"
            too_long = f"launcher.signal_delay_s={self.signal_delay_s} is not below {limit}"
            raise UserError(f"{too_long}: a task would be stopped as it starts.")

    def check(self, jobs: Sequence[Job]) -> None:
        """Refuse values that no script can have; the machine that runs the tasks checks their implementation."""
        for directory in {job.run_directory for job in jobs}:
            self._parameters(directory)

    def start(self, rounds: Sequence[Round]) -> None:
        """Submit an array for each round, which waits for the round before and for earlier jobs on the same cells."""
        first, _ = rounds[0]
        cluster = slurm_queue.cluster()
        ahead = _jobs_ahead(jobs_of(first), cluster)
        earlier = queue(first, cluster)
        for tasks, work in rounds:
            try:
                submitted = self._submit(tasks, work, ahead)
            except BaseException:
                # If the first round was not submitted, no task waits; else `earlier` is empty.
                for path, text in earlier.items():
                    if text is None:
                        path.unlink(missing_ok=True)
                    else:
                        replace_text(path, text)
                raise
            ahead = [submitted[0].job_id.partition("_")[0]]  # the array, of 12_0 the 12
            earlier = {}
            print(f"submitted {counted(len(tasks), 'task')} as job {ahead[0]}")

    def _submit(self, tasks: Sequence[Task], work: Work, ahead: Sequence[str]) -> list[submitit.Job[None]]:
        """Hand the tasks to SLURM as one array, which waits for the end of the jobs `ahead`."""
        parameters = self._parameters(tasks[0][0].job.run_directory, ahead)
        errors = submitit.core.utils
        options = [*parameters["additional_parameters"], *_FIXED]
        # A user's SBATCH_NO_REQUEUE would keep a task that its time limit stops from being queued again.
        if self.max_requeues:
            options.append("no_requeue")
        # Removed meanwhile: the variables by which sbatch would set these options otherwise than the script does, and
        # those of the job whose shell submits.
        overruling = {f"SBATCH_{name.upper()}" for name in _names(options)}
        removed = {name: os.environ.pop(name) for name in overruling.union(_of_another_job()) & os.environ.keys()}
        try:
            executor = submitit.SlurmExecutor(logs(tasks), max_num_timeout=self.max_requeues, python=self._python())
            executor.update_parameters(**parameters)
            # submitit prints what sbatch says, and so does the error.
            with redirect_stderr(io.StringIO()):
                slurm_jobs = executor.map_array(RunJobs(work), [list(task) for task in tasks])
        # A RuntimeError says that this machine has no srun.
        except (FileNotFoundError, RuntimeError, errors.FailedJobError, errors.FailedSubmissionError) as error:
            raise UserError(f"launcher=slurm cannot submit: {error}") from error
        finally:
            os.environ.update(removed)
        for task, entry in zip(tasks, slurm_jobs, strict=True):
            for share in task:
                task_status.note_job(share.job.run_directory, share.task, entry.job_id)
        return slurm_jobs

    def _python(self) -> str:
        """What starts the interpreter of a task: as with PYTHONSAFEPATH, which a task may not inherit."""
        return f"{self.python or shlex.quote(sys.executable)} -P"

    def _parameters(self, run_directory: Path, ahead: Sequence[str] = ()) -> dict[str, Any]:
        """The parameters of submitit for an array that waits for the end of the jobs `ahead`.

        Raises UserError for a value that no script can have, and for an option of launcher.additional that the script
        has anyway.
        """
        settings: dict[str, Any] = {
            "job_name": "kvsweep",
            "ntasks": 1,
            "partition": self.partition,
            "account": self.account,
            "qos": self.qos,
            "gpus_per_node": self.gpus or None,
            "cpus_per_task": self.cpus,
            "mem": None if self.memory_gb is None else f"{ceil(self.memory_gb * 1024)}M",
            "time": self.timeout_min,
        }
        options = {name: value for name, value in settings.items() if value is not None}
        options |= self._additional_options(_names([*options, *_FIXED]))
        if ahead:
            wait = f"afterany:{':'.join(ahead)}"  # also if they fail
            given_dependency = options.get("dependency")
            options["dependency"] = f"{given_dependency},{wait}" if given_dependency else wait
        # The script names files in the run's folder, for the output. `folder_below` has checked the folder's own name.
        for name, value in {**options, "results_dir": run_directory.absolute().parent}.items():
            if _NO_VALUE.search(str(value)):
                hint = "take another, without control characters, % and \\"
                raise UserError(f"SLURM does not read {name}={value} as it stands there: {hint}.")
        return {
            "time": self.timeout_min,
            "signal_delay_s": self.signal_delay_s,
            "array_parallelism": self.parallel or 1000,  # else about as many as SLURM's default allows in all
            "setup": [_PASS_ON, *self.setup],
            # On a whole node srun would start as many copies as fit.
            "srun_args": ["--ntasks=1", *self.srun_args],
            "additional_parameters": options,
        }

    def _additional_options(self, taken: Sequence[str]) -> dict[str, Any]:
        """The options of launcher.additional that are set; refuses names of the options that are `taken`."""
        options = {}
        for key, value in self.additional.items():
            name = key.replace("-", "_")
            is_taken = any(option.startswith(name) for option in taken)  # sbatch takes "part" for "partition"
            # "gres" is another name of gpus, but asks for other things too, such as a node's disk.
            if name == "gres" and "gpu" not in str(value):
                is_taken = False
            if is_taken or not re.fullmatch(r"\w+", name):
                hint = "leave it out; conf/launcher/slurm.yaml has the settings"
                raise UserError(f"launcher.additional.{key}={value} is no option to add, kvsweep sets its own: {hint}.")
            if value is not None and value is not False:  # either leaves the option out
                options[name] = value
        return options

    @property
    def gpus_of_a_task(self) -> int:
        return self.gpus

    def at_once(self, tasks: Sequence[Task]) -> int:
        return self.parallel or len(tasks)

    def preview(self, tasks: Sequence[Task], hours: Sequence[float]) -> list[str]:
        """The script that sbatch would get, the array's size and time, and a warning if the time is too short."""
        executor = _Preview(folder=logs(tasks), python=self._python())
        executor.update_parameters(**self._parameters(tasks[0][0].job.run_directory))
        array = "one array"
        if any(job.rounds for job in jobs_of(tasks)):
            array = "for each round one array"
        at_once = min(self.at_once(tasks), len(tasks))
        size = f"{counted(len(tasks), 'task')}, {at_once} at once, each for at most {self.timeout_min} minutes"
        lines = [f"sbatch would get {array} of {size}:"]
        for line in executor.script(len(tasks)).splitlines():
            if line and not line.startswith(("# ", "#!")):
                lines.append(f"  {line}")
        limit = self.timeout_min / 60
        too_long = [task_hours for task_hours in hours if task_hours > limit]  # NaN is not above it
        if too_long:
            longest = max(too_long)
            takes = f"the longest task takes {longest:.1f} hours, launcher.timeout_min={self.timeout_min}"
            ends = f"SLURM stops it and queues it again, at most {self.max_requeues} times (launcher.max_requeues)"
            # 30% more, as much as the estimate may be off.
            hint = f"set launcher.timeout_min={ceil(60 * longest * 1.3)} or more launcher.shards"
            lines.append(f"warning: {takes} allows {limit:.3g}: {ends}; {hint}.")
        return lines


class _Preview(submitit.SlurmExecutor):
    """Writes the script that sbatch would get, also on a machine without SLURM."""

    @classmethod
    def affinity(cls) -> int:
        return 1

    def script(self, tasks: int) -> str:
        if tasks > 1:
            self.parameters["map_count"] = tasks
        return self._make_submission_file_text(self._submitit_command_str, "")


def _names(options: Iterable[str]) -> list[str]:
    """The options with their other names."""
    names = []
    for option in options:
        names += [option, *_OTHER_NAMES.get(option, [])]
    return names


def _of_another_job() -> list[str]:
    """SLURM's variables of the job whose shell submits: srun would take that job's sizes for those of the new one."""
    if not {"SLURM_JOB_ID", "SLURM_JOBID"} & os.environ.keys():
        return []
    return [name for name in os.environ if name.startswith(("SLURM_", "SLURMD_", "SRUN_")) and name not in _OF_NO_JOB]


def _jobs_ahead(jobs: Sequence[Job], cluster: str) -> list[str]:
    """The SLURM jobs that wait or run with cells of these jobs, with a note; another process at work is refused.

    A task's job, the `scheduler_job` that `tasks_now` sets, counts if it was submitted for the task or is in the queue;
    another number is left over from a shell. No job can wait for a job of another cluster.
    """
    ahead: dict[str, None] = {}  # ids of jobs, each once
    read_queue = cache(slurm_queue.waiting_jobs)  # each user's once
    for directory in dict.fromkeys(job.run_directory for job in jobs):
        jobs_here = [job for job in jobs if job.run_directory == directory]
        for task in slurm_queue.tasks_now(directory, read_queue):
            sharing_jobs = [job for job in jobs_here if _has_cells_of(job, task)]
            if task.state not in ("queued", "running") or not sharing_jobs:
                continue
            submitted = task_status.noted_jobs(directory, task.task)
            in_queue = read_queue(slurm_queue.owner_of(directory, task.task)) or {}
            is_elsewhere = task.cluster not in ("", cluster)
            if task.scheduler_job in {*submitted, *in_queue} and not is_elsewhere:
                # In a sequential sweep a task has a job for each round, and several may be in the queue.
                job_ids = [job_id for job_id in submitted if job_id in in_queue]
                if not job_ids:  # the queue does not show them, or the task runs in the job of a shell
                    job_ids = [task.scheduler_job]
                # Waiting for an array, 12, is waiting for all its tasks, such as 12_3.
                ahead |= dict.fromkeys(job_id.partition("_")[0] for job_id in job_ids)
            elif any(_may_write_same_rows(task.shard, job.shard) for job in sharing_jobs):
                path = task_status.TaskStatus.path(directory, task.task)
                hint = f"wait until it has ended, or stop it; if its machine is gone, delete {path}"
                worker = f"process {task.pid} on {task.host}"
                if is_elsewhere:
                    worker = f"job {task.scheduler_job} of the cluster {task.cluster}"
                raise CellLockedError(f"{worker} works on the same cells: {hint}.")
    if ahead:
        print(f"note: job {', '.join(ahead)} works on the same cells; the new tasks wait until it has ended.")
    return [*ahead]


def _has_cells_of(job: Job, task: task_status.TaskStatus) -> bool:
    return any(cell.cell_id in task.cells for cell in job.cells)


def _may_write_same_rows(shard: str, new_shard: Shard) -> bool:
    """Whether a shard is the new one, or of another split of the cells."""
    return shard == str(new_shard) or not shard.endswith(f"/{new_shard.count}")
