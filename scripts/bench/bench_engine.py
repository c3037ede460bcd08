"""Live tokens per second of the engine on an embedded model, beside transformers.generate and a padded evicting loop.

    python scripts/bench/bench_engine.py --model toy_qwen --problems 160 --slots 1 20 64 96 --batches 20 1 80 --rounds 5
    python scripts/bench/bench_engine.py --invariance --slots 1 20 64  # beside false, in CPU time
    python scripts/bench/bench_engine.py --packed --slots 64 --model smollm2_135m  # packed rows beside unpacked ones

All contenders decode the same problems with the same sampling on one thread, one after the other in each round;
figures are medians over rounds. Only tokens that end up in a completion count, not those that a padded batch computes
after a row's end. The clock runs from the first prefill to the last completion, evictions included. Both peers decode
static batches: `generate` with the full cache, and a loop that follows DynTS's code (batch 20 there), which pads its
rows to the longest after every eviction. Our full cache runs twice: with as many slots as dynts, and with as many as
fit into the memory of those. "Products alone" is a bound and not a contender: only the matrix products of a step of
dynts, at the mean length of a slot. The last line is one JSON object.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from rounds import alternating, ask, conclude, medians
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from kvsweep.compression.config import UNPACKED, CacheConfig
from kvsweep.compression.policies.dynts import DynTS
from kvsweep.compression.policy import Policy
from kvsweep.compression.recorders import load_predictor
from kvsweep.harness.decode.engine import Engine
from kvsweep.harness.decode.memory import auto_slots
from kvsweep.harness.decode.request import DecodingConfig, needed_capacity
from kvsweep.harness.decode.sampling import cuts
from kvsweep.harness.models.load import load_model
from kvsweep.harness.models.loaded import LoadedModel
from kvsweep.harness.settings import compose_config
from kvsweep.harness.sweep.job import Job, make_job
from kvsweep.kernels.sampling import inverse_cdf

Prompts = list[tuple[int, ...]]


def main() -> None:
    args = parse_args()
    if args.invariance:
        conclude(args, invariance=invariance(args))
    elif args.packed:
        conclude(args, packed=packed(args))
    else:
        compare(args)


def compare(args: argparse.Namespace) -> None:
    job, model, prompts = prepare(args, args.problems)
    policies = {cell.policy.name: cell.policy for cell in job.cells}
    peer = Peer(stock_network(job), prompts, policies["dynts"], job.decoding)
    contenders: dict[str, Callable[[], int]] = {}
    for batch in args.batches:
        contenders[f"generate, batch {batch}"] = partial(peer.generate, batch)
        contenders[f"padded dynts loop, batch {batch}"] = partial(peer.evicting_loop, batch)
    shares: dict[str, dict[str, float]] = {}
    rows = {name: needed_capacity(ask(prompts, policy), job.decoding) for name, policy in policies.items()}
    for slots in args.slots:
        contenders[f"products alone, {slots} slots"] = products(model, prompts, policies["dynts"], slots)
        # The full cache twice: with as many slots, and with as many as the memory of dynts's slots holds.
        fitting = max(1, slots * rows["dynts"] // rows["full"])
        for name, count in (("full", slots), ("full", fitting), ("dynts", slots)):
            label = f"{name}, {count} slots"
            contenders[label] = ours(job, model, prompts, policies[name], count, shares.setdefault(label, {}))
    found = medians(alternating(contenders, args.rounds, time.perf_counter))
    base = found[f"generate, batch {args.batches[0]}"]
    print(f"{'contender':30}{'tokens/s':>10}{'ratio':>8}  share of the time: {', '.join(PARTS)}")
    for name, rate in found.items():
        parts = "  ".join(f"{value:.2f}" for value in shares.get(name, {}).values())
        print(f"{name:30}{rate:10.0f}{rate / base:8.2f}  {parts}")
    conclude(args, tokens_per_second=found, shares=shares)


PARTS = ("prefill", "forward", "sampling", "scoring", "eviction", "host")


def prepare(args: argparse.Namespace, problems: int) -> tuple[Job, LoadedModel, Prompts]:
    overrides = [f"model={args.model}", "benchmark=toy_chain", "experiment=demo_full", "grid.beside=[]"]
    overrides += [f"benchmark.count={problems}", f"benchmark.limit={problems}"]
    job = make_job(compose_config(*overrides, "grid.keep_ratio=[0.3]", "grid.local_window=[48]"))
    model = load_model(replace(job.model, threads=1))
    prompts = [model.dialogue.prompt_ids(p.prompt) for p in job.benchmark.problems]
    dynts = next(cell.policy for cell in job.cells if cell.policy.name == "dynts")
    chosen = auto_slots(model, ask(prompts, dynts), job.decoding).slots
    args.slots = [chosen if slots == "auto" else int(slots) for slots in args.slots]
    return job, model, prompts


def ours(
    job: Job,
    model: LoadedModel,
    prompts: Prompts,
    policy: Policy,
    slots: int,
    shares: dict[str, float],
    invariant: bool = True,
    cache: CacheConfig = UNPACKED,
) -> Callable[[], int]:
    requests, how = ask(prompts, policy), {"seed": 0, "slots": slots, "invariant": invariant, "cache": cache}

    def run() -> int:
        engine = Engine.sized_for(requests, model, decoding=job.decoding, **how)
        tokens = sum(completion.num_tokens for _, completion in engine.generate(requests))
        shares.update({part: getattr(engine.clock, part) / engine.clock.wall for part in PARTS})
        return tokens

    return run


def products(model: LoadedModel, prompts: Prompts, policy: Policy, slots: int) -> Callable[[], int]:
    """The matrix products of 200 steps, each slot as long as a text that is evicted is on average."""
    assert isinstance(policy, DynTS)
    question = round(statistics.mean(map(len, prompts)))
    least = policy.size
    length = question + (least + policy.budget) // 2
    shape, weights = model.shape, [m.weight for m in model.network.modules() if isinstance(m, nn.Linear)]
    inputs = {w.shape[1]: torch.randn(slots, w.shape[1]) for w in weights}
    query = torch.randn(slots, shape.kv_heads, shape.q_heads // shape.kv_heads, shape.head_dim)
    cache = torch.randn(shape.layers, 2, slots, shape.kv_heads, length, shape.head_dim)

    @torch.inference_mode()
    def run() -> int:
        for _ in range(200):
            for weight in weights:
                functional.linear(inputs[weight.shape[1]], weight)
            for keys, values in cache:
                torch.matmul(torch.matmul(query, keys.transpose(-1, -2)), values)
        return 200 * slots

    return run


def stock_network(job: Job) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(job.model.path, dtype=torch.float32).eval()


class Peer:
    """Static batches over a stock transformers model, every row to the end of its batch."""

    def __init__(self, network: PreTrainedModel, prompts: Prompts, policy: DynTS, decoding: DecodingConfig) -> None:
        self.network = network
        self.pad = self.network.generation_config.pad_token_id or 0
        eos = self.network.generation_config.eos_token_id
        self.stops = torch.tensor(eos if isinstance(eos, list) else [eos], device=network.device)
        self.head = load_predictor(Path(str(policy.predictor)), dtype=network.dtype).to(network.device)
        self.decoding, self.prompts, self.policy = decoding, prompts, policy

    def batches(self, size: int) -> list[tuple[Tensor, Tensor]]:
        """Token ids and mask [batch, longest], padded in front."""
        found = []
        for start in range(0, len(self.prompts), size):
            batch = self.prompts[start : start + size]
            width = max(map(len, batch))
            ids = torch.tensor([[self.pad] * (width - len(p)) + list(p) for p in batch])
            mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in batch])
            found.append((ids.to(self.network.device), mask.to(self.network.device)))
        return found

    @torch.inference_mode()
    def generate(self, batch: int) -> int:
        sampling, tokens = self.decoding.sampling, 0
        for ids, mask in self.batches(batch):
            written = self.network.generate(
                ids,
                attention_mask=mask,
                do_sample=True,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=0,
                max_new_tokens=self.decoding.max_new_tokens,
                pad_token_id=self.pad,
            )[:, ids.shape[1] :]
            tokens += self.live(written)
        return tokens

    def live(self, written: Tensor) -> int:
        """Tokens up to each row's first stop token."""
        ended = torch.isin(written, self.stops).long().cumsum(-1)
        return int((ended == 0).sum()) + int((ended[:, -1] > 0).sum())

    @torch.inference_mode()
    def evicting_loop(self, batch: int) -> int:
        return sum(self.live(self.decode(ids, mask)) for ids, mask in self.batches(batch))

    def uniform(self, positions: Tensor) -> Tensor:
        """A random number for the next token of each row, [batch], at its position in the text."""
        return torch.rand(len(positions), dtype=torch.float64, device=positions.device)

    def go_on(self) -> bool:
        """Whether the loop has time for another step."""
        return True

    def decode(self, ids: Tensor, mask: Tensor) -> Tensor:
        questions = mask.sum(-1)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        scores = torch.where(mask.bool(), torch.inf, -torch.inf)  # a question always stays, padding never
        cache, feed, written = DynamicCache(), ids, []
        done = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
        while len(written) < self.decoding.max_new_tokens and not done.all() and self.go_on():
            output = self.network.model(
                input_ids=feed, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
            )
            if written:
                scores = torch.cat([scores, self.head(output.last_hidden_state[:, -1:]).float()], dim=-1)
            if int((mask.sum(-1) - questions).max()) > self.policy.budget:
                mask, scores = self.evict(cache, mask, scores, questions)
            logits = self.network.lm_head(output.last_hidden_state[:, -1])
            token = inverse_cdf(logits, self.uniform(positions[:, -1] + 1), **cuts(self.decoding.sampling))
            written.append(token)
            done |= torch.isin(token, self.stops)
            feed, positions = token[:, None], positions[:, -1:] + 1
            mask = torch.cat([mask, mask.new_ones(len(ids), 1)], dim=-1)
        return torch.stack(written, dim=-1)

    def evict(self, cache: DynamicCache, mask: Tensor, scores: Tensor, questions: Tensor) -> tuple[Tensor, Tensor]:
        """Keep of every row that is due its question, its best and its newest; pad all rows to the longest again."""
        kept = []
        for row, question in enumerate(questions.tolist()):
            places = mask[row].nonzero()[:, 0]
            if len(places) - question > self.policy.budget:
                older, newest = places[: -self.policy.local_window], places[-self.policy.local_window :]
                count = question + int((len(older) - question) * self.policy.keep_ratio)
                places = torch.cat([older[scores[row, older].topk(count).indices.sort().values], newest])
            kept.append(places)
        width = max(map(len, kept))
        index = torch.stack([torch.cat([p.new_zeros(width - len(p)), p]) for p in kept])
        for layer in cache.layers:
            rows = index[:, None, :, None].expand(-1, layer.keys.shape[1], -1, layer.keys.shape[3])
            layer.keys, layer.values = layer.keys.gather(2, rows), layer.values.gather(2, rows)
        mask = torch.stack([torch.arange(width, device=mask.device) >= width - len(p) for p in kept]).to(mask.dtype)
        return mask, scores.gather(-1, index).where(mask.bool(), -torch.inf)


def invariance(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Live tokens per second of CPU time with and without `invariant`, in alternating rounds; medians.

    A problem per slot, four at least. The ratio is the median of the rounds' ratios.
    """
    job, model, prompts = prepare(args, args.problems)
    found = {}
    for cell, slots in itertools.product(job.cells, args.slots):
        asked = prompts[: max(4, slots)]
        runs = {name: ours(job, model, asked, cell.policy, slots, {}, name == "with") for name in ("with", "without")}
        found[f"{cell.policy.name}, {slots} slots"] = beside(runs, args.rounds)
    return found


def packed(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Live tokens per second of CPU time with packed rows and with unpacked ones, in alternating rounds; medians.

    All rows, and a window in a budget of 128. The ratio is that of the times, the median of the rounds' ratios.
    """
    settings = [f"model={args.model}", "benchmark=toy_chain", f"benchmark.count={args.problems}", "policy=window"]
    settings += ["policy.budget=128", "policy.local_window=64", "policy.keep_ratio=0.5", "grid.policy=[full,window]"]
    job = make_job(compose_config(*settings, f"decoding.max_new_tokens={args.tokens}"))
    model = load_model(replace(job.model, threads=1))
    prompts = [model.dialogue.prompt_ids(p.prompt) for p in job.benchmark.problems]
    found = {}
    for cell, slots in itertools.product(job.cells, args.slots):
        for scheme in ("rotated", "plain", "kivi"):
            caches = {"unpacked": UNPACKED, "4 bits": CacheConfig(bits=4, scheme=scheme, residual=job.cache.residual)}
            runs = {name: ours(job, model, prompts, cell.policy, slots, {}, True, c) for name, c in caches.items()}
            label = f"{cell.policy.name}, {slots} slots, {scheme}"
            print(label, end="", flush=True)
            found[label] = beside(runs, args.rounds)
    return found


def beside(runs: dict[str, Callable[[], int]], rounds: int) -> dict[str, float]:
    """Tokens per second of CPU time of two contenders, and their ratio, each the median over the rounds."""
    rates = alternating(runs, rounds)
    rates["ratio"] = [one / other for one, other in zip(*rates.values(), strict=True)]
    found = medians(rates)
    print("".join(f"{name:>10} {value:8.3f}" for name, value in found.items()), flush=True)
    return found


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="toy_qwen")
    parser.add_argument("--problems", type=int, default=160)
    parser.add_argument("--slots", nargs="+", default=["32", "64", "128"], help='"auto": as a sweep chooses')
    parser.add_argument("--batches", type=int, nargs="+", default=[20], help="of the peers; the first is the ratio's 1")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--invariance", action="store_true")
    parser.add_argument("--packed", action="store_true")
    parser.add_argument("--tokens", type=int, default=448, help="at most so many new tokens, with --packed")
    return parser.parse_args()


if __name__ == "__main__":
    main()
