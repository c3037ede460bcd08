"""Column sums and maxima of causal attention in two passes: the Triton twin of what labels and prompt mass rest on.

First the log-sum-exp of every query's row, then each block of keys adds up, or takes the largest of, what it receives.
One program owns a block of keys of one key head, so nothing is added atomically and nothing of length x length is held.
"""

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import reference
from kernels.precision import depth, padded, stages, upcast

BLOCK = 64


def importance_labels(
    query: Tensor,
    key: Tensor,
    *,
    kind: Literal["answer", "far_max", "later"],
    scaling: float,
    answer_start: int,
    min_distance: int = 32,
) -> Tensor:
    """As the reference."""
    return reference.importance_labels(
        query,
        key,
        kind=kind,
        scaling=scaling,
        answer_start=answer_start,
        min_distance=min_distance,
        reduce_columns=_reduce_columns,
    )


def causal_mass(query: Tensor, key: Tensor, *, scaling: float) -> Tensor:
    """As the reference."""
    return reference.causal_mass(query, key, scaling=scaling, reduce_columns=_reduce_columns)


def _reduce_columns(
    query: Tensor, key: Tensor, *, scaling: float, first_query: int, min_distance: int, largest: bool, block: int = 0
) -> Tensor:
    """As the reference's; `block` has no meaning here, the kernels' own tile is fixed."""
    kv_heads, length, head_dim = key.shape
    q_heads, query, key = query.shape[0], query.contiguous(), key.contiguous()
    norm = torch.empty(q_heads, length, dtype=torch.float32, device=key.device)
    columns = torch.empty(kv_heads, length, dtype=torch.float32, device=key.device)
    group, blocks = q_heads // kv_heads, triton.cdiv(length, BLOCK)
    shape = {"DIM": head_dim, "DIM_PADDED": padded(head_dim), "DEPTH": depth(query.dtype, head_dim)}
    shape |= {"BLOCK": BLOCK, "UPCAST": upcast(query.dtype)}
    _row_norms[(blocks, q_heads)](
        query,
        key,
        norm,
        scaling,
        length,
        first_query,
        GROUP=group,
        **shape,
        num_warps=8,
        num_stages=stages(query.dtype),
    )
    _columns[(blocks, kv_heads)](
        query,
        key,
        norm,
        columns,
        scaling,
        length,
        first_query,
        min_distance,
        GROUP=group,
        LARGEST=largest,
        **shape,
        num_warps=8,
        num_stages=stages(query.dtype),
    )
    return columns


@triton.jit
def _logits(
    query,
    key,
    q_head,
    head,
    rows,
    cols,
    scaling,
    length,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """[rows, cols] logits, a stretch of `DEPTH` numbers of each row at a time."""
    logits = tl.zeros([BLOCK, BLOCK], tl.float32)
    q_at = (q_head.to(tl.int64) * length + rows)[:, None] * DIM
    k_at = (head.to(tl.int64) * length + cols)[:, None] * DIM
    for start in range(0, DIM_PADDED, DEPTH):
        dims = start + tl.arange(0, DEPTH)
        q = tl.load(query + q_at + dims, mask=(rows < length)[:, None] & (dims < DIM), other=0.0)
        k = tl.load(key + k_at + dims, mask=(cols < length)[:, None] & (dims < DIM), other=0.0)
        if UPCAST:
            q, k = q.to(tl.float32), k.to(tl.float32)
        logits = tl.dot(q, tl.trans(k), logits, input_precision="ieee")
    return logits * scaling


@triton.jit
def _row_norms(
    query,
    key,
    norm,
    scaling,
    length,
    first_query,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
    UPCAST: tl.constexpr,
):
    head, start = tl.program_id(1), tl.program_id(0) * BLOCK
    rows = start + tl.arange(0, BLOCK)
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    weight = tl.zeros([BLOCK], tl.float32)
    if start + BLOCK > first_query:
        for first in range(0, start + BLOCK, BLOCK):
            cols = first + tl.arange(0, BLOCK)
            logits = _logits(
                query, key, head, head // GROUP, rows, cols, scaling, length, DIM, DIM_PADDED, DEPTH, BLOCK, UPCAST
            )
            logits = tl.where(cols[None, :] <= rows[:, None], logits, float("-inf"))
            above = tl.maximum(top, tl.max(logits, 1))
            weight = weight * tl.exp(top - above) + tl.sum(tl.exp(logits - above[:, None]), 1)
            top = above
        tl.store(norm + head.to(tl.int64) * length + rows, top + tl.log(weight), mask=rows < length)


@triton.jit
def _columns(
    query,
    key,
    norm,
    columns,
    scaling,
    length,
    first_query,
    min_distance,
    GROUP: tl.constexpr,
    LARGEST: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
    UPCAST: tl.constexpr,
):
    head, start = tl.program_id(1), tl.program_id(0) * BLOCK
    cols = start + tl.arange(0, BLOCK)
    received = tl.zeros([BLOCK], tl.float32)
    begin = tl.maximum(first_query, start + min_distance)
    for member in range(GROUP):
        q_head = head * GROUP + member
        for first in range(begin, length, BLOCK):
            rows = first + tl.arange(0, BLOCK)
            its_norm = tl.load(norm + q_head.to(tl.int64) * length + rows, mask=rows < length, other=0.0)
            logits = _logits(
                query, key, q_head, head, rows, cols, scaling, length, DIM, DIM_PADDED, DEPTH, BLOCK, UPCAST
            )
            far = (rows[:, None] - cols[None, :] >= min_distance) & (rows < length)[:, None]
            weights = tl.where(far, tl.exp(logits - its_norm[:, None]), 0.0)
            if LARGEST:
                received = tl.maximum(received, tl.max(weights, 0))
            else:
                received += tl.sum(weights, 0)
    tl.store(columns + head.to(tl.int64) * length + cols, received, mask=cols < length)
