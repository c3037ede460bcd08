"""The command `kvsweep`: compose, check everything, skip what is finished, decode, grade, sum up."""

import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress

from tqdm import tqdm

from harness.grading.grader import Grader
from harness.sweep.decode_cells import decode
from harness.sweep.heartbeat import CellProgress, Reporter, State, TaskStatus, last_lines, policy_label, task_name
from harness.sweep.job import Job
from harness.sweep.store import CellLockedError, CellStore, is_done
from harness.sweep.tracker import tracked


def run(jobs: Sequence[Job]) -> list[Exception]:
    """Work through all jobs, each model loaded once; a job that fails does not keep the others from running."""
    failures: list[Exception] = []
    total = sum(len(job.cells) * len(job.own_pairs) for job in jobs)
    with Grader() as grader, tqdm(total=total, unit="completion", smoothing=0.02, mininterval=1) as progress:
        for job in sorted(jobs, key=lambda job: str(job.model)):  # each model is loaded once
            try:
                execute(job, grader, progress)
            except Exception as error:
                failures.append(error)
                if len(jobs) > 1:
                    progress.write(f"{job.model.name} {job.benchmark.name} failed: {error}", file=sys.stderr)
    return failures


def execute(job: Job, grader: Grader, progress: tqdm) -> None:
    """Write the completions that the job's cells lack, grade them, mark the cells that are complete."""
    pairs = job.own_pairs
    cells = [c for c in job.cells if not is_done(job.run_directory, c, job.problem_ids, job.draws)]
    progress.update(len(pairs) * (len(job.cells) - len(cells)))
    if not cells:
        return
    status = _status(job, "running")
    with ExitStack() as stack:
        try:
            stores = {
                cell.cell_id: stack.enter_context(
                    CellStore(job.run_directory, cell, job.benchmark.problems, shard=job.shard)
                )
                for cell in cells
            }
        except CellLockedError:
            raise  # the status is its holder's to write
        except Exception as error:
            status.state, status.error = "failed", last_lines(error)
            with suppress(OSError):
                status.write(job.run_directory)
            raise
        for cell_id, store in stores.items():
            status.cells[cell_id].finished = len(store.finished_pairs.intersection(pairs))
            progress.update(status.cells[cell_id].finished)
        stack.enter_context(tracked(job.tracker, job.run_directory, status.task, stores))
        reporter = stack.enter_context(Reporter(job.run_directory, status))
        missing = [cell for cell in cells if not stores[cell.cell_id].finished_pairs.issuperset(pairs)]
        if missing:
            decode(job, missing, stores, progress, reporter)
        for store in stores.values():
            grader.grade_cell(store.directory, shard=job.shard)
            store.mark_done(job.problem_ids, job.draws)


def _status(job: Job, state: State) -> TaskStatus:
    cells = {
        cell.cell_id: CellProgress(
            model=job.model.name,
            benchmark=job.benchmark.name,
            policy=policy_label(cell.policy.identity()),
            finished=0,
            expected=len(job.own_pairs),
        )
        for cell in job.cells
    }
    return TaskStatus(
        task=task_name(job.model.name, job.benchmark.name, cells, str(job.shard)),
        state=state,
        shard=str(job.shard),
        command=job.command,
        cells=cells,
    )
