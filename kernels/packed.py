"""Weights in the order in which oneDNN multiplies on a CPU: large float32 products take half the time.

A weight lies in memory twice then, because prompts are read with torch's own products. For small weights, as the
embedded models have, torch's own products are faster.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from kvsweep.kernels.row_format import TOKEN_BLOCK

PackedProduct = Callable[[Tensor, Tensor | None], Tensor]


def pack(weight: Tensor) -> None:
    """Give a weight [outputs, width] on a CPU that multiplies its precision a packed copy, which is freed with it."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return
    if weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and multiplies_bfloat16()):
        weight.packed_product = packed_product(weight)  # type: ignore[attr-defined]


def multiplies_bfloat16() -> bool:
    """Say if this processor has instructions for bfloat16."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def packed_product(weight: Tensor) -> PackedProduct:
    """Return the product of inputs [tokens, width] and a packed copy of the weight, plus a bias [outputs] or None.

    Only this file calls private operations of torch. If a later torch renames them, `test_a_product` says
    what to do.
    """
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), TOKEN_BLOCK)

    def product(inputs: Tensor, bias: Tensor | None) -> Tensor:
        result: Tensor = torch.ops.mkldnn._linear_pointwise(inputs, packed, bias, "none", [], "")
        return result

    return product
