"""Tokens per second of CPU on SmolLM2, beside transformers.generate on the same problems, greedily.

    python scripts/bench/bench_smollm2.py --problems 64 --slots 64 --dtypes float32 bfloat16

`generate` decodes static batches of as many rows as we have slots, left-padded; it computes on for ended rows,
and only tokens of a completion count for either side. The lengths differ: the i-th text may have a quarter to all of
--new-tokens. Both load before the clock starts, and run on one thread, one after the other. The last line is one JSON
object.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from transformers import AutoModelForCausalLM

from kvsweep.compression.policies.full import FullCache
from kvsweep.harness.benchmarks.config import BenchmarkConfig
from kvsweep.harness.benchmarks.load import load_problems
from kvsweep.harness.decode.engine import Engine
from kvsweep.harness.decode.request import Branch, DecodingConfig, Request, SamplingConfig
from kvsweep.harness.models.config import ModelConfig
from kvsweep.harness.models.load import load_model
from kvsweep.harness.models.loaded import LoadedModel
from kvsweep.harness.provenance import describe_machine
from kvsweep.harness.settings import build, compose_config

Prompts = list[tuple[int, ...]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=64)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--dtypes", nargs="+", choices=["float32", "bfloat16"], default=["float32"])
    args = parser.parse_args()
    torch.set_num_threads(1)
    config = compose_config("model=smollm2_135m", "benchmark=words", f"benchmark.count={args.problems}")
    questions = load_problems(build(BenchmarkConfig, "benchmark", config.benchmark)).problems
    found: dict[str, dict[str, float]] = {}
    for dtype in args.dtypes:
        model = load_model(replace(build(ModelConfig, "model", config.model), dtype=dtype, threads=1))
        prompts = [model.prompt_ids(question.prompt) for question in questions]
        most = [args.new_tokens * (1 + i % 4) // 4 for i in range(len(prompts))]
        stock = AutoModelForCausalLM.from_pretrained(model.config.checkpoint, dtype=getattr(torch, dtype))
        ours, theirs = Ours(model, args.slots), Theirs(stock, model, args.slots)
        found[dtype] = {
            "kvsweep": per_cpu_second(ours, prompts, most),
            "generate": per_cpu_second(theirs, prompts, most),
        }
        print(dtype, found[dtype], flush=True)
    print(json.dumps({"tokens_per_cpu_second": found, "machine": describe_machine(), **vars(args)}))


def per_cpu_second(decode: Callable[[Prompts, list[int]], int], prompts: Prompts, most: list[int]) -> float:
    before = time.process_time()
    tokens = decode(prompts, most)
    return round(tokens / (time.process_time() - before), 2)


class Ours:
    """The engine with the full cache; a completion that is cut at its length makes room for the next one."""

    def __init__(self, model: LoadedModel, slots: int) -> None:
        self.model, self.slots = model, slots

    def __call__(self, prompts: Prompts, most: list[int]) -> int:
        tokens = 0
        # An engine has one limit for all its texts, so each limit is a run of its own, with all slots at its disposal.
        for limit in sorted(set(most)):
            chosen = [(i, ids) for i, ids in enumerate(prompts) if most[i] == limit]
            branch = Branch(cell_id="full", policy=FullCache(name="full"))
            requests = [Request(problem_id=str(i), draw=0, prompt_ids=ids, branches=(branch,)) for i, ids in chosen]
            decoding = DecodingConfig(name="g", max_new_tokens=limit, sampling=SamplingConfig(temperature=0.0))
            engine = Engine.sized_for(requests, self.model, decoding=decoding, seed=0, slots=self.slots)
            tokens += sum(completion.num_tokens for _, completion in engine.generate(requests))
        return tokens


class Theirs:
    """`generate` over static batches, each decoded up to its longest row."""

    def __init__(self, network: torch.nn.Module, model: LoadedModel, batch: int) -> None:
        self.network, self.stop, self.batch = network, model.stop_ids[0], batch

    @torch.inference_mode()
    def __call__(self, prompts: Prompts, most: list[int]) -> int:
        tokens = 0
        for start in range(0, len(prompts), self.batch):
            rows, limits = prompts[start : start + self.batch], most[start : start + self.batch]
            longest = max(map(len, rows))
            ids = torch.tensor([[self.stop] * (longest - len(row)) + list(row) for row in rows])
            mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
            out = self.network.generate(  # type: ignore[operator]
                input_ids=ids, attention_mask=mask, max_new_tokens=max(limits), do_sample=False, pad_token_id=self.stop
            )[:, longest:]
            for row, limit in zip(out.tolist(), limits, strict=True):
                end = row.index(self.stop) + 1 if self.stop in row else len(row)
                tokens += min(end, limit)
        return tokens


if __name__ == "__main__":
    main()
