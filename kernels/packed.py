"""Weights in the order in which oneDNN multiplies on a CPU: large float32 products take half the time or less.

A weight lies in memory twice then, because prompts are read with torch's own products. For small weights, as the
embedded models have, torch's own products are faster.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from kvsweep.kernels.row_format import TOKEN_BLOCK

PackedProduct = Callable[[Tensor, Tensor | None], Tensor]


def pack(weight: Tensor) -> None:
    """Give a weight [outputs, width] on a CPU its packed copy, which is freed with it."""
    if weight.device.type == "cpu" and torch.backends.mkldnn.is_available():
        weight.packed_product = packed_product(weight)  # type: ignore[attr-defined]


def packed_product(weight: Tensor) -> PackedProduct:
    """Return the product of inputs [tokens, width] and a packed copy of the weight, plus a bias [outputs] or None.

    No other place calls these private operations of torch. If a later torch renames them, `test_a_product` says
    what to do.
    """
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), TOKEN_BLOCK)

    def product(inputs: Tensor, bias: Tensor | None) -> Tensor:
        result: Tensor = torch.ops.mkldnn._linear_pointwise(inputs, packed, bias, "none", [], "")
        return result

    return product
