"""Split-K flash decoding over slots: the Triton kernel of `kernels.reference.decode_attention`.

Each program attends over one chunk of one slot's rows; a second kernel joins the chunks of a head, unless one chunk is
the whole output. The grid depends only on slots and capacity, and the kernels read the lengths on the device, so that a
CUDA graph can replay them.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from kvsweep.kernels.linear import dot, rounded
from kvsweep.kernels.tiles import padded, stages

CHUNK = constexpr(512)


def block(dtype: torch.dtype) -> int:
    """Rows per product: fewer in float32, because registers hold the operands."""
    return 16 if dtype == torch.float32 else 64


def launch(query: torch.dtype, rows: torch.dtype, dim: int) -> dict[str, int]:
    """Warps per program and loads in flight. fp8 rows are widened, which takes more registers (wide heads, float32)."""
    if rows.itemsize > 1:
        return {"num_warps": 4, "num_stages": 2}
    return {"num_warps": 8 if dim > 128 else 4, "num_stages": stages(query)}


def decode_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    *,
    scaling: float,
    return_mass: bool = False,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    scales: Sequence[Tensor] = (),
) -> tuple[Tensor, Tensor | None]:
    """Do `kernels.reference.decode_attention`. Dead rows are never read and may hold NaN; a length of 0 gives zeros.

    The numbers of fp8 rows are multiplied by their scale in float32, then rounded to the query's precision.
    """
    slots, kv_heads, capacity, head_dim = keys.shape
    assert keys.stride() == values.stride(), "keys and values share one layout"
    assert keys.stride(-1) == 1, "the numbers of a row are contiguous"
    query = query.contiguous()
    chunks = triton.cdiv(capacity, CHUNK)
    lengths = lengths.contiguous()
    parts = scratch(query, chunks, capacity if return_mass else 1)  # what the programs store for `join`
    alone = chunks == 1 and sinks is None and not return_mass
    if alone:  # the first kernel writes the output itself, and nothing is joined
        parts[0] = torch.empty_like(query)
    group = query.shape[1] // kv_heads  # query heads of a key head
    how: dict[str, Any] = {"GROUP": group, "GROUP_PADDED": triton.next_power_of_2(group)}
    how |= {"BLOCK": block(query.dtype), "DIM": head_dim, "DIM_PADDED": padded(head_dim)}
    how |= {"MASS": return_mass, "SOFTCAP": softcap, "ALONE": alone}
    how |= launch(query.dtype, keys.dtype, head_dim)
    key_scales, value_scales = scales or (None, None)
    scale_strides = (0, 0) if key_scales is None else key_scales.stride()[:2]
    strides = *keys.stride()[:3], *scale_strides
    _attend_chunk[(slots, kv_heads, chunks)](
        query, keys, values, key_scales, value_scales, lengths, *parts, scaling, capacity, *strides, **how
    )
    if alone:
        return parts[0], None
    return join(query, parts, lengths, kv_heads, sinks, return_mass)


def scratch(query: Tensor, chunks: int, logits: int) -> list[Tensor]:
    """Allocate what `join` takes: part, peak, total, and `logits` numbers for each query head."""
    sizes = (chunks, query.shape[-1]), (chunks,), (chunks,), (logits,)
    return [torch.empty(*query.shape[:2], *size, dtype=torch.float32, device=query.device) for size in sizes]


def join(
    query: Tensor, parts: list[Tensor], lengths: Tensor, kv_heads: int, sinks: Tensor | None, return_mass: bool
) -> tuple[Tensor, Tensor | None]:
    """Join the chunks of each head; return the output, shaped as the query, and the attention mass if it is wanted.

    `parts` comes from `scratch`: part [slots, q_heads, chunks, head_dim], peak and total [slots, q_heads, chunks],
    logits [slots, q_heads, capacity]; lengths [slots]; sinks [q_heads].
    """
    part, peak, total, logits = parts
    slots, q_heads, chunks, head_dim = part.shape
    capacity = logits.shape[-1]
    output = torch.empty_like(query)
    norm = torch.empty_like(peak[..., 0])  # log of each head's summed exponentials, which the first kernel writes
    _join_chunks[(slots, q_heads)](
        part, peak, total, lengths, sinks, output, norm, chunks, q_heads, DIM=head_dim, DIM_PADDED=padded(head_dim)
    )
    if not return_mass:
        return output, None
    mass = torch.empty(slots, kv_heads, capacity, dtype=torch.float32, device=query.device)
    _sum_group[(slots, kv_heads, chunks)](logits, norm, lengths, mass, capacity, GROUP=q_heads // kv_heads)
    return output, mass


@triton.jit
def _attend_chunk(
    query, keys, values, key_scales, value_scales, lengths, part, peak, total, logits_out, scaling, capacity,
    stride_slot, stride_head, stride_row, scale_slot, scale_head,
    GROUP: constexpr, DIM: constexpr, DIM_PADDED: constexpr, GROUP_PADDED: constexpr,
    BLOCK: constexpr, MASS: constexpr, SOFTCAP: constexpr, ALONE: constexpr,
):  # fmt: skip
    """Attend with one slot's queries of one key head over one chunk of its rows; store what `_join_chunks` adds up."""
    slot, head, chunk, length = chunk_of_slot(lengths)
    start = chunk * CHUNK
    # `_join_chunks` does not read chunks beyond the length; alone, a program also writes an empty slot's zeros.
    if ALONE or start < length:
        end = tl.minimum(start + CHUNK, length)
        group, dims = tl.arange(0, GROUP_PADDED), tl.arange(0, DIM_PADDED)
        heads = (slot * tl.num_programs(1) + head) * GROUP + group  # query heads, counted over all slots
        real, wide = group < GROUP, dims < DIM
        q = tl.load(query + heads[:, None] * DIM + dims, mask=real[:, None] & wide, other=0.0)
        base = slot * stride_slot + head * stride_head
        top, weight, mixed = no_rows(q)
        for first in range(start, end, BLOCK):
            rows = first + tl.arange(0, BLOCK)
            live = rows < end
            at = base + rows.to(tl.int64)[:, None] * stride_row + dims
            k = tl.load(keys + at, mask=live[:, None] & wide, other=0.0)
            v = tl.load(values + at, mask=live[:, None] & wide, other=0.0)
            if key_scales is not None:
                scale_at = slot * scale_slot + head * scale_head + rows
                k = k.to(tl.float32) * tl.load(key_scales + scale_at, mask=live, other=0.0)[:, None]
                v = v.to(tl.float32) * tl.load(value_scales + scale_at, mask=live, other=0.0)[:, None]
            k, v = rounded(k, q.dtype), rounded(v, q.dtype)
            logits, top, weight, mixed = attend_rows(q, k, v, live[None, :], scaling, top, weight, mixed, SOFTCAP)
            if MASS:
                tl.store(logits_out + heads[:, None] * capacity + rows, logits, mask=real[:, None] & live)
        cell = heads * tl.num_programs(2) + chunk
        if ALONE:  # nothing to join; an empty slot gives zeros
            mixed = mixed / tl.where(length > 0, weight, 1.0)[:, None]
        tl.store(part + cell[:, None] * DIM + dims, mixed.to(part.dtype.element_ty), mask=real[:, None] & wide)
        tl.store(peak + cell, top, mask=real)
        tl.store(total + cell, weight, mask=real)


@triton.jit
def chunk_of_slot(lengths):
    """Return this program's slot, key head and chunk, and the slot's length."""
    slot, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    return slot, head, tl.program_id(2), tl.load(lengths + slot).to(tl.int32)


@triton.jit
def no_rows(q):
    """Return what `attend_rows` begins with: the largest logit, the sum of weights and that of weighted values."""
    top = tl.full([q.shape[0]], float("-inf"), tl.float32)
    return top, tl.zeros_like(top), tl.zeros(q.shape, tl.float32)


@triton.jit
def attend_rows(q, k, v, live, scaling, top, weight, mixed, SOFTCAP: constexpr):
    """Add a block of rows to a running softmax per query head; each query sees the rows that are `live`.

    Returns the block's logits, the largest logit so far, and the sums of weights and of weighted values relative to it.
    """
    logits = dot(q, tl.trans(k)) * scaling
    if SOFTCAP is not None:
        logits = SOFTCAP * (2.0 / (1.0 + tl.exp(-2.0 * logits / SOFTCAP)) - 1.0)  # a hyperbolic tangent
    logits = tl.where(live, logits, float("-inf"))
    # The sums so far are relative to `top`; a larger logit shrinks them.
    above = tl.maximum(top, tl.max(logits, 1))
    p = tl.exp(logits - above[:, None])
    shrink = tl.exp(top - above)
    weight = weight * shrink + tl.sum(p, 1)
    mixed = mixed * shrink[:, None] + dot(p, v)
    return logits, above, weight, mixed


@triton.jit
def _join_chunks(
    part, peak, total, lengths, sinks, output, norm, chunks, q_heads,
    DIM: constexpr, DIM_PADDED: constexpr,
):  # fmt: skip
    """Join the chunks of one query head of one slot; store its output and the logarithm of its softmax's divisor."""
    slot, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    length = tl.load(lengths + slot).to(tl.int32)
    dims = tl.arange(0, DIM_PADDED)
    wide = dims < DIM
    row = slot * q_heads + head
    top, weight = float("-inf"), 0.0
    if sinks is not None:  # a logit beside the rows, with no value to mix in
        top, weight = tl.load(sinks + head).to(tl.float32), 1.0
    mixed = tl.zeros([DIM_PADDED], tl.float32)
    for chunk in range(0, tl.cdiv(length, CHUNK)):
        cell = row * chunks + chunk
        its_top = tl.load(peak + cell)
        above = tl.maximum(top, its_top)
        shrink, grow = tl.exp(top - above), tl.exp(its_top - above)
        weight = weight * shrink + tl.load(total + cell) * grow
        mixed = mixed * shrink + tl.load(part + cell * DIM + dims, mask=wide, other=0.0) * grow
        top = above
    whole = tl.where(length > 0, weight, 1.0)  # an empty slot gives zeros, not 0 / 0
    tl.store(output + row * DIM + dims, (mixed / whole).to(output.dtype.element_ty), mask=wide)
    tl.store(norm + row, top + tl.log(whole))


@triton.jit
def _sum_group(logits, norm, lengths, mass, capacity, GROUP: constexpr):
    """Sum the probabilities of a chunk of rows over the query heads of one key head of one slot."""
    slot, head, chunk, length = chunk_of_slot(lengths)
    rows = chunk * CHUNK + tl.arange(0, CHUNK)
    live = rows < length
    row = slot * tl.num_programs(1) + head  # key heads, counted over all slots
    received = tl.zeros([CHUNK], tl.float32)
    for member in range(GROUP):
        q_head = row * GROUP + member
        logit = tl.load(logits + q_head * capacity + rows, mask=live, other=float("-inf"))
        received += tl.where(live, tl.exp(logit - tl.load(norm + q_head)), 0.0)
    tl.store(mass + row * capacity + rows, received, mask=rows < capacity)


def tokens_at_once(dtype: torch.dtype, group_padded: int) -> int:
    """Tokens per program, so that their queries fill a tile: fewer in float32, because registers hold the operands."""
    return max(1, (16 if dtype == torch.float32 else 64) // group_padded)


def warps(dtype: torch.dtype, dim: int, return_mass: bool) -> int:
    """Warps per program: with 4, attention masses in float32 and wide heads in 16 bits would spill registers."""
    if dtype == torch.float32:
        return 16 if return_mass else 4
    return 8 if dim > 128 else 4


def chunk_attention(
    query: Tensor, keys: Tensor, values: Tensor, *, scaling: float, return_mass: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Do `kernels.reference.chunk_attention` without sinks, softcap and window.

    A chunk here is the newest tokens of one slot: query [tokens, q_heads, head_dim], keys and values [kv_heads, rows,
    head_dim], the mass [tokens, kv_heads, rows].
    """
    tokens, q_heads, dim = query.shape
    kv_heads, rows = keys.shape[:2]
    assert keys.stride() == values.stride(), "keys and values share one layout"
    assert keys.stride(-1) == 1, "the numbers of a row are contiguous"
    query = query.contiguous()
    group = q_heads // kv_heads
    group_padded = triton.next_power_of_2(group)
    at_once = tokens_at_once(query.dtype, group_padded)
    output = torch.empty_like(query)
    mass = None
    if return_mass:  # zeros, because no program writes the rows behind its tokens
        mass = torch.zeros(tokens, kv_heads, rows, dtype=torch.float32, device=query.device)
    how = {"GROUP": group, "GROUP_PADDED": group_padded, "TOKENS": at_once, "BLOCK": block(query.dtype)}
    how |= {"DIM": dim, "DIM_PADDED": padded(dim)}
    how |= {"num_warps": warps(query.dtype, dim, return_mass), "num_stages": 2}
    _attend[(kv_heads, triton.cdiv(tokens, at_once))](
        query, keys, values, output, mass, scaling, tokens, rows, *keys.stride()[:2], **how
    )
    return output, mass


@triton.jit
def _attend(
    query, keys, values, output, mass, scaling, tokens, rows, stride_head, stride_row,
    GROUP: constexpr, GROUP_PADDED: constexpr, TOKENS: constexpr, DIM: constexpr,
    DIM_PADDED: constexpr, BLOCK: constexpr,
):  # fmt: skip
    """Attend with some tokens' queries of one key head, each over the rows up to its own; then store the mass."""
    head, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * TOKENS
    lane, dims = tl.arange(0, TOKENS * GROUP_PADDED), tl.arange(0, DIM_PADDED)
    token, member = first + lane // GROUP_PADDED, lane % GROUP_PADDED
    real, wide = (token < tokens) & (member < GROUP), dims < DIM
    own = (token.to(tl.int64) * tl.num_programs(0) + head) * GROUP + member  # query heads, counted over all tokens
    q = tl.load(query + own[:, None] * DIM + dims, mask=real[:, None] & wide, other=0.0)
    last = rows - tokens + token  # each token's own row, the last one that it sees
    top, weight, mixed = no_rows(q)
    end = tl.minimum(rows - tokens + first + TOKENS, rows)  # behind the row of the last of these tokens
    for begin in range(0, end, BLOCK):
        row = begin + tl.arange(0, BLOCK)
        at = head * stride_head + row.to(tl.int64)[:, None] * stride_row + dims
        k = tl.load(keys + at, mask=(row < end)[:, None] & wide, other=0.0)
        v = tl.load(values + at, mask=(row < end)[:, None] & wide, other=0.0)
        seen = row[None, :] <= last[:, None]
        _, top, weight, mixed = attend_rows(q, k, v, seen, scaling, top, weight, mixed, None)
    out = (mixed / weight[:, None]).to(output.dtype.element_ty)
    tl.store(output + own[:, None] * DIM + dims, out, mask=real[:, None] & wide)
    if mass is not None:  # again, since only now the largest logit and the sum of weights are known
        each = first + tl.arange(0, TOKENS)
        for begin in range(0, end, BLOCK):
            row = begin + tl.arange(0, BLOCK)
            at = head * stride_head + row.to(tl.int64)[:, None] * stride_row + dims
            k = tl.load(keys + at, mask=(row < end)[:, None] & wide, other=0.0)
            logits = dot(q, tl.trans(k)) * scaling
            p = tl.exp(logits - top[:, None]) / weight[:, None]
            p = tl.where((row[None, :] <= last[:, None]) & real[:, None], p, 0.0)
            paid = tl.sum(tl.reshape(p, [TOKENS, GROUP_PADDED, BLOCK]), 1)
            to = (each.to(tl.int64)[:, None] * tl.num_programs(0) + head) * rows + row
            tl.store(mass + to, paid, mask=(each < tokens)[:, None] & (row < end)[None, :])
