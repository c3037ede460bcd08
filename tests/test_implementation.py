"""impl=triton: refused where it cannot run, and in the interpreter the same greedy texts as impl=torch."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.kernels.interpreter import skip_without_interpreter

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU can run it")
def test_triton_without_a_gpu_is_refused_before_a_model_is_loaded(kvsweep, no_model, tiny, tmp_path, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    ended = kvsweep(*tiny, "benchmark=toy_chain", "impl=triton", f"results_dir={tmp_path}")
    assert ended.code == 2
    assert "impl=triton needs" in ended.err


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU can run it")
def test_triton_can_be_submitted_from_where_there_is_no_gpu(kvsweep, no_model, tiny, tmp_path, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    arguments = [*tiny, "benchmark=toy_chain", "impl=triton", f"results_dir={tmp_path}", "launcher=slurm"]
    assert kvsweep(*arguments, "--dry-run").code == 0


PACKED = ["cache.bits=4", "cache.group=8", "cache.residual=9", "grid.policy=[h2o,random_head]"]

FP8 = ["cache.scheme=fp8", "cache.scale=token", "grid.policy=[h2o,random_head]"]


# `make test` holds each kernel against its reference in the interpreter.
@pytest.mark.slow
@pytest.mark.parametrize("more", [["grid.policy=[dynts,h2o,rkv]"], PACKED, FP8], ids=["whole", "packed", "fp8"])
@pytest.mark.one_in(3)
def test_triton_writes_the_same_greedy_texts(more, kvsweep, tiny, tiny_policy, tmp_path):
    pytest.importorskip("triton")
    found = {}
    for impl in ("torch", "triton"):
        arguments = [*tiny, *tiny_policy, f"impl={impl}", "benchmark=toy_chain", "decoding=greedy", "benchmark.limit=1"]
        arguments += ["policy.budget=40", "decoding.max_new_tokens=14", "slots=3", *more]
        arguments += [f"results_dir={tmp_path / impl}"]
        if impl == "torch":
            assert kvsweep(*arguments).code == 0
        else:
            run_interpreted([sys.executable, "-m", "kvsweep.cli", *arguments], tmp_path)
        found[impl] = {
            file.parent.name: [json.loads(line) for line in file.read_text().splitlines()]
            for file in (tmp_path / impl).rglob("completions.jsonl")
        }
    assert len(found["torch"]) == len(found["triton"]) == more[-1].count(",") + 1
    assert not found["torch"].keys() & found["triton"].keys()
    texts = {impl: sorted(map(of_text, itertools.chain(*cells.values()))) for impl, cells in found.items()}
    assert texts["torch"] == texts["triton"]
    assert all(any(row["evictions"] for row in rows) for rows in found["triton"].values())


def of_text(row):
    evictions = [(e["step"], e["length_before"], e["length_after"], e["held"]) for e in row["evictions"]]
    return row["problem_id"], row["token_ids"], evictions


def test_every_triton_kernel_has_a_reference_of_its_name():
    pytest.importorskip("triton")
    from kvsweep.kernels import reference, triton_kernels

    names = [name for name, value in vars(triton_kernels).items() if callable(value)]
    assert len(names) == 13
    assert all(hasattr(reference, name) for name in names)


LABELS = """
import torch
from kvsweep.harness.models.config import ModelConfig
from kvsweep.harness.models.load import load_model
from kvsweep.harness.predictor.labels import label_trace
from kvsweep.harness.predictor.recipe import LABEL_KINDS
from kvsweep.harness.predictor.traces import Trace
from kvsweep.harness.settings import WEIGHTS

model = load_model(ModelConfig(name="toy_qwen", title="Toy", path=str(WEIGHTS / "toy_qwen"), threads=1))
ids = torch.randint(3, 60, (45,), generator=torch.Generator().manual_seed(0)).tolist()
trace = Trace(problem_id="p", draw=0, token_ids=ids, think_start=10, think_end=38, kept=True)
hidden, labels = label_trace(model, trace, 5, LABEL_KINDS)
other_hidden, others = label_trace(model, trace, 5, LABEL_KINDS, "triton")
assert torch.equal(hidden, other_hidden)
for kind, label in labels.items():
    assert not torch.equal(label, others[kind]), "computed by the same code"
    torch.testing.assert_close(label, others[kind], atol=1e-6, rtol=1e-5, equal_nan=True)
"""


@pytest.mark.slow  # test_triton.py has the kernel
@pytest.mark.release
def test_triton_makes_the_same_labels(tmp_path):
    pytest.importorskip("triton")
    run_interpreted([sys.executable, "-c", LABELS], tmp_path)


def run_interpreted(command, folder):
    skip_without_interpreter()
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "TRITON_INTERPRET": "1"}
    ended = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
