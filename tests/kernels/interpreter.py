"""A test file's kernels in the interpreter.

The interpreter must be asked for before a kernel is imported, and a process that has it cannot compile: so such tests
run in a process of their own.
"""

import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import torch
from packaging.version import Version

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 5e-3, torch.float16: 7e-4}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=["fp32", "bf16", "fp16"])


# A test that runs files in the interpreter, for `make test` and for `make release`.
BY_MARK = pytest.mark.parametrize("mark", ["not slow", pytest.param("slow", marks=pytest.mark.release)])


def is_usable(triton: str, numpy: str) -> bool:
    """Whether these versions have an interpreter: that of Triton 3.6 takes arrays for numbers, numpy 2.5 refuses it."""
    return Version(triton) >= Version("3.7") or Version(numpy) < Version("2.5")


def skip_without_interpreter():
    """Skip a test that would start the interpreter where it is missing or fails."""
    try:
        triton, numpy = version("triton"), version("numpy")
    except PackageNotFoundError:
        pytest.skip("Triton is not installed")
    if not is_usable(triton, numpy):
        pytest.skip(f"the interpreter of triton {triton} fails with numpy {numpy}: install numpy<2.5")


def run_files(mark: str, *files: str | Path):
    """Run test files' tests of a mark once more where the interpreter is on; they must pass."""
    skip_without_interpreter()
    root = Path(__file__).resolve().parents[2]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "-m",
        mark,
        *map(str, files),
    ]
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": f"{root / 'src'}:{root}"}
    env.pop("PYTEST_XDIST_WORKER", None)
    ended = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=1800, check=False)
    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-2000:]
    assert " passed" in ended.stdout
