"""The attention function that lets a transformers model decode over a slot cache."""

from typing import Any

import torch
from torch import Tensor, nn

from kvsweep.compression.cache import SlotCache
from kvsweep.compression.rows import PaddedPrefill, Prefill

SLOT_ATTENTION = "slot"
# Arguments that transformers hands down and that change nothing in what a token sees.
_HARMLESS = {
    "dropout",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "position_ids",
    "use_cache",
}


def slot_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    sliding_window: int | None = None,
    slot_cache: SlotCache | None = None,
    prefill: Prefill | PaddedPrefill | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend one step over `slot_cache`; without it, prefill prompts or the next chunk of one, causally.

    query [prompts, q_heads, tokens, head_dim], in a step [tokens, q_heads, 1, head_dim]; key and value as the cache's
    `update` returned them. Returns ([prompts, tokens, q_heads, head_dim], None). The cache's recorders, or `prefill`,
    take in what the layer computed.

    Raises:
        ValueError: a decode step without `slot_cache`, or an argument that slot attention does not know, such as a
            window or sinks; the result would be wrong.
    """
    given = {"attention_mask": attention_mask, **others}
    rows = key.shape[2] if slot_cache is None else slot_cache.longest
    if sliding_window is not None and rows > sliding_window:
        raise ValueError(f"slot attention reaches beyond sliding_window={sliding_window}")
    if unknown := sorted(name for name in given.keys() - _HARMLESS if given[name] is not None):
        raise ValueError(f"slot attention does not know {', '.join(unknown)}")
    if slot_cache is not None:
        return attend_slots(slot_cache, int(module.layer_idx), query[:, :, 0], scaling)[:, None], None  # type: ignore[arg-type]
    earlier = key.shape[2] - query.shape[2]
    if earlier and prefill is None:
        raise ValueError("a decode step with slot attention needs slot_cache=, the cache that knows each slot's length")
    if prefill is not None:
        prefill.observe(query, key, value, scaling)
    seen = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=key.device).tril(earlier)
    output = nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=seen if earlier else None, is_causal=not earlier, scale=scaling, enable_gqa=True
    )
    return output.transpose(1, 2), None


def attend_slots(cache: SlotCache, layer: int, query: Tensor, scaling: float) -> Tensor:
    """One layer's attention of a step, which the cache's recorders take in; returns [tokens, q_heads, head_dim].

    query [tokens, q_heads, head_dim], after the cache's `update`. Tokens beyond the step's own fill a block and attend
    to nothing.
    """
    output, masses = cache.storage.attend(layer, query, scaling)
    for piece, mass in zip(cache.pieces, masses, strict=True):
        cache.observe(layer, piece, query[piece.tokens], mass)
    return output


def use_slot_attention(model: nn.Module) -> None:
    """Make a transformers model decode over a `SlotCache`; over any other cache it prefills causally."""
    from transformers import AttentionInterface  # with transformers' models, which take as long to import as torch

    AttentionInterface.register(SLOT_ATTENTION, slot_attention)
    model.set_attn_implementation(SLOT_ATTENTION)  # type: ignore[operator]
