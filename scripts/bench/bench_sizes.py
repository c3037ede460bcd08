"""Seconds and memory at the sizes that README promises: many cells in one job, a large page, a large export.

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

from bench_report import write_cell

ROOT = Path(__file__).resolve().parents[2]
FILES = 256
MANY = [
    "model=toy_qwen",
    "benchmark=toy_chain",
    "benchmark.limit=1",
    "policy.budget=96",
    "grid.keep_ratio=[0.2,0.3,0.4,0.5]",
    "decoding.max_new_tokens=8",
]


def measured(module: str, *arguments: object, limits: Callable[[], None] = int) -> dict[str, Any]:
    """Run a module as a process; return its seconds, peak memory in GB and exit code."""
    start = time.perf_counter()
    pid = os.fork()
    if not pid:
        limits()
        os.environ |= {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"}
        out = os.open(os.devnull, os.O_WRONLY)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.execv(sys.executable, [sys.executable, "-m", module, *map(str, arguments)])
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


def cells(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """2,000 cells in one job with few open files, and their status."""
    windows = ",".join(str(n) for n in range(4, 504))
    sweep = [*MANY, f"grid.local_window=[{windows}]", "policy.budget=1024", f"results_dir={folder}"]
    yield "sweep of 2,000 cells, ulimit -n 256", measured("kvsweep.harness.sweep.command", *sweep, limits=few_files)
    yield "status of 2,000 cells", measured("kvsweep.harness.sweep.watch.status", folder / "default")


def page(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The report of 200,000 completions, and its page in a browser."""
    for number in range(42):
        write_cell(folder, number, 200_000 // 42 + 1, 32)
    yield "report of 200,000 completions", measured("kvsweep.analysis.report.build", folder)
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


def export(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The export of a million rows."""
    for number in range(42):
        write_cell(folder, number, 1_000_000 // 42 + 1, 32)
    yield "export of 1,000,000 rows", measured("kvsweep.analysis.export", folder)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    sizes = {"cells": cells, "page": page, "export": export}
    parser.add_argument("--only", choices=sizes)
    options = parser.parse_args()
    found = {}
    for name, measure in sizes.items():
        if options.only in (None, name):
            with tempfile.TemporaryDirectory(prefix="kvsweep-sizes-") as folder:
                for what, result in measure(Path(folder)):
                    print(f"{what}: {result}", flush=True)
                    found[what] = result
    print(json.dumps(found))


if __name__ == "__main__":
    main()
