"""Tokens per second of the full cache beside llama.cpp's own server: the same GGUF, prompts and texts at once.

    python scripts/llama_servers.py F16=8001 --parallel 16 &
    python scripts/bench/bench_llama.py http://127.0.0.1:8001 --texts 1 16 --tokens 96 --rounds 3
    python scripts/bench/bench_llama.py http://127.0.0.1:8001 model=qwen25_coder_1_5b model.gguf=FILE

Both decode greedily on one thread and get the same token ids, as many texts at once as `--texts` says. A text ends
after `--tokens` tokens, or where the model ends it. llama.cpp keeps the weights as the file has them and its cache in
16 bits; we read the weights as model.dtype. Both clocks include the prompts, llama.cpp's HTTP too. The contenders take
turns; figures are medians over rounds. The last line is one JSON object.
"""

import argparse
import json
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from time import perf_counter

from rounds import alternating, ask, conclude, medians

from kvsweep.compression.policies.full import FullCache
from kvsweep.harness.decode.engine import Engine
from kvsweep.harness.decode.request import DecodingConfig, SamplingConfig
from kvsweep.harness.models.load import load_model
from kvsweep.harness.models.loaded import LoadedModel
from kvsweep.harness.settings import compose_config
from kvsweep.harness.sweep.job import make_job

Prompts = list[tuple[int, ...]]


def main() -> None:
    args = parse_args()
    most = max(args.texts)
    words = [f"benchmark={args.benchmark}", f"benchmark.limit={most}", "policy=full", "decoding=greedy", *args.settings]
    job = make_job(compose_config(*words))
    contenders: dict[str, Callable[[], float]] = {}
    model = load_model(replace(job.model, threads=1))
    prompts = [model.dialogue.prompt_ids(problem.prompt) for problem in job.benchmark.problems]
    for texts in args.texts:
        for invariant in (True, False):
            name = f"ours, {texts} at once{'' if invariant else ', not invariant'}"
            contenders[name] = partial(ours, model, prompts[:texts], args.tokens, invariant)
        contenders[f"llama.cpp, {texts} at once"] = partial(theirs, args.server, prompts[:texts], args.tokens)
    found = medians(alternating(contenders, args.rounds, perf_counter))
    for name, rate in found.items():
        print(f"{name:36}{rate:8.1f} tokens/s")
    conclude(args, tokens_per_second=found)


def ours(model: LoadedModel, prompts: Prompts, tokens: int, invariant: bool) -> float:
    decoding = DecodingConfig(name="greedy", max_new_tokens=tokens, sampling=SamplingConfig(temperature=0))
    requests, how = ask(prompts, FullCache(name="full")), {"seed": 0, "slots": len(prompts), "invariant": invariant}
    engine = Engine.sized_for(requests, model, decoding=decoding, **how)
    return sum(completion.num_tokens for _, completion in engine.generate(requests))


def theirs(server: str, prompts: Prompts, tokens: int) -> float:
    with ThreadPoolExecutor(len(prompts)) as pool:
        return sum(pool.map(partial(_complete, server, tokens), prompts))


def _complete(server: str, tokens: int, prompt: tuple[int, ...]) -> int:
    body = {"prompt": list(prompt), "n_predict": tokens, "temperature": 0, "cache_prompt": False}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{server}/completion", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=600) as answer:
        return int(json.loads(answer.read())["tokens_predicted"])


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("server", help="address of llama.cpp's server, which has the same GGUF")
    parser.add_argument("settings", nargs="*", default=["model=smollm2_135m"], help="KEY=VALUE, as of a sweep")
    parser.add_argument("--benchmark", default="toy_chain")
    parser.add_argument("--texts", type=int, nargs="+", default=[1, 16], help="texts at once")
    parser.add_argument("--tokens", type=int, default=96, help="at most, of a text")
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
