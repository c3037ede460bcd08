"""Rows of 8-bit floating-point numbers, as the "fp8" caches of the serving engines store them.

A number goes to the nearest code, ties to even. What lies beyond the largest number becomes the largest, an infinity
too, and NaN stays NaN, as in NVIDIA's conversion with `satfinite`, which vLLM calls
(csrc/quantization/fp8/nvidia/quant_utils.cuh at 03476e5). SGLang casts with torch, whose cast of e5m2 makes infinities
(python/sglang/srt/mem_cache/memory_pool.py at 000ccdb). Both engines divide keys and values by one scale each for a
whole layer, from a checkpoint or 1.0 (vLLM, vllm/model_executor/layers/quantization/kv_cache.py at 0531c22): 1.0 is
`cache.scale=none` here, and a scale from a calibration `cache.scale=tensor`. A scale per token is absmax / largest, at
least 1e-6, in float32 (vLLM, vllm/v1/attention/ops/triton_reshape_and_cache_flash.py at 027e07f, there over all heads
of a token; here per head).
"""

import torch
from torch import Tensor

from kvsweep.kernels.row_format import Fp8Format

DTYPES: dict[Fp8Format, torch.dtype] = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
_LEAST = 1e-6
_NUMBERS = {dtype: torch.arange(256, dtype=torch.uint8).view(dtype).float() for dtype in DTYPES.values()}


def row_scales(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a float32 scale for each of the rows [..., head_dim], [..., 1]."""
    return scale_of(rows.float().abs().amax(dim=-1, keepdim=True), dtype)


def scale_of(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the scale that stores numbers up to `largest` as the format's numbers."""
    return (largest / torch.finfo(dtype).max).clamp(min=_LEAST)


def to_fp8(rows: Tensor, dtype: torch.dtype, scale: Tensor | None = None) -> Tensor:
    """Return the codes of rows [..., head_dim] divided by their scale, [..., 1] or one number, if they have one."""
    top = torch.finfo(dtype).max
    return (rows if scale is None else rows.float() / scale).clamp(-top, top).to(dtype)


def widened(rows: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the numbers of rows [..., head_dim] in `dtype`, float32 or wider, times their scale if they have one."""
    # On a CPU torch casts one number after the other; a table of the 256 numbers is faster.
    if rows.dtype in _NUMBERS and rows.device.type == "cpu":
        codes = rows.view(torch.uint8)
        wide = _NUMBERS[rows.dtype].index_select(0, codes.flatten().int()).view(rows.shape).to(dtype)
    else:
        wide = rows.to(dtype)
    return wide if scale is None else wide * scale
