"""Sequential sweeps (`until=decided`): which cells of a grid the stored rows have decided.

After each round of draws, every cell is compared with the full cache of its grid. A cell that is shown to lose less
than the margin, or more, gets no more draws. That depends on the stored grades and the job's settings alone, and no
shard begins a round before all shards have stored the one before, so every shard finds the same cells.
"""

from collections.abc import Mapping

import numpy as np

from kvsweep.analysis.numbers.margin_test import Floats, decide_rounds
from kvsweep.base.command_line import LOCKED
from kvsweep.base.errors import UserError
from kvsweep.base.records import Grade, ignore, read_grades, view
from kvsweep.harness.grading.grader import Grader
from kvsweep.harness.sweep.plan.cell import stored_pairs
from kvsweep.harness.sweep.plan.job import Job

_Verdict = view(Grade, "correct", "rule")


class UnfinishedRoundError(UserError):
    """Another process has still to store completions of an earlier round."""

    exit_code = LOCKED


def decided_cells(job: Job, draws: int, grader: Grader) -> dict[str, int]:
    """The cells that the first `draws` draws decide, by cell_id, and the draws after which each was decided.

    The full cache counts as decided once all other cells are. A cell that is not decided and lacks a completion of
    these draws raises an UnfinishedRoundError.
    """
    scores = {cell.cell_id: stored_scores(job, cell.cell_id, draws) for cell in job.cells}
    decided = _decided(job, scores)
    lacking = [cell_id for cell_id, score in scores.items() if cell_id not in decided and np.isnan(score).any()]
    if not lacking:
        return decided
    wanted = {(problem_id, draw) for problem_id in job.problem_ids for draw in range(draws)}
    missing = sum(len(wanted - stored_pairs(job.run_directory / cell_id)) for cell_id in lacking)
    if missing:
        waits = f"the draws after the first {draws} wait until all shards have stored those"
        mend = "run the other shards, then this command again"
        raise UnfinishedRoundError(f"{job.name}: {waits}, and {missing} completions are missing: {mend}.")
    for cell_id in lacking:
        # The process that stored the last of these completions ended before it had graded them.
        grader.grade_cell(job.run_directory / cell_id)
        scores[cell_id] = stored_scores(job, cell_id, draws)
    return _decided(job, scores)


def _decided(job: Job, scores: Mapping[str, Floats]) -> dict[str, int]:
    [full] = [cell.cell_id for cell in job.cells if cell.policy.name == "full"]
    others = {cell_id: score for cell_id, score in scores.items() if cell_id != full}
    assert job.margin is not None
    decisions = decide_rounds(others, scores[full], rounds=job.rounds, margin=job.margin / 100)
    decided = {cell_id: decision.draws for cell_id, decision in decisions.items() if decision.settled}
    return decided if len(decided) < len(others) else {**decided, full: max(decided.values())}


def stored_scores(job: Job, cell_id: str, draws: int) -> Floats:
    """The stored grades of a cell, [problems, draws]: 1 right, 0 not, NaN without a grade."""
    rows = {problem_id: row for row, problem_id in enumerate(job.problem_ids)}
    scores = np.full((len(rows), draws), np.nan)
    for grade in read_grades(job.run_directory / cell_id, _Verdict, on_bad=ignore):
        if grade.problem_id in rows and grade.draw < draws:
            scores[rows[grade.problem_id], grade.draw] = grade.correct
    return scores
