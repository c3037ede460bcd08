"""Figures of one completion: importance of its tokens, kept tokens, and how much importance policies keep."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from scipy.stats import PermutationMethod, pearsonr

from kvsweep.analysis import notation
from kvsweep.analysis.figures import style
from kvsweep.analysis.notation import PAGE_WIDTH
from kvsweep.analysis.report.rendering import render, script_json
from kvsweep.run_files.row_types import Eviction, held_percents

WHITE_TO_BLUE = LinearSegmentedColormap.from_list("importance", ["#ffffff", "#9ecae1", "#3182bd", "#08306b"])
# Red, dark enough for small text.
MEAN_COLOR = "#c00000"
# Width of a page in dots. With more tokens, each dot shows the largest of its scores, so that no high score is lost.
MOST_COLUMNS = 1200
# The colour scale ends at these percentiles; otherwise a few outliers would leave all other scores one colour.
PERCENTILES = (1.0, 99.0)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The parts of one completion, shared by all its strips."""

    question: int  # tokens
    thinking: int  # tokens
    answer: int  # tokens, with the closing tag
    steps: Sequence[int]  # [thinking] number of the step that each thinking token belongs to, ascending from 0
    pieces: Sequence[str]  # the text of each thinking token


def mean_and_ratio(scores: np.ndarray) -> tuple[float, float]:
    """Return the mean of the known scores and the fraction of them above the mean; both NaN without a known score."""
    scored = scores[~np.isnan(scores)]
    if not len(scored):
        return float("nan"), float("nan")
    mean = float(scored.mean())
    return mean, float((scored > mean).mean())


def by_step(scores: np.ndarray, steps: Sequence[int]) -> np.ndarray:
    """Give every token the mean of the known scores of its step."""
    return pd.Series(scores).groupby(np.asarray(steps)).transform("mean").to_numpy()


def caption(scores: np.ndarray) -> str:
    """Write `Mean Score: 0.604; Ratio: 0.198`; a mean below a hundredth has three significant digits."""
    mean, ratio = mean_and_ratio(scores)
    if np.isnan(mean):
        return "no token has a score"
    form = ".3f" if mean >= 0.01 else ".3g"
    return f"Mean Score: {mean:{form}}; Ratio: {ratio:.3f}"


def importance_table(layout: Layout, strips: Mapping[str, np.ndarray]) -> pd.DataFrame:
    """A row per thinking token: its position in the text, number in the thinking, step, text and scores."""
    number = np.arange(layout.thinking)
    columns = {"position": layout.question + number, "token": number, "step": layout.steps, "text": layout.pieces}
    return pd.DataFrame({**columns, **strips})


@matplotlib.rc_context(style.STYLE)
def importance_figure(
    layout: Layout, strips: Mapping[str, np.ndarray], *, title: str, average_steps: bool = False
) -> Figure:
    """Draw the strips of one text over each other: question | thinking | answer, white (low) to blue (high).

    A strip is a named score of thinking tokens, [thinking], NaN where unknown, or its steps' means, on its own scale.
    """
    figure, panels = style.panels(PAGE_WIDTH, len(strips), 1, row_height=1.2, extra_height=0.88, sharex=True)
    for axes, (name, scores) in zip(panels, strips.items(), strict=True):
        if average_steps:
            name = f"{name}, mean of each step"
            scores = by_step(scores, layout.steps)
        _strip(axes, layout, scores)
        axes.set_title(name, loc="left", fontsize=8)
    # Only the thinking is drawn to scale, so only the thinking has ticks, at whole tokens.
    lowest = panels[-1]
    lowest.set_xticks([tick for tick in lowest.get_xticks() if 0 <= tick < layout.thinking and tick % 1 == 0])
    lowest.set_xlabel("Reasoning Step (tokens of the thinking)")
    figure.set_label(title)
    image = lowest.images[0]
    bar = figure.colorbar(image, ax=panels, aspect=30, pad=0.01)
    bar.set_ticks(list(image.get_clim()), labels=["Low", "High"])
    note = "red: the mean of what is drawn; Ratio: the share of it above the mean; hatched: not scored; "
    style.footnote(figure, note + "the colours end at the 1st and the 99th percentile of each strip")
    return figure


def _strip(axes: Axes, layout: Layout, scores: np.ndarray) -> None:
    """Draw one text's scores [thinking] as colours, with their mean as a line, between question and answer."""
    scored = scores[~np.isnan(scores)]
    # Any scale will do if nothing is scored.
    low, high = np.percentile(scored, PERCENTILES).tolist() if len(scored) else (0.0, 1.0)
    # The line of the mean lies on the scale of the colours, so the scale must reach it.
    mean, _ = mean_and_ratio(scores)
    low = min(low, mean)
    # A scale needs a width. A mean of NaN changes neither end.
    high = max(high, mean, low + 1e-12)
    # Each token takes a width of 1, with its number in the middle.
    begin, end = -0.5, layout.thinking - 0.5
    axes.imshow(
        pooled(scores, MOST_COLUMNS)[None],
        cmap=WHITE_TO_BLUE,
        vmin=low,
        vmax=high,
        extent=(begin, end, low, high),
        aspect="auto",
        interpolation="nearest",
    )
    # The background is seen where a token has no score: hatched, in no colour of the scale.
    axes.patch.set(facecolor="0.95", edgecolor="0.75", hatch="///", linewidth=0)
    # The question and the answer take as much room, whatever their lengths.
    room = 0.05 * layout.thinking
    axes.set(xlim=(begin - room, end + room), ylim=(low, high))
    box = {"boxstyle": "round,pad=0.2", "facecolor": "0.95", "edgecolor": "none"}
    look: Any = {"rotation": 90, "ha": "center", "va": "center", "fontsize": 6.5, "bbox": box}
    axes.text(begin - room / 2, (low + high) / 2, "question", **look)
    axes.text(end + room / 2, (low + high) / 2, "answer" if layout.answer else "no answer", **look)
    axes.vlines([begin, end], low, high, color="0.3", linewidth=1)
    axes.plot([begin, end], [mean, mean], color=MEAN_COLOR, linestyle="--", linewidth=1)
    axes.set_title(caption(scores), loc="right", fontsize=8, color=MEAN_COLOR)
    axes.set_ylabel("Importance\nScore", fontsize=8)
    axes.set_yticks([low, high], ["Low", "High"], fontsize=7)


def pooled(scores: np.ndarray, most: int) -> np.ndarray:
    """Reduce the scores to at most `most` columns, each the largest known score of its tokens."""
    if len(scores) <= most:
        return scores
    starts = np.unique(np.linspace(0, len(scores), most, endpoint=False).astype(int))
    # `fmax` passes over NaN.
    return np.fmax.reduceat(scores, starts)


def lorenz(scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return shares of tokens, most important first, and their shares of all importance; both from 0 to 1."""
    scored = scores[~np.isnan(scores)]
    most_first = np.sort(scored)[::-1]
    sums = np.concatenate([[0.0], np.cumsum(most_first)])
    # Not 0, if no token has any importance.
    total = max(sums[-1], 1e-300)
    return np.linspace(0, 1, len(sums)), sums / total


@dataclass(frozen=True, kw_only=True)
class Kept:
    """The tokens that a completion's cache held after each eviction."""

    pieces: Sequence[str]  # the text of each token of prompt and completion
    prompt: int  # the number of the prompt's tokens
    steps: Sequence[int]  # tokens written before each eviction
    # [evictions, tokens] percent of (layer, key head) pairs that hold a token, NaN before it is written
    held: np.ndarray

    @property
    def gone_at(self) -> np.ndarray:
        """[tokens] number, from 0, of the eviction after which no head holds the token; -1 if a head still does."""
        gone = self.held == 0
        return np.where(gone.any(axis=0), gone.argmax(axis=0), -1)


def read_kept(pieces: Sequence[str], prompt: int, evictions: Sequence[Eviction]) -> Kept:
    """Decode which tokens each eviction of a completion kept; `evictions` must have one or more."""
    percent_held = np.full((len(evictions), len(pieces)), np.nan)  # an eviction says nothing of tokens written later
    for number, eviction in enumerate(evictions):
        written = held_percents(eviction.held)[: len(pieces)]
        percent_held[number, : len(written)] = written
    steps = [eviction.step for eviction in evictions]
    return Kept(pieces=pieces, prompt=prompt, steps=steps, held=percent_held)


def kept_html(kept: Kept, *, title: str) -> str:
    """Write a page of the whole text, evicted tokens shaded by eviction."""
    # Of each eviction, for each stretch of tokens that are held alike: their percent and their number, in one list.
    stretches = []
    for percents in kept.held:
        numbers = []
        for percent, alike in groupby(percents[~np.isnan(percents)].tolist()):
            numbers += [int(percent), len(list(alike))]
        stretches.append(numbers)
    data = {
        "text": "".join(kept.pieces),
        # In UTF-16 units, as a browser counts.
        "lengths": [len(piece.encode("utf-16-le")) // 2 for piece in kept.pieces],
        # The text begins with the prompt, so no token stands before it and its first tokens are the question.
        "prompt": 0,
        "question": kept.prompt,
        "steps": list(kept.steps),
        "held": stretches,
    }
    return render("kept.html.jinja", title=title, data=script_json(data))


def kept_table(kept: Kept) -> pd.DataFrame:
    """A row per token: position, text, the eviction (from 1) that took it or 0, percent held after each eviction."""
    columns = {f"held_{number}": row for number, row in enumerate(kept.held, start=1)}
    position = np.arange(len(kept.pieces))
    return pd.DataFrame({"position": position, "text": kept.pieces, "gone_at": kept.gone_at + 1, **columns})


def retention(kept: Kept, importance: np.ndarray) -> np.ndarray:
    """Return the share of the importance written so far that the cache holds after each eviction, [evictions].

    `importance`, [thinking], is that of the thinking tokens, which follow the prompt; none below 0; NaN counts as 0.
    """
    thinking = slice(kept.prompt, kept.prompt + len(importance))
    percents = kept.held[:, thinking]  # [evictions, thinking], NaN before a token is written
    weights = np.where(np.isnan(percents) | np.isnan(importance), 0.0, importance)
    retained = (np.nan_to_num(percents) / 100 * weights).sum(axis=1)
    total = weights.sum(axis=1)
    return retained / np.where(total > 0, total, np.nan)


def rank_correlation(table: pd.DataFrame) -> tuple[float, float, int]:
    """Return Spearman's rho of `retained` and `pass1` over the policies, its p, and the number of policies with both.

    p is from a permutation test, exact for up to 7 policies, because the usual approximation needs more. rho and p are
    NaN for fewer than three policies, or if all policies have the same value.
    """
    ranks = table[["retained", "pass1"]].dropna().rank()
    if len(ranks) < 3 or (ranks.nunique() == 1).any():
        return float("nan"), float("nan"), len(ranks)
    shuffled = PermutationMethod(rng=np.random.default_rng(0))
    result = pearsonr(ranks["pass1"], ranks["retained"], method=shuffled)
    return float(result.statistic), float(result.pvalue), len(ranks)


def correlation_text(table: pd.DataFrame) -> str:
    rho, p, n = rank_correlation(table)
    if np.isnan(rho):
        return f"no correlation over n = {n}"
    return f"Spearman rho {rho:.2f}, {notation.p_equals(p)}, n = {n}"


@matplotlib.rc_context(style.STYLE)
def retention_figure(
    curves: pd.DataFrame, table: pd.DataFrame, carried: pd.DataFrame, kind: str, *, title: str
) -> Figure:
    """Draw how much true importance each policy keeps, its score against that, and how unequal importance is.

    The tables come from `metrics.by_eviction`, `by_policy` and `mean_lorenz`; `kind` is that of the importance.
    """
    best_first = table.sort_values("pass1", ascending=False, kind="stable")
    figure, (left, middle, right) = style.panels(PAGE_WIDTH, 3, 3, row_height=2.3, extra_height=0.4)
    for number, row in enumerate(notation.rows(best_first)):
        look = style.look_of(number)
        curve = curves[curves["policy"] == row.policy]
        left.plot(curve["eviction"], curve["retained"], markersize=3.5, linewidth=1, **look)
        look["linestyle"] = "none"
        middle.plot(row.retained, 100 * row.pass1, markersize=5, label=row.policy, **look)
    left.set(xlabel="eviction", ylabel="true importance held", ylim=(0, 1.02))
    left.xaxis.set_major_locator(MaxNLocator(integer=True))
    middle.set(xlabel="true importance held", ylabel="Pass@1 (%)", xlim=(0, 1.02), ylim=(-2, 102))
    middle.set_title(correlation_text(table), fontsize=7)
    right.plot(carried["tokens"], carried["importance"], color=style.LINE_COLORS[0], label=f"importance: {kind}")
    right.plot([0, 1], [0, 1], color="0.5", linestyle=":", label="all alike")
    right.axvspan(0.2, 0.3, color="0.5", alpha=0.2, linewidth=0, label="20 to 30% of the tokens")
    right.set(xlabel="tokens, most important first", ylabel="importance they carry")
    for axes in (left, middle, right):
        style.tidy(axes, grid="both")
    style.legend_below(figure)
    figure.set_label(title)
    return figure
