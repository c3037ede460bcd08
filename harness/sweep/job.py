"""From a composed Hydra configuration to checked, frozen dataclasses: the edge of the program.

Everything wrong with the input is said here, in one sentence, before a model is loaded.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf

from analysis.records import WHOLE, Shard, UserError
from compression.policy import BudgetPolicy, Policy, Question
from compression.predictor import read_card
from harness.benchmarks.config import BenchmarkConfig
from harness.benchmarks.load import Benchmark, load_problems
from harness.decode.request import DecodingConfig, build_decoding
from harness.models.config import ModelConfig
from harness.models.load import read_architecture
from harness.provenance import command_line
from harness.settings import CONF, _container, _whole, build
from harness.sweep.cell import Cell
from harness.sweep.tracker import UNTRACKED, TrackerConfig
from kernels.implementation import Implementation, check_installed


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The axes of a grid; None leaves an axis at the single value that `policy` has.

    Raises:
        UserError: an axis without a value.
    """

    policy: Sequence[str] | None = None
    keep_ratio: Sequence[float] | None = None
    local_window: Sequence[int] | None = None
    budget: Sequence[int] | None = None
    question: Sequence[Question] | None = None

    def __post_init__(self) -> None:
        for axis, values in dataclasses.asdict(self).items():
            if values is not None and not values:
                raise UserError(f"grid.{axis}=[] is empty: name at least one value, or null for the policy's own.")


@dataclass(frozen=True, kw_only=True)
class Job:
    """What one process works through: the cells of one grid, on one model and one benchmark.

    Attributes:
        draws: completions per problem.
        slots: sequences decoded at once, None for as many as fit.
        resolved: the whole configuration, for provenance.
        shard: the part of the pairs that is this process's.
        command: the command line that asked for it.
        tracker: who is told of it beside the files.
    """

    model: ModelConfig
    benchmark: Benchmark
    cells: tuple[Cell, ...]
    draws: int
    slots: int | None
    run_directory: Path
    resolved: Mapping[str, Any]
    shard: Shard = WHOLE
    command: str = "kvsweep"
    tracker: TrackerConfig = UNTRACKED

    @property
    def decoding(self) -> DecodingConfig:
        """The decoding that all cells share."""
        return self.cells[0].decoding

    @property
    def seed(self) -> int:
        """The seed that all cells share."""
        return self.cells[0].seed

    @property
    def impl(self) -> Implementation:
        """The implementation of the cache's operations that all cells share."""
        return self.cells[0].impl

    @property
    def pairs(self) -> list[tuple[str, int]]:
        """(problem_id, draw) of every completion that each cell must have."""
        return [(p.id, draw) for p in self.benchmark.problems for draw in range(self.draws)]

    @property
    def own_pairs(self) -> list[tuple[str, int]]:
        """The pairs of this job's shard."""
        return self.shard.of(self.pairs)

    @property
    def problem_ids(self) -> list[str]:
        """The problems, by id."""
        return [problem.id for problem in self.benchmark.problems]

    def of_shard(self, shard: Shard) -> "Job":
        """The same job for one part of the pairs."""
        return dataclasses.replace(self, shard=shard)


def plan(config: DictConfig) -> Job:
    """Check a composed configuration and say what is to be done.

    Raises:
        UserError: any value that is missing, unknown or out of range; data that cannot be used.
    """
    model = build(ModelConfig, "model", config.model)
    benchmark_config = build(BenchmarkConfig, "benchmark", config.benchmark)
    decoding = build_decoding(config.decoding)
    seed = _whole("seed", config.seed, least=0)
    impl = _implementation(config.impl)
    policies = build_policies(config)
    check_predictors(model, policies)
    benchmark = load_problems(benchmark_config)
    cells = [
        Cell(
            model=model,
            benchmark=benchmark_config,
            dataset_hash=benchmark.content_hash,
            policy=policy,
            decoding=decoding,
            seed=seed,
            impl=impl,
        )
        for policy in policies
    ]
    return Job(
        model=model,
        benchmark=benchmark,
        cells=tuple({cell.cell_id: cell for cell in cells}.values()),
        draws=_whole("draws", config.draws, least=1),
        slots=None if config.slots == "auto" else _whole("slots", config.slots, least=1),
        run_directory=Path(str(config.results_dir)) / str(config.run_name),
        resolved=_container(config),
        shard=Shard.parse(str(config.shard)),
        command=command_line(),
        tracker=build(TrackerConfig, "tracker", config.tracker),
    )


def build_policies(config: DictConfig) -> list[Policy]:
    """Make every policy of the grid: the product of its axes, or the one policy where there is no grid.

    The composed `policy` gives the settings that all share (keep_ratio, local_window, budget, question), so that a
    grid's policies hold the same memory. A shared setting that it leaves at null, and all others, come from each
    policy's own YAML.
    """
    grid = build(Grid, "grid", config.grid)
    composed = _container(config.policy)
    names = grid.policy or [composed["name"]]
    axes = {a: v for a, v in dataclasses.asdict(grid).items() if a != "policy" and v is not None}
    policies = []
    for name, *point in itertools.product(names, *axes.values()):
        values = composed if name == composed["name"] else _policy_of_grid(name, config, composed)
        setting = {a: v for a, v in zip(axes, point, strict=True) if a in values}
        if "question" in setting:
            setting["question_on_top"] = None  # the older spelling of the same axis
        policies.append(build_policy({**values, **setting}))
    return list(dict.fromkeys(policies))


def build_policy(values: Mapping[str, Any]) -> Policy:
    """Make the policy whose class `_target_` names from the settings beside it."""
    settings = dict(values)
    cls = get_class(settings.pop("_target_"))
    return build(cls, "policy", settings)


def _policy_of_grid(name: str, config: DictConfig, composed: Mapping[str, Any]) -> dict[str, Any]:
    path = CONF / "policy" / f"{name}.yaml"
    if not path.is_file():
        choices = ", ".join(sorted(p.stem for p in path.parent.glob("*.yaml")))
        raise UserError(f"grid.policy={name} is unknown: choose from {choices}.")
    # Composed with the rest of the configuration, so that ${model.predictor} and the like find what they name.
    rest = OmegaConf.masked_copy(config, ["model", "benchmark", "results_dir"])
    whole = OmegaConf.merge(rest, {"policy": _policy_file(path)})
    values = _container(whole.policy)
    shared = {k: composed[k] for k in BudgetPolicy.SHARED if composed.get(k) is not None and k in values}
    return {**values, **shared}


def _policy_file(path: Path) -> DictConfig:
    """A policy's YAML over the files that its defaults list names, as Hydra composes it."""
    own = OmegaConf.load(path)
    assert isinstance(own, DictConfig)
    bases = [path.parent / f"{name}.yaml" for name in own.pop("defaults", []) if name != "_self_"]
    return OmegaConf.merge(*map(_policy_file, bases), own)  # type: ignore[return-value]


def check_predictors(model: ModelConfig, policies: Sequence[Policy]) -> None:
    """Refuse policies whose importance predictor was made for another model.

    Raises:
        UserError: there is one.
    """
    directories = {d for p in policies if (d := getattr(p, "predictor", None))}
    hidden_size = read_architecture(model).hidden_size
    for directory in directories:
        card = read_card(Path(directory))
        expected, weights = card["hidden_size"], model.identity()["weights"]
        if expected != hidden_size:
            raise UserError(
                f"policy.predictor={directory} was made for hidden size {expected}, but model={model.name} has "
                f"{hidden_size}: give a predictor made for this model."
            )
        made_for = card.get("model_weights", weights)
        # A hub id cannot be told from a local copy of the same weights, whose identity is a hash.
        if made_for != weights and ("@" in made_for) == ("@" in weights):
            raise UserError(
                f"policy.predictor={directory} was made for {card.get('model')} ({made_for}), but "
                f"model={model.name} is {weights}: give a predictor made for this model."
            )


def _implementation(name: Any) -> Implementation:
    try:
        check_installed(str(name))  # where a job is submitted from, there need be no GPU
    except ValueError as error:
        raise UserError(str(error)) from error
    return name
