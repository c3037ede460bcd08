"""From a composed Hydra configuration to a checked, frozen Job. Every mistake is refused here."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import numpy as np
from numpy.typing import NDArray
from omegaconf import DictConfig, OmegaConf
from pydantic import BeforeValidator, Field, PositiveFloat, StrictBool

from kvsweep.compression import artifacts
from kvsweep.compression.config import CacheConfig
from kvsweep.compression.policy import Policy
from kvsweep.harness.benchmarks.config import BenchmarkConfig
from kvsweep.harness.benchmarks.load import Benchmark, load_problems, question_hash
from kvsweep.harness.decode.request import DecodingConfig, build_decoding, first_eviction
from kvsweep.harness.models.config import ModelConfig
from kvsweep.harness.models.spec import ModelSpec
from kvsweep.harness.provenance import command_line, describe_code
from kvsweep.harness.settings import WEIGHTS, build, choices, conf_files, plain
from kvsweep.harness.sweep.card import AssumeConfig, Card, CostConfig, known_card
from kvsweep.harness.sweep.cell import Cell
from kvsweep.harness.sweep.checks import input_files, rounds_until
from kvsweep.harness.sweep.grid import policy_file
from kvsweep.harness.sweep.source import Decoded, Source, source_class
from kvsweep.kernels.implementation import Implementation, check_installed
from kvsweep.messages.checked import checked
from kvsweep.messages.errors import UserError
from kvsweep.messages.escape import folder_below
from kvsweep.run_files import row_types
from kvsweep.run_files.row_types import MOST, Shard, leaves
from kvsweep.run_files.run_reader import StoredCell, read_cells, read_provenance

_Verdict = row_types.view(row_types.Grade, "correct", "rule")


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """The report's settings for a sequential sweep: a cell is safe if it loses fewer points than `margin`."""

    margin: Annotated[float, Field(gt=0, lt=100)] = 5.0


@dataclass(frozen=True, kw_only=True)
class TrackerConfig:
    """A job's tracker. `conf/tracker/wandb.yaml` describes each field. A missing package raises UserError."""

    kind: Literal["none", "wandb", "trackio", "mlflow"] = "none"
    project: str = "kvsweep"
    interval_s: PositiveFloat = 15.0
    patience_s: PositiveFloat = 20.0

    def __post_init__(self) -> None:
        if self.kind != "none" and find_spec(self.kind) is None:
            missing = f"tracker={self.kind} needs the package {self.kind}, which is not installed"
            raise UserError(f"{missing}: pip install 'kvsweep[{self.kind}]', or tracker=none.")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The settings outside all sections, which conf/config.yaml describes.

    Raises UserError for an implementation that is not installed, and for `finish` without `until`.
    """

    seed: Annotated[int, Field(ge=0, le=MOST, strict=True)]
    draws: Annotated[int, Field(ge=1, le=MOST, strict=True)]
    slots: Annotated[int, Field(ge=1, le=MOST, strict=True)] | Literal["auto"]
    invariant: StrictBool | Literal["auto"]
    impl: Implementation
    shard: Annotated[Shard, BeforeValidator(lambda text: Shard.parse(str(text)))]
    # A stored configuration of an older version lacks these.
    until: Literal["decided"] | None = None
    finish: StrictBool = False
    card: str | None = None

    def __post_init__(self) -> None:
        check_installed(self.impl)  # not check_available: the machine that submits a job to SLURM may have no GPU
        if self.finish and self.until is None:
            raise UserError("finish=True goes with until=decided: add until=decided or leave it out.")


_SECTIONS = {
    "cache": CacheConfig,
    "report": ReportConfig,
    "tracker": TrackerConfig,
    "cost": CostConfig,
    "assume": AssumeConfig,
}
UNTRACKED = TrackerConfig()
_MOST_PAIRS = 10_000_000  # of problem and draw; each takes memory


@dataclass(frozen=True, kw_only=True)
class Job:
    """The work of one process: the cells of one grid, on one model and one benchmark.

    All cells share `decoding`, `seed`, `impl` and `cache`. A sequential job (`until=decided`) has rounds.
    """

    model: ModelConfig
    source: Source
    benchmark: Benchmark
    cells: tuple[Cell, ...]
    decoding: DecodingConfig
    seed: int
    impl: Implementation
    draws: int  # completions per problem; in a round, the completions until its end
    slots: int | None  # sequences decoded at once; None: as many as fit
    run_directory: Path
    resolved: Mapping[str, Any]  # the whole configuration, for provenance
    invariant: bool | None  # true: equal bits in every batch; None: the device's default
    cache: CacheConfig
    shard: Shard
    rounds: tuple[int, ...]  # draws until the end of each round
    margin: float | None  # points of Pass@1 that a safe cell may lose; None without rounds
    finish: bool  # after the last round, decode the other draws of cells that are already decided
    inputs: Mapping[Path, str]  # weight files in the cells' ids, with hashes
    card: Card | None  # the GPU for the estimate of --dry-run
    cost: CostConfig
    assume: AssumeConfig
    command: str
    tracker: TrackerConfig

    @property
    def name(self) -> str:
        return f"{self.model.name} {self.benchmark.name}{self.cache.title}"

    @property
    def spec(self) -> ModelSpec:
        """What the model's config says; only of a job that decodes here."""
        assert isinstance(self.source, Decoded)
        return self.source.spec

    @property
    def problem_ids(self) -> list[str]:
        return [problem.id for problem in self.benchmark.problems]

    def first_eviction(self, policy: Policy, question: int) -> int | None:
        """Return the step at which a cell's completions leave those of other cells; None if they never do.

        Cells of servers share no token.
        """
        return first_eviction(policy, question) if self.source.local else 0

    def provenance(self, cell: Cell) -> dict[str, Any]:
        """Return where a cell's rows come from, as far as it is known before decoding or asking."""
        code = describe_code()
        # Only a sequential job has these two.
        of_rounds = {"rounds": list(self.rounds), "margin": self.margin} if self.rounds else {}
        return {
            "dataset_hash": cell.dataset_hash,
            "dataset_origin": self.benchmark.origin,
            "expected": len(self.problem_ids) * self.draws,
            "draws": self.draws,
            **of_rounds,
            "random_weights": self.model.random_weights,
            "git": {"revision": code["git_revision"], "dirty": code["git_dirty"]},
            "packages": code["packages"],
            "config": self.resolved,
        }

    def check_inputs(self) -> None:
        """Refuse to write rows if the files have changed since their hashes went into the ids."""
        files = input_files(self.model, [cell.policy for cell in self.cells], self.cache)
        # Part of a job has some of its policies only. `files` are theirs; `inputs` has those of the other policies too,
        # whose changes the other parts refuse. But a deleted file is refused by each part: it may be of the weights.
        deleted_files = [path for path in self.inputs if not path.exists()]
        for path in sorted({*files, *deleted_files}):
            if files.get(path) != self.inputs.get(path):
                changed = f"{path} has changed since the cells of {self.name} were planned"
                raise UserError(f"{changed}: restore the file, or run the command again for cells of its new contents.")

    def differing(self, other: "Job") -> list[str]:
        """Return the names of the settings in which two jobs differ that share cells, such as slots.

        What is in the ids of the cells that they share is equal anyway.
        """
        # Two benchmarks may have the same problems, so the problems' ids are compared in place of the benchmarks.
        may_differ = ("benchmark", "cells", "inputs", "resolved", "command")
        names = ["problem_ids", *(field.name for field in fields(self) if field.name not in may_differ)]
        differing = [name for name in names if getattr(self, name) != getattr(other, name)]
        # These decide the grades, and a cell has a single grade of each completion. They are settings of the
        # configuration of the benchmark, `Cell.benchmark`, which is the same for all cells of a job.
        for name in ("answer_kind", "answer_from"):
            if getattr(self.cells[0].benchmark, name) != getattr(other.cells[0].benchmark, name):
                differing.append(f"benchmark.{name}")
        return differing

    def scores(self, cell: Cell) -> NDArray[np.float64]:
        """Return the stored grades of one of the job's cells, [problems, draws]: 1 right, 0 wrong, NaN ungraded."""
        rows = {problem_id: row for row, problem_id in enumerate(self.problem_ids)}
        scores = np.full((len(rows), self.draws), np.nan)
        for grade in self.stored(cell).grades(_Verdict, on_bad=row_types.ignore).values():
            # Another command may have stored more problems or draws of the same cell.
            if grade.problem_id in rows and grade.draw < self.draws:
                scores[rows[grade.problem_id], grade.draw] = grade.correct
        return scores

    def stored(self, cell: Cell) -> StoredCell:
        return StoredCell(self.run_directory / cell.cell_id)


def make_job(config: DictConfig) -> Job:
    """Check a composed configuration and make its job: first the settings, then the files, which take longest."""
    source_type = source_class(config)
    model, policies = source_type.choose(config)
    model = replace(model, revision=model.commit or model.revision)  # the commit that a branch names now
    benchmark_config = build(BenchmarkConfig, "benchmark", config.benchmark)
    run = checked(RunConfig, config, extra=True)
    sections: dict[str, Any] = {name: build(cls, name, config.get(name, {})) for name, cls in _SECTIONS.items()}
    decoding = build_decoding(config.decoding)
    if run.until and "group" in benchmark_config.columns:
        raise UserError("until=decided takes problems as independent: leave it, or benchmark.columns.group, out.")
    cache = sections.pop("cache")
    margin = sections.pop("report").margin
    rounds = rounds_until(run.draws, cache, policies) if run.until else ()
    # From here on files are read.
    benchmark = load_problems(benchmark_config, only_estimated=artifacts.is_planning())
    inputs = input_files(model, policies, cache)  # before the cells hash the same files for their ids
    _refuse_leaks({policy.placed["predictor"] for policy in policies if "predictor" in policy.placed}, benchmark)
    source = source_type.read(cache, run.impl, model, policies)
    shared: dict[str, Any] = {"model": model, "decoding": decoding, "seed": run.seed, "cache": cache}
    cells = {}  # by their ids, so that each comes once
    for policy in policies:
        cell = Cell(
            **shared,
            benchmark=benchmark_config,
            dataset_hash=benchmark.content_hash,
            policy=policy,
            impl=source.impl(run.impl),  # what rounds the cell's numbers, for its id; the job has the user's choice
        )
        cells[cell.cell_id] = cell
    resolved = plain(config)
    job = Job(
        **shared,
        **sections,
        source=source,
        benchmark=benchmark,
        cells=tuple(cells.values()),
        impl=run.impl,
        draws=run.draws,
        slots=None if run.slots == "auto" else run.slots,
        run_directory=folder_below(str(resolved["results_dir"]), str(resolved["run_name"])),
        resolved={**resolved, "model": resolved["model"] | {"revision": model.revision}, **named_protocol(config)},
        invariant=None if run.invariant == "auto" else run.invariant,
        shard=run.shard,
        rounds=rounds,
        margin=margin if rounds else None,
        finish=run.finish,
        inputs=inputs,
        card=None if run.card is None else known_card(run.card),
        command=command_line(),
    )
    completions = job.draws * len(job.problem_ids)
    if completions > _MOST_PAIRS:
        most = f"at most {_MOST_PAIRS:,} are possible"
        raise UserError(f"draws={job.draws} asks for {completions:,} completions a cell: {most}.")
    job.check_inputs()  # a file may have changed since it was hashed above
    if model.revision != config.model.revision:
        _refuse_moved(job, config.model.revision or "main")
    return job


def _refuse_leaks(predictors: set[str], benchmark: Benchmark) -> None:
    """Raise UserError if a predictor was trained on texts that answer one of the benchmark's questions.

    `predictors` are the folders of the policies' predictors.
    """
    for place in predictors:
        trained_hashes = set(artifacts.read_card("predictor", place).get("questions", ()))
        leaked = [question for question in benchmark.questions if question_hash(question) in trained_hashes]
        if leaked:
            overlap = f"{len(leaked)} of the {len(benchmark.questions)} problems of benchmark={benchmark.name}"
            first = f"the first is {leaked[0]!r:.60}"
            raise UserError(f"{place} was trained on texts of {overlap}, {first}: train a head on other problems.")


def named_protocol(config: DictConfig) -> dict[str, Any]:
    """Return the section `protocol` of a configuration that chose one, else {}; `changed` lists overridden settings."""
    chosen = plain(config.get("protocol") or {})
    if not chosen or chosen["name"] not in choices("protocol"):
        return {}
    # Merged over the configuration, because values of the protocol may refer to other settings of the configuration.
    protocol = OmegaConf.load(conf_files("protocol")[chosen["name"]])
    as_published = OmegaConf.merge(config, protocol)
    settings = cast(dict[str, Any], OmegaConf.to_container(protocol))
    changed = []
    if config.benchmark.name not in chosen["benchmarks"]:
        changed.append(f"benchmark.name={config.benchmark.name}")
    for key, _ in leaves(settings):
        value = OmegaConf.select(config, key)
        # The keys under "protocol." describe it and are no settings.
        if not key.startswith("protocol.") and value != OmegaConf.select(as_published, key):
            changed.append(f"{key}={value}")
    return {"protocol": {**chosen, "changed": changed}}


def _refuse_moved(job: Job, branch: str) -> None:
    """Refuse to resume a run if its cells come from another commit than the branch names now."""
    place = job.model.place
    weights = f"{place}@{job.model.revision}"
    for _, settings in read_cells(job.run_directory):
        # Weights of the hub are identified by PLACE@COMMIT.
        model = settings["model"]
        earlier = str(model["weights"])
        if earlier.startswith(f"{place}@") and model["name"] == job.model.name and earlier != weights:
            commit = earlier.rpartition("@")[2]
            moved = f"{branch} of {place} names commit {job.model.revision} now"
            hint = f"give model.revision={commit} to go on, or another run_name for the new commit"
            raise UserError(f"{moved}, and {job.run_directory} has cells of {commit}: {hint}.")


def stored_config(path: Path) -> dict[str, Any]:
    """Return a provenance file's configuration. It may be a stranger's, so everything that could act is removed.

    The policy's class comes from this installation's YAML of the same name. Of the settings of model and policy, only
    those known to ModelConfig and that YAML remain. Weights embedded in another installation are taken from this one.
    """
    try:
        stored_settings = dict(read_provenance(path)["config"])
        model = dict(stored_settings["model"])
        policy = dict(stored_settings["policy"])
        name = str(policy["name"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{path} names no model and policy: run the cell again.") from error
    if name not in choices("policy"):
        raise UserError(f"{path} names the policy {name}, and this kvsweep has {', '.join(choices('policy'))}.")
    policy_settings = policy_file(name)
    model_settings = {field.name for field in fields(ModelConfig)}
    policy = {key: _embedded_here(value) for key, value in policy.items() if key in policy_settings}
    policy |= {"_target_": policy_settings["_target_"], "name": name}
    model = {key: _embedded_here(value) for key, value in model.items() if key in model_settings}
    config = {**stored_settings, "model": model, "policy": policy}
    config.pop("launcher", None)
    # A server's class, address and key variable may be a stranger's. kvsweep's own decoding has no class.
    if config.pop("engine", None) not in (None, {"_target_": None}):
        raise UserError(f"{path} is of a server's texts, and only those of kvsweep's own decoding can be read again.")
    # OmegaConf would replace ${...}, by a variable of the environment for one.
    if "${" in json.dumps(config):
        raise UserError(f"{path} holds ${{, which no stored setting has: restore the file, or run the cell again.")
    return config


def _embedded_here(value: Any) -> Any:
    """Replace a path into another installation's embedded weights, which is gone, by this installation's path."""
    _, separator, name = str(value).rpartition("/harness/toy/weights/")  # the separator is "" without such a part
    is_gone = separator and not Path(value).exists()
    if is_gone and (WEIGHTS / name).exists():
        return str(WEIGHTS / name)
    return value
