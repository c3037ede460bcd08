"""`cache.scheme=kvarn` against KVarN written out in numpy, and over steps, evictions and memory that begins as junk."""

import numpy as np
import pytest
import torch

from kvsweep.compression.cache import SlotCache
from kvsweep.compression.cache_rows import CacheShape, Prefill
from kvsweep.compression.config import CacheConfig
from kvsweep.compression.policy import Selection
from kvsweep.kernels.packing import column_scales

SHAPE = CacheShape(layers=2, q_heads=6, kv_heads=3, head_dim=32, dtype=torch.float32)
CONFIG = CacheConfig(key_bits=4, value_bits=2, scheme="kvarn", group=16, residual=5)
CAPACITY = 96


def normalized(tile: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The scales of columns and rows of one tile in float64, step by step."""

    def uneven(now):
        of_columns, of_rows = now.std(0, ddof=1), now.std(1, ddof=1)
        return of_columns.max() / of_columns.min() + of_rows.max() / of_rows.min()

    columns, rows = np.zeros(tile.shape[1]), np.zeros(tile.shape[0])
    tried = [(uneven(tile), columns, rows)]
    for _ in range(16):
        now = tile / np.exp(columns) / np.exp(rows)[:, None]
        columns = np.clip(columns + np.log(np.clip(now.std(0, ddof=1), 1e-3, 1e3)), -0.3, 10)
        now = tile / np.exp(columns) / np.exp(rows)[:, None]
        rows = np.clip(rows + np.log(np.clip(now.std(1, ddof=1), 1e-3, 1e3)), -0.3, 10)
        tried.append((uneven(tile / np.exp(columns) / np.exp(rows)[:, None]), columns, rows))
    least = min(one[0] for one in tried)
    _, columns, rows = [one for one in tried if one[0] == least][-1]
    return np.exp(columns), np.exp(rows)[:, None]


def rounded(tile: np.ndarray, bits: int) -> np.ndarray:
    """A tile after KVarN: normalized, each row to the nearest of 2^bits levels between its ends, and back."""
    columns, rows = normalized(tile)
    balanced = tile / columns / rows
    low, high = balanced.min(1, keepdims=True), balanced.max(1, keepdims=True)
    step = (high - low) / (2**bits - 1)
    return (np.round((balanced - low) / step) * step + low) * columns * rows


def hadamard(size: int) -> np.ndarray:
    whole = np.ones((1, 1))
    while len(whole) < size:
        whole = np.block([[whole, whole], [whole, -whole]])
    return whole / np.sqrt(size)


def outliers(*shape: int) -> torch.Tensor:
    """Rows [..., tokens, head_dim] of which some tokens and some channels stand out."""
    rows = torch.randn(*shape)
    rows[..., 3] *= 9
    rows[..., ::7, :] *= 6
    return rows


def empty(per_head: bool = False) -> SlotCache:
    device = torch.device("cpu")
    cache = SlotCache(SHAPE, slots=3, capacity=CAPACITY, device=device, config=CONFIG, per_head=per_head)
    for tensor in cache.storage.tensors:
        tensor.fill_(0xFF if tensor.dtype == torch.uint8 else torch.nan)
    return cache


def admitted(cache: SlotCache, layers: list[torch.Tensor]):
    """Layers of keys and values, [2, kv_heads, length, head_dim] each."""
    prefill = Prefill()
    for keys, values in layers:
        prefill.observe(torch.zeros(1, 6, keys.shape[1], 32), keys[None], values[None], 0.2)
    cache.admit(prefill)


def read(cache: SlotCache, layer: int) -> torch.Tensor:
    return torch.stack(cache.storage.read(layer, 0, int(cache.lengths[0])))


@pytest.mark.parametrize(("rows", "columns"), [(32, 16), (16, 32), (128, 128)])
def test_the_scales_are_those_of_numpy(rows, columns):
    torch.manual_seed(rows)
    tiles = torch.randn(3, 2, rows, columns)
    tiles[:, :, ::5] *= 20
    tiles[..., 1] *= 0.01
    tiles[1] *= 300
    found = column_scales(tiles)
    assert found.shape == (3, 2, 1, columns)
    for at in np.ndindex(3, 2):
        np.testing.assert_allclose(found[at][0], normalized(tiles[at].double().numpy())[0], rtol=1e-4)


def test_packed_rows_are_those_of_numpy():
    torch.manual_seed(0)
    cache, layers = empty(), [outliers(2, 3, 60, 32) for _ in range(2)]
    admitted(cache, layers)
    turn = hadamard(32)
    for layer, rows in enumerate(layers):
        found = read(cache, layer).double().numpy()
        assert np.allclose(found[:, :, 48:], rows[:, :, 48:], atol=1e-5), "60 - 5 rows hold three groups of 16"
        for head in range(3):
            for first in (0, 16, 32):
                tile = rows[:, head, first : first + 16].double().numpy() @ turn
                own = found[:, head, first : first + 16] @ turn
                expected = np.stack([rounded(tile[0].T, 4).T, rounded(tile[1], 2)])
                # Ends and steps are rounded to float16, so that a number between two levels may go to the other one.
                close = np.isclose(own, expected, rtol=0.02, atol=0.02 * tile.std())
                assert close.mean() > 0.98
                for kind in range(2):
                    error = np.linalg.norm(expected[kind] - tile[kind])
                    assert np.linalg.norm(own[kind] - tile[kind]) < 1.02 * error < 0.5 * np.linalg.norm(tile[kind])


def test_keys_lose_less_than_kivis_where_tokens_stand_out():
    """Both have a step for the 16 tokens of a channel; KVarN rotates, and has a scale of 2 bytes a token more."""
    torch.manual_seed(1)
    layers, errors = [outliers(2, 3, 80, 32) for _ in range(2)], {}
    for scheme in ("kvarn", "kivi"):
        config = CacheConfig(bits=2, scheme=scheme, group=16, residual=1)
        cache = SlotCache(SHAPE, slots=3, capacity=CAPACITY, device=torch.device("cpu"), config=config)
        admitted(cache, layers)
        errors[scheme] = float((read(cache, 0)[0, :, :64] - layers[0][0, :, :64]).norm())
    assert errors["kvarn"] < 0.8 * errors["kivi"]


def test_rows_that_come_one_by_one_are_packed_as_those_of_a_prompt():
    torch.manual_seed(2)
    layers = [outliers(2, 3, 60, 32) for _ in range(2)]
    whole, stepped = empty(), empty()
    admitted(whole, layers)
    admitted(stepped, [rows[:, :, :7] for rows in layers])
    for token in range(7, 60):
        stepped.begin_step(torch.tensor([token]))
        for layer, rows in enumerate(layers):
            stepped.update(*rows[:, None, :, token : token + 1], layer_idx=layer)
    assert all(torch.allclose(read(whole, layer), read(stepped, layer), atol=1e-4) for layer in range(2))
    for one, other in zip(whole.storage.scales, stepped.storage.scales, strict=True):
        assert torch.equal(one[0, :, :, :3], other[0, :, :, :3])


@pytest.mark.parametrize("per_head", [False, True])
def test_an_eviction_quantizes_again_only_what_leaves_its_group(per_head):
    torch.manual_seed(3)
    cache = empty(per_head)
    admitted(cache, [outliers(2, 3, 60, 32) for _ in range(2)])
    before = [read(cache, layer).clone() for layer in range(2)]
    scales = [scale[0, :, :, :1].clone() for scale in cache.storage.scales]
    # The first group stays whole, every other row of the rest; a head may keep others of them.
    keep = torch.cat([torch.arange(16), torch.arange(16, 60, 2)])
    if per_head:
        keep = keep + (torch.arange(38) >= 16) * torch.randint(0, 2, (2, 3, 1))
    cache.evict(0, Selection(keep=keep))
    for layer, rows in enumerate(before):
        own = keep.expand(2, 3, -1)[layer]
        expected = rows.gather(2, own[None, ..., None].expand(2, -1, -1, 32))
        found = read(cache, layer)
        assert torch.equal(found[:, :, :16], expected[:, :, :16])
        assert torch.allclose(found[:, :, 32:], expected[:, :, 32:], atol=1e-5)
        again = expected[:, :, 16:32]
        assert 0 < (found[:, :, 16:32] - again).norm() < 0.6 * again.norm()
    assert all(torch.equal(a, b[0, :, :, :1]) for a, b in zip(scales, cache.storage.scales, strict=True))


def test_attention_is_that_over_the_rows_that_are_read():
    """In float64, beside an empty slot's junk, after an eviction and further steps."""
    torch.manual_seed(4)
    cache = empty()
    admitted(cache, [outliers(2, 3, 60, 32) for _ in range(2)])
    cache.evict(0, Selection(keep=torch.arange(1, 60, 2)))
    for token in range(60, 75):
        cache.begin_step(torch.tensor([token]))
        for layer in range(2):
            cache.update(*outliers(2, 1, 3, 1, 32), layer_idx=layer)
    query = torch.randn(1, 6, 32)
    for layer in range(2):
        output, _ = cache.storage.attend(layer, query, {"scaling": 0.2, "sinks": None, "softcap": None})
        keys, values = read(cache, layer).double()
        for head in range(6):
            weights = (keys[head // 2] @ query[0, head].double() * 0.2).softmax(0)
            torch.testing.assert_close(output[0, head].double(), weights @ values[head // 2], rtol=1e-4, atol=1e-4)
