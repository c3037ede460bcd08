"""A model's configuration and identity. Importing this module does not import torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any, Literal

from pydantic import PositiveInt

from kvsweep.annexes import annex
from kvsweep.harness.models.hub import adapter_files, commit_of, is_id
from kvsweep.messages.errors import UserError
from kvsweep.run_files.row_types import content_hash
from kvsweep.run_files.safe_files import contains, digests
from kvsweep.run_files.thinking import ThinkTags

# Roles for which a stand-in tokenizer must have a token.
ROLES = ("bos", "eos", "user", "assistant")

# The call by which a template asks for today's date, and the files beside *.jinja that may hold a template.
_DATE, _TEMPLATES = "strftime_now", ("tokenizer_config.json", "chat_template.json")
# What kvsweep itself passes to a chat template.
_NOT_VARIABLES = {"messages", "tools", "documents", "chat_template", "add_generation_prompt", _DATE}
_CHECKPOINT_FILES = {".safetensors", ".bin", ".json", ".jinja", ".model", ".txt"}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A model. conf/model/base/model.yaml describes the fields; a contradiction raises UserError."""

    name: str
    title: str
    path: str | None = None
    gguf: str | None = None
    adapter: str | None = None
    revision: str | None = None
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    random_weights: bool = False
    device: str = "auto"
    threads: PositiveInt | None = None
    think_start: str | None = "<think>"
    think_end: str | None = "</think>"
    force_think: bool = False
    split: str | None = None
    chat_template: Literal["own", "none"] = "own"
    template: Mapping[str, Any] | None = field(default=None, hash=False)
    today: str = "2026-01-01"
    # A mapping has no hash; equality still compares it.
    config: Mapping[str, Any] | None = field(default=None, hash=False)
    special_tokens: Mapping[str, str] | None = field(default=None, hash=False)
    safetensors_only: bool = True
    predictor: str | None = None
    statistics: str | None = None
    # Only conf/policy and conf/decoding read this field.
    sizes: Mapping[str, Any] | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        if (self.path is None) == (self.gguf is None):
            raise UserError(f"model.path={self.path} and model.gguf={self.gguf}: name one of both, the other is null.")
        for name in ("think_start", "think_end"):
            tag = getattr(self, name)
            if tag is not None and not tag.strip():
                raise UserError(f"model.{name} is empty: name the tag that this model writes, or null for none.")
        reserved = _NOT_VARIABLES.intersection(self.template or {})
        if reserved:
            raise UserError(
                f"model.template sets {', '.join(sorted(reserved))}, which kvsweep itself does: leave it out."
            )
        if self.template and self.chat_template == "none":
            raise UserError(
                f"model.template={dict(self.template)} has variables of a chat template, and chat_template=none: "
                "choose model.template=null, or model.chat_template=own."
            )
        try:
            date.fromisoformat(self.today)
        except ValueError:
            raise UserError(f"model.today={self.today} is no date: write it as 2026-01-01.") from None
        if self.force_think and None in (self.think_start, self.think_end):
            raise UserError("model.force_think=true needs model.think_start and model.think_end: name both tags.")
        if self.adapter is not None and self.random_weights:
            raise UserError("model.adapter belongs to trained weights: set it to null with model.random_weights=true.")
        if self.is_built and set(self.special_tokens or ()) != set(ROLES):
            raise UserError(f"model.special_tokens={self.special_tokens} must name {', '.join(ROLES)}: correct it.")

    @property
    def is_built(self) -> bool:
        """True if the model is built from `config`, with random weights and a stand-in tokenizer."""
        return self.random_weights and self.config is not None

    @property
    def tags(self) -> ThinkTags:
        return ThinkTags(start=self.think_start, end=self.think_end)

    @property
    def place(self) -> str:
        return str(self.gguf or self.path)

    @property
    def checkpoint(self) -> str:
        """The folder or hub id of weights and tokenizer; a GGUF file is converted to a folder."""
        file = self._gguf_file
        return self.place if file is None else str(annex("gguf").converted(file))

    @property
    def _gguf_file(self) -> Path | None:
        """The file that `gguf` names; None without one, and for a built model, which does not read it."""
        return None if self.gguf is None or self.is_built else Path(annex("gguf").find_gguf(self.gguf))

    @property
    def commit(self) -> str | None:
        """The commit of a hub model, whatever `revision` names; None for a folder, a file or a built model."""
        if self.gguf is not None or self.is_built or Path(self.place).is_dir() or not is_id(self.place):
            return None
        return commit_of(self.place, self.revision)

    def files(self) -> dict[Path, str]:
        """The files of checkpoint and adapter on this disk, each with the hash of its contents."""
        adapter = adapter_files(self.adapter) if self.adapter is not None else []
        return {**self._checkpoint_files(), **dict(zip(adapter, digests(adapter), strict=True))}

    def _checkpoint_files(self) -> dict[Path, str]:
        """The checkpoint's files on this disk, each with the hash of all files up to it; none of a hub model."""
        file = self._gguf_file
        if file is not None:
            return {file: digests([file])[0]}
        if self.is_built or not Path(self.place).is_dir():
            return {}
        files = sorted(path for path in Path(self.place).iterdir() if path.suffix in _CHECKPOINT_FILES)
        return dict(zip(files, digests(files, named=True), strict=True))

    def identity(self) -> dict[str, Any]:
        """Everything about the model that can change a completion: weights, precision, the closing thinking tag."""
        identity = {
            "weights": self._weights(),
            "dtype": self.dtype,
            "random_weights": self.random_weights,
            "think_end": self.think_end,
        }
        # The others are named only if they act, so that cells from before these settings keep their cell_id.
        if self.force_think:
            identity |= {"force_think": True, "think_start": self.think_start}
        if self.chat_template == "none":
            identity["chat_template"] = "none"
        if self.template:
            identity["template"] = dict(self.template)
        file = self._gguf_file
        if file is not None:
            identity |= annex("gguf").marks(file)
        if self._may_read_the_date():
            identity["today"] = self.today
        return identity

    def _weights(self) -> str:
        """The weights' place with its commit, or a hash: of files on this disk, or of the config of a built model."""
        if self.is_built:
            weights = f"random@{content_hash([dict(self.config or {}), dict(self.special_tokens or {})])}"
        else:
            hashes = [*self._checkpoint_files().values()]
            # The last hash is of all files together.
            weights = hashes[-1] if hashes else f"{self.place}@{self.commit or self.revision}"
        if self.adapter is None:
            return weights
        return content_hash([weights, digests(adapter_files(self.adapter))[-1]])

    def _may_read_the_date(self) -> bool:
        """True if the chat template asks for today's date, or lies on the hub and another date is set."""
        if self.is_built or self.chat_template == "none":
            return False
        file = self._gguf_file
        if file is not None:
            return contains(file, _DATE)
        folder = Path(self.place)
        if not folder.is_dir():  # the template may not be on this disk yet; the usual date leaves a cell_id as it was
            return self.today != ModelConfig.today
        files = [*folder.rglob("*.jinja"), *(folder / name for name in _TEMPLATES)]
        return any(contains(file, _DATE) for file in files if file.is_file())

    def describe(self) -> dict[str, Any]:
        """The model's entry in cell.yaml: names, identity, and the tags that grading uses to find the answer."""
        return {"name": self.name, "title": self.title, "think_start": self.think_start, **self.identity()}
