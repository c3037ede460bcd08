"""Look, parts and files that all figures share."""

import re
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from math import ceil
from pathlib import Path
from textwrap import fill
from typing import Any, Literal

import matplotlib
import numpy as np
import pandas as pd
import seaborn
from matplotlib.axes import Axes
from matplotlib.collections import Collection
from matplotlib.colors import Colormap, ListedColormap, to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.font_manager import findSystemFonts, fontManager
from matplotlib.ft2font import FT2Font
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.text import Text
from matplotlib.ticker import LogFormatter

from kvsweep.analysis import notation
from kvsweep.messages.errors import UserError
from kvsweep.run_files.row_types import content_hash
from kvsweep.run_files.safe_files import read_file, replace_text, replacing

FORMATS = ("png", "svg", "pdf")

# A user's matplotlibrc changes no figure. The backend belongs to the program or notebook.
_DEFAULTS = {name: value for name, value in matplotlib.rcParamsDefault.items() if not name.startswith("backend")}
STYLE: Any = {
    **_DEFAULTS,
    # Times, as in papers, and a font for other characters; matplotlib ships both, so all machines draw the same.
    "font.family": ["STIXGeneral", "DejaVu Sans"],
    **dict.fromkeys(("font.size", "axes.titlesize", "axes.labelsize"), 8),
    **dict.fromkeys(("xtick.labelsize", "ytick.labelsize", "legend.fontsize"), 7),
    "savefig.dpi": 200,
    "pdf.fonttype": 42,
    "svg.hashsalt": "kvsweep",
    "text.parse_math": False,
    "hatch.linewidth": 0.6,
    "legend.frameon": False,
}

# Lightness falls evenly from low to high: safe for colour-blind readers and in grey print.
SEQUENTIAL = "YlGnBu"
# Red below zero, blue above zero: colour-blind readers can tell them apart.
DIVERGING = "RdBu"

# Okabe and Ito's colours, with indigo for their yellow, which is too light in print, and Tol's wine and olive. Nine
# colours and eleven markers tell 99 policies apart; neighbours differ in both.
LINE_COLORS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#332288", "#882255", "#999933")
MARKERS = "osD^vPX<>ph"
DASHES: tuple[Any, ...] = ("-", (0, (4, 1.5)), (0, (1, 1)), (0, (5, 1, 1, 1)))
# Letters in an inch of a note; inches of a letter in a legend.
LETTERS, LETTER = 22, 0.039


def check_map(name: str) -> None:
    """Raise UserError if matplotlib has no colour map with this name."""
    if name not in matplotlib.colormaps:
        raise UserError(f"--map {name} is no colour map of matplotlib: give one such as viridis, PuOr or RdYlGn.")


def new_figure(size: tuple[float, float]) -> Figure:
    """Make an empty figure of this width and height in inches; its parts do not overlap."""
    return Figure(figsize=size, layout=ConstrainedLayoutEngine(w_pad=0.05, h_pad=0.06))


def wrapped(text: str, width: float) -> str:
    """Break lines of a note that are wider than `width` inches."""
    return "\n".join(fill(line, round(LETTERS * width)) for line in text.splitlines())


def footnote(figure: Figure, text: str) -> None:
    """Write a note below the figure, in lines that fit, and make the figure higher for it."""
    lines = wrapped(text, figure.get_figwidth())
    figure.set_figheight(figure.get_figheight() + 0.12 * (1 + lines.count("\n")))
    figure.supxlabel(lines, fontsize=7, color="0.3")


def marks(texts: Iterable[str]) -> list[str]:
    """Explain the marks in these texts, and the sign of the standard error."""
    shown = list(texts)
    meanings = {mark: notation.MARKS[mark] for mark in notation.marks(shown)}
    if "±" in "".join(shown):
        meanings["±"] = "standard error over problems"
    return [f"{mark}\N{NO-BREAK SPACE}{meaning}" for mark, meaning in meanings.items()]


def panels(
    width: float,
    count: int,
    columns: int,
    *,
    row_height: float,
    extra_height: float,
    max_height: float = np.inf,
    **shared: Any,
) -> tuple[Figure, list[Axes]]:
    """Make a figure of `count` panels in rows of `columns`; `shared` is for `Figure.subplots`.

    All rows together have at most `max_height`, and all else has `extra_height`, in inches like `width`.
    """
    rows = ceil(count / columns)
    figure = new_figure((width, min(row_height * rows, max_height) + extra_height))
    axes = figure.subplots(rows, columns, squeeze=False, **shared).ravel()
    for unused in axes[count:]:
        unused.remove()
    return figure, list(axes[:count])


def tidy(axes: Axes, *, grid: Literal["x", "y", "both"] = "y") -> None:
    """Draw a faint grid below the data and leave out the frame on top and on the right."""
    axes.grid(axis=grid, color="0.92", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


class PlainLogFormatter(LogFormatter):
    """matplotlib's choice of the ticks that have a number, without its formulas, which `STYLE` does not read."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        return f"{x:g}" if super().__call__(x, pos) else ""


def percent_axis(axes: Axes) -> None:
    """End a vertical axis of percents at 0 and 100, with room for a marker beyond."""
    low, high = axes.get_ylim()
    axes.set_ylim(max(low, -2.0), min(high, 102.0))


def percent_errors(rows: Any) -> tuple[Any, list[Any]]:
    """Return scores in percent, and the lengths of their error bars to either side, cut at 0 and 100."""
    scores = 100 * rows["pass_at_1"]
    errors = 100 * rows["se"].fillna(0)
    return scores, [np.minimum(errors, scores), np.minimum(errors, 100 - scores)]


def legend_below(figure: Figure) -> None:
    """Explain below a figure what its panels show, each label once, and make the figure higher for it."""
    handles = {}  # what is drawn, by its label
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles[label] = handle
    # What is drawn before a label takes the room of about 7 letters.
    column_width = LETTER * (max(map(len, handles)) + 7)
    columns = max(1, int(figure.get_figwidth() / column_width))
    lines = ceil(len(handles) / columns)
    figure.set_figheight(figure.get_figheight() + 0.13 * lines)
    figure.legend(
        list(handles.values()),
        list(handles),
        loc="outside lower center",
        ncols=columns,
        columnspacing=0.8,
        handlelength=1.6,
        fontsize=6,
    )


def look_of(number: int) -> dict[str, Any]:
    """Return the colour, marker and dashes of the line or policy with this number, from 0."""
    choices: dict[str, Any] = {"color": LINE_COLORS, "marker": MARKERS, "linestyle": DASHES}
    return {name: values[number % len(values)] for name, values in choices.items()}


def faded(cmap: str) -> Colormap:
    """Return a colour map at a third of its strength, for scores that may differ by chance alone."""
    colors = matplotlib.colormaps[cmap](np.linspace(0, 1, 256))[:, :3]
    # 1 is white.
    return ListedColormap(1 - (1 - colors) / 3)


def shade(value: float, limits: tuple[float, float], cmap: str | Colormap) -> tuple[str, str]:
    """Return a value's colour on a scale between two limits, and black or white, whichever has more contrast."""
    low, high = limits
    color = matplotlib.colormaps.get_cmap(cmap)((value - low) / (high - low))
    channels = np.asarray(to_rgb(color))
    # WCAG 2's relative luminance, from 0 (black) to 1 (white), and contrast (lighter + 0.05) / (darker + 0.05).
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    luminance = float(linear @ [0.2126, 0.7152, 0.0722])
    # Black and white have equal contrasts, 4.58, to a colour of this luminance.
    equal_contrasts = (1.05 * 0.05) ** 0.5 - 0.05
    return to_hex(color), "#000000" if luminance > equal_contrasts else "#ffffff"


def heat_table(
    axes: Axes,
    values: pd.DataFrame,
    labels: Iterable[str],
    *,
    cmap: str | Colormap,
    limits: tuple[float, float],
    size: float,
) -> Collection:
    """Draw a table as coloured cells with their labels (row by row), the first row on top; hatched where missing."""
    low, high = limits
    seaborn.heatmap(
        values,
        ax=axes,
        vmin=low,
        vmax=high,
        cmap=cmap,
        linewidths=1,
        linecolor="white",
        cbar=False,
        xticklabels=True,
        yticklabels=True,
    )
    axes.tick_params(length=0, rotation=0)
    # The hatched background shows where a cell is missing.
    axes.patch.set(facecolor="0.96", edgecolor="0.65", hatch="////", linewidth=0)
    # We draw the labels, because seaborn's choice of black or white leaves some with too little contrast.
    box = {"boxstyle": "round,pad=0.15", "facecolor": "0.96", "edgecolor": "none"}
    for ((row, column), value), label in zip(np.ndenumerate(values), labels, strict=True):
        look: dict[str, Any] = {"color": "0.2", "bbox": box}
        if value == value:  # not missing
            _, text_color = shade(value, limits, cmap)
            look = {"color": text_color}
        axes.text(column + 0.5, row + 0.5, label, fontsize=size, ha="center", va="center", **look)
    axes.spines[:].set_visible(False)
    return axes.collections[0]


def add_fonts(figure: Figure) -> None:
    """Give a figure's texts this machine's fonts for the characters that its own fonts do not have.

    matplotlib warns of each character that no font has, and draws a box.
    """
    texts = [artist for artist in figure.findobj(Text) if isinstance(artist, Text)]
    families = _families_with(frozenset("".join(text.get_text() for text in texts)))
    if families:
        for text in texts:
            text.set_fontfamily([*text.get_fontfamily(), *families])


@cache
def _families_with(characters: frozenset[str]) -> list[str]:
    """Return fonts of this machine for the characters that the figures' own fonts do not have.

    The fonts are searched again, because matplotlib's own list may be old.
    """
    missing = {ord(character) for character in characters if character.isprintable()}
    for family in STYLE["font.family"]:
        missing -= FT2Font(fontManager.findfont(family)).get_charmap().keys()
    families = list[str]()
    if not missing:
        return families
    for path in sorted(findSystemFonts()):
        with suppress(OSError, RuntimeError):  # not a font file
            font = FT2Font(path)
            glyphs = missing & font.get_charmap().keys()
            # Fonts of pixels cannot be drawn in every size.
            if font.scalable and glyphs:
                missing -= glyphs
                # `addfont` puts the font at the end of `ttflist`.
                fontManager.addfont(path)
                families.append(fontManager.ttflist[-1].name)
    return families


def _name_clips(path: Path, figure_name: str) -> None:
    """Name an SVG's clip paths by figure and order.

    matplotlib hashes their bounds, and the layout's last bits differ from one process to the next.
    """
    text = read_file(path).decode()
    for number, clip in enumerate(re.findall('<clipPath id="(p[0-9a-f]{10})">', text)):
        text = text.replace(clip, f"p{content_hash([figure_name, number])[:10]}")
    replace_text(path, text)


def save_figure(figure: Figure, directory: Path, name: str, *, pdf: bool = True) -> dict[str, Path]:
    """Write a figure as PNG (200 dpi), SVG and PDF, always the same bytes, and its caption (its label) as text."""
    paths = {suffix: directory / f"{name}.{suffix}" for suffix in FORMATS if pdf or suffix != "pdf"}
    no_date: dict[str, dict[str, Any]] = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}
    with matplotlib.rc_context(STYLE):
        add_fonts(figure)
        for suffix, path in paths.items():
            with replacing(path) as temporary:
                figure.savefig(temporary, format=suffix, metadata=no_date[suffix])
                if suffix == "svg":
                    _name_clips(temporary, name)
            # Layout is the slow part: the first format computes it, and the other formats reuse it. With an engine, or
            # a placeholder of one, matplotlib would draw once more before it writes.
            figure.set_layout_engine(None)
    caption = directory / f"{name}.txt"
    replace_text(caption, f"{figure.get_label()}\n")
    return {**paths, "txt": caption}
