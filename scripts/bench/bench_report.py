"""Seconds and memory of kvsweep-report on a generated sweep: cells × completions rows with texts and evictions."""

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from tokenizers import Tokenizer

from kvsweep.analysis.report.build import build_report
from kvsweep.harness.settings import WEIGHTS
from kvsweep.run_files.run_reader import StoredCell

STEP = "Let me see. a is 4, b is 5, 4+5=9. So c is 9. "
TEXTS = {
    "full": STEP * 10 + "</think>c is 9. \\boxed{9}",
    "dynts": STEP * 5 + "Good, go on. " + STEP * 5 + "</think>c is 9. \\boxed{9}",
}
MODEL = WEIGHTS / "toy_qwen"


def eviction(step: int, random: np.random.Generator) -> dict[str, Any]:
    """One eviction after which a random part of the tokens is held."""
    runs = random.geometric(0.3, size=(64 + step) // 3).tolist()
    held = [number for i, count in enumerate(runs) for number in (100 * (i % 2), count)]
    return {"step": step, "length_before": 129, "length_after": 72, "held": held}


def write_cell(run: Path, number: int, rows: int, draws: int) -> None:
    ratio, window, panel = 0.1 + 0.1 * (number % 5), 500 * (1 + number // 5 % 4), number // 21
    full = number % 21 == 20
    folder = run / f"{number:016x}"
    folder.mkdir()
    policy = (
        {"name": "full"}
        if full
        else {"name": "dynts", "keep_ratio": round(ratio, 1), "local_window": window, "budget": 128}
    )
    cell = {
        "schema": 1,
        "model": {"name": f"model{panel % 2}", "title": f"Model {panel % 2}"},
        "benchmark": {"name": f"bench{panel // 2}", "title": f"Bench {panel // 2}"},
        "policy": policy,
        "decoding": {"name": "r1"},
        "seed": 0,
        "condition": f"panel{panel}",
    }
    (folder / "cell.yaml").write_text(yaml.safe_dump(cell))
    config = {"model": {"path": str(MODEL)}}
    (folder / "provenance.json").write_text(
        json.dumps({"schema": 1, "expected": rows, "draws": draws, "config": config})
    )
    random = np.random.default_rng(number)
    events = [] if full else [eviction(89 + 57 * i, random) for i in range(3)]
    text = TEXTS[policy["name"]]
    ids = Tokenizer.from_file(str(MODEL / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    right = random.random(rows) < 0.6
    tail = json.dumps(
        {
            "text": text,
            "token_ids": ids,
            "num_tokens": len(ids),
            "prompt_tokens": 64,
            "thinking_tokens": 210,
        }
        | {"stop_reason": "stop", "evictions": events, "fork_step": None if full else 89, "peak_length": 129, "seed": 0}
    )[1:]
    keys = [f'{{"schema":1,"problem_id": "p{i // draws:04d}", "draw": {i % draws}, ' for i in range(rows)]
    (folder / "completions.jsonl").write_text("".join(f"{key}{tail}\n" for key in keys))
    names = np.where(right, "correct", "wrong")
    grades = (
        f'"answer": "9", "gold": "9", "outcome": "{name}", "correct": {int(name == "correct")}}}\n' for name in names
    )
    (folder / "grades.jsonl").write_text("".join(key + grade for key, grade in zip(keys, grades, strict=True)))
    (folder / "DONE").write_text(json.dumps({"files": StoredCell(folder).sizes("completions.jsonl")}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cells", type=int, default=168)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--draws", type=int, default=32)
    options = parser.parse_args()
    each = -(-options.rows // options.cells)
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.cells):
            write_cell(Path(folder), number, each, options.draws)
        size = sum(path.stat().st_size for path in Path(folder).rglob("*.jsonl"))
        started, started_cpu = time.perf_counter(), time.process_time()
        page = build_report(folder)
        seconds = time.perf_counter() - started
        result = {
            "cells": options.cells,
            "rows": each * options.cells,
            "input_bytes": size,
            "seconds": round(seconds, 1),
            "cpu_seconds": round(time.process_time() - started_cpu, 1),
            "peak_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 2),
            "page_bytes": page.stat().st_size,
        }
    spent = f"{seconds:.1f} s ({result['cpu_seconds']} s of CPU)"
    print(f"{result['rows']:,} rows of {size / 1e9:.2f} GB: {spent}, peak {result['peak_gb']} GB")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
