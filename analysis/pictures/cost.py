"""The cost of a decoding step as the text grows, compressed beside full: rows, KV memory, FLOPs, throughput."""

import json
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis import words
from analysis.load import Run
from analysis.numbers.metrics import model_title
from analysis.pictures.style import LINE_COLORS, PAGE_WIDTH, STYLE, new_figure, tidy

MAX_LINES = 6

# A mean over fewer completions depends more on which of them still write than on the step.
MIN_LIVE = 10
PANELS = ("cache length (tokens)", "KV memory, full ÷ this", "FLOPs of a step, full ÷ this", "tokens/s")


def lengths_by_step(rows: pd.DataFrame, events: pd.DataFrame) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Count the completions that still write at each step, and average their cache lengths.

    Step s feeds generated token s; see `metrics.cache_rows` for what counts. `rows` are one cell's completions, indexed
    by their number in the run, and `events` their evictions.

    Returns:
        live, held, full, each [steps]: the count, the mean length, and the mean length if nothing were evicted.
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


def cost_figure(run: Run, metrics: pd.DataFrame, model: str) -> Figure | None:
    """Draw cache length, KV memory and FLOPs against step for one benchmark's settings, and the throughput.

    Cells that were decoded together have one throughput, which is no property of any of them: it is drawn once.

    The benchmark is the one with the longest texts; at most `MAX_LINES` settings are drawn, spread over the cache
    lengths. FLOPs need the shape of the model, from config.json where its provenance says it lies: 2 per weight, and 4
    per layer, head dimension and row. Without a compressed cell there is no figure.
    """
    ours = metrics[(metrics["model"] == model) & (metrics["completions"] >= MIN_LIVE)]
    compressed = ours[(ours["policy"] != "full") & (ours["evicted"] > 0)]
    if compressed.empty:
        return None
    longest = compressed["condition"].iloc[int(compressed["mean_tokens"].to_numpy().argmax())]
    chosen = compressed[compressed["condition"] == longest].sort_values("mean_cache_length")
    places = np.unique(np.linspace(0, len(chosen) - 1, min(MAX_LINES, len(chosen))).round().astype(int))
    chosen = chosen.iloc[places]
    full_cell = ours[(ours["condition"] == longest) & (ours["policy"] == "full")]
    with matplotlib.rc_context(STYLE):
        figure = new_figure((PAGE_WIDTH, 5.2))
        axes = figure.subplots(2, 2).ravel()
        _lines(axes, run, chosen)
        colors = [*LINE_COLORS[: len(chosen)], *["0.6"] * len(full_cell)]
        _throughput(axes[3], pd.concat([chosen, full_cell]).assign(color=colors))
        for one, title in zip(axes, PANELS, strict=True):
            one.set_title(title, fontsize=9)
            tidy(one)
        for one in axes[:3]:
            one.set_xlabel("decoding step", fontsize=8)
        figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=7.5)
        benchmark = chosen["benchmark_title"].iloc[0]
        figure.suptitle(f"{model_title(metrics, model)} | {benchmark}: the cost of a decoding step", fontsize=10)
    return figure


def _lines(axes: Any, run: Run, chosen: pd.DataFrame) -> None:
    shape = _shape(run, chosen["cell_id"].iloc[0])
    for row, color in zip(chosen.itertuples(), LINE_COLORS, strict=False):
        ours = run.completions[run.completions["cell_id"] == row.cell_id]
        live, held, full = lengths_by_step(ours, run.events[run.events["completion"].isin(ours.index)])
        steps = np.flatnonzero(live >= MIN_LIVE)
        held, full = held[steps], full[steps]
        look: dict[str, Any] = {"color": color, "linewidth": 1.2}
        axes[0].plot(steps, held, label=words.setting(row), **look)
        axes[1].plot(steps, full / held, **look)
        if shape is not None:
            axes[2].plot(steps, (shape[0] + shape[1] * full) / (shape[0] + shape[1] * held), **look)
    axes[0].plot(steps, full, color="0.4", linestyle="--", linewidth=1, label="full cache")
    if shape is None:
        axes[2].text(0.5, 0.5, "the model's shape is not known here", ha="center", transform=axes[2].transAxes)


def _throughput(axes: Axes, cells: pd.DataFrame) -> None:
    known = cells[cells["tokens_per_second"].notna()]
    alone = known["decoded_together"] == 1
    bars = pd.concat([known[alone], known[~alone].drop_duplicates("tokens_per_second").assign(color="0.85")])
    shown = axes.bar(np.arange(len(bars)), bars["tokens_per_second"], color=list(bars["color"]), width=0.6)
    axes.bar_label(shown, [words.decimal(speed, 0) for speed in bars["tokens_per_second"]], fontsize=7)
    alone_names = bars["policy"].map({"full": "full cache"}).fillna("")
    together = bars["decoded_together"].map("{:g} cells\ntogether".format)
    names = alone_names.where(bars["decoded_together"] == 1, together)
    axes.set_xticks(np.arange(len(bars)), names, fontsize=7)
    axes.tick_params(axis="x", length=0)
    axes.set_xlim(-0.8, max(len(bars) - 0.2, 0.8))
    axes.margins(y=0.12)


def _shape(run: Run, cell_id: str) -> tuple[float, float] | None:
    """FLOPs of one token that need no cache, and those per cache row; None where config.json cannot be read."""
    path = ((run.provenance.get(cell_id, {}).get("config") or {}).get("model") or {}).get("path")
    try:
        config = json.loads((Path(str(path)) / "config.json").read_text())
        hidden, layers, heads = (config[k] for k in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
        size = config.get("head_dim") or hidden // heads
        kv = config["num_key_value_heads"]
        layer = hidden * size * (2 * heads + 2 * kv) + 3 * hidden * config["intermediate_size"]
        return 2.0 * (layers * layer + hidden * config["vocab_size"]), 4.0 * layers * heads * size
    except (OSError, ValueError, KeyError):
        return None
