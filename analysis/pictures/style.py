"""What all pictures share: how they look, where they are written, what their files are called."""

import re
from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from analysis.records import content_hash

FORMATS = ("png", "svg", "pdf")

# The width of a printed page between its margins, 18 cm, in inches.
PAGE_WIDTH = 18 / 2.54
STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 10,
    "savefig.dpi": 200,
    "pdf.fonttype": 42,
    "svg.hashsalt": "kvsweep",
    "text.parse_math": False,
    "hatch.linewidth": 0.6,
}


def new_figure(size: tuple[float, float]) -> Figure:
    """An empty figure of that width and height in inches, whose parts make room for each other."""
    return Figure(figsize=size, layout=ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08))


def model_title(metrics: pd.DataFrame, model: str) -> str:
    """The name of a model as a reader knows it."""
    return metrics.loc[metrics["model"] == model, "model_title"].iloc[0]


def save_figure(figure: Figure, directory: Path, name: str) -> dict[str, Path]:
    """Write a figure as PNG (200 dpi), SVG and PDF; the same figure gives the same bytes.

    Returns:
        The written path per format.
    """
    paths = {suffix: directory / f"{name}.{suffix}" for suffix in FORMATS}
    dates: dict[str, dict[str, Any]] = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}
    with matplotlib.rc_context(STYLE):
        for suffix, path in paths.items():
            figure.savefig(path, metadata=dates[suffix])
            # The first format settles the layout, which is the slow part; the others take it over.
            figure.set_layout_engine("none")
    return paths


def file_name(*parts: str) -> str:
    """A file name without suffix from words of any characters; different words give different names."""
    raw = "_".join(part for part in parts if part)
    safe = re.sub(r"[^A-Za-z0-9.-]+", "_", raw).strip("._")
    return safe if safe == raw else f"{safe[:80]}_{content_hash(raw)[:6]}"


# Okabe and Ito's colours without their yellow, which print loses, and with indigo. Seven of them and eleven
# markers: 77 policies differ in one or the other, neighbours in both.
LINE_COLORS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#332288")
MARKERS = "osD^vPX<>ph"
