"""The rows that a run writes and the analysis reads. Standard library only, so that both sides may import it."""

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

StopReason = Literal["stop", "length"]
Outcome = Literal["correct", "wrong", "no_answer", "truncated", "grader_timeout"]
OUTCOMES: tuple[Outcome, ...] = ("correct", "wrong", "no_answer", "truncated", "grader_timeout")
CELL_FILE = "cell.yaml"
PROVENANCE_FILE = "provenance.json"
PROBLEMS_FILE = "problems.jsonl"
COMPLETIONS_FILE = "completions.jsonl"
GRADES_FILE = "grades.jsonl"
STATS_FILE = "stats.jsonl"
DONE_FILE = "DONE"
STATUS_FOLDER = "status"
_T = TypeVar("_T")


class UserError(ValueError):
    """A mistake the user can mend. The message is one sentence: the value, what is allowed, the way out."""

    def __init__(self, message: str) -> None:
        # A value may hold a line break; the sentence that names it stays on one line.
        super().__init__(" ".join(message.splitlines()))


@dataclass(frozen=True, kw_only=True, order=True)
class Shard:
    """The part of a cell's (problem, draw) pairs that one writer takes: every `count`-th, from `index` (1, 2, ...).

    Each shard writes files of its own, and readers take all of a cell's files together, so nothing is merged.

    Raises:
        UserError: no whole numbers with 1 <= index <= count.
    """

    index: int = 1
    count: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.index <= self.count:
            raise UserError(f"shard={self} is out of range: of i/n, i must lie between 1 and n, as in shard=1/4.")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `i/n`."""
        match = re.fullmatch(r"\s*(\d+)\s*/\s*(\d+)\s*", text)
        if match is None:
            raise UserError(f"shard={text} cannot be read: write it as i/n, the i-th of n parts, as in shard=1/4.")
        return cls(index=int(match[1]), count=int(match[2]))

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    def of(self, items: Sequence[_T]) -> list[_T]:
        """This shard's part of the items; the shards of one count share all items out, no item twice."""
        return list(items[self.index - 1 :: self.count])

    def file(self, name: str) -> str:
        """What this shard calls a cell's file: `completions.jsonl`, or `completions-1of4.jsonl`."""
        if self.count == 1:
            return name
        stem, _, suffix = name.rpartition(".")
        return f"{stem}-{self.index}of{self.count}.{suffix}" if stem else f"{name}-{self.index}of{self.count}"


WHOLE = Shard()


def shard_files(directory: Path, name: str) -> dict[Shard, Path]:
    """The files that writers made of a cell's file: the whole cell's (`completions.jsonl`) first, then the shards'."""
    stem, _, suffix = name.rpartition(".")
    found = {}
    for path in directory.glob(f"{stem}-*of*.{suffix}"):
        match = re.fullmatch(r"-(\d+)of(\d+)", path.name[len(stem) : -len(suffix) - 1])
        if match is not None and 1 <= int(match[1]) <= int(match[2]):
            found[Shard(index=int(match[1]), count=int(match[2]))] = path
    if (directory / name).exists():
        found[WHOLE] = directory / name
    return dict(sorted(found.items(), key=lambda item: (item[0].count, item[0].index)))


class _Row:
    """A dataclass that goes to and from one line of JSON."""

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)  # type: ignore[call-overload]

    @classmethod
    def from_dict(cls, row: dict[str, Any]) -> Self:
        """Build from a parsed JSON object; fields this version does not know are ignored."""
        known = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
        return cls(**{name: value for name, value in row.items() if name in known})


@dataclass(frozen=True, kw_only=True)
class Problem(_Row):
    """One benchmark item. `prompt` is the user message; `gold` the reference answer as text."""

    id: str
    prompt: str
    gold: str


@dataclass(frozen=True, kw_only=True)
class Eviction(_Row):
    """One eviction: cache lengths in tokens before and after; `step` counts the generated tokens fed so far.

    `held` says what is still there after it: see `held_percents`. Rows of before this field have none.
    """

    step: int
    length_before: int
    length_after: int
    held: list[int] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Completion(_Row):
    """One generation: `token_ids` after the prompt, the stop token included; lengths in tokens.

    Until its first eviction a completion is the one that every cell of its grid writes. `fork_step` is the step of that
    eviction (as in `Eviction`), None where there was none.
    """

    problem_id: str
    draw: int
    text: str
    token_ids: list[int]
    num_tokens: int
    prompt_tokens: int
    thinking_tokens: int
    stop_reason: StopReason
    evictions: list[Eviction] = field(default_factory=list)
    fork_step: int | None = None
    peak_length: int
    seed: int

    @classmethod
    def from_dict(cls, row: dict[str, Any]) -> Self:
        """Build from a parsed JSON object, its evictions included."""
        return super().from_dict({**row, "evictions": [Eviction.from_dict(e) for e in row["evictions"]]})

    @property
    def key(self) -> tuple[str, int]:
        """What identifies a completion within its cell."""
        return (self.problem_id, self.draw)

    @property
    def shared_ids(self) -> list[int]:
        """The tokens that every cell of the grid writes: all, or those drawn by the end of the step that evicted."""
        return self.token_ids[: self.evictions[0].step + 1] if self.evictions else self.token_ids


@dataclass(frozen=True, kw_only=True)
class Grade(_Row):
    """The verdict on one completion. `correct` is 1 only for outcome "correct"."""

    problem_id: str
    draw: int
    answer: str | None
    gold: str
    outcome: Outcome
    correct: int

    @property
    def key(self) -> tuple[str, int]:
        """What identifies a grade within its cell."""
        return (self.problem_id, self.draw)


@dataclass(frozen=True, kw_only=True)
class DecodeStats(_Row):
    """What one stretch of decoding cost: wall seconds, live tokens (rows that still wrote), KV bytes.

    `decode_seconds` is all that the engine took but `prefill_seconds`: forward, sampling, scoring, eviction and host
    together; `first_token_seconds` until its first step had drawn. The stretch may serve several cells at once; `cells`
    says how many, and `tokens` counts this cell's alone, `tokens_total` all of them.
    """

    wall_seconds: float
    prefill_seconds: float
    decode_seconds: float
    eviction_seconds: float
    tokens: int
    tokens_total: int
    cells: int
    completions: int
    slots: int
    steps: int
    kv_bytes_allocated: int
    kv_bytes_analytic: int
    # Rows of before these fields have none.
    forward_seconds: float | None = None
    sampling_seconds: float | None = None
    scoring_seconds: float | None = None
    host_seconds: float | None = None
    first_token_seconds: float | None = None


def held_percents(held: Sequence[int]) -> list[int]:
    """Decode `Eviction.held`, runs `[percent, count, percent, count, ...]`: one entry per text position from 0 on.

    An entry is the percent of (layer, kv head) pairs that still hold the position, rounded to a multiple of 10.

    Raises:
        ValueError: a run without its count.
    """
    return [percent for percent, count in zip(held[::2], held[1::2], strict=True) for _ in range(count)]


def content_hash(value: object) -> str:
    """Sixteen hex digits of the SHA-256 of the value's canonical JSON: the same on every machine and run."""
    canonical = json.dumps(value, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def read_rows(path: Path, *, on_bad: Callable[[int, str], None] | None = None) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a file of lines; a missing file yields none.

    A torn last line (no newline at its end) is passed over: its writer died, and the row will be made again. A broken
    line before it goes to `on_bad(line_number, text)`.

    Raises:
        UserError: a broken line while `on_bad` is None.
    """
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace", newline="\n") as lines:
        for number, line in enumerate(lines, start=1):
            row = _parse(line)
            if row is not None:
                yield row
            elif not line.endswith("\n"):
                return
            elif on_bad is not None:
                on_bad(number, line)
            elif line.strip():
                raise UserError(
                    f"{path}:{number} is not a JSON object; delete that line and run again to make its row anew."
                )


def read_shards(directory: Path, name: str) -> Iterator[dict[str, Any]]:
    """The rows of a cell's file, those of all its shards.

    Raises:
        UserError: a broken line.
    """
    for path in shard_files(directory, name).values():
        yield from read_rows(path)


def _parse(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def drop_torn_line(path: Path) -> None:
    """Cut off a last line that its writer did not live to finish."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        size = file.seek(0, os.SEEK_END)
        end = size
        while end > 0:
            start = max(0, end - 65536)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        if end < size:
            file.truncate(end)


@contextmanager
def plain_disk_errors(directory: Path) -> Iterator[None]:
    """Turn a disk that cannot be written to into one sentence.

    Raises:
        UserError: no space, over quota, read-only, no permission, no such place.
    """
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{directory} cannot be written to ({error.strerror}): make room or set results_dir= elsewhere, then run "
            "the same command again; what is stored stays and is not made anew."
        ) from error


def _line(row: dict[str, Any]) -> str:
    return json.dumps(row, separators=(",", ":")) + "\n"


def _replace(path: Path, text: str) -> None:
    if path.exists() and path.read_text() == text:
        return
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
