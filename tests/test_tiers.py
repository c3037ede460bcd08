"""`make test` stays short: a case has a budget of processor time, and few cases are free of it (tests/conftest.py)."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CASES = """
import subprocess, sys
import pytest
import tests.conftest

tests.conftest.BUDGET = 0.001  # any processor takes longer

def count():
    for _ in range(10_000_000):
        pass

def test_counts():
    count()

def test_starts_a_process():
    subprocess.run([sys.executable, "-c", "for _ in range(10_000_000): pass"])

@pytest.mark.{mark}
def test_is_marked():
    count()

def test_is_quick():
    pass
"""


@pytest.mark.slow
@pytest.mark.parametrize("mark", ["slow", "core"])
def test_a_case_above_the_budget_fails_with_a_sentence_and_a_marked_one_passes(mark, tmp_path):
    (tmp_path / "test_cases.py").write_text(CASES.format(mark=mark))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "-p", "no:cacheprovider", "--dearest", "2"]
    command += ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path), str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert "2 failed, 2 passed" in ended.stdout, ended.stdout
    failed = set(re.findall(r"test_cases\.py::(\w+) took \d+\.\d s of processor time", ended.stdout))
    assert failed == {"test_counts", "test_starts_a_process"}
    assert "make it cheaper, mark it slow, or core" in ended.stdout
    # The two dearest are among the three that count.
    dearest = re.findall(r"s of processor +\d+\.\d s  test_cases\.py::(\w+)", ended.stdout)
    assert len(dearest) == 2
    assert "test_is_quick" not in dearest


PRODUCTS = """
import pytest

@pytest.mark.covers(1)
@pytest.mark.slow_covers(2)
@pytest.mark.parametrize("a", [1, 2, 3])
@pytest.mark.parametrize("b", "xy")
@pytest.mark.parametrize("c", "uvw")
def test_product(a, b, c):
    pass

@pytest.mark.slow
@pytest.mark.release_unless(rule=lambda name: name < 7)
@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", range(8))
def test_list(name):
    pass
"""


@pytest.mark.parametrize(
    ("tier", "product", "of_list"),
    [
        ("not slow and not release", 3, []),  # each value once
        ("slow and not release", 9, [0, 3, 6]),  # each pair once, and the pairs of a with c are nine
        ("release", 18 - 3 - 9, [1, 2, 4, 5, 7]),
    ],
)
def test_a_product_is_spread_over_the_three_tiers(tier, product, of_list, tmp_path):
    (tmp_path / "test_products.py").write_text(PRODUCTS)
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "tests.conftest", "-p", "no:cacheprovider"]
    command += ["-m", tier, "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path), str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert ended.stdout.count("::test_product[") == product
    assert [int(name) for name in re.findall(r"::test_list\[(\d)\]", ended.stdout)] == of_list


def test_few_cases_are_free_of_the_budget(request):
    core = [item for item in request.session.items if item.get_closest_marker("core")]
    assert len([item for item in core if not item.get_closest_marker("slow")]) <= 15


def test_a_few_cases_meet_every_combination_of_a_product():
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
