"""Run the parts in the order of their worth, each in processes of their own, until the deadline.

    scripts/bench/gpu_day/quarter.sh OUT [--deadline 420] [--only toys step] [--small]

OUT/quarter.json is written after each part, OUT/logs.tar.gz at the end. A part that fails or overruns is named there
and costs no other part; the exit status is then 1. What is right is tried side by side before anything is timed.
`--small` tries the parts on the CPU, in Triton's interpreter, where no time means anything: only the deadline ends one.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import combinations
from pathlib import Path
from typing import Any

from kvsweep.run_files.safe_files import make_folder, replace_text
from scripts.bench.same_texts import differences

MOST_SECONDS = {
    "card": 60,
    "toys": 200,
    "tests": 240,
    "step": 200,
    "bits": 90,
    "generate": 90,
    "generate_compiled": 150,
}
GPU_TESTS = (
    "tests/kernels/test_gpu.py",
    "tests/harness/decode/test_graphs.py",
    "tests/harness/decode/test_layer_kinds.py",
)
GRID = "benchmark=toy_chain decoding=greedy policy.question=on_top policy.keep_ratio=0.3 model.threads=2"
LARGE_GRID = (
    "benchmark.limit=20 decoding.max_new_tokens=300 policy.budget=128 policy.local_window=48 "
    "grid.policy=[full,dynts,snapkv,h2o,rkv,streaming_llm]"
)
SMALL_GRID = (
    "benchmark.limit=2 decoding.max_new_tokens=20 policy.budget=14 policy.local_window=6 grid.policy=[full,random]"
)
ON_CPU = "impl=torch model.device=cpu"
LARGE_FORMS = {"cpu": ON_CPU, "torch": "impl=torch model.device=cuda", "triton": "impl=triton model.device=cuda"}
SMALL_FORMS = {"cpu": ON_CPU, "triton": "impl=triton model.device=cpu invariant=false"}
TOO_LATE = 124


def main() -> None:
    args = parse_args()
    if args.small:
        os.environ |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    elif not has_gpu():
        sys.exit("no GPU was found: the quarter hour needs one, or --small to try its parts on the CPU")
    quarter = Quarter(args.out, time.monotonic() + args.deadline, args.small)
    try:
        quarter.run(args.only or list(MOST_SECONDS))
    finally:
        quarter.close()
    print("\n".join(table(quarter.found)))
    if args.small:
        print("no time above means anything: the shapes are small, and the kernels ran in the interpreter")
    sys.exit(any(part["exit_code"] for part in quarter.found.values()))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="the folder for quarter.json and logs.tar.gz")
    parser.add_argument("--deadline", type=float, default=420, help="seconds from now at which the last part ends")
    parser.add_argument("--only", nargs="+", choices=list(MOST_SECONDS), help="these parts alone")
    parser.add_argument("--small", action="store_true", help="try the parts on the CPU")
    return parser.parse_args()


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


class Quarter:
    """The parts that have ended, and the processes of those that run."""

    def __init__(self, out: Path, end: float, small: bool) -> None:
        self.out, self.end, self.small = make_folder(out.resolve()), end, small
        self.work = Path(tempfile.mkdtemp(prefix="quarter"))
        self.logs, self.runs = make_folder(self.work / "logs"), self.work / "runs"
        self.found, self.began = dict[str, Any](), dict[str, float]()
        self.processes: list[subprocess.Popen[bytes]] = []

    def run(self, names: Sequence[str]) -> None:
        """Run these parts in the order of MOST_SECONDS, the toys and the tests side by side."""
        if "card" in names:
            self.part("card")
        self.correctness([name for name in ("toys", "tests") if name in names])
        for name in ("step", "bits", "generate", "generate_compiled"):
            if name in names:
                self.part(name)

    def left(self) -> float:
        return self.end - time.monotonic()

    def note(self, name: str, exit_code: int, figures: Mapping[str, Any]) -> None:
        """Write quarter.json anew, with this part in it."""
        seconds = time.monotonic() - self.began[name]
        self.found[name] = {"exit_code": exit_code, "seconds": round(seconds, 1), **figures}
        replace_text(self.out / "quarter.json", json.dumps(self.found, indent=1) + "\n")
        state = "done" if exit_code == 0 else f"exit status {exit_code}"
        print(f"{name}: {state} in {seconds:.0f} s, {max(0, self.left()):.0f} s left", flush=True)

    def start(self, name: str, words: Sequence[str]) -> subprocess.Popen[bytes]:
        """Start Python with these words, in a process group of its own; its output is a log of that name."""
        with (self.logs / f"{name}.log").open("wb") as log:
            command = [sys.executable, *words]
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        self.processes.append(process)
        return process

    def ended(self, process: subprocess.Popen[bytes], name: str) -> int:
        """The exit status of a part's process, which is killed with its children at the part's end or the deadline."""
        end = self.end if self.small else min(self.end, self.began[name] + MOST_SECONDS[name])
        try:
            return process.wait(max(0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.kill(process)
            return TOO_LATE

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def log(self, name: str) -> list[str]:
        return (self.logs / f"{name}.log").read_text(errors="replace").splitlines()

    def part(self, name: str) -> None:
        """Run a part of parts.py, whose figures are its last line."""
        self.began[name] = time.monotonic()
        script = str(Path(__file__).with_name("parts.py"))
        process = self.start(name, [script, name, *(["--small"] if self.small else [])])
        code, lines = self.ended(process, name), self.log(name)
        self.note(name, code, last_object(lines) or {"log": lines[-3:]})

    def correctness(self, names: Sequence[str]) -> None:
        """Run the toys and the tests side by side."""
        self.began |= dict.fromkeys(names, time.monotonic())
        models = ("toy_qwen",) if self.small else ("toy_qwen", "toy_llama")
        sweeps = dict(self._sweeps(models)) if "toys" in names else {}
        tests = self._tests() if "tests" in names else None
        if sweeps:
            codes = {name: self.ended(sweep, "toys") for name, sweep in sweeps.items()}
            same = {model: self._same(model) for model in models}
            self.note("toys", max(map(abs, codes.values())), {"exit_codes": codes, "same": same})
        if tests:
            code, lines = self.ended(tests, "tests"), self.log("tests")
            failed = [line[:300] for line in lines if line.startswith(("FAILED", "ERROR"))]
            self.note("tests", code, {"summary": lines[-1] if lines else "", "failed": failed[:20]})

    def _sweeps(self, models: Sequence[str]) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
        grid, forms = (SMALL_GRID, SMALL_FORMS) if self.small else (LARGE_GRID, LARGE_FORMS)
        for model in models:
            for form, words in forms.items():
                name = f"{model}_{form}"
                sweep = f"-m kvsweep.cli model={model} {GRID} {grid} {words} run_name={name}"
                yield name, self.start(name, [*sweep.split(), f"results_dir={self.runs}"])

    def _same(self, model: str) -> dict[str, dict[str, Any]]:
        """For each two forms of a model's sweep, how many texts are the same, and where the others begin to differ."""
        found, runs = {}, [self.runs / f"{model}_{form}" for form in (SMALL_FORMS if self.small else LARGE_FORMS)]
        for one, other in combinations(runs, 2):
            places = [place for ends in differences(one, other).values() for place in ends]
            differ = sorted(place for place in places if place is not None)
            pair = "_".join(run.name.removeprefix(f"{model}_") for run in (one, other))
            found[pair] = {"texts": len(places), "same": len(places) - len(differ), "first_differences": differ[:10]}
        return found

    def _tests(self) -> subprocess.Popen[bytes]:
        words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", "--durations=8"]
        # Two files with three fast cases, which are skipped on a CPU.
        files = GPU_TESTS[1:2] if self.small else ("-n", "5", "--dist", "worksteal", *GPU_TESTS)
        return self.start("tests", [*words, *files])

    def close(self) -> None:
        """Kill what an interrupt left running, pack the logs, and remove the runs."""
        for process in self.processes:
            if process.poll() is None:
                self.kill(process)
        shutil.make_archive(str(self.out / "logs"), "gztar", self.work, "logs")
        shutil.rmtree(self.work, ignore_errors=True)


def last_object(lines: Sequence[str]) -> dict[str, Any] | None:
    """The last JSON object among the lines."""
    for line in reversed(lines):
        with suppress(ValueError):
            if line.startswith("{"):
                return dict(json.loads(line))
    return None


def table(found: Mapping[str, Any]) -> list[str]:
    """Lines for a reader: what is right, then each group's step over the floor of the bandwidth and the estimate."""
    lines = []
    for model, pairs in found.get("toys", {}).get("same", {}).items():
        lines += [f"{model} {pair}: {n['same']} of {n['texts']} texts the same" for pair, n in pairs.items()]
    if "tests" in found:
        lines.append(f"tests: {found['tests']['summary'].strip('= ')}")
    for name, one in found.get("bits", {}).items():
        if name.startswith("slots_"):
            counts = f"{one['logits_differ']} of {one['steps']} logits, {one['texts_differ']} of {one['texts']} texts"
            lines.append(f"bits at {name.removeprefix('slots_')} slots: {counts} differ")
    lines += step_lines(found.get("step", {}).get("rows", []))
    for name in ("generate", "generate_compiled"):
        if "step_ms" in (row := found.get(name, {})):
            lines.append(f"{name}: {row['step_ms']:.2f} ms a step, {row['batch']} texts of {row['rows_each']} rows")
    return lines


COLUMNS = (
    *("policy", "slots", "invariant", "freed", "rows", "step", "forward", "drawing", "evicting"),
    *("floor", "sheet", "estimate", "step/floor", "step/estimate", "tokens/s"),
)


def step_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A table with a line for each group; all times are milliseconds a step."""
    cells = [COLUMNS, *(step_cells(row) for row in rows)]
    lines = [
        "  ".join(f"{cell:>{max(7, len(name))}}" for cell, name in zip(row, COLUMNS, strict=True)) for row in cells
    ]
    failed = [f"{row['policy']} failed: {row['failed']}" for row in rows if "failed" in row]
    return [*lines, *failed] if rows else []


def step_cells(row: Mapping[str, Any]) -> list[str]:
    words = [row["policy"], "yes" if row["invariant"] else "no", "yes" if row["freed"] else "no"]
    if "failed" in row:
        return [words[0], "-", *words[1:], *["-"] * (len(COLUMNS) - 4)]
    step = row["step_ms"]
    times = [step, row["forward_ms"], row["sampling_ms"], row["scoring_ms"] + row["eviction_ms"]]
    times += [row["floor_ms"], row["sheet_ms"], row["estimate_ms"], step / row["floor_ms"], step / row["estimate_ms"]]
    figures = ["-" if time is None else f"{time:.2f}" for time in times]
    return [
        words[0],
        f"{row['slots']}",
        *words[1:],
        f"{row['mean_rows']:.0f}",
        *figures,
        f"{row['tokens_per_second']:.0f}",
    ]


if __name__ == "__main__":
    main()
