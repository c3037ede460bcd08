"""Tests that need a GPU: bfloat16 accuracy at real sizes, races, replayed graphs, memory as computed.

Each check is a function of a device and of sizes. The tests marked `gpu` run them at the models' own sizes; where there
is no GPU, `test_the_checks_themselves_in_the_interpreter` runs what the interpreter can at small ones, so that no
check rots. Dead rows hold NaN throughout.
"""

import gc
import itertools
from dataclasses import dataclass, replace

import pytest
import torch

from kvsweep.compression.cache import SlotCache
from kvsweep.compression.cache_rows import CacheShape
from kvsweep.kernels import reference
from kvsweep.kernels.packing import pack_rows
from kvsweep.kernels.row_format import RowFormat
from tests.kernels.beside import close, compared, exact, kernel
from tests.kernels.interpreter import DTYPES, INTERPRETED, TOLERANCE, run_files

pytest.importorskip("triton")
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@dataclass(frozen=True)
class Sizes:
    """Heads of one layer, sequences decoded at once, rows per slot, rows after an eviction."""

    q_heads: int
    kv_heads: int
    head_dim: int
    layers: int
    slots: int
    capacity: int
    kept: int


QWEN = Sizes(q_heads=28, kv_heads=4, head_dim=128, layers=28, slots=32, capacity=5001, kept=1500)
LLAMA = Sizes(q_heads=32, kv_heads=8, head_dim=128, layers=32, slots=32, capacity=5001, kept=1500)
SMALL = Sizes(q_heads=7, kv_heads=1, head_dim=24, layers=2, slots=2, capacity=70, kept=37)
MODELS = pytest.mark.parametrize("sizes", [QWEN, LLAMA], ids=["qwen", "llama"])
without_gpu = INTERPRETED or not torch.cuda.is_available()
needs_gpu = pytest.mark.skipif(without_gpu, reason="needs a CUDA GPU and no interpreter")
inside = pytest.mark.skipif(not INTERPRETED, reason="runs in the process with the interpreter")


def on_gpu(test):
    return pytest.mark.gpu(needs_gpu(test))


@pytest.mark.slow  # test_triton.py has the kernels in the interpreter
@pytest.mark.skipif(INTERPRETED, reason="this is that process")
@pytest.mark.release
def test_the_checks_themselves_in_the_interpreter():
    run_files("not slow", __file__)


def normal(device, dtype, *shape, seed=0):
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, device=device, generator=generator).to(dtype)


def cache_of(device, dtype, sizes, slots):
    """Query, keys, values and lengths from 1 to capacity, NaN beyond each length."""
    query = normal(device, dtype, slots, sizes.q_heads, sizes.head_dim)
    keys, values = normal(device, dtype, 2, slots, sizes.kv_heads, sizes.capacity, sizes.head_dim, seed=1)
    lengths = torch.linspace(1, sizes.capacity, slots, device=device).long()
    poison(keys, values, lengths)
    return query, keys, values, lengths


def poison(keys, values, lengths):
    dead = torch.arange(keys.shape[2], device=keys.device) >= lengths[:, None]
    for rows in (keys, values):
        rows.masked_fill_(dead[:, None, :, None], torch.nan)


def long_text(device, dtype, sizes, tokens):
    query = normal(device, dtype, sizes.q_heads, tokens, sizes.head_dim)
    return query, normal(device, dtype, sizes.kv_heads, tokens, sizes.head_dim, seed=1)


def repetitive_keys(device, dtype, sizes):
    """Live rows of a longer slot, the rest NaN; keys of few kinds, whose cosines are far from the threshold of 0.5."""
    kinds = normal(CPU, torch.float32, sizes.kv_heads, 32, sizes.head_dim)
    chosen = torch.randint(32, (sizes.capacity,), generator=torch.Generator().manual_seed(1))
    noise = normal(CPU, torch.float32, sizes.kv_heads, sizes.capacity, sizes.head_dim, seed=2)
    rows = torch.full((sizes.kv_heads, sizes.capacity + 9, sizes.head_dim), torch.nan)
    rows[:, : sizes.capacity] = kinds[:, chosen] + 0.2 * noise
    return rows.to(device, dtype)[:, : sizes.capacity]


def check_decode_attention(device, dtype, sizes):
    inputs, attend = cache_of(device, dtype, sizes, sizes.slots), kernel("decode_attention")
    how = {"scaling": sizes.head_dim**-0.5, "return_mass": True}
    output, mass = attend(*inputs, **how)
    assert torch.equal(attend(*inputs, scaling=how["scaling"])[0], output)
    for slot in range(sizes.slots):
        one = slice(slot, slot + 1)
        expected = reference.decode_attention(*(exact(tensor[one]) for tensor in inputs), **how)
        close(output[one], expected[0], dtype)
        close(mass[one], expected[1], dtype)


def check_packed_attention(device, dtype, sizes, bits):
    """Slots of every length, of which all but the newest 32 rows are packed; the other bytes are those of NaN."""
    group = 8 if sizes.head_dim % 16 else 16
    forms, residual = tuple(RowFormat(bits=n, group=group, head_dim=sizes.head_dim) for n in bits), 32
    shape = (sizes.slots, 2, sizes.kv_heads)
    query, _, _, lengths = cache_of(device, dtype, sizes, sizes.slots)
    kinds = normal(device, dtype, *shape, sizes.capacity, sizes.head_dim, seed=1).unbind(1)
    packed = [pack_rows(one, form) for one, form in zip(kinds, forms, strict=True)]
    newest = normal(device, dtype, *shape, residual, sizes.head_dim, seed=2)
    rows = torch.arange(sizes.capacity, device=device)
    positions = (rows + 1000).expand(sizes.slots, sizes.kv_heads, -1)
    counts = (lengths - residual).clamp(min=0)[:, None].expand(-1, sizes.kv_heads)
    dead, clean = (rows >= counts[..., None])[..., None], (query, *packed, newest, positions, counts, lengths)
    junk, how = [one.masked_fill(dead, 0xFF) for one in packed], {"formats": forms, "scaling": sizes.head_dim**-0.5}
    inputs = *junk, newest, positions, counts, lengths
    attend = kernel("packed_attention")
    output, mass = attend(query, *inputs, **how, return_mass=True)
    assert torch.equal(attend(query, *inputs, **how)[0], output)
    for slot in range(sizes.slots):
        one = slice(slot, slot + 1)
        expected = reference.packed_attention(*(exact(tensor[one]) for tensor in clean), **how, return_mass=True)
        close(output[one], expected[0], dtype)
        close(mass[one], expected[1], dtype)


def check_a_slot_alone_and_in_a_batch(device, dtype, sizes, capacity, batches):
    largest, decode_attention = max(batches), kernel("decode_attention")
    inputs = cache_of(device, dtype, replace(sizes, capacity=capacity), largest)
    how = {"scaling": sizes.head_dim**-0.5, "return_mass": True}
    whole = decode_attention(*inputs, **how)
    for slots in batches:
        for start in (0, largest - slots):
            found = decode_attention(*(tensor[start : start + slots] for tensor in inputs), **how)
            for part, all_of_it in zip(found, whole, strict=True):
                assert torch.equal(part, all_of_it[start : start + slots]), (slots, start)


def check_replay(device, dtype, sizes, mass):
    """Decode attention captured once, replayed after its inputs have changed in place, as the engine's steps do."""
    query, keys, values, lengths = cache_of(device, dtype, sizes, sizes.slots)
    how, decode_attention = {"scaling": sizes.head_dim**-0.5, "return_mass": mass}, kernel("decode_attention")
    replay = captured(lambda: decode_attention(query, keys, values, lengths, **how), device)
    for step in range(4):
        query.copy_(normal(device, dtype, *query.shape, seed=10 + step))
        rows = normal(device, dtype, 2, *keys.shape, seed=20 + step)
        lengths.copy_(torch.linspace(1 + step, sizes.capacity - 3 * step, sizes.slots).long())
        keys.copy_(rows[0])
        values.copy_(rows[1])
        poison(keys, values, lengths)
        eager = decode_attention(query, keys, values, lengths, **how)
        replayed = replay()
        assert torch.equal(replayed[0], eager[0])
        assert torch.equal(replayed[1], eager[1]) if mass else replayed[1] is None


def captured(work, device):
    """A function that replays `work` and returns what it then holds; without a GPU `work` itself."""
    if device.type == "cpu":
        return work
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = work()

    def replay():
        for tensor in held:
            if tensor is not None:
                tensor.fill_(torch.nan)
        graph.replay()
        return held

    return replay


def selection(device, sizes, per_head):
    generator = torch.Generator().manual_seed(3)
    order = torch.rand(sizes.layers, sizes.kv_heads, sizes.capacity, generator=generator).argsort(dim=-1)
    keep = order[..., : sizes.kept].sort(dim=-1).values.to(device)
    return keep if per_head else keep[0, 0].contiguous()


def check_compact(device, dtype, sizes, per_head, runs):
    """Every run moves the same rows of one slot, from NaN-strewn memory, and touches no other slot."""
    before = normal(device, dtype, 2 * sizes.layers, 2, sizes.kv_heads, sizes.capacity, sizes.head_dim)
    before[:, :, :, ::7, 0] = torch.nan
    keep = selection(device, sizes, per_head)
    expected = before.clone()
    # As integers: NaN equals nothing, and a gather may change its bits.
    reference.compact_layers([tensor[1].view(torch.int16) for tensor in expected], keep)
    caches = torch.empty_like(before)
    for _ in range(runs):
        caches.copy_(before)
        kernel("compact_layers")([tensor[1] for tensor in caches], keep)
        assert torch.equal(caches.view(torch.int16), expected.view(torch.int16))


def check_importance_labels(device, dtype, sizes, tokens, kind):
    how = {"kind": kind, "scaling": sizes.head_dim**-0.5, "answer_start": tokens * 3 // 4, "min_distance": 32}
    compared("importance_labels", *long_text(device, dtype, sizes, tokens), dtype=dtype, **how)


def check_causal_mass(device, dtype, sizes, tokens):
    compared("causal_mass", *long_text(device, dtype, sizes, tokens), dtype=dtype, scaling=sizes.head_dim**-0.5)


def check_redundancy(device, dtype, sizes):
    # Widened first in either form, so that bfloat16 keys cost no accuracy.
    compared("redundancy", repetitive_keys(device, dtype, sizes), dtype=torch.float32, threshold=0.5)


OBSERVATIONS = [
    (8, {"past_only": True, "pool_logits": True, "pooling": 7, "pool": "max"}),
    (32, {"pooling": 5, "pool": "mean"}),
]


def observed(device, dtype, sizes, window):
    return normal(device, dtype, sizes.q_heads, window, sizes.head_dim), repetitive_keys(device, dtype, sizes)


def check_observation(device, dtype, sizes, window, how):
    how = {"scaling": sizes.head_dim**-0.5, **how}
    compared("observation_scores", *observed(device, dtype, sizes, window), dtype=dtype, **how)


def check_repeats(device, dtype, sizes, tokens, runs):
    """No kernel but `compact`, which has a check of its own, ever gives other bits."""
    scaling = sizes.head_dim**-0.5
    cache, text = cache_of(device, dtype, sizes, sizes.slots), long_text(device, dtype, sizes, tokens)
    keys = repetitive_keys(device, dtype, sizes)
    seen = [(*observed(device, dtype, sizes, window), how) for window, how in OBSERVATIONS]
    label = {"scaling": scaling, "answer_start": tokens // 2}

    def everything():
        yield from kernel("decode_attention")(*cache, scaling=scaling, return_mass=True)
        for kind in ("answer", "far_max"):
            yield kernel("importance_labels")(*text, kind=kind, **label).nan_to_num()
        yield kernel("redundancy")(keys, threshold=0.5)
        for queries, rows, how in seen:
            yield kernel("observation_scores")(queries, rows, scaling=scaling, **how)

    first = [tensor.clone() for tensor in everything()]
    for run in range(runs):
        for number, (again, once) in enumerate(zip(everything(), first, strict=True)):
            assert torch.equal(again, once), (run, number)


def check_pointwise(device, dtype, sizes, inner, normed):
    """A step of every slot, and the bits of the first slot alone."""
    width, lines = sizes.q_heads * sizes.head_dim, torch.arange(sizes.slots * sizes.kv_heads, device=device).flip(0)
    states, update = 30 * normal(device, dtype, 2, sizes.slots, width)
    gate_up, weight = normal(device, dtype, sizes.slots, 2 * inner), normal(device, dtype, width)
    heads = normal(device, dtype, sizes.slots, sizes.q_heads + 2 * sizes.kv_heads, sizes.head_dim)
    turn = normal(device, dtype, 2, sizes.slots, 1, sizes.head_dim)
    weights = normal(device, dtype, 2, sizes.head_dim)

    def results(get, slots, to):
        norm, gate, rotate = map(get, ("add_norm", "gated", "rotate_and_write"))
        tensors = [tensor.to(to) for tensor in (states, update, gate_up, heads, *turn)]
        own = [tensor[:slots] for tensor in tensors]
        memory = torch.zeros(2, len(lines), sizes.head_dim, dtype=to, device=device)
        norms = (*weights.to(to), 1e-6) if normed else None
        query = rotate(*own[3:], *memory, lines[: slots * sizes.kv_heads], q_heads=sizes.q_heads, norms=norms)
        return *norm(*own[:2], weight.to(to), 1e-6), gate(own[2]), query, *memory

    whole = results(kernel, sizes.slots, dtype)
    expected = results(vars(reference).get, sizes.slots, torch.float64)
    for found, right in zip(whole, expected, strict=True):
        close(found, right, dtype)
    alone = results(kernel, 1, dtype)
    for one, of_all in zip(alone[:4], whole[:4], strict=True):
        assert torch.equal(one[0], of_all[0])


def check_memory(device, sizes, impl, allocated):
    """Of the rows alone: what is kept for each row beside them is a few bytes of some fifty thousand."""
    shape = CacheShape(
        layers=sizes.layers,
        q_heads=sizes.q_heads,
        kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        dtype=torch.bfloat16,
    )
    gc.collect()
    before = allocated()
    cache = SlotCache(shape, slots=sizes.slots, capacity=sizes.capacity, device=device, impl=impl)
    analytic = SlotCache.bytes_per_slot(shape, sizes.capacity) * sizes.slots
    assert allocated() - before == pytest.approx(analytic, rel=0.02)
    assert cache.kv_bytes == analytic


ALL, WIDE = tuple(TOLERANCE), (torch.float32, torch.bfloat16)
# Each check at the models' sizes: the dtypes, and what else it is given.
CHECKS = [
    (check_decode_attention, ALL, ()),
    *((check_packed_attention, ALL, (bits,)) for bits in ((8, 8), (4, 4), (2, 2), (4, 2))),
    (check_a_slot_alone_and_in_a_batch, WIDE, (2100, (1, 7, 128))),
    *((check_replay, WIDE, (mass,)) for mass in (False, True)),
    *((check_compact, WIDE, (per_head, 100)) for per_head in (False, True)),
    *((check_importance_labels, ALL, case) for case in itertools.product((4096, 5001), ("answer", "far_max", "later"))),
    (check_causal_mass, ALL, (3001,)),
    (check_redundancy, ALL, ()),
    *((check_observation, ALL, case) for case in OBSERVATIONS),
    *((check_pointwise, ALL, (18944, normed)) for normed in (False, True)),
    (check_repeats, WIDE, (2048, 100)),
]


@on_gpu
@MODELS
@pytest.mark.parametrize(
    ("check", "dtype", "given"), [(check, dtype, given) for check, dtypes, given in CHECKS for dtype in dtypes]
)
def test_at_the_models_sizes(check, dtype, given, sizes):
    check(CUDA, dtype, sizes, *given)


@on_gpu
@MODELS
def test_the_slot_cache_takes_the_memory_computed_for_it(sizes):
    check_memory(CUDA, replace(sizes, slots=8), "triton", lambda: torch.cuda.memory_allocated(CUDA))


@inside
@DTYPES
@pytest.mark.slow_unless(rule=lambda dtype: dtype != torch.float16)
def test_in_small(dtype):
    check_decode_attention(CPU, dtype, SMALL)
    check_packed_attention(CPU, dtype, SMALL, (8, 4))
    check_a_slot_alone_and_in_a_batch(CPU, dtype, SMALL, SMALL.capacity, (1, 2))
    check_replay(CPU, dtype, SMALL, mass=True)
    check_importance_labels(CPU, dtype, SMALL, 70, "later")
    check_causal_mass(CPU, dtype, SMALL, 70)
    check_redundancy(CPU, dtype, SMALL)
    check_pointwise(CPU, dtype, SMALL, 70, normed=True)


@inside
def test_more_in_small():
    for dtype, per_head in itertools.product(WIDE, (False, True)):
        check_compact(CPU, dtype, SMALL, per_head, runs=2)
    for window, how in OBSERVATIONS:
        check_observation(CPU, torch.bfloat16, SMALL, window, how)
    check_repeats(CPU, torch.bfloat16, replace(SMALL, slots=1, capacity=40), 40, runs=1)


@inside
def test_memory_in_small():
    shape = replace(SMALL, layers=6, kv_heads=4, head_dim=64)

    def allocated():
        tensors = (o for o in gc.get_objects() if type(o) is torch.Tensor)
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())

    check_memory(CPU, shape, "triton", allocated)
