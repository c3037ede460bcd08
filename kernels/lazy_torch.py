"""torch for modules that a refusal or `--help` also imports: torch is imported where one of its names is first used."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

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

__all__ = ["Tensor", "functional", "torch"]
