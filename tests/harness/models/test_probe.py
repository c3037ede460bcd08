"""The check of a loaded model refuses a step that differs from the network's own code, in one sentence."""

from typing import Any

import pytest
import torch

from kvsweep.compression.cache import slot_attention
from kvsweep.harness.models import spec
from kvsweep.harness.models.load import load_model
from kvsweep.harness.models.loaded import FusedStep, LoadedModel
from kvsweep.harness.models.probe import prepare_steps
from kvsweep.kernels import packed
from kvsweep.messages.errors import UserError
from tests.harness.models.test_families import described


def load(family: str, **fields: Any) -> LoadedModel:
    return load_model(described(family, {"initializer_range": 0.5, **fields}))


def doubled_scaling(monkeypatch: pytest.MonkeyPatch):
    of_network = FusedStep.__init__

    def wrong(self, network):
        of_network(self, network)
        self.scaling *= 2

    monkeypatch.setattr(FusedStep, "__init__", wrong)


def failing_step(monkeypatch: pytest.MonkeyPatch):
    def fail(*_: Any):
        raise RuntimeError("sizes do not fit\nand more")

    monkeypatch.setattr(FusedStep, "__call__", fail)


def lost_positions(monkeypatch: pytest.MonkeyPatch):
    """Positions counted from the rows that are left, which is right until the first eviction."""
    step = FusedStep.__call__
    monkeypatch.setattr(
        FusedStep, "__call__", lambda self, tokens, _, cache: step(self, tokens, cache.step_lengths - 1, cache)
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (doubled_scaling, "model type llama has other logits over a slot cache"),
        (lost_positions, "model type llama has other logits over a slot cache"),
        (failing_step, r"model type llama fails over a slot cache \(sizes do not fit\)"),
    ],
)
def test_a_step_that_differs_is_refused(change, message, monkeypatch):
    load("llama")
    change(monkeypatch)
    with pytest.raises(UserError, match=message) as refused:
        load("llama")
    assert "\n" not in str(refused.value)


def test_packed_weights_are_compared_before_the_first_step(monkeypatch):
    """Loading compares steps of unpacked weights, so that a model loads as fast as without packed ones."""
    monkeypatch.setattr(spec, "_PACKED_PARAMETERS", 0)
    monkeypatch.setattr(packed, "packed_product", lambda weight: lambda inputs, bias: inputs @ weight.T * 2)
    model = load("llama")
    with pytest.raises(UserError, match="has other logits"):
        prepare_steps(model, "torch")


@pytest.mark.parametrize(("family", "fields"), [("granite", {"logits_scaling": 8.0}), ("nanochat", {})])
def test_a_head_that_scales_or_caps_is_not_gone_around(family, fields, monkeypatch):
    load(family, **fields)
    monkeypatch.setattr(LoadedModel, "logits", lambda self, hidden, linear: linear(hidden, self.network.lm_head.weight))
    with pytest.raises(UserError, match="has other logits"):
        load(family, **fields)


@pytest.mark.parametrize("name", ["position_bias", "head_mask", "attention_mask"])
def test_arguments_that_slot_attention_does_not_know_are_refused(name):
    rows, layer = torch.zeros(1, 1, 3, 4), torch.nn.Module()
    layer.layer_idx = 0
    given: dict[str, Any] = {"attention_mask": None, name: torch.ones(1)}
    with pytest.raises(ValueError, match=f"does not know {name}"):
        slot_attention(layer, rows, rows, rows, scaling=1.0, **given)
    with pytest.raises(ValueError, match="beyond sliding_window=2"):
        slot_attention(layer, rows, rows, rows, None, scaling=1.0, sliding_window=2)
