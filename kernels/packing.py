"""Rows of keys and values as bytes and back, and the rotation that spreads a row's outliers before it is packed.

Both implementations pack with these functions. A row's bytes depend on that row alone.
"""

import torch
from torch import Tensor

from kvsweep.kernels.row_format import RowFormat

# Rounding to float16 changes a number by at most 2^-11 of the number or, below float16's normal numbers, by 2^-25. A
# number less these margins, then rounded, is below the number; one with them added is above.
_MARGIN, _LEAST = 2.0**-10, 2.0**-24


def rotation(head_dim: int) -> tuple[Tensor, Tensor]:
    """The Hadamard rotation of a head and its inverse, both symmetric, [head_dim, head_dim], float32.

    Sylvester's construction; `head_dim` is a power of two. Its factor is a power of two in place of a root, so that
    bfloat16 holds every entry and the two are exact inverses: the rotation shrinks a vector by at most sqrt(2). Source:
    QuaRot (2404.00456), section 3.
    """
    power, whole = head_dim.bit_length() - 1, torch.ones(1, 1)
    for _ in range(power):
        whole = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), whole)
    shrink = (power + 1) // 2
    return whole * 2.0**-shrink, whole * 2.0 ** (shrink - power)


def pack_rows(rows: Tensor, form: RowFormat) -> Tensor:
    """The bytes [..., row_bytes] of rows [..., head_dim].

    The numbers of a group become the nearest of 2^bits levels from its smallest to its largest number. Zero and step
    are rounded so that these levels enclose the group; so no number changes by more than half a step.
    """
    numbers = rows.float().unflatten(-1, (form.groups, form.group))
    low, high = numbers.aminmax(dim=-1)
    zero = (low - low.abs() * _MARGIN - _LEAST).half()
    step = ((high - zero.float()) * ((1 + _MARGIN) / form.top) + _LEAST).half()
    levels = (numbers - zero.float()[..., None]) / step.float()[..., None]
    levels = levels.round_().clamp_(0, form.top).to(torch.uint8).flatten(-2)
    first, *others = levels.split(form.level_bytes, dim=-1)
    packed = first
    for place, part in enumerate(others, start=1):
        packed = packed | part << (place * form.bits)
    return torch.cat([packed, torch.cat([zero, step], dim=-1).view(torch.uint8)], dim=-1)


def unpack_rows(packed: Tensor, form: RowFormat, real: Tensor, out: Tensor) -> None:
    """Write the numbers of packed rows [..., row_bytes] into `out` [..., head_dim].

    Rows that are not `real`, [...] or broadcast to it, become zeros whatever their bytes are.
    """
    # On the CPU each conversion is several times as fast from contiguous memory.
    levels, fields = (part.contiguous() for part in packed.tensor_split([form.level_bytes], dim=-1))
    fields = fields.view(torch.float16).float().masked_fill_(~real[..., None], 0)
    zero, step = fields[..., None].split(form.groups, dim=-2)  # [..., groups, 1]
    # In words of four bytes, in which all levels of one place are cut out at once.
    words = levels.view(torch.int32)
    if form.bits < 8:
        mask = form.top * 0x01010101
        words = torch.cat([words >> shift & mask for shift in range(0, 8, form.bits)], dim=-1)
    # In float32 for every type of `out`. On the CPU three plain operations are faster than a fused one.
    numbers = out if out.dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32)
    numbers.copy_(words.view(torch.uint8))
    numbers.unflatten(-1, (form.groups, form.group)).mul_(step).add_(zero)
    if numbers is not out:
        out.copy_(numbers)
