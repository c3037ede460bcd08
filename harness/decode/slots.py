"""The slot table: the sequence in each slot, and the numbers that decoding keeps per slot."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers.cache_utils import DynamicCache

from kvsweep.compression.cache import SlotCache
from kvsweep.compression.cache_rows import PaddedPrefill, Prefill
from kvsweep.compression.policy import CacheView, Policy, Signal
from kvsweep.compression.slots import Chunks, uploaded
from kvsweep.harness.decode.request import Branch, Request
from kvsweep.harness.decode.sampling import sequence_key, uniforms_of_rows
from kvsweep.harness.models.loaded import LoadedModel
from kvsweep.run_files.loops import LEAST_REPEATS, LEAST_TOKENS
from kvsweep.run_files.row_types import Eviction

_NEVER = np.iinfo(np.int64).max


@dataclass
class SlotState:
    """The sequence in a slot: a single branch, or a trunk with the branches that have not forked yet."""

    request: Request
    branches: list[Branch]
    evictions: list[Eviction] = field(default_factory=list)

    @property
    def is_trunk(self) -> bool:
        return len(self.branches) > 1

    def trigger(self, branch: Branch) -> int:
        trigger = branch.policy.trigger(len(self.request.prompt_ids), len(self.evictions))
        return _NEVER if trigger is None else trigger


class EndFlags:
    """A flag per slot: true if the latest step ended its completion. The device sets it, the host reads it later."""

    def __init__(self, slots: int, device: torch.device) -> None:
        self.flags = torch.zeros(slots, dtype=torch.bool, device=device)
        self._event = torch.cuda.Event() if device.type == "cuda" else None
        self._on_host = torch.zeros(slots, dtype=torch.bool, pin_memory=self._event is not None)
        self._live = 0

    def send(self, live: int) -> None:
        """Start copying the flags of the live slots to the host."""
        self._live = live
        self._on_host[:live].copy_(self.flags[:live], non_blocking=True)
        if self._event is not None:
            self._event.record()

    def read(self) -> Any:
        """Wait for the flags that were sent last; return them, [live]."""
        if self._event is not None:
            self._event.synchronize()
        return self._on_host[: self._live].numpy()


class SlotTable:
    """The sequences in a cache's slots, and columns of the numbers that decoding keeps per slot.

    Slots 0 to `cache.live` - 1 decode. A trunk that waits for a free slot to fork into is parked at the upper end,
    below the `waiting` trunks parked before it. The slots in between are free.

    On the host: `generated`, the tokens written; `forced`, the number of first tokens that the request gives; `limits`,
    the length at which the completion is truncated; `triggers`, the cache length at which the next step evicts. On the
    device: `tokens` and `positions` to feed next; `streams`, the keys of random numbers; `written` [slots,
    max_new_tokens], with a request's given tokens from the start; `counts`, equal to `generated`; `ends`; `broken`,
    true if the newest token's logits were not finite; `agreeing` [slots, periods]: for each period of a loop, how many
    last tokens equal the token one period earlier.
    """

    def __init__(self, cache: SlotCache, *, max_new_tokens: int, find_loops: bool) -> None:
        self.cache = cache
        self.slots = cache.slots
        self.waiting = 0
        self._states = np.full(cache.slots, None)  # an array of objects, which moves like the other columns
        # Three columns on the host, [slots] each, and four on the device.
        self.generated, self.forced, self.limits = np.zeros((3, cache.slots), dtype=np.int64)
        self.triggers = np.full(cache.slots, _NEVER)
        device = cache.slot_ids.device
        numbers = [torch.zeros_like(cache.slot_ids) for _ in range(4)]
        self.tokens, self.positions, self.streams, self.counts = numbers
        self.written = torch.zeros(cache.slots, max_new_tokens, dtype=torch.int64, device=device)
        self.ends = EndFlags(cache.slots, device)
        self.broken = torch.zeros(cache.slots, dtype=torch.bool, device=device)
        longest_period = max_new_tokens // LEAST_REPEATS if find_loops else 0
        self._periods = torch.arange(1, longest_period + 1, device=device)
        self.agreeing = torch.zeros(cache.slots, len(self._periods), dtype=torch.int64, device=device)
        on_host = self.generated, self.forced, self.limits, self.triggers
        self.tensors = (*numbers, self.written, self.ends.flags, self.broken, self.agreeing)
        self._columns: tuple[Any, ...] = (self._states, *on_host, *self.tensors)

    def __getitem__(self, slot: int) -> SlotState:
        state: SlotState = self._states[slot]
        return state

    @property
    def free(self) -> int:
        return self.slots - self.cache.live - self.waiting

    def due(self) -> np.ndarray:
        """Return a mask of live slots with a length that had reached the trigger before the latest step, [live]."""
        live = self.cache.live
        # The step must have fed a generated token, so an overlong prompt is not evicted before the first one.
        return (self.cache.lengths[:live] - 1 >= self.triggers[:live]) & (self.generated[:live] > 1)

    def room(self, slot: int) -> int:
        """Return the tokens that a slot can be fed until it is due, the last included."""
        # It is due once its length exceeds the trigger and two tokens are generated (`due`). A step feeds at least one.
        return max(int(self.triggers[slot]) + 1 - int(self.cache.lengths[slot]), 2 - int(self.generated[slot]), 1)

    def full(self) -> np.ndarray:
        """Return a mask of live slots at their length limit, [live]."""
        return self.generated[: self.cache.live] >= self.limits[: self.cache.live]

    def has_room(self, request: Request) -> bool:
        """True if a slot is free and, for a request of several branches, the branches will find slots to fork into.

        Trunks take at most half of the slots, and none starts while the table has enough branches to fill every slot.
        """
        if not self.free:
            return False
        if len(request.branches) == 1:  # it never forks
            return True
        occupied = [*range(self.cache.live), *range(self.slots - self.waiting, self.slots)]  # by live and parked ones
        trunks = [state for state in map(self.__getitem__, occupied) if state.is_trunk]
        unforked = sum(len(trunk.branches) - 1 for trunk in trunks)
        return len(trunks) < max(1, self.slots // 2) and unforked < self.slots

    def admit(self, request: Request, prefill: Prefill, *, stream: int) -> int:
        """Start a request with a prefilled prompt; the next step feeds the prompt's last token. Return the slot."""
        slot = self.cache.admit(prefill)
        self._seat(slot, SlotState(request, list(request.branches)))
        self.generated[slot], self.counts[slot] = 0, 0
        self.forced[slot] = len(request.forced)
        self.limits[slot] = len(request.forced) if request.replayed else self.written.shape[1]  # max_new_tokens
        self.written[slot, : len(request.forced)] = uploaded(request.forced, self.written.device)
        self.tokens[slot] = request.prompt_ids[-1]
        self.positions[slot] = len(request.prefilled_ids)
        self.streams[slot] = stream
        self.agreeing[slot] = 0
        self.broken[slot] = False
        return slot

    def append(self, drawn: Tensor) -> Tensor:
        """Write each live slot's drawn token, [live], or its given token; return the written tokens, [live]."""
        live = self.cache.live
        rows = self.cache.slot_ids[:live]
        counts = self.counts[:live]
        is_given = self.generated[:live] < self.forced[:live]
        if is_given.any():  # the host knows, so most steps launch no `where`
            given = uploaded(is_given.tolist(), drawn.device).bool()
            drawn = torch.where(given, self.written[rows, counts], drawn)
        self.written[rows, counts] = drawn
        self.tokens[:live] = drawn
        counts += 1  # in the table too
        self.generated[:live] += 1
        return drawn

    def extend(self, chunks: Chunks, ids: Tensor) -> None:
        """Write known tokens, `ids` [tokens]; all of a slot's tokens but the last have been fed."""
        self.written[chunks.slot_of, chunks.places(self.counts)] = ids
        self.tokens[chunks.slots] = ids[chunks.starts + chunks.sizes - 1]
        self.positions[chunks.slots] += chunks.sizes
        self.counts[chunks.slots] += chunks.sizes
        for slot, count in chunks.counts.items():
            self.generated[slot] += count
            if len(self._periods):  # loops are looked for
                self._count_agreeing(slice(slot, slot + 1), count)

    def looping(self) -> Tensor:
        """Count the newest tokens for loops; return which live completions loop (`loops.find_loop`), [live]."""
        live = slice(self.cache.live)
        self._count_agreeing(live, 1)
        needed = (LEAST_REPEATS * self._periods).clamp(min=LEAST_TOKENS)
        # The first period of a loop agrees with nothing before it, and counts too.
        return (self.agreeing[live] + self._periods >= needed).any(-1)

    def _count_agreeing(self, slots: slice, count: int) -> None:
        """Count the newest `count` tokens of the slots for loops."""
        # Columns of the newest tokens in `written`, newest first, [slots, count]; and those a period earlier.
        newest = self.counts[slots, None] - 1 - torch.arange(count, device=self.counts.device)
        earlier = newest[..., None] - self._periods  # [slots, count, periods]; negative before the text
        rows = self.cache.slot_ids[slots, None]
        equal = self.written[rows, newest][..., None] == self.written[rows[..., None], earlier.clamp(min=0)]
        unbroken = (equal & (earlier >= 0)).long().cumprod(dim=1)  # 1 up to the first token that differs, then 0
        # The count goes on from before only if all `count` tokens agree.
        self.agreeing[slots] = unbroken.sum(dim=1) + self.agreeing[slots] * unbroken[:, -1]

    def add_eviction(self, slot: int, eviction: Eviction) -> None:
        """Record an eviction of a slot, and set the slot's next trigger."""
        self[slot].evictions.append(eviction)
        self._seat(slot, self[slot])

    def text(self, slot: int) -> Tensor:  # [generated]
        return self.written[slot, : self.generated[slot]]

    def release(self, slot: int) -> None:
        """End a live slot's sequence, and move the last live slot into its place."""
        self.cache.live -= 1
        if slot != self.cache.live:
            self._copy(self.cache.live, slot)

    def park(self, slot: int) -> None:
        """Move a trunk from the live slots to the upper end, where it waits to fork."""
        last = self.cache.live - 1
        upper = self.slots - self.waiting - 1  # if no slot is free, the last live slot
        self._copy([slot, last], [upper, slot])
        self.cache.live -= 1
        self.waiting += 1

    def fork(self) -> int | None:
        """Make a due branch of the lowest parked trunk live, or the whole trunk if none is due; return its slot.

        None if no slot is free for the branch, and other branches still need the trunk.
        """
        parked = self.slots - self.waiting
        slot = self.cache.live
        trunk = self[parked]
        # As in `due`; that the trunk has fed a generated token was true when it was parked.
        due = [branch for branch in trunk.branches if self.cache.lengths[parked] > trunk.trigger(branch)]
        if due and trunk.is_trunk:  # a copy of the trunk becomes the branch
            if not self.free:
                return None
            self._copy(parked, slot)
            trunk.branches.remove(due[0])
            self._seat(parked, trunk)  # its trigger is that of the branches that remain
            self._seat(slot, SlotState(trunk.request, due[:1]))
        else:  # the trunk itself becomes live, whole or with its last branch
            if self.free:  # else `parked` is the slot behind the live ones already
                self._copy(parked, slot)
            self.waiting -= 1
        self.cache.live += 1
        return slot

    def _seat(self, slot: int, state: SlotState) -> None:
        self._states[slot] = state
        self.triggers[slot] = min(map(state.trigger, state.branches))

    def _copy(self, sources: int | list[int], targets: int | list[int]) -> None:
        self.cache.copy(sources, targets)
        for column in self._columns:
            column[targets] = column[sources]


def view_slot(
    model: LoadedModel, cache: SlotCache, slot: int, policy: Policy, *, text_ids: Tensor, seed: int, **named: Any
) -> CacheView:
    """Return the view of a slot from which its policy selects.

    `text_ids` [text length] is prompt and completion so far; the last token is not fed yet. `named` has the fields of
    `CacheView` that a cache does not know.
    """
    # Another stream than the one that drew the tokens, so that the policy does not repeat its numbers.
    stream = sequence_key(seed, named["problem_id"], named["draw"], "select", named["evictions"])
    length = int(cache.lengths[slot])
    positions = cache.positions[slot, ..., :length]
    if not policy.per_head:
        positions = positions[0, 0]  # alike in all layers and heads
    token_ids = text_ids[positions]
    newest = len(text_ids) - 2  # the position of the last token that was fed
    signals = dict[Signal, Tensor]()
    for signal in policy.signals:
        recorder = cache.recorders[signal]
        recorded = recorder.read(slot, length, newest)
        # What is recorded of a token, as its position, is alike in all layers and heads.
        signals[signal] = recorded[0, 0] if recorder.of_tokens and not policy.per_head else recorded
    return CacheView(
        text_ids=text_ids,
        positions=positions,
        token_ids=token_ids,
        separating=lambda: model.separators[token_ids],
        keys=_Layers(cache, slot, 0),
        values=_Layers(cache, slot, 1),
        scaling=model.scaling,
        signals=signals,
        uniform=lambda: uniforms_of_rows(stream, positions),
        operations=cache.operations,
        **named,
    )


class _Layers(Sequence[Tensor]):
    """Each layer's keys (0) or values (1) of a slot, read on demand, since most policies read few of them."""

    def __init__(self, cache: SlotCache, slot: int, which: int) -> None:
        self.cache, self.slot, self.which = cache, slot, which
        self.length = int(cache.lengths[slot])

    def __len__(self) -> int:
        return len(self.cache.slot_layers)

    def __getitem__(self, layer: Any) -> Any:
        # A range resolves a negative index, and raises IndexError, which ends a loop over the layers.
        index = range(len(self))[layer]
        if isinstance(index, range):
            return [self[i] for i in index]
        return self.cache.storage.read(index, self.slot, self.length)[self.which]


# Enough tokens to keep the processor busy, few enough that the decoding slots hardly wait.
STEP_TOKENS = 2048
_Ids = tuple[int, ...]


class Prefiller:
    """Prefills at most `step_tokens` tokens per call: several short prompts together, or a chunk of a long one.

    A call's tokens include padding. A problem's draws and cells share one prefill. `keep_queries`: true if a recorder
    needs the prompts' queries. `alone`: prefill each prompt alone, because its rows must not depend on other prompts
    (products may round differently), or because linear layers would read the padding.
    """

    def __init__(self, model: LoadedModel, *, keep_queries: bool, alone: bool) -> None:
        self.model = model
        self.keep_queries = keep_queries
        self.alone = alone
        self.step_tokens = STEP_TOKENS
        self.done: dict[_Ids, Prefill] = {(): Prefill()}  # nothing is prefilled of a prompt of one token
        self._begun: tuple[_Ids, Prefill, DynamicCache] | None = None  # a long prompt, until its last chunk

    def keep(self, wanted: Iterable[_Ids]) -> None:
        wanted = {(), *wanted}
        self.done = {ids: prefill for ids, prefill in self.done.items() if ids in wanted}

    def advance(self, wanted: Iterable[_Ids]) -> None:
        """Prefill as many tokens as one call may, from the wanted prompts that are not done, in order."""
        missing = [ids for ids in dict.fromkeys(wanted) if ids not in self.done]
        if not missing:
            return
        if self._begun is None and len(missing[0]) > self.step_tokens:
            self._begun = missing[0], Prefill(keep_queries=self.keep_queries), self.model.new_cache()
        if self._begun is not None:
            ids, prefill, cache = self._begun
            start = prefill.length
            prefill.begin_chunk()
            chunk = torch.tensor([ids[start : start + self.step_tokens]], device=self.model.device)
            self.model.read(chunk, start, prefill, cache)
            if prefill.length == len(ids):
                self.done[ids], self._begun = prefill, None
            return
        # The first `number` prompts take `number * width` tokens with padding: the longest of them is the width.
        widths = accumulate(map(len, missing), max)
        # How many prompts fit: these tokens only grow with the number.
        count = max(1, sum(number * width <= self.step_tokens for number, width in enumerate(widths, start=1)))
        batches = [[ids] for ids in missing[:count]] if self.alone else [missing[:count]]
        for prompts in batches:
            prefills = [Prefill(keep_queries=self.keep_queries) for _ in prompts]
            padded = pad_sequence([torch.tensor(ids) for ids in prompts], batch_first=True).to(self.model.device)
            self.model.read(padded, 0, PaddedPrefill(prefills, list(map(len, prompts))), self.model.new_cache())
            self.done.update(zip(prompts, prefills, strict=True))
