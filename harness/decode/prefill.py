"""Prefilling prompts ahead of the slots that will hold them, in steps that delay the decoding slots little."""

from collections.abc import Iterable
from itertools import accumulate

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers.cache_utils import DynamicCache

from kvsweep.compression.rows import PaddedPrefill, Prefill
from kvsweep.harness.models.loaded import LoadedModel

# Enough tokens to fill the processor, few enough that the decoding slots hardly wait.
STEP_TOKENS = 2048
_Ids = tuple[int, ...]


class Prefiller:
    """Prefills at most `step_tokens` tokens per call: several short prompts side by side, or a chunk of a long one.

    The tokens of a call include padding. The requests for one problem follow each other, so that its draws and cells
    share one prefill. `keep_queries`: whether some recorder needs the prompts' queries. `alone`: whether each prompt is
    prefilled alone, because its rows must not depend on the prompts beside it (products of other numbers of tokens may
    round otherwise), or because linear layers would read the padding.
    """

    def __init__(self, model: LoadedModel, *, keep_queries: bool, alone: bool = False) -> None:
        self.model, self.keep_queries, self.alone, self.step_tokens = model, keep_queries, alone, STEP_TOKENS
        self.done: dict[_Ids, Prefill] = {(): Prefill()}
        self._begun: tuple[_Ids, Prefill, DynamicCache] | None = None

    def keep(self, wanted: Iterable[_Ids]) -> None:
        wanted = {(), *wanted}
        self.done = {ids: prefill for ids, prefill in self.done.items() if ids in wanted}

    def advance(self, wanted: Iterable[_Ids]) -> None:
        """Prefill as many tokens as one call may, of the wanted prompts that are not done, in their order."""
        missing = [ids for ids in dict.fromkeys(wanted) if ids not in self.done]
        if not missing:
            return
        if self._begun is None and len(missing[0]) > self.step_tokens:
            self._begun = missing[0], Prefill(keep_queries=self.keep_queries), self.model.new_cache()
        if self._begun is not None:
            self._next_chunk(*self._begun)
            return
        widths = accumulate(map(len, missing), max)
        count = max(1, sum(number * width <= self.step_tokens for number, width in enumerate(widths, start=1)))
        for prompts in [[ids] for ids in missing[:count]] if self.alone else [missing[:count]]:
            prefills = [Prefill(keep_queries=self.keep_queries) for _ in prompts]
            padded = pad_sequence([torch.tensor(ids) for ids in prompts], batch_first=True).to(self.model.device)
            self.model.read(padded, 0, PaddedPrefill(prefills, list(map(len, prompts))), self.model.new_cache())
            self.done.update(zip(prompts, prefills, strict=True))

    def _next_chunk(self, ids: _Ids, prefill: Prefill, cache: DynamicCache) -> None:
        start = prefill.length
        prefill.begin_chunk()
        chunk = torch.tensor([ids[start : start + self.step_tokens]], device=self.model.device)
        self.model.read(chunk, start, prefill, cache)
        if prefill.length == len(ids):
            self.done[ids], self._begun = prefill, None
