"""Eviction in one launch, in place: the Triton kernel of `kernels.reference.compact_layers`.

Rows move only towards the front, and each block takes them in order, so no block loads a row that an earlier block has
overwritten. A barrier separates a block's loads from its stores.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

BLOCK = constexpr(64)
WORDS = constexpr(32)


def compact_layers(rows: Sequence[Tensor], keep: Tensor) -> None:
    """Do `kernels.reference.compact_layers` for tensors of one layout; rows begin at multiples of 16 or 4 bytes."""
    kept = keep.shape[-1]
    assert all(tensor.stride() == rows[0].stride() for tensor in rows), "one layout for all layers"
    assert rows[0].stride(-1) == 1, "the numbers of a row are contiguous"
    first = rows[0].view(torch.uint8)
    # Bytes from a head to the next, from a row to the next, and of a row.
    sizes = [*first.stride()[:2], first.shape[-1]]
    addresses = [tensor.data_ptr() for tensor in rows]
    alignment = math.gcd(16, *sizes, *addresses)
    assert alignment >= 4, "the kernel moves 4 bytes at least"
    unit = 4 if alignment == 16 else 1  # words that the kernel moves together
    if not kept:
        return
    pointers = _on_device(tuple(addresses), keep.device)
    keep = keep.contiguous()
    units = [number // (4 * unit) for number in sizes]
    per_layer = len(rows) // len(keep)  # tensors of a layer; if all layers share `keep`, it is not read
    blocks = triton.cdiv(sizes[-1], 4 * WORDS)  # of a row's words
    _move_rows[(len(rows), len(first), blocks)](
        pointers, keep, kept, *units, per_layer, UNIT=unit, SHARED=keep.dim() == 1
    )


@lru_cache(maxsize=1024)
def _on_device(pointers: tuple[int, ...], device: torch.device) -> Tensor:
    """Copy the pointers to the device; cached, because they never change and a copy makes the host wait."""
    return torch.tensor(pointers, dtype=torch.int64, device=device)


@triton.jit
def _move_rows(
    pointers, keep, kept, stride_head, stride_row, units, per_layer,
    UNIT: constexpr, SHARED: constexpr,
):  # fmt: skip
    """Move one block of words of one head's kept rows, [heads, capacity, words], in one of the tensors."""
    # Strides and widths are counted in units of 16 bytes (four 32-bit words), so that the compiler sees the alignment,
    # or in units of one word if rows are not aligned to 16 bytes.
    tensor, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    base = tl.load(pointers + tensor).to(tl.pointer_type(tl.int32))
    base = tl.multiple_of(base, 4 * UNIT)
    base += head * stride_head * UNIT
    if not SHARED:
        keep += ((tensor // per_layer) * tl.num_programs(1) + head) * kept
    words = tl.program_id(2) * WORDS + tl.arange(0, WORDS)
    inside = (words // UNIT) < units  # by units, so that the compiler sees whole units masked alike
    for first in range(0, kept, BLOCK):
        targets = first + tl.arange(0, BLOCK)
        real = targets < kept
        sources = tl.load(keep + targets, mask=real, other=0).to(tl.int64)
        mask = real[:, None] & inside
        moved = tl.load(base + sources[:, None] * (stride_row * UNIT) + words, mask=mask)
        tl.debug_barrier()
        tl.store(base + targets.to(tl.int64)[:, None] * (stride_row * UNIT) + words, moved, mask=mask)
