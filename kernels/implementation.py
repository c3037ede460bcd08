"""Choose the reference operations or the Triton kernels. Neither falls back to the other."""

import os
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

from kvsweep.messages.errors import UserError

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.nn import functional
else:

    class _Lazy:
        def __init__(self, module: str) -> None:
            self._module = module

        def __getattr__(self, name: str) -> Any:
            return getattr(import_module(self._module), name)

    torch, functional, Tensor = _Lazy("torch"), _Lazy("torch.nn.functional"), Any


Implementation = Literal["torch", "triton"]
# What rounds a cell's numbers: packed is torch with `kernels.packed`, openai a server's own.
Rounding = Implementation | Literal["packed", "openai"]
# What the ids of cells call it: another name as soon as its results have other bits.
ARITHMETIC = {"torch": "torch", "packed": "torch packed", "triton": "triton 2", "openai": "openai"}
# `kernels.reference` or `kernels.triton_kernels`: every operation, and RAGGED.
Operations = ModuleType


def check_installed(impl: Implementation) -> None:
    """Raise UserError for Triton if it is not installed."""
    if impl == "triton" and find_spec("triton") is None:
        raise UserError("impl=triton needs the package triton, which is not installed: install it or choose torch.")


def check_available(impl: Implementation) -> None:
    """Like `check_installed`; also raise UserError if Triton has neither a GPU nor its interpreter."""
    check_installed(impl)
    if impl == "torch":
        return
    if os.environ.get("TRITON_INTERPRET") == "1":
        return
    import torch

    if not torch.cuda.is_available():
        raise UserError("impl=triton needs a CUDA GPU, or TRITON_INTERPRET=1 to try it without: else choose torch.")


def operations(impl: Implementation = "torch") -> Operations:
    """Import the operations of one implementation; raises UserError if `check_available` refuses it."""
    check_available(impl)
    if impl == "torch":
        from kvsweep.kernels import reference

        return reference
    from kvsweep.kernels import triton_kernels

    return triton_kernels


__all__ = ["Tensor", "functional", "torch"]
