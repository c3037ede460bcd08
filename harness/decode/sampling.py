"""The streams of random numbers, and a decoding's settings as drawing takes them.

A number is computed only from (seed, problem, draw, position). So two cells write the same tokens until one of them
evicts, and a completion is the same after a resume, in any order of requests, with any number of slots.
"""

import hashlib
from typing import Any

import torch
from torch import Tensor

from kvsweep.harness.decode.request import SamplingConfig
from kvsweep.kernels.sampling import uniform


def sequence_key(*parts: object) -> int:
    """Hash the parts that name a stream of uniform numbers; return its key, a signed 64-bit integer."""
    text = "\x1f".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big", signed=True)


def uniforms_of_rows(stream: int, positions: Tensor) -> Tensor:
    """A uniform number per cache row: by position [length], or by layer and head too [layers, kv_heads, length]."""
    if positions.dim() == 1:
        return uniform(stream, positions)
    layers, heads, _ = positions.shape
    grid = torch.arange(layers * heads, device=positions.device).view(layers, heads, 1)
    # Positions are below 2**32, so each (layer, head) has its own range of counters.
    return uniform(stream, positions + ((grid + 1) << 32))


def cuts(config: SamplingConfig) -> dict[str, Any]:
    """Return the settings that `draw_tokens` of both implementations takes."""
    k_first = config.order == "top_k_then_top_p"
    return {"temperature": config.temperature, "top_p": config.top_p, "top_k": config.top_k, "k_first": k_first}
