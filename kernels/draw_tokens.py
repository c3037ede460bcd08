"""Draw one token per row, one program per row: the Triton kernel of `kernels.sampling.draw_tokens`.

A program reads only its own row, in one order, so a token does not depend on the other rows. No program waits for
another, and no memory of the logits' size is written. The weights are exp(logit / temperature - the largest one), as in
the reference, but they are not divided by their sum. Where the two sums round to different sides of top_p or of the
drawn number, the token may differ from the reference's.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

BLOCK, WARPS = 4096, 16
# Low bits of a logit in float32 that are zero for every number of the dtype. An even number, because each reading of
# the row in `_edge` finds two bits: 12 of float16's 13.
ZERO_BITS = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 12}


def draw_tokens(
    logits: Tensor, keys: Tensor, counters: Tensor, *, temperature: float, top_p: float, top_k: int, k_first: bool
) -> Tensor:
    """Do `kernels.sampling.draw_tokens`."""
    rows, vocabulary = logits.shape
    if temperature == 0:
        return logits.argmax(dim=-1)
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    drawn = torch.empty(rows, dtype=torch.int64, device=logits.device)
    _draw[(rows,)](
        logits,
        vocabulary,
        logits.stride(0),
        keys.contiguous(),
        counters.contiguous(),
        drawn,
        temperature,
        top_p,
        top_k,
        TOP_P=top_p < 1,
        TOP_K=0 < top_k < vocabulary,
        K_FIRST=k_first,
        SHIFT=ZERO_BITS[logits.dtype],
        BLOCK=min(BLOCK, triton.next_power_of_2(vocabulary)),
        num_warps=WARPS,
    )
    return drawn


@triton.jit
def _draw(
    logits, vocabulary, stride_row, keys, counters, drawn, temperature, top_p, top_k,
    TOP_P: constexpr, TOP_K: constexpr, K_FIRST: constexpr, SHIFT: constexpr, BLOCK: constexpr,
):  # fmt: skip
    """Draw the token of one row: find the largest logit, then the lowest rank that stays, then the number's place."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride_row
    inside = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, vocabulary, BLOCK):
        best = tl.maximum(best, _logits(logits, start + inside, vocabulary))
    tokens = logits, vocabulary, tl.max(best), temperature, SHIFT, inside  # what all functions below read
    edge = tl.full([], -(1 << (31 - SHIFT)), tl.int32)  # the lowest rank: all are kept
    if TOP_K and (K_FIRST or not TOP_P):  # else one search below finds both edges
        edge = _edge(tokens, None, top_k)
    if TOP_P:  # of the sum of the weights that are kept so far, since they are not divided by it
        over, many = _kept(tokens, edge)
        if TOP_K and K_FIRST:
            # Among tokens that equal the k-th largest, count only as many as fit into k.
            above, fewer = _kept(tokens, edge + 1)
            over = above + (over - above) * ((top_k - fewer).to(tl.float64) / (many - fewer).to(tl.float64))
            edge = tl.maximum(edge, _edge(tokens, over * top_p, None))
        else:
            edge = _edge(tokens, over * top_p, top_k if TOP_K else None)
    number = _uniform(tl.load(keys + row), tl.load(counters + row))
    tl.store(drawn + row, _inverse(tokens, edge, number))


@triton.jit
def _logits(logits, places, vocabulary):
    return tl.load(logits + places, mask=places < vocabulary, other=float("-inf")).to(tl.float32)


@triton.jit
def _weights(tokens, start):
    """Return ranks and weights of a block's tokens. A rank is a whole number, ordered as the logits."""
    logits, vocabulary, peak, temperature, shift, inside = tokens
    x = _logits(logits, start + inside, vocabulary)
    weights = tl.exp(tl.div_rn(x, temperature) - tl.div_rn(peak, temperature))
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)  # zero for zero and minus zero
    # A float's bits grow with its size, so those of negative numbers are turned round, all but the sign. The bits that
    # are zero in this dtype are shifted out.
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> shift, weights


@triton.jit
def _kept(tokens, edge):
    """Return the sum of weights and the number of tokens from a rank on."""
    _, vocabulary, _, _, _, inside = tokens
    weight, number = tl.zeros(inside.shape, tl.float32), tl.zeros(inside.shape, tl.int32)
    for start in range(0, vocabulary, inside.shape[0]):
        ranks, weights = _weights(tokens, start)
        weight += tl.where(ranks >= edge, weights, 0.0)
        number += (ranks >= edge).to(tl.int32)
    return tl.sum(weight.to(tl.float64)), tl.sum(number)


@triton.jit
def _edge(tokens, most, many):
    """Return the lowest rank above which the tokens weigh less than `most` and are fewer than `many`, if not None.

    A 4-way search: each reading of the row tests three ranks and finds two bits of the result.
    """
    _, vocabulary, _, _, shift, inside = tokens
    low = tl.full([], -(1 << (31 - shift)), tl.int32)
    quarter = tl.full([], 1 << (30 - shift), tl.int32)
    for _ in range((32 - shift) // 2):
        first, second, third = low + (quarter - 1), low + (2 * quarter - 1), low + (2 * quarter - 1) + quarter
        weight_1, weight_2, weight_3 = (tl.zeros(inside.shape, tl.float32),) * 3
        number_1, number_2, number_3 = (tl.zeros(inside.shape, tl.int32),) * 3
        for start in range(0, vocabulary, inside.shape[0]):
            ranks, weights = _weights(tokens, start)
            if most is not None:
                weight_1 += tl.where(ranks > first, weights, 0.0)
                weight_2 += tl.where(ranks > second, weights, 0.0)
                weight_3 += tl.where(ranks > third, weights, 0.0)
            if many is not None:
                number_1 += (ranks > first).to(tl.int32)
                number_2 += (ranks > second).to(tl.int32)
                number_3 += (ranks > third).to(tl.int32)
        # `low` rises by as many quarters as thresholds have too many tokens above them.
        low += quarter * (
            _too_many(weight_1, number_1, most, many)
            + _too_many(weight_2, number_2, most, many)
            + _too_many(weight_3, number_3, most, many)
        )
        quarter = quarter >> 2
    return low


@triton.jit
def _too_many(weight, number, most, many):
    """Return 1 if the tokens above a rank weigh `most` or more, or are `many` or more, else 0."""
    found = tl.full([], 0, tl.int32)
    if most is not None:
        found = found | (tl.sum(weight.to(tl.float64)) >= most).to(tl.int32)
    if many is not None:
        found = found | (tl.sum(number) >= many).to(tl.int32)
    return found


@triton.jit
def _uniform(key, counter):
    """As `kernels.sampling.uniform`."""
    state = key.to(tl.uint64, bitcast=True) + (counter + 1).to(tl.uint64, bitcast=True) * 0x9E3779B97F4A7C15
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB
    state = state ^ (state >> 31)
    return (state >> 11).to(tl.float64) * (2.0**-53)


@triton.jit
def _inverse(tokens, edge, number):
    """Return the token where the cumulative weights from a rank on, in vocabulary order, pass a share of the sum."""
    _, vocabulary, _, _, _, inside = tokens
    block = inside.shape[0]
    total = tl.full([], 0, tl.float64)
    for start in range(0, vocabulary, block):
        total += _block_sum(tokens, start, edge)
    # First the block in which the sum passes the target (`passed` blocks lie before it), then the token in this block.
    target, sum_, before = number * total, tl.full([], 0, tl.float64), tl.full([], 0, tl.float64)
    passed = tl.full([], 0, tl.int32)
    for start in range(0, vocabulary, block):
        sum_ += _block_sum(tokens, start, edge)
        below = (sum_ <= target) & (sum_ < total)  # never true for the last block with a weight
        before = tl.where(below, sum_, before)
        passed += below.to(tl.int32)
    start = passed * block
    ranks, weights = _weights(tokens, start)
    kept = tl.where(ranks >= edge, weights, 0.0)
    beyond = (before + tl.cumsum(kept.to(tl.float64), 0) > target) & (kept > 0)
    first, last = tl.min(tl.where(beyond, inside, block)), tl.max(tl.where(kept > 0, inside, 0))
    # The block's sum and its last cumulative sum may round to different sides of the target.
    return tl.minimum(start + tl.minimum(first, last), vocabulary - 1).to(tl.int64)


@triton.jit
def _block_sum(tokens, start, edge):
    ranks, weights = _weights(tokens, start)
    return tl.sum(tl.where(ranks >= edge, weights, 0.0).to(tl.float64))
