"""The price of an answer: which settings of the demo's grid hold, found in four ways, each timed to its conclusion.

    python scripts/bench/bench_answer.py --model toy_qwen --benchmark toy_chain --problems 100 --draws 8 --rounds 3

- paper: a plain loop over transformers, as the DynTS code has it: one cell after the other, static batches of 20 that
  are padded to the longest row after every eviction, and all draws.
- cells: our engine, one cell after the other, all draws.
- forked: our engine, all cells in one batch that forks at the first eviction, all draws.
- sequential: the same with `until=decided`.

Every way runs in a process of its own on one thread, the ways in turn in each round. The clock runs from the loading of
the model to the decision, so it counts prefill, evictions, files and grading. All ways draw with the same random
numbers, so their texts differ by rounding alone. Figures are medians over the rounds: wall seconds, CPU seconds of the
process and its graders (which a busy machine disturbs less), tokens decoded, and the largest resident memory. The last
line is one JSON object.
"""

import argparse
import json
import resource
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from bench_engine import Peer, stock_network
from rounds import conclude, in_own_process
from torch import Tensor
from tqdm import tqdm

from kvsweep.analysis.statistics.noninferiority import decide_rounds
from kvsweep.compression.policies.dynts import DynTS
from kvsweep.harness.decode.sampling import sequence_key, uniform
from kvsweep.harness.grading.grader import Grader
from kvsweep.harness.models.loaded import LoadedModel
from kvsweep.harness.rounds import run
from kvsweep.harness.screen import ReplayPlan
from kvsweep.harness.settings import compose_config
from kvsweep.harness.sweep.cell_store import CellStore
from kvsweep.harness.sweep.fill import loaded
from kvsweep.harness.sweep.job import Job, make_job
from kvsweep.harness.sweep.launch import Inline
from kvsweep.harness.sweep.share import share_of
from kvsweep.run_files.row_types import STATS_FILE, Completion, DecodeStats, Pair, read_rows

WAYS = ("paper", "cells", "forked", "sequential")
BATCH = 20  # of the DynTS code


def main() -> None:
    args = parse_args()
    if args.way:
        print(json.dumps(answer(args)))
        return
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in args.ways}
    for _ in tqdm(range(args.rounds), desc="rounds"):
        for way in args.ways:
            found[way].append(in_own_process("--way", way))
            if "failed" in found[way][-1]:
                sys.exit(f"{way}: {found[way][-1]['failed']}")
    report(args, found)


def answer(args: argparse.Namespace) -> dict[str, Any]:
    """Go one way from the model's files to the decisions, and tell what that took and what was decided."""
    with tempfile.TemporaryDirectory(prefix="bench-answer-") as folder:
        job = the_job(args, folder)
        start, before = time.perf_counter(), cpu_seconds()
        if args.way == "paper":
            tokens = run_paper(job)
        else:
            jobs = [replace(job, cells=(cell,)) for cell in job.cells] if args.way == "cells" else [job]
            run(jobs, Inline(), ReplayPlan())
            tokens = decoded_tokens(job)
        scores = {cell.cell_id: job.scores(cell) for cell in job.cells}
        [full] = [cell.cell_id for cell in job.cells if cell.policy.name == "full"]
        baseline = scores.pop(full)
        decisions = decide_rounds(scores, baseline, rounds=job.rounds or (args.draws,), margin=args.margin / 100)
        wall = time.perf_counter() - start
    return {
        "wall_seconds": wall,
        "cpu_seconds": cpu_seconds() - before,
        "tokens": tokens,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "labels": {cell_id: decision.label for cell_id, decision in decisions.items()},
    }


def cpu_seconds() -> float:
    """CPU seconds of this process and of its children that have ended."""
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(use.ru_utime + use.ru_stime for use in usage)


def the_job(args: argparse.Namespace, folder: str) -> Job:
    """The demo's grid, sequential for the way of that name."""
    overrides = [f"model={args.model}", f"benchmark={args.benchmark}", f"benchmark.limit={args.problems}"]
    overrides += [f"draws={args.draws}", f"report.margin={args.margin}", f"results_dir={folder}", "model.threads=1"]
    if args.way == "sequential":
        overrides.append("until=decided")
    return make_job(compose_config("experiment=demo_full", "grid.beside=[]", *overrides))


def decoded_tokens(job: Job) -> int:
    """Live tokens that the engine has decoded for all cells; a pass over several cells has a row for each of them."""
    files = [job.run_directory / cell.cell_id / STATS_FILE for cell in job.cells]
    return round(sum(row.tokens_total / row.cells for path in files for row in read_rows(path, DecodeStats)))


def run_paper(job: Job) -> int:
    """Write, store and grade every cell's completions as the paper's code decodes; return the tokens of the texts."""
    model, tokens = loaded(job.model), 0
    dynts = next(cell.policy for cell in job.cells if isinstance(cell.policy, DynTS))
    with Grader() as grader:
        for cell in tqdm(job.cells, desc="cells"):
            # With a budget that no text reaches, the loop keeps the full cache.
            policy = cell.policy if isinstance(cell.policy, DynTS) else replace(dynts, budget=1 << 30)
            loop = PaperLoop(job, model, policy)
            with CellStore(job.run_directory, cell, job.benchmark.problems) as store:
                for completion in loop.completions():
                    store.append(completion)
                    tokens += completion.num_tokens
            grader.grade_cell(store.directory)
    return tokens


class PaperLoop(Peer):
    """The padded evicting loop over all problems and draws, with the random numbers that our engine draws with."""

    def __init__(self, job: Job, model: LoadedModel, policy: DynTS) -> None:
        self.pairs, self.model, self.seed = share_of(job).pairs, model, job.seed
        prompts = {problem.id: model.dialogue.prompt_ids(problem.prompt) for problem in job.benchmark.problems}
        prompts_of_pairs = [prompts[problem_id] for problem_id, _ in self.pairs]
        super().__init__(stock_network(job), prompts_of_pairs, policy, job.decoding)

    @torch.inference_mode()
    def completions(self) -> Iterator[Completion]:
        """Decode batch by batch."""
        for number, (ids, mask) in enumerate(self.batches(BATCH)):
            pairs = self.pairs[number * BATCH : (number + 1) * BATCH]
            self.streams = torch.tensor([sequence_key(self.seed, *pair) for pair in pairs])
            written = self.decode(ids, mask).tolist()
            yield from (self.completion(*row) for row in zip(pairs, written, mask.sum(-1).tolist(), strict=True))

    def uniform(self, positions: Tensor) -> Tensor:
        return uniform(self.streams, positions)

    def completion(self, pair: Pair, written: list[int], prompt_tokens: int) -> Completion:
        """The text up to its stop token; the batch may have gone on behind it."""
        end = next((i for i, token in enumerate(written, start=1) if token in self.model.stop_ids), None)
        ids = written[:end]
        return Completion(
            problem_id=pair[0],
            draw=pair[1],
            text=self.model.dialogue.decode(ids[:-1] if end else ids),
            token_ids=ids,
            num_tokens=len(ids),
            prompt_tokens=prompt_tokens,
            thinking_tokens=len(ids),
            stop_reason="stop" if end else "length",
            evictions=[],
            fork_step=None,
            peak_length=prompt_tokens + len(ids),
            seed=self.seed,
        )


def report(args: argparse.Namespace, found: dict[str, list[dict[str, Any]]]) -> None:
    figures = ("wall_seconds", "cpu_seconds", "tokens", "peak_mib")
    medians = {way: {f: statistics.median(one[f] for one in rounds) for f in figures} for way, rounds in found.items()}
    labels = {way: rounds[0]["labels"] for way, rounds in found.items()}
    base, first = medians[args.ways[0]], labels[args.ways[0]]
    print(f"{'way':12}{'wall s':>9}{'CPU s':>9}{'tokens':>12}{'MiB':>7}{'times less: wall':>18}{'CPU':>7}{'tokens':>8}")
    for way, values in medians.items():
        less = [base[f] / values[f] for f in figures[:3]]
        row = (
            f"{values['wall_seconds']:9.1f}{values['cpu_seconds']:9.1f}{values['tokens']:12,}{values['peak_mib']:7.0f}"
        )
        print(f"{way:12}{row}{less[0]:18.2f}{less[1]:7.2f}{less[2]:8.2f}")
    for way, told in labels.items():
        decided = [cell_id for cell_id in told if "unclear" not in (told[cell_id], first[cell_id])]
        same = sum(told[cell_id] == first[cell_id] for cell_id in decided)
        counts = ", ".join(f"{count} {label}" for label, count in sorted(Counter(told.values()).items()))
        print(
            f"{way:12}{counts}; of {len(decided)} cells decided here and by {args.ways[0]}, {same} have the same label"
        )
    conclude(args, figures=medians, each_round=found)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="toy_qwen")
    parser.add_argument("--benchmark", default="toy_chain")
    parser.add_argument("--problems", type=int, default=100)
    parser.add_argument("--draws", type=int, default=8)
    parser.add_argument("--margin", type=float, default=5, help="points of Pass@1 (default: 5)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, help="the first one is what the others beat")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
