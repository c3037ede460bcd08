"""What the parts share: the clock, the card's bandwidth, and a model with the sizes of R1-Distill-Qwen-7B."""

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from kvsweep.harness.decode.request import DecodingConfig, SamplingConfig
from kvsweep.harness.models.config import ModelConfig
from kvsweep.harness.models.load import load_model
from kvsweep.harness.models.loaded import LoadedModel
from kvsweep.harness.settings import build, compose_config
from kvsweep.harness.sweep.card import CARDS

SAMPLINGS = {
    "r1": SamplingConfig(temperature=0.6, top_p=0.95),
    "dynts": SamplingConfig(temperature=0.6, top_p=0.95, top_k=20, order="top_p_then_top_k"),
}
TINY = {
    "num_hidden_layers": 1,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 1100,
}


class Bandwidth(NamedTuple):
    """Bytes per second: read and written ones of a copy here, and those of the card's data sheet, if it is known."""

    copied: float
    specified: float | None


def on_gpu() -> bool:
    return torch.cuda.is_available()


def wait() -> None:
    """Wait until the GPU has done what it was given."""
    if on_gpu():
        torch.cuda.synchronize()


def free_gib() -> float | None:
    """GiB that the GPU has free; None without one."""
    return torch.cuda.mem_get_info()[0] / 2**30 if on_gpu() else None


def median_ms(work: Callable[[], object], repeats: int = 20) -> float:
    """The median of the milliseconds that the work takes, on the GPU's clock if there is one, after three calls."""
    for _ in range(3):
        work()
    return statistics.median(one_ms(work) for _ in range(repeats))


def one_ms(work: Callable[[], object]) -> float:
    if not on_gpu():
        start = time.perf_counter()
        work()
        return 1000 * (time.perf_counter() - start)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def bandwidth(small: bool) -> Bandwidth:
    """The bandwidth of this machine, by a copy of random data."""
    source = torch.randn(1 << (19 if small else 28), device="cuda" if on_gpu() else "cpu").bfloat16()
    target = torch.empty_like(source)
    copied = 2 * source.nbytes / median_ms(lambda: target.copy_(source)) * 1000
    name = torch.cuda.get_device_name() if on_gpu() else ""
    for card in CARDS.values():
        if card.title in name:  # such as "NVIDIA H100 80GB HBM3"
            return Bandwidth(copied, card.bandwidth)
    return Bandwidth(copied, None)


def random_r1(small: bool, **fields: int) -> LoadedModel:
    """R1-Distill-Qwen-7B with random weights and these fields of its configuration; `small` is a model for the CPU."""
    fields = {**(TINY if small else {}), **fields}
    words = ["model=r1_qwen_7b", "model.random_weights=true", *(f"model.config.{k}={v}" for k, v in fields.items())]
    words += ["model.dtype=float32", "model.threads=1"] if small else []
    return load_model(build(ModelConfig, "model", compose_config(*words).model))


def weight_bytes(model: LoadedModel) -> int:
    """The bytes of weights that a step reads: all but the embedding's, of which it reads a row for each slot."""
    network: Any = model.network
    return sum(weight.nbytes for weight in network.parameters()) - network.get_input_embeddings().weight.nbytes


def decoding_of(sampling: str, tokens: int) -> DecodingConfig:
    return DecodingConfig(name="bench", max_new_tokens=tokens, sampling=SAMPLINGS[sampling])


def random_ids(model: LoadedModel, *size: int, seed: int) -> torch.Tensor:
    """Random token ids on the CPU, of tokens that every vocabulary has."""
    vocabulary = min(1000, model.spec.vocab_size)
    return torch.randint(vocabulary, size, generator=torch.Generator().manual_seed(seed))
