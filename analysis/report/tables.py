"""Tables of a report as text, Markdown and LaTeX."""

from pathlib import Path
from typing import Any

import pandas as pd

from analysis import words as formats
from analysis.load import in_order, load_run
from analysis.numbers.metrics import SETTING, cell_metrics, mean_over_benchmarks
from analysis.pictures.style import model_title


def _tables(metrics: pd.DataFrame, form: str) -> str:
    """The Pass@1 tables of all models as Markdown or LaTeX (booktabs)."""
    parts = []
    for model in metrics["model"].unique():
        table = _summary(metrics, model)
        if form == "markdown":
            head = [str(table.index.name), *map(str, table.columns)]
            lines = [
                head,
                ["---"] * len(head),
                *([str(name), *row] for name, row in zip(table.index, table.to_numpy(), strict=True)),
            ]
            parts.append(
                "\n".join("| " + " | ".join(text.replace("|", "\\|") for text in line) + " |" for line in lines)
            )
        else:
            text = table.reset_index().map(_latex).rename(columns=_latex)
            parts.append(text.to_latex(index=False, escape=False, column_format="l" + "r" * len(table.columns)))
    note = "Pass@1 in %, ± standard error over problems; * not finished; – no result yet"
    return "\n\n".join([*parts, note if form == "markdown" else f"% {note}"]) + "\n"


def _latex(text: Any) -> str:
    known = {"\\": r"\textbackslash{}", "±": r"$\pm$", "–": "--", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    return "".join(known.get(c, f"\\{c}" if c in "&%$#_{}" else c) for c in str(text))


def summary_table(directory: Path | str) -> str:
    """Pass@1 ± standard error in percent as plain text, per model: policy settings by benchmarks, and rows they keep.

    Raises:
        UserError: the directory is missing or holds no cell.
    """
    metrics = cell_metrics(load_run(directory))
    models = metrics["model"].unique()
    tables = [_aligned(_summary(metrics, model).assign(kept=_kept(metrics, model))) for model in models]
    note = "Pass@1 in %, ± standard error over problems; * not finished; – no result yet; kept: rows after an eviction"
    return "\n\n".join([*tables, note])


def _kept(metrics: pd.DataFrame, model: str) -> pd.Series:
    """Mean cache length after an eviction, the benchmarks' mean, per policy setting."""
    ours = metrics[metrics["model"] == model]
    lengths = ours.groupby([formats.setting(row) for row in ours.itertuples()])["mean_length_after"].mean()
    return lengths.map(formats.decimal)


def _summary(metrics: pd.DataFrame, model: str) -> pd.DataFrame:
    """Texts: a row per policy setting, a column per benchmark and their mean; named by the model."""
    ours = metrics[metrics["model"] == model].drop_duplicates([*SETTING, "benchmark"])
    names = list(ours["benchmark"].unique())
    columns = {}
    for name in names:
        rows = ours[ours["benchmark"] == name]
        columns[rows.iloc[0]["benchmark_title"]] = _scores(rows)
    if len(names) > 1:
        columns["mean"] = _scores(mean_over_benchmarks(ours, names))
    settings = in_order(ours.drop_duplicates(SETTING), by=SETTING)
    order = [formats.setting(row) for row in settings.itertuples()]
    table = pd.DataFrame(columns).reindex(order).fillna(formats.MISSING)
    return table.rename_axis(ours.iloc[0]["model_title"])


def _scores(rows: pd.DataFrame) -> pd.Series:
    texts = [_score(row) for row in rows.itertuples()]
    return pd.Series(texts, index=[formats.setting(row) for row in rows.itertuples()], dtype="object")


def _score(row: Any) -> str:
    text = formats.percent_pm(row.pass_at_1, row.se)
    return text if row.status == "done" or text == formats.MISSING else f"{text}*"


def _holdings(metrics: pd.DataFrame, model: str) -> list[tuple[str, pd.DataFrame]]:
    """What each policy setting of a model holds: a heading and a table, of the mean over benchmarks and of each."""
    ours = metrics[metrics["model"] == model].drop_duplicates([*SETTING, "benchmark"])
    name = model_title(metrics, model)
    tables = [
        (f"{name} | {rows.iloc[0]['benchmark_title']}", _lengths(rows))
        for _, rows in ours.groupby("benchmark", sort=False)
    ]
    if len(tables) > 1:
        mean = mean_over_benchmarks(ours, list(ours["benchmark"].unique()))
        tables.insert(0, (f"{name} | mean of {len(tables)} benchmarks", _lengths(mean)))
    return tables


def _lengths(rows: pd.DataFrame) -> pd.DataFrame:
    """Texts: what each policy setting holds, in tokens and in percent of the full cache of the same texts."""
    rows = in_order(rows, by=SETTING)
    texts = {
        "largest peak": rows["max_peak_length"].map(formats.number),
        "mean peak": rows["mean_peak_length"].map(formats.decimal),
        "at an eviction": rows["mean_length_before"].map(formats.decimal),
        "just after it": rows["mean_length_after"].map(formats.decimal),
        "mean over steps": rows["mean_cache_length"].map(formats.decimal),
        "peak, % of full": rows["kept_memory"].map(formats.percent),
        "mean, % of full": rows["kept_rows"].map(formats.percent),
    }
    return pd.DataFrame(texts).set_axis([formats.setting(row) for row in rows.itertuples()])


def _aligned(table: pd.DataFrame) -> str:
    lines = [[str(table.index.name), *map(str, table.columns)]]
    lines += [[str(name), *row] for name, row in zip(table.index, table.to_numpy(), strict=True)]
    # A place of its own for the star keeps the digits in line.
    lines = [[name, *(text if text.endswith("*") else f"{text} " for text in texts)] for name, *texts in lines]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(text.rjust(width) if i else text.ljust(width) for i, (text, width) in enumerate(pairs)).rstrip()
        for pairs in (list(zip(line, widths, strict=True)) for line in lines)
    )
