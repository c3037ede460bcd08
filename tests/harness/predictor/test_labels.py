"""Labels against those of whole attention matrices in float64, on both architectures."""

import pytest
import torch

from kvsweep.harness.predictor.labels import label_trace, standardise, target
from kvsweep.harness.predictor.recipe import LABEL_KINDS, read_settings
from kvsweep.harness.predictor.traces import Trace


@pytest.mark.parametrize(("length", "start", "end"), [(11, 3, 8), (77, 20, 61), (301, 40, 250)])
@pytest.mark.parametrize("min_distance", [1, 32])
@torch.inference_mode()
def test_labels_equal_those_of_eager_attention_in_float64(toy_and_eager, length, start, end, min_distance):
    model, eager = toy_and_eager
    ids = torch.randint(6, 90, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    trace = Trace(problem_id="p", draw=0, kept=True, token_ids=ids, think_start=start, think_end=end)
    output = eager.model(torch.tensor([ids]), output_attentions=True)
    attention = torch.cat(output.attentions).double()  # [layers, q_heads, length, length]
    hidden, labels = label_trace(model, trace, min_distance, LABEL_KINDS)
    torch.testing.assert_close(hidden.double(), output.last_hidden_state[0, start:end].double(), rtol=1e-3, atol=1e-3)
    assert set(labels) == set(LABEL_KINDS)
    for token in range(start, end):
        far = attention[:, :, token + min_distance :, token]
        expected = {"answer": attention[:, :, end + 1 :, token].mean()}
        if far.shape[-1]:
            expected |= {"far_max": far.amax(), "later": far.mean()}
        for kind in LABEL_KINDS:
            found = float(labels[kind][token - start])
            assert found == pytest.approx(float(expected[kind]), abs=1e-5) if kind in expected else found != found


def test_a_sum_of_labels_weighs_its_kinds_alike():
    labels = {"answer": torch.tensor([0.0, 1.0, 2.0]), "far_max": torch.tensor([0.2, 0.1, torch.nan]), "later": None}
    recipe = read_settings(["model=toy_llama", "recipe.label=[answer,far_max]"]).recipe
    both = target(labels, recipe.label, recipe.target)
    assert torch.equal(target(labels, ["answer"]), torch.tensor([0.0, 0.5, 1.0]))
    assert both[:2].tolist() == pytest.approx([1.0, 0.0])
    assert both[2].isnan()
    assert torch.equal(standardise(torch.ones(3)), torch.zeros(3))
