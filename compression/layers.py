"""The layers of a slot cache: full attention (policies choose its rows), sliding windows, and linear layers' states."""

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, LinearAttentionLayer

from kvsweep.compression.config import ring
from kvsweep.compression.slots import Slots
from kvsweep.compression.storage import Storage, WholeRows, filled
from kvsweep.kernels.pointwise import rotated


class _Layer(CacheLayerMixin):
    """The interface that transformers' attention modules expect of a cache layer, over memory of the slot cache."""

    def __init__(self, cache: Slots) -> None:
        super().__init__()
        # A strong reference would be a cycle, which keeps the slots' memory until Python next collects garbage.
        self._cache = weakref.proxy(cache)
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the memory is allocated already."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        raise NotImplementedError("a slot cache has a length per slot, which no single mask size can express")

    def get_seq_length(self) -> int:
        """Rows of the longest slot. After an eviction the text is longer, so callers must pass position_ids."""
        return self._cache.longest

    def get_max_length(self) -> int:
        return self._cache.capacity

    def rotate(self, heads: Tensor, cos: Tensor, sin: Tensor, **how: Any) -> Tensor:
        """Rotate a step's heads (`kernels.pointwise.rotated`), `update` with the rows, and return the queries."""
        query, key, value = rotated(heads, cos, sin, **how)
        self.update(key[:, :, None], value[:, :, None])
        return query


class SlotLayer(_Layer):
    """A layer of full attention: rows [slots, kv_heads, capacity, head_dim], of which a policy keeps some."""

    keys: Any

    def __init__(self, cache: Slots, storage: Storage, index: int) -> None:
        super().__init__(cache)
        if isinstance(storage, WholeRows):
            self.keys, self.values = storage.keys[index], storage.values[index]
        self._storage, self._index = storage, index

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Write one row per token of the step, [tokens or more, kv_heads, 1, head_dim]; return the new rows."""
        self._storage.write(self._index, key_states, value_states)
        return key_states, value_states

    def rotate(self, heads: Tensor, cos: Tensor, sin: Tensor, **how: Any) -> Tensor:
        storage = self._storage
        # Rows that are stored as they are computed are written by the kernel that rotates them.
        if not isinstance(storage, WholeRows) or self.keys.dtype != heads.dtype:
            return super().rotate(heads, cos, sin, **how)
        memory = self.keys, self.values, storage.lines
        query: Tensor = self._cache.operations.rotate_and_write(heads, cos, sin, *memory, **how)
        return query

    def attend(self, query: Tensor, how: Mapping[str, Any]) -> Tensor:
        """Attend (`Storage.attend`), and pass each token's attention to the recorders."""
        output, masses = self._storage.attend(self._index, query, how)
        for piece, mass in zip(self._cache.pieces, masses, strict=True):
            self._cache.observe(self._index, piece, query[piece.tokens], mass)
        return output


class WindowLayer(_Layer):
    """The newest `window` rows of each slot in a ring buffer: the token at position p lies in row p % window."""

    def __init__(self, cache: Slots) -> None:
        super().__init__(cache)
        shape = cache.shape
        self.window = shape.window
        size = (cache.slots, shape.kv_heads, ring(self.window), shape.head_dim)
        self.tensors = [torch.zeros(size, dtype=shape.dtype, device=cache.device) for _ in range(2)]
        self.keys, self.values = self.tensors

    def admit(self, slot: int, rows: tuple[Tensor, Tensor], length: int) -> None:
        """Write the newest rows of a prompt of `length` tokens, [kv_heads, tokens, head_dim] each."""
        for memory, new in zip(self.tensors, rows, strict=True):
            newest = new[:, -self.window :]
            places = torch.arange(length - newest.shape[1], length, device=memory.device) % self.window
            memory[slot, :, places] = newest

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Take one row per token of the step, [tokens or more, kv_heads, 1, head_dim]; `attend` writes the rows."""
        self._new = key_states[:, :, 0], value_states[:, :, 0]
        return key_states, value_states

    def attend(self, query: Tensor, how: Mapping[str, Any]) -> Tensor:
        """Like `Storage.attend`, over the window that ends with each token: [tokens or more, q_heads, head_dim]."""
        cache = self._cache
        lengths = (cache.step_positions + 1).clamp(max=self.window)
        # In a step of one token a slot, no token needs the row that another overwrites: write first, then attend.
        if len(cache.pieces) == 1 and cache.pieces[0].count == 1:
            slots = cache.pieces[0].slots
            self._write(slice(len(lengths)))
            keys, values = self.tensors
            rows = keys[slots, :, : cache.reach], values[slots, :, : cache.reach]
            output, _ = cache.operations.decode_attention(query[: len(lengths)], *rows, lengths, **how)
            return filled([output], len(query))
        return filled([self._chunk(query, lengths, piece.tokens, how) for piece in cache.pieces], len(query))

    def _chunk(self, query: Tensor, lengths: Tensor, tokens: slice, how: Mapping[str, Any]) -> Tensor:
        """Attend with the tokens of one slot: each sees the ring as it is after the token's own row is written."""
        cache = self._cache
        slot = cache.step_slots[tokens][0]
        positions = cache.step_positions[tokens]
        places = torch.arange(cache.reach, device=query.device)
        # For each token the position of the row in each place of the ring, [tokens, places]: in a window of 4 the token
        # at position 6 sees the rows of positions 4, 5, 6 and 3 in the places 0 to 3.
        positions_of_rows = positions[:, None] - (positions[:, None] - places) % self.window
        # A ring has whole blocks of places. Those from `window` on, and those without a row yet, lie behind the token's
        # length, where attention does not read.
        is_new = (positions_of_rows >= positions[0]) & (places < self.window)
        # The index of each such row in `keys` and `values`, where the chunk's new rows lie behind the ring.
        rows = torch.where(is_new, ring(self.window) + positions_of_rows - positions[0], places)
        # Keys and values, [kv_heads, places and new rows, head_dim] each.
        memories = [
            torch.cat([old[slot], new[tokens].transpose(0, 1)], dim=1)
            for old, new in zip(self.tensors, self._new, strict=True)
        ]

        def rings(few: slice) -> list[Tensor]:
            # [tokens, kv_heads, places, head_dim]: a copy of the ring for each token.
            return [memory[:, rows[few]].transpose(0, 1).contiguous() for memory in memories]

        output, _ = cache.attend_in_steps(rings, query[tokens], lengths[tokens], how)
        # Of a chunk longer than the window, only the newest rows have a place.
        self._write(slice(max(tokens.start, tokens.stop - self.window), tokens.stop))
        return output

    def _write(self, tokens: slice) -> None:
        cache = self._cache
        for memory, new in zip(self.tensors, self._new, strict=True):
            memory[cache.step_slots[tokens], :, cache.step_positions[tokens] % self.window] = new[tokens]


class LinearLayer(LinearAttentionLayer):
    """Each slot's state in a layer of linear attention or convolutions, which transformers' modules update."""

    def __init__(self, cache: Slots) -> None:
        super().__init__()
        # The convolution's inputs, [slots, width, kernel], and the recurrent state if the layer has one.
        states = zip(cache.shape.states, cache.shape.state_dtypes, strict=True)
        self.tensors = [torch.zeros(cache.slots, *size, dtype=dtype, device=cache.device) for size, dtype in states]
        # If `record_past` is true, the modules pass every state to `update_conv_state` and change none in place.
        self.record_past = True
        self.has_previous_state = {0: True}  # so that they read the states also before the first token, as zeros
        self._cache = weakref.proxy(cache)

    def admit(self, slot: int, states: list[Tensor], length: int) -> None:
        """Write the states after a prompt of `length` tokens."""
        for tensor, state in zip(self.tensors, states, strict=True):
            tensor[slot] = state

    def read(self, index: int) -> Tensor:
        """Return a state of each token's slot, [tokens, ...]; zero beyond the step's own tokens."""
        return filled([self.tensors[index][self._cache.step_slots]], self._cache.step_tokens)

    def update_conv_state(self, conv_states: Tensor, *_: object, **__: object) -> Tensor:
        """Append the step's inputs [tokens or more, width, 1] to the convolution's inputs, and return both."""
        whole = torch.cat([self.read(0), conv_states], dim=-1)
        self._write(0, whole[..., -self.tensors[0].shape[-1] :])
        return whole

    def update_recurrent_state(self, recurrent_states: Tensor, *_: object, **__: object) -> Tensor:
        """Store the step's new states, [tokens or more, ...]."""
        self._write(1, recurrent_states)
        return recurrent_states

    def _write(self, index: int, states: Tensor) -> None:
        self.tensors[index][self._cache.step_slots] = states[: len(self._cache.step_slots)]
