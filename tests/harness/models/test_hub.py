"""Models and data sets from the hub: its own libraries, unpatched, against a server of its protocol on loopback."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from kvsweep.harness.models.config import ModelConfig
from kvsweep.harness.models.spec import read_architecture
from kvsweep.messages.errors import UserError
from tests.harness.models.hub import COMMIT, Hub, Repository, files_of

# Loads each place and prints a line: its number of layers, or the sentence.
MODELS = f"""
import sys
import transformers
from kvsweep.messages.errors import UserError
from kvsweep.harness.models.config import ModelConfig
from kvsweep.harness.models.load import load_model
for place in sys.argv[1:]:
    place, _, revision = place.partition("@")
    try:
        model = load_model(ModelConfig(name="tiny", title="", path=place, revision=revision or "{COMMIT}", threads=1))
        print("layers", model.spec.layers)
    except UserError as error:
        print(error)
"""
BENCHMARKS = f"""
import sys
from kvsweep.messages.errors import UserError
from kvsweep.harness.benchmarks.config import BenchmarkConfig
from kvsweep.harness.benchmarks.load import load_problems
from kvsweep.harness.settings import build, compose_config, plain
import datasets
for name in sys.argv[1:]:
    values = plain(compose_config(f"benchmark={{name}}").benchmark)
    try:
        pinned = {{**values, "revision": "{COMMIT}", "fallback": None}}
        found = load_problems(build(BenchmarkConfig, "benchmark", pinned))
        print(found.count, found.origin, found.problems[1].gold)
    except UserError as error:
        print(error)
"""
Run = Callable[..., list[str]]


def rows(count: int, problem: str) -> bytes:
    return "".join(
        json.dumps({"id": i, problem: f"{i}+{i}?", "answer": str(2 * i)}) + "\n" for i in range(count)
    ).encode()


@pytest.fixture(scope="module")
def hub(tiny_model_dir) -> Iterator[Hub]:
    model = files_of(tiny_model_dir)
    repositories = {
        "maker/tiny": Repository(model, broken={"model.safetensors"}),
        "maker/gated": Repository(model, status=403),
        "maker/private": Repository(model, status=401),
        "datasets/HuggingFaceH4/aime_2024": Repository({"train.jsonl": rows(30, "problem")}),
        "datasets/math-ai/amc23": Repository({"test.jsonl": rows(40, "question")}),
        "datasets/Idavidrein/gpqa": Repository({}, status=403),
    }
    with Hub(repositories) as server:
        yield server


@pytest.fixture(scope="module")
def run(hub, tmp_path_factory) -> Run:
    """Run a program against the hub; return the lines that it printed. All programs share one cache."""
    home = tmp_path_factory.mktemp("hub")

    def start(program, *places: str, endpoint=hub.url):
        clean = {name: value for name, value in os.environ.items() if not name.endswith("_OFFLINE")}
        environment = {**clean, "HF_ENDPOINT": endpoint, "HF_HOME": str(home), "NO_PROXY": "127.0.0.1"}
        hub.log.clear()
        ended = subprocess.run(
            [sys.executable, "-c", program, *places], env=environment, capture_output=True, text=True, timeout=300
        )
        assert ended.returncode == 0, ended.stderr
        assert "Retrying" not in ended.stderr
        return ended.stdout.splitlines()

    return start


NOWHERE = "http://127.0.0.1:9"  # the port of the discard protocol, at which nothing listens


@pytest.mark.slow  # three processes that import torch
@pytest.mark.release
def test_models_from_the_hub(hub, run):
    """A pinned download that breaks and is taken up again, gated and private places, a revision that is not there."""
    found = run(MODELS, "maker/tiny", "maker/gated", "maker/private", "maker/none", f"maker/tiny@{'f' * 40}")
    assert found[0] == "layers 2"
    downloads = [line for line in hub.log if line.startswith("GET") and "model.safetensors" in line]
    assert len(downloads) == 2
    assert all(COMMIT in line for line in downloads)
    assert "cannot be loaded from maker/gated: it is gated: accept its terms" in found[1]
    for line in found[2:4]:
        assert "it is not on the hub or not open to you: check the name, or run `hf auth login`" in line
    assert f"it has no revision {'f' * 40}" in found[4]
    # What a commit pins and the cache holds is not asked for again, with the hub or without it.
    again = run(MODELS, "maker/tiny")
    assert again[0] == "layers 2"
    assert hub.log == []
    offline = run(MODELS, "maker/tiny", "maker/other", endpoint=NOWHERE)
    assert offline[0] == "layers 2"
    assert "the hub cannot be reached, and its cache on this disk lacks it: check the network" in offline[1]


@pytest.mark.slow
def test_benchmarks_from_the_hub(run):
    """The data sets' own loader: two benchmarks, a gated one, and all of them again from the cache alone."""
    wanted = [f"30 HuggingFaceH4/aime_2024@{COMMIT}, split train 2", f"40 math-ai/amc23@{COMMIT}, split test 2"]
    found = run(BENCHMARKS, "aime24", "amc23", "gpqa_diamond")
    assert found[:2] == wanted
    assert "is gated; accept its terms on its hub page" in found[2]
    offline = run(BENCHMARKS, "aime24", "amc23", "hmmt_feb25", endpoint=NOWHERE)
    assert offline[:2] == wanted
    assert "cannot be reached and is not in the local cache" in offline[2]


@pytest.mark.parametrize("place", ["/nodir", "nodir/", "a/b/c", "~/models"])
def test_a_place_that_is_neither_a_folder_nor_an_id(place):
    with pytest.raises(UserError, match="is no folder, and no id on the hub"):
        read_architecture(ModelConfig(name="a", title="", path=place))


def test_a_dry_run_of_a_model_that_was_never_downloaded(kvsweep, write_problems, tmp_path, monkeypatch):
    """Its sizes are in its YAML; transformers and the network are not needed."""
    monkeypatch.setattr("kvsweep.harness.models.spec.read_architecture", None)
    problems = write_problems([{"id": 1, "problem": "1+1?", "answer": 2}])
    policy = ["policy=window", "policy.budget=4000", "policy.local_window=500"]
    ended = kvsweep(
        "--dry-run", "model=r1_qwen_7b", f"benchmark.path={problems}", *policy, f"results_dir={tmp_path}/runs"
    )
    assert ended.code == 0, ended.err
    assert "28 layers x 4 heads x 128 x 2 bytes" in ended.out
