"""The fused pointwise kernels in the interpreter against the reference in float64.

tests/kernels/test_triton.py starts the process that runs these tests. tests/harness/models/test_loaded.py compares the
reference with transformers' modules.
"""

import pytest
import torch
from torch import Tensor

from kvsweep.kernels import pointwise
from tests.kernels.interpreter import DTYPES, INTERPRETED, TOLERANCE

pytest.importorskip("triton")
inside = pytest.mark.skipif(not INTERPRETED, reason="runs in the process that test_triton.py starts")
WIDTHS = pytest.mark.parametrize("width", [1, 128, 3584])


def close(actual: Tensor, expected: Tensor):
    """Each token's relative error in the Euclidean norm."""
    assert actual.isfinite().all()
    error = (actual.double() - expected).norm(dim=-1)
    assert (error <= TOLERANCE[actual.dtype] * expected.norm(dim=-1)).all(), error / expected.norm(dim=-1)


def normal(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def exact(*tensors: Tensor) -> list[Tensor]:
    return [tensor.double() for tensor in tensors]


@inside
@DTYPES
@WIDTHS
def test_add_norm(width, dtype):
    from kvsweep.kernels.fused_pointwise import add_norm

    states, weight = 30 * normal(dtype, 3, width), 1 + normal(dtype, width)
    update = normal(dtype, 5, width)[::2]  # not contiguous
    total, normed = add_norm(states, update, weight, 1e-6)
    expected = pointwise.add_norm(*exact(states, update, weight), 1e-6)
    close(total, expected[0])
    close(normed, pointwise.add_norm(total.double(), None, weight.double(), 1e-6)[1])
    close(normed, expected[1])
    same, alone = add_norm(total, None, weight, 1e-6)
    assert same is total
    assert torch.equal(alone, normed)


@inside
@DTYPES
def test_the_epsilon_keeps_a_token_of_zeros_finite(dtype):
    from kvsweep.kernels.fused_pointwise import add_norm

    tiny = torch.stack([torch.zeros(40), torch.full((40,), 1e-4)]).to(dtype)
    _, normed = add_norm(tiny, torch.zeros_like(tiny), torch.ones(40, dtype=dtype), 1e-5)
    assert not normed[0].any()
    close(normed[1], pointwise.add_norm(tiny[1].double(), None, torch.ones(40).double(), 1e-5)[1])


@inside
@DTYPES
@WIDTHS
def test_gated(width, dtype):
    from kvsweep.kernels.fused_pointwise import gated

    gate_up = 4 * normal(dtype, 2, 2 * width)
    gate_up[0, :width] = torch.linspace(90, -90, width)  # exp(90) is beyond float32's numbers
    close(gated(gate_up), pointwise.gated(gate_up.double()))


@inside
@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed heads"])
@DTYPES
@pytest.mark.parametrize(("q_heads", "kv_heads", "dim"), [(4, 2, 32), (28, 4, 128), (3, 1, 10)])
def test_rotate_and_write(q_heads, kv_heads, dim, dtype, normed):
    """Queries, and rows at their lines of a memory that is NaN elsewhere and stays so."""
    from kvsweep.kernels.fused_pointwise import rotate_and_write

    heads = normal(dtype, 3, q_heads + 2 * kv_heads, dim)
    angles = normal(torch.float32, 3, 1, dim)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    lines = torch.randperm(60, generator=torch.Generator().manual_seed(dim))[: 3 * kv_heads]
    weights = 1 + normal(dtype, 2, dim)
    memory = torch.full((2, 2, 5, 6, dim), torch.nan, dtype=dtype)
    how = {"q_heads": q_heads, "norms": (*weights, 1e-6) if normed else None}
    query = rotate_and_write(heads, cos, sin, *memory, lines, **how)
    how["norms"] = (*exact(*weights), 1e-6) if normed else None
    expected = torch.full(memory.shape, torch.nan, dtype=torch.float64)
    close(query.flatten(1), pointwise.rotate_and_write(*exact(heads, cos, sin), *expected, lines, **how).flatten(1))
    assert torch.equal(memory.isnan(), expected.isnan())
    written = expected.isnan().logical_not().all(-1)
    assert int(written.sum()) == 2 * 3 * kv_heads
    close(memory[written].flatten(), expected[written].flatten())
    assert torch.equal(memory[1].double().nan_to_num(), expected[1].nan_to_num()), "values are copied"


@inside
@DTYPES
@pytest.mark.slow_unless(rule=lambda dtype: dtype == torch.bfloat16)
def test_a_token_has_the_same_bits_beside_any_others(dtype):
    from kvsweep.kernels.fused_pointwise import add_norm, gated, rotate_and_write

    tokens = 9
    states, update, weight = normal(dtype, tokens, 200), 2 * normal(dtype, tokens, 200), normal(dtype, 200)
    heads, (cos, sin) = normal(dtype, tokens, 8, 32), normal(dtype, 2, tokens, 1, 32)
    norms = *normal(dtype, 2, 32), 1e-6

    def everything(which):
        memory = torch.zeros(2, len(which) * 2, 32, dtype=dtype)
        query = rotate_and_write(
            *(one[which] for one in (heads, cos, sin)), *memory, torch.arange(len(which) * 2), q_heads=4, norms=norms
        )
        found = *add_norm(states[which], update[which], weight, 1e-6), gated(states[which]), query
        return torch.cat([one.flatten(1) for one in (*found, *memory.view(2, len(which), -1))], dim=1)

    whole, order = everything(torch.arange(tokens)), torch.randperm(tokens)
    assert torch.equal(everything(order), whole[order])
    for few in (1, 4, 7):
        assert torch.equal(everything(torch.arange(few)), whole[:few])
