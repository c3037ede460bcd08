"""A section of the configuration becomes its dataclass, or one sentence that names the value and the allowed range."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from kvsweep.compression.policies.baselines import Window
from kvsweep.compression.policy import Policy
from kvsweep.errors import UserError
from kvsweep.harness.settings import build, build_target, compose_config, plain_config_errors


@dataclass(frozen=True, kw_only=True)
class Example:
    ratio: Annotated[float, Field(gt=0, le=1, description="the fraction kept")] = 0.5
    count: Annotated[int, Field(ge=1)] = 1
    threads: Annotated[int, Field(ge=1, description="a number of threads")] | None = None
    values: Annotated[Sequence[Annotated[float, Field(ge=0, lt=2)]], Field(min_length=1)] | None = None
    name: Literal["a", "b"] = "a"

    def __post_init__(self) -> None:
        if self.name == "b" and self.count > 3:
            raise ValueError(f"example.count={self.count} is too many for b.")


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"ratio": 1.5}, "example.ratio=1.5 is out of range: it is the fraction kept, above 0 and at most 1."),
        ({"ratio": float("nan")}, "example.ratio=nan is out of range: it is the fraction kept, above 0 and at most 1."),
        ({"count": 0}, "example.count=0 is out of range: it must be at least 1."),
        ({"threads": 0}, "example.threads=0 is out of range: it is a number of threads, at least 1, or null."),
        ({"values": [1, 2]}, "example.values.1=2 is out of range: it must be at least 0 and below 2, or null."),
        ({"values": []}, "example.values=[] has too few values: name at least 1."),
        ({"name": "b", "count": 4}, "example.count=4 is too many for b."),
        ({"length": 1}, "example.length is not a setting: example has ratio, count, threads, values, name."),
    ],
)
def test_a_refusal(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError) as refused:
        build(Example, "example", settings)
    assert str(refused.value) == sentence


@pytest.mark.parametrize("settings", [{"count": "many"}, {"count": 1.5}, {"count": None}, {"name": "c"}])
def test_another_type_names_the_setting_and_the_value(settings: dict[str, Any]) -> None:
    [(name, value)] = settings.items()
    with pytest.raises(UserError, match=rf"^example\.{name}='?{value}'? .*\.$"):
        build(Example, "example", settings)


def test_the_ends_of_a_range_are_taken() -> None:
    assert build(Example, "example", {"ratio": 1, "count": 1, "values": [0]}).ratio == 1.0
    assert build(Example, "example", {"threads": None, "values": None}) == Example()


@pytest.mark.parametrize(
    ("path", "fault"),
    [
        ("os.system", "is no policy"),
        ("json.JSONDecoder", "is no policy"),
        ("kvsweep.harness.benchmarks.config.BenchmarkConfig", "is no policy"),
        ("kvsweep.compression.policies.baselines.Nothing", "is no policy"),
        ("no_such_module.Mine", "cannot be imported (No module named 'no_such_module')"),
        ("no_module", "cannot be imported (Empty module name)"),
        (None, "cannot be imported (Empty module name)"),
    ],
)
def test_a_target_that_is_no_policy(path: str | None, fault: str) -> None:
    with pytest.raises(UserError) as caught:
        build_target("policy", {"_target_": path, "budget": 64}, Policy)
    wanted = "name a dataclass that extends kvsweep.compression.policy.Policy."
    assert str(caught.value) == f"policy._target_={path} {fault}: {wanted}"


def test_a_target_that_is_a_policy() -> None:
    settings = {"name": "window", "budget": 64, "keep_ratio": 0.5, "local_window": 8}
    path = f"{Window.__module__}.{Window.__qualname__}"
    assert build_target("policy", {"_target_": path, **settings}, Policy) == Window(**settings)


@pytest.mark.parametrize("sign", ["\u2028", "½", "#"])
def test_a_sign_that_only_quotes_can_hold(sign: str) -> None:
    with pytest.raises(UserError) as caught, plain_config_errors():
        compose_config(f"benchmark.path=a{sign}b.jsonl")
    shown = sign.replace("\u2028", r"\u2028")
    assert str(caught.value) == (
        f"benchmark.path=a{shown}b.jsonl has a sign that a value without quotes "
        """cannot have: write 'KEY="VALUE"', with quotes around the value too."""
    )
    assert compose_config(f'benchmark.path="a{sign}b.jsonl"').benchmark.path == f"a{sign}b.jsonl"
