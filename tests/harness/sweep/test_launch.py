"""A launcher is one class and one YAML; a sweep of several processes ends with its command."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kvsweep.harness.command import init
from kvsweep.harness.settings import compose_config
from kvsweep.harness.sweep.job import make_job
from kvsweep.harness.sweep.launch import Local, split
from kvsweep.harness.sweep.share import share_of

ROOT = Path(__file__).resolve().parents[3]
# What CONTRIBUTING says a launcher is: a class, named by `_target_`.
OWN = """
from dataclasses import dataclass
from pathlib import Path

from kvsweep.harness.sweep.launch import Launcher, queue


@dataclass(frozen=True, kw_only=True)
class Listed(Launcher):
    waits = False
    file: Path

    def start(self, rounds):
        [(tasks, work)] = rounds
        queue(tasks)
        lines = [f"{share.job.name} {share.job.shard}" for task in tasks for share in task]
        self.file.write_text(" | ".join(lines))
"""


@pytest.fixture
def own(tmp_path, monkeypatch) -> list[str]:
    """Overrides that put a launcher of one's own in place of the package's."""
    (tmp_path / "kvsweep_test_launcher.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    return ["launcher._target_=kvsweep_test_launcher.Listed", f"+launcher.file={tmp_path / 'listed'}"]


@pytest.mark.slow
def test_a_launcher_of_ones_own_starts_the_tasks(kvsweep, own, tiny, tmp_path, no_model):
    ended = kvsweep("-m", *tiny, *own, "+launcher.shards=2", f"results_dir={tmp_path}", "benchmark=toy_add,toy_chain")
    assert ended.code == 0, ended.err
    assert (tmp_path / "listed").read_text() == " | ".join(
        f"toy_qwen {benchmark} {shard}" for benchmark in ("toy_add", "toy_chain") for shard in ("1/2", "2/2")
    )
    states = [json.loads(path.read_text())["state"] for path in (tmp_path / "default/status").glob("*.json")]
    assert states == ["queued"] * 4
    assert f"progress: kvsweep status {tmp_path}/default --watch" in ended.out


def test_a_task_takes_the_same_shard_of_several_jobs():
    words = ("experiment=demo", "launcher=local")
    jobs = [make_job(compose_config(*words, f"benchmark={name}")) for name in ("toy_chain", "toy_groups")]
    tasks = split([share_of(job) for job in jobs], Local(shards=2, cells_per_task=50))
    assert [[(share.job.benchmark.name, str(share.job.shard)) for share in task] for task in tasks] == [
        [("toy_chain", shard), ("toy_groups", shard)] for shard in ("1/2", "2/2")
    ]
    assert len(split([share_of(job) for job in jobs], Local(shards=2))) == 4
    assert len(split([share_of(jobs[0])], Local(shards=2, cells_per_task=50))) == 2


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("+launcher.nodes=2", "launcher.nodes is not a setting: launcher has shards, cells_per_task, file."),
        ("+launcher.shards=0", "launcher.shards=0 cannot be used: input should be greater than 0."),
    ],
)
def test_a_launchers_settings_are_checked(override, sentence, kvsweep, own, tiny):
    ended = kvsweep(*tiny, *own, override)
    assert ended.code == 2
    assert sentence in ended.err


@pytest.mark.slow
@pytest.mark.parametrize("ignored", [False, True], ids=["foreground", "background of a shell"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_processes_of_a_local_sweep(start_kvsweep, tiny, tmp_path, number, ignored):
    setup = "import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL)"  # which a test under nohup ignores
    setup += "; signal.signal(signal.SIGINT, signal.SIG_IGN)" if ignored else ""
    words = [*tiny, "launcher=local", "draws=5000", "policy=full", f"results_dir={tmp_path}"]
    process = start_kvsweep(*words, setup=setup)
    deadline, running = time.monotonic() + 480, dict[str, Any]()
    while running.get("state") != "running" or not running["made"]:
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.2)
        for path in (tmp_path / "default/status").glob("*.json"):
            running = json.loads(path.read_text())
    assert running["pid"] != process.pid
    process.send_signal(number)
    assert process.wait(120) == 128 + number
    deadline = time.monotonic() + 120
    while is_running(running["pid"]):
        assert time.monotonic() < deadline
        time.sleep(0.2)


@pytest.mark.release
@pytest.mark.parametrize("granted", ["affinity", "SLURM"])
def test_a_local_sweep_starts_no_more_processes_than_cores_were_granted(
    start_kvsweep, tiny, tmp_path, granted, monkeypatch
):
    setup = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})" if granted == "affinity" else ""
    if granted == "SLURM":
        monkeypatch.setenv("SLURM_CPUS_ON_NODE", "1")
    words = [*tiny, "launcher=local", "launcher.shards=2", "draws=2", "policy=full", f"results_dir={tmp_path}"]
    process = start_kvsweep(*words, setup=setup)
    most, deadline = 0, time.monotonic() + 480
    while process.poll() is None:
        assert time.monotonic() < deadline
        most = max(most, sum("pickle.load" in command for command in children(process.pid)))
        time.sleep(0.05)
    assert process.returncode == 0, process.communicate()[1]
    assert most == 1
    assert len(list(tmp_path.glob("default/*/completions-*of2.jsonl"))) == 2


def children(pid: int) -> list[str]:
    """The command lines of the processes that a process has started and that still live."""
    found = []
    with suppress(OSError):  # processes end meanwhile
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            found += [Path(f"/proc/{child}/cmdline").read_text() for child in task.read_text().split()]
    return found


@pytest.mark.slow
def test_a_task_imports_what_the_command_imports(tiny, tmp_path):
    """Files of the user's own folder with the names of Python's modules are taken neither here nor there."""
    init(tmp_path / "own")
    for name in ("statistics", "random", "types", "torch"):
        (tmp_path / f"own/{name}.py").write_text("raise SystemExit('the file of the user')")
    words = [*tiny, "policy=spread", "grid.policy=[full,spread]", "benchmark.limit=1", "launcher=local"]
    ended = subprocess.run(
        [sys.executable, "-P", "-m", "kvsweep.cli", *words, f"results_dir={tmp_path}"],
        cwd=tmp_path / "own",
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=480,
    )
    assert ended.returncode == 0, ended.stderr
    assert "full" in ended.stdout
    assert "spread" in ended.stdout
    # What is recorded is the sweep's command, not that of the process which it starts.
    recorded = [json.loads(path.read_text()) for path in tmp_path.glob("*/*/provenance.json")]
    commands = [one["command"] for record in recorded for one in record["decoding_passes"]]
    assert len(commands) == 2
    assert all(command[1:] == [*words, f"results_dir={tmp_path}"] for command in commands), commands


@pytest.mark.slow
def test_a_process_that_dies_before_its_task_begins_is_named(start_kvsweep, tiny, tmp_path):
    setup = (
        "import kvsweep.harness.sweep.launch as launch\n"
        "launch.RunJobs.__reduce__ = lambda self: (eval, ('__import__(\"no_such_module\")',))"
    )
    process = start_kvsweep(*tiny, "launcher=local", "policy=full", f"results_dir={tmp_path}", setup=setup)
    assert process.wait(240) == 1
    [status] = (tmp_path / "default/status").glob("*.json")
    found = json.loads(status.read_text())
    assert found["state"] == "failed"
    assert "No module named 'no_such_module'" in found["error"]


def is_running(pid: int) -> bool:
    """True if the process lives; one that nobody has waited for is dead."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
