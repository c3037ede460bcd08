"""How far the fidelity of replayed texts tells Pass@1: rank and linear correlations over published grids.

`python scripts/study/replay_study.py replay --out DIR` lets the full cache write the texts of the demo's panels and
replays them through every cell of the grid; the same command goes on where it stopped. `tables --out DIR` compares the
rows with the published cells and writes tables and figures to DIR/published.
"""

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODELS, TASKS = ("toy_qwen", "toy_llama"), ("toy_chain", "toy_regs", "toy_groups", "toy_add")
# The sign makes every number larger for a cell that is nearer to the full cache.
SIGNS = {"kl": -1, "change": 1, "flips": -1, "answer_change": 1, "first_other": 1}


def jobs(out: Path, texts: int, experiment: str, panels: Sequence[tuple[str, str]]) -> Iterator:
    """The replay of each panel, after its full cache has written the texts."""
    from dataclasses import replace

    from kvsweep.harness.replay.job import ReplayJob
    from kvsweep.harness.replay.texts import ReplayConfig
    from kvsweep.harness.settings import compose_config
    from kvsweep.harness.sweep.plan.job import make_job
    from kvsweep.harness.sweep.run.execute import run

    for model, task in panels:
        where = [f"results_dir={out}", f"run_name={experiment}", f"benchmark.limit={texts}", "draws=1"]
        job = make_job(compose_config(f"experiment={experiment}", f"model={model}", f"benchmark={task}", *where))
        full = tuple(cell for cell in job.cells if cell.policy.name == "full")
        if failed := run([replace(job, cells=full)]):
            raise failed[0]
        yield ReplayJob.of(job, ReplayConfig(limit=texts))


def replay(out: Path, texts: int, experiment: str, panels: Sequence[tuple[str, str]]) -> None:
    """Replay every panel, and note its CPU seconds."""
    from kvsweep.harness.sweep.run.decode_cells import loaded
    from kvsweep.harness.sweep.run.execute import run

    for job in jobs(out, texts, experiment, panels):
        if not job.unfinished_cells():
            continue
        loaded(job.model)
        begin = time.process_time()
        if failed := run([job]):
            raise failed[0]
        note = {"panel": job.name, "cells": len(job.cells), "texts": texts, "cpu_seconds": time.process_time() - begin}
        with (out / "seconds.jsonl").open("a") as file:
            file.write(json.dumps(note) + "\n")
        print(note, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=["replay", "tables"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--texts", type=int, default=20)
    parser.add_argument("--experiment", default="demo")
    parser.add_argument("--panels", nargs="*", default=[f"{m}/{t}" for m in MODELS for t in TASKS])
    given = parser.parse_args()
    panels = [tuple(panel.split("/")) for panel in given.panels]
    if given.stage == "replay":
        replay(given.out, given.texts, given.experiment, panels)


if __name__ == "__main__":
    main()
