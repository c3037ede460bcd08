"""Group a run's cells: the grid of each policy, and the settings that several policies share."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from kvsweep.analysis import notation
from kvsweep.analysis.notation import policy_title

AXES = ["budget", "keep_ratio", "local_window"]


@dataclass(kw_only=True)
class PolicyGrid:
    """The cells of one policy, budget and variant over keep_ratio and local_window, for all models.

    Ratios ascend and windows descend, as drawn. All models and benchmarks share the axes, so that gaps are visible.
    `label` tells a run's grids apart; a single grid has none.
    """

    policy: str
    budget: float
    variant: str
    ratios: list[float]
    windows: list[float]
    models: list[str]
    benchmarks: list[str]
    cells: pd.DataFrame
    label: str = ""

    @property
    def title(self) -> str:
        """The policy, budget, variant and question, as "dynts, trigger 128, question pinned"."""
        title = notation.setting(self)
        # The variant may name the question's place already. A grid without any place has an empty title for it.
        return title if "question=" in self.variant else f"{title}, {question_title(self.cells)}".removesuffix(", ")


def find_grids(metrics: pd.DataFrame) -> list[PolicyGrid]:
    """Return the grids that are large enough for a picture: two values on both axes, or three on one.

    `metrics` has the columns of cells.csv.
    """
    on_both_axes = metrics.dropna(subset=["keep_ratio", "local_window"])
    grids = []
    groups: Any = on_both_axes.groupby(["policy", "budget", "variant"], dropna=False, sort=False)
    for (policy, budget, variant), cells in groups:
        ratios = sorted(cells["keep_ratio"].unique())
        windows = sorted(cells["local_window"].unique(), reverse=True)
        shorter, longer = sorted([len(ratios), len(windows)])
        if shorter < 2 and longer < 3:
            continue
        benchmarks = set(cells["benchmark"])
        grid = PolicyGrid(
            policy=policy,
            budget=budget,
            variant=variant,
            ratios=ratios,
            windows=windows,
            models=list(cells["model"].unique()),
            benchmarks=[name for name in metrics["benchmark"].unique() if name in benchmarks],
            cells=cells,
        )
        grids.append(grid)
    several_policies = len({(grid.policy, grid.variant) for grid in grids}) > 1
    several_triggers = len({grid.budget for grid in grids}) > 1
    for grid in grids:
        names = []
        if several_policies:
            names.append(policy_title(grid.policy, grid.variant))
        if several_triggers:
            names.append(notation.axes({"budget": grid.budget}))
        grid.label = ", ".join(names)
    return grids


def missing_cells(grid: PolicyGrid) -> pd.DataFrame:
    """Return the points of the grid without a cell: model, benchmark, keep_ratio, local_window."""
    names = ["model", "benchmark", "keep_ratio", "local_window"]
    points = pd.MultiIndex.from_product([grid.models, grid.benchmarks, grid.ratios, grid.windows], names=names)
    points_with_cell = pd.MultiIndex.from_frame(grid.cells[names])
    return points.difference(points_with_cell, sort=False).to_frame(index=False)


def has_results(cells: pd.DataFrame, model: str) -> bool:
    """True if a compressed cache of the model has a score: cells that were only replayed have none."""
    return bool(cells.loc[(cells["model"] == model) & (cells["policy"] != "full"), "pass_at_1"].notna().any())


@dataclass(frozen=True, kw_only=True)
class SharedSetting:
    """The cells of all policies that ran with one budget, keep_ratio and local_window, on all models.

    An axis that no policy has is missing (NaN). A policy without one of the fields, such as the full cache, belongs to
    every value of that field. If a policy ran with the question in several places, each place is a setting: a figure
    ranks policies with the question in one place, or its title says which differ.
    """

    budget: float
    keep_ratio: float
    local_window: float
    cells: pd.DataFrame
    question: str

    @property
    def title(self) -> str:
        """The setting in words, as "keep ratio 0.3, window 48, trigger 128, question pinned"."""
        size = notation.axes(vars(self)) or "the policies' own settings"
        return f"{size}, {question_title(self.cells)}".removesuffix(", ")

    @property
    def file_part(self) -> str:
        """The setting as part of a file's name, as "ratio0.3_window48_budget128"."""
        sizes = {"ratio": self.keep_ratio, "window": self.local_window, "budget": self.budget}
        parts = [f"{name}{notation.number(size)}" for name, size in sizes.items() if not notation.missing(size)]
        file_part = "_".join(parts)
        if self.question:
            file_part += f"_question_{self.question}"
        return file_part

    @property
    def policies(self) -> int:
        """How many policies share the setting, without the full cache; a policy's variants count once."""
        return int(self.cells.loc[self.cells["policy"] != "full", "policy"].nunique())


def shared_settings(metrics: pd.DataFrame) -> list[SharedSetting]:
    """Return the settings that two or more policies share; settings of the most policies come first."""
    points = metrics.loc[metrics["policy"] != "full", AXES].drop_duplicates().sort_values(AXES, kind="stable")
    settings = []
    records: list[Any] = points.to_dict("records")
    for point in records:
        axes = {axis: value for axis, value in point.items() if not notation.missing(value)}
        agrees = (points[list(axes)] == pd.Series(axes)).all(axis=1)  # the point with itself too
        # The picture of another point that agrees on all axes of this one shows this one's policies.
        if agrees.sum() > 1:
            continue
        at_point = metrics
        for axis, value in point.items():
            # A policy without the axis belongs to all of its values. A point without it (NaN) has such policies alone.
            at_point = at_point[at_point[axis].isna() | (at_point[axis] == value)]
        for question, cells in by_question(at_point):
            setting = SharedSetting(**point, cells=cells, question=question)
            if setting.policies > 1:
                settings.append(setting)
    return sorted(settings, key=lambda setting: -setting.policies)


# Beside this package's folder, both in the repository and in an installed wheel.
REFERENCE = Path(__file__).resolve().parents[2] / "results" / "reference"
GRID_FILE = "dynts_heatmaps.csv"
SCORES_FILE = "scores.csv"
MATCH = ["model", "benchmark", "policy", "keep_ratio", "local_window", "budget"]


def published_grid(grid: PolicyGrid, model: str) -> pd.DataFrame | None:
    """Published scores at the points of a model's grid, in percent; None unless they have two rows and two columns."""
    table = pd.read_csv(REFERENCE / GRID_FILE)
    of_policy = (table["model"] == model) & (table["policy"] == grid.policy) & (table["budget"] == grid.budget)
    on_axes = table["keep_ratio"].isin(grid.ratios) & table["local_window"].isin(grid.windows)
    published = table[of_policy & on_axes & table["benchmark"].isin(grid.benchmarks)]
    columns, rows = published[["keep_ratio", "local_window"]].nunique()
    return published if min(columns, rows) >= 2 else None


def beside_published(metrics: pd.DataFrame) -> pd.DataFrame | None:
    """Join our scores with the published ones, as text, a row per cell that has a published score; None without any."""
    scored = metrics[metrics["pass_at_1"].notna()]
    tables = [pd.read_csv(REFERENCE / name) for name in (GRID_FILE, SCORES_FILE)]
    published = pd.concat(tables, ignore_index=True)[[*MATCH, "pass_at_1", "source", "doubt"]]
    # The full cache is missing on the axes in both tables, and pandas joins missing values like equal ones.
    both = scored.merge(published, on=MATCH, suffixes=("", "_published"))
    texts = []
    for row in notation.rows(both):
        # A missing budget fails the comparison: the full cache has a name and no setting.
        setting = notation.setting(row) if row.budget >= 0 else notation.policy_title(row.policy)
        texts.append(
            {
                "model": row.model_title,
                "benchmark": row.benchmark_title,
                "setting": setting,
                "ours ± SE": notation.percent_pm(row.pass_at_1, row.se),
                "95% interval": notation.interval(row.ci_low, row.ci_high),
                "published": f"{row.pass_at_1_published:.1f}",
                "source": row.source,
                "doubt": "" if pd.isna(row.doubt) else row.doubt,
            }
        )
    return pd.DataFrame(texts).set_index("model") if texts else None


TITLES = {"free": "free", "pinned": "pinned", "on_top": "on top"}


def question_title(cells: pd.DataFrame) -> str:
    """Describe the question's place in some cells: "question pinned", or which policies differ from most.

    Policies that differ cannot be compared as equals: "question pinned for DynTS, SnapKV, free for the others".
    Returns "" if no cell has a place, as full caches and servers.
    """
    # The full cache keeps all tokens and has no place for the question.
    placed = cells.loc[cells["question"] != "", ["policy", "question"]].drop_duplicates()
    places = placed["question"].value_counts()
    if places.empty:
        return ""
    most_common, *others = places.index
    title = TITLES.get(most_common, most_common)
    if not others:
        return f"question {title}"
    policies = placed["policy"].map(policy_title).groupby(placed["question"]).agg(", ".join)
    exceptions = [f"{TITLES.get(place, place)} for {policies[place]}" for place in others]
    return f"question {', '.join(exceptions)}, {title} for the others"


def by_question(cells: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """Split cells by the question's place, with the full cache in each part; one part, "", if no policy has several."""
    has_place = cells["question"] != ""
    places_per_policy = cells[has_place].groupby("policy")["question"].nunique()
    if not (places_per_policy > 1).any():
        return [("", cells)]
    parts = []
    for place in TITLES:
        is_placed = cells["question"] == place
        if is_placed.any():
            parts.append((place, cells[~has_place | is_placed]))
    return parts
