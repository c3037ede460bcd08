"""The annexes, which the core imports nowhere: it takes one from this table when a command or a setting asks for it."""

from importlib import import_module
from typing import Any

# By the command's or the setting's name.
ANNEXES = {
    "compare": "analysis.compare",
    "gguf": "harness.gguf.conversion",
    "plan": "harness.sweep.plan",
    "policy": "harness.policy_check",
    "predictor": "harness.predictor.command",
    "replay": "harness.replay.command",
    "screen": "harness.screen",
    "trace": "harness.trace.command",
    "servers": "harness.sweep.server",
    "tracker": "harness.sweep.tracker",
    "verify": "harness.verify.command",
}


def annex(name: str) -> Any:
    """Import an annex."""
    return import_module(f"kvsweep.{ANNEXES[name]}")
