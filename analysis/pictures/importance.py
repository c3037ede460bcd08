"""Importance over the reasoning steps of one text: strips of scores, their mean and ratio, and the Lorenz curve."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from kvsweep.analysis.format import PAGE_WIDTH
from kvsweep.analysis.pictures.style import STYLE, footnote, new_figure

WHITE_TO_BLUE = LinearSegmentedColormap.from_list("importance", ["#ffffff", "#9ecae1", "#3182bd", "#08306b"])
# No score is measured there: hatched, and in no colour of the scale.
UNSCORED: Any = {"facecolor": "0.95", "edgecolor": "0.75", "hatch": "///", "linewidth": 0}

# Red, dark enough for small text.
MEAN_COLOR = "#c00000"

# A page is this many dots wide. With more tokens each dot shows the largest score, so that no single high one is lost.
_MOST_COLUMNS = 1200

# The scale ends at these percentiles; otherwise a few outliers would leave all other scores one colour.
_PERCENTILES = (1.0, 99.0)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The parts of one text, which all its strips share.

    Attributes:
        question, thinking, answer: token counts; the closing tag counts to the answer.
        steps: [thinking] number of the step that each thinking token belongs to, ascending from 0.
        pieces: the text of each thinking token.
    """

    question: int
    thinking: int
    answer: int
    steps: Sequence[int]
    pieces: Sequence[str]


def mean_and_ratio(scores: np.ndarray) -> tuple[float, float]:
    """The mean of the known scores, and the fraction of them above the mean; both NaN where no score is known."""
    known = scores[~np.isnan(scores)]
    if not len(known):
        return float("nan"), float("nan")
    mean = float(known.mean())
    return mean, float((known > mean).mean())


def by_step(scores: np.ndarray, steps: Sequence[int]) -> np.ndarray:
    """Give every token the mean of the known scores of its step."""
    return pd.Series(scores).groupby(np.asarray(steps)).transform("mean").to_numpy()


def caption(scores: np.ndarray) -> str:
    """Write `Mean Score: 0.604; Ratio: 0.198`; a mean below a hundredth has three significant digits."""
    mean, ratio = mean_and_ratio(scores)
    return f"Mean Score: {mean:{'.3f' if mean >= 0.01 else '.3g'}}; Ratio: {ratio:.3f}"


def importance_table(layout: Layout, strips: Mapping[str, np.ndarray]) -> pd.DataFrame:
    """A row per thinking token: its position in the text, number in the thinking, step, text and scores."""
    number = np.arange(layout.thinking)
    columns = {"position": layout.question + number, "token": number, "step": layout.steps, "text": layout.pieces}
    return pd.DataFrame({**columns, **strips})


def importance_figure(
    layout: Layout, strips: Mapping[str, np.ndarray], *, title: str, average_steps: bool = False
) -> Figure:
    """Draw the strips of one text over each other: question | thinking | answer, white (low) to blue (high).

    A strip is a named score of thinking tokens, [thinking], NaN where unknown, or its steps' means, on its own scale.
    """
    with matplotlib.rc_context(STYLE):
        figure = new_figure((PAGE_WIDTH, 1.0 + 1.2 * len(strips)))
        rows = figure.subplots(len(strips), 1, sharex=True, squeeze=False)[:, 0]
        for axes, name in zip(rows, strips, strict=True):
            _strip(axes, layout, name, strips[name], average_steps)
        # Only the thinking is drawn to scale, so only it has ticks.
        rows[-1].set_xticks([tick for tick in rows[-1].get_xticks() if 0 <= tick < layout.thinking])
        rows[-1].set_xlabel("Reasoning Step (tokens of the thinking)")
        figure.suptitle(title)
        bar = figure.colorbar(rows[-1].images[0], ax=list(rows), aspect=30, pad=0.01)
        bar.set_ticks(list(rows[-1].images[0].get_clim()), labels=["Low", "High"])
        note = "red: the mean of what is drawn; Ratio: the share of it above the mean; hatched: not scored; "
        footnote(figure, note + "the colours end at the 1st and the 99th percentile of each strip")
    return figure


def _strip(axes: Axes, layout: Layout, name: str, own: np.ndarray, average_steps: bool) -> None:
    scores = by_step(own, layout.steps) if average_steps else own
    known = scores[~np.isnan(scores)]
    low, high = np.percentile(known, _PERCENTILES).tolist() if len(known) else (0.0, 1.0)
    # The line of the mean lies on the scale of the colours, so the scale must reach it.
    mean = mean_and_ratio(scores)[0]
    low = min(low, mean)
    high = max(high, mean, low + 1e-12)
    extent = (-0.5, layout.thinking - 0.5, low, high)
    columns = pooled(scores, _MOST_COLUMNS)[None]
    axes.set_facecolor("#f7f7f7")
    axes.imshow(columns, cmap=WHITE_TO_BLUE, vmin=low, vmax=high, extent=extent, aspect="auto", interpolation="nearest")
    # The question and the answer stay visible beside a long thinking, and leave room for a short one.
    widths = [min(max(n, 0.02 * layout.thinking), 0.15 * layout.thinking) for n in (layout.question, layout.answer)]
    ends = [(0, -1, "question"), (layout.thinking, 1, "answer")]
    for (edge, sign, label), width in zip(ends[: 2 if layout.answer else 1], widths, strict=False):
        axes.axvspan(edge - 0.5, edge - 0.5 + sign * width, **UNSCORED)
        box = {"boxstyle": "round,pad=0.2", "facecolor": "0.95", "edgecolor": "none"}
        look: dict[str, Any] = {"rotation": 90, "ha": "center", "va": "center", "fontsize": 6.5, "bbox": box}
        axes.text(edge - 0.5 + sign * width / 2, (low + high) / 2, label, **look)
        axes.axvline(edge - 0.5, color="0.3", linewidth=1)
    axes.set_xlim(-0.5 - widths[0], layout.thinking - 0.5 + (widths[1] if layout.answer else 0))
    axes.set_ylim(low, high)
    axes.plot([-0.5, layout.thinking - 0.5], [mean, mean], color=MEAN_COLOR, linestyle="--", linewidth=1)
    axes.set_title(f"{name}{', mean of each step' if average_steps else ''}", loc="left", fontsize=8)
    axes.set_title(caption(scores), loc="right", fontsize=8, color=MEAN_COLOR)
    axes.set_ylabel("Importance\nScore", fontsize=8)
    axes.set_yticks([low, high], ["Low", "High"], fontsize=7)


def pooled(scores: np.ndarray, most: int) -> np.ndarray:
    """Reduce the scores to at most `most` columns, each the largest known score of the tokens that share the column."""
    if len(scores) <= most:
        return scores
    starts = np.unique(np.linspace(0, len(scores), most, endpoint=False).astype(int))
    return np.fmax.reduceat(scores, starts)


def lorenz(scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The share of the tokens, most important first, and the share of all importance they carry; both from 0 to 1."""
    ordered = np.sort(scores[~np.isnan(scores)])[::-1]
    carried = np.concatenate([[0.0], np.cumsum(ordered)])
    return np.linspace(0, 1, len(carried)), carried / max(carried[-1], 1e-300)
