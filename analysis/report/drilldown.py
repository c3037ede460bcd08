"""The data behind the page's drill-down: each cell's problems and completions, in the page or in a file of its own.

A page opened from a disk may not fetch JSON, but it may load a script; so a cell's file is a script that calls
`kvsweepCell(cell_id, data)`. A small run has the data inside the page.
"""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from analysis.load import Run, load_problems, load_texts
from analysis.loops import find_loop
from analysis.numbers.metrics import graded_rows
from analysis.records import Completion, replace_text
from analysis.report.rendering import script_json

# If the files of completions are larger together, the data goes into files beside the page.
MAX_EMBEDDED_BYTES = 64_000_000


def drill_data(run: Run, completions: int, folder: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Collect the data of all cells, with at most so many completions together.

    Returns:
        By cell_id the JSON for the page, and the names of the files that were written beside it in the folder.
    """
    data = cells_data(run, completions)
    size = sum(path.stat().st_size for path in run.directory.glob("*/completions*.jsonl"))
    if not completions or size <= MAX_EMBEDDED_BYTES:
        return dict(data), {}
    (folder / "data").mkdir(exist_ok=True)
    files = {}
    for cell_id, text in data:
        files[cell_id] = f"data/{re.sub(r'[^A-Za-z0-9.-]+', '_', cell_id)}.js"
        replace_text(folder / files[cell_id], f"kvsweepCell({script_json(cell_id)},{text});\n")
    return {}, files


def cells_data(run: Run, completions: int) -> Iterator[tuple[str, str]]:
    """Yield cell_id and data, as JSON that is safe inside a script element, for each cell that has completions."""
    limit = completions // max(1, len(run.cells))
    for name, rows in _beside_full(run).groupby("cell_id", observed=True, sort=False):
        cell_id = str(name)
        config = run.provenance.get(cell_id, {}).get("config", {})
        tokenizer = _tokenizer(str((config.get("model") or {}).get("path") or ""))
        problems = _problems(run.directory / cell_id, rows, limit, tokenizer)
        yield cell_id, script_json({"problems": problems, "left_out": max(0, len(rows) - limit)})


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


def _problems(folder: Path, rows: pd.DataFrame, limit: int, tokenizer: Tokenizer | None) -> list[dict[str, Any]]:
    """Per problem its id, question, gold and draws, as the page's script reads them."""
    texts, asked = load_texts(folder, limit), load_problems(folder)
    found: dict[str, dict[str, Any]] = {}
    shown: Any = rows.head(limit).itertuples()
    for row in shown:
        name, text = row.problem_id, texts.get((row.problem_id, row.draw))
        problem = asked.get(name)
        question, gold = (problem.prompt, problem.gold) if problem else (None, None)
        entry = found.setdefault(name, {"id": name, "question": question, "gold": gold, "draws": []})
        entry["draws"].append(
            {
                "draw": row.draw,
                "outcome": "" if pd.isna(row.correct) else row.outcome,
                "answer": row.answer if isinstance(row.answer, str) else None,
                "full": row.full,
                "tokens": row.num_tokens,
                **(_text_data(text, tokenizer) if text else {}),
            }
        )
    return [found[name] for name in sorted(found)]


def _text_data(row: Completion, tokenizer: Tokenizer | None) -> dict[str, Any]:
    events = [[e.step, e.length_before, e.length_after] for e in row.evictions]
    data: dict[str, Any] = {"text": row.text, "evictions": events}
    if row.stop_reason != "stop" and (loop := find_loop(row.token_ids)):
        data["loop"] = [loop.period, loop.count]
    lengths = token_lengths(row, tokenizer) if any(e.held for e in row.evictions) else None
    if lengths is None:
        return data
    return {**data, "prompt": row.prompt_tokens, "lengths": lengths, "held": [e.held for e in row.evictions]}


def token_lengths(row: Completion, tokenizer: Tokenizer | None) -> list[int] | None:
    """Count the characters (UTF-16 units, as a browser does) of each token; None if they do not add up to the text.

    A token that ends inside a character counts 0; the token that completes the character counts the whole of it.
    """
    if tokenizer is None:
        return None
    stream = DecodeStream(skip_special_tokens=True)
    pieces = [stream.step(tokenizer, token) or "" for token in row.token_ids]
    if "".join(pieces) != row.text:
        return None
    return [len(piece.encode("utf-16-le")) // 2 for piece in pieces]


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
