"""The cells that a job writes, open: their files, the status file of their task, and the progress bar."""

import os
import platform
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from tqdm import tqdm

from kvsweep.base.errors import UserError
from kvsweep.base.records import Completion, Pair, PairRow
from kvsweep.base.tasks import TaskStatus
from kvsweep.harness.sweep.plan.cell import Cell
from kvsweep.harness.sweep.plan.job import Job
from kvsweep.harness.sweep.run.store import CellLockedError, CellStore
from kvsweep.harness.sweep.watch.tracker import tracked

HEARTBEAT_S = 5.0


class Reporter:
    """Keeps a task's status file up to date while the task runs, and writes how the task ended. A context manager.

    A status that cannot be written stops no task. Each of `counters` returns an engine's live tokens so far.
    """

    def __init__(self, run_directory: Path, status: TaskStatus) -> None:
        self.status, self._run_directory = status, run_directory
        self.counters: list[Callable[[], int]] = []
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def __enter__(self) -> Self:
        self.status.state, self.status.error = "running", None
        self.status.host, self.status.pid = platform.node(), os.getpid()
        array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
        # As squeue names the job.
        self.status.scheduler_job = f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID")
        self.status.started = time.time()
        self._write()
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._end.set()
        self._thread.join()
        if error is None:
            self.status.state = "done"
        elif isinstance(error, Exception):
            self.status.state, self.status.error = "failed", last_lines(error)
        else:
            self.status.state = "stopped"
        self._write()

    def stored(self, cell_id: str, packed: bool | None = None) -> None:
        cell = self.status.cells[cell_id]
        cell.finished += 1
        cell.packed = packed if cell.packed is None else cell.packed or packed
        self.status.made += 1

    def _beat(self) -> None:
        while not self._end.wait(HEARTBEAT_S):
            self._write()

    def _write(self) -> None:
        self.status.heartbeat, self.status.tokens = time.time(), sum(count() for count in self.counters)
        with suppress(OSError):
            self.status.write(self._run_directory)


def last_lines(error: BaseException) -> str:
    """The text to show of an error: one sentence for a user's mistake, the end of the traceback for any other error."""
    lines = "".join(traceback.format_exception(error)).rstrip().splitlines()
    return str(error) if isinstance(error, UserError) else "\n".join(lines[-12:])


@dataclass(frozen=True, kw_only=True)
class OpenCells:
    """The unfinished cells of one job, open for writing: their files by cell_id, status file and progress bar."""

    job: Job
    stores: Mapping[str, CellStore]
    reporter: Reporter
    progress: tqdm

    def lacks(self, cell_id: str, pair: Pair) -> bool:
        return pair not in self.stores[cell_id].finished_pairs

    def append(self, cell_id: str, row: PairRow) -> None:
        self.stores[cell_id].append(row)
        self.reporter.stored(cell_id, self.job.cache.packs(row.peak_length) if isinstance(row, Completion) else None)
        self.progress.update()


@contextmanager
def open_cells(job: Job, cells: Sequence[Cell], status: TaskStatus, progress: tqdm) -> Iterator[OpenCells]:
    """Open the files of some of a job's cells, and keep the status up to date, while the block runs.

    A cell that another process writes raises a CellLockedError; weights that have changed since the job was planned,
    and a file that cannot be written, raise a UserError.
    """
    with ExitStack() as stack:
        try:
            job.check_inputs()
            stores = {cell.cell_id: stack.enter_context(CellStore.of(job, cell)) for cell in cells}
        except CellLockedError:
            raise  # the status file belongs to the process that holds the lock
        except Exception as error:
            status.state, status.error = "failed", last_lines(error)
            with suppress(OSError):
                status.write(job.run_directory)
            raise
        own_pairs, new_pairs = job.own_pairs, job.new_pairs
        for cell_id, store in stores.items():
            status.cells[cell_id].finished = len(store.finished_pairs.intersection(own_pairs))
            progress.update(len(store.finished_pairs.intersection(new_pairs)))
        stack.enter_context(tracked(job.tracker, job.run_directory, status.task, stores))
        reporter = stack.enter_context(Reporter(job.run_directory, status))
        yield OpenCells(job=job, stores=stores, reporter=reporter, progress=progress)
