"""Save and caption a report's figures, and write the files of `kvsweep replay`."""

import base64
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from kvsweep.analysis import notation
from kvsweep.analysis.figures import cost, heatmap, rankings, tradeoffs
from kvsweep.analysis.figures.style import save_figure
from kvsweep.analysis.load import Run, load_run
from kvsweep.analysis.notation import DEFAULT_LOOK, PAGE_WIDTH, Look
from kvsweep.analysis.report import tables
from kvsweep.analysis.statistics.fidelity import fidelity_bins, paired_fidelity, replay_rows, timings
from kvsweep.analysis.statistics.grids import PolicyGrid, has_results, published_grid
from kvsweep.analysis.statistics.sentences import MAX_COMPARED, Findings
from kvsweep.messages.errors import UserError
from kvsweep.messages.escape import file_name
from kvsweep.run_files.safe_files import make_folder, replace_text

# A figure (its label is its caption), and the parts of its file name.
Drawn = tuple[Figure | None, tuple[str, ...]]


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A figure on the page: `kind` begins its `name`, `address` holds its SVG as a data URL.

    `width` is its share of a page's.
    """

    caption: str
    kind: str
    name: str
    address: str
    width: float


def draw_all(findings: Findings, folder: Path, look: Look) -> list[Picture]:
    """Draw and save the figures of a run."""
    pictures = []
    for figure, name in _of_run(findings, look):
        if figure:
            stem = file_name(*name)
            written = save_figure(figure, folder, stem, pdf=look.pdf)
            svg = base64.b64encode(written["svg"].read_bytes()).decode()
            share = min(1.0, figure.get_figwidth() / PAGE_WIDTH)
            caption = str(figure.get_label())
            address = f"data:image/svg+xml;base64,{svg}"
            pictures.append(Picture(caption=caption, kind=name[0], name=stem, address=address, width=share))
    return pictures


def _of_run(findings: Findings, look: Look) -> Iterator[Drawn]:
    """Yield the figures of a run: each model's, then those of replayed completions and of noise floors."""
    for model in findings.models:
        yield from _of_model(findings, model, look)
    for file in tables.replay_files(findings.run):
        for model, figure in _fidelity_figures(findings.run, file, look):
            yield figure, ("fidelity", f"{file.removesuffix('.jsonl')}_{model}")
    floors = [(verdict.title, verdict.floor) for verdict in findings.verdicts if verdict.floor]
    if floors:
        yield rankings.noise_figure(floors, look), ("noise",)


def _of_model(findings: Findings, model: str, look: Look) -> Iterator[Drawn]:
    """Yield a model's figures: its grids, bars of policies, costs of a step, and scores against costs."""
    metrics = findings.metrics
    for grid in findings.grids:
        if has_results(grid.cells, model):
            yield from _of_grid(findings, grid, model, look)
    for setting in findings.charted[:MAX_COMPARED]:
        if has_results(setting.cells, model):
            figure = rankings.policy_bars_figure(setting, model, metrics, look)
            yield figure, ("policies", model, setting.file_part)
    yield cost.cost_figure(findings.run, metrics, model, look), ("cost", model)
    timed = timings(findings.run)
    for x in tradeoffs.COSTS:
        yield tradeoffs.tradeoff(x, metrics, model, look, timed), (x, model)


def _of_grid(findings: Findings, grid: PolicyGrid, model: str, look: Look) -> Iterator[Drawn]:
    """Yield a grid's heatmaps for one model: scores, published scores, differences, and means over benchmarks."""
    metrics = findings.metrics
    trigger = "" if notation.missing(grid.budget) else notation.number(grid.budget)
    name = (model, grid.policy, trigger, grid.variant)
    yield heatmap.grid_figure(grid, model, metrics, look, findings.verdicts), ("heatmap", *name)
    published = published_grid(grid, model)
    has_texts = len(findings.run.completions) > 0  # else it is a file of scores, which may be the published ones
    if published is not None and has_texts:
        figure = heatmap.published_figure(grid, model, metrics, published, look)
        yield figure, ("published", *name)
    # Without the verdicts, whose noise floors are those of scores and not of differences.
    if grid.cells.loc[grid.cells["model"] == model, "diff_to_full"].notna().any():
        figure = heatmap.grid_figure(grid, model, metrics, replace(look, scale="diff_from_full"))
        yield figure, ("difference", *name)
    if len(grid.benchmarks) > 1:
        yield heatmap.mean_figure(grid, model, metrics, look), ("mean", *name)


def _fidelity_figures(run: Run, file: str, look: Look) -> Iterator[tuple[str, Figure]]:
    """Yield each model of some replayed completions, and its figure."""
    bins = fidelity_bins(run, file)
    table = tables.fidelity_by_cell(run, file)
    for (model, title), cells in table.groupby(["model", "model_title"], sort=False):
        bins_of_model = bins[bins["cell_id"].isin(cells["cell_id"])]
        yield str(model), rankings.fidelity_figure(cells, bins_of_model, str(title), look)


def write_fidelity(directory: Path, file: str) -> tuple[str, Path]:
    """Write fidelity.csv, bins.csv, pairs.csv and the figures below DIR/report; return the table and their folder."""
    run = load_run(directory)
    rows = replay_rows(run, file)
    if rows.empty:
        raise UserError(f"{directory} holds no row of {file}: run kvsweep replay on that folder first.")
    folder = make_folder(directory / "report") / file.removesuffix(".jsonl").replace("replay", "fidelity")
    make_folder(folder)
    table = tables.fidelity_by_cell(run, file)
    # In each condition, every cell's KL minus that of the compressed cell with the least KL, with Holm's p.
    pairs = []
    for _, panel in table[table["policy"] != "full"].groupby("condition", sort=False):
        # `fidelity_by_cell` has the least KL first.
        nearest = panel["cell_id"].iloc[0]
        if len(panel) > 1:
            panel_rows = rows[rows["cell_id"].isin(panel["cell_id"])]
            pairs.append(paired_fidelity(panel_rows, nearest).assign(nearest=nearest))
    pair_table = pd.concat(pairs) if pairs else pd.DataFrame()
    files = {"fidelity": table, "bins": fidelity_bins(run, file), "pairs": pair_table}
    for name, numbers in files.items():
        replace_text(folder / f"{name}.csv", notation.csv_text(numbers))
    for model, figure in _fidelity_figures(run, file, DEFAULT_LOOK):
        save_figure(figure, folder, file_name("fidelity", model))
    return tables.fidelity_text(table), folder
