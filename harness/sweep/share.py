"""One process's part of a job in one round, decided before it runs. The cells' files say which rows are missing."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from kvsweep.harness.sweep.cell import Cell
from kvsweep.harness.sweep.job import Job
from kvsweep.run_files.row_types import COMPLETIONS_FILE, Pair, grading_rule
from kvsweep.run_files.task_status import CellProgress, State, TaskStatus, policy_label, task_name


@dataclass(frozen=True, kw_only=True)
class Share:
    """One process's part of a job in one round.

    Attributes: job: the job with this process's cells and shard, and the draws until the end of the round. dealt:
    (problem_id, draw) of all shards' rows, in the order in which shards get them. rows: the file that gets the rows; a
    replay has another file than the completions. is_last: whether this is the job's last round, after which complete
    cells are marked DONE.
    """

    job: Job
    dealt: Sequence[Pair]
    rows: str = COMPLETIONS_FILE
    is_last: bool = True

    @cached_property
    def pairs(self) -> list[Pair]:
        """(problem_id, draw) of this shard's rows, problem by problem."""
        # `dealt` is a0 b0 a1 b1, and here a0 a1 b0 b1 are needed. A problem sorts by the place of its last pair in
        # `dealt`, which replaces its earlier places in the dictionary. The sort leaves its draws in their order.
        last_places = {problem_id: place for place, (problem_id, _) in enumerate(self.dealt)}
        return sorted(self.job.shard.of(self.dealt), key=lambda pair: last_places[pair[0]])

    @property
    def replays(self) -> bool:
        return self.rows != COMPLETIONS_FILE

    @property
    def task(self) -> str:
        """The name of the status file; a replay has a separate file beside the decoding's."""
        job = self.job
        name = task_name(job.model.name, job.benchmark.name, [cell.cell_id for cell in job.cells], str(job.shard))
        return f"replay-{name}" if self.replays else name


def share_of(job: Job) -> Share:
    """Return the share that decodes a job's completions. A pair's shard does not depend on the job's draws."""
    dealt = []
    # Draw by draw, so that further draws come behind and leave the others where they are.
    for draw in range(job.draws):
        dealt += [(problem_id, draw) for problem_id in job.problem_ids]
    return Share(job=job, dealt=dealt, is_last=job.draws >= max(job.rounds, default=0))


def lacking(share: Share) -> list[Cell]:
    """Return the cells without a DONE for the job's completions; before the last round, those that lack a grade.

    For a replay, which has no DONE: the cells that lack a row of this shard.
    """
    job = share.job
    cells = []
    for cell in job.cells:
        stored = job.stored(cell)
        if share.replays:
            is_complete = stored.pairs(share.rows).issuperset(share.pairs)
        else:
            is_complete = stored.covers(job.problem_ids, job.draws, grading_rule(cell.describe()))
            if not is_complete and not share.is_last:
                is_complete = not np.isnan(job.scores(cell)).any()
        if not is_complete:
            cells.append(cell)
    return cells


def status_of(share: Share, state: State) -> TaskStatus:
    """Return a status with no completion counted; for a replay, the complete cells are counted."""
    job = share.job
    expected = len(share.pairs)
    # A cell that has decoded all shows it by DONE, so each counts as incomplete. A replay has no DONE, so its complete
    # cells are counted here.
    incomplete = lacking(share) if share.replays else job.cells
    incomplete_ids = {cell.cell_id for cell in incomplete}
    cells = {}
    for cell in job.cells:
        cells[cell.cell_id] = CellProgress(
            model=job.model.name,
            benchmark=job.benchmark.name,
            policy=policy_label(cell.policy.identity()),
            finished=0 if cell.cell_id in incomplete_ids else expected,
            expected=expected,
            random_weights=job.model.random_weights,
        )
    return TaskStatus(
        task=share.task, shard=str(job.shard), command=job.command, state=state, cells=cells, replays=share.replays
    )
