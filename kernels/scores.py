"""Pooled observation-window scores: the Triton kernel of `kernels.reference.observation_scores`."""

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from kvsweep.kernels.linear import products
from kvsweep.kernels.tiles import padded, row_tile

BLOCK = constexpr(64)


def observation_scores(
    queries: Tensor,
    keys: Tensor,
    *,
    scaling: float,
    past_only: bool = False,
    pool_logits: bool = False,
    pooling: int = 1,
    pool: Literal["mean", "max"] = "mean",
) -> Tensor:
    """Do `kernels.reference.observation_scores` without a window x length matrix."""
    kv_heads, length, head_dim = keys.shape
    queries = queries.contiguous()
    window = queries.shape[1]
    group = queries.shape[0] // kv_heads
    past = length - window  # rows before the window
    members = 1 if pool_logits else group  # scores per key head: of its whole group, or of each query head
    norm = torch.empty(kv_heads, members, window, dtype=torch.float32, device=keys.device)
    scores = torch.empty(kv_heads, members, past, dtype=torch.float32, device=keys.device)
    if not past:  # a kernel cannot be launched on nothing
        return scores
    how = {**row_tile(keys.dtype, head_dim), "WINDOW": window, "WINDOW_PADDED": padded(window)}
    how |= {"GROUP": group, "MERGED": group if pool_logits else 1, "num_warps": 4}
    _window_norms[(kv_heads, members)](
        queries, keys, norm, scaling, length, *keys.stride()[:2], PAST_ONLY=past_only, **how
    )
    _pooled_scores[(kv_heads, members, triton.cdiv(past, BLOCK))](
        queries, keys, norm, scores, scaling, past, *keys.stride()[:2], POOLING=pooling, LARGEST=pool == "max", **how
    )
    return scores


@triton.jit
def _logits(
    queries, keys, head, member, steps, cols, seen, scaling, stride_head, stride_row,
    WINDOW: constexpr, DIM: constexpr, DEPTH: constexpr, GROUP: constexpr, MERGED: constexpr,
):  # fmt: skip
    """Return logits [window, cols] of one query head, or the largest over a group's query heads.

    `head` is the KV head, `member` the query head in its group. Columns outside `seen` get logits of zero keys, which
    the callers mask.
    """
    k_at = head.to(tl.int64) * stride_head + cols.to(tl.int64) * stride_row
    logits = tl.full([steps.shape[0], BLOCK], float("-inf"), tl.float32)
    for other in range(MERGED):  # 1, or the whole group, of which `member` then is the first
        q_at = ((head * GROUP + member + other) * WINDOW + steps) * DIM
        product = products(queries, q_at, steps < WINDOW, keys, k_at, seen, DIM, DEPTH)
        logits = tl.maximum(logits, product * scaling)
    return logits


@triton.jit
def _window_norms(
    queries, keys, norm, scaling, length, stride_head, stride_row, PAST_ONLY: constexpr,
    WINDOW: constexpr, WINDOW_PADDED: constexpr, DIM: constexpr,
    DEPTH: constexpr, GROUP: constexpr, MERGED: constexpr,
):  # fmt: skip
    """Store the log-sum-exp of each window query of one query head, or of one merged group."""
    head, member = tl.program_id(0), tl.program_id(1)
    steps = tl.arange(0, WINDOW_PADDED)
    past = length - WINDOW
    top = tl.full([WINDOW_PADDED], float("-inf"), tl.float32)
    weight = tl.zeros([WINDOW_PADDED], tl.float32)
    end = past if PAST_ONLY else length
    for first in range(0, end, BLOCK):
        cols = first + tl.arange(0, BLOCK)
        logits = _logits(
            queries, keys, head, member, steps, cols, cols < end, scaling, stride_head, stride_row,
            WINDOW, DIM, DEPTH, GROUP, MERGED,
        )  # fmt: skip
        seen = (cols < end)[None, :] & (cols[None, :] <= past + steps[:, None])  # query `steps` is row past + steps
        logits = tl.where(seen, logits, float("-inf"))
        above = tl.maximum(top, tl.max(logits, 1))
        weight = weight * tl.exp(top - above) + tl.sum(tl.exp(logits - above[:, None]), 1)
        top = above
    row = (head * tl.num_programs(1) + member) * WINDOW
    tl.store(norm + row + steps, top + tl.log(weight), mask=steps < WINDOW)


@triton.jit
def _pooled_scores(
    queries, keys, norm, scores, scaling, past, stride_head, stride_row,
    POOLING: constexpr, LARGEST: constexpr,
    WINDOW: constexpr, WINDOW_PADDED: constexpr, DIM: constexpr,
    DEPTH: constexpr, GROUP: constexpr, MERGED: constexpr,
):  # fmt: skip
    """Store the pooled scores of a block of rows, for one query head or one merged group."""
    head, member = tl.program_id(0), tl.program_id(1)
    steps = tl.arange(0, WINDOW_PADDED)
    row = head * tl.num_programs(1) + member
    its_norm = tl.load(norm + row * WINDOW + steps, mask=steps < WINDOW, other=float("inf"))
    cols = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    pooled = tl.zeros([BLOCK], tl.float32)
    # Tiles cannot be shifted, so each neighbour's score is computed again; its keys are still in the GPU's cache.
    for shift in range(-(POOLING // 2), POOLING // 2 + 1):
        near = cols + shift
        seen = (near >= 0) & (near < past)
        logits = _logits(
            queries, keys, head, member, steps, near, seen, scaling, stride_head, stride_row,
            WINDOW, DIM, DEPTH, GROUP, MERGED,
        )  # fmt: skip
        weights = tl.where(seen[None, :] & (steps < WINDOW)[:, None], tl.exp(logits - its_norm[:, None]), 0.0)
        score = tl.sum(weights, 0) / WINDOW
        if LARGEST:
            pooled = tl.maximum(pooled, score)
        else:
            pooled += score / POOLING
    tl.store(scores + row.to(tl.int64) * past + cols, pooled, mask=cols < past)


def redundancy(keys: Tensor, *, threshold: float) -> Tensor:
    """Do `kernels.reference.redundancy` without a length x length matrix."""
    heads, length, head_dim = keys.shape
    unit = torch.nn.functional.normalize(keys.float(), dim=-1, eps=1e-8).contiguous()
    # For each row of the cosine matrix the column of its last similar key, and the cosine there, which does not count;
    # for each column the sum of the cosines that do not count.
    last = torch.empty(heads, length, dtype=torch.int32, device=keys.device)
    lost = torch.empty(heads, length, dtype=torch.float32, device=keys.device)
    taken = torch.empty_like(lost)
    grid = (triton.cdiv(length, BLOCK), heads)
    _last_similar[grid](unit, last, lost, threshold, length, num_warps=8, **row_tile(unit.dtype, head_dim))
    _sum_lost[grid](last, lost, taken, length)
    # The sum of each key's cosines with all keys, less the one with itself, and less what rows lose in its column.
    received = torch.einsum("hld,hd->hl", unit, unit.sum(dim=1)) - unit.square().sum(dim=-1)
    return ((received - taken) / length).softmax(dim=-1)


@triton.jit
def _last_similar(
    unit, last, lost, threshold, length,
    DIM: constexpr, DEPTH: constexpr,
):  # fmt: skip
    """Store the last similar key of each of a block's keys, and their cosine; blocks of columns go from the end."""
    head = tl.program_id(1).to(tl.int64) * length
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = rows < length
    found, cosine = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.float32)
    first = (tl.cdiv(length, BLOCK) - 1) * BLOCK
    while first >= 0:
        cols = first + tl.arange(0, BLOCK)
        rows_at, cols_at = (head + rows) * DIM, (head + cols) * DIM
        cosines = products(unit, rows_at, real, unit, cols_at, cols < length, DIM, DEPTH)
        cosines = tl.where(rows[:, None] == cols[None, :], 0.0, cosines)
        similar = (cosines > threshold) & (cols < length)[None, :]
        best = tl.max(tl.where(similar, cols[None, :], 0), 1)
        # A row without a similar key, once the first block is reached, loses column 0 at any cosine.
        new = (found == 0) & ((best > 0) | (first == 0))
        value = tl.sum(tl.where(cols[None, :] == best[:, None], cosines, 0.0), 1)
        found, cosine = tl.where(new, best, found), tl.where(new, value, cosine)
        # -1 ends the loop: every row has its last similar key.
        first = tl.where(tl.min(tl.where(real, found, 1), 0) > 0, -1, first - BLOCK)
    tl.store(last + head + rows, found, mask=real)
    tl.store(lost + head + rows, cosine, mask=real)


@triton.jit
def _sum_lost(last, lost, taken, length):
    """Sum for each of a block's columns the cosines that rows lose there: row r loses lost[r] at column last[r]."""
    head = tl.program_id(1).to(tl.int64) * length
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, length, BLOCK):
        rows = first + tl.arange(0, BLOCK)
        at = tl.load(last + head + rows, mask=rows < length, other=-1)
        value = tl.load(lost + head + rows, mask=rows < length, other=0.0)
        total += tl.sum(tl.where(at[:, None] == cols[None, :], value[:, None], 0.0), 0)
    tl.store(taken + head + cols, total, mask=cols < length)
