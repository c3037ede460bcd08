"""`make test` stays short: a case has a budget of processor time, and few cases are free of it (tests/conftest.py)."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CASES = """
import subprocess, sys, time
import pytest

def test_sleeps():
    time.sleep(5)

def test_starts_a_process():  # counts for 8 s of a quiet processor, as the budget's yardstick does
    subprocess.run([sys.executable, "-c", "def count():\\n for _ in range(320_000_000): pass\\ncount()"])

@pytest.mark.{mark}
def test_is_marked():
    time.sleep(5)

def test_is_quick():
    pass
"""


@pytest.mark.slow
@pytest.mark.parametrize("mark", ["slow", "core"])
def test_a_case_above_the_budget_fails_with_a_sentence_and_a_marked_one_passes(mark: str, tmp_path: Path) -> None:
    (tmp_path / "test_cases.py").write_text(CASES.format(mark=mark))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "-p", "no:cacheprovider"]
    command += ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path), str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert "2 failed, 2 passed" in ended.stdout, ended.stdout
    assert "test_cases.py::test_sleeps took 5." in ended.stdout
    [seconds] = set(re.findall(r"test_cases\.py::test_starts_a_process took (\d+\.\d) s of", ended.stdout))  # CI: twice
    assert 4.5 < float(seconds) < 20
    assert (
        "of processor time and sleep; the budget of a case is 1.5 s: make it cheaper, mark it slow, or core"
        in ended.stdout
    )


@pytest.mark.covers(1)
@pytest.mark.parametrize("a", [1, 2, 3])
@pytest.mark.parametrize("b", "xy")
def test_pytest_knows_the_product(a: int, b: str, request: pytest.FixtureRequest) -> None:
    of_this = [item for item in request.session.items if item.name.startswith("test_pytest_knows_the_product")]
    if len(of_this) == 6 or request.node.get_closest_marker("slow"):
        return  # all of them are asked for
    assert len(of_this) == 3


def test_few_cases_are_free_of_the_budget(request: pytest.FixtureRequest) -> None:
    core = [item for item in request.session.items if item.get_closest_marker("core")]
    assert len([item for item in core if not item.get_closest_marker("slow")]) <= 15


def test_a_few_cases_meet_every_combination_of_a_product() -> None:
    from types import SimpleNamespace
    from typing import Any

    from tests.conftest import covering

    product = [{"a": a, "b": b, "same_as_b": b, "c": c} for a in range(3) for b in range(4) for c in range(5)]
    cases: list[Any] = [SimpleNamespace(callspec=SimpleNamespace(params=row)) for row in product]
    for strength, most in ((1, 5), (2, 25), (3, 60)):
        chosen = [case.callspec.params for case in covering(cases, strength)]
        assert len(chosen) <= most
        for names in (("a", "b"), ("a", "c"), ("b", "c")) if strength == 2 else [("a",), ("b",), ("c",)]:
            assert {tuple(row[name] for name in names) for row in chosen} == {
                tuple(row[name] for name in names) for row in product
            }
