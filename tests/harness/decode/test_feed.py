"""Known texts fed in chunks against the same texts fed token by token: kept rows, logits, completions."""

import random
from collections import defaultdict
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import pad

from kvsweep.compression.config import UNPACKED, CacheConfig
from kvsweep.harness.decode.engine import Engine
from kvsweep.harness.decode.request import DecodingConfig
from kvsweep.harness.settings import choices, compose_config
from kvsweep.harness.sweep.grid import build_policies
from kvsweep.harness.toy.tasks import problems
from kvsweep.kernels.row_format import TOKEN_BLOCK
from tests.harness.decode.fakes import GREEDY, ask, toy_model

# Beside those that need labels of the very text.
POLICIES = [name for name in choices("policy") if not name.startswith("oracle")]
LENGTHS = (0, 1, 61, 110)


class Watched(Engine):
    """An engine that notes every eviction's kept rows and, for each token, the logits that predict it."""

    chunks = random.Random(0)

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.kept, self.seen = defaultdict(list), defaultdict(list)

    def name(self, slot):
        return (self.table[slot].request.problem_id, self.table[slot].branches[0].cell_id)

    def _evict(self, slot):
        evict = self.cache.evict
        self.cache.evict = lambda at, selection: (
            self.kept[self.name(slot)].append((int(self.table.generated[slot]), selection.keep.clone())),
            evict(at, selection),
        )
        super()._evict(slot)
        self.cache.evict = evict

    def _sample(self, logits):
        for slot in range(self.cache.live):
            self.seen[self.name(slot)].append(logits[slot].clone())
        super()._sample(logits)

    @property
    def _most_fed(self):
        return min(self.chunks.choice((1, 3, 17, 64, 500)), self.cache.storage.longest_chunk or 500)


def texts_of(model):
    """Questions, and texts of ragged lengths that the model finds likely in parts."""
    dice, vocabulary = random.Random(1), model.network.config.vocab_size - 1
    prompts = [model.dialogue.prompt_ids(problem.question) for problem in problems("chain")[: len(LENGTHS)]]
    ends = [tuple(dice.randrange(3, vocabulary) for _ in range(length)) for length in LENGTHS]
    return [(prompt[:cut], (*prompt, *end)) for prompt, end, cut in zip(prompts, ends, (1, 20, 999, 999), strict=True)]


def engine_for(model, policies, *, slots, invariant, cache):
    texts = texts_of(model)
    requests = ask([prompt for prompt, _ in texts], *policies, replayed=True)
    requests = [replace(request, forced=text) for request, (_, text) in zip(requests, texts, strict=True)]
    decoding = DecodingConfig(name="test", max_new_tokens=max(len(r.forced) for r in requests), sampling=GREEDY)
    engine = Watched.sized_for(
        requests, model, decoding=decoding, seed=3, slots=slots, invariant=invariant, cache=cache
    )
    # Memory that nobody has written must not matter. Rows are zeroed on admission, as attention needs it.
    for tensor in engine.cache.storage.tensors:
        tensor.fill_(255 if tensor.dtype == torch.uint8 else torch.nan)
    for recorder in engine.cache.recorders.values():
        for tensor in recorder.tensors:
            if tensor.dtype.is_floating_point:
                tensor.fill_(torch.nan)
    return engine, requests


def stepped(model, policies, **options):
    """Each cell in a slot of its own, one token at a time: kept rows and logits by (problem, cell)."""
    engine, requests = engine_for(model, policies, slots=64, **options)
    list(engine.generate([single for request in requests for single in request.split()]))
    return engine.kept, {name: torch.stack(rows) for name, rows in engine.seen.items()}


def replayed(model, policies, **options):
    engine, requests = engine_for(model, policies, **options)
    seen = defaultdict(list)
    for fed in (part for step in engine.replay(requests) for part in step):
        filled = pad(fed.hidden, (0, 0, 0, -len(fed.hidden) % TOKEN_BLOCK))
        logits = model.logits(filled, engine.cache.linear)[: len(fed.hidden)]
        for cell in fed.cell_ids:
            assert fed.start == sum(map(len, seen[fed.request.problem_id, cell])), "a part is missing or came twice"
            seen[fed.request.problem_id, cell].append(logits.clone())
    assert engine.table.free == options["slots"]
    return engine.kept, {name: torch.cat(parts) for name, parts in seen.items()}


# One of each kind of recorder, of positions per head, of remembered rows, of draws.
FEW = ["full", "dynts", "h2o", "raas", "snapkv", "gkv", "random", "random_head", "streaming_llm"]


def policies_of(model, names):
    rule = ("policy.budget=96", "policy.keep_ratio=0.7", "policy.local_window=32")
    built = build_policies(compose_config(f"model={model.config.name}", f"grid.policy=[{','.join(names)}]", *rule))
    assert len(built) == len(names)
    return built


@pytest.mark.core
@pytest.mark.parametrize(
    ("name", "settings", "names"),
    [
        pytest.param("toy_qwen", {}, POLICIES, marks=pytest.mark.slow),
        ("toy_llama", {}, FEW),
        pytest.param("toy_llama", {"bits": 8}, FEW, marks=pytest.mark.slow),
        pytest.param("toy_qwen", {"bits": 4, "value_bits": 2}, FEW, marks=pytest.mark.slow),
        pytest.param("toy_qwen", {"bits": 2, "scheme": "plain"}, FEW, marks=pytest.mark.slow),
        pytest.param(
            "toy_qwen", {"bits": 4, "value_bits": 2, "scheme": "kivi", "group": 16}, FEW, marks=pytest.mark.slow
        ),
        pytest.param(
            "toy_llama", {"bits": 4, "value_bits": 2, "scheme": "kvarn", "group": 16}, FEW, marks=pytest.mark.slow
        ),
        pytest.param("toy_qwen", {"scheme": "fp8", "format": "e5m2", "scale": "token"}, FEW, marks=pytest.mark.slow),
        pytest.param("toy_llama", {"scheme": "fp8"}, FEW, marks=pytest.mark.slow),
    ],
    ids=["qwen-16", "llama-16", "llama-8", "qwen-42", "qwen-2", "kivi", "kvarn", "qwen-fp8", "llama-fp8"],
)
@pytest.mark.one_in(4)
@pytest.mark.release_unless(rule=lambda name, settings, names: names == FEW)
def test_chunks_are_bit_for_bit_the_steps(name, settings, names):
    """Policies side by side, in chunks with odd borders, against one token at a time."""
    model, cache = toy_model(name), CacheConfig(**settings, residual=19)
    policies = policies_of(model, names)
    kept, seen = stepped(model, policies, invariant=True, cache=cache)
    found_kept, found = replayed(model, policies, slots=40, invariant=True, cache=cache)
    assert found.keys() == seen.keys()
    assert all(torch.equal(found[name], seen[name]) for name in seen)
    compare_kept(found_kept, kept, at_least=len(names) - 2)


@pytest.mark.slow
@pytest.mark.parametrize("slots", [pytest.param(1, marks=pytest.mark.slow), 40])
def test_chunks_of_torchs_own_products_keep_the_same_rows(slots):
    model = toy_model("toy_qwen")
    policies = policies_of(model, FEW)
    kept, seen = stepped(model, policies, invariant=True, cache=UNPACKED)
    found_kept, found = replayed(model, policies, slots=slots, invariant=False, cache=UNPACKED)
    for name, logits in seen.items():
        torch.testing.assert_close(found[name], logits, rtol=1e-4, atol=1e-4)
    compare_kept(found_kept, kept, at_least=len(FEW) - 2)


def compare_kept(found, kept, *, at_least):
    assert found.keys() == kept.keys()
    for name, evictions in kept.items():
        assert [step for step, _ in found[name]] == [step for step, _ in evictions]
        assert all(torch.equal(one, other) for (_, one), (_, other) in zip(found[name], evictions, strict=True))
    assert len({cell for _, cell in kept}) >= at_least, "nearly all policies evicted"
