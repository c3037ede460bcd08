"""Work through jobs: open the cells' files, decode and grade what is missing, mark complete cells."""

import sys
import threading
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import TypeVar

from kvsweep.harness.grading.grader import Grader, read_standard
from kvsweep.harness.sweep.cell_store import CellStore, OpenCells, allow_open_cells, open_cells
from kvsweep.harness.sweep.progress_board import board
from kvsweep.harness.sweep.share import Share, lacking
from kvsweep.run_files.row_types import Completion

_S = TypeVar("_S", bound=Share)


def decode_all(shares: Sequence[Share]) -> list[Exception]:
    """Decode and grade what the shares are missing; return the errors of those that failed."""
    with Grader() as grader:
        return work_through(shares, partial(execute, grader))


def work_through(shares: Sequence[_S], run: Callable[[_S, OpenCells], None]) -> list[Exception]:
    """Open the cells that lack rows, and run each share. One failure stops no other share. Return the errors."""
    failures: list[Exception] = []
    allow_open_cells()  # each cell has a lock, and the limit may be low
    by_model = sorted(shares, key=lambda share: str(share.job.model))  # so that each model is loaded once
    with board([share.job for share in shares]):
        for share in by_model:
            try:
                cells = lacking(share)
                if cells:
                    with open_cells(share, cells) as work:
                        run(share, work)
            except Exception as error:
                _let_go(error)
                failures.append(error)
                if len(shares) > 1:  # the caller raises only the first error
                    print(f"{share.job.name} failed: {error}", file=sys.stderr)
    return failures


def _let_go(error: BaseException) -> None:
    """Clear the frames of a stored error: they would keep the engine, and with it the slots' memory."""
    cause: BaseException | None = error
    while cause is not None:
        traceback.clear_frames(cause.__traceback__)
        cause = cause.__cause__ or cause.__context__


def execute(grader: Grader, share: Share, work: OpenCells) -> None:
    """Decode, or ask the servers for, the open cells' missing rows; grade them, and mark complete cells."""
    filler = import_module(share.job.source.filler)  # only now, because it brings torch or a client
    with graded_beside(grader, work.stores.values()):
        filler.fill(work)
    for store in work.stores.values():
        grader.grade_cell(store.directory, shard=share.job.shard)
        if share.is_last:
            store.mark_done(share.job.problem_ids, share.job.draws, grader.grade_cell)


@contextmanager
def graded_beside(grader: Grader, stores: Collection[CellStore]) -> Iterator[None]:
    """Grade the rows appended to the cells while the block runs, so that a sweep shows its Pass@1 so far.

    Two threads wait for the grading workers while decoding continues. `Grader.grade_cell` later grades the rows without
    a grade: the last completions, all rows after a grading error, and those that exceeded their time, because grading
    gets less of the processor beside the decoding. Nothing else may write the cells' grades until the block ends.
    """
    standard = read_standard(next(iter(stores)).directory)  # the same for all cells of a job
    ended = threading.Event()

    def grade(store: CellStore, completion: Completion) -> None:
        """Grade one completion; an error ends the grading beside the decoding, with a note."""
        if ended.is_set():
            return
        try:
            [row] = grader.grade([completion], standard)
            if row.outcome != "grader_timeout":
                store.append_grade(row)
        except Exception as error:  # a grading error must not stop the decoding
            ended.set()
            note = f"note: all completions are graded after decoding, none beside it any more ({error})."
            print(note, file=sys.stderr)

    with ThreadPoolExecutor(max_workers=2) as threads:
        for store in stores:
            # Each appended row is handed to a thread, which calls `grade(store, row)`.
            store.listener = partial(threads.submit, partial(grade, store))
        try:
            yield
        finally:
            ended.set()  # rows that still wait for a thread are graded by `Grader.grade_cell`
