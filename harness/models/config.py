"""The configuration of a model and its identity."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch

from analysis.records import UserError, content_hash
from harness.models.stand_in import ROLES
from harness.models.thinking import ThinkTags

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# Of a larger file of a local checkpoint this many blocks, evenly spread, are hashed: all of it would take minutes.
_BLOCKS, _BLOCK_BYTES = 256, 1 << 16
_CHECKPOINT_FILES = {".safetensors", ".bin", ".json", ".jinja", ".model", ".txt"}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which model, and how to run it.

    Attributes:
        name: the config's name.
        title: how reports call it.
        path: a local directory, or an id on the hub.
        revision: commit of the hub id.
        dtype: float32, bfloat16 or float16, of weights and cache.
        random_weights: the architecture with random weights, for speed and memory runs.
        device: "auto" takes CUDA if there is one, else the CPU.
        threads: CPU threads of the process; None leaves torch's choice.
        think_start: the tag that opens the thinking.
        think_end: the tag that closes the thinking, one token.
        force_think: begin the thinking (`think_start` and a line break) in the prompt where the chat template does not.
        config: the architecture as its config.json has it. With random_weights it is what is built, without a download;
            else it is for the reader, and the checkpoint's own counts.
        special_tokens: bos, eos, user and assistant, for the stand-in tokenizer of such a build.
        predictor: directory of the importance predictor made for it, if any.

    Raises:
        UserError: a field out of its range.
    """

    name: str
    title: str
    path: str
    revision: str | None = None
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    random_weights: bool = False
    device: str = "auto"
    threads: int | None = None
    think_start: str = "<think>"
    think_end: str = "</think>"
    force_think: bool = False
    # Not hashed, being mappings; still compared.
    config: Mapping[str, Any] | None = field(default=None, hash=False)
    special_tokens: Mapping[str, str] | None = field(default=None, hash=False)
    predictor: str | None = None

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise UserError(f"model.dtype={self.dtype} is unknown: choose one of {', '.join(DTYPES)}.")
        if self.threads is not None and self.threads < 1:
            raise UserError(f"model.threads={self.threads} is out of range: at least 1, or null for torch's choice.")
        for name in ("think_start", "think_end"):
            if not getattr(self, name).strip():
                raise UserError(f"model.{name} is empty: name the tag that this model writes.")
        if self.config is not None and "model_type" not in self.config:
            raise UserError("model.config has no model_type: name the architecture, such as qwen2 or llama.")
        if self.is_built and set(self.special_tokens or ()) != set(ROLES):
            raise UserError(f"model.special_tokens={self.special_tokens} must name {', '.join(ROLES)}: correct it.")

    @property
    def is_built(self) -> bool:
        """Whether the model is made from `config` alone, with random weights and a stand-in tokenizer."""
        return self.random_weights and self.config is not None

    @property
    def tags(self) -> ThinkTags:
        """The tags around the thinking."""
        return ThinkTags(start=self.think_start, end=self.think_end)

    def identity(self) -> dict[str, Any]:
        """What of the model can change a completion: its weights, their precision, where thinking ends."""
        if self.is_built:
            weights = f"random@{content_hash([dict(self.config or {}), dict(self.special_tokens or {})])}"
        elif Path(self.path).is_dir():
            weights = _directory_digest(Path(self.path))
        else:
            weights = f"{self.path}@{self.revision}"
        # Named only where it acts, so that cells from before it keep their names.
        forced = {"force_think": True, "think_start": self.think_start} if self.force_think else {}
        return {
            "weights": weights,
            "dtype": self.dtype,
            "random_weights": self.random_weights,
            "think_end": self.think_end,
            **forced,
        }

    def describe(self) -> dict[str, Any]:
        """What cell.yaml says of the model: its names, its identity, and its tags, by which answers are found."""
        return {"name": self.name, "title": self.title, "think_start": self.think_start, **self.identity()}


@cache
def _directory_digest(directory: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(p for p in directory.iterdir() if p.suffix in _CHECKPOINT_FILES):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}".encode())
        with path.open("rb") as file:
            for offset in range(0, size, max(_BLOCK_BYTES, -(-size // _BLOCKS))):
                file.seek(offset)
                digest.update(file.read(_BLOCK_BYTES))
    return digest.hexdigest()[:16]
