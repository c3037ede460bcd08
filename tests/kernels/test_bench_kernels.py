"""The kernels' benchmark in the interpreter: that it works, and that it keeps silent about a wrong kernel."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.interpreter import skip_without_interpreter

pytest.importorskip("triton")
ROOT = Path(__file__).resolve().parents[2]
KERNELS = ["decode_attention", "packed_attention", "compact", "importance_labels", "redundancy", "observation"]


def bench(*arguments, first="", interpret="1"):
    """The script's own process; `first` is a statement run before it."""
    skip_without_interpreter()
    program = f"import runpy\n{first}\nrunpy.run_path('scripts/bench/bench_kernels.py', run_name='__main__')"
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "TRITON_INTERPRET": interpret}
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=1800, check=False)


@pytest.mark.release
def test_every_kernel_is_measured_and_the_times_are_called_meaningless():
    ended = bench("--tiny")
    assert ended.returncode == 0, ended.stderr[-3000:]
    *page, last = ended.stdout.splitlines()
    told = json.loads(last)
    assert told["times_mean_nothing"]
    assert any("mean nothing" in line for line in page)
    assert [line[3:] for line in page if line.startswith("## ")] == KERNELS == list(told["kernels"])
    assert sum("| triton meaningless ms |" in line for line in page) == len(KERNELS)
    # Nor is a share of the machine's limits reported.
    assert "%" not in "".join(page)
    peers = {kernel: set().union(*(row["seconds"] for row in rows)) for kernel, rows in told["kernels"].items()}
    assert peers["decode_attention"] == {"triton", "reference", "SDPA", "flex_attention"}
    assert peers["packed_attention"] == {"triton", "reference", "unpacked"}
    assert peers["compact"] == {"triton", "reference", "gather + copy"}
    rows = [row for rows in told["kernels"].values() for row in rows]
    assert all(isinstance(seconds, float) for row in rows for seconds in row["seconds"].values())
    assert all(row["bytes"] > 0 for row in rows)
    whole = next(row for row in told["kernels"]["decode_attention"] if row["shape"] == "2 x 40")
    # 2 slots, 40 rows, 4 query and 2 key heads of 16, two bytes a number
    assert whole["operations"] == 2 * (2 * 2 * 4 * 40 * 16)
    assert whole["bytes"] == 2 * (2 * 2 * 40 * 2 * 16 + 2 * 2 * 4 * 16)
    packed = next(row for row in told["kernels"]["packed_attention"] if row["shape"] == "2 x 40, 4 bits")
    # Half of the rows are packed: 16 numbers of half a byte, and one group of 16 with a zero and a step.
    assert packed["bytes"] == 2 * 2 * 2 * (20 * (8 + 4) + 20 * 16 * 2) + 2 * (2 * 2 * 4 * 16)


# A row lost, a mean off by one part in fifty, and one that does not run at all.
WRONG = """
from kvsweep.kernels import compact
from kvsweep.kernels import scores
from kvsweep.kernels import scores
move, mean = compact.compact_layers, scores.redundancy
compact.compact_layers = lambda rows, keep: move(rows, keep[..., 1:])
scores.redundancy = lambda *a, **b: 1.02 * mean(*a, **b)
scores.observation_scores = None
"""


@pytest.mark.release
def test_a_wrong_kernel_is_not_reported():
    kernels = ["compact", "redundancy", "observation", "decode_attention"]
    ended = bench("--kernels", *kernels, first=WRONG)
    assert ended.returncode == 1, ended.stderr[-3000:]
    *page, last = ended.stdout.splitlines()
    told = json.loads(last)
    assert list(told["refused"]) == kernels[:3]
    assert list(told["kernels"]) == kernels[3:]
    assert [line[3:] for line in page if line.startswith("## ")] == kernels[3:]
    silent = [line for line in page if line.startswith("not reported: ")]
    assert [line.split()[2].rstrip(",") for line in silent] == kernels[:3]
    assert "relative error inf, allowed 0e+00" in silent[0]
    assert "relative error 2.0e-02, allowed 1e-06" in silent[1]
    assert "not callable" in silent[2]


@pytest.mark.release
@pytest.mark.parametrize(
    ("arguments", "how", "sentence"),
    [
        (["--output", "results/published/kernels.md"], {}, "is refused with --tiny and in Triton's interpreter"),
        (["--kept", "200"], {}, "--rows 33 or more and at least --kept"),
        (
            [],
            {"first": "import torch; torch.cuda.is_available = lambda: False", "interpret": "0"},
            "needs a CUDA GPU, or TRITON_INTERPRET=1",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(arguments, how, sentence):
    ended = bench(*arguments, **how)
    assert ended.returncode == 2
    assert sentence in ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1
    assert not ended.stdout
