"""Peak extra memory of the label pass by length, beside the formula in its docstring.

    python scripts/bench/bench_labels.py

Each length runs in a process of its own, on the queries and keys of a random layer with 8 query and 2 key heads of 32,
in float32, with all three kinds of label. The figure is the growth of the largest resident size, median of five.
`matrix` is the size of the layer's attention matrix alone.
"""

import json
import os
import resource
import statistics
import subprocess
import sys

LENGTHS = (1024, 2048, 4096, 8192)
Q_HEADS, KV_HEADS, HEAD_DIM, BLOCK, REPEATS = 8, 2, 32, 512, 5
# Every block of memory goes back to the system when it is freed, so that the resident size is what is held.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}


def main() -> None:
    if len(sys.argv) > 1:
        print(peak(int(sys.argv[1])))
        return
    rows = []
    print(f"{'tokens':>8}{'extra MiB':>11}{'formula MiB':>13}{'matrix MiB':>12}")
    for length in LENGTHS:
        extra = statistics.median(run(length) for _ in range(REPEATS))
        matrix = Q_HEADS * length**2 * 4 / 2**20
        rows.append({"tokens": length, "extra": extra, "formula": formula(length), "matrix": matrix})
        print(f"{length:8}{extra:11.1f}{formula(length):13.1f}{matrix:12.0f}", flush=True)
    print(json.dumps(rows))


def run(length: int) -> float:
    command = [sys.executable, __file__, str(length)]
    ended = subprocess.run(command, env={**os.environ, **MALLOC}, capture_output=True, text=True, check=True)
    return float(ended.stdout)


def formula(length: int) -> float:
    """MiB, as `LabelPass` has it."""
    from kvsweep.harness.predictor.recipe import LABEL_KINDS

    sums = 4 * length * KV_HEADS * (len(LABEL_KINDS) + 2)
    return (sums + 16 * Q_HEADS * (BLOCK**2 + length)) / 2**20


def peak(length: int) -> float:
    """MiB of the label pass over two layers, above what was resident before it."""
    import torch

    from kvsweep.harness.predictor.labels import LabelPass
    from kvsweep.harness.predictor.recipe import LABEL_KINDS

    query, key = torch.randn(1, Q_HEADS, length, HEAD_DIM), torch.randn(1, KV_HEADS, length, HEAD_DIM)
    with torch.inference_mode():
        for layers in (1, 2):
            size = 64 if layers == 1 else length  # the first, short, loads what is loaded once
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            labels = LabelPass(answer_start=size - size // 8, min_distance=32, kinds=LABEL_KINDS, impl="torch")
            for _ in range(layers):
                labels.observe(query[:, :, :size], key[:, :, :size], key[:, :, :size], HEAD_DIM**-0.5)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


if __name__ == "__main__":
    main()
