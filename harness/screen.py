"""What a sweep replays before it decodes (`replay=`), and the cells that it then leaves out (`screen=`).

Known completions are replayed through every cell, and a screen leaves out the cells that predict them worst. Both
depend only on stored rows and the command's settings, so the same command resumes.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from kvsweep.harness.replay.references import ReplayConfig
from kvsweep.harness.replay.replay_share import ReplayShare, replay_share, start_replay
from kvsweep.harness.sweep.cell import Cell
from kvsweep.harness.sweep.execute import decode_all
from kvsweep.harness.sweep.job import Job
from kvsweep.harness.sweep.launch import Launcher, start
from kvsweep.harness.sweep.replay_plan import ReplayPlan
from kvsweep.harness.sweep.share import share_of
from kvsweep.messages.errors import UserError
from kvsweep.run_files import row_types
from kvsweep.run_files.run_reader import read_screen
from kvsweep.run_files.safe_files import replace_text


def _full_caches(jobs: Sequence[Job], launcher: Launcher, plan: ReplayPlan) -> list[Job]:
    """Return the jobs whose texts are replayed, none if a file has them; UserError where nothing can be replayed."""
    if not launcher.waits:
        raise UserError("replay= and screen= go on when the full cache has ended: take launcher=inline or local.")
    if plan.texts is not None:
        return []
    full = [replace(job, cells=_full(job), rounds=(), margin=None, finish=False) for job in jobs]
    if not all(job.cells for job in full):
        raise UserError("replay= and screen= replay the full cache's texts: add full to grid.policy, or give texts=.")
    return full


def to_estimate(jobs: Sequence[Job], launcher: Launcher, plan: ReplayPlan) -> tuple[list[Job], str]:
    """Return the jobs that may decode, for `--dry-run`, and a sentence on what they leave open ("" if nothing)."""
    if not plan.wanted:
        return list(jobs), ""
    full = _full_caches(jobs, launcher, plan)  # refuses what cannot be replayed; empty where a file has the texts
    note = "Replaying passes each known text once through every cell, which is not counted."
    if plan.replay == "only":
        decoded = "the full cache alone" if full else "nothing"
        return full, f"{note} replay=only decodes {decoded}."
    if plan.screen is not None:
        note += f" screen={plan.screen} will leave out cells: this is the most that can come."
    return list(jobs), note


def replayed(jobs: Sequence[Job], launcher: Launcher, plan: ReplayPlan) -> list[Job]:
    """Decode the full cache's completions, replay them through every cell; return the jobs of the cells to decode."""
    full = _full_caches(jobs, launcher, plan)
    if full:
        start([([*map(share_of, full)], decode_all)], launcher)
    replays = [replay_share(job, ReplayConfig(texts=plan.texts)) for job in jobs]
    start_replay(replays, launcher)
    if plan.replay == "only":
        return []
    to_decode = []
    for job, share in zip(jobs, replays, strict=True):
        screened = _screened(job, share, plan)
        if screened.cells:
            to_decode.append(screened)
    return to_decode


def _full(job: Job) -> tuple[Cell, ...]:
    return tuple(cell for cell in job.cells if cell.policy.name == "full")


def _screened(job: Job, replay: ReplayShare, plan: ReplayPlan) -> Job:
    """Return the job with the full cache and the cells that pass the screen; record the others in the run's folder."""
    from kvsweep.analysis.statistics.fidelity import fidelity, rows_of_cells

    rows = rows_of_cells(job.run_directory, [cell.cell_id for cell in job.cells], replay.rows)
    # An earlier replay may have given some cells more completions; compare all on those of this one.
    problem_ids = [text.pair[0] for text in replay.texts]
    rows = rows[rows["problem_id"].isin(problem_ids)]
    table = fidelity(rows).sort_values("kl", kind="stable")  # a row for each cell, the lowest KL first
    # Without full caches, which always pass.
    table = table[~table["cell_id"].isin([cell.cell_id for cell in _full(job)])]
    passing = table
    if plan.loss is not None:
        passing = passing[-passing["change"] <= plan.loss]  # a change below 0 is a loss
    passing = passing[: plan.most]  # all of them if `most` is None
    rule = f"screen={plan.screen}"
    left_out = {}
    failing: Any = table[~table["cell_id"].isin(passing["cell_id"])]  # Any: pandas gives no types of the columns
    for row in failing.itertuples():
        left_out[row.cell_id] = row_types.Screened(rule=rule, texts=row.texts, kl=row.kl, loss=-row.change)
    earlier_records = read_screen(job.run_directory)
    # Of the cells of this replay the earlier records no longer count.
    replayed_ids = set(table["cell_id"])
    records = {cell_id: record for cell_id, record in earlier_records.items() if cell_id not in replayed_ids}
    records |= left_out
    if records != earlier_records:
        text = json.dumps(msgspec.to_builtins(records), indent=1)
        replace_text(job.run_directory / row_types.SCREEN_FILE, text + "\n")
    if plan.screen is not None:
        print(
            f"{job.name}: {rule} leaves out {len(left_out)} of {len(job.cells)} cells after "
            f"{len(replay.texts)} replayed texts; a cell left out may still be safe."
        )
    return replace(job, cells=tuple(cell for cell in job.cells if cell.cell_id not in left_out))
