"""A report's tables, and their text as Markdown, as LaTeX and for the terminal. Needs no plotting library."""

import itertools
import re
import shutil
from pathlib import Path
from typing import Any

import pandas as pd

from kvsweep.analysis import notation
from kvsweep.analysis.load import Run, in_order, is_control, load_run
from kvsweep.analysis.notation import MARKS, MISSING, STOPPED, UNFINISHED, UNPACKED, UNTOUCHED, WORSE
from kvsweep.analysis.report.warnings import warnings
from kvsweep.analysis.statistics.fidelity import fidelity, replay_rows, timings
from kvsweep.analysis.statistics.metrics import (
    SETTING,
    benchmark_views,
    cell_scores,
    cells_of_model,
    mean_over_benchmarks,
    model_title,
    size,
)
from kvsweep.analysis.statistics.sentences import Findings, best_setting
from kvsweep.messages.escape import file_name
from kvsweep.run_files import row_types
from kvsweep.run_files.run_reader import CONTROL

_MARKED = "; ".join(f"{mark} {MARKS[mark]}" for mark in (UNFINISHED, MISSING, UNTOUCHED, UNPACKED, STOPPED))
NOTE = f"Pass@1 in %, ± standard error over problems; {_MARKED}"
CAPTION = f"{NOTE}; {WORSE} worse than the full cache; bold: the highest score of a compressed cache"

# What a table of settings in which something is evicted needs beside the note.
LEGEND = (
    "a setting reads: policy, keep ratio / local window, trigger: cached tokens at which eviction fires "
    "(policy.budget), without a question on top; KV budget: tokens left after an eviction, the question among them; "
    "evicted: texts that lost tokens"
)

FIDELITY_NOTE = (
    "kl, change: KL divergence, and change of the text's log-likelihood, in nats per token, texts as clusters; "
    "answer_change: of the answer's; flips: tokens with another most likely token. "
    "These numbers rank settings and never show that one is safe: docs/report.md."
)

# These surround a column's best score until the table's form is known.
BEST_BEGIN, BEST_END = "⟦", "⟧"


def summary_table(directory: Path | str) -> str:
    """Return Pass@1 ± standard error in percent as text, per model: settings by benchmarks, and the KV budget."""
    run = load_run(directory)
    scores = cell_scores(run)
    tables = []
    for model in scores["model"].unique():
        table = score_table(scores, model).join(_caches(cells_of_model(scores, model)))
        tables.append(_aligned(table))
    footer = [NOTE]
    if scores["budget"].notna().any():
        footer.append(LEGEND)
    for sentence in itertools.chain(run.notices, *warnings(run).values()):
        footer.append(f"note: {sentence}")
    return "\n\n".join([*tables, "\n".join(footer)])


def headline(metrics: pd.DataFrame) -> pd.DataFrame:
    """Return, for each finished model and benchmark, the cell that a reader would take: rows of `metrics`."""
    compared = metrics[metrics["decision"].notna() & ~is_control(metrics)]
    chosen = []  # places in `metrics`
    for _, cells in compared.groupby(["model", "benchmark"], sort=False):
        if (cells["status"] == "done").all():
            chosen.append(best_setting(cells).name)
    return metrics.loc[chosen]


def chosen_as(row: Any) -> str:
    """Say why `headline` chose a setting."""
    return "recommended" if row.recommendable else "loses least"


def headline_text(metrics: pd.DataFrame) -> str:
    """`headline` for the terminal; empty if nothing can be compared yet."""
    rows = []
    luck = ""
    for row in notation.rows(headline(metrics)):
        if row.decision in ("safe", "small loss") and not row.recommendable:
            luck = "\nA setting that is safe and not recommended may be so by luck, as one of many."
        rows.append(
            {
                "model": row.model_title,
                "benchmark": row.benchmark_title,
                "verdict": row.decision,
                "chosen as": chosen_as(row),
                "vs full, points": notation.percent(row.diff_to_full, signed=True),
                "interval": notation.interval(row.these_low, row.these_high, signed=True),
                "memory saved, peak": _saved(row.kept_memory),
                "mean": _saved(row.kept_memory_mean),
                "setting": notation.setting(row),
            }
        )
    if not rows:
        return ""
    return pd.DataFrame(rows).to_string(index=False) + luck


def _saved(kept: float) -> str:
    return MISSING if notation.missing(kept) else f"{notation.percent(1 - kept)}%"


def _caches(cells: pd.DataFrame) -> pd.DataFrame:
    """Per policy setting of a model: completions with an eviction, over all benchmarks, and the mean length after it.

    Of servers alone: the bytes of a token that a server says, and the bytes that were declared, where there are any.
    """
    settings = cells.set_axis(notation.settings(cells)).groupby(level=0)
    if cells["engine"].eq("server").all():
        sizes = settings[["measured_bytes", "declared_bytes"]].first().dropna(axis="columns", how="all")
        texts = sizes.round({"measured_bytes": 0}).map(notation.number)
        return texts.rename(columns={"measured_bytes": "bytes a token", "declared_bytes": "bytes, declared"})
    # A question on top counts neither to the trigger nor to the KV budget.
    budget = "KV budget + question" if cells["question"].eq("on_top").any() else "KV budget"
    caches = {}
    for setting, rows in settings:
        # The column is a share of the completions; rounding makes it a count again.
        evicted = (rows["evicted"] * rows["completions"]).sum(min_count=1)  # missing, and not 0, where all are missing
        caches[setting] = {
            "evicted": MISSING if notation.missing(evicted) else f"{evicted:.0f} of {rows['completions'].sum()}",
            budget: notation.decimal(rows["mean_length_after"].mean()),
        }
    return pd.DataFrame.from_dict(caches, orient="index")


def markdown(metrics: pd.DataFrame) -> str:
    """The Pass@1 tables of all models as Markdown."""
    texts = []
    for model in metrics["model"].unique():
        table = score_table(metrics, model, marked=True).reset_index(allow_duplicates=True)
        # An asterisk that is a mark is escaped before the asterisks of bold scores are written.
        text = notation.markdown([table.columns, *table.to_numpy()]).replace("*", r"\*")
        texts.append(text.replace(BEST_BEGIN, "**").replace(BEST_END, "**"))
    return "\n\n".join([*texts, CAPTION.replace("*", r"\*")]) + "\n"


def latex(metrics: pd.DataFrame) -> str:
    """The Pass@1 tables of all models as LaTeX, for booktabs; each mark becomes a command."""
    commands = {
        "±": r"$\pm$",
        MISSING: "--",
        WORSE: r"$^{\dagger}$",
        UNFINISHED: "$^{*}$",
        UNTOUCHED: "$^{=}$",
        UNPACKED: r"$^{\S}$",
        STOPPED: r"$^{\circ}$",
        BEST_BEGIN: r"\textbf{",
        BEST_END: "}",
    }
    texts = []
    for model in metrics["model"].unique():
        table = score_table(metrics, model, marked=True)
        text = table.reset_index(allow_duplicates=True).to_latex(
            index=False,
            escape=True,
            column_format="l" + "r" * len(table.columns),
            caption=CAPTION.replace("%", r"\%"),
            label=f"tab:{file_name(model)}",
        )
        # The `=` in a setting such as bits=4 follows a name and is no mark.
        texts.append(re.sub(f"(?<![A-Za-z])[{''.join(commands)}]", lambda sign: commands[sign[0]], text))
    return "\n".join(texts)


def score_table(metrics: pd.DataFrame, model: str, *, marked: bool = False) -> pd.DataFrame:
    """Return texts: a row per policy setting, a column per benchmark and for the mean; the model names the index.

    If `marked`, `BEST_BEGIN` and `BEST_END` surround each column's best compressed score, and a loss has a dagger.
    """
    cells = cells_of_model(metrics, model)
    columns = {}
    for _, rows in cells.groupby("benchmark", sort=False):
        columns[rows.iloc[0]["benchmark_title"]] = _scores(rows, marked)
    if len(columns) > 1:
        means = mean_over_benchmarks(cells)
        columns["mean"] = _scores(means, marked)
    settings = in_order(cells.drop_duplicates(SETTING), by=SETTING)
    # In display order, with a dash where a benchmark has no such cell.
    table = pd.DataFrame(columns).reindex(notation.settings(settings)).fillna(MISSING)
    return table.rename_axis(model_title(metrics, model))


def _scores(rows: pd.DataFrame, marked: bool) -> pd.Series:
    """A column of `score_table` by setting: Pass@1 with its error and marks."""
    is_compressed = ~rows["policy"].isin(["full", CONTROL])
    best = rows.loc[is_compressed, "pass_at_1"].max()
    texts = []
    for row in notation.rows(rows.assign(best=is_compressed & (rows["pass_at_1"] == best))):
        text = notation.percent_pm(row.pass_at_1, row.se)
        if text != MISSING:
            text += notation.state_marks(row)
        if marked and row.best:
            text = f"{BEST_BEGIN}{text}{BEST_END}"
        # Means have no decision.
        if marked and getattr(row, "decision", None) == "worse":
            text += WORSE
        texts.append(text)
    return pd.Series(texts, index=notation.settings(rows), dtype="object")


def holding_tables(metrics: pd.DataFrame, model: str) -> tuple[str, list[tuple[str, pd.DataFrame]]]:
    """Return a model's title, and headings and tables of cache lengths: mean over benchmarks, then each benchmark."""
    cells = cells_of_model(metrics, model)
    title = model_title(metrics, model)
    return title, [(f"{title} | {name}", _lengths(rows)) for name, rows in benchmark_views(cells)]


def _lengths(cells: pd.DataFrame) -> pd.DataFrame:
    """Cache lengths in tokens, and memory beside the full cache's, as texts: a row per setting."""
    rows = in_order(cells, by=SETTING)
    texts = {
        "largest peak": rows["max_peak_length"].map(notation.number),
        "mean peak": rows["mean_peak_length"].map(notation.decimal),
        "at an eviction": rows["mean_length_before"].map(notation.decimal),
        "just after it": rows["mean_length_after"].map(notation.decimal),
        "mean over steps": rows["mean_cache_length"].map(notation.decimal),
        "peak memory, % of full": rows["kept_memory"].map(notation.percent),
        "mean memory, % of full": rows["kept_memory_mean"].map(notation.percent),
    }
    return pd.DataFrame(texts).set_axis(notation.settings(rows))


def seconds_table(findings: Findings) -> pd.DataFrame | None:
    """Return the speed of each timed cell and batch (`fidelity.timings`) as texts; None if nothing was timed."""
    # The metrics' speed is that of cells decoded together; the timed one replaces it.
    timed = findings.metrics.drop(columns="tokens_per_second").merge(timings(findings.run), on="cell_id")
    if timed.empty:
        return None
    table = pd.DataFrame(
        {
            "setting": notation.settings(timed),
            "texts at once": timed["slots"].map(notation.number),
            "tokens/s": timed["tokens_per_second"].map(notation.decimal, digits=0),
            "× full": timed["times_full"].map(notation.decimal, digits=2),
            "ms per step": timed["ms_per_step"].map(notation.decimal, digits=2),
            "evictions": timed["eviction_share"].map(notation.percent) + "%",
            "memory": timed["peak_bytes"].fillna(timed["kv_bytes"]).map(size),
        }
    )
    return table.set_axis(pd.Index(timed["model_title"] + " | " + timed["benchmark_title"], name="model | benchmark"))


def replay_files(run: Run) -> list[str]:
    """Return the files of replayed completions, the full cache's own first; shards count as one file."""
    stem = row_types.REPLAY_FILE.removesuffix(".jsonl")
    names = set()
    for cell_id in run.cells["cell_id"]:
        for path in (run.directory / cell_id).glob(f"{stem}*.jsonl"):
            # A shard has a name such as replay-1of4.jsonl.
            names.add(re.sub(r"-\d+of\d+\.jsonl$", ".jsonl", path.name))
    return sorted(names)  # the point in the full cache's file's name is before any other's "_"


def fidelity_by_cell(run: Run, file: str) -> pd.DataFrame:
    """Return the numbers of `statistics.fidelity` with names and settings; in each benchmark the least KL first."""
    names = ["cell_id", "model", "model_title", "benchmark", "benchmark_title", "policy", "variant", "bits"]
    names += ["keep_ratio", "local_window", "budget", "question", "condition"]
    named = run.cells[names].merge(fidelity(replay_rows(run, file)), on="cell_id")
    return named.sort_values(["model", "benchmark", "kl"], ignore_index=True)


def fidelity_table(run: Run) -> pd.DataFrame | None:
    """Return each cell's replay of each set of completions, as texts for the page; None if nothing was replayed."""
    tables = [_fidelity_texts(fidelity_by_cell(run, file)) for file in replay_files(run)]
    return pd.concat(tables).set_index("model | benchmark") if tables else None


def fidelity_text(table: pd.DataFrame) -> str:
    """The table of `fidelity_by_cell` for the terminal."""
    width = shutil.get_terminal_size((140, 24)).columns
    texts = []
    for name, rows in _fidelity_texts(table).set_index("setting").groupby("model | benchmark", sort=False):
        shown = rows.drop(columns="model | benchmark").rename_axis(index=None, columns=str(name))
        texts.append(shown.to_string(line_width=width))
    return "\n\n".join([*texts, FIDELITY_NOTE])


def _fidelity_texts(table: pd.DataFrame) -> pd.DataFrame:
    """The table of `fidelity_by_cell` as texts with their errors, one row per cell."""
    shown = pd.DataFrame({"model | benchmark": table["model_title"] + " | " + table["benchmark_title"]})
    shown["setting"] = notation.settings(table)
    for name in ("kl", "change", "flips", "answer_change"):
        texts = table[name].map("{:.4f}".format) + table[f"{name}_se"].map(" ± {:.4f}".format)
        # Without a row, texts of which pandas makes numbers.
        shown[name] = texts.astype("str").str.removesuffix(" ± nan").replace("nan", MISSING)
    return shown.assign(evictions=table["evictions"].round(1), texts=table["texts"])


def _aligned(table: pd.DataFrame) -> str:
    """A table of texts for the terminal: every text ends with a mark or a space, so that digits align."""
    marks = (UNFINISHED, UNTOUCHED, UNPACKED, STOPPED)
    padded = table.map(lambda text: text if text.endswith(marks) else f"{text} ")
    padded = padded.rename(columns="{} ".format).rename_axis(index=None, columns=str(table.index.name))
    return "\n".join(line.rstrip() for line in padded.to_string().splitlines())
