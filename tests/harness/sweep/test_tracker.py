"""A tracker follows a run and can neither break, hold up nor change the run."""

import json
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest

from kvsweep.analysis.load import load_run
from kvsweep.analysis.statistics.metrics import cell_metrics
from kvsweep.harness.decode.engine import Engine
from kvsweep.harness.settings import build
from kvsweep.harness.sweep.job import UNTRACKED, TrackerConfig, make_job
from kvsweep.harness.sweep.tracker import TRACKERS
from kvsweep.messages.errors import UserError
from kvsweep.run_files.row_types import read_rows

ROOT = Path(__file__).resolve().parents[3]
KINDS = tuple(TRACKERS)
FIRST_KIND = pytest.mark.slow_unless(rule=lambda kind: kind == KINDS[0])


# Stands in for each of the packages: writes what its runs are told to a file, a line each, after `BEFORE` has run.
FAKE = """
import json, os, pathlib, time
from types import SimpleNamespace

def told(*words):
    with open(os.environ["TOLD"], "a") as file:
        file.write(json.dumps(words) + "\\n")

def init(**settings):
    exec(os.environ.get("BEFORE", ""))
    told(settings["name"], "open", settings)
    return SimpleNamespace(
        log=lambda values, step: told(settings["name"], "log", step, values),
        finish=lambda exit_code=0: told(settings["name"], "ok", exit_code == 0),
    )

class MlflowClient:
    def get_experiment_by_name(self, name):
        return SimpleNamespace(experiment_id=name) if name == "known" else None

    def create_experiment(self, name):
        return name

    def create_run(self, experiment, run_name, tags):
        init(project=experiment, name=run_name, **tags)
        return SimpleNamespace(info=SimpleNamespace(run_id=run_name))

    def log_param(self, run, key, value):
        told(run, "param", key, value)

    def log_metric(self, run, key, value, step):
        told(run, "log", step, {key: value})

    def set_terminated(self, run, status):
        told(run, "ok", status == "FINISHED")
"""


class FakeTracker:
    """The stand-in, and what its runs were told."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch):
        self._set, self._told = monkeypatch.setenv, directory / "told.jsonl"
        packages = directory / "packages"
        packages.mkdir()
        for kind in KINDS:
            (packages / f"{kind}.py").write_text(FAKE)
        monkeypatch.syspath_prepend(str(packages))
        monkeypatch.setenv("TOLD", str(self._told))

    def before(self, statement: str):
        """Run this statement when a run is opened."""
        self._set("BEFORE", statement)

    @property
    def runs(self) -> list[dict[str, Any]]:
        """The runs in the order of their opening."""
        found: dict[str, dict[str, Any]] = {}
        for line in self._told.read_text().splitlines() if self._told.exists() else []:
            name, verb, *rest = json.loads(line)
            if verb == "open":
                found[name] = {"logged": {}, "params": {}, "ok": None, **rest[0]}
            elif verb == "log":
                found[name]["logged"].setdefault(rest[0], {}).update(rest[1])
            elif verb == "param":
                found[name]["params"][rest[0]] = rest[1]
            else:
                found[name]["ok"] = rest[0]
        return list(found.values())

    def last(self, run: dict[str, Any]) -> dict[str, float]:
        """The values of a run at its last step."""
        return run["logged"][max(run["logged"])]


@pytest.fixture
def fake(tmp_path, monkeypatch):
    monkeypatch.setattr("kvsweep.harness.sweep.tracker.PAUSES_S", (0.0, 0.0))
    return FakeTracker(tmp_path, monkeypatch)


@pytest.fixture
def command(kvsweep, tiny, tiny_policy, tmp_path, monkeypatch):
    """`command(*overrides, run=NAME)`: two cells of the tiny model."""
    monkeypatch.chdir(tmp_path)

    def run(*overrides, run="default"):
        grid = ["benchmark=toy_add", "grid.policy=[full,random]", f"results_dir={tmp_path / 'runs'}", f"run_name={run}"]
        return kvsweep(*tiny, *tiny_policy, *grid, *overrides)

    return run


@pytest.mark.parametrize("kind", KINDS)
@FIRST_KIND
def test_each_cell_tells_its_settings_progress_and_result(kind, command, fake, tmp_path):
    ended = command(f"tracker={kind}", "tracker.project=known", "tracker.interval_s=0.05")
    assert ended.code == 0, ended.err
    assert sorted(run["name"] for run in fake.runs) == ["toy_qwen toy_add full", "toy_qwen toy_add random 0.4 w8 b64"]
    for run in fake.runs:
        assert (run["project"], run["group"], run["ok"]) == ("known", "default", True)
        config = run.get("config") or run["params"]
        assert list(run["logged"]) == list(range(1, len(run["logged"]) + 1))
        assert len(run["logged"]) > 1
        last = fake.last(run)
        assert (last["completions"], last["progress"]) == (3, 1.0)
        assert last["tokens_per_second"] > 0
        grades = [*read_rows(tmp_path / "runs/default" / config["cell_id"] / "grades.jsonl", dict)]
        shares = {o: sum(g["outcome"] == o for g in grades) / 3 for o in ("truncated", "wrong", "no_answer")}
        assert {name: last[name] for name in shares} == shares
        assert last["pass_at_1"] == sum(g["correct"] for g in grades) / 3
        assert last["kv_bytes_allocated"] > 0
        assert last["kept_memory_own"] == 1.0 if "full" in run["name"] else 0 < last["kept_memory_own"] < 1
    settings = fake.runs[0].get("config")
    if settings is None:
        assert fake.runs[0]["params"]["model.name"] == "toy_qwen"
    else:
        assert settings["model"]["name"] == "toy_qwen"


@pytest.mark.slow
def test_the_report_says_the_same_of_memory(command, fake, tmp_path):
    command("tracker=wandb")
    metrics = cell_metrics(load_run(tmp_path / "runs/default")).set_index("cell_id")
    for run in fake.runs:
        of_report = metrics.loc[run["config"]["cell_id"]]
        last = fake.last(run)
        for name in ("kept_memory_own", "pass_at_1", "truncated", "kv_bytes_allocated"):
            assert last[name] == pytest.approx(of_report[name])


@pytest.mark.slow
def test_a_tracker_changes_no_cell_and_no_completion(command, fake, tmp_path, read_completions):
    command(run="plain")
    command("tracker=wandb", "tracker.interval_s=0.01", run="tracked")
    plain = read_completions(tmp_path / "runs/plain")
    assert plain == read_completions(tmp_path / "runs/tracked")
    assert len(plain) == len(fake.runs) == 2


# --- What goes wrong ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@FIRST_KIND
def test_an_error_of_the_tracker_is_told_once_and_costs_nothing(kind, command, fake, tmp_path, kvsweep):
    fake.before("raise RuntimeError('no route')")
    ended = command(f"tracker={kind}")
    assert ended.code == 0, ended.err
    assert ended.err.count(f"note: tracker={kind} gets no more values (RuntimeError: no route)") == 1
    assert len(list((tmp_path / "runs/default").glob("*/DONE"))) == 2
    assert "(RuntimeError: no route)" in kvsweep("status", str(tmp_path / "runs/default")).out


def test_a_run_that_cannot_be_opened_at_once_is_opened_again(command, fake, tmp_path):
    tries = tmp_path / "tries"
    fake.before(f"open({str(tries)!r}, 'a').write('x'); assert os.path.getsize({str(tries)!r}) > 2, 'it exists'")
    ended = command("tracker=mlflow")
    assert "note: tracker" not in ended.err
    assert [run["ok"] for run in fake.runs] == [True, True]


@pytest.mark.slow
def test_a_tracker_that_hangs_is_stopped(command, fake, tmp_path):
    fake.before("time.sleep(1800)")
    start = time.monotonic()
    ended = command("tracker=wandb", "tracker.patience_s=1")
    assert time.monotonic() - start < 1200
    assert ended.code == 0
    assert "tracker=wandb gets no more values (not finished after 1 s)" in ended.err
    assert len(list((tmp_path / "runs/default").glob("*/DONE"))) == 2


def test_a_shard_may_be_empty(command, fake):
    command("tracker=wandb", "shard=9/9", "benchmark.limit=1")
    assert [fake.last(run)["progress"] for run in fake.runs] == [0, 0]


def test_a_run_that_fails_is_told_as_failed(command, fake, monkeypatch):
    def fail(*_):
        raise RuntimeError("broken")

    monkeypatch.setattr(Engine, "generate", fail)
    with pytest.raises(RuntimeError, match="broken"):
        command("tracker=wandb")
    assert [run["ok"] for run in fake.runs] == [False, False]


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_package_is_one_sentence_before_the_model(kind, command, monkeypatch):
    monkeypatch.setitem(sys.modules, kind, None)
    ended = command(f"tracker={kind}")
    assert (ended.code, f"pip install 'kvsweep[{kind}]'" in ended.err) == (2, True), ended.err


@pytest.mark.parametrize("name", ["interval_s", "patience_s"])
def test_times_are_above_zero(name):
    with pytest.raises(UserError, match=rf"tracker\.{name}"):
        build(TrackerConfig, "tracker", {name: 0})


# --- What ships ---------------------------------------------------------------------------------------------


def test_nobody_is_told_unless_asked(compose):
    assert make_job(compose()).tracker == UNTRACKED


def test_every_tracker_has_its_configuration_and_its_extra(compose, fake):
    assert {path.stem for path in (ROOT / "conf/tracker").glob("*.yaml")} == {"none", *KINDS}
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for kind in KINDS:
        assert make_job(compose(f"tracker={kind}")).tracker == TrackerConfig(kind=kind)  # type: ignore[arg-type]
        assert extras[kind][0].startswith(kind)
