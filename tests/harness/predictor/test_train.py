"""The report of eval on heads whose quality is known."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

import kvsweep.harness.predictor.train as stage
from kvsweep.harness.predictor.labels import open_shard, shard_path
from kvsweep.harness.predictor.recipe import LABEL_KINDS, read_manifest, read_settings
from kvsweep.messages.errors import UserError

LENGTHS = (50, 83)


@pytest.fixture
def settings(tmp_path):
    return read_settings([f"recipe.out={tmp_path}"])


@pytest.fixture
def recipe(settings):
    """A cache of two held-out traces and one that is not; the first hidden number of each token is its label."""
    recipe = settings.recipe
    lengths = [*LENGTHS, 40]
    hidden = torch.rand(sum(lengths), 3, generator=torch.Generator().manual_seed(0))
    for part in hidden.split(lengths):
        part[:, 0] -= part[:, 0].min()
        part[:, 0] /= part[:, 0].max()
    tensors = {kind: hidden[:, 0].clone() for kind in LABEL_KINDS}
    tensors |= {"hidden": hidden, "lengths": torch.tensor(lengths)}
    path = shard_path(recipe.labels, 0)
    path.parent.mkdir()
    manifest = {"model": settings.model.identity(), "data": "d", "shards": 1}
    problems = ["18", "18", "1"]  # the hash holds out one in ten, and 18 is one
    save_file(tensors, path, {"about": json.dumps({"manifest": manifest, "problems": problems})})
    recipe.manifest.write_text(json.dumps(manifest))
    card = {"kind": "predictor", "hidden_size": 3, "data": "d", "held_out": recipe.held_out}
    recipe.head.mkdir()
    (recipe.head / "predictor.json").write_text(json.dumps(card))
    return recipe


def read(recipe):
    return json.loads(recipe.manifest.read_text())


def evaluate(monkeypatch, settings, head):
    monkeypatch.setattr(stage, "load_predictor", lambda directory: head)
    result = stage.evaluate(settings)
    assert result == json.loads((settings.recipe.head / "eval.json").read_text())
    return result


def test_a_perfect_head(monkeypatch, settings, recipe):
    result = evaluate(monkeypatch, settings, lambda hidden: hidden[:, 0])
    assert result["held_out_traces"] == len(LENGTHS)
    assert set(result["true_top_20_percent_found_in_predicted_top"].values()) == {1.0}
    assert result["rank_correlation"] == 1
    for true, predicted in result["calibration_by_tenth_of_thinking_true_predicted"]:
        assert true == pytest.approx(predicted)


def test_a_head_that_is_right_about_nothing(monkeypatch, settings, recipe):
    result = evaluate(monkeypatch, settings, lambda hidden: 1 - hidden[:, 0])
    found = result["true_top_20_percent_found_in_predicted_top"]
    assert found["20%"] == found["70%"] == 0
    assert found["90%"] == pytest.approx(0.5, abs=0.05)
    assert result["rank_correlation"] == -1


def test_calibration_shows_a_drift_along_the_thinking(monkeypatch, settings, recipe):
    def drifts(hidden):
        return hidden[:, 0] + torch.linspace(-0.5, 0.5, len(hidden))

    pairs = evaluate(monkeypatch, settings, drifts)["calibration_by_tenth_of_thinking_true_predicted"]
    gaps = [predicted - true for true, predicted in pairs]
    assert gaps == pytest.approx([-0.45 + 0.1 * tenth for tenth in range(10)], abs=0.02)


def test_the_split_is_made_where_labels_are_read(recipe):
    manifest = read(recipe)
    assert [trace.held_out for trace in open_shard(recipe, manifest, 0)] == [True, True, False]
    assert [trace.held_out for trace in open_shard(replace(recipe, held_out=9), manifest, 0)] == [False] * 3


def test_a_head_that_was_fitted_to_what_is_held_out_now_is_refused(monkeypatch, settings, recipe):
    monkeypatch.setattr(stage, "load_predictor", lambda directory: None)
    with pytest.raises(UserError, match=r"or with recipe.held_out=10: run kvsweep predictor train again"):
        stage.evaluate(replace(settings, recipe=replace(recipe, held_out=2)))


def test_labels_of_other_traces_are_refused(recipe):
    with pytest.raises(UserError, match=r"shard-00000.safetensors is no shard of labels of these traces: run"):
        open_shard(recipe, read(recipe) | {"data": "e"}, 0)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"shards": 1}'])
def test_a_broken_manifest_is_one_sentence(text, settings, recipe):
    recipe.manifest.write_text(text)
    with pytest.raises(UserError, match=r"cache.json is broken: delete .*/cache or set recipe.out="):
        read_manifest(settings, recipe.manifest, "labels")


def test_eval_before_train_is_refused(settings, recipe):
    (recipe.head / "predictor.json").unlink()
    with pytest.raises(UserError, match="holds no predictor"):
        stage.evaluate(settings)
