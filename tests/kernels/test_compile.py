"""Every kernel lowered for Hopper on a machine that need not have a GPU: registers, spills, wide loads, the barrier."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton's compiler is for Linux")


@pytest.fixture(scope="module")
def lowered(tmp_path_factory):
    root = Path(__file__).resolve().parents[2]
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": str(root), "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))}
    command = [sys.executable, str(Path(__file__).with_name("compile_kernels.py"))]
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500, check=False)
    assert ended.returncode == 0, ended.stderr[-4000:]
    return [json.loads(line) for line in ended.stdout.splitlines()]


@pytest.mark.slow
def test_no_kernel_spills(lowered, capsys):
    with capsys.disabled():
        print("\n" + "\n".join(f"{row['name']:<42} {row['REG']:>4} registers" for row in lowered))
    kernels = {row["name"].split()[0] for row in lowered}
    assert kernels == {
        "attend_chunk",
        "join_chunks",
        "sum_group",
        "compact",
        "row_norms",
        "columns",
        "last_similar",
        "sum_lost",
        "window_norms",
        "pooled_scores",
    }
    assert not [row for row in lowered if row["spills"] or row["STACK"] or row["LOCAL"]]


@pytest.mark.slow
def test_compaction_moves_16_bytes_and_waits_between_load_and_store(lowered):
    forms = [row["sass"] for row in lowered if row["name"].startswith("compact")]
    assert len(forms) == 2
    for sass in forms:
        loads = [i for i, op in enumerate(sass) if op.startswith("LDG") and op.endswith(".128")]
        stores = [i for i, op in enumerate(sass) if op.startswith("STG")]
        barriers = [i for i, op in enumerate(sass) if op.startswith("BAR")]
        assert loads
        assert stores
        assert all(sass[i].endswith(".128") for i in stores)
        assert any(loads[-1] < barrier < stores[0] for barrier in barriers)
