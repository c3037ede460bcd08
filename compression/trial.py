"""Try a policy on small seeded caches before a sweep; each fault of its code is named in one sentence."""

import inspect
import itertools
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvsweep.compression.policy import (
    AttentionMass,
    BudgetPolicy,
    CacheView,
    LastUse,
    Policy,
    PredictedImportance,
    RecentQueries,
    RowMemory,
    Selection,
    SelectionError,
    Signal,
    check_selection,
    checked_capacity,
)
from kvsweep.compression.recorders import decayed_mass
from kvsweep.errors import UserError

HEAD_DIM = 8
_LONG = 2048  # tokens
_SEPARATORS = (0, 1, 2)  # token ids of the 50 in the caches
_UNLIKE = "two evictions of equal caches keep different rows: take all numbers from the view"
_TENSORS = ("text_ids", "positions", "token_ids", "keys", "values", "signals")


class Trial(NamedTuple):
    """A cache to try a policy on: its name, shape and numbers; `evictions` earlier evictions have left gaps."""

    name: str
    policy: Policy
    layers: int = 3
    kv_heads: int = 2
    group: int = 2  # query heads of a key head
    question: int = 12  # tokens
    evictions: int = 0
    equal: bool = False  # True if all keys, values and queries are equal
    problem_id: str = "trial"
    draw: int = 0

    @property
    def length(self) -> int | None:
        """Cached tokens at which the policy evicts; None if it never does."""
        trigger = self.policy.trigger(self.question, self.evictions)
        return None if trigger is None else max(trigger, self.question) + 1

    @property
    def promised(self) -> int | None:
        """The most rows that may stay; None if the policy does not say."""
        if not isinstance(self.policy, BudgetPolicy) or self.length is None:
            return None
        return self.policy.length_after(self.length, self.question, self.evictions)

    def arrays(self) -> dict[str, Tensor]:
        """Return keys and values [layers, kv_heads, length, head_dim], queries of every row, positions, token ids."""
        length, numbers = int(self.length or 0), torch.Generator().manual_seed(20240)
        gaps = self.evictions * length // 2  # the oldest tokens behind the question are evicted
        late = torch.arange(length) >= self.question
        positions = torch.arange(length) + gaps * late

        def drawn(heads: int) -> Tensor:
            found = torch.randn(self.layers, heads, length, HEAD_DIM, generator=numbers)
            return torch.ones_like(found) if self.equal else found

        token_ids = torch.randint(50, (length + gaps + 1,), generator=numbers)
        return {
            "keys": drawn(self.kv_heads),
            "values": drawn(self.kv_heads),
            "queries": drawn(self.kv_heads * self.group),
            "positions": positions,
            "text_ids": token_ids,
            "token_ids": token_ids[positions],
        }

    def view(self) -> CacheView:
        """The view of the cache, built again from the same numbers at each call."""
        arrays = self.arrays()
        positions, token_ids = arrays["positions"], arrays["token_ids"]
        if self.policy.per_head:
            positions = positions.repeat(self.layers, self.kv_heads, 1)
            token_ids = token_ids.repeat(self.layers, self.kv_heads, 1)
        return CacheView(
            problem_id=self.problem_id,
            draw=self.draw,
            text_ids=arrays["text_ids"],
            positions=positions,
            token_ids=token_ids,
            question_length=self.question,
            answer_start=None,
            keys=list(arrays["keys"]),
            values=list(arrays["values"]),
            scaling=HEAD_DIM**-0.5,
            signals={signal: self._recorded(signal, arrays) for signal in self.policy.signals},
            separating=lambda: torch.isin(token_ids, torch.tensor(_SEPARATORS)),
            uniform=lambda: torch.rand(positions.shape, generator=torch.Generator().manual_seed(7)),
            evictions=self.evictions,
        )

    def _recorded(self, signal: Signal, found: Mapping[str, Tensor]) -> Tensor:
        """Return what a signal's recorder would hold for these rows; random if the rows do not determine it."""
        numbers, shape = torch.Generator().manual_seed(3), found["keys"].shape[:-1]
        positions, drawn = found["positions"], torch.rand(shape, generator=numbers)
        drawn = torch.ones_like(drawn) if self.equal else drawn
        match signal:
            case PredictedImportance():
                scores = torch.where(positions < self.question - 1, torch.nan, drawn[0, 0])
                return scores.expand(shape) if self.policy.per_head else scores
            case AttentionMass(decay=decay):
                pairs = zip(found["queries"], found["keys"], strict=True)
                return torch.stack([decayed_mass(q, k, scaling=HEAD_DIM**-0.5, decay=decay) for q, k in pairs])
            case RecentQueries(window=window):
                return found["queries"][:, :, -window:].clone()
            case LastUse():
                pause = ((positions[-1] - positions) * drawn).int()
                return torch.stack([positions.int() + pause, pause])
            case RowMemory():
                # Rows written after the latest eviction have no number yet.
                return torch.where(positions < positions[-1] - self.question, drawn, torch.nan * torch.ones(()))
        own = f"signal {type(signal).__name__} has a recorder of your own, which these caches do not have"
        raise UserError(f"policy={self.policy.name}: {own}: try the policy in a sweep with benchmark.limit=1.")


def trials(policy: Policy) -> list[Trial]:
    """One layer, several, many heads, ties, a second eviction, tiny, long: caches at the policy's trigger."""
    if policy.trigger(1) is None:
        raise UserError(f"policy={policy.name} never evicts: there is nothing to check.")
    found = [
        Trial("one_layer", policy, layers=1, kv_heads=1, group=1),
        Trial("several_layers", policy),
        Trial("many_heads", policy, layers=2, kv_heads=5, group=3),
        Trial("ties", policy, equal=True),
        Trial("second_eviction", policy, evictions=1),
    ]
    if isinstance(policy, BudgetPolicy):
        tiny = (_sized(policy, 2**power) for power in range(3, 12))
        found += [Trial("tiny", one, question=2) for one in tiny if one][:1]
        found += [Trial("long", one) for one in [_sized(policy, _LONG)] if one]
    return found


def _sized(policy: BudgetPolicy, budget: int) -> BudgetPolicy | None:
    """Return the policy with another budget and a window that fits; None if its other settings do not fit."""
    try:
        return replace(policy, budget=budget, local_window=min(policy.local_window, budget // 4))
    except (UserError, ValueError):  # the user's code may raise either
        return None


def check(tried: Sequence[Trial]) -> dict[str, Tensor]:
    """Return the rows that the policy keeps of each cache, by name; raises UserError at the first fault.

    Each cache is tried twice, the second time in another order and behind other problems' caches: the kept rows may
    depend only on the view.
    """
    for trial in tried:
        checked_capacity(trial.policy, trial.question, _LONG)
    kept = {trial.name: _select(trial) for trial in tried}
    for trial, draw in itertools.product(tried, range(2)):
        _select(trial._replace(problem_id="another trial", draw=draw))
    for trial in reversed(tried):
        if not torch.equal(kept[trial.name], _select(trial)):
            raise _fault(trial, _UNLIKE)
    return kept


def selected(policy: Policy, view: CacheView) -> Selection:
    """Let a user's policy select, whose code may do anything.

    Raises SelectionError for each error in it, for a selection that names no rows, and for a view that it changes.
    """
    before = {name: _copied(getattr(view, name)) for name in _TENSORS}
    try:
        selection = policy.select(view)
    except SelectionError:
        raise
    except Exception as error:
        raise SelectionError(f"{_place(error, policy)} raises {type(error).__name__}: {error}"[:400]) from error
    if not isinstance(selection, Selection):
        raise SelectionError(f"select returned a {type(selection).__name__}: return a Selection.")
    check_selection(selection, view)
    if changed := [name for name, kept in before.items() if not _equal(getattr(view, name), kept)]:
        raise SelectionError(f"it changes view.{changed[0]} in place: work on a copy (clone)")
    return selection


def selected_alike(policy: Policy, view: CacheView) -> Selection:
    """Let a user's policy select twice; raises SelectionError if the rows do not depend on the view alone."""
    selection = selected(policy, view)
    if not torch.equal(selection.keep, selected(policy, view).keep):
        raise SelectionError(_UNLIKE)
    return selection


def check_room(selection: Selection, capacity: int) -> None:
    """Raise SelectionError if the next token has no row in the capacity that a policy promises."""
    if (kept := selection.keep.shape[-1]) >= capacity:
        raise SelectionError(
            f"it keeps {kept} rows, and capacity() returns {capacity}: keep fewer, so that the next token has a row."
        )


def _select(trial: Trial) -> Tensor:
    view = trial.view()
    try:
        selection = selected(trial.policy, view)
    except SelectionError as error:
        raise _fault(trial, str(error).rstrip(".")) from error
    for signal, numbers in selection.written.items():
        if tuple(numbers.shape) != (shape := (trial.layers, trial.kv_heads, view.length)):
            raise _fault(trial, f"written[{signal}] must be {list(shape)}: it is {list(numbers.shape)}")
    if trial.promised is not None and selection.keep.shape[-1] > trial.promised:
        raise _fault(trial, f"it keeps {selection.keep.shape[-1]} rows where length_after promises {trial.promised}")
    return selection.keep


def _fault(trial: Trial, sentence: str) -> UserError:
    cache = f"{trial.layers} layers, {trial.kv_heads} key heads, {trial.length} cached tokens"
    return UserError(f"policy={trial.policy.name} on the cache {trial.name} ({cache}): {sentence}.")


def _place(error: Exception, policy: Policy) -> str:
    """Return the last line of the policy's own files in the traceback, or the traceback's last line."""
    frames = traceback.extract_tb(error.__traceback__)
    files = {inspect.getsourcefile(cls) for cls in type(policy).__mro__ if issubclass(cls, Policy)} - {
        inspect.getsourcefile(Policy)
    }
    frame = ([one for one in frames if one.filename in files] or frames)[-1]
    return f"{frame.filename.rpartition('/')[2]}, line {frame.lineno}"


def _copied(value: Any) -> Any:
    """Return a copy of a tensor, or of all tensors of a list or a mapping."""
    if torch.is_tensor(value):
        return value.clone()
    if isinstance(value, Mapping):
        return {name: _copied(one) for name, one in value.items()}
    return [_copied(one) for one in value]


def _equal(ours: Any, theirs: Any) -> bool:
    """True if tensors, or all tensors of two lists or mappings, are equal; NaN equals NaN."""
    if torch.is_tensor(ours):
        return ours.shape == theirs.shape and torch.equal(ours.nan_to_num(-1e9), theirs.nan_to_num(-1e9))
    pairs: Iterable[tuple[Any, Any]] = zip(ours, theirs, strict=False)
    if isinstance(ours, Mapping):
        pairs = ((numbers, theirs[name]) for name, numbers in ours.items())
    return len(ours) == len(theirs) and all(_equal(one, other) for one, other in pairs)
