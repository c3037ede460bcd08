"""The command `kvsweep-replay`, and the replays of a sweep, which come before it decodes its cells or screen them."""

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import msgspec
import yaml
from pydantic import StrictInt

from kvsweep.base import records
from kvsweep.base.command_line import GOES_ON, one_sentence
from kvsweep.base.errors import UserError
from kvsweep.base.files import replace_text
from kvsweep.harness.replay.job import ReplayJob, read_jobs
from kvsweep.harness.replay.texts import ReplayConfig
from kvsweep.harness.settings import build, build_target, compose_config
from kvsweep.harness.sweep.launch.launcher import Launcher, launch, split
from kvsweep.harness.sweep.plan.cell import Cell
from kvsweep.harness.sweep.plan.job import Job

USAGE = "kvsweep-replay DIR [--time] [texts=FILE] [limit=20] [tokens=N] [launcher=NAME] [KEY=VALUE ...]"
HELP = f"""{USAGE}

Feed known texts again through every cell of the run in DIR, which evicts as in decoding, and compare its
next-token distributions with the full cache's: KL, log-likelihood, most likely tokens. No token is drawn.
The same command goes on where it stopped.

  DIR                a run's folder, such as results/runs/demo
  texts=FILE         lines with id, problem and text; without it the texts that the full cache wrote in DIR
  limit=20           texts, from the first; null for all
  tokens=N           tokens of each text, from the first; null for all
  shard=i/n          only every n-th text, from the i-th
  launcher=local, launcher.KEY=VALUE   as for kvsweep

  --time             seconds instead: each cell alone decodes the texts, in rounds beside the full cache
  slots=N            with --time: texts side by side in the second batch (default 8); the first has one
  memory_gb=G        with --time: a third batch, of as many texts as this memory holds keys and values of
  rounds=3           with --time: rounds, of which the median counts

The numbers say how near a cell stays to the full cache, not whether it solves problems: docs/report.md.
Exit status: 0 done, 1 a job failed, 2 bad input, 3 locked by another process, 130 interrupted.
"""
_OWN = ("texts", "limit", "tokens")
_TIMED = ("slots", "memory_gb", "rounds")


@one_sentence("kvsweep-replay", GOES_ON)
def main(argv: Sequence[str] | None = None) -> None:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if {"-h", "--help"} & set(arguments):
        print(HELP, end="")
        return
    words = [word for word in arguments if "=" not in word]
    timed = "--time" in words
    places = [word for word in words if word != "--time"]
    if len(places) != 1 or places[0].startswith("-"):
        raise UserError(f"give one run's folder: {USAGE}.")
    if not Path(places[0]).is_dir():
        raise UserError(f"{places[0]} is no folder: give the folder of a run, such as results/runs/demo.")
    _replay(Path(places[0]), [word for word in arguments if "=" in word], timed=timed)


def _replay(directory: Path, overrides: Sequence[str], *, timed: bool) -> None:
    try:
        own = {name: yaml.safe_load(value) for name, _, value in (word.partition("=") for word in overrides)}
    except yaml.YAMLError as error:
        raise UserError(f"{' '.join(overrides)} cannot be read as KEY=VALUE: {USAGE}.") from error
    rest = [word for word in overrides if word.partition("=")[0] not in (*_OWN, *_TIMED)]
    known = [word for word in rest if word.startswith(("launcher=", "launcher.", "shard="))]
    if unknown := sorted({*rest} - {*known}):
        raise UserError(f"{unknown[0]} is unknown here: {USAGE}.")
    if timed and known:
        raise UserError(f"{known[0]} cannot go with --time, which measures one cell after the other in this process.")
    config = compose_config(*known)
    replay = build(ReplayConfig, "replay", {name: own[name] for name in _OWN if name in own})
    jobs = [ReplayJob.of(job, replay) for job in read_jobs(directory)]
    if timed:
        from kvsweep.harness.replay.seconds import TimeConfig, measure_seconds  # imports torch

        measure_seconds(jobs, build(TimeConfig, "time", {name: own[name] for name in _TIMED if name in own}))
        return
    if given := [name for name in _TIMED if name in own]:
        raise UserError(f"{given[0]}= goes with --time alone.")
    shard = records.Shard.parse(str(config.shard))
    start_replay([replace(job, shard=shard) for job in jobs], build_target("launcher", config.launcher))


@dataclass(frozen=True, kw_only=True)
class ReplayPlan:
    """What a sweep replays.

    Attributes:
        replay: true replays known texts through every cell before the cells decode; only decodes nothing but the full
            cache, whose texts these are.
        screen: decode beside the full cache only so many cells, those of the lowest KL, or ("loss:X") those whose texts
            lose at most X nats of log-likelihood per token; None decodes all.
        texts: a file of texts in place of the full cache's own.
    """

    replay: Literal[True, False, "only"] = False
    screen: StrictInt | str | None = None
    texts: str | None = None

    def __post_init__(self) -> None:
        if self.screen is not None and not (self.most or (self.loss is not None and 0 <= self.loss < math.inf)):
            known = "a number of cells, or loss:X for those whose texts lose at most X nats of log-likelihood per token"
            raise UserError(f"screen={self.screen} is unknown: give {known}, such as loss:0.002.")
        if self.screen is not None and self.replay == "only":
            raise UserError(f"screen={self.screen} chooses cells to decode, and replay=only decodes none: drop one.")
        if self.texts is not None and not self.wanted:
            raise UserError(f"texts={self.texts} goes with replay=true, replay=only or screen=N: add one of them.")

    @property
    def most(self) -> int | None:
        """The most cells that are decoded beside the full cache."""
        return self.screen if isinstance(self.screen, int) and self.screen > 0 else None

    @property
    def loss(self) -> float | None:
        """The most nats of log-likelihood per token that the texts of a decoded cell lose."""
        kind, _, bound = str(self.screen).partition(":")
        try:
            return float(bound) if kind == "loss" else None
        except ValueError:
            return None

    @property
    def wanted(self) -> bool:
        return bool(self.replay or self.screen)


def launch_replayed(jobs: Sequence[Job], launcher: Launcher, plan: ReplayPlan) -> None:
    """Decode the full cache's texts, replay them through every cell, then decode the cells that the plan leaves."""
    if not launcher.waits:
        raise UserError("replay= and screen= go on when the full cache has ended: take launcher=inline or local.")
    if plan.texts is None:
        full = [replace(job, cells=_full(job), rounds=(), margin=None) for job in jobs]
        if not all(job.cells for job in full):
            replayed = "replay= and screen= replay the full cache's texts"
            raise UserError(f"{replayed}: add full to grid.policy, or give texts=.")
        launch(full, launcher)
    replays = [ReplayJob.of(job, ReplayConfig(texts=plan.texts)) for job in jobs]
    start_replay(replays, launcher)
    if plan.replay != "only":
        chosen = [_screened(job, one, plan) for job, one in zip(jobs, replays, strict=True)]
        launch([job for job in chosen if job.cells], launcher)


def _full(job: Job) -> tuple[Cell, ...]:
    return tuple(cell for cell in job.cells if cell.policy.name == "full")


def _screened(job: Job, replayed: ReplayJob, plan: ReplayPlan) -> Job:
    """The job with the full cache and the cells that the plan's screen leaves; the run's folder gets the other ones."""
    from kvsweep.analysis.numbers.fidelity import fidelity, rows_of_cells

    rows = rows_of_cells(job.run_directory, [cell.cell_id for cell in job.cells], replayed.replay.file)
    # An earlier replay may have given some cells more texts.
    rows = rows[rows["problem_id"].isin([text.pair[0] for text in replayed.texts])]
    table = fidelity(rows).sort_values("kl", kind="stable")
    table = table[~table["cell_id"].isin([cell.cell_id for cell in _full(job)])]
    kept = table if plan.loss is None else table[-table["change"] <= plan.loss]
    kept = kept if plan.most is None else kept[: plan.most]
    out = table[~table["cell_id"].isin(kept["cell_id"])]
    noted, rule = records.read_screen(job.run_directory), f"screen={plan.screen}"
    known = {cell_id: note for cell_id, note in noted.items() if cell_id not in set(table["cell_id"])}
    left_out: Any = out.itertuples()
    for row in left_out:
        known[row.cell_id] = records.Screened(rule=rule, texts=row.texts, kl=row.kl, loss=-row.change)
    if known != noted:
        replace_text(job.run_directory / records.SCREEN_FILE, json.dumps(msgspec.to_builtins(known), indent=1) + "\n")
    if plan.screen is not None:
        fewer = f"{len(out)} of {len(job.cells)} cells after {len(replayed.texts)} replayed texts"
        print(f"{job.name}: {rule} leaves out {fewer}; a cell left out may still hold.")
    return replace(job, cells=tuple(cell for cell in job.cells if cell.cell_id not in set(out["cell_id"])))


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
