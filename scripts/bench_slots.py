"""Live tokens per second on an embedded model, by number of slots, beside transformers.generate in static batches.

    python scripts/bench_slots.py --model toy_qwen --problems 160 --slots 16 32 64 128 --rounds 5

Every contender decodes the same problems with the same sampling, one after the other in each round; figures are medians
over rounds. Tokens are those that end up in a completion: rows that ride along after their end do not count. Prints a
table; the last line is one JSON object.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from hydra import compose, initialize_config_dir
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from harness.config import CONF, Job, plan
from harness.engine import Branch, Engine, Request
from harness.models import LoadedModel, load_model
from harness.provenance import describe_code, describe_hardware

PEER_BATCH = 20


def main() -> None:
    args = parse_args()
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        overrides = [
            f"model={args.model}",
            "benchmark=toy_chain",
            f"benchmark.count={args.problems}",
            f"benchmark.limit={args.problems}",
            "experiment=demo",
        ]
        job = plan(compose("config", overrides=[*overrides, "grid.keep_ratio=[0.3]", "grid.local_window=[48]"]))
    model = load_model(replace(job.model, threads=1))
    prompts = [model.prompt_ids(p.prompt) for p in job.benchmark.problems]
    policies = {cell.policy.name: cell.policy for cell in job.cells}
    contenders: dict[str, Callable[[], int]] = {"generate, batch 20": peer(job, model, prompts)}
    for slots in args.slots:
        for name in ("full", "dynts"):
            contenders[f"{name}, {slots} slots"] = ours(job, model, prompts, policies[name], slots)
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in tqdm(range(args.rounds + 1), desc="rounds, the first not counted"):
        for name, contender in contenders.items():
            start = time.perf_counter()
            tokens = contender()
            rates[name].append(tokens / (time.perf_counter() - start))
    report(args, {name: statistics.median(figures[1:]) for name, figures in rates.items()})


def ours(job: Job, model: LoadedModel, prompts: list[tuple[int, ...]], policy, slots: int) -> Callable[[], int]:
    branches = (Branch(cell_id="bench", policy=policy),)
    requests = [Request(problem_id=str(i), draw=0, prompt_ids=p, branches=branches) for i, p in enumerate(prompts)]

    def run() -> int:
        engine = Engine.sized_for(requests, model, decoding=job.decoding, seed=0, slots=slots)
        return sum(completion.num_tokens for _, completion in engine.generate(requests))

    return run


def peer(job: Job, model: LoadedModel, prompts: list[tuple[int, ...]]) -> Callable[[], int]:
    network = AutoModelForCausalLM.from_pretrained(job.model.path, dtype=torch.float32).eval()
    sampling, pad = job.decoding.sampling, model.tokenizer.pad_token_id

    @torch.inference_mode()
    def run() -> int:
        tokens = 0
        for start in range(0, len(prompts), PEER_BATCH):
            batch = prompts[start : start + PEER_BATCH]
            width = max(map(len, batch))
            ids = torch.tensor([[pad] * (width - len(p)) + list(p) for p in batch])
            written = network.generate(
                ids,
                attention_mask=(ids != pad).long(),
                do_sample=True,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=0,
                max_new_tokens=job.decoding.max_new_tokens,
                pad_token_id=pad,
            )[:, width:]
            tokens += int((written != pad).sum())
        return tokens

    return run


def report(args: argparse.Namespace, medians: dict[str, float]) -> None:
    base = medians["generate, batch 20"]
    print(f"{'contender':24}{'tokens/s':>10}{'ratio':>8}")
    for name, rate in medians.items():
        print(f"{name:24}{rate:10.0f}{rate / base:8.2f}")
    code = describe_code()
    print(json.dumps({**vars(args), "tokens_per_second": medians, "hardware": describe_hardware(), "code": code}))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="toy_qwen")
    parser.add_argument("--problems", type=int, default=160)
    parser.add_argument("--slots", type=int, nargs="+", default=[16, 32, 64, 128])
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args()


if __name__ == "__main__":
    main()
