"""Tokens per second of CPU on SmolLM2, beside transformers.generate on the same problems, greedily.

    python scripts/bench/bench_smollm2.py --problems 64 --slots 16 64 --dtypes float32 bfloat16
    python scripts/bench/bench_smollm2.py --dtypes bfloat16 --invariant false --lengths FILE --of correct-5K-27B
    python scripts/bench/bench_smollm2.py --profile --slots 16 64 --dtypes float32 bfloat16

Each text ends where the model ends it, so their lengths differ. With `--lengths` they are those of real outputs (JSON
lines with `model` and `n_chars`), of the models whose name holds `--of`, scaled so that the longest has `--new-tokens`;
then no text ends by itself. `fill` is the mean length over the longest of a batch of texts, in the mean over batches:
what a static batch can use of its rows. `generate` decodes static batches of as many rows as we have slots,
left-padded; it computes on for ended rows, and only tokens of a completion count for either side. `--invariant false`
leaves to torch which product it takes, as `generate` does, in place of bits that do not depend on the batch. Both load
before the clock starts, and run on one thread, one after the other. `--profile` prints the operations of our steps by
their CPU time instead. The last line is one JSON object.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from rounds import ask, conclude
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM

from kvsweep.compression.policies.full import FullCache
from kvsweep.harness.benchmarks.config import BenchmarkConfig
from kvsweep.harness.benchmarks.load import load_problems
from kvsweep.harness.decode.engine import Engine
from kvsweep.harness.decode.request import DecodingConfig, Request, SamplingConfig
from kvsweep.harness.models.config import ModelConfig
from kvsweep.harness.models.load import add_adapter, load_model
from kvsweep.harness.models.loaded import LoadedModel
from kvsweep.harness.settings import build, compose_config

Texts = list[list[int]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2_reasons")
    parser.add_argument("--problems", type=int, default=64)
    parser.add_argument("--slots", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--new-tokens", type=int, default=448)
    parser.add_argument("--dtypes", nargs="+", choices=["float32", "bfloat16"], default=["float32"])
    parser.add_argument("--invariant", choices=["auto", "false"], default="auto")
    parser.add_argument("--lengths", type=Path, help="real outputs whose lengths the texts get")
    parser.add_argument("--of", default="", help="part of the names of the models that wrote these outputs")
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    config = compose_config(f"model={args.model}", "benchmark=words", f"benchmark.count={args.problems}")
    questions = load_problems(build(BenchmarkConfig, "benchmark", config.benchmark)).problems
    limits = real_lengths(args.lengths, args.of, args.problems, args.new_tokens) if args.lengths else None
    invariant = None if args.invariant == "auto" else False
    found: list[dict[str, object]] = []
    for dtype in args.dtypes:
        model = load_model(replace(build(ModelConfig, "model", config.model), dtype=dtype, threads=1))
        prompts = [model.dialogue.prompt_ids(question.prompt) for question in questions]
        if args.profile:
            for slots in args.slots:
                print(f"{dtype}, {slots} slots")
                print_profile(engine_for(model, Work(prompts, slots, args.new_tokens, limits), invariant))
            continue
        stock = AutoModelForCausalLM.from_pretrained(model.config.checkpoint, dtype=getattr(torch, dtype))
        if model.config.adapter is not None:
            add_adapter(stock, model.config.adapter)
        for slots in args.slots:
            work = Work(prompts, slots, args.new_tokens, limits)
            row = {"dtype": dtype, "slots": slots, **race(model, stock, work, invariant)}
            print(row, flush=True)
            found.append(row)
    conclude(args, rows=found)


@dataclass(frozen=True)
class Work:
    """The prompts, the sequences that are decoded at once, and the most tokens of all texts or the tokens of each."""

    prompts: Sequence[tuple[int, ...]]
    slots: int
    most: int
    limits: Sequence[int] | None


def real_lengths(file: Path, name: str, count: int, longest: int) -> list[int]:
    """The lengths of the first `count` outputs of a model, scaled so that the longest has `longest` tokens."""
    outputs = [json.loads(line) for line in file.read_text().splitlines()]
    lengths = [row["n_chars"] for row in outputs if name in row["model"]][:count]
    assert len(lengths) == count, f"{file} has {len(lengths)} outputs of {name!r}"
    return [max(1, round(length * longest / max(lengths))) for length in lengths]


def race(model: LoadedModel, stock: Any, work: Work, invariant: bool | None) -> dict[str, float]:
    """Tokens per CPU second of both sides, their ratio, the texts that are equal, and the spread of the lengths."""
    own, our_rate = timed(lambda: ours(model, work, invariant))
    other, their_rate = timed(lambda: theirs(model.stop_ids[0], stock, work))
    lengths = [len(text) for text in own]
    batches = [lengths[start : start + work.slots] for start in range(0, len(lengths), work.slots)]
    return {
        "kvsweep": our_rate,
        "generate": their_rate,
        "ratio": round(our_rate / their_rate, 2),
        "equal_texts": sum(a == b for a, b in zip(own, other, strict=True)),
        "fill": round(mean(mean(batch) / max(batch) for batch in batches), 2),
        "shortest": min(lengths),
        "mean": round(mean(lengths), 1),
        "longest": max(lengths),
    }


def timed(decode: Callable[[], Texts]) -> tuple[Texts, float]:
    before = time.process_time()
    texts = decode()
    return texts, round(sum(map(len, texts)) / (time.process_time() - before), 2)


class CutEngine(Engine):
    """An engine that ends each text at a length of its own, and never before."""

    limits: Sequence[int]

    def _sample(self, logits: torch.Tensor) -> None:
        super()._sample(logits)
        for slot in range(self.cache.live):
            limit = self.limits[int(self.table[slot].request.problem_id)]
            self.table.ends.flags[slot] = bool(self.table.generated[slot] >= limit)


def engine_for(model: LoadedModel, work: Work, invariant: bool | None) -> tuple[Engine, list[Request]]:
    requests = ask(work.prompts, FullCache(name="full"))
    decoding = DecodingConfig(name="g", max_new_tokens=work.most, sampling=SamplingConfig(temperature=0.0))
    kind = Engine if work.limits is None else CutEngine
    engine = kind.sized_for(requests, model, decoding=decoding, seed=0, slots=work.slots, invariant=invariant)
    if isinstance(engine, CutEngine) and work.limits is not None:
        engine.limits = work.limits
    return engine, requests


def ours(model: LoadedModel, work: Work, invariant: bool | None) -> Texts:
    """The engine with the full cache: a text that ends makes room for the next one."""
    engine, requests = engine_for(model, work, invariant)
    found = {int(completion.problem_id): completion.token_ids for _, completion in engine.generate(requests)}
    return [found[i] for i in range(len(requests))]


@torch.inference_mode()
def theirs(stop: int, network: Any, work: Work) -> Texts:
    """`generate` over static batches, each decoded up to its longest row."""
    texts: Texts = []
    for start in range(0, len(work.prompts), work.slots):
        rows = work.prompts[start : start + work.slots]
        limits = work.limits[start : start + work.slots] if work.limits is not None else None
        longest = max(map(len, rows))
        ids = torch.tensor([[stop] * (longest - len(row)) + list(row) for row in rows])
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
        own: dict[str, Any] = {} if limits is None else {"eos_token_id": [], "max_new_tokens": max(limits)}
        out = network.generate(
            **{"max_new_tokens": work.most, "do_sample": False, "pad_token_id": stop, **own},
            input_ids=ids,
            attention_mask=mask,
        )[:, longest:].tolist()
        if limits is None:
            texts += [row[: row.index(stop) + 1] if stop in row else row for row in out]
        else:
            texts += [row[:limit] for row, limit in zip(out, limits, strict=True)]
    return texts


def print_profile(made: tuple[Engine, list[Request]]) -> None:
    """The operations of twenty steps behind the first ten, by their own CPU time."""
    engine, requests = made
    steps = engine.steps(requests)
    for _ in islice(steps, 10):
        pass
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in islice(steps, 20):
            pass
    print(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=12, max_name_column_width=40))


if __name__ == "__main__":
    main()
