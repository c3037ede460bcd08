"""Start replays: alone, before a sweep decodes its cells, or to screen which cells are decoded at all."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from pydantic import Field

from kvsweep.base.errors import UserError
from kvsweep.harness.replay.job import ReplayJob
from kvsweep.harness.replay.texts import ReplayConfig
from kvsweep.harness.sweep.launch.launch import launch
from kvsweep.harness.sweep.launch.launcher import Launcher, split
from kvsweep.harness.sweep.plan.cell import Cell
from kvsweep.harness.sweep.plan.job import Job


@dataclass(frozen=True, kw_only=True)
class ReplayPlan:
    """What a sweep replays.

    Attributes:
        replay: true replays known texts through every cell before the cells decode; only decodes nothing but the full
            cache, whose texts these are.
        screen: decode only so many cells beside the full cache, those of the lowest KL; None decodes all.
        texts: a file of texts in place of the full cache's own.
    """

    replay: Literal[True, False, "only"] = False
    screen: Annotated[int, Field(ge=1, description="a number of cells")] | None = None
    texts: str | None = None

    def __post_init__(self) -> None:
        if self.screen is not None and self.replay == "only":
            raise UserError(f"screen={self.screen} chooses cells to decode, and replay=only decodes none: drop one.")
        if self.texts is not None and not self.wanted:
            raise UserError(f"texts={self.texts} goes with replay=true, replay=only or screen=N: add one of them.")

    @property
    def wanted(self) -> bool:
        """True if anything is replayed."""
        return bool(self.replay or self.screen)


def launch_replayed(jobs: Sequence[Job], launcher: Launcher, plan: ReplayPlan) -> None:
    """Decode the full cache's texts, replay them through every cell, then decode the cells that the plan leaves."""
    if not launcher.waits:
        raise UserError("replay= and screen= go on when the full cache has ended: take launcher=inline or local.")
    if plan.texts is None:
        full = [replace(job, cells=_full(job), rounds=(), margin=None) for job in jobs]
        if not all(job.cells for job in full):
            raise UserError(
                "replay= and screen= replay the full cache's texts: add full to grid.policy, or give texts=."
            )
        launch(full, launcher)
    replays = [ReplayJob.of(job, ReplayConfig(texts=plan.texts)) for job in jobs]
    start_replay(replays, launcher)
    if plan.replay != "only":
        launch(
            jobs if plan.screen is None else list(map(_screened, jobs, replays, [plan.screen] * len(jobs))), launcher
        )


def _full(job: Job) -> tuple[Cell, ...]:
    return tuple(cell for cell in job.cells if cell.policy.name == "full")


def _screened(job: Job, replayed: ReplayJob, most: int) -> Job:
    """The job with the full cache and the `most` cells of the lowest mean KL."""
    from kvsweep.analysis.numbers.fidelity import fidelity, rows_of_cells

    rows = rows_of_cells(job.run_directory, [cell.cell_id for cell in job.cells], replayed.replay.file)
    ranked = fidelity(rows).sort_values("kl")["cell_id"].tolist()
    full = {cell.cell_id for cell in _full(job)}
    chosen = {*full, *[cell_id for cell_id in ranked if cell_id not in full][:most]}
    print(
        f"{job.name}: screen={most} decodes {len(chosen)} of {len(job.cells)} cells, those of the lowest KL over "
        f"{len(replayed.texts)} replayed texts; a cell left out may still hold."
    )
    return replace(job, cells=tuple(cell for cell in job.cells if cell.cell_id in chosen))


def start_replay(jobs: Sequence[ReplayJob], launcher: Launcher) -> None:
    """Start replays by a launcher, and print what they found, or the command that shows their progress."""
    if any(job.unfinished_cells() for job in jobs):
        launcher.check(jobs)
        launcher.start([split(jobs, launcher)])
    for directory, file in dict.fromkeys((job.run_directory, job.replay.file) for job in jobs):
        if launcher.waits:
            from kvsweep.analysis.report.fidelity import write_fidelity  # imports pandas

            table, folder = write_fidelity(directory, file)
            print(f"{table}\nnumbers and figure: {folder}")
        else:
            print(f"progress: kvsweep-status {directory} --watch")
