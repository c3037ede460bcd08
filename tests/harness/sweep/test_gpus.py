"""launcher=local gives each process one of the machine's GPUs; the list of GPUs is faked."""

import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvsweep.harness import provenance
from kvsweep.harness.models.config import ModelConfig
from kvsweep.harness.models.load import device_of
from kvsweep.harness.provenance import VISIBLE, visible_gpus
from kvsweep.harness.sweep import launch
from kvsweep.harness.sweep.launch import Local
from kvsweep.messages.errors import UserError

WHOLE = "GPU 0: NVIDIA H200 (UUID: GPU-aaa)\nGPU 1: NVIDIA H200 (UUID: GPU-bbb)\n"
DIVIDED = WHOLE.replace("GPU 1", "  MIG 3g.71gb Device 0: (UUID: MIG-c)\n  MIG 3g.71gb Device 1: (UUID: MIG-d)\nGPU 1")


@pytest.fixture
def machine(monkeypatch, tmp_path) -> Any:
    """`machine(listed)`: a machine whose nvidia-smi lists these GPUs, and on which no variable names any."""

    def with_gpus(listed):
        script = tmp_path / "nvidia-smi"
        script.write_text(f"#!{sys.executable}\nprint({listed!r}, end='')\n")
        script.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
        monkeypatch.delenv(VISIBLE, raising=False)

    return with_gpus


def test_the_gpus_of_a_machine(machine):
    machine(WHOLE)
    assert visible_gpus() == ["GPU-aaa", "GPU-bbb"]
    machine(DIVIDED)
    assert visible_gpus() == ["MIG-c", "MIG-d", "GPU-bbb"]
    machine("")
    assert visible_gpus() == []


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("#!/bin/sh\nexec sleep 60\n", r"gives no answer \(.*timed out after 0.3 seconds"),
        ("#!/no/such/interpreter\n", r"gives no answer \(.*No such file"),
        ("no program", r"gives no answer \(.*Exec format error"),
    ],
)
def test_a_driver_that_hangs_or_does_not_run_is_named(script, why, machine, tmp_path, monkeypatch):
    machine("")
    (tmp_path / "nvidia-smi").write_text(script)
    monkeypatch.setattr(provenance, "SECONDS", 0.3)
    jobs: Any = [SimpleNamespace(model=SimpleNamespace(device=device), impl="torch") for device in ("cpu", "auto")]
    way_out = rf"nvidia-smi, which names the GPUs, {why}.*: set CUDA_VISIBLE_DEVICES to .*, or model.device=cpu\."
    with pytest.raises(UserError, match=way_out):
        Local().check(jobs)
    Local().check(jobs[:1])
    # As nvidia-smi does on a machine without a GPU.
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nprintf '\\377'\nexit 9\n")
    monkeypatch.undo()
    Local().check(jobs)


@pytest.mark.parametrize(
    ("named", "found"),
    [("0,1,3", ["0", "1", "3"]), ("GPU-a, MIG-b", ["GPU-a", "MIG-b"]), ("", []), ("-1", []), ("2,-1,3", ["2"])],
)
def test_the_gpus_that_a_variable_names(named, found, monkeypatch):
    monkeypatch.setenv(VISIBLE, named)
    assert visible_gpus() == found


def report(jobs: Any) -> list[Exception]:
    out: Path = jobs[0].job.out
    out.write_text(os.environ.get("CUDA_VISIBLE_DEVICES", "none"))
    end = time.monotonic() + 240
    while len(list(out.parent.glob("seen-?"))) < 4:  # all processes run at once
        assert time.monotonic() < end
        time.sleep(0.05)
    return []


@pytest.mark.slow
def test_each_process_sees_one_gpu(tmp_path, monkeypatch):
    names = ["0", "1", "GPU-aaa", "MIG-b"]
    monkeypatch.setenv(VISIBLE, ",".join(names))
    monkeypatch.setattr(launch, "logs", lambda tasks: tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]), prepend=":")  # of this module
    model = SimpleNamespace(device="auto")
    jobs = [SimpleNamespace(out=tmp_path / f"seen-{number}", model=model) for number in range(4)]
    tasks: Any = [[SimpleNamespace(job=job, task=job.out.name)] for job in jobs]
    assert Local(parallel=4)._run(tasks, report) == 0
    assert sorted(job.out.read_text() for job in jobs) == sorted(names)


def test_cuda_without_a_gpu_is_refused(machine):
    machine("")
    config = ModelConfig(name="a", title="", path="x", device="cuda")
    job: Any = SimpleNamespace(model=config, impl="torch")
    with pytest.raises(UserError, match=r"model\.device=cuda needs a GPU, and launcher=local sees none"):
        Local().check([job])
    with pytest.raises(UserError, match=r"model\.device=cuda needs a GPU, and this process sees none"):
        device_of(config)


@pytest.mark.skipif(torch.cuda.is_available(), reason="here torch finds a GPU")
def test_a_gpu_that_was_given_and_is_not_found_is_refused(monkeypatch):
    config = ModelConfig(name="a", title="", path="x")
    for given in ("", "-1", "NoDevFiles"):
        monkeypatch.setenv(VISIBLE, given)
        assert device_of(config).type == "cpu"
    monkeypatch.setenv(VISIBLE, "GPU-aaa")
    assert device_of(replace(config, device="cpu")).type == "cpu"
    with pytest.raises(UserError, match=r"given a GPU \(CUDA_VISIBLE_DEVICES=GPU-aaa\), and torch finds none"):
        device_of(config)
