"""A completion is bit for bit the same whatever is decoded beside it: each operation alone, and a short hunt."""

import argparse
import random
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

from kvsweep.compression.recorders import ImportancePredictor
from kvsweep.harness.decode.engine import is_invariant
from kvsweep.harness.decode.request import SamplingConfig
from kvsweep.harness.decode.sampling import cuts
from kvsweep.harness.decode.slots import Prefiller
from kvsweep.harness.settings import UserError
from kvsweep.kernels import reference
from kvsweep.kernels.packed import pack
from kvsweep.kernels.row_format import ROW_BLOCK, TOKEN_BLOCK, filled_tokens, whole_blocks
from kvsweep.kernels.sampling import inverse_cdf
from scripts.bench.hunt_differences import POLICIES, Plan, compare, observe, prepare
from tests.harness.decode.fakes import toy_model

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
THREADS = pytest.mark.parametrize("threads", [1, 2])
COUNTS = (1, 2, 3, 5, 7, 8, 13, 31, 64, 65)


@pytest.fixture(autouse=True)
def threads_as_before():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def same_rows(operation, *inputs):
    """Holds an operation on the first few rows, and on rows that changed places, against the operation on all rows."""
    whole, order = operation(*inputs), torch.randperm(len(inputs[0]))
    for count in COUNTS:
        assert torch.equal(operation(*(i[:count].clone() for i in inputs)), whole[:count]), count
    assert torch.equal(operation(*(i[order] for i in inputs)), whole[order])


def filled(inputs):
    return functional.pad(inputs, (0, 0, 0, filled_tokens(len(inputs)) - len(inputs)))


@pytest.mark.covers(1)
@THREADS
@DTYPES
@pytest.mark.parametrize(("width", "outs"), [(128, 256), (384, 128), (896, 200), (100, 60), (3584, 512)])
def test_a_product(width, outs, dtype, threads):
    """If `torch.ops.mkldnn` has no such operation: a later torch has renamed those of `kernels.packed.packed_product`.

    torch/_inductor/fx_passes/mkldnn_fusion.py packs the weights of a linear layer with them: look there for the new
    names and arguments, and change that function alone. If the last line fails, they compute something else: let `pack`
    return early, and ARITHMETIC name packed products `torch` plus a number.
    """
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    weight, bias = torch.randn(outs, width).to(dtype), torch.randn(outs).to(dtype)
    inputs = torch.randn(101, width).to(dtype)
    for packed in (False, True):
        if packed:
            pack(weight)
        same_rows(lambda x: reference.linear(filled(x), weight, bias)[: len(x)], inputs)
        same_rows(lambda x: reference.linear(x, weight, bias), inputs)
    torch.testing.assert_close(reference.linear(inputs, weight), inputs @ weight.T, atol=0.01, rtol=0.01)


@pytest.mark.parametrize(
    "rounds", ["more tokens", "a seventh", "the last two", "every second", "rows, and columns beyond a block"]
)
def test_a_product_that_rounds_otherwise_is_done_in_another_form(monkeypatch, rounds):
    """As libraries do on some processors, whatever this one does. A BLAS library is known to round by a row's place."""
    multiply, columns = functional.linear, reference._across

    def otherwise(x):
        factor = torch.ones(len(x), 1)
        if rounds == "more tokens":
            factor += 1e-6 * (len(x) > TOKEN_BLOCK)
        elif rounds == "a seventh":  # of the others no output is rounded otherwise
            factor += 1e-6 * (x[:, :1].abs() > 1.47) * (len(x) > TOKEN_BLOCK)
        elif rounds == "the last two":
            factor[max(1, len(x) - 2) :] += 1e-6
        else:
            factor[1::2] += 1e-6
        return factor

    def by_columns(x, *rest):
        return columns(x, *rest) * (1 + 1e-6 * (rounds.startswith("rows") and len(x) > TOKEN_BLOCK))

    monkeypatch.setattr(functional, "linear", lambda x, *rest: multiply(x, *rest) * otherwise(x))
    monkeypatch.setattr(reference, "_across", by_columns)
    monkeypatch.setattr(reference, "_products", {})
    torch.manual_seed(0)
    weight, bias = torch.randn(24, 40), torch.randn(24)
    for offset in (None, bias):
        same_rows(lambda x, offset=offset: reference.linear(x, weight, offset), torch.randn(101, 40))
    many = torch.randn(64, 40)
    assert not (functional.linear(many, weight) == reference.linear(many, weight)).all()
    torch.testing.assert_close(reference.linear(many, weight, bias), many @ weight.T + bias)


@pytest.mark.covers(1)
@THREADS
@DTYPES
@pytest.mark.parametrize("widths", [(256, 64), (40, 9), (5,)])
def test_the_predictor(widths, dtype, threads):
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    predictor = ImportancePredictor(128, widths).to(dtype).requires_grad_(False)
    same_rows(lambda x: predictor(filled(x), reference.linear)[: len(x)], torch.randn(101, 128).to(dtype))


@pytest.mark.covers(1)
@THREADS
@DTYPES
@pytest.mark.parametrize(("group", "dim"), [(1, 16), (2, 32), (4, 96), (7, 128)])
@pytest.mark.parametrize("length", [1, 17, 33, 129, 260, 1000, 1100])
def test_attention_beside_a_longer_slot(length, group, dim, dtype, threads):
    torch.set_num_threads(threads)
    torch.manual_seed(length)
    query, (keys, values) = torch.randn(3, group, dim).to(dtype), torch.randn(2, 3, 1, 2600, dim).to(dtype)
    lengths = torch.tensor([length, 1, length])

    def attend(slots, longest):
        seen = whole_blocks(longest, ROW_BLOCK)
        rows = keys[:slots, :, :seen], values[:slots, :, :seen]
        output, mass = reference.decode_attention(query[:slots], *rows, lengths[:slots], scaling=0.2, return_mass=True)
        return output[0], mass[0, :, :length]

    alone = attend(1, length)
    longer = [case for case in [(2, 400), (3, 640), (3, 1024), (2, 1056), (3, 2590)] if case[1] >= length]
    for slots, longest in [(1, length + 31), (3, length), (3, length + 70), *longer]:
        assert all(map(torch.equal, attend(slots, longest), alone)), (slots, longest)


@DTYPES
def test_norms_gates_and_draws(dtype):
    torch.manual_seed(0)
    states, weight = torch.randn(101, 768).to(dtype), torch.rand(384).to(dtype)
    same_rows(lambda x: functional.rms_norm(x[:, :384], (384,), weight, 1e-6), states)
    same_rows(lambda x: functional.silu(x.chunk(2, dim=-1)[0]) * x.chunk(2, dim=-1)[1], states)
    logits, numbers = 3 * torch.randn(101, 1500), torch.rand(101, dtype=torch.float64)
    for top_k in (0, 20):
        settings = SamplingConfig(temperature=0.6, top_p=0.9, top_k=top_k)
        same_rows(lambda *row, settings=settings: inverse_cdf(*row, **cuts(settings)), logits, numbers)


@pytest.mark.parametrize("invariant", [True, False])
def test_a_prompt_beside_others(invariant):
    """Without the setting the same prompt has other bits beside a longer one: the test can fail."""
    numbers = random.Random(0)
    prompts = [tuple(numbers.randrange(3, 128) for _ in range(length)) for length in (5, 33, 64, 65, 190, 66)]

    def rows(*together):
        prefiller = Prefiller(toy_model(), keep_queries=True, alone=invariant)
        while together[0] not in prefiller.done:
            prefiller.advance(together)
        found = prefiller.done[together[0]]
        return torch.cat([t.flatten() for pair in found.rows for t in pair] + [q.flatten() for q in found.queries])

    with torch.inference_mode():
        same = [torch.equal(rows(prompt), rows(prompt, *prompts)) for prompt in prompts]
    assert all(same) == invariant


def test_the_default_and_what_is_refused():
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    llama, gemma, mixtral = (
        SimpleNamespace(family=name, fusable=name == "llama", experts=name == "mixtral")
        for name in ("llama", "gemma", "mixtral")
    )
    assert [is_invariant(None, llama, device, "torch") for device in (cpu, gpu)] == [True, False]
    assert is_invariant(True, llama, gpu, "triton")
    assert is_invariant(True, gemma, cpu, "torch")
    assert not is_invariant(False, llama, cpu, "torch")
    assert not is_invariant(None, mixtral, cpu, "torch")
    for spec, impl in ((llama, "torch"), (gemma, "triton")):
        with pytest.raises(UserError, match="invariant=true needs impl=triton on a GPU"):
            is_invariant(True, spec, gpu, impl)
    with pytest.raises(UserError, match="invariant=true cannot hold for the experts of model type mixtral"):
        is_invariant(True, mixtral, cpu, "torch")


PLANS = [
    Plan(slots=1, cells=(1, 7)),
    Plan(slots=7, shards=2, kills=2, order=5, cells=(0, 1, 2, 3, 6)),
    Plan(slots=13, threads=2, order=3, kills=1, cells=(2, 4, 5, 8, 9)),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "invariant", "bits"),
    [("float32", True, 16), ("bfloat16", True, 16), ("float32", False, 16), ("float32", True, 4)],
)
@pytest.mark.one_in(2)
def test_a_short_hunt(dtype, invariant, bits):
    """Without the setting the hunt finds the bits of some logits and caches changed."""
    arguments = argparse.Namespace(problems=2, draws=1, dtype=dtype, invariant=str(invariant), impl="torch", bits=bits)
    make = partial(prepare, arguments, "toy_llama", benchmark="toy_chain", question="null", seed=0)
    whole = {threads: observe(make, Plan(threads=threads), dice=random.Random(0)) for threads in (1, 2)}
    assert all(len(seen.lines) == len(POLICIES) * 2 for seen in whole.values())
    found = [compare(whole[plan.threads], observe(make, plan, dice=random.Random(1))) for plan in PLANS]
    assert sum(f["rows"] for f in found) == (2 + 5 + 5) * 2
    assert all(f["logits"] for f in found)
    different = [sum(f[name] for f in found) for name in ("rows_different", "logits_different", "caches_different")]
    assert different == [0, 0, 0] if invariant else different[1] and different[2]
