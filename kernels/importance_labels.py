"""Column sums and maxima of causal attention in two passes: the Triton kernel of importance labels and prompt mass.

The first pass computes the log-sum-exp of every query's row. In the second pass each program owns a block of keys of
one key head: no atomic additions, and no length x length matrix.
"""

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from kvsweep.kernels import reference
from kvsweep.kernels.linear import products
from kvsweep.kernels.tiles import row_tile

BLOCK = constexpr(64)


def _reduce_columns(
    query: Tensor, key: Tensor, *, scaling: float, first_query: int, min_distance: int, largest: bool
) -> Tensor:
    """Do `kernels.reference._reduce_columns`."""
    kv_heads, length, head_dim = key.shape
    q_heads = query.shape[0]
    query = query.contiguous()
    key = key.contiguous()
    norm = torch.empty(q_heads, length, dtype=torch.float32, device=key.device)
    columns = torch.empty(kv_heads, length, dtype=torch.float32, device=key.device)
    group = q_heads // kv_heads
    blocks = triton.cdiv(length, BLOCK)
    how = {**row_tile(query.dtype, head_dim), "GROUP": group, "num_warps": 8}
    _row_norms[(blocks, q_heads)](query, key, norm, scaling, length, first_query, **how)
    _columns[(blocks, kv_heads)](
        query, key, norm, columns, scaling, length, first_query, min_distance, LARGEST=largest, **how
    )
    return columns


importance_labels = partial(reference.importance_labels, reduce_columns=_reduce_columns)
causal_mass = partial(reference.causal_mass, reduce_columns=_reduce_columns)


@triton.jit
def _logits(
    query, key, q_head, head, rows, cols, scaling, length,
    DIM: constexpr, DEPTH: constexpr,
):  # fmt: skip
    """Return logits [rows, cols]; each product takes `DEPTH` numbers of a row."""
    q_at = (q_head.to(tl.int64) * length + rows) * DIM
    k_at = (head.to(tl.int64) * length + cols) * DIM
    logits = products(query, q_at, rows < length, key, k_at, cols < length, DIM, DEPTH)
    return logits * scaling


@triton.jit
def _row_norms(
    query, key, norm, scaling, length, first_query, GROUP: constexpr,
    DIM: constexpr, DEPTH: constexpr,
):  # fmt: skip
    """Store the log-sum-exp of one query head's logits for a block of queries, each over the keys up to its own."""
    head, start = tl.program_id(1), tl.program_id(0) * BLOCK
    rows = start + tl.arange(0, BLOCK)
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    weight = tl.zeros([BLOCK], tl.float32)
    if start + BLOCK > first_query:  # no earlier query counts
        for first in range(0, start + BLOCK, BLOCK):
            cols = first + tl.arange(0, BLOCK)
            logits = _logits(query, key, head, head // GROUP, rows, cols, scaling, length, DIM, DEPTH)
            logits = tl.where(cols[None, :] <= rows[:, None], logits, float("-inf"))
            above = tl.maximum(top, tl.max(logits, 1))
            weight = weight * tl.exp(top - above) + tl.sum(tl.exp(logits - above[:, None]), 1)
            top = above
        tl.store(norm + head.to(tl.int64) * length + rows, top + tl.log(weight), mask=rows < length)


@triton.jit
def _columns(
    query, key, norm, columns, scaling, length, first_query, min_distance, GROUP: constexpr, LARGEST: constexpr,
    DIM: constexpr, DEPTH: constexpr,
):  # fmt: skip
    """Store the sum or maximum that a block of keys of one key head receives from all queries that count."""
    head, start = tl.program_id(1), tl.program_id(0) * BLOCK
    cols = start + tl.arange(0, BLOCK)
    received = tl.zeros([BLOCK], tl.float32)
    begin = tl.maximum(first_query, start + min_distance)  # the first query that counts for any of these keys
    for member in range(GROUP):
        q_head = head * GROUP + member
        for first in range(begin, length, BLOCK):
            rows = first + tl.arange(0, BLOCK)
            its_norm = tl.load(norm + q_head.to(tl.int64) * length + rows, mask=rows < length, other=0.0)
            logits = _logits(query, key, q_head, head, rows, cols, scaling, length, DIM, DEPTH)
            far = (rows[:, None] - cols[None, :] >= min_distance) & (rows < length)[:, None]
            weights = tl.where(far, tl.exp(logits - its_norm[:, None]), 0.0)
            if LARGEST:
                received = tl.maximum(received, tl.max(weights, 0))
            else:
                received += tl.sum(weights, 0)
    tl.store(columns + head.to(tl.int64) * length + cols, received, mask=cols < length)
