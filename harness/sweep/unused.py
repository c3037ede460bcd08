"""Settings that a job does not use: if the command line gives one, it is refused or named in a note."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from omegaconf import DictConfig

from kvsweep.compression.policy import BudgetPolicy
from kvsweep.harness.settings import config_keys, plain
from kvsweep.harness.sweep.grid import AXES, policy_file
from kvsweep.harness.sweep.job import Job
from kvsweep.messages.errors import UserError

_NAMED = {"report.margin", *(f"policy.{name}" for name in BudgetPolicy.SHARED)}
# Why a grid does not use `policy` or one of its settings; the key of the grid's own values comes before this text.
_GIVES = " gives the values"


def refuse_unused(arguments: Sequence[str], unused: Sequence[Mapping[str, str]]) -> None:
    """Raise UserError for a KEY=VALUE that no job uses; `unused` has each job's `unused_settings`.

    A size that no policy takes, or the margin, is named in a note and not refused, because a script may pass the same
    settings to every job, also to the full cache's.
    """
    for argument in dict.fromkeys(arguments):
        key, _, value = argument.partition("=")
        if not all(key in settings for settings in unused):
            continue
        reason = unused[0][key]  # the first job's stands for all
        no_effect = f"{argument} has no effect, because {reason}"
        if reason.endswith(_GIVES):
            grid_key = reason.removesuffix(_GIVES)  # the value may be a list already, with brackets
            raise UserError(f"{no_effect}: leave it out, or write '{grid_key}=[{value.strip('[]')}]'.")
        if key not in _NAMED:
            raise UserError(f"{no_effect}: leave it out.")
        print(f"note: {no_effect}.", file=sys.stderr)


def unused_settings(config: DictConfig, job: Job) -> dict[str, str]:
    """Return the keys of a configuration that its job does not use, each with the reason."""
    source = job.source
    if source.unused:
        unused = {}
        for key in [*config_keys(config), "policy"]:
            # `used` has model.sizes, and so all sizes below it are used.
            if key.startswith(source.unused) and key not in source.used and not key.startswith("model.sizes."):
                unused[key] = source.why
        return unused
    grid = plain(config.grid)
    unused = {f"cache.{name}": reason for name, reason in job.cache.unused().items()}
    unused["grid.engine"] = "engine=openai alone takes it"
    if not job.rounds:
        unused["report.margin"] = "until=decided alone uses it, and kvsweep report has --margin"
    return unused | dict(_of_policies(plain(config.policy), [grid, *grid["beside"]]))


def _of_policies(composed: Mapping[str, Any], grids: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield the composed policy's settings, and the first grid's axes, that no policy of any grid takes."""
    chosen_name = composed["name"]  # by policy=NAME; a grid without a list of policies has this one
    policies_of_grids = [grid.get("policy") or [chosen_name] for grid in grids]
    names = list(dict.fromkeys(chain(*policies_of_grids)))  # of all grids, each once
    # What each policy takes of the composed one: the shared settings that it has; the composed one itself, all.
    fields = {name: policy_file(name).keys() & {*BudgetPolicy.SHARED} for name in names if name != chosen_name}
    fields[chosen_name] = set(composed)
    first_policies = policies_of_grids[0]
    # policy=NAME has no effect where all grids list their policies. It is tolerated if the first list has that name;
    # another list may have it by chance.
    if chosen_name not in first_policies and all(grid.get("policy") for grid in grids):
        yield "policy", f"grid.policy{_GIVES}"
    for key in composed.keys() - {"name", "_target_"}:
        taking_grids = []
        for grid, policies in zip(grids, policies_of_grids, strict=True):
            if any(key in fields[name] for name in policies):
                taking_grids.append(grid)
        if not taking_grids:
            yield f"policy.{key}", f"no policy of the job ({', '.join(names)}) takes it"
        elif all(grid.get(key) for grid in taking_grids):  # each has a list, so the single value reaches none
            yield f"policy.{key}", f"grid.{key}{_GIVES}"
    for axis in AXES:
        if grids[0].get(axis) and not any(axis in fields[name] for name in first_policies):
            yield f"grid.{axis}", f"no policy of the grid ({', '.join(first_policies)}) takes it"
