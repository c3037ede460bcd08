"""The configurations that a stored run was made with, also where the run lies in a bundle (`bundle.py`)."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvsweep.harness.sweep.job import stored_config
from kvsweep.messages.errors import UserError
from kvsweep.run_files.row_types import PROVENANCE_FILE, content_hash
from kvsweep.run_files.run_reader import read_cells
from kvsweep.run_files.safe_files import read_file

# Says where a bundle has the files that the configurations name.
PLACES_FILE = "places.json"


def begun_configs(
    directory: Path, on_other: Callable[[Path, UserError], object]
) -> list[tuple[dict[str, Any], set[str]]]:
    """Return each configuration that wrote cells of a run directory, with the ids of the cells that it started.

    `on_other` gets each folder whose provenance names no such configuration, with the reason.
    """
    found: dict[str, tuple[dict[str, Any], set[str]]] = {}
    for cell, _ in read_cells(directory):
        for file in cell.files(PROVENANCE_FILE).values():
            try:
                config = in_bundle(stored_config(file), directory)
            except UserError as reason:
                on_other(cell.folder, reason)
                continue
            config |= {"results_dir": str(directory.resolve().parent), "run_name": directory.resolve().name}
            config |= {"shard": "1/1", "until": None, "finish": False}
            # Jobs that differ only in their policies are one grid; policies' own settings keep them apart.
            found.setdefault(content_hash(config), (config, set()))[1].add(cell.name)
    return list(found.values())


def in_bundle(config: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Return a run's configuration with the paths of its bundle, if the run lies in one."""
    folder = directory.resolve().parent
    try:
        places = dict(json.loads(read_file(folder / PLACES_FILE)))
    except FileNotFoundError:
        return config
    except (ValueError, TypeError) as error:
        raise UserError(f"{folder / PLACES_FILE} is broken ({error}): unpack the bundle again.") from error
    here = {str(place): (folder / str(where)).resolve() for place, where in places.items()}
    # A stranger's file may name only what lies beside it.
    inside = {place: str(path) for place, path in here.items() if path.is_relative_to(folder) and path.exists()}
    return _replaced(config, inside)


def _replaced(value: Any, by: Mapping[str, str]) -> Any:
    if isinstance(value, Mapping):
        return {name: _replaced(item, by) for name, item in value.items()}
    return by.get(value, value) if isinstance(value, str) else value
