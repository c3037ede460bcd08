"""The settings of the predictor pipeline, as `conf/predictor/*.yaml` and the command line give them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from hydra import compose, initialize_config_dir

from analysis.records import UserError
from harness.benchmarks.config import BenchmarkConfig
from harness.decode.request import DecodingConfig, build_decoding
from harness.models.config import ModelConfig
from harness.settings import build
from harness.sweep.job import CONF
from kernels.implementation import Implementation, check_available

LabelKind = Literal["answer", "far_max", "later"]
LABEL_KINDS: tuple[LabelKind, ...] = get_args(LabelKind)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a head is made.

    Attributes:
        out: directory of the traces, the labels and the heads.
        toy_problems: training problems of the toy tasks, if the traces are written on these.
        draws: completions per problem.
        import_from: a cell's folder or a JSONL of texts, to take traces from in place of writing them.
        impl: what the traces and the labels are computed with.
        open_tag: opens the thinking in imported texts; their closing tag is `close_tag`.
        min_distance: positions between a token and the queries that count for far_max and later.
        shard_mib: size of a file of hidden states.
        label: kinds whose standardised labels are added.
        widths: hidden widths of the head.
        batch: tokens a step.
        rank_weight: weight of the pairwise-rank term.
        held_out: one trace in so many is kept for eval.

    Raises:
        UserError: a value out of its range.
    """

    out: str
    toy_problems: int | None
    draws: int
    seed: int
    slots: int | None
    impl: Implementation
    import_from: str | None
    open_tag: str
    close_tag: str
    min_distance: int
    shard_mib: int
    label: list[LabelKind]
    widths: list[int]
    epochs: int
    lr: float
    weight_decay: float
    batch: int
    rank_weight: float
    held_out: int

    def __post_init__(self) -> None:
        check_available(self.impl)
        least = {"draws": 1, "min_distance": 1, "shard_mib": 1, "epochs": 1, "batch": 2, "held_out": 2}
        for name, lowest in least.items():
            if getattr(self, name) < lowest:
                raise UserError(f"{name}={getattr(self, name)} is out of range: it must be at least {lowest}.")
        if not self.label or len(set(self.label)) < len(self.label):
            raise UserError(f"label={self.label} cannot be used: name one or more of {', '.join(LABEL_KINDS)}.")
        if not self.lr > 0 or self.rank_weight < 0:
            raise UserError(f"lr={self.lr} must be above 0 and rank_weight={self.rank_weight} not below.")

    @property
    def directory(self) -> Path:
        """`out` as a path."""
        return Path(self.out)

    @property
    def head(self) -> Path:
        """Directory of the head that this label makes."""
        return self.directory / "_".join(self.label)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A recipe with the model and the decoding it is for; `benchmark` has the problems unless these are toy ones."""

    recipe: Recipe
    model: ModelConfig
    decoding: DecodingConfig
    benchmark: BenchmarkConfig | None


def read_plan(arguments: list[str]) -> Plan:
    """Compose `conf/predictor/<recipe>.yaml` with KEY=VALUE overrides and check it.

    Raises:
        UserError: a setting that is unknown or out of range.
    """
    chosen = [a.split("=", 1)[1] for a in arguments if a.startswith("recipe=")]
    name = chosen[-1] if chosen else "toy"
    if not (CONF / "predictor" / f"{name}.yaml").is_file():
        choices = ", ".join(sorted(p.stem for p in (CONF / "predictor").glob("*.yaml")))
        raise UserError(f"recipe={name} is unknown: choose from {choices}.")
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        config = compose(f"predictor/{name}", [a for a in arguments if not a.startswith("recipe=")])
    return Plan(
        recipe=build(Recipe, "predictor", config.recipe),
        model=build(ModelConfig, "model", config.model),
        decoding=build_decoding(config.decoding),
        benchmark=build(BenchmarkConfig, "benchmark", config.benchmark) if config.get("benchmark") else None,
    )
