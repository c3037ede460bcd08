import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig

from kvsweep.compression.cache import SlotCache, use_slot_attention
from kvsweep.compression.cache_rows import CacheShape, Prefill
from kvsweep.compression.policy import AttentionMass, LastUse, PredictedImportance, RecentQueries, RowMemory, Selection
from kvsweep.compression.recorders import ScoreRecorder, decayed_mass
from kvsweep.compression.slots import Chunks
from kvsweep.kernels.reference import causal_mass

SHAPE = CacheShape(layers=2, q_heads=6, kv_heads=3, head_dim=4, dtype=torch.float32)
MASS, QUERIES = AttentionMass(), RecentQueries(3)
DECAYED, USE, MEMORY = AttentionMass(0.5), LastUse(0.9), RowMemory("test")
PER_ROW = (MASS, DECAYED, USE, MEMORY)


class FirstHidden(PredictedImportance):
    """Records the first number of the hidden state."""

    def allocate(self, memory):
        return ScoreRecorder(lambda hidden: hidden[:, 0], memory)


MARKER = FirstHidden("none")


def make_cache(slots=4, capacity=9, per_head=False):
    signals = [MARKER, *PER_ROW, QUERIES]
    return SlotCache(
        SHAPE, slots=slots, capacity=capacity, device=torch.device("cpu"), signals=signals, per_head=per_head
    )


def admit(cache, length, seed):
    torch.manual_seed(seed)
    prefill = Prefill()
    for _ in range(SHAPE.layers):
        prefill.observe(torch.randn(1, 6, length, 4), *torch.randn(2, 1, 3, length, 4), 0.5)
    cache.admit(prefill)


def step(cache, positions):
    """One decode step."""
    live = cache.live
    cache.begin_step(torch.tensor(positions))
    for layer in range(SHAPE.layers):
        cache.update(*torch.randn(2, live, 3, 1, 4), layer_idx=layer)
        query = torch.tensor(positions)[:, None, None].expand(live, 6, 4) + layer / 10
        cache.observe(layer, cache.pieces[0], query, torch.ones(live, 3, cache.longest))
    cache.end_step(torch.tensor(positions)[:, None] / 10)


def test_what_is_recorded_of_a_row_goes_with_it():
    cache = make_cache()
    admit(cache, 6, seed=0)
    step(cache, [6])
    assert cache.recorders[MARKER].read(0, 6, 6).isnan().all()
    cache.evict(0, Selection(keep=torch.tensor([0, 3, 4, 6])))
    step(cache, [7])
    assert torch.equal(cache.recorders[MARKER].read(0, 5, 7)[0, 0, 3:], torch.tensor([0.6, 0.7]))
    # The newest three queries are those of positions 5 (the prompt's last), 6 and 7, in that order.
    assert cache.recorders[QUERIES].read(0, 5, 7)[1, 0, 1:, 0].tolist() == torch.tensor([6.1, 7.1]).tolist()
    mass = cache.recorders[MASS].read(0, 5, 7)
    assert mass.shape == (2, 3, 5)
    assert (mass[..., 4] == 1).all(), "a row that takes an evicted one's place begins with nothing"


def test_memory_is_allocated_once_and_equals_the_arithmetic():
    cache = make_cache(slots=5, capacity=7)
    analytic = 5 * SlotCache.bytes_per_slot(SHAPE, 7)
    assert cache.kv_bytes == analytic == 5 * 2 * 2 * 3 * 7 * 4 * 4
    pointers = [layer.keys.data_ptr() for layer in cache.slot_layers]
    for round_ in range(6):
        cache.live = 0
        admit(cache, 5, seed=round_)
        step(cache, [5])
        cache.evict(0, Selection(keep=torch.tensor([1, 5])))
    assert [layer.keys.data_ptr() for layer in cache.slot_layers] == pointers
    assert cache.kv_bytes == analytic


def test_a_new_tenant_never_meets_what_the_last_one_left():
    cache = make_cache(slots=2, capacity=6)
    for layer in cache.slot_layers:
        layer.keys.fill_(torch.nan)
        layer.values.fill_(torch.nan)
    admit(cache, 2, seed=0)
    admit(cache, 3, seed=1)
    for layer in cache.slot_layers:
        assert layer.keys.isfinite().all()
        assert layer.values.isfinite().all()
        layer.keys[1] = torch.nan
    cache.copy(0, 1)
    assert all(layer.keys.isfinite().all() for layer in cache.slot_layers)


def test_copy_and_swap_carry_everything():
    cache = make_cache()
    admit(cache, 2, seed=0)
    admit(cache, 5, seed=1)
    step(cache, [2, 5])
    cache.evict(1, Selection(keep=torch.arange(1, 6), written={MEMORY: torch.rand(2, 3, 6)}))

    def content(slot):
        n = int(cache.lengths[slot])
        rows = [t[slot, :, :n].clone() for layer in cache.slot_layers for t in (layer.keys, layer.values)]
        recorded = [cache.recorders[s].read(slot, n, n - 1).clone().nan_to_num(-1) for s in (MARKER, *PER_ROW, QUERIES)]
        return [*rows, cache.positions[slot, 0, 0, :n].clone(), *recorded]

    first, second = content(0), content(1)
    cache.copy(1, 3)
    cache.copy([0, 1], [1, 0])
    for slot, expected in ((0, second), (1, first), (3, second)):
        assert all(map(torch.equal, content(slot), expected))
    assert np.array_equal(cache.lengths, cache.device_lengths.numpy())


def test_what_a_policy_writes_goes_with_its_row():
    cache = make_cache(per_head=True)
    admit(cache, 4, seed=0)
    step(cache, [4])
    read = cache.recorders[MEMORY].read
    assert read(0, 5, 4).isnan().all()
    values = torch.rand(2, 3, 5)
    keep = torch.stack([torch.stack([torch.randperm(5)[:3].sort().values for _ in range(3)]) for _ in range(2)])
    cache.evict(0, Selection(keep=keep, written={MEMORY: values}))
    scores = cache.recorders[MARKER].read(0, 3, 4)
    assert torch.equal(scores.nan_to_num(0), (cache.positions[0, ..., :3] == 4) * 0.4), "a token's score in each head"
    step(cache, [5])
    assert torch.equal(read(0, 4, 5)[..., :3], values.gather(-1, keep))
    assert read(0, 4, 5)[..., 3].isnan().all(), "a new row remembers nothing"
    cache.evict(0, Selection(keep=torch.tensor([1, 3])))
    assert torch.equal(read(0, 1, 5)[..., 0], values.gather(-1, keep)[..., 1]), "nothing written, nothing lost"
    cache.live = 0
    admit(cache, 2, seed=1)
    assert read(0, 2, 1).isnan().all(), "another sequence"


def test_last_uses_are_counted_one_query_at_a_time():
    """Random masses and evictions over 60 steps, against lists."""
    torch.manual_seed(0)
    cache = make_cache(slots=2, capacity=12)
    admit(cache, 3, seed=0)
    rows = [[2, 0] for _ in range(3)]  # last use and longest interval
    for now in range(3, 63):
        cache.begin_step(torch.tensor([now]))
        rows.append([now - 1, 0])
        received = torch.rand(1, 3, len(rows)) * 1.2
        for layer in range(2):
            cache.observe(layer, cache.pieces[0], torch.zeros(1, 6, 4), received)
        for row, mass in zip(rows, received[0, 1].tolist(), strict=True):
            if mass >= 0.9:
                row[:] = now, max(row[1], now - row[0])
        if len(rows) == 12:
            keep = torch.randperm(12)[:7].sort().values
            cache.evict(0, Selection(keep=keep))
            rows = [rows[i] for i in keep]
        assert cache.recorders[USE].read(0, len(rows), now)[:, 1, 1].T.tolist() == rows


def test_decayed_mass_weighs_each_query_less_than_the_next():
    torch.manual_seed(0)
    for length, group, decay in [(1, 4, 0.8), (37, 7, 0.8), (150, 4, 0.97), (20, 4, 0.0), (20, 4, 1.0)]:
        query, key = torch.randn(2 * group, length, 6), torch.randn(2, length, 6)
        expected = torch.zeros(2, length, dtype=torch.float64)
        for q in range(length):
            for head in range(2 * group):
                keys = key[head // group, : q + 1].double()
                weights = torch.softmax(keys @ query[head, q].double() * 0.4, dim=0)
                expected[head // group, : q + 1] += weights * decay ** (length - 1 - q)
        for block in (8, 512):
            found = decayed_mass(query, key, scaling=0.4, decay=decay, block=block)
            torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
        if decay == 1:
            torch.testing.assert_close(found, causal_mass(query, key, scaling=0.4))


TINY = {
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 50,
}


def test_a_step_without_its_cache_is_refused():
    model = AutoModelForCausalLM.from_config(LlamaConfig(num_hidden_layers=1, **TINY)).eval()
    use_slot_attention(model)
    cache = DynamicCache()
    model(torch.zeros(1, 5, dtype=torch.int64), past_key_values=cache)
    with pytest.raises(ValueError, match="slot_cache"):
        model(torch.zeros(1, 1, dtype=torch.int64), past_key_values=cache)


@pytest.mark.parametrize(
    ("invariant", "ragged", "rows", "tokens"),
    [(False, False, 6, 3), (True, False, 32, 4), (False, True, 40, 3), (True, True, 40, 3)],
)
def test_equal_bits_cost_whole_blocks_and_kernels_that_know_the_lengths_need_none(invariant, ragged, rows, tokens):
    cache = SlotCache(SHAPE, slots=3, capacity=40, device=torch.device("cpu"), invariant=invariant)
    cache.ragged = ragged
    for seed in range(3):
        admit(cache, 5, seed)
    cache.begin_step(torch.full((3,), 5))
    assert (cache.rows_read(slice(0, 3)), cache.step_tokens) == (rows, tokens)


def test_the_mask_of_a_step_is_made_once_for_each_number_of_rows():
    cache = make_cache(slots=3)
    for seed in range(3):
        admit(cache, 2, seed)
    cache.begin_step(torch.full((3,), 2))
    wide, narrow = cache.unseen(9), cache.unseen(3)
    assert (wide.shape[-1], narrow.shape[-1]) == (9, 3)
    assert cache.unseen(3) is narrow


def test_more_tokens_than_a_slot_has_room_for_are_refused_before_any_is_placed():
    cache = make_cache()
    admit(cache, 5, seed=0)
    with pytest.raises(ValueError, match="slot 0 holds 5 of 9 rows: it has no room for 5"):
        cache.begin_chunks(Chunks({0: 5}, cache.device), torch.arange(5, 10))
    assert cache.lengths[0] == 5
    cache.begin_chunks(Chunks({0: 4}, cache.device), torch.arange(5, 9))
    assert cache.lengths[0] == 9
