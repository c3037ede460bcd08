"""`kvsweep policy check NAME`: a policy on small caches, and beside the rows that a script of the user's own keeps."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kvsweep.compression.policy import Policy
from kvsweep.compression.trial import check, trials
from kvsweep.errors import UserError
from kvsweep.files import read_file, replacing
from kvsweep.harness import settings
from kvsweep.harness.sweep.grid import build_policies

# Made from one model, whose layers and heads the caches do not have.
_OF_A_MODEL = {"statistics", "labels"}


def check_policy(name: str, overrides: Sequence[str], golden: Path | None, write: Path | None) -> None:
    """Print a line for each cache; a UserError names the policy's first fault. `write`: only write the caches."""
    policy = _policy(name, overrides)
    if of_model := sorted(_OF_A_MODEL & policy.ARTIFACTS.keys()):
        unfit = f"policy.{of_model[0]} is made for one model, whose layers these caches do not have"
        raise UserError(f"policy={name}: {unfit}: try the policy in a sweep with benchmark.limit=1.")
    tried = trials(policy)
    if write is not None:
        arrays = {f"{one.name}.{key}": tensor.numpy() for one in tried for key, tensor in one.arrays().items()}
        arrays |= {f"{one.name}.kept": np.array(one.promised or 0) for one in tried}
        with replacing(write) as path, path.open("wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
        print(write)
        return
    kept = check(tried, {} if golden is None else _golden(golden))
    for one in tried:
        rows = f"keeps {kept[one.name].shape[-1]} of {one.length} cached tokens"
        print(f"{one.name:<16} {one.layers} x {one.kv_heads} heads  {rows}")
    print(f"policy={name}: no fault found.")


def _policy(name: str, overrides: Sequence[str]) -> Policy:
    with settings.plain_config_errors():
        [policy] = build_policies(settings.compose_config(f"policy={name}", *overrides))
    return policy


def _golden(path: Path) -> dict[str, object]:
    try:
        found = json.loads(read_file(path, linked=True))
    except OSError as error:
        raise UserError(
            f"{path} cannot be read ({error.strerror}): name a JSON file of cache names and rows."
        ) from error
    except ValueError as error:
        raise UserError(f"{path} is no JSON ({error}): write an object of cache names and rows.") from error
    if not isinstance(found, dict):
        raise UserError(f"{path} holds no object: write one of cache names and rows.")
    return found
