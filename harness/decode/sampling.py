"""Drawing the next token: one uniform number per token, and one inverse CDF.

The number is a pure function of (seed, problem, draw, position). So two cells write the same tokens until one of them
evicts, and a completion is the same after a resume, in any order of requests, with any number of slots.
"""

import hashlib

import numpy as np
import torch
from torch import Tensor

from kvsweep.harness.decode.request import SamplingConfig

# In a larger vocabulary, finding the edge of the nucleus is faster than sorting.
_SORTED = 1024
# SplitMix64's constants, as the int64 of the same bits.
_GOLDEN, _MIX_1, _MIX_2 = (n - (1 << 64) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def sequence_key(*parts: object) -> int:
    """Hash the parts that name a stream of uniform numbers to its key, a signed integer of 64 bits."""
    text = "\x1f".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big", signed=True)


def uniform(keys: Tensor | int, counters: Tensor) -> Tensor:
    """Numbers in [0, 1), float64, for the streams `keys` at `counters` (int64, broadcast together).

    SplitMix64 (Steele, Lea, Flood 2014) of key + (counter + 1) * golden ratio; the top 53 bits make the number.
    """
    state = keys + (counters + 1) * _GOLDEN
    state = (state ^ _shift_right(state, 30)) * _MIX_1
    state = (state ^ _shift_right(state, 27)) * _MIX_2
    state = state ^ _shift_right(state, 31)
    return _shift_right(state, 11).double() * 2.0**-53


def uniforms_of_rows(stream: int, positions: Tensor) -> Tensor:
    """A uniform number per cache row, by position [length]; with [layers, kv_heads, length] by layer and head too."""
    if positions.dim() == 1:
        return uniform(stream, positions)
    layers, heads, _ = positions.shape
    grid = torch.arange(layers * heads, device=positions.device).view(layers, heads, 1)
    # Positions are below 2**32, so every (layer, head) has a range of counters of its own.
    return uniform(stream, positions + ((grid + 1) << 32))


def sample(logits: Tensor, uniforms: Tensor, config: SamplingConfig) -> Tensor:
    """Draw one token id per row of logits [rows, vocabulary] with uniforms [rows].

    The cumulative sum runs in the order of the vocabulary: in the order of probability, rounding could exchange two
    nearly equal tokens. For the same reason tokens of equal probability at the edge of a cut are kept together.
    """
    if config.temperature == 0:
        return logits.argmax(dim=-1)
    probabilities = torch.softmax(logits.float() / config.temperature, dim=-1)
    if config.top_p < 1 or 0 < config.top_k < probabilities.shape[-1]:
        probabilities = probabilities.where(probabilities >= _least_kept(probabilities, config), 0.0)
    cumulative = probabilities.double().cumsum(dim=-1)
    # A target is strictly below the total, so that a tail of zeros is never chosen.
    targets = uniforms[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, targets, right=True).clamp_(max=cumulative.shape[-1] - 1).squeeze(-1)


def _least_kept(probabilities: Tensor, config: SamplingConfig) -> Tensor:
    """The lowest probability that top_k and top_p keep, [rows, 1]."""
    if not config.top_k and probabilities.shape[-1] > _SORTED:
        return _nucleus_edge(probabilities, config.top_p)
    descending = _largest(probabilities, min(config.top_k or _SORTED, probabilities.shape[-1]))
    before = descending.cumsum(dim=-1) - descending
    edge: Tensor | float = config.top_p
    if config.top_k and config.order == "top_k_then_top_p":
        edge = config.top_p * descending.sum(-1, keepdim=True)
    return descending.masked_fill(before >= edge, torch.inf).amin(dim=-1, keepdim=True)


def _nucleus_edge(probabilities: Tensor, top_p: float) -> Tensor:
    """The lowest number, [rows, 1], such that all probabilities above it sum to less than `top_p`.

    A binary search over the bits of float32, which are ordered as their numbers: no sort, no wait for the device.
    """
    low = torch.zeros(len(probabilities), 1, dtype=torch.int32, device=probabilities.device)
    high = torch.full_like(low, 0x3F800000)  # 1.0
    for _ in range(30):
        middle = (low + high) >> 1
        above = probabilities.where(probabilities > middle.view(torch.float32), 0.0).sum(dim=-1, keepdim=True)
        holds = above < top_p
        low, high = torch.where(holds, low, middle + 1), torch.where(holds, middle, high)
    return high.view(torch.float32)


def _largest(probabilities: Tensor, count: int) -> Tensor:
    """The largest `count` probabilities of each row, descending; for all of them, sorting is faster than topk."""
    if count < probabilities.shape[-1]:
        return probabilities.topk(count, dim=-1).values
    if probabilities.device.type == "cpu":  # numpy sorts with vector instructions, torch does not
        return torch.from_numpy(np.sort(probabilities.numpy(), axis=-1)).flip(-1)
    return probabilities.sort(dim=-1, descending=True).values


def _shift_right(value: Tensor, bits: int) -> Tensor:
    """Shift right logically; the shift of int64 is arithmetic."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)
