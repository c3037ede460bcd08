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
    values: dict[str, Any] = {}
    texts_path = ""
    launching = []
    unknown = []
    try:
        for word in overrides:
            name, _, text = word.partition("=")
            values[name] = yaml.safe_load(text)  # numbers and null, as Hydra reads its overrides
            if name == "texts":
                texts_path = text
            elif word.startswith(("launcher=", "launcher.", "shard=")):
                launching.append(word)
            elif name not in _OWN + _TIMED:
                unknown.append(word)
    except yaml.YAMLError as error:
        raise UserError(f"{' '.join(overrides)} cannot be read as KEY=VALUE: see kvsweep replay --help.") from error
    if values.get("texts") is not None:
        values["texts"] = at_home(texts_path)  # as typed: YAML may read a name as a number
    if unknown:
        raise UserError(f"{min(unknown)} is unknown here: see kvsweep replay --help.")
    if timed and launching:
        process = "which measures one cell after the other in this process"
        raise UserError(f"{launching[0]} cannot go with --time, {process}.")
    with plain_config_errors():
        config = compose_config(*launching)
    texts = checked(ReplayConfig, {name: values[name] for name in _OWN if name in values})
    timing = {name: values[name] for name in _TIMED if name in values}
    jobs = read_jobs(directory)
    if timed:
        from kvsweep.harness.replay.seconds import TimeConfig, measure_seconds  # imports torch

        measure_seconds(jobs, texts, checked(TimeConfig, timing))
        return
    if timing:
        raise UserError(f"{next(iter(timing))}= goes with --time alone.")
    shard = row_types.Shard.parse(str(config.shard))
    launcher = build_target("launcher", config.launcher, Launcher)
    start_replay([replay_share(replace(job, shard=shard), texts) for job in jobs], launcher)
