"""The slot cache: one fixed block of memory for the keys and values of all sequences being decoded.

A slot holds one sequence: `capacity` rows of keys and values per layer, stored by `compression.storage`. A row is one
cached token; the first `length` rows are live. An eviction moves the kept rows to the front and lowers the length. So
the capacity depends on the budget, not on the length of the text.
"""

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from kvsweep.compression.cache_rows import CacheShape, PaddedPrefill, Prefill
from kvsweep.compression.config import UNPACKED, CacheConfig, LayerKind, fixed_bytes
from kvsweep.compression.layers import LinearLayer, SlotLayer, WindowLayer
from kvsweep.compression.policy import Selection, Signal
from kvsweep.compression.recorders import Recorder, keep_columns, recorder_of
from kvsweep.compression.slots import Piece, Slots
from kvsweep.compression.storage import Fp8Rows, KiviRows, PackedRows, Storage, WholeRows
from kvsweep.kernels.implementation import Implementation, operations
from kvsweep.kernels.reference import chunk_attention


class SlotCache(Slots, Cache):
    """All layers' slots, each slot's length, the original positions of the rows, and the recorded signals.

    `sizes` are those of `Slots`: slots, capacity, device, per_head, invariant.
    The first `live` slots take part in a step. To end a sequence, the caller copies the last live slot over it (`copy`)
    and lowers `live`. `per_head`: each layer and head has its own positions, for a policy that keeps different rows per
    head. `invariant`: a slot's bits do not depend on the other slots; the caller then steps with
    `kernels.row_format.filled_tokens` of its tokens. Raises ValueError if `per_head` or `impl` does not support the
    precision in `config`.
    """

    layers: list[Any]

    def __init__(
        self,
        shape: CacheShape,
        *,
        signals: Iterable[Signal] = (),
        impl: Implementation = "torch",
        config: CacheConfig = UNPACKED,
        **sizes: Any,
    ) -> None:
        Slots.__init__(self, shape, operations(impl), **sizes)
        on_gpu = self.device.type == "cuda"
        config.check_implementation(impl, torch.cuda.get_device_capability(self.device) if on_gpu else None)
        self.recorders = {signal: recorder_of(signal, self) for signal in signals}
        self.needs_mass = any(recorder.needs_mass for recorder in self.recorders.values())
        # Those that define `on_attention`: without any, `observe` has nothing to prepare.
        self._observing = [r for r in self.recorders.values() if type(r).on_attention is not Recorder.on_attention]
        # The schemes plain and rotated have one storage.
        packed_class = {"kivi": KiviRows, "kvarn": KiviRows, "fp8": Fp8Rows}.get(config.scheme, PackedRows)
        self.storage: Storage = packed_class(self, config) if config.is_packed else WholeRows(self)
        numbers = itertools.count()  # a storage numbers the full layers alone
        layer_of: dict[LayerKind, Callable[[], Any]] = {
            "full": lambda: SlotLayer(self, self.storage, next(numbers)),
            "window": lambda: WindowLayer(self),
            "linear": lambda: LinearLayer(self),
        }
        Cache.__init__(self, layers=[layer_of[kind]() for kind in shape.layer_kinds])
        self.slot_layers = [layer for layer in self.layers if isinstance(layer, SlotLayer)]
        windows = [layer for layer in self.layers if isinstance(layer, WindowLayer)]
        self.linears = [layer for layer in self.layers if isinstance(layer, LinearLayer)]
        self._fixed_layers: list[Any] = [*windows, *self.linears]  # windows first, as `admit` reads a prefill
        self._fixed: list[Tensor] = []  # memory whose size does not depend on the capacity
        for layer in self._fixed_layers:
            self._fixed += layer.tensors

    @staticmethod
    def bytes_per_slot(shape: CacheShape, capacity: int, config: CacheConfig = UNPACKED) -> int:
        """Bytes of one slot: its rows (`CacheConfig.bytes_per_slot`) and the memory of fixed size."""
        itemsize = shape.dtype.itemsize
        return config.bytes_per_slot(shape, itemsize, capacity) + fixed_bytes(shape, itemsize)

    @property
    def kv_bytes(self) -> int:
        """Bytes that the rows, windows and states of all slots take."""
        return sum(tensor.untyped_storage().nbytes() for tensor in (*self.storage.tensors, *self._fixed))

    @property
    def tensors(self) -> list[Tensor]:
        """All memory that belongs to slots, [slots, ...] each: rows, windows, states, positions, recorded signals."""
        tensors = [*self.storage.tensors, *self.storage.columns, *self._fixed]
        for recorder in self.recorders.values():
            tensors += recorder.tensors
        return [*tensors, self.positions, self.device_lengths]

    @property
    def longest_chunk(self) -> int | None:
        """The most tokens of one slot that a step may feed; None if there is no limit."""
        return 1 if self.linears else self.storage.longest_chunk

    # transformers' linear layers read these states of each token's slot: the convolution's inputs, the recurrent sum.
    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor:
        return self.layers[layer_idx].read(0)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor:
        return self.layers[layer_idx].read(1)

    def admit(self, prefill: Prefill) -> int:
        """Copy a prefilled prompt, or an empty `Prefill`, into the first free slot; make it live and return it."""
        slot = self.live
        length = prefill.length
        self.live += 1
        self._set_length(slot, length)
        self.positions[slot, ..., :length] = torch.arange(length, device=self.device)
        # An earlier sequence may have left NaN where this prompt writes nothing.
        for memory in (*self.storage.tensors, *self.storage.columns, *self._fixed):
            memory[slot] = 0
        self.storage.admit(slot, prefill)
        of_fixed_layers = [*prefill.windows, *prefill.states]
        if of_fixed_layers:  # an empty `Prefill` has none
            for layer, rows in zip(self._fixed_layers, of_fixed_layers, strict=True):
                layer.admit(slot, rows, length)
        for recorder in self.recorders.values():
            recorder.admit(slot, prefill)
        return slot

    def _place(self, pieces: list[Piece], slots: Tensor, write_at: Tensor, positions: Tensor) -> None:
        super()._place(pieces, slots, write_at, positions)
        self.storage.place()
        for recorder in self.recorders.values():
            recorder.on_row(slots, write_at, positions)

    def observe(self, layer: int, piece: Piece, query: Tensor, mass: Tensor | None) -> None:
        if not self._observing:
            return
        # From [tokens, ...] to [slots, tokens of a slot, ...].
        by_slot = (-1, piece.count)
        positions = self.step_positions[piece.tokens].unflatten(0, by_slot)
        query = query.unflatten(0, by_slot)
        mass = None if mass is None else mass.unflatten(0, by_slot)
        for recorder in self._observing:
            recorder.on_attention(layer, piece.slots, positions, query, mass)

    def end_step(self, hidden: Tensor) -> None:
        """Record the last hidden states [tokens or more, hidden_size] of the tokens that this step wrote."""
        for recorder in self.recorders.values():
            recorder.on_token(self.step_slots, self.write_at, hidden)

    def evict(self, slot: int, selection: Selection) -> None:
        if not self.slot_layers:
            raise ValueError("a model without a layer of full attention has no rows to evict: choose policy=full")
        keep = selection.keep
        self.storage.keep(slot, keep)
        keep_columns(self.positions[slot], keep)
        for signal, recorder in self.recorders.items():
            if signal in selection.written:  # for the rows before the eviction, so `evict` moves these numbers too
                recorder.write(slot, selection.written[signal])
            recorder.evict(slot, keep)
        self._set_length(slot, keep.shape[-1])

    def held(self, slot: int, text_length: int, *, per_head: bool) -> list[int]:
        """Return how much of each text position 0 .. text_length - 1 the slot holds, as runs `[percent, count, ...]`.

        The percentage counts the (layer, kv head) pairs that hold the position, rounded to a multiple of 10.
        """
        positions = self.positions[slot, ..., : int(self.lengths[slot])]
        # [pairs, length]; if all pairs hold the same positions, one stands for all.
        positions = positions.flatten(0, 1) if per_head else positions[0, :1]
        pairs = len(positions)
        holding = torch.bincount(positions.flatten(), minlength=text_length)  # pairs that hold each text position
        # 10 * round(10 * holding / pairs) in whole numbers; a half goes up.
        runs = torch.unique_consecutive((20 * holding + pairs) // (2 * pairs) * 10, return_counts=True)
        return torch.stack(runs, dim=1).flatten().tolist()

    def copy(self, sources: int | list[int], targets: int | list[int]) -> None:
        """Copy one slot, or several at once, so that two can change places."""
        for tensor in self.tensors:
            tensor[targets] = tensor[sources]
        self.lengths[targets] = self.lengths[sources]


SLOT_ATTENTION = "slot"
# transformers passes these arguments; they do not change what a token attends to.
_INERT = {"dropout", "output_attentions", "output_hidden_states", "output_router_logits", "position_ids", "use_cache"}


def slot_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    slot_cache: SlotCache | None = None,
    slot_shape: CacheShape | None = None,
    prefill: Prefill | PaddedPrefill | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend one step over `slot_cache`; without it, prefill prompts or the next chunk of a prompt, causally.

    query [prompts, q_heads, tokens, head_dim], in a step [tokens, q_heads, 1, head_dim]; key and value as the cache's
    `update` returned them; `s_aux`: the layer's attention sinks; `slot_shape` says which layers are windows. Returns
    ([prompts, tokens, q_heads, head_dim], None). The cache's recorders, or `prefill`, record the layer's queries, keys
    and attention. Raises ValueError for a step without `slot_cache` and for an unknown window or argument.
    """
    arguments = {"attention_mask": attention_mask, **others}
    unknown = sorted(name for name in arguments.keys() - _INERT if arguments[name] is not None)
    if unknown:
        raise ValueError(f"slot attention does not know {', '.join(unknown)}")
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    shape = slot_shape if slot_cache is None else slot_cache.shape
    window = shape.window if shape is not None and shape.layer_kinds[layer] == "window" else None
    if sliding_window is not None and sliding_window != window:
        rows = key.shape[2] if slot_cache is None else slot_cache.longest
        # A cache without windows holds all rows of the layer: then the window acts on no row until they are more.
        if window is not None or rows > sliding_window:
            raise ValueError(f"layer {layer} reaches beyond sliding_window={sliding_window}: the cache has {window}")
    how: dict[str, Any] = {"scaling": scaling, "sinks": s_aux, "softcap": softcap}
    if slot_cache is not None:
        return slot_cache.layers[layer].attend(query[:, :, 0], how)[:, None], None
    # More keys than queries: another cache holds earlier tokens, which only a prefill in chunks may have.
    if key.shape[2] > query.shape[2] and prefill is None:
        raise ValueError("a decode step with slot attention needs slot_cache=, the cache that knows each slot's length")
    if prefill is not None:
        for part, place in prefill.parts:
            heads = query[place], key[place], value[place]
            if window is None:
                part.observe(*heads, scaling, s_aux, softcap)
            else:
                part.observe_window(*heads, window)
    if window is None and s_aux is None and softcap is None:  # all that torch's attention can compute
        return _causal(query, key, value, scaling), None
    prompts = zip(query.transpose(1, 2), key, value, strict=True)
    return torch.stack([chunk_attention(*prompt, **how, window=window)[0] for prompt in prompts]), None


def _causal(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """Attend as `slot_attention` does in a prefill: each token to itself and to all earlier ones."""
    earlier = key.shape[2] - query.shape[2]  # tokens of earlier chunks, which `is_causal` does not know
    mask = None
    if earlier:
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=key.device).tril(earlier)
    output = nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=True
    )
    return output.transpose(1, 2)


def use_slot_attention(model: nn.Module) -> None:
    """Make a transformers model attend over a `SlotCache`; with any other cache the model prefills causally."""
    from transformers import AttentionInterface  # with transformers' models, which take as long to import as torch

    AttentionInterface.register(SLOT_ATTENTION, slot_attention)
    model.set_attn_implementation(SLOT_ATTENTION)  # type: ignore[operator]
