"""One part of the quarter hour: its last line is one JSON object, and its exit status is 1 if a piece of it failed.

    python scripts/bench/gpu_day/parts.py step [--small]

Every number is of random data, never of zeros. `--small` takes shapes for a CPU, with TRITON_INTERPRET=1.
"""

import argparse
import importlib.metadata
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import GenerationConfig, StaticCache

from kvsweep.harness.provenance import describe_machine
from scripts.bench.gpu_day.bits import bits
from scripts.bench.gpu_day.common import bandwidth, median_ms, on_gpu, random_ids, random_r1, wait
from scripts.bench.gpu_day.step import step

PACKAGES = ("torch", "triton", "transformers", "tokenizers", "numpy", "hydra-core", "math-verify")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    found = PARTS[args.part](args.small)
    print(json.dumps(found, default=str))
    sys.exit(any("failed" in row for row in found.get("rows", [])))


def card(small: bool) -> dict[str, Any]:
    """What this machine is, and what it copies and multiplies per second."""
    width = 256 if small else 8192
    one, other = torch.randn(2, width, width, device="cuda" if on_gpu() else "cpu").bfloat16()
    found: dict[str, Any] = {
        **bandwidth(small)._asdict(),
        "flops": 2 * width**3 / median_ms(lambda: one @ other, 10) * 1000,
    }
    found |= {"packages": {name: importlib.metadata.version(name) for name in PACKAGES}, **describe_machine()}
    if on_gpu():
        found |= {"memory": torch.cuda.mem_get_info(), "tf32": torch.backends.cuda.matmul.allow_tf32}
    return found


@torch.inference_mode()
def generate(small: bool, *, compiled: bool) -> dict[str, Any]:
    """A step of transformers' `generate`, which attends over all rows of its static cache from the first step on."""
    model = random_r1(small)
    network: Any = model.network
    network.set_attn_implementation("sdpa")
    network.generation_config = GenerationConfig(eos_token_id=-1, pad_token_id=0)
    batch, rows, question = (2, 64, 8) if small else (64, 4160, 16)
    prompts = random_ids(model, batch, question, seed=1).to(model.device)
    cache, seconds = StaticCache(config=network.config, max_cache_len=rows), dict[int, float]()
    for tokens in (4, 8, 24):  # the difference between the last two is 16 steps without the prompt
        cache.reset()
        wait()
        start = time.perf_counter()
        network.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            past_key_values=cache,
            max_new_tokens=tokens,
            do_sample=True,
            temperature=0.6,
            top_p=0.95,
            top_k=0,
            disable_compile=not compiled,
        )
        wait()
        seconds[tokens] = time.perf_counter() - start
    ms = 1000 * (seconds[24] - seconds[8]) / 16
    found = {"batch": batch, "rows_each": rows, "compiled": compiled, "step_ms": ms}
    return found | {"first_call_seconds": seconds[4], "tokens_per_second": 1000 * batch / ms}


PARTS: dict[str, Callable[[bool], dict[str, Any]]] = {
    "card": card,
    "step": step,
    "bits": bits,
    "generate": partial(generate, compiled=False),
    "generate_compiled": partial(generate, compiled=True),
}

if __name__ == "__main__":
    main()
