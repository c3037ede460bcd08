"""Decoding over packed rows: the same texts whatever the slots and the neighbours, at every width."""

import pytest
import torch

from kvsweep.compression.cache import SlotCache
from kvsweep.compression.config import UNPACKED, CacheConfig
from kvsweep.compression.policies.full import FullCache
from kvsweep.compression.policies.rkv import RKV
from kvsweep.compression.policies.window import Window
from kvsweep.harness.decode.engine import Engine
from kvsweep.harness.decode.request import Branch, DecodingConfig, Request, SamplingConfig
from kvsweep.harness.models.config import ModelConfig
from kvsweep.harness.models.load import load_model
from kvsweep.harness.settings import WEIGHTS

LIMIT = 60
POLICIES = [
    FullCache(name="full"),
    Window(name="window", keep_ratio=0.5, local_window=16, budget=40),
    RKV(name="rkv", keep_ratio=0.3, local_window=12, budget=36, observation_window=4),
]
DECODING = DecodingConfig(name="test", max_new_tokens=LIMIT, sampling=SamplingConfig(temperature=1.0))


@pytest.fixture(scope="module")
def model():
    return load_model(ModelConfig(name="toy_qwen", title="Toy", path=str(WEIGHTS / "toy_qwen"), threads=1))


def requests(count, policies=POLICIES):
    generator = torch.Generator().manual_seed(0)
    for index in range(count):
        prompt = torch.randint(3, 128, (9 + 11 * index,), generator=generator)
        branches = tuple(Branch(cell_id=policy.name, policy=policy) for policy in policies)
        yield Request(problem_id=str(index), draw=0, prompt_ids=tuple(prompt.tolist()), branches=branches)


def texts(model, wanted, cache, slots):
    engine = Engine.sized_for(list(requests(3)), model, decoding=DECODING, seed=0, slots=slots, cache=cache)
    found = {(cell, c.problem_id): (c.token_ids, c.evictions) for cell, c in engine.generate(wanted)}
    assert engine.cache.kv_bytes == slots * SlotCache.bytes_per_slot(model.shape, engine.cache.capacity, cache)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"bits": 8}, marks=pytest.mark.slow),
        {"bits": 4},
        pytest.param({"bits": 2}, marks=pytest.mark.slow),
        {"bits": 4, "value_bits": 2, "scheme": "kivi", "group": 16},
        {"bits": 4, "value_bits": 2, "scheme": "kvarn", "group": 16},
        {"scheme": "fp8", "scale": "token"},
    ],
    ids=["8", "4", "2", "kivi", "kvarn", "fp8"],
)
@pytest.mark.one_in(2)
def test_texts_do_not_depend_on_the_batch(model, settings):
    config, wanted = CacheConfig(residual=10, **{"group": 32, **settings}), list(requests(3))
    together = texts(model, wanted, config, slots=6)
    assert len(together) == 9
    # One slot decodes each branch alone from its beginning; the order turns round.
    alone = texts(model, wanted[::-1], config, slots=1)
    assert together == alone
    assert any(evictions for _, evictions in together.values())
    assert together != texts(model, wanted, UNPACKED, slots=6)


@pytest.mark.slow
def test_a_residual_as_long_as_the_text_changes_nothing_but_rounding(model):
    """Every row is then among the newest, rotated; so greedy texts are the unpacked ones."""
    greedy = DecodingConfig(name="test", max_new_tokens=LIMIT, sampling=SamplingConfig(temperature=0))
    found = []
    for cache in (UNPACKED, CacheConfig(bits=2, residual=120), CacheConfig(bits=2, residual=120, scheme="kivi")):
        engine = Engine.sized_for(list(requests(3)), model, decoding=greedy, seed=0, slots=4, cache=cache)
        found.append({(cell, c.problem_id): c.token_ids for cell, c in engine.generate(requests(3))})
    assert found[0] == found[1] == found[2]
