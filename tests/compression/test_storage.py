"""A cache whose older rows are packed, held against a list of rows: every operation on slots, and its bytes."""

import random

import pytest
import torch

from kvsweep.compression.cache import SlotCache
from kvsweep.compression.config import CacheConfig
from kvsweep.compression.policy import Selection
from kvsweep.compression.rows import CacheShape, Prefill
from kvsweep.kernels.packing import pack_rows, rotation

SHAPE = CacheShape(layers=2, q_heads=6, kv_heads=3, head_dim=16, dtype=torch.float32)
FORTH, BACK = rotation(16)
SLOTS, CAPACITY = 5, 24


class Text:
    """A sequence as it should be: for each layer and head its rows in order, (position, keys and values, bytes).

    The bytes of a row are set when its token is `residual` tokens old, and never change.
    """

    def __init__(self, form, residual):
        self.form, self.residual = form, residual
        self.rows = [[[] for _ in range(SHAPE.kv_heads)] for _ in range(SHAPE.layers)]
        self.length = 0

    def append(self, layer, keys, values):
        """A layer's rows of one token, [kv_heads, head_dim]; the token is over with the last layer."""
        for head in range(SHAPE.kv_heads):
            self.rows[layer][head].append([self.length, torch.stack([keys[head], values[head]]) @ FORTH, None])
        self.length += layer == SHAPE.layers - 1

    def age(self):
        for heads in self.rows:
            for rows in heads:
                for row in rows:
                    if row[2] is None and row[0] < self.length - self.residual:
                        row[2] = pack_rows(row[1], self.form)

    def keep(self, keep):
        for layer, heads in enumerate(self.rows):
            for head, rows in enumerate(heads):
                chosen = keep if keep.dim() == 1 else keep[layer, head]
                heads[head] = [rows[i] for i in chosen.tolist()]

    def copied(self):
        other = Text(self.form, self.residual)
        other.length = self.length
        other.rows = [[[list(row) for row in rows] for rows in heads] for heads in self.rows]
        return other


def check(cache, slot, text):
    """The bytes of the slot are the text's own, and so are its newest rows, bit for bit."""
    storage, n = cache.storage, len(text.rows[0][0])
    assert cache.lengths[slot] == cache.device_lengths[slot] == n
    per_head = cache.positions.shape[1] > 1
    for layer, heads in enumerate(text.rows):
        read = torch.stack(storage.read(layer, slot, n))
        for head, rows in enumerate(heads):
            where = (slot, layer, head) if per_head else (slot, 0, 0)
            assert cache.positions[where][:n].tolist() == [row[0] for row in rows]
            count = int(storage.counts[where])
            assert [row[2] is not None for row in rows] == [True] * count + [False] * (n - count)
            for i, (position, whole, packed) in enumerate(rows):
                if packed is not None:
                    assert torch.equal(storage.packed[slot, layer, :, head, i], packed)
                else:
                    lies = storage.newest[slot, layer, :, head, position % text.residual]
                    torch.testing.assert_close(lies, whole, rtol=1e-6, atol=1e-6)
                    torch.testing.assert_close(read[:, head, i], whole @ BACK, rtol=1e-5, atol=1e-5)
    assert read.isfinite().all()


def selection(dice, length, per_head):
    kept = dice.randint(1, length)
    if not per_head:
        return torch.tensor(sorted(dice.sample(range(length), kept)))
    one = [[sorted(dice.sample(range(length), kept)) for _ in range(SHAPE.kv_heads)] for _ in range(SHAPE.layers)]
    return torch.tensor(one)


@pytest.mark.parametrize(("bits", "residual", "per_head"), [(8, 1, False), (4, 5, True), (4, 7, False), (2, 40, True)])
def test_every_operation_on_packed_slots(bits, residual, per_head):
    """Random admissions, steps, evictions, copies, swaps and ends, over memory that begins as junk."""
    dice, numbers = random.Random(bits + residual), torch.Generator().manual_seed(bits)
    config = CacheConfig(bits=bits, group=8, residual=residual)
    cache = SlotCache(
        SHAPE, slots=SLOTS, capacity=CAPACITY, device=torch.device("cpu"), per_head=per_head, config=config
    )
    cache.storage.packed.fill_(0xFF)
    cache.storage.newest.fill_(torch.nan)
    form, texts = config.form(16), []

    def draw(*shape):
        return torch.randn(*shape, generator=numbers)

    for _ in range(100):
        kind = dice.choice(["step"] * 5 + ["chunks"] * 2 + ["admit", "evict", "copy", "swap", "end"])
        slot = dice.randrange(len(texts)) if texts else 0
        if kind == "admit" and len(texts) < SLOTS:
            text, prefill = Text(form, residual), Prefill()
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
        elif kind == "step" and texts and cache.longest < CAPACITY:
            cache.begin_step(torch.tensor([text.length for text in texts]))
            for layer in range(SHAPE.layers):
                keys, values = draw(2, len(texts), SHAPE.kv_heads, 1, 16)
                cache.update(keys, values, layer_idx=layer)
                for index, text in enumerate(texts):
                    text.append(layer, keys[index, :, 0], values[index, :, 0])
            for text in texts:
                text.age()
        elif kind == "chunks" and texts:
            counts = {i: dice.randint(1, residual) for i in range(len(texts)) if dice.random() < 0.7}
            counts = {i: min(n, CAPACITY - int(cache.lengths[i])) for i, n in counts.items()}
            counts = {i: n for i, n in counts.items() if n}
            if not counts:
                continue
            at = [p for i, n in counts.items() for p in range(texts[i].length, texts[i].length + n)]
            cache.begin_chunks(counts, torch.tensor(at))
            rows = [draw(2, len(at), SHAPE.kv_heads, 1, 16) for _ in range(SHAPE.layers)]
            for layer, (keys, values) in enumerate(rows):
                cache.update(keys, values, layer_idx=layer)
            for token, index in enumerate(i for i, n in counts.items() for _ in range(n)):
                for layer, (keys, values) in enumerate(rows):
                    texts[index].append(layer, keys[token, :, 0], values[token, :, 0])
                texts[index].age()
        elif kind == "evict" and texts and cache.lengths[slot]:
            keep = selection(dice, int(cache.lengths[slot]), per_head)
            cache.evict(slot, Selection(keep=keep))
            texts[slot].keep(keep)
        elif kind == "copy" and texts and len(texts) < SLOTS:
            cache.copy(slot, len(texts))
            cache.live += 1
            texts.append(texts[slot].copied())
        elif kind == "swap" and texts:
            other = dice.randrange(len(texts))
            cache.swap(slot, other)
            texts[slot], texts[other] = texts[other], texts[slot]
        elif kind == "end" and len(texts) > 1:
            cache.live -= 1
            cache.copy(len(texts) - 1, slot)
            texts[slot] = texts[-1]
            texts.pop()
        for index, text in enumerate(texts):
            if len(text.rows[0][0]):
                check(cache, index, text)


@pytest.mark.parametrize("bits", [16, 8, 4, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_equals_the_arithmetic_to_the_byte(bits, dtype):
    shape = CacheShape(layers=3, q_heads=4, kv_heads=2, head_dim=32, dtype=dtype)
    config = CacheConfig(bits=bits, group=16, residual=6)
    cache = SlotCache(shape, slots=5, capacity=64, device=torch.device("cpu"), config=config)
    whole = 32 * dtype.itemsize
    slot = 64 * whole if bits == 16 else 64 * (32 * bits // 8 + 2 * (2 + 2)) + 6 * whole
    assert cache.kv_bytes == 5 * SlotCache.bytes_per_slot(shape, 64, config) == 5 * 3 * 2 * 2 * slot
