"""R-KV's similarity score without a square matrix: the Triton kernel of `kernels.reference.redundancy`.

The sum of a column of cosines is the product of its key with the sum of all keys, less one entry per row. A scan finds
these entries from the newest key backwards; a block of rows stops as soon as each of its rows has met a similar key.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvsweep.kernels.tiles import row_tile

BLOCK = 64


def redundancy(keys: Tensor, *, threshold: float) -> Tensor:
    heads, length, head_dim = keys.shape
    unit = torch.nn.functional.normalize(keys.float(), dim=-1, eps=1e-8).contiguous()
    last = torch.empty(heads, length, dtype=torch.int32, device=keys.device)
    lost, taken = (torch.empty(heads, length, dtype=torch.float32, device=keys.device) for _ in range(2))
    grid = (triton.cdiv(length, BLOCK), heads)
    _last_similar[grid](
        unit, last, lost, threshold, length, **row_tile(unit.dtype, head_dim), BLOCK=BLOCK, num_warps=8, num_stages=1
    )
    _sum_lost[grid](last, lost, taken, length, BLOCK=BLOCK, num_warps=4, num_stages=1)
    received = torch.einsum("hld,hd->hl", unit, unit.sum(dim=1)) - unit.square().sum(dim=-1)
    return ((received - taken) / length).softmax(dim=-1)


@triton.jit
def _last_similar(
    unit, last, lost, threshold, length,
    DIM: tl.constexpr, DIM_PADDED: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64) * length
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = rows < length
    found, cosine = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.float32)
    first = (tl.cdiv(length, BLOCK) - 1) * BLOCK
    while first >= 0:
        cols = first + tl.arange(0, BLOCK)
        cosines = tl.zeros([BLOCK, BLOCK], tl.float32)
        for start in range(0, DIM_PADDED, DEPTH):
            dims = start + tl.arange(0, DEPTH)
            wide = dims < DIM
            row = tl.load(unit + (head + rows)[:, None] * DIM + dims, mask=real[:, None] & wide, other=0.0)
            col = tl.load(unit + (head + cols)[:, None] * DIM + dims, mask=(cols < length)[:, None] & wide, other=0.0)
            cosines = tl.dot(row, tl.trans(col), cosines, input_precision="ieee")
        cosines = tl.where(rows[:, None] == cols[None, :], 0.0, cosines)
        similar = (cosines > threshold) & (cols < length)[None, :]
        best = tl.max(tl.where(similar, cols[None, :], 0), 1)
        # A row that has found no similar key by the first block loses column 0, whatever its cosine.
        new = (found == 0) & ((best > 0) | (first == 0))
        value = tl.sum(tl.where(cols[None, :] == best[:, None], cosines, 0.0), 1)
        found, cosine = tl.where(new, best, found), tl.where(new, value, cosine)
        first = tl.where(tl.min(tl.where(real, found, 1), 0) > 0, -1, first - BLOCK)
    tl.store(last + head + rows, found, mask=real)
    tl.store(lost + head + rows, cosine, mask=real)


@triton.jit
def _sum_lost(last, lost, taken, length, BLOCK: tl.constexpr):
    head = tl.program_id(1).to(tl.int64) * length
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, length, BLOCK):
        rows = first + tl.arange(0, BLOCK)
        at = tl.load(last + head + rows, mask=rows < length, other=-1)
        value = tl.load(lost + head + rows, mask=rows < length, other=0.0)
        total += tl.sum(tl.where(at[:, None] == cols[None, :], value[:, None], 0.0), 0)
    tl.store(taken + head + cols, total, mask=cols < length)
