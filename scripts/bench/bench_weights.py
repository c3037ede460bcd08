"""Steps with packed weights (`kernels.packed`) beside plain ones, and whether texts are the same at 1, 7 and 64 slots.

    python scripts/bench/bench_weights.py --slots 1 4 16 64 --rounds 5                 # float32
    python scripts/bench/bench_weights.py --slots 1 4 16 64 --rounds 5 --dtype bfloat16
    python scripts/bench/bench_weights.py model=qwen3_1_7b model.random_weights=true model.config.num_hidden_layers=4

Each contender decodes a problem a slot with the full cache, greedily, on one thread; a rate is tokens per second of
processor time, prompts left out. The contenders take turns of some steps each; a ratio is one of medians over the
rounds. The last line is one JSON object.
"""

import argparse
from dataclasses import replace
from itertools import islice
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
    words = [*args.settings, f"model.dtype={args.dtype}", "benchmark=toy_chain", f"benchmark.count={problems}"]
    job = make_job(compose_config(*words, f"benchmark.limit={problems}", "policy=full"))
    packed, plain = load(job, packed=True), load(job, packed=False)
    prompts = [packed.dialogue.prompt_ids(problem.prompt) for problem in job.benchmark.problems]
    rates: dict[str, float] = {}
    for slots in args.slots:
        contenders = {
            "packed": Steps(packed, prompts[:slots], args.rounds, args.steps).run,
            "plain": Steps(plain, prompts[:slots], args.rounds, args.steps).run,
        }
        found = medians(alternating(contenders, args.rounds))
        rates |= {f"{name}, {slots} slots": rate for name, rate in found.items()}
        ratio = found["packed"] / found["plain"]
        print(
            f"{slots:3} slots: packed {found['packed']:7.1f}, plain {found['plain']:7.1f} tokens/s, {ratio:.2f}",
            flush=True,
        )
    texts = {slots: decode(packed, prompts[:64], args.steps, slots) for slots in (1, 7, 64)}
    same = all(texts[slots] == texts[1] for slots in texts)
    print(f"texts at 1, 7 and 64 slots: {'the same' if same else 'different'}")
    conclude(args, tokens_per_second=rates, same_texts=same)


def load(job: Job, *, packed: bool) -> LoadedModel:
    with patch.object(ModelSpec, "packed", packed):
        return load_model(replace(job.model, threads=1))


class Steps:
    """The steps of one contender, which go on from round to round, once all prompts are read."""

    def __init__(self, model: LoadedModel, prompts: Prompts, rounds: int, steps: int) -> None:
        most = len(prompts) + (1 + rounds) * steps
        self.count = steps
        self.engine = engine_for(model, prompts, most, len(prompts))
        self.steps = self.engine.steps(ask(prompts, FullCache(name="full")))
        while self.engine.table.free:
            next(self.steps)

    def run(self) -> int:
        """Decode the steps of a round; return their tokens."""
        tokens = 0
        for _ in islice(self.steps, self.count):
            tokens += self.engine.table.slots - self.engine.table.free
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
    parser.add_argument("settings", nargs="*", default=["model=smollm2_135m"], help="KEY=VALUE, as of a sweep")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--slots", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--steps", type=int, default=12, help="of a round")
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args()


if __name__ == "__main__":
    main()
