"""The table, the numbers and the figures of replayed texts."""

import re
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from kvsweep.analysis import format
from kvsweep.analysis.format import DEFAULT_LOOK, Look
from kvsweep.analysis.load import Run, load_run
from kvsweep.analysis.numbers.fidelity import fidelity, fidelity_bins, paired_fidelity, replay_rows
from kvsweep.analysis.pictures.fidelity import fidelity_figure
from kvsweep.analysis.pictures.style import save_figure
from kvsweep.base import records
from kvsweep.base.errors import UserError
from kvsweep.base.escape import file_name
from kvsweep.base.files import make_folder, replace_text

NOTE = (
    "KL and log-likelihood change in nats per token, texts as clusters; flips: tokens with another most likely token. "
    "These numbers rank settings and never show that one holds: docs/report.md."
)
_SHOWN = ("kl", "change", "flips", "answer_change")
_NAMES = ["cell_id", "model", "model_title", "benchmark", "benchmark_title", "policy", "variant", "bits"]
_NAMES += ["keep_ratio", "local_window", "budget", "question", "condition"]


def write_fidelity(directory: Path, file: str) -> tuple[str, Path]:
    """Write fidelity.csv, bins.csv, pairs.csv and the figures below DIR/report; return the table and their folder."""
    run = load_run(directory)
    rows = replay_rows(run, file)
    if rows.empty:
        raise UserError(f"{directory} holds no row of {file}: run kvsweep-replay on that folder first.")
    folder = make_folder(directory / "report") / file.removesuffix(".jsonl").replace("replay", "fidelity")
    make_folder(folder)
    table = _named(run, rows)
    for name, numbers in (("fidelity", table), ("bins", fidelity_bins(run, file)), ("pairs", _pairs(table, rows))):
        replace_text(folder / f"{name}.csv", format.csv_text(numbers))
    for model, _, figure in _figures(run, file, DEFAULT_LOOK):
        save_figure(figure, folder, file_name("fidelity", model))
    return f"{_shown(table).to_string(index=False)}\n{NOTE}", folder


def _named(run: Run, rows: pd.DataFrame) -> pd.DataFrame:
    named = run.cells[_NAMES].merge(fidelity(rows), on="cell_id")
    return named.sort_values(["model", "benchmark", "kl"], ignore_index=True)


def _pairs(table: pd.DataFrame, rows: pd.DataFrame) -> pd.DataFrame:
    """In each condition the KL of every cell minus that of the nearest compressed cell, with Holm's p."""
    found = []
    for _, panel in table[table["policy"] != "full"].groupby("condition", sort=False):
        if len(panel) > 1:
            own = rows[rows["cell_id"].isin(panel["cell_id"])]
            found.append(paired_fidelity(own, panel["cell_id"].iloc[0]).assign(nearest=panel["cell_id"].iloc[0]))
    return pd.concat(found) if found else pd.DataFrame()


def fidelity_table(run: Run) -> pd.DataFrame | None:
    """Every cell's reading of each set of texts, as texts for the page; None where nothing was replayed."""
    tables = [_shown(_named(run, replay_rows(run, file))) for file in _files(run)]
    return pd.concat(tables).set_index("model | benchmark") if tables else None


def _shown(table: pd.DataFrame) -> pd.DataFrame:
    shown = pd.DataFrame({"model | benchmark": table["model_title"] + " | " + table["benchmark_title"]})
    shown["setting"] = [format.setting(row) for row in table.itertuples()]
    for name in _SHOWN:
        errors = table[f"{name}_se"].map(" ± {:.4f}".format).where(table[f"{name}_se"].notna(), "")
        shown[name] = table[name].map("{:.4f}".format) + errors
    return shown.assign(evictions=table["evictions"].round(1), texts=table["texts"])


def drawn_fidelity(run: Run, look: Look) -> Iterator[tuple[str, str, Figure]]:
    """A file's stem with the model's name, the model's title and the figure, for each set of replayed texts."""
    for file in _files(run):
        for model, title, figure in _figures(run, file, look):
            yield f"{file.removesuffix('.jsonl')}_{model}", title, figure


def _figures(run: Run, file: str, look: Look) -> Iterator[tuple[str, str, Figure]]:
    table, bins = _named(run, replay_rows(run, file)), fidelity_bins(run, file)
    for (model, title), own in table.groupby(["model", "model_title"], sort=False):
        yield str(model), str(title), fidelity_figure(own, bins[bins["cell_id"].isin(own["cell_id"])], str(title), look)


def _files(run: Run) -> list[str]:
    """The files of replayed texts, the full cache's own first; shards count as their file."""
    stem = records.REPLAY_FILE.removesuffix(".jsonl")
    paths = [path for cell_id in run.cells["cell_id"] for path in (run.directory / cell_id).glob(f"{stem}*.jsonl")]
    names = {re.sub(r"-\d+of\d+\.jsonl$", ".jsonl", path.name) for path in paths}
    return sorted(names, key=lambda name: (len(name), name))
