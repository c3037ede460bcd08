"""Token attribution as a table of signed numbers: rows are answer tokens, columns reasoning steps."""

import re
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from kvsweep.analysis.format import EQUATION, PAGE_WIDTH
from kvsweep.analysis.pictures.style import DIVERGING, STYLE, heat_table, new_figure

_LABEL_CHARACTERS = 32

# A printed page shows no more rows and columns than these. Those with the largest effects stay; the table has all.
_MOST_TOKENS, _MOST_STEPS = 36, 9

# A step whose largest effect is below this share of the largest of all is summed up with the others.
_FAINT = 0.001


def attribution_table(values: np.ndarray, tokens: Sequence[str], steps: Sequence[str]) -> pd.DataFrame:
    """Name the columns of [tokens, steps] effects by the steps, and put the answer tokens before them."""
    table = pd.DataFrame(values, columns=list(steps))
    table.insert(0, "token", list(tokens))
    return table


def attribution_figure(
    values: np.ndarray,
    tokens: Sequence[str],
    steps: Sequence[str],
    *,
    title: str,
    method: str = "removal",
    cmap: str | None = None,
) -> Figure:
    """Draw signed effects on the log-probability [tokens, steps] with four decimals, red (-1) over white to blue (1).

    A value beyond the scale has its end's colour and is printed in full. The steps with the largest effects have a
    column each, in the text's order, and the last column sums the others; of many tokens the strongest are shown.
    """
    rows, columns = strongest(values, axis=1, most=_MOST_TOKENS), strongest(values, axis=0, most=_MOST_STEPS)
    shown, names = values[:, columns], [shortened(steps[column]) for column in columns]
    if others := len(steps) - len(columns):
        rest = values.sum(axis=1) - shown.sum(axis=1)
        shown = np.column_stack([shown, rest])
        names.append(f"sum of {others} other{'s' * (others > 1)}")
    shown = shown[rows]
    notes = [f"effect of a step on each answer token's log-probability, by {method}; the colours end at -1 and 1"]
    notes += [f"the {len(columns)} of {len(steps)} steps with the largest effects"] if others else []
    notes += [f"the {len(rows)} of {len(tokens)} tokens with the largest effects"] if len(rows) < len(tokens) else []
    with matplotlib.rc_context(STYLE):
        width = min(PAGE_WIDTH, max(5.2, 1.6 + 0.55 * len(names)))
        figure = new_figure((width, 2.6 + 0.165 * len(rows)))
        axes = figure.subplots()
        # z: no sign before a zero.
        labels = np.array([[f"{value:z.4f}" for value in row] for row in shown])
        mesh = heat_table(axes, shown, labels, cmap=cmap or DIVERGING, limits=(-1.0, 1.0), size=6)
        axes.xaxis.tick_top()
        axes.xaxis.set_label_position("top")
        turned: Any = {"rotation": 40, "ha": "left", "rotation_mode": "anchor", "fontsize": 6.5}
        axes.set_xticks(np.arange(len(names)) + 0.5, names, **turned)
        axes.set_yticks(np.arange(len(rows)) + 0.5, [visible(tokens[row]) for row in rows], fontsize=6.5)
        axes.set(xlabel="Reasoning step", ylabel="Answer token")
        axes.tick_params(length=0)
        bar = figure.colorbar(mesh, ax=axes, extend="both", ticks=[-1.0, -0.5, 0.0, 0.5, 1.0], aspect=25, pad=0.02)
        bar.set_label("Token Attribution")
        figure.suptitle(title)
        figure.supxlabel("\n".join(notes), fontsize=7, color="0.3")
    return figure


def strongest(values: np.ndarray, *, axis: int, most: int) -> list[int]:
    """The rows (axis 1) or columns (axis 0) with the largest absolute values, in order; faint columns are left out."""
    strength = np.abs(values).max(axis=axis)
    ranked = np.argsort(-strength, kind="stable")[:most]
    if axis == 0:
        ranked = ranked[strength[ranked] >= _FAINT * strength.max()]
    return sorted(ranked.tolist())


def visible(token: str) -> str:
    """Show the spaces and line breaks of a token."""
    return token.replace(" ", "␣").replace("\n", "↵")


def shortened(step: str) -> str:
    """Put a step's text on one line and cut it to the length that a column's head holds: its last equation stays."""
    line = " ".join(step.split())
    if len(line) <= _LABEL_CHARACTERS:
        return line
    equations = list(re.finditer(EQUATION, line))
    kept, before = (equations[-1].group(), line[: equations[-1].start()]) if equations else ("", line)
    room = _LABEL_CHARACTERS - len(kept)
    return (before if len(before) <= room else f"{before[: room - 1]}…") + kept
