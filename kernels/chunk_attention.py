"""Attention of a chunk of one slot's newest tokens: the Triton kernel of `kernels.reference.chunk_attention`.

A program attends with all query heads of some tokens that share a key head, over the rows up to the last of the tokens.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvsweep.kernels.decode_attention import attend_rows, block
from kvsweep.kernels.tiles import padded, upcast


def tokens_at_once(dtype: torch.dtype, group_padded: int) -> int:
    """Tokens of a program, whose queries make a whole tile: fewer in float32, where registers hold the operands."""
    return max(1, (16 if dtype == torch.float32 else 64) // group_padded)


def warps(dtype: torch.dtype, dim: int, return_mass: bool) -> int:
    """Warps of a program: with 4, masses in float32 and wide heads in 16 bits would spill registers."""
    if dtype == torch.float32:
        return 16 if return_mass else 4
    return 8 if dim > 128 else 4


def chunk_attention(
    query: Tensor, keys: Tensor, values: Tensor, *, scaling: float, return_mass: bool = False
) -> tuple[Tensor, Tensor | None]:
    tokens, q_heads, dim = query.shape
    kv_heads, rows = keys.shape[:2]
    assert keys.stride() == values.stride(), "keys and values share one layout"
    assert keys.stride(-1) == 1, "the numbers of a row are contiguous"
    query, group = query.contiguous(), q_heads // kv_heads
    group_padded = 1 << (group - 1).bit_length()
    at_once = tokens_at_once(query.dtype, group_padded)
    output = torch.empty_like(query)
    mass = torch.zeros(tokens if return_mass else 0, kv_heads, rows, dtype=torch.float32, device=query.device)
    how = {"GROUP": group, "GROUP_PADDED": group_padded, "TOKENS": at_once, "BLOCK": block(query.dtype)}
    how |= {"DIM": dim, "DIM_PADDED": padded(dim), "MASS": return_mass, "UPCAST": upcast(query.dtype)}
    how |= {"num_warps": warps(query.dtype, dim, return_mass), "num_stages": 2}
    _attend[(kv_heads, triton.cdiv(tokens, at_once))](
        query, keys, values, output, mass, scaling, tokens, rows, *keys.stride()[:2], **how
    )
    return output, mass if return_mass else None


@triton.jit
def _attend(
    query, keys, values, output, mass, scaling, tokens, rows, stride_head, stride_row,
    GROUP: tl.constexpr, GROUP_PADDED: tl.constexpr, TOKENS: tl.constexpr, DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr, BLOCK: tl.constexpr, MASS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    head, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * TOKENS
    lane, dims = tl.arange(0, TOKENS * GROUP_PADDED), tl.arange(0, DIM_PADDED)
    token, member = first + lane // GROUP_PADDED, lane % GROUP_PADDED
    real, wide = (token < tokens) & (member < GROUP), dims < DIM
    own = (token.to(tl.int64) * tl.num_programs(0) + head) * GROUP + member
    q = tl.load(query + own[:, None] * DIM + dims, mask=real[:, None] & wide, other=0.0)
    if UPCAST:
        q = q.to(tl.float32)
    last = rows - tokens + token  # each token's own row, the last one that it sees
    top = tl.full([TOKENS * GROUP_PADDED], float("-inf"), tl.float32)
    weight = tl.zeros([TOKENS * GROUP_PADDED], tl.float32)
    mixed = tl.zeros([TOKENS * GROUP_PADDED, DIM_PADDED], tl.float32)
    end = tl.minimum(rows - tokens + first + TOKENS, rows)
    for begin in range(0, end, BLOCK):
        row = begin + tl.arange(0, BLOCK)
        at = head * stride_head + row.to(tl.int64)[:, None] * stride_row + dims
        k = tl.load(keys + at, mask=(row < end)[:, None] & wide, other=0.0)
        v = tl.load(values + at, mask=(row < end)[:, None] & wide, other=0.0)
        if UPCAST:
            k, v = k.to(tl.float32), v.to(tl.float32)
        seen = row[None, :] <= last[:, None]
        _, top, weight, mixed = attend_rows(q, k, v, seen, scaling, top, weight, mixed, None)
    out = (mixed / weight[:, None]).to(output.dtype.element_ty)
    tl.store(output + own[:, None] * DIM + dims, out, mask=real[:, None] & wide)
    if MASS:
        each = first + tl.arange(0, TOKENS)
        for begin in range(0, end, BLOCK):
            row = begin + tl.arange(0, BLOCK)
            at = head * stride_head + row.to(tl.int64)[:, None] * stride_row + dims
            k = tl.load(keys + at, mask=(row < end)[:, None] & wide, other=0.0)
            if UPCAST:
                k = k.to(tl.float32)
            logits = tl.dot(q, tl.trans(k), input_precision="ieee") * scaling
            p = tl.exp(logits - top[:, None]) / weight[:, None]
            p = tl.where((row[None, :] <= last[:, None]) & real[:, None], p, 0.0)
            paid = tl.sum(tl.reshape(p, [TOKENS, GROUP_PADDED, BLOCK]), 1)
            to = (each.to(tl.int64)[:, None] * tl.num_programs(0) + head) * rows + row
            tl.store(mass + to, paid, mask=(each < tokens)[:, None] & (row < end)[None, :])
