"""Tokens per second of CPU on SmolLM2, beside transformers.generate on the same problems, greedily.

    python scripts/bench/bench_smollm2.py --problems 64 --slots 16 64 --dtypes float32 bfloat16
    python scripts/bench/bench_smollm2.py --profile --slots 16 64 --dtypes float32 bfloat16

Each text ends where the model ends it, so their lengths differ. `generate` decodes static batches of as many rows as we
have slots, left-padded; it computes on for ended rows, and only tokens of a completion count for either side. Both load
before the clock starts, and run on one thread, one after the other. `--profile` prints the operations of our steps by
their CPU time instead. The last line is one JSON object.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM

from kvsweep.compression.policies.full import FullCache
from kvsweep.harness.benchmarks.config import BenchmarkConfig
from kvsweep.harness.benchmarks.load import load_problems
from kvsweep.harness.decode.engine import Engine
from kvsweep.harness.decode.request import Branch, DecodingConfig, Request, SamplingConfig
from kvsweep.harness.models.adapter import add_adapter
from kvsweep.harness.models.config import ModelConfig
from kvsweep.harness.models.load import load_model
from kvsweep.harness.models.loaded import LoadedModel
from kvsweep.harness.provenance import describe_machine
from kvsweep.harness.settings import build, compose_config

Texts = list[list[int]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2_reasons")
    parser.add_argument("--problems", type=int, default=64)
    parser.add_argument("--slots", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--new-tokens", type=int, default=448)
    parser.add_argument("--dtypes", nargs="+", choices=["float32", "bfloat16"], default=["float32"])
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    config = compose_config(f"model={args.model}", "benchmark=words", f"benchmark.count={args.problems}")
    questions = load_problems(build(BenchmarkConfig, "benchmark", config.benchmark)).problems
    found: list[dict[str, object]] = []
    for dtype in args.dtypes:
        model = load_model(replace(build(ModelConfig, "model", config.model), dtype=dtype, threads=1))
        prompts = [model.prompt_ids(question.prompt) for question in questions]
        if args.profile:
            for slots in args.slots:
                print(f"{dtype}, {slots} slots")
                print_profile(engine_for(model, prompts, slots, args.new_tokens))
            continue
        stock = AutoModelForCausalLM.from_pretrained(model.config.checkpoint, dtype=getattr(torch, dtype))
        if model.config.adapter is not None:
            add_adapter(stock, model.config.adapter)
        for slots in args.slots:
            row = {"dtype": dtype, "slots": slots, **race(model, stock, prompts, slots, args.new_tokens)}
            print(row, flush=True)
            found.append(row)
    print(json.dumps({"rows": found, "machine": describe_machine(), **vars(args)}))


def race(
    model: LoadedModel, stock: torch.nn.Module, prompts: Sequence[tuple[int, ...]], slots: int, most: int
) -> dict[str, float]:
    """Tokens per CPU second of both sides, their ratio, the texts that are equal, and the spread of the lengths."""
    own, our_rate = timed(lambda: ours(model, prompts, slots, most))
    other, their_rate = timed(lambda: theirs(model.stop_ids[0], stock, prompts, slots, most))
    return {
        "kvsweep": our_rate,
        "generate": their_rate,
        "ratio": round(our_rate / their_rate, 2),
        "equal_texts": sum(a == b for a, b in zip(own, other, strict=True)),
        "shortest": min(map(len, own)),
        "mean": round(sum(map(len, own)) / len(own), 1),
        "longest": max(map(len, own)),
    }


def timed(decode: Callable[[], Texts]) -> tuple[Texts, float]:
    before = time.process_time()
    texts = decode()
    return texts, round(sum(map(len, texts)) / (time.process_time() - before), 2)


def engine_for(
    model: LoadedModel, prompts: Sequence[tuple[int, ...]], slots: int, most: int
) -> tuple[Engine, list[Request]]:
    branch = Branch(cell_id="full", policy=FullCache(name="full"))
    requests = [Request(problem_id=str(i), draw=0, prompt_ids=ids, branches=(branch,)) for i, ids in enumerate(prompts)]
    decoding = DecodingConfig(name="g", max_new_tokens=most, sampling=SamplingConfig(temperature=0.0))
    return Engine.sized_for(requests, model, decoding=decoding, seed=0, slots=slots), requests


def ours(model: LoadedModel, prompts: Sequence[tuple[int, ...]], slots: int, most: int) -> Texts:
    """The engine with the full cache: a text that ends makes room for the next one."""
    engine, requests = engine_for(model, prompts, slots, most)
    found = {int(completion.problem_id): completion.token_ids for _, completion in engine.generate(requests)}
    return [found[i] for i in range(len(prompts))]


@torch.inference_mode()
def theirs(stop: int, network: torch.nn.Module, prompts: Sequence[tuple[int, ...]], batch: int, most: int) -> Texts:
    """`generate` over static batches, each decoded up to its longest row."""
    texts = []
    for start in range(0, len(prompts), batch):
        rows = prompts[start : start + batch]
        longest = max(map(len, rows))
        ids = torch.tensor([[stop] * (longest - len(row)) + list(row) for row in rows])
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
        out = network.generate(  # type: ignore[operator]
            input_ids=ids, attention_mask=mask, max_new_tokens=most, do_sample=False, pad_token_id=stop
        )[:, longest:]
        texts += [row[: row.index(stop) + 1] if stop in row else row for row in out.tolist()]
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
