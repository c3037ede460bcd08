"""How far the fidelity of replayed texts tells Pass@1: rank and linear correlations over published grids.

`python scripts/study/replay_study.py replay --out DIR` lets the full cache write the texts of the demo's panels and
replays them through every cell of the grid; the same command goes on where it stopped. `tables --out DIR` compares the
rows with the published cells and writes tables and figures to DIR/published. `tokens --out DIR` replays the first
tokens of the texts alone, and writes how they rank the cells to results/published/replay/tokens.csv.
"""

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from kvsweep.run_files.row_types import REPLAY_FILE

ROOT = Path(__file__).resolve().parents[2]
MODELS, TASKS = ("toy_qwen", "toy_llama"), ("toy_chain", "toy_regs", "toy_groups", "toy_add")
PANEL, SIZES, METHODS = (
    ["experiment", "model", "benchmark"],
    ["keep_ratio", "local_window", "budget"],
    ("spearman", "pearson"),
)
# The published folders of experiments with another name.
FOLDERS = {"bytes_toy": "bits"}
MARGIN, BOUNDS = 0.05, (0.0005, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.01, 0.02)
FIRST_TOKENS = (None, 320, 256, 224, 192)
# The sign makes every number larger for a cell that is nearer to the full cache.
SIGNS = {"kl": -1, "change": 1, "flips": -1, "answer_change": 1, "first_other": 1}


def jobs(
    out: Path, texts: int, experiment: str, panels: Sequence[tuple[str, str]], overrides: Sequence[str] = ()
) -> Iterator:
    """The replay of each panel, after its full cache has written the texts."""
    from kvsweep.harness.replay.references import ReplayConfig
    from kvsweep.harness.replay.replay_share import replay_share
    from kvsweep.harness.settings import compose_config
    from kvsweep.harness.sweep.execute import decode_all
    from kvsweep.harness.sweep.job import make_job
    from kvsweep.harness.sweep.share import share_of

    for model, task in panels:
        where = [f"results_dir={out}", f"run_name={experiment}", f"benchmark.limit={texts}", "draws=1"]
        job = make_job(
            compose_config(f"experiment={experiment}", f"model={model}", f"benchmark={task}", *where, *overrides)
        )
        # The texts are those of the unpacked full cache.
        unpacked = ["cache.bits=16"] if job.cache.is_packed else []
        names = [f"experiment={experiment}", f"model={model}", f"benchmark={task}"]
        plain = make_job(compose_config(*names, *where, *overrides, *unpacked))
        full = tuple(cell for cell in plain.cells if cell.policy.name == "full")
        if failed := decode_all([share_of(replace(plain, cells=full))]):
            raise failed[0]
        yield replay_share(job, ReplayConfig(limit=texts))


def cpu_seconds(share: Any) -> float:
    """Run a share of a job; the CPU seconds of it, without those of loading its model."""
    from kvsweep.harness.replay.replay_share import ReplayShare, replay_all
    from kvsweep.harness.sweep.execute import decode_all
    from kvsweep.harness.sweep.fill import loaded

    loaded(share.job.model)
    begin = time.process_time()
    if failed := (replay_all if isinstance(share, ReplayShare) else decode_all)([share]):
        raise failed[0]
    return time.process_time() - begin


def replay_timed(share: Any, out: Path, **said: object) -> None:
    """Replay what is left of a share; its CPU seconds and what is `said` become a line of seconds.jsonl."""
    from kvsweep.harness.sweep.share import lacking

    if not lacking(share):
        return
    note = said | {"cells": len(share.job.cells), "cpu_seconds": round(cpu_seconds(share), 1)}
    with (out / "seconds.jsonl").open("a") as file:
        file.write(json.dumps(note) + "\n")
    print(note, flush=True)


def replay(out: Path, texts: int, experiment: str, panels: Sequence[tuple[str, str]], overrides: Sequence[str]) -> None:
    """Replay every panel, and note its CPU seconds."""
    for share in jobs(out, texts, experiment, panels, overrides):
        replay_timed(share, out, panel=share.job.name, texts=texts)


def cost(out: Path, texts: int, experiment: str, panels: Sequence[tuple[str, str]], overrides: Sequence[str]) -> None:
    """Decode each panel's whole grid with forks, then replay it three times, in one process; note CPU seconds."""
    from kvsweep.harness.replay.references import ReplayConfig
    from kvsweep.harness.replay.replay_share import replay_share
    from kvsweep.harness.settings import compose_config
    from kvsweep.harness.sweep.job import make_job
    from kvsweep.harness.sweep.share import share_of

    for model, task in panels:
        where = [f"results_dir={out}", f"run_name=cost_{model}_{task}", "benchmark.limit=100", "draws=1"]
        job = make_job(
            compose_config(f"experiment={experiment}", f"model={model}", f"benchmark={task}", *where, *overrides)
        )
        replayed = replay_share(job, ReplayConfig(limit=texts))
        decoded, rounds = cpu_seconds(share_of(job)), []
        for _ in range(3):
            for file in job.run_directory.glob(f"*/{replayed.rows}"):
                file.unlink()
            rounds.append(cpu_seconds(replayed))
        note = {"panel": job.name, "cells": len(job.cells), "texts": texts, "decoding": decoded, "replay": rounds}
        with (out / "cost.jsonl").open("a") as file:
            file.write(json.dumps(note | {"share": statistics.median(rounds) / decoded}) + "\n")
        print(note, flush=True)


def tokens(out: Path, texts: int, experiment: str, panels: Sequence[tuple[str, str]], overrides: Sequence[str]) -> None:
    """Replay the first tokens of the texts, and write how their KL ranks the cells of each panel like Pass@1 does."""
    from kvsweep.harness.replay.references import ReplayConfig
    from kvsweep.harness.replay.replay_share import replay_share

    replays, found = list(jobs(out, texts, experiment, panels, overrides)), []
    for most in FIRST_TOKENS:
        config = ReplayConfig(limit=texts, tokens=most)
        seconds = {tuple(share.job.name.split()): cpu_seconds(replay_share(share.job, config)) for share in replays}
        cells = completed(joined(out, experiment, texts, config.file))
        table = correlations(cells[cells["policy"] != "full"])
        table = table[(table["cohort"] == "all") & (table["number"] == "kl")]
        named = zip(table["model"], table["benchmark"], strict=True)
        found.append(table.assign(tokens=most, cpu_seconds=[round(seconds[name], 1) for name in named]))
    columns = ["tokens", "model", "benchmark", "cells", "spearman", "cpu_seconds"]
    written = pd.concat(found)[columns].astype({"tokens": "Int64"}).round(3)
    written.to_csv(ROOT / "results/published/replay/tokens.csv", index=False)
    print(written.groupby("tokens", dropna=False)[["spearman", "cpu_seconds"]].mean().round(2).to_string())


def joined(out: Path, experiment: str, texts: int, file: str = REPLAY_FILE) -> pd.DataFrame:
    """Fidelity of every cell with all its texts, beside its published Pass@1 and decision."""
    from kvsweep.analysis.load import load_run
    from kvsweep.analysis.statistics.fidelity import fidelity, replay_rows

    run = load_run(out / experiment)
    found = fidelity(replay_rows(run, file)).merge(run.cells, on="cell_id")
    published = pd.read_csv(ROOT / "results/published" / FOLDERS.get(experiment, experiment) / "cells.csv")
    keys = [*PANEL[1:], "policy", *SIZES, "bits"]
    for table in (found, published):
        table[SIZES] = table[SIZES].apply(pd.to_numeric, errors="coerce")
    table = found[[*keys, "texts", *SIGNS]].merge(published[[*keys, "pass_at_1", "decision", "mean_tokens"]], on=keys)
    return table[table["texts"] >= texts].assign(experiment=experiment)


def completed(table: pd.DataFrame) -> pd.DataFrame:
    """The cells with what they lose of the full cache's Pass@1, and their rank in KL among the compressed ones."""
    full = table[table["policy"] == "full"].set_index(PANEL)["pass_at_1"]
    table["lost"] = full.reindex(pd.MultiIndex.from_frame(table[PANEL])).to_numpy() - table["pass_at_1"]
    ranks = table[table["policy"] != "full"].groupby(PANEL)["kl"].rank(method="first")
    return table.assign(rank=ranks).sort_values([*PANEL, "kl"], ignore_index=True)


def correlations(cells: pd.DataFrame) -> pd.DataFrame:
    """Spearman and Pearson of each number with Pass@1 per panel: all cells, and those that lose at most 10 points."""
    rows = []
    for names, panel in cells.groupby(PANEL):
        for cohort, some in (("all", panel), ("near", panel[panel["lost"] <= 0.10])):
            for name, sign in SIGNS.items():
                known = len(some) >= 5 and some[name].nunique() > 1 and some["pass_at_1"].nunique() > 1
                pair = (sign * some[name], some["pass_at_1"])
                values = [
                    function(*pair).statistic if known else np.nan for function in (stats.spearmanr, stats.pearsonr)
                ]
                own = {"cohort": cohort, "cells": len(some), "number": name}
                rows.append(dict(zip(PANEL, names, strict=True)) | own | dict(zip(METHODS, values, strict=True)))
    return pd.DataFrame(rows)


def outcome(table: pd.DataFrame, kept: pd.Series) -> dict[str, float]:
    """What a screen finds of the cells that hold and of those whose Pass@1 lies within 5 points, and its tokens."""
    compressed = table["policy"] != "full"
    holds, near = table["decision"] == "safe", compressed & (table["lost"] <= MARGIN)
    decoded = table["mean_tokens"].where(kept | ~compressed, 0)
    return {
        "holding": int(holds.sum()),
        "holding_found": int((holds & kept).sum()),
        "within_5_points": int(near.sum()),
        "within_5_points_found": int((near & kept).sum()),
        "share_of_tokens": decoded.sum() / table["mean_tokens"].sum(),
    }


def screening(table: pd.DataFrame) -> pd.DataFrame:
    """The outcome of each screen over all panels of each experiment."""
    rules = {f"screen={most}": table["rank"] <= most for most in (1, 2, 4, 6, 8, 10, 12, 16)}
    rules |= {f"screen=loss:{bound:g}": -table["change"] <= bound for bound in BOUNDS}
    found = []
    for experiment in [*table["experiment"].unique(), "all"]:
        own = table["experiment"].isin([experiment]) | (experiment == "all")
        for rule, kept in rules.items():
            found.append({"experiment": experiment, "rule": rule} | outcome(table[own], kept[own]))
    return pd.DataFrame(found)


def halves(table: pd.DataFrame, rounds: int = 300) -> pd.DataFrame:
    """A bound on the loss, calibrated on a random half of the panels and tried on the other half.

    The bound keeps nine of ten cells of the first half whose Pass@1 lies within 5 points of the full cache's, or is two
    or four times as large.
    """
    groups = [panel for _, panel in table.groupby(PANEL)]
    dice, found = np.random.default_rng(0), []
    for _ in range(rounds):
        order = dice.permutation(len(groups))
        first, second = (pd.concat([groups[i] for i in part]) for part in np.array_split(order, 2))
        near = first[(first["policy"] != "full") & (first["lost"] <= MARGIN)]
        bound = (-near["change"]).clip(lower=0).quantile(0.9)
        for factor in (1, 2, 4):
            kept = -second["change"] <= factor * bound
            found.append({"factor": factor, "bound": factor * bound} | outcome(second, kept))
    return pd.DataFrame(found)


def tables(out: Path, experiments: Sequence[str], texts: int) -> None:
    """Put the replayed experiments among the published cells, and write the tables again."""
    folder = ROOT / "results/published/replay"
    new = [joined(out, name, texts) for name in experiments]
    known = pd.read_csv(folder / "cells.csv")
    fresh = pd.concat([pd.DataFrame(columns=PANEL), *new])[PANEL].apply(tuple, axis=1)
    kept = known[~known[PANEL].apply(tuple, axis=1).isin(set(fresh))]
    table = completed(pd.concat([kept, *new], ignore_index=True))
    table.round(6).to_csv(folder / "cells.csv", index=False)
    cells = table[table["policy"] != "full"]
    found = correlations(cells)
    found.round(4).to_csv(folder / "correlations.csv", index=False)
    screens, tried = screening(table), halves(table)
    screens.round(4).to_csv(folder / "screening.csv", index=False)
    tries = tried.groupby("factor")
    summary = tries["bound"].quantile([0.05, 0.5, 0.95]).unstack().add_prefix("bound_")
    for name in ("holding", "within_5_points"):
        summary[f"{name}_screened_out"] = 1 - tries[f"{name}_found"].sum() / tries[name].sum()
    summary["share_of_tokens"] = tries["share_of_tokens"].mean()
    summary.round(5).to_csv(folder / "halves.csv")
    wide = found.pivot_table(index=PANEL, columns=["cohort", "number"], values="spearman")
    print(wide.round(2).to_string())
    print(screens[screens["experiment"] == "all"].round(3).to_string(index=False))
    print(summary.round(4).to_string())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=["replay", "cost", "tokens", "tables"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--texts", type=int, default=20)
    parser.add_argument("--experiment", default="demo")
    parser.add_argument("--panels", nargs="*", default=[f"{m}/{t}" for m in MODELS for t in TASKS])
    parser.add_argument("--overrides", nargs="*", default=[])
    given = parser.parse_args()
    panels = [tuple(panel.split("/")) for panel in given.panels]
    if given.stage != "tables":
        stage = {"replay": replay, "cost": cost, "tokens": tokens}[given.stage]
        stage(given.out, given.texts, given.experiment, panels, given.overrides)
    else:
        tables(given.out, given.experiment.split(",") if given.experiment else [], given.texts)


if __name__ == "__main__":
    main()
