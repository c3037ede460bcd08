"""The adapter to kvpress: what it refuses, and where kvpress is installed, what its presses keep."""

import pickle
from importlib.util import find_spec

import pytest
import torch

from kvsweep.compression.policies import kvpress_adapter
from kvsweep.compression.policies.keydiff import KeyDiff
from kvsweep.compression.policies.kvpress_adapter import KVPress
from kvsweep.compression.policies.lagkv import LagKV
from kvsweep.compression.policies.streaming_llm import StreamingLLM
from kvsweep.harness.decode.request import Branch, Request, SamplingConfig
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
        ("SnapKVPress", {}, "SnapKVPress needs the attention module"),
        ("ExpectedAttentionPress", {}, "needs hidden states"),
        ("ObservedAttentionPress", {}, "needs attention weights"),
        ("AdaKVPress", {}, "AdaKVPress is no ScorerPress"),
        ("NoSuchPress", {}, "NoSuchPress is no ScorerPress"),
        ("RandomPress", {}, "draws random numbers that differ from call to call"),
        ("QFilterPress", {}, "cannot score 65 rows from keys and values"),
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
