"""The page of `kvsweep judge`: verdicts, outcomes by problem, and both texts of an answer side by side."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from kvsweep.analysis.outputs import PAIR
from kvsweep.analysis.report.drilldown import common_length, outcome_map, packed
from kvsweep.analysis.report.rendering import render, script_json
from kvsweep.run_files.row_types import content_hash

MOST_TEXTS = 2000  # over all files


def judged_page(
    table: pd.DataFrame,
    sentences: Mapping[str, str],
    words: Sequence[str],
    notes: Sequence[str],
    answers: Mapping[str, pd.DataFrame],
    full: str,
) -> str:
    """Return the HTML page: `table`, `sentences` and `words` of the verdicts, `notes`, and some texts of each pair.

    `answers` has the rows of each file by name, `full` is the baseline's name, and `sentences` has one by name of each
    other file.
    """
    ids = {name: f"file{number}" for number, name in enumerate(answers)}
    # The baseline's rows come first.
    rows = {name: _with_outcomes(answers[name]).assign(cell_id=ids[name]) for name in (full, *sentences)}
    full_texts = rows[full]["text"].dropna()
    shown_pairs = _shown_pairs(rows)
    cells = []
    blocks = {}  # of each setting: the texts that the page shows
    for name, setting_rows in rows.items():
        graded, pass_at_1 = setting_rows["correct"].agg(["count", "mean"]).tolist()
        cells.append(
            {
                "cell_id": ids[name],
                "name": name,
                "said": sentences.get(name),
                "graded": graded,
                "pass_at_1": pass_at_1,
            }
        )
        shown: Any = setting_rows[setting_rows["text"].notna() & setting_rows.index.isin(shown_pairs)]
        problems = {}
        draws = []
        for row in shown.itertuples():
            problem, draw = row.Index
            problems[problem] = {"gold": _text(row.gold), "question": _text(row.prompt)}
            # As the page's script reads a completion.
            answer = {
                "problem": problem,
                "draw": draw,
                "outcome": row.outcome if isinstance(row.outcome, str) else "",
                "text": row.text,
                "characters": len(row.text),
                "same": common_length(row.text, full_texts.get(row.Index, "")),
                "evictions": [],
            }
            draws.append(answer)
        block = {
            "base": None if name == full else ids[full],  # the setting whose texts lie beside
            "left_out": len(setting_rows) - len(shown),
            "problems": problems,
            "draws": draws,
        }
        blocks[ids[name]] = packed(block)
    page_cells = [{"id": ids[name], "name": name, "full": name == full} for name in answers]
    outcomes = outcome_map(pd.concat(rows.values()).reset_index(), page_cells)
    data = {"files": {}, "cell-data": cells, "outcome-data": [{"title": "all problems", **outcomes}]}
    return render(
        "judged.html.jinja",
        table=table,
        sentences=sentences.values(),
        words=words,
        notes=notes,
        names=list(answers),
        shown=[ids[name] for name in sentences],
        full=full,
        nonce=content_hash(["nonce", *answers]),
        blocks=blocks,
        data={key: script_json(value) for key, value in data.items()},
    )


def _with_outcomes(answers: pd.DataFrame) -> pd.DataFrame:
    """The answers by pair, with their outcome as a sweep names it, or none where no answer is known."""
    # As objects, because without any grade the column would be of floats, which hold no word.
    outcomes = answers["correct"].map({1: "correct", 0: "wrong"}).astype(object)
    outcomes = outcomes.mask(outcomes.eq("wrong") & answers["ending"].eq("length"), "truncated")
    return answers.assign(outcome=outcomes).set_index(PAIR)


def _shown_pairs(rows: Mapping[str, pd.DataFrame]) -> pd.Index:
    """The pairs with texts on the page: first those that a setting loses or wins; each group by draw, then problem."""
    full, *_ = rows.values()
    grades = pd.concat([table["correct"].reindex(full.index) for table in rows.values()], axis=1)
    # Pairs with one grade in all files, or none, come last.
    pairs = pd.DataFrame({"alike": grades.nunique(axis=1) < 2})
    return pairs.sort_values(["alike", *reversed(PAIR)]).head(MOST_TEXTS // len(rows)).index


def _text(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value, default=str)
