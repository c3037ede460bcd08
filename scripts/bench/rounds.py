"""What the benchmarks share: rounds of contenders in turn, requests to the engine, processes, the last line."""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvsweep.compression.policy import Policy
from kvsweep.harness.decode.request import Branch, Request
from kvsweep.harness.provenance import describe_machine


def alternating(
    runs: Mapping[str, Callable[[], float]], rounds: int, clock: Callable[[], float] = time.process_time
) -> dict[str, list[float]]:
    """What each contender does per second of the clock, in each round but the first; every other round goes backwards.

    Args:
        runs: contenders that return how much they did, such as tokens.
        clock: of processor time, which a busy machine disturbs less, or of the wall.
    """
    rates: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name in list(runs)[:: -1 if number % 2 else 1]:
            start = clock()
            done = runs[name]()
            rates[name].append(done / (clock() - start))
    return {name: found[1:] for name, found in rates.items()}


def medians(rates: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {name: statistics.median(found) for name, found in rates.items()}


def ask(prompts: Sequence[tuple[int, ...]], policy: Policy) -> list[Request]:
    """A request of one cell for each prompt, named by its place."""
    branches = (Branch(cell_id="bench", policy=policy),)
    return [Request(problem_id=str(i), draw=0, prompt_ids=ids, branches=branches) for i, ids in enumerate(prompts)]


def in_own_process(*words: str) -> dict[str, Any]:
    """The last line that this script prints when it runs once more with these words behind those given."""
    done = subprocess.run([sys.executable, *sys.argv, *words], capture_output=True, text=True, check=False)
    if done.returncode:
        return {"failed": done.stderr.strip().splitlines()[-1]}
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


def conclude(args: argparse.Namespace, **figures: object) -> None:
    """Print the last line: the arguments, the figures and the machine as one JSON object."""
    print(json.dumps({**vars(args), **figures, **describe_machine()}, default=str))
