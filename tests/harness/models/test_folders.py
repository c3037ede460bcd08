"""A folder that is no model, or lacks a part of one, is refused in one sentence that names the part and the way out."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file

from kvsweep.errors import UserError
from kvsweep.harness.models import hub
from kvsweep.harness.models.config import ModelConfig
from kvsweep.harness.models.hub import commit_of
from kvsweep.harness.models.load import load_model

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"


def config(folder: Path) -> ModelConfig:
    return ModelConfig(name="mine", title="", path=str(folder), threads=1)


def point(folder: Path) -> None:
    (folder / "model.safetensors").write_text(POINTER)


def point_from_config(folder: Path) -> None:
    (folder / "config.json").write_text(POINTER)


def drop_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


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
        (point, "its model.safetensors is a Git LFS pointer in place of the file: run `git lfs pull` in the clone"),
        (point_from_config, "its config.json is a Git LFS pointer in place of the file: run `git lfs pull`"),
        (drop_tokenizer, "it has no tokenizer.json: add the file"),
        (pickle, "it has its weights as .bin alone: set model.safetensors_only=false"),
        (adapt, "it is a LoRA adapter: name it as model.adapter"),
        (cached, "it is a model's folder in the hub's cache: name its snapshot of a commit, snapshots/c0ffee"),
    ],
)
def test_what_a_folder_lacks(
    spoil: Callable[[Path], None], sentence: str, tiny_model_dir: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "mine"
    shutil.copytree(tiny_model_dir, folder)
    spoil(folder)
    with pytest.raises(UserError) as refused:
        load_model(config(folder))
    assert f"model=mine cannot be loaded from {folder}: {sentence}" in str(refused.value)


@pytest.fixture
def unreachable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(hub, "is_reachable", lambda: False)
    commit_of.cache_clear()
    yield
    commit_of.cache_clear()


def test_a_path_that_may_be_a_folder_or_an_id(unreachable: None) -> None:
    with pytest.raises(UserError) as refused:
        load_model(config(Path("models/mine")))
    assert "the hub cannot be reached, and its cache on this disk lacks it" in str(refused.value)
    assert "check the network, or the path, since no such folder is here." in str(refused.value)
