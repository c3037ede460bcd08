"""`kvsweep-export DIR`: completions and grades as a folder that `datasets.load_dataset` reads, with a dataset card."""

import argparse
import hashlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from statistics import mean
from typing import Any

import msgspec
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from analysis import words as formats
from analysis.load import load_problems, load_settings, skipped
from analysis.records import (
    CELL_FILE,
    COMPLETIONS_FILE,
    GRADES_FILE,
    Completion,
    Grade,
    UserError,
    read_shards,
    replace_text,
    replacing,
)

EXPORT_FOLDER = "export"
DATA_FOLDER = "data"
CARD_FILE = "README.md"
TAG = "kvsweep"
# Rows held in memory together; the longest texts take some hundred kilobytes each, and so do their tokens.
ROWS_AT_ONCE = 100
SIZES = {1_000: "n<1K", 10_000: "1K<n<10K", 100_000: "10K<n<100K", 1_000_000: "100K<n<1M", 10_000_000: "1M<n<10M"}

_EVICTION = pa.struct([(name, pa.int32()) for name in ("step", "length_before", "length_after")])
# Name, type and meaning of each column, in order.
COLUMNS: tuple[tuple[str, pa.DataType, str], ...] = (
    (
        "cell_id",
        pa.string(),
        "hash of everything that can change a completion: model, problems, policy, decoding, seed",
    ),
    ("condition", pa.string(), "the same without the policy: cells that share it can be compared"),
    ("model", pa.string(), "short name of the model"),
    ("benchmark", pa.string(), "short name of the benchmark"),
    ("policy", pa.string(), "what decides which tokens stay in the KV cache; `full` keeps all"),
    ("keep_ratio", pa.float64(), "fraction kept of the tokens outside the window; null for `full`"),
    ("local_window", pa.int32(), "newest tokens always kept"),
    ("budget", pa.int32(), "cache length in tokens at which eviction fires"),
    ("variant", pa.string(), "other settings that differ between cells of one policy, as field=value"),
    ("decoding", pa.string(), "name of the sampling settings"),
    ("seed", pa.int64(), "first part of every completion's random stream"),
    ("problem_id", pa.string(), "the problem within its benchmark"),
    ("draw", pa.int32(), "repeat number, from 0"),
    ("prompt", pa.string(), "the user message; null where the problems may not be republished"),
    ("text", pa.string(), "the completion, without special tokens"),
    ("num_tokens", pa.int32(), "generated tokens"),
    ("prompt_tokens", pa.int32(), "tokens of the prompt"),
    ("thinking_tokens", pa.int32(), "generated tokens up to the end of the thinking"),
    ("stop_reason", pa.string(), "stop (the model ended it) or length (cut at the limit)"),
    ("evictions", pa.list_(_EVICTION), "each eviction: generated tokens fed so far, cache length before and after"),
    ("fork_step", pa.int32(), "index of the last token shared with the full cache's text; null if nothing was evicted"),
    ("peak_length", pa.int32(), "the longest that the cache was, in tokens"),
    ("answer", pa.string(), "the answer that the grader found; null if none"),
    ("gold", pa.string(), "the reference answer; null while ungraded"),
    ("outcome", pa.string(), "correct, wrong, no_answer, truncated or grader_timeout; null while ungraded"),
    ("correct", pa.bool_(), "outcome is correct; null while ungraded"),
    ("token_ids", pa.list_(pa.int32()), "the generated tokens, the stop token included"),
)


@dataclass
class Tally:
    """The counts of one cell for the card; `correct` holds a verdict per draw, by problem."""

    rows: int = 0
    truncated: int = 0
    correct: dict[str, list[bool]] = field(default_factory=dict)

    @property
    def pass_at_1(self) -> float | None:
        """Mean over problems of the mean over draws; None without grades."""
        return mean(mean(draws) for draws in self.correct.values()) if self.correct else None


def export(
    directory: Path, output: Path | None = None, *, cells: Sequence[str] = (), problems: bool = False, ids: bool = False
) -> tuple[Path, list[str]]:
    """Write a run's completions and grades as Parquet files, one per cell, beside a dataset card.

    Args:
        directory: a run directory, or one cell's folder.
        output: the dataset's folder; `export` in the run directory if None.
        cells: only these, by cell_id.
        problems: the texts of problems that may not be republished as well.
        ids: `token_ids` as well.

    Returns:
        The dataset's folder, and one notice for each thing that was skipped or looks wrong.

    Raises:
        UserError: no such cell, or a folder that holds another dataset.
    """
    if (directory / CELL_FILE).is_file():
        directory, cells = directory.parent, [directory.name]
    output = output or directory / EXPORT_FOLDER
    notices: list[str] = []
    table = load_settings(directory, notices.append)
    unknown = sorted(set(cells) - set(table["cell_id"]))
    if unknown:
        raise UserError(f"--cell {unknown[0]} is not in {directory}: give the name of one of its folders.")
    if cells:
        table = table[table["cell_id"].isin(cells)]
    _claim(output)
    schema = pa.schema([(name, kind) for name, kind, _ in COLUMNS if ids or name != "token_ids"])
    tallies = {}
    cells_of_run: list[Any] = table.to_dict("records")
    for cell in cells_of_run:
        withheld = _withheld(cell) and not problems
        rows = _rows(directory / cell["cell_id"], cell, withheld, notices)
        tallies[cell["cell_id"]] = _write(output / DATA_FOLDER / f"{cell['cell_id']}.parquet", rows, schema)
    for stale in output.glob(f"{DATA_FOLDER}/*.parquet"):
        if stale.stem not in tallies:
            stale.unlink()
    text = card(table, tallies, schema.names, problems=problems, digest=_digest(output / DATA_FOLDER))
    replace_text(output / CARD_FILE, text)
    return output, notices


def _digest(folder: Path) -> str:
    """Hash of the data files."""
    whole = hashlib.sha256()
    for path in sorted(folder.glob("*.parquet")):
        with path.open("rb") as file:
            whole.update(hashlib.file_digest(file, "sha256").digest())
    return whole.hexdigest()[:16]


def _claim(output: Path) -> None:
    """Mark the folder by a card; a folder with such a mark may be written over, also after an export cut short."""
    path, mark = output / CARD_FILE, f"- {TAG}\n"
    if path.is_file() and mark in path.read_text(encoding="utf-8"):
        return
    if any(output.glob("*")):
        raise UserError(f"{output} holds something else: give an empty or a new folder with --output.")
    (output / DATA_FOLDER).mkdir(parents=True, exist_ok=True)
    path.write_text(f"---\ntags:\n{mark}---\n\nNot finished.\n", encoding="utf-8")


def _withheld(cell: dict[str, Any]) -> bool:
    """True if `benchmark.licence` calls the problems gated, so that their texts may not be passed on."""
    return "gated" in cell["licence"]


def _rows(folder: Path, cell: dict[str, Any], withheld: bool, notices: list[str]) -> Iterator[dict[str, Any]]:
    on_bad = skipped(notices.append)
    grades = {grade.key: grade for grade in read_shards(folder, GRADES_FILE, Grade, on_bad=on_bad)}
    prompts = {} if withheld else {name: problem.prompt for name, problem in load_problems(folder).items()}
    setting = {name: None if pd.isna(value) else value for name, value in cell.items()}
    for row in read_shards(folder, COMPLETIONS_FILE, Completion, on_bad=on_bad):
        yield {**setting, **_completion(row), **_grade(grades.get(row.key)), "prompt": prompts.get(row.problem_id)}


def _completion(row: Completion) -> dict[str, Any]:
    evictions = [{field.name: getattr(e, field.name) for field in _EVICTION} for e in row.evictions]
    return {**msgspec.structs.asdict(row), "evictions": evictions, "text": _utf8(row.text)}


def _grade(grade: Grade | None) -> dict[str, Any]:
    if grade is None:
        return {}
    answer = None if grade.answer is None else _utf8(grade.answer)
    return {"answer": answer, "gold": grade.gold, "outcome": grade.outcome, "correct": grade.outcome == "correct"}


def _utf8(text: str) -> str:
    """The text with a mark for each half of a surrogate pair, which a model may write and Parquet refuses."""
    return text.encode("utf-8", "replace").decode()


def _write(path: Path, rows: Iterable[dict[str, Any]], schema: pa.Schema) -> Tally:
    """Write one cell's file, a group of rows at a time."""
    tally = Tally()
    with replacing(path) as temporary, pq.ParquetWriter(temporary, schema) as writer:
        for group in _groups(rows):
            for row in group:
                tally.rows += 1
                tally.truncated += row["stop_reason"] == "length"
                if "correct" in row:
                    tally.correct.setdefault(row["problem_id"], []).append(row["correct"])
            writer.write_table(pa.Table.from_pylist(group, schema=schema))
    return tally


def _groups(rows: Iterable[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    rest = iter(rows)
    while group := list(islice(rest, ROWS_AT_ONCE)):
        yield group


def card(table: pd.DataFrame, tallies: dict[str, Tally], columns: Sequence[str], *, problems: bool, digest: str) -> str:
    """The dataset card: YAML front matter, then the contents, the cells, the columns and the licence."""
    rows = sum(tally.rows for tally in tallies.values())
    models, benchmarks = _titles(table, "model"), _titles(table, "benchmark")
    # `datasets` names its cache by this front matter: without the digest it would open the rows of another export.
    config = {"config_name": "default", "data_files": f"{DATA_FOLDER}/*.parquet", "description": f"content {digest}"}
    front = {
        "pretty_name": f"KV-cache compression of {', '.join(models.values())}",
        "license": "other",
        "language": ["en"],
        "task_categories": ["text-generation"],
        "tags": [TAG, "kv-cache", "reasoning"],
        "size_categories": [next((name for size, name in SIZES.items() if rows < size), "n>10M")],
        "configs": [config],
    }
    meanings = {name: (kind, meaning) for name, kind, meaning in COLUMNS}
    policies = ", ".join(f"`{name}`" for name in table["policy"].unique())
    parts = [
        f"---\n{yaml.safe_dump(front, sort_keys=False, allow_unicode=True)}---",
        f"# {front['pretty_name']}",
        f"{rows:,} completions of {len(table)} cells with their grades, written by kvsweep. A cell is one model, "
        "benchmark, policy, decoding and seed; until its first eviction a completion is the full cache's, token for "
        "token, so cells of one `condition` can be compared pair by pair.",
        f"Models: {_listed(models)}. Benchmarks: {_listed(benchmarks)}. Policies: {policies}.",
        f"Decoding: {'; '.join(_decodings(table))}. Code: {_revisions(table)}.",
        "## Cells",
        "Pass@1 is the mean over problems of the mean over draws, in percent, of what is graded.",
        _markdown(_cell_rows(table, tallies)),
        "## Columns",
        _markdown([{"column": f"`{n}`", "type": str(meanings[n][0]), "meaning": meanings[n][1]} for n in columns]),
        "## Licence",
        "\n".join(_licences(table, problems=problems)),
    ]
    return "\n\n".join(parts) + "\n"


def _titles(table: pd.DataFrame, kind: str) -> dict[str, str]:
    pairs = table.drop_duplicates(kind)
    return dict(zip(pairs[kind], pairs[f"{kind}_title"], strict=True))


def _decodings(table: pd.DataFrame) -> Iterator[str]:
    """Each set of sampling settings, by name and value."""
    columns = [name for name in table.columns if name == "decoding" or name.startswith("decoding_")]
    for row in table[columns].drop_duplicates().to_dict("records"):
        settings = [
            f"{str(k).removeprefix('decoding_')} {v}" for k, v in row.items() if k != "decoding" and pd.notna(v)
        ]
        yield f"`{row['decoding']}` ({', '.join(settings)})"


def _revisions(table: pd.DataFrame) -> str:
    return ", ".join(f"commit {name}" for name in table["revision"].unique() if name) or "commit unknown"


def _listed(titles: dict[str, str]) -> str:
    return ", ".join(f"{title} (`{name}`)" for name, title in titles.items())


def _cell_rows(table: pd.DataFrame, tallies: dict[str, Tally]) -> list[dict[str, str]]:
    rows = []
    cells: Any = table.itertuples()
    for cell in cells:
        tally = tallies[cell.cell_id]
        score = None if cell.random_weights else tally.pass_at_1
        rows.append(
            {
                "cell": f"`{cell.cell_id}`",
                "model": f"`{cell.model}`",
                "benchmark": f"`{cell.benchmark}`",
                "policy": formats.setting(cell),
                "completions": f"{tally.rows:,}" + ("" if cell.status == "done" else " (unfinished)"),
                "Pass@1": formats.MISSING if score is None else formats.percent(score),
                "cut at the limit": formats.percent(tally.truncated / tally.rows) if tally.rows else formats.MISSING,
            }
        )
    return rows


def _licences(table: pd.DataFrame, *, problems: bool) -> Iterator[str]:
    yield "The completions are the models' outputs: the models' licences and terms apply to them."
    cells: Any = table.drop_duplicates("benchmark").itertuples()
    for cell in cells:
        text = (
            f"- {cell.benchmark_title}: {cell.licence or 'problems generated by kvsweep itself or from a local file'}."
        )
        if _withheld({"licence": cell.licence}):
            held = "included at the exporter's wish" if problems else "not included"
            text += (
                f" Access to its problems is gated: their texts are {held}. Completions may quote them all the same."
            )
        yield text


def _markdown(rows: Sequence[dict[str, str]]) -> str:
    names = list(rows[0])
    lines = [names, ["---"] * len(names), *([row[name].replace("|", "\\|") for name in names] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def check_login() -> None:
    """Refuse an upload that the hub would refuse.

    Raises:
        UserError: nobody is logged in.
    """
    from huggingface_hub import get_token

    if get_token() is None:
        raise UserError("--push-to-hub needs a login: run `hf auth login` or set HF_TOKEN, then run it again.")


def push(folder: Path, name: str, *, public: bool) -> None:
    """Upload the dataset and its card.

    Raises:
        UserError: the hub cannot be reached or refuses.
    """
    import datasets
    from huggingface_hub import DatasetCard

    try:
        datasets.load_dataset(str(folder), split="train").push_to_hub(name, private=not public)
        # The upload of the data writes a card of its own, so ours comes after it.
        DatasetCard.load(folder / CARD_FILE).push_to_hub(name)
    except Exception as error:  # the hub's client lets the errors of its transport through
        reason = " ".join(str(error).split())
        raise UserError(f"--push-to-hub {name} failed ({reason}): the export itself lies whole in {folder}.") from error


def main(arguments: Sequence[str] | None = None) -> None:
    """The console script `kvsweep-export`: exit code 0 done, 2 bad input."""
    options = _parser().parse_args(arguments)
    try:
        if options.push_to_hub:
            check_login()
        folder, notices = export(
            options.directory, options.output, cells=options.cell, problems=options.with_problems, ids=options.token_ids
        )
        for notice in notices:
            print(f"note: {notice}", file=sys.stderr)
        print(folder)
        if options.push_to_hub:
            push(folder, options.push_to_hub, public=options.public)
    except UserError as error:
        print(f"kvsweep-export: error: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        place = options.output or options.directory
        print(
            f"kvsweep-export: error: {place} cannot be written to ({error.strerror}): give --output.", file=sys.stderr
        )
        sys.exit(2)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvsweep-export",
        description="Completions and grades as a folder for datasets.load_dataset: Parquet files and a dataset card.",
    )
    parser.add_argument("directory", metavar="DIR", type=Path, help="a run directory, or one cell's folder")
    parser.add_argument("--output", metavar="DIR", type=Path, help="the dataset's folder (default: DIR/export)")
    parser.add_argument("--cell", metavar="ID", action="append", default=[], help="only this cell; repeatable")
    parser.add_argument("--token-ids", action="store_true", help="the generated tokens as well")
    parser.add_argument(
        "--with-problems", action="store_true", help="the texts of gated problems as well; their terms may forbid it"
    )
    parser.add_argument("--push-to-hub", metavar="NAME", help="upload it as this dataset, private unless --public")
    parser.add_argument("--public", action="store_true", help="with --push-to-hub: for everybody to see")
    return parser


if __name__ == "__main__":
    main()
