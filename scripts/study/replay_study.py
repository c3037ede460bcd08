"""How far the fidelity of replayed texts tells Pass@1: rank and linear correlations over published grids.

`python scripts/study/replay_study.py replay --out DIR` lets the full cache write the texts of the demo's panels and
replays them through every cell of the grid; the same command goes on where it stopped. `tables --out DIR` compares the
rows with the published cells and writes tables and figures to DIR/published.
"""

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import stats

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


def cost(out: Path, texts: int, experiment: str, panels: Sequence[tuple[str, str]]) -> None:
    """Decode each panel's whole grid, all cells forked from shared texts, then replay it three times, in one process."""
    from kvsweep.harness.replay.job import ReplayJob
    from kvsweep.harness.replay.texts import ReplayConfig
    from kvsweep.harness.settings import compose_config
    from kvsweep.harness.sweep.plan.job import make_job
    from kvsweep.harness.sweep.run.decode_cells import loaded
    from kvsweep.harness.sweep.run.execute import run

    def seconds(job: object) -> float:
        begin = time.process_time()
        if failed := run([job]):
            raise failed[0]
        return time.process_time() - begin

    for model, task in panels:
        where = [f"results_dir={out}", f"run_name=cost_{model}_{task}", "benchmark.limit=100", "draws=1"]
        job = make_job(compose_config(f"experiment={experiment}", f"model={model}", f"benchmark={task}", *where))
        replayed = ReplayJob.of(job, ReplayConfig(limit=texts))
        loaded(job.model)
        decoded, rounds = seconds(job), []
        for _ in range(3):
            for file in job.run_directory.glob(f"*/{replayed.replay.file}"):
                file.unlink()
            rounds.append(seconds(replayed))
        note = {"panel": job.name, "cells": len(job.cells), "texts": texts, "decoding": decoded, "replay": rounds}
        with (out / "cost.jsonl").open("a") as file:
            file.write(json.dumps(note | {"share": statistics.median(rounds) / decoded}) + "\n")
        print(note, flush=True)


def joined(out: Path, experiment: str) -> pd.DataFrame:
    """Fidelity of every compressed cell beside its published Pass@1 and decision."""
    from kvsweep.analysis.load import load_run
    from kvsweep.analysis.numbers.fidelity import fidelity, replay_rows

    run = load_run(out / experiment)
    found = fidelity(replay_rows(run)).merge(run.cells, on="cell_id")
    published = pd.read_csv(ROOT / "results/published" / experiment / "cells.csv")
    full = published[published["policy"] == "full"].set_index(["model", "benchmark"])["pass_at_1"]
    keys = ["model", "benchmark", "policy", "keep_ratio", "local_window", "budget"]
    for name in keys[3:]:
        found[name] = pd.to_numeric(found[name], errors="coerce")
    table = found[[*keys, "texts", *SIGNS]].merge(published[[*keys, "pass_at_1", "decision", "mean_tokens"]], on=keys)
    table["lost"] = [full[row.model, row.benchmark] - row.pass_at_1 for row in table.itertuples()]
    table["rank"] = table.groupby(["model", "benchmark"])["kl"].rank(method="first").astype(int)
    return table


def correlations(table: pd.DataFrame) -> pd.DataFrame:
    """Spearman and Pearson of each number with Pass@1 per panel: all cells, and those that lose at most 10 points."""
    rows = []
    for (model, task), panel in table.groupby(["model", "benchmark"]):
        for cohort, cells in (("all", panel), ("near", panel[panel["lost"] <= 0.10])):
            for name, sign in SIGNS.items():
                known = len(cells) >= 5 and cells[name].nunique() > 1 and cells["pass_at_1"].nunique() > 1
                pair = (sign * cells[name], cells["pass_at_1"])
                rows.append(
                    {
                        "model": model,
                        "benchmark": task,
                        "cohort": cohort,
                        "cells": len(cells),
                        "number": name,
                        "spearman": stats.spearmanr(*pair).statistic if known else np.nan,
                        "pearson": stats.pearsonr(*pair).statistic if known else np.nan,
                    }
                )
    return pd.DataFrame(rows)


def screening(table: pd.DataFrame) -> pd.DataFrame:
    """For each size of the screen: the cells that hold, those it finds, and the panels whose best cell it keeps."""
    rows = []
    panels = [panel for _, panel in table.groupby(["model", "benchmark"])]
    for most in range(1, 21):
        kept = [panel[panel["rank"] <= most] for panel in panels]
        holds = sum(int((panel["decision"] == "holds").sum()) for panel in panels)
        found = sum(int((panel["decision"] == "holds").sum()) for panel in kept)
        best = sum(
            chosen["pass_at_1"].max() >= panel["pass_at_1"].max() for chosen, panel in zip(kept, panels, strict=True)
        )
        loss = [
            panel["pass_at_1"].max() - chosen["pass_at_1"].max() for chosen, panel in zip(kept, panels, strict=True)
        ]
        share = sum(c["mean_tokens"].sum() for c in kept) / sum(p["mean_tokens"].sum() for p in panels)
        rows.append(
            {
                "screen": most,
                "holding": holds,
                "found": found,
                "panels_with_best": int(best),
                "panels": len(panels),
                "worst_loss_of_best": max(loss),
                "share_of_cell_tokens": share,
            }
        )
    return pd.DataFrame(rows)


def tables(out: Path, experiment: str) -> None:
    """Write the tables and the figure."""
    from matplotlib.figure import Figure

    folder = out / "published"
    folder.mkdir(exist_ok=True)
    table = joined(out, experiment)
    table.round(6).to_csv(folder / "cells.csv", index=False)
    found = correlations(table)
    found.round(4).to_csv(folder / "correlations.csv", index=False)
    screening(table).round(4).to_csv(folder / "screening.csv", index=False)
    figure = Figure(figsize=(11, 5.5), layout="constrained")
    for axis, ((model, task), panel) in zip(
        figure.subplots(2, 4).flat, table.groupby(["model", "benchmark"]), strict=True
    ):
        axis.scatter(panel["kl"], 100 * panel["pass_at_1"], s=14, c=panel["keep_ratio"], cmap="viridis")
        axis.set_xscale("log")
        axis.axhline(100 * (panel["pass_at_1"] + panel["lost"]).iloc[0], lw=0.8, ls="--", color="grey")
        value = found.query("model == @model and benchmark == @task and cohort == 'all' and number == 'kl'")[
            "spearman"
        ].iloc[0]
        axis.set_title(f"{model} {task}: Spearman {value:.2f}", fontsize=9)
        axis.set_xlabel("KL per token", fontsize=8)
        axis.set_ylabel("Pass@1 in %", fontsize=8)
    figure.savefig(folder / "kl_and_pass_at_1.png", dpi=130)
    wide = found.pivot_table(index=["model", "benchmark"], columns=["cohort", "number"], values="spearman")
    print(wide.round(2).to_string())
    print(screening(table).round(3).to_string(index=False))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=["replay", "cost", "tables"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--texts", type=int, default=20)
    parser.add_argument("--experiment", default="demo")
    parser.add_argument("--panels", nargs="*", default=[f"{m}/{t}" for m in MODELS for t in TASKS])
    given = parser.parse_args()
    panels = [tuple(panel.split("/")) for panel in given.panels]
    if given.stage != "tables":
        {"replay": replay, "cost": cost}[given.stage](given.out, given.texts, given.experiment, panels)
    else:
        tables(given.out, given.experiment)


if __name__ == "__main__":
    main()
