"""What a grid says, in plain words: signal or noise, where eviction acted, which cells hold up."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis import words as formats
from analysis.numbers.grids import Grid
from analysis.numbers.inference import (
    BETWEEN_PROBLEMS,
    LEVEL,
    NoiseFloor,
    draws_to_separate,
    noise_floor,
    score_array,
    summary_draws_to_separate,
    summary_noise_floor,
)
from analysis.records import UserError

# Below this share of completions with an eviction a panel compares the full cache with itself.
HARDLY_FIRES = 0.2
SUMMARY_COLUMNS = ("model", "benchmark", "keep_ratio", "local_window", "problems", "draws", "pass_at_1")


@dataclass(frozen=True, kw_only=True)
class PanelVerdict:
    """One model and benchmark of a grid. floor: None with too little data; lines: sentences, the first one sums up."""

    title: str
    cells: pd.DataFrame
    floor: NoiseFloor | None
    lines: list[str]


def panel_verdicts(grid: Grid, graded: pd.DataFrame, metrics: pd.DataFrame) -> list[PanelVerdict]:
    """The verdict of each panel of a grid that has grades.

    Args:
        graded: `metrics.graded_rows`; metrics: all cells of the run.
    """
    found = []
    for _, cells in grid.cells.groupby("condition", sort=False):
        cells = cells[cells["graded"] > 0].drop_duplicates(["keep_ratio", "local_window"])
        if len(cells) < 3:
            continue
        first = cells.iloc[0]
        scores = score_array(graded, list(cells["cell_id"]))
        floor = noise_floor(scores)
        lines = [] if floor is None else [floor_in_words(floor), *_best(cells, scores, floor)]
        lines = [*lines, _eviction(cells), *_against_full(cells)]
        title = f"{first['model_title']} | {first['benchmark_title']}, {grid.title}"
        found.append(PanelVerdict(title=title, cells=cells, floor=floor, lines=lines))
    return found


def floor_in_words(floor: NoiseFloor) -> str:
    """The verdict on the grid as a whole, with its range beside that of identical cells."""
    is_signal = "can be told from noise" if floor.signal else "cannot be told from noise"
    low, middle, high = (f"{100 * value:.1f}" for value in floor.expected_range)
    inside = floor.expected_range[0] <= floor.range <= floor.expected_range[2]
    where = "within what identical cells give" if inside or not floor.signal else "beyond what identical cells give"
    draws = "draw" if floor.draws == 1 else "draws"
    return (
        f"The grid as a whole {is_signal} (p {_p(floor.p)}): its range of {100 * floor.range:.1f} points is {where} "
        f"({floor.cells} identical cells of {floor.problems} problems × {floor.draws:g} {draws}: {low} to {high}, "
        f"median {middle})."
    )


def _p(value: float) -> str:
    return "< 0.001" if value < 0.001 else f"= {value:.3f}"


def _best(cells: pd.DataFrame, scores: np.ndarray, floor: NoiseFloor) -> list[str]:
    means = cells["pass_at_1"].to_numpy()
    order = np.argsort(-means, kind="stable")
    best, second = order[0], order[1]
    close = int((means >= means[best] - floor.critical).sum()) - 1
    needed, bound = draws_to_separate(scores[best], scores[second])
    return [
        f"Best is {_cell(cells.iloc[best])} with {formats.percent(means[best])}; {close} of the other {len(cells) - 1} "
        f"cells cannot be told from it (they lie less than {100 * floor.critical:.1f} points below, corrected for the "
        f"choice among all). {_needed(needed, bound)}"
    ]


def _needed(draws: float, bound: bool = False) -> str:
    if np.isnan(draws):
        return ""
    if np.isinf(draws):
        return "The top two score the same: no number of draws separates them."
    most = "at most " if bound else "about "
    return f"To separate the top two on these problems takes {most}{draws:,.0f} draws per problem."


def _eviction(cells: pd.DataFrame) -> str:
    share = float(np.average(cells["evicted"], weights=cells["completions"]))
    words = f"Eviction acted in {formats.percent(share)}% of the completions"
    often = f", {cells['mean_evictions'].mean():.1f} times each in the mean"
    if share < HARDLY_FIRES:
        return f"{words}: it hardly fires here, so this panel mostly compares the full cache with itself."
    differ = cells["untouched_differ"].sum()
    rest = f" {differ:.0f} untouched completions differ from the full cache's, which a common seed should not allow."
    return f"{words}{often}.{rest if differ else ''}"


def _against_full(cells: pd.DataFrame) -> list[str]:
    known = cells[cells["p_holm"].notna()]
    if known.empty:
        return ["No full-cache cell to compare with."]
    equal = known[(known["p_holm"] >= LEVEL)].sort_values("kept_rows")
    worse = int(((known["p_holm"] < LEVEL) & (known["diff_to_full"] < 0)).sum())
    better = int(((known["p_holm"] < LEVEL) & (known["diff_to_full"] > 0)).sum())
    counts = f"{worse} of {len(known)} cells are worse than the full cache, {better} better (paired, Holm)."
    if equal.empty:
        return [f"{counts} None is left that cannot be told from it."]
    row = equal.iloc[0]
    return [
        f"{counts} The smallest that cannot be told from it is {_cell(row)}, at {formats.percent(row['kept_rows'])}% "
        f"of its cache length over the steps: {100 * row['diff_to_full']:+.1f} points, 95% interval "
        f"{100 * row['diff_low']:+.1f} to {100 * row['diff_high']:+.1f}."
    ]


def _cell(row: Any) -> str:
    return f"keep ratio {formats.number(row['keep_ratio'])}, window {formats.number(row['local_window'])}"


def read_summary(path: Path) -> pd.DataFrame:
    """A grid of which only scores are known: CSV with `SUMMARY_COLUMNS`, pass_at_1 in percent.

    Raises:
        UserError: no such file, a column is missing, or a score is outside 0 to 100.
    """
    try:
        table = pd.read_csv(path)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path} cannot be read as CSV ({error}); give a table of scores or a run directory."
        ) from error
    lacking = [name for name in SUMMARY_COLUMNS if name not in table]
    if lacking:
        raise UserError(f"{path} lacks the columns {', '.join(lacking)}; a table of scores has {SUMMARY_COLUMNS}.")
    numbers = table[list(SUMMARY_COLUMNS[2:])].apply(pd.to_numeric, errors="coerce")
    if numbers.isna().any(axis=None) or not numbers["pass_at_1"].between(0, 100).all():
        raise UserError(f"{path} holds a value that is no number, or a pass_at_1 outside 0 to 100 percent.")
    return table


def summary_verdicts(table: pd.DataFrame) -> list[PanelVerdict]:
    """The verdict of each model and benchmark of which only the scores are known."""
    found = []
    for (model, benchmark), cells in table.groupby(["model", "benchmark"], sort=False):
        first = cells.iloc[0]
        scores = cells["pass_at_1"].to_numpy() / 100
        floors = [
            summary_noise_floor(scores, int(first["problems"]), int(first["draws"]), between=between)
            for between in BETWEEN_PROBLEMS
        ]
        floor = floors[1]
        strict = max(floors, key=lambda one: one.p)
        top = np.sort(scores)[::-1]
        needed = summary_draws_to_separate(
            top[0] - top[1], float(scores.mean()), int(first["problems"]), between=BETWEEN_PROBLEMS[1]
        )
        close = int((scores >= top[0] - floor.critical).sum()) - 1
        low, high = (100 * floors[i].expected_spread for i in (-1, 0))
        lines = [
            floor_in_words(floor),
            f"Its standard deviation is {100 * floor.spread:.2f} points; identical cells would show {low:.1f} to "
            f"{high:.1f}, as {BETWEEN_PROBLEMS[-1]:.0%} to {BETWEEN_PROBLEMS[0]:.0%} of the variance lies between "
            f"problems (p {_p(min(f.p for f in floors))} to {_p(strict.p).removeprefix('= ')}).",
            f"{close} of the other {len(scores) - 1} cells cannot be told from the best. {_needed(needed)}",
        ]
        doubts: Any = cells["doubt"].dropna().unique() if "doubt" in cells else []
        lines += [f"In doubt: {doubt}." for doubt in doubts]
        names = [str(first.get(f"{name}_title", value)) for name, value in (("model", model), ("benchmark", benchmark))]
        found.append(PanelVerdict(title=" | ".join(names), cells=cells, floor=floor, lines=lines))
    return found
