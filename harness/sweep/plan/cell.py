"""One point of the sweep and its id."""

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from kvsweep.base.records import SCHEMA, content_hash
from kvsweep.compression.config import UNPACKED, CacheConfig
from kvsweep.compression.policy import Policy
from kvsweep.harness.benchmarks.config import BenchmarkConfig
from kvsweep.harness.decode.request import DecodingConfig
from kvsweep.harness.models.config import ModelConfig
from kvsweep.kernels.implementation import Implementation


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One point of the sweep: all settings that decide its completions.

    Attributes:
        dataset_hash: hash of all problems of the benchmark, as the prompts ask them.
    """

    model: ModelConfig
    benchmark: BenchmarkConfig
    dataset_hash: str
    policy: Policy
    decoding: DecodingConfig
    seed: int
    impl: Implementation = "torch"
    cache: CacheConfig = UNPACKED

    @cached_property
    def cell_id(self) -> str:
        """Hash of all settings that can change the outputs, and of no other: not of draws, limit, slots or paths."""
        policy = {"class": type(self.policy).__qualname__, **self.policy.identity()}
        return content_hash({**self._conditions, "policy": policy, **self.cache.identity()})

    @property
    def _conditions(self) -> dict[str, Any]:
        """All settings but policy and cache. Cells whose conditions are the same can be compared."""
        sampling = dataclasses.asdict(self.decoding.sampling)
        limits = {"max_new_tokens": self.decoding.max_new_tokens, "stop_on_loop": self.decoding.stop_on_loop}
        return {
            "model": self.model.identity(),
            "dataset": self.dataset_hash,
            "decoding": {**limits, **sampling},
            "seed": self.seed,
            "impl": self.impl,  # implementations round differently
        }

    def describe(self) -> dict[str, Any]:
        """The contents of cell.yaml, which people and the analysis read; `check` tells if the file was edited."""
        decoding = dataclasses.asdict(self.decoding)
        described = {
            "schema": SCHEMA,
            "cell_id": self.cell_id,
            "condition": content_hash(self._conditions),
            "model": self.model.describe(),
            "benchmark": dataclasses.asdict(self.benchmark),
            "dataset_hash": self.dataset_hash,
            "policy": self.policy.identity(),
            "decoding": {**decoding.pop("sampling"), **decoding},
            "impl": self.impl,
            "seed": self.seed,
            **self.cache.identity(),
        }
        # Near the top, so that a file that was cut off still has it.
        return {"schema": SCHEMA, "check": content_hash([self.cell_id, described]), **described}
