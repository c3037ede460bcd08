"""One point of the sweep, its id, and whether it is complete: the contents of DONE, the mark that a cell gets last."""

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import msgspec

from kvsweep.base import records
from kvsweep.base.files import read_file
from kvsweep.compression.config import UNPACKED, CacheConfig
from kvsweep.compression.policy import Policy
from kvsweep.harness.benchmarks.config import BenchmarkConfig
from kvsweep.harness.decode.request import DecodingConfig
from kvsweep.harness.models.config import ModelConfig
from kvsweep.kernels.implementation import Implementation


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One point of the sweep: all settings that decide its completions; `dataset_hash` is of all problems as asked."""

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
        return records.content_hash({**self._conditions, "policy": policy, **self.cache.identity()})

    @property
    def _conditions(self) -> dict[str, Any]:
        """All settings but policy and cache. Cells whose conditions are the same can be compared."""
        limits = {"max_new_tokens": self.decoding.max_new_tokens, "stop_on_loop": self.decoding.stop_on_loop}
        return {
            "model": self.model.identity(),
            "dataset": self.dataset_hash,
            "decoding": {**limits, **dataclasses.asdict(self.decoding.sampling)},
            "seed": self.seed,
            "impl": self.impl,  # implementations round differently
        }

    def describe(self) -> dict[str, Any]:
        """The contents of cell.yaml, which people and the analysis read; `check` tells if the file was edited."""
        decoding = dataclasses.asdict(self.decoding)
        described = {
            "schema": records.SCHEMA,
            "cell_id": self.cell_id,
            "condition": records.content_hash(self._conditions),
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
        return {"schema": records.SCHEMA, "check": records.content_hash([self.cell_id, described]), **described}


class Done(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The contents of DONE: the stored completions, and the sizes of the files that hold them.

    Attributes:
        rule: the `grading_rule` of the grades.
        plans: the sequential jobs for which these draws are enough, because they have decided the cell (`Job.plan`).
    """

    completions: int
    draws: int
    problems: list[str]
    files: dict[str, int]
    plans: list[str] = []
    rule: str = ""

    @classmethod
    def read(cls, directory: Path) -> Self | None:
        """Read a cell's DONE; None where there is none, or where the files have other sizes now. No rows are read."""
        try:
            done = records.decode(read_file(directory / records.DONE_FILE), cls)
        except (OSError, ValueError):
            return None
        return done if done.files == file_sizes(directory) and records.PROBLEMS_FILE in done.files else None

    def covers(self, problem_ids: Collection[str], draws: int) -> bool:
        return set(problem_ids) <= set(self.problems) and draws <= self.draws


def is_done(run_directory: Path, cell: Cell, problem_ids: Sequence[str], draws: int, plan: str | None = None) -> bool:
    """True if DONE lists all these completions, or the plan of a sequential job; reads no rows."""
    done = Done.read(run_directory / cell.cell_id)
    if done is None or done.rule != records.grading_rule(cell.describe()):
        return False
    return plan in done.plans or done.covers(problem_ids, draws)


def stored_pairs(directory: Path, rows: str = records.COMPLETIONS_FILE) -> set[records.Pair]:
    files = records.shard_files(directory, rows).values()
    return {row.key for path in files for row in records.read_rows(path, records.PairRow, on_bad=records.ignore)}


def file_sizes(directory: Path) -> dict[str, int]:
    """The sizes in bytes of the files that DONE vouches for, by name."""
    names = (records.PROBLEMS_FILE, records.COMPLETIONS_FILE, records.GRADES_FILE)
    return {path.name: path.stat().st_size for name in names for path in records.shard_files(directory, name).values()}
