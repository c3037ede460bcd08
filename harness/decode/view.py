"""From a slot of the cache to the view that a policy selects from."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from kvsweep.compression.cache import SlotCache
from kvsweep.compression.policy import CacheView, Policy
from kvsweep.harness.decode.sampling import uniforms_of_rows
from kvsweep.harness.models.loaded import LoadedModel


def view_slot(
    model: LoadedModel, cache: SlotCache, slot: int, policy: Policy, *, text_ids: Tensor, stream: int, **named: Any
) -> CacheView:
    """Make the view of a slot that its policy selects from.

    `text_ids` [text length] are prompt and text so far, of which the last token is not fed yet; `stream` is the key of
    the policy's random numbers (`harness.decode.sampling.sequence_key`); `named` are the fields of `CacheView` that a
    cache does not know: problem_id, draw, question_length, answer_start, evictions.
    """
    length = int(cache.lengths[slot])
    positions = cache.positions[slot, ..., :length]
    if not policy.per_head:
        positions = positions[0, 0]
    token_ids = text_ids[positions]
    newest = len(text_ids) - 2
    return CacheView(
        text_ids=text_ids,
        positions=positions,
        token_ids=token_ids,
        separators=model.separators[token_ids],
        keys=_Layers(cache, slot, 0),
        values=_Layers(cache, slot, 1),
        scaling=model.scaling,
        signals={s: cache.recorders[s].read(slot, length, newest) for s in policy.signals},
        uniform=lambda: uniforms_of_rows(stream, positions),
        operations=cache.operations,
        **named,
    )


class _Layers(Sequence[Tensor]):
    """Each layer's keys (0) or values (1) of a slot, read when they are asked for, since most policies look at few."""

    def __init__(self, cache: SlotCache, slot: int, which: int) -> None:
        self.cache, self.slot, self.which = cache, slot, which
        self.length = int(cache.lengths[slot])

    def __len__(self) -> int:
        return len(self.cache.slot_layers)

    def __getitem__(self, layer: Any) -> Any:
        if isinstance(layer, slice):
            return [self[one] for one in range(len(self))[layer]]
        return self.cache.storage.read(range(len(self))[layer], self.slot, self.length)[self.which]
