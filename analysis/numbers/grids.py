"""Which cells form a grid, and which settings several policies share."""

from dataclasses import dataclass

import pandas as pd

from analysis import words as formats
from analysis.question import by_question, question_title


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The cells of one policy, budget and variant over keep_ratio and local_window, for all models.

    The axes are the union over models and benchmarks, so what one of them lacks is seen to be missing.
    ratios ascend, windows descend: the order in which they are drawn, from the left and from the top.
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
        """The grid in words: "dynts, budget 128"."""
        title = self.policy + formats.of_grid(self.budget, self.variant)
        return title if "question=" in self.variant else f"{title}, {question_title(self.cells)}".removesuffix(", ")


def find_grids(metrics: pd.DataFrame) -> list[Grid]:
    """The grids worth a picture: two values on both axes, or three on one; the rest is for the table."""
    gridded = metrics.dropna(subset=["keep_ratio", "local_window"])
    grids = []
    groups = gridded.groupby(["policy", "budget", "variant"], dropna=False, sort=False)
    for (policy, _, variant), cells in groups:
        ratios = sorted(cells["keep_ratio"].unique())
        windows = sorted(cells["local_window"].unique(), reverse=True)
        if min(len(ratios), len(windows)) >= 2 or max(len(ratios), len(windows)) >= 3:
            grids.append(
                Grid(
                    policy=str(policy),
                    budget=float(cells["budget"].iloc[0]),
                    variant=str(variant),
                    ratios=ratios,
                    windows=windows,
                    models=list(cells["model"].unique()),
                    benchmarks=[b for b in metrics["benchmark"].unique() if b in set(cells["benchmark"])],
                    cells=cells,
                )
            )
    return grids


def missing_cells(grid: Grid) -> pd.DataFrame:
    """The points of the grid that no cell stands for, as model, benchmark, keep_ratio, local_window."""
    names = ["model", "benchmark", "keep_ratio", "local_window"]
    every = pd.MultiIndex.from_product([grid.models, grid.benchmarks, grid.ratios, grid.windows], names=names)
    return every.difference(pd.MultiIndex.from_frame(grid.cells[names]), sort=False).to_frame(index=False)


AXES = ["budget", "keep_ratio", "local_window"]
MIN_POLICIES = 3


@dataclass(frozen=True, kw_only=True)
class SharedSetting:
    """The cells of all policies that ran with one budget, keep_ratio and local_window, on all models.

    An axis that none of the policies has is missing (NaN). A policy without one of the fields belongs to
    every value of it; so the full cache, which has none, is always there. Where a policy ran with the question in
    several places, each place is a setting of its own: policies are ranked beside policies of the same place, or the
    title says which of them differ.
    """

    budget: float
    keep_ratio: float
    local_window: float
    cells: pd.DataFrame
    question: str = ""

    @property
    def title(self) -> str:
        """The setting in words: "keep ratio 0.3, window 48, budget 128"."""
        named = (("keep ratio", self.keep_ratio), ("window", self.local_window), ("budget", self.budget))
        words = [f"{name} {formats.number(value)}" for name, value in named if not formats.missing(value)]
        size = ", ".join(words) or "the policies' own settings"
        return f"{size}, {question_title(self.cells)}".removesuffix(", ")

    @property
    def file_part(self) -> str:
        """The setting as part of a file's name: "ratio0.3_window48_budget128"."""
        named = (("ratio", self.keep_ratio), ("window", self.local_window), ("budget", self.budget))
        parts = [f"{name}{formats.number(value)}" for name, value in named if not formats.missing(value)]
        return "_".join([*parts, *([f"question_{self.question}"] if self.question else [])])

    @property
    def policies(self) -> int:
        """How many policies share it, the full cache not counted, variants not told apart."""
        return int(self.cells.loc[self.cells["policy"] != "full", "policy"].nunique())

    @property
    def models(self) -> set[str]:
        """The models that ran a compressed cache with this setting."""
        return set(self.cells.loc[self.cells["policy"] != "full", "model"])


def shared_settings(metrics: pd.DataFrame) -> list[SharedSetting]:
    """The settings of budget, keep_ratio and local_window that three or more policies share, full cache aside.

    Those that most policies share come first.
    """
    points = metrics.loc[metrics["policy"] != "full", AXES].drop_duplicates().sort_values(AXES, kind="stable")
    found = []
    for budget, keep_ratio, local_window in points.itertuples(index=False, name=None):
        point = {"budget": budget, "keep_ratio": keep_ratio, "local_window": local_window}
        cells = metrics[_fits(metrics, point)]
        settings = [SharedSetting(**point, cells=part, question=place) for place, part in by_question(cells)]
        # What fits into a setting with more fields is drawn there.
        if not _fits_into_another(point, points):
            found += [setting for setting in settings if setting.policies >= MIN_POLICIES]
    return sorted(found, key=lambda setting: -setting.policies)


def _fits(rows: pd.DataFrame, point: dict[str, float]) -> pd.Series:
    fits = [rows[name].isna() | (rows[name] == value) for name, value in point.items()]
    return fits[0] & fits[1] & fits[2]


def _fits_into_another(point: dict[str, float], points: pd.DataFrame) -> bool:
    same = points
    for name, value in point.items():
        same = same if formats.missing(value) else same[same[name] == value]
    return len(same) > 1
