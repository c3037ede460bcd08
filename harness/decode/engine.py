"""Decoding over slots: continuous batching in which each sequence is evicted alone, by its own policy.

A policy says what to keep, the cache moves it, the engine says when.
"""

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from analysis.records import Completion, Eviction
from compression.cache import SlotCache
from compression.policy import CacheView, Policy
from harness.decode.clock import Clock
from harness.decode.graphs import StepGraphs
from harness.decode.prefill import Prefiller
from harness.decode.request import Branch, DecodingConfig, Request, _one_by_one, auto_slots, needed_capacity
from harness.decode.sampling import sample, sequence_key, uniform, uniforms_of_rows
from harness.models.load import LoadedModel
from kernels.implementation import Implementation

_NEVER = np.iinfo(np.int64).max


class _Ends:
    """Which slots the latest step ended: told by the device, and read by the host when it likes."""

    def __init__(self, slots: int, device: torch.device) -> None:
        self.flags = torch.zeros(slots, dtype=torch.bool, device=device)
        self._event = torch.cuda.Event() if device.type == "cuda" else None
        self._told = torch.zeros(slots, dtype=torch.bool, pin_memory=self._event is not None)
        self._live = 0

    def send(self, live: int) -> None:
        """Begin to bring the flags of the live slots to the host."""
        self._live = live
        self._told[:live].copy_(self.flags[:live], non_blocking=True)
        if self._event is not None:
            self._event.record()

    def read(self) -> Any:
        """The flags last sent, [live], once they have come."""
        if self._event is not None:
            self._event.synchronize()
        return self._told[: self._live].numpy()


@dataclass
class _Sequence:
    """What a slot holds: a branch, or a trunk with the branches that have not forked yet."""

    request: Request
    branches: list[Branch]
    evictions: list[Eviction] = field(default_factory=list)

    def trigger(self, branch: Branch) -> int:
        trigger = branch.policy.trigger(len(self.request.prompt_ids))
        return _NEVER if trigger is None else trigger


class Engine:
    """Writes completions for requests whose branches may each carry another policy.

    Slots from 0 up to `cache.live` decode. Trunks that wait for room to fork lie at the upper end, the latest lowest.

    On a GPU the host runs ahead: it starts a step before it has read which texts the one before ended. Such a text gets
    a token too many, which is dropped. It waits only where it must know, for an eviction and at the length limit.

    Args:
        model: what decodes.
        decoding: sampling and length limit.
        seed: first part of every sequence's random stream.
        slots: sequences decoded at once.
        capacity: rows per slot, at least what any request's policy asks for.
        policies: the policies of the requests to come; their signals are recorded.
        impl: what the cache computes with.
    """

    def __init__(
        self,
        model: LoadedModel,
        *,
        decoding: DecodingConfig,
        seed: int,
        slots: int,
        capacity: int,
        policies: Iterable[Policy],
        impl: Implementation = "torch",
    ) -> None:
        self.model, self.decoding, self.seed = model, decoding, seed
        device, policies = model.device, list(policies)
        self.clock = Clock(device)
        self.cache = SlotCache(
            model.shape,
            slots=slots,
            capacity=capacity,
            device=device,
            signals=dict.fromkeys(signal for policy in policies for signal in policy.signals),
            per_head=any(policy.per_head for policy in policies),
            impl=impl,
        )
        self.slots, self.waiting = slots, 0
        self.sequences: list[_Sequence | None] = [None] * slots
        self.stop_ids = torch.tensor(model.stop_ids, device=device)
        self.rows = torch.arange(slots, device=device)
        self.ends, self.unread = _Ends(slots, device), False
        self.ahead = device.type == "cuda"
        self.graphs: StepGraphs | None = None
        if StepGraphs.serve(model, self.cache):
            self.graphs = StepGraphs(self._decode, slots=slots, timer=partial(self.clock.time, "forward"))
        # Per slot, known to the host alone: tokens written, how many of the first are given, and the cache length that
        # makes the next step evict.
        self.generated = np.zeros(slots, dtype=np.int64)
        self.forced = np.zeros(slots, dtype=np.int64)
        self.triggers = np.full(slots, _NEVER)
        # Per slot, on the device: the token to feed, its position in the text, the random stream, the text so far, and
        # the tokens of it.
        self.tokens = torch.zeros(slots, dtype=torch.int64, device=device)
        self.positions = torch.zeros(slots, dtype=torch.int64, device=device)
        self.streams = torch.zeros(slots, dtype=torch.int64, device=device)
        self.written = torch.zeros(slots, decoding.max_new_tokens, dtype=torch.int64, device=device)
        self.counts = torch.zeros(slots, dtype=torch.int64, device=device)
        self.columns: tuple[Any, ...] = (
            self.generated,
            self.forced,
            self.triggers,
            self.tokens,
            self.positions,
            self.streams,
            self.written,
            self.counts,
            self.ends.flags,
        )
        self.prefiller = Prefiller(model, keep_queries=bool(self.cache.recorders))

    @classmethod
    def sized_for(
        cls,
        requests: Sequence[Request],
        model: LoadedModel,
        *,
        decoding: DecodingConfig,
        seed: int,
        slots: int | None = None,
        impl: Implementation = "torch",
    ) -> Self:
        """An engine with the capacity, the signals and, unless `slots` are given, the slots that the requests need."""
        capacity = needed_capacity(requests, decoding)
        branches = [branch for request in requests for branch in request.branches]
        return cls(
            model,
            decoding=decoding,
            seed=seed,
            slots=slots or auto_slots(model, capacity=capacity, requests=len(branches)).slots,
            capacity=capacity,
            policies=dict.fromkeys(branch.policy for branch in branches),
            impl=impl,
        )

    @torch.inference_mode()
    def generate(self, requests: Iterable[Request]) -> Iterator[tuple[str, Completion]]:
        """Yield (cell_id, completion) for every branch of every request, as they end."""
        queue = deque(requests if self.slots > 1 else _one_by_one(requests))
        while queue or self.cache.live or self.waiting:
            with self.clock.time("wall"):
                completions = self._step(queue)
            if not self.clock.first_token and self.clock.steps > self.unread:
                self.clock.first_token = self.clock.wall
            yield from completions

    def _step(self, queue: deque[Request]) -> list[tuple[str, Completion]]:
        """Fill the slots, write one token in each, evict; return the completions that are known to have ended."""
        self._fill(queue)
        if not self.cache.live:  # a long question is still being prefilled
            return []
        logits = self._forward()
        with self.clock.time("sampling"):
            self._sample(logits)
        completions = self._finish_ended(late=1) if self.unread else []
        self.ends.send(self.cache.live)
        self.unread = self.ahead and not (self._due().any() or self._cut().any())
        if not self.unread:
            completions += self._finish_ended(late=0)
            self._evict_due()
        self.clock.settle()
        return completions

    @property
    def free(self) -> int:
        """Slots that hold nothing."""
        return self.slots - self.cache.live - self.waiting

    def _fill(self, queue: deque[Request]) -> None:
        """Forks first, then new trunks: a trunk that waits holds a slot and does nothing."""
        while self.waiting and self._fork():
            pass
        if not (queue and self._has_room(queue[0])):
            return
        with self.clock.time("prefill"):
            self.prefiller.advance(request.question for request in itertools.islice(queue, self.free))
        while queue and queue[0].question in self.prefiller.done and self._has_room(queue[0]):
            self._admit(queue.popleft())
        self.prefiller.keep(request.question for request in itertools.islice(queue, self.slots))

    def _has_room(self, request: Request) -> bool:
        """Whether to begin a request now.

        Trunks never take more than half of the slots, so that forks always find room in the end; and no trunk begins
        while those under way hold enough branches to fill every slot.
        """
        if not self.free or len(request.branches) == 1:
            return self.free > 0
        seated = range(self.cache.live), range(self.slots - self.waiting, self.slots)
        trunks = [s for s in map(self._at, itertools.chain(*seated)) if len(s.branches) > 1]
        unforked = sum(len(s.branches) - 1 for s in trunks)
        return len(trunks) < max(1, self.slots // 2) and unforked < self.slots

    def _admit(self, request: Request) -> None:
        """Begin a request whose question is prefilled; its last token the next step feeds like any other."""
        with self.clock.time("prefill"):
            slot = self.cache.admit(self.prefiller.done[request.question])
        self._seat(slot, _Sequence(request, list(request.branches)))
        self.generated[slot], self.counts[slot], self.forced[slot] = 0, 0, len(request.forced)
        self.written[slot, : len(request.forced)] = torch.tensor(request.forced, dtype=torch.int64)
        self.tokens[slot] = request.prompt_ids[-1]
        self.positions[slot] = len(request.question)
        self.streams[slot] = sequence_key(self.seed, request.problem_id, request.draw)

    def _seat(self, slot: int, sequence: _Sequence) -> None:
        self.sequences[slot] = sequence
        self.triggers[slot] = min(map(sequence.trigger, sequence.branches))

    def _forward(self) -> Tensor:
        """Feed one token to every live slot; return logits [live, vocabulary]."""
        live = self.cache.live
        self.cache.count_step()
        if self.graphs is None:
            return self._decode(live)
        return self.graphs(live, room=self.slots - self.waiting)[:live]

    def _decode(self, rows: int) -> Tensor:
        """The device's part of `_forward` for the first slots, at least the live ones: what `StepGraphs` captures."""
        with self.clock.time("forward"):
            self.cache.place_step(self.positions[:rows])
            hidden = self.model.step_hidden(self.tokens[:rows], self.positions[:rows], self.cache)
            logits = self.model.logits(hidden)
        with self.clock.time("scoring"):
            self.cache.end_step(hidden)
        return logits

    def _due(self) -> Any:
        """Live slots whose length had reached their trigger before this step (the published rule), [live]."""
        live = self.cache.live
        # The token this step fed must be a generated one; an overlong question is evicted no earlier than that.
        return (self.cache.lengths[:live] - 1 >= self.triggers[:live]) & (self.generated[:live] > 1)

    def _cut(self) -> Any:
        """Live slots whose text is as long as it may be, [live]."""
        return self.generated[: self.cache.live] >= self.decoding.max_new_tokens

    def _evict_due(self) -> None:
        """Evict every slot that is due.

        A trunk is not evicted but parked, to fork. A text that this step ended is gone already: nobody would see it.
        """
        for slot in reversed(np.flatnonzero(self._due()).tolist()):
            if len(self._at(slot).branches) == 1:
                self._evict(slot)
            else:
                self._park(slot)

    def _park(self, slot: int) -> None:
        """Take a trunk out of the step, to the upper end of the slots."""
        last, upper = self.cache.live - 1, self.slots - self.waiting - 1
        if upper > last:
            self._copy(slot, upper)
            self._copy(last, slot)
        else:
            self._swap(slot, last)
        self.cache.live -= 1
        self.waiting += 1

    def _fork(self) -> bool:
        """Let the lowest waiting trunk fork a branch, or go on itself if it has none to fork; False without room."""
        trunk, slot = self.slots - self.waiting, self.cache.live
        sequence = self._at(trunk)
        due = [b for b in sequence.branches if self.cache.lengths[trunk] > sequence.trigger(b)]
        takes_over = not due or len(sequence.branches) == 1
        if not self.free and not takes_over:
            return False
        # Without a free slot the trunk lies right behind the live ones and need only be counted among them.
        if self.free:
            self._copy(trunk, slot)
        self.cache.live += 1
        if takes_over:
            self.waiting -= 1
        else:
            sequence.branches.remove(due[0])
            self._seat(trunk, sequence)
            self._seat(slot, _Sequence(sequence.request, due[:1]))
        if due:
            self._evict(slot)
        return True

    def _evict(self, slot: int) -> None:
        sequence = self._at(slot)
        with self.clock.time("scoring"):
            view = self._view(slot, sequence)
            selection = sequence.branches[0].policy.select(view)
        kept, step = selection.keep.shape[-1], int(self.generated[slot]) - 1
        if kept < view.length:
            with self.clock.time("eviction"):
                self.cache.evict(slot, selection)
            self.forced[slot] = 0
            text_length = len(sequence.request.prompt_ids) + step
            held = self.cache.held(slot, text_length, per_head=selection.keep.dim() > 1)
            sequence.evictions.append(Eviction(step=step, length_before=view.length, length_after=kept, held=held))

    def _view(self, slot: int, sequence: _Sequence) -> CacheView:
        request = sequence.request
        prompt = torch.tensor(request.prompt_ids, device=self.written.device)
        return view_slot(
            self.model,
            self.cache,
            slot,
            sequence.branches[0].policy,
            problem_id=request.problem_id,
            draw=request.draw,
            text_ids=torch.cat([prompt, self.written[slot, : self.generated[slot]]]),
            question_length=len(request.prompt_ids),
            answer_start=self._answer_start(slot, len(request.prompt_ids)),
            # A stream of its own: what the policy draws must not repeat the numbers that drew the tokens.
            stream=sequence_key(self.seed, request.problem_id, request.draw, "select", len(sequence.evictions)),
        )

    def _answer_start(self, slot: int, question_length: int) -> int | None:
        text = self.written[slot, : self.generated[slot]]
        closing = (text == self.model.think_end_id).nonzero()
        return question_length + int(closing[0]) if len(closing) else None

    def _sample(self, logits: Tensor) -> None:
        """Draw every live slot's next token, and tell which texts it ends."""
        live = self.cache.live
        rows, positions, counts = self.rows[:live], self.positions[:live], self.counts[:live]
        positions += 1
        drawn = sample(logits, uniform(self.streams[:live], positions), self.decoding.sampling)
        given = self.generated[:live] < self.forced[:live]
        if given.any():
            drawn = torch.where(torch.from_numpy(given).to(drawn.device), self.written[rows, counts], drawn)
        self.written[rows, counts] = drawn
        counts += 1
        self.tokens[:live] = drawn
        self.generated[:live] += 1
        self.clock.steps += 1
        self.clock.tokens += live
        self.ends.flags[:live] = torch.isin(drawn, self.stop_ids)

    def _finish_ended(self, *, late: int) -> list[tuple[str, Completion]]:
        """Take out the texts that the step sent last ended, which was `late` steps ago."""
        ended = self.ends.read()
        if not late:
            ended = ended | self._cut()
        slots = reversed(np.flatnonzero(ended).tolist())
        return [completion for slot in slots for completion in self._finish(slot, late)]

    def _finish(self, slot: int, late: int) -> list[tuple[str, Completion]]:
        """Take the slot's completion out, for each of its branches, and give its place to the last live slot."""
        sequence = self._at(slot)
        self.generated[slot] -= late
        self.cache.lengths[slot] -= late
        self.clock.tokens -= late
        completion = self._completion(slot, sequence)
        self.cache.live -= 1
        if slot != self.cache.live:
            self._copy(self.cache.live, slot)
        return [(branch.cell_id, completion) for branch in sequence.branches]

    def _at(self, slot: int) -> _Sequence:
        sequence = self.sequences[slot]
        assert sequence is not None
        return sequence

    def _copy(self, source: int, target: int) -> None:
        self.cache.copy(source, target)
        for column in self.columns:
            column[target] = column[source]
        self.sequences[target] = self.sequences[source]

    def _swap(self, one: int, other: int) -> None:
        self.cache.swap(one, other)
        for column in self.columns:
            column[[one, other]] = column[[other, one]]
        self.sequences[one], self.sequences[other] = self.sequences[other], self.sequences[one]

    def _completion(self, slot: int, sequence: _Sequence) -> Completion:
        request, evictions = sequence.request, sequence.evictions
        ids = self.written[slot, : self.generated[slot]].tolist()
        stopped = ids[-1] in self.model.stop_ids
        thinking = ids.index(self.model.think_end_id) if self.model.think_end_id in ids else len(ids)
        return Completion(
            problem_id=request.problem_id,
            draw=request.draw,
            text=self.model.decode(ids[:-1] if stopped else ids),
            token_ids=ids,
            num_tokens=len(ids),
            prompt_tokens=len(request.prompt_ids),
            thinking_tokens=thinking,
            stop_reason="stop" if stopped else "length",
            evictions=evictions,
            fork_step=evictions[0].step if evictions else None,
            peak_length=max([int(self.cache.lengths[slot]), *(e.length_before for e in evictions)]),
            seed=self.seed,
        )


def view_slot(
    model: LoadedModel,
    cache: SlotCache,
    slot: int,
    policy: Policy,
    *,
    problem_id: str,
    draw: int,
    text_ids: Tensor,
    question_length: int,
    answer_start: int | None,
    stream: int,
) -> CacheView:
    """What a policy sees of a slot: `text_ids` end with the one token that is not fed yet; `stream` is its chance."""
    length = int(cache.lengths[slot])
    positions = cache.positions[slot, ..., :length]
    if not policy.per_head:
        positions = positions[0, 0]
    token_ids = text_ids[positions]
    newest = len(text_ids) - 2
    return CacheView(
        problem_id=problem_id,
        draw=draw,
        text_ids=text_ids,
        positions=positions,
        token_ids=token_ids,
        separators=model.separators[token_ids],
        question_length=question_length,
        answer_start=answer_start,
        keys=[layer.keys[slot, :, :length] for layer in cache.slot_layers],
        values=[layer.values[slot, :, :length] for layer in cache.slot_layers],
        scaling=model.scaling,
        signals={s: cache.recorders[s].read(slot, length, newest) for s in policy.signals},
        uniform=lambda: uniforms_of_rows(stream, positions),
        operations=cache.operations,
    )
