"""The names of tasks and cells that people read."""

from collections.abc import Iterable, Mapping
from typing import Any

from kvsweep.base.escape import file_name
from kvsweep.base.records import content_hash


def task_name(model: str, benchmark: str, cell_ids: Iterable[str], shard: str) -> str:
    """The name of a task's file. A rerun of the same cells and shard has the same name, and replaces the old file."""
    names = (file_name(model), file_name(benchmark), shard.replace("/", "of"))
    return "-".join([*names, content_hash([sorted(cell_ids), shard])[:8]])


def policy_label(settings: Mapping[str, Any]) -> str:
    """A policy's name and the settings that tell a grid's cells apart: `dynts 0.3 w64 b5000`."""
    prefixes = {"keep_ratio": "", "local_window": "w", "budget": "b"}
    values = [f"{prefix}{settings[key]}" for key, prefix in prefixes.items() if settings.get(key) is not None]
    return " ".join([str(settings["name"]), *values])
