"""A matrix product whose tiles depend on the weight alone: the Triton kernel of `kernels.reference.linear`.

A program runs over the whole inner dimension in order, so a token's outputs have the same bits in every batch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvsweep.kernels.tiles import upcast

TOKENS = 16  # the fewest that a tensor core multiplies
STAGES = 3  # the weight is read once, so the time is that of its loads
_MANY_COLUMNS = 16384


def tile(weight: Tensor) -> dict[str, int]:
    """Columns and depth of a tile: fewer columns for a narrow weight, so that there are programs for the whole GPU."""
    columns = 64 if weight.shape[0] >= _MANY_COLUMNS else 32
    return {"COLUMNS": columns, "DEPTH": 32 if weight.dtype == torch.float32 else 128}


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    inputs = inputs.contiguous()
    tokens, outs = len(inputs), len(weight)
    output = torch.empty(tokens, outs, dtype=inputs.dtype, device=inputs.device)
    how = {**tile(weight), "TOKENS": TOKENS, "BIAS": bias is not None, "UPCAST": upcast(inputs.dtype)}
    how |= {"num_warps": 4, "num_stages": STAGES}
    _multiply[(triton.cdiv(outs, how["COLUMNS"]), triton.cdiv(tokens, TOKENS))](
        inputs, weight, weight if bias is None else bias, output, tokens, outs, inputs.shape[1], weight.stride(0), **how
    )
    return output


@triton.jit
def _multiply(
    inputs, weight, bias, output, tokens, outs, width, stride_row,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, BIAS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    cols = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    real, kept = (rows < tokens)[:, None], cols < outs
    total = tl.zeros([TOKENS, COLUMNS], tl.float32)
    for start in range(0, width, DEPTH):
        inner = start + tl.arange(0, DEPTH)
        inside = inner < width
        x = tl.load(inputs + rows.to(tl.int64)[:, None] * width + inner, mask=real & inside, other=0.0)
        w = tl.load(weight + cols.to(tl.int64)[:, None] * stride_row + inner, mask=kept[:, None] & inside, other=0.0)
        if UPCAST:
            x, w = x.to(tl.float32), w.to(tl.float32)
        total = tl.dot(x, tl.trans(w), total, input_precision="ieee")
    if BIAS:
        total += tl.load(bias + cols, mask=kept, other=0.0).to(tl.float32)
    to = output + rows.to(tl.int64)[:, None] * outs + cols
    tl.store(to, total.to(output.dtype.element_ty), mask=real & kept)
