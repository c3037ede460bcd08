"""The report of eval on heads whose quality is known."""

import json

import pytest
import torch
from safetensors.torch import save_file

import kvsweep.harness.predictor.train as stage
from kvsweep.errors import UserError
from kvsweep.harness.predictor.labels import shard_path
from kvsweep.harness.predictor.recipe import LABEL_KINDS, read_manifest, read_settings

LENGTHS = (50, 83)


@pytest.fixture
def recipe(tmp_path):
    """A cache of two held-out traces and one that is not; the first hidden number of each token is its label."""
    recipe = read_settings([f"recipe.out={tmp_path}"]).recipe
    lengths = [*LENGTHS, 40]
    hidden = torch.rand(sum(lengths), 3, generator=torch.Generator().manual_seed(0))
    for part in hidden.split(lengths):
        part[:, 0] -= part[:, 0].min()
        part[:, 0] /= part[:, 0].max()
    tensors = {kind: hidden[:, 0].clone() for kind in LABEL_KINDS}
    tensors |= {"hidden": hidden, "lengths": torch.tensor(lengths), "held_out": torch.tensor([True, True, False])}
    path = shard_path(recipe.labels, 0)
    path.parent.mkdir()
    save_file(tensors, path)
    recipe.manifest.write_text(json.dumps({"shards": 1}))
    recipe.head.mkdir()
    return recipe


def evaluate(monkeypatch, recipe, head):
    monkeypatch.setattr(stage, "load_predictor", lambda directory: head)
    result = stage.evaluate(recipe, read_manifest(recipe))
    assert result == json.loads((recipe.head / "eval.json").read_text())
    return result


def test_a_perfect_head(monkeypatch, recipe):
    result = evaluate(monkeypatch, recipe, lambda hidden: hidden[:, 0])
    assert result["held_out_traces"] == len(LENGTHS)
    assert set(result["true_top_20_percent_found_in_predicted_top"].values()) == {1.0}
    assert result["rank_correlation"] == 1
    for true, predicted in result["calibration_by_tenth_of_thinking_true_predicted"]:
        assert true == pytest.approx(predicted)


def test_a_head_that_is_right_about_nothing(monkeypatch, recipe):
    result = evaluate(monkeypatch, recipe, lambda hidden: 1 - hidden[:, 0])
    found = result["true_top_20_percent_found_in_predicted_top"]
    assert found["20%"] == found["70%"] == 0
    assert found["90%"] == pytest.approx(0.5, abs=0.05)
    assert result["rank_correlation"] == -1


def test_calibration_shows_a_drift_along_the_thinking(monkeypatch, recipe):
    def drifts(hidden):
        return hidden[:, 0] + torch.linspace(-0.5, 0.5, len(hidden))

    pairs = evaluate(monkeypatch, recipe, drifts)["calibration_by_tenth_of_thinking_true_predicted"]
    gaps = [predicted - true for true, predicted in pairs]
    assert gaps == pytest.approx([-0.45 + 0.1 * tenth for tenth in range(10)], abs=0.02)


def test_eval_before_train_is_refused(recipe):
    with pytest.raises(UserError, match="run kvsweep predictor train first"):
        stage.evaluate(recipe, read_manifest(recipe))
