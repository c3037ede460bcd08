"""The files of a run: names, row types, and their lines, sealed, written and read. docs/files.md describes the files.

The harness writes the rows defined here; `kvsweep.run_files.run_reader` reads a cell's folder.
"""

import hashlib
import json
import mmap
import os
import re
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar, get_args

import msgspec

from kvsweep.messages.errors import OtherSchemaError, UserError
from kvsweep.run_files.safe_files import open_file, read_lines

# Version of cell.yaml, provenance.json and all rows; raised by a change that an older reader would misread.
SCHEMA = 1
StopReason = Literal["stop", "length", "loop", "not_finite"]
Outcome = Literal["correct", "wrong", "no_answer", "truncated", "grader_timeout"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
# Version of the grader's rules; raised by a change that changes a grade, and all grades are then made again.
GRADER = 9
# Likewise, of the rules for benchmark.answer_from=anywhere alone.
GRADER_ANYWHERE = "2"
CELL_FILE = "cell.yaml"
PROVENANCE_FILE = "provenance.json"
PROBLEMS_FILE = "problems.jsonl"
COMPLETIONS_FILE = "completions.jsonl"
GRADES_FILE = "grades.jsonl"
STATS_FILE = "stats.jsonl"
REPLAY_FILE = "replay.jsonl"
SECONDS_FILE = "seconds.jsonl"
SCREEN_FILE = "screen.json"
DONE_FILE = "DONE"
VERIFY_FILE = "report/verify.json"  # in the run's directory, outside its cells
Pair = tuple[str, int]
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True, order=True)
class Shard:
    """One writer's part of a cell's (problem, draw) pairs: every `count`-th, from `index` (1, 2, ...).

    Each shard writes its own files. Readers take all of a cell's files together, so nothing is merged.
    """

    # In this order, by which shards are sorted.
    count: int = 1
    index: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.index <= self.count:
            raise UserError(f"shard={self} is out of range: of i/n, i must lie between 1 and n, as in shard=1/4.")

    @classmethod
    def parse(cls, text: str) -> Self:
        match = re.fullmatch(r"\s*(\d+)\s*/\s*(\d+)\s*", text)
        if match is None:
            raise UserError(f"shard={text} cannot be read: write it as i/n, the i-th of n parts, as in shard=1/4.")
        return cls(index=int(match[1]), count=int(match[2]))

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    def of(self, items: Sequence[_T]) -> list[_T]:
        """Return this shard's part of the items; each item belongs to exactly one shard of the same count."""
        return list(items[self.index - 1 :: self.count])

    def file(self, name: str) -> str:
        """Return this shard's name for a cell's file: `completions.jsonl`, or `completions-1of4.jsonl`."""
        if self.count == 1:
            return name
        path = Path(name)
        return f"{path.stem}-{self.index}of{self.count}{path.suffix}"


WHOLE = Shard()


def shard_files(directory: Path, name: str) -> dict[Shard, Path]:
    """Return a cell's files called `name`: the whole cell's (`completions.jsonl`) first, then the shards'."""
    stem, _, suffix = name.rpartition(".")
    files = {}
    for path in sorted(directory.glob(f"*.{suffix}")):  # the whole cell's comes last, and counts more than a shard 1of1
        # "completions-1of4.jsonl" -> "1", "4"; "completions.jsonl" -> "1", "1"
        match = re.fullmatch(rf"{re.escape(stem)}(?:-(\d+)of(\d+))?\.{suffix}", path.name)
        if match is None:
            continue
        index, count = map(int, match.groups("1"))
        if 1 <= index <= count:
            files[Shard(index=index, count=count)] = path
    return dict(sorted(files.items()))


# --- Rows ---------------------------------------------------------------------------------------------------


# Limits of tokens per completion, rows per cache, draws per problem, and all counts of bytes or tokens.
MOST_TOKENS = (1 << 31) - 1
MOST = (1 << 53) - 1
# No picture is drawn of a longer completion.
MOST_POSITIONS = 1 << 22
Tokens = Annotated[int, msgspec.Meta(ge=0, le=MOST_TOKENS)]
Count = Annotated[int, msgspec.Meta(ge=0, le=MOST)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=MOST)]


class Row(msgspec.Struct, frozen=True):
    """A JSON object. A reader ignores fields that this version does not know."""

    def to_dict(self) -> dict[str, Any]:
        return msgspec.to_builtins(self)


class StoredRow(Row, frozen=True, tag_field="schema", tag=SCHEMA):
    """A row on its own line, which begins with the schema's number.

    Attributes: file: the cell's file of such rows. sealed: True for a row of a cell. Its line ends with a check over
    contents and cell, so that a line that was edited, or that lies in another cell's folder, is refused. Rows of other
    programs may have no check.
    """

    file: ClassVar[str]
    sealed: ClassVar[bool] = True

    def to_line(self, folder: Path | None = None) -> str:
        """Return the row as one ASCII line; with `folder`, the line is sealed for this cell."""
        body = json.dumps(self.to_dict(), separators=(",", ":"))[:-1]  # without its last brace
        end = _seal(body.encode(), cell_of(folder)).decode() if folder and self.sealed else "}"
        return f"{body}{end}\n"


def cell_of(folder: Path) -> str:
    """Return the name of the folder itself, whatever link or path leads to it."""
    plain = folder.name not in ("", "..") and not folder.is_symlink()
    return folder.name if plain else folder.resolve().name


def _seal(body: bytes, cell: str) -> bytes:
    """Return the end (check) of the line that begins with `body`, in a file of the cell `cell`."""
    return b',"check":"%s"}' % hashlib.sha256(os.fsencode(cell) + b"\n" + body).hexdigest()[:16].encode()


class PairRow(StoredRow, frozen=True):
    """A row that belongs to one (problem, draw) pair of its cell."""

    problem_id: str
    draw: Tokens

    @property
    def key(self) -> Pair:
        return (self.problem_id, self.draw)


class Problem(StoredRow, frozen=True, omit_defaults=True):
    """One benchmark item. `prompt` is the user message, `gold` the reference answer as text.

    `group` is what the variants of one question share, where the benchmark has such a column.
    """

    file: ClassVar[str] = PROBLEMS_FILE

    id: str
    prompt: str
    gold: str
    group: str | None = None


class Eviction(Row, frozen=True):
    """One eviction: cache lengths in tokens before and after it. `step` counts the generated tokens fed so far.

    `held` says which tokens the cache holds after the eviction: see `held_percents`.
    """

    step: Tokens
    length_before: Tokens
    length_after: Tokens
    held: list[Tokens]

    def __post_init__(self) -> None:
        if sum(self.held[1::2]) > MOST_POSITIONS:
            raise ValueError(f"held counts more than {MOST_POSITIONS:,} positions")


class Completion(PairRow, frozen=True):
    """One generation: `token_ids` after the prompt, with the stop token. Lengths are in tokens.

    `stop_reason`: "stop", the model ended the completion; "length", truncated at the token limit; "loop", truncated
    because it had begun to loop (`run_files.loops.find_loop`); "not_finite", truncated before the token with NaN or
    infinite logits, perhaps the first. Until `fork_step`, the step of the first eviction (None without one), every cell
    of the grid writes the same tokens.

    A server's completion has no token_ids and no peak_length; it has thinking_tokens only if the server counts them,
    and the seconds until it arrived, waits included.
    """

    file: ClassVar[str] = COMPLETIONS_FILE

    text: str
    token_ids: list[Tokens]
    num_tokens: Tokens
    prompt_tokens: Tokens
    thinking_tokens: Tokens | None
    stop_reason: StopReason
    evictions: list[Eviction]
    fork_step: Tokens | None
    peak_length: Tokens | None
    seed: Count
    seconds: Seconds | msgspec.UnsetType = msgspec.UNSET

    @property
    def shared_ids(self) -> list[int]:
        """The tokens that every cell of the grid writes: all, or those drawn up to the first evicting step."""
        return self.token_ids[: self.evictions[0].step + 1] if self.evictions else self.token_ids


class Grade(PairRow, frozen=True):
    """The grade of one completion. `correct` is 1 for the outcome "correct" and 0 for the others.

    `rule` is the `grading_rule` of the grade; None in rows of other programs.
    """

    file: ClassVar[str] = GRADES_FILE

    answer: str | None
    gold: str
    outcome: Outcome
    correct: Literal[0, 1]
    rule: str | None = None

    def __post_init__(self) -> None:
        if self.correct != (self.outcome == "correct"):
            raise ValueError(f"correct={self.correct} contradicts the outcome {self.outcome!r}")


class DecodeStats(StoredRow, frozen=True):
    """The cost of one call of the engine: seconds, tokens decoded up to each completion's end, KV cache bytes.

    `decode_seconds` is the engine's time without `prefill_seconds`: forward, sampling, scoring, eviction and host.
    `first_token_seconds` is the time until the end of the first step. One call may decode several cells: `cells` is
    their number, `tokens` counts this cell's tokens and `tokens_total` those of all cells.
    """

    file: ClassVar[str] = STATS_FILE

    wall_seconds: Seconds
    prefill_seconds: Seconds
    decode_seconds: Seconds
    forward_seconds: Seconds
    sampling_seconds: Seconds
    scoring_seconds: Seconds
    eviction_seconds: Seconds
    host_seconds: Seconds
    first_token_seconds: Seconds
    tokens: Count
    tokens_total: Count
    cells: Count
    completions: Count
    slots: Count
    steps: Count
    kv_bytes_allocated: Count
    kv_bytes_analytic: Count


class ReplayBin(Row, frozen=True):
    """Sums over some tokens of a replayed completion: number, KL, change of log-likelihood, equal top-1 tokens."""

    tokens: Tokens
    kl: float
    change: float
    top1: Tokens


class Replay(PairRow, frozen=True):
    """One known completion read through a cell's cache, compared with the full cache's reading of it. Unit: nats.

    KL is from the full cache's next-token distribution to the cell's. `change` is the completion's log-likelihood minus
    the full cache's; `answer_change` the same for the tokens behind the closing thinking tag, None without them. `top1`
    is the share of tokens with equal most likely tokens, `first_other` the first token without. `by_distance` has a bin
    for each of REPLAY_DISTANCES, tokens since the last eviction (0: before the first one), `by_entropy` one for each of
    REPLAY_ENTROPIES, the full cache's entropy.
    """

    file: ClassVar[str] = REPLAY_FILE

    tokens: Tokens
    prompt_tokens: Tokens
    evictions: Tokens
    kl_mean: float
    kl_median: float
    kl_p99: float
    loglik: float
    change: float
    top1: float
    first_other: Tokens | None
    answer_tokens: Tokens
    answer_loglik: float | None
    answer_change: float | None
    by_distance: list[ReplayBin]
    by_entropy: list[ReplayBin]


# The lower bounds of the bins.
REPLAY_DISTANCES = (0, 1, 9, 33, 129)
REPLAY_ENTROPIES = (0.0, 0.01, 0.1, 1.0)


class Screened(Row, frozen=True):
    """Why a sweep did not decode a cell: the screen's rule, and means per token over its replayed completions."""

    rule: str
    texts: Count
    kl: float
    loss: float


# What chose how many texts a batch of `Timing` has.
Why = Literal["one", "given", "memory"]


class Timing(StoredRow, frozen=True):
    """One round of timing a cell: `slots` known completions, token by token; `why` says what chose `slots`.

    `seconds` is wall time without prefill, `eviction_seconds` the part that chooses and moves rows. `by_length` has,
    for some numbers of rows in the longest slot, [rows, steps, seconds].
    """

    file: ClassVar[str] = SECONDS_FILE

    why: Why
    round: Count
    slots: Count
    tokens: Tokens
    seconds: Seconds
    cpu_seconds: Seconds
    eviction_seconds: Seconds
    kv_bytes: Count
    peak_bytes: Count | None
    by_length: list[tuple[Tokens, Count, Seconds]]


def view(kind: type[Row], *names: str, **types: Any) -> Any:
    """Return a row type with only the named fields of `kind`, plus `problem_id` and `draw` if it is a row of a pair.

    Readers skip the other fields, which is faster. `types` gives fields another type, such as a view of an inner row.
    """
    fields = []
    for field in msgspec.structs.fields(kind):
        if field.name in {*names, *types}:
            # Without a default it is NODEFAULT, by which a field is required.
            fields.append((field.name, types.get(field.name, field.type), msgspec.field(default=field.default)))
    namespace = {"file": getattr(kind, "file", None)}
    return msgspec.defstruct(kind.__name__, fields, bases=kind.__bases__, namespace=namespace, frozen=True)


def held_percents(held: Sequence[int]) -> list[int]:
    """Decode `Eviction.held`, runs `[percent, count, percent, count, ...]`: one entry per text position from 0 on.

    An entry is the percent of (layer, kv head) pairs that still hold the position, rounded to a multiple of 10.
    """
    percents = []
    for percent, count in zip(held[::2], held[1::2], strict=True):
        percents += [percent] * count
    return percents


def leaves(value: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested dictionaries, each with the names that lead to it: "a.b"."""
    for name, item in value.items():
        if isinstance(item, Mapping):
            yield from leaves(item, f"{above}{name}.")
        else:
            yield f"{above}{name}", item


def content_hash(value: object) -> str:
    """Sixteen hex digits of the SHA-256 of the value's canonical JSON: the same on every machine and in every run."""
    canonical = json.dumps(value, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


# --- Lines of rows -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class BadLine:
    """A line that is not a valid row (number 0: lines that are rows of something else), and what to do about it.

    As text it begins a sentence, which names the file, the line and the reason.
    """

    path: Path
    number: int
    text: bytes
    reason: str
    hint: str = "delete that line and run again to make its row anew"

    def __str__(self) -> str:
        if not self.number:
            return f"{self.path}: {self.reason}"
        return f"{self.path}:{self.number} is broken ({self.reason})"


_P = TypeVar("_P", bound=PairRow)
# How each line of this schema begins, as `StoredRow.to_line` writes it.
_BEGIN = f'{{"schema":{SCHEMA},'.encode()
_CHECK = re.compile(rb'"check"\s*:')
OnBad = Callable[[BadLine], object]


def ignore(line: BadLine) -> None:
    """Ignore a bad line silently; for `on_bad`."""


def refuse(line: BadLine) -> None:
    """Raise a UserError that names the bad line; for `on_bad`."""
    raise UserError(f"{line}: {line.hint}.")


def read_rows(path: Path, kind: type[_T], *, on_bad: OnBad = refuse) -> Iterator[_T]:
    """Yield the rows of a file of lines as `kind`; a missing file yields none, and empty lines are skipped.

    A broken line goes to `on_bad`. A broken last line without a newline is skipped silently: its writer is still
    writing it, or has died, and the row will be made again.
    """
    return (row for _, row in _placed_rows([path], kind, on_bad))


def _placed_rows(
    paths: Iterable[Path], kind: type[_T], on_bad: OnBad, checked: Container[str] = ()
) -> Iterator[tuple[str, _T]]:
    """Yield the rows of files with their places, "FILE:LINE"; rows at the places `checked` are known to be whole."""
    for path in filter(os.path.lexists, paths):
        cell = cell_of(path.parent) if getattr(kind, "sealed", False) else None  # only a `StoredRow` has `sealed`
        for number, line in enumerate(read_lines(path), start=1):
            place = f"{path}:{number}"
            try:
                if not line.startswith(_BEGIN):
                    check_schema(decode(line, dict[str, Any]), place)
                row = decode(line, kind)
                if cell is not None and place not in checked:
                    _check_seal(line, cell)
            except (ValueError, RecursionError) as error:
                # A line without an end is still being written.
                if line.strip() and line.endswith(b"\n"):
                    on_bad(BadLine(path=path, number=number, text=line, reason=str(error)))
            else:
                yield place, row


def _check_seal(line: bytes, cell: str) -> None:
    """Raise ValueError if a line's check does not fit its other bytes and its cell."""
    if is_sealed(line):
        body = line.rpartition(b',"check":')[0]
        # Git may change line ends in a checkout; they are not part of a row.
        if line.rstrip(b"\r\n") != body + _seal(body, cell):
            raise ValueError("its check does not fit: the row was edited, or belongs to another cell")


def is_sealed(line: bytes) -> bool:
    return _CHECK.search(line) is not None


def check_schema(contents: Mapping[str, Any], where: object) -> None:
    """Raise OtherSchemaError if a file's contents name another schema than this version's, or none."""
    schema = contents.get("schema")
    if type(schema) is int and schema == SCHEMA:
        return
    named = "no schema" if schema is None else f"schema {schema}"
    way_out = "an older kvsweep wrote it; run the sweep again under another run_name"
    if type(schema) is int and schema > SCHEMA:
        way_out = "install the kvsweep that wrote it, or a newer one"
    raise OtherSchemaError(f"{where} has {named} and this kvsweep reads schema {SCHEMA}: {way_out}.")


def latest_rows(paths: Collection[Path], kind: type[_P], *, on_bad: OnBad = refuse) -> Iterator[_P]:
    """Yield the rows of several files, each (problem, draw) pair once: the last of repeated rows counts.

    All readers use this rule, in the order of `shard_files`. Files are read twice, to keep only one row in memory.
    """
    # Broken lines are ignored here: the second reading gives them to `on_bad`.
    last_place = {row.key: place for place, row in _placed_rows(paths, PairRow, ignore)}
    places = {*last_place.values()}
    for place, latest in _placed_rows(paths, kind, on_bad, places):
        if place in places:
            yield latest


_GRADED_BY = ("benchmark.answer_kind", "benchmark.answer_from", "model.think_start", "model.think_end")


def grading_rule(cell: Mapping[str, Any]) -> str:
    """Hash all that decides a cell's grades besides completions and golds; `cell` is its cell.yaml."""
    settings = dict(leaves(cell))
    values = [str(settings.get(name)) for name in _GRADED_BY]
    if "anywhere" in values:
        values.append(GRADER_ANYWHERE)
    return content_hash([GRADER, *values])


def decode(data: bytes, kind: type[_T]) -> _T:
    """Read one JSON value as `kind`; raises ValueError for anything else."""
    try:
        return msgspec.json.decode(data, type=kind)
    # A kind of `DecodeError`: good JSON that is no `kind`, which a second try would not change.
    except msgspec.ValidationError:
        raise
    except (msgspec.DecodeError, UnicodeDecodeError):
        # A model may write half a surrogate pair, which msgspec refuses as text; Python reads it.
        return msgspec.convert(json.loads(data), kind)


# --- The one writer -----------------------------------------------------------------------------------------


def append_row(path: Path, row: StoredRow) -> None:
    drop_torn_line(path)
    with open_file(path, "ab") as file:
        file.write(row.to_line(path.parent).encode())


def drop_torn_line(path: Path) -> None:
    """Remove a last line without a newline: its writer died."""
    if not os.path.lexists(path) or not path.stat().st_size:
        return
    with open_file(path, "rb+") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        end_of_last = data.rfind(b"\n") + 1
        if end_of_last < len(data):
            file.truncate(end_of_last)
