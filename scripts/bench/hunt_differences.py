"""Hunt for completions that depend on what was decoded beside them, bit for bit.

    python scripts/bench/hunt_differences.py --models toy_qwen toy_llama --rows 200000
    python scripts/bench/hunt_differences.py --dtype bfloat16 --rows 20000    # on a GPU: --impl triton
    python scripts/bench/hunt_differences.py --invariant false --rows 20000    # finds the old behaviour
    python scripts/bench/hunt_differences.py --models wide --problems 10 --rows 200    # a vocabulary of 152,064

Each round decodes one grid through the harness, first as the reference, with 100 slots, whole and in order, and then
several times with other slots, as shards, in another order of problems, with other cells beside, stopped at random
moments and resumed; on one thread or two, each beside a reference of as many threads. Three things are compared for
each row: its bytes in completions.jsonl, the bits of the logits of all of its tokens, and the bits of the cache when
the text ends. For the first row that differs, the plan of its run and the place of the first differing token are given.
Each round adds a line to `--log`, and the script goes on from there. The last line is one JSON object; exit code 1 says
that something differed.
"""

import argparse
import dataclasses
import io
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.functional import pad
from tqdm import tqdm

from kvsweep.harness.decode.engine import Engine
from kvsweep.harness.provenance import describe_hardware
from kvsweep.harness.settings import compose_config
from kvsweep.harness.sweep import fill as decode_cells
from kvsweep.harness.sweep.cell_store import CellStore, OpenCells
from kvsweep.harness.sweep.estimate import TokensLeft
from kvsweep.harness.sweep.job import Job, make_job
from kvsweep.harness.sweep.share import share_of, status_of
from kvsweep.kernels.row_format import TOKEN_BLOCK, whole_blocks
from kvsweep.run_files.row_types import COMPLETIONS_FILE, Completion, PairRow, Shard, decode, shard_files
from kvsweep.run_files.task_status import Reporter

POLICIES = ["full", "dynts", "h2o", "snapkv", "rkv", "tova", "keydiff", "knorm", "streaming_llm", "random"]
BENCHMARKS = ("toy_chain", "toy_add", "toy_regs")
# A model of random weights with R1's vocabulary, so that the sums of drawing are as long as R1's. It has no head.
SMALL = "hidden_size=64 intermediate_size=64 num_hidden_layers=2 num_attention_heads=4 num_key_value_heads=2"
WIDE = ["model=r1_qwen_7b", "model.random_weights=true", "model.config.vocab_size=152064"]
WIDE += [f"model.config.{field}" for field in SMALL.split()]
# A question inside the budget is cut soon, and again; beside it (on_top) a text is cut once, late.
BUDGETS = {"null": (80, 36), "on_top": (40, 54)}  # by policy.question: policy.budget, decoding.max_new_tokens
SLOTS = (1, 5, 7, 13, 64, 200)
SHARES = (1, 8, 8, 8, 20, 20)  # of the rounds; a row takes longest in a single slot
REFERENCE_SLOTS = 100

Row = tuple[str, str, int]  # cell_id, problem_id, draw


@dataclass
class Seen:
    """What was seen of the rows of one run: their bytes, the bits of their logits, those of their last cache."""

    lines: dict[Row, bytes] = field(default_factory=dict)
    logits: dict[Row, int] = field(default_factory=dict)
    caches: dict[Row, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How one run of a grid differs from the reference."""

    slots: int = REFERENCE_SLOTS
    threads: int = 1
    shards: int = 1
    kills: int = 0
    cells: tuple[int, ...] = tuple(range(len(POLICIES)))
    order: int = 0  # seed of the order of the problems; 0 leaves it

    @classmethod
    def drawn(cls, dice: random.Random, slots: int) -> "Plan":
        """A random plan."""
        cells = range(len(POLICIES))
        neighbours = dice.random() < 0.5
        return cls(
            slots=slots,
            threads=dice.choice((1, 1, 1, 1, 1, 2)),
            shards=dice.choice((1, 1, 2, 3)),
            kills=dice.choice((0, 0, 1, 3)),
            cells=tuple(sorted(dice.sample(cells, dice.randint(1, len(cells))))) if neighbours else tuple(cells),
            order=dice.choice((0, dice.randrange(1, 1 << 30))),
        )


class Killed(Exception):
    """The moment at which a run stops."""


_MIX = 0x5851F42D


class WitnessEngine(Engine):
    """An engine that hashes the bits of every logit and of each finished cache.

    `trail` holds a hash per slot, which moves with the slot's sequence and takes in the logits of every step.
    """

    seen: Seen

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.trail = torch.zeros_like(self.table.tokens)
        self.table._columns = (*self.table._columns, self.trail)

    def _read_ahead(self, slot: int, known: Sequence[int]) -> None:
        self.trail[slot] = 0
        super()._read_ahead(slot, known)

    def feed(self, texts: Mapping[int, Sequence[int]]) -> dict[int, Tensor]:
        states = super().feed(texts)
        for slot, hidden in states.items():
            # A multiple of the block's tokens, so that the product has the bits of a step.
            filled = pad(hidden, (0, 0, 0, whole_blocks(len(hidden), TOKEN_BLOCK) - len(hidden)))
            logits = self.model.logits(filled, self.cache.linear)[: len(hidden)]
            for checksum in _checksum(logits):
                self.trail[slot] = self.trail[slot] * _MIX + checksum
        return states

    def _sample(self, logits: Tensor) -> None:
        live = self.cache.live
        self.trail[:live] = self.trail[:live] * _MIX + _checksum(logits)
        super()._sample(logits)

    def _completion(self, slot: int) -> Completion:
        completion = super()._completion(slot)
        length = int(self.cache.lengths[slot])
        layers = range(len(self.cache.slot_layers))
        rows = [rows for layer in layers for rows in self.cache.storage.read(layer, slot, length)]
        cache = int(_checksum(torch.cat([r.reshape(1, -1) for r in rows], dim=1))[0])
        for branch in self.table[slot].branches:
            row = (branch.cell_id, *completion.key)
            self.seen.logits[row], self.seen.caches[row] = int(self.trail[slot]), cache
        return completion


def _checksum(rows: Tensor) -> Tensor:
    """A hash of the bits of each row [rows, width], as int64."""
    bits = rows.contiguous().view(torch.int16).long()
    places = torch.arange(bits.shape[1]) * 0x9E3779B1 + 1
    return (bits * (places * places)).sum(dim=1)


def main() -> None:
    """Hunt until enough rows are compared; print the counts."""
    arguments = parse_args()
    log = Path(arguments.log) if arguments.log else None
    rounds = [json.loads(line) for line in log.read_text().splitlines()] if log and log.exists() else []
    start = time.perf_counter()
    while (total := _total(rounds))["rows"] < arguments.rows:
        found = hunt(arguments, number=len(rounds))
        rounds.append(found)
        if log:
            with log.open("a") as file:
                file.write(json.dumps(found) + "\n")
        if found["first"] and arguments.stop:
            break
        tqdm.write(f"round {len(rounds)}: {_total(rounds)}", file=sys.stderr)
    total = _total(rounds)
    total |= {"slots": _per_slots(rounds), "first": next((r["first"] for r in rounds if r["first"]), None)}
    total |= {"seconds": round(time.perf_counter() - start, 1), "hardware": describe_hardware()}
    print(json.dumps({"arguments": vars(arguments), **total}))
    sys.exit(1 if total["rows_different"] + total["logits_different"] + total["caches_different"] else 0)


COUNTS = ("rows", "rows_different", "logits", "logits_different", "caches_different", "tokens")


def _total(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    return {name: sum(run[name] for found in rounds for run in found["runs"]) for name in COUNTS}


def _per_slots(rounds: list[dict[str, Any]]) -> dict[int, int]:
    found: dict[int, int] = {}
    for run in (run for one in rounds for run in one["runs"]):
        found[run["plan"]["slots"]] = found.get(run["plan"]["slots"], 0) + run["rows"]
    return found


def hunt(arguments: argparse.Namespace, number: int) -> dict[str, Any]:
    """One round: a reference and several runs against it. Its random choices depend on its number alone."""
    dice = random.Random(number)
    model = arguments.models[number % len(arguments.models)]
    make = partial(
        prepare,
        arguments,
        model,
        benchmark=dice.choice(BENCHMARKS),
        question=dice.choice(["null", "null", "on_top"]),
        seed=number,
    )
    references: dict[int, Seen] = {}  # by threads, on which the bits may depend
    runs, first = [], None
    for _ in range(arguments.runs):
        slots = dice.choices(SLOTS, SHARES)[0]
        plan, fate = Plan.drawn(dice, slots), dice.randrange(1 << 30)
        problems = arguments.problems if slots > 1 else max(1, arguments.problems // 10)
        found = observe(partial(make, problems=problems), plan, dice=random.Random(fate))
        if plan.threads not in references:
            references[plan.threads] = observe(make, Plan(threads=plan.threads), dice=random.Random(0))
        reference = references[plan.threads]
        run = {"plan": dataclasses.asdict(plan), **compare(reference, found)}
        row = run.pop("different")
        if row is not None and first is None:
            texts = [decode(seen.lines[row], Completion).token_ids for seen in (reference, found)]
            place = next((i for i, (a, b) in enumerate(zip(*texts, strict=False)) if a != b), None)
            first = {"row": row, "plan": run["plan"], "first_differing_token": place}
        runs.append(run)
    return {"model": model, "runs": runs, "first": first}


def compare(reference: Seen, found: Seen) -> dict[str, Any]:
    """Counts of the rows of a run that differ from the reference, and the first of them."""
    lines = [row for row, line in found.lines.items() if reference.lines[row] != line]
    logits = [row for row, bits in found.logits.items() if reference.logits.get(row, bits) != bits]
    caches = [row for row, bits in found.caches.items() if reference.caches.get(row, bits) != bits]
    return {
        "rows": len(found.lines),
        "rows_different": len(lines),
        "logits": len(found.logits.keys() & reference.logits.keys()),
        "logits_different": len(logits),
        "caches_different": len(caches),
        "tokens": sum(decode(line, Completion).num_tokens for line in found.lines.values()),
        "different": next(iter(lines + logits + caches), None),
    }


def prepare(
    arguments: argparse.Namespace,
    model: str,
    folder: str,
    *,
    benchmark: str,
    question: str,
    seed: int,
    problems: int | None = None,
) -> Job:
    """The job of one round, into a folder."""
    budget, tokens = BUDGETS[question]
    policies = ",".join(POLICIES if model != "wide" else ["window", *(p for p in POLICIES if p != "dynts")])
    overrides = [
        *(WIDE if model == "wide" else [f"model={model}"]),
        *(f"model.dtype={arguments.dtype}", f"invariant={arguments.invariant}"),
        *(f"benchmark={benchmark}", f"benchmark.limit={problems or arguments.problems}"),
        *(f"benchmark.count={arguments.problems}", f"draws={arguments.draws}", f"seed={seed}"),
        *(f"grid.policy=[{policies}]", f"policy.budget={budget}", f"policy.question={question}"),
        *("policy.keep_ratio=0.5", "policy.local_window=24", f"decoding.max_new_tokens={tokens}"),
        *(f"impl={arguments.impl}", f"cache.bits={arguments.bits}", "cache.residual=24", f"results_dir={folder}"),
    ]
    return make_job(compose_config(*overrides))


def observe(make: Callable[..., Job], plan: Plan, dice: random.Random) -> Seen:
    """Decode a job as planned, and return what was seen."""
    seen = Seen()
    engine = type("Watching", (WitnessEngine,), {"seen": seen})
    with tempfile.TemporaryDirectory(prefix="kvsweep-hunt-") as folder, patch.object(decode_cells, "Engine", engine):
        job = make(folder)
        job = dataclasses.replace(
            job,
            slots=plan.slots,
            cells=tuple(job.cells[i] for i in plan.cells),
            model=dataclasses.replace(job.model, threads=None),
            benchmark=dataclasses.replace(job.benchmark, problems=_ordered(job.benchmark.problems, plan.order)),
        )
        torch.set_num_threads(plan.threads)
        shards = [Shard(index=i + 1, count=plan.shards) for i in range(plan.shards)]
        dice.shuffle(shards)
        for shard in shards:
            decode_part(dataclasses.replace(job, shard=shard), plan.kills, dice)
        for cell in job.cells:
            for path in shard_files(job.run_directory / cell.cell_id, COMPLETIONS_FILE).values():
                for line in path.read_bytes().splitlines():
                    seen.lines[(cell.cell_id, *decode(line, PairRow).key)] = line
    return seen


def _ordered(problems: Any, seed: int) -> Any:
    found = list(problems)
    if seed:
        random.Random(seed).shuffle(found)
    return type(problems)(found)


def decode_part(job: Job, kills: int, dice: random.Random) -> None:
    """Decode one shard, stopped `kills` times at random moments and resumed."""
    missing = len(job.cells) * len(share_of(job).pairs)
    for life in range(kills + 1):
        left = dice.randint(1, max(1, missing)) if life < kills else sys.maxsize
        try:
            _decode(job, left)
        except Killed:
            continue


def _decode(job: Job, left: int) -> None:
    class Deadly(Reporter):
        def stored(self, cell_id: str) -> None:
            nonlocal left
            super().stored(cell_id)
            left -= 1
            if not left:
                raise Killed

    share = share_of(job)
    status = status_of(share, "running")
    with ExitStack() as stack, redirect_stdout(io.StringIO()):
        stores = {cell.cell_id: stack.enter_context(CellStore.of(share, cell)) for cell in job.cells}
        reporter = Deadly(job.run_directory, status)
        tokens_left = TokensLeft(share, {cell_id: store.finished_pairs for cell_id, store in stores.items()})
        decode_cells.fill(OpenCells(share=share, stores=stores, reporter=reporter, left=tokens_left))


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["toy_qwen", "toy_llama"])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--invariant", default="true")
    parser.add_argument("--impl", default="torch", choices=["torch", "triton"])
    parser.add_argument("--bits", type=int, default=16)
    parser.add_argument("--rows", type=int, default=2000, help="rows to compare")
    parser.add_argument("--runs", type=int, default=6, help="runs per round beside the reference")
    parser.add_argument("--problems", type=int, default=50)
    parser.add_argument("--draws", type=int, default=2)
    parser.add_argument("--log", help="file of finished rounds, to go on from")
    parser.add_argument("--stop", action="store_true", help="stop at the first difference")
    return parser.parse_args()


if __name__ == "__main__":
    main()
