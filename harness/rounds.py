"""The loop around the jobs of a command: launch, decide from what is stored, launch the rest.

`until=decided` has rounds of draws. After each round every cell is compared with the full cache of its grid, and a cell
that is shown to lose less than the margin, or more, gets no more draws. This depends on stored rows and the command's
settings alone, so the same command goes on where it stopped. SLURM gets all rounds in one submission, and each array
waits for the one before.
"""

import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

import numpy as np

from kvsweep.command_line import LOCKED, counted
from kvsweep.errors import UserError
from kvsweep.harness.grading.grader import Grader
from kvsweep.harness.screen import ReplayPlan, replayed
from kvsweep.harness.sweep.cell import stored_pairs
from kvsweep.harness.sweep.execute import decode_all
from kvsweep.harness.sweep.job import Job, changed_code
from kvsweep.harness.sweep.launch import Launcher, show_results, start
from kvsweep.harness.sweep.share import Share, lacking, share_of
from kvsweep.harness.sweep.store import CellStore
from kvsweep.task_status import State, TaskStatus


class UnfinishedRoundError(UserError):
    """Another process has still to store completions of an earlier round."""

    exit_code = LOCKED


def run(jobs: Sequence[Job], launcher: Launcher, plan: ReplayPlan) -> None:
    """Do all that a command asks for and that its launcher waits for; print the results, or where to see progress."""
    for note in filter(None, map(changed_code, jobs)):
        print(note, file=sys.stderr)
    if plan.wanted:
        jobs = replayed(jobs, launcher, plan)
    if not jobs:
        return
    started = _run_rounds(jobs, launcher)
    if not started:
        cells = len({(job.run_directory, cell.cell_id) for job in jobs for cell in job.cells})
        print(f"nothing to do: {counted(cells, 'cell')} done already")
    show_results(jobs, are_there=launcher.waits or not started, table=started)


def _run_rounds(jobs: Sequence[Job], launcher: Launcher) -> bool:
    """Launch the jobs round by round; False if no cell lacked anything.

    A launcher that does not wait gets all rounds at once. A job whose round failed has no later rounds; the other jobs
    go on, and then the first error is raised.
    """
    started, failures = False, list[Exception]()
    for number in range(max(len(_stages(job)) for job in jobs)):
        parts, unfinished = _parts(jobs, number)
        failures += [error for _, error in unfinished]
        try:
            if launcher.waits:
                started |= start([(parts, decode_all)], launcher)
            elif any(map(lacking, parts)):
                started = _submit(jobs, launcher, number)
                break
        except Exception as error:
            failures.append(error)
    if failures:
        raise failures[0]
    return started


def _submit(jobs: Sequence[Job], launcher: Launcher, first: int) -> bool:
    """Hand the rounds from the first unfinished one on to a launcher that does not wait; a task finds what it lacks."""
    last = max(len(_stages(job)) for job in jobs)
    rounds = [([*map(share_of, _with_round(jobs, n))], partial(decode_round, n)) for n in range(first, last)]
    return start(rounds, launcher)


def _with_round(jobs: Sequence[Job], number: int) -> list[Job]:
    return [job for job in jobs if number < len(_stages(job))]


def decode_round(number: int, shares: Sequence[Share]) -> list[Exception]:
    """As `decode_all`, of the cells that the rounds before have not decided; the next round's task then waits."""
    jobs = [share.job for share in shares]
    parts, unfinished = _parts(jobs, number)
    for job, error in unfinished:
        _note(job, "stopped", str(error))
    failures = [*(error for _, error in unfinished), *decode_all(parts)]
    for job in _with_round(jobs, number + 1):
        _note(job, "queued")
    return failures


def _note(job: Job, state: State, error: str | None = None) -> None:
    """Write a state into the status of a job's task, unless the task has failed or stopped."""
    with suppress(OSError, ValueError):
        status = TaskStatus.read(TaskStatus.path(job.run_directory, share_of(job).task))
        if status.state in ("queued", "done"):
            status.state, status.error = state, error
            status.write(job.run_directory)


def _parts(jobs: Sequence[Job], number: int) -> tuple[list[Share], list[tuple[Job, UnfinishedRoundError]]]:
    """The shares of one round, and the jobs that cannot begin it, each with its error."""
    parts, unfinished = list[Share](), list[tuple[Job, UnfinishedRoundError]]()
    for job in _with_round(jobs, number):
        try:
            parts.append(share_of(_part(job, number)))
        except UnfinishedRoundError as error:
            unfinished.append((job, error))
    return parts, unfinished


def _stages(job: Job) -> list[int]:
    """The draws per problem at the end of each round; the last stage of a job with `finish` has all cells again."""
    return [*(job.rounds or [job.draws]), *[job.draws] * job.finish]


def _part(job: Job, number: int) -> Job:
    """The job of one stage, with the cells that the earlier ones have not decided; decided cells are marked DONE."""
    stages = _stages(job)
    part = replace(job, draws=stages[number])
    if number == 0:
        return part
    decided = decided_cells(replace(job, draws=stages[number - 1]))
    for cell in job.cells:
        if draws := decided.get(cell.cell_id):
            share = share_of(replace(job, cells=(cell,), draws=draws, rounds=()))
            if lacking(share):
                with CellStore.of(share, cell) as store:
                    store.mark_done(job.problem_ids, draws)
    is_finish = number == len(job.rounds)
    return part if is_finish else replace(part, cells=tuple(c for c in job.cells if c.cell_id not in decided))


def decided_cells(job: Job) -> dict[str, int]:
    """The cells that the draws of a job's round decide, by cell_id, and the draws after which each was decided.

    The full cache counts as decided once all other cells are. A cell that is not decided and lacks a completion of
    these draws raises an UnfinishedRoundError.
    """
    decided = _decided(job)
    lacking = [c for c in job.cells if c.cell_id not in decided and np.isnan(job.scores(c)).any()]
    if not lacking:
        return decided
    wanted = {(problem_id, draw) for problem_id in job.problem_ids for draw in range(job.draws)}
    missing = sum(len(wanted - stored_pairs(job.run_directory / cell.cell_id)) for cell in lacking)
    if missing:
        waits = f"the draws after the first {job.draws} wait until all shards have stored those"
        mend = "run the other shards, then this command again"
        raise UnfinishedRoundError(f"{job.name}: {waits}, and {missing} completions are missing: {mend}.")
    with Grader() as grader:  # the process that stored the last of these completions ended before it had graded them
        for cell in lacking:
            grader.grade_cell(job.run_directory / cell.cell_id)
    return _decided(job)


def _decided(job: Job) -> dict[str, int]:
    from kvsweep.analysis.statistics.noninferiority import decide_rounds  # imports scipy

    [full] = [cell for cell in job.cells if cell.policy.name == "full"]
    others = {cell.cell_id: job.scores(cell) for cell in job.cells if cell is not full}
    assert job.margin is not None
    decisions = decide_rounds(others, job.scores(full), rounds=job.rounds, margin=job.margin / 100)
    decided = {cell_id: decision.draws for cell_id, decision in decisions.items() if decision.settled}
    return decided if len(decided) < len(others) else {**decided, full.cell_id: max(decided.values())}
