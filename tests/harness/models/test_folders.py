"""A folder that is no model, or lacks a part of one, is refused in one sentence that names the part and the way out."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kvsweep.errors import UserError
from kvsweep.harness.models.config import ModelConfig
from kvsweep.harness.models.load import load_model

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"


def pickle(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def adapt(folder: Path) -> None:
    for file in list(folder.iterdir()):
        file.unlink()
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": "a/b"}))
    (folder / "adapter_model.safetensors").write_bytes(b"")


def cached(folder: Path) -> None:
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
        (adapt, "it is a LoRA adapter"),
        (cached, "snapshots/c0ffee"),
    ],
)
def test_what_a_folder_lacks(spoil, sentence, tiny_model_dir, tmp_path):
    folder = shutil.copytree(tiny_model_dir, tmp_path / "mine")
    spoil(folder)
    with pytest.raises(UserError, match=f"model=mine cannot be loaded from {folder}: .*{sentence}"):
        load_model(ModelConfig(name="mine", title="", path=str(folder), threads=1))
