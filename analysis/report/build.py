"""`kvsweep-report DIR`: DIR/report with cells.csv, the pictures, and one HTML file that holds all of it."""

import argparse
import base64
import math
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

import jinja2
import matplotlib
import pandas as pd

from analysis import words as formats
from analysis.load import Run, leaves, load_run
from analysis.numbers.grids import Grid, SharedSetting, find_grids, missing_cells, shared_settings
from analysis.numbers.metrics import cell_metrics, graded_rows
from analysis.numbers.reference import beside_published
from analysis.numbers.verdict import PanelVerdict, panel_verdicts, read_summary, summary_verdicts
from analysis.pictures.comparison import accuracy_memory_figure, policy_bars_figure, spread_in_words
from analysis.pictures.cost import cost_figure
from analysis.pictures.heatmap import COLORMAP, Scale, budget_figure, grid_figure, mean_figure
from analysis.pictures.noise import noise_figure
from analysis.pictures.style import file_name, model_title, save_figure
from analysis.records import UserError, content_hash
from analysis.report.drilldown import MAX_COMPLETIONS, cells_data, data_file_name, fits_in_page, script_json
from analysis.report.tables import _holdings, _summary, _tables

REPORT_FOLDER = "report"
TEMPLATES = Path(__file__).parent / "templates"

# A value that differs more often than this (a time stamp) says nothing about the run as a whole.
MAX_VALUES = 4
SHOWN_APART = ("expected", "draws", "config", "stretches")
MAX_LISTED = 200

# Bar charts of one run; a whole grid of several policies would have as many as it has points.
MAX_BARS = 6


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A figure as the report shows it: its SVG as a data address, so that the page needs no other file."""

    caption: str
    name: str
    address: str


def build_report(
    directory: Path | str,
    *,
    folder: Path | None = None,
    scale: Scale = "own",
    interval: bool = False,
    completions: int = MAX_COMPLETIONS,
) -> Path:
    """Write the report of a run directory, whatever of it there is so far, to DIR/report.

    Writes cells.csv (one row per cell, see results/README.md), each figure as PNG, SVG and PDF, and
    report.html.

    Args:
        directory: the run directory.
        folder: where the report goes, if not to DIR/report.
        scale: the heatmaps' colour scale, see `Scale`; the difference to the full cache is always drawn beside it.
        interval: whether the heatmaps have the 95% interval under each value.
        completions: the most that the page shows one by one; with 0 it is a few megabytes, whatever the run.

    Returns:
        The path of report.html.

    Raises:
        UserError: the directory is missing or holds no cell.
    """
    run = load_run(directory)
    metrics = cell_metrics(run)
    grids = find_grids(metrics)
    settings = shared_settings(metrics)
    folder = folder or run.directory / REPORT_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / "cells.csv", metrics.to_csv(index=False))
    _write(folder / "tables.md", _tables(metrics, "markdown"))
    _write(folder / "tables.tex", _tables(metrics, "latex"))
    graded = graded_rows(run)
    verdicts = [verdict for grid in grids for verdict in panel_verdicts(grid, graded, metrics)]
    drawn = partial(grid_figure, scale=scale, interval=interval)
    pictures = _pictures(run, metrics, grids, settings[:MAX_BARS], verdicts, folder, drawn)
    page = folder / "report.html"
    _write(page, _html(run, metrics, grids, settings, verdicts, pictures, _drill_data(run, folder, completions)))
    return page


def build_summary_report(path: Path, folder: Path) -> Path:
    """The report of grids of which only the scores are known: their noise floor, figure and verdict.

    Raises:
        UserError: see `verdict.read_summary`.
    """
    verdicts = summary_verdicts(read_summary(path))
    folder.mkdir(parents=True, exist_ok=True)
    picture = _picture(noise_figure(verdicts), folder, "The scores beside what identical cells give", "noise")
    page = folder / "report.html"
    text = _template().render(name=path.stem, verdicts=verdicts, pictures=[picture], run=None, nonce=_nonce(path.stem))
    _write(page, text)
    return page


@dataclass(frozen=True, kw_only=True)
class DrillData:
    """The cells' data in the page, or the names of the files beside it, by cell_id."""

    embedded: dict[str, str]
    files: dict[str, str]


def _drill_data(run: Run, folder: Path, completions: int) -> DrillData:
    if not completions or fits_in_page(run):
        return DrillData(embedded=dict(cells_data(run, completions)), files={})
    (folder / "data").mkdir(exist_ok=True)
    files = {}
    for cell_id, data in cells_data(run, completions):
        files[cell_id] = f"data/{data_file_name(cell_id)}"
        _write(folder / files[cell_id], f"kvsweepCell({script_json(cell_id)},{data});\n")
    return DrillData(embedded={}, files=files)


def _nonce(name: str) -> str:
    return content_hash(["nonce", name])


def main(arguments: Sequence[str] | None = None) -> None:
    """The console script `kvsweep-report`."""
    parser = argparse.ArgumentParser(
        prog="kvsweep-report",
        description="Numbers (CSV), pictures (PNG, SVG, PDF) and a self-contained page under DIR/report.",
    )
    parser.add_argument(
        "directory",
        metavar="DIR",
        type=Path,
        help="run directory: <results_dir>/<run_name>; or a CSV of scores alone (results/reference/dynts_heatmaps.csv)",
    )
    parser.add_argument(
        "--output", metavar="DIR", type=Path, help="where the report goes (default: DIR/report; a CSV's: <name>_report)"
    )
    parser.add_argument(
        "--completions",
        metavar="N",
        type=int,
        default=MAX_COMPLETIONS,
        help="show at most so many completions one by one (default: %(default)s; 0 makes a small page)",
    )
    parser.add_argument(
        "--scale", choices=get_args(Scale), default="own", help="colours of the heatmaps (default: each panel's own)"
    )
    parser.add_argument("--interval", action="store_true", help="the 95%% interval under each value of the heatmaps")
    options = parser.parse_args(arguments)
    path = options.directory
    try:
        if path.is_file():
            print(build_summary_report(path, options.output or Path(f"{path.stem}_report")))
        else:
            how = {"scale": options.scale, "interval": options.interval, "completions": max(0, options.completions)}
            print(build_report(path, folder=options.output, **how))
    except UserError as error:
        print(f"kvsweep-report: error: {error}", file=sys.stderr)
        sys.exit(2)


def _write(path: Path, text: str) -> None:
    # A reader who reloads the page while a sweep renews it must never see half of it.
    half = path.with_name(f".{path.name}.tmp")
    half.write_text(text, encoding="utf-8", newline="\n")
    half.replace(path)


def _pictures(
    run: Run,
    metrics: pd.DataFrame,
    grids: list[Grid],
    settings: list[SharedSetting],
    verdicts: list[PanelVerdict],
    folder: Path,
    drawn: Callable[..., Any],
) -> list[Picture]:
    pictures = []
    floors = [verdict for verdict in verdicts if verdict.floor is not None]
    if floors:
        caption = "Each grid's cells in order, beside what identical cells give"
        pictures.append(_picture(noise_figure(floors), folder, caption, "noise"))
    for model in metrics["model"].unique():
        title = metrics.loc[metrics["model"] == model, "model_title"].iloc[0]
        for grid in grids:
            if model not in grid.models:
                continue
            budget = "" if formats.missing(grid.budget) else formats.number(grid.budget)
            tail = (model, grid.policy, budget, grid.variant)
            figure = drawn(grid, model, metrics)
            pictures.append(_picture(figure, folder, f"{title}, {grid.title}", "heatmap", *tail))
            if grid.cells.loc[grid.cells["model"] == model, "diff_to_full"].notna().any():
                figure = grid_figure(grid, model, metrics, scale="diff_from_full", marks=True)
                caption = f"{title}, {grid.title}, difference to the full cache in points"
                pictures.append(_picture(figure, folder, caption, "difference", *tail))
            if len(grid.benchmarks) > 1:
                figure = mean_figure(grid, model, metrics)
                pictures.append(_picture(figure, folder, f"{title}, {grid.title}, mean", "mean", *tail))
        budgets = budget_figure(metrics, model)
        if budgets is not None:
            pictures.append(_picture(budgets, folder, f"{title}, Pass@1 against budget", "budget", model))
        for setting in settings:
            if model in setting.models:
                figure = policy_bars_figure(setting, model, metrics)
                caption = f"{title}, Pass@1 per policy at {setting.title}"
                pictures.append(_picture(figure, folder, caption, "policies", model, setting.file_part))
        memory = accuracy_memory_figure(metrics, model)
        if memory is not None:
            pictures.append(_picture(memory, folder, f"{title}, Pass@1 against memory", "memory", model))
        cost = cost_figure(run, metrics, model)
        if cost is not None:
            pictures.append(_picture(cost, folder, f"{title}, KV memory, FLOPs and throughput", "cost", model))
    return pictures


def _picture(figure: Any, folder: Path, caption: str, *name: str) -> Picture:
    stem = file_name(*name)
    svg = save_figure(figure, folder, stem)["svg"].read_bytes()
    address = f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}"
    return Picture(caption=caption, name=stem, address=address)


def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html.jinja")


def _html(
    run: Run,
    metrics: pd.DataFrame,
    grids: list[Grid],
    settings: list[SharedSetting],
    verdicts: list[PanelVerdict],
    pictures: list[Picture],
    drill: DrillData,
) -> str:
    name = run.directory.resolve().name
    return _template().render(
        name=name,
        nonce=_nonce(name),
        run=run,
        verdict=_verdict(metrics, grids),
        verdicts=verdicts,
        concerns=_concerns(metrics, grids, settings[MAX_BARS:], run.notices),
        facts=_facts(run, metrics),
        pictures=pictures,
        heatmaps=[_clickable(verdict) for verdict in verdicts],
        published=beside_published(metrics),
        summaries=[(model_title(metrics, model), _summary(metrics, model)) for model in metrics["model"].unique()],
        spreads=_spreads(metrics, settings),
        holdings=[_holdings(metrics, model) for model in metrics["model"].unique()],
        cells=[(row.cell_id, _cell_row(row)) for row in metrics.itertuples()],
        drill=drill,
        files_json=script_json(drill.files),
    )


def _clickable(verdict: PanelVerdict) -> dict[str, Any]:
    """A heatmap of buttons: rows from the largest window down, each cell with its id, text and colour."""
    cells = verdict.cells
    ratios = sorted(cells["keep_ratio"].unique())
    low, high = cells["pass_at_1"].min(), cells["pass_at_1"].max()
    places = {(row.local_window, row.keep_ratio): row for row in cells.itertuples()}
    rows = []
    for window in sorted(cells["local_window"].unique(), reverse=True):
        found = [places.get((window, ratio)) for ratio in ratios]
        rows.append((formats.number(window), [None if row is None else _button(row, low, high) for row in found]))
    return {"title": verdict.title, "ratios": [formats.number(ratio) for ratio in ratios], "rows": rows}


def _button(row: Any, low: float, high: float) -> dict[str, str]:
    share = (row.pass_at_1 - low) / (high - low) if high > low else 0.5
    red, green, blue, _ = matplotlib.colormaps[COLORMAP](0.75 * share, bytes=True)
    return {
        "cell": row.cell_id,
        "text": formats.percent(row.pass_at_1) + ("" if row.status == "done" else "*"),
        "color": f"rgb({red},{green},{blue})",
        "ink": "#fff" if share > 0.75 else "#111",
    }


def _verdict(metrics: pd.DataFrame, grids: list[Grid]) -> str:
    done = int((metrics["status"] == "done").sum())
    gaps = sum(len(missing_cells(grid)) for grid in grids)
    ungraded = int(metrics["ungraded"].sum())
    parts = [f"{done} of {len(metrics)} cells are done"]
    parts += [f"{len(metrics) - done} unfinished"] if done < len(metrics) else []
    parts += [f"{gaps} missing from the grids"] if gaps else []
    parts += [f"{ungraded:,} completions not graded yet"] if ungraded else []
    return ", ".join(parts) + "."


def _concerns(
    metrics: pd.DataFrame, grids: list[Grid], undrawn: list[SharedSetting], notices: list[str]
) -> list[tuple[str, list[str]]]:
    """What a reader must know before the numbers: a heading and its lines, each."""
    titles = metrics.drop_duplicates("model").set_index("model")["model_title"]
    benchmark_titles = metrics.drop_duplicates("benchmark").set_index("benchmark")["benchmark_title"]
    partial = metrics[metrics["status"] != "done"]
    ungraded = metrics[metrics["ungraded"] > 0]
    conditions = metrics.drop_duplicates("condition")
    baseless = conditions[~conditions["condition"].isin(metrics.loc[metrics["policy"] == "full", "condition"])]
    gaps = [
        f"{titles[model]} | {benchmark_titles[benchmark]}: {grid.policy} {formats.number(ratio)} / "
        f"{formats.number(window)}{formats.of_grid(grid.budget, grid.variant)}"
        for grid in grids
        for model, benchmark, ratio, window in missing_cells(grid).itertuples(index=False)
    ]
    concerns = [
        (
            "Unfinished cells",
            [f"{_place(row)}: {_progress(row)} completions" for row in partial.itertuples()],
        ),
        ("Missing cells", gaps),
        (
            "Ungraded",
            [f"{_place(row)}: {row.ungraded} of {row.completions}" for row in ungraded.itertuples()],
        ),
        ("No full-cache cell to compare with", [_where(row) for row in baseless.itertuples()]),
        ("Settings without a bar chart, there are too many", [setting.title for setting in undrawn]),
        ("Notices from reading the files", notices),
    ]
    return [(f"{heading}: {len(lines)}", _shortened(lines)) for heading, lines in concerns if lines]


def _shortened(lines: list[str]) -> list[str]:
    more = len(lines) - MAX_LISTED
    return lines if more <= 0 else [*lines[:MAX_LISTED], f"and {more} more"]


def _where(row: Any) -> str:
    return f"{row.model_title} | {row.benchmark_title}"


def _place(row: Any) -> str:
    return f"{_where(row)}: {formats.setting(row)}"


def _progress(row: Any) -> str:
    return f"{row.completions} of {'?' if formats.missing(row.expected) else formats.number(row.expected)}"


def _facts(run: Run, metrics: pd.DataFrame) -> list[tuple[str, str]]:
    """What ran, as (name, value): from the cells first, then whatever their provenance holds."""
    ids = run.completions.groupby("cell_id", observed=True)["problem_id"].nunique()
    benchmarks = metrics.assign(ids=metrics["cell_id"].map(ids).fillna(0)).groupby("benchmark_title", sort=False)
    facts = [
        ("models", _listed(metrics["model_title"])),
        (
            "benchmarks",
            _listed(f"{name} ({most:g} problems)" for name, most in benchmarks["ids"].max().items()),
        ),
        ("policies", _listed(metrics["policy"])),
        ("draws", _listed(metrics["draws"].map(formats.number))),
        ("decoding", _listed(metrics["decoding"])),
        ("seed", _listed(metrics["seed"])),
        ("completions", f"{metrics['completions'].sum():,}"),
    ]
    seen: dict[str, dict[str, None]] = {}
    for record in run.provenance.values():
        for stretch in record.get("stretches", []):
            seen.setdefault("command", {})[shlex.join(map(str, stretch.get("command", [])))] = None
        for path, item in leaves({k: v for k, v in record.items() if k not in SHOWN_APART}):
            if item not in (None, []):
                seen.setdefault(" ".join(path).replace("_", " "), {})[str(item)[:200]] = None
    for name, values in seen.items():
        few = len(values) <= MAX_VALUES
        facts.append((name, "; ".join(values) if few else f"{len(values)} different values"))
    return facts


def _listed(values: Iterable[Any]) -> str:
    return ", ".join(dict.fromkeys(str(value) for value in values))


def _spreads(metrics: pd.DataFrame, settings: list[SharedSetting]) -> list[str]:
    """How equal the memory of policies with one setting is, a sentence per model and setting."""
    return [
        f"{model_title(metrics, model)}, {setting.title}: {spread_in_words(setting, model)}"
        for model in metrics["model"].unique()
        for setting in settings
        if model in setting.models
    ]


def _cell_row(row: Any) -> dict[str, str]:
    unfinished = row.status != "done"
    return {
        "model": row.model_title,
        "benchmark": row.benchmark_title,
        "policy": row.policy + (f", {row.variant}" if row.variant else ""),
        "keep ratio": formats.number(row.keep_ratio),
        "window": formats.number(row.local_window),
        "budget": formats.number(row.budget),
        "Pass@1 ± SE": formats.percent_pm(row.pass_at_1, row.se),
        "95% interval": f"{formats.percent(row.ci_low)} to {formats.percent(row.ci_high)}"
        if row.graded
        else formats.MISSING,
        "vs full ± SE": formats.percent_pm(row.diff_to_full, row.diff_se, signed=True),
        "p (Holm)": formats.p_value(row.p_holm),
        "regressions": formats.number(row.regressions),
        "gains": formats.number(row.gains),
        "where evicted": formats.percent_pm(row.diff_evicted, math.nan, signed=True),
        "elsewhere": formats.percent_pm(row.diff_untouched, math.nan, signed=True),
        "tokens": formats.decimal(row.mean_tokens),
        "tokens, × full": formats.decimal(row.tokens_to_full, 2),
        "evictions": formats.decimal(row.mean_evictions, 2),
        "evicted %": formats.percent(row.evicted),
        "kept memory %": formats.percent(row.kept_memory),
        "truncated %": formats.percent(row.truncated),
        "no answer %": formats.percent(row.no_answer),
        "timed out %": formats.percent(row.grader_timeout),
        "status": f"partial: {_progress(row)}" if unfinished else "done",
    }


if __name__ == "__main__":
    main()
