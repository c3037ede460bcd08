"""The options of the attacks, their undisturbed run, and the table of what was tried.

pytest -m slow tests/attack                                     the short form, which `make slow` runs
pytest -m slow tests/attack --attack-long --attack-seed 3       every case of every attack
"""

import dataclasses
import random
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.attack.field import GRID, Command, Field, Tally


def pytest_addoption(parser: pytest.Parser):
    group = parser.getgroup("attack", "tests/attack, asked for by name")
    group.addoption("--attack-long", action="store_true", help="every case of every attack, and more kills")
    group.addoption("--attack-seed", type=int, default=0, metavar="S", help="seed of all that is random (0)")
    group.addoption("--attack-times", type=int, default=8, metavar="N", help="how many seeds of tampering (8)")


def pytest_configure(config: pytest.Config):
    config.addinivalue_line("markers", "drawn(name, cases, every): the short form tries each `every`-th case")


def is_long(config: pytest.Config) -> bool:
    """`make slow` does not name this folder; pytest then knows no options of it."""
    return bool(config.getoption("attack_long", False))


def pytest_generate_tests(metafunc: pytest.Metafunc):
    """Give a test its cases: all of them in the long form, else each `every`-th, beginning at the seed."""
    first = metafunc.config.getoption("attack_seed", 0)
    for mark in metafunc.definition.iter_markers("drawn"):
        name, cases, every = mark.args
        chosen = cases if is_long(metafunc.config) else cases[first % every :: every]
        metafunc.parametrize(name, chosen, ids=[case["name"] if isinstance(case, dict) else case for case in chosen])
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", range(first, first + metafunc.config.getoption("attack_times", 8)))


@pytest.fixture(scope="session")
def calm(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Field:
    """The undisturbed run, after this process has imported everything, so that a fork needs no import."""

    problems, tokens = (6, 160) if is_long(pytestconfig) else (3, 112)
    grid = [*GRID, f"benchmark.limit={problems}", f"decoding.max_new_tokens={tokens}"]
    scratch = tmp_path_factory.mktemp("calm")
    field = Field(scratch, grid, scratch / "calm", random.Random(0), is_long(pytestconfig), Tally())
    field.run("kvsweep", *field.sweep(field.calm), codes=[0])
    assert field.tally.is_clean, field.tally
    return field


@pytest.fixture(scope="session")
def lives(calm: Field) -> dict[bool, float]:
    """Seconds of the undisturbed run in an interpreter of its own (True), and in a fork of this process (False)."""

    def seconds(fresh):
        start = time.monotonic()
        words = calm.sweep(calm.scratch / f"life-{fresh}")
        assert Command("kvsweep", *words, cwd=calm.scratch, fresh=fresh).end().code == 0
        return time.monotonic() - start

    return {fresh: seconds(fresh) for fresh in (True, False)}


@pytest.fixture
def field(calm: Field, tmp_path: Path, request: pytest.FixtureRequest) -> Field:
    """A field of this test's own, whose dice follow from the seed and the test's name."""
    dice = random.Random(f"{request.config.getoption('attack_seed', 0)} {request.node.name}")
    field = dataclasses.replace(calm, scratch=tmp_path, dice=dice, tally=Tally())
    request.node.user_properties.append(("tally", vars(field.tally)))  # as it is when the test has ended
    return field


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter):
    """The table of results/published/attack.md."""
    reports = [*terminalreporter.getreports("passed"), *terminalreporter.getreports("failed")]
    tallies = dict[str, Tally]()
    for report in reports:
        for counts in _tallies(report.user_properties if report.when == "call" else ()):
            name = report.nodeid.partition("::test_")[2].partition("[")[0].replace("_", " ")
            tallies.setdefault(name, Tally()).add(counts)
    heads = [field.name.replace("_", " ") for field in dataclasses.fields(Tally)]
    for cells in [["attack", *heads], ["---"] * (len(heads) + 1)] * bool(tallies):
        terminalreporter.write_line("| " + " | ".join(cells) + " |")
    for name, tally in tallies.items():
        terminalreporter.write_line("| " + " | ".join(map(str, (name, *vars(tally).values()))) + " |")


def _tallies(properties: Iterable[tuple[str, object]]) -> list[Tally]:
    return [Tally(**value) for name, value in properties if name == "tally" and isinstance(value, dict)]
