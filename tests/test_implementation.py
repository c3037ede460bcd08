"""impl=triton: refused where it cannot run, and in the interpreter the same greedy texts as impl=torch."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU can run it")
def test_triton_without_a_gpu_is_refused_before_a_model_is_loaded(kvsweep, no_model, tiny, tmp_path, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    ended = kvsweep(*tiny, "benchmark=toy_chain", "impl=triton", f"results_dir={tmp_path}")
    assert ended.code == 2
    assert "impl=triton needs" in ended.err


def test_an_unknown_implementation_is_refused(kvsweep, no_model, tiny, tmp_path):
    ended = kvsweep(*tiny, "benchmark=toy_chain", "impl=cuda", f"results_dir={tmp_path}")
    assert ended.code == 2
    assert "impl=cuda is unknown" in ended.err


@pytest.mark.parametrize("policy", ["dynts", "h2o"])
def test_triton_writes_the_same_greedy_texts(policy, tiny, tiny_policy, tmp_path):
    pytest.importorskip("triton")
    texts, cells = {}, {}
    for impl in ("torch", "triton"):
        command = [sys.executable, "-m", "harness.run", *tiny, *tiny_policy, f"policy={policy}", f"impl={impl}"]
        command += ["benchmark=toy_chain", "decoding=greedy", "benchmark.limit=2", "policy.budget=40"]
        command += ["decoding.max_new_tokens=24", "slots=2", f"results_dir={tmp_path / impl}"]
        env = {**os.environ, "PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "1"}
        ended = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stderr[-3000:]
        (file,) = (tmp_path / impl).rglob("completions.jsonl")
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        texts[impl] = {row["problem_id"]: (row["token_ids"], row["evictions"]) for row in rows}
        cells[impl] = file.parent.name
    assert texts["torch"] == texts["triton"]
    assert any(evictions for _, evictions in texts["triton"].values())
    assert cells["torch"] != cells["triton"]
