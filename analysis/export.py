"""`kvsweep export DIR`: completions and grades as a folder that `datasets.load_dataset` reads, with a dataset card."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from kvsweep.analysis import notation as formats
from kvsweep.analysis.load import load_problems, load_settings, row_dicts, skipped
from kvsweep.analysis.report.rendering import render
from kvsweep.messages.command_line import counted
from kvsweep.messages.errors import UserError
from kvsweep.messages.escape import as_text, markdown_text
from kvsweep.run_files import row_types
from kvsweep.run_files.row_types import Completion, Replay
from kvsweep.run_files.run_reader import StoredCell
from kvsweep.run_files.safe_files import digests, make_folder, read_file, replace_text, replacing

EXPORT_FOLDER = "export"
DATA_FOLDER = "data"
REPLAYS_FILE = "replayed.parquet"
CARD_FILE = "README.md"
TAG = "kvsweep"
_MARK = f"- {TAG}\n".encode()  # in a card: the dataset is ours, and may be overwritten
GATED = "gated"  # The texts of problems whose licence says so may not be passed on.
# Rows held in memory together; the longest texts take some hundred kilobytes each, and so do their tokens.
ROWS_AT_ONCE = 100

# The names and titles that stand in the card's sentences.
CARD_NAMES = ("model", "model_title", "benchmark", "benchmark_title", "policy", "decoding", "licence", "revision")
CELL_HEADS = ("cell", "model", "benchmark", "policy", "completions", "Pass@1", "cut at the limit")
_TEXT, _COUNT = pa.string(), pa.int64()
_LENGTHS: Any = row_types.view(row_types.Eviction, "step", "length_before", "length_after")
# The columns of a file: settings of the cell, the prompt, a completion's fields, its grade.
SCHEMA = pa.schema(
    {
        **dict.fromkeys(("cell_id", "condition", "model", "benchmark", "policy"), _TEXT),
        "keep_ratio": pa.float64(),
        **dict.fromkeys(("local_window", "budget"), _COUNT),
        **dict.fromkeys(("question", "variant", "decoding"), _TEXT),
        "seed": _COUNT,
        **dict.fromkeys(("prompt", "problem_id"), _TEXT),
        "draw": _COUNT,
        "text": _TEXT,
        "token_ids": pa.list_(_COUNT),
        **dict.fromkeys(("num_tokens", "prompt_tokens", "thinking_tokens"), _COUNT),
        "stop_reason": _TEXT,
        "evictions": pa.list_(pa.struct(dict.fromkeys(_LENGTHS.__struct_fields__, _COUNT))),
        **dict.fromkeys(("fork_step", "peak_length"), _COUNT),
        "seconds": pa.float64(),
        **dict.fromkeys(("answer", "gold", "outcome"), _TEXT),
        "correct": pa.bool_(),
    }
)


def export(
    directory: Path, output: Path | None = None, *, cells: Sequence[str] = (), problems: bool = False, ids: bool = False
) -> tuple[Path, list[str]]:
    """Write a run's completions and grades as Parquet files, one per cell, beside a dataset card.

    Returns the dataset's folder, and one notice for each thing that was skipped or looks wrong. `problems` and `ids`
    include the texts of problems that may not be republished, and `token_ids`.
    """
    output = output.resolve() if output else directory / EXPORT_FOLDER
    notices: list[str] = []
    table = chosen(load_settings(directory, notices.append), cells, directory)
    _claim(output)
    schema = SCHEMA
    if not ids:
        schema = schema.remove(schema.get_field_index("token_ids"))
    kind = row_types.view(Completion, *schema.names, evictions=list[_LENGTHS])
    records: list[Any] = table.to_dict("records")
    for cell in records:
        withheld = GATED in cell["licence"] and not problems
        rows = _rows(directory / cell["cell_id"], kind, cell, withheld, notices)
        _write(output / DATA_FOLDER / f"{cell['cell_id']}.parquet", rows, schema)
    # The files of an earlier export of other cells are deleted.
    exported = set(table["cell_id"])
    for path in output.glob(f"{DATA_FOLDER}/*.parquet"):
        if path.stem not in exported:
            path.unlink()
    _write_replays(directory, table["cell_id"], output / REPLAYS_FILE)
    replace_text(output / CARD_FILE, card(table, output / DATA_FOLDER, schema, problems=problems))
    return output, notices


def chosen(table: pd.DataFrame, cells: Sequence[str], directory: Path) -> pd.DataFrame:
    """The rows of these cells, or all if none is named."""
    unknown = sorted(set(cells) - set(table["cell_id"]))
    if unknown:
        raise UserError(f"--cell {unknown[0]} is not in {directory}: give the name of one of its folders.")
    return table[table["cell_id"].isin(cells)] if cells else table


def _claim(output: Path) -> None:
    """Mark the folder by a card; a folder with the mark may be overwritten, also if its export was cut short."""
    path = output / CARD_FILE
    make_folder(output)
    is_marked = path.exists() and _MARK in read_file(path)
    if not is_marked and any(output.glob("*")):
        raise UserError(f"{output} holds something else: give an empty or a new folder with --output.")
    make_folder(output / DATA_FOLDER)
    if not is_marked:
        replace_text(path, f"---\ntags:\n{_MARK.decode()}---\n\nNot finished.\n")


def _rows(
    folder: Path, kind: Any, cell: dict[str, Any], withheld: bool, notices: list[str]
) -> Iterator[dict[str, Any]]:
    """Yield a cell's completions as rows of `SCHEMA`, without prompts if `withheld`; `kind` is a view of `Completion`.

    Half of a surrogate pair, which a model may write and Parquet refuses, becomes a question mark.
    """
    on_bad = skipped(notices.append)
    stored = StoredCell(folder)
    grades = stored.grades(on_bad=on_bad)
    problems = {} if withheld else load_problems(folder)
    # All columns of the table: those that the schema does not name are dropped when the rows are written.
    setting = {name: None if pd.isna(value) else value for name, value in cell.items()}
    for row in stored.rows(kind, on_bad=on_bad):
        values = {**row.to_dict(), **setting}
        if row.problem_id in problems:
            values["prompt"] = problems[row.problem_id].prompt
        grade = grades.get(row.key)
        if grade is not None:
            values |= {**grade.to_dict(), "correct": grade.outcome == "correct"}
        for name, value in values.items():
            if isinstance(value, str):
                values[name] = as_text(value)
        yield values


def _write_replays(directory: Path, cell_ids: Iterable[str], path: Path) -> None:
    """Write a row for each cell and text that was replayed (docs/report.md); no file where none was."""
    rows = [*row_dicts(directory, cell_ids, Replay)]
    path.unlink(missing_ok=True)
    if rows:
        with replacing(path) as temporary:
            pq.write_table(pa.Table.from_pylist(rows), temporary)


def _write(path: Path, rows: Iterator[dict[str, Any]], schema: pa.Schema) -> None:
    with replacing(path) as temporary, pq.ParquetWriter(temporary, schema) as writer:
        while group := list(islice(rows, ROWS_AT_ONCE)):
            writer.write_table(pa.Table.from_pylist(group, schema=schema))


def card(table: pd.DataFrame, data: Path, schema: pa.Schema, *, problems: bool) -> str:
    """The dataset card of the cells in `table`, whose Parquet files lie in `data`; `problems` is that of `export`."""
    table = table.assign(**table[[*CARD_NAMES]].map(str).map(markdown_text))
    # The last digest is that of all contents; none without files.
    digest = (digests(sorted(data.glob("*.parquet"))) or [""])[-1]
    # `datasets` names its cache by this front matter: without the digest it would open the rows of another export.
    config = {"config_name": "default", "data_files": f"{DATA_FOLDER}/*.parquet", "description": f"content {digest}"}
    configs = [config]
    if (data.parent / REPLAYS_FILE).exists():
        configs.append({"config_name": "replayed", "data_files": REPLAYS_FILE})
    front = {
        "pretty_name": f"KV-cache compression of {', '.join(table['model_title'].unique())}",
        "license": "other",
        "language": ["en"],
        "task_categories": ["text-generation"],
        "tags": [TAG, "kv-cache", "reasoning"],
        "configs": configs,
    }
    commits = [f"commit {revision}" for revision in table["revision"].unique() if revision]
    cell_lines = [_cell(row, data) for row in table.itertuples()]
    column_lines = [(f"`{field.name}`", str(field.type)) for field in schema]
    return render(
        "card.md.jinja",
        front=yaml.safe_dump(front, sort_keys=False, allow_unicode=True),
        title=front["pretty_name"],
        rows=_count(data),
        cells=table,
        models=_named(table, "model"),
        benchmarks=_named(table, "benchmark"),
        policies=", ".join(f"`{name}`" for name in table["policy"].unique()),
        decodings=_decodings(table),
        commits=", ".join(commits) or "commit unknown",
        cell_table=formats.markdown([CELL_HEADS, *cell_lines]),
        column_table=formats.markdown([("column", "type"), *column_lines]),
        licences=table.drop_duplicates("benchmark").itertuples(),
        gated=GATED,
        problems=problems,
    )


def _count(data: Path) -> int:
    """The rows of all Parquet files in a folder."""
    return sum(pq.read_metadata(path).num_rows for path in data.glob("*.parquet"))


def _named(table: pd.DataFrame, kind: str) -> str:
    pairs = table.drop_duplicates(kind)
    return ", ".join(f"{title} (`{name}`)" for name, title in zip(pairs[kind], pairs[f"{kind}_title"], strict=True))


def _decodings(table: pd.DataFrame) -> Iterator[str]:
    """Yield each decoding of the cells with its settings: "`sample` (temperature 0.6, top_p 0.95)"."""
    for decoding in table.filter(regex="^decoding").drop_duplicates().to_dict("records"):
        name = decoding.pop("decoding")
        settings = [
            f"{str(column).removeprefix('decoding_')} {value}" for column, value in decoding.items() if pd.notna(value)
        ]
        yield f"`{name}` ({', '.join(settings)})"


def _cell(cell: Any, data: Path) -> list[str]:
    """A cell's line of the card's table, as `CELL_HEADS` name it."""
    rows = pd.read_parquet(data / f"{cell.cell_id}.parquet", columns=["problem_id", "stop_reason", "correct"])
    # Truth values beside missing ones are objects and no numbers.
    score = rows.astype({"correct": "float64"}).groupby("problem_id")["correct"].mean().mean()
    unfinished = "" if cell.status == "done" else " (unfinished)"
    return [
        f"`{cell.cell_id}`",
        f"`{cell.model}`",
        f"`{cell.benchmark}`",
        formats.setting(cell),
        f"{len(rows):,}{unfinished}",
        formats.MISSING if cell.random_weights else formats.percent(score),
        formats.percent((rows["stop_reason"] == "length").mean()),
    ]


def check_login() -> None:
    from huggingface_hub import get_token

    if get_token() is None:
        raise UserError("--push-to-hub needs a login: run `hf auth login` or set HF_TOKEN, then run it again.")


def push(folder: Path, name: str, *, public: bool) -> None:
    """Upload an export's folder to the dataset of this name on the hub, a new one or an earlier export."""
    from huggingface_hub import HfApi

    hub = HfApi()
    files = [CARD_FILE, f"{DATA_FOLDER}/*.parquet", REPLAYS_FILE]
    try:
        dataset = hub.create_repo(name, repo_type="dataset", private=not public, exist_ok=True).repo_id
        _claim_on_hub(hub, dataset, public=public)
        # What an earlier upload left there is deleted where this export lacks it.
        hub.upload_folder(
            repo_id=dataset, repo_type="dataset", folder_path=folder, allow_patterns=files, delete_patterns=files
        )
    except UserError:
        raise
    except Exception as error:  # the hub's client lets the errors of its transport through
        reason = " ".join(str(error).split())
        raise UserError(f"--push-to-hub {name} failed ({reason}): the export in {folder} is complete.") from error


def _claim_on_hub(hub: Any, dataset: str, *, public: bool) -> None:
    """Refuse a dataset that everybody sees, unless it may be `public`, and one that holds something else."""
    info = hub.repo_info(dataset, repo_type="dataset")
    if not (public or info.private):
        raise UserError(f"--push-to-hub {dataset} is a public dataset: add --public, or give another name.")
    # The hub puts this file into a new dataset.
    names = {file.rfilename for file in info.siblings} - {".gitattributes"}
    is_marked = False
    if CARD_FILE in names:
        card_path = Path(hub.hf_hub_download(dataset, CARD_FILE, repo_type="dataset"))
        is_marked = _MARK in read_file(card_path, linked=True)
    if names and not is_marked:
        raise UserError(f"--push-to-hub {dataset} holds something else: give an empty or a new dataset.")


def export_run(directory: Path, output: Path | None, push_to_hub: str | None, *, public: bool, **what: Any) -> None:
    """Export a run's rows, and upload them if a name on the hub is given; `what` as for `export`."""
    if push_to_hub:
        check_login()
    folder, notices = export(directory, output, **what)
    for notice in notices:
        print(f"note: {notice}", file=sys.stderr)
    rows = counted(_count(folder / DATA_FOLDER), "row")
    print(f"{folder}\n{rows}; in Python: datasets.load_dataset({str(folder)!r}, split='train')")
    if push_to_hub:
        push(folder, push_to_hub, public=public)
