"""Work through jobs: open the cells' files, decode what they lack, grade, mark what is complete."""

import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress

from tqdm import tqdm

from harness.grading.grader import Grader
from harness.sweep.decode_cells import OpenCells, decode
from harness.sweep.heartbeat import Reporter, last_lines
from harness.sweep.job import Job
from harness.sweep.store import CellLockedError, CellStore, most_open_cells
from harness.sweep.tracker import tracked


def run(jobs: Sequence[Job]) -> list[Exception]:
    """Work through all jobs and return the errors of those that failed; a failed job does not stop the others."""
    failures: list[Exception] = []
    most_open_cells()
    total = sum(len(job.cells) * len(job.own_pairs) for job in jobs)
    with Grader() as grader, tqdm(total=total, unit="completion", smoothing=0.02, mininterval=1) as progress:
        for job in sorted(jobs, key=lambda job: str(job.model)):  # each model is loaded once
            try:
                execute(job, grader, progress)
            except Exception as error:
                failures.append(error)
                if len(jobs) > 1:
                    progress.write(f"{job.name} failed: {error}", file=sys.stderr)
    return failures


def execute(job: Job, grader: Grader, progress: tqdm) -> None:
    """Write the completions that the job's cells lack, grade them, mark the cells that are complete."""
    cells = job.unfinished_cells()
    progress.update(len(job.own_pairs) * (len(job.cells) - len(cells)))
    if not cells:
        return
    status = job.status("running")
    with ExitStack() as stack:
        try:
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
        for cell_id, store in stores.items():
            status.cells[cell_id].finished = len(store.finished_pairs.intersection(job.own_pairs))
            progress.update(status.cells[cell_id].finished)
        stack.enter_context(tracked(job.tracker, job.run_directory, status.task, stores))
        reporter = stack.enter_context(Reporter(job.run_directory, status))
        decode(OpenCells(job=job, stores=stores, reporter=reporter, progress=progress))
        for store in stores.values():
            grader.grade_cell(store.directory, shard=job.shard)
            store.mark_done(job.problem_ids, job.draws)
