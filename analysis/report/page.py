"""The report's page: what the template shows, as texts."""

import shlex
from collections.abc import Iterable
from typing import Any

import pandas as pd

from analysis import words
from analysis.load import Run
from analysis.numbers.findings import Findings
from analysis.numbers.grids import missing_cells
from analysis.numbers.metrics import model_title
from analysis.numbers.reference import beside_published
from analysis.numbers.verdict import PanelVerdict, spread_in_words
from analysis.pictures.heatmap import css_colors
from analysis.records import content_hash, leaves
from analysis.report import gallery
from analysis.report.gallery import Picture
from analysis.report.rendering import render, script_json
from analysis.report.tables import cell_table, holding_tables, progress, score_table

# A setting that differs more often than this (a time stamp) says nothing about the run as a whole.
MAX_VALUES = 4
SHOWN_APART = ("expected", "draws", "rounds", "margin", "config", "stretches")
MAX_LISTED = 200


def run_page(found: Findings, pictures: list[Picture], embedded: dict[str, str], files: dict[str, str]) -> str:
    """The HTML page of a run; `embedded` and `files` are those of `drilldown.drill_data`."""
    metrics = found.metrics
    return _page(
        found.run.directory.resolve().name,
        found.verdicts or found.policies,
        pictures,
        run=found.run,
        state=_state(found),
        concerns=_concerns(found),
        facts=_facts(found.run, metrics),
        heatmaps=[_clickable(verdict) for verdict in found.verdicts],
        published=beside_published(metrics),
        scores=[score_table(metrics, model) for model in found.models],
        spreads=_spreads(found),
        holdings=[holding_tables(metrics, model) for model in found.models],
        cells=cell_table(metrics),
        partial=set(metrics.loc[metrics["status"] != "done", "cell_id"]),
        embedded=embedded,
        files_json=script_json(files),
    )


def summary_page(name: str, verdicts: list[PanelVerdict], pictures: list[Picture]) -> str:
    """The HTML page of grids of which only the scores are known."""
    return _page(name, verdicts, pictures, run=None)


def _page(name: str, verdicts: list[PanelVerdict], pictures: list[Picture], **context: Any) -> str:
    # The page admits only scripts that carry this number; it is the same for the same run.
    nonce = content_hash(["nonce", name])
    context |= {"name": name, "nonce": nonce, "verdicts": verdicts, "pictures": pictures}
    return render("report.html.jinja", **context)


def _clickable(verdict: PanelVerdict) -> dict[str, Any]:
    """A heatmap of buttons: rows from the largest window down, each cell with its id, text and colours."""
    cells = verdict.cells
    ratios = sorted(cells["keep_ratio"].unique())
    low, high = cells["pass_at_1"].min(), cells["pass_at_1"].max()
    buttons = {(row.local_window, row.keep_ratio): _button(row, low, high) for row in cells.itertuples()}
    rows = [
        (words.number(window), [buttons.get((window, ratio)) for ratio in ratios])
        for window in sorted(cells["local_window"].unique(), reverse=True)
    ]
    return {"title": verdict.title, "ratios": [words.number(ratio) for ratio in ratios], "rows": rows}


def _button(row: Any, low: float, high: float) -> dict[str, str]:
    background, ink = css_colors((row.pass_at_1 - low) / (high - low) if high > low else 0.5)
    text = words.percent(row.pass_at_1) + ("" if row.status == "done" else words.UNFINISHED)
    return {"cell": row.cell_id, "text": text, "background": background, "ink": ink}


def _state(found: Findings) -> str:
    metrics = found.metrics
    done = int((metrics["status"] == "done").sum())
    missing = sum(len(missing_cells(grid)) for grid in found.grids)
    ungraded = int(metrics["ungraded"].sum())
    parts = [f"{done} of {len(metrics)} cells are done"]
    parts += [f"{len(metrics) - done} unfinished"] if done < len(metrics) else []
    parts += [f"{missing} missing from the grids"] if missing else []
    parts += [f"{ungraded:,} completions not graded yet"] if ungraded else []
    return ", ".join(parts) + "."


def _concerns(found: Findings) -> list[tuple[str, list[str]]]:
    """A heading and its lines for everything that a reader must know before the numbers."""
    metrics = found.metrics
    partial = metrics[metrics["status"] != "done"]
    ungraded = metrics[metrics["ungraded"] > 0]
    conditions = metrics.drop_duplicates("condition")
    alone = conditions[~conditions["condition"].isin(metrics.loc[metrics["policy"] == "full", "condition"])]
    concerns = [
        ("Unfinished cells", [f"{_cell(row)}: {progress(row)} completions" for row in partial.itertuples()]),
        ("Missing cells", _missing(found)),
        ("Ungraded", [f"{_cell(row)}: {row.ungraded} of {row.completions}" for row in ungraded.itertuples()]),
        ("No full-cache cell to compare with", list(alone["model_title"] + " | " + alone["benchmark_title"])),
        ("Settings without a bar chart, there are too many", [one.title for one in found.settings[gallery.MAX_BARS :]]),
        ("Notices from reading the files", found.run.notices),
    ]
    return [(f"{heading}: {len(lines)}", _shortened(lines)) for heading, lines in concerns if lines]


def _missing(found: Findings) -> list[str]:
    """The missing cells of all grids, named as the other cells are."""
    tables = []
    for grid in found.grids:
        table = missing_cells(grid).assign(policy=grid.policy, budget=grid.budget, variant=grid.variant)
        for kind in ("model", "benchmark"):
            table[f"{kind}_title"] = table[kind].map(dict(found.metrics[[kind, f"{kind}_title"]].to_numpy()))
        tables.append(table)
    return [_cell(row) for table in tables for row in table.itertuples()]


def _cell(row: Any) -> str:
    return f"{row.model_title} | {row.benchmark_title}: {words.setting(row)}"


def _shortened(lines: list[str]) -> list[str]:
    more = len(lines) - MAX_LISTED
    return lines if more <= 0 else [*lines[:MAX_LISTED], f"and {more} more"]


def _spreads(found: Findings) -> list[str]:
    """A sentence per model and shared setting: how equal the memory of the policies is."""
    return [
        f"{model_title(found.metrics, model)}, {setting.title}: {spread_in_words(setting, model)}"
        for model in found.models
        for setting in found.settings
        if model in setting.models
    ]


def _facts(run: Run, metrics: pd.DataFrame) -> list[tuple[str, str]]:
    """Names and values that describe the run, from the cells first and then from their provenance."""
    problems = run.completions.groupby("cell_id", observed=True)["problem_id"].nunique()
    counted = metrics.assign(count=metrics["cell_id"].map(problems).fillna(0))
    benchmarks = counted.groupby("benchmark_title", sort=False)["count"].max()
    facts = [
        ("models", _listed(metrics["model_title"])),
        ("benchmarks", _listed(f"{name} ({most:g} problems)" for name, most in benchmarks.items())),
        ("policies", _listed(metrics["policy"])),
        ("draws", _draws(metrics)),
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
        facts.append((name, "; ".join(values) if len(values) <= MAX_VALUES else f"{len(values)} different values"))
    return facts


def _draws(metrics: pd.DataFrame) -> str:
    """The draws per problem, and that the sweep was sequential."""
    listed = _listed(metrics["draws"].sort_values().map(words.number))
    rounds = [text.replace(" ", ", ") for text in metrics["rounds"].dropna().unique() if text]
    if not rounds:
        return listed
    return (
        f"{listed}; sequential: in rounds of {'; '.join(rounds)}, until a cell was decided, which leaves it fewer draws"
    )


def _listed(values: Iterable[Any]) -> str:
    return ", ".join(dict.fromkeys(str(value) for value in values))
