"""A result says which code, packages, machine and command it comes from."""

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from kvsweep.harness import provenance


@pytest.fixture(autouse=True)
def fresh():
    for described in (provenance.describe_code, provenance.describe_hardware):
        described.cache_clear()
    yield
    for described in (provenance.describe_code, provenance.describe_hardware):
        described.cache_clear()


def git(folder: Path, *arguments: str) -> str:
    who = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    return subprocess.run(
        ["git", *who, *arguments], cwd=folder, capture_output=True, text=True, check=True
    ).stdout.strip()


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A repository of one commit in which the code is said to lie."""
    folder = tmp_path / "checkout"
    (folder / "harness").mkdir(parents=True)
    source = folder / "harness" / "provenance.py"
    source.write_text("")
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "one")
    monkeypatch.setattr(provenance, "__file__", str(source))
    return folder


def test_the_revision_of_a_clean_tree(checkout):
    described = provenance.describe_code()
    assert described["git_revision"] == git(checkout, "rev-parse", "HEAD")
    assert described["git_dirty"] is False


@pytest.mark.parametrize("name", ["harness/provenance.py", "harness/untracked.py"])
def test_a_changed_tree_is_dirty(name, checkout):
    (checkout / name).write_text("changed")
    assert provenance.describe_code()["git_dirty"] is True


def test_outside_a_checkout_there_is_no_revision(tmp_path, monkeypatch):
    monkeypatch.setattr(provenance, "__file__", str(tmp_path / "provenance.py"))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    described = provenance.describe_code()
    assert described["git_revision"] is None
    assert described["git_dirty"] is None


def test_without_git_there_is_no_revision(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert provenance.describe_code()["git_revision"] is None


def test_code_installed_into_another_repository_is_not_that_repository(checkout):
    """A virtual environment inside somebody's checkout: its revision says nothing about this code."""
    (checkout / ".gitignore").write_text("harness/\n")
    git(checkout, "rm", "-q", "--cached", "harness/provenance.py")
    git(checkout, "add", ".gitignore")
    git(checkout, "commit", "-q", "-m", "two")
    described = provenance.describe_code()
    assert described["git_revision"] is None
    assert described["git_dirty"] is None


def test_versions_and_machine():
    code, hardware = provenance.describe_code(), provenance.describe_hardware()
    assert code["packages"]["torch"] == version("torch")
    assert code["packages"]["transformers"] == version("transformers")
    assert code["python"] == ".".join(map(str, sys.version_info[:3]))
    assert hardware["processor"]
    assert isinstance(hardware["gpus"], list)
    json.dumps([code, hardware])


def test_what_is_not_installed_is_none(monkeypatch):
    monkeypatch.setattr(provenance, "_PACKAGES", ("torch", "no-such-package-anywhere"))
    assert provenance.describe_code()["packages"]["no-such-package-anywhere"] is None


def test_the_arithmetic_tells_settings_and_threads_apart():
    before = torch.get_num_threads()
    kinds = [("torch", "float32", True, 1), ("torch", "float32", True, 2), ("torch", "float32", False, 2)]
    kinds += [("torch", "bfloat16", False, 2), ("triton", "bfloat16", False, 2)]
    found = set()
    for impl, dtype, invariant, threads in kinds:
        torch.set_num_threads(threads)
        found.add(json.dumps(provenance.describe_arithmetic(invariant=invariant, impl=impl, dtype=dtype)))
    torch.set_num_threads(before)
    assert len(found) == len(kinds)


def test_a_run_records_where_it_comes_from(kvsweep, tiny, tiny_policy, tmp_path, write_problems):
    path = write_problems([{"id": "a", "problem": "1+1?", "answer": 2}, {"id": "b", "problem": "2+2?", "answer": 4}])
    arguments = [*tiny, *tiny_policy, f"benchmark.path={path}", "draws=2", f"results_dir={tmp_path / 'runs'}"]
    assert kvsweep(*arguments).code == 0
    [file] = (tmp_path / "runs/default").glob("*/provenance.json")
    recorded = json.loads(file.read_text())
    assert recorded["expected"] == 4
    assert recorded["draws"] == 2
    assert recorded["dataset_origin"] == str(path)
    assert recorded["config"]["policy"]["budget"] == 64
    assert recorded["config"]["policy"]["predictor"] == recorded["config"]["model"]["predictor"], "resolved"
    assert set(recorded["git"]) == {"revision", "dirty"}
    assert recorded["packages"]["torch"] == version("torch")
    [decoding_pass] = recorded["decoding_passes"]
    assert decoding_pass["command"][1:] == arguments
    assert decoding_pass["started"][:2] == "20"
    # All that the bits of a completion depend on beside the cell: these, the processor and the packages.
    assert decoding_pass["arithmetic"] == {
        "invariant": True,
        "impl": "torch",
        "dtype": recorded["config"]["model"]["dtype"],
        "threads": torch.get_num_threads(),
        "vector_instructions": torch.backends.cpu.get_cpu_capability(),
    }
    assert {"torch", "transformers", "triton"} <= decoding_pass["code"]["packages"].keys()
    assert decoding_pass["hardware"] == recorded["hardware"] == provenance.describe_hardware()
