"""Quantize rows of keys and values to bytes and back, for both implementations; rotate heads to spread outliers."""

from functools import reduce

import torch
from torch import Tensor

from kvsweep.kernels.row_format import RowFormat

# Rounding to float16 changes a number by at most 2^-11 of the number or, below float16's normal numbers, by 2^-25. So a
# number minus these margins stays below itself after rounding, and a number plus these margins stays above.
_MARGIN, _LEAST = 2.0**-10, 2.0**-24
# KVarN: steps of the normalization; limits of a deviation, and of a scale's logarithm.
_STEPS, _DEVIATIONS, _SCALES = 16, (1e-3, 1e3), (-0.3, 10.0)
_UNPACK = {4: torch.ops.quantized.embedding_bag_4bit_unpack, 2: torch.ops.quantized.embedding_bag_2bit_unpack}


def rotation(head_dim: int) -> tuple[Tensor, Tensor]:
    """Return the Hadamard rotation of a head and its inverse, both symmetric, [head_dim, head_dim], float32.

    QuaRot (2404.00456), section 3: Sylvester's construction; head_dim is a power of two. The factor is a power of two,
    not a root, so that bfloat16 holds every entry and the two matrices are exact inverses.
    """
    power = head_dim.bit_length() - 1
    hadamard = torch.ones(1, 1)
    for _ in range(power):
        hadamard = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), hadamard)
    shrink = (power + 1) // 2  # half of the exponents; the inverse's factor is 2 ** -power over this one
    return hadamard * 2.0**-shrink, hadamard * 2.0 ** (shrink - power)


def pack_rows(rows: Tensor, row_format: RowFormat) -> Tensor:
    """Quantize rows [..., head_dim] to bytes [..., row_bytes].

    The numbers of a group go to the nearest of 2^bits levels. The levels enclose the group after zero and step are
    rounded, so no number changes by more than half a step.
    """
    numbers = rows.float().unflatten(-1, (-1, row_format.group))
    low, high = numbers.aminmax(dim=-1, keepdim=True)
    # `zero` lies below the lowest number, and zero + top * step above the highest.
    zero = (low - low.abs() * _MARGIN - _LEAST).half()
    step = ((high - zero.float()) * ((1 + _MARGIN) / row_format.top) + _LEAST).half()
    levels = ((numbers - zero.float()) / step.float()).round_().clamp_(0, row_format.top).to(torch.uint8)
    # Neighbouring levels share a byte, the first in its lowest bits.
    levels_of_byte = levels.unflatten(-1, (-1, 8 // row_format.bits)).unbind(-1)
    shifted = [level << (place * row_format.bits) for place, level in enumerate(levels_of_byte)]
    packed = reduce(torch.bitwise_or, shifted)
    fields = torch.cat([step, zero], dim=-1).view(torch.uint8)
    return torch.cat([packed, fields], dim=-1).flatten(-2)


def unpack_rows(packed: Tensor, row_format: RowFormat) -> Tensor:
    """Return the numbers of quantized rows [..., row_bytes] in float32, [..., head_dim]."""
    groups = packed.reshape(-1, row_format.group_bytes).contiguous()
    if groups.device.type == "cpu" and row_format.bits in _UNPACK:
        # fbgemm's loop is several times as fast as the operations below.
        numbers = _UNPACK[row_format.bits](groups)
    else:
        levels, fields = groups.split([row_format.group_bytes - 4, 4], dim=1)
        levels, fields = levels.contiguous(), fields.contiguous()
        places = [levels >> place & row_format.top for place in range(0, 8, row_format.bits)]  # `pack_rows` in reverse
        step, zero = fields.view(torch.float16).float().split(1, dim=1)
        numbers = torch.stack(places, dim=-1).flatten(1) * step + zero
    return numbers.view(*packed.shape[:-1], row_format.head_dim)


def column_scales(tiles: Tensor) -> Tensor:
    """Return KVarN's scale of each column of tiles [..., rows, columns], float32, [..., 1, columns].

    KVarN (2606.03458; constants of huawei-csl/KVarN, ascend_kernel/kvarn_store_tile_k/api_test.py at f9806bd) divides
    columns, then rows, by their standard deviations, 16 times, and takes the scales after which the deviations differ
    least. Scales of rows are not returned: quantized rows have a step each, which absorbs them.
    """
    tiles = tiles.float()
    # Logarithms of the scales.
    column_logs = torch.zeros_like(tiles[..., :1, :])
    row_logs = torch.zeros_like(tiles[..., :1])
    scaled = tiles
    best = column_logs
    least = _unevenness(tiles)
    for _ in range(_STEPS):
        column_logs = (column_logs + scaled.std(dim=-2, keepdim=True).clamp(*_DEVIATIONS).log()).clamp(*_SCALES)
        scaled = tiles / column_logs.exp() / row_logs.exp()
        row_logs = (row_logs + scaled.std(dim=-1, keepdim=True).clamp(*_DEVIATIONS).log()).clamp(*_SCALES)
        scaled = tiles / column_logs.exp() / row_logs.exp()
        unevenness = _unevenness(scaled)
        best = torch.where(unevenness <= least, column_logs, best)  # of equal ones the later
        least = torch.minimum(unevenness, least)
    return best.exp()


def _unevenness(tiles: Tensor) -> Tensor:
    """The largest deviation of a tile's columns, and of its rows, over the smallest, added: [..., 1, 1]."""
    return _largest_over_smallest(tiles.std(dim=-2)) + _largest_over_smallest(tiles.std(dim=-1))


def _largest_over_smallest(deviations: Tensor) -> Tensor:
    """Divide the largest of the deviations [..., number] by the smallest: [..., 1, 1]."""
    return (deviations.amax(-1) / deviations.amin(-1).clamp(min=1e-8))[..., None, None]
