"""Prefilling prompts ahead of the slots that will hold them, in steps that delay the decoding slots little."""

from collections.abc import Iterable

import torch
from transformers.cache_utils import DynamicCache

from compression.rows import PaddedPrefill, Prefill
from harness.models.load import LoadedModel
from kernels.blocks import whole_blocks

# Enough tokens to fill the processor, few enough that the decoding slots hardly wait.
STEP_TOKENS = 2048
# Few enough that a short prompt is not padded to several times its length.
PROMPT_BLOCK = 64
_Ids = tuple[int, ...]


class Prefiller:
    """Prefills at most `step_tokens` tokens per call: several short prompts side by side, or a chunk of a long one.

    The requests for one problem follow each other, so that its draws and cells share one prefill.

    Args:
        model: the model that prefills.
        keep_queries: whether some recorder needs the prompts' queries.
        invariant: whether a prompt's rows must not depend on the prompts beside it. A prompt is then padded to a whole
            number of blocks of its own, and prompts side by side have equally many.
        step_tokens: tokens per call, padding included.
    """

    def __init__(
        self, model: LoadedModel, *, keep_queries: bool, invariant: bool = False, step_tokens: int = STEP_TOKENS
    ) -> None:
        self.model, self.keep_queries, self.step_tokens = model, keep_queries, step_tokens
        self.invariant, self.block = invariant, PROMPT_BLOCK if invariant else 1
        self.done: dict[_Ids, Prefill] = {(): Prefill()}
        self._begun: tuple[_Ids, Prefill, DynamicCache] | None = None

    def keep(self, wanted: Iterable[_Ids]) -> None:
        """Forget all prefills but the wanted ones."""
        wanted = {(), *wanted}
        self.done = {ids: prefill for ids, prefill in self.done.items() if ids in wanted}

    def advance(self, wanted: Iterable[_Ids]) -> None:
        """Prefill as many tokens as one call may, of the wanted prompts that are not done, in their order."""
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
            width = max(width, whole_blocks(len(ids), self.block))
            if count and (count + 1) * width > self.step_tokens:
                break
            count += 1
        together: dict[object, list[_Ids]] = {}
        for ids in missing[:count]:
            together.setdefault(self._company(ids), []).append(ids)
        for prompts in together.values():
            self._side_by_side(prompts)

    def _company(self, ids: _Ids) -> object:
        """A key that is equal for prompts that may be prefilled side by side."""
        if not self.invariant:
            return None
        # A GPU's products of other numbers of tokens round otherwise, so there each prompt is alone.
        return whole_blocks(len(ids), self.block) if self.model.device.type == "cpu" else ids

    def _side_by_side(self, prompts: list[_Ids]) -> None:
        prefills = [Prefill(keep_queries=self.keep_queries) for _ in prompts]
        lengths = list(map(len, prompts))
        padded = torch.zeros(len(prompts), whole_blocks(max(lengths), self.block), dtype=torch.int64)
        for row, ids in zip(padded, prompts, strict=True):
            row[: len(ids)] = torch.tensor(ids)
        self._run(padded, 0, PaddedPrefill(prefills, lengths), DynamicCache())
        self.done.update(zip(prompts, prefills, strict=True))

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
