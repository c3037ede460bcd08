"""The command `kvsweep replay`, and the replays that a sweep runs before it decodes or screens its cells."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from kvsweep.harness.replay.references import ReplayConfig, TimeConfig
from kvsweep.harness.replay.replay_share import read_jobs, replay_share, start_replay
from kvsweep.harness.settings import build_target, compose_config, plain_config_errors
from kvsweep.harness.sweep.launch import Launcher
from kvsweep.messages.checked import checked
from kvsweep.messages.errors import UserError
from kvsweep.run_files import row_types
from kvsweep.run_files.safe_files import at_home


def replay(directory: Path, overrides: Sequence[str], *, timed: bool) -> None:
    """Replay completions through every cell of a run, or (`timed`) measure each cell's seconds."""
    values = {}
    launching = []
    for override in overrides:
        name, _, text = override.partition("=")
        if override.startswith(("launcher=", "launcher.", "shard=")):
            launching.append(override)
        else:
            values[name] = None if text == "null" else at_home(text)
    if timed and launching:
        raise UserError(
            f"{launching[0]} cannot go with --time, which measures one cell after the other in this process."
        )
    with plain_config_errors():
        config = compose_config(*launching)
    replay_config = checked(TimeConfig if timed else ReplayConfig, values)
    jobs = read_jobs(directory)
    if isinstance(replay_config, TimeConfig):
        from kvsweep.harness.replay.seconds import measure_seconds  # imports torch

        measure_seconds(jobs, replay_config)
        return
    shard = row_types.Shard.parse(str(config.shard))
    launcher = build_target("launcher", config.launcher, Launcher)
    start_replay([replay_share(replace(job, shard=shard), replay_config) for job in jobs], launcher)
