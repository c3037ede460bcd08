"""Models and requests for small runs of the engine: one of a few operations, and the embedded ones."""

import random
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace

import torch
from transformers import AutoModelForCausalLM
from transformers.cache_utils import DynamicCache

from kvsweep.compression.cache import use_slot_attention
from kvsweep.compression.cache_rows import CacheShape
from kvsweep.compression.policies.full import FullCache
from kvsweep.compression.policies.gkv import GKV
from kvsweep.compression.policies.h2o import H2O, H2ODynTSCode
from kvsweep.compression.policies.inertia import Inertia
from kvsweep.compression.policies.lazyeviction import LazyEviction
from kvsweep.compression.policies.random import Random
from kvsweep.compression.policies.rkv import RKVDynTSCode
from kvsweep.compression.policies.rpc import RPC
from kvsweep.compression.policies.snapkv import SnapKV
from kvsweep.compression.policies.window import Window
from kvsweep.harness.decode.engine import Engine
from kvsweep.harness.decode.request import Branch, DecodingConfig, Request, SamplingConfig
from kvsweep.harness.decode.slots import STEP_TOKENS
from kvsweep.harness.models.config import ModelConfig
from kvsweep.harness.models.load import load_model
from kvsweep.harness.models.loaded import LoadedModel
from kvsweep.harness.settings import WEIGHTS

GREEDY = SamplingConfig(temperature=0)
NEW_TOKENS = 60
FULL = FullCache(name="full")


EOS, THINK_END = 96, 95


class IdTokenizer:
    """Stands in for a tokenizer: a text is its token ids."""

    eos_token_id, unk_token_id = EOS, None

    def encode(self, text, add_special_tokens):
        return [THINK_END]

    def decode(self, ids):
        return "," if len(ids) == 1 and ids[0] % 10 == 3 else " ".join(map(str, ids))


def random_network(config):
    torch.manual_seed(1)
    network = AutoModelForCausalLM.from_config(deepcopy(config)).eval()
    # As random as they come: sharp logits, so that an error in the cache shows in the tokens.
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return network


def in_slots(network):
    """A network as the engine decodes with it."""
    use_slot_attention(network)
    return LoadedModel(ModelConfig(name="m", title="M", path="none", think_end=str(THINK_END)), network, IdTokenizer())


@cache
def toy_model(name="toy_qwen"):
    """An embedded model, loaded once."""
    return load_model(ModelConfig(name=name, title="Toy", path=str(WEIGHTS / name), threads=1))


def ask(texts, *policies, draws=1, **fields):
    """Requests p0, p1, ... for texts, whose cells are the policies 0, 1, ..."""
    branches = tuple(Branch(cell_id=str(i), policy=p) for i, p in enumerate(policies))
    return [
        Request(problem_id=f"p{i}", draw=d, prompt_ids=tuple(ids), branches=branches, **fields)
        for i, ids in enumerate(texts)
        for d in range(draws)
    ]


def run(
    model,
    requests,
    *,
    slots=3,
    sampling=GREEDY,
    max_new_tokens=NEW_TOKENS,
    seed=0,
    step_tokens=STEP_TOKENS,
    prepare=None,
    **options,
):
    """Completions by (cell_id, problem_id, draw), and the engine for its counts."""
    decoding = DecodingConfig(name="test", max_new_tokens=max_new_tokens, sampling=sampling)
    engine = Engine.sized_for(requests, model, decoding=decoding, seed=seed, slots=slots, **options)
    engine.prefiller.step_tokens = step_tokens
    if prepare is not None:
        prepare(engine)
    results = [((cell_id, c.problem_id, c.draw), c) for cell_id, c in engine.generate(requests)]
    assert len(dict(results)) == len(results), "a completion came twice"
    return dict(results), engine


class FakeDialogue:
    """Token 1 closes the thinking."""

    thinks = True

    def closing_tag(self, ids):
        return range(ids.index(1), ids.index(1) + 1) if 1 in ids else None

    def decode(self, ids):
        return " ".join(map(str, ids))


@dataclass
class FakeModel:
    """A model of a few operations whose next token depends on every row its cache holds; for many small runs."""

    vocabulary: int = 23

    device = torch.device("cpu")
    stop_ids = (0,)
    dialogue = FakeDialogue()
    spec = SimpleNamespace(experts=False, fusable=True, packed=False)
    shape = CacheShape(layers=1, q_heads=1, kv_heads=1, head_dim=4, dtype=torch.float64)

    def check_length(self, tokens):
        """Any length will do."""

    scaling = 1.0
    separators = torch.arange(23) % 5 == 0

    def step_hidden(self, tokens, positions, cache):
        rows = self.rows(tokens[:, None], positions[:, None])
        cache.slot_layers[0].update(rows, rows.cos())
        query = rows[:, :, 0] * 3
        return cache.layers[0].attend(query, {"scaling": 1.0})[:, 0]

    new_cache = DynamicCache

    def read(self, ids, start, prefill, cache):
        rows = self.rows(ids, torch.arange(start, start + ids.shape[1]).expand(len(ids), -1))
        keys, values = cache.update(rows, rows.cos(), 0)
        for part, place in prefill.parts:
            part.observe((rows * 3)[place], keys[place], values[place], self.scaling)
        return rows[:, 0]

    def rows(self, input_ids, position_ids):
        angle = input_ids[..., None] * torch.tensor([1.0, 0.7, 0.3, 0.1], dtype=torch.float64) + position_ids[..., None]
        return torch.sin(angle)[:, None]  # [slots, 1, tokens, 4]

    def logits(self, hidden, *_):
        spread = torch.arange(self.vocabulary, dtype=torch.float64)
        return torch.sin(hidden.sum(-1, keepdim=True) * 1000 + spread * 1.7) * 3


FAKE_POLICIES = [
    FULL,
    *(
        kind(name=kind.__name__, keep_ratio=ratio, local_window=window, budget=budget)
        for kind in (Window, Random)
        for ratio, window, budget in [(0.2, 3, 9), (0.5, 6, 9), (0.5, 3, 14), (1.0, 4, 12)]
    ),
    H2O(name="h2o", keep_ratio=0.4, local_window=3, budget=9),
    H2ODynTSCode(name="h2o", keep_ratio=0.4, local_window=3, budget=13),
    SnapKV(name="snapkv", keep_ratio=0.5, local_window=4, budget=10, observation_window=3),
    RKVDynTSCode(name="rkv", keep_ratio=0.5, local_window=4, budget=11, observation_window=2),
    Inertia(name="inertia", keep_ratio=0.4, local_window=3, budget=10),
    LazyEviction(name="lazyeviction", keep_ratio=0.4, local_window=3, budget=9, threshold=0.1),
    GKV(name="gkv", keep_ratio=0.4, local_window=3, budget=9, observation_window=2),
    RPC(name="rpc", keep_ratio=0.3, local_window=3, budget=9, observation_window=2, pooling=3),
]


def fake_requests(seed, count, policies):
    rng = random.Random(seed)
    texts = [tuple(rng.randrange(2, 23) for _ in range(rng.randrange(1, 13))) for _ in range(count)]
    branches = [Branch(cell_id=str(i), policy=p) for i, p in enumerate(policies)]
    # A resumed grid asks for any subset of its cells.
    return [
        Request(
            problem_id=str(i),
            draw=0,
            prompt_ids=ids,
            branches=tuple(rng.sample(branches, rng.randint(1, len(branches)))),
        )
        for i, ids in enumerate(texts)
    ]


T1 = SamplingConfig(temperature=1.0)
