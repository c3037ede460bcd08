"""One point of the sweep, and its id."""

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from kvsweep.compression.config import UNPACKED, CacheConfig
from kvsweep.compression.policy import Policy
from kvsweep.harness.benchmarks.config import BenchmarkConfig
from kvsweep.harness.decode.request import DecodingConfig
from kvsweep.harness.models.config import ModelConfig
from kvsweep.kernels.implementation import ARITHMETIC, Rounding
from kvsweep.run_files import row_types


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One point of the sweep: all settings that decide its completions; `dataset_hash` covers all prompts."""

    model: ModelConfig
    benchmark: BenchmarkConfig
    dataset_hash: str
    policy: Policy
    decoding: DecodingConfig
    seed: int
    impl: Rounding = "torch"
    cache: CacheConfig = UNPACKED

    @cached_property
    def cell_id(self) -> str:
        """Hash of all settings that can change the outputs. Draws, limit, slots and paths are not part of it."""
        policy = {"class": type(self.policy).__qualname__, **self.policy.identity()}
        return row_types.content_hash({**self._conditions, "policy": policy, **self.cache.identity()})

    @cached_property
    def _conditions(self) -> dict[str, Any]:
        """All settings except policy and cache. Cells with equal conditions can be compared."""
        limits = {"max_new_tokens": self.decoding.max_new_tokens, "stop_on_loop": self.decoding.stop_on_loop}
        return {
            "model": self.model.identity(),
            "dataset": self.dataset_hash,
            "decoding": {**limits, **dataclasses.asdict(self.decoding.sampling)},
            "seed": self.seed,
            "impl": ARITHMETIC[self.impl],  # implementations round differently
        }

    def describe(self) -> dict[str, Any]:
        """Return the contents of cell.yaml, for people and for the analysis; `check` shows if the file was edited."""
        decoding = dataclasses.asdict(self.decoding)
        sampling = decoding.pop("sampling")
        described = {
            "schema": row_types.SCHEMA,
            "cell_id": self.cell_id,
            "condition": row_types.content_hash(self._conditions),
            "model": self.model.describe(),
            "benchmark": dataclasses.asdict(self.benchmark),
            "dataset_hash": self.dataset_hash,
            "policy": self.policy.identity(),
            "decoding": {**sampling, **decoding},
            "impl": self._conditions["impl"],
            "seed": self.seed,
            **self.cache.identity(),
        }
        # The check stands near the top, so that a truncated file still has it.
        return {"schema": row_types.SCHEMA, "check": row_types.content_hash([self.cell_id, described]), **described}
