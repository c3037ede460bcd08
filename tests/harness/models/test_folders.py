"""A folder that is no model, or lacks a part of one, is refused in one sentence that names the part and the way out."""

import json
import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kvsweep.harness.models.config import ModelConfig
from kvsweep.harness.models.load import load_model
from kvsweep.messages.errors import UserError

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"


def pickle(folder: Path):
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def adapt(folder: Path):
    for file in list(folder.iterdir()):
        file.unlink()
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": "a/b"}))
    (folder / "adapter_model.safetensors").write_bytes(b"")


def cached(folder: Path):
    files = list(folder.iterdir())
    (folder / "refs").mkdir()
    (folder / "snapshots" / "c0ffee").mkdir(parents=True)
    for file in files:
        file.rename(folder / "snapshots" / "c0ffee" / file.name)


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (
            lambda folder: (folder / "model.safetensors").write_text(POINTER),
            "its model.safetensors is a Git LFS",
        ),
        (lambda folder: (folder / "config.json").write_text(POINTER), "its config.json is a Git LFS"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "it has no tokenizer.json"),
        (pickle, "model.safetensors_only=false"),
        (lambda folder: (folder / "model.safetensors").unlink(), "name a folder with config.json and safetensors"),
        (lambda folder: (folder / "model.safetensors").write_text("{"), "correct its files"),
        (adapt, "it is a LoRA adapter"),
        (cached, "snapshots/c0ffee"),
    ],
)
def test_what_a_folder_lacks(spoil, sentence, tiny_model_dir, tmp_path):
    folder = shutil.copytree(tiny_model_dir, tmp_path / "mine")
    spoil(folder)
    with pytest.raises(UserError, match=f"model=mine cannot be loaded from {folder}: .*{sentence}"):
        load_model(ModelConfig(name="mine", title="", path=str(folder), threads=1))


@pytest.mark.parametrize("text", ['{"eos_token_id": [2, 5],}', "", "\ufeff{}"])
def test_a_file_that_is_no_json(text, tiny_model_dir, tmp_path):
    folder = shutil.copytree(tiny_model_dir, tmp_path / "mine")
    (folder / "generation_config.json").write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match="is no JSON"):
        load_model(ModelConfig(name="mine", title="", path=str(folder), threads=1))


@pytest.mark.parametrize(("theta", "loads"), [({}, False), ({"rope_theta": 1e6}, True)])
def test_rotary_settings_that_transformers_drops(theta, loads, tiny_model_dir, tmp_path):
    """A model card says to add rope_scaling, and transformers then drops the rope_theta that it has saved itself."""
    folder = shutil.copytree(tiny_model_dir, tmp_path / "mine")
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 1e6
    config["rope_scaling"] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256, **theta}
    (folder / "config.json").write_text(json.dumps(config))
    with nullcontext() if loads else pytest.raises(UserError, match="say rope_theta=1000000"):
        load_model(ModelConfig(name="mine", title="", path=str(folder), threads=1))
