"""The decode step over its floor: the time to read the weights and the live keys and values once.

    python scripts/bench/bench_roofline.py model=r1_qwen_7b --slots 1 32 256 --lengths 1024 5001 16384 --impl triton
    python scripts/bench/bench_roofline.py model=r1_llama_8b model.config.num_hidden_layers=2 \\
        model.config.hidden_size=256 model.config.intermediate_size=512 \\
        model.config.num_attention_heads=4 model.config.num_key_value_heads=2 model.config.head_dim=64 \\
        model.config.vocab_size=1000 model.dtype=float32 --slots 1 4 --lengths 64 256
    python scripts/bench/bench_roofline.py model=r1_qwen_7b --bits 16 4 --impl triton  # packed rows beside unpacked

The weights are random: speed and memory do not depend on them. Below 16 bits all rows but the newest 128 are packed,
and `of 16 bits` is the step's time over that of the same rows unpacked, in the same run. The floor is bytes over the
copy bandwidth measured here
(a copy of 1 GiB, or 256 MiB on a CPU; bytes read plus bytes written). A step is forward, logits and sampling, without
eviction, replayed from a graph where the engine would do so; times are medians of `--steps`. Sizes that do not fit are
named and left out. The last line is one JSON object.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext

import torch
from rounds import conclude
from torch import Tensor

from kvsweep.compression.cache import SlotCache
from kvsweep.compression.config import CacheConfig
from kvsweep.compression.storage import PackedRows
from kvsweep.harness.decode.graphs import StepGraphs
from kvsweep.harness.decode.memory import free_memory
from kvsweep.harness.decode.request import SamplingConfig
from kvsweep.harness.decode.sampling import sample
from kvsweep.harness.models.config import ModelConfig
from kvsweep.harness.models.load import load_model
from kvsweep.harness.models.loaded import LoadedModel
from kvsweep.harness.settings import build, compose_config


def main() -> None:
    args = parse_args()
    config = compose_config(*args.overrides, "model.random_weights=true")
    model = load_model(build(ModelConfig, "model", config.model))
    weights = weight_bytes(model)
    bandwidth = copy_bandwidth(model.device)
    print(f"weights {weights / 2**30:.2f} GiB, copy bandwidth {bandwidth / 1e9:.0f} GB/s, impl {args.impl}")
    head = (
        f"{'slots':>6}{'length':>8}{'bits':>6}{'step ms':>10}{'floor ms':>10}{'ratio':>7}{'tokens/s':>11}{'KV GiB':>9}"
    )
    print(head + "  of 16 bits" * (len(args.bits) > 1))
    rows, unpacked = [], dict[tuple[int, int], float]()
    for length, slots, bits in itertools.product(args.lengths, args.slots, args.bits):
        cache = CacheConfig(bits=bits)
        kv = slots * SlotCache.bytes_per_slot(model.shape, length, cache)
        if kv > 0.9 * free_memory(model.device):
            print(f"{slots:6}{length:8}{bits:6}  does not fit: {kv / 2**30:.1f} GiB of keys and values")
            continue
        seconds = step_seconds(model, slots, length, cache, args)
        floor = (weights + kv) / bandwidth
        rows.append(
            {"slots": slots, "length": length, "bits": bits, "seconds": seconds, "floor": floor, "kv_bytes": kv}
        )
        figures = f"{1000 * seconds:10.3f}{1000 * floor:10.3f}{seconds / floor:7.2f}{slots / seconds:11.0f}"
        if bits == 16:
            unpacked[length, slots] = seconds
        beside = f"{seconds / unpacked[length, slots]:12.2f}" if bits < 16 and (length, slots) in unpacked else ""
        print(f"{slots:6}{length:8}{bits:6}{figures}{kv / 2**30:9.3f}{beside}", flush=True)
    conclude(args, weights=weights, bandwidth=bandwidth, rows=rows)


def weight_bytes(model: LoadedModel) -> int:
    """Bytes that a step reads: all weights but the embedding's, of which it reads a row per slot, unless it is tied."""
    embedding, head = model.network.get_input_embeddings(), model.network.get_output_embeddings()
    tied = embedding.weight.data_ptr() == head.weight.data_ptr()
    total = sum(p.nbytes for p in {id(p): p for p in model.network.parameters()}.values())
    return total if tied else total - embedding.weight.nbytes


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second of a large copy, read and written bytes counted."""
    size = 2**30 if device.type == "cuda" else 2**28
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / median_seconds(lambda: target.copy_(source), device, 10)


@torch.inference_mode()
def step_seconds(model: LoadedModel, slots: int, length: int, config: CacheConfig, args: argparse.Namespace) -> float:
    """Median seconds of a step that finds every slot `length - 1` rows long."""
    cache = SlotCache(model.shape, slots=slots, capacity=length, device=model.device, impl=args.impl, config=config)
    cache.live = slots
    cache.positions[:] = torch.arange(length, device=model.device)
    if isinstance(cache.storage, PackedRows):
        cache.storage.counts.fill_(max(0, length - config.residual))
    tokens = torch.zeros(slots, dtype=torch.int64, device=model.device)
    positions = torch.full_like(tokens, length - 1)
    uniforms = torch.full((slots,), 0.5, dtype=torch.float64, device=model.device)
    sampling = SamplingConfig(temperature=0.6, top_p=0.95)

    def decode(rows: int) -> Tensor:
        cache.place_step(positions[:rows])
        return model.logits(model.step_hidden(tokens[:rows], positions[:rows], cache))

    graphs = StepGraphs(decode, slots=slots, timer=nullcontext) if StepGraphs.can_capture(model, cache) else None

    def step() -> Tensor:
        cache.lengths[:] = length - 1
        cache.device_lengths.fill_(length - 1)
        cache.count_step()
        logits = decode(slots) if graphs is None else graphs(slots, room=slots)
        return sample(logits, uniforms, sampling)

    return median_seconds(step, model.device, args.steps)


def median_seconds(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    for _ in range(3):
        work()
    times = []
    for _ in range(repeats):
        wait()
        start = time.perf_counter()
        work()
        wait()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("overrides", nargs="*", default=["model=r1_qwen_7b"], help="model=NAME and other KEY=VALUE")
    parser.add_argument("--slots", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 5001, 16384])
    parser.add_argument("--bits", type=int, nargs="+", choices=[16, 8, 4, 2], default=[16], help="of a stored number")
    parser.add_argument("--impl", default="torch", choices=["torch", "triton"])
    parser.add_argument("--steps", type=int, default=20)
    return parser.parse_args()


if __name__ == "__main__":
    main()
