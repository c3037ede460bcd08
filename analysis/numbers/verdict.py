"""Sentences about a grid: signal or noise, where eviction acted, which cells hold up, how equal the memory is."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis import words
from analysis.numbers import inference
from analysis.numbers.grids import PolicyGrid, SharedSetting
from analysis.numbers.inference import BETWEEN_PROBLEMS, LEVEL, NoiseFloor
from analysis.numbers.metrics import mean_over_benchmarks
from analysis.records import UserError

# If eviction acts in a smaller share of the completions, a panel compares the full cache with itself.
HARDLY_FIRES = 0.2
POINT = ["keep_ratio", "local_window"]
SUMMARY_COLUMNS = ("model", "benchmark", "keep_ratio", "local_window", "problems", "draws", "pass_at_1")

MOMENTS = {
    "mean_length_after": "just after an eviction",
    "mean_peak_length": "at the peak",
    "mean_cache_length": "in the mean over the decoding steps",
}


@dataclass(frozen=True, kw_only=True)
class PanelVerdict:
    """The verdict on one model and benchmark of a grid: sentences, of which the first sums up.

    `cells` are rows of metrics, or of a table of scores in percent. With too little data there is no `floor`.
    """

    title: str
    cells: pd.DataFrame
    floor: NoiseFloor | None
    lines: list[str]


def panel_verdicts(grid: PolicyGrid, graded: pd.DataFrame) -> list[PanelVerdict]:
    """The verdict on each panel of a grid that has at least three cells among the `graded` rows."""
    found = []
    for _, cells in grid.cells.groupby("condition", sort=False):
        cells = cells[cells["graded"] > 0].drop_duplicates(["keep_ratio", "local_window"])
        if len(cells) < 3:
            continue
        first = cells.iloc[0]
        scores = inference.score_array(graded, list(cells["cell_id"]))
        floor = inference.noise_floor(scores)
        lines = [] if floor is None else [floor_in_words(floor), _best(cells, scores, floor)]
        lines += [_eviction(cells), _against_full(cells)]
        title = f"{first['model_title']} | {first['benchmark_title']}, {grid.title}"
        found.append(PanelVerdict(title=title, cells=cells, floor=floor, lines=lines))
    return found


def floor_in_words(floor: NoiseFloor) -> str:
    """Say if the grid as a whole is signal, with its range beside that of identical cells."""
    can = "can" if floor.signal else "cannot"
    low, middle, high = (words.percent(value) for value in floor.expected_range)
    inside = floor.expected_range[0] <= floor.range <= floor.expected_range[2]
    where = "within" if inside or not floor.signal else "beyond"
    size = f"{floor.problems} problems × {floor.draws:g} draw{'' if floor.draws == 1 else 's'}"
    return (
        f"The grid as a whole {can} be told from noise ({words.p_equals(floor.p)}): its range of "
        f"{words.percent(floor.range)} points is {where} what identical cells give ({floor.cells} identical cells of "
        f"{size}: {low} to {high}, median {middle})."
    )


def _best(cells: pd.DataFrame, scores: np.ndarray, floor: NoiseFloor) -> str:
    means = cells["pass_at_1"].to_numpy()
    order = np.argsort(-means, kind="stable")
    best, second = order[0], order[1]
    needed, bound = inference.draws_to_separate(scores[best], scores[second])
    return (
        f"The best cell is {words.axes(cells.iloc[best][POINT])} with {words.percent(means[best])}; "
        f"{_close(means, floor)} cells cannot be told from it (they lie less than {words.percent(floor.critical)} "
        f"points below, with a correction for choosing the best of all). {_needed(needed, bound)}"
    )


def _close(means: np.ndarray, floor: NoiseFloor) -> str:
    return f"{int((means >= means.max() - floor.critical).sum()) - 1} of the other {len(means) - 1}"


def _needed(draws: float, bound: bool = False) -> str:
    if np.isnan(draws):
        return ""
    if np.isinf(draws):
        return "The top two score the same: no number of draws separates them."
    most = "at most " if bound else "about "
    return f"To separate the top two on these problems takes {most}{draws:,.0f} draws per problem."


def _eviction(cells: pd.DataFrame) -> str:
    share = float(np.average(cells["evicted"], weights=cells["completions"]))
    acted = f"Eviction acted in {words.percent(share)}% of the completions"
    if share < HARDLY_FIRES:
        return f"{acted}: it hardly fires here, so this panel mostly compares the full cache with itself."
    differ = cells["untouched_differ"].sum()
    rest = f" {differ:.0f} completions without an eviction differ from the full cache's, although they share the seed."
    return f"{acted}, {cells['mean_evictions'].mean():.1f} times each in the mean.{rest if differ else ''}"


def _against_full(cells: pd.DataFrame) -> str:
    known = cells[cells["p_holm"].notna()]
    if known.empty:
        return "No full-cache cell to compare with."
    differs = known["p_holm"] < LEVEL
    worse, better = (int((differs & side).sum()) for side in (known["diff_to_full"] < 0, known["diff_to_full"] > 0))
    counts = f"{worse} of {len(known)} cells are worse than the full cache, {better} better (paired, Holm)."
    equal = known[~differs].sort_values("kept_rows")
    if equal.empty:
        return f"{counts} All of them differ significantly from it."
    row = equal.iloc[0]
    difference, low, high = (
        words.percent(row[name], signed=True) for name in ("diff_to_full", "diff_low", "diff_high")
    )
    return (
        f"{counts} The smallest that cannot be told from it is {words.axes(row[POINT])}, at "
        f"{words.percent(row['kept_rows'])}% of its cache length over the steps: {difference} points, 95% interval "
        f"{low} to {high}."
    )


def read_summary(path: Path) -> pd.DataFrame:
    """Read the CSV of a grid of which only the scores are known: `SUMMARY_COLUMNS`, pass_at_1 in percent.

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
    """The verdict on each model and benchmark of a table as `read_summary` returns it."""
    found = []
    for (model, benchmark), cells in table.groupby(["model", "benchmark"], sort=False):
        first = cells.iloc[0]
        scores = cells["pass_at_1"].to_numpy() / 100
        problems, draws = int(first["problems"]), int(first["draws"])
        floors = [inference.summary_noise_floor(scores, problems, draws, between=b) for b in BETWEEN_PROBLEMS]
        floor = floors[1]
        second, best = np.sort(scores)[-2:]
        gap, middle = best - second, BETWEEN_PROBLEMS[1]
        needed = inference.summary_draws_to_separate(gap, scores.mean(), problems, between=middle)
        least, _, most = sorted(one.p for one in floors)
        wide, _, narrow = (words.percent(one.expected_spread) for one in floors)
        lines = [
            floor_in_words(floor),
            f"Its standard deviation is {100 * floor.spread:.2f} points; identical cells would show "
            f"{narrow} to {wide}, if {BETWEEN_PROBLEMS[-1]:.0%} to {BETWEEN_PROBLEMS[0]:.0%} of the variance lies "
            f"between problems ({words.p_equals(least)} to {words.p_value(most)}).",
            f"{_close(scores, floor)} cells cannot be told from the best. {_needed(needed)}",
        ]
        doubts: Any = cells["doubt"].dropna().unique() if "doubt" in cells else []
        lines += [f"In doubt: {doubt}." for doubt in doubts]
        names = [str(first.get(f"{name}_title", value)) for name, value in (("model", model), ("benchmark", benchmark))]
        found.append(PanelVerdict(title=" | ".join(names), cells=cells, floor=floor, lines=lines))
    return found


def spread_in_words(setting: SharedSetting, model: str) -> str:
    """Say how far apart the policies' cache lengths are, each the mean over benchmarks; an unknown one is left out."""
    ours = setting.cells[(setting.cells["model"] == model) & (setting.cells["policy"] != "full")]
    means = mean_over_benchmarks(ours, list(ours["benchmark"].unique()))
    known = means.dropna(subset=["mean_cache_length"])
    if known.empty:
        return "not known yet"
    lengths = [f"{_range(known[name])} {moment}" for name, moment in MOMENTS.items() if known[name].notna().any()]
    of_all = "" if len(known) == len(means) else f" of {len(means)}"
    return f"{len(known)}{of_all} policies hold {', '.join(lengths)} (tokens)"


def _range(lengths: pd.Series) -> str:
    low, high = words.decimal(lengths.min()), words.decimal(lengths.max())
    return low if low == high else f"{low} to {high}"
