"""Tables of a report, and their text as Markdown, as LaTeX and for the terminal. No plotting library is needed."""

from pathlib import Path
from typing import Any

import pandas as pd

from analysis import words
from analysis.load import in_order, load_run
from analysis.numbers.metrics import SETTING, benchmark_views, cell_scores, mean_over_benchmarks, model_title
from analysis.words import MISSING, UNFINISHED

NOTE = f"Pass@1 in %, ± standard error over problems; {UNFINISHED} not finished; {MISSING} no result yet"


def summary_table(directory: Path | str) -> str:
    """Pass@1 ± standard error in percent as plain text, per model: policy settings by benchmarks, and rows they keep.

    Raises:
        UserError: the directory is missing or holds no cell.
    """
    scores = cell_scores(load_run(directory))
    models = scores["model"].unique()
    tables = [_aligned(score_table(scores, model).assign(kept=_kept(scores, model))) for model in models]
    return "\n\n".join([*tables, f"{NOTE}; kept: rows after an eviction"])


def _kept(scores: pd.DataFrame, model: str) -> pd.Series:
    """Mean cache length after an eviction, the benchmarks' mean, per policy setting."""
    ours = scores[scores["model"] == model]
    return ours.groupby(_settings(ours))["mean_length_after"].mean().map(words.decimal)


def markdown(metrics: pd.DataFrame) -> str:
    """The Pass@1 tables of all models as Markdown."""
    tables = [score_table(metrics, model).reset_index(allow_duplicates=True) for model in metrics["model"].unique()]
    texts = [words.markdown([table.columns, *table.to_numpy()]) for table in tables]
    return "\n\n".join([*texts, NOTE]) + "\n"


def latex(metrics: pd.DataFrame) -> str:
    """The Pass@1 tables of all models as LaTeX (booktabs)."""
    tables = [_latex(score_table(metrics, model)) for model in metrics["model"].unique()]
    return "\n\n".join([*tables, f"% {NOTE}"]) + "\n"


def score_table(metrics: pd.DataFrame, model: str) -> pd.DataFrame:
    """Texts: a row per policy setting, a column per benchmark and their mean; the index is named by the model."""
    ours = metrics[metrics["model"] == model].drop_duplicates([*SETTING, "benchmark"])
    columns = {rows.iloc[0]["benchmark_title"]: _scores(rows) for _, rows in ours.groupby("benchmark", sort=False)}
    if len(columns) > 1:
        columns["mean"] = _scores(mean_over_benchmarks(ours, list(ours["benchmark"].unique())))
    settings = in_order(ours.drop_duplicates(SETTING), by=SETTING)
    table = pd.DataFrame(columns).reindex(_settings(settings)).fillna(MISSING)
    return table.rename_axis(model_title(metrics, model))


def _scores(rows: pd.DataFrame) -> pd.Series:
    return pd.Series([_score(row) for row in rows.itertuples()], index=_settings(rows), dtype="object")


def _settings(rows: pd.DataFrame) -> list[str]:
    return [words.setting(row) for row in rows.itertuples()]


def _score(row: Any) -> str:
    text = words.percent_pm(row.pass_at_1, row.se)
    return text if row.status == "done" or text == MISSING else f"{text}{UNFINISHED}"


def holding_tables(metrics: pd.DataFrame, model: str) -> list[tuple[str, pd.DataFrame]]:
    """The cache lengths of each policy setting of a model: a heading and a table, of the mean and of each benchmark."""
    ours = metrics[metrics["model"] == model].drop_duplicates([*SETTING, "benchmark"])
    return [(f"{model_title(metrics, model)} | {title}", _lengths(rows)) for title, rows in benchmark_views(ours)]


def _lengths(rows: pd.DataFrame) -> pd.DataFrame:
    """Texts: cache lengths in tokens, and in percent of the full cache of the same texts."""
    rows = in_order(rows, by=SETTING)
    texts = {
        "largest peak": rows["max_peak_length"].map(words.number),
        "mean peak": rows["mean_peak_length"].map(words.decimal),
        "at an eviction": rows["mean_length_before"].map(words.decimal),
        "just after it": rows["mean_length_after"].map(words.decimal),
        "mean over steps": rows["mean_cache_length"].map(words.decimal),
        "peak, % of full": rows["kept_memory"].map(words.percent),
        "mean, % of full": rows["kept_rows"].map(words.percent),
    }
    return pd.DataFrame(texts).set_axis(_settings(rows))


# The columns of the table of cells that are shown together.
VIEWS = {
    "scores": ["draws", "Pass@1 ± SE", "95% interval", "vs full ± SE", "decision", "kept memory %", "status"],
    "against the full cache": [
        *["Pass@1 ± SE", "vs full ± SE", "decision", "p (Holm)", "regressions", "gains", "where evicted", "elsewhere"]
    ],
    "lengths and memory": ["tokens", "tokens, × full", "evictions", "evicted %", "kept memory %"],
    "endings": ["truncated %", "looping", "no answer %", "timed out %", "status"],
    "settings": ["model", "benchmark", "policy", "keep ratio", "window", "budget", "draws"],
}


def cell_table(metrics: pd.DataFrame) -> pd.DataFrame:
    """Texts: a row per cell, indexed by cell_id."""
    several = [str(name) for name in metrics if str(name).startswith("pass_at_")]
    most = max(int(name.removeprefix("pass_at_")) for name in several)
    return pd.DataFrame([_cell(row, most) for row in metrics.itertuples()], index=list(metrics["cell_id"]))


def _cell(row: Any, draws: int) -> dict[str, str]:
    interval = f"{words.percent(row.ci_low)} to {words.percent(row.ci_high)}"
    several = {f"pass@{draws}": getattr(row, f"pass_at_{draws}"), "majority": getattr(row, "maj_at_n", None)}
    return {
        "cell": words.setting(row),
        "model": row.model_title,
        "benchmark": row.benchmark_title,
        "policy": ", ".join(name for name in (row.policy, row.variant) if name),
        "keep ratio": words.number(row.keep_ratio),
        "window": words.number(row.local_window),
        "budget": words.number(row.budget),
        "draws": words.number(row.draws),
        "Pass@1 ± SE": words.percent_pm(row.pass_at_1, row.se),
        "95% interval": interval if row.graded else MISSING,
        **({name: words.percent(value) for name, value in several.items()} if draws > 1 else {}),
        "vs full ± SE": words.percent_pm(row.diff_to_full, row.diff_se, signed=True),
        "decision": row.decision if isinstance(row.decision, str) else MISSING,
        "p (Holm)": words.p_value(row.p_holm),
        "regressions": words.number(row.regressions),
        "gains": words.number(row.gains),
        "where evicted": words.percent(row.diff_evicted, signed=True),
        "elsewhere": words.percent(row.diff_untouched, signed=True),
        "tokens": words.decimal(row.mean_tokens),
        "tokens, × full": words.decimal(row.tokens_to_full, 2),
        "evictions": words.decimal(row.mean_evictions, 2),
        "evicted %": words.percent(row.evicted),
        "kept memory %": words.percent(row.kept_memory),
        "truncated %": words.percent(row.truncated),
        "looping": f"{row.looping_texts:g} of {row.truncated_texts:g}" if row.truncated_texts else MISSING,
        "no answer %": words.percent(row.no_answer),
        "timed out %": words.percent(row.grader_timeout),
        "status": "done" if row.status == "done" else f"partial: {progress(row)}",
    }


def progress(cell: Any) -> str:
    """How many of a cell's completions there are, as "3 of 9"."""
    return f"{cell.completions} of {'?' if words.missing(cell.expected) else words.number(cell.expected)}"


def _aligned(table: pd.DataFrame) -> str:
    # Every text ends with a star or a space, so that the digits line up.
    padded = table.map(lambda text: text if text.endswith(UNFINISHED) else f"{text} ").rename(columns="{} ".format)
    lines = padded.rename_axis(index=None, columns=str(table.index.name)).to_string().splitlines()
    return "\n".join(line.rstrip() for line in lines)


def _latex(table: pd.DataFrame) -> str:
    columns = "l" + "r" * len(table.columns)
    text = table.reset_index(allow_duplicates=True).to_latex(index=False, escape=True, column_format=columns)
    return text.replace("±", r"$\pm$").replace("–", "--")
