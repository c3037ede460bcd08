"""Read a run directory (docs/files.md) into data frames: one row per cell, one row per completion.

A running sweep is a normal input: a cell without `DONE` is partial, a completion without a grade is ungraded (missing,
never wrong), and an unreadable line is skipped with a notice.
"""

import json
from array import array
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal, NamedTuple, TypedDict

import msgspec
import numpy as np
import pandas as pd

from kvsweep.analysis.answers import GREEDY_BELOW, counted_share, plain
from kvsweep.analysis.notation import AXES, POLICY_TITLES
from kvsweep.analysis.server_records import BYTES, record_of
from kvsweep.messages.errors import BrokenCell, UserError
from kvsweep.messages.escape import in_one_line
from kvsweep.run_files import row_types
from kvsweep.run_files.attempts import failed_attempts
from kvsweep.run_files.row_types import Completion, OnBad, Pair, Problem
from kvsweep.run_files.run_reader import CONTROL, StoredCell, is_served, stored_cells
from kvsweep.run_files.task_status import TaskStatus, read_tasks

# Names that are shown first, in this order.
KNOWN = {
    "model": ["toy_qwen", "toy_llama", "r1_qwen_7b", "r1_llama_8b"],
    "benchmark": ["aime24", "aime25", "amc23", "gpqa_diamond", "toy_chain", "toy_add", "toy_regs", "toy_groups"],
    "policy": list(POLICY_TITLES),
}
ORDER = ("model", "benchmark", "policy", "variant", "budget", "keep_ratio", "local_window", "cell_id")

SECTIONS = ("model", "benchmark", "policy", "decoding")
# The grid's own axes are no variants. The other settings change no completion; dataset_hash identifies the problems.
ASIDE = {f"policy.{axis}" for axis in AXES} | {"model.device", "model.threads"}
ASIDE |= {f"benchmark.{field}" for field in ("source", "path", "limit", "expected_count")}

_OF_A_POLICY = ("policy.", "cache.")

COUNTS = ("num_tokens", "prompt_tokens", "thinking_tokens", "peak_length")
EVICTION_SUMS = ("evictions", "length_before_sum", "length_after_sum", "freed_step_sum")
COMPLETION_DTYPES: dict[str, Any] = {
    "problem_id": "category",
    "draw": "int64",
    "stop_reason": "category",
    **dict.fromkeys((*COUNTS, *EVICTION_SUMS), "int64"),
    "outcome": pd.CategoricalDtype([*row_types.OUTCOMES]),
    "correct": "float64",
    "answer": "object",
    "gold": "object",
}
COSTS = ("prefill_seconds", "decode_seconds", "tokens_total", "kv_bytes_allocated", "kv_bytes_analytic", "cells")

# Fields that become numbers; texts and their tokens are not read.
_Lengths: Any = row_types.view(row_types.Eviction, "step", "length_before", "length_after")
_Counts = row_types.view(Completion, *COUNTS, "stop_reason", evictions=list[_Lengths])
_Costs = row_types.view(row_types.DecodeStats, *COSTS)
_Notify = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything read from one run directory.

    Attributes:
        cells: one row per cell, ordered by model, benchmark and policy, with the first columns of cells.csv
            (docs/report.md): the settings from cell_id to condition, status, completions, expected and draws.
        completions: one row per (cell, problem, draw): cell_id and the columns of `COMPLETION_DTYPES`. Lengths are in
            tokens, evictions are counted, freed_step_sum sums tokens freed times step over them, all missing in a
            server's texts; outcome, correct (0 or 1), answer and gold are missing where there is no grade.
        events: one row per eviction: completion (row number in `completions`), step, freed (tokens).
        stats: one row per cell that has any, by cell_id: KV bytes at their peak, cells decoded together, and tokens per
            second over all decoding passes.
        settings, provenance: the contents of cell.yaml and provenance.json, by cell_id.
        tasks: the tasks of the sweep, each with its state as seen from outside when the run was read.
        notices: one sentence for each thing that was skipped or looks wrong.
    """

    directory: Path
    cells: pd.DataFrame
    completions: pd.DataFrame
    events: pd.DataFrame
    stats: pd.DataFrame
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    provenance: dict[str, dict[str, Any]] = field(default_factory=dict)
    tasks: list[TaskStatus] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)

    @property
    def state(self) -> Literal["done", "running", "waiting", "stopped"]:
        """The state of the sweep: waiting while tasks are queued and none is running or done."""
        states = {task.state for task in self.tasks}
        if "running" in states:
            return "running"
        if "queued" in states:
            # Between two tasks none runs. The sweep runs if any has ended.
            return "running" if "done" in states else "waiting"
        # No task runs or waits any more. Without a failure all of their cells are complete.
        begun = set(self.cells["cell_id"])
        all_begun = all(begun.issuperset(task.cells) for task in self.tasks)
        all_ended = self.cells["status"].isin(["done", "replayed"]).all()
        return "done" if all_begun and all_ended else "stopped"


def load_texts(folder: Path, wanted: Container[Pair] | None = None) -> dict[Pair, Completion]:
    """Return one cell's completions, all or the wanted ones; unreadable rows are left out."""
    rows = StoredCell(folder).rows(Completion, on_bad=row_types.ignore)
    return {row.key: row for row in rows if wanted is None or row.key in wanted}


def load_problems(folder: Path) -> dict[str, Problem]:
    """Return one cell's problems as asked, by id; empty if the file is missing."""
    return StoredCell(folder).problems(on_bad=row_types.ignore)


def row_dicts(
    directory: Path, cell_ids: Iterable[str], kind: type[Any], *, file: str = "", on_bad: OnBad = row_types.ignore
) -> Iterator[dict[str, Any]]:
    """Yield the stored rows of some cells of a run directory, with their cell_id."""
    for cell_id in cell_ids:
        for row in StoredCell(directory / cell_id).rows(kind, file=file, on_bad=on_bad):
            yield {"cell_id": cell_id, **row.to_dict()}


def skipped(notify: _Notify) -> OnBad:
    """Return an `on_bad` for readers that skips the line and tells `notify`."""
    return lambda line: notify(f"{line}; the line was skipped.")


def load_run(directory: Path | str) -> Run:
    """Read a run directory; raises UserError if it is missing or has no cell."""
    directory = Path(directory)
    notices: list[str] = []
    fault = "cannot be read; the state of its task is unknown."
    tasks = read_tasks(directory, on_bad=lambda path: notices.append(f"{path} {fault}"))
    attempts = failed_attempts(directory, tasks)
    notices += attempts.notes
    # The cells that only a failed attempt left behind are left out.
    cells = [cell for cell in _read_cells(directory, notices.append) if cell.folder.name not in attempts.cells]
    folders = [cell.folder for cell in cells]
    completions, events = _completion_table(folders, notices.append)
    table = _cell_table(cells)
    table["completions"] = table["cell_id"].map(completions["cell_id"].value_counts())
    for cell in cells:
        # `copies` and `groups` are not stored: they tell `plan_of` what the sample is.
        if _has_copies(cell):
            cell.provenance["copies"] = True
            same_texts = "most problems have the same text in all draws, though the server was asked to sample"
            notices.append(f"Cell {cell.folder.name}: {same_texts}; each problem counts once, as greedy texts do.")
        # Problems may be variants of one question.
        columns = cell.settings["benchmark"].get("columns") or ()
        if "group" in columns:
            problems = load_problems(cell.folder)
            cell.provenance["groups"] = {problem_id: problem.group for problem_id, problem in problems.items()}
    run = Run(
        directory=directory,
        cells=_in_order_of_run(table, notices.append),
        completions=completions,
        events=events,
        stats=_stat_table(directory, table["cell_id"], notices.append),
        settings={cell.folder.name: cell.settings for cell in cells},
        provenance={cell.folder.name: cell.provenance for cell in cells},
        tasks=attempts.tasks,
        notices=notices,
    )
    refuse_unlike_golds(run)
    return run


def refuse_unlike_golds(*runs: Run) -> None:
    """Raise UserError if two grades of one problem of one dataset were made by different golds."""
    tables = []
    for run in runs:
        graded = run.completions[["cell_id", "problem_id", "gold"]].dropna().drop_duplicates()
        # As plain objects, because the categories of two runs differ.
        tables.append(graded.astype("object").merge(run.cells[["cell_id", "benchmark", "dataset_hash"]], on="cell_id"))
    golds_of_cells = pd.concat(tables)
    # Golds such as 070 and 70 are one.
    golds_of_cells["gold"] = golds_of_cells["gold"].map(plain)
    golds_of_problem: Any = golds_of_cells.groupby(["benchmark", "dataset_hash", "problem_id"])["gold"].unique()
    for (benchmark, _, problem_id), golds in golds_of_problem.items():
        if len(golds) > 1:
            problem = f"Problem {problem_id!r:.60} of {benchmark}"
            listed = " and ".join(golds)
            raise UserError(f"{problem} was graded by the golds {listed:.120}: grade all cells with kvsweep grade.")


def run_of_scores(table: pd.DataFrame, directory: Path) -> Run:
    """Return a run without completions; its cells are the rows of a table of scores (`summary.read_summary`)."""
    cells = []
    for number, row in enumerate(table.to_dict("records")):
        settings = {
            "model": {"name": row["model"], "title": row.get("model_title")},
            "benchmark": {"name": row["benchmark"], "title": row.get("benchmark_title")},
            "policy": {"name": row.get("policy") or "scores", **{axis: row.get(axis) for axis in AXES}},
            "decoding": {"name": ""},
            "condition": f"{row['model']} {row['benchmark']}",
        }
        # No such folder exists: its name is the cell's id.
        cells.append(_Cell(directory / f"row-{number}", settings, {"draws": row["draws"]}))
    # Empty tables: nothing is read, so nothing is printed.
    completions, events = _completion_table([], print)
    stats = _stat_table(directory, [], print)
    cell_table = _cell_table(cells).assign(status="done")
    return Run(directory=directory, cells=cell_table, completions=completions, events=events, stats=stats)


def load_settings(directory: Path | str, notify: _Notify) -> pd.DataFrame:
    """Like `load_run(...).cells`, without reading completions; adds licence and code revision ("" if unknown)."""
    cells = _read_cells(Path(directory), notify)
    table = _cell_table(cells).drop(columns="completions")
    table["licence"] = [cell.settings["benchmark"].get("licence") or "" for cell in cells]
    table["revision"] = [(cell.provenance.get("git") or {}).get("revision") or "" for cell in cells]
    return in_order(table)


class _Cell(NamedTuple):
    """A cell's folder with the contents of its cell.yaml and provenance.json."""

    folder: Path
    settings: dict[str, Any]
    provenance: dict[str, Any]


_Size = Annotated[float, msgspec.Meta(ge=0, le=row_types.MOST_TOKENS)] | None


class _Policy(TypedDict, total=False):
    """The numbers of a policy that become columns, and the field that marks a server."""

    kind: Literal["declared"]
    kept_bytes: _Size
    keep_ratio: _Size
    local_window: Annotated[int, msgspec.Meta(ge=0, le=row_types.MOST_TOKENS)] | None
    budget: Annotated[int, msgspec.Meta(ge=0, le=row_types.MOST_TOKENS)] | None


class _Settings(TypedDict, total=False):
    """The fields of cell.yaml that need a certain type here."""

    policy: _Policy
    seed: row_types.Count
    cache: dict[str, Any]


class _Pass(TypedDict, total=False):
    """What the server of a pass said of itself."""

    cache: dict[str, str]
    model: str | None
    provider: list[str]
    system_fingerprint: list[str]


class _Provenance(TypedDict, total=False):
    """The fields of provenance.json that need a certain type here or on the page."""

    expected: _Size
    draws: _Size
    bytes: dict[str, Annotated[float, msgspec.Meta(ge=0, le=row_types.MOST)]]
    decoding_passes: list[_Pass]
    git: dict[str, Any] | None
    config: dict[str, Any] | None


def _read_cells(directory: Path, notify: _Notify) -> list[_Cell]:
    """Return the cells that can be read; `notify` gets a sentence about each other folder. UserError without any."""
    # A name that is not printable could break any text or table that shows it.
    folders = [cell.folder for cell in stored_cells(directory) if cell.name.isprintable()]
    if not folders:
        raise UserError(f"{directory} holds no cells; give a run directory, <results_dir>/<run_name>.")
    with_completions = {path.parent for path in directory.glob("*/completions*.jsonl")}
    for folder in sorted(with_completions.difference(folders)):
        notify(f"{folder} holds completions and no {row_types.CELL_FILE}; it was left out, and a sweep makes it again.")
    cells = []
    for folder in folders:
        settings = _read_settings(folder, notify)
        if settings is not None:
            cells.append(_Cell(folder, settings, _read_provenance(folder, notify)))
    if not cells:
        raise UserError(f"No {row_types.CELL_FILE} in {directory} can be read; give a run directory with whole cells.")
    return cells


def _read_settings(folder: Path, notify: _Notify) -> dict[str, Any] | None:
    """Return the contents of a cell's cell.yaml; None, and a sentence to `notify`, if it describes no cell."""
    fault = f"{folder / row_types.CELL_FILE} does not describe a cell."
    try:
        cell = StoredCell(folder).settings
        msgspec.convert(cell, _Settings)
        names = [cell[section]["name"] for section in SECTIONS]
        if "condition" in cell and all(isinstance(name, str) for name in names):
            return in_one_line(cell)
    except BrokenCell as error:
        fault = str(error)
    except (OSError, KeyError, TypeError, ValueError):
        pass  # `fault` says it already
    notify(f"{fault} Its folder was left out.")
    return None


def _read_provenance(folder: Path, notify: _Notify) -> dict[str, Any]:
    """Return a cell's provenance: the first shard's, with the decoding passes of all shards."""
    provenance: dict[str, Any] = {}
    passes: list[Any] = []

    # `provenances` gives the error too.
    def notify_unread(path: Path, _: Exception | None = None) -> None:
        notify(f"{path} cannot be read; the number of completions that its cell should have may be unknown.")

    cell = StoredCell(folder)
    for path, record in cell.provenances(notify_unread):
        try:
            shard = in_one_line(record)
            msgspec.convert(shard, _Provenance)
            passes += shard.get("decoding_passes", [])
            # What an earlier shard says has precedence.
            provenance = {**shard, **provenance, "decoding_passes": passes}
        except (ValueError, RecursionError):
            notify_unread(path)
    if not cell.files(row_types.PROVENANCE_FILE):
        notify_unread(folder / row_types.PROVENANCE_FILE)
    return provenance


def _cell_table(cells: list[_Cell]) -> pd.DataFrame:
    """Return a row per cell with the columns of `Run.cells`; completions are not counted yet."""
    table = pd.DataFrame(map(_cell_row, cells))
    table["variant"] = _variants(cells, table)
    numbers = (*AXES, "bits", "expected", "draws", "unpacked_rows", "declared_bytes", "measured_bytes")
    # A column may have None alone, of which pandas makes objects.
    return table.astype(dict.fromkeys(numbers, "float64"))


def _cell_row(cell: _Cell) -> dict[str, Any]:
    """Return a cell's row; its variant follows from the other rows."""
    settings = cell.settings
    model = settings["model"]
    benchmark = settings["benchmark"]
    policy = settings["policy"]
    decoding = settings["decoding"]
    served = is_served(settings)
    cache = _cache(settings)
    server_record = record_of(cell.provenance.get("decoding_passes", []))
    policy_name = str(policy["name"])
    if policy_name == "full" and settings.get("cache"):  # cells are compared with `full`, which is not quantized
        policy_name = "full_packed"
    model_title = _title(model)
    if model.get("random_weights"):
        model_title += " (random weights)"
    return {
        # The folder names the cell, because YAML would read an all-digit id as a number.
        "cell_id": cell.folder.name,
        "model": model["name"],
        "model_title": model_title,
        "benchmark": benchmark["name"],
        "benchmark_title": _title(benchmark),
        "policy": policy_name,
        # The bits of a server's cache are its own matter.
        "bits": None if served else _bits(cache),
        "unpacked_rows": _unpacked_rows(cache),
        **{axis: policy.get(axis) for axis in AXES},
        "question": str(policy.get("question") or ""),
        "variant": "",
        "engine": "server" if served else "kvsweep",
        "declared_bytes": policy.get("kept_bytes"),
        "measured_bytes": server_record.get(BYTES),
        "decoding": decoding["name"],
        "seed": settings.get("seed"),
        "random_weights": bool(model.get("random_weights")),
        "status": _status(cell),
        "completions": 0,
        "expected": cell.provenance.get("expected"),
        "draws": cell.provenance.get("draws"),
        "condition": str(settings["condition"]),
        "dataset_hash": str(settings.get("dataset_hash") or ""),
        **{f"decoding_{name}": value for name, value in decoding.items() if name != "name"},
    }


def _status(cell: _Cell) -> str:
    """Return done, partial, or replayed (only a replay has started the cell and expects no completion)."""
    if StoredCell(cell.folder).is_done:
        return "done"
    return "replayed" if cell.provenance.get("expected") == 0 else "partial"


def _cache(cell: dict[str, Any]) -> dict[str, Any]:
    """Return bits (16, the model's precision, if cell.yaml names none; "4/2": keys, values), scheme and sizes."""
    section = cell.get("cache")
    if not section:
        return {"bits": 16}
    bits = section["bits"] if "bits" in section else f"{section['key_bits']}/{section['value_bits']}"
    sizes = {name: section[name] for name in ("group", "residual", "format", "scale", "scales") if name in section}
    if section.get("scheme") == "fp8":
        sizes["whole_layers"] = section.get("whole_layers", 0)  # always, so that two settings differ in it
    return {"bits": bits, "scheme": section.get("scheme", "rotated"), **sizes}


def _bits(cache: dict[str, Any]) -> float:
    """Bits of a stored number, mean over keys and values; `cache` is as `_cache` returns it."""
    return fmean(map(int, str(cache["bits"]).split("/")))


def _unpacked_rows(cache: dict[str, Any]) -> int | None:
    """The longest cache in which no token is quantized; None without quantization."""
    if cache["bits"] == 16:
        return None
    rows = int(cache.get("residual", 0))
    # These quantize whole groups, so that almost a group may wait unquantized.
    if cache["scheme"] in ("kivi", "kvarn"):
        rows += cache["group"] - 1
    return rows


def _title(section: dict[str, Any]) -> str:
    return str(section.get("title") or section["name"])


def _variants(cells: list[_Cell], table: pd.DataFrame) -> list[str]:
    """Return, as `field=value`, each cell's settings that differ within one model, benchmark and policy of `table`.

    The grid's own axes are left out, and so is what differs only between benchmarks or models (a longer token limit).
    Bits of a quantized cache, and fp8, are always named, because the full cache beside it may not be quantized.
    """
    values_of_cells = [settings_of(cell.settings) for cell in cells]
    counts = pd.DataFrame(values_of_cells).groupby([table["model"], table["benchmark"], table["policy"]]).nunique()
    varies = (counts > 1).groupby("policy").any()  # [policies, settings]
    # Bits and a policy's fields belong to that policy; any other setting that varies for one policy is named for all.
    common = varies.columns[~varies.columns.str.startswith(_OF_A_POLICY)]
    varies[common] |= varies[common].any()
    variants = []
    for cell, policy, values in zip(cells, table["policy"], values_of_cells, strict=True):
        fields = []
        for name, value in values.items():
            # "fp8" is the scheme of a cache.
            is_quantized = value == "fp8" or (name == "cache.bits" and value != "16")
            if is_quantized or varies.at[policy, name]:
                _, _, field_name = name.partition(".")
                short = field_name if name.startswith(_OF_A_POLICY) else name
                fields.append(f"{short}={value}")
        # A policy's title and kind, where it has them, tell it apart from another of its name.
        for name in ("title", "kind"):
            if cell.settings["policy"].get(name):
                fields.append(str(cell.settings["policy"][name]))
        variants.append(", ".join(fields))
    return variants


def settings_of(cell: dict[str, Any]) -> dict[str, str]:
    """Return the settings that decide a cell's outputs, as `section.field`, without names, titles and grid axes."""
    sections = {name: cell.get(name) for name in (*SECTIONS, "dataset_hash", "seed")}
    sections["cache"] = _cache(cell)
    settings = {}
    for name, value in row_types.leaves(sections):
        if name not in ASIDE and not name.endswith((".name", ".title")):
            # As text, because values of several types are compared and counted.
            settings[name] = value if isinstance(value, str) else json.dumps(value, default=str)
    return settings


def is_control(cells: pd.DataFrame) -> "pd.Series[bool]":
    """True for each cell that is the baseline asked again: a server's setting of the name `control`."""
    return cells["policy"].eq(CONTROL) & cells["engine"].eq("server")


def _has_copies(cell: _Cell) -> bool:
    """True if a server ignores seed or temperature: more draws then say nothing about chance."""
    config = cell.provenance.get("config") or {}
    decoding = config.get("decoding") or {}
    # kvsweep keeps to its seeds, and greedy draws are copies as they should be.
    if not is_served(cell.settings) or decoding.get("temperature") == 0:
        return False
    texts = [(row.problem_id, row.text) for row in load_texts(cell.folder).values()]
    answers = pd.DataFrame(texts, columns=["problem_id", "text"], dtype=object).assign(correct=np.nan)
    # No grade is given, so texts alone are compared.
    share = counted_share(answers)
    # Copies if some text repeats and fewer than two draws of a problem count on average.
    fewest_drawn = GREEDY_BELOW * answers["problem_id"].nunique()
    return share < 1 and share * len(answers) < fewest_drawn


def _in_order_of_run(cells: pd.DataFrame, notify: _Notify) -> pd.DataFrame:
    """Return the cells in display order, and of several baselines of a server's condition the fullest one first."""
    is_baseline = cells["policy"].eq("full") & cells["engine"].eq("server")
    # Missing for all but baselines: the names after it decide the order of the others.
    ranked = cells.assign(fewer=-cells["completions"].where(is_baseline))
    ordered = in_order(ranked, by=(*ORDER[:3], "fewer", *ORDER[3:]))
    for _, cell_ids in ordered.dropna(subset="fewer").groupby("condition", sort=False)["cell_id"]:
        if len(cell_ids) > 1:
            compared = f"settings are compared with {cell_ids.iloc[0]}"
            notify(f"Cells {', '.join(cell_ids)} are all named full: {compared}.")
    return ordered.drop(columns="fewer")


def in_order(cells: pd.DataFrame, *, by: Sequence[str] = ORDER) -> pd.DataFrame:
    """Return the cells in display order: known names first, then by name and by size."""

    def ranks(column: pd.Series) -> pd.Series:
        known = KNOWN.get(str(column.name))
        if known is None:
            return column
        # Other names follow the known ones, in alphabetical order.
        names = [*known, *sorted(set(column) - set(known))]
        return column.map(names.index)

    return cells.sort_values(list(by), key=ranks, kind="stable", ignore_index=True)


def benchmarks_first(cells: pd.DataFrame, names: Sequence[str]) -> pd.DataFrame:
    """Return the cells with these benchmarks, by name or title, before the others; UserError for an unknown one."""
    for name in reversed(names):
        named = cells["benchmark"].eq(name) | cells["benchmark_title"].eq(name)
        if not named.any():
            titles = ", ".join(cells["benchmark_title"].unique())
            raise UserError(f"--order names {name}, which is no benchmark here: choose among {titles}.")
        cells = pd.concat([cells[named], cells[~named]], ignore_index=True)
    return cells


def _completion_table(folders: list[Path], notify: _Notify) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the tables `completions` and `events` of a `Run` from its cells' folders."""
    counts_of = attrgetter("problem_id", "draw", "stop_reason", *COUNTS)
    on_bad = skipped(notify)
    rows: list[tuple[Any, ...]] = []
    events = array("q")  # three numbers each, in the order of the columns below
    for folder in folders:
        cell = StoredCell(folder)
        completions = list(cell.rows(_Counts, on_bad=on_bad))
        grades = cell.grades(on_bad=on_bad)
        for row in completions:
            for eviction in row.evictions:
                # This completion's row is the next one of the table.
                events.extend((len(rows), eviction.step, eviction.length_before - eviction.length_after))
            grade = grades.get(row.key)
            # None without a grade.
            of_grade = [getattr(grade, name, None) for name in ("outcome", "correct", "answer", "gold")]
            rows.append((folder.name, *counts_of(row), *_eviction_sums(row), *of_grade))
    cell_ids = pd.CategoricalDtype([folder.name for folder in folders])
    table = pd.DataFrame(rows, columns=["cell_id", *COMPLETION_DTYPES])
    # Of a server some numbers are unknown, and only a column of floats can lack one.
    gaps = {name: "float64" for name in (*COUNTS, *EVICTION_SUMS) if table[name].isna().any()}
    table = table.astype({"cell_id": cell_ids, **COMPLETION_DTYPES, **gaps})
    return table, pd.DataFrame(np.array(events).reshape(-1, 3), columns=["completion", "step", "freed"])


def _eviction_sums(row: Any) -> list[int | None]:
    """Return the `EVICTION_SUMS` of a completion: evictions, lengths before and after them, tokens freed times step.

    A server's completion has none of them.
    """
    if row.peak_length is None:
        return [None] * 4
    before = after = freed_step = 0
    for eviction in row.evictions:
        before += eviction.length_before
        after += eviction.length_after
        freed_step += (eviction.length_before - eviction.length_after) * eviction.step
    return [len(row.evictions), before, after, freed_step]


def _stat_table(directory: Path, cell_ids: Iterable[str], notify: _Notify) -> pd.DataFrame:
    """Return the table `stats` of a `Run` from its cells' files."""
    rows = row_dicts(directory, cell_ids, _Costs, on_bad=skipped(notify))
    # As floats, in which a number that a row lacks is NaN.
    costs = pd.DataFrame(rows, columns=["cell_id", *COSTS]).astype(dict.fromkeys(COSTS, "float64")).groupby("cell_id")
    sums = costs.sum()
    seconds = sums["prefill_seconds"] + sums["decode_seconds"]
    table = costs[["kv_bytes_allocated", "kv_bytes_analytic", "cells"]].max()
    table["tokens_per_second"] = sums["tokens_total"] / seconds.where(seconds > 0)
    return table.rename(columns={"cells": "decoded_together"})
