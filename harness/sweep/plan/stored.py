"""The configuration that a run's provenance holds, read as data: the file may come from a stranger."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from kvsweep.base.errors import UserError
from kvsweep.base.records import read_provenance
from kvsweep.harness.models.config import ModelConfig
from kvsweep.harness.settings import choices
from kvsweep.harness.sweep.plan.grid import policy_file


def stored_config(path: Path) -> dict[str, Any]:
    """The configuration of a provenance file, without anything that could act.

    The policy's class is that of this installation's YAML of the same name. Of the settings of model and policy those
    remain that ModelConfig and that YAML have.
    """
    try:
        stored = dict(read_provenance(path)["config"])
        model, policy, name = dict(stored["model"]), dict(stored["policy"]), str(stored["policy"]["name"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{path} names no model and policy: run the cell again.") from error
    if name not in choices("policy"):
        raise UserError(f"{path} names the policy {name}, and this kvsweep has {', '.join(choices('policy'))}.")
    own, known = policy_file(name), {field.name for field in fields(ModelConfig)}
    policy = {k: v for k, v in policy.items() if k in own} | {"_target_": None, "name": name}
    found = {**stored, "model": {k: v for k, v in model.items() if k in known}, "policy": policy}
    found.pop("launcher", None)
    if "${" in json.dumps(found):
        raise UserError(f"{path} holds ${{, which no stored setting has: restore the file, or run the cell again.")
    policy["_target_"] = own["_target_"]
    return found
