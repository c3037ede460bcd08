"""Steps with packed weights (`kernels.packed`) beside plain ones, and whether texts are the same at 1, 7 and 64 slots.

    python scripts/bench/bench_weights.py --slots 1 4 16 64 --rounds 5                 # float32
    python scripts/bench/bench_weights.py --slots 1 4 16 64 --rounds 5 --dtype bfloat16

Each contender decodes a problem a slot with the full cache, greedily, on one thread; a rate is tokens per second of
processor time, prompts left out. The contenders take turns; a ratio is one of medians over the rounds. The last line
is one JSON object.
"""

import argparse
import time
from dataclasses import replace
from functools import partial
from unittest.mock import patch

from rounds import alternating, ask, conclude, medians

from kvsweep.compression.policies.full import FullCache
from kvsweep.harness.decode.engine import Engine
from kvsweep.harness.decode.request import DecodingConfig, SamplingConfig
from kvsweep.harness.models.load import load_model
from kvsweep.harness.models.loaded import LoadedModel
from kvsweep.harness.models.spec import ModelSpec
from kvsweep.harness.settings import compose_config
from kvsweep.harness.sweep.job import Job, make_job

Prompts = list[tuple[int, ...]]
Texts = dict[str, tuple[int, ...]]


def main() -> None:
    args = parse_args()
    problems = max(*args.slots, 64)
    words = [f"model={args.model}", f"model.dtype={args.dtype}", "benchmark=toy_chain", f"benchmark.count={problems}"]
    job = make_job(compose_config(*words, f"benchmark.limit={problems}", "policy=full"))
    packed, plain = load(job, packed=True), load(job, packed=False)
    prompts = [packed.dialogue.prompt_ids(problem.prompt) for problem in job.benchmark.problems]
    rates: dict[str, float] = {}
    for slots in args.slots:
        contenders = {
            "packed": Decoding(packed, prompts[:slots], args.tokens),
            "plain": Decoding(plain, prompts[:slots], args.tokens),
        }
        # The clock is the decoding's own, which stops while prompts are read.
        runs = {name: partial(run, contender) for name, contender in contenders.items()}
        alternating(runs, args.rounds)
        found = medians({name: contender.rates[1:] for name, contender in contenders.items()})
        rates |= {f"{name}, {slots} slots": rate for name, rate in found.items()}
        ratio = found["packed"] / found["plain"]
        print(
            f"{slots:3} slots: packed {found['packed']:7.1f}, plain {found['plain']:7.1f} tokens/s, {ratio:.2f}",
            flush=True,
        )
    texts = {slots: decode(packed, prompts[:64], args.tokens, slots) for slots in (1, 7, 64)}
    same = all(texts[slots] == texts[1] for slots in texts)
    print(f"texts at 1, 7 and 64 slots: {'the same' if same else 'different'}")
    conclude(args, tokens_per_second=rates, same_texts=same)


def load(job: Job, *, packed: bool) -> LoadedModel:
    with patch.object(ModelSpec, "packed", lambda spec, dtype: packed):
        return load_model(replace(job.model, threads=1))


class Decoding:
    """One contender: its model and prompts, and the rates so far."""

    def __init__(self, model: LoadedModel, prompts: Prompts, tokens: int) -> None:
        self.model, self.prompts, self.tokens = model, prompts, tokens
        self.rates: list[float] = []


def run(contender: Decoding) -> float:
    """Decode; note tokens per second of the steps behind the first, which reads the prompts."""
    prompts = contender.prompts
    engine = engine_for(contender.model, prompts, contender.tokens, len(prompts))
    steps = engine.steps(ask(prompts, FullCache(name="full")))
    next(steps)
    start = time.process_time()
    tokens = sum(completion.num_tokens - 1 for completions in steps for _, completion in completions)
    contender.rates.append(tokens / (time.process_time() - start))
    return tokens


def decode(model: LoadedModel, prompts: Prompts, tokens: int, slots: int) -> Texts:
    engine = engine_for(model, prompts, tokens, slots)
    completions = engine.generate(ask(prompts, FullCache(name="full")))
    return {completion.problem_id: tuple(completion.token_ids) for _, completion in completions}


def engine_for(model: LoadedModel, prompts: Prompts, tokens: int, slots: int) -> Engine:
    decoding = DecodingConfig(name="greedy", max_new_tokens=tokens, sampling=SamplingConfig(temperature=0))
    requests = ask(prompts, FullCache(name="full"))
    return Engine.sized_for(requests, model, decoding=decoding, seed=0, slots=slots)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2_135m")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--slots", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--tokens", type=int, default=24, help="of a text")
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args()


if __name__ == "__main__":
    main()
