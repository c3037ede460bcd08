"""The policies of a grid: the product of its axes; each policy has the settings that all policies share."""

import itertools
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, TypeVar

from omegaconf import DictConfig, OmegaConf
from pydantic import Field

from kvsweep.compression.policy import BudgetPolicy, Policy, Question, SizeInRows
from kvsweep.harness import settings
from kvsweep.messages.checked import checked
from kvsweep.messages.errors import UserError

_T = TypeVar("_T")
_Axis = Annotated[Sequence[_T], Field(min_length=1)] | None


@dataclass(frozen=True, kw_only=True)
class Axes:
    """The axes of a grid; None uses the single value in `policy`."""

    policy: _Axis[str] = None
    keep_ratio: _Axis[float] = None
    local_window: _Axis[int] = None
    budget: _Axis[int] = None
    question: _Axis[Question] = None
    sinks: _Axis[int] = None


@dataclass(frozen=True, kw_only=True)
class GridAxes(Axes):
    """A grid with those beside it."""

    engine: Any = None  # read by `Served.choose`
    beside: Sequence[dict[str, Any]] = ()  # the `Axes` of each


AXES = ("keep_ratio", "local_window", "budget", "question", "sinks")


def build_policies(config: DictConfig) -> list[Policy]:
    """Make every policy of the grid and of the grids beside it, or the one policy if there is no grid.

    The composed `policy` gives the settings that all policies of a grid share (keep_ratio, local_window, budget, rows,
    every, question, sinks), so that their caches have the same size. Each policy's own YAML gives all other settings,
    and shared settings that are null in the composed policy.
    """
    _check_names()
    grid = settings.build(GridAxes, "grid", config.grid)
    policies = list(_policies(grid, config))
    for inner in grid.beside:
        policies += _policies(settings.build(Axes, "grid.beside", inner), config)
    return list(dict.fromkeys(policies))  # equal ones once, in their order


def _hashable(policy: Policy) -> Policy:
    """Return the policy; raises UserError if a setting has a value that may change, such as a list."""
    for field in fields(policy):
        value = getattr(policy, field.name)
        if not isinstance(value, Hashable):
            raise UserError(
                f"policy.{field.name}={value!r:.60} is a {type(value).__name__}, which may change: "
                f"annotate the field of {type(policy).__name__} as tuple[...], or make a setting of each value."
            )
    return policy


def _policies(grid: Axes, config: DictConfig) -> Iterator[Policy]:
    """Yield the product of one grid's axes."""
    composed = settings.plain(config.policy)
    _refuse_two_sizes(composed, grid, config)
    axes = {axis: getattr(grid, axis) for axis in AXES if getattr(grid, axis) is not None}
    for name in grid.policy or [composed["name"]]:
        if name == composed["name"]:
            _check_class(composed)
            values = composed
        else:
            values = _policy_of_grid(name, config, composed)
        for point in itertools.product(*axes.values()):
            # A policy without the setting of an axis, such as the full cache, comes out equal at each of its values.
            on_axes = {axis: value for axis, value in zip(axes, point, strict=True) if axis in values}
            sized = _sized({**values, **on_axes})
            yield _hashable(settings.build_target("policy", sized, Policy))


def _check_names() -> None:
    """Refuse files in the user's conf/policy whose `name` differs from the file name."""
    for name, path in settings.own_conf_files("policy").items():
        given = policy_file(name).get("name")
        if given != name:
            raise UserError(
                f"{path} has the name {given}, under which its results would stand: write `name: {name}`, "
                f"or name the file {given}.yaml."
            )


def _check_class(policy: Mapping[str, Any]) -> None:
    """Refuse a composed policy with the name of another class's file, because results are stored under the name."""
    name = policy["name"]
    cls = settings.target_class("policy", policy, Policy)
    names = settings.choices("policy")
    if name in names:
        cls_of_file = settings.target_class("policy", policy_file(name), Policy)
        if cls is not cls_of_file:
            differs = f"is the name of {cls_of_file.__qualname__}, not of {cls.__qualname__}"
            raise UserError(
                f"policy.name={name} {differs}: leave policy.name out, "
                "or give a policy of your own a file in conf/policy."
            )
        return
    # A class without a file, given by policy._target_, may have any name that is a word.
    if not name.isidentifier():
        raise UserError(f"policy.name={name} is no word: give one of letters, digits and _.")
    classes_with_file = (settings.target_class("policy", policy_file(other), Policy) for other in names)
    if cls in classes_with_file:
        raise UserError(
            f"policy.name={name} is no file of conf/policy, and {cls.__qualname__} has one: leave policy.name out."
        )


def _refuse_two_sizes(composed: Mapping[str, Any], grid: Axes, config: DictConfig) -> None:
    """Refuse keep_ratio or budget beside rows and every, unless it is the default value."""
    if composed.get("rows") is None and composed.get("every") is None:
        return
    defaults = _policy_section("base/budget", config)
    for name in ("keep_ratio", "budget"):
        axis = getattr(grid, name)
        given = f"grid.{name}={axis}" if axis else f"policy.{name}={composed[name]}"
        if axis or composed[name] not in (None, defaults[name]):
            raise UserError(
                f"{given} contradicts policy.rows and policy.every, which say the same: leave one of them out."
            )


def _sized(policy: Mapping[str, Any]) -> dict[str, Any]:
    """Return a policy's settings, with keep_ratio and budget instead of rows and every, if these are given."""
    rest = dict(policy)
    rows, every = rest.pop("rows", None), rest.pop("every", None)
    if rows is None and every is None:
        return rest
    if rows is None or every is None:
        name = "every" if rows is None else "rows"
        raise UserError(f"policy.{name} is given alone: policy.rows and policy.every go together.")
    size = checked(SizeInRows, {"rows": rows, "every": every, "local_window": rest["local_window"]}, "policy.")
    return rest | size.settings()


def _policy_of_grid(name: str, config: DictConfig, composed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a policy that a grid names: those of its file, shared ones from the composed policy."""
    if name not in settings.choices("policy"):
        raise UserError(settings.unknown_choice("policy", name, "grid.policy"))
    values = settings.plain(_policy_section(name, config))
    for shared in BudgetPolicy.SHARED:
        if shared in values and composed.get(shared) is not None:
            values[shared] = composed[shared]
    return values


def _policy_section(name: str, config: DictConfig) -> DictConfig:
    """Put a policy's section into the configuration, so that ${model.predictor} and others resolve."""
    rest = OmegaConf.masked_copy(config, ["model", "benchmark", "results_dir"])  # all that a policy's file refers to
    return OmegaConf.unsafe_merge(rest, {"policy": policy_file(name)}).policy


def policy_file(name: str) -> DictConfig:
    """Return a policy's YAML merged over the files of its defaults list, as Hydra composes it."""
    # A base, such as base/budget, lies in a folder below, and is no choice.
    path = settings.conf_files("policy").get(name, settings.CONF / "policy" / f"{name}.yaml")
    values = OmegaConf.load(path)
    assert isinstance(values, DictConfig)
    bases = [policy_file(base) for base in values.pop("defaults", []) if base != "_self_"]
    return OmegaConf.unsafe_merge(*bases, values)  # type: ignore[return-value]
