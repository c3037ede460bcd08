"""The interface of a cache policy, which chooses the rows of one sequence's cache that stay at an eviction."""

from __future__ import annotations

import dataclasses
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_type_hints

from pydantic import Field, NonNegativeInt, PositiveInt, TypeAdapter, ValidationError

from kvsweep.compression import artifacts
from kvsweep.compression.source import code_hash, is_own, source_files
from kvsweep.kernels.implementation import Operations, Tensor, operations, torch
from kvsweep.messages.errors import UserError
from kvsweep.run_files.safe_files import digests


class Signal:
    """A quantity that the engine records. Signals are frozen and hashable; equal signals share a recorder."""

    def allocate(self, cache: Any) -> Any:
        """Return the recorder of a user's signal; `compression.recorders` has the recorders of the signals below.

        Take memory only on `cache.device`: on torch's meta device, which stores no numbers, it counts a slot's bytes.
        """
        raise NotImplementedError(f"{type(self).__name__} has no recorder: define allocate(cache).")


@dataclass(frozen=True)
class PredictedImportance(Signal):
    """The score that the importance predictor in a folder gives each token, shaped as positions; NaN at the prompt."""

    directory: str


@dataclass(frozen=True)
class AttentionMass(Signal):
    """Attention probability that each row has received, summed over queries and groups: [layers, kv_heads, length].

    The prefill of the prompt counts. The sum of an evicted row is discarded with it (H2O, 2306.14048, section 4). Each
    step multiplies earlier sums by `decay`: 1 counts all queries alike, 0 only the newest (InertiaKV, 2609.03515).
    """

    decay: float = 1.0


@dataclass(frozen=True)
class RecentQueries(Signal):
    """The rotated queries of the newest `window` tokens, [layers, q_heads, window, head_dim], oldest first."""

    window: int


@dataclass(frozen=True)
class LastUse(Signal):
    """Position of each row's last use, and longest interval between two uses: [2, layers, kv_heads, length].

    A query uses a row if the query heads of a group together pay it attention of at least `threshold`. The prefill of
    the prompt counts as one use of its rows (LazyEviction, 2506.15969).
    """

    threshold: float


@dataclass(frozen=True)
class RowMemory(Signal):
    """A number per row that a policy writes at an eviction, [layers, kv_heads, length]; NaN before it is written."""

    policy: str


Question = Literal["free", "pinned", "on_top"]
Count = PositiveInt
Fraction = Annotated[float, Field(ge=0, le=1)]


@cache
def _adapters(cls: type) -> dict[str, TypeAdapter[Any]]:
    """Return the pydantic adapter that checks type and range, for each field of a policy class."""
    hints = get_type_hints(cls, include_extras=True)
    return {field.name: TypeAdapter(hints[field.name]) for field in dataclasses.fields(cls)}


@dataclass(frozen=True, kw_only=True)
class CacheView:
    """One sequence's cache at the moment of eviction.

    Tensors per row are [length] for a policy that keeps the same rows in all layers and heads, and [layers, kv_heads,
    length] for a policy with `per_head`.
    """

    problem_id: str
    draw: int
    text_ids: Tensor  # prompt and text so far, [text length]
    positions: Tensor  # original index of each row's token in the text, ascending
    token_ids: Tensor  # each row's token, shaped as positions
    question_length: int  # prompt tokens, at positions 0 .. question_length - 1
    answer_start: int | None  # position of the closing thinking tag; None while the sequence still thinks
    keys: Sequence[Tensor]  # rotated keys of each layer, [kv_heads, length, head_dim]
    values: Sequence[Tensor]
    scaling: float  # factor of the model's attention logits
    signals: Mapping[Signal, Tensor]  # what was recorded for each signal that the policy names
    # True if a row's token is punctuation, a line break or a space; shaped as positions.
    separating: Callable[[], Tensor]
    # Numbers in [0, 1), shaped as positions, computed only from (seed, problem, draw, eviction, position, layer, head).
    uniform: Callable[[], Tensor]
    evictions: int = 0  # the sequence's evictions so far
    operations: Operations = field(default_factory=operations)

    @property
    def length(self) -> int:
        return self.positions.shape[-1]

    @property
    def separators(self) -> Tensor:
        """True at punctuation, line breaks and spaces; shaped as positions."""
        return self.separating()

    @property
    def question(self) -> Tensor:
        """True at prompt tokens; shaped as positions."""
        return self.positions < self.question_length

    @property
    def answer(self) -> Tensor:
        """True at the closing thinking tag and all tokens behind it; shaped as positions."""
        # No position is negative: without an answer, all are false.
        return self.positions < 0 if self.answer_start is None else self.positions >= self.answer_start

    @property
    def evicted_before(self) -> bool:
        """True from the second eviction on: the newest position then exceeds the number of rows."""
        return int(self.positions.flatten()[-1]) >= self.length


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The outcome of an eviction."""

    keep: Tensor  # sorted indices of the rows to keep, [kept] for all layers and heads or [layers, kv_heads, kept]
    # A number per row to remember until the next eviction, [layers, kv_heads, length], for each `RowMemory`.
    written: Mapping[Signal, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Policy(ABC):
    """A cache policy decides which tokens stay. Its fields are the keys of conf/policy/NAME.yaml.

    It stores nothing of a sequence. A field's annotation gives type and range (pydantic's Field), else UserError.
    """

    ARTIFACTS: ClassVar[Mapping[str, str]] = {}  # settings that name an artifact: the command that makes it
    per_head: ClassVar[bool] = False  # True if each layer and key head keeps different rows

    name: str

    def __post_init__(self) -> None:
        for name, adapter in _adapters(type(self)).items():
            value = getattr(self, name)
            try:
                adapter.validate_python(value)
            except ValidationError as error:
                reason = error.errors()[0]["msg"]
                raise UserError(f"policy.{name}={value!r} cannot be used: {reason}.") from error
        for kind, maker in self.ARTIFACTS.items():
            artifacts.check(kind, getattr(self, kind), maker)

    @property
    def signals(self) -> tuple[Signal, ...]:
        """The recordings that `select` needs of every token."""
        return ()

    @abstractmethod
    def trigger(self, question_length: int, evictions: int = 0) -> int | None:
        """Return the cache length that makes the next step evict, after `evictions` evictions; None: never."""

    @abstractmethod
    def capacity(self, question_length: int, max_new_tokens: int) -> int:
        """Return the most rows that one sequence needs."""

    @abstractmethod
    def select(self, view: CacheView) -> Selection:
        """Return the rows to keep."""

    def files(self) -> dict[Path, str]:
        """Return the artifacts that the policy reads, and a user's Python files and data, each with a hash."""
        code = source_files(type(self)) if is_own(type(self)) else {}
        data = {path: digests([path])[0] for path in itertools.chain(*self._data().values())}
        return code | artifacts.files(self.placed) | data

    def _data(self) -> dict[str, list[Path]]:
        """Return the files that a user's settings name, by setting; of a folder, which a slash tells, all in it."""
        if not is_own(type(self)):
            return {}
        data = {}
        for name, value in vars(self).items():
            if name == "name" or not isinstance(value, str | Path):
                continue
            path = Path(value)
            # A plain word, such as a mode, may happen to name a folder here: without a slash only a file counts.
            paths = [path, *path.rglob("*")] if "/" in str(value) else [path]
            files = sorted(filter(Path.is_file, paths))
            if files:
                data[name] = files
        return data

    def identity(self) -> dict[str, Any]:
        """Return everything about the policy that can change a completion, for `cell_id`.

        Artifacts and a user's data are given by a hash of their contents, a user's class by its name and a hash of its
        code. The code of kvsweep's own policies is left out, so that an update keeps the ids: `CellStore.begin_pass`.
        """
        # The last digest covers all files of a setting.
        contents = {name: digests(files, named=True)[-1] for name, files in self._data().items()}
        contents |= {kind: artifacts.digest(place) for kind, place in self.placed.items()}
        cls = type(self)
        if is_own(cls):
            contents["class"] = f"{cls.__module__}.{cls.__qualname__} {code_hash(cls)}"
        return dataclasses.asdict(self) | contents  # a hash in the place of each path

    def load_artifacts(self) -> None:
        """Read the artifacts; raises UserError if one contains invalid numbers."""
        for place in self.placed.values():
            artifacts.load_once(place)

    @property
    def placed(self) -> dict[str, str]:
        """Return the path of each artifact that is set, by setting; a signal names its predictor too."""
        places = {kind: getattr(self, kind) for kind in self.ARTIFACTS}
        for signal in self.signals:
            if isinstance(signal, PredictedImportance):
                places.setdefault("predictor", signal.directory)  # of a policy without this setting
        return {kind: place for kind, place in places.items() if place is not None}

    @property
    def lacking(self) -> dict[str, str]:
        """Return the settings without an artifact, with the command that makes one; filled only inside `planning`."""
        return {kind: maker for kind, maker in self.ARTIFACTS.items() if getattr(self, kind) is None}


class SelectionError(ValueError):
    """An eviction cannot use a policy's scores or selection; the message says what they must be."""


def _check_shape(scores: Any, view: CacheView) -> None:
    """Raise SelectionError unless scores are real numbers, shaped as the view's positions, on the cache's device."""
    heads = tuple(view.positions.shape[:-1])  # (layers, kv_heads), or () if all keep the same rows
    sizes = ", ".join(map(str, (*heads, view.length)))
    names = "[layers, kv_heads, cached tokens]" if heads else "[cached tokens]"
    rule = f"scores must be a tensor [{sizes}], {names}; the newest tokens that stay for certain may be left out"
    if not torch.is_tensor(scores):
        raise SelectionError(f"{rule}: they are a {type(scores).__name__}.")
    if not scores.dim() or tuple(scores.shape[:-1]) != heads or scores.shape[-1] > view.length:
        raise SelectionError(f"{rule}: they are {list(scores.shape)}.")
    if scores.is_complex() or scores.dtype == torch.bool:
        raise SelectionError(f"{rule}, of real numbers: they are of {scores.dtype}.")
    if scores.device != view.positions.device:
        raise SelectionError(f"{rule}, on {view.positions.device} as the cache: they are on {scores.device}.")


def _checked(scores: Tensor, view: CacheView, competing: int) -> Tensor:
    """Return the scores of the rows that compete, the first `competing`; SelectionError if there are fewer, or NaN."""
    if scores.shape[-1] < competing:
        raise SelectionError(
            f"scores name {scores.shape[-1]} of the {view.length} cached tokens, of which {competing} compete: "
            "return a score for each of these."
        )
    scores = scores[..., :competing]
    nan_count = int(scores.isnan().sum())  # the only wait for the device here
    if nan_count:
        raise SelectionError(
            f"{nan_count} of {scores.numel()} scores are NaN: "
            "return numbers; infinity keeps a token, and -infinity drops it first."
        )
    return scores


def checked_capacity(policy: Policy, question: int, limit: int) -> int:
    """Return the policy's capacity for a prompt of `question` and a completion of `limit` tokens.

    Raises UserError if that is less than the rows of a text at its first eviction or, without one, at its end.
    """
    capacity = policy.capacity(question, limit)
    trigger = policy.trigger(question)
    fullest = question + limit - 1  # the last token is never fed
    if trigger is not None:
        fullest = min(fullest, max(trigger, question) + 1)
    if capacity < fullest:
        raise UserError(
            f"policy={policy.name}: capacity({question}, {limit}) returns {capacity}, "
            f"and a text has {fullest} rows at its first eviction or its end: return {fullest} or more."
        )
    return capacity


def check_selection(selection: Selection, view: CacheView) -> None:
    """Raise SelectionError unless `keep` names rows of the view in ascending order, each once."""
    keep = selection.keep
    heads = tuple(view.positions.shape[:-1])  # (layers, kv_heads), or () if all keep the same rows
    rule = f"keep must be whole numbers of 0 to {view.length - 1}, ascending, each once"
    has_heads = tuple(keep.shape[:-1]) in ((), heads)
    if not has_heads or keep.dtype != torch.int64 or not keep.shape[-1]:
        raise SelectionError(f"{rule}, of at least one row: it is {list(keep.shape)} of {keep.dtype}.")
    least_step = keep.diff(dim=-1, prepend=keep[..., :1] - 1).amin()  # between neighbours; 1 before the first row
    # None of these numbers may be negative. They are compared together, so that the host waits once for the device.
    margins = torch.stack([keep.amin(), view.length - 1 - keep.amax(), least_step - 1])
    if bool((margins < 0).any()):
        raise SelectionError(f"{rule}: it goes from {int(keep.amin())} to {int(keep.amax())}, or repeats or turns.")


@dataclass(frozen=True, kw_only=True)
class BudgetPolicy(Policy):
    """A policy that cuts the cache to a fixed size: pinned rows, then the highest scores of the other rows.

    All these policies keep the size of DynTS's rule: the `local_window` newest tokens, and `keep_ratio` of the others,
    rounded down. Each method has its own pinned rows (`newest_kept`, sinks) within this size. Eviction fires at
    `budget` tokens; the published code tests the length before the step, so budget + 1 tokens are pruned.

    `question` says what happens to prompt tokens. "free": they compete by their scores. "pinned": they stay, inside the
    size, before any other row that competes, and so do the first `sinks` tokens of the text. "on_top": they stay beside
    the size, and budget, ratio and window count only generated tokens. None: the authors' choice.
    """

    # The settings that all policies of a grid share; `rows` and `every` set ratio and budget in another form.
    SHARED: ClassVar[tuple[str, ...]] = ("keep_ratio", "local_window", "budget", "rows", "every", "question", "sinks")
    QUESTION: ClassVar[Question] = "free"  # the authors' choice, like SINKS
    SINKS: ClassVar[int] = 0
    THINKS: ClassVar[bool] = False  # True if the method treats the answer and the thinking before it differently

    keep_ratio: Annotated[float, Field(gt=0, le=1)]
    local_window: PositiveInt
    budget: PositiveInt
    question: Question | None = None
    sinks: NonNegativeInt | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.local_window > self.budget:
            larger = f"policy.local_window={self.local_window} is larger than policy.budget={self.budget}"
            default = "of the two, one that was not given is the model's (model.sizes)"
            raise UserError(f"{larger}; {default}: give policy.local_window={self.budget} or less, or a larger budget.")
        if self.sinks_kept > max(0, self.size - self.newest_kept):
            raise UserError(
                f"policy.sinks={self.sinks_kept} is out of range: of the {self.size} tokens that stay "
                f"{self.newest_kept} are the newest, and sinks are among the others."
            )

    @property
    def question_rule(self) -> Question:
        return self.question or self.QUESTION

    @property
    def sinks_kept(self) -> int:
        return self.SINKS if self.sinks is None else self.sinks

    def identity(self) -> dict[str, Any]:
        return super().identity() | {"question": self.question_rule, "sinks": self.sinks_kept}

    def trigger(self, question_length: int, evictions: int = 0) -> int | None:
        return self.budget + self._on_top(question_length)

    def capacity(self, question_length: int, max_new_tokens: int) -> int:
        """Largest cache length: trigger + 1 (prompt + 1 if longer), or the whole text if an eviction frees nothing."""
        whole_text = question_length + max_new_tokens
        # The step that finds `trigger` rows writes one more and evicts; after a longer prompt the first step evicts.
        fullest = max(self.budget + self._on_top(question_length), question_length) + 1
        frees_rows = self.length_after(fullest, question_length) < fullest
        return min(fullest, whole_text) if frees_rows else whole_text

    def length_after(self, length: int, question_length: int, evictions: int = 0) -> int:
        """Return the rows left by an eviction at `length` rows: DynTS's released rule with its rounding."""
        outside = max(0, length - self._on_top(question_length) - self.local_window)  # rows that the ratio cuts
        return length - outside + int(outside * self.keep_ratio)

    def select(self, view: CacheView) -> Selection:
        """Keep the `newest_kept` newest rows and the highest scores of the others; position breaks ties."""
        # The rows before the newest compete. A question on top does so even if it is among the newest: its scores are
        # infinite.
        competing = max(self._on_top(view.question_length), view.length - self.newest_kept)
        scores = _checked(self.ranking(view), view, competing)
        kept = self.length_after(view.length, view.question_length, view.evictions)
        count = kept - (view.length - competing)  # rows to keep of those that compete
        ranked = scores.sort(dim=-1, descending=True, stable=True).indices
        best = ranked[..., :count].sort(dim=-1).values
        newest = torch.arange(competing, view.length, device=best.device).expand(*best.shape[:-1], -1)
        return Selection(keep=torch.cat([best, newest], dim=-1), written=self.written(view))

    def ranking(self, view: CacheView) -> Tensor:
        """Return the scores, infinite at sinks and at prompt tokens that stay."""
        scores = self.scores(view)
        _check_shape(scores, view)
        scores = scores if scores.is_floating_point() else scores.double()  # pinned rows become infinite below
        pinned = view.question_length if self.question_rule != "free" else 0
        positions = view.positions[..., : scores.shape[-1]]
        return scores.masked_fill(positions < max(pinned, self.sinks_kept), float("inf"))

    @property
    def newest_kept(self) -> int:
        return self.local_window

    @property
    def size(self) -> int:
        """Rows that stay of budget + 1 rows, not counting a question on top."""
        return self.local_window + int((self.budget + 1 - self.local_window) * self.keep_ratio)

    @abstractmethod
    def scores(self, view: CacheView) -> Tensor:
        """Return the importance of each row: higher scores stay, infinity pins the row.

        Shape [length], or [layers, kv_heads, length] with `per_head`; the `newest_kept` newest rows may be left out.
        """

    def written(self, view: CacheView) -> Mapping[Signal, Tensor]:
        """Return numbers to store with the rows (`Selection.written`)."""
        return {}

    def _on_top(self, question_length: int) -> int:
        return question_length if self.question_rule == "on_top" else 0


@dataclass(frozen=True, kw_only=True)
class HeadPolicy(BudgetPolicy):
    """A policy with scores [layers, kv_heads, length]: each layer and key head keeps different rows."""

    per_head = True


@dataclass(frozen=True, kw_only=True)
class SizeInRows:
    """A policy's size in another form: an eviction leaves `rows` rows, and the next comes `every` tokens later."""

    rows: Annotated[int, Field(ge=1, strict=True)]
    every: Annotated[int, Field(ge=1, strict=True)]
    local_window: Annotated[int, Field(ge=1, strict=True)]

    def __post_init__(self) -> None:
        if self.rows <= self.local_window:
            raise UserError(
                f"policy.rows={self.rows} leaves no row beside policy.local_window={self.local_window}: "
                "choose more rows or a smaller window."
            )

    def settings(self) -> dict[str, Any]:
        """Return the budget, and the keep_ratio with the fewest digits for which an eviction leaves exactly `rows`."""
        # `BudgetPolicy.length_after` in reverse: of budget + 1 rows, those outside the window are cut by the ratio. An
        # eviction leaves `rows`, and the next one comes at budget + 1 again.
        budget = self.rows + self.every
        kept = self.rows - self.local_window
        outside = budget + 1 - self.local_window
        for digits in itertools.count(1):
            ratio = math.ceil(kept / outside * 10**digits) / 10**digits
            if int(outside * ratio) == kept:
                break
        return {"keep_ratio": ratio, "budget": budget}
