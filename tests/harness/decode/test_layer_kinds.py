"""Models whose layers are of several kinds, tiny, over texts far longer than their windows.

The yardstick is transformers' own code: `generate`, and its eager attention under a mask for each kind of layer.
"""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import transformers

from kvsweep.compression.cache import SLOT_ATTENTION, SlotCache
from kvsweep.compression.cache_rows import Prefill
from kvsweep.compression.config import CacheConfig, fixed_bytes
from kvsweep.compression.policies.h2o import H2O
from kvsweep.compression.policies.window import Window
from kvsweep.compression.policy import Policy, Selection
from kvsweep.harness.decode.engine import Engine
from kvsweep.harness.decode.request import DecodingConfig, Request, SamplingConfig
from kvsweep.harness.models.loaded import LoadedModel
from kvsweep.messages.errors import UserError
from tests.harness.decode.fakes import FULL, ask
from tests.harness.models.test_families import (
    EXACT,
    InFloat64,
    check_distance,
    check_exact,
    float64_copy,
    loaded,
    particular,
)

WINDOW = 24
THREE = {"num_hidden_layers": 3, "sliding_window": WINDOW}
ROPES = {"sliding_attention": {"rope_type": "default", "rope_theta": 100.0}} | {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
}


def kinds(*names: str) -> dict[str, Any]:
    short = {"w": "sliding_attention", "f": "full_attention", "l": "linear_attention", "c": "conv"}
    return {"layer_types": [short[name] for name in names]}


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "windows alone": ("mistral", {"sliding_window": WINDOW}),
    "a window of no whole block, fused": (
        "qwen3",
        {**THREE, **kinds("f", "w", "f"), "use_sliding_window": True, "sliding_window": 37},
    ),
    "windows first and last": ("olmo3", {**THREE, **kinds("w", "f", "w")}),
    "no rope in full layers": ("exaone4", {**THREE, **kinds("w", "f", "w")}),
    "two ropes": ("gemma3_text", {**THREE, **kinds("f", "w", "f"), "rope_parameters": ROPES}),
    "softcap": ("gemma2", {**THREE, **kinds("w", "f", "f"), "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8}),
    "sinks": ("gpt_oss", {**THREE, **kinds("w", "f", "w")}),
}
DELTA = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
MODELS |= {
    "linear first and last": ("qwen3_5_text", {"num_hidden_layers": 3, **DELTA, **kinds("l", "f", "l")}),
    "linear between": ("qwen3_next", {"num_hidden_layers": 3, **DELTA, **kinds("f", "l", "f")}),
    "convolutions": ("lfm2", {"num_hidden_layers": 3, **kinds("c", "f", "c")}),
}
EACH = pytest.mark.parametrize("name", MODELS)
# What `make test` runs of each kind of layer; `make slow` runs the others.
FEW = ("a window of no whole block, fused", "two ropes", "sinks")
# Where a chunk's bits are not those of its steps, though both are within rounding; nobody knows why yet.
CHUNKS_ROUND = {"gpt2", "gpt_neox", "persimmon"}
# The other families, each with windows where it has them, in shorter texts.
OTHERS = sorted(EXACT.keys() - {family for family, _ in MODELS.values()})


@cache
def model_of(name: str) -> LoadedModel:
    return model_on(name, "cpu") if name in MODELS else particular(name)


def model_on(name: str, device: str) -> LoadedModel:
    family, fields = MODELS[name]
    if name.startswith("linear") and not hasattr(transformers.Cache, "get_recurrent_state"):
        pytest.skip("a delta rule needs transformers 5.21")
    return loaded(family, fields, device)


def text_of(model: LoadedModel, length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 290, (length,), generator=generator).tolist()


@EACH
@pytest.mark.slow_unless(rule=lambda name, **_: name == FEW[0])
@pytest.mark.parametrize("tokens", [40, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.release_unless(rule=lambda name, tokens: tokens == 40 or name in FEW)
def test_many_tokens_are_those_of_the_models_own_code(name, tokens):
    check_exact(model_of(name), new=tokens, prompts=(5, 40, 9))


def own_logits(model: LoadedModel, text: list[int], prompt: int, gone: dict[int, list[int]]) -> torch.Tensor:
    """Eager logits of the tokens behind the prompt; from token `at` on no full layer sees the positions `gone[at]`.

    In one forward; with linear layers in steps over transformers' own cache, since the form of a linear layer that
    reads a whole text rounds otherwise than its recurrent form, by up to 6e-4 of the logits' deviation.
    """
    network, length, lowest = model.network, len(text), torch.finfo(torch.float32).min
    later = torch.ones(length, length, dtype=torch.bool).triu(1)
    hidden = {"full": later.clone(), "window": later | ~torch.ones_like(later).triu(1 - model.spec.window)}
    for at, positions in gone.items():
        hidden["full"][at:, positions] = True
    masks = {kind: torch.zeros(1, 1, length, length).masked_fill(mask, lowest) for kind, mask in hidden.items()}
    network.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            if not model.spec.states:
                kind = {"sliding_attention": masks["window"], "full_attention": masks["full"]}
                mask = kind if getattr(network.config, "layer_types", None) else masks["window"]
                return network(input_ids=torch.tensor([text]), attention_mask=mask, use_cache=False).logits[0, prompt:]
            own, found = model.new_cache(), []
            network(input_ids=torch.tensor([text[:prompt]]), past_key_values=own)
            for at in range(prompt, length):
                seen = {"full_attention": masks["full"][:, :, at : at + 1, : at + 1]}
                seen |= {"linear_attention": None, "conv": None}
                ids = {"input_ids": torch.tensor([text[at : at + 1]]), "position_ids": torch.tensor([[at]])}
                found.append(network(**ids, past_key_values=own, attention_mask=seen).logits[0, -1])
            return torch.stack(found)
    finally:
        network.set_attn_implementation(SLOT_ATTENTION)


def exact_logits(model: LoadedModel, text: list[int], prompt: int, gone: dict[int, list[int]]) -> torch.Tensor:
    """`own_logits` in float64."""
    with InFloat64():
        return own_logits(replace(model, network=float64_copy(model)), text, prompt, gone)


@EACH
@pytest.mark.slow_unless(rule=lambda name: name in FEW)
def test_evictions_free_rows_of_full_layers_alone(name):
    """The second slot is copied from the first, which then swaps places with the third."""
    model, prompt, length = model_of(name), 33, 160
    text = text_of(model, length, 1)
    evictions = {} if not model.shape.layers else {60: range(5, 40), 90: range(2, 41, 2), 130: range(35)}
    cache = SlotCache(model.shape, slots=3, capacity=length, device=model.device)
    found, gone, prefill = [], dict[int, list[int]](), Prefill()
    with torch.inference_mode():
        model.read(torch.tensor([text[:prompt]]), 0, prefill, model.new_cache())
        cache.admit(prefill)
        for at in range(prompt, length):
            if at == 70:
                cache.copy(0, 2)
                cache.copy([0, 2], [2, 0])
            positions = torch.tensor([at])
            cache.begin_step(positions)
            found.append(model.logits(model.step_hidden(torch.tensor([text[at]]), positions, cache))[0])
            cache.end_step(torch.zeros(1, model.spec.hidden_size))
            if at + 1 in evictions:
                rows = set(evictions[at + 1])
                held = cache.positions[0, 0, 0, : cache.lengths[0]].tolist()
                gone[at + 1] = [position for row, position in enumerate(held) if row in rows]
                cache.evict(0, Selection(keep=torch.tensor([row for row in range(len(held)) if row not in rows])))
    exact = exact_logits(model, text, prompt, gone)
    check_distance(torch.stack(found), own_logits(model, text, prompt, gone), exact)


POLICIES: list[Policy] = [
    FULL,
    Window(name="window", keep_ratio=0.3, local_window=8, budget=40),
    H2O(name="h2o", keep_ratio=0.4, local_window=8, budget=36),
]


def engine_of(model: LoadedModel, requests: list[Request], slots: int, new: int = 48, **options: Any) -> Engine:
    decoding = DecodingConfig(name="greedy", max_new_tokens=new, sampling=SamplingConfig(temperature=0))
    return Engine.sized_for(requests, model, decoding=decoding, seed=0, slots=slots, **options)


def requests_for(model: LoadedModel, count: int) -> list[Request]:
    texts = [text_of(model, 3 + 5 * i % 44, i) for i in range(count)]
    return ask(texts, *policies_for(model))  # type: ignore[no-any-return]


def policies_for(model: LoadedModel) -> list[Policy]:
    return POLICIES if model.shape.layers else POLICIES[:1]


PACKED = CacheConfig(bits=8, group=8, residual=16)


@pytest.mark.parametrize(
    ("name", "config", "new"),
    [(name, config, 48) for name in MODELS for config in (CacheConfig(), PACKED)] + [(f, PACKED, 36) for f in OTHERS],
)
@pytest.mark.slow_unless(rule=lambda name, config, new: (name, config) in ((FEW[0], PACKED), (FEW[1], CacheConfig())))
@pytest.mark.one_in(4)
def test_forks_are_what_each_branch_writes_alone(name, config, new):
    model = model_of(name)
    requests = requests_for(model, 3)
    alone = [single for request in requests for single in request.split()]
    # Side by side, in slots of their own: `alone` has nothing to fork.
    found, expected = (
        {(cell, c.problem_id): c for cell, c in engine_of(model, rows, slots, new, cache=config).generate(rows)}
        for rows, slots in ((requests, 4), (alone, len(alone)))
    )
    assert found == expected
    assert len(found) == 3 * len(policies_for(model))
    assert any(c.evictions for c in found.values()) == (len(policies_for(model)) > 1)


def check_bits(model: LoadedModel, **options: Any):
    """Logits of 66 texts, 7 and 64 of them side by side, and of the first 12 alone."""
    seen: list[dict[tuple[str, int], torch.Tensor]] = []
    for slots, texts in ((64, 66), (7, 66), (1, 12)):
        requests = [r for request in requests_for(model, texts) for r in list(request.split())[-1:]]
        engine = engine_of(model, requests, slots, new=16, **options)
        logits = dict[tuple[str, int], torch.Tensor]()
        assert engine.cache.invariant
        sample = engine._sample

        def keep(rows, engine=engine, logits=logits, sample=sample):
            for slot in range(engine.cache.live):
                key = engine.table[slot].request.problem_id, int(engine.table.generated[slot])
                logits[key] = rows[slot].clone()
            sample(rows)

        engine._sample = keep  # type: ignore[method-assign]
        ended = {completion.problem_id: completion.num_tokens for _, completion in engine.generate(requests)}
        # On a GPU a text that has ended may get one token more, which is dropped.
        seen.append({key: rows for key, rows in logits.items() if key[1] < ended[key[0]]})
    assert seen[1].keys() == seen[0].keys() > seen[2].keys()
    for other in seen[1:]:
        assert all(torch.equal(rows, seen[0][key]) for key, rows in other.items())


ON_A_DEVICE = pytest.mark.parametrize(
    ("device", "impl"),
    [
        ("cpu", "torch"),
        *(
            pytest.param(
                "cuda",
                impl,
                marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")],
            )
            for impl in ("torch", "triton")
        ),
    ],
)


@EACH
@ON_A_DEVICE
@pytest.mark.slow_unless(rule=lambda name, device, impl: device == "cuda" or name == "windows alone")
@pytest.mark.one_in(3)
def test_greedy_texts_on_a_device_are_those_of_the_cpu(name, device, impl):
    """Unevicted and in a window, over 1 and 7 slots; the CPU's own are held to transformers' code above."""
    found = []
    for model, slots, how in ((model_of(name), 3, "torch"), *((model_on(name, device), n, impl) for n in (1, 7))):
        requests = [replace(request, branches=request.branches[:2]) for request in requests_for(model, 4)]
        ended = engine_of(model, requests, slots, impl=how).generate(requests)
        found.append({(cell, one.problem_id): (one.token_ids, one.evictions) for cell, one in ended})
    assert found[0] == found[1] == found[2]
    assert any(evictions for _, evictions in found[0].values()) == bool(model_of(name).shape.layers)


@pytest.mark.slow
@ON_A_DEVICE
def test_bits_on_a_device_are_the_same_whatever_the_slots(device, impl):
    """Of a fused model with windows; of others, and of torch's products on a GPU, nobody may ask for it."""
    fused, other = model_on("a window of no whole block, fused", device), model_on("linear between", device)
    for model in (other,) if impl == "triton" else (fused, other) if device == "cuda" else (other,):
        with pytest.raises(UserError, match="invariant=true"):
            check_bits(model, impl=impl, invariant=True)
    if device == "cpu" or impl == "triton":
        check_bits(fused, impl=impl, invariant=True)


@pytest.mark.parametrize(
    ("name", "invariant", "length"),
    [(name, invariant, 150) for name in MODELS for invariant in (True, False)] + [(f, True, 60) for f in OTHERS],
)
@pytest.mark.slow_unless(rule=lambda name, invariant, length: length == 60 and OTHERS.index(name) % 40 == 0)
@pytest.mark.one_in(4)
def test_chunks_are_the_steps_one_by_one(name, invariant, length):
    """A text over two slots: the last hidden states after chunks of any size; invariance is refused for experts."""
    model = model_of(name)
    invariant = invariant and not model.spec.experts
    text = tuple(text_of(model, length, 3))
    decoding = DecodingConfig(name="fed", max_new_tokens=length, sampling=SamplingConfig(temperature=0))
    requests = ask([text[:30]] * 2, *policies_for(model), forced=text[30:], replayed=True)
    states = []
    for most in (1, 7, 64):
        engine = Engine.sized_for(requests, model, decoding=decoding, seed=0, slots=6, invariant=invariant)
        largest = 1 if engine.cache.linears else most
        type(engine)._most_fed, before = property(lambda _, most=largest: most), type(engine)._most_fed
        try:
            found = [part for step in engine.replay(requests) for part in step]
        finally:
            type(engine)._most_fed = before
        rows = {
            (f.request.problem_id, cell, f.start + i): s
            for f in found
            for cell in f.cell_ids
            for i, s in enumerate(f.hidden)
        }
        states.append(torch.stack([rows[key] for key in sorted(rows)]))
    for other in states[1:]:
        if invariant and name not in CHUNKS_ROUND:
            assert torch.equal(other, states[0])
        torch.testing.assert_close(other, states[0], rtol=1e-4, atol=1e-4)


def test_bytes_count_what_does_not_grow():
    for name in MODELS:
        model = model_of(name)
        cache = SlotCache(model.shape, slots=3, capacity=50, device=model.device)
        assert cache.kv_bytes == 3 * SlotCache.bytes_per_slot(model.shape, 50)
        assert SlotCache.bytes_per_slot(model.shape, 0) == fixed_bytes(model.spec, 4) > 0


def test_rows_of_windows_cannot_be_evicted():
    model = model_of("windows alone")
    cache = SlotCache(model.shape, slots=1, capacity=5, device=model.device)
    with pytest.raises(ValueError, match="without a layer of full attention"):
        cache.evict(0, Selection(keep=torch.tensor([0])))
