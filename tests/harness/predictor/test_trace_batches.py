"""The recipe of DynTS's head against numbers of its authors' own code.

`dynts_head.npz` is data alone. `scripts/study/dynts_head_golden.py` made it, and says from which functions. All numbers
are float32, but for one rounded target.
"""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import kvsweep.harness.predictor.trace_batches as stage
from kvsweep.compression.recorders import ImportancePredictor
from kvsweep.harness.predictor.labels import shard_path, target, with_lead
from kvsweep.harness.predictor.recipe import LABEL_KINDS, read_settings
from kvsweep.harness.predictor.traces import Trace
from kvsweep.messages.errors import UserError

ARRAYS = dict(np.load(Path(__file__).with_name("dynts_head.npz")))
ABOUT = json.loads(str(ARRAYS.pop("about")))
CPU = torch.device("cpu")
SCALES = {"qwen": "power", "llama": "linear"}
of_each_model = pytest.mark.parametrize("model", SCALES)


def golden(name):
    return torch.from_numpy(ARRAYS[name])


def recipe_of(model="qwen"):
    return read_settings([f"model=r1_{model}_{'7b' if model == 'qwen' else '8b'}"]).recipe


def head_of(prefix):
    weights = [golden(f"{prefix}.{layer}") for layer in range(3)]
    head = ImportancePredictor(weights[0].shape[1], [len(weight) for weight in weights[:-1]])
    head.load_state_dict(dict(zip(head.state_dict(), weights, strict=True)))
    return head


def assert_close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@of_each_model
def test_targets(model):
    recipe, trained = recipe_of(model), golden(f"{model}.mask").bool()
    importance, expected = (golden(f"{model}.{name}")[trained] for name in ("importance", "targets"))
    assert_close(target({"answer": importance}, recipe.label, recipe.target), expected)
    rounded = target({"answer": importance.bfloat16()}, recipe.label, recipe.target)
    assert torch.equal(rounded.float(), golden(f"{model}.targets_bfloat16")[trained])


@of_each_model
def test_trained_tokens(model):
    """The prompt ends with the newline behind the opening tag, which is trained too."""
    for ids, mask in zip(golden(f"{model}.ids").tolist(), golden(f"{model}.mask").tolist(), strict=True):
        assert ids[ids.index(ABOUT["open_tag"]) + 1] == ABOUT["newline"]
        start, end = ids.index(ABOUT["open_tag"]) + 2, ids.index(ABOUT["close_tag"])
        trace = Trace(problem_id="p", draw=0, kept=True, token_ids=ids, think_start=start, think_end=end)
        longer = with_lead(trace, recipe_of(model).lead)
        assert [position for position, trained in enumerate(mask) if trained] == [*range(longer.think_start, end)]


@of_each_model
def test_weights_loss_and_clipped_gradient(model, monkeypatch):
    recipe, trained = recipe_of(model), golden(f"{model}.mask").bool()
    goal, weights = (golden(f"{model}.{name}")[trained] for name in ("targets", "weights"))
    assert torch.equal(stage.weights_of(goal, recipe.whole_traces), weights.float())
    assert {1, 5} == set(weights.tolist())
    head, rules = head_of(f"{model}.head"), replace(recipe.whole_traces, ranks=1)
    optimizer, _ = stage.new_optimizer(head, recipe, rules, steps=1)
    losses, norms = recorded(monkeypatch, "weighted_error"), recorded(monkeypatch, "clip_grad_norm_")
    assert stage.fit_batch(head, optimizer, [(golden(f"{model}.hidden")[trained], goal)], rules) == len(goal)
    assert_close(losses[0], golden(f"{model}.loss"))
    assert_close(norms[0], golden(f"{model}.norm"))
    for layer, weight in enumerate(head.parameters()):
        assert_close(weight.grad, golden(f"{model}.clipped.{layer}"))


def test_learning_rate_of_each_step():
    recipe, expected = recipe_of(), golden("rates")
    rules, steps = recipe.whole_traces, 7_100 // recipe.batch * recipe.epochs
    optimizer, schedule = stage.new_optimizer(head_of("qwen.head"), recipe, rules, steps)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    torch.testing.assert_close(torch.tensor(rates, dtype=torch.float64), expected, rtol=1e-5, atol=1e-10)
    assert rates[0] == 0
    assert rates[40] == max(rates) == recipe.lr
    group = optimizer.param_groups[0]
    numbers = [*group["betas"], group["eps"], group["weight_decay"], rules.clip]
    assert golden("optimizer").tolist() == numbers


def test_traces_of_each_micro_batch():
    """1,030 traces make four steps of 256; two epochs."""
    recipe = recipe_of()
    for epoch, steps in enumerate(golden("order")):
        found = stage.batches(1030, recipe.batch, recipe.seed + epoch)
        assert len(found) == len(steps)
        for batch, ranks in zip(found, steps, strict=True):
            dealt = stage.micro_batches(batch, recipe.whole_traces)
            assert torch.equal(dealt, ranks.flatten(0, 1).long())


@of_each_model
def test_first_weights(model):
    recipe = recipe_of(model)
    assert float(golden(f"{model}.default_spread")) == recipe.whole_traces.first_spread
    for spread in (0.02, 0.05):
        torch.manual_seed(0)
        head = stage.new_head(32, recipe.widths, replace(recipe.whole_traces, first_spread=spread))
        assert [list(weight.shape) for weight in head.parameters()] == golden(f"{model}.widths").tolist()
        for weight, expected in zip(head.parameters(), golden(f"{model}.first_weights.{spread}"), strict=True):
            found = torch.stack([weight.mean(), weight.std(), (weight.abs() < spread).float().mean()])
            unit = torch.tensor([spread, spread, 1.0])
            error = 7 / len(weight.flatten()) ** 0.5  # five standard errors of a difference
            torch.testing.assert_close(found / unit, expected / unit, rtol=0, atol=error)


def recorded(monkeypatch, name):
    """The results of a function of the stage, as they come."""
    function, results = getattr(stage, name), []
    monkeypatch.setattr(stage, name, lambda *given: results.append(function(*given)) or results[-1])
    return results


@pytest.fixture
def stored(tmp_path):
    """The recipe of the recorded training, with its traces in two shards."""
    rules = replace(recipe_of().whole_traces, ranks=ABOUT["ranks"], micro_batch=ABOUT["micro_batch"])
    names = {"out": tmp_path, "held_out": None, "widths": [16, 4], "whole_traces": rules}
    recipe = replace(recipe_of(), **names, **{name: ABOUT[name] for name in ("batch", "epochs", "lr")})
    recipe.labels.mkdir()
    lengths = golden("train.lengths").tolist()
    hidden, importance = (golden(f"train.{name}").split(lengths) for name in ("hidden", "importance"))
    manifest = {"hidden_size": 8, "shards": 2}
    for number, part in enumerate((slice(0, 20), slice(20, None))):
        tensors = {kind: torch.cat(importance[part]) for kind in LABEL_KINDS}
        tensors |= {"hidden": torch.cat(hidden[part]), "lengths": torch.tensor(lengths[part])}
        about = {"manifest": manifest, "problems": [str(index) for index in range(len(lengths[part]))]}
        save_file(tensors, shard_path(recipe.labels, number), {"about": json.dumps(about)})
    return recipe, manifest


def test_a_training_of_some_steps(stored, monkeypatch):
    recipe, manifest = stored
    losses, norms = recorded(monkeypatch, "weighted_error"), recorded(monkeypatch, "clip_grad_norm_")
    parts, fit_epoch = stage.trace_fitting(recipe, recipe.whole_traces, manifest, CPU)
    parts["head"].load_state_dict(head_of("train.first").state_dict())
    for epoch in range(recipe.epochs):
        fit_epoch(epoch)
    of_steps = torch.stack(losses).detach().view(len(norms), -1)  # a step's micro-batches side by side
    assert_close(of_steps.mean(dim=1), golden("train.losses"))
    assert_close(torch.stack(norms), golden("train.norms"))
    for layer, weight in enumerate(parts["head"].parameters()):
        assert_close(weight.detach(), golden(f"train.last.{layer}"))


def test_too_few_traces_are_refused(stored):
    recipe, manifest = stored
    with pytest.raises(UserError, match=r"35 traces that are not held out are less than recipe\.batch=64 traces"):
        stage.trace_fitting(replace(recipe, batch=64), recipe.whole_traces, manifest, CPU)


def test_a_step_without_a_finite_gradient_changes_nothing(stored):
    recipe, _ = stored
    head = head_of("train.first")
    optimizer, _ = stage.new_optimizer(head, recipe, recipe.whole_traces, steps=1)
    goals = [(torch.full((3, 8), torch.inf), torch.ones(3))]
    assert stage.fit_batch(head, optimizer, goals, recipe.whole_traces) == 3
    for weight, before in zip(head.parameters(), head_of("train.first").parameters(), strict=True):
        assert torch.equal(weight, before)


def test_a_token_without_a_label_does_not_count():
    rules, goal = recipe_of().whole_traces, torch.tensor([4.5, torch.nan, 1.0])
    loss = stage.weighted_error(torch.tensor([3.5, 9.0, 3.0]), goal, rules)
    assert float(loss) == (5 * 1 + 4) / 2
