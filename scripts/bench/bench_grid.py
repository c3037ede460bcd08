"""A grid in one batch, its common beginning decoded once, against one cell after the other.

    python scripts/bench/bench_grid.py --model toy_qwen --benchmark toy_chain --problems 60 --rounds 3

Both ways decode the same cells (experiment=demo_full without the full cache) with the same engine, alternating. The
script compares the completions and ends without a figure if they differ. It prints a table of medians; the last line
is one JSON object.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence

from rounds import conclude

from kvsweep.harness.decode.engine import Engine
from kvsweep.harness.decode.request import Branch, Request
from kvsweep.harness.models.load import load_model
from kvsweep.harness.models.loaded import LoadedModel
from kvsweep.harness.settings import compose_config
from kvsweep.harness.sweep.job import Job, make_job
from kvsweep.run_files.row_types import Completion

Written = dict[tuple[str, str, int], Completion]


def main() -> None:
    args = parse_args()
    overrides = [f"model={args.model}", f"benchmark={args.benchmark}", f"benchmark.limit={args.problems}"]
    job = make_job(compose_config(*overrides, "experiment=demo_full", "grid.policy=[dynts]", "grid.beside=[]"))
    model = load_model(job.model)
    branches = tuple(Branch(cell_id=cell.cell_id, policy=cell.policy) for cell in job.cells)
    ways = {"grid": [branches], "cell by cell": [(branch,) for branch in branches]}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    decoded: dict[str, int] = {}
    for _ in range(args.rounds):
        written: dict[str, Written] = {}
        for way, batches in ways.items():
            start = time.perf_counter()
            written[way], decoded[way] = decode(job, model, batches)
            seconds[way].append(time.perf_counter() - start)
        if written["grid"] != written["cell by cell"]:
            sys.exit("the two ways wrote different completions: no figure")
    report(args, {way: statistics.median(figures) for way, figures in seconds.items()}, decoded)


def decode(job: Job, model: LoadedModel, batches: Sequence[tuple[Branch, ...]]) -> tuple[Written, int]:
    """Decode each batch of cells by itself; return all completions and the number of tokens decoded."""
    written: Written = {}
    tokens = 0
    for branches in batches:
        requests = [
            Request(problem_id=p.id, draw=0, prompt_ids=model.dialogue.prompt_ids(p.prompt), branches=branches)
            for p in job.benchmark.problems
        ]
        engine = Engine.sized_for(requests, model, decoding=job.decoding, seed=job.seed)
        for cell_id, completion in engine.generate(requests):
            written[cell_id, completion.problem_id, completion.draw] = completion
        tokens += engine.clock.tokens
    return written, tokens


def report(args: argparse.Namespace, seconds: dict[str, float], decoded: dict[str, int]) -> None:
    print(f"{'way':14}{'seconds':>9}{'tokens decoded':>16}")
    for way, median in seconds.items():
        print(f"{way:14}{median:9.1f}{decoded[way]:16,}")
    ratios = {
        name: found["cell by cell"] / found["grid"] for name, found in (("seconds", seconds), ("tokens", decoded))
    }
    print(f"cell by cell / grid: {ratios['seconds']:.2f} in seconds, {ratios['tokens']:.2f} in tokens decoded")
    conclude(args, seconds=seconds, decoded=decoded, ratios=ratios)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="toy_qwen")
    parser.add_argument("--benchmark", default="toy_chain")
    parser.add_argument("--problems", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
