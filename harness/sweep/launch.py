"""Start a sweep's tasks, in this process (`launcher=inline`) or in several (`launcher=local`)."""

import os
import pickle
import shlex
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, ClassVar

from pydantic import PositiveInt
from submitit.helpers import Checkpointable

from kvsweep.harness.provenance import VISIBLE, visible_gpus
from kvsweep.harness.settings import import_from, own_folder
from kvsweep.harness.sweep.cell_store import allow_open_cells
from kvsweep.harness.sweep.estimate import TokensLeft
from kvsweep.harness.sweep.job import Job
from kvsweep.harness.sweep.progress_board import board
from kvsweep.harness.sweep.share import Share, lacking, status_of
from kvsweep.kernels.implementation import check_available
from kvsweep.messages.command_line import FAILED, guard_streams
from kvsweep.messages.errors import UserError, plain_disk_errors
from kvsweep.processes.granted import granted_cores
from kvsweep.run_files import task_status
from kvsweep.run_files.row_types import Shard
from kvsweep.run_files.safe_files import make_folder, open_file, read_file

# The shares of one process.
Task = Sequence[Share]
# The function that a process applies to its shares; returns the errors of those that failed.
Work = Callable[[Any], list[Exception]]
Round = tuple[Sequence[Task], Work]
# What a process of `Local` runs: the function and the task that stdin has. -P: no random.py of the working directory.
_PROGRAM = [sys.executable, "-P", "-c", "import pickle, sys; run, task = pickle.load(sys.stdin.buffer); run(task)"]


class FailedTasksError(UserError):
    """Tasks failed; each has an error in its status file."""

    exit_code = FAILED


@dataclass(frozen=True, kw_only=True)
class Launcher(ABC):
    """A way to start a sweep's tasks. A YAML of conf/launcher names the class and describes its settings.

    `waits`: True if the tasks have ended when `start` returns. Each of a job's `shards` is a task, which takes more
    jobs until it has `cells_per_task` cells; None makes a task of each job.
    """

    waits: ClassVar[bool] = True
    shards: PositiveInt = 1
    cells_per_task: PositiveInt | None = None

    def check(self, jobs: Sequence[Job]) -> None:
        """Refuse jobs that this machine cannot start, before anything is written."""
        for job in jobs:
            check_available(job.impl)

    @property
    def gpus_of_a_task(self) -> int:
        """The GPUs that a scheduler reserves for a task and counts; 0 without a scheduler."""
        return 0

    def at_once(self, tasks: Sequence[Task]) -> int:
        """How many of the tasks run at the same time, at most."""
        return 1

    def preview(self, tasks: Sequence[Task], hours: Sequence[float]) -> list[str]:
        """Describe how the tasks would start; `hours` is the time of each task, NaN if unknown."""
        return []

    @abstractmethod
    def start(self, rounds: Sequence[Round]) -> None:
        """Mark the first round's tasks as queued and start them; each later round starts when the one before has ended.

        A launcher that waits gets one round at a time.
        """


@dataclass(frozen=True, kw_only=True)
class Inline(Launcher):
    """Runs the jobs in this process."""

    def start(self, rounds: Sequence[Round]) -> None:
        """Run all jobs, then raise the first error."""
        [(tasks, work)] = rounds  # one at a time, as this launcher waits
        queue(tasks)
        failures = work(list(chain.from_iterable(tasks)))
        if failures:
            raise failures[0]


@dataclass(frozen=True, kw_only=True)
class Local(Launcher):
    """Runs `parallel` tasks at once (default: one per GPU or core), each in a process, with one GPU if any."""

    parallel: PositiveInt | None = None

    def check(self, jobs: Sequence[Job]) -> None:
        super().check(jobs)
        gpus = _gpus_for(jobs)  # raises UserError where GPUs cannot be listed, here before a task is queued
        if not gpus and any(job.model.device.startswith("cuda") for job in jobs):
            raise UserError("model.device=cuda needs a GPU, and launcher=local sees none: set model.device=cpu.")

    def at_once(self, tasks: Sequence[Task]) -> int:
        gpus = _gpus_for(jobs_of(tasks))
        return self.parallel or len(gpus) or granted_cores()

    def start(self, rounds: Sequence[Round]) -> None:
        """Run the tasks; raises FailedTasksError after the last one if any failed."""
        [(tasks, work)] = rounds  # one at a time, as this launcher waits
        queue(tasks)
        with board(jobs_of(tasks)):
            failed = self._run(tasks, work)
        if failed:
            raise FailedTasksError(f"{failed} of {len(tasks)} tasks failed: kvsweep status says which.")

    def _run(self, tasks: Sequence[Task], work: Work) -> int:
        """Run the tasks; return how many failed."""
        waiting = list(tasks)
        running: dict[subprocess.Popen[bytes], tuple[str | None, Task]] = {}  # the GPU and the task of each process
        failed = 0
        gpus = _gpus_for(jobs_of(tasks))
        parallel = self.at_once(tasks)
        # The processes share the cores; with more threads than cores a process is many times slower than one thread.
        threads = max(1, granted_cores() // min(parallel, len(tasks)))
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
        try:
            while waiting or running:
                while waiting and len(running) < parallel:
                    task = waiting.pop(0)
                    used_gpus = [used_gpu for used_gpu, _ in running.values()]
                    gpu = min(gpus, key=used_gpus.count, default=None)  # the least used; None without GPUs
                    running[_start(task, work, gpu)] = gpu, task
                ended = [process for process in running if process.poll() is not None]
                for process in ended:
                    _, task = running.pop(process)
                    if process.returncode:
                        failed += 1
                        for share in task:
                            # One that has begun has written its error, or is seen to have stopped. The others would
                            # seem to wait.
                            note_state(share, ["queued"], "failed", task_status.end_of(_output(task)))
                        print(f"note: a task failed; its output is {_output(task)}", file=sys.stderr)
                time.sleep(0.2)
        except BaseException:  # Ctrl-C too: no process outlives this one
            _end(running)
            raise
        return failed


def jobs_of(tasks: Sequence[Task]) -> list[Job]:
    """Return the job of each share of the tasks."""
    return [share.job for share in chain.from_iterable(tasks)]


def _output(task: Task) -> Path:
    """Return the file with what a task's process prints."""
    return logs([task]) / f"{task[0].task}.log"


def _start(task: Task, work: Work, gpu: str | None) -> subprocess.Popen[bytes]:
    """Start a process for a task, which sees only `gpu` if given; its output goes to a file."""
    variables = {} if gpu is None else {VISIBLE: gpu}
    make_folder(logs([task]))
    with TemporaryFile() as stdin, open_file(_output(task), "ab") as output:
        pickle.dump((RunJobs(work), task), stdin)
        stdin.seek(0)
        return subprocess.Popen(_PROGRAM, stdin=stdin, stdout=output, stderr=output, env={**os.environ, **variables})


def note_state(
    share: Share, earlier: Sequence[task_status.State], state: task_status.State, error: str | None = None
) -> None:
    """Write a state into the status of a share's task, if it has one of the earlier states."""
    directory = share.job.run_directory
    with suppress(OSError, ValueError):
        status = task_status.TaskStatus.read(task_status.TaskStatus.path(directory, share.task))
        if status.state in earlier:
            status.state, status.error = state, error
            status.write(directory)


def _end(processes: Collection[subprocess.Popen[bytes]]) -> None:
    """End processes as Ctrl-C does, and kill those that ignore it, as in a shell's background."""
    for process in processes:
        process.send_signal(signal.SIGINT)
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(1)
        process.kill()


def _gpus_for(jobs: Sequence[Job]) -> list[str]:
    """Return the GPUs that these jobs may use; jobs on the CPU use none and need no working driver."""
    return visible_gpus() if any(job.model.device != "cpu" for job in jobs) else []


class RunJobs(Checkpointable):
    """The function of one task; under SLURM a task stopped by its time limit is queued again.

    A task records the sweep's command, not the command of the process that runs it.
    """

    def __init__(self, work: Work) -> None:
        self.work = work
        self.command = sys.argv

    def __reduce__(self) -> tuple[Any, ...]:
        """Let the task's process import from the user's folder before it unpickles the jobs, whose policies need it."""
        conf = own_folder()
        folder = None if conf is None else str(conf.parent)
        return _without_fields, (folder,), self.__dict__  # pickle calls the function, and then sets the fields

    def __call__(self, task: Task) -> None:
        sys.argv = self.command
        guard_streams()
        errors = self.work(task)
        if errors:
            raise RuntimeError(f"{len(errors)} of {len(task)} jobs failed") from errors[0]


def _without_fields(folder: str | None) -> RunJobs:
    """Return a task's function to unpickle; from now on this process can import the modules in `folder`."""
    import_from(folder)
    return RunJobs.__new__(RunJobs)


def start(rounds: Sequence[tuple[Sequence[Share], Work]], launcher: Launcher) -> bool:
    """Start the tasks that have work, round by round; return False if the first round has none.

    A launcher's error passes.
    """
    first_shares, _ = rounds[0]
    if not any(map(lacking, first_shares)):
        return False
    launcher.check([share.job for share in first_shares])
    task_rounds = []
    for shares, work in rounds:
        tasks = [task for task in split(shares, launcher) if any(map(lacking, task))]
        task_rounds.append((tasks, work))
    launcher.start(task_rounds)
    return True


def show_results(jobs: Sequence[Job], *, are_there: bool, table: bool) -> None:
    """Print where each run's results are, with `table` also a table of them, and the command of its report.

    Unless they `are_there`, print the command that shows the run's progress in place of them.
    """
    for directory in dict.fromkeys(job.run_directory for job in jobs):
        quoted = shlex.quote(str(directory))
        if not are_there:
            print(f"progress: kvsweep status {quoted} --watch")
        else:
            if table:
                from kvsweep.analysis.report.tables import summary_table  # imports pandas

                print(summary_table(directory))
            print(f"results: {directory}")
        print(f"report:  kvsweep report {quoted}")


def split(shares: Sequence[Share], launcher: Launcher) -> Sequence[Task]:
    """Return the tasks: every job's shards, and with `cells_per_task` the same shard of several small jobs together."""
    pieces = _pieces(shares, launcher)
    if launcher.cells_per_task is not None:  # shards of a job take about as long, so each task gets one of every job
        pieces.sort(key=lambda piece: piece.job.shard.index)
    tasks: list[list[Share]] = []
    room = 0  # for cells, in the last task; 0 at first, so that the first piece begins a task
    for piece in pieces:
        # A task has the same shard of all its jobs.
        if room <= 0 or tasks[-1][-1].job.shard != piece.job.shard:
            tasks.append([])
            room = launcher.cells_per_task or 1  # 1 is filled by any job, which then is a task by itself
        tasks[-1].append(piece)
        room -= len(piece.job.cells)  # below 0 if the last job has more cells
    return tasks


def _pieces(shares: Sequence[Share], launcher: Launcher) -> list[Share]:
    """Return the shards of every share's job, in this order; a job of more cells than files may be open has several."""
    pieces = []
    most_cells = allow_open_cells()
    for share in shares:
        job = share.job
        shards = [job.shard]
        if job.shard.count == 1:
            shards = [Shard(index=index, count=launcher.shards) for index in range(1, launcher.shards + 1)]
        elif launcher.shards > 1:
            both = f"shard={job.shard} and launcher.shards={launcher.shards}"
            raise UserError(f"{both} both split the cells: give one of them.")
        # A job with rounds stays whole, because each round compares its cells with its full cache.
        if job.rounds and len(job.cells) > most_cells:
            needed = f"with {len(job.cells)} cells needs a file open for each, and the limit allows {most_cells}"
            hint = "raise `ulimit -n`, make the grid smaller, or leave out until=decided"
            raise UserError(f"until=decided {needed}: {hint}.")
        for first in range(0, len(job.cells), most_cells):
            cells = job.cells[first : first + most_cells]
            for shard in shards:
                pieces.append(replace(share, job=replace(job, cells=cells, shard=shard)))
    return pieces


def queue(tasks: Sequence[Task], cluster: str = "") -> dict[Path, str | None]:
    """Mark each share as queued, on a cluster if one is named, unless it runs or is finished.

    Return the files that were changed, with what they held before; None for a new one.
    """
    earlier = dict[Path, str | None]()
    for share in chain.from_iterable(tasks):
        cells = lacking(share)
        if not cells:
            continue
        job = share.job
        status = status_of(share, "queued")
        if not share.replays:
            # As if no completion were stored: the task itself counts those that are, once it begins.
            status.tokens_left = int(TokensLeft(share, {cell.cell_id: () for cell in cells}))
        status.sign()
        status.cluster = cluster
        path = task_status.TaskStatus.path(job.run_directory, status.task)
        with suppress(OSError, ValueError):  # there is no status yet, or a broken one
            if task_status.TaskStatus.read(path).seen(path) == "running":
                continue
        job_file = task_status.job_file(job.run_directory, status.task)
        with plain_disk_errors(job.run_directory):
            for file in (path, job_file):
                earlier[file] = read_file(file).decode(errors="replace") if file.exists() else None
            # This file names the SLURM job that an earlier command submitted for the task.
            job_file.unlink(missing_ok=True)
            status.write(job.run_directory)
    return earlier


def logs(tasks: Sequence[Task]) -> Path:
    """Return the folder for the outputs of tasks, and for submitit's scripts and pickles."""
    return tasks[0][0].job.run_directory / task_status.LOGS
