"""Packed rows against float64: the rotation, the error of a number, attention over packed rows, bytes nobody uses."""

import numpy as np
import pytest
import torch

from kvsweep.kernels.packing import pack_rows, rotation, unpack_rows
from kvsweep.kernels.reference import kivi_attention, packed_attention
from kvsweep.kernels.row_format import RowFormat

BITS = pytest.mark.parametrize("bits", [8, 4, 2])
# Of attention's output over rows of normal numbers, relative in the Euclidean norm. Measured: 0.007, 0.12 and 0.61.
OUTPUT_ERROR = {8: 1e-2, 4: 0.15, 2: 0.7}


def by_definition(packed, form):
    """The numbers of one packed row in float64, byte by byte, as RowFormat's docstring has them."""
    data, per_byte, numbers, steps = packed.numpy().tobytes(), 8 // form.bits, [], []
    for first in range(0, form.row_bytes, form.group_bytes):
        levels, fields = data[first : first + form.group_bytes - 4], data[first + form.group_bytes - 4 :][:4]
        step, zero = np.frombuffer(fields, dtype="<f2").astype(float)
        bits = [levels[j // per_byte] >> form.bits * (j % per_byte) for j in range(form.group)]
        numbers += [zero + step * (level % 2**form.bits) for level in bits]
        steps.append(step)
    return torch.tensor(numbers, dtype=torch.float64), torch.tensor(steps, dtype=torch.float64)


@pytest.mark.parametrize("head_dim", [1, 4, 32, 64, 128, 256])
def test_the_rotation_is_a_hadamard_matrix_with_an_exact_inverse(head_dim):
    forth, back = rotation(head_dim)
    for matrix in (forth, back):
        assert torch.equal(matrix.bfloat16().float(), matrix)
        assert torch.equal(matrix, matrix.T)
    assert torch.equal(forth.double() @ back.double(), torch.eye(head_dim, dtype=torch.float64))
    scaled = forth.double() @ forth.double().T
    assert torch.equal(scaled, scaled[0, 0] * torch.eye(head_dim, dtype=torch.float64))
    assert (forth.abs() == forth[0, 0]).all(), "an outlier spreads over the whole head"


@BITS
@pytest.mark.parametrize(("head_dim", "group"), [(32, 32), (128, 32), (128, 128), (96, 16), (16, 16)])
def test_a_number_changes_by_at_most_half_a_step(head_dim, group, bits):
    form = RowFormat(bits=bits, group=group, head_dim=head_dim)
    torch.manual_seed(head_dim + bits)
    rows = torch.randn(20, head_dim) * 10.0 ** torch.linspace(-4, 3, 20)[:, None]
    rows[::7] += 40 * rows[::7].std()  # far from zero
    rows[3] = 2.5  # no range at all
    packed = pack_rows(rows, form)
    assert packed.dtype == torch.uint8
    assert packed.shape == (20, form.row_bytes)
    assert form.row_bytes == head_dim * bits // 8 + 4 * head_dim // group
    found = unpack_rows(packed, form)
    for row, bytes_, numbers in zip(rows, packed, found, strict=True):
        exact, steps = by_definition(bytes_, form)
        torch.testing.assert_close(numbers.double(), exact, rtol=1e-6, atol=1e-7)
        error = (row.double() - exact).abs().view(-1, group)
        # Float16 resolves nothing finer than 2^-24, and float32 computed the levels.
        assert (error <= (0.5 + 1e-3) * steps[:, None] + 2.0**-23 + 1e-6 * row.abs().max()).all()
        spread = row.view(-1, group).double()
        width = spread.amax(1) - spread.amin(1)
        assert (steps <= (width * 1.0025 + spread.abs().amax(1) / 400) / (2**bits - 1) + 2.0**-22).all()
    again = pack_rows(rows[[5]], form)
    assert torch.equal(again[0], packed[5]), "a row's bytes depend on the row alone"


def cache_of(rows, forms, counts, lengths, residual, capacity):
    """What `packed_attention` is given for keys and values [2, slots, kv_heads, capacity, head_dim]."""
    _, slots, heads, _, dim = rows.shape
    packed = [torch.randint(0, 120, (slots, heads, capacity, form.row_bytes), dtype=torch.uint8) for form in forms]
    newest = torch.zeros(slots, 2, heads, residual, dim, dtype=rows.dtype)
    positions = torch.full((slots, heads, capacity), 12345)
    for slot in range(slots):
        for head in range(heads):
            count, length = counts[slot][head], lengths[slot]
            # The text has twice as many tokens; the newest rows lie without gaps but for the first of them.
            place = torch.arange(length) + length
            positions[slot, head, :length] = place
            for kind, form in enumerate(forms):
                packed[kind][slot, head, :count] = pack_rows(rows[kind, slot, head, :count], form)
            newest[slot, :, head, place[count:] % residual] = rows[:, slot, head, count:length]
    return *packed, newest, positions, torch.tensor(counts), torch.tensor(lengths)


def attend(query, keys, values, length, scaling):
    group = len(query) // len(keys)
    outputs = []
    for head, q in enumerate(query.double()):
        k, v = keys[head // group, :length].double(), values[head // group, :length].double()
        outputs.append(torch.softmax(k @ q * scaling, dim=0) @ v)
    return torch.stack(outputs)


@pytest.mark.parametrize("bits", [(8, 8), (4, 4), (2, 2), (8, 2), (2, 4)])
@pytest.mark.parametrize(("group", "dim"), [(1, 32), (4, 128)])
def test_attention_over_packed_rows(group, dim, bits):
    """Against float64 over the rows that the bytes stand for, and over the rows before they were packed."""
    forms = tuple(RowFormat(bits=width, group=32, head_dim=dim) for width in bits)
    torch.manual_seed(bits[0])
    lengths, counts, residual, capacity = [90, 7, 64], [[74, 80], [0, 2], [64, 48]], 16, 96
    rows, query = torch.randn(2, 3, 2, capacity, dim), torch.randn(3, 2 * group, dim)
    inputs = cache_of(rows, forms, counts, lengths, residual, capacity)
    output, mass = packed_attention(query, *inputs, formats=forms, scaling=dim**-0.5, return_mass=True)
    assert mass.shape == (3, 2, capacity)
    torch.testing.assert_close(mass.sum(-1), torch.full((3, 2), float(group)))
    for slot, length in enumerate(lengths):
        assert not mass[slot, :, length:].any()
        stored = rows[:, slot].clone()
        for head in range(2):
            count = counts[slot][head]
            for kind, form in enumerate(forms):
                stored[kind, head, :count] = unpack_rows(pack_rows(stored[kind, head, :count], form), form)
        expected = attend(query[slot], *stored, length, dim**-0.5)
        torch.testing.assert_close(output[slot].double(), expected, rtol=1e-5, atol=1e-6)
        whole = attend(query[slot], *rows[:, slot], length, dim**-0.5)
        assert (output[slot] - whole).norm() <= OUTPUT_ERROR[min(bits)] * whole.norm()


@pytest.mark.parametrize(("bits", "group", "dim"), [((4, 4), 8, 32), ((8, 2), 16, 48), ((2, 4), 32, 32)])
def test_attention_over_keys_packed_by_channel(bits, group, dim):
    """Against float64 over the rows that the bytes stand for, in slots of odd lengths; a channel stands out."""
    forms = tuple(RowFormat(bits=n, group=group, head_dim=width) for n, width in zip(bits, (group, dim), strict=True))
    torch.manual_seed(dim)
    lengths, counts, residual, capacity = [3 * group + 7, 5, 2 * group], [2 * group, 0, group], group + 7, 3 * group
    rows, query, room = torch.randn(2, 3, 2, 4 * group, dim), torch.randn(3, 6, dim), residual + group
    rows[0, ..., 3] = 20 * rows[0, ..., 3] + 9
    keys = torch.randint(0, 120, (3, 2, 3, dim, forms[0].row_bytes), dtype=torch.uint8)
    values = torch.randint(0, 120, (3, 2, capacity, forms[1].row_bytes), dtype=torch.uint8)
    newest, stored = torch.zeros(3, 2, 2, room, dim), rows.double().clone()
    for slot, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        at = torch.arange(count, length)
        newest[slot][:, :, at % room] = rows[:, slot, :, count:length]
        for head in range(2):
            values[slot, head, :count] = pack_rows(rows[1, slot, head, :count], forms[1])
            for i in range(count):
                stored[1, slot, head, i] = by_definition(values[slot, head, i], forms[1])[0]
            for first in range(0, count, group):
                part = slice(first, first + group)
                keys[slot, head, first // group] = pack_rows(rows[0, slot, head, part].T, forms[0])
                for channel in range(dim):
                    numbers = by_definition(keys[slot, head, first // group, channel], forms[0])[0]
                    stored[0, slot, head, part, channel] = numbers
    how = {"lengths": torch.tensor(lengths), "formats": forms, "scaling": dim**-0.5, "return_mass": True}
    output, mass = kivi_attention(query, keys, values, newest, torch.tensor(counts), **how)
    assert output.isfinite().all()
    torch.testing.assert_close(mass.sum(-1), torch.full((3, 2), 3.0))
    for slot, length in enumerate(lengths):
        expected = attend(query[slot], *stored[:, slot], length, dim**-0.5)
        torch.testing.assert_close(output[slot].double(), expected, rtol=1e-4, atol=1e-5)
        # Each channel has a step of its own, so the one that stands out does not round the others away.
        calm = [channel for channel in range(dim) if channel != 3]
        error = (stored[0, slot, :, : counts[slot]] - rows[0, slot, :, : counts[slot]])[..., calm].abs()
        assert (error <= 8 / forms[0].top / 2).all(), "normal numbers lie within 8 of each other"
