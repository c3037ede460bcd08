"""The start of a sweep, and what every launcher shares: settings, tasks, the mark that a task is queued."""

import os
import platform
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product, zip_longest
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field
from submitit.helpers import Checkpointable

from kvsweep.base.command_line import counted, guard_streams
from kvsweep.base.errors import UserError, plain_disk_errors
from kvsweep.base.files import make_folder
from kvsweep.base.records import Shard
from kvsweep.base.tasks import TaskStatus, job_file
from kvsweep.harness.models.gpus import VISIBLE
from kvsweep.harness.sweep.plan.estimate import TokensLeft
from kvsweep.harness.sweep.plan.job import Job, checked_implementation
from kvsweep.harness.sweep.run.store import allow_open_cells
from kvsweep.kernels.implementation import check_available

AtLeastOne = Annotated[int, Field(ge=1)]
# The jobs that one process works through.
Task = list[Job]


@dataclass(frozen=True, kw_only=True)
class Launcher(ABC):
    """How the tasks of a sweep are started. A YAML of conf/launcher names the class and describes its settings.

    `waits` says whether the tasks have ended when `start` returns. Each of a job's `shards` is a task, which takes
    further jobs until it has `cells_per_task` cells; None puts each job into its own task.
    """

    waits: ClassVar[bool] = True
    shards: AtLeastOne = 1
    cells_per_task: AtLeastOne | None = None

    def check(self, jobs: Sequence[Job]) -> None:
        """Refuse jobs that this machine cannot start; nothing has been written yet."""
        for job in jobs:
            checked_implementation(job.impl, check_available)

    @abstractmethod
    def start(self, rounds: Sequence[Sequence[Task]]) -> None:
        """Start the tasks, those of a round after all tasks of the round before; mark the first round's as queued."""


def launch(jobs: Sequence[Job], launcher: Launcher) -> None:
    """Start the jobs; print a table of results, or the command that shows the progress. The launcher's error passes."""
    is_finished = not any(job.unfinished_cells() for job in jobs)
    if is_finished:
        cells = len({(job.run_directory, cell.cell_id) for job in jobs for cell in job.cells})
        print(f"nothing to do: {counted(cells, 'cell')} done already")
    else:
        # The first round of every job, then the second round of those that have one, and so on.
        by_round = zip_longest(*(job.in_rounds() for job in jobs))
        rounds = [split([job for job in part if job is not None], launcher) for part in by_round]
        launcher.check(jobs)
        launcher.start(rounds)
    for directory in dict.fromkeys(job.run_directory for job in jobs):
        if not is_finished and launcher.waits:
            from kvsweep.analysis.report.tables import summary_table  # imports pandas

            print(summary_table(directory))
        is_there = is_finished or launcher.waits
        print(f"results: {directory}" if is_there else f"progress: kvsweep-status {directory} --watch")
        print(f"report:  kvsweep-report {directory}")


class RunJobs(Checkpointable):
    """The function of one task, which sees `gpu` alone if given; a task that the time limit stops is queued again."""

    def __init__(self, gpu: str | None = None) -> None:
        self.gpu = gpu

    def __call__(self, jobs: Task) -> None:
        if self.gpu is not None:
            os.environ[VISIBLE] = self.gpu  # before torch is imported
        from kvsweep.harness.sweep.run.execute import run  # imports torch, which the submitting process does not need

        guard_streams()
        if failed := run(jobs):
            raise RuntimeError(f"{len(failed)} of {len(jobs)} jobs failed") from failed[0]


def split(jobs: Sequence[Job], launcher: Launcher) -> list[Task]:
    """Every job's shards as tasks, small jobs together if so asked; a job of too many cells becomes several."""
    tasks: list[Task] = [[]]
    most = allow_open_cells()
    for job in jobs:
        shards = [Shard(index=i, count=launcher.shards) for i in range(1, launcher.shards + 1)]
        if job.shard.count > 1:
            if len(shards) > 1:
                both = f"shard={job.shard} and launcher.shards={launcher.shards}"
                raise UserError(f"{both} both split the cells: give one of them.")
            shards = [job.shard]
        if job.rounds and len(job.cells) > most:
            needed = f"with {len(job.cells)} cells needs a file open for each, and the limit allows {most}"
            mend = "raise `ulimit -n`, make the grid smaller, or leave out until=decided"
            raise UserError(f"until=decided {needed}: {mend}.")
        parts = [replace(job, cells=job.cells[i : i + most]) for i in range(0, len(job.cells), most)]
        for part, shard in product(parts, shards):
            tasks[-1].append(replace(part, shard=shard))
            if sum(len(one.cells) for one in tasks[-1]) >= (launcher.cells_per_task or 1):
                tasks.append([])
    return [task for task in tasks if task]


def queue(tasks: Sequence[Task]) -> list[Path]:
    """Write the status that each job is queued, unless it runs already or is finished; the files that were written."""
    written = []
    for job in (job for task in tasks for job in task if job.unfinished_cells()):
        status = job.status("queued")
        if not status.replays:
            status.tokens_left = int(TokensLeft(job, {cell.cell_id: () for cell in job.unfinished_cells()}))
        status.host, status.pid = platform.node(), os.getpid()
        path = TaskStatus.path(job.run_directory, status.task)
        with suppress(OSError, ValueError):
            if TaskStatus.read(path).seen(time.time()) == "running":
                continue
        with plain_disk_errors(job.run_directory):
            job_file(job.run_directory, status.task).unlink(missing_ok=True)
            status.write(job.run_directory)
        written.append(path)
    return written


def logs(tasks: Sequence[Task]) -> Path:
    """The folder in which submitit keeps its scripts, pickles and outputs."""
    return make_folder(tasks[0][0].run_directory / "logs")
