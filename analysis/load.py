"""From a run directory to data frames: one row per cell, one row per completion.

Layout of a run directory: results/README.md. A running sweep is a normal input: a cell without `DONE` is
partial, a completion without a grade is ungraded (missing, never wrong), and a line that cannot be read is
skipped with a notice.
"""

import json
import warnings
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pandas as pd
import yaml

from analysis.question import one_spelling, question_of
from analysis.records import (
    CELL_FILE,
    COMPLETIONS_FILE,
    DONE_FILE,
    GRADES_FILE,
    OUTCOMES,
    PROBLEMS_FILE,
    PROVENANCE_FILE,
    STATS_FILE,
    Outcome,
    UserError,
    content_hash,
    shard_files,
)
from analysis.words import POLICY_TITLES

MODEL_ORDER = ("toy_qwen", "toy_llama", "r1_qwen_7b", "r1_llama_8b")
BENCHMARK_ORDER = (
    "aime24", "aime25", "amc23", "gpqa_diamond", "toy_chain", "toy_add", "toy_regs", "toy_groups",
)  # fmt: skip
POLICY_ORDER = tuple(POLICY_TITLES)
ORDER = ("model", "benchmark", "policy", "variant", "budget", "keep_ratio", "local_window", "cell_id")

SECTIONS = ("model", "benchmark", "policy", "decoding")
NAMES = {f"{section}.{field}" for section in SECTIONS for field in ("name", "title")}
AXES = {"policy.keep_ratio", "policy.local_window", "policy.budget"}
# How and on how much of a benchmark a cell ran changes no completion; dataset_hash says which problems.
ASIDE = {"model.device", "model.threads"} | {
    f"benchmark.{field}" for field in ("source", "path", "limit", "expected_count")
}

KEY = ["cell", "problem_id", "draw"]
COMPLETION_DTYPES = {
    "cell": "int32",
    "problem_id": "str",
    "draw": "int32",
    "num_tokens": "int64",
    "prompt_tokens": "int64",
    "thinking_tokens": "int64",
    "peak_length": "int64",
    "evictions": "int32",
    "length_before_sum": "int64",
    "length_after_sum": "int64",
    "freed_step_sum": "int64",
    "stop_reason": "str",
}
GRADE_DTYPES = {
    "cell": "int32",
    "problem_id": "str",
    "draw": "int32",
    "outcome": "str",
    "correct": "float64",
    "answer": "object",
    "gold": "object",
}
STAT_SUMS = ("decode_seconds", "eviction_seconds", "tokens_total")
STAT_MAXIMA = ("kv_bytes_allocated", "kv_bytes_analytic")


class EvictionRow(msgspec.Struct):
    """One eviction as it is stored; `held` as in results/README.md, empty where its row has none."""

    step: int
    length_before: int
    length_after: int
    held: list[int] = []


class _Lengths(msgspec.Struct):
    step: int
    length_before: int
    length_after: int


class _CompletionRow(msgspec.Struct):
    """What the numbers need of a completion: the decoder passes over all other fields without building them."""

    problem_id: str
    draw: int
    num_tokens: int
    prompt_tokens: int
    thinking_tokens: int
    peak_length: int
    stop_reason: str
    evictions: list[_Lengths]


class CompletionTexts(msgspec.Struct):
    """What the drill-down needs of a completion."""

    problem_id: str
    draw: int
    text: str
    token_ids: list[int]
    prompt_tokens: int
    thinking_tokens: int
    evictions: list[EvictionRow]


class StoredCompletion(CompletionTexts):
    """A completion with all its fields; rows of before `fork_step` have none."""

    num_tokens: int
    peak_length: int
    stop_reason: str
    seed: int
    fork_step: int | None = None


class StoredGrade(msgspec.Struct):
    """A grade as it is stored."""

    problem_id: str
    draw: int
    outcome: Outcome
    answer: Any = None
    gold: Any = None


_YamlLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_Notify = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything read from one run directory.

    cells: one row per cell, as `load_cells` describes.
    completions: one row per (cell, problem, draw), as `load_completions` describes.
    events: one row per eviction: completion (row number in `completions`), step, freed (tokens).
    stats: one row per cell that has any; seconds and tokens summed over its stretches, KV bytes at their
    peak.
    provenance: what provenance.json holds, by cell_id.
    notices: one sentence for each thing that was skipped or looks wrong.
    """

    directory: Path
    cells: pd.DataFrame
    completions: pd.DataFrame
    events: pd.DataFrame
    stats: pd.DataFrame
    provenance: dict[str, dict[str, Any]]
    notices: list[str]


def load_cells(directory: Path | str) -> pd.DataFrame:
    """One row per cell, ordered by model, benchmark and policy.

    Columns: cell_id, model, model_title, benchmark, benchmark_title, policy, keep_ratio, local_window, budget
    (missing for `full`), question (free, pinned or on_top; empty for `full`), variant (other settings that differ
    between cells of one policy, as text), decoding and `decoding_*`, seed, status (done or partial), completions and
    expected (counts), draws, condition (hash of model, benchmark, decoding and seed: cells that share it differ in
    their policy only).

    Raises:
        UserError: the directory is missing or holds no cell.
    """
    return _warned(load_run(directory)).cells


def load_completions(directory: Path | str) -> pd.DataFrame:
    """One row per (cell, problem, draw) with its grade.

    Columns: cell_id, problem_id, draw, lengths in tokens (num_tokens, prompt_tokens, thinking_tokens,
    peak_length), evictions (how often it was evicted), sums over its evictions (length_before_sum,
    length_after_sum, and freed_step_sum: of tokens freed times step), stop_reason, outcome, correct (0 or 1),
    answer, gold. The last four are missing for an ungraded completion.

    Raises:
        UserError: the directory is missing or holds no cell.
    """
    return _warned(load_run(directory)).completions


def load_texts(folder: Path, limit: int | None = None) -> dict[tuple[str, int], CompletionTexts]:
    """The texts of one cell's first `limit` completions by (problem_id, draw); an unreadable row is left out."""
    texts: dict[tuple[str, int], CompletionTexts] = {}
    for path in shard_files(folder, COMPLETIONS_FILE).values():
        for row in _rows(path, CompletionTexts, lambda notice: None):
            if limit is not None and len(texts) >= limit:
                return texts
            texts[row.problem_id, row.draw] = row
    return texts


def stream_completions(folder: Path, notify: _Notify) -> Iterator[StoredCompletion]:
    """Yield one cell's completions, one in memory at a time, each (problem, draw) once: the later row of two."""
    paths = list(shard_files(folder, COMPLETIONS_FILE).values())
    newest: dict[tuple[str, int], tuple[Path, int]] = {}
    for path in paths:
        newest |= {(row.problem_id, row.draw): (path, i) for i, row in enumerate(_rows(path, StoredCompletion, notify))}
    for path in paths:
        for i, row in enumerate(_rows(path, StoredCompletion, lambda notice: None)):
            if newest.get((row.problem_id, row.draw)) == (path, i):
                yield row


def load_grades(folder: Path, notify: _Notify) -> dict[tuple[str, int], StoredGrade]:
    """The grades of one cell by (problem_id, draw)."""
    paths = shard_files(folder, GRADES_FILE).values()
    return {(row.problem_id, row.draw): row for path in paths for row in _rows(path, StoredGrade, notify)}


def load_problems(folder: Path) -> dict[str, dict[str, Any]]:
    """The problems of one cell as they were asked, by id; none if the file is missing."""
    rows = _rows(folder / PROBLEMS_FILE, dict[str, Any], lambda notice: None)
    return {str(row["id"]): row for row in rows if "id" in row}


def load_run(directory: Path | str) -> Run:
    """Read a run directory once.

    Raises:
        UserError: the directory is missing or holds no cell.
    """
    directory = Path(directory)
    notices: list[str] = []
    readable, settings, provenance = _described(directory, notices.append)
    completions, events = _completion_table(readable, notices.append)
    cells = _cell_table(readable, settings, provenance)
    counts = completions["cell"].value_counts()
    cells["completions"] = counts.reindex(range(len(cells)), fill_value=0).to_numpy()
    notices += _same_settings(cells, settings)
    names = [folder.name for folder in readable]
    cell_ids = pd.Categorical.from_codes(completions.pop("cell").to_numpy(), dtype=pd.CategoricalDtype(names))
    completions.insert(0, "cell_id", pd.Series(cell_ids))
    return Run(
        directory=directory,
        cells=in_order(cells),
        completions=completions,
        events=events,
        stats=_stat_table(readable, notices.append),
        provenance=provenance,
        notices=notices,
    )


def load_settings(directory: Path | str, notify: _Notify) -> pd.DataFrame:
    """The cells as `load_cells` has them, without their counts; reads no completion.

    Beside these columns: licence (of the problems) and revision (git's, of the code), empty where unknown.

    Raises:
        UserError: the directory is missing or holds no cell.
    """
    folders, settings, provenance = _described(Path(directory), notify)
    cells = _cell_table(folders, settings, provenance).drop(columns="completions")
    cells["licence"] = [cell["benchmark"].get("licence") or "" for cell in settings]
    cells["revision"] = [(provenance[folder.name].get("git") or {}).get("revision") or "" for folder in folders]
    return in_order(cells)


def _described(directory: Path, notify: _Notify) -> tuple[list[Path], list[dict[str, Any]], dict[str, dict[str, Any]]]:
    """The folders of the cells that can be read, with their cell.yaml and, by cell_id, provenance."""
    found = {folder: _read_cell(folder, notify) for folder in _cell_folders(directory)}
    settings = {folder: cell for folder, cell in found.items() if cell is not None}
    if not settings:
        raise UserError(f"No {CELL_FILE} in {directory} can be read; give a run directory with whole cells.")
    provenance = {folder.name: _read_provenance(folder, notify) for folder in settings}
    return list(settings), list(settings.values()), provenance


def _warned(run: Run) -> Run:
    for notice in run.notices:
        warnings.warn(notice, stacklevel=3)
    return run


def _cell_folders(directory: Path) -> list[Path]:
    if not directory.is_dir():
        raise UserError(f"{directory} is not a directory; give a run directory, <results_dir>/<run_name>.")
    if (directory / CELL_FILE).is_file():
        raise UserError(f"{directory} is a single cell; give the run directory around it, {directory.parent}.")
    folders = sorted(path.parent for path in directory.glob(f"*/{CELL_FILE}"))
    if not folders:
        raise UserError(f"{directory} holds no cells; give a run directory, <results_dir>/<run_name>.")
    return folders


def _read_cell(folder: Path, notify: _Notify) -> dict[str, Any] | None:
    path = folder / CELL_FILE
    try:
        cell = yaml.load(path.read_text(encoding="utf-8"), _YamlLoader)
        sections = [cell[name] for name in SECTIONS]
        if all(isinstance(section["name"], str) for section in sections):
            return cell
    except (OSError, UnicodeDecodeError, yaml.YAMLError, KeyError, TypeError):
        pass
    notify(f"{path} does not describe a cell; its folder was left out.")
    return None


def _read_provenance(folder: Path, notify: _Notify) -> dict[str, Any]:
    """What the cell's writers recorded: the first shard's, with the stretches of all."""
    whole: dict[str, Any] = {}
    for path in shard_files(folder, PROVENANCE_FILE).values() or [folder / PROVENANCE_FILE]:
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            value = None
        if isinstance(value, dict):
            whole = {**value, **whole, "stretches": [*whole.get("stretches", []), *value.get("stretches", [])]}
        else:
            notify(f"{path} cannot be read; how many completions its cell should have may be unknown.")
    return whole


def _cell_table(
    folders: list[Path], settings: list[dict[str, Any]], provenance: dict[str, dict[str, Any]]
) -> pd.DataFrame:
    rows = []
    for folder, cell, variant in zip(folders, settings, _variants(settings), strict=True):
        model, benchmark, policy, decoding = (cell[k] for k in SECTIONS)
        rows.append(
            {
                # The folder names the cell: a YAML reader takes an all-digit id for a number.
                "cell_id": folder.name,
                "model": model["name"],
                "model_title": _model_title(model),
                "benchmark": benchmark["name"],
                "benchmark_title": str(benchmark.get("title") or benchmark["name"]),
                "policy": policy["name"],
                "keep_ratio": policy.get("keep_ratio"),
                "local_window": policy.get("local_window"),
                "budget": policy.get("budget"),
                "question": question_of(policy),
                "variant": variant,
                "decoding": decoding["name"],
                "seed": cell.get("seed"),
                "random_weights": bool(model.get("random_weights")),
                "status": "done" if (folder / DONE_FILE).exists() else "partial",
                "completions": 0,
                "expected": provenance[folder.name].get("expected"),
                "draws": provenance[folder.name].get("draws"),
                "condition": _condition(cell),
                **{f"decoding_{name}": value for name, value in decoding.items() if name != "name"},
            }
        )
    table = pd.DataFrame(rows)
    for column in ("keep_ratio", "local_window", "budget", "expected", "draws"):
        table[column] = pd.to_numeric(table[column], errors="coerce").astype("float64")
    return table


def _model_title(model: dict[str, Any]) -> str:
    title = str(model.get("title") or model["name"])
    return f"{title} (random weights)" if model.get("random_weights") else title


def _variants(settings: list[dict[str, Any]]) -> list[str]:
    """Per cell, as `field=value` text, what differs between cells of one model, benchmark and policy.

    A grid's own axes are left out. What differs only from benchmark to benchmark or from model to model (a
    longer token limit, another model's predictor) is no variant.
    """
    flat = [_settings(cell) for cell in settings]
    seen: dict[tuple[str, ...], set[str]] = defaultdict(set)
    for cell, values in zip(settings, flat, strict=True):
        group = (cell["model"]["name"], cell["benchmark"]["name"], cell["policy"]["name"])
        for name, value in values.items():
            seen[(*group, name)].add(value)
    # A policy's field is its own; any other setting that varies for one policy is named for all of them.
    varying = {
        (policy if name.startswith("policy.") else "", name)
        for (_, _, policy, name), values in seen.items()
        if len(values) > 1
    }
    labels = []
    for cell, values in zip(settings, flat, strict=True):
        named = [
            f"{name.removeprefix('policy.')}={value}"
            for name, value in values.items()
            if ("", name) in varying or (cell["policy"]["name"], name) in varying
        ]
        labels.append(", ".join(named))
    return labels


def _settings(cell: dict[str, Any]) -> dict[str, str]:
    """What decides a cell's outputs, as `section.field`, without names, titles and a grid's axes."""
    sections = {name: cell.get(name) for name in (*SECTIONS, "dataset_hash", "seed")}
    sections["policy"] = one_spelling(cell["policy"])
    named = {".".join(path): item for path, item in leaves(sections)}
    return {
        name: item if isinstance(item, str) else json.dumps(item, default=str)
        for name, item in named.items()
        if name not in NAMES | AXES | ASIDE
    }


def _condition(cell: dict[str, Any]) -> str:
    if "condition" in cell:
        return str(cell["condition"])
    names = [cell[section]["name"] for section in ("model", "benchmark", "decoding")]
    rest = {name: value for name, value in _settings(cell).items() if not name.startswith("policy.")}
    return content_hash([names, rest])


def leaves(value: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The values of nested dictionaries, each with the names that lead to it."""
    for name, item in value.items():
        if isinstance(item, dict):
            yield from leaves(item, (*path, name))
        else:
            yield (*path, name), item


def _same_settings(cells: pd.DataFrame, settings: list[dict[str, Any]]) -> list[str]:
    same = defaultdict(list)
    for cell_id, cell in zip(cells["cell_id"], settings, strict=True):
        same[content_hash({k: v for k, v in cell.items() if k != "cell_id"})].append(cell_id)
    return [
        f"Cells {', '.join(ids)} have the same settings; the pictures show the first of them."
        for ids in same.values()
        if len(ids) > 1
    ]


def in_order(cells: pd.DataFrame, *, by: Sequence[str] = ORDER) -> pd.DataFrame:
    """The cells in the order in which they are shown: the known names first, then by name and by size."""
    known = {"model": MODEL_ORDER, "benchmark": BENCHMARK_ORDER, "policy": POLICY_ORDER}

    def rank(column: pd.Series) -> pd.Series:
        first = known.get(str(column.name))
        if first is None:
            return column
        return column.map({name: i for i, name in enumerate([*first, *sorted(set(column) - set(first))])})

    return cells.sort_values(list(by), key=rank, kind="stable").reset_index(drop=True)


def _completion_table(folders: list[Path], notify: _Notify) -> tuple[pd.DataFrame, pd.DataFrame]:
    completions, grades = _Columns(COMPLETION_DTYPES), _Columns(GRADE_DTYPES)
    events = _Columns({"completion": "int64", "step": "int64", "freed": "int64"})
    for cell, folder in enumerate(folders):
        for path in shard_files(folder, COMPLETIONS_FILE).values():
            for row in _rows(path, _CompletionRow, notify):
                for e in row.evictions:
                    events.append((completions.length, e.step, e.length_before - e.length_after))
                completions.append((cell, *_completion(row)))
        for path in shard_files(folder, GRADES_FILE).values():
            for grade in _rows(path, StoredGrade, notify):
                correct = float(grade.outcome == "correct")
                grades.append((cell, grade.problem_id, grade.draw, grade.outcome, correct, grade.answer, grade.gold))
    # A pair that was written twice (a shard run again) counts once.
    table = completions.frame().drop_duplicates(KEY, keep="last")
    places = np.full(completions.length, -1)
    places[table.index] = np.arange(len(table))
    happened = events.frame().assign(completion=lambda rows: places[rows["completion"]])
    verdicts = grades.frame().drop_duplicates(KEY, keep="last")
    table = table.merge(verdicts, on=KEY, how="left", validate="one_to_one")
    table["stop_reason"] = table["stop_reason"].astype("category")
    table["problem_id"] = table["problem_id"].astype("category")
    table["outcome"] = pd.Categorical(table["outcome"], categories=OUTCOMES)
    return table, happened[happened["completion"] >= 0].reset_index(drop=True)


def _stat_table(folders: list[Path], notify: _Notify) -> pd.DataFrame:
    names = (*STAT_SUMS, *STAT_MAXIMA)
    stats = _Columns({"cell": "int32", **dict.fromkeys(names, "float64")})
    for cell, folder in enumerate(folders):
        for path in shard_files(folder, STATS_FILE).values():
            for row in _rows(path, _StatsRow, notify):
                stats.append((cell, *(getattr(row, name) for name in names)))
    rules = {**dict.fromkeys(STAT_SUMS, "sum"), **dict.fromkeys(STAT_MAXIMA, "max")}
    table = stats.frame().groupby("cell").agg(rules).reset_index()
    table.insert(0, "cell_id", table.pop("cell").map(dict(enumerate(folder.name for folder in folders))))
    return table


_StatsRow = msgspec.defstruct("_StatsRow", [(name, float) for name in (*STAT_SUMS, *STAT_MAXIMA)])


class _Columns:
    """Grows a table by rows without holding a dict per row; whole numbers take eight bytes each."""

    def __init__(self, dtypes: dict[str, str]):
        self.dtypes = dtypes
        self.length = 0
        self.values: list[Any] = [array("q") if "int" in dtype else [] for dtype in dtypes.values()]

    def append(self, row: tuple[Any, ...]) -> None:
        self.length += 1
        for column, value in zip(self.values, row, strict=True):
            column.append(value)

    def frame(self) -> pd.DataFrame:
        named = zip(self.dtypes.items(), self.values, strict=True)
        return pd.DataFrame({name: pd.Series(values, dtype=dtype) for (name, dtype), values in named})


def _rows(path: Path, kind: Any, notify: _Notify) -> Iterator[Any]:
    """The rows of a file of lines as `kind`, whose fields alone are decoded; others are passed over unread.

    A torn last line is passed over in silence: its writer died, and the row will be made again.
    """
    if not path.exists():
        return
    decode = msgspec.json.Decoder(kind).decode
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                row = _decoded(decode, kind, line)
            except (ValueError, msgspec.ValidationError) as error:
                if line.endswith(b"\n") and line.strip():
                    notify(_bad_line(path, number, line, error))
                continue
            yield row


def _decoded(decode: Callable[[bytes], Any], kind: Any, line: bytes) -> Any:
    try:
        return decode(line)
    except msgspec.ValidationError:
        raise
    except (msgspec.DecodeError, UnicodeDecodeError):
        # Half a surrogate pair is no text to msgspec; a model may write one, and Python reads it.
        return msgspec.convert(json.loads(line), kind)


def _bad_line(path: Path, number: int, line: bytes, error: Exception) -> str:
    try:
        row = json.loads(line)
        pair = f"{row.get('problem_id')!r}, draw {row.get('draw')!r}"
    except (ValueError, AttributeError):
        return f"{path}:{number} is not a JSON object; the line was skipped."
    return f"{path}: the row of {pair} was skipped: {error}."


def _completion(row: _CompletionRow) -> tuple[Any, ...]:
    before = after = freed_steps = 0
    for e in row.evictions:
        before += e.length_before
        after += e.length_after
        freed_steps += (e.length_before - e.length_after) * e.step
    return (
        row.problem_id,
        row.draw,
        row.num_tokens,
        row.prompt_tokens,
        row.thinking_tokens,
        row.peak_length,
        len(row.evictions),
        before,
        after,
        freed_steps,
        row.stop_reason,
    )
