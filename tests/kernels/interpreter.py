"""A test file's kernels in the interpreter.

The interpreter must be asked for before a kernel is imported, and a process that has it cannot compile: so such tests
run in a process of their own.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 5e-3}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=["fp32", "bf16"])


# A file's test that runs it, for `make test` and for `make slow`.
BY_MARK = pytest.mark.parametrize("mark", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])


def run_file(file: str, mark: str) -> None:
    """Run a test file's tests of a mark once more where the interpreter is on; they must pass."""
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", mark, file]
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": f"{root / 'src'}:{root}"}
    env.pop("PYTEST_XDIST_WORKER", None)
    ended = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-2000:]
    assert " passed" in ended.stdout
