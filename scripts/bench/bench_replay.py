"""Known texts in chunks against the same texts token by token, in one run: CPU seconds of one thread, or a GPU's.

`python scripts/bench/bench_replay.py` takes an embedded model and a Llama of 100 million random parameters. Both ways
feed the same tokens to the same engine with the same evictions, `--rounds` times in turn; a chunk ends after `--chunk`
tokens and at every eviction. The last line is one JSON object with the medians.
"""

import argparse
import random
import statistics
import time

import torch
from rounds import conclude

from kvsweep.compression.policies.h2o import H2O
from kvsweep.compression.policies.streaming_llm import StreamingLLM
from kvsweep.harness.decode import engine as engine_module
from kvsweep.harness.decode.engine import Engine
from kvsweep.harness.decode.request import Branch, DecodingConfig, Request, SamplingConfig
from kvsweep.harness.models.config import ModelConfig
from kvsweep.harness.models.load import LoadedModel, load_model
from kvsweep.harness.settings import build, compose_config, plain

RULE = {"keep_ratio": 0.5, "local_window": 32, "question": "on_top"}
LLAMA = {"model_type": "llama", "hidden_size": 768, "intermediate_size": 2304, "vocab_size": 8192}
LLAMA |= {"num_hidden_layers": 12, "num_attention_heads": 12, "num_key_value_heads": 4}


def models(names: list[str], device: str) -> dict[str, LoadedModel]:
    """The models to measure."""
    found = {}
    for name in names:
        weights = ["model.random_weights=true"] if name.startswith("r1") else []
        node = compose_config(f"model={'toy_llama' if name == 'llama_100m' else name}", *weights).model
        if name == "llama_100m":
            node = compose_config(
                "model=r1_llama_8b",
                "model.random_weights=true",
                "model.dtype=float32",
                *(f"++model.config.{key}={value}" for key, value in LLAMA.items()),
            ).model
        found[name] = load_model(build(ModelConfig, "model", {**plain(node), "threads": 1, "device": device}))
    return found


def measure(model: LoadedModel, policy: object, tokens: int, *, chunked: bool) -> float:
    """Seconds to feed a text of random tokens in one slot: of the CPU, or by the clock on a GPU."""
    dice = random.Random(0)
    ids = tuple(dice.randrange(3, min(96, model.network.config.vocab_size)) for _ in range(tokens))
    request = Request(
        problem_id="p",
        draw=0,
        prompt_ids=ids[:16],
        branches=(Branch(cell_id="c", policy=policy),),  # type: ignore[arg-type]
        forced=ids,
        replayed=True,
    )
    decoding = DecodingConfig(name="bench", max_new_tokens=tokens, sampling=SamplingConfig(temperature=0))
    engine = Engine.sized_for([request], model, decoding=decoding, seed=0, slots=1, invariant=False)
    on_gpu = model.device.type == "cuda"
    clock = time.perf_counter if on_gpu else time.process_time
    begin = clock()
    if chunked:
        fed = sum(len(model.logits(part.hidden)) for step in engine.replay([request]) for part in step)
    else:
        fed = sum(completion.num_tokens for _, completion in engine.generate([request]))
    assert fed == tokens
    if on_gpu:
        torch.cuda.synchronize()
    return clock() - begin


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=["toy_qwen", "llama_100m"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--chunk", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    engine_module._MOST_FED = given.chunk
    results = {}
    kinds = StreamingLLM(name="streaming_llm", sinks=4, budget=160, **RULE), H2O(name="h2o", budget=160, **RULE)
    for name, model in models(given.models, given.device).items():
        for policy in kinds:
            measure(model, policy, 64, chunked=True)
            rounds = [
                [measure(model, policy, given.tokens, chunked=c) for c in (False, True)] for _ in range(given.rounds)
            ]
            steps, chunks = (statistics.median(column) for column in zip(*rounds, strict=True))
            rates = {"times": steps / chunks, "chunked_tokens_per_second": given.tokens / chunks}
            results[f"{name} {policy.name}"] = {"steps": steps, "chunks": chunks, **rates}
            line = f"token by token {steps:7.2f} s, chunks {chunks:6.2f} s: {steps / chunks:.1f} times"
            print(f"{name:12} {policy.name:14} {line}", flush=True)
    conclude(given, seconds=results)


if __name__ == "__main__":
    main()
