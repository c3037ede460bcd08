"""The report's page: texts for the template, and data for its scripts."""

import shlex
from collections.abc import Iterable
from typing import Any, get_args

import numpy as np
import pandas as pd

from kvsweep.analysis import notation
from kvsweep.analysis.figures import heatmap, style
from kvsweep.analysis.load import Run, in_order, is_control
from kvsweep.analysis.notation import Look, Scale
from kvsweep.analysis.report import card, drilldown, tables
from kvsweep.analysis.report.gallery import Picture
from kvsweep.analysis.report.rendering import render, script_json
from kvsweep.analysis.report.warnings import cell_title, warnings
from kvsweep.analysis.statistics.grids import TITLES, beside_published, has_results, missing_cells
from kvsweep.analysis.statistics.metrics import (
    SETTING,
    cells_of_model,
    cheapest_in_words,
    model_title,
    settings_by_bytes,
)
from kvsweep.analysis.statistics.sentences import MAX_COMPARED, Findings, better_policies, label_counts
from kvsweep.messages.command_line import counted
from kvsweep.messages.escape import in_one_line, visible
from kvsweep.run_files.row_types import Screened, content_hash
from kvsweep.run_files.run_reader import read_screen

MAX_LISTED = 200

# The facts of the card that readers ask for first.
FIRST_FACTS = ("protocol", "benchmarks", "draws", "decoding", "machine", "verified")

# Facts that belong to every such run, and no warnings.
ROUTINE = ("Screened out, not decoded", "The full setting asked again")

# Meaning of each treatment of the question.
MEANINGS = {
    "free": "its tokens compete with all others",
    "pinned": "its tokens are always kept and count to trigger and KV budget",
    "on_top": "its tokens are always kept and count to neither trigger nor KV budget",
}


def run_page(
    findings: Findings,
    pictures: list[Picture],
    embedded: dict[str, str],
    files: dict[str, str],
    reload: float | None = None,
) -> str:
    """Return a run's HTML page; a running sweep's page reloads after `reload` seconds.

    `embedded` and `files` are those of `drill_data`.
    """
    run = findings.run
    metrics = findings.metrics
    name = run.directory.resolve().name
    boards = {scale: heatmaps(findings, scale) for scale in get_args(Scale)}
    data = {
        "files": files,
        "cell-data": cell_data(metrics),
        "heatmap-data": boards,
        "outcome-data": drilldown.outcome_maps(run),
    }
    facts = card.rows(card.card(findings))
    floors = [(verdict.title, verdict.floor) for verdict in findings.verdicts if verdict.floor]
    matter = [title for title, floor in floors if floor.signal]
    page = {
        "findings": findings,
        "embedded": embedded,
        "name": name,
        # The page admits only scripts with this number, which is the same for the same run.
        "nonce": content_hash(["nonce", name]),
        "reload": reload if run.state in ("running", "waiting") else None,
        "data": {key: script_json(value) for key, value in data.items()},
        # The headline's row for each model and benchmark title.
        "best": {(row.model_title, row.benchmark_title): row for row in notation.rows(tables.headline(metrics))},
        "counts": _label_counts(metrics),
        "marks": _marks(boards["own"]),
        "made_of": "; ".join(f"{name}: {facts[name]}" for name in FIRST_FACTS if name in facts),
        "better": better_policies(findings.pairs),
        # Titles of the grids whose scores differ by more than chance.
        "matter": matter,
        # True if a heatmap's scores may differ by chance alone.
        "pale": len(matter) < len(floors),
        "questions": [(TITLES[name], MEANINGS[name]) for name in metrics["question"].unique() if name in TITLES],
        "pictures": pictures,
        "cheapest": _cheapest(findings),
        "progress": _progress(findings),
        "failures": _failures(run, metrics),
        # For the command that grades.
        "directory": shlex.quote(in_one_line(str(run.directory))),
        "concerns": _concerns(findings),
        # Settings that are too many for bar charts.
        "uncharted": findings.charted[MAX_COMPARED:],
        "facts": facts,
        "published": beside_published(metrics) if len(run.completions) else None,
    }
    return render("report.html.jinja", page=page, notation=notation, tables=tables)


def _cheapest(findings: Findings) -> list[str]:
    """Return for each model with several numbers of bits a line on its cheapest setting."""
    lines = []
    metrics = findings.metrics
    for model in findings.models:
        if metrics.loc[metrics["model"] == model, "bits"].nunique() > 1:
            cheapest = cheapest_in_words(settings_by_bytes(metrics, model))
            lines.append(f"{model_title(metrics, model)}: {cheapest}")
    return lines


def _label_counts(metrics: pd.DataFrame) -> dict[Any, str]:
    """Return how many settings have each label, by model and benchmark title: "of 24 settings: 3 safe, ..."."""
    compared = metrics[metrics["decision"].notna() & ~is_control(metrics)]
    counts = {}
    for name, labels in compared.groupby(["model_title", "benchmark_title"], sort=False)["decision"]:
        counts[name] = f"of {counted(len(labels), 'setting')}: {label_counts(labels)}"
    return counts


def _marks(boards: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return the marks in the heatmaps, with their meanings."""
    cells = []
    for board in boards:
        for panel in board["panels"]:
            cells += panel["full"]
            for _, cells_of_row in panel["rows"]:
                cells += cells_of_row
    # The parts of a cell are in the order of `_drawn`.
    texts = [f"{label}{mark}" for _, label, mark, *_ in cells]
    return [(mark, notation.MARKS[mark]) for mark in notation.marks(texts)]


def cell_data(metrics: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the cells in order, each with all known numbers, the texts that name it, and its marks."""
    cells = []
    rounded = metrics.round(6).to_dict("records")
    for row, numbers in zip(notation.rows(metrics), rounded, strict=True):
        texts = {
            "setting": notation.setting(row),
            "policy_title": notation.policy_title(row.policy, row.variant),
            "partial": row.status != "done" or row.ungraded > 0,
            "marks": notation.state_marks(row),
        }
        values = numbers | texts
        cells.append({str(name): value for name, value in values.items() if pd.notna(value)})
    return cells


def heatmaps(findings: Findings, scale: Scale) -> list[dict[str, Any]]:
    """Return the clickable heatmaps on one colour scale: of each grid and model, and of other settings."""
    metrics = findings.metrics
    difference = scale == "diff_from_full"
    in_grids: set[str] = set()
    for grid in findings.grids:
        in_grids.update(grid.cells["cell_id"])
    is_inside = metrics["cell_id"].isin(in_grids)
    grid_values = 100 * metrics.loc[is_inside, "diff_to_full" if difference else "pass_at_1"]
    boards = []
    for grid in findings.grids:
        for model in grid.models:
            if not has_results(grid.cells, model):
                continue
            drawn = []
            for panel in heatmap.grid_panels(grid, model, metrics, Look(scale=scale), findings.verdicts):
                # The colours span this panel's values, or those of all panels.
                values = panel.cells["value"] if scale == "own" else grid_values
                drawn.append(_drawn(panel, [values] * len(panel.columns)))
            title = f"{model_title(metrics, model)} | {grid.title}"
            boards.append({"title": title, "corner": "window ↓ ratio →", "panels": drawn})
    which = "settings outside the grids" if findings.grids else "all settings"
    for model in findings.models:
        rows = cells_of_model(metrics[~is_inside], model)
        # A full cache alone needs no table where the grids' panels show it.
        has_compressed = (rows["policy"] != "full").any()
        if has_compressed or (len(rows) and not findings.grids):
            title = f"{model_title(metrics, model)} | {which}"
            drawn = [_settings_panel(rows, grid_values, difference)]
            boards.append({"title": title, "corner": "policy, keep ratio / window", "panels": drawn})
    return boards


def _settings_panel(rows: pd.DataFrame, grid_values: pd.Series, difference: bool) -> dict[str, Any]:
    """Return a drawn panel of one model: settings in rows (full cache first), benchmarks in columns."""
    rows = in_order(rows, by=SETTING)
    names = notation.settings(rows)
    settings = list(dict.fromkeys(names))
    benchmarks = rows.drop_duplicates("benchmark").set_index("benchmark")["benchmark_title"]
    places = pd.MultiIndex.from_product([settings, benchmarks.index])
    # The rows are indexed as `places` is: by the setting's name and the benchmark.
    cells = heatmap.cells(rows.set_index([names, "benchmark"]), places, difference=difference)
    panel = heatmap.Panel(
        title="",
        cells=cells,
        full=cells.head(0),
        difference=difference,
        rows=settings,
        columns=benchmarks.tolist(),
    )
    # The colours of each benchmark span its compressed settings. The full cache is none, and would widen the span.
    first_is_full = settings[0] == notation.policy_title("full")
    column_values = list(panel.matrix("value")[int(first_is_full) :].T)
    # Those of differences span all of them, also in the grids.
    if difference:
        column_values = [cells["value"] if grid_values.empty else grid_values] * len(benchmarks)
    return _drawn(panel, column_values)


def _drawn(panel: heatmap.Panel, column_values: list[Any]) -> dict[str, Any]:
    """Return a panel as data: texts and colours of its cells.

    `column_values` has for each column the numbers whose range its colours span. A full cache beyond the range of the
    compressed ones has no colour.
    """
    cmap = panel.colors(style.SEQUENTIAL)
    column_limits = [heatmap.limits(values, difference=panel.difference) for values in column_values]

    def cell(row: Any, limits: tuple[float, float]) -> list[str]:
        low, high = limits
        colours = ("", "")
        if low <= row.value <= high:
            colours = style.shade(row.value, limits, cmap)
        return [row.cell_id, row.label, row.mark, row.error, *colours]

    # The page shows the scale of a heatmap alone, whose columns share their limits.
    first_limits = column_limits[0]
    full_limits = (np.inf, -np.inf) if panel.difference else first_limits  # a difference to itself has no colour
    rows = []
    cells = notation.rows(panel.cells)  # row by row: each row of the panel takes as many as there are columns
    for name in panel.rows:
        rows.append([name, [cell(next(cells), limits) for limits in column_limits]])
    _, _, title = panel.title.rpartition(" | ")  # without the model, which the page names above
    return {
        "title": title,
        "chance": ", ".join(panel.chance),
        "columns": panel.columns,
        "full": [cell(row, full_limits) for row in notation.rows(panel.full)],
        "rows": rows,
        "ends": [notation.percent(end / 100, signed=panel.difference) for end in first_limits],
        "ramp": [style.shade(share, (0, 1), cmap)[0] for share in np.linspace(0, 1, 9)],
    }


def _progress(findings: Findings) -> dict[str, Any]:
    """Return a sweep's progress: counts of cells and completions; `expected` is a text."""
    metrics = findings.metrics
    begun = set(metrics["cell_id"])
    waiting = {}
    for task in findings.run.tasks:
        for cell_id, cell in task.cells.items():
            if cell_id not in begun:
                waiting[cell_id] = cell.expected
    # Unknown as soon as one cell's number is.
    expected = metrics["expected"].sum(skipna=False) + sum(waiting.values())
    return {
        "cells": len(metrics),
        "done": 0,
        "replayed": 0,
        **metrics["status"].value_counts(),
        "missing": len(_missing(findings)),
        "waiting": len(waiting),
        **metrics[["completions", "graded", "ungraded"]].sum(),
        "expected": notation.decimal(expected, 0),
    }


def _failures(run: Run, metrics: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the tasks that failed before their cells were done: cells, error, command."""
    done = set(metrics.loc[metrics["status"] == "done", "cell_id"])
    failures = []
    for task in run.tasks:
        lines = []
        for cell_id, cell in task.cells.items():
            if cell_id not in done:
                setting = f"{cell.model} | {cell.benchmark}: {cell.policy}"
                lines.append(f"{setting}: {cell.finished} of {cell.expected}")
        if lines and task.state == "failed":
            # The error keeps its lines; the other texts are put on one line each.
            texts = {"task": task.task, "cells": _shortened(lines), "command": task.command}
            error = visible(task.error or "The task left no error.")
            failures.append(in_one_line(texts) | {"error": error})
    return failures


def _concerns(findings: Findings) -> list[tuple[str, list[str], bool]]:
    """Return a heading and lines for everything that a reader must know before the numbers, and True for `ROUTINE`."""
    metrics = findings.metrics
    screen = read_screen(findings.run.directory)
    done = metrics[(metrics["status"] == "done") & (metrics["graded"] > 0)]
    most_problems = done.groupby("condition")["problems"].max()
    with_full = set(metrics.loc[metrics["policy"] == "full", "condition"])
    unfinished = []
    screened_out = []
    incomplete = []
    ungraded = []
    without_full = {}  # by condition
    for row in notation.rows(metrics):
        title = cell_title(row)
        if row.status == "partial":
            unfinished.append(f"{title}: {row.completions} of {notation.number(row.expected)} completions")
        elif row.graded and row.status == "done":
            most = most_problems[row.condition]
            # Fewer problems than another cell, or not as many draws of each.
            if row.problems < most or row.graded % row.problems:
                incomplete.append(f"{title}: {row.graded} answers to {row.problems} of {most} problems")
        if row.cell_id in screen and not row.completions:
            screened_out.append(f"{title}: {_reason(screen[row.cell_id])}")
        if row.ungraded > 0:
            ungraded.append(f"{title}: {row.ungraded} of {row.completions}")
        if row.condition not in with_full:
            without_full[row.condition] = f"{row.model_title} | {row.benchmark_title}"
    concerns: dict[str, Iterable[str]] = {
        "Unfinished cells": unfinished,
        "Screened out, not decoded": screened_out,
        "Missing cells": _missing(findings),
        "Not on all problems and draws of the others, which are compared on what both have": incomplete,
        "Ungraded": ungraded,
        **warnings(findings.run, findings.margin),
        "No full-cache cell to compare with": without_full.values(),
        "Notices from reading the files": findings.run.notices,
    }
    shown = []
    for heading, sentences in concerns.items():
        lines = list(sentences)
        if lines:
            shown.append((f"{heading}: {len(lines)}", _shortened(lines), heading in ROUTINE))
    return shown


def _reason(screened: Screened) -> str:
    lost = f"{screened.loss:.4f} nats of log-likelihood per token (KL {screened.kl:.4f})"
    doubt = "the setting may still be safe, docs/statistics.md says how often such a screen errs"
    return f"{screened.rule} after {screened.texts} replayed texts, which lose {lost}; {doubt}"


def _missing(findings: Findings) -> list[str]:
    """Name the settings of the grids that have no cell."""
    model_titles = dict(findings.metrics[["model", "model_title"]].to_numpy())
    benchmark_titles = dict(findings.metrics[["benchmark", "benchmark_title"]].to_numpy())
    lines = []
    for grid in findings.grids:
        cells = missing_cells(grid).assign(policy=grid.policy, budget=grid.budget, variant=grid.variant)
        for row in notation.rows(cells):
            panel = f"{model_titles[row.model]} | {benchmark_titles[row.benchmark]}"
            lines.append(f"{panel}: {notation.setting(row)}")
    return lines


def _shortened(lines: list[str]) -> list[str]:
    more = len(lines) - MAX_LISTED
    if more <= 0:
        return lines
    return [*lines[:MAX_LISTED], f"and {more} more"]
