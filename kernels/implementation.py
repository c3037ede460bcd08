"""The switch between the reference and its Triton twins; nothing falls back from one to the other."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor

from kernels import reference

Implementation = Literal["torch", "triton"]


@dataclass(frozen=True, kw_only=True)
class Operations:
    """What the slot cache, its policies and the labels compute with, as `kernels.reference` specifies it.

    Attributes:
        ragged: whether attention itself stops at each length, so that rows need not be cut to the longest and a step
            of a given number of slots is always the same launches: one that a CUDA graph can replay.
    """

    decode_attention: Callable[..., tuple[Tensor, Tensor | None]]
    compact_layers: Callable[..., None]
    causal_mass: Callable[..., Tensor]
    importance_labels: Callable[..., Tensor]
    observation_scores: Callable[..., Tensor]
    redundancy: Callable[..., Tensor]
    ragged: bool


def check_installed(impl: str) -> None:
    """Refuse an implementation that no machine with these packages can run.

    Raises:
        ValueError: an unknown name; Triton where it is not installed.
    """
    if impl not in ("torch", "triton"):
        raise ValueError(f"impl={impl} is unknown: choose torch or triton.")
    if impl == "triton" and find_spec("triton") is None:
        raise ValueError("impl=triton needs the package triton, which is not installed: install it or choose torch.")


def check_available(impl: str) -> None:
    """Refuse an implementation that this machine cannot run.

    Raises:
        ValueError: `check_installed` refuses it; Triton without a GPU and its interpreter.
    """
    check_installed(impl)
    if impl == "triton" and not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError("impl=triton needs a CUDA GPU, or TRITON_INTERPRET=1 to try it without: else choose torch.")


def operations(impl: Implementation) -> Operations:
    """The operations of one implementation.

    Raises:
        ValueError: `check_available` refuses it.
    """
    check_available(impl)
    if impl == "torch":
        return Operations(
            decode_attention=reference.decode_attention,
            compact_layers=reference.compact_layers,
            causal_mass=reference.causal_mass,
            importance_labels=reference.importance_labels,
            observation_scores=reference.observation_scores,
            redundancy=reference.redundancy,
            ragged=False,
        )
    from kernels import compact, decode_attention, importance_labels, observation, redundancy

    return Operations(
        decode_attention=decode_attention.decode_attention,
        compact_layers=compact.compact_layers,
        causal_mass=importance_labels.causal_mass,
        importance_labels=importance_labels.importance_labels,
        observation_scores=observation.observation_scores,
        redundancy=redundancy.redundancy,
        ragged=True,
    )


TORCH = operations("torch")
