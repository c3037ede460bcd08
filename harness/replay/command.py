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

_TEXT_OPTIONS = ("texts", "limit", "tokens")
_TIME_OPTIONS = ("slots", "memory_gb", "rounds")


def replay(directory: Path, overrides: Sequence[str], *, timed: bool) -> None:
    """Replay completions through every cell of a run, or (`timed`) measure each cell's seconds."""
    values: dict[str, Any] = {}
    launching = []
    unknown = []
    try:
        for override in overrides:
            name, _, text = override.partition("=")
            values[name] = yaml.safe_load(text)  # numbers and null, as Hydra reads its overrides
            if name == "texts" and values[name] is not None:
                values[name] = at_home(text)  # as typed: YAML may read a name as a number
            if override.startswith(("launcher=", "launcher.", "shard=")):
                launching.append(override)
            elif name not in _TEXT_OPTIONS + _TIME_OPTIONS:
                unknown.append(override)
    except yaml.YAMLError as error:
        raise UserError(f"{' '.join(overrides)} cannot be read as KEY=VALUE: see kvsweep replay --help.") from error
    if unknown:
        raise UserError(f"{min(unknown)} is unknown here: see kvsweep replay --help.")
    if timed and launching:
        process = "which measures one cell after the other in this process"
        raise UserError(f"{launching[0]} cannot go with --time, {process}.")
    with plain_config_errors():
        config = compose_config(*launching)
    texts_config = checked(ReplayConfig, {name: values[name] for name in _TEXT_OPTIONS if name in values})
    time_options = {name: values[name] for name in _TIME_OPTIONS if name in values}
    jobs = read_jobs(directory)
    if timed:
        from kvsweep.harness.replay.seconds import TimeConfig, measure_seconds  # imports torch

        measure_seconds(jobs, texts_config, checked(TimeConfig, time_options))
        return
    if time_options:
        raise UserError(f"{next(iter(time_options))}= goes with --time alone.")
    shard = row_types.Shard.parse(str(config.shard))
    launcher = build_target("launcher", config.launcher, Launcher)
    start_replay([replay_share(replace(job, shard=shard), texts_config) for job in jobs], launcher)
