"""Every kernel lowered for Hopper on a machine that need not have a GPU: what it takes, wide accesses, the barrier."""

import json
import os
import pkgutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from kvsweep import kernels

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.release,
    pytest.mark.first,
    pytest.mark.skipif(sys.platform != "linux", reason="Triton's compiler is for Linux"),
]
SHARED_MEMORY = 227 * 1024  # bytes that one block of an H100 or H200 may ask for


@pytest.fixture(scope="module")
def lowered(tmp_path_factory):
    root = Path(__file__).resolve().parents[2]
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": f"{root / 'src'}:{root}", "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))}
    command = [sys.executable, str(root / "scripts/bench/compile_kernels.py")]
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1800, check=False)
    assert ended.returncode == 0, ended.stderr[-4000:]
    return [json.loads(line) for line in ended.stdout.splitlines()]


def places(sass, operation):
    return [i for i, found in enumerate(sass) if found.startswith(operation + ".")]


def test_every_kernel_is_lowered(lowered, capsys):
    columns = {"REG": "registers", "STACK": "stack", "LOCAL": "local", "SHARED": "shared"}
    with capsys.disabled():
        print(f"\n{'kernel':<42}" + "".join(f"{title:>11}" for title in columns.values()))
        for row in lowered:
            print(f"{row['name']:<42}" + "".join(f"{row[key]:>11}" for key in columns))
    modules = [import_module(f"kvsweep.kernels.{found.name}") for found in pkgutil.iter_modules(kernels.__path__)]
    jitted = {name: value.src for m in modules for name, value in vars(m).items() if hasattr(value, "arg_names")}
    called = {name for name in jitted if sum(f"{name}(" in source for source in jitted.values()) > 1}
    assert {row["name"].split()[0] for row in lowered} == {name.strip("_") for name in jitted.keys() - called}


def test_no_kernel_spills(lowered):
    for row in lowered:
        assert not row["STACK"] + row["LOCAL"], row
        assert not places(row["sass"], "LDL") + places(row["sass"], "STL"), row


def test_no_kernel_asks_for_more_shared_memory_than_there_is(lowered):
    assert 0 < max(row["SHARED"] for row in lowered) <= SHARED_MEMORY


def test_compaction_moves_16_bytes_and_waits_between_load_and_store(lowered):
    forms = [row["sass"] for row in lowered if row["name"].startswith("move_rows") and "unit=4" in row["name"]]
    assert len(forms) == 2
    for sass in forms:
        stores = places(sass, "STG")
        # The indices of the rows are loaded too, 8 bytes each.
        loads = [i for i in places(sass, "LDG") if sass[i].endswith(".128")]
        assert stores
        assert len(loads) == len(stores), sass
        assert all(sass[i].endswith(".128") for i in stores), sass
        assert any(loads[-1] < barrier < stores[0] for barrier in places(sass, "BAR.SYNC")), sass


def test_attention_fetches_keys_and_values_16_bytes_at_a_time(lowered):
    forms = [row["sass"] for row in lowered if row["name"].startswith("attend_chunk") and " fp8" not in row["name"]]
    assert forms
    for sass in forms:
        fetched = [sass[i] for i in places(sass, "LDGSTS")]
        assert fetched, sass
        assert all(operation.endswith(".128") for operation in fetched), sass


def test_pointwise_kernels_write_16_bytes_at_a_time(lowered):
    forms = [row for row in lowered if row["name"].split()[0] in ("add_norm", "gate", "rotate")]
    assert len(forms) == 27
    for row in forms:
        stored = {row["sass"][i] for i in places(row["sass"], "STG")}
        assert stored == {"STG.E.64" if "width=128" in row["name"] and "fp32" not in row["name"] else "STG.E.128"}, row


def test_attention_fetches_8_fp8_numbers_at_a_time(lowered):
    """In 16 bits, where two blocks are in flight; scales are 4 bytes each."""
    forms = [row for row in lowered if row["name"].startswith("attend_chunk bf16 fp8")]
    assert len(forms) == 12
    for row in forms:
        fetched = {row["sass"][i] for i in places(row["sass"], "LDGSTS")}
        rows = {operation for operation in fetched if operation.endswith((".64", ".128"))}
        assert rows, row
        assert fetched - rows <= ({"LDGSTS.E"} if "scaled=1" in row["name"] else set()), row
