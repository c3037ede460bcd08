"""Work through jobs: open the cells' files, decode and grade what they lack, mark what is complete."""

import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress

from tqdm import tqdm

from kvsweep.base.tasks import TaskStatus
from kvsweep.harness.grading.grader import Grader
from kvsweep.harness.sweep.plan.job import Job
from kvsweep.harness.sweep.run.decode_cells import OpenCells, decode
from kvsweep.harness.sweep.run.grade_thread import GradeThread
from kvsweep.harness.sweep.run.rounds import UnfinishedRoundError, decided_cells
from kvsweep.harness.sweep.run.store import CellLockedError, CellStore, raise_open_files
from kvsweep.harness.sweep.watch.heartbeat import Reporter, last_lines
from kvsweep.harness.sweep.watch.tracker import tracked


def run(jobs: Sequence[Job]) -> list[Exception]:
    """Work through all jobs and return the errors of those that failed; a failed job does not stop the others.

    Of a sequential job that fails in one round, the later rounds are left out.
    """
    failures: list[Exception] = []
    failed: dict[str, int] = {}
    total = sum(len(job.cells) * len(job.new_pairs) for job in jobs)
    raise_open_files()
    with Grader() as grader, tqdm(total=total, unit="completion", smoothing=0.02, mininterval=1) as progress:
        for job in sorted(jobs, key=lambda job: str(job.model)):  # each model is loaded once
            if job.plan in failed and job.draws > failed[job.plan]:
                continue
            try:
                (job.work or execute)(job, grader, progress)
            except Exception as error:
                failures.append(error)
                if job.plan:
                    failed.setdefault(job.plan, job.draws)
                if len(jobs) > 1:
                    progress.write(f"{job.name} failed: {error}", file=sys.stderr)
    return failures


def execute(job: Job, grader: Grader, progress: tqdm) -> None:
    """Write the completions that the job's cells lack, grade them, mark the cells that are complete."""
    unfinished = job.unfinished_cells()
    decided = _decided_before(job, grader) if unfinished and job.earlier_draws else {}
    cells = [cell for cell in unfinished if cell.cell_id not in decided]
    progress.update(len(job.new_pairs) * (len(job.cells) - len(cells)))
    if not cells:
        return
    status = job.status("running", decided)
    with ExitStack() as stack:
        try:
            job.check_inputs()
            stores = {
                cell.cell_id: stack.enter_context(
                    CellStore(job.run_directory, cell, job.benchmark.problems, shard=job.shard)
                )
                for cell in cells
            }
        except CellLockedError:
            raise  # the status file belongs to the process that holds the lock
        except Exception as error:
            status.state, status.error = "failed", last_lines(error)
            with suppress(OSError):
                status.write(job.run_directory)
            raise
        own_pairs, new_pairs = job.own_pairs, job.new_pairs
        if job.finish:
            progress.total = (progress.total or 0) + sum(
                len(set(own_pairs) - store.finished_pairs) for store in stores.values()
            )
        for cell_id, store in stores.items():
            status.cells[cell_id].finished = len(store.finished_pairs.intersection(own_pairs))
            if job.cache.is_packed:
                earlier = [job.cache.packs(row.peak_length) for row in store.read_completions(own_pairs)]
                status.cells[cell_id].packed = any(earlier) if earlier else None
            progress.update(len(store.finished_pairs.intersection(new_pairs)))
        stack.enter_context(tracked(job.tracker, job.run_directory, status.task, stores))
        reporter = stack.enter_context(Reporter(job.run_directory, status))
        with GradeThread(grader, stores.values()):
            decode(OpenCells(job=job, stores=stores, reporter=reporter, progress=progress))
        for store in stores.values():
            grader.grade_cell(store.directory, shard=job.shard)
        enough, plan = _enough_draws(job, grader), job.plan
        for cell_id, store in stores.items():
            if cell_id in enough:
                store.mark_done(job.problem_ids, enough[cell_id], plan)
    if len(enough) < len(job.cells):  # there is another round
        status.state = "queued"
        with suppress(OSError):
            status.write(job.run_directory)


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
            with CellStore(job.run_directory, cell, job.benchmark.problems, shard=job.shard) as store:
                store.mark_done(job.problem_ids, decided[cell.cell_id], job.plan)
    return decided
