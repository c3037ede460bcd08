"""Work through jobs: open the cells' files, decode and grade what they lack, mark what is complete."""

import sys
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

from kvsweep.harness.grading.grader import Grader, read_standard
from kvsweep.harness.sweep.job import Job
from kvsweep.harness.sweep.progress_board import Board
from kvsweep.harness.sweep.store import CellStore, allow_open_cells, open_cells
from kvsweep.records import Completion

_J = TypeVar("_J", bound=Job)


def decode_all(jobs: Sequence[Job]) -> list[Exception]:
    """Decode and grade what the jobs lack; return the errors of the jobs that failed."""
    with Grader() as grader:
        return work_through(jobs, partial(execute, grader))


def work_through(jobs: Sequence[_J], work: Callable[[_J], None]) -> list[Exception]:
    """Do the work of every job; a job that fails stops no other. Return the errors of the jobs that failed."""
    failures: list[Exception] = []
    allow_open_cells()  # each cell has a lock, and the limit may be low
    with Board(jobs):
        for job in sorted(jobs, key=lambda job: str(job.model)):  # each model is loaded once
            try:
                work(job)
            except Exception as error:
                failures.append(error)
                if len(jobs) > 1:
                    print(f"{job.name} failed: {error}", file=sys.stderr)
    return failures


def execute(grader: Grader, job: Job) -> None:
    from kvsweep.harness.sweep.decode import decode  # imports torch

    cells = job.unfinished_cells()
    if not cells:
        return
    with open_cells(job, cells) as work:
        with graded_beside(grader, work.stores.values()):
            decode(work)
        for store in work.stores.values():
            grader.grade_cell(store.directory, shard=job.shard)
            if job.is_last_round:
                store.mark_done(job.problem_ids, job.draws)


@contextmanager
def graded_beside(grader: Grader, stores: Collection[CellStore]) -> Iterator[None]:
    """Grade what is appended to the cells while the block runs, so that a sweep shows its Pass@1 so far.

    Two threads wait for the grading workers, and the decoding goes on. `Grader.grade_cell` then grades what has no
    grade: the last completions, all after an error in grading, and those that overran their time, because a row has
    less of the processor beside the decoding. Nothing else may write the cells' grades until the block ends.
    """
    standard = read_standard(next(iter(stores)).directory)  # that of all cells of a job
    ended = threading.Event()

    def grade(store: CellStore, completion: Completion) -> None:
        if ended.is_set():
            return
        try:
            [row] = grader.grade([completion], standard)
            if row.outcome != "grader_timeout":
                store.append_grade(row)
        except Exception as error:  # no error of the grading may stop the decoding
            ended.set()
            note = f"note: all completions are graded after decoding, none beside it any more ({error})."
            print(note, file=sys.stderr)

    with ThreadPoolExecutor(max_workers=2) as threads:
        for store in stores:
            store.listener = partial(threads.submit, partial(grade, store))
        try:
            yield
        finally:
            ended.set()
