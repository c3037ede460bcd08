"""Key-value rows (one row is one cached token): their shape, and the rows that a prefill produces."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvsweep.compression.config import LayerKind


@dataclass(frozen=True, kw_only=True)
class CacheShape:
    """The sizes that decide how large a cache is: layers, heads per layer, head width, precision."""

    layers: int  # layers of full attention, where policies choose the rows
    q_heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    kinds: tuple[LayerKind, ...] = ()  # of each layer of the network; empty if all are full
    window: int = 0  # rows of a window layer
    # Shapes of a slot's state in a linear layer: the convolution's inputs, then the recurrent sum (float32).
    states: tuple[tuple[int, ...], ...] = ()

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        full: LayerKind = "full"
        return self.kinds or (full,) * self.layers

    @property
    def state_dtypes(self) -> tuple[torch.dtype, ...]:
        return (self.dtype, torch.float32)[: len(self.states)]


class Prefill:
    """Rows and queries of a prefilled prompt, filled in layer by layer; `begin_chunk` starts the next chunk."""

    def __init__(self, *, keep_queries: bool = True) -> None:
        self.rows: list[tuple[Tensor, Tensor]] = []  # keys and values of each full layer, [kv_heads, length, head_dim]
        self.queries: list[Tensor] = []  # of each full layer, [q_heads, length, head_dim]; empty unless `keep_queries`
        self.sinks: list[Tensor | None] = []  # of each full layer, [q_heads]
        self.windows: list[tuple[Tensor, Tensor]] = []  # newest keys and values of each window layer
        self.states: list[list[Tensor]] = []  # of each linear layer
        self.keep_queries = keep_queries
        self.scaling = 1.0
        self.softcap: float | None = None
        self._layer = self._window = self._tokens = 0

    def begin_chunk(self) -> None:
        """Expect the first layer again, for the next chunk of tokens."""
        self._layer = self._window = 0

    def observe(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        sinks: Tensor | None = None,
        softcap: float | None = None,
    ) -> None:
        """Record a full layer, [1, heads, tokens, head_dim] each: this chunk's queries, all keys and values so far."""
        layer = self._layer
        self._layer += 1
        self.scaling, self.softcap = scaling, softcap
        # A slice of one place appends in the first chunk, and replaces in later ones.
        self.rows[layer : layer + 1] = [(key[0], value[0])]
        self.sinks[layer : layer + 1] = [sinks]
        if self.keep_queries:  # of the chunk alone, so that those of earlier chunks stay
            self.queries[layer : layer + 1] = [torch.cat([*self.queries[layer : layer + 1], query[0]], dim=1)]

    def observe_window(self, query: Tensor, key: Tensor, value: Tensor, window: int) -> None:
        """Record a window layer, as `observe` does; only its newest `window` rows stay."""
        layer = self._window
        self._window += 1
        if layer == 0:  # once a chunk; `length` needs it in a network of windows alone
            self._tokens += query.shape[2]
        self.windows[layer : layer + 1] = [(key[0, :, -window:].clone(), value[0, :, -window:].clone())]

    @property
    def length(self) -> int:
        return self.rows[0][0].shape[1] if self.rows else self._tokens

    @property
    def parts(self) -> list[tuple["Prefill", tuple[slice, ...]]]:
        """As of a `PaddedPrefill`: this prompt has the whole forward."""
        return [(self, ())]


class PaddedPrefill:
    """The prefill of several prompts in one forward. Padding lies at the end; no prompt token attends to it.

    `parts`: each prompt's prefill, and its place in [prompts, heads, tokens, head_dim]: its row, all heads, its tokens.
    """

    def __init__(self, prefills: Sequence[Prefill], lengths: Sequence[int]) -> None:
        places = [(slice(row, row + 1), slice(None), slice(length)) for row, length in enumerate(lengths)]
        self.parts = list(zip(prefills, places, strict=True))
