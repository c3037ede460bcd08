"""The noise figure: the cells of each grid in ascending order, beside the range that identical cells would give."""

from math import ceil

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis import words
from analysis.numbers.verdict import PanelVerdict
from analysis.pictures.style import PAGE_WIDTH, STYLE, new_figure, panels

BAND_COLOR, SIGNAL_COLOR, NOISE_COLOR = "0.85", "#0072B2", "#D55E00"


def noise_figure(verdicts: list[PanelVerdict]) -> Figure:
    """Draw one panel per verdict: its cells' Pass@1 in ascending order over a grey band.

    The band is as wide as the range that identical cells stay within in 95% of grids, around the middle of the range.
    All verdicts must have a floor.
    """
    columns = min(2, len(verdicts))
    with matplotlib.rc_context(STYLE):
        figure = new_figure((PAGE_WIDTH, 2.1 * ceil(len(verdicts) / columns) + 0.5))
        for axes, verdict in zip(panels(figure, len(verdicts), columns), verdicts, strict=True):
            _panel(axes, verdict)
        figure.supylabel("Pass@1 (%)", fontsize=9)
        note = "dots: cells in ascending order    grey: the range identical cells stay within in 95% of grids"
        figure.supxlabel(note, fontsize=8, color="0.3")
    return figure


def _panel(axes: Axes, verdict: PanelVerdict) -> None:
    floor = verdict.floor
    assert floor is not None
    # A table of scores holds percent, a run's cells hold fractions.
    scale = 1 if verdict.cells["pass_at_1"].max() > 1 else 100
    scores = np.sort(verdict.cells["pass_at_1"].to_numpy() * scale)
    middle = (scores[0] + scores[-1]) / 2
    half = 100 * floor.critical / 2
    axes.axhspan(middle - half, middle + half, color=BAND_COLOR, linewidth=0)
    color = SIGNAL_COLOR if floor.signal else NOISE_COLOR
    axes.plot(np.arange(1, len(scores) + 1), scores, "o", markersize=3.5, color=color)
    axes.set_title(verdict.title, fontsize=8.5)
    note = f"range {words.percent(floor.range)}, floor {words.percent(floor.critical)}, {words.p_equals(floor.p)}"
    axes.text(0.03, 0.94, note, transform=axes.transAxes, va="top", fontsize=7.5)
    low, high = min(scores[0], middle - half), max(scores[-1], middle + half)
    span = high - low or 1.0  # cells that are all correct have no range
    axes.set_ylim(low - 0.08 * span, high + 0.28 * span)
    axes.set_xticks([])
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
