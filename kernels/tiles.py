"""Tile sizes and arithmetic precision that the Triton kernels share."""

import os

import torch
import triton.language as tl

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# True where products are in float32: Triton's interpreter multiplies bfloat16 wrongly, without an error, and cuts off
# where a GPU rounds.
UPCAST = tl.constexpr(INTERPRETED)


def padded(width: int) -> int:
    """Return the smallest power of two that holds `width` and that `tl.dot` accepts, at least 16."""
    return max(16, 1 << (width - 1).bit_length())


def row_tile(dtype: torch.dtype, width: int) -> dict[str, int]:
    """Constants to multiply rows of `width` numbers: DEPTH at a time is all, in float32 16 to save registers."""
    depth = 16 if dtype == torch.float32 else padded(width)
    return {"DIM": width, "DEPTH": depth, "num_stages": stages(dtype)}


def stages(dtype: torch.dtype) -> int:
    """Loads in flight (`num_stages`): one in float32, which leaves no registers for a second."""
    return 1 if dtype == torch.float32 else 2
