"""The switch between the reference and its Triton twins; nothing falls back from one to the other."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal

import torch

from kernels import reference

Implementation = Literal["torch", "triton"]


@dataclass(frozen=True, kw_only=True)
class CacheOperations:
    """What the slot cache computes with, as `kernels.reference` specifies it.

    Attributes:
        ragged: whether attention itself stops at each length, so that rows need not be cut to the longest.
    """

    decode_attention: Callable[..., Any]
    compact_layers: Callable[..., None]
    ragged: bool


def check_available(impl: str) -> None:
    """Refuse an implementation that this machine cannot run.

    Raises:
        ValueError: an unknown name; Triton where it is not installed, or without a GPU and its interpreter.
    """
    if impl not in ("torch", "triton"):
        raise ValueError(f"impl={impl} is unknown: choose torch or triton.")
    if impl == "triton" and find_spec("triton") is None:
        raise ValueError("impl=triton needs the package triton, which is not installed: install it or choose torch.")
    if impl == "triton" and not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError("impl=triton needs a CUDA GPU, or TRITON_INTERPRET=1 to try it without: else choose torch.")


def cache_operations(impl: Implementation) -> CacheOperations:
    """The operations of one implementation.

    Raises:
        ValueError: `check_available` refuses it.
    """
    check_available(impl)
    if impl == "torch":
        return CacheOperations(
            decode_attention=reference.decode_attention, compact_layers=reference.compact_layers, ragged=False
        )
    from kernels.compact import compact_layers
    from kernels.decode_attention import decode_attention

    return CacheOperations(decode_attention=decode_attention, compact_layers=compact_layers, ragged=True)
