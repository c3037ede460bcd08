"""The noise figure: the scores of each grid in ascending order, beside those that are tied with the best."""

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
    """Draw one panel per verdict: its settings' Pass@1 in ascending order, and a grey band below the best.

    The band reaches from the best score down by `NoiseFloor.critical`: the settings in it are tied with the best. All
    verdicts must have a floor.
    """
    columns = min(2, len(verdicts))
    with matplotlib.rc_context(STYLE):
        figure = new_figure((PAGE_WIDTH, 2.2 * ceil(len(verdicts) / columns) + 0.5))
        for axes, verdict in zip(panels(figure, len(verdicts), columns), verdicts, strict=True):
            _panel(axes, verdict)
        figure.supylabel("Pass@1 (%)", fontsize=9)
        note = "dots: settings in ascending order, blue where settings matter    grey: statistically tied with the best"
        figure.supxlabel(note, fontsize=8, color="0.3")
    return figure


def _panel(axes: Axes, verdict: PanelVerdict) -> None:
    floor = verdict.floor
    assert floor is not None
    scores = 100 * np.sort(floor.scores)
    best = scores[-1]
    tied_from = max(0.0, best - 100 * floor.critical)
    axes.axhspan(tied_from, best, color=BAND_COLOR, linewidth=0)
    color = SIGNAL_COLOR if floor.signal else NOISE_COLOR
    axes.plot(np.arange(1, len(scores) + 1), scores, "o", markersize=3.5, color=color)
    low, _, high = (words.percent(value) for value in floor.expected_range)
    spans = f"scores span {words.percent(floor.range)}, by chance {low} to {high}, {words.p_equals(floor.p)}"
    axes.set_title(f"{verdict.title}\n{spans}", fontsize=8, linespacing=1.3)
    bottom = min(scores[0], tied_from)
    room = 0.08 * (best - bottom or 1.0)  # settings that are all correct span nothing
    axes.set_ylim(bottom - room, best + room)
    # No score lies above 100%, and no tick should say so.
    axes.set_yticks([tick for tick in axes.get_yticks() if bottom - room <= tick <= min(100, best + room)])
    axes.set_xticks([])
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
