"""How often one of two equal servers is called worse than the other, or beyond the control: 1,000 pairs a row.

    python scripts/study/equal_servers.py

Each problem is solved with a chance of its own, the same for all servers, so whatever differs is chance. `full` is
asked, asked again as the control, and an equal server is the other setting. "sampled" has draws with temperature, and
its labels are about these problems; "greedy" has one answer a problem, which only few problems change, and its labels
are about problems like these.
"""

import argparse
import json
from typing import get_args

import numpy as np

from kvsweep.analysis.statistics.noninferiority import Label, Population, beyond_control, decide, paired_test

# Problems, draws, the shapes of the Beta distribution of the problems' chances, what the labels are about.
CASES: dict[str, tuple[int, int, float, float, Population]] = {
    "sampled, 30 x 8": (30, 8, 0.6, 0.4, "these"),
    "sampled, 198 x 4": (198, 4, 0.6, 0.4, "these"),
    "greedy, 120 x 1": (120, 1, 0.06, 0.012, "like_these"),
    "greedy, 30 x 1": (30, 1, 0.06, 0.012, "like_these"),
}


def called(
    problems: int, draws: int, shape: tuple[float, float], population: Population, pairs: int, seed: int
) -> dict[str, int]:
    """Return how many of the `pairs` got each label, and how many lay beyond the control."""
    rng, counts = (
        np.random.default_rng(seed),
        dict.fromkeys([*get_args(Label), "beyond control", "answers that flip"], 0),
    )
    for _ in range(pairs):
        chances = rng.beta(*shape, problems)[:, None]
        full, control, other = (rng.random((3, problems, draws)) < chances).astype(float)
        counts[decide(other, full, population=population).label] += 1
        test = paired_test(other, full, population)
        counts["beyond control"] += len(beyond_control({"other": test}, {"other": other}, full, control))
        counts["answers that flip"] += int(np.abs(control - full).sum())
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=94)
    options, found = parser.parse_args(), {}
    for name, (problems, draws, *shape, population) in CASES.items():
        found[name] = called(problems, draws, (shape[0], shape[1]), population, options.pairs, options.seed)
        print(f"{name}: " + ", ".join(f"{count:,} {what}" for what, count in found[name].items()), flush=True)
    print(json.dumps({"pairs": options.pairs, "seed": options.seed, **found}))


if __name__ == "__main__":
    main()
