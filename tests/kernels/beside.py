"""A kernel beside the reference of its name."""

from typing import Any

import torch
from torch import Tensor

from kvsweep.kernels import reference
from tests.kernels.interpreter import TOLERANCE


def kernel(name: str) -> Any:
    """A Triton kernel, imported when a test runs: the interpreter must be asked for before."""
    from kvsweep.kernels import triton_kernels

    return getattr(triton_kernels, name)


def close(actual: Tensor, expected: Tensor, dtype: torch.dtype):
    """Relative error in the Euclidean norm."""
    actual, expected = actual.double(), expected.double()
    assert actual.isfinite().all()
    assert (actual - expected).norm() <= TOLERANCE[dtype] * expected.norm().clamp(min=1e-30)


def exact(value: Any) -> Any:
    """A tensor of real numbers in float64, with zeros for the NaN of rows that nobody reads."""
    is_real = isinstance(value, Tensor) and value.is_floating_point()
    return value.double().nan_to_num() if is_real else value


def compared(name: str, *inputs: Any, dtype: torch.dtype, **how: Any) -> Any:
    """What a kernel returns, after it was held against the reference in float64."""
    found = kernel(name)(*inputs, **how)
    expected = getattr(reference, name)(*map(exact, inputs), **{key: exact(value) for key, value in how.items()})
    for actual, right in zip(listed(found), listed(expected), strict=True):
        assert torch.equal(actual.isnan(), right.isnan())
        close(actual.nan_to_num(), right.nan_to_num(), dtype)
    return found


def listed(found: Any) -> list[Tensor]:
    return [found] if isinstance(found, Tensor) else [one for one in found if one is not None]
