"""The Triton kernels in the interpreter against the reference in float64.

The interpreter must be asked for before a kernel is imported, and a process that has it cannot compile: so this file's
tests run in a process of their own, which `test_in_the_interpreter` starts.
"""

import itertools
from pathlib import Path

import pytest
import torch

from kvsweep.kernels import reference
from kvsweep.kernels.fp8 import DTYPES as FP8
from kvsweep.kernels.packing import pack_rows
from kvsweep.kernels.row_format import RowFormat
from tests.kernels.beside import close, compared, exact, kernel
from tests.kernels.interpreter import BY_MARK, DTYPES, INTERPRETED, run_files

pytest.importorskip("triton")
BESIDE = [Path(__file__).with_name(name) for name in ("test_triton.py", "test_pointwise.py", "test_drawing.py")]
FILES = {"not slow": BESIDE, "slow": (*BESIDE, Path("tests/harness/models/test_fused_step.py"))}
inside = pytest.mark.skipif(not INTERPRETED, reason="runs in the process that test_in_the_interpreter starts")


@pytest.mark.core
@BY_MARK
@pytest.mark.skipif(INTERPRETED, reason="this is that process")
def test_in_the_interpreter(mark):
    run_files(mark, *FILES[mark])


@inside
@pytest.mark.covers(1)
@DTYPES
@pytest.mark.parametrize(
    ("group", "dim", "capacity", "lengths"),
    [(1, 8, 1, [1, 1]), (4, 96, 130, [1, 130]), (7, 128, 600, [513, 37]), (16, 64, 70, [65, 64])],
)
def test_decode_attention(group, dim, capacity, lengths, dtype):
    torch.manual_seed(group)
    query = torch.randn(2, group, dim).to(dtype)
    keys, values = torch.randn(2, 2, 1, capacity, dim).to(dtype)
    for slot, length in enumerate(lengths):
        keys[slot, :, length:], values[slot, :, length:] = torch.nan, torch.nan
    inputs, scaling = (query, keys, values, torch.tensor(lengths)), dim**-0.5
    output, _ = compared("decode_attention", *inputs, dtype=dtype, scaling=scaling, return_mass=True)
    without, none = kernel("decode_attention")(*inputs, scaling=scaling)
    assert none is None
    assert torch.equal(without, output)


@inside
@pytest.mark.covers(1)
@DTYPES
@pytest.mark.parametrize(
    ("group", "dim", "rows", "tokens"), [(1, 8, 1, 1), (4, 96, 130, 33), (7, 128, 150, 150), (16, 64, 70, 5)]
)
@pytest.mark.slow_unless(rule=lambda tokens, **_: tokens < 150)
def test_chunk_attention(group, dim, rows, tokens, dtype):
    torch.manual_seed(group)
    query = torch.randn(tokens, 2 * group, dim).to(dtype)
    memory = torch.full((2, 2, rows + 9, dim), torch.nan).to(dtype)  # rows behind the chunk's are never read
    memory[:, :, :rows] = torch.randn(2, 2, rows, dim).to(dtype)
    keys, values = memory[:, :, :rows]
    chunk_attention = kernel("chunk_attention")
    output, mass = chunk_attention(query, keys, values, scaling=dim**-0.5, return_mass=True)
    # The same tokens one after the other, each over its own rows alone.
    for token in range(tokens):
        seen = rows - tokens + token + 1
        one = [exact(tensor)[None] for tensor in (query[token], keys, values)]
        expected = reference.decode_attention(*one, torch.tensor([seen]), scaling=dim**-0.5, return_mass=True)
        close(output[token], expected[0][0], dtype)
        close(mass[token], expected[1][0], dtype)
    assert torch.equal(chunk_attention(query, keys, values, scaling=dim**-0.5)[0], output)


@inside
@DTYPES
@pytest.mark.parametrize("scale", ["none", "tensor", "token"])
@pytest.mark.parametrize("form", ["e4m3", "e5m2"])
@pytest.mark.slow_unless(rule=lambda dtype, **_: dtype == torch.bfloat16)
def test_decode_attention_over_fp8_rows(form, scale, dtype):
    """All codes of a format, three query heads a key head, heads of 24 numbers; dead rows and scales are NaN."""
    torch.manual_seed(2)
    query, lengths = torch.randn(2, 6, 24).to(dtype), torch.tensor([37, 5])
    codes = torch.arange(2 * 2 * 2 * 40 * 24).view(2, 2, 2, 40, 24).to(torch.uint8).view(FP8[form])
    # Numbers of one size: those of a code apart from its exponent's highest bits, so that no weight is all of them.
    keys, values = torch.where(codes.float().abs() < 2, codes.float(), 0.5).to(FP8[form])
    scales = [] if scale == "none" else list(torch.rand(2, 2, 2, 40, 1) + 0.1)
    if scale == "tensor":  # one number in the memory of one head's rows
        scales = [one[0, 0, :1].repeat(40, 1).expand(2, 2, 40, 1) for one in scales]
    clean = [[tensor.clone() for tensor in several] for several in ((keys, values), scales)]
    for slot, length in enumerate(lengths.tolist()):
        for rows in (keys, values):
            rows.view(torch.uint8)[slot, :, length:] = 127  # NaN in both formats
        for own in scales if scale == "token" else ():
            own[slot, :, length:] = torch.nan
    how = {"scaling": 24**-0.5, "return_mass": True}
    output, mass = kernel("decode_attention")(query, keys, values, lengths, scales=scales, **how)
    expected = reference.decode_attention(query.double(), *clean[0], lengths, scales=clean[1], **how)
    close(output, expected[0], dtype)
    close(mass, expected[1], dtype)


@inside
def test_decode_attention_of_an_empty_slot():
    torch.manual_seed(0)
    query, (keys, values) = torch.randn(2, 6, 16), torch.randn(2, 2, 2, 40, 16)
    empty = query, keys * torch.nan, values, torch.tensor([0, 0])
    output, mass = kernel("decode_attention")(*empty, scaling=1, return_mass=True)
    assert not output.any()
    assert not mass.any()
    assert not kernel("decode_attention")(*empty, scaling=1)[0].any()


@inside
@DTYPES
@pytest.mark.parametrize("softcap", [pytest.param(None, marks=pytest.mark.slow), 3.0])
@pytest.mark.slow_unless(rule=lambda dtype, softcap: dtype == torch.bfloat16)
def test_attention_with_sinks_and_a_softcap(softcap, dtype):
    """Over whole rows and over packed ones, of more than a chunk; sinks of all sizes, one a query head."""
    torch.manual_seed(0)
    query, (keys, values) = 3 * torch.randn(2, 6, 16).to(dtype), torch.randn(2, 2, 2, 530, 16).to(dtype)
    lengths, sinks = torch.tensor([525, 2]), torch.tensor([-9.0, -1, 0, 1, 4, 30]).to(dtype)
    how = {"scaling": 0.3, "return_mass": True, "softcap": softcap, "dtype": dtype}
    _, mass = compared("decode_attention", query, keys, values, lengths, sinks=sinks, **how)
    assert not torch.allclose(mass, compared("decode_attention", query, keys, values, lengths, **how)[1], rtol=0.1)
    forms, newest = [RowFormat(bits=8, group=16, head_dim=16)] * 2, torch.randn(2, 2, 2, 24, 16).to(dtype)
    packed = [pack_rows(torch.randn(2, 2, 530, 16), form) for form in forms]
    counts, positions = (lengths[:, None] - 10).clamp(min=0).expand(-1, 2), torch.arange(530).expand(2, 2, -1)
    rows = *packed, newest, positions, counts, lengths
    compared("packed_attention", query, *rows, formats=forms, sinks=sinks, **how)


@inside
@pytest.mark.covers(1)
@DTYPES
@pytest.mark.parametrize(
    ("bits", "group", "dim", "lengths"),
    [((8, 4), 1, 16, [1, 40]), ((4, 4), 7, 96, [540, 77]), ((2, 8), 4, 128, [64, 65])],
)
@pytest.mark.slow_unless(rule=lambda group, **_: group != 7)
def test_packed_attention(bits, group, dim, lengths, dtype):
    """Each head has its own number of packed rows; bytes that nobody uses are those of NaN."""
    torch.manual_seed(bits[0])
    forms, residual, capacity = [RowFormat(bits=n, group=16, head_dim=dim) for n in bits], 24, max(lengths) + 3
    query, newest = torch.randn(2, 2 * group, dim).to(dtype), torch.randn(2, 2, 2, residual, dim).to(dtype)
    packed = [pack_rows(torch.randn(2, 2, capacity, dim), form) for form in forms]
    positions, lengths = torch.arange(capacity).expand(2, 2, -1) + 1000, torch.tensor(lengths)
    counts = (lengths[:, None] - torch.tensor([[residual, 5], [3, 24]])).clamp(min=0)
    expected = reference.packed_attention(
        *(query.double(), *packed, newest.double(), positions, counts, lengths),
        formats=forms,
        scaling=0.2,
        return_mass=True,
    )
    for slot, head in itertools.product(range(2), range(2)):
        for memory in packed:
            memory[slot, head, counts[slot, head] :] = 0xFF
        used = positions[slot, head, counts[slot, head] : lengths[slot]] % residual
        unused = [place for place in range(residual) if place not in used.tolist()]
        newest[slot, :, head, unused] = torch.nan
    inputs = query, *packed, newest, positions, counts, lengths
    packed_attention = kernel("packed_attention")
    output, mass = packed_attention(*inputs, formats=forms, scaling=0.2, return_mass=True)
    close(output, expected[0], dtype)
    close(mass, expected[1], dtype)
    assert torch.equal(packed_attention(*inputs, formats=forms, scaling=0.2)[0], output)


@inside
@pytest.mark.covers(1)
@DTYPES
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize(
    ("capacity", "kept", "kinds"), [(1, 1, 2), (150, 97, 2), (150, 150, 2), (70, 0, 2), (90, 41, 1)]
)
def test_compact_layers_is_bit_exact(capacity, kept, kinds, per_head, dtype):
    torch.manual_seed(capacity + kept)
    # In float32 the rows are whole units of 16 bytes; in 16 bits of 4, as packed rows may be.
    layers, heads, dim = 2, 2, 24 if dtype == torch.float32 else 22
    caches = torch.randn(kinds * layers, 3, heads, capacity, dim).to(dtype)
    caches[0, 1, 0, 0, 0] = torch.nan
    order = torch.rand(layers, heads, capacity).argsort(dim=-1)[..., :kept].sort(dim=-1).values
    keep = order if per_head else order[0, 0].contiguous()
    expected = caches.clone()
    kernel("compact_layers")([cache[1] for cache in caches], keep)
    # As integers: the CPU's gather of bfloat16 changes the bits of a NaN.
    reference.compact_layers([cache[1].view(torch.int16) for cache in expected], keep)
    assert torch.equal(caches.view(torch.int16), expected.view(torch.int16))


@inside
@pytest.mark.covers(1)
@DTYPES
@pytest.mark.parametrize("kind", ["answer", "far_max", "later"])
@pytest.mark.parametrize(("group", "length", "dim"), [(1, 1, 64), (7, 65, 16), (4, 100, 96)])
@pytest.mark.slow_unless(rule=lambda dtype, group, **_: dtype == torch.float32 or group == 7)
def test_importance_labels(kind, group, length, dim, dtype):
    torch.manual_seed(length)
    query, key = torch.randn(group, length, dim).to(dtype), torch.randn(1, length, dim).to(dtype)
    how = {"kind": kind, "scaling": dim**-0.5, "answer_start": length * 2 // 3, "min_distance": 5}
    compared("importance_labels", query, key, dtype=dtype, **how)


@inside
@DTYPES
@pytest.mark.slow_unless(rule=lambda dtype: dtype != torch.float16)
def test_causal_mass(dtype):
    query, key = torch.randn(8, 67, 16).to(dtype), torch.randn(2, 67, 16).to(dtype)
    compared("causal_mass", query, key, dtype=dtype, scaling=0.25)


@inside
@pytest.mark.covers(1)
@DTYPES
@pytest.mark.parametrize("length", [1, 64, 131])
@pytest.mark.parametrize("threshold", [0.5, 0.99, -0.5])
def test_redundancy(length, threshold, dtype):
    torch.manual_seed(length)
    # Few distinct directions, so that many keys are similar; some are like none.
    keys = (torch.randn(2, 5, 24)[:, torch.randint(5, (length,))] + 0.3 * torch.randn(2, length, 24)).to(dtype)
    compared("redundancy", keys, dtype=dtype, threshold=threshold)


@inside
@pytest.mark.covers(1)
@DTYPES
@pytest.mark.parametrize("past_only", [False, True])
@pytest.mark.parametrize(("pool_logits", "pooling", "pool"), [(False, 5, "mean"), (True, 7, "max"), (False, 1, "mean")])
@pytest.mark.parametrize(("group", "length", "window"), [(7, 9, 8), (4, 101, 8)])
@pytest.mark.slow_unless(rule=lambda length, past_only, **_: (length == 9) == past_only)
def test_observation_scores(group, length, window, past_only, pool_logits, pooling, pool, dtype):
    torch.manual_seed(length)
    cache = torch.full((1, length + 9, 24), torch.nan)
    cache[:, :length] = torch.randn(1, length, 24)
    queries, keys = torch.randn(group, window, 24).to(dtype), cache.to(dtype)[:, :length]
    how = {"scaling": 0.2, "past_only": past_only, "pool_logits": pool_logits, "pooling": pooling, "pool": pool}
    compared("observation_scores", queries, keys, dtype=dtype, **how)


@inside
@pytest.mark.covers(1)
@DTYPES
@pytest.mark.parametrize(
    ("tokens", "width", "outs", "bias"), [(1, 7, 3, False), (17, 130, 70, True), (5, 64, 1, False)]
)
def test_linear(tokens, width, outs, bias, dtype):
    torch.manual_seed(width)
    inputs, weight = torch.randn(tokens, 2 * width).to(dtype)[:, :width], torch.randn(outs, width).to(dtype)
    offset = torch.randn(outs).to(dtype) if bias else None
    compared("linear", inputs, weight, offset, dtype=dtype)
    compared("linear", inputs, weight[:1].expand(16, -1), dtype=dtype)


@inside
@DTYPES
@pytest.mark.slow_unless(rule=lambda dtype: dtype != torch.float16)
def test_a_token_has_the_same_bits_in_every_product(dtype, plain_products):
    torch.manual_seed(0)
    inputs, weight, linear = torch.randn(67, 200).to(dtype), torch.randn(40, 200).to(dtype), kernel("linear")
    whole = linear(inputs, weight)
    for tokens in (1, 17, 64):
        assert torch.equal(linear(inputs[:tokens], weight), whole[:tokens])
    order = torch.randperm(67)
    assert torch.equal(linear(inputs[order], weight), whole[order])


@inside
@DTYPES
@pytest.mark.slow_unless(rule=lambda dtype: dtype == torch.bfloat16)
def test_a_slot_has_the_same_bits_beside_any_others_and_in_any_capacity(dtype, plain_products):
    torch.manual_seed(0)
    query, (keys, values) = torch.randn(17, 4, 16).to(dtype), torch.randn(2, 17, 1, 530, 16).to(dtype)
    lengths = torch.randint(1, 40, (17,))
    lengths[:2] = torch.tensor([520, 3])
    decode_attention = kernel("decode_attention")
    whole = decode_attention(query, keys, values, lengths, scaling=0.25, return_mass=True)
    for slots, capacity in [(1, 520), (3, 525), (8, 530)]:
        of = slice(17 - slots, 17) if slots == 8 else slice(slots)
        rows = keys[of, :, :capacity], values[of, :, :capacity]
        output, mass = decode_attention(query[of], *rows, lengths[of], scaling=0.25, return_mass=True)
        assert torch.equal(output, whole[0][of])
        assert torch.equal(mass, whole[1][of, :, :capacity])
    few = query[2:], keys[2:, :, :40], values[2:, :, :40], lengths[2:]  # one chunk, which nothing joins
    assert torch.equal(decode_attention(*few, scaling=0.25)[0], whole[0][2:])
