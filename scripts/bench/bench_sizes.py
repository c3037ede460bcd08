"""Seconds and memory at the sizes that docs promise: many cells in one job, a large page, export and comparison.

    python scripts/bench/bench_sizes.py                all; about ten minutes and 4 GB of disk
    python scripts/bench/bench_sizes.py --only page

Each command runs as a process of its own. Prints a line per command and, as its last line, one JSON object.
"""

import argparse
import json
import os
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from tokenizers import Tokenizer

from kvsweep.harness.settings import WEIGHTS
from kvsweep.run_files.run_reader import StoredCell

ROOT = Path(__file__).resolve().parents[2]
FILES = 256
MANY = (
    "model=toy_qwen benchmark=toy_chain benchmark.limit=1 grid.keep_ratio=[0.2,0.3,0.4,0.5] decoding.max_new_tokens=8"
)


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
    """One of 21 cells of a panel, the last of which has the full cache: rows of one text, six of ten right."""
    panel, full = number // 21, number % 21 == 20
    ratio, window = round(0.1 + 0.1 * (number % 5), 1), 500 * (1 + number // 5 % 4)
    folder = run / f"{number:016x}"
    folder.mkdir()
    dynts = {"name": "dynts", "keep_ratio": ratio, "local_window": window, "budget": 128}
    cell = {"schema": 1, "policy": {"name": "full"} if full else dynts, "decoding": {"name": "r1"}, "seed": 0}
    for kind, name in (("model", panel % 2), ("benchmark", panel // 2)):
        cell[kind] = {"name": f"{kind}{name}", "title": f"{kind} {name}"}
    (folder / "cell.yaml").write_text(yaml.safe_dump(cell | {"condition": f"panel{panel}"}))
    provenance = {"schema": 1, "expected": rows, "draws": draws, "config": {"model": {"path": str(MODEL)}}}
    (folder / "provenance.json").write_text(json.dumps(provenance))
    random, text = np.random.default_rng(number), TEXTS["full" if full else "dynts"]
    ids = Tokenizer.from_file(str(MODEL / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    row = {"text": text, "token_ids": ids, "num_tokens": len(ids), "prompt_tokens": 64, "thinking_tokens": 210}
    row |= {"stop_reason": "stop", "evictions": [] if full else [eviction(89 + 57 * i, random) for i in range(3)]}
    row |= {"fork_step": None if full else 89, "peak_length": 129, "seed": 0}
    tail = json.dumps(row)[1:]
    keys = [f'{{"schema":1,"problem_id": "p{i // draws:04d}", "draw": {i % draws}, ' for i in range(rows)]
    (folder / "completions.jsonl").write_text("".join(f"{key}{tail}\n" for key in keys))
    grades = [
        f'"answer": "9", "gold": "9", "outcome": "{"correct" if right else "wrong"}", "correct": {int(right)}}}\n'
        for right in random.random(rows) < 0.6
    ]
    (folder / "grades.jsonl").write_text("".join(key + grade for key, grade in zip(keys, grades, strict=True)))
    (folder / "DONE").write_text(json.dumps({"files": StoredCell(folder).sizes("completions.jsonl")}))


def write_run(folder: Path, rows: int) -> None:
    """A run of 42 cells of 32 draws."""
    for number in range(42):
        write_cell(folder, number, rows // 42 + 1, 32)


def measured(*arguments: object, limits: Callable[[], None] = int) -> dict[str, Any]:
    """Run kvsweep as a process; return its seconds, peak memory in GB and exit code."""
    start = time.perf_counter()
    pid = os.fork()
    if not pid:
        limits()
        os.environ |= {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"}
        out = os.open(os.devnull, os.O_WRONLY)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.execv(sys.executable, [sys.executable, "-m", "kvsweep.cli", *map(str, arguments)])
    _, status, usage = os.wait4(pid, 0)
    seconds = time.perf_counter() - start
    return {
        "seconds": round(seconds, 1),
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 1),
        "peak_gb": round(usage.ru_maxrss / 1e6, 2),
        "code": os.waitstatus_to_exitcode(status),
    }


def few_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, FILES))


def cells(folder: Path, rows: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """2,000 cells in one job with few open files, and their status."""
    windows = ",".join(str(n) for n in range(4, 504))
    sweep = [*MANY.split(), f"grid.local_window=[{windows}]", "policy.budget=1024", f"results_dir={folder}"]
    yield "sweep of 2,000 cells, ulimit -n 256", measured(*sweep, limits=few_files)
    yield "status of 2,000 cells", measured("status", folder / "default")


def page(folder: Path, rows: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """The report of so many completions, and its page in a browser."""
    write_run(folder, rows or 200_000)
    yield f"report of {rows or 200_000:,} completions", measured("report", folder)
    yield "its page in headless Chromium", {"seconds": opened(folder / "report/report.html")}


def opened(path: Path) -> float | None:
    """Seconds until the page of a report is there and a click has shown a completion; None without Chromium."""
    try:
        from selenium import webdriver
        from selenium.webdriver.common.by import By
        from selenium.webdriver.support.ui import WebDriverWait

        options = webdriver.ChromeOptions()
        for word in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
            options.add_argument(word)
        driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    except Exception as error:  # selenium raises its own, or has no browser
        print(f"no browser: {error}", file=sys.stderr)
        return None
    try:
        start = time.perf_counter()
        driver.get(path.as_uri())
        driver.find_element(By.CSS_SELECTOR, "button[data-cell]").click()
        WebDriverWait(driver, 60).until(lambda d: d.find_elements(By.CSS_SELECTOR, "#drill[open] .pair"))
        return round(time.perf_counter() - start, 1)
    finally:
        driver.quit()


def export(folder: Path, rows: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """The export of so many rows."""
    write_run(folder, rows or 1_000_000)
    yield f"export of {rows or 1_000_000:,} rows", measured("export", folder)


def judge(folder: Path, rows: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """The labels of two files of so many graded outputs, 20 draws of each problem."""
    count, random = rows or 200_000, np.random.default_rng(0)
    for name in ("full", "other"):
        right = random.random(count) < 0.6
        lines = (f'{{"id": "p{i // 20}", "draw": {i % 20}, "correct": {int(right[i])}}}\n' for i in range(count))
        (folder / f"{name}.jsonl").write_text("".join(lines))
    yield f"judge of two files of {count:,} rows", measured("judge", folder / "full.jsonl", folder / "other.jsonl")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    sizes = {"cells": cells, "page": page, "export": export, "judge": judge}
    parser.add_argument("--only", choices=sizes)
    parser.add_argument("--rows", type=int, default=0, help="rows in place of those of page, export and judge")
    options = parser.parse_args()
    found = {}
    for name, measure in sizes.items():
        if options.only in (None, name):
            with tempfile.TemporaryDirectory(prefix="kvsweep-sizes-") as folder:
                for what, result in measure(Path(folder), options.rows):
                    print(f"{what}: {result}", flush=True)
                    found[what] = result
    print(json.dumps(found))


if __name__ == "__main__":
    main()
