"""Predictors, statistics and labels that do not fit their kind are refused before any model is loaded."""

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvsweep.compression import artifacts
from kvsweep.compression.policies.oracle import save_labels
from kvsweep.compression.recorders import ImportancePredictor, save_predictor
from kvsweep.messages.errors import UserError

Tensors = dict[str, torch.Tensor]


@pytest.fixture
def places(tmp_path, tiny_statistics) -> dict[str, Path]:
    """A good artifact of each kind."""
    save_predictor(ImportancePredictor(32, (16, 8)), tmp_path / "head", {})
    artifacts.save("statistics", tmp_path / "s.safetensors", load_file(tiny_statistics), {"hidden_size": 32})
    labels = {"p/0": (torch.arange(5), torch.tensor([0.0, 1.0, float("nan"), 0.5, 0.2]))}
    save_labels(str(tmp_path / "l.safetensors"), labels, {"hidden_size": 32})
    return {
        "predictor": tmp_path / "head",
        "statistics": tmp_path / "s.safetensors",
        "labels": tmp_path / "l.safetensors",
    }


def use(kind: str, place: Path):
    """What happens to an artifact before the model is loaded."""
    artifacts.check(kind, str(place), "make")
    artifacts.load(place)


def first(tensors: Tensors) -> str:
    return min(tensors)


def with_number(value: float) -> Callable[[Tensors], object]:
    return lambda tensors: next(t for t in tensors.values() if t.is_floating_point()).view(-1)[:1].fill_(value)


TENSORS: dict[str, Callable[[Tensors], object]] = {
    "not a number": with_number(float("nan")),
    "infinite": with_number(float("inf")),
    "minus infinite": with_number(float("-inf")),
    "another shape": lambda tensors: tensors.update({first(tensors): torch.stack([tensors[first(tensors)]] * 2)}),
    "missing": lambda tensors: tensors.pop(first(tensors)),
    "one more": lambda tensors: tensors.update(more=torch.zeros(3)),
    "renamed": lambda tensors: tensors.update({"x" + first(tensors): tensors.pop(first(tensors))}),
    "whole numbers": lambda tensors: tensors.update({n: t.to(torch.int32) for n, t in tensors.items()}),
    "no tensor": lambda tensors: tensors.clear(),
}
FILES: dict[str, Callable[[Path], object]] = {
    "garbage": lambda path: path.write_bytes(os.urandom(4096)),
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "pickle": lambda path: path.write_bytes(pickle.dumps({"layers.0.weight": [1.0]})),
    "header bomb": lambda path: path.write_bytes((1 << 60).to_bytes(8, "little") + b"{}"),
    "pipe": lambda path: (path.unlink(), os.mkfifo(path)),
}
CARDS: dict[str, Callable[[dict[str, Any]], object]] = {
    "another kind": lambda card: card.update(kind="x"),
    "no size": lambda card: card.pop("hidden_size"),
    "a number as weights": lambda card: card.update(model_weights=5),
    "nested": lambda card: card.update(hidden_size=[[]]),
}


@pytest.mark.parametrize("kind", ["predictor", "statistics", "labels"])
class TestEveryKind:
    def test_a_good_one_is_taken(self, kind, places):
        use(kind, places[kind])

    @pytest.mark.parametrize("change", TENSORS.values(), ids=TENSORS)
    def test_tensors(self, kind, places, change):
        path = artifacts.file_of(places[kind])
        tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
        change(tensors)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
        if kind == "labels" and (not tensors or change is TENSORS["not a number"]):
            return use(kind, places[kind])  # no text has labels, or a token has none
        with pytest.raises(UserError, match="make it again"):
            use(kind, places[kind])

    @pytest.mark.parametrize("change", FILES.values(), ids=FILES)
    def test_files(self, kind, places, change):
        change(artifacts.file_of(places[kind]))
        with pytest.raises(UserError, match="make it"):
            use(kind, places[kind])

    @pytest.mark.parametrize("change", CARDS.values(), ids=CARDS)
    def test_cards(self, kind, places, change):
        path = artifacts.file_of(places[kind]).with_suffix(".json")
        card = json.loads(path.read_text())
        change(card)
        path.write_text(json.dumps(card))
        if change is CARDS["nested"] and kind != "predictor":
            return  # the check against the model reads it
        with pytest.raises(UserError, match="make it again"):
            use(kind, places[kind])


@pytest.mark.parametrize("widths", [[16], [16, 8, 4], "16", [1.5, 8], None])
def test_widths_that_are_not_those_of_the_file(places, widths):
    path = places["predictor"] / "predictor.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "widths": widths}))
    with pytest.raises(UserError, match="does not fit its card"):
        use("predictor", places["predictor"])


def test_a_sweep_with_a_head_of_nan_stops_before_the_model(kvsweep, tiny, tiny_policy, places, tmp_path, no_model):
    path = artifacts.file_of(places["predictor"])
    save_file({name: torch.full_like(tensor, float("nan")) for name, tensor in load_file(path).items()}, path)
    own = ["policy=dynts", "benchmark=toy_add", f"policy.predictor={places['predictor']}", f"results_dir={tmp_path}"]
    ended = kvsweep(*tiny, *tiny_policy, *own)
    assert ended.code == 2
    assert "that are none of its kind" in ended.err
    assert ended.err.strip().count("\n") <= 3
