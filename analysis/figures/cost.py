"""The cost of a decoding step as the text grows, compressed and full: cached tokens, KV memory, FLOPs."""

import json
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from kvsweep.analysis import notation
from kvsweep.analysis.figures import style
from kvsweep.analysis.load import Run
from kvsweep.analysis.notation import DEFAULT_LOOK, Look
from kvsweep.analysis.statistics.metrics import model_title
from kvsweep.messages.command_line import counted
from kvsweep.run_files.safe_files import read_file

MAX_LINES = 4

# With fewer completions, the mean depends more on which of them still decode than on the step.
MIN_LIVE = 10

TITLES = (
    "cache length (tokens)",
    "the full cache's KV memory divided by the setting's",
    "the full cache's FLOPs a step divided by the setting's",
)


def lengths_by_step(rows: pd.DataFrame, events: pd.DataFrame) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Count the completions that still decode at each step, and average their cache lengths (`metrics.cache_rows`).

    `rows` are one cell's completions, indexed by their number in the run; `events` are their evictions. Returns live,
    lengths, full, each [steps]: the count, the mean length, and the mean length without evictions.
    """
    ends = rows["num_tokens"].to_numpy()
    starts = np.zeros(len(rows), int)
    steps = int(ends.max())
    live = _sums(starts, ends, np.ones(len(rows)), steps)
    full = _sums(starts, ends, rows["prompt_tokens"].to_numpy(), steps) + live * np.arange(steps)
    # Freed tokens are missing from the step after their eviction to the end of their completion.
    event_ends = rows["num_tokens"].reindex(events["completion"]).to_numpy()
    freed = _sums(events["step"].to_numpy() + 1, event_ends, events["freed"].to_numpy(), steps)
    # The longest completion is live at every step, so nothing is divided by zero.
    return live, (full - freed) / live, full / live


def _sums(starts: np.ndarray, ends: np.ndarray, amounts: np.ndarray, steps: int) -> np.ndarray:
    """Sum at each step the amounts that are active there, [steps]: each from its start to just before its end."""
    # What starts or ends after the last step is cut off.
    changes = np.bincount(starts, amounts, steps)[:steps] - np.bincount(ends, amounts, steps)[:steps]
    return np.cumsum(changes)


@matplotlib.rc_context(style.STYLE)
def cost_figure(run: Run, metrics: pd.DataFrame, model: str, look: Look = DEFAULT_LOOK) -> Figure | None:
    """Draw cache length, KV memory and FLOPs against step, for the benchmark with the longest completions.

    FLOPs (2 per weight, and 4 per layer, head dimension and row) need the config.json that the provenance names;
    without it they have no panel. Returns None without a compressed cell.
    """
    cells = metrics[(metrics["model"] == model) & (metrics["completions"] >= MIN_LIVE)]
    compressed = cells[(cells["policy"] != "full") & (cells["evicted"] > 0)]
    if compressed.empty:
        return None
    # The model and benchmark of the cell with the longest texts.
    condition = compressed.nlargest(1, "mean_tokens")["condition"].item()
    compared = compressed[compressed["condition"] == condition]
    full_cells = metrics.loc[(metrics["condition"] == condition) & (metrics["policy"] == "full"), "cell_id"]
    full_cell = next(iter(full_cells), "")  # "", which no cell has, has no known bytes
    token_flops = flops(run, compared["cell_id"].iloc[0])
    titles = TITLES if token_flops else TITLES[:2]  # the last is of FLOPs
    columns = len(titles) if look.width > 5 else 1  # beside one another on a page, below one another in a column
    figure, panels = style.panels(look.width, len(titles), columns, row_height=1.9, extra_height=0.6)
    full_curves = []
    chosen = _cells_to_draw(compared)
    for number, (name, cell) in enumerate(chosen):
        lengths, full = _lengths(run, cell)
        full_curves.append(full)
        saved = _kv_bytes(run, full_cell, full) / _kv_bytes(run, cell, lengths)
        # Where bytes per token are unknown, the lengths are compared.
        curves = [lengths, np.where(np.isnan(saved), full / lengths, saved)]
        if token_flops:
            token, cached_token = token_flops
            curves.append((token + cached_token * full) / (token + cached_token * lengths))
        for axes, values in zip(panels, curves, strict=True):
            axes.plot(
                values, label=name, color=style.LINE_COLORS[number], linestyle=style.DASHES[number], linewidth=1.2
            )
    # Without eviction all cells would have about one curve: the longest of them is drawn.
    longest = max(full_curves, key=len)
    panels[0].plot(longest, color="0.4", linewidth=1, label=notation.policy_title("full"), zorder=1)
    for axes, title in zip(panels, titles, strict=True):
        axes.set(title=style.wrapped(title, 0.8 * look.width / columns), xlabel="decoding step")
        style.tidy(axes)
    style.legend_below(figure)
    title = f"{model_title(metrics, model)} | {compared['benchmark_title'].iloc[0]}"
    note = f"{len(chosen)} of {counted(len(compared), 'setting')}, from the smallest cache to the largest"
    note += ". Left out: benchmarks of shorter texts, settings that evict nothing, "
    note += f"steps of fewer than {MIN_LIVE} texts"
    figure.set_label(f"{title}: the cost of a decoding step, mean over the texts that have not ended; {note}")
    return figure


def _lengths(run: Run, cell: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the cache lengths of a cell and of a full cache, at steps where enough completions still decode."""
    rows = run.completions[run.completions["cell_id"] == cell]
    live, lengths, full = lengths_by_step(rows, run.events[run.events["completion"].isin(rows.index)])
    return lengths[live >= MIN_LIVE], full[live >= MIN_LIVE]


def _kv_bytes(run: Run, cell: str, lengths: np.ndarray) -> np.ndarray:
    """Return the KV bytes of caches of these lengths, NaN if bytes per token are unknown."""
    sizes = run.provenance.get(cell, {}).get("bytes", {})
    # Beside the packed rows: the newest rows, which are not packed yet, and layers of a fixed size.
    return lengths * (sizes.get("row") or np.nan) + sizes.get("newest", 0) + sizes.get("fixed", 0)


def _cells_to_draw(cells: pd.DataFrame) -> list[tuple[str, str]]:
    """Return names and ids of at most `MAX_LINES` cells, smallest cache first."""
    ascending = cells.sort_values(["mean_cache_length", "bits"], kind="stable")
    # Evenly from the smallest to the largest; of fewer cells each once.
    indices = np.unique(np.linspace(0, len(cells) - 1, MAX_LINES).round().astype(int))
    return [(notation.setting(cell), cell.cell_id) for cell in notation.rows(ascending.iloc[indices])]


def flops(run: Run, cell_id: str) -> tuple[float, float] | None:
    """FLOPs of a token without cached tokens (full windows included), and per cached token; None if unknown."""
    try:
        folder = Path(run.provenance[cell_id]["config"]["model"]["path"])
        config = json.loads(read_file(folder / "config.json", linked=True))
        hidden, layers, heads = config["hidden_size"], config["num_hidden_layers"], config["num_attention_heads"]
        head_dim = config.get("head_dim") or hidden // heads
        # Queries and output have all heads, keys and values the key heads.
        attention_weights = hidden * head_dim * 2 * (heads + config["num_key_value_heads"])
        # The MLP has three matrices: gate, up and down.
        layer_weights = attention_weights + 3 * hidden * config["intermediate_size"]
        weights = layers * layer_weights + hidden * config["vocab_size"]
        row_flops = 4.0 * heads * head_dim  # of attention over one cached token in one layer
        layer_types = config.get("layer_types") or ["full_attention"] * layers
        window_rows = layer_types.count("sliding_attention") * (config.get("sliding_window") or 0)
        return 2.0 * weights + row_flops * window_rows, row_flops * layer_types.count("full_attention")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError):
        return None
