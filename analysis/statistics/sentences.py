"""Sentences about a grid: which settings are safe, whether settings matter, where eviction acted."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from kvsweep.analysis import notation
from kvsweep.analysis.load import Run, benchmarks_first, is_control, run_of_scores
from kvsweep.analysis.statistics import inference
from kvsweep.analysis.statistics.grids import PolicyGrid, SharedSetting, find_grids, shared_settings
from kvsweep.analysis.statistics.inference import BETWEEN_PROBLEMS, NoiseFloor
from kvsweep.analysis.statistics.metrics import cell_metrics, graded_rows
from kvsweep.analysis.statistics.noninferiority import LEVEL, p_these
from kvsweep.analysis.statistics.summary import read_summary
from kvsweep.messages.command_line import counted

# If eviction acts in a smaller share of the completions, a panel mostly compares the full cache with itself.
HARDLY_FIRES = 0.2
POINT = ["keep_ratio", "local_window"]

# From the best to the worst.
LABELS = ("safe", "small loss", "unclear", "worse")


@dataclass(frozen=True, kw_only=True)
class PanelVerdict:
    """Sentences on a model and benchmark, a summary first; none for bare scores. Too little data gives no `floor`."""

    title: str
    cells: pd.DataFrame
    floor: NoiseFloor | None = None
    lines: list[str] = field(default_factory=list)


def panel_verdicts(grid: PolicyGrid, graded: pd.DataFrame) -> list[PanelVerdict]:
    """Return the verdict on each panel of a grid that has at least three cells in the `graded` rows."""
    verdicts = []
    for _, panel in grid.cells.groupby("condition", sort=False):
        cells = panel[panel["graded"] > 0].drop_duplicates(POINT)
        if len(cells) < 3:
            continue
        scores = inference.score_array(graded, list(cells["cell_id"]))
        floor = inference.noise_floor(scores)
        is_finished = cells["status"].eq("done").all()
        lines = _against_full(cells) if is_finished else [_unfinished(cells)]
        if floor is not None:
            matter = "Settings matter" if floor.signal else "No setting is shown to matter"
            lines.append(f"{matter}: scores {', '.join(floor.words)}.")
            if is_finished:
                lines.append(_best(cells, scores, floor))
        lines += [_eviction(cells), *_loops(cells)]
        verdicts.append(PanelVerdict(title=_title(cells, grid.title), cells=cells, floor=floor, lines=lines))
    return verdicts


def policy_verdicts(setting: SharedSetting) -> list[PanelVerdict]:
    """Return the verdict on each model and benchmark of a setting: its policies beside the full cache."""
    verdicts = []
    decided = setting.cells[setting.cells["decision"].notna()]
    for _, cells in decided.groupby("condition", sort=False):
        is_finished = cells["status"].eq("done").all()
        lines = [_counts(cells, "policies") if is_finished else _unfinished(cells)]
        best_first = cells.sort_values("diff_to_full", ascending=False)
        for label in LABELS:
            policies = []
            for row in notation.rows(best_first[best_first["decision"] == label]):
                policies.append(f"{_policy(row)} ({_signed(row.diff_to_full)})")
            if policies:
                what = f"{label.capitalize()}, with the difference to the full cache in points"
                lines.append(f"{what}: {'; '.join(policies)}.")
        verdicts.append(PanelVerdict(title=_title(cells, setting.title), cells=cells, lines=lines))
    return verdicts


# What a policy does beside another.
BETTER, WORSE, ALIKE = "better", "worse", "no difference shown"


@dataclass(frozen=True, kw_only=True)
class PolicyPairs:
    """Policies of one model and benchmark, compared with each other: a sentence, and a table of pairs.

    `outcomes` has the names of each pair at each setting, and what the first is: BETTER, WORSE or ALIKE.
    """

    title: str
    line: str
    table: pd.DataFrame
    outcomes: list[tuple[str, str, str]]


def better_policies(tables: Sequence[PolicyPairs]) -> list[str]:
    """Return a sentence for each policy that is shown to be better: than which, and at how many shared settings."""
    shared = Counter[tuple[str, str]]()
    better = Counter[tuple[str, str]]()
    for table in tables:
        for first, second, label in table.outcomes:
            shared.update([(first, second), (second, first)])
            if label == BETTER:
                better[first, second] += 1
            if label == WORSE:
                better[second, first] += 1
    rivals = defaultdict[str, list[str]](list)
    for (first, second), count in better.most_common():
        rivals[first].append(f"{second} ({count} of {shared[first, second]})")
    return [f"{name} is better than {', '.join(worse)}" for name, worse in rivals.items()]


def policy_pairs(settings: Sequence[SharedSetting], graded: pd.DataFrame) -> list[PolicyPairs]:
    """Compare the policies that share a setting, paired over problems, with Holm over the pairs of a table.

    Three policies or more have a table for each setting, two have a table of all settings that these two share.
    """
    tables: list[PolicyPairs] = []
    # Of each condition and two policies: the settings that they share, with the two cells of each.
    duels = defaultdict[Any, list[tuple[SharedSetting, pd.DataFrame]]](list)
    for setting in settings:
        cells = setting.cells[(setting.cells["policy"] != "full") & (setting.cells["graded"] > 0)]
        for condition, rivals in cells.groupby("condition", sort=False):
            if len(rivals) == 2:
                ordered = rivals.sort_values(["policy", "variant"])
                names = tuple(_policy(row) for row in ordered.itertuples())
                duels[condition, names].append((setting, ordered))
            elif len(rivals) > 2:
                tables.append(_pairs(setting, rivals, graded))
    for shared in duels.values():
        tables.append(_duel(shared, graded))
    return tables


def _pairs(setting: SharedSetting, rivals: pd.DataFrame, graded: pd.DataFrame) -> PolicyPairs:
    """Compare three cells or more of one setting, each with each: the better one minus the other."""
    ranked = rivals.sort_values("pass_at_1", ascending=False, kind="stable")
    scores = inference.score_array(graded, list(ranked["cell_id"]))
    # Of each pair the places in the ranking, the better one's first: (0, 1), (0, 2), ..., (1, 2), ...
    better, other = np.triu_indices(len(ranked), 1)
    tests = inference.paired_tests(scores[better], scores[other])
    # Over the problems that both have, the better one of the ranking may be the worse one.
    labels = _labels(tests)
    names = [_policy(row) for row in ranked.itertuples()]
    outcomes = []
    texts = np.full((len(ranked), len(ranked)), "", dtype=object)
    for row, column, test, label in zip(better, other, notation.rows(tests), labels, strict=True):
        outcomes.append((names[row], names[column], label))
        text = f"{_signed(test.difference)} ({notation.p_value(test.p_holm)})"
        texts[row, column] = text if label == ALIKE else f"{label} {text}"
    # The pairs of the first of the ranking come first, with the others in their order.
    not_better = [name for name, label in zip(names[1:], labels, strict=False) if label != BETTER]
    best = "shown to be better than every other"
    if not_better:
        best = f"not shown to be better than {'; '.join(not_better)}"
    # In no pair the first of the ranking is the other one, so it has a row and no column.
    table = pd.DataFrame(texts[:, 1:], index=names, columns=names[1:])
    table.insert(0, "Pass@1", _scored(ranked))
    table.insert(1, "rows, % of full", ranked["kept_rows"].map(notation.percent).to_list())
    differing = len(labels) - labels.count(ALIKE)
    line = f"{differing} of {len(tests)} pairs differ. The best, {names[0]}, is {best}."
    return PolicyPairs(title=_title(ranked, setting.title), line=line, table=table, outcomes=outcomes)


def _duel(shared: list[tuple[SharedSetting, pd.DataFrame]], graded: pd.DataFrame) -> PolicyPairs:
    """Compare two policies at all settings that they share: the better one in the mean minus the other."""
    # At each setting the two cells are in one order of the policies.
    first = pd.concat([cells.head(1) for _, cells in shared])
    second = pd.concat([cells.tail(1) for _, cells in shared])
    if first["pass_at_1"].mean() < second["pass_at_1"].mean():
        first, second = second, first
    size = len(shared)
    # [cells of the first and of the second policy, problems, draws]
    scores = inference.score_array(graded, [*first["cell_id"], *second["cell_id"]])
    tests = inference.paired_tests(scores[:size], scores[size:])
    labels = _labels(tests)
    first_name = _policy(first.iloc[0])
    second_name = _policy(second.iloc[0])
    table = pd.DataFrame(
        {
            first_name: _scored(first),
            second_name: _scored(second),
            "difference": tests["difference"].map(_signed).to_list(),
            "95% interval": [notation.interval(row.low, row.high, signed=True) for row in notation.rows(tests)],
            "p": tests["p_holm"].map(notation.p_value).to_list(),
            f"{first_name} is": labels,
        },
        index=[setting.title for setting, _ in shared],
    )
    counts = ", ".join(f"{count} {label}" for label, count in pd.Series(labels).value_counts().items())
    line = f"at {counted(size, 'size')}: {counts}."
    title = _title(first, f"{first_name} minus {second_name}")
    outcomes = [(first_name, second_name, label) for label in labels]
    return PolicyPairs(title=title, line=line, table=table, outcomes=outcomes)


def _labels(tests: pd.DataFrame) -> list[str]:
    """Say of each of the `paired_tests` what its first cell is beside the second: BETTER, WORSE or ALIKE."""
    differ = tests["p_holm"] < inference.LEVEL
    return np.where(differ, np.where(tests["difference"] > 0, BETTER, WORSE), ALIKE).tolist()


def _scored(rows: pd.DataFrame) -> list[str]:
    return [notation.percent_pm(row.pass_at_1, row.se) for row in notation.rows(rows)]


def _title(cells: pd.DataFrame, *more: str) -> str:
    first = cells.iloc[0]
    return ", ".join([f"{first['model_title']} | {first['benchmark_title']}", *more])


def _policy(row: Any) -> str:
    return notation.policy_title(row.policy, row.variant)


def best_setting(cells: pd.DataFrame) -> pd.Series:
    """Return the cell to show first: the recommended one, else the one with the best label and smallest loss.

    Recommended is the smallest cache among the cells that stay safe when the smallest is searched for.
    """
    recommendable = cells[cells["recommendable"].eq(True)]
    if len(recommendable):
        return recommendable.sort_values("kept_memory", kind="stable").iloc[0]
    best_label = min(cells["decision"], key=LABELS.index)
    of_label = cells[cells["decision"] == best_label]
    return cells.loc[of_label["diff_to_full"].idxmax()]


def _signed(difference: float) -> str:
    return notation.percent(difference, signed=True)


def _unfinished(cells: pd.DataFrame) -> str:
    expected = notation.decimal(cells["expected"].sum(skipna=False), 0)
    completions = f"{cells['completions'].sum():,} of {expected}"
    why = "Short texts end first, so the scores will move, and no setting is recommended yet."
    return f"Unfinished: {completions} completions are stored. {why}"


def _against_full(cells: pd.DataFrame) -> list[str]:
    """Say which setting to take, how many settings have each label, and which problems this is about."""
    decided = cells[cells["decision"].notna()]
    if decided.empty:
        return ["There is no full cache to compare with."]
    chosen = best_setting(decided)
    if set(decided["decision"]) == {"worse"}:
        loss = notation.percent(-chosen["diff_to_full"])
        where = f"{notation.axes(chosen[POINT])}, {_interval(chosen)}"
        return [f"Every setting is worse; the nearest loses {loss} points ({where}).", f"{_size(decided)}."]
    headline = _recommendation(chosen) if chosen["recommendable"] else _no_recommendation(decided, chosen)
    return [headline, _counts(decided), _levels(decided), _population(chosen)]


def _recommendation(chosen: pd.Series) -> str:
    """Name the recommended cell, a row of cells.csv."""
    setting = notation.axes(chosen[POINT])
    count = f"{chosen['family']:.0f}"  # of the settings that were searched
    remark = ", a small loss that is shown" if chosen["decision"] == "small loss" else ""
    saved = notation.percent(1 - chosen["kept_memory"])
    return (
        f"Recommended: {setting}, the smallest cache that is safe in a search through all {count} settings. "
        f"It loses {_less(chosen)} ({_difference(chosen)}{remark}) and saves {saved}% of the memory."
    )


def _no_recommendation(decided: pd.DataFrame, nearest: pd.Series) -> str:
    """Say why none of the `decided` cells is recommended, and what the nearest one lacks."""
    safe = decided["decision"].isin(["safe", "small loss"]).sum()
    less = _less(nearest)
    headline = f"No setting is shown to be safe, that is, to lose {less}."
    if safe:
        headline = (
            f"No setting is recommended. Shown, each alone, to lose {less}: {safe} of {len(decided)}, which may be "
            "luck in a search through all of them."
        )
    where = f"{notation.axes(nearest[POINT])} ({nearest['decision']}, {_difference(nearest)})"
    return f"{headline} The nearest is {where}. {_to_show(nearest)}"


def _less(row: pd.Series) -> str:
    points = notation.number(100 * row["margin"])
    return f"less than {counted(points, 'point')} against the full cache"


def _counts(cells: pd.DataFrame, what: str = "settings") -> str:
    """Count the cells with each label: "24 settings on ...: 3 safe, 21 unclear."."""
    return f"{_size(cells, what)}: {label_counts(cells['decision'])}."


def label_counts(decisions: "pd.Series[str]") -> str:
    """Count the labels, the best first: "3 safe, 21 unclear"; that none is safe is said too."""
    counts = decisions.value_counts().reindex(LABELS, fill_value=0)
    return ", ".join(f"{count} {label}" for label, count in counts.items() if count or label == "safe")


def _levels(cells: pd.DataFrame) -> str:
    """Say how likely a label is wrong, and for how many settings."""
    # Several rounds are written with a space between.
    looks = ", all rounds together" if " " in cells["rounds"].iloc[0] else ""
    among = f"among the {cells['family'].iloc[0]:.0f} settings on this benchmark (Holm), 5% for the recommendation"
    return f"Chances of an error{looks}: 2.5% for each setting that is safe, 2.5% for any that is worse {among}."


def _difference(row: Any) -> str:
    return f"difference {_signed(row['diff_to_full'])} points, {_interval(row)}"


def _interval(row: Any) -> str:
    return f"interval {notation.interval(row['these_low'], row['these_high'], signed=True)}"


def _size(cells: pd.DataFrame, what: str = "settings") -> str:
    """Say how many cells there are, on how many problems, with how many draws, and in which rounds."""
    draws = (cells["graded"] / cells["problems"]).round().astype("int64")
    fewest, most = draws.min(), draws.max()
    each = f"{fewest}" if fewest == most else f"{fewest} to {most}"
    size = f"{len(cells)} {what} on {cells['problems'].max()} problems, {counted(each, 'draw')} each"
    rounds = cells["rounds"].iloc[0].split()
    if len(rounds) < 2:
        return size
    lean = "a decided setting got no more, so its score leans the way of its label"
    return f"{size} (in rounds of {', '.join(rounds)}; {lean})"


def _to_show(row: Any) -> str:
    """Say what would show that a setting is safe."""
    # It is missing where the full cache solves no more than the margin.
    if pd.isna(row["draws_to_hold"]):
        share = f"no more than {notation.percent(row['margin'])}% of its answers"
        return f"The full cache is right in {share}, so nothing can be called safe beside it."
    what = "questions" if row["population"] == "groups" else "problems"
    problems = f"{row['problems_to_hold']:,.0f} {what} like these with as many draws as here (90% power)"
    # As `kvsweep judge` says, so few pairs show nothing even if all are equal; many draws of few problems are no plan.
    shows_nothing = p_these(0, 0, row["margin"] * row["problems"] * row["paired_draws"]) > LEVEL
    if row["population"] != "these" or (shows_nothing and row["draws_to_hold"] > row["problems"]):
        return f"If it is as good as the full cache, {problems} would show it."
    draws = counted(f"{row['draws_to_hold']:,.0f}", "draw")
    return f"If it is as good as the full cache, {draws} per problem would show it, or {problems}."


def _population(row: Any) -> str:
    """Name the problems that the comparison with the full cache is about."""
    if row["population"] == "like_these":
        return "Every draw has the same answer, so this is about other problems like these."
    if row["population"] == "groups":
        return "Problems are variants of questions, so this is about other questions like these."
    these = f"This is about these {row['problems']} problems, with new draws of the answers."
    if isinstance(row["fewest_draws"], str):  # else None or NaN
        counted_draws = counted(f"{row['paired_draws']:.0f}", "draw")
        fewer = f"{row['fewest_draws']} has fewer answers than others: {counted_draws} of each problem count"
        these += f" {fewer}, and one that lacks may be lost or won."
    shown = "is shown" if row["diff_low"] > -row["margin"] else "is not shown"
    interval = notation.interval(row["diff_low"], row["diff_high"], signed=True)
    there = f"there the 95% interval of {notation.axes(row[POINT])} is {interval}"
    return f"{these} It {shown} for other problems like these: {there}."


def _best(cells: pd.DataFrame, scores: np.ndarray, floor: NoiseFloor) -> str:
    """Say which setting is best, how many are tied with it, and what would separate it from the second."""
    best, second = np.argsort(-floor.scores, kind="stable")[:2]
    # The best is tied with itself.
    others = counted(floor.tied.sum() - 1, "other setting")
    sentence = (
        f"The best score is {notation.percent(floor.scores[best])} ({notation.axes(cells.iloc[best][POINT])}). "
        f"Statistically tied with it: {others}, because a setting within {notation.percent(floor.critical)} points of "
        "the best cannot be told from it."
    )
    draws, is_bound = inference.draws_to_separate(scores[best], scores[second])
    if np.isnan(draws):
        return sentence
    if np.isinf(draws):
        return f"{sentence} The second best scores the same."
    about = "up to" if is_bound else "about"
    need = f"{about} {counted(f'{draws:,.0f}', 'draw')} per problem would show it (80% power)"
    return f"{sentence} If the gap between the best two is real, {need}."


def _eviction(cells: pd.DataFrame) -> str:
    """Say in which share of a panel's completions eviction acted, and how many differ that lost no token."""
    share = np.average(cells["evicted"], weights=cells["completions"])
    completions = f"{notation.percent(share)}% of the completions"
    if share < HARDLY_FIRES:
        return f"Eviction acted in only {completions}: this panel mostly compares the full cache with itself."
    sentence = f"Eviction acted in {completions}, {cells['mean_evictions'].mean():.1f} times each on average."
    untouched_differ = cells["untouched_differ"].sum()
    if not untouched_differ:
        return sentence
    differ = "completions differ from the full cache's although nothing was evicted from theirs."
    return f"{sentence} {untouched_differ:.0f} {differ}"


def _loops(cells: pd.DataFrame) -> list[str]:
    """Say how many truncated completions loop at the smallest keep ratio, and what stopping loops would save."""
    ratio = cells["keep_ratio"].min()
    smallest = cells[cells["keep_ratio"] == ratio]  # several windows
    truncated = smallest["truncated_texts"].sum()
    looping = smallest["looping_texts"].sum()
    if not truncated:
        return []
    counts = f"At keep ratio {notation.number(ratio)}, {looping:,.0f} of {truncated:,.0f} truncated texts loop"
    if not looping:
        return [f"{counts}."]
    saved = smallest["tokens_in_loops"].sum() / (smallest["mean_tokens"] * smallest["completions"]).sum()
    stop = f"decoding.stop_on_loop=true would save {notation.percent(saved)}% of the tokens there."
    return [f"{counts}: they repeat their end until they are cut off. {stop}"]


def summary_verdicts(table: pd.DataFrame) -> list[PanelVerdict]:
    """Return the noise floor of each model and benchmark with several settings; scores as in `read_summary`."""
    verdicts = []
    for _, cells in table.groupby(["model", "benchmark"], sort=False):
        if len(cells) < 2:
            continue
        scores = cells["pass_at_1"].to_numpy()
        problems, draws = cells[["problems", "draws"]].iloc[0].astype(int)
        # The middle of the three measured shares.
        floor = inference.summary_noise_floor(scores, problems, draws, between=BETWEEN_PROBLEMS[1])
        verdicts.append(PanelVerdict(title=_title(cells), cells=cells, floor=floor))
    return verdicts


# A grid of several policies shares as many settings as it has points. A bar chart has three policies or more, and at
# most this many settings get one.
MAX_COMPARED = 6


@dataclass(frozen=True, kw_only=True)
class Findings:
    """A run with its numbers and verdicts.

    `margin` (a fraction) is the requested margin, which replaces the run's own.
    """

    run: Run
    metrics: pd.DataFrame
    grids: list[PolicyGrid]
    verdicts: list[PanelVerdict]
    settings: list[SharedSetting] = field(default_factory=list)
    policies: list[PanelVerdict] = field(default_factory=list)
    pairs: list[PolicyPairs] = field(default_factory=list)
    margin: float | None = None

    @property
    def charted(self) -> list[SharedSetting]:
        """The settings that are drawn as bars, while there are no more than `MAX_COMPARED`."""
        return [setting for setting in self.settings if setting.policies > 2]

    @property
    def models(self) -> list[str]:
        return list(self.metrics["model"].unique())


def analyse(run: Run, margin: float | None = None, order: Sequence[str] = ()) -> Findings:
    """Compute all numbers and verdicts of a run; `margin` as in `cell_metrics`, `order` as in `benchmarks_first`."""
    run = replace(run, cells=benchmarks_first(run.cells, order))
    metrics = cell_metrics(run, margin)
    graded = graded_rows(run)
    grids = find_grids(metrics)
    verdicts = []
    for grid in grids:
        verdicts += panel_verdicts(grid, graded)
    settings = shared_settings(metrics[~is_control(metrics)])
    policies = []
    # Where a grid has verdicts, the page is about its settings and not about single policies.
    if not verdicts:
        for setting in settings:
            policies += policy_verdicts(setting)
    return Findings(
        run=run,
        metrics=metrics,
        verdicts=verdicts,
        grids=grids,
        settings=settings,
        policies=policies,
        pairs=policy_pairs(settings, graded),
        margin=margin,
    )


def analyse_scores(path: Path, order: Sequence[str] = ()) -> Findings:
    """Return the findings on grids with scores only, from a CSV as `read_summary` reads it."""
    table = read_summary(path)
    run = run_of_scores(table, path.with_suffix(""))
    scores = table.reindex(columns=["pass_at_1", "problems", "draws", "sure", "doubt"])
    scores["pass_at_1"] /= 100
    scores["graded"] = scores["problems"] * scores["draws"]
    without_scores = cell_metrics(run).drop(columns=scores.columns, errors="ignore")
    # Joined by number: the cells are the table's rows, in the same order.
    metrics = benchmarks_first(without_scores.join(scores), order)
    return Findings(run=run, metrics=metrics, grids=find_grids(metrics), verdicts=summary_verdicts(metrics))
