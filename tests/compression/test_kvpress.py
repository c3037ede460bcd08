"""The adapter to kvpress: what it refuses, and where kvpress is installed, what its presses keep."""

import pickle
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from kvsweep.compression.cache import SlotCache
from kvsweep.compression.policies import kvpress_adapter
from kvsweep.compression.policies.keys import KeyDiff
from kvsweep.compression.policies.kvpress_adapter import KVPress
from kvsweep.compression.policies.lagkv import LagKV
from kvsweep.compression.policies.window import StreamingLLM
from kvsweep.compression.signals import AttentionMass
from kvsweep.harness.decode.prefill import Prefiller
from kvsweep.harness.decode.request import Branch, Request, SamplingConfig
from kvsweep.harness.decode.view import view_slot
from kvsweep.harness.models.config import ModelConfig
from kvsweep.harness.models.load import load_model
from kvsweep.harness.toy.paths import WEIGHTS
from kvsweep.harness.toy.tasks import problems
from tests.compression.test_policies import make_view
from tests.harness.decode.fakes import run

RULE = {"keep_ratio": 0.3, "local_window": 20, "budget": 64}
installed = pytest.mark.skipif(find_spec("kvpress") is None, reason="kvpress is not installed")


def adapted(press, **arguments):
    return KVPress(name="kvpress", press=press, press_args=arguments, **RULE)


def test_without_kvpress_one_sentence_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(kvpress_adapter, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"KeyDiffPress needs the package kvpress.*pip install --no-deps kvpress"):
        adapted("KeyDiffPress")


@installed
@pytest.mark.parametrize(
    ("press", "arguments", "said"),
    [
        ("SnapKVPress", {"window_size": 8}, "policy.statistics is not set .* `kvsweep-predictor statistics`"),
        ("ExpectedAttentionPress", {}, "policy.statistics is not set .* `kvsweep-predictor statistics`"),
        ("KVzapPress", {}, "cannot score 65 rows from what is recorded here"),
        ("LeverageScorePress", {}, "LeverageScorePress needs"),
        ("AdaKVPress", {}, "AdaKVPress is no ScorerPress"),
        ("NoSuchPress", {}, "NoSuchPress is no ScorerPress"),
        ("RandomPress", {}, "draws random numbers that differ from call to call"),
        ("QFilterPress", {}, "cannot score 65 rows from what is recorded here"),
        ("LagKVPress", {"lag": 3}, "do not fit LagKVPress .*unexpected keyword argument"),
        ("KnormPress", {"compression_ratio": 0.5}, "press_args.compression_ratio contradicts"),
    ],
)
def test_a_press_that_needs_more_is_refused(press, arguments, said):
    with pytest.raises(ValueError, match=said):
        adapted(press, **arguments)


@installed
def test_presses_keep_what_the_policies_of_the_same_rules_keep():
    pairs = [
        (adapted("KeyDiffPress"), KeyDiff(name="keydiff", **RULE)),
        (adapted("LagKVPress", n_sink=3, lag_size=11), LagKV(name="lagkv", sinks=3, lag=11, **RULE)),
        (adapted("StreamingLLMPress", n_sink=3), StreamingLLM(name="streaming_llm", sinks=3, **RULE)),
    ]
    for seed, (press, policy) in enumerate(pairs * 4):
        view = make_view(65, 6, seed=seed, per_head=True, group=4, holes=policy.name != "streaming_llm")
        kept = press.select(view).keep
        if policy.name == "streaming_llm":
            shared = make_view(65, 6, seed=seed, holes=False)
            assert torch.equal(kept, policy.select(shared).keep.expand_as(kept))
        else:
            torch.testing.assert_close(press.scores(view), policy.scores(view), rtol=1e-6, atol=1e-6)
            assert torch.equal(kept, policy.select(view).keep)


@installed
def test_keydiff_through_the_adapter_writes_the_same_texts():
    """In either order of loading the model and importing kvpress, and after a way through another process."""
    model = load_model(ModelConfig(name="toy_qwen", title="Toy", path=str(WEIGHTS / "toy_qwen"), threads=1))
    press = pickle.loads(pickle.dumps(adapted("KeyDiffPress")))
    branches = (Branch(cell_id="press", policy=press), Branch(cell_id="ours", policy=KeyDiff(name="keydiff", **RULE)))
    requests = [
        Request(problem_id=p.id, draw=0, prompt_ids=model.prompt_ids(p.question), branches=branches)
        for p in problems("chain")[:4]
    ]
    completions, _ = run(model, requests, sampling=SamplingConfig(temperature=0.6), max_new_tokens=200, slots=4)
    for request in requests:
        one, other = (completions[cell, request.problem_id, 0] for cell in ("press", "ours"))
        assert one == other
        assert one.evictions


def kept_by_kvpress(press, ids):
    """The rows that kvpress itself leaves of a prefill, [layers, kv_heads, kept], found by their keys."""
    from transformers import AutoModelForCausalLM, DynamicCache

    network = AutoModelForCausalLM.from_pretrained(
        WEIGHTS / "toy_qwen", attn_implementation="eager", dtype=torch.float32
    )
    whole, pruned = DynamicCache(), DynamicCache()
    network(ids, past_key_values=whole)
    with press(network):
        network(ids, past_key_values=pruned, cache_position=torch.arange(ids.shape[1]))
    same = [
        (few.keys[0, :, :, None] == all_.keys[0, :, None]).all(-1)
        for few, all_ in zip(pruned.layers, whole.layers, strict=True)
    ]
    return torch.stack([one.float().argmax(-1).sort().values for one in same])


@installed
@pytest.mark.parametrize(
    ("press", "arguments"),
    [
        ("ObservedAttentionPress", {}),
        ("ExpectedAttentionPress", {"n_future_positions": 64}),
        ("ExpectedAttentionPress", {"use_covariance": False, "n_sink": 2, "epsilon": 0.01}),
        ("SnapKVPress", {"window_size": 16}),
        ("TOVAPress", {}),
        ("KeyDiffPress", {}),
    ],
)
@torch.no_grad()
def test_of_a_prefill_a_press_keeps_what_kvpress_itself_keeps(press, arguments):
    import kvpress

    model = load_model(ModelConfig(name="toy_qwen", title="Toy", path=str(WEIGHTS / "toy_qwen"), threads=1))
    text = [token for problem in problems("chain")[:6] for token in model.prompt_ids(problem.question)][:300]
    assert len(text) == 300
    policy = KVPress(
        name="kvpress",
        press=press,
        press_args=arguments,
        keep_ratio=0.4,
        local_window=1,
        budget=299,
        queries=300,
        statistics=str(WEIGHTS / "statistics" / "toy_qwen.safetensors"),
    )
    prefiller = Prefiller(model, keep_queries=True)
    prefiller.advance([tuple(text)])
    cache = SlotCache(model.shape, slots=1, capacity=300, device=model.device, signals=policy.signals, per_head=True)
    slot, ids = cache.admit(prefiller.done[tuple(text)]), torch.tensor([*text, 0])
    named = {"problem_id": "p", "draw": 0, "question_length": 300, "answer_start": None, "stream": 0}
    view = view_slot(model, cache, slot, policy, text_ids=ids, **named)
    ours = policy.select(view).keep
    theirs = getattr(kvpress, press)(compression_ratio=1 - (ours.shape[-1] + 0.5) / 300, **arguments)
    assert torch.equal(ours, kept_by_kvpress(theirs, ids[None, :300]))


@installed
def test_evicted_rows_do_not_change_what_the_others_received():
    """A press that averages over the queries behind a row is told of the queries behind evicted rows too."""
    policy = adapted("ObservedAttentionPress")
    view = make_view(65, 6, seed=1, per_head=True, group=4)
    view = replace(view, positions=(torch.arange(65) * 3 + 5).expand(view.positions.shape))
    mass, queries = view.signals[AttentionMass()].double(), 64 * 3 + 6 - (torch.arange(65) * 3 + 5)
    torch.testing.assert_close(policy.scores(view).double(), mass / queries, rtol=1e-5, atol=1e-7)
