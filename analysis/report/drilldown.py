"""The data behind the report's drill-down: each cell's problems and completions, in the page or in a file of its own.

A page opened from a disk may not fetch JSON, but it may load a script; so a cell's data is a script that calls
`kvsweepCell(cell_id, data)`. Small runs carry theirs inside the page.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pandas as pd
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from analysis.load import Run, load_problems, load_texts
from analysis.numbers.metrics import graded_rows
from analysis.records import Completion

# Up to so many bytes of completions.jsonl the page carries its drill-down itself.
MAX_EMBEDDED_BYTES = 64_000_000

# So many completions have their texts in the drill-down if not told otherwise, each cell alike; the first that ended.
MAX_COMPLETIONS = 200_000


def fits_in_page(run: Run) -> bool:
    """Whether the drill-down's data goes into the page, rather than into a file per cell."""
    sizes = (path.stat().st_size for path in run.directory.glob("*/completions*.jsonl"))
    return sum(sizes) <= MAX_EMBEDDED_BYTES


def cells_data(run: Run, completions: int = MAX_COMPLETIONS) -> Iterator[tuple[str, str]]:
    """(cell_id, its data as JSON that is safe inside a script element) for each cell that has completions.

    At most so many completions of all cells together are among it.
    """
    tokenizers: dict[str, Tokenizer | None] = {}
    limit = completions // max(1, len(run.cells))
    shown = run.completions.assign(correct=graded_rows(run)["correct"])
    groups = dict(iter(shown.groupby("cell_id", observed=True, sort=False)))
    twins = _full_twins(run)
    full_scores: dict[str, dict[tuple[str, int], int]] = {}
    for name, rows in groups.items():
        cell_id = str(name)
        config = run.provenance.get(cell_id, {}).get("config", {})
        path = str((config.get("model") or {}).get("path") or "")
        if path not in tokenizers:
            tokenizers[path] = _tokenizer(path)
        full = twins.get(cell_id, "")
        if full in groups and full not in full_scores:
            full_scores[full] = _scores(groups[full])
        data = {
            "problems": _problems(run.directory / cell_id, rows, limit, tokenizers[path], full_scores.get(full, {})),
            "left_out": max(0, len(rows) - limit),
        }
        yield cell_id, script_json(data)


def script_json(value: Any) -> str:
    """JSON that is safe inside a script element: no text can close it or open another."""
    text = msgspec.json.encode(value).decode()
    # The two line separators end a line in old JavaScript.
    text = text.replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _full_twins(run: Run) -> dict[str, str]:
    full = run.cells[run.cells["policy"] == "full"].drop_duplicates("condition").set_index("condition")["cell_id"]
    others = run.cells[run.cells["policy"] != "full"]
    pairs = zip(others["cell_id"], others["condition"], strict=True)
    return {cell_id: full[condition] for cell_id, condition in pairs if condition in full}


def _scores(rows: pd.DataFrame) -> dict[tuple[str, int], int]:
    """1 right, 0 not, -1 not known, by (problem_id, draw)."""
    correct = rows["correct"].fillna(-1).astype("int64")
    return dict(zip(zip(rows["problem_id"], rows["draw"], strict=True), correct, strict=True))


def _problems(
    folder: Path, rows: pd.DataFrame, limit: int, tokenizer: Tokenizer | None, full: dict[tuple[str, int], int]
) -> list[dict[str, Any]]:
    """Per problem: id, question, gold and its draws, as the page's script reads them."""
    texts, asked = load_texts(folder, limit), load_problems(folder)
    columns = [rows[name].iloc[:limit] for name in ("problem_id", "draw", "outcome", "answer", "num_tokens", "correct")]
    found: dict[str, dict[str, Any]] = {}
    for problem_id, draw, outcome, answer, tokens, correct in zip(*columns, strict=True):
        problem = asked.get(problem_id)
        question, gold = (problem.prompt, problem.gold) if problem else (None, None)
        entry = found.setdefault(problem_id, {"id": problem_id, "question": question, "gold": gold, "draws": []})
        text = texts.get((problem_id, draw))
        entry["draws"].append(
            {
                "draw": draw,
                "outcome": outcome if correct == correct else "",
                "answer": str(answer) if isinstance(answer, str | int) else None,
                "full": full.get((problem_id, draw), -1),
                "tokens": tokens,
                **(_text_data(text, tokenizer) if text else {}),
            }
        )
    return [found[name] for name in sorted(found)]


def _text_data(row: Completion, tokenizer: Tokenizer | None) -> dict[str, Any]:
    events = [[e.step, e.length_before, e.length_after] for e in row.evictions]
    data: dict[str, Any] = {"text": row.text, "evictions": events}
    if any(e.held for e in row.evictions):
        lengths = token_lengths(row, tokenizer)
        if lengths is not None:
            data |= {"prompt": row.prompt_tokens, "lengths": lengths, "held": [e.held for e in row.evictions]}
    return data


def token_lengths(row: Completion, tokenizer: Tokenizer | None) -> list[int] | None:
    """Characters (UTF-16 units, as a browser counts) of each token in the text; None if they do not add up to it.

    A token that ends inside a character has none, the one that completes it has it.
    """
    if tokenizer is None:
        return None
    stream = DecodeStream(skip_special_tokens=True)
    pieces = [stream.step(tokenizer, token) or "" for token in row.token_ids]
    if "".join(pieces) != row.text:
        return None
    return [len(piece.encode("utf-16-le")) // 2 for piece in pieces]


def _tokenizer(path: str) -> Tokenizer | None:
    """The tokenizer of the model that wrote the texts, if its files lie on this machine."""
    file = Path(path) / "tokenizer.json"
    if not path or not file.is_file():
        return None
    try:
        return Tokenizer.from_file(str(file))
    except Exception:  # the library raises plain Exception for a file that it cannot read
        return None


def data_file_name(cell_id: str) -> str:
    """A cell's file in the report's data folder."""
    return re.sub(r"[^A-Za-z0-9.-]+", "_", cell_id) + ".js"
