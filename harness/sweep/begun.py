"""The configurations that a stored run was made with, also where the run lies in a bundle (`bundle.py`)."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvsweep.harness.sweep.job import stored_config
from kvsweep.messages.errors import UserError
from kvsweep.messages.escape import each_text
from kvsweep.run_files.row_types import PROVENANCE_FILE, content_hash
from kvsweep.run_files.run_reader import read_cells
from kvsweep.run_files.safe_files import read_file

# Says where a bundle has the files that the configurations name.
PLACES_FILE = "places.json"


def begun_configs(
    directory: Path, on_other: Callable[[Path, UserError], object] | None = None
) -> list[tuple[dict[str, Any], set[str]]]:
    """Return each configuration that wrote cells of a run directory, with the ids of the cells that it started.

    `on_other` gets each folder whose provenance names no such configuration, with the reason; None raises it.
    """
    begun: dict[str, tuple[dict[str, Any], set[str]]] = {}  # by the configurations' hashes
    for cell, _ in read_cells(directory):
        for file in cell.files(PROVENANCE_FILE).values():
            try:
                config = in_bundle(stored_config(file), directory)
            except UserError as reason:
                if on_other is None:
                    raise
                on_other(cell.folder, reason)
                continue
            # The run may lie elsewhere now, and it is read as a whole: all shards, all rounds.
            config |= {
                "results_dir": str(directory.resolve().parent),
                "run_name": directory.resolve().name,
                "shard": "1/1",
                "until": None,
                "finish": False,
            }
            # The cells of a job have one configuration, which names the policies of its whole grid.
            _, cell_ids = begun.setdefault(content_hash(config), (config, set()))
            cell_ids.add(cell.name)
    return list(begun.values())


def in_bundle(config: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Return a run's configuration with the paths of its bundle, if the run lies in one."""
    folder = directory.resolve().parent
    try:
        places = dict(json.loads(read_file(folder / PLACES_FILE)))
    except FileNotFoundError:
        return config
    except (ValueError, TypeError) as error:
        raise UserError(f"{folder / PLACES_FILE} is broken ({error}): unpack the bundle again.") from error
    paths = {}  # in the bundle, by those that the configuration names
    for original, place in places.items():
        path = (folder / str(place)).resolve()
        # A stranger's file may name only what lies beside it.
        if path.is_relative_to(folder) and path.exists():
            paths[str(original)] = str(path)
    settings: dict[str, Any] = each_text(lambda text: paths.get(text, text), config)
    return settings
