"""A replay as a job of the sweep: the same cells, launchers, shards and locks; it writes rows of replayed texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from omegaconf import OmegaConf

from kvsweep import records
from kvsweep.errors import UserError
from kvsweep.harness.provenance import describe_arithmetic, describe_process
from kvsweep.harness.replay.texts import ReplayConfig, Text, read_texts
from kvsweep.harness.sweep.cell import Cell, stored_pairs
from kvsweep.harness.sweep.execute import work_through
from kvsweep.harness.sweep.job import UNTRACKED, Job, make_job, stored_config
from kvsweep.harness.sweep.launch import Launcher, start
from kvsweep.harness.sweep.store import open_cells
from kvsweep.records import Pair, shard_files
from kvsweep.task_status import State, TaskStatus


@dataclass(frozen=True, kw_only=True)
class ReplayJob(Job):
    """The replay of some texts, `replay`, through the cells of a job."""

    replay: ReplayConfig

    @classmethod
    def of(cls, job: Job, config: ReplayConfig) -> Self:
        """The replay of a job's cells; a cell gets as many texts whatever its draws."""
        own = {field.name: getattr(job, field.name) for field in fields(Job)}
        own |= {"rounds": (), "finish": False, "draws": 1, "tracker": UNTRACKED}
        return cls(**own, replay=config)

    @cached_property
    def texts(self) -> list[Text]:
        """The texts of the replay's file, else of the full cache."""
        return read_texts(self, self.replay)

    @property
    def rows_file(self) -> str:
        return self.replay.file

    @property
    def own_pairs(self) -> list[Pair]:
        return self.shard.of([text.pair for text in self.texts])

    def unfinished_cells(self) -> list[Cell]:
        """The cells that lack a row of some text of this shard."""
        wanted, run = set(self.own_pairs), self.run_directory
        return [cell for cell in self.cells if not wanted <= stored_pairs(run / cell.cell_id, self.rows_file)]

    def status(self, state: State) -> TaskStatus:
        """The status of a task of its own, beside the one that decodes the cells."""
        status = super().status(state)
        status.task, status.replays = f"replay-{status.task}", True
        lacking = {cell.cell_id for cell in self.unfinished_cells()}
        for cell_id in status.cells.keys() - lacking:
            status.cells[cell_id].finished = status.cells[cell_id].expected
        return status


def start_replay(jobs: Sequence[ReplayJob], launcher: Launcher) -> None:
    """Start replays by a launcher, and print what they found, or the command that shows their progress."""
    start([(jobs, replay_all)], launcher)
    for directory, file in dict.fromkeys((job.run_directory, job.replay.file) for job in jobs):
        if launcher.waits:
            from kvsweep.analysis.report.gallery import write_fidelity  # imports pandas

            table, folder = write_fidelity(directory, file)
            print(f"{table}\nnumbers and figure: {folder}")
        else:
            print(f"progress: kvsweep status {directory} --watch")


def replay_all(jobs: Sequence[ReplayJob]) -> list[Exception]:
    """Write the rows that the jobs' cells lack; return the errors of the jobs that failed."""
    return work_through(jobs, execute)


def execute(job: ReplayJob) -> None:
    """Write the rows that the cells lack, a text at a time; nothing is graded."""
    from kvsweep.harness.replay.measure import replay  # imports torch
    from kvsweep.harness.sweep.decode import loaded

    cells = job.unfinished_cells()
    if not cells:
        return
    with open_cells(job, cells) as work:
        decoding_pass = describe_process()
        decoding_pass["arithmetic"] = describe_arithmetic(invariant=False, impl=job.impl, dtype=job.model.dtype)
        for store in work.stores.values():
            if not shard_files(store.directory, records.PROVENANCE_FILE):  # nothing of the cell was decoded yet
                what = {"expected": 0, "draws": job.draws, "random_weights": job.model.random_weights}
                store.begin_pass({**what, "config": job.resolved}, decoding_pass)
        lacking = {t: [cell for cell in cells if work.lacks(cell.cell_id, t.pair)] for t in job.shard.of(job.texts)}
        wanted = {text: found for text, found in lacking.items() if found}
        for cell_id, row in replay(loaded(job.model), job, wanted, job.replay.tokens):
            work.append(cell_id, row)


def read_jobs(directory: Path) -> list[Job]:
    """The jobs that wrote the cells of a run directory, as their provenance has them."""
    found: dict[str, dict[str, Any]] = {}
    for folder, _ in records.read_cells(directory):
        for file in shard_files(folder, records.PROVENANCE_FILE).values():
            config = stored_config(file)
            config |= {"results_dir": str(directory.resolve().parent), "run_name": directory.resolve().name}
            config |= {"shard": "1/1", "until": None, "finish": False}
            # Jobs that differ in their policies alone are one grid; a policy's own settings keep them apart.
            found.setdefault(records.content_hash(config), config)
    if not found:
        raise UserError(f"{directory} holds no cell that a sweep has begun: give the folder of a run.")
    # The jobs of one model, benchmark and precision become one job.
    groups: dict[str, Job] = {}
    for job in (make_job(OmegaConf.create(config)) for config in found.values()):
        key = records.content_hash([job.cells[0].describe()["condition"], job.cache.identity()])
        first = groups.setdefault(key, job)
        cells = {cell.cell_id: cell for cell in (*first.cells, *job.cells)}
        inputs = {**first.inputs, **job.inputs}
        groups[key] = replace(first, cells=tuple(cells.values()), inputs=inputs, rounds=(), margin=None)
    return list(groups.values())
