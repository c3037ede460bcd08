"""Without the extra `engine` everything works that reads files alone, and what decodes is refused in one sentence."""

import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from kvsweep.messages import command_line
from kvsweep.messages.command_line import BAD_INPUT, ENGINE

ROOT = Path(__file__).resolve().parents[1]
JUDGED = Path(__file__).parent / "analysis/judged"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Python reads it at its start, in the processes that a command starts too.
SITECUSTOMIZE = """
from importlib.machinery import PathFinder
find, hidden = PathFinder.find_spec, {hidden!r}
PathFinder.find_spec = lambda name, *rest: None if name.partition(".")[0] in hidden else find(name, *rest)
"""


def installed_for(texts: list[str]) -> set[str]:
    """The packages that pip installs for these requirements, as those that are installed here declare theirs."""
    found, todo = set[str](), [Requirement(text) for text in texts]
    while todo:
        asked = todo.pop()
        name = canonicalize_name(asked.name)
        extras = {"", *asked.extras}
        if f"{name}{sorted(extras)}" in found:
            continue
        found |= {name, f"{name}{sorted(extras)}"}
        try:
            needed = [Requirement(text) for text in requires(name) or []]
        except PackageNotFoundError:  # for another system
            continue
        todo += [one for one in needed if not one.marker or any(one.marker.evaluate({"extra": e}) for e in extras)]
    return found


@pytest.fixture
def small(tmp_path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`small("report", "DIR")` runs the program in `tmp_path`, where only the base install's packages are there."""
    base = installed_for(PROJECT["dependencies"])
    owners = packages_distributions().items()
    hidden = {module for module, names in owners if not {canonicalize_name(name) for name in names} & base}
    assert {*ENGINE, "triton", "networkx", "hypothesis"} - hidden == {"tqdm"}  # which huggingface_hub needs
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(SITECUSTOMIZE.format(hidden=hidden - {"kvsweep"}))
    env = {**os.environ, "PYTHONPATH": f"{site}{os.pathsep}{ROOT / 'src'}", "PYTHONSAFEPATH": "1"}

    def run(*words: Any):
        command = [sys.executable, "-m", "kvsweep.cli", *map(str, words)]
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=False)

    return run


@pytest.mark.slow
def test_what_reads_files_alone_works(small, kvsweep, tmp_path):
    sweep = ["model=toy_qwen", "benchmark=toy_chain", "benchmark.limit=2", "policy=h2o", "policy.budget=96"]
    assert kvsweep(*sweep, f"results_dir={tmp_path}", "run_name=made").code == 0
    shutil.copytree(tmp_path / "made", tmp_path / "run")
    (cell,) = (path.parent.name for path in tmp_path.glob("run/*/DONE"))
    (tmp_path / f"run/{cell}/grades.jsonl").unlink()
    # The worker processes grade.
    for words, said in (
        (["grade", "run"], "2 rows, 2 graded now"),
        (["status", "run"], "1/1"),
        (["report", "run"], "report.html"),
        (["compare", "made", "run"], "A and B differ in 0 of 1 cell"),
        (["export", "run"], "run/export"),
        (["--cfg", "job"], "benchmark:"),
        (["init", "mine"], "made mine"),
        (["--help"], "kvsweep report"),
    ):
        ended = small(*words)
        assert ended.returncode == 0, ended.stderr
        assert said in ended.stdout, words
    assert "Toy-Qwen" in (tmp_path / "run/report/report.html").read_text()
    assert (tmp_path / f"run/export/data/{cell}.parquet").is_file()
    full, fp8 = (JUDGED / f"inspect_ai_0.3.285_{name}.json" for name in ("full", "fp8"))
    ended = small("judge", full, fp8)
    assert ended.returncode == command_line.UNCLEAR, ended.stderr
    assert "unclear" in ended.stdout


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        (["policy=h2o"], "kvsweep: error: a sweep"),
        (["-m", "experiment=demo", "launcher=local"], "kvsweep: error: a sweep"),
        (["replay", "run"], "kvsweep replay: error: a replay"),
        (["verify", "."], "kvsweep verify: error: a verification of completions"),
        (["predictor", "all"], "kvsweep predictor: error: a predictor"),
        (["trace", "live"], "kvsweep trace: error: a trace"),
    ],
    ids=str,
)
def test_what_is_missing_is_named_before_anything_is_written(words, asked, kvsweep, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    there = command_line.find_spec
    monkeypatch.setattr(command_line, "find_spec", lambda name: None if name == "datasets" else there(name))
    ended = kvsweep(*words)
    assert (ended.code, ended.out) == (BAD_INPUT, "")
    assert ended.err == f"{asked} needs datasets: pip install 'kvsweep[engine]'.\n"
    # Hydra writes down a multirun before it composes the first job.
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} <= {"multirun.yaml"}


def test_the_program_looks_for_the_packages_of_the_extra():
    needed = map(Requirement, PROJECT["optional-dependencies"]["engine"])
    assert [one.name for one in needed if not one.marker] == list(ENGINE), "triton is on Linux alone"
