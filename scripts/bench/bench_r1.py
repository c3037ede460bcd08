"""Whole texts at the sizes of an R1 distillation: DynTS beside the full cache and transformers, each on its own.

    python scripts/bench/bench_r1.py model=r1_qwen_7b --contenders dynts full padded generate continuous --impl triton
    python scripts/bench/bench_r1.py model=r1_llama_8b model.config.num_hidden_layers=2 model.config.hidden_size=256 \
        model.config.intermediate_size=512 model.config.num_attention_heads=4 model.config.num_key_value_heads=2 \
        model.config.head_dim=64 model.config.vocab_size=1000 model.dtype=float32 policy.budget=96 \
        policy.local_window=32 --tokens 256 --question 40 --seconds 20 --batches 4

- dynts, full: our engine with `slots=auto` and as many texts as slots, under --impl.
- padded: a loop over transformers that evicts as the DynTS code does, in one static batch of 20 (--batches).
- generate: transformers' `generate` with a static cache, at each batch of --batches; the best counts.
- continuous: transformers' continuous batching (`generate_batch`), as many texts as our full cache has slots.

The weights are random, the importance head's too: speed and memory do not depend on them. Stop tokens are suppressed,
so each text has --tokens tokens. Every contender has a process of its own. A contender that has not ended after
--seconds of decoding is stopped, and its rate is that of the tokens so far, which were the cheaper ones; `share` says
how much of its texts it wrote. Peak memory is the allocator's on a GPU; `analytic` is weights plus allocated slots.
The last line is one JSON object.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bench_engine import PARTS, Peer
from rounds import ask, conclude, in_own_process
from transformers import GenerationConfig, StaticCache
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from kvsweep.compression.cache import SlotCache
from kvsweep.compression.policies.dynts import DynTS
from kvsweep.compression.policies.full import FullCache
from kvsweep.compression.policy import Policy
from kvsweep.compression.recorders import ImportancePredictor, save_predictor
from kvsweep.harness.decode.engine import Engine
from kvsweep.harness.decode.request import DecodingConfig, build_decoding, needed_capacity
from kvsweep.harness.models.config import ModelConfig
from kvsweep.harness.models.load import load_model
from kvsweep.harness.models.loaded import LoadedModel
from kvsweep.harness.settings import build, compose_config

CONTENDERS = ("dynts", "full", "padded", "generate", "continuous")


class OutOfTime(Exception):
    """The contender has decoded for --seconds."""


def main() -> None:
    args = parse_args()
    if args.contender:
        print(json.dumps(measure(args)))
        return
    found: dict[str, dict[str, Any]] = {}
    for contender in args.contenders:
        for batch in args.batches if contender == "generate" else args.batches[:1] if contender == "padded" else [0]:
            label = f"{contender}, batch {batch}" if batch else contender
            found[label] = in_own_process("--contender", contender, "--batch", str(batch))
            print(
                f"{label:22}" + "  ".join(f"{name} {short(value)}" for name, value in found[label].items()), flush=True
            )
    rates = {label: figures.get("tokens_per_second", 0.0) for label, figures in found.items()}
    for label, rate in rates.items():
        if rate:
            print(f"dynts / {label}: {rates.get('dynts', 0.0) / rate:.2f} times the live tokens/s")
    conclude(args, found=found)


def short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        overrides = ["model=r1_qwen_7b", "decoding=dynts", "policy.keep_ratio=0.4", "policy.local_window=2000"]
        fixed = ["model.random_weights=true", f"decoding.max_new_tokens={args.tokens}", f"model.predictor={folder}"]
        config = compose_config(*overrides, *args.overrides, *fixed)
        model = load_model(build(ModelConfig, "model", config.model))
        torch.manual_seed(0)
        widths = args.head_widths
        save_predictor(ImportancePredictor(model.network.config.hidden_size, widths).bfloat16(), Path(folder), {})
        settings = {name: config.policy[name] for name in ("keep_ratio", "budget", "local_window", "predictor")}
        policy = DynTS(name="dynts", **settings)
        run: Callable[[], dict[str, Any]] = {
            "dynts": lambda: ours(args, model, policy, build_decoding(config.decoding)),
            "full": lambda: ours(args, model, FullCache(name="full"), build_decoding(config.decoding)),
            "padded": lambda: padded(args, model, policy, build_decoding(config.decoding)),
            "generate": lambda: generate(args, model),
            "continuous": lambda: continuous(args, model),
        }[args.contender]
        found = run()
    if model.device.type == "cuda":
        found["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return found


def questions(args: argparse.Namespace, model: LoadedModel, count: int) -> list[tuple[int, ...]]:
    """Random token ids, a question of --question tokens per text."""
    generator = torch.Generator().manual_seed(1)
    vocabulary = model.network.config.vocab_size
    return [tuple(row) for row in torch.randint(vocabulary, (count, args.question), generator=generator).tolist()]


def figures(args: argparse.Namespace, tokens: int, texts: int, seconds: float, **more: Any) -> dict[str, Any]:
    share = tokens / (texts * args.tokens)
    return {"tokens_per_second": tokens / seconds, "texts": texts, "share": share, "seconds": seconds, **more}


def ours(args: argparse.Namespace, model: LoadedModel, policy: Policy, decoding: DecodingConfig) -> dict[str, Any]:
    wanted = ask(questions(args, model, args.texts), policy)
    engine = Engine.sized_for(wanted, model, decoding=decoding, seed=0, impl=args.impl, invariant=args.invariant)
    slots = engine.table.slots
    engine.stop_ids = torch.tensor([-1], device=model.device)
    step = engine._step

    def timed(*arguments: Any) -> Any:
        if engine.clock.wall > args.seconds:
            raise OutOfTime
        return step(*arguments)

    engine._step = timed  # type: ignore[method-assign]
    texts = wanted[:slots]
    try:
        for _ in engine.generate(texts):
            pass
    except OutOfTime:
        pass
    clock = engine.clock
    shares = {part: getattr(clock, part) / clock.wall for part in PARTS}
    slot = SlotCache.bytes_per_slot(model.shape, needed_capacity(wanted, decoding))
    allocated = {"weights_gib": weights_gib(model), "slots_gib": engine.cache.kv_bytes / 2**30}
    return figures(
        args,
        clock.tokens,
        len(texts),
        clock.wall,
        step_ms=1000 * clock.decode / clock.steps,
        first_token=clock.first_token,
        analytic_gib=allocated["weights_gib"] + slots * slot / 2**30,
        **allocated,
        **shares,
    )


def weights_gib(model: LoadedModel) -> float:
    return sum(p.nbytes for p in {id(p): p for p in model.network.parameters()}.values()) / 2**30


def stock_network(model: LoadedModel) -> Any:
    """The model's network with transformers' own attention in the place of ours."""
    network: Any = model.network
    network.set_attn_implementation("sdpa")
    network.generation_config = GenerationConfig(eos_token_id=-1, pad_token_id=0)
    return network


class TimedPeer(Peer):
    """The padded loop that stops after --seconds of decoding."""

    def __init__(self, args: argparse.Namespace, network: Any, prompts: Any, policy: DynTS, decoding: DecodingConfig):
        super().__init__(network, prompts, policy, decoding)
        self.seconds, self.start = args.seconds, 0.0
        self.stops = torch.tensor([-1], device=network.device)

    def go_on(self) -> bool:
        if not self.start:
            self.start = time.perf_counter()
        return time.perf_counter() - self.start < self.seconds


def padded(args: argparse.Namespace, model: LoadedModel, policy: DynTS, decoding: DecodingConfig) -> dict[str, Any]:
    prompts = questions(args, model, args.batch)
    peer = TimedPeer(args, stock_network(model), prompts, policy, decoding)
    start = time.perf_counter()
    tokens = peer.evicting_loop(args.batch)
    return figures(args, tokens, args.batch, time.perf_counter() - start)


@torch.inference_mode()
def generate(args: argparse.Namespace, model: LoadedModel) -> dict[str, Any]:
    """A warm-up of 8 tokens compiles the step where transformers does so; the clock runs after it."""
    prompts = torch.tensor(questions(args, model, args.batch), device=model.device)
    network = stock_network(model)
    cache = StaticCache(config=network.config, max_cache_len=args.question + args.tokens)
    seconds, written = 0.0, prompts
    for tokens in (8, args.tokens):
        cache.reset()
        start = time.perf_counter()
        written = network.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            past_key_values=cache,
            max_new_tokens=tokens,
            max_time=float(args.seconds),
            do_sample=True,
            temperature=0.6,
            top_p=0.95,
            top_k=0,
        )
        seconds = time.perf_counter() - start
    return figures(args, written.numel() - prompts.numel(), args.batch, seconds)


def continuous(args: argparse.Namespace, model: LoadedModel) -> dict[str, Any]:
    """As many texts as fit into the memory that is left; each token arrives as it is written."""
    slot = SlotCache.bytes_per_slot(model.shape, args.question + args.tokens)
    free = torch.cuda.mem_get_info()[0] if model.device.type == "cuda" else 0
    texts = min(args.texts, max(1, int(0.8 * free) // slot)) if free else min(args.texts, 16)
    prompts = [list(prompt) for prompt in questions(args, model, texts)]
    network = stock_network(model)
    sampling = GenerationConfig(
        max_new_tokens=args.tokens,
        do_sample=True,
        temperature=0.6,
        top_p=0.95,
        top_k=0,
        eos_token_id=-1,
        pad_token_id=0,
    )
    lengths: dict[str, int] = {}
    config = ContinuousBatchingConfig(allow_block_sharing=False)
    with network.continuous_batching_context_manager(
        generation_config=sampling, continuous_batching_config=config, block=False
    ) as manager:
        start = time.perf_counter()
        manager.add_requests(prompts, max_new_tokens=args.tokens, streaming=True)
        ended = 0
        while ended < texts and time.perf_counter() - start < args.seconds and manager.is_running():
            result = manager.get_result(timeout=1)
            if result is not None:
                lengths[result.request_id] = len(result.generated_tokens)
                ended += result.is_finished()
        seconds, tokens = time.perf_counter() - start, sum(lengths.values())
        for request in lengths:
            manager.cancel_request(request)
    return figures(args, tokens, texts, seconds)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("overrides", nargs="*", help="model=NAME and other KEY=VALUE of the model, the policy and the decoding")
    add("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    add("--tokens", type=int, default=16384, help="of every text")
    add("--question", type=int, default=250, help="tokens of every question")
    add("--texts", type=int, default=256, help="at most so many at once")
    add("--seconds", type=float, default=100, help="of decoding for each contender")
    add("--batches", type=int, nargs="+", default=[20, 64], help="of generate; the first is the padded loop's")
    add("--impl", choices=["torch", "triton"], default="torch")
    add("--invariant", type=lambda word: word == "true", default=None, metavar="true|false")
    add("--head-widths", type=int, nargs="+", default=[8192, 2048], help="of the importance head")
    add("--contender", choices=CONTENDERS, help=argparse.SUPPRESS)
    add("--batch", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
