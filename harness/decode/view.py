"""From a slot of the cache to the view that a policy selects from."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from kvsweep.compression.cache import SlotCache
from kvsweep.compression.policy import CacheView, Policy
from kvsweep.harness.decode.sampling import uniforms_of_rows
from kvsweep.harness.models.loaded import LoadedModel


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
    evictions: int = 0,
) -> CacheView:
    """Make the view of a slot that its policy selects from.

    Args:
        model: gives separators and the scaling of attention logits.
        cache: the cache.
        slot: the slot.
        policy: decides which signals are read, and whether positions are per layer and head.
        problem_id, draw: name the sequence.
        text_ids: prompt and text so far, [text length]; the last token is not fed yet.
        question_length: tokens of the prompt.
        answer_start: position of the tag that closes the thinking; None while the sequence is thinking.
        stream: key of the policy's random numbers (`harness.decode.sampling.sequence_key`).
        evictions: the sequence's evictions so far.
    """
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
        keys=_Layers(cache, slot, 0),
        values=_Layers(cache, slot, 1),
        scaling=model.scaling,
        signals={s: cache.recorders[s].read(slot, length, newest) for s in policy.signals},
        uniform=lambda: uniforms_of_rows(stream, positions),
        evictions=evictions,
        operations=cache.operations,
    )


class _Layers(Sequence[Tensor]):
    """Each layer's keys (0) or values (1) of a slot, read when they are asked for, since most policies look at few."""

    def __init__(self, cache: SlotCache, slot: int, which: int) -> None:
        self.cache, self.slot, self.which = cache, slot, which
        self.length = int(cache.lengths[slot])

    def __len__(self) -> int:
        return len(self.cache.slot_layers)

    def __getitem__(self, layer: Any) -> Any:
        if layer >= len(self):
            raise IndexError(layer)
        return self.cache.storage.read(layer, self.slot, self.length)[self.which]
