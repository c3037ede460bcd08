"""The noise figure: the scores of each grid in ascending order, beside those that are tied with the best."""

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvsweep.analysis import format
from kvsweep.analysis.format import DEFAULT_LOOK, Look
from kvsweep.analysis.numbers.sentences import PanelVerdict
from kvsweep.analysis.pictures import style

# All panels together, in inches: with the note they fit on a page.
MOST_HIGH = 9.0
BAND_COLOR, SIGNAL_COLOR, NOISE_COLOR = "0.85", "#0072B2", "#D55E00"


@matplotlib.rc_context(style.STYLE)
def noise_figure(verdicts: list[PanelVerdict], look: Look = DEFAULT_LOOK) -> Figure:
    """Draw one panel per verdict, each with a floor: its settings' Pass@1 in ascending order, and a grey band.

    The band reaches from the best score down by `NoiseFloor.critical`: the settings in it are tied with the best.
    """
    columns = min(2 if look.width > 5 else 1, len(verdicts))
    figure, grid = style.panels(look.width, len(verdicts), columns, row=1.8, rest=0.5, most=MOST_HIGH)
    for axes, verdict in zip(grid, verdicts, strict=True):
        _panel(axes, verdict, look.width / columns)
    figure.supylabel("Pass@1 (%)", fontsize=8)
    note = "one dot per setting, in ascending order: blue where settings matter, orange where that is not shown;"
    style.footnote(figure, f"{note} grey: statistically tied with the best")
    return figure


def _panel(axes: Axes, verdict: PanelVerdict, width: float) -> None:
    floor = verdict.floor
    assert floor is not None
    scores = 100 * np.sort(floor.scores)
    best = scores[-1]
    tied_from = max(0.0, best - 100 * floor.critical)
    axes.axhspan(tied_from, best, color=BAND_COLOR, linewidth=0)
    color = SIGNAL_COLOR if floor.signal else NOISE_COLOR
    axes.plot(np.arange(1, len(scores) + 1), scores, "o", markersize=3.5, color=color)
    low, _, high = (format.percent(value) for value in floor.expected_range)
    spans = f"scores span {format.percent(floor.range)}, by chance {low} to {high}, {format.p_equals(floor.p)}"
    axes.set_title(style.wrapped(f"{verdict.title}\n{spans}", width, style.SMALL), fontsize=7, linespacing=1.3)
    bottom = min(scores[0], tied_from)
    room = 0.08 * (best - bottom or 1.0)  # settings that are all correct span nothing
    axes.set_ylim(bottom - room, best + room)
    style.percent_axis(axes)
    axes.set_xticks([])
    axes.spines[["top", "right", "bottom"]].set_visible(False)
