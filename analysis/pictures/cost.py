"""The cost of a decoding step as the text grows, compressed beside full: rows, KV memory, FLOPs."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvsweep.analysis import format
from kvsweep.analysis.format import DEFAULT_LOOK, Look
from kvsweep.analysis.load import Run
from kvsweep.analysis.numbers.metrics import model_title
from kvsweep.analysis.pictures import style
from kvsweep.base.files import read_file

MAX_LINES = 4

# Settings whose cache lengths differ by less than this share on average have one line: it would hide the others.
ALIKE = 0.04

# A mean over fewer completions depends more on which of them still write than on the step.
MIN_LIVE = 10


def lengths_by_step(rows: pd.DataFrame, events: pd.DataFrame) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Count the completions that still write at each step, and average their cache lengths (`metrics.cache_rows`).

    `rows` are one cell's completions, indexed by their number in the run, and `events` their evictions. Returns live,
    held, full, each [steps]: the count, the mean length, and the mean length if nothing were evicted.
    """
    tokens = rows["num_tokens"].to_numpy()
    steps, begin = int(tokens.max()), np.zeros_like(tokens)
    live = _sums(begin, tokens, 1.0, steps)
    full = _sums(begin, tokens, rows["prompt_tokens"].to_numpy(), steps) + live * np.arange(steps)
    ends = rows["num_tokens"].reindex(events["completion"]).to_numpy()
    gone = _sums(events["step"].to_numpy() + 1, ends, events["freed"].to_numpy(), steps)
    with np.errstate(invalid="ignore", divide="ignore"):
        return live, (full - gone) / live, full / live


def _sums(begins: np.ndarray, ends: np.ndarray, amounts: Any, steps: int) -> np.ndarray:
    """Sum at each step the amounts that count there: each from its begin to before its end."""
    changes = np.zeros(steps + 2)
    np.add.at(changes, np.minimum(begins, steps + 1), amounts)
    np.subtract.at(changes, np.minimum(ends, steps + 1), amounts)
    return np.cumsum(changes)[:steps]


class Curve(NamedTuple):
    """One setting against the step, [steps]: mean cache length, a full cache's, and the full one's bytes over its."""

    name: str
    held: np.ndarray
    full: np.ndarray
    saved: np.ndarray


@matplotlib.rc_context(style.STYLE)
def cost_figure(run: Run, metrics: pd.DataFrame, model: str, look: Look = DEFAULT_LOOK) -> Figure | None:
    """Draw cache length, KV memory and FLOPs against step for the settings of the benchmark with the longest texts.

    FLOPs, 2 per weight and 4 per layer, head dimension and row, need the config.json that the provenance names, or have
    no panel. Without a compressed cell there is no figure.
    """
    ours = metrics[(metrics["model"] == model) & (metrics["completions"] >= MIN_LIVE)]
    compressed = ours[(ours["policy"] != "full") & (ours["evicted"] > 0)]
    if compressed.empty:
        return None
    longest = compressed["condition"].iloc[int(compressed["mean_tokens"].to_numpy().argmax())]
    compared = compressed[compressed["condition"] == longest]
    full = metrics[(metrics["condition"] == longest) & (metrics["policy"] == "full")]
    curves = _curves(run, compared, next(iter(full["cell_id"]), None))
    shape = _shape(run, compared["cell_id"].iloc[0])
    titles = ["cache length (tokens)", "KV memory, full ÷ this"]
    titles += ["FLOPs of a step, full ÷ this"] if shape else []
    columns = len(titles) if look.width > 5 else 1
    figure, axes = style.panels(look.width, len(titles), columns, row=1.9, rest=0.9)
    _lines(axes, curves, shape)
    for title, one in zip(titles, axes, strict=True):
        one.set_title(title)
        style.tidy(one)
        one.set_xlabel("decoding step")
    figure.legend(loc="outside lower center", ncols=min(columns, 2), frameon=False)
    benchmark = compared["benchmark_title"].iloc[0]
    title = f"{model_title(metrics, model)} | {benchmark}: the cost of a decoding step"
    figure.suptitle(style.wrapped(title, look.width))
    return figure


def _curves(run: Run, cells: pd.DataFrame, full_cell: str | None) -> list[Curve]:
    """At most `MAX_LINES` curves, from the smallest cache to the largest; cells alike in bytes or lengths share one."""
    lengths = (np.log(cells["mean_cache_length"]) / np.log1p(ALIKE)).round()
    groups = [rows for _, rows in cells.groupby([lengths, "bits"])]
    known = {cell: given.get("bytes", {}) for cell, given in run.provenance.items()}
    found = []
    for place in np.unique(np.linspace(0, len(groups) - 1, MAX_LINES).round().astype(int)):
        cell: Any = next(groups[place].itertuples())
        ours = run.completions[run.completions["cell_id"] == cell.cell_id]
        live, held, full = lengths_by_step(ours, run.events[run.events["completion"].isin(ours.index)])
        others = len(groups[place]) - 1
        more = f" and {others} other{'s' * (others > 1)} alike" if others else ""
        own, whole = known.get(cell.cell_id, {}), known.get(full_cell or "", {})
        own, whole = (own, whole) if own.get("row") and whole.get("row") else ({}, {})
        saved = _bytes(full, whole) / _bytes(held, own)
        parts = (part[live >= MIN_LIVE] for part in (held, full, saved))
        found.append(Curve(format.setting(cell) + more, *parts))
    return found


def _bytes(lengths: np.ndarray, sizes: dict[str, float]) -> np.ndarray:
    return lengths * sizes.get("row", 1) + sizes.get("newest", 0) + sizes.get("fixed", 0)


def _lines(axes: list[Axes], curves: list[Curve], shape: tuple[float, float] | None) -> None:
    for place, curve in enumerate(curves):
        look: dict[str, Any] = {"color": style.LINE_COLORS[place], "linestyle": style.DASHES[place], "linewidth": 1.2}
        axes[0].plot(curve.held, label=curve.name, **look)
        axes[1].plot(curve.saved, **look)
        if shape is not None:
            axes[2].plot((shape[0] + shape[1] * curve.full) / (shape[0] + shape[1] * curve.held), **look)
    longest = max((curve.full for curve in curves), key=len)
    axes[0].plot(longest, color="0.4", linewidth=1, label=format.policy_title("full"), zorder=1)


def _shape(run: Run, cell_id: str) -> tuple[float, float] | None:
    """FLOPs of a token beside the cache, full windows included, and per row of it; None without config.json."""
    path = ((run.provenance.get(cell_id, {}).get("config") or {}).get("model") or {}).get("path")
    try:
        config = json.loads(read_file(Path(str(path)) / "config.json", linked=True))
        hidden, layers, heads = (config[k] for k in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
        size = config.get("head_dim") or hidden // heads
        kv = config["num_key_value_heads"]
        layer = hidden * size * (2 * heads + 2 * kv) + 3 * hidden * config["intermediate_size"]
        kinds, row = config.get("layer_types") or ["full_attention"] * layers, 4.0 * heads * size
        windows = kinds.count("sliding_attention") * (config.get("sliding_window") or 0)
        weights = 2.0 * (layers * layer + hidden * config["vocab_size"])
        return weights + row * windows, row * kinds.count("full_attention")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError):
        return None
