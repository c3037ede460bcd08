"""Rows of problems from toy tasks, local files and hub datasets. Raises UserError for unreadable data."""

import glob
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvsweep.harness.benchmarks.config import WRONG_OPTIONS, BenchmarkConfig
from kvsweep.harness.models.hub import is_lfs_pointer, is_reachable
from kvsweep.harness.settings import build
from kvsweep.messages.errors import UserError
from kvsweep.run_files.other_rows import FileRow, rows_of_file

# A folder with more entries is a disk or an archive, not a data set, and takes minutes to list.
MOST_ENTRIES = 10_000
# Characters of a question that stands in for one that the hub does not give; AIME's have 80 to 1,734.
_STAND_IN_CHARS = 1000


def read_source(config: BenchmarkConfig, *, only_estimated: bool) -> tuple[list[FileRow], str, BenchmarkConfig]:
    """Read the rows; return them, their source, and the configuration that fits them (a fallback has its own).

    If a sweep is `only_estimated`, stand-ins take the place of a hub dataset that cannot be had.
    """
    if config.path is not None:
        path = Path(config.path)
        rows = _read_folder(path, config.split) if path.is_dir() else _read_file(path)
        return rows, str(path), config
    if config.source == "toy":
        return _read_toy(config), f"toy task {config.task}", config
    try:
        return _read_hub(config), _hub_origin(config), config
    except UserError as first:
        if only_estimated and config.expected_count is not None:
            return _stand_ins(config, first)
        if config.fallback is None:
            raise
        # A revision and a column name belong to one dataset only.
        unset = dict.fromkeys(("revision", "hub_config", "answer_after", "keep_if", "fallback"))
        values = vars(config) | unset | {"columns": {}} | dict(config.fallback)
        fallback = build(BenchmarkConfig, "benchmark", values)
        try:
            rows = _read_hub(fallback)
        except UserError:
            raise first from None  # of the data set that the user named
        print(f"benchmark {config.name}: {config.hub_id} could not be had, {fallback.hub_id} is used.", file=sys.stderr)
        return rows, _hub_origin(fallback), fallback


def _stand_ins(config: BenchmarkConfig, reason: UserError) -> tuple[list[FileRow], str, BenchmarkConfig]:
    """Return `expected_count` questions of one length, to estimate a sweep of a data set that cannot be had here."""
    print(
        f"{reason} The dry run counts {config.expected_count} questions of {_STAND_IN_CHARS:,} characters "
        "(benchmark.expected_count), and no stored cell of theirs as done.",
        file=sys.stderr,
    )
    # The right option is "A" or "0", the wrong ones are "1" to "3", which nothing reads in a benchmark without options.
    # A question for a letter without option columns has its options in its text.
    values: dict[str, Any] = {name: str(number) for number, name in enumerate(WRONG_OPTIONS, start=1)}
    values["answer"] = "A" if config.answer_kind == "letter" else "0"
    rows = []
    for number in range(int(config.expected_count or 0)):  # the caller has seen that it is not None
        # Of two benchmarks no question is the same.
        problem = f"{config.name} {number} (A) (B)".ljust(_STAND_IN_CHARS, "?")
        rows.append(FileRow(f"row {number}", values | {"id": number, "problem": problem, "group": number}))
    columns = {name: name for name in config.columns}
    fitting = replace(config, columns=columns, answer_after=None, keep_if=None, expected_hash=None)
    return rows, _hub_origin(config), fitting


def _read_toy(config: BenchmarkConfig) -> list[FileRow]:
    """Return rows of `count` problems of a toy task."""
    from kvsweep.harness.toy.tasks import BENCHMARKS, TASKS, problems

    task = str(config.task)
    tasks = (*TASKS, *BENCHMARKS)
    if task not in tasks:
        raise UserError(f"benchmark.task={task} is unknown: choose one of {', '.join(tasks)}.")
    rows = []
    for toy in problems(task, config.count):
        rows.append(FileRow(f"toy {toy.id}", {"id": toy.id, "problem": toy.question, "answer": toy.answer}))
    return rows


def _read_hub(config: BenchmarkConfig) -> list[FileRow]:
    """Return the rows of a hub dataset; raises UserError, with what to do, if it cannot be had."""
    is_reachable()  # before datasets, which then uses its cache at once if the hub does not answer
    import datasets

    try:
        data = datasets.load_dataset(config.hub_id, config.hub_config, split=config.split, revision=config.revision)
    except Exception as error:  # four libraries raise here; their errors have no common base class
        raise UserError(_hub_message(config, error)) from error
    if config.revision is None:
        print(
            f"benchmark {config.name}: {config.hub_id} is not pinned to a revision; the newest one is used.",
            file=sys.stderr,
        )
    return _dataset_rows(data, str(config.hub_id))


def _hub_origin(config: BenchmarkConfig) -> str:
    configuration = f", configuration {config.hub_config}" if config.hub_config else ""
    split = f", split {config.split}" if config.split else ""
    return f"{config.hub_id}@{config.revision or 'unpinned'}{configuration}{split}"


def _hub_message(config: BenchmarkConfig, error: Exception) -> str:
    """Return why a hub dataset could not be loaded, and what to do."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    cache_fault = _cache_fault(error)
    if cache_fault:
        reason = f"did not load; {cache_fault}"
    elif "GatedRepoError" in kinds or "gated" in str(error).lower():
        reason = "is gated; accept its terms on its hub page and run `hf auth login` (once `huggingface-cli login`)"
    elif "DatasetNotFoundError" in kinds:
        reason = "is not on the hub or not open to you; check the names, run `hf auth login` if it is private"
    elif "ConnectionError" in kinds:
        reason = "cannot be reached and is not in the local cache; check the network"
    else:
        reason = f"did not load ({type(error).__name__}); check benchmark.split and benchmark.revision"
    return (
        f"Dataset {config.hub_id} (revision={config.revision or 'newest'}, split={config.split}) {reason}, or give "
        "benchmark.path=FILE."
    )


def _cache_fault(error: Exception) -> str | None:
    """Return the sentence's end if the cache of `datasets` caused an error, else None."""
    import datasets

    cache = Path(datasets.config.HF_DATASETS_CACHE)
    place = getattr(error, "filename", None)
    if not isinstance(error, OSError) or not isinstance(place, str):
        return None
    # The file lies in the cache, or is a folder above it that could not be made.
    if not (cache.is_relative_to(place) or Path(place).is_relative_to(cache)):
        return None
    return f"the cache {cache} cannot be written to ({error.strerror}), so name another folder as HF_HOME"


def _dataset_rows(data: Any, name: str) -> list[FileRow]:
    if isinstance(data, Mapping):
        raise UserError(f"{name} has the splits {', '.join(data)}; choose one with benchmark.split=NAME.")
    return [FileRow(f"{name} row {number}", dict(row)) for number, row in enumerate(data, start=1)]


def _read_file(path: Path) -> list[FileRow]:
    """Return the rows of a file; raises UserError for one that cannot be read."""
    if is_lfs_pointer(path):  # else it would be read as a CSV
        raise UserError(f"{path} is a Git LFS pointer in place of the file; run `git lfs pull` in the clone.")
    return [*rows_of_file(path)]


def _read_folder(path: Path, split: str | None) -> list[FileRow]:
    """Return the rows of a folder that `datasets` saved, or of data files that `datasets` can load."""
    import datasets

    _check_entries(path)
    is_saved = (path / "dataset_dict.json").exists() or (path / "state.json").exists()
    place = str(path.absolute())
    if not is_saved and glob.escape(place) != place:
        raise UserError(
            f"benchmark.path={path} has *, ? or [ in its name, which datasets reads as a pattern; rename the folder, "
            "or give a file."
        )
    try:
        if is_saved:
            data: Any = datasets.load_from_disk(str(path))  # rows by split, or rows without splits
        else:
            # Only the files of each split: `datasets` would read 007 in a CSV as 7.
            data = datasets.load_dataset_builder(place).config.data_files
    except Exception as error:  # as in `_read_hub`, the errors have no common base class
        fault = _cache_fault(error)
        if fault:
            raise UserError(f"benchmark.path={path} did not load; {fault}.") from error
        raise UserError(
            f"benchmark.path={path} is no folder datasets can load ({type(error).__name__}); give a file."
        ) from error
    if not isinstance(data, Mapping):
        return _dataset_rows(data, str(path))
    name = next(iter(data)) if len(data) == 1 else split  # a single split needs no name
    if name not in data:
        splits = ", ".join(map(str, data))
        raise UserError(f"benchmark.split={split} is not in {path}, which has {splits}; choose one of these.")
    if is_saved:
        return _dataset_rows(data[name], str(path))
    rows = list[FileRow]()
    for file in data[name]:
        rows += _read_file(Path(file))
    return rows


def _check_entries(path: Path) -> None:
    """Refuse a folder with too many entries, or with an entry that might never end."""
    for number, entry in enumerate(path.rglob("*")):
        if entry.exists() and not entry.is_file() and not entry.is_dir():
            raise UserError(f"{entry} is a pipe, a device or a socket, which might never end; remove it.")
        if number == MOST_ENTRIES:
            raise UserError(f"benchmark.path={path} holds more than {MOST_ENTRIES:,} entries; give a file.")
