"""The report's page: texts for the template, and data for its scripts."""

import shlex
from collections.abc import Callable
from itertools import chain
from typing import Any, get_args

import numpy as np
import pandas as pd

from kvsweep.analysis import notation
from kvsweep.analysis.figures import heatmap, style
from kvsweep.analysis.load import Run, in_order, is_control
from kvsweep.analysis.notation import MISSING, Look, Scale
from kvsweep.analysis.report import card, drilldown, tables
from kvsweep.analysis.report.gallery import Picture
from kvsweep.analysis.report.rendering import render, script_json
from kvsweep.analysis.report.warnings import warnings
from kvsweep.analysis.statistics.grids import TITLES, beside_published, has_results, missing_cells
from kvsweep.analysis.statistics.metrics import SETTING, cheapest_in_words, model_title, settings_by_bytes
from kvsweep.analysis.statistics.sentences import MAX_COMPARED, Findings
from kvsweep.messages.command_line import counted
from kvsweep.messages.escape import in_one_line, visible
from kvsweep.run_files.row_types import Screened, content_hash
from kvsweep.run_files.run_reader import read_screen

MAX_LISTED = 200

# Facts that belong to every such run, and no warnings.
ROUTINE = ("Screened out, not decoded", "The full setting asked again")

# Meaning of each treatment of the question.
MEANINGS = {
    "free": "its tokens compete with all others",
    "pinned": "its tokens are always kept and count to trigger and KV budget",
    "on_top": "its tokens are always kept and do not count to the trigger",
}


def run_page(
    found: Findings,
    pictures: list[Picture],
    embedded: dict[str, str],
    files: dict[str, str],
    reload: float | None = None,
) -> str:
    """Return a run's HTML page with `drill_data`'s data; a running sweep's page reloads after `reload` seconds."""
    run, metrics, name = found.run, found.metrics, found.run.directory.resolve().name
    boards = {scale: heatmaps(found, scale) for scale in get_args(Scale)}
    data = {
        "files": files,
        "cell-data": cell_data(metrics),
        "heatmap-data": boards,
        "outcome-data": drilldown.outcome_maps(run),
    }
    facts = card.rows(card.card(found), run)
    floors = [(verdict.title, verdict.floor) for verdict in found.verdicts if verdict.floor]
    places = [place for place in metrics["question"].unique() if place in TITLES]
    page = {
        "found": found,
        "embedded": embedded,
        "name": name,
        # The page admits only scripts with this number, which is the same for the same run.
        "nonce": content_hash(["nonce", name]),
        "reload": reload if run.state in ("running", "waiting") else None,
        "data": {key: script_json(value) for key, value in data.items()},
        "benchmarks": list(metrics["benchmark_title"].unique()),
        # The headline's row for each model and benchmark title.
        "best": {(row.model_title, row.benchmark_title): row for row in notation.rows(tables.headline(metrics))},
        "counts": _label_counts(metrics),
        "marks": _marks(boards["own"]),
        "made_of": _made_of(dict(facts)),
        "matter": [title for title, floor in floors if floor.signal],
        # True if a heatmap's scores may differ by chance alone.
        "pale": any(not floor.signal for _, floor in floors),
        "questions": [(TITLES[place], MEANINGS[place]) for place in places],
        # Costs have their own section, and heatmaps are buttons on the page.
        "pictures": [one for one in pictures if not one.name.startswith(("cost", "heatmap", "difference"))],
        "heatmaps": [one for one in pictures if one.name.startswith(("heatmap", "difference"))],
        "costs": [one for one in pictures if one.name.startswith("cost")],
        "cheapest": [
            f"{model_title(metrics, model)}: {cheapest_in_words(settings_by_bytes(metrics, model))}"
            for model in found.models
            if metrics.loc[metrics["model"] == model, "bits"].nunique() > 1
        ],
        "progress": _progress(found),
        "failures": _failures(run, metrics),
        # The command that grades ungraded completions, or "".
        "grade": f"kvsweep grade {shlex.quote(in_one_line(str(run.directory)))}" * bool(metrics["ungraded"].any()),
        "concerns": _concerns(found),
        "uncharted": found.charted[MAX_COMPARED:],
        "facts": facts,
        "published": beside_published(metrics) if len(run.completions) else None,
    }
    return render("report.html.jinja", page=page, notation=notation, tables=tables)


def _label_counts(metrics: pd.DataFrame) -> dict[Any, str]:
    """Return how many settings have each label, by model and benchmark title: "15 worse, 6 unclear, 3 safe"."""
    compared = metrics[metrics["decision"].notna() & ~is_control(metrics)]
    groups = compared.groupby(["model_title", "benchmark_title"], sort=False)["decision"]
    return {
        name: f"of {counted(len(labels), 'setting')}: "
        + ", ".join(f"{count} {label}" for label, count in labels.value_counts().items())
        for name, labels in groups
    }


def _marks(boards: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return the marks in the heatmaps, with their meanings."""
    panels = [panel for board in boards for panel in board["panels"]]
    cells = chain.from_iterable([*panel["full"], *chain(*dict(panel["rows"]).values())] for panel in panels)
    return [(mark, notation.MARKS[mark]) for mark in notation.marks(f"{label}{mark}" for _, label, mark, *_ in cells)]


def _made_of(facts: dict[str, str]) -> str:
    """Return a line of the facts that readers ask for first."""
    names = ("protocol", "benchmarks", "draws", "decoding", "machine", "verified")
    return "; ".join(f"{name}: {facts[name]}" for name in names if facts.get(name))


def cell_data(metrics: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the cells in order, each with all known numbers, the texts that name it, and its marks."""
    rows = list(notation.rows(metrics))
    named = metrics.round(6).assign(
        setting=[notation.setting(row) for row in rows],
        policy_title=[notation.policy_title(row.policy, row.variant) for row in rows],
        partial=(metrics["status"] != "done") | (metrics["ungraded"] > 0),
        marks=[notation.state_marks(row) + notation.UNSURE * (getattr(row, "sure", "") == "no") for row in rows],
    )
    return [{str(name): value for name, value in row.items() if pd.notna(value)} for row in named.to_dict("records")]


def heatmaps(found: Findings, scale: Scale) -> list[dict[str, Any]]:
    """Return the clickable heatmaps on one colour scale: of each grid and model, and of other settings."""
    metrics, look, difference = found.metrics, Look(scale=scale), scale == "diff_from_full"
    boards = [
        (
            f"{model_title(metrics, model)} | {grid.title}",
            heatmap.grid_panels(grid, model, metrics, look, found.verdicts),
        )
        for grid in found.grids
        for model in grid.models
        if has_results(grid.cells, model)
    ]
    every = [number for _, panels in boards for panel in panels for number in panel.cells["value"]]
    shown = []
    for title, panels in boards:
        ranges = [list(panel.cells["value"]) if scale == "own" else every for panel in panels]
        drawn = [_drawn(panel, [own] * len(panel.columns)) for panel, own in zip(panels, ranges, strict=True)]
        shown.append({"title": title, "corner": "window ↓ ratio →", "panels": drawn})
    in_grids = {cell_id for grid in found.grids for cell_id in grid.cells["cell_id"]}
    apart = metrics[~metrics["cell_id"].isin(in_grids)].drop_duplicates([*SETTING, "benchmark"])
    for model, rows in apart.groupby("model", sort=False):
        if not found.grids or (rows["policy"] != "full").any():
            panel = _settings_panel(rows, difference)
            values = panel.matrix("value")
            compressed = values[1:] if panel.rows[0] == notation.policy_title("full") else values
            ranges = [every or list(values.flat)] * len(panel.columns) if difference else list(compressed.T)
            which = "settings outside the grids" if found.grids else "all settings"
            title = f"{model_title(metrics, str(model))} | {which}"
            shown.append({"title": title, "corner": "policy, keep ratio / window", "panels": [_drawn(panel, ranges)]})
    return shown


def _settings_panel(rows: pd.DataFrame, difference: bool) -> heatmap.Panel:
    """Return a panel of one model: settings in rows (full cache first), benchmarks in columns."""
    rows = in_order(rows, by=SETTING)
    names = [notation.setting(row) for row in rows.itertuples()]
    benchmarks = rows.drop_duplicates("benchmark").set_index("benchmark")["benchmark_title"]
    places = pd.MultiIndex.from_product([dict.fromkeys(names), benchmarks.index])
    cells = heatmap.cells(rows.set_index([names, "benchmark"]), places, difference=difference)
    return heatmap.Panel(
        title="",
        note="",
        cells=cells,
        full=cells.head(0),
        difference=difference,
        rows=list(dict.fromkeys(names)),
        columns=benchmarks.tolist(),
    )


def _drawn(panel: heatmap.Panel, ranges: list[list[float]]) -> dict[str, Any]:
    """Return a panel as data: texts and colours of its cells; each column has one of the number ranges.

    A full cache beyond the range of the compressed ones has no colour.
    """
    cmap = panel.colors(style.SEQUENTIAL)
    ends = [heatmap.limits(numbers, difference=panel.difference) for numbers in ranges]

    def cell(row: Any, limits: tuple[float, float] | None) -> list[str]:
        is_on_scale = limits is not None and limits[0] <= row.value <= limits[1]
        colours = style.shade(row.value, limits, cmap) if limits and is_on_scale else ("", "")
        return [row.cell_id, row.label, row.mark, row.error, *colours]

    cells = [cell(row, ends[place % len(ends)]) for place, row in enumerate(panel.cells.itertuples())]
    return {
        "title": panel.title.rpartition(" | ")[2],
        "chance": ", ".join(panel.chance),
        "columns": panel.columns,
        "full": [cell(row, None if panel.difference else ends[0]) for row in panel.full.itertuples()],
        "rows": [[name, cells[i * len(ends) : (i + 1) * len(ends)]] for i, name in enumerate(panel.rows)],
        "ends": [notation.percent(end / 100, signed=panel.difference) for end in ends[0]],
        "ramp": [style.shade(place, (0, 1), cmap)[0] for place in np.linspace(0, 1, 9)],
    }


def _progress(found: Findings) -> dict[str, Any]:
    """Return a sweep's progress: counts of cells and completions; `expected` is None if unknown."""
    metrics, begun = found.metrics, set(found.metrics["cell_id"])
    cells = [item for task in found.run.tasks for item in task.cells.items()]
    waiting = {cell_id: cell.expected for cell_id, cell in cells if cell_id not in begun}
    expected = metrics["expected"].sum(skipna=False) + sum(waiting.values())
    return {
        "cells": len(metrics),
        "done": int((metrics["status"] == "done").sum()),
        "replayed": int((metrics["status"] == "replayed").sum()),
        "missing": sum(len(missing_cells(grid)) for grid in found.grids),
        "waiting": len(waiting),
        "stored": int(metrics["completions"].sum()),
        "graded": int(metrics["graded"].sum()),
        "ungraded": int(metrics["ungraded"].sum()),
        "expected": None if notation.missing(expected) else int(expected),
    }


def _failures(run: Run, metrics: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the tasks that failed before their cells were done: cells, error, command."""
    done = set(metrics.loc[metrics["status"] == "done", "cell_id"])
    found = []
    for task in run.tasks:
        left = [cell for cell_id, cell in task.cells.items() if cell_id not in done]
        if task.state == "failed" and left:
            lines = [f"{one.model} | {one.benchmark}: {one.policy}: {one.finished} of {one.expected}" for one in left]
            error = visible(task.error or "The task left no error.")
            texts = {"task": task.task, "cells": _shortened(lines), "command": task.command}
            found.append(in_one_line(texts) | {"error": error})
    return found


def _concerns(found: Findings) -> list[tuple[str, list[str], bool]]:
    """Return a heading and lines for everything that a reader must know before the numbers, and True for `ROUTINE`."""
    metrics = found.metrics
    screen = read_screen(found.run.directory)
    done = metrics[(metrics["status"] == "done") & (metrics["graded"] > 0)]
    done = done.assign(most=done.groupby("condition")["problems"].transform("max"))
    conditions = metrics.drop_duplicates("condition")
    alone = conditions[~conditions["condition"].isin(metrics.loc[metrics["policy"] == "full", "condition"])]

    def listed(rows: pd.DataFrame, text: Callable[[Any], str]) -> list[str]:
        return [f"{_cell(row)}: {text(row)}" for row in notation.rows(rows)]

    concerns = {
        "Unfinished cells": listed(
            metrics[~metrics["status"].isin(["done", "replayed"])],
            lambda row: f"{row.completions} of {notation.number(row.expected).replace(MISSING, '?')} completions",
        ),
        "Screened out, not decoded": listed(
            metrics[metrics["cell_id"].isin(screen.keys()) & (metrics["completions"] == 0)],
            lambda row: _reason(screen[row.cell_id]),
        ),
        "Missing cells": _missing(found),
        "Not on all problems and draws of the others, which are compared on what both have": listed(
            done[(done["problems"] < done["most"]) | (done["graded"] % done["problems"] > 0)],
            lambda row: f"{row.graded} answers to {row.problems} of {row.most} problems",
        ),
        "Ungraded": listed(metrics[metrics["ungraded"] > 0], lambda row: f"{row.ungraded} of {row.completions}"),
        **warnings(found.run, found.margin),
        "No full-cache cell to compare with": list(alone["model_title"] + " | " + alone["benchmark_title"]),
        "Notices from reading the files": found.run.notices,
    }
    said = [(heading, lines) for heading, lines in concerns.items() if lines]
    return [(f"{heading}: {len(lines)}", _shortened(lines), heading in ROUTINE) for heading, lines in said]


def _reason(out: Screened) -> str:
    lost = f"{out.loss:.4f} nats of log-likelihood per token (KL {out.kl:.4f})"
    doubt = "the setting may still be safe, docs/statistics.md says how often such a screen errs"
    return f"{out.rule} after {out.texts} replayed texts, which lose {lost}; {doubt}"


def _missing(found: Findings) -> list[str]:
    titles = {kind: dict(found.metrics[[kind, f"{kind}_title"]].to_numpy()) for kind in ("model", "benchmark")}
    lines = []
    for grid in found.grids:
        table = missing_cells(grid).assign(policy=grid.policy, budget=grid.budget, variant=grid.variant)
        named = table.assign(**{f"{kind}_title": table[kind].map(titles[kind]) for kind in titles})
        lines += [_cell(row) for row in named.itertuples()]
    return lines


def _cell(row: Any) -> str:
    return f"{row.model_title} | {row.benchmark_title}: {notation.setting(row)}"


def _shortened(lines: list[str]) -> list[str]:
    more = len(lines) - MAX_LISTED
    return lines if more <= 0 else [*lines[:MAX_LISTED], f"and {more} more"]
