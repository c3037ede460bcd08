"""The data behind the page's drill-down: each cell's completions, and the outcomes of every panel.

A page opened from a disk may not fetch JSON, but it may load a script; so a cell's file is a script that calls
`kvsweepCell(cell_id, data)`. A small run has the data inside the page.

Until its first eviction a completion is the full cache's, so only what follows the common beginning is stored, and a
problem's question is stored with the full cache alone.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from string import ascii_lowercase, digits
from typing import Any, TypeVar

import numpy as np
import pandas as pd
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from kvsweep.analysis import format
from kvsweep.analysis.load import Run, load_problems, load_texts
from kvsweep.analysis.numbers.metrics import graded_rows
from kvsweep.analysis.report.rendering import script_json
from kvsweep.base.files import make_folder, replace_text
from kvsweep.base.loops import find_loop
from kvsweep.base.records import Completion, Pair

# If the files of completions are larger together, the data goes into files beside the page.
MAX_EMBEDDED_BYTES = 64_000_000

# One letter per completion in a map of outcomes.
LETTERS = {"correct": "c", "wrong": "w", "no_answer": "n", "truncated": "t", "grader_timeout": "g"}
UNGRADED, ABSENT = "u", "-"

_DIGITS = digits + ascii_lowercase
_Part = TypeVar("_Part", str, list[int])


def drill_data(run: Run, completions: int, folder: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Collect the data of all cells, with at most so many completions together.

    Returns:
        By cell_id the JSON for the page, and the names of the files that were written beside it in the folder.
    """
    data = cells_data(run, completions)
    size = sum(path.stat().st_size for path in run.directory.glob("*/completions*.jsonl"))
    if not completions or size <= MAX_EMBEDDED_BYTES:
        return dict(data), {}
    make_folder(folder / "data")
    files = {}
    for cell_id, text in data:
        files[cell_id] = f"data/{re.sub(r'[^A-Za-z0-9.-]+', '_', cell_id)}.js"
        replace_text(folder / files[cell_id], f"kvsweepCell({script_json(cell_id)},{text});\n")
    return {}, files


@dataclass(frozen=True, kw_only=True)
class _Shown:
    """The completions of one cell that the page shows, with the characters of each token where they are known."""

    cell_id: str
    texts: dict[Pair, Completion]
    lengths: dict[Pair, list[int] | None]
    problems: dict[str, dict[str, Any]]


def cells_data(run: Run, completions: int) -> Iterator[tuple[str, str]]:
    """Yield cell_id and data, as JSON that is safe inside a script element, for each cell that has completions.

    Every cell shows as many completions, those of the first draws, so that the full cache's are there to compare with.
    """
    limit = completions // max(1, len(run.cells))
    groups = dict(iter(_beside_full(run).groupby("cell_id", observed=True, sort=False)))
    for _, cells in run.cells.groupby("condition", sort=False):
        full: _Shown | None = None
        # The full cache comes first; the other cells lean on it.
        ordered: Any = cells.assign(other=cells["policy"] != "full").sort_values("other", kind="stable").itertuples()
        for cell in ordered:
            if (rows := groups.get(cell.cell_id)) is None:
                continue
            left_out = max(0, len(rows) - limit)
            rows = rows.sort_values(["draw", "problem_id"], kind="stable").head(limit)
            is_full = cell.policy == "full"
            shown = _shown(run, cell.cell_id, rows, is_full=is_full)
            data = {"base": full.cell_id if full else None, "left_out": left_out, **_cell_data(rows, shown, full)}
            yield shown.cell_id, script_json(data)
            if full is None and is_full:
                full = shown


def _shown(run: Run, cell_id: str, rows: pd.DataFrame, *, is_full: bool) -> _Shown:
    config = run.provenance.get(cell_id, {}).get("config") or {}
    tokenizer = _tokenizer(str((config.get("model") or {}).get("path") or ""))
    folder = run.directory / cell_id
    texts = load_texts(folder, set(zip(rows["problem_id"], rows["draw"], strict=True))) if len(rows) else {}
    known = {key: is_full or any(event.held for event in row.evictions) for key, row in texts.items()}
    lengths = {key: token_lengths(row, tokenizer) if known[key] else None for key, row in texts.items()}
    asked = {one.id: {"question": one.prompt, "gold": one.gold} for one in load_problems(folder).values()}
    return _Shown(cell_id=cell_id, texts=texts, lengths=lengths, problems=asked)


def _beside_full(run: Run) -> pd.DataFrame:
    """The completions with a column `full`: the full cache's grade of the same pair, 1, 0, or -1 if there is none."""
    rows = run.completions.assign(correct=graded_rows(run)["correct"])
    rows["condition"] = rows["cell_id"].astype("object").map(run.cells.set_index("cell_id")["condition"])
    full = run.cells[run.cells["policy"] == "full"]
    key = ["condition", "problem_id", "draw"]
    is_twin = rows["cell_id"].isin(full.drop_duplicates("condition")["cell_id"])
    twins = rows.loc[is_twin, [*key, "correct"]].rename(columns={"correct": "full"})
    rows = rows.merge(twins, on=key, how="left")
    is_full = rows["cell_id"].isin(full["cell_id"])
    return rows.assign(full=rows["full"].mask(is_full).fillna(-1).astype("int64"))


def _cell_data(rows: pd.DataFrame, shown: _Shown, full: _Shown | None) -> dict[str, Any]:
    """The cell's completions, and its problems less those that the full cache's data hold."""
    draws = []
    ordered: Any = rows.sort_values(["problem_id", "draw"]).itertuples()
    for row in ordered:
        key = (row.problem_id, row.draw)
        entry = {
            "problem": row.problem_id,
            "draw": row.draw,
            "outcome": "" if pd.isna(row.correct) else row.outcome,
            "answer": row.answer if isinstance(row.answer, str) else None,
            "full": row.full,
            "tokens": row.num_tokens,
        }
        draws.append(entry | (_text_data(key, shown, full) if key in shown.texts else {}))
    named = {draw["problem"] for draw in draws}
    told = full.problems if full else {}
    return {"problems": {k: v for k, v in shown.problems.items() if k in named and told.get(k) != v}, "draws": draws}


def _text_data(key: Pair, shown: _Shown, full: _Shown | None) -> dict[str, Any]:
    """The text behind its common beginning with the full cache's: `same` tokens, `shared` UTF-16 units."""
    row, lengths = shown.texts[key], shown.lengths[key]
    twin = full.texts.get(key) if full else None
    twin_lengths = full.lengths[key] if full and twin else None
    same = common_length(row.token_ids, twin.token_ids) if twin else 0
    begin = common_length(row.text, twin.text) if twin else 0
    if lengths is not None and twin_lengths is not None:
        lengths = lengths[same:]
    data: dict[str, Any] = {
        "same": same,
        "shared": _units(row.text[:begin]),
        "text": row.text[begin:],
        "prompt": row.prompt_tokens,
        "evictions": [[e.step, e.length_before, e.length_after] for e in row.evictions],
    }
    if row.stop_reason != "stop" and (loop := find_loop(row.token_ids)):
        data["loop"] = [loop.period, loop.count]
    if lengths is not None:
        data["lengths"] = packed_lengths(lengths)
        data["held"] = [packed_runs(e.held) for e in row.evictions] if all(e.held for e in row.evictions) else []
    return data


def common_length(first: _Part, second: _Part) -> int:
    """Count the equal items at the beginning of two texts or lists."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def packed_lengths(lengths: list[int]) -> str:
    """Write a number per token in one character: 0 to 9, then a to z; a larger one in brackets."""
    return "".join(_DIGITS[count] if count < len(_DIGITS) else f"({count})" for count in lengths)


def packed_runs(runs: list[int]) -> str:
    """Write `Eviction.held` in few characters: of a run its percent (a is 0, b is 10, ...), and its count if not 1."""
    return "".join(map(_packed_run, runs[::2], runs[1::2]))


@cache
def _packed_run(percent: int, count: int) -> str:
    name = ascii_lowercase[percent // 10] if percent in range(0, 101, 10) else f"({percent})"
    return f"{name}{count if count != 1 else ''}"


def _units(text: str) -> int:
    """Count the UTF-16 units of a text, by which a browser counts."""
    return len(text.encode("utf-16-le", "surrogatepass")) // 2


def token_lengths(row: Completion, tokenizer: Tokenizer | None) -> list[int] | None:
    """Count the characters (UTF-16 units, as a browser does) of each token; None if they do not add up to the text.

    A token that ends inside a character counts 0; the token that completes the character counts the whole of it.
    """
    if tokenizer is None:
        return None
    pieces = [_piece(tokenizer, token) for token in row.token_ids]
    if "".join(pieces) != row.text:
        # A token's text depends on the tokens before it: some characters take several tokens.
        stream = DecodeStream(skip_special_tokens=True)
        pieces = [stream.step(tokenizer, token) or "" for token in row.token_ids]
    return [_piece_units(piece) for piece in pieces] if "".join(pieces) == row.text else None


@cache
def _piece(tokenizer: Tokenizer, token: int) -> str:
    return tokenizer.decode([token])


_piece_units = cache(_units)


@cache
def _tokenizer(path: str) -> Tokenizer | None:
    """The tokenizer of the model that wrote the texts, if its files lie on this machine."""
    file = Path(path) / "tokenizer.json"
    if not path or not file.is_file():
        return None
    try:
        return Tokenizer.from_file(str(file))
    except Exception:  # the library raises plain Exception for a file that it cannot read
        return None


def outcome_maps(run: Run) -> list[dict[str, Any]]:
    """Per condition its problems and draws, and for each cell a letter per completion: problem by problem, by draw."""
    rows = run.completions
    letters = rows["outcome"].astype("object").map(LETTERS).fillna(UNGRADED)
    graded = rows.index.isin(graded_rows(run).index)
    rows = rows.assign(letter=letters.where(graded, UNGRADED))
    groups = dict(iter(rows.groupby("cell_id", observed=True)))
    maps = []
    for _, cells in run.cells.groupby("condition", sort=False):
        begun = cells[cells["cell_id"].isin(list(groups))]
        parts = [groups[cell_id] for cell_id in begun["cell_id"]]
        if not parts:
            continue
        problems = sorted(set().union(*(part["problem_id"].unique() for part in parts)))
        draws = sorted(set().union(*(part["draw"].unique().tolist() for part in parts)))
        codes = [_letters(part, problems, draws) for part in parts]
        named = [
            {"id": str(cell.cell_id), "name": format.setting(cell), "full": cell.policy == "full", "outcomes": text}
            for cell, text in zip(begun.itertuples(), codes, strict=True)
        ]
        first = begun.iloc[0]
        title = f"{first['model_title']} | {first['benchmark_title']}"
        maps.append({"title": title, "problems": problems, "draws": draws, "cells": named})
    return maps


def _letters(rows: pd.DataFrame, problems: Sequence[str], draws: Sequence[int]) -> str:
    table = np.full((len(problems), len(draws)), ABSENT, dtype="S1")
    lines = rows["problem_id"].astype("object").map({name: i for i, name in enumerate(problems)})
    columns = rows["draw"].map({draw: i for i, draw in enumerate(draws)})
    table[lines.to_numpy(), columns.to_numpy()] = rows["letter"].to_numpy(dtype="S1")
    return table.tobytes().decode()
