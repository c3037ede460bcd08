"""Work through jobs: open the cells' files, decode and grade what they lack, mark what is complete."""

import sys
import threading
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial

from kvsweep.base.records import Completion, view
from kvsweep.base.tasks import TaskStatus
from kvsweep.harness.grading.grader import Grader, read_standard
from kvsweep.harness.sweep.plan.job import Job
from kvsweep.harness.sweep.run.decode_cells import decode
from kvsweep.harness.sweep.run.open_cells import open_cells
from kvsweep.harness.sweep.run.rounds import UnfinishedRoundError, decided_cells
from kvsweep.harness.sweep.run.store import CellStore, allow_open_cells
from kvsweep.harness.sweep.watch.board import Board

_Peak = view(Completion, "peak_length")


def run(jobs: Sequence[Job]) -> list[Exception]:
    """Work through all jobs; return the errors of those that failed, which stop only the same job's later rounds."""
    failures: list[Exception] = []
    failed: dict[str, int] = {}
    allow_open_cells()  # each cell has a lock, and the limit may be low
    with Grader() as grader, Board(jobs):
        for job in sorted(jobs, key=lambda job: str(job.model)):  # each model is loaded once
            if job.plan in failed and job.draws > failed[job.plan]:
                continue
            try:
                (job.work or execute)(job, grader)
            except Exception as error:
                failures.append(error)
                if job.plan:
                    failed.setdefault(job.plan, job.draws)
                if len(jobs) > 1:
                    print(f"{job.name} failed: {error}", file=sys.stderr)
    return failures


def execute(job: Job, grader: Grader) -> None:
    unfinished = job.unfinished_cells()
    decided = _decided_before(job, grader) if unfinished and job.earlier_draws else {}
    cells = [cell for cell in unfinished if cell.cell_id not in decided]
    if not cells:
        return
    status, own_pairs = job.status("running", decided), set(job.own_pairs)
    with open_cells(job, cells, status) as work:
        if job.cache.is_packed:
            for cell_id, store in work.stores.items():
                if longest := max((row.peak_length for row in store.read_completions(own_pairs, _Peak)), default=0):
                    status.cells[cell_id].packed = job.cache.packs(longest)
        with graded_beside(grader, work.stores.values()):
            decode(work)
        for store in work.stores.values():
            grader.grade_cell(store.directory, shard=job.shard)
        enough, plan = _enough_draws(job, grader), job.plan
        for cell_id, store in work.stores.items():
            if cell_id in enough:
                store.mark_done(job.problem_ids, enough[cell_id], plan)
    if len(enough) < len(job.cells):  # there is another round
        status.state = "queued"
        with suppress(OSError):
            status.write(job.run_directory)


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


def _enough_draws(job: Job, grader: Grader) -> dict[str, int]:
    """The draws of each cell that needs no more after this round; no cell while another shard still writes its part."""
    if job.draws == max(job.rounds, default=job.draws):
        return {cell.cell_id: job.draws for cell in job.cells}
    with suppress(UnfinishedRoundError):
        return decided_cells(job, job.draws, grader)
    return {}


def _decided_before(job: Job, grader: Grader) -> dict[str, int]:
    """The cells that the earlier rounds have decided; those that a killed process left without DONE are marked."""
    try:
        decided = decided_cells(job, job.earlier_draws, grader)
    except UnfinishedRoundError as error:
        with suppress(OSError, ValueError):
            status = TaskStatus.read(TaskStatus.path(job.run_directory, job.status("queued").task))
            if status.state == "queued":
                status.state, status.error = "stopped", str(error)
                status.write(job.run_directory)
        raise
    for cell in job.unfinished_cells():
        if cell.cell_id in decided:
            with CellStore.of(job, cell) as store:
                store.mark_done(job.problem_ids, decided[cell.cell_id], job.plan)
    return decided
