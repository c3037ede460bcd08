"""A policy's own scores: by hand on a tiny model, and those that it sees when the engine asks it."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from kvsweep.compression.recorders import load_predictor
from kvsweep.harness.decode.engine import Engine
from kvsweep.harness.decode.request import Branch, DecodingConfig, Request
from kvsweep.harness.decode.sampling import SamplingConfig
from kvsweep.harness.models.config import ModelConfig
from kvsweep.harness.models.load import load_model
from kvsweep.harness.predictor.traces import Trace
from kvsweep.harness.settings import CONF
from kvsweep.harness.sweep.grid import build_policies
from kvsweep.harness.trace.importance import policy_scores, removal
from kvsweep.harness.trace.inspected import InspectedText, NotInText

START, END = 12, 60
BY_USE = ("raas", "lazyeviction")
LEFT_OUT = ("full", "oracle", *BY_USE)
POLICIES = sorted(path.stem for path in (CONF / "policy").glob("*.yaml") if not path.stem.startswith(LEFT_OUT))


@pytest.fixture(scope="module")
def model(tiny_model_dir):
    return load_model(ModelConfig(name="tiny", title="Tiny", path=str(tiny_model_dir), threads=1))


@pytest.fixture(scope="module")
def text(model):
    ids = torch.randint(6, 90, (END + 9,), generator=torch.Generator().manual_seed(5)).tolist()
    trace = Trace(problem_id="p", draw=0, kept=True, token_ids=ids, think_start=START, think_end=END)
    return InspectedText(model=model, trace=trace)


@pytest.fixture
def policy_of(compose, tiny_predictor_dir, tiny_statistics):
    def make(name, budget=64, **settings):
        own = [f"policy.{key}={value}" for key, value in settings.items()]
        size = [f"policy.budget={budget}", "policy.local_window=32", "policy.keep_ratio=0.4"]
        made_for_it = [f"model.predictor={tiny_predictor_dir}", f"model.statistics={tiny_statistics}"]
        (policy,) = build_policies(compose(f"policy={name}", *made_for_it, *size, *own))
        return policy

    return make


@pytest.fixture(scope="module")
def reference(tiny_model_dir, text):
    """Keys [layers, kv_heads, END, head_dim], attention [layers, q_heads, END, END], last hidden states, in float64."""
    eager = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float64, attn_implementation="eager")
    ids = torch.tensor([text.trace.token_ids[:END]])
    with torch.inference_mode():
        output = eager(ids, output_attentions=True, output_hidden_states=True, use_cache=True)
    keys = torch.stack([layer.keys[0] for layer in output.past_key_values.layers])
    return keys, torch.stack([a[0] for a in output.attentions]), output.hidden_states[-1][0]


def test_the_windows_scores_are_the_positions(text, policy_of):
    (scores,) = policy_scores(text, [policy_of("window")])
    np.testing.assert_array_equal(scores, np.arange(START, END))


def test_pinned_sinks_count_as_the_highest(text, policy_of):
    (scores,) = policy_scores(text, [policy_of("streaming_llm", budget=128, sinks=START + 3)])
    np.testing.assert_array_equal(scores, [END - 1] * 3 + list(range(START + 3, END)))


def test_key_norms_by_hand(text, policy_of, reference):
    keys, _, _ = reference
    (scores,) = policy_scores(text, [policy_of("knorm")])
    np.testing.assert_allclose(scores, -keys.norm(dim=-1).mean(dim=(0, 1))[START:], rtol=1e-3)
    assert scores.std() > 0.01


def test_accumulated_attention_by_hand(text, policy_of, reference):
    _, attention, _ = reference
    summed = attention.sum(dim=2)  # over queries
    # Two query heads a key head: their sum, then the mean over layers and key heads.
    expected = summed.unflatten(1, (2, 2)).sum(dim=2).mean(dim=(0, 1))[START:]
    original, newest = policy_scores(text, [policy_of("h2o"), policy_of("h2o_dynts_code")])
    np.testing.assert_allclose(original, expected, rtol=1e-4)
    np.testing.assert_allclose(newest, attention[:, :, -1].mean(dim=(0, 1))[START:], rtol=1e-4)


def test_the_last_querys_attention_by_hand(text, policy_of, reference):
    _, attention, _ = reference
    (scores,) = policy_scores(text, [policy_of("tova")])
    np.testing.assert_allclose(scores, attention[:, :, -1].mean(dim=(0, 1))[START:], rtol=1e-4)
    (observed,) = policy_scores(text, [policy_of("snapkv", observation_window=1, pooling=1)])
    np.testing.assert_allclose(observed[:-1], scores[:-1], rtol=1e-4)
    assert np.isnan(observed[-1])  # always kept, never scored


def test_the_heads_predictions_by_hand(text, policy_of, reference, tiny_predictor_dir):
    *_, hidden = reference
    expected = load_predictor(tiny_predictor_dir)(hidden[START:].float()).detach()
    dynts, bottom = policy_scores(text, [policy_of("dynts"), policy_of("bottom")])
    np.testing.assert_allclose(dynts, expected, rtol=1e-4)
    np.testing.assert_allclose(bottom, -expected, rtol=1e-4)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.slow_unless(rule=lambda name: POLICIES.index(name) % 6 == 0)
@pytest.mark.one_in(3)
def test_scores_are_what_the_policy_gives_in_the_engine(name, model, policy_of, monkeypatch):
    # These name the embedded models' heads, which are of another width.
    settings = {"predictor": policy_of("dynts").predictor} if name.startswith("dynts_") else {}
    if name in ("vase", "caote"):
        settings["observation_window"] = 32  # of the 45 rows that stay
    policy, seen = policy_of(name, **settings), []
    given = type(policy).scores

    def scores(self, view):
        seen.append(given(self, view).clone())
        return seen[-1]

    monkeypatch.setattr(type(policy), "scores", scores)
    request = Request(
        problem_id="p", draw=0, prompt_ids=tuple(range(6, 18)), branches=(Branch(cell_id="", policy=policy),)
    )
    decoding = DecodingConfig(name="", max_new_tokens=70, sampling=SamplingConfig(temperature=1.0))
    engine = Engine.sized_for([request], model, decoding=decoding, seed=0, slots=1)
    ((_, completion),) = engine.generate([request])
    first = completion.evictions[0]
    text = [*request.prompt_ids, *completion.token_ids][: first.length_before]
    trace = Trace(problem_id="p", draw=0, kept=True, token_ids=text, think_start=12, think_end=len(text))
    engines = seen[0]
    seen.clear()
    policy_scores(InspectedText(model=model, trace=trace), [policy])
    torch.testing.assert_close(seen[0], engines, rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("name", BY_USE)
def test_a_text_does_not_tell_when_its_rows_were_used(name, text, policy_of):
    with pytest.raises(NotInText, match=f"{name} scores by when each row was used"):
        policy_scores(text, [policy_of(name)])


def test_a_text_shorter_than_the_observation_window(model, policy_of):
    trace = Trace(problem_id="p", draw=0, kept=True, token_ids=list(range(6, 30)), think_start=4, think_end=20)
    with pytest.raises(NotInText, match="scores from the newest 32"):
        policy_scores(InspectedText(model=model, trace=trace), [policy_of("snapkv")])


STEPS = [range(12, 20), range(20, 37), range(37, 38), range(40, 60)]
FIRST = 61


@pytest.fixture
def ids():
    return torch.randint(6, 90, (83,), generator=torch.Generator().manual_seed(5)).tolist()


@torch.inference_mode()
def brute_force(eager, ids, step):
    """Every query from FIRST on sees nothing of the step; positions are the text's."""
    seen = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
    seen[FIRST:, step.start : step.stop] = False
    mask = torch.zeros(1, 1, len(ids), len(ids), dtype=torch.float64).masked_fill(~seen, torch.finfo(torch.float64).min)
    logits = eager(torch.tensor([ids]), attention_mask=mask).logits[0, FIRST:-1].log_softmax(dim=-1)
    return logits.gather(1, torch.tensor(ids[FIRST + 1 :])[:, None])[:, 0]


@pytest.mark.parametrize("slots", [1, 2, 32])
def test_removal_equals_a_rerun_without_the_step(toy_and_eager, ids, slots):
    model, eager = toy_and_eager
    found = removal(model, ids, FIRST, STEPS, slots=slots)
    whole = brute_force(eager, ids, range(0))
    expected = torch.stack([whole - brute_force(eager, ids, step) for step in STEPS], dim=1)
    assert found.shape == (len(ids) - FIRST - 1, len(STEPS))
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-4)
