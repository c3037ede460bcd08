"""The data of the page's drill-down: each cell's completions, and the outcomes of every panel.

A page opened from disk may not fetch JSON, but it may load a script; so a cell's file is a script that calls
`kvsweepCell(cell_id, data)`. A small run has the data inside the page. Both forms are compressed.
"""

import base64
import zlib
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from kvsweep.analysis import notation
from kvsweep.analysis.load import Run, load_problems, load_texts
from kvsweep.analysis.report.rendering import script_json
from kvsweep.analysis.statistics.metrics import full_first, graded_rows
from kvsweep.messages.escape import file_name
from kvsweep.run_files.loops import find_loop
from kvsweep.run_files.row_types import Completion, Pair
from kvsweep.run_files.safe_files import make_folder, read_file, replace_text

# If the files of completions are larger together, the data go into files beside the page.
MAX_EMBEDDED_BYTES = 64_000_000

# One letter per completion in a map of outcomes.
LETTERS = {"correct": "c", "wrong": "w", "no_answer": "n", "truncated": "t", "grader_timeout": "g"}
UNGRADED, ABSENT = "u", "-"


def drill_data(run: Run, completions: int, folder: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Return this many completions' compressed data for the page, by cell_id, and the files written beside it."""
    data = cells_data(run, completions)
    # The page's data have about as many bytes as the stored files of the share that is shown.
    stored_bytes = sum(path.stat().st_size for path in run.directory.glob("*/completions*.jsonl"))
    shown_share = min(1.0, completions / max(1, len(run.completions)))
    if stored_bytes * shown_share <= MAX_EMBEDDED_BYTES:
        return dict(data), {}
    make_folder(folder / "data")
    files = {}
    for cell_id, text in data:
        files[cell_id] = f"data/{file_name(cell_id)}.js"
        replace_text(folder / files[cell_id], f'kvsweepCell({script_json(cell_id)},"{text}");\n')
    return {}, files


def cells_data(run: Run, completions: int) -> Iterator[tuple[str, str]]:
    """Yield cell_id and data (JSON, zlib, base64) for each cell with completions.

    All cells of a panel show the same pairs, so that the full cache's completions can be compared: first the pairs that
    most cells lose, then those of the first draws.
    """
    limit = completions // max(1, len(run.cells))
    # By row number: an answer of random weights is no graded row, so its grade becomes missing.
    all_rows = run.completions.assign(correct=graded_rows(run)["correct"])
    for _, cells in run.cells.groupby("condition", sort=False):
        ranked = _by_losses(all_rows[all_rows["cell_id"].isin(cells["cell_id"])], cells)
        full: str | None = None  # the first full cache, when it has been read
        full_texts: dict[Pair, Completion] = {}
        # The other cells are compared with the full cache.
        for cell in notation.rows(full_first(cells)):
            rows = ranked[ranked["cell_id"] == cell.cell_id]
            if rows.empty:
                continue
            shown = rows.head(limit).sort_values(["problem_id", "draw"])
            pairs = set(zip(shown["problem_id"], shown["draw"], strict=True))
            folder = run.directory / cell.cell_id
            # Without a pair to show the file of texts is not read.
            texts = load_texts(folder, pairs) if pairs else {}
            # "None" without a tokenizer, which is no file's name.
            name = Path(str(run.provenance.get(cell.cell_id, {}).get("tokenizer"))).name
            tokenizer = _tokenizer(run.directory / "tokenizers" / name)
            problems = {}
            shown_ids = set(shown["problem_id"])
            for problem_id, problem in load_problems(folder).items():
                if problem_id in shown_ids:
                    problems[problem_id] = {"question": problem.prompt, "gold": problem.gold}
            data = {
                "base": full,
                "left_out": len(rows) - len(shown),
                "problems": problems,
                "draws": list(_draws(shown, texts, full_texts, tokenizer)),
            }
            yield cell.cell_id, packed(data)
            if full is None and cell.policy == "full":
                full = cell.cell_id
                full_texts = texts


def packed(data: Any) -> str:
    """Return JSON in zlib's format and base64, which the page's script unpacks."""
    return base64.b64encode(zlib.compress(script_json(data).encode())).decode()


def _by_losses(rows: pd.DataFrame, cells: pd.DataFrame) -> pd.DataFrame:
    """Sort completions of the `cells` of one condition by how many cells lose their pair to the full cache, most first.

    Pairs that equally many cells lose are sorted by draw.
    """
    scores = rows.pivot_table(index="cell_id", columns=["draw", "problem_id"], values="correct", observed=True)
    is_full = scores.index.isin(cells.loc[cells["policy"] == "full", "cell_id"])
    lost = (scores[~is_full] == 0) & (scores[is_full].max() == 1)  # [cells, pairs]
    losses = lost.sum().to_dict()
    places = [-losses.get(pair, 0) for pair in zip(rows["draw"], rows["problem_id"], strict=True)]
    return rows.assign(place=places).sort_values(["place", "draw", "problem_id"], kind="stable")


def _draws(
    rows: pd.DataFrame, texts: dict[Pair, Completion], full_texts: dict[Pair, Completion], tokenizer: Tokenizer | None
) -> Iterator[dict[str, Any]]:
    """Yield a cell's completions for the page, with the texts that could be read; `full_texts` are the full cache's."""
    for row in notation.rows(rows):
        pair = (row.problem_id, row.draw)
        entry = {
            "problem": row.problem_id,
            "draw": row.draw,
            "outcome": "" if pd.isna(row.correct) else row.outcome,
            "answer": row.answer if isinstance(row.answer, str) else None,
            "tokens": row.num_tokens,
        }
        if pair in texts:
            entry |= _text_data(texts[pair], full_texts.get(pair), tokenizer)
        yield entry


def _text_data(row: Completion, full: Completion | None, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Return the text, its evictions, and how many first tokens equal those of the full cache's text (`same`)."""
    evictions = [(eviction.step, eviction.length_before, eviction.length_after) for eviction in row.evictions]
    data: dict[str, Any] = {"text": row.text, "same": 0, "prompt": row.prompt_tokens, "evictions": evictions}
    unit = "token_ids"
    if row.peak_length is None:  # a server's completion has no tokens
        unit = "text"
        data |= {"tokens": None, "characters": len(row.text)}
    if full is not None:
        data["same"] = common_length(getattr(row, unit), getattr(full, unit))
    loop = None if row.stop_reason == "stop" else find_loop(row.token_ids)
    if loop:
        data["loop"] = [loop.period, loop.count]
    lengths = token_lengths(row, tokenizer)
    if lengths:
        held = [eviction.held for eviction in row.evictions]
        data["lengths"] = lengths
        data["held"] = held if all(held) else []  # older rows do not say it
    return data


def common_length(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Count the equal items at the start of two texts or lists."""
    lengths = range(1, min(len(first), len(second)) + 1)
    # A binary search for the first length at which the starts differ.
    return bisect_left(lengths, True, key=lambda length: first[:length] != second[:length])


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
    if "".join(pieces) != row.text:
        return None
    return list(map(_units, pieces))


@cache
def _piece(tokenizer: Tokenizer, token: int) -> str:
    return tokenizer.decode([token])


@cache
def _units(piece: str) -> int:
    return len(piece.encode("utf-16-le", "surrogatepass")) // 2


@cache
def _tokenizer(file: Path) -> Tokenizer | None:
    """Return the tokenizer in a file; None without the file, or if the library does not know its form."""
    try:
        return Tokenizer.from_buffer(read_file(file))
    except Exception:  # the library raises plain Exception for an unknown file
        return None


def outcome_maps(run: Run) -> list[dict[str, Any]]:
    """Return the title and `outcome_map` of each condition."""
    # By row number: random weights have outcomes and no graded rows, so the map shows them as ungraded.
    rows = run.completions.assign(outcome=graded_rows(run)["outcome"].astype("object"))
    maps = []
    with_completions = run.cells[run.cells["completions"] > 0]
    for _, cells in with_completions.groupby("condition", sort=False):
        page_cells = [
            {"id": cell.cell_id, "name": notation.setting(cell), "full": cell.policy == "full"}
            for cell in notation.rows(cells)
        ]
        title = " | ".join(cells.iloc[0][["model_title", "benchmark_title"]])
        maps.append({"title": title, **outcome_map(rows[rows["cell_id"].isin(cells["cell_id"])], page_cells)})
    return maps


def outcome_map(rows: pd.DataFrame, cells: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return problems and draws of `rows`, and for each cell a letter per completion, by problem and draw.

    `rows` are completions with their outcome; `cells` have the `id` and what else the page shows of each.
    """
    letters = rows.set_index(["cell_id", "problem_id", "draw"])["outcome"].map(LETTERS).fillna(UNGRADED)
    problems = sorted(set(rows["problem_id"]))
    draws = sorted(set(rows["draw"]))
    mapped = []
    for cell in cells:
        pairs = pd.MultiIndex.from_product([[cell["id"]], problems, draws])
        mapped.append(cell | {"outcomes": "".join(letters.reindex(pairs, fill_value=ABSENT))})
    return {"problems": problems, "draws": draws, "cells": mapped}
