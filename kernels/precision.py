"""What every Triton kernel here asks of its inputs' precision, and how the interpreter differs from a GPU."""

import os

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def upcast(dtype: torch.dtype) -> bool:
    """Whether a kernel must do its arithmetic in float32 right after loading `dtype`.

    A GPU multiplies half-precision inputs itself, adding up in float32. The interpreter's bfloat16 products are wrong
    without a word, so there everything is widened first.
    """
    return INTERPRETED or dtype == torch.float32


def padded(width: int) -> int:
    """The smallest power of two that holds `width` and that a matrix product takes."""
    return max(16, 1 << (width - 1).bit_length())


def depth(dtype: torch.dtype, width: int) -> int:
    """Numbers of a row to multiply at a time: all on tensor cores, few in float32, which holds them in registers."""
    return 16 if dtype == torch.float32 else padded(width)


def stages(dtype: torch.dtype) -> int:
    """Loads in flight: float32 has no registers left for a second."""
    return 1 if dtype == torch.float32 else 2
