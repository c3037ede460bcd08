"""Group a run's cells: the grid of each policy, and the settings that several policies share."""

from dataclasses import dataclass
from typing import Any

import pandas as pd

from kvsweep.analysis import format
from kvsweep.analysis.question import by_question, question_title

# A picture of a shared setting compares at least so many policies.
MIN_POLICIES = 3
AXES = ["budget", "keep_ratio", "local_window"]


@dataclass(frozen=True, kw_only=True)
class PolicyGrid:
    """The cells of one policy, budget and variant over keep_ratio and local_window, for all models.

    Ratios ascend and windows descend, as drawn; the axes are those of all models and benchmarks: gaps are seen.
    """

    policy: str
    budget: float
    variant: str
    ratios: list[float]
    windows: list[float]
    models: list[str]
    benchmarks: list[str]
    cells: pd.DataFrame

    @property
    def title(self) -> str:
        """The policy, budget, variant and question, as "dynts, budget 128, question pinned"."""
        title = format.setting(self)
        return title if "question=" in self.variant else f"{title}, {question_title(self.cells)}".removesuffix(", ")


def find_grids(metrics: pd.DataFrame) -> list[PolicyGrid]:
    """The grids that are large enough for a picture: two values on both axes, or three on one."""
    gridded = metrics.dropna(subset=["keep_ratio", "local_window"])
    grids = []
    groups: Any = gridded.groupby(["policy", "budget", "variant"], dropna=False, sort=False)
    for (policy, budget, variant), cells in groups:
        ratios = sorted(cells["keep_ratio"].unique())
        windows = sorted(cells["local_window"].unique(), reverse=True)
        if min(len(ratios), len(windows)) >= 2 or max(len(ratios), len(windows)) >= 3:
            benchmarks = [name for name in metrics["benchmark"].unique() if name in set(cells["benchmark"])]
            axes = {"ratios": ratios, "windows": windows, "benchmarks": benchmarks}
            models = list(cells["model"].unique())
            grids.append(PolicyGrid(policy=policy, budget=budget, variant=variant, models=models, cells=cells, **axes))
    return grids


def missing_cells(grid: PolicyGrid) -> pd.DataFrame:
    """The points of the grid without a cell, as model, benchmark, keep_ratio, local_window."""
    names = ["model", "benchmark", "keep_ratio", "local_window"]
    every = pd.MultiIndex.from_product([grid.models, grid.benchmarks, grid.ratios, grid.windows], names=names)
    return every.difference(pd.MultiIndex.from_frame(grid.cells[names]), sort=False).to_frame(index=False)


@dataclass(frozen=True, kw_only=True)
class SharedSetting:
    """The cells of all policies that ran with one budget, keep_ratio and local_window, on all models.

    An axis that none of the policies has is missing (NaN). A policy without one of the fields, as the full cache,
    belongs to every value of it. Where a policy ran with the question in several places, each place is a setting: a
    figure ranks policies with the question in one place, or its title says which differ.
    """

    budget: float
    keep_ratio: float
    local_window: float
    cells: pd.DataFrame
    question: str = ""

    @property
    def title(self) -> str:
        """The setting in words, as "keep ratio 0.3, window 48, budget 128, question pinned"."""
        size = format.axes(vars(self)) or "the policies' own settings"
        return f"{size}, {question_title(self.cells)}".removesuffix(", ")

    @property
    def file_part(self) -> str:
        """The setting as part of a file's name, as "ratio0.3_window48_budget128"."""
        size = format.axes(vars(self)).replace("keep ", "").replace(", ", "_").replace(" ", "")
        return f"{size}_question_{self.question}" if self.question else size

    @property
    def policies(self) -> int:
        """The number of policies that share the setting, without the full cache; a policy's variants count once."""
        return int(self.cells.loc[self.cells["policy"] != "full", "policy"].nunique())

    @property
    def models(self) -> set[str]:
        """The models that ran a compressed cache with this setting."""
        return set(self.cells.loc[self.cells["policy"] != "full", "model"])


def shared_settings(metrics: pd.DataFrame) -> list[SharedSetting]:
    """The settings that at least `MIN_POLICIES` policies share, those that most policies share first."""
    points = metrics.loc[metrics["policy"] != "full", AXES].drop_duplicates().sort_values(AXES, kind="stable")
    found = []
    for values in points.itertuples(index=False, name=None):
        point = dict(zip(AXES, values, strict=True))
        if _is_part_of_another(point, points):
            continue
        fits = [metrics[name].isna() | (metrics[name] == value) for name, value in point.items()]
        for place, cells in by_question(metrics[fits[0] & fits[1] & fits[2]]):
            setting = SharedSetting(**point, cells=cells, question=place)
            if setting.policies >= MIN_POLICIES:
                found.append(setting)
    return sorted(found, key=lambda setting: -setting.policies)


def _is_part_of_another(point: dict[str, float], points: pd.DataFrame) -> bool:
    """Say if another point agrees on all axes that this one has: its picture shows this one's policies too."""
    known = {name: value for name, value in point.items() if not format.missing(value)}
    return int((points[list(known)] == pd.Series(known)).all(axis=1).sum()) > 1
