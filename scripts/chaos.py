"""Kill a running grid again and again, finish it, and count the rows that are lost, doubled or changed.

Two shards of one grid run side by side on toy_qwen. Each process is killed (SIGKILL) at a random moment of its life,
start-up included, and started again, until `--kills` kills have been made; then both run to their end. Their rows are
compared with those of an undisturbed run. The last line printed is one JSON object; exit code 1 says that rows differ.

    python scripts/chaos.py --kills 50
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from analysis.records import COMPLETIONS_FILE, PairRow, decode, shard_files

GRID = [
    "model=toy_qwen",
    "benchmark=toy_chain",
    "grid.policy=[full,dynts,h2o]",
    "policy.budget=96",
    "policy.keep_ratio=0.4",
    "policy.local_window=32",
    "policy.question_on_top=true",
    "decoding.max_new_tokens=400",
    "slots=2",
]
SHARDS = 2
CALM_S = 900.0


def main() -> None:
    """Run the reference, the chaos and the last run; print the comparison."""
    arguments = _parser().parse_args()
    dice = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory(prefix="kvsweep-chaos-") as folder:
        grid = [*GRID, f"benchmark.limit={arguments.problems}"]
        start = time.monotonic()
        finish([start_shard(grid, Path(folder, "calm"), "1/1")])
        calm = time.monotonic() - start
        expected = rows(Path(folder, "calm"))
        kills = storm(grid, Path(folder, "storm"), arguments.kills, arguments.longest, dice)
        torn = sum(map(is_torn, row_files(Path(folder, "storm"))))
        before = sum(map(len, rows(Path(folder, "storm")).values()))
        finish([start_shard(grid, Path(folder, "storm"), f"{i}/{SHARDS}") for i in range(1, SHARDS + 1)])
        report = compare(expected, rows(Path(folder, "storm")))
        done = len(list(Path(folder, "storm").glob("default/*/DONE")))
    report |= {"kills": kills, "torn_lines_at_the_end": torn, "stored_before_the_last_run": before, "done": done}
    report |= {
        "cells": len(expected),
        "seconds_uninterrupted": round(calm, 1),
        "seconds": round(time.monotonic() - start, 1),
    }
    print(json.dumps(report))
    whole = report["lost"] == report["doubled"] == report["changed"] == 0 and done == len(expected)
    sys.exit(0 if whole else 1)


def storm(grid: list[str], results: Path, kills: int, longest: float, dice: random.Random) -> int:
    """Kill shards at random moments and start each again at once; return the number of living processes killed."""
    shards = [f"{i}/{SHARDS}" for i in range(1, SHARDS + 1)]
    running = {shard: start_shard(grid, results, shard) for shard in shards}
    ends = {shard: time.monotonic() + dice.uniform(0, longest) for shard in shards}
    made = 0
    while made < kills:
        shard = min(ends, key=lambda s: ends[s])
        time.sleep(max(0.0, ends[shard] - time.monotonic()))
        alive = running[shard].poll() is None
        running[shard].send_signal(signal.SIGKILL)
        running[shard].wait()
        made += alive
        print(f"{made}/{kills} {shard} {'killed' if alive else 'had finished'}", file=sys.stderr)
        running[shard] = start_shard(grid, results, shard)
        ends[shard] = time.monotonic() + dice.uniform(0, longest)
    for process in running.values():
        process.send_signal(signal.SIGKILL)
        process.wait()
    return made + len(running)


def start_shard(grid: list[str], results: Path, shard: str) -> subprocess.Popen[bytes]:
    """Start one shard of the grid as a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "harness.sweep.command", *grid, f"results_dir={results}", f"shard={shard}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def finish(processes: list[subprocess.Popen[bytes]]) -> None:
    """Wait for processes; raise RuntimeError if one fails."""
    for process in processes:
        if process.wait(timeout=CALM_S):
            raise RuntimeError(f"a run ended with {process.returncode}")


def row_files(results: Path) -> list[Path]:
    """All files of completions."""
    return [path for cell in results.glob("default/*/") for path in shard_files(cell, COMPLETIONS_FILE).values()]


def is_torn(path: Path) -> bool:
    """True if the file's last line has no newline."""
    return not (b"\n" + path.read_bytes()).endswith(b"\n")


def rows(results: Path) -> dict[str, Counter[bytes]]:
    """Every cell's whole lines, each with its count."""
    found: dict[str, Counter[bytes]] = {}
    for path in row_files(results):
        lines = path.read_bytes().split(b"\n")[:-1]
        found.setdefault(path.parent.name, Counter()).update(lines)
    return found


def compare(expected: dict[str, Counter[bytes]], found: dict[str, Counter[bytes]]) -> dict[str, int]:
    """The numbers of pairs that are lost, doubled, or have another row than expected."""
    lost = doubled = changed = 0
    for cell_id, lines in expected.items():
        here = found.get(cell_id, Counter())
        pairs = Counter(_pair(line) for line in here.elements())
        lost += len({_pair(line) for line in lines} - pairs.keys())
        doubled += sum(count - 1 for count in pairs.values())
        changed += sum((here - lines).values())
    return {"rows": sum(map(Counter.total, expected.values())), "lost": lost, "doubled": doubled, "changed": changed}


def _pair(line: bytes) -> tuple[str, int]:
    return decode(line, PairRow).key


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--problems", type=int, default=100)
    parser.add_argument("--longest", type=float, default=20.0, metavar="S", help="seconds a process lives at most")
    parser.add_argument("--seed", type=int, default=0)
    return parser


if __name__ == "__main__":
    main()
