"""Verdicts of NVIDIA NeMo Evaluator, asked of its own package: valid_at_thirty.py runs this in that package's Python.

Stdin is a JSON list of questions: `rule` (gate or compare), `margin`, `draws` and `tables`, which have a pair per
problem: the right answers of the baseline and of the candidate. Stdout is the version and, per question, a verdict per
table. The first table also goes through the files and functions of the commands `nel gate` and `nel compare`, and must
get the same verdict.
"""

import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import scipy  # noqa: F401  (without it their rules change silently: z for t, and no test at all)
from nemo_evaluator.config.gate_policy import BenchmarkGateDefaults, BenchmarkGateEntry, GatePolicy, Tier
from nemo_evaluator.engine import comparison, gate

NAME = "benchmark"


def main() -> None:
    found = [answered(question) for question in json.load(sys.stdin)]
    json.dump({"version": version("nemo-evaluator"), "verdicts": found}, sys.stdout)


def answered(question: dict) -> list[str]:
    tables = [records(table, question["draws"]) for table in question["tables"]]
    rule, on_files = {"gate": (gated, gated_files), "compare": (compared, compared_files)}[question["rule"]]
    verdicts = [rule(*table, question["margin"]) for table in tables]
    with tempfile.TemporaryDirectory() as folder:
        sides = [written(Path(folder) / name, side) for name, side in zip(("full", "cell"), tables[0], strict=True)]
        whole = on_files(*sides, question["margin"])
    if whole != verdicts[0]:
        sys.exit(f"nel {question['rule']} says {whole} of files and {verdicts[0]} of the same arrays.")
    return verdicts


def records(table: list[list[int]], draws: int) -> list[dict[tuple[int, int], dict]]:
    """Their records of both sides, by problem and repeat: of each problem's answers the first ones are right."""
    return [
        {
            (problem, repeat): {"problem_idx": problem, "repeat": repeat, "reward": float(repeat < right[side])}
            for problem, right in enumerate(table)
            for repeat in range(draws)
        }
        for side in (0, 1)
    ]


def written(folder: Path, side: dict[tuple[int, int], dict]) -> Path:
    folder.mkdir()
    (folder / "results.jsonl").write_text("".join(json.dumps(record) + "\n" for record in side.values()))
    (folder / "eval-run.json").write_text(json.dumps({"benchmark": {"name": NAME}}))
    return folder


def policy(margin: float) -> GatePolicy:
    defaults = BenchmarkGateDefaults(tier=Tier.critical, metric="mean_reward", max_drop=margin)
    return GatePolicy(defaults=defaults, benchmarks={NAME: BenchmarkGateEntry()})


def gated(full: dict, cell: dict, margin: float) -> str:
    """The gate's rule on records in memory: it gets them where it would read files, and no supporting report."""
    sides = {"full": full, "cell": cell}
    gate.load_paired_records = lambda folder: sides[folder.name]
    gate.compare_runs = lambda *paths: {}
    result = gate._evaluate_benchmark(NAME, Path("full/run"), Path("cell/run"), policy(margin).resolve(NAME))
    return gate._aggregate_verdict([result])[0]


def gated_files(full: Path, cell: Path, margin: float) -> str:
    gate.load_paired_records, gate.compare_runs = comparison.load_paired_records, comparison.compare_runs
    return gate.gate_runs(full, cell, policy(margin)).verdict


def compared(full: dict, cell: dict, margin: float) -> str:
    return comparison.compare_results(full, cell, min_effect=margin)["verdict"]


def compared_files(full: Path, cell: Path, margin: float) -> str:
    return comparison.compare_runs(full / "eval-run.json", cell / "eval-run.json", min_effect=margin)["verdict"]


if __name__ == "__main__":
    main()
