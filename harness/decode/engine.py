"""Decoding over slots: continuous batching, where each sequence's own policy evicts from it.

A policy says what to keep, the cache moves the rows, the engine says when. `harness.decode.slots` does the bookkeeping.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, Self, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from kvsweep.compression.config import UNPACKED, CacheConfig
from kvsweep.compression.policy import CacheView, Policy, Selection, SelectionError, check_selection
from kvsweep.compression.selection import selected
from kvsweep.compression.slots import Chunks, uploaded
from kvsweep.compression.source import is_own
from kvsweep.harness.decode.clock import Clock
from kvsweep.harness.decode.graphs import StepGraphs
from kvsweep.harness.decode.memory import auto_slots, policies_of, slot_cache
from kvsweep.harness.decode.request import DecodingConfig, Request, needed_capacity
from kvsweep.harness.decode.sampling import cuts, sequence_key
from kvsweep.harness.decode.slots import Prefiller, SlotState, SlotTable, view_slot
from kvsweep.harness.models.loaded import LoadedModel
from kvsweep.harness.models.probe import prepare_steps
from kvsweep.harness.models.spec import ModelSpec
from kvsweep.kernels.implementation import Implementation
from kvsweep.messages.errors import UserError
from kvsweep.run_files.row_types import Completion, Eviction, StopReason


def is_invariant(setting: bool | None, spec: ModelSpec, device: torch.device, impl: Implementation) -> bool:
    """Return the setting or its default: true on the CPU without experts. Refuse true if bits depend on the slots."""
    on_cpu = device.type == "cpu"
    # An expert multiplies the tokens of all slots that are routed to it, so their number changes its rounding.
    if setting and spec.experts:
        impossible = f"invariant=true cannot hold for the experts of model type {spec.family}"
        raise UserError(f"{impossible}: choose false or auto.")
    # On a GPU only the fused step with Triton's kernels sums in an order that does not depend on the slots.
    keeps_order = on_cpu or (impl == "triton" and spec.fusable)
    if setting and not keeps_order:
        needs = "invariant=true needs impl=triton on a GPU, and a model of type llama, qwen2 or qwen3"
        raise UserError(f"{needs}: choose these, or invariant=false.")
    if setting is None:
        return on_cpu and not spec.experts
    return setting


Result = TypeVar("Result")
# Known tokens that one step feeds, of one slot and of all slots: enough to keep the processor busy.
_MOST_FED, _MOST_FED_AT_ONCE = 512, 8192


@dataclass(frozen=True, kw_only=True)
class Fed:
    """Known tokens of a request that a step of `Engine.replay` has fed, and the last hidden states."""

    request: Request
    cell_ids: tuple[str, ...]
    start: int  # index in `forced` of the first token that the states predict
    hidden: Tensor  # last hidden states, [tokens, hidden_size]
    since: range | None  # for each of these tokens, the tokens fed since the last eviction; None before the first
    evictions: int  # of the completion so far


class Engine:
    """Writes completions for requests; each branch of a request may have another policy.

    On a GPU the host runs ahead: it starts a step before it has read which completions the last step ended. An ended
    completion gets one extra token, which is dropped. The host waits only for an eviction and at the length limit.

    The engine decodes `slots` sequences at once, each in `capacity` rows, at least what any request's policy needs;
    `policies` are those of all later requests. `invariant` (None: true on the CPU) makes a completion bit for bit the
    same whatever is decoded beside it. `seed` starts the key of every sequence's random numbers.
    """

    def __init__(
        self,
        model: LoadedModel,
        *,
        decoding: DecodingConfig,
        seed: int,
        slots: int,
        capacity: int,
        policies: Sequence[Policy],
        impl: Implementation = "torch",
        invariant: bool | None = None,
        cache: CacheConfig = UNPACKED,
    ) -> None:
        self.model = model
        self.decoding = decoding
        self.seed = seed
        device = model.device
        if impl != "torch" or model.spec.packed:  # loading has compared torch's steps of unpacked weights
            prepare_steps(model, impl)
        self.clock = Clock(device)
        self.cache = slot_cache(
            model.shape,
            policies,
            slots=slots,
            capacity=capacity,
            device=device,
            impl=impl,
            invariant=is_invariant(invariant, model.spec, device, impl),
            config=cache,
        )
        self.table = SlotTable(self.cache, max_new_tokens=decoding.max_new_tokens, find_loops=decoding.stop_on_loop)
        reads_alone = self.cache.invariant or bool(self.cache.linears)  # why: see `Prefiller`
        self.prefiller = Prefiller(model, keep_queries=bool(self.cache.recorders), alone=reads_alone)
        self.stop_ids = torch.tensor(model.stop_ids, device=device)
        # True if the host may start a step before it has read which completions the last one ended.
        self.ahead = device.type == "cuda"
        self.unread = False  # true while the ends of the last step are not read
        self.graphs: StepGraphs | None = None
        # A graph can hold a step that never waits for the device, such as the fused step.
        if self.ahead and self.cache.ragged and model.spec.fusable:
            self.graphs = StepGraphs(slots, self.clock)

    @classmethod
    def sized_for(
        cls,
        requests: Sequence[Request],
        model: LoadedModel,
        *,
        decoding: DecodingConfig,
        slots: int | None = None,
        cache: CacheConfig = UNPACKED,
        **options: Any,
    ) -> Self:
        """Make an engine for the requests: their capacity, their signals and, unless given, their slots."""
        model.check_length(max(len(request.prompt_ids) for request in requests) + decoding.max_new_tokens)
        return cls(
            model,
            decoding=decoding,
            slots=slots or auto_slots(model, requests, decoding, cache).slots,
            capacity=needed_capacity(requests, decoding),
            policies=policies_of(requests),
            cache=cache,
            **options,
        )

    def generate(self, requests: Iterable[Request]) -> Iterator[tuple[str, Completion]]:
        """Yield (cell_id, completion) for every branch of every request, in the order in which they end."""
        return chain.from_iterable(self.steps(requests))

    def steps(self, requests: Iterable[Request]) -> Iterator[list[tuple[str, Completion]]]:
        """Like `generate`, but after every step yield a list of the completions that ended with it, usually empty."""
        return self._results(requests, self._step)

    def replay(self, requests: Iterable[Request]) -> Iterator[list[Fed]]:
        """Feed every request's tokens to all its branches, which evict as in decoding; yield each step's parts.

        Requests must be made with `replayed`. Between two evictions, tokens are fed in chunks.
        """
        return self._results(requests, self._feed_live)

    @torch.inference_mode()
    def _results(self, requests: Iterable[Request], step: Callable[[], list[Result]]) -> Iterator[list[Result]]:
        """Fill the slots and take a step, until every request has ended; yield each step's results."""
        queue = deque(requests)
        if self.table.slots == 1:  # no room to fork: one request per branch
            queue = deque(chain.from_iterable(request.split() for request in queue))
        while queue or self.table.free < self.table.slots:  # until every slot is free
            with self.clock.time("wall"):
                self._fill(queue)
                results = step() if self.cache.live else []  # none live: a long prompt is still being prefilled
                self.clock.settle()
            # The first step has drawn its tokens once its ends are read: with it or, if it is left unread (which counts
            # as 1), with the second step.
            if not self.clock.first_token and self.clock.steps > self.unread:
                self.clock.first_token = self.clock.wall
            yield results

    def feed(self, texts: Mapping[int, Sequence[int]]) -> dict[int, Tensor]:
        """Append known tokens to live slots in one step; return each slot's last hidden states [tokens, width].

        The state at index i predicts token i: the slot is fed its last token and all of these but the last one. The
        caller evicts; until its next eviction a slot takes at most `SlotTable.room` tokens.
        """
        chunks = Chunks({slot: len(text) for slot, text in texts.items()}, self.model.device)
        ids = uploaded(list(chain.from_iterable(texts.values())), self.model.device)
        # What is fed lies one token behind what it predicts: before a slot's first new token, the slot's last.
        tokens = ids.roll(1)
        tokens[chunks.starts] = self.table.tokens[chunks.slots]
        positions = chunks.places(self.table.positions)
        with self.clock.time("forward"):
            self.cache.begin_chunks(chunks, positions)
            hidden = self._hidden(tokens, positions)
        with self.clock.time("scoring"):
            self.cache.end_step(hidden)
        self.table.extend(chunks, ids)
        self.clock.tokens += len(tokens)
        # A step may be filled up with further tokens, at the end.
        return dict(zip(texts, hidden[: len(tokens)].split(list(chunks.counts.values())), strict=True))

    def _feed_live(self) -> list[Fed]:
        """Feed each live slot its known tokens up to its next eviction; evict; remove completions that end."""
        starts = {slot: int(self.table.generated[slot]) for slot in range(self.cache.live)}
        fair_share = max(1, _MOST_FED_AT_ONCE // len(starts))  # of what one step may feed
        texts = {}
        for slot, start in starts.items():
            count = min(self.table.room(slot), fair_share, self._most_fed)
            texts[slot] = self.table[slot].request.forced[start : start + count]
        fed = []
        for slot, hidden in self.feed(texts).items():
            state = self.table[slot]
            start = starts[slot]
            since = None
            if state.evictions:
                # `start` and `step` count the tokens that were fed up to the first state and before the eviction.
                first = start - state.evictions[-1].step
                since = range(first, first + len(hidden))
            fed.append(
                Fed(
                    request=state.request,
                    cell_ids=tuple(branch.cell_id for branch in state.branches),
                    start=start,
                    hidden=hidden,
                    since=since,
                    evictions=len(state.evictions),
                )
            )
        # From the last slot down: a release moves the last live slot, which has been looked at, into the freed place.
        for slot in reversed(starts):
            if self.table.generated[slot] == len(self.table[slot].request.forced):
                self.table.release(slot)
        self._evict_due()
        return fed

    @property
    def _most_fed(self) -> int:
        return min(_MOST_FED, self.cache.longest_chunk or _MOST_FED)

    def _step(self) -> list[tuple[str, Completion]]:
        """Write one token in each live slot, and evict; return the completions that have ended."""
        logits = self._forward()
        with self.clock.time("sampling"):
            self._sample(logits)
        # What the last step ended is read only now, and has drawn one token too many in this step.
        completions = self._finish_ended(late=1) if self.unread else []
        self.table.ends.send(self.cache.live)
        # An eviction must not change an ended completion, and at the length limit there is no row for another token.
        self.unread = self.ahead and not (self.table.due().any() or self.table.full().any())
        if not self.unread:
            completions += self._finish_ended(late=0)
            self._evict_due()
        return completions

    def _fill(self, queue: deque[Request]) -> None:
        """Fork parked trunks, then start new requests: a parked trunk occupies a slot without writing."""
        while self.table.waiting and (slot := self.table.fork()) is not None:
            if self.table.due()[slot]:  # a branch; a trunk that goes on is not due
                self._evict(slot)
        if not (queue and self.table.has_room(queue[0])):
            return
        with self.clock.time("prefill"):
            self.prefiller.advance(request.prefilled_ids for request in islice(queue, self.table.free))
        while queue and queue[0].prefilled_ids in self.prefiller.done and self.table.has_room(queue[0]):
            self._admit(queue.popleft())
        # The next requests may share a prefill with one that has just started.
        self.prefiller.keep(request.prefilled_ids for request in islice(queue, self.table.slots))

    def _admit(self, request: Request) -> None:
        stream = sequence_key(self.seed, request.problem_id, request.draw)
        with self.clock.time("prefill"):
            slot = self.table.admit(request, self.prefiller.done[request.prefilled_ids], stream=stream)
        if not request.replayed:
            self._read_ahead(slot, request.forced)

    def _read_ahead(self, slot: int, known: Sequence[int]) -> None:
        """Feed a new request's known tokens in chunks, up to the last before its end or first eviction."""
        end = min(len(known), self.table.room(slot)) - 1  # an ordinary step feeds the last, and then ends or evicts
        for start in range(0, end, self._most_fed):
            self.feed({slot: known[start : min(start + self._most_fed, end)]})

    def _forward(self) -> Tensor:
        """Feed one token to every live slot; return logits [live, vocabulary]."""
        live = self.cache.live
        self.cache.count_step()
        if self.graphs is None:
            return self._decode(live)
        # A graph may also step free slots, but no parked trunk.
        return self.graphs(self._decode, live, room=self.table.slots - self.table.waiting)[:live]

    def _decode(self, rows: int) -> Tensor:
        """Do the device's part of `_forward` for the first `rows` slots, which include all live slots."""
        tokens, positions = self.table.tokens[:rows], self.table.positions[:rows]
        with self.clock.time("forward"):
            self.cache.place_step(positions)
            hidden = self._hidden(tokens, positions)
            logits = self.model.logits(hidden, self.cache.linear)[:rows]
        with self.clock.time("scoring"):
            self.cache.end_step(hidden)
        return logits

    def _hidden(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return last hidden states [tokens or more, hidden_size] of a step's tokens; the cache has begun the step."""
        beyond = self.cache.step_tokens - len(tokens)  # an invariant cache may step more tokens, in whole blocks
        return self.model.step_hidden(pad(tokens, (0, beyond)), pad(positions, (0, beyond)), self.cache)

    def _sample(self, logits: Tensor) -> None:
        """Draw each live slot's next token from logits [live, vocabulary], and flag the completions that it ends."""
        live = self.cache.live
        positions = self.table.positions[:live]
        positions += 1  # in the table too: the positions of the tokens that are drawn now
        draw = self.cache.operations.draw_tokens
        drawn = draw(logits, self.table.streams[:live], positions, **cuts(self.decoding.sampling))
        written = self.table.append(drawn)
        self.clock.steps += 1
        self.clock.tokens += live
        broken = self.table.broken[:live]
        broken |= ~logits.amax(dim=-1).isfinite()  # in the table too; a row with NaN has NaN as its largest logit
        ends = broken | torch.isin(written, self.stop_ids)
        if self.decoding.stop_on_loop:
            ends |= self.table.looping()
        self.table.ends.flags[:live] = ends

    def _finish_ended(self, *, late: int) -> list[tuple[str, Completion]]:
        """Remove the completions that ended `late` steps ago, for each branch, and drop the tokens drawn since."""
        ended = self.table.ends.read()
        # A step that is read late left no slot full (`_step`). Slots that the newest step has filled are read next,
        # with late=0.
        if not late:
            ended = ended | self.table.full()
        completions = []
        # From the last slot down: a release moves the last live slot into the freed place.
        for slot in reversed(np.flatnonzero(ended).tolist()):
            self.table.generated[slot] -= late
            self.cache.lengths[slot] -= late
            self.clock.tokens -= late
            completion = self._completion(slot)
            completions += [(branch.cell_id, completion) for branch in self.table[slot].branches]
            self.table.release(slot)
        return completions

    def _completion(self, slot: int) -> Completion:
        """Return the completion of a slot whose text has ended."""
        request = self.table[slot].request
        evictions = self.table[slot].evictions
        ids = self.table.text(slot).tolist()
        stop_reason: StopReason = "loop"  # unless the text has ended for another reason
        if self.table.broken[slot]:
            ids.pop()  # a token drawn from logits that are not finite means nothing
            stop_reason = "not_finite"
        elif ids[-1] in self.model.stop_ids:
            stop_reason = "stop"
        elif len(ids) == self.decoding.max_new_tokens:
            stop_reason = "length"
        shown = ids[:-1] if stop_reason == "stop" else ids
        closing_tag = self.model.dialogue.closing_tag(shown)
        unclosed = len(ids) if self.model.dialogue.thinks else 0  # thinking tokens, if no tag closes the thinking
        return Completion(
            problem_id=request.problem_id,
            draw=request.draw,
            text=self.model.dialogue.decode(shown),
            token_ids=ids,
            num_tokens=len(ids),
            prompt_tokens=len(request.prompt_ids),
            thinking_tokens=unclosed if closing_tag is None else closing_tag.start,
            stop_reason=stop_reason,
            evictions=evictions,
            fork_step=evictions[0].step if evictions else None,
            peak_length=max([int(self.cache.lengths[slot]), *(e.length_before for e in evictions)]),
            seed=self.seed,
        )

    def _evict_due(self) -> None:
        """Evict from every live slot that is due. A trunk is parked instead, until its branches can fork."""
        # From the last slot down: parking moves the last live slot into the freed place.
        for slot in reversed(np.flatnonzero(self.table.due()).tolist()):
            if self.table[slot].is_trunk:
                self.table.park(slot)
            else:
                self._evict(slot)

    def _evict(self, slot: int) -> None:
        """Let the policy of a slot's only branch select the rows to keep, and free the other rows."""
        state = self.table[slot]
        with self.clock.time("scoring"):
            view = self._view(slot, state)
            selection = self._selected(state, view, slot)
        kept = selection.keep.shape[-1]
        step = int(self.table.generated[slot]) - 1  # the newest token is not fed yet
        if kept < view.length:  # a policy may keep all rows
            with self.clock.time("eviction"):
                self.cache.evict(slot, selection)
            held: list[int] = []  # nothing reads the kept tokens of a replay
            if not state.request.replayed:
                self.table.forced[slot] = 0  # the eviction has changed what the given tokens would be
                text_length = len(state.request.prompt_ids) + step
                # The positions of a `per_head` policy are [layers, kv_heads, length], those of others [length].
                held = self.cache.held(slot, text_length, per_head=view.positions.dim() > 1)
            eviction = Eviction(step=step, length_before=view.length, length_after=kept, held=held)
            self.table.add_eviction(slot, eviction)

    def _selected(self, state: SlotState, view: CacheView, slot: int) -> Selection:
        """Return the selection of a slot's policy; an invalid one raises UserError with the policy's name.

        A user's policy selects twice at a text's first eviction, which shows chance and memories of its own.
        """
        policy = state.branches[0].policy
        request = state.request
        try:
            if is_own(type(policy)):
                selection = selected(policy, view, twice=not state.evictions)
            else:
                selection = policy.select(view)
                check_selection(selection, view)
            capacity = policy.capacity(view.question_length, self.decoding.max_new_tokens)
            rows = selection.keep.shape[-1]
            if rows >= capacity:
                full = f"it keeps {rows} rows, and capacity() returns {capacity}"
                raise SelectionError(f"{full}: keep fewer, so that the next token has a row.")
        except SelectionError as error:
            where = f"token {int(self.table.generated[slot])} of problem {request.problem_id}, draw {request.draw}"
            raise UserError(f"policy={policy.name}, {where}: {error}") from error
        return selection

    def _view(self, slot: int, state: SlotState) -> CacheView:
        """Return what the policy of a slot's only branch sees of the slot."""
        request = state.request
        text = self.table.text(slot)
        question_length = len(request.prompt_ids)
        closing_tag = self.model.dialogue.closing_tag(text.tolist())
        return view_slot(
            self.model,
            self.cache,
            slot,
            state.branches[0].policy,
            problem_id=request.problem_id,
            draw=request.draw,
            text_ids=torch.cat([uploaded(request.prompt_ids, text.device), text]),
            question_length=question_length,
            answer_start=None if closing_tag is None else question_length + closing_tag.start,
            seed=self.seed,
            evictions=len(state.evictions),
        )
