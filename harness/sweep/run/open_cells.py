"""The cells that a job writes, open: their files, the status file of their task, and what they lack."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

from kvsweep.base.records import Completion, Pair, PairRow
from kvsweep.base.tasks import TaskStatus
from kvsweep.harness.sweep.plan.cell import Cell
from kvsweep.harness.sweep.plan.estimate import TokensLeft
from kvsweep.harness.sweep.plan.job import Job
from kvsweep.harness.sweep.run.store import CellLockedError, CellStore
from kvsweep.harness.sweep.watch.heartbeat import Reporter, last_lines
from kvsweep.harness.sweep.watch.tracker import tracked


@dataclass(frozen=True, kw_only=True)
class OpenCells:
    """The unfinished cells of one job, open for writing: their files by cell_id, status file, tokens to come."""

    job: Job
    stores: Mapping[str, CellStore]
    reporter: Reporter
    left: TokensLeft | None  # None in a replay

    def lacks(self, cell_id: str, pair: Pair) -> bool:
        return pair not in self.stores[cell_id].finished_pairs

    def know(self, pair: Pair, tokens: int) -> None:
        """Note the length of a text that another cell or an earlier pass has stored."""
        if self.left is not None:
            self.left.know(pair, tokens)

    def append(self, cell_id: str, row: PairRow) -> None:
        self.stores[cell_id].append(row)
        self.reporter.stored(cell_id, self.job.cache.packs(row.peak_length) if isinstance(row, Completion) else None)
        if self.left is not None and isinstance(row, Completion):
            self.left.store(cell_id, row.key, row.num_tokens)


@contextmanager
def open_cells(job: Job, cells: Sequence[Cell], status: TaskStatus) -> Iterator[OpenCells]:
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
        own_pairs = job.own_pairs
        for cell_id, store in stores.items():
            status.cells[cell_id].finished = len(store.finished_pairs.intersection(own_pairs))
        stack.enter_context(tracked(job.tracker, job.run_directory, status.task, stores))
        reporter, left = Reporter(job.run_directory, status), None
        if not status.replays:
            left = TokensLeft(job, {cell_id: store.finished_pairs for cell_id, store in stores.items()})
            reporter.tokens_left = left.__int__
        yield OpenCells(job=job, stores=stores, reporter=stack.enter_context(reporter), left=left)
