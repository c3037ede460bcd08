"""fp8 rows: every code and every number of 16 bits against the formats written out and against torch's own cast."""

import math

import pytest
import torch

from kvsweep.kernels.fp8 import DTYPES, row_scales, to_fp8, widened
from kvsweep.kernels.reference import decode_attention

FORMATS = pytest.mark.parametrize(("form", "exponent", "mantissa"), [("e4m3", 4, 3), ("e5m2", 5, 2)])


def by_definition(code: int, exponent: int, mantissa: int) -> float:
    """The number of a code (OCP 8-bit floating point, 1.0): e5m2 has infinities, e4m3 one NaN of each sign."""
    sign, power, part = -1.0 if code >> 7 else 1.0, code >> mantissa & 2**exponent - 1, code & 2**mantissa - 1
    if power == 2**exponent - 1 and (exponent == 5 or part == 2**mantissa - 1):
        return math.nan if part else sign * math.inf
    bias = 2 ** (exponent - 1) - 1
    fraction = part / 2**mantissa
    return sign * (2.0 ** (power - bias) * (1 + fraction) if power else 2.0 ** (1 - bias) * fraction)


@FORMATS
def test_every_code_is_its_number_and_every_number_its_code(form, exponent, mantissa):
    codes = torch.arange(256, dtype=torch.uint8)
    numbers = widened(codes.view(DTYPES[form]), None, torch.float32)
    expected = torch.tensor([by_definition(code, exponent, mantissa) for code in range(256)])
    assert torch.equal(numbers.nan_to_num(9e9), expected.nan_to_num(9e9))
    finite = expected.isfinite()
    again = to_fp8(numbers, DTYPES[form])
    assert torch.equal(again.view(torch.uint8)[finite], codes[finite])
    assert torch.equal(again.view(torch.uint8)[finite], numbers.to(DTYPES[form]).view(torch.uint8)[finite])
    assert again.float()[expected.isnan()].isnan().all()
    top = expected[finite].max()
    assert top == {"e4m3": 448, "e5m2": 57344}[form]
    assert torch.equal(again.float()[expected.isinf()], expected[expected.isinf()].sign() * top)


@FORMATS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_16_bit_number_goes_to_the_nearest_code(form, exponent, mantissa, dtype):
    """All 65,536 of them: the nearest code, ties to the even one, the largest beyond it, NaN for NaN alone."""
    halves = torch.float16 if dtype == torch.float16 else torch.bfloat16
    numbers = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(halves).to(dtype)
    found = to_fp8(numbers, DTYPES[form])
    assert torch.equal(found.float().isnan(), numbers.isnan())
    values = torch.tensor([by_definition(code, exponent, mantissa) for code in range(128)], dtype=torch.float64)
    values = values[values.isfinite()]
    sizes = numbers[~numbers.isnan()].double().abs().clamp(max=float(values.max()))
    above = torch.searchsorted(values, sizes).clamp(min=1)
    low, high = sizes - values[above - 1], values[above] - sizes
    even = above % 2 == 0
    nearest = torch.where((high < low) | ((high == low) & even), above, above - 1)
    codes = found.view(torch.uint8)[~numbers.isnan()]
    assert torch.equal(codes.long() & 127, nearest)
    assert torch.equal(codes >> 7 == 1, numbers[~numbers.isnan()].signbit())
    inside = numbers.abs() <= float(values.max())
    assert torch.equal(found.view(torch.uint8)[inside], numbers.to(DTYPES[form]).view(torch.uint8)[inside])


@FORMATS
def test_a_scale_puts_the_largest_number_of_a_row_at_the_top(form, exponent, mantissa):
    torch.manual_seed(0)
    rows = torch.randn(40, 3, 24) * 10.0 ** torch.arange(-4, 4)[torch.randint(8, (40, 1, 1))]
    rows[5], rows[6, 0, 3], rows[7, 0, 3] = 0, torch.nan, torch.inf
    scale = row_scales(rows, DTYPES[form])
    codes = to_fp8(rows, DTYPES[form], scale)
    whole = torch.ones(40, dtype=torch.bool).index_fill_(0, torch.tensor([5, 6, 7]), value=False)
    top = torch.finfo(DTYPES[form]).max
    large = rows[whole].abs().amax(-1) > 1e-6 * top
    assert (codes.float().abs().amax(-1)[whole] == top)[large].all()
    assert (scale[whole][~large] == 1e-6).all()
    assert 0 < large.sum() < large.numel()
    back = widened(codes, scale, torch.float32)
    # Half a step of the mantissa, and of the smallest numbers half the smallest step.
    least = scale * 2.0 ** (1 - (2 ** (exponent - 1) - 1) - mantissa)
    allowed = torch.maximum(rows.abs() * 2.0 ** -(mantissa + 1), least / 2) * 1.0001
    assert ((back - rows).abs() <= allowed)[whole].all()
    assert not back[5].any()
    assert back[6, 0, 3].isnan(), "a row that is not finite does not become finite"
    assert not back[7, 0].isfinite().all()
    assert back[6:8, 1:].isfinite().all()


@FORMATS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scaled", [False, True])
def test_attention_is_that_over_the_rows_that_torch_casts(form, exponent, mantissa, dtype, scaled):
    """In float64; three query heads a key head, heads of 20 numbers, slots of other lengths, any finite dead rows."""
    torch.manual_seed(1)
    query, rows = torch.randn(3, 9, 20).to(dtype), torch.randn(2, 3, 3, 33, 20).to(dtype)
    lengths, cast = [33, 1, 17], []
    given, scales = [], []
    for one in rows:
        scale = row_scales(one, DTYPES[form]) if scaled else None
        codes = to_fp8(one, DTYPES[form], scale)
        given, scales = [*given, codes], scales if scale is None else [*scales, scale]
        by = 1.0 if scale is None else scale.double()
        cast.append((one.double() / by).float().to(DTYPES[form]).double() * by)
    for slot, length in enumerate(lengths):
        for codes in given:
            codes.view(torch.uint8)[slot, :, length:] = 99
    how = {"scaling": 20**-0.5, "return_mass": True, "softcap": 4.0}
    output, mass = decode_attention(query, *given, torch.tensor(lengths), scales=scales, **how)
    assert output.dtype == dtype
    for slot, length in enumerate(lengths):
        for head in range(9):
            key, value = (one[slot, head // 3, :length] for one in cast)
            logits = key @ query[slot, head].double() * 20**-0.5
            weights = (torch.tanh(logits / 4) * 4).softmax(0)
            allowed = 1e-6 if dtype == torch.float32 else 5e-3
            torch.testing.assert_close(output[slot, head].double(), weights @ value, rtol=allowed, atol=allowed)
        assert not mass[slot, :, length:].any()
    torch.testing.assert_close(mass.sum(-1), torch.full((3, 3), 3.0))
