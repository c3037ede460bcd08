"""The command `kvsweep replay`, and the replays that a sweep runs before it decodes or screens its cells."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from kvsweep.harness.replay.references import ReplayConfig
from kvsweep.harness.replay.replay_share import read_jobs, replay_share, start_replay
from kvsweep.harness.settings import build_target, compose_config, plain_config_errors
from kvsweep.harness.sweep.launch import Launcher
from kvsweep.messages.checked import checked
from kvsweep.messages.errors import UserError
from kvsweep.run_files import row_types
from kvsweep.run_files.safe_files import at_home

_OWN = ("texts", "limit", "tokens")
_TIMED = ("slots", "memory_gb", "rounds")


def replay(directory: Path, overrides: Sequence[str], *, timed: bool) -> None:
    """Replay completions through every cell of a run, or (`timed`) measure each cell's seconds."""
    own: dict[str, Any] = {}
    try:
        for word in overrides:
            name, _, value = word.partition("=")
            own[name] = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise UserError(f"{' '.join(overrides)} cannot be read as KEY=VALUE: see kvsweep replay --help.") from error
    if own.get("texts") is not None:  # a path, as the user typed it
        own["texts"] = at_home([word for word in overrides if word.startswith("texts=")][-1].partition("=")[2])
    rest = [word for word in overrides if word.partition("=")[0] not in (*_OWN, *_TIMED)]
    known = [word for word in rest if word.startswith(("launcher=", "launcher.", "shard="))]
    if unknown := sorted({*rest} - {*known}):
        raise UserError(f"{unknown[0]} is unknown here: see kvsweep replay --help.")
    if timed and known:
        raise UserError(f"{known[0]} cannot go with --time, which measures one cell after the other in this process.")
    with plain_config_errors():
        config = compose_config(*known)
    texts = checked(ReplayConfig, {name: own[name] for name in _OWN if name in own})
    jobs = read_jobs(directory)
    if timed:
        from kvsweep.harness.replay.seconds import TimeConfig, measure_seconds  # imports torch

        measure_seconds(jobs, texts, checked(TimeConfig, {name: own[name] for name in _TIMED if name in own}))
        return
    if given := [name for name in _TIMED if name in own]:
        raise UserError(f"{given[0]}= goes with --time alone.")
    shard, launcher = row_types.Shard.parse(str(config.shard)), build_target("launcher", config.launcher, Launcher)
    start_replay([replay_share(replace(job, shard=shard), texts) for job in jobs], launcher)
