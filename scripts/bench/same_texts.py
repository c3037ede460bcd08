"""How many completions of two run directories are the same, token by token, for each policy and in all.

    python scripts/bench/same_texts.py results/runs/on_cpu results/runs/on_gpu

Cells pair by cell_id. For texts that differ, the median place of the first differing token is given. Exit code 1 says
that some text differs or that the runs share none.
"""

import argparse
import itertools
import statistics
import sys
from collections import defaultdict
from pathlib import Path

from kvsweep.records import COMPLETIONS_FILE, Completion, read_cell, read_shards


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, nargs=2, metavar="RUN")
    first, second = parser.parse_args().runs
    places: dict[str, list[int | None]] = defaultdict(list)
    for folder in sorted(path.parent for path in first.glob("*/cell.yaml")):
        other = {row.key: row.token_ids for row in completions(second / folder.name)}
        policy = read_cell(folder)["policy"]["name"]
        for row in completions(folder):
            if row.key in other:
                places[policy].append(first_difference(row.token_ids, other[row.key]))
    places["all"] = [place for found in places.values() for place in found]
    for policy, found in places.items():
        differ = [place for place in found if place is not None]
        told = f", others differ from token {statistics.median(differ):g} on" if differ else ""
        print(f"{policy:24}{len(found) - len(differ):8} of {len(found)} the same{told}")
    if any(place is not None for place in places["all"]) or not places["all"]:
        sys.exit(1)


def completions(folder: Path) -> list[Completion]:
    return list(read_shards(folder, COMPLETIONS_FILE, Completion)) if folder.is_dir() else []


def first_difference(one: list[int], other: list[int]) -> int | None:
    """Index of the first differing token, the length of a text that the other one continues, or None."""
    pairs = enumerate(itertools.zip_longest(one, other))
    return next((place for place, (a, b) in pairs if a != b), None)


if __name__ == "__main__":
    main()
