"""Where the completions of a job's cells come from: kvsweep's own decoding, or servers (`engine=openai`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Self

from omegaconf import DictConfig, OmegaConf

from kvsweep.annexes import annex
from kvsweep.compression.config import CacheConfig
from kvsweep.compression.policy import Policy
from kvsweep.harness.models.config import ModelConfig
from kvsweep.harness.models.spec import ModelSpec, read_spec
from kvsweep.harness.settings import build
from kvsweep.harness.sweep.checks import check_artifacts, check_cache, check_tags
from kvsweep.harness.sweep.grid import build_policies
from kvsweep.kernels.implementation import Implementation, Rounding
from kvsweep.messages.command_line import check_engine


class Source(ABC):
    """One kind of source. A further kind is a subclass, a name in `source_class`, and a module with its `fill`.

    Attributes:
        filler: the module whose `fill(work)` writes the missing rows; it is imported then, because it brings torch or a
            client.
        local: whether the model and its caches are in this machine's memory.
        lent: what a model that only a place names takes from the chosen model, in words.
        unused: the settings that a job does not use, as beginnings of keys; `used` are exceptions, `why` the reason.
    """

    filler: ClassVar[str]
    local: ClassVar[bool]
    lent: ClassVar[str]
    unused: ClassVar[tuple[str, ...]] = ()
    used: ClassVar[tuple[str, ...]] = ()
    why: ClassVar[str] = ""

    @classmethod
    @abstractmethod
    def check(cls, config: DictConfig) -> None:
        """Raise UserError if a package is missing; fill in what only the source knows."""

    @classmethod
    @abstractmethod
    def choose(cls, config: DictConfig) -> tuple[ModelConfig, list[Policy]]:
        """Return the model and a policy, or what stands in its place, for each cell; UserError for a wrong setting."""

    @classmethod
    @abstractmethod
    def read(cls, cache: CacheConfig, impl: str, model: ModelConfig, policies: list[Policy]) -> Self:
        """Read what the model's files say; UserError if they do not fit the settings."""

    @abstractmethod
    def impl(self, asked: Implementation) -> Rounding:
        """The implementation in the cells' ids."""


@dataclass(frozen=True, kw_only=True)
class Decoded(Source):
    """kvsweep's own decoding. `spec`: what the model's config says; `packed`: packed weights change its bits."""

    filler = "kvsweep.harness.sweep.fill"
    local = True
    lent = "precision, tags and sizes"
    spec: ModelSpec
    packed: bool

    @classmethod
    def check(cls, config: DictConfig) -> None:
        check_engine("a sweep")

    @classmethod
    def choose(cls, config: DictConfig) -> tuple[ModelConfig, list[Policy]]:
        return build(ModelConfig, "model", config.model), build_policies(config)

    @classmethod
    def read(cls, cache: CacheConfig, impl: str, model: ModelConfig, policies: list[Policy]) -> Self:
        check_tags(model, policies)
        spec = read_spec(model)
        check_artifacts(model, spec, [*policies, cache])
        check_cache(cache, impl, model, spec, policies)
        # The field `packed` says that packing changes the bits, `spec.packed` that weights are packed at all.
        # The bits of float32 change; bfloat16 is packed only where they stay the same.
        return cls(spec=spec, packed=spec.packed and model.dtype == "float32")

    def impl(self, asked: Implementation) -> Rounding:
        return "packed" if self.packed and asked == "torch" else asked


def source_class(config: DictConfig) -> type[Source]:
    """Return the source that a configuration chooses; a run of an older version names no engine."""
    if OmegaConf.select(config, "engine._target_") is None:
        return Decoded
    kind: type[Source] = annex("servers").Served
    return kind
