"""Try a policy on small seeded caches before a sweep; each fault of its code is named in one sentence."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

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
    SelectionError,
    Signal,
    checked_capacity,
)
from kvsweep.compression.recorders import decayed_mass
from kvsweep.compression.selection import UNLIKE, selected
from kvsweep.messages.errors import UserError

HEAD_DIM = 8
_LONG = 2048  # tokens
_SEPARATORS = (0, 1, 2)  # token ids of the 50 in the caches


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
        if trigger is None:
            return None
        return max(trigger, self.question) + 1

    @property
    def promised(self) -> int | None:
        """The most rows that may stay; None if the policy does not say."""
        if not isinstance(self.policy, BudgetPolicy) or self.length is None:
            return None
        return self.policy.length_after(self.length, self.question, self.evictions)

    def view(self) -> CacheView:
        """The view of the cache, built again from the same numbers at each call."""
        length = int(self.length or 0)
        generator = torch.Generator().manual_seed(20240)
        gaps = self.evictions * length // 2  # positions behind the question whose tokens were evicted
        is_generated = torch.arange(length) >= self.question
        places = torch.arange(length) + gaps * is_generated
        text_ids = torch.randint(50, (length + gaps + 1,), generator=generator)  # the last token is not fed yet

        def drawn(heads: int) -> Tensor:
            rows = torch.randn(self.layers, heads, length, HEAD_DIM, generator=generator)
            if self.equal:
                return torch.ones_like(rows)
            return rows

        keys, values, queries = map(drawn, (self.kv_heads, self.kv_heads, self.kv_heads * self.group))
        positions = places
        if self.policy.per_head:
            positions = places.repeat(self.layers, self.kv_heads, 1)
        token_ids = text_ids[positions]
        return CacheView(
            problem_id=self.problem_id,
            draw=self.draw,
            text_ids=text_ids,
            positions=positions,
            token_ids=token_ids,
            question_length=self.question,
            answer_start=None,
            keys=list(keys),
            values=list(values),
            scaling=HEAD_DIM**-0.5,
            signals={signal: self._recorded(signal, places, keys, queries) for signal in self.policy.signals},
            separating=lambda: torch.isin(token_ids, torch.tensor(_SEPARATORS)),
            uniform=lambda: torch.rand(positions.shape, generator=torch.Generator().manual_seed(7)),
            evictions=self.evictions,
        )

    def _recorded(self, signal: Signal, positions: Tensor, keys: Tensor, queries: Tensor) -> Tensor:
        """Return what a signal's recorder would hold for these rows; random if the rows do not determine it.

        `positions` are [length], `keys` and `queries` [layers, heads, length, head_dim].
        """
        shape = keys.shape[:-1]
        drawn = torch.rand(shape, generator=torch.Generator().manual_seed(3))
        if self.equal:
            drawn = torch.ones(shape)
        match signal:
            case PredictedImportance():
                # The step that feeds the prompt's last token is the first to score.
                scores = torch.where(positions < self.question - 1, torch.nan, drawn[0, 0])
                if self.policy.per_head:
                    return scores.expand(shape)
                return scores
            case AttentionMass(decay=decay):
                layers = zip(queries, keys, strict=True)
                masses = [decayed_mass(query, key, scaling=HEAD_DIM**-0.5, decay=decay) for query, key in layers]
                return torch.stack(masses)
            case RecentQueries(window=window):
                return queries[:, :, -window:].clone()
            case LastUse():
                # Each row was used once behind its own position, so its pause and its last use are drawn together.
                pause = ((positions[-1] - positions) * drawn).int()
                return torch.stack([positions.int() + pause, pause])
            case RowMemory():
                # Rows written after the latest eviction have no number yet.
                return torch.where(positions < positions[-1] - self.question, drawn, torch.nan)
        raise UserError(
            f"policy={self.policy.name}: signal {type(signal).__name__} has a recorder of your own, "
            "which these caches do not have: try the policy in a sweep with benchmark.limit=1."
        )


def trials(policy: Policy) -> list[Trial]:
    """One layer, several, many heads, ties, a second eviction, tiny, long: caches at the policy's trigger."""
    if policy.trigger(1) is None:
        raise UserError(f"policy={policy.name} never evicts: there is nothing to check.")
    caches = [
        Trial("one_layer", policy, layers=1, kv_heads=1, group=1),
        Trial("several_layers", policy),
        Trial("many_heads", policy, layers=2, kv_heads=5, group=3),
        Trial("ties", policy, equal=True),
        Trial("second_eviction", policy, evictions=1),
    ]
    if isinstance(policy, BudgetPolicy):
        for power in range(3, 12):  # the smallest budget from 8 to 2048 with which the policy can be made
            smallest = _sized(policy, 2**power)
            if smallest:
                caches.append(Trial("tiny", smallest, question=2))
                break
        largest = _sized(policy, _LONG)
        if largest:
            caches.append(Trial("long", largest))
    return caches


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
            raise _fault(trial, UNLIKE)
    return kept


def _select(trial: Trial) -> Tensor:
    """Return the rows that the policy keeps of a trial's cache; UserError for a fault."""
    view = trial.view()
    try:
        selection = selected(trial.policy, view)
    except SelectionError as error:
        raise _fault(trial, str(error).rstrip(".")) from error
    # A policy may also write numbers of a signal for each row, which its next eviction reads.
    shape = [trial.layers, trial.kv_heads, view.length]
    for signal, numbers in selection.written.items():
        if list(numbers.shape) != shape:
            raise _fault(trial, f"written[{signal}] must be {shape}: it is {list(numbers.shape)}")
    rows = selection.keep.shape[-1]
    if trial.promised is not None and rows > trial.promised:
        raise _fault(trial, f"it keeps {rows} rows where length_after promises {trial.promised}")
    return selection.keep


def _fault(trial: Trial, sentence: str) -> UserError:
    return UserError(
        f"policy={trial.policy.name} on the cache {trial.name} ({trial.layers} layers, {trial.kv_heads} key heads, "
        f"{trial.length} cached tokens): {sentence}."
    )
