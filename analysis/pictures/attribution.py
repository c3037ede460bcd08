"""Token attribution as a table of signed numbers: rows are answer tokens, columns reasoning steps."""

from collections.abc import Sequence

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from analysis.pictures.style import STYLE, TURNED, new_figure

_LABEL_CHARACTERS = 28

# A page shows no more rows and columns than these. Those with the largest effects stay; the table has all.
_MOST_TOKENS, _MOST_STEPS = 80, 40


def attribution_table(values: np.ndarray, tokens: Sequence[str], steps: Sequence[str]) -> pd.DataFrame:
    """Name the columns of [tokens, steps] effects by the steps, and put the answer tokens before them."""
    table = pd.DataFrame(values, columns=list(steps))
    table.insert(0, "token", list(tokens))
    return table


def attribution_figure(values: np.ndarray, tokens: Sequence[str], steps: Sequence[str], *, title: str) -> Figure:
    """Draw signed effects on the log-probability [tokens, steps] with four decimals, red (-1) over white to green (1).

    A value beyond the scale has the colour of the scale's end and is printed in full. If there are very many answer
    tokens or reasoning steps, those with the largest effects are shown in the text's order, and the title says how many
    there are.
    """
    rows, columns = strongest(values, axis=1, most=_MOST_TOKENS), strongest(values, axis=0, most=_MOST_STEPS)
    if len(rows) < len(tokens) or len(columns) < len(steps):
        title += f"\nstrongest {len(rows)} of {len(tokens)} tokens, {len(columns)} of {len(steps)} steps"
    values = values[np.ix_(rows, columns)]
    tokens, steps = [tokens[row] for row in rows], [steps[column] for column in columns]
    with matplotlib.rc_context(STYLE):
        height = 1.6 + 0.26 * len(tokens)
        figure = new_figure((1.8 + 0.72 * len(steps), height))
        axes = figure.subplots()
        image = axes.imshow(values, cmap="RdYlGn", vmin=-1.0, vmax=1.0, aspect="auto")
        for (row, column), value in np.ndenumerate(values):
            ink = "white" if abs(value) > 0.75 else "black"
            # z: no sign before a zero.
            axes.text(column, row, f"{value:z.4f}", ha="center", va="center", fontsize=7, color=ink)
        axes.set_xticks(range(len(steps)), [shortened(s) for s in steps], fontsize=7, **TURNED)
        axes.set_yticks(range(len(tokens)), [visible(t) for t in tokens], fontsize=7)
        axes.set_xlabel("Reasoning step")
        axes.set_ylabel("Answer token")
        axes.set_title(title)
        # A colour bar's width follows its height; beside a tall table it must not grow.
        tall = max(1.0, height / 9)
        bar = figure.colorbar(
            image, ax=axes, extend="both", ticks=[-1.0, -0.5, 0.0, 0.5, 1.0], aspect=20 * tall, extendfrac=0.05 / tall
        )
        bar.set_label("Token Attribution")
    return figure


def strongest(values: np.ndarray, *, axis: int, most: int) -> list[int]:
    """Select the rows (axis 1) or columns (axis 0) with the largest absolute values, at most so many, in order."""
    strength = np.abs(values).max(axis=axis)
    return sorted(np.argsort(-strength, kind="stable")[:most].tolist())


def visible(token: str) -> str:
    """Show the spaces and line breaks of a token."""
    return token.replace(" ", "␣").replace("\n", "↵")


def shortened(step: str) -> str:
    """Put a step's text on one line and cut it to the length that a column's head holds."""
    line = " ".join(step.split())
    return line if len(line) <= _LABEL_CHARACTERS else line[: _LABEL_CHARACTERS - 1] + "…"
