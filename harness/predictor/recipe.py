"""The settings of the predictor pipeline, from `conf/predictor/*.yaml` and the command line."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from kvsweep.harness.benchmarks.config import BenchmarkConfig
from kvsweep.harness.decode.request import DecodingConfig, build_decoding
from kvsweep.harness.models.config import ModelConfig
from kvsweep.harness.settings import build, choices, compose_config, plain_config_errors
from kvsweep.harness.toy.tasks import BENCHMARKS, TASKS
from kvsweep.kernels.implementation import Implementation, check_available
from kvsweep.messages.errors import UserError

if TYPE_CHECKING:
    from kvsweep.harness.models.loaded import LoadedModel

# `kernels.reference.importance_labels` defines all three.
LabelKind = Literal["answer", "far_max", "later"]
LABEL_KINDS: tuple[LabelKind, ...] = get_args(LabelKind)
# `labels.target` defines all three.
Target = Literal["standardised", "power", "linear"]
AtLeastTwo = Annotated[int, Field(ge=2)]
Share = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True, kw_only=True)
class WholeTraces:
    """How a head learns from batches of whole traces. `conf/predictor/r1.yaml` has each field's released value."""

    ranks: PositiveInt
    micro_batch: PositiveInt
    heavy: Annotated[list[float], Field(min_length=2, max_length=2)]
    heavy_weight: NonNegativeFloat
    clip: PositiveFloat
    betas: Annotated[list[Share], Field(min_length=2, max_length=2)]
    warm_up: Share
    first_spread: PositiveFloat
    dtype: Literal["float32", "bfloat16"]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The settings of the stages that make a predictor. `conf/predictor/base/recipe.yaml` describes each field."""

    out: Path
    toy_problems: PositiveInt | None
    toy_tasks: Annotated[list[str], Field(min_length=1)]
    draws: PositiveInt
    seed: int
    slots: PositiveInt | None
    impl: Implementation
    import_from: str | None
    text: str | None
    open_tag: str | None
    close_tag: str | None
    min_distance: PositiveInt
    lead: NonNegativeInt
    shard_mib: PositiveInt
    label: Annotated[list[LabelKind], Field(min_length=1)]
    target: Target | None
    widths: list[PositiveInt]
    epochs: PositiveInt
    lr: PositiveFloat
    weight_decay: NonNegativeFloat
    batch: AtLeastTwo
    rank_weight: NonNegativeFloat
    held_out: AtLeastTwo | None
    whole_traces: WholeTraces | None

    def __post_init__(self) -> None:
        check_available(self.impl)
        tasks = (*TASKS, *BENCHMARKS["words"])
        if not set(self.toy_tasks) <= set(tasks):
            raise UserError(
                f"recipe.toy_tasks={self.toy_tasks} names an unknown task: choose among {', '.join(tasks)}."
            )
        if self.text is not None and not Path(self.text).is_file():
            raise UserError(f"recipe.text={self.text} is no file: give a text, or null for the texts of the traces.")
        self._check_target()

    def _check_target(self) -> None:
        """Refuse a target that does not fit the labels, and settings that exclude each other."""
        if self.target is None:
            raise UserError(
                "recipe.target= is not set, and DynTS has power (10 / 0.3 * x ** 0.3) and linear (10,000 * x): "
                "name model=r1_qwen_7b or r1_llama_8b, or choose the scale for another model."
            )
        if self.target != "standardised" and len(self.label) > 1:
            raise UserError(
                f"recipe.target={self.target} scales one kind of label, not recipe.label={self.label}: "
                "name one kind, or take recipe.target=standardised."
            )
        whole = self.whole_traces
        if whole and self.rank_weight:
            raise UserError(
                f"recipe.rank_weight={self.rank_weight} is of batches of tokens, and recipe.whole_traces is set: "
                "choose recipe.rank_weight=0 or recipe.whole_traces=null."
            )
        if whole and self.batch % (whole.ranks * whole.micro_batch):
            raise UserError(
                f"recipe.batch={self.batch} traces are no whole micro-batches of {whole.micro_batch} "
                f"for each of {whole.ranks} ranks: choose a multiple."
            )

    @property
    def labels(self) -> Path:
        return self.out / "cache"

    @property
    def manifest(self) -> Path:
        """The file that names the label shards' traces and model."""
        return self.labels / "cache.json"

    @property
    def head(self) -> Path:
        return self.out / "_".join(self.label)


@dataclass(frozen=True, kw_only=True)
class PredictorSettings:
    """A recipe with its model and decoding, and the benchmark of its problems, if any."""

    recipe: Recipe
    model: ModelConfig
    decoding: DecodingConfig
    benchmark: BenchmarkConfig | None

    @cached_property
    def loaded(self) -> "LoadedModel":
        """The model, loaded when the first stage needs it, after that stage's input."""
        from kvsweep.harness.models.load import load_model

        return load_model(self.model)


@plain_config_errors()
def read_settings(arguments: Sequence[str]) -> PredictorSettings:
    """Compose conf/predictor/<recipe>.yaml (default: the model's, else toy) with overrides; refuse wrong ones.

    With a model that the DynTS paper's code names, recipe=r1 is the model's own file, which adds the target.
    """
    model = recipe = None  # the names behind model= and recipe=
    overrides = []
    for argument in arguments:
        key, _, value = argument.partition("=")
        if key == "recipe":  # the name of the file, and no key in it
            recipe = value
            continue
        if key == "model":
            model = value
        overrides.append(argument)
    recipes = choices("predictor")
    if recipe is None:
        recipe = model if model in recipes else "toy"
    if recipe not in recipes:
        raise UserError(f"recipe={recipe} is unknown: choose from {', '.join(recipes)}.")
    # Only the r1 recipes leave `toy_problems` out, so another would ignore a benchmark.
    if not recipe.startswith("r1") and any(argument.startswith("benchmark") for argument in overrides):
        raise UserError(
            f"recipe={recipe} makes its own problems (recipe.toy_problems), and recipe=r1 takes a benchmark's: "
            "leave benchmark out, or add recipe=r1."
        )
    if recipe == "r1" and model in recipes and model.startswith("r1_"):
        recipe = model
    config = compose_config(*overrides, name=f"predictor/{recipe}")
    # conf/predictor/r1.yaml leaves out the file, which only the stage that writes traces needs.
    benchmark = config.get("benchmark")
    names_problems = benchmark and (benchmark.path is not None or benchmark.source != "file")
    return PredictorSettings(
        recipe=build(Recipe, "recipe", config.recipe),
        model=build(ModelConfig, "model", config.model),
        decoding=build_decoding(config.decoding),
        benchmark=build(BenchmarkConfig, "benchmark", benchmark) if names_problems else None,
    )


def read_manifest(settings: PredictorSettings, path: Path, stage: str) -> dict[str, Any]:
    """Read a stage's manifest; raises UserError if it is missing, broken or of another model."""
    try:
        manifest = json.loads(path.read_bytes())
        weights = manifest["model"]["weights"]
    except FileNotFoundError:
        raise UserError(f"{path} does not exist: run kvsweep predictor {stage} first.") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UserError(f"{path} is broken: delete {path.parent} or set recipe.out=.") from None
    if weights != settings.model.identity()["weights"]:
        raise UserError(
            f"{path} names other weights than those of model={settings.model.name}: "
            f"choose that model, delete {path.parent} or set recipe.out=."
        )
    return manifest
