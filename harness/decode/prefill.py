"""Questions run through the model ahead of the slots that want them, without making the others wait long."""

from collections.abc import Iterable

import torch
from transformers.cache_utils import DynamicCache

from compression.signals import PaddedPrefill, Prefill
from harness.models.load import LoadedModel

# Long enough to fill the processor, short enough that the slots which decode meanwhile hardly wait.
STEP_TOKENS = 2048
_Ids = tuple[int, ...]


class Prefiller:
    """Prefills at most `step_tokens` tokens per call: several short questions side by side, or a chunk of a long one.

    Requests for one problem come in a row, so that its draws and cells share one prefill.

    Args:
        model: what decodes.
        keep_queries: whether some policy wants the questions' queries.
        step_tokens: tokens per call, padding included.
    """

    def __init__(self, model: LoadedModel, *, keep_queries: bool, step_tokens: int = STEP_TOKENS) -> None:
        self.model, self.keep_queries, self.step_tokens = model, keep_queries, step_tokens
        self.done: dict[_Ids, Prefill] = {(): Prefill()}
        self._begun: tuple[_Ids, Prefill, DynamicCache] | None = None

    def keep(self, wanted: Iterable[_Ids]) -> None:
        """Forget what nobody wants any more."""
        wanted = {(), *wanted}
        self.done = {ids: prefill for ids, prefill in self.done.items() if ids in wanted}

    def advance(self, wanted: Iterable[_Ids]) -> None:
        """Spend one call's tokens on those of the questions, in their order, that are not done."""
        missing = [ids for ids in dict.fromkeys(wanted) if ids not in self.done]
        if not missing:
            return
        if self._begun is None and len(missing[0]) > self.step_tokens:
            self._begun = missing[0], Prefill(keep_queries=self.keep_queries), DynamicCache()
        if self._begun is not None:
            self._next_chunk(*self._begun)
            return
        count, width = 0, 0
        for ids in missing:
            width = max(width, len(ids))
            if (count + 1) * width > self.step_tokens:
                break
            count += 1
        self._side_by_side(missing[:count])

    def _side_by_side(self, questions: list[_Ids]) -> None:
        prefills = [Prefill(keep_queries=self.keep_queries) for _ in questions]
        lengths = list(map(len, questions))
        padded = torch.zeros(len(questions), max(lengths), dtype=torch.int64)
        for row, ids in zip(padded, questions, strict=True):
            row[: len(ids)] = torch.tensor(ids)
        self._run(padded, 0, PaddedPrefill(prefills, lengths), DynamicCache())
        self.done.update(zip(questions, prefills, strict=True))

    def _next_chunk(self, ids: _Ids, prefill: Prefill, cache: DynamicCache) -> None:
        start = prefill.length
        prefill.begin_chunk()
        self._run(torch.tensor([ids[start : start + self.step_tokens]]), start, prefill, cache)
        if prefill.length == len(ids):
            self.done[ids], self._begun = prefill, None

    def _run(self, ids: torch.Tensor, start: int, prefill: Prefill | PaddedPrefill, cache: DynamicCache) -> None:
        device = self.model.device
        self.model.decode_hidden(
            input_ids=ids.to(device),
            position_ids=torch.arange(start, start + ids.shape[1], device=device).expand(len(ids), -1),
            past_key_values=cache,
            prefill=prefill,
        )
