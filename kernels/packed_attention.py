"""Split-K flash decoding over a quantized cache: the Triton kernel of `kernels.reference.packed_attention`.

Works as `kernels.decode_attention`, which adds up rows and joins chunks; here a program unpacks rows in registers.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from kvsweep.kernels.decode_attention import CHUNK, attend_rows, chunk_of_slot, join, no_rows, scratch
from kvsweep.kernels.linear import rounded
from kvsweep.kernels.row_format import RowFormats
from kvsweep.kernels.tiles import padded

BLOCK = constexpr(16)  # rows per product; the numbers of two larger unpacked tiles do not fit into the registers
WARPS = 8  # with 4 warps, a row's levels (two or more share a byte) would spill registers


def packed_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    newest: Tensor,
    positions: Tensor,
    counts: Tensor,
    lengths: Tensor,
    *,
    formats: RowFormats,
    scaling: float,
    return_mass: bool = False,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Do `kernels.reference.packed_attention`. Dead rows are never read and may hold any bytes."""
    slots, kv_heads, capacity, _ = keys.shape
    dim = newest.shape[-1]
    rows = (keys, values, newest, positions)
    assert all(tensor.stride(-1) == 1 for tensor in rows), "the numbers of a row are contiguous"
    assert newest.stride(-2) == dim, "the newest rows of a head are contiguous"
    query = query.contiguous()
    lengths = lengths.contiguous()
    chunks = triton.cdiv(capacity, CHUNK)
    parts = scratch(query, chunks, capacity if return_mass else 1)  # what the programs store for `join`
    group = query.shape[1] // kv_heads  # query heads of a key head
    # The same bytes also as float16, for each group's step and zero.
    _attend_packed[(slots, kv_heads, chunks)](
        query, keys, keys.view(torch.float16), values, values.view(torch.float16), newest, positions, counts,
        lengths, *parts, scaling, capacity,
        *keys.stride()[:3], *values.stride()[:3], *newest.stride()[:3], *positions.stride()[:2], *counts.stride(),
        GROUP=group, GROUP_PADDED=triton.next_power_of_2(group),
        DIM=dim, DIM_PADDED=padded(dim),
        KEY_BITS=formats[0].bits, VALUE_BITS=formats[1].bits, SHARE=formats[1].group,
        RESIDUAL=newest.shape[3], MASS=return_mass, SOFTCAP=softcap,
        num_warps=WARPS, num_stages=2,
    )  # fmt: skip
    return join(query, parts, lengths, kv_heads, sinks, return_mass)


@triton.jit
def _attend_packed(
    query, keys, key_fields, values, value_fields, newest, positions, counts, lengths,
    part, peak, total, logits_out, scaling, capacity,
    key_slot, key_head, key_row, value_slot, value_head, value_row, newest_slot, newest_kind, newest_head,
    position_slot, position_head, count_slot, count_head,
    GROUP: constexpr, GROUP_PADDED: constexpr, DIM: constexpr, DIM_PADDED: constexpr,
    KEY_BITS: constexpr, VALUE_BITS: constexpr,
    SHARE: constexpr, RESIDUAL: constexpr, MASS: constexpr, SOFTCAP: constexpr,
):  # fmt: skip
    """Do `kernels.decode_attention._attend_chunk` over rows of which the first `counts` are packed."""
    slot, head, chunk, length = chunk_of_slot(lengths)
    start = chunk * CHUNK
    if start < length:
        end = tl.minimum(start + CHUNK, length)
        count = tl.load(counts + slot * count_slot + head * count_head).to(tl.int32)
        group, dims = tl.arange(0, GROUP_PADDED), tl.arange(0, DIM_PADDED)
        heads = (slot * tl.num_programs(1) + head) * GROUP + group  # query heads, counted over all slots
        real, wide = group < GROUP, dims < DIM
        q = tl.load(query + heads[:, None] * DIM + dims, mask=real[:, None] & wide, other=0.0)
        old_keys, old_values = slot * key_slot + head * key_head, slot * value_slot + head * value_head
        new = slot * newest_slot + head * newest_head
        places = positions + slot * position_slot + head * position_head
        top, weight, mixed = no_rows(q)
        for first in range(start, end, BLOCK):
            rows = first + tl.arange(0, BLOCK)
            live = rows < end
            # Each row is loaded from the one memory that has it, and the other gives zeros.
            is_old, is_new = live & (rows < count), live & (rows >= count)
            lie = tl.load(places + rows, mask=is_new, other=0) % RESIDUAL
            row = rows.to(tl.int64)[:, None]
            at_new = new + lie[:, None] * DIM + dims
            mask_old = is_old[:, None] & wide
            mask_new = is_new[:, None] & wide
            k = tl.load(newest + at_new, mask=mask_new, other=0.0)
            v = tl.load(newest + newest_kind + at_new, mask=mask_new, other=0.0)
            old_k = _unpacked(keys, key_fields, old_keys + row * key_row, dims, mask_old, KEY_BITS, SHARE)
            old_v = _unpacked(values, value_fields, old_values + row * value_row, dims, mask_old, VALUE_BITS, SHARE)
            k = tl.where(is_old[:, None], rounded(old_k, k.dtype), k)
            v = tl.where(is_old[:, None], rounded(old_v, v.dtype), v)
            logits, top, weight, mixed = attend_rows(q, k, v, live[None, :], scaling, top, weight, mixed, SOFTCAP)
            if MASS:
                tl.store(logits_out + heads[:, None] * capacity + rows, logits, mask=real[:, None] & live)
        cell = heads * tl.num_programs(2) + chunk
        tl.store(part + cell[:, None] * DIM + dims, mixed, mask=real[:, None] & wide)
        tl.store(peak + cell, top, mask=real)
        tl.store(total + cell, weight, mask=real)


@triton.jit
def _unpacked(packed, fields, at, dims, mask, BITS: constexpr, SHARE: constexpr):
    """Return the numbers of packed rows; `at` is the byte where a row begins, `fields` the same memory as float16."""
    GROUP_BYTES: constexpr = SHARE * BITS // 8 + 4
    PER_BYTE: constexpr = 8 // BITS
    group = dims // SHARE * GROUP_BYTES  # a group has its levels, then step and zero of two bytes each
    levels = tl.load(packed + at + (group + dims % SHARE // PER_BYTE), mask=mask, other=0).to(tl.int32)
    levels = (levels >> (dims % PER_BYTE * BITS)) & ((1 << BITS) - 1)
    step_at = fields + at // 2 + (group + SHARE * BITS // 8) // 2
    step = tl.load(step_at, mask=mask, other=0.0).to(tl.float32)
    zero = tl.load(step_at + 1, mask=mask, other=0.0).to(tl.float32)
    return zero + step * levels.to(tl.float32)
