"""A matrix product with tiles that depend only on the weight: the Triton kernel of `kernels.reference.linear`.

Each program runs over the whole inner dimension in order, so a token's outputs have the same bits in every batch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from kvsweep.kernels.tiles import UPCAST

STAGES = 3  # loads in flight: each weight is read once, so loading takes all the time
_MANY_COLUMNS = 16384


def tile(weight: Tensor) -> dict[str, int]:
    """Choose tokens, columns and depth of a tile from the weight.

    A weight is read once for 64 tokens, which a tensor core multiplies as fast as 16. float32 runs on other units:
    there a tile has fewer tokens, to compute fewer in vain, and fewer columns of a narrow weight, to make more
    programs.
    """
    if weight.dtype != torch.float32:
        return {"TOKENS": 64, "COLUMNS": 64, "DEPTH": 128}
    return {"TOKENS": 16, "COLUMNS": 64 if weight.shape[0] >= _MANY_COLUMNS else 32, "DEPTH": 32}


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Do `kernels.reference.linear`."""
    inputs = inputs.contiguous()
    tokens, outs = len(inputs), len(weight)
    output = torch.empty(tokens, outs, dtype=inputs.dtype, device=inputs.device)
    how = {**tile(weight), "num_warps": 4, "num_stages": STAGES}
    # Neighbouring programs share the weight's rows, so with more tokens they find these in the GPU's cache.
    _multiply[(triton.cdiv(tokens, how["TOKENS"]), triton.cdiv(outs, how["COLUMNS"]))](
        inputs, weight, bias, output, tokens, outs, inputs.shape[1], weight.stride(0), **how
    )
    return output


@triton.jit
def _multiply(
    inputs, weight, bias, output, tokens, outs, width, stride_row,
    TOKENS: constexpr, COLUMNS: constexpr, DEPTH: constexpr,
):  # fmt: skip
    """Compute one tile [TOKENS, COLUMNS] of the output."""
    rows = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    cols = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    real, kept = rows < tokens, cols < outs
    rows_at, cols_at = rows.to(tl.int64) * width, cols.to(tl.int64) * stride_row
    total = products(inputs, rows_at, real, weight, cols_at, kept, width, DEPTH)
    if bias is not None:
        total += tl.load(bias + cols, mask=kept, other=0.0).to(tl.float32)
    to = output + rows.to(tl.int64)[:, None] * outs + cols
    tl.store(to, total.to(output.dtype.element_ty), mask=real[:, None] & kept)


@triton.jit
def products(left, left_at, left_mask, right, right_at, right_mask, width, DEPTH: constexpr):
    """Return the products [left, right] of the rows of two memories, `DEPTH` of their `width` numbers at a time.

    `left_at` and `right_at` [rows] say where each row begins, the masks [rows] which rows there are; others are zeros.
    """
    total = tl.zeros([left_at.shape[0], right_at.shape[0]], tl.float32)
    for start in range(0, width, DEPTH):
        inner = start + tl.arange(0, DEPTH)
        inside = inner < width
        x = tl.load(left + left_at[:, None] + inner, mask=left_mask[:, None] & inside, other=0.0)
        y = tl.load(right + right_at[:, None] + inner, mask=right_mask[:, None] & inside, other=0.0)
        total += dot(x, tl.trans(y))
    return total


@triton.jit
def dot(left, right):
    """Return the product of two tiles in float32, without TF32; the left one is rounded as the right one is."""
    if UPCAST:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left.to(right.dtype), right, input_precision="ieee")


@triton.jit
def rounded(tile, dtype):
    """Round a tile that `dot` takes."""
    if not UPCAST:
        tile = tile.to(dtype)
    return tile
