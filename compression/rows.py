"""Key-value rows: their shape, and the rows that a prefill leaves behind."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class CacheShape:
    """The numbers that decide the size of a cache: layers, heads per layer, width of a head, precision."""

    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype


class Prefill:
    """The rows and queries of one prefilled prompt; the attention function fills them in, layer by layer.

    A long prompt may come in chunks; `begin_chunk` announces each.

    Attributes:
        rows: each layer's keys and values, [kv_heads, length, head_dim].
        queries: each layer's queries, [q_heads, length, head_dim]; empty unless `keep_queries`.
        scaling: factor of the model's attention logits, 1 until a layer is observed.
    """

    def __init__(self, *, keep_queries: bool = True) -> None:
        self.rows: list[tuple[Tensor, Tensor]] = []
        self.queries: list[Tensor] = []
        self.keep_queries, self.scaling = keep_queries, 1.0
        self._layer = 0

    def begin_chunk(self) -> None:
        """Expect the first layer again, for the tokens that follow."""
        self._layer = 0

    def observe(self, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> None:
        """Take in one layer, [1, heads, tokens, head_dim] each: this chunk's queries, all keys and values so far."""
        layer, self._layer, self.scaling = self._layer, self._layer + 1, scaling
        self.rows[layer : layer + 1] = [(key[0], value[0])]
        if self.keep_queries:
            self.queries[layer : layer + 1] = [torch.cat([*self.queries[layer : layer + 1], query[0]], dim=1)]

    @property
    def length(self) -> int:
        """Tokens of the prompt."""
        return self.rows[0][0].shape[1] if self.rows else 0


class PaddedPrefill:
    """The prefill of several prompts in one forward, padded at their ends, which no prompt token attends to."""

    def __init__(self, prefills: Sequence[Prefill], lengths: Sequence[int]) -> None:
        self.parts = list(zip(prefills, lengths, strict=True))

    def observe(self, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> None:
        """Take in one layer of all prompts, [prompts, heads, longest, head_dim] each."""
        for row, (prefill, length) in enumerate(self.parts):
            one = slice(row, row + 1), slice(None), slice(length)
            prefill.observe(query[one], key[one], value[one], scaling)
