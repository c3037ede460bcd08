"""A cache, whose older rows may be packed, against a list of rows: every operation on slots, and its bytes."""

import random

import pytest
import torch

from kvsweep.compression import artifacts
from kvsweep.compression.cache import SlotCache
from kvsweep.compression.cache_rows import CacheShape, Prefill
from kvsweep.compression.config import CacheConfig
from kvsweep.compression.policy import Selection
from kvsweep.compression.slots import Chunks
from kvsweep.kernels.packing import pack_rows, rotation

SHAPE = CacheShape(layers=2, q_heads=6, kv_heads=3, head_dim=16, dtype=torch.float32)
FORTH, BACK = rotation(16)
SLOTS, CAPACITY = 5, 24
LARGEST = {"keys": torch.tensor([3.0, 0.7]), "values": torch.tensor([9.0, 448.0])}  # of a calibration, by layer


class Text:
    """A sequence as it should be: for each layer and head its rows in order, (position, keys and values, bytes).

    The bytes of a row are set when its token is `residual` tokens old, and never change.
    """

    def __init__(self, config):
        self.config, self.forms, self.residual = config, config.row_formats(16), config.residual
        self.rows = [[[] for _ in range(SHAPE.kv_heads)] for _ in range(SHAPE.layers)]
        self.length = 0
        self.forth, self.back = (FORTH, BACK) if config.scheme == "rotated" else (torch.eye(16), torch.eye(16))

    def append(self, layer, keys, values):
        """A layer's rows of one token, [kv_heads, head_dim]; the token is over with the last layer."""
        for head in range(SHAPE.kv_heads):
            self.rows[layer][head].append([self.length, torch.stack([keys[head], values[head]]) @ self.forth, None])
        self.length += layer == SHAPE.layers - 1

    def age(self):
        for heads in self.rows:
            for rows in heads:
                for row in rows:
                    if row[2] is None and row[0] < self.length - self.residual:
                        row[2] = torch.cat([pack_rows(n, f) for n, f in zip(row[1], self.forms, strict=True)])

    def keep(self, keep):
        for layer, heads in enumerate(self.rows):
            for head, rows in enumerate(heads):
                chosen = keep if keep.dim() == 1 else keep[layer, head]
                heads[head] = [rows[i] for i in chosen.tolist()]

    def copied(self):
        other = type(self)(self.config)
        other.length = self.length
        other.rows = [[[list(row) for row in rows] for rows in heads] for heads in self.rows]
        return other

    def check(self, cache, slot):
        """The bytes of the slot are the text's own, and so are its newest rows, bit for bit."""
        storage, n = cache.storage, len(self.rows[0][0])
        for layer, heads in enumerate(self.rows):
            read = torch.stack(storage.read(layer, slot, n))
            assert read.isfinite().all()
            for head, rows in enumerate(heads):
                where = (slot, layer, head) if cache.positions.shape[1] > 1 else (slot, 0, 0)
                count = int(storage.counts[where])
                assert [row[2] is not None for row in rows] == [True] * count + [False] * (n - count)
                for i, (position, whole, packed) in enumerate(rows):
                    if packed is not None:
                        stored = torch.cat([memory[slot, layer, head, i] for memory in storage.packed])
                        assert torch.equal(stored, packed)
                    else:
                        lies = storage.newest[slot, layer, :, head, position % self.residual]
                        torch.testing.assert_close(lies, whole, rtol=1e-6, atol=1e-6)
                        torch.testing.assert_close(read[:, head, i], whole @ self.back, rtol=1e-5, atol=1e-5)


def most(numbers, dim, bits):
    """The most that rounding to 2^bits levels between the extremes of a dimension changes each number, in float64."""
    low, high = numbers.double().aminmax(dim=dim, keepdim=True)
    step = ((high - low) * 1.0025 + torch.maximum(low.abs(), high.abs()) / 400) / (2**bits - 1)
    return (step * 0.501 + 1e-6).expand(numbers.shape)


class KiviText(Text):
    """The same for `scheme=kivi`: a row's last entry is how much its numbers may have changed since they were checked.

    Row by row the length says what is packed, `group` rows at a time. Once rounded, a value never changes again, and a
    key never as long as an eviction leaves its group whole.
    """

    def __init__(self, config):
        super().__init__(config)
        self.packed = 0

    def target(self):
        return max(0, len(self.rows[0][0]) - self.residual) // self.config.group * self.config.group

    def age(self):
        if len({len(rows) for heads in self.rows for rows in heads}) == 1:
            self.round([[list(range(len(rows))) for rows in heads] for heads in self.rows])

    def keep(self, keep):
        kept = keep.expand(SHAPE.layers, SHAPE.kv_heads, -1).tolist()
        super().keep(keep)
        self.round(kept)

    def round(self, came_from):
        """Note how far rows may change that came from these places, of which the first `packed` were packed."""
        group, (key_bits, value_bits) = self.config.group, self.config.widths
        for layer, heads in enumerate(self.rows):
            for head, rows in enumerate(heads):
                origin = came_from[layer][head]
                for first in range(0, self.target(), group):
                    part = rows[first : first + group]
                    numbers = torch.stack([row[1] for row in part], dim=1)  # [2, group, head_dim]
                    rounded = torch.zeros_like(numbers, dtype=torch.float64)
                    stays = origin[first : first + group] == list(range(first, first + group))
                    if not (stays and first + group <= self.packed):
                        rounded[0] = most(numbers[0], 0, key_bits)
                    wide = most(numbers[1].unflatten(-1, (-1, group)), -1, value_bits).flatten(-2)
                    fresh = torch.tensor(origin[first : first + group]) >= self.packed
                    rounded[1] = wide.where(fresh[:, None], 0)
                    for i, row in enumerate(part):
                        row[2] = rounded[:, i] if row[2] is None else row[2] + rounded[:, i]
        self.packed = self.target()

    def copied(self):
        other = super().copied()
        other.packed = self.packed
        return other

    def check(self, cache, slot):
        for layer, heads in enumerate(self.rows):
            read = torch.stack(cache.storage.read(layer, slot, len(heads[0])))
            for head, rows in enumerate(heads):
                for i, row in enumerate(rows):
                    allowed = torch.zeros(2, 16) if row[2] is None else row[2]
                    assert ((read[:, head, i].double() - row[1].double()).abs() <= allowed).all()
                    row[1:] = read[:, head, i].clone(), None


class Fp8Text(Text):
    """The same for `scheme=fp8`: torch's own cast of each number, made when the token comes, and never again."""

    def __init__(self, config):
        super().__init__(config)
        self.dtype = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[config.format]

    def age(self):
        top = torch.finfo(self.dtype).max
        layers = [(layer, row) for layer, heads in enumerate(self.rows) for rows in heads for row in rows]
        for layer, row in (one for one in layers if one[1][2] is None):
            calibrated = torch.stack([LARGEST["keys"][layer], LARGEST["values"][layer]])[:, None] / top
            largest = row[1].abs().amax(-1, keepdim=True) / top
            scale = {"none": torch.ones(2, 1), "tensor": calibrated, "token": largest}[self.config.scale]
            packed = (row[1] / scale).clamp(-top, top).to(self.dtype).float() * scale
            row[2] = row[1] if layer < self.config.whole_layers else packed

    def check(self, cache, slot):
        for layer, heads in enumerate(self.rows):
            read = torch.stack(cache.storage.read(layer, slot, len(heads[0])))
            assert torch.equal(
                read, torch.stack([torch.stack([row[2] for row in rows], dim=1) for rows in heads], dim=1)
            )


class WholeText(Fp8Text):
    """The same without packing: rows are read as they came."""

    def __init__(self, config):
        Text.__init__(self, config)

    def age(self):
        for row in (row for heads in self.rows for rows in heads for row in rows):
            row[2] = row[1]


def selection(dice, length, per_head):
    kept = dice.randint(1, length)
    if not per_head:
        return torch.tensor(sorted(dice.sample(range(length), kept)))
    one = [[sorted(dice.sample(range(length), kept)) for _ in range(SHAPE.kv_heads)] for _ in range(SHAPE.layers)]
    return torch.tensor(one)


@pytest.mark.parametrize(
    ("settings", "residual", "per_head"),
    [
        ({"scheme": "plain"}, 3, False),
        ({"scheme": "plain"}, 2, True),
        pytest.param({"bits": 8}, 1, False, marks=pytest.mark.slow),
        pytest.param({"bits": 4}, 5, True, marks=pytest.mark.slow),
        pytest.param({"bits": 4, "value_bits": 2, "scheme": "plain", "group": 16}, 7, False, marks=pytest.mark.slow),
        pytest.param({"key_bits": 8, "value_bits": 2, "group": 16}, 40, True, marks=pytest.mark.slow),
        pytest.param({"bits": 4, "scheme": "kivi"}, 1, False, marks=pytest.mark.slow),
        pytest.param({"bits": 4, "value_bits": 8, "scheme": "kivi"}, 5, True, marks=pytest.mark.slow),
        pytest.param({"bits": 2, "scheme": "kivi", "group": 16}, 3, True, marks=pytest.mark.slow),
        ({"scheme": "fp8", "scale": "token"}, 6, True),
        pytest.param({"scheme": "fp8", "scale": "tensor", "whole_layers": 1}, 4, True, marks=pytest.mark.slow),
        pytest.param({"scheme": "fp8", "format": "e5m2"}, 9, False, marks=pytest.mark.slow),
    ],
)
@pytest.mark.one_in(3)
def test_every_operation_on_slots(settings, residual, per_head, tmp_path):
    """Random admissions, steps, evictions, copies, swaps and ends, over memory that begins as junk."""
    dice, numbers = random.Random(residual), torch.Generator().manual_seed(residual)
    artifacts.save("scales", tmp_path / "s.safetensors", LARGEST, {"hidden_size": 96})
    config = CacheConfig(**{"group": 8, **settings}, residual=residual, scales=str(tmp_path / "s.safetensors"))
    kind = {"kivi": KiviText, "fp8": Fp8Text}.get(config.scheme, WholeText if settings == {"scheme": "plain"} else Text)
    cache = SlotCache(
        SHAPE, slots=SLOTS, capacity=CAPACITY, device=torch.device("cpu"), per_head=per_head, config=config
    )
    for tensor in cache.storage.tensors:
        tensor.fill_(0xFF if tensor.dtype == torch.uint8 else torch.nan)
    texts = []

    def draw(*shape):
        """Numbers whose rotation is exact in float32, so that no order of adding changes a packed byte."""
        return torch.randint(-1024, 1025, shape, generator=numbers) / 256

    for _ in range(100):
        what = dice.choice(["step"] * 5 + ["chunks"] * 2 + ["admit", "evict", "copy", "swap", "end"])
        slot = dice.randrange(len(texts)) if texts else 0
        if what == "admit" and len(texts) < SLOTS:
            text, prefill = kind(config), Prefill()
            length = dice.randint(0, CAPACITY - 1)
            layers = [draw(2, 1, SHAPE.kv_heads, length, 16) for _ in range(SHAPE.layers)]
            for keys, values in layers if length else []:
                prefill.observe(draw(1, 6, length, 16), keys, values, 0.25)
            for token in range(length):
                for layer, (keys, values) in enumerate(layers):
                    text.append(layer, keys[0, :, token], values[0, :, token])
            text.age()
            assert cache.admit(prefill) == len(texts)
            texts.append(text)
        elif what == "step" and texts and cache.longest < CAPACITY:
            cache.begin_step(torch.tensor([text.length for text in texts]))
            for layer in range(SHAPE.layers):
                keys, values = draw(2, len(texts), SHAPE.kv_heads, 1, 16)
                cache.update(keys, values, layer_idx=layer)
                for index, text in enumerate(texts):
                    text.append(layer, keys[index, :, 0], values[index, :, 0])
            for text in texts:
                text.age()
        elif what == "chunks" and texts:
            counts = {i: dice.randint(1, residual) for i in range(len(texts)) if dice.random() < 0.7}
            counts = {i: min(n, CAPACITY - int(cache.lengths[i])) for i, n in counts.items()}
            counts = {i: n for i, n in counts.items() if n}
            if not counts:
                continue
            at = [p for i, n in counts.items() for p in range(texts[i].length, texts[i].length + n)]
            cache.begin_chunks(Chunks(counts, cache.device), torch.tensor(at))
            rows = [draw(2, len(at), SHAPE.kv_heads, 1, 16) for _ in range(SHAPE.layers)]
            for layer, (keys, values) in enumerate(rows):
                cache.update(keys, values, layer_idx=layer)
            for token, index in enumerate(i for i, n in counts.items() for _ in range(n)):
                for layer, (keys, values) in enumerate(rows):
                    texts[index].append(layer, keys[token, :, 0], values[token, :, 0])
                texts[index].age()
        elif what == "evict" and texts and cache.lengths[slot]:
            keep = selection(dice, int(cache.lengths[slot]), per_head)
            cache.evict(slot, Selection(keep=keep))
            texts[slot].keep(keep)
        elif what == "copy" and texts and len(texts) < SLOTS:
            cache.copy(slot, len(texts))
            cache.live += 1
            texts.append(texts[slot].copied())
        elif what == "swap" and texts:
            other = dice.randrange(len(texts))
            cache.copy([slot, other], [other, slot])
            texts[slot], texts[other] = texts[other], texts[slot]
        elif what == "end" and len(texts) > 1:
            cache.live -= 1
            cache.copy(len(texts) - 1, slot)
            texts[slot] = texts[-1]
            texts.pop()
        for index, text in enumerate(texts):
            if len(text.rows[0][0]):
                n = len(text.rows[0][0])
                assert cache.lengths[index] == cache.device_lengths[index] == n
                for layer, head in [(x, y) for x in range(SHAPE.layers) for y in range(SHAPE.kv_heads)]:
                    where = (index, layer, head) if per_head else (index, 0, 0)
                    assert cache.positions[where][:n].tolist() == [row[0] for row in text.rows[layer][head]]
                text.check(cache, index)


@pytest.mark.parametrize("bits", [(16, 16), (8, 8), (4, 4), (2, 2), (4, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scheme", ["rotated", "plain", "kivi", "kvarn"])
@pytest.mark.parametrize("device", ["cpu", "meta"])  # on meta a job counts the slots that fit
def test_memory_equals_the_arithmetic_to_the_byte(bits, dtype, scheme, device):
    shape = CacheShape(layers=3, q_heads=4, kv_heads=2, head_dim=32, dtype=dtype)
    widths = {} if bits[0] == 16 else dict(zip(("key_bits", "value_bits"), bits, strict=True))
    config = CacheConfig(group=16, residual=6, scheme=scheme, **widths)
    cache = SlotCache(shape, slots=5, capacity=70, device=torch.device(device), config=config)
    whole = 32 * dtype.itemsize
    # A zero and a step of 2 bytes each per 16 numbers; only whole groups of 16 rows are packed channel by channel.
    rows, newest = (64, 6 + 16) if scheme in ("kivi", "kvarn") else (70, 6)
    packed = sum(rows * (32 * width // 8 + 2 * (2 + 2)) + newest * whole for width in bits)
    if scheme == "kvarn":  # one zero and step for all 32 numbers of a value; a scale for 64 tokens, and 32 in 4 groups
        packed += 2 * 64 + 4 * 2 * 32 - 64 * (2 + 2)
    slot = 2 * 70 * whole if bits[0] == 16 else packed
    assert cache.kv_bytes == 5 * SlotCache.bytes_per_slot(shape, 70, config) == 5 * 3 * 2 * slot


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("scale", "row", "whole"), [("none", 20, 2), ("tensor", 20, 0), ("token", 24, 0)])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_fp8_takes_a_byte_a_number_and_four_a_scale(scale, row, whole, dtype, device, tmp_path):
    shape = CacheShape(layers=3, q_heads=4, kv_heads=2, head_dim=20, dtype=dtype)
    sizes = {"keys": torch.ones(3), "values": torch.ones(3)}
    artifacts.save("scales", tmp_path / "s.safetensors", sizes, {"hidden_size": 80})
    config = CacheConfig(scheme="fp8", scale=scale, scales=str(tmp_path / "s.safetensors"), whole_layers=whole)
    cache = SlotCache(shape, slots=5, capacity=71, device=torch.device(device), config=config)
    layers = (3 - whole) * row + whole * 20 * dtype.itemsize
    assert cache.kv_bytes == 5 * SlotCache.bytes_per_slot(shape, 71, config) == 5 * 2 * 2 * 71 * layers
