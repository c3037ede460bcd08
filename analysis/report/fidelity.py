"""The table, the numbers and the figure of replayed texts."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from kvsweep.analysis.load import Run, load_run
from kvsweep.analysis.numbers.fidelity import fidelity, fidelity_bins, paired_fidelity, replay_rows
from kvsweep.base import records
from kvsweep.base.errors import UserError
from kvsweep.base.files import make_folder, replace_text, replacing

NOTE = (
    "KL and log-likelihood change in nats per token, texts as clusters; flips: tokens with another most likely token. "
    "These numbers rank settings and never show that one holds: docs/report.md."
)
_SHOWN = ("kl", "change", "flips", "answer_change")


def write_fidelity(directory: Path, file: str) -> tuple[str, Path]:
    """Write fidelity.csv, bins.csv, pairs.csv and fidelity.png below DIR/report; return the table and their folder."""
    run = load_run(directory)
    rows = replay_rows(run, file)
    if rows.empty:
        raise UserError(f"{directory} holds no row of {file}: run kvsweep-replay on that folder first.")
    folder = make_folder(directory / "report") / file.removesuffix(".jsonl").replace("replay", "fidelity")
    make_folder(folder)
    table = _named(run, fidelity(rows))
    replace_text(folder / "fidelity.csv", table.to_csv(index=False))
    bins = fidelity_bins(run, file)
    replace_text(folder / "bins.csv", bins.to_csv(index=False))
    replace_text(folder / "pairs.csv", _pairs(table, rows).to_csv(index=False))
    with replacing(folder / "fidelity.png") as temporary:
        fidelity_figure(table, bins).savefig(temporary, format="png", dpi=150)
    return f"{_text(table)}\n{NOTE}", folder


def _named(run: Run, table: pd.DataFrame) -> pd.DataFrame:
    names = ["cell_id", "model", "benchmark", "policy", "bits", "keep_ratio", "local_window", "budget", "question"]
    named = run.cells[[name for name in names if name in run.cells]].merge(table, on="cell_id")
    return named.sort_values(["model", "benchmark", "kl"], ignore_index=True)


def _pairs(table: pd.DataFrame, rows: pd.DataFrame) -> pd.DataFrame:
    """In each model and benchmark, the KL of every cell minus that of the nearest compressed cell, with Holm's p."""
    found = []
    for _, panel in table[table["policy"] != "full"].groupby(["model", "benchmark"]):
        if len(panel) > 1:
            own = rows[rows["cell_id"].isin(panel["cell_id"])]
            found.append(paired_fidelity(own, panel["cell_id"].iloc[0]).assign(nearest=panel["cell_id"].iloc[0]))
    return pd.concat(found) if found else pd.DataFrame()


def fidelity_table(run: Run) -> pd.DataFrame | None:
    """Every cell's reading of each set of texts, as texts for the page; None where nothing was replayed."""
    tables = [_shown(_named(run, fidelity(replay_rows(run, file)))) for file in _files(run)]
    return pd.concat(tables).set_index("model | benchmark") if tables else None


def _files(run: Run) -> list[str]:
    """The files of replayed texts, the full cache's own first; shards count as their file."""
    stem = records.REPLAY_FILE.removesuffix(".jsonl")
    paths = [path for cell_id in run.cells["cell_id"] for path in (run.directory / cell_id).glob(f"{stem}*.jsonl")]
    return sorted(
        {re.sub(r"-\d+of\d+\.jsonl$", ".jsonl", path.name) for path in paths}, key=lambda name: (len(name), name)
    )


def _text(table: pd.DataFrame) -> str:
    return _shown(table).to_string(index=False)


def _shown(table: pd.DataFrame) -> pd.DataFrame:
    shown = pd.DataFrame({"model | benchmark": table["model"] + " | " + table["benchmark"]})
    shown["setting"] = [_setting(row) for row in table.itertuples()]
    for name in _SHOWN:
        shown[name] = [
            f"{value:.4f} ± {error:.4f}" for value, error in zip(table[name], table[f"{name}_se"], strict=True)
        ]
    shown["evictions"] = table["evictions"].round(1)
    return shown


def _setting(row: Any) -> str:
    numbers = [getattr(row, name) for name in ("keep_ratio", "local_window", "budget")]
    return " ".join([str(row.policy), *(f"{number:g}" for number in numbers if pd.notna(number))])


def drawn_fidelity(run: Run) -> Iterator[tuple[str, str, Figure]]:
    """A file's stem, model's title and figure for each model and set of replayed texts."""
    for file in _files(run):
        rows, bins = replay_rows(run, file), fidelity_bins(run, file)
        for (model, title), cells in run.cells.groupby(["model", "model_title"], sort=False):
            own = rows[rows["cell_id"].isin(cells["cell_id"])]
            if len(own):
                table = _named(run, fidelity(own))
                name = f"{file.removesuffix('.jsonl')}_{model}"
                yield name, str(title), fidelity_figure(table, bins[bins["cell_id"].isin(table["cell_id"])])


def fidelity_figure(table: pd.DataFrame, bins: pd.DataFrame) -> Figure:
    """KL of each cell with its error; KL by distance since the last eviction and by the full cache's entropy."""
    figure = Figure(figsize=(11, max(3.5, 0.22 * len(table))), layout="constrained")
    cells, distance, entropy = figure.subplots(1, 3, width_ratios=[2, 1, 1])
    names = [f"{row.model} {row.benchmark} {_setting(row)}" for row in table.itertuples()]
    cells.errorbar(table["kl"], range(len(table)), xerr=1.96 * table["kl_se"].fillna(0), fmt="o", ms=3, lw=1)
    cells.set_yticks(range(len(table)), names, fontsize=6)
    cells.invert_yaxis()
    cells.set_xlabel("KL from the full cache, nats per token (95%)")
    axes = {"distance": (distance, "tokens since the last eviction"), "entropy": (entropy, "nats of the full cache")}
    for kind, (axis, label) in axes.items():
        for _, one in bins[bins["by"] == kind].groupby("cell_id"):
            axis.plot(range(len(one)), one["kl"], marker=".", lw=0.6, alpha=0.6)
        marks = sorted(bins.loc[bins["by"] == kind, "from"].unique())
        axis.set_xticks(range(len(marks)), [f"{mark:g}" for mark in marks])
        axis.set_xlabel(f"{label}, from")
    distance.set_ylabel("KL per token")
    return figure
