"""Attribution by removal against a model that reads the text with the step masked."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvsweep.harness.inspect.attribution import cost, grad_x_input, removal
from kvsweep.harness.models.config import ModelConfig
from kvsweep.harness.models.load import load_model
from kvsweep.harness.toy.paths import WEIGHTS

STEPS = [range(12, 20), range(20, 37), range(37, 38), range(40, 60)]
START = 61


@pytest.fixture(scope="module", params=["toy_qwen", "toy_llama"])
def models(request):
    path = str(WEIGHTS / request.param)
    eager = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="eager").eval()
    return load_model(ModelConfig(name=request.param, title="", path=path, threads=1)), eager


@pytest.fixture
def ids():
    return torch.randint(6, 90, (83,), generator=torch.Generator().manual_seed(5)).tolist()


@torch.inference_mode()
def brute_force(eager, ids, step):
    """Every query from START on sees nothing of the step; positions are the text's."""
    seen = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
    seen[START:, step.start : step.stop] = False
    mask = torch.zeros(1, 1, len(ids), len(ids), dtype=torch.float64).masked_fill(~seen, torch.finfo(torch.float64).min)
    logits = eager(torch.tensor([ids]), attention_mask=mask).logits[0, START:-1].log_softmax(dim=-1)
    return logits.gather(1, torch.tensor(ids[START + 1 :])[:, None])[:, 0]


@pytest.mark.parametrize("slots", [1, 2, 32])
def test_removal_equals_a_rerun_without_the_step(models, ids, slots):
    model, eager = models
    found = removal(model, ids, START, STEPS, slots=slots)
    whole = brute_force(eager, ids, range(0))
    expected = torch.stack([whole - brute_force(eager, ids, step) for step in STEPS], dim=1)
    assert found.shape == (len(ids) - START - 1, len(STEPS))
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-4)


def test_grad_x_input_is_the_slope_of_a_step_made_weaker(models, ids):
    model, eager = models
    found = grad_x_input(model, ids, START, STEPS)
    embedded = eager.get_input_embeddings()(torch.tensor([ids])).detach()

    def score(step, factor):
        changed = embedded.clone()
        changed[:, step.start : step.stop] *= factor
        logits = eager(inputs_embeds=changed).logits[0, START:-1].log_softmax(dim=-1)
        return logits.gather(1, torch.tensor(ids[START + 1 :])[:, None])[:, 0]

    with torch.inference_mode():
        slopes = [(score(step, 1 + 1e-3) - score(step, 1 - 1e-3)) / 2e-3 for step in STEPS]
    torch.testing.assert_close(found.double(), torch.stack(slopes, dim=1), rtol=0.02, atol=0.01)


def test_both_methods_take_turns_on_one_model(models, ids):
    model, _ = models
    first = grad_x_input(model, ids, START, STEPS)
    removal(model, ids, START, STEPS)  # decodes, in inference mode
    torch.testing.assert_close(grad_x_input(model, ids, START, STEPS), first)


def test_the_cost_is_said_beforehand(models):
    assert "a prefill of 61 tokens, then 2 x 22 decode steps over 3 slots (4 steps" in cost(models[0], 83, START, 4, 3)
