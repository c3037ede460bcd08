"""A replay as a share of a job: same cells, launchers, shards and locks, but it writes rows of replayed completions."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from omegaconf import OmegaConf

from kvsweep.harness.provenance import describe_arithmetic, describe_process
from kvsweep.harness.replay.references import ReplayConfig, Text, read_texts
from kvsweep.harness.sweep.begun import begun_configs
from kvsweep.harness.sweep.cell_store import OpenCells
from kvsweep.harness.sweep.execute import work_through
from kvsweep.harness.sweep.job import UNTRACKED, Job, make_job
from kvsweep.harness.sweep.launch import Launcher, start
from kvsweep.harness.sweep.share import Share
from kvsweep.messages.errors import UserError
from kvsweep.run_files import row_types
from kvsweep.run_files.row_types import PROVENANCE_FILE


@dataclass(frozen=True, kw_only=True)
class ReplayShare(Share):
    """A share that replays at most `tokens` tokens of each completion through the cells of a job."""

    texts: Sequence[Text]
    tokens: int | None


def replay_share(job: Job, config: ReplayConfig) -> ReplayShare:
    """Return the share that replays all completions through a job's cells."""
    texts = read_texts(job, config)
    # Each text is fed once; the job's draws, its rounds and what follows them are of texts that are drawn.
    job = replace(job, rounds=(), finish=False, draws=1, tracker=UNTRACKED)
    pairs = [text.pair for text in texts]
    return ReplayShare(job=job, dealt=pairs, rows=config.file, texts=texts, tokens=config.tokens)


def start_replay(shares: Sequence[ReplayShare], launcher: Launcher) -> None:
    """Start replays with a launcher; print the results, or the command that shows their progress."""
    start([(shares, replay_all)], launcher)
    # Shares of one run that replay the same texts have one table.
    for directory, file in dict.fromkeys((share.job.run_directory, share.rows) for share in shares):
        if launcher.waits:
            from kvsweep.analysis.report.gallery import write_fidelity  # imports pandas

            table, folder = write_fidelity(directory, file)
            print(f"{table}\nnumbers and figure: {folder}")
        else:
            print(f"progress: kvsweep status {shlex.quote(str(directory))} --watch")


def replay_all(shares: Sequence[ReplayShare]) -> list[Exception]:
    """Write the missing rows of the shares' cells; return the errors of the shares that failed."""
    return work_through(shares, execute)


def execute(share: ReplayShare, work: OpenCells) -> None:
    """Write the open cells' missing rows, completion by completion; nothing is graded."""
    from kvsweep.harness.replay.measure import replay  # imports torch
    from kvsweep.harness.sweep.fill import loaded

    job = share.job
    decoding_pass = describe_process()
    decoding_pass["arithmetic"] = describe_arithmetic(invariant=False, impl=job.impl, dtype=job.model.dtype)
    for store in work.stores.values():
        if not store.stored.files(PROVENANCE_FILE):  # nothing of the cell was decoded yet
            store.begin_pass(
                {
                    "expected": 0,  # completions: a replay writes none
                    "draws": job.draws,
                    "random_weights": job.model.random_weights,
                    "config": job.resolved,
                },
                decoding_pass,
            )
    cells = [store.cell for store in work.stores.values()]
    cells_of_texts = {}
    for text in job.shard.of(share.texts):
        missing = [cell for cell in cells if work.lacks(cell.cell_id, text.pair)]
        if missing:
            cells_of_texts[text] = missing
    for cell_id, row in replay(loaded(job.model), job, cells_of_texts, share.tokens):
        work.append(cell_id, row)


def read_jobs(directory: Path) -> list[Job]:
    """Return the jobs that wrote the cells of a run directory, from the cells' provenance.

    A note names each cell that cannot be made again; raises UserError if that is all of them.
    """
    configs = begun_configs(directory)
    if not configs:
        raise UserError(f"{directory} holds no cell that a sweep has begun: give the folder of a run.")
    begun = set[str]()
    for _, ids in configs:
        begun |= ids
    changed = set(begun)
    jobs: dict[str, Job] = {}  # by model, benchmark and precision: jobs that have the same ones become one
    for config, ids in configs:
        job = make_job(OmegaConf.create(config))
        condition = row_types.content_hash([job.cells[0].describe()["condition"], job.cache.identity()])
        # A cell whose weights or code have changed has another id today, under which it would seem not to have begun.
        # Then only the cells that have begun are replayed, else also those that are still to come.
        if not ids <= {cell.cell_id for cell in job.cells}:
            job = replace(job, cells=tuple(cell for cell in job.cells if cell.cell_id in begun))
        joined = jobs.get(condition, job)
        cells = {cell.cell_id: cell for cell in (*joined.cells, *job.cells)}
        changed -= cells.keys()
        inputs = {**joined.inputs, **job.inputs}
        jobs[condition] = replace(joined, cells=tuple(cells.values()), inputs=inputs, rounds=(), margin=None)
    reason = "because the weights or the code of its policy have changed"
    if changed == begun:
        raise UserError(f"no cell of {directory} can be replayed, {reason}: restore them.")
    for cell_id in sorted(changed):
        print(f"note: cell {cell_id} is not replayed, {reason}.", file=sys.stderr)
    return [job for job in jobs.values() if job.cells]
