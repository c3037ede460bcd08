"""The page of `kvsweep judge`: verdicts, outcomes by problem, and both texts of an answer side by side."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from kvsweep.analysis.outputs import Answer, Outputs, graded
from kvsweep.analysis.report.drilldown import common_length, outcome_map, packed
from kvsweep.analysis.report.rendering import render, script_json
from kvsweep.records import Pair, content_hash

MOST_TEXTS = 2000  # over all files
Texts = Mapping[str, Mapping[Pair, str]]


def shown_pairs(outputs: Outputs, baseline: str) -> set[Pair]:
    """Return the pairs with texts on the page: first those that a setting loses or wins, then the first others."""
    grades = {name: {one.key: one.correct for one in answers} for name, answers in outputs.items()}
    full = grades[baseline]
    flips = {key: len({of[key] for of in grades.values() if of.get(key) is not None}) > 1 for key in full}
    return set(sorted(full, key=lambda key: (not flips[key], key[1], key[0]))[: MOST_TEXTS // len(outputs)])


def judged_page(
    table: pd.DataFrame, words: str, notes: Sequence[str], outputs: Outputs, full: str, texts: Texts
) -> str:
    """Return the HTML page: `table` and `words` of the verdicts, `notes`, and some of the `texts`, by file and pair."""
    others, ids = [name for name in outputs if name != full], {name: f"file{n}" for n, name in enumerate(outputs)}
    rows = table[["points", "interval", "label"]].to_numpy()  # in the order of the other files
    said = {
        name: f"{row[0]} points against {full} ({row[1]}): {row[2]}" for name, row in zip(others, rows, strict=True)
    }
    cells, blocks = [], {}
    for name in (full, *others):
        grades = [one.correct for one in outputs[name] if one.correct is not None]
        score = {"graded": len(grades), "pass_at_1": sum(grades) / len(grades) if grades else None}
        cells.append({"cell_id": ids[name], "name": name, "said": said.get(name), **score})
        shown = [one for one in outputs[name] if one.key in texts[name]]
        draws = [_draw(one, texts[name], texts[full]) for one in shown]
        problems = {one.problem: {"gold": _shown(one.gold), "question": _shown(one.prompt)} for one in shown}
        base, left = None if name == full else ids[full], len(outputs[name]) - len(shown)
        blocks[ids[name]] = packed({"base": base, "left_out": left, "problems": problems, "draws": draws})
    named = [{"id": ids[name], "name": name, "full": name == full} for name in outputs]
    outcomes = outcome_map(graded({ids[name]: answers for name, answers in outputs.items()}), named)
    data = {"files": {}, "cell-data": cells, "outcome-data": [{"title": "all problems", **outcomes}]}
    return render(
        "judged.html.jinja",
        table=table,
        words=words.splitlines(),
        notes=notes,
        names=list(outputs),
        shown=[ids[name] for name in others],
        full=full,
        nonce=content_hash(["nonce", *outputs]),
        blocks=blocks,
        data={key: script_json(value) for key, value in data.items()},
    )


def _shown(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else json.dumps(value, default=str)


def _draw(one: Answer, texts: Mapping[Pair, str], full: Mapping[Pair, str]) -> dict[str, Any]:
    text = texts[one.key]
    same = common_length(text, full.get(one.key, ""))
    known = {"problem": one.problem, "draw": one.draw, "outcome": one.outcome or ""}
    return {**known, "text": text, "characters": len(text), "same": same, "evictions": []}
