"""The command `kvsweep-replay`: known texts again through every cell of a run directory."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from kvsweep.base.command_line import GOES_ON, one_sentence
from kvsweep.base.errors import UserError

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
    """Console script: exit code 0 done, 1 a job failed, 2 bad input, 3 locked, 130 interrupted."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if {"-h", "--help"} & set(arguments):
        print(HELP, end="")
        return
    words = [word for word in arguments if "=" not in word]
    timed = "--time" in words
    [*places] = [word for word in words if word != "--time"]
    if len(places) != 1 or places[0].startswith("-"):
        raise UserError(f"give one run's folder: {USAGE}.")
    if not Path(places[0]).is_dir():
        raise UserError(f"{places[0]} is no folder: give the folder of a run, such as results/runs/demo.")
    _replay(Path(places[0]), [word for word in arguments if "=" in word], timed=timed)


def _replay(directory: Path, overrides: Sequence[str], *, timed: bool) -> None:
    import yaml

    from kvsweep.base.records import Shard
    from kvsweep.harness.replay.job import ReplayJob, read_jobs
    from kvsweep.harness.replay.start import start_replay
    from kvsweep.harness.replay.texts import ReplayConfig
    from kvsweep.harness.settings import build, build_target, compose_config

    own = {name: yaml.safe_load(value) for name, _, value in (word.partition("=") for word in overrides)}
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
        from kvsweep.harness.replay.seconds import TimeConfig, measure_seconds

        measure_seconds(jobs, build(TimeConfig, "time", {name: own[name] for name in _TIMED if name in own}))
        return
    if given := [name for name in _TIMED if name in own]:
        raise UserError(f"{given[0]}= goes with --time alone.")

    shard = Shard.parse(str(config.shard))
    start_replay([replace(job, shard=shard) for job in jobs], build_target("launcher", config.launcher))
