"""The data behind the page's drill-down: each cell's completions, and the outcomes of every panel.

A page opened from a disk may not fetch JSON, but it may load a script; so a cell's file is a script that calls
`kvsweepCell(cell_id, data)`. A small run has the data inside the page. Either way the data are compressed.
"""

import base64
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from kvsweep.analysis import format
from kvsweep.analysis.load import Run, load_problems, load_texts
from kvsweep.analysis.numbers.metrics import graded_rows
from kvsweep.analysis.report.rendering import script_json
from kvsweep.base.escape import file_name
from kvsweep.base.files import make_folder, read_file, replace_text
from kvsweep.base.loops import find_loop
from kvsweep.base.records import Completion, Pair

# If the files of completions are larger together, the data goes into files beside the page.
MAX_EMBEDDED_BYTES = 64_000_000

# One letter per completion in a map of outcomes.
LETTERS = {"correct": "c", "wrong": "w", "no_answer": "n", "truncated": "t", "grader_timeout": "g"}
UNGRADED, ABSENT = "u", "-"

_K = TypeVar("_K")
_V = TypeVar("_V")


def drill_data(run: Run, completions: int, folder: Path) -> tuple[dict[str, str], dict[str, str]]:
    """By cell_id the compressed data of so many completions for the page, and the files that were written beside it."""
    data = cells_data(run, completions)
    size = sum(path.stat().st_size for path in run.directory.glob("*/completions*.jsonl"))
    if size * min(1.0, completions / max(1, len(run.completions))) <= MAX_EMBEDDED_BYTES:
        return dict(data), {}
    make_folder(folder / "data")
    files = {}
    for cell_id, text in data:
        files[cell_id] = f"data/{file_name(cell_id)}.js"
        replace_text(folder / files[cell_id], f'kvsweepCell({script_json(cell_id)},"{text}");\n')
    return {}, files


def cells_data(run: Run, completions: int) -> Iterator[tuple[str, str]]:
    """Yield cell_id and data, as JSON in zlib's format and base64, for each cell that has completions.

    Every cell of a panel shows the same pairs, so that the full cache's are there to compare with: first those that
    most cells lose, then those of the first draws.
    """
    limit = completions // max(1, len(run.cells))
    known = run.completions.assign(correct=graded_rows(run)["correct"])
    groups = dict(iter(known.groupby("cell_id", observed=True, sort=False)))
    for _, cells in run.cells.groupby("condition", sort=False):
        telling = _telling(known[known["cell_id"].isin(cells["cell_id"])], cells, limit)
        full: str | None = None
        twins: dict[Pair, Completion] = {}
        # The full cache comes first; the other cells are compared with it.
        for cell in format.rows(cells.assign(other=cells["policy"] != "full").sort_values("other", kind="stable")):
            if (rows := groups.get(cell.cell_id)) is None:
                continue
            places = [telling.get(pair, limit) for pair in zip(rows["problem_id"], rows["draw"], strict=True)]
            shown = rows.assign(place=places).sort_values(["place", "draw", "problem_id"], kind="stable").head(limit)
            pairs = set(zip(shown["problem_id"], shown["draw"], strict=True))
            texts = load_texts(run.directory / cell.cell_id, pairs) if pairs else {}
            draws = list(_draws(shown, texts, twins, _tokenizer(run, cell.cell_id)))
            asked = {problem for problem, _ in pairs}
            problems = load_problems(run.directory / cell.cell_id).items()
            told = {name: {"question": one.prompt, "gold": one.gold} for name, one in problems if name in asked}
            data = {"base": full, "left_out": len(rows) - len(shown), "problems": told, "draws": draws}
            yield cell.cell_id, base64.b64encode(zlib.compress(script_json(data).encode())).decode()
            if full is None and cell.policy == "full":
                full, twins = cell.cell_id, texts


def _telling(rows: pd.DataFrame, cells: pd.DataFrame, limit: int) -> dict[Pair, int]:
    """Few pairs, at most so many, of which every cell that loses one to the full cache loses one; with their places."""
    scores = rows.pivot_table(index="cell_id", columns=["draw", "problem_id"], values="correct", observed=True)
    full = scores.index.isin(cells.loc[cells["policy"] == "full", "cell_id"])
    lost = (scores[~full] == 0) & (scores[full].max() == 1)
    found: dict[Pair, int] = {}
    while len(found) < limit and lost.to_numpy().any():
        most: Any = lost.sum().idxmax()
        found[most[::-1]] = len(found)
        lost = lost[~lost[most]]
    return found


def _draws(
    rows: pd.DataFrame, texts: dict[Pair, Completion], twins: dict[Pair, Completion], tokenizer: Tokenizer | None
) -> Iterator[dict[str, Any]]:
    for row in format.rows(rows.sort_values(["problem_id", "draw"])):
        key = (row.problem_id, row.draw)
        entry = {
            "problem": row.problem_id,
            "draw": row.draw,
            "outcome": "" if pd.isna(row.correct) else row.outcome,
            "answer": row.answer if isinstance(row.answer, str) else None,
            "tokens": row.num_tokens,
        }
        yield entry | (_text_data(texts[key], twins.get(key), tokenizer) if key in texts else {})


def _text_data(row: Completion, twin: Completion | None, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """The text, its evictions, and how many tokens it shares with the full cache's (`same`)."""
    data: dict[str, Any] = {
        "text": row.text,
        "same": common_length(row.token_ids, twin.token_ids) if twin else 0,
        "prompt": row.prompt_tokens,
        "evictions": [[e.step, e.length_before, e.length_after] for e in row.evictions],
    }
    if row.stop_reason != "stop" and (loop := find_loop(row.token_ids)):
        data["loop"] = [loop.period, loop.count]
    if lengths := token_lengths(row, tokenizer):
        data["lengths"] = lengths
        data["held"] = [e.held for e in row.evictions] if all(e.held for e in row.evictions) else []
    return data


def common_length(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Count the equal items at the beginning of two texts or lists."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def token_lengths(row: Completion, tokenizer: Tokenizer | None) -> list[int] | None:
    """Count the characters (UTF-16 units, as a browser does) of each token; None if they do not add up to the text.

    A token that ends inside a character counts 0; the token that completes the character counts the whole of it.
    """
    if tokenizer is None:
        return None
    pieces = list(map(_pieces(tokenizer).__getitem__, row.token_ids))
    if "".join(pieces) != row.text:
        # A token's text depends on the tokens before it: some characters take several tokens.
        stream = DecodeStream(skip_special_tokens=True)
        pieces = [stream.step(tokenizer, token) or "" for token in row.token_ids]
    return list(map(_UNITS.__getitem__, pieces)) if "".join(pieces) == row.text else None


class _Computed(dict[_K, _V]):
    """A mapping that computes what it lacks. A lookup costs half as much as the call of a cached function."""

    def __init__(self, compute: Callable[[_K], _V]) -> None:
        self._compute = compute

    def __missing__(self, key: _K) -> _V:
        return self.setdefault(key, self._compute(key))


@cache
def _pieces(tokenizer: Tokenizer) -> _Computed[int, str]:
    return _Computed(lambda token: tokenizer.decode([token]))


_UNITS: _Computed[str, int] = _Computed(lambda piece: len(piece.encode("utf-16-le", "surrogatepass")) // 2)


def _tokenizer(run: Run, cell_id: str) -> Tokenizer | None:
    """The tokenizer of the model that wrote a cell, if the run holds one."""
    name = run.provenance.get(cell_id, {}).get("tokenizer")
    return _read_tokenizer(run.directory / "tokenizers" / Path(name).name) if isinstance(name, str) else None


@cache
def _read_tokenizer(file: Path) -> Tokenizer | None:
    try:
        return Tokenizer.from_buffer(read_file(file))
    except Exception:  # the library raises plain Exception for a file that it does not know
        return None


def outcome_maps(run: Run) -> list[dict[str, Any]]:
    """Per condition its problems and draws, and for each cell a letter per completion: problem by problem, by draw."""
    rows = run.completions
    letters = rows["outcome"].astype("object").map(LETTERS).fillna(UNGRADED)
    letters = letters.where(rows.index.isin(graded_rows(run).index), UNGRADED)
    rows = rows.assign(letter=letters).astype({"cell_id": "object", "problem_id": "object"})
    maps = []
    for _, cells in run.cells[run.cells["completions"] > 0].groupby("condition", sort=False):
        ours = rows[rows["cell_id"].isin(cells["cell_id"])]
        table = ours.pivot(index="cell_id", columns=["problem_id", "draw"], values="letter")
        problems, draws = (sorted(ours[name].unique().tolist()) for name in ("problem_id", "draw"))
        table = table.reindex(columns=pd.MultiIndex.from_product([problems, draws])).fillna(ABSENT)
        named = [
            {
                "id": cell.cell_id,
                "name": format.setting(cell),
                "full": cell.policy == "full",
                "outcomes": "".join(table.loc[cell.cell_id]),
            }
            for cell in format.rows(cells)
        ]
        title = " | ".join(cells.iloc[0][["model_title", "benchmark_title"]])
        maps.append({"title": title, "problems": problems, "draws": draws, "cells": named})
    return maps
