"""`kvsweep export --bundle FILE`: a run with all that `kvsweep verify` needs on another machine, but for large weights.

The zip holds the run's folder, the user's conf and policies, and the files that the settings name: problems, prompts,
heads. `places.json` says where the bundle has each of them. `SHA256SUMS` has a hash of every file.
"""

import hashlib
import json
import zipfile
from io import BufferedReader
from pathlib import Path
from typing import Any, cast

from kvsweep.harness.settings import CONF, WEIGHTS, own_folder
from kvsweep.harness.sweep.begun import PLACES_FILE, begun_configs
from kvsweep.messages.command_line import counted
from kvsweep.messages.errors import UserError
from kvsweep.run_files.row_types import leaves
from kvsweep.run_files.safe_files import open_file

HASHES_FILE = "SHA256SUMS"
# Settings whose values may name files; a model's own weights stay where they are.
_NAMES_FILES = ("policy.", "cache.", "benchmark.", "model.")
_WEIGHTS = ("model.path", "model.gguf", "model.adapter")
# What a report, an export or an earlier verification left in the run's folder.
_MADE_AGAIN = ("report", "export")
GATED = "gated"
README = """# {run}

A run of kvsweep with what made it: settings, policies, problems and importance heads. To verify it, here:

    sha256sum --check SHA256SUMS
    kvsweep verify {run}

These weights are not among the files; put a folder of your own into `weights/`, under its name:

{weights}
"""


def write_bundle(directory: Path, file: Path, *, problems: bool) -> str:
    """Write the bundle of a run's folder to the zip `file`, and return what it holds in words.

    Raises UserError for gated problems, unless `problems` says that they may be passed on.
    """
    directory = directory.resolve()
    configs = [config for config, _ in begun_configs(directory)]
    if not configs:
        raise UserError(f"{directory} holds no cell: give the folder of a run, such as results/runs/demo.")
    benchmarks = [config["benchmark"] for config in configs]
    gated_names = {benchmark["name"] for benchmark in benchmarks if GATED in (benchmark["licence"] or "")}
    if gated_names and not problems:
        name = min(gated_names)
        raise UserError(f"the problems of {name} are gated: add --with-problems if their terms let you pass them on.")
    places, weights = _inputs(configs)
    members = {}  # the path of each file, by its name in the bundle
    for name, path in _files_below(directory, directory.name).items():
        if not name.split("/")[1].startswith(_MADE_AGAIN):  # the part behind the run's name
            members[name] = path
    for original, place in places.items():
        members |= _files_below(Path(original), place)
    conf = own_folder()
    if conf is not None:
        # The modules beside it have the policies' classes.
        members |= _files_below(conf, conf.name) | {path.name: path for path in conf.parent.glob("*.py")}
    # The receiver's copy of a folder of weights goes to its place here; a model of the hub is downloaded there.
    for original in weights:
        if Path(original).exists():
            places[original] = f"weights/{Path(original).name}"
    listed_weights = "\n".join(f"- {original}" for original in sorted(weights))
    hashes = ""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as bundle:
        for name, path in members.items():
            bundle.write(path, name)
            with open_file(path, linked=True) as opened:
                hashes += f"{hashlib.file_digest(cast(BufferedReader, opened), 'sha256').hexdigest()}  {name}\n"
        bundle.writestr(PLACES_FILE, json.dumps(places))
        bundle.writestr("README.md", README.format(run=directory.name, weights=listed_weights))
        bundle.writestr(HASHES_FILE, hashes)
    without = f"; without the weights {', '.join(sorted(weights))}" if weights else ""
    return f"{file}\n{counted(len(members), 'file')} with their hashes{without}; there: kvsweep verify {directory.name}"


def _inputs(configs: list[dict[str, Any]]) -> tuple[dict[str, str], set[str]]:
    """Return the place in the bundle of each path that settings name, and the weights that are not in it."""
    places, weights = dict[str, str](), set[str]()
    for config in configs:
        for name, value in leaves(config):
            if not isinstance(value, str) or not name.startswith(_NAMES_FILES) or value in places:
                continue
            path = Path(value)
            looks_like_path = "/" in value or path.suffix  # else a word such as "auto", which may also name a file here
            if path.is_relative_to(WEIGHTS) or not looks_like_path:  # kvsweep has the embedded weights itself
                continue
            if name in _WEIGHTS:
                weights.add(value)
            elif path.exists() and not path.resolve().is_relative_to(CONF):  # kvsweep has the files of its conf, too
                # Numbered, because two files may have the same name.
                places[value] = f"inputs/{len(places)}/{path.name}"
    return places, weights


def _files_below(place: Path, name: str) -> dict[str, Path]:
    """Return the files of a folder, or a file itself, by their names in the bundle, which begin with `name`."""
    if place.is_file():
        return {name: place}
    files = {}
    # A link may lead out of the folder, to a file that is not meant to be passed on.
    for path in sorted(place.rglob("*")):
        if path.is_file() and not path.is_symlink() and "__pycache__" not in path.parts:
            files[f"{name}/{path.relative_to(place).as_posix()}"] = path
    return files
