"""The loop over a command's jobs: launch, decide from the stored rows, launch the rest.

`until=decided` has rounds of draws. After each round every cell is compared with the full cache of its grid. A cell
that is shown to lose less than the margin, or more, gets no more draws. Decisions depend only on stored rows and the
command's settings, so the same command resumes. SLURM gets all rounds in one submission; each array waits for the one
before.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product, zip_longest

import numpy as np

from kvsweep.annexes import annex
from kvsweep.harness.grading.grader import Grader
from kvsweep.harness.sweep.cell_store import CellStore
from kvsweep.harness.sweep.execute import decode_all
from kvsweep.harness.sweep.job import Job
from kvsweep.harness.sweep.launch import Launcher, note_state, show_results, start
from kvsweep.harness.sweep.replay_plan import ReplayPlan
from kvsweep.harness.sweep.share import Share, lacking, share_of
from kvsweep.messages.command_line import LOCKED, counted
from kvsweep.messages.errors import UserError
from kvsweep.run_files.run_reader import CONTROL


class UnfinishedRoundError(UserError):
    """Another process still has to store completions of an earlier round."""

    exit_code = LOCKED


def run(jobs: Sequence[Job], launcher: Launcher, plan: ReplayPlan) -> None:
    """Do what a command asks for and its launcher waits for; print the results, or how to see progress."""
    if plan.wanted:
        jobs = annex("screen").replayed(jobs, launcher, plan)
    if not jobs:
        return
    started = _run_rounds(jobs, launcher)
    if not started:
        cells = sum(len(job.cells) for job in jobs)
        print(f"nothing to do: {counted(cells, 'cell')} done already")
    show_results(jobs, are_there=launcher.waits or not started, table=started)


def _run_rounds(jobs: Sequence[Job], launcher: Launcher) -> bool:
    """Launch the jobs round by round; return False if no cell had missing rows.

    A launcher that does not wait gets all rounds at once, and each task then finds its missing rows. A job with a
    failed round has no later rounds; the other jobs continue, and then the first error is raised.
    """
    started = False
    failures = list[Exception]()
    rounds = list[list[StageShare]]()
    for stages in zip_longest(*map(staged, jobs)):  # None for a job that has fewer stages
        rounds.append([share for share in stages if share is not None])
    for number, shares in enumerate(rounds):
        # Decided only now: the rows of the rounds before are stored.
        undecided, unfinished = _undecided_shares(shares)
        failures += unfinished
        try:
            if launcher.waits:
                started |= start([(undecided, decode_all)], launcher)
            elif any(map(lacking, undecided)):
                # The first round with work goes out together with all later ones, with all cells: its tasks decide.
                started = start([(later, decode_stage) for later in rounds[number:]], launcher)
                break
        except Exception as error:
            failures.append(error)
    if failures:
        raise failures[0]
    return started


@dataclass(frozen=True, kw_only=True)
class StageShare(Share):
    """A job and one of its stages. The process finds the cells once the stage before has ended.

    Attributes:
        before: the draws of the stage before, after which cells are decided; 0 for the first stage.
        draws: the draws per problem at the stage's end; the job's may be more.
        has_next: whether another stage follows.
    """

    before: int
    draws: int
    has_next: bool


def staged(job: Job) -> list[StageShare]:
    """Return a share for each stage of the job: one per round, and one for `finish`."""
    dealt = share_of(job).dealt  # with all draws of the job; `_undecided_job` takes those of the stage
    ends = list(job.rounds) or [job.draws]
    if job.finish:
        ends.append(job.draws)  # no further draws, but all cells
    shares = []
    before = 0
    for number, draws in enumerate(ends, start=1):
        shares.append(StageShare(job=job, dealt=dealt, before=before, draws=draws, has_next=number < len(ends)))
        before = draws
    return shares


def decode_stage(shares: Sequence[StageShare]) -> list[Exception]:
    """Like `decode_all`, for cells that earlier stages have not decided; the next round's task then waits."""
    undecided, failures = _undecided_shares(shares)
    failures += decode_all(undecided)
    # A decoding of all the job's cells has written "done", but a round of the job still waits.
    for share in shares:
        if share.has_next:
            note_state(share, ["done"], "queued")
    return failures


def _undecided_shares(shares: Sequence[StageShare]) -> tuple[list[Share], list[Exception]]:
    """Return the work left in each stage, and the errors of stages that cannot start, which are noted as stopped."""
    undecided = list[Share]()
    failures = list[Exception]()
    for share in shares:
        try:
            undecided.append(share_of(_undecided_job(share)))
        except UnfinishedRoundError as error:
            note_state(share, ["queued", "done"], "stopped", str(error))
            failures.append(error)
    return undecided, failures


def _undecided_job(stage: StageShare) -> Job:
    """Return one stage's job with the cells that earlier stages have not decided; mark decided cells DONE."""
    job = stage.job
    all_cells = replace(job, draws=stage.draws)
    if not stage.before:
        return all_cells
    decided = decided_cells(replace(job, draws=stage.before))
    for cell in job.cells:
        draws = decided.get(cell.cell_id)
        if not draws:  # not decided, or a full cache without a cell to compare it with
            continue
        # Without rounds this share is the last of its cell, so that `lacking` also asks for the mark DONE.
        share = share_of(replace(job, cells=(cell,), draws=draws, rounds=()))
        if lacking(share):
            with CellStore.of(share, cell) as store:
                store.mark_done(job.problem_ids, draws)
    if stage.draws == stage.before:  # the stage of `finish`, in which decided cells continue too
        return all_cells
    return replace(all_cells, cells=tuple(cell for cell in job.cells if cell.cell_id not in decided))


def decided_cells(job: Job) -> dict[str, int]:
    """The cells that the draws of a job's round decide, by cell_id, and the draws after which each was decided.

    The full cache and a control count as decided once all other cells are. A cell that is not decided and lacks a
    completion of these draws raises an UnfinishedRoundError.
    """
    decided = _decided(job)
    # Only an undecided cell needs the missing grades.
    ungraded = [cell for cell in job.cells if cell.cell_id not in decided and np.isnan(job.scores(cell)).any()]
    if not ungraded:
        return decided
    pairs = set(product(job.problem_ids, range(job.draws)))
    missing = sum(len(pairs - job.stored(cell).pairs()) for cell in ungraded)
    if missing:
        waits = f"the draws after the first {job.draws} wait until all shards have stored those"
        raise UnfinishedRoundError(
            f"{job.name}: {waits}, and {missing} completions are missing: run the other shards, "
            "then this command again."
        )
    with Grader() as grader:  # the process that stored the last of these completions ended before it had graded them
        for cell in ungraded:
            grader.grade_cell(job.run_directory / cell.cell_id)
    return _decided(job)


def _decided(job: Job) -> dict[str, int]:
    """The cells that the stored grades of a job's round decide, and the draws after which each was decided."""
    from kvsweep.analysis.statistics.noninferiority import decide_rounds  # imports scipy

    [full] = [cell for cell in job.cells if cell.policy.name == "full"]
    # Only servers have a control, the full cache asked again; in a decoded grid a policy may have that name.
    controls = [cell for cell in job.cells if not job.source.local and cell.policy.name == CONTROL]
    not_compared = [full, *controls]
    scores = {cell.cell_id: job.scores(cell) for cell in job.cells if cell not in not_compared}
    assert job.margin is not None
    decisions = decide_rounds(scores, job.scores(full), rounds=job.rounds, margin=job.margin / 100)
    decided = {cell_id: decision.draws for cell_id, decision in decisions.items() if decision.settled}
    if len(decided) == len(scores):  # nothing needs the full cache's further draws
        last = max(decided.values(), default=0)
        decided |= {cell.cell_id: last for cell in not_compared}
    return decided
