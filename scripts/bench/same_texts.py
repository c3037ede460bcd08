"""How many completions of two run directories are the same, token by token, for each policy and in all.

    python scripts/bench/same_texts.py results/runs/on_cpu results/runs/on_gpu

Cells pair by what they have in common beyond the implementation: the model's name, the problems, the policy, the
cache, the decoding and the seed. For texts that differ, the median place of the first differing token is given. Exit
code 1 says that some text differs or that the runs share none.
"""

import argparse
import itertools
import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path

from kvsweep.run_files.row_types import Completion
from kvsweep.run_files.run_reader import StoredCell

# Of cell.yaml: what two implementations of one setting differ in. A name stands for the model.
_OWN = ("schema", "check", "cell_id", "condition", "impl", "model")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, nargs=2, metavar="RUN")
    places = differences(*parser.parse_args().runs)
    places["all"] = [place for found in places.values() for place in found]
    for policy, found in places.items():
        differ = [place for place in found if place is not None]
        told = f", others differ from token {statistics.median(differ):g} on" if differ else ""
        print(f"{policy:24}{len(found) - len(differ):8} of {len(found)} the same{told}")
    if any(place is not None for place in places["all"]) or not places["all"]:
        sys.exit(1)


def differences(first: Path, second: Path) -> dict[str, list[int | None]]:
    """By policy, the first differing token of each text that both runs have; None where the texts are the same."""
    places: dict[str, list[int | None]] = defaultdict(list)
    others = {setting(folder): folder for folder in cells(second)}
    for folder in cells(first):
        if (other := others.get(setting(folder))) is None:
            continue
        known = {row.key: row.token_ids for row in completions(other)}
        policy = StoredCell(folder).settings["policy"]["name"]
        places[policy] += [
            first_difference(row.token_ids, known[row.key]) for row in completions(folder) if row.key in known
        ]
    return places


def cells(run: Path) -> list[Path]:
    return sorted(path.parent for path in run.glob("*/cell.yaml"))


def setting(folder: Path) -> str:
    """What a cell decodes, whatever the implementation."""
    cell = StoredCell(folder).settings
    rest = {name: value for name, value in cell.items() if name not in _OWN}
    return json.dumps([cell["model"]["name"], rest], sort_keys=True, default=str)


def completions(folder: Path) -> list[Completion]:
    return list(StoredCell(folder).rows(Completion))


def first_difference(one: list[int], other: list[int]) -> int | None:
    """Index of the first differing token, the length of a text that the other one continues, or None."""
    pairs = enumerate(itertools.zip_longest(one, other))
    return next((place for place, (a, b) in pairs if a != b), None)


if __name__ == "__main__":
    main()
