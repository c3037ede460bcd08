"""Drawing the next token: one uniform number per token, a pure function of where the token stands, and one inverse CDF.

The number depends on (seed, problem, draw, position) and never on the cell, the slot or the batch. So two cells write
the same tokens until one of them evicts, and a completion is the same after a resume, in any order, with any slots.
"""

import hashlib
import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from analysis.records import UserError

SamplingOrder = Literal["top_k_then_top_p", "top_p_then_top_k"]
ORDERS: tuple[SamplingOrder, ...] = ("top_k_then_top_p", "top_p_then_top_k")

# Sorting a vocabulary of many thousands costs more than finding the edge of its nucleus.
_SORTED = 1024

# Divided by less, logits would leave the range of float32.
_COLDEST = 1e-3
_MASK = (1 << 64) - 1
_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How tokens are drawn.

    Attributes:
        temperature: divides the logits; 0 takes the most likely token.
        top_p: nucleus mass in (0, 1]; the token that crosses it is kept.
        top_k: number of most likely tokens kept; 0 keeps all.
        order: which cut comes first. "top_k_then_top_p" measures the nucleus on the renormalised top k (transformers,
            vLLM); "top_p_then_top_k" on the whole distribution (DynTS).

    Raises:
        UserError: a field out of its range.
    """

    temperature: float
    top_p: float = 1.0
    top_k: int = 0
    order: SamplingOrder = "top_k_then_top_p"

    def __post_init__(self) -> None:
        if not (self.temperature == 0 or _COLDEST <= self.temperature < math.inf):
            raise UserError(
                f"decoding.temperature={self.temperature} is out of range: 0 (greedy), or {_COLDEST} and above."
            )
        if not 0 < self.top_p <= 1:
            raise UserError(f"decoding.top_p={self.top_p} is out of range: above 0 and at most 1 (1 keeps all).")
        if self.top_k < 0:
            raise UserError(f"decoding.top_k={self.top_k} is out of range: 0 (keeps all) or above.")
        if self.order not in ORDERS:
            raise UserError(f"decoding.order={self.order} is unknown: choose one of {', '.join(ORDERS)}.")


def sequence_key(*parts: object) -> int:
    """Sixty-four bits that name a stream of uniform numbers, as a signed integer: same parts, same stream, anywhere."""
    text = "\x1f".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big", signed=True)


def uniform(keys: Tensor | int, counters: Tensor) -> Tensor:
    """Numbers in [0, 1), float64, for the streams `keys` at `counters` (int64, broadcast together).

    SplitMix64 (Steele, Lea, Flood 2014) of key + (counter + 1) * golden ratio; the top 53 bits make the number.
    """
    state = keys + (counters + 1) * _signed(_GOLDEN)
    state = (state ^ _shift_right(state, 30)) * _signed(_MIX_1)
    state = (state ^ _shift_right(state, 27)) * _signed(_MIX_2)
    state = state ^ _shift_right(state, 31)
    return _shift_right(state, 11).double() * 2.0**-53


def uniforms_of_rows(stream: int, positions: Tensor) -> Tensor:
    """A number per cache row, by its position [length] and, given [layers, kv_heads, length], by layer and head."""
    if positions.dim() == 1:
        return uniform(stream, positions)
    layers, heads, _ = positions.shape
    grid = torch.arange(layers * heads, device=positions.device).view(layers, heads, 1)
    # Positions stay below 2**32: every (layer, head) counts in a range of its own.
    return uniform(stream, positions + ((grid + 1) << 32))


def sample(logits: Tensor, uniforms: Tensor, config: SamplingConfig) -> Tensor:
    """Draw one token id per row of logits [rows, vocabulary] with uniforms [rows].

    The cumulative sum runs over the kept tokens in vocabulary order: sorted by probability, two near-equal tokens would
    swap places under rounding noise, and a sequence would depend on its batch. For the same reason tokens of equal
    probability at the edge of a cut are kept together.
    """
    if config.temperature == 0:
        return logits.argmax(dim=-1)
    probabilities = torch.softmax(logits.float() / config.temperature, dim=-1)
    if config.top_p < 1 or 0 < config.top_k < probabilities.shape[-1]:
        probabilities = probabilities.where(probabilities >= _least_kept(probabilities, config), 0.0)
    cumulative = probabilities.double().cumsum(dim=-1)
    # Strictly below the total, so that a row of zeros at the end is never chosen.
    targets = uniforms[:, None] * cumulative[:, -1:]
    chosen = torch.searchsorted(cumulative, targets, right=True).clamp_(max=cumulative.shape[-1] - 1)
    return chosen.squeeze(-1)


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
    """The lowest number, [rows, 1], of which those above hold less than `top_p`.

    Halving over the bits of float32, whose order is that of the numbers: nothing is sorted, and the host asks nothing.
    """
    rows = probabilities.shape[0]
    low = torch.zeros(rows, 1, dtype=torch.int32, device=probabilities.device)
    high = torch.full_like(low, 0x3F800000)  # 1.0
    for _ in range(30):
        middle = (low + high) >> 1
        above = probabilities.where(probabilities > middle.view(torch.float32), 0.0).sum(dim=-1, keepdim=True)
        holds = above < top_p
        low, high = torch.where(holds, low, middle + 1), torch.where(holds, middle, high)
    return high.view(torch.float32)


def _largest(probabilities: Tensor, count: int) -> Tensor:
    """The largest `count` of each row, descending; sorting is the faster way to have them all."""
    if count < probabilities.shape[-1]:
        return probabilities.topk(count, dim=-1).values
    if probabilities.device.type == "cpu":  # numpy sorts with vector instructions, torch without
        return torch.from_numpy(np.sort(probabilities.numpy(), axis=-1)).flip(-1)
    return probabilities.sort(dim=-1, descending=True).values


def _shift_right(value: Tensor, bits: int) -> Tensor:
    """Logical shift: int64 has only the arithmetic one."""
    return (value >> bits) & (_MASK >> bits)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
