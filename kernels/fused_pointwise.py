"""What a decode step computes between its products and attention, in one launch each: Triton kernels of `pointwise`.

A program computes numbers of one token, with tiles that depend only on the widths, so a token has the same bits beside
any others. All arithmetic is in float32, and a result is rounded once; only the sum of `add_norm` is rounded before its
norm is computed, as the model rounds what it passes on.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from kvsweep.kernels.pointwise import HeadNorms
from kvsweep.kernels.tiles import padded

# Of a program.
HEADS = constexpr(8)
COLUMNS = constexpr(1024)


def add_norm(states: Tensor, update: Tensor | None, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Do `kernels.pointwise.add_norm`."""
    states = states.contiguous()
    normed = torch.empty_like(states)
    total = states
    if update is not None:
        total = torch.empty_like(states)
        update = update.contiguous()
    width = states.shape[1]
    _add_norm[(len(states),)](states, update, weight, total, normed, width, epsilon, **row_block(width))
    return total, normed


def row_block(width: int) -> dict[str, int]:
    """Return the launch constants of a program that holds a whole row in its registers."""
    block = triton.next_power_of_2(width)
    return {"BLOCK": block, "num_warps": min(16, max(1, block // 512))}


def gated(gate_up: Tensor) -> Tensor:
    tokens = len(gate_up)
    width = gate_up.shape[1] // 2
    output = torch.empty(tokens, width, dtype=gate_up.dtype, device=gate_up.device)
    _gate[(tokens, triton.cdiv(width, COLUMNS))](gate_up.contiguous(), output, width)
    return output


def rotate_and_write(
    heads: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    lines: Tensor,
    *,
    q_heads: int,
    norms: HeadNorms | None = None,
) -> Tensor:
    """Do `kernels.pointwise.rotate_and_write`."""
    tokens, count, dim = heads.shape
    kv_heads = (count - q_heads) // 2
    assert all(rows.is_contiguous() for rows in (keys, values)), "a line is a row of the whole memory"
    assert len(lines) == tokens * kv_heads, "a line for each key"
    query = torch.empty(tokens, q_heads, dim, dtype=heads.dtype, device=heads.device)
    q_weight, k_weight, epsilon = norms or (None, None, 0.0)
    how = {"Q_HEADS": q_heads, "KV_HEADS": kv_heads, "DIM": dim, "DIM_PADDED": padded(dim)}
    inputs = heads.contiguous(), cos.contiguous(), sin.contiguous(), q_weight, k_weight
    _rotate[(tokens, triton.cdiv(count, HEADS))](*inputs, query, keys, values, lines, epsilon, **how)
    return query


@triton.jit
def _add_norm(states, update, weight, total, normed, width, epsilon, BLOCK: constexpr):
    """Add and normalize one token's row [width]."""
    columns = tl.arange(0, BLOCK)
    inside, at = columns < width, tl.program_id(0).to(tl.int64) * width + columns
    x = tl.load(states + at, mask=inside, other=0.0)
    if update is not None:
        added = tl.load(update + at, mask=inside, other=0.0)
        x = (x.to(tl.float32) + added.to(tl.float32)).to(x.dtype)
        tl.store(total + at, x, mask=inside)
    x = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x) / width + epsilon)
    w = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + at, (x * scale * w).to(normed.dtype.element_ty), mask=inside)


@triton.jit
def _gate(gate_up, output, width):
    """Compute one block of one token's columns [width]."""
    token, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside, at = columns < width, gate_up + token * 2 * width + columns
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + width, mask=inside, other=0.0).to(tl.float32)
    product = gate / (1.0 + tl.exp(-gate)) * up  # SiLU of the gate
    tl.store(output + token * width + columns, product.to(output.dtype.element_ty), mask=inside)


@triton.jit
def _rotate(
    heads, cos, sin, q_weight, k_weight, query, keys, values, lines, epsilon,
    Q_HEADS: constexpr, KV_HEADS: constexpr, DIM: constexpr, DIM_PADDED: constexpr,
):  # fmt: skip
    """Normalize, rotate and store some heads of one token: queries to the output, keys and values to their lines."""
    COUNT: constexpr = Q_HEADS + 2 * KV_HEADS
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dims = tl.arange(0, DIM_PADDED)
    wide, partner = dims < DIM, (dims + DIM // 2) % DIM  # the same place in the other half of the head
    row = heads + (token * COUNT + head)[:, None] * DIM
    real = (head < COUNT)[:, None] & wide
    own = tl.load(row + dims, mask=real, other=0.0)
    x, y = own.to(tl.float32), tl.load(row + partner, mask=real, other=0.0).to(tl.float32)
    if q_weight is not None:
        is_query = (head < Q_HEADS)[:, None]
        scale = tl.rsqrt(tl.sum(x * x, 1) / DIM + epsilon)[:, None]
        x *= scale * _head_weight(q_weight, k_weight, dims, wide, is_query)
        y *= scale * _head_weight(q_weight, k_weight, partner, wide, is_query)
    c = tl.load(cos + token * DIM + dims, mask=wide, other=0.0).to(tl.float32)
    s = tl.load(sin + token * DIM + dims, mask=wide, other=0.0).to(tl.float32)
    turned = (x * c + y * s).to(own.dtype)
    tl.store(query + (token * Q_HEADS + head)[:, None] * DIM + dims, turned, mask=(head < Q_HEADS)[:, None] & wide)
    # Behind the queries come the keys (kind 0), then the values (kind 1), which are not rotated.
    kind, member = (head - Q_HEADS) // KV_HEADS, (head - Q_HEADS) % KV_HEADS
    is_key, is_value = (head >= Q_HEADS) & (kind == 0), (head >= Q_HEADS) & (kind == 1)
    line = tl.load(lines + token * KV_HEADS + member, mask=is_key | is_value, other=0)
    tl.store(keys + line[:, None] * DIM + dims, turned, mask=is_key[:, None] & wide)
    tl.store(values + line[:, None] * DIM + dims, own, mask=is_value[:, None] & wide)


@triton.jit
def _head_weight(q_weight, k_weight, dims, wide, is_query):
    q, k = tl.load(q_weight + dims, mask=wide, other=0.0), tl.load(k_weight + dims, mask=wide, other=0.0)
    return tl.where(is_query, q.to(tl.float32), k.to(tl.float32))
