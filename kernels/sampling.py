"""Draw tokens in plain torch, with one uniform number per token and one inverse CDF.

The number is computed only from its stream's key and a counter. `kernels.draw_tokens` implements this specification.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

# For a larger vocabulary, a search for the nucleus's edge is faster than sorting.
_SORTED = 1024
# SplitMix64's constants, as int64 with the same bits.
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


def uniform(keys: Tensor | int, counters: Tensor) -> Tensor:
    """Return numbers in [0, 1), float64, for the streams `keys` at `counters` (int64, broadcast together).

    SplitMix64 (Steele, Lea, Flood 2014) of key + (counter + 1) * golden ratio; the top 53 bits make the number.
    """
    state = keys + (counters + 1) * _GOLDEN
    state = (state ^ _shift_right(state, 30)) * _MIX_1
    state = (state ^ _shift_right(state, 27)) * _MIX_2
    state = state ^ _shift_right(state, 31)
    return _shift_right(state, 11).double() * 2.0**-53


def draw_tokens(logits: Tensor, keys: Tensor, counters: Tensor, **settings: Any) -> Tensor:
    """Draw a token id [rows] for each row of logits [rows, vocabulary], with the numbers of `uniform(keys, counters)`.

    keys, counters [rows]; `settings` are the keywords of `inverse_cdf`.
    """
    return inverse_cdf(logits, uniform(keys, counters), **settings)


def inverse_cdf(
    logits: Tensor, uniforms: Tensor, *, temperature: float, top_p: float, top_k: int, k_first: bool
) -> Tensor:
    """Draw a token id [rows] for each row of logits [rows, vocabulary] with uniforms [rows].

    `temperature` 0 takes the largest logit; `top_k` 0 keeps all. `k_first`: apply the nucleus `top_p` to what top_k
    keeps; otherwise apply both cuts to the whole distribution. The cumulative sum runs in vocabulary order: in the
    order of probability, rounding could swap two nearly equal tokens. For the same reason, tokens of equal probability
    at the edge of a cut are kept together.
    """
    if temperature == 0:
        return logits.argmax(dim=-1)
    probabilities = torch.softmax(logits.float() / temperature, dim=-1)
    if top_p < 1 or 0 < top_k < probabilities.shape[-1]:
        least = _least_kept(probabilities, top_p, top_k, k_first)
        probabilities = probabilities.where(probabilities >= least, 0.0)
    cumulative = probabilities.double().cumsum(dim=-1)
    # A target is strictly below the total, so a tail of zeros is never chosen. The clamp is for a row of NaN, which has
    # no place for it: its token is dropped later.
    targets = uniforms[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, targets, right=True).clamp_(max=cumulative.shape[-1] - 1).squeeze(-1)


def _least_kept(probabilities: Tensor, top_p: float, top_k: int, k_first: bool) -> Tensor:
    """Return the lowest probability that top_k and top_p keep, [rows, 1]."""
    if not top_k and probabilities.shape[-1] > _SORTED:
        return _nucleus_edge(probabilities, top_p)
    # Without top_k the vocabulary is small here, and all of it is sorted.
    descending = _largest(probabilities, min(top_k or _SORTED, probabilities.shape[-1]))
    before = descending.cumsum(dim=-1) - descending  # the sum of all larger ones
    nucleus: Tensor | float = top_p
    if top_k and k_first:  # the nucleus is a share of what top_k keeps
        nucleus = top_p * descending.sum(-1, keepdim=True)
    return descending.masked_fill(before >= nucleus, torch.inf).amin(dim=-1, keepdim=True)


def _nucleus_edge(probabilities: Tensor, top_p: float) -> Tensor:
    """Return the lowest number, [rows, 1], such that all probabilities above it sum to less than `top_p`.

    A binary search over float32's bits, which have the order of their numbers: no sort, no wait for the device. On the
    CPU, where nothing waits, the edge is looked for among the largest probabilities first; it has the same bits.
    """
    if probabilities.device.type == "cpu":
        edge = _edge_among_largest(probabilities, top_p)
        if edge is not None:
            return edge
    low = torch.zeros(len(probabilities), 1, dtype=torch.int32, device=probabilities.device)
    high = torch.full_like(low, 0x3F800000)  # 1.0
    for _ in range(30):  # 0x3F800000 lies between 2 ** 29 and 2 ** 30
        middle = (low + high) >> 1
        above = probabilities.where(probabilities > middle.view(torch.float32), 0.0).sum(dim=-1, keepdim=True)
        is_enough = above < top_p
        low = torch.where(is_enough, low, middle + 1)
        high = torch.where(is_enough, middle, high)
    return high.view(torch.float32)


def _edge_among_largest(probabilities: Tensor, top_p: float) -> Tensor | None:
    """Return the edges, [rows, 1], or None if a row's nucleus is wider than its `_SORTED` largest probabilities.

    Sums in float64 propose an edge. It is the search's if the sums that the search compares agree: what lies above the
    edge is less than `top_p`, and with the edge it is not. A sum of non-negative numbers in one order never falls when
    a number grows, rounding included, so no other number passes both.
    """
    largest = probabilities.topk(_SORTED, dim=-1).values
    wide = largest.double()
    before = wide.cumsum(dim=-1) - wide  # the sum of all larger ones
    last_kept = (before < top_p).sum(dim=-1, keepdim=True) - 1
    edge = largest.gather(-1, last_kept.clamp(min=0))
    next_lower = largest.masked_fill(largest >= edge, -1.0).amax(dim=-1, keepdim=True)
    if bool((next_lower < 0).any()):  # the edge is the smallest of these, so that a lower one may lie beyond them
        return None
    above = probabilities.where(probabilities > edge, 0.0).sum(dim=-1, keepdim=True)
    with_edge = probabilities.where(probabilities > next_lower, 0.0).sum(dim=-1, keepdim=True)
    agree = (above < top_p) & (with_edge >= top_p)
    return edge if bool(agree.all()) else None


def _largest(probabilities: Tensor, count: int) -> Tensor:
    """Return the `count` largest probabilities of each row, descending; for all, sorting is faster than topk."""
    if count < probabilities.shape[-1]:
        return probabilities.topk(count, dim=-1).values
    if probabilities.device.type == "cpu":  # numpy sorts with vector instructions, torch does not
        return torch.from_numpy(np.sort(probabilities.numpy(), axis=-1)).flip(-1)
    return probabilities.sort(dim=-1, descending=True).values


def _shift_right(value: Tensor, bits: int) -> Tensor:
    """Shift right and fill with zeros; int64's own shift fills with the sign."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)
