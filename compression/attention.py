"""The attention function that lets a transformers model decode over a slot cache."""

from typing import Any

import torch
from torch import Tensor, nn

from kvsweep.compression.cache import SlotCache
from kvsweep.compression.rows import CacheShape, PaddedPrefill, Prefill
from kvsweep.kernels.reference import chunk_attention

SLOT_ATTENTION = "slot"
# Arguments that transformers hands down and that change nothing in what a token sees.
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
    """Attend one step over `slot_cache`; without it, prefill prompts or the next chunk of one, causally.

    query [prompts, q_heads, tokens, head_dim], in a step [tokens, q_heads, 1, head_dim]; key and value as the cache's
    `update` returned them; `s_aux`: the layer's sinks; `slot_shape` says which layers are windows. Returns ([prompts,
    tokens, q_heads, head_dim], None). The cache's recorders, or `prefill`, take in what the layer computed. What would
    be computed wrongly is a ValueError: a step without `slot_cache`, a window or an argument that is not known here.
    """
    given = {"attention_mask": attention_mask, **others}
    if unknown := sorted(name for name in given.keys() - _INERT if given[name] is not None):
        raise ValueError(f"slot attention does not know {', '.join(unknown)}")
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    shape = slot_shape if slot_cache is None else slot_cache.shape
    window = shape.window if shape is not None and shape.layer_kinds[layer] == "window" else None
    if sliding_window is not None and window is None:
        reached = key.shape[2] if slot_cache is None else slot_cache.longest
        if reached > sliding_window:
            raise ValueError(f"slot attention reaches beyond sliding_window={sliding_window}")
    elif sliding_window is not None and sliding_window != window:
        raise ValueError(f"layer {layer} has sliding_window={sliding_window} in a cache of windows of {window}")
    how: dict[str, Any] = {"scaling": scaling, "sinks": s_aux, "softcap": softcap}
    if slot_cache is not None:
        return slot_cache.layers[layer].attend(query[:, :, 0], how)[:, None], None
    if key.shape[2] > query.shape[2] and prefill is None:
        raise ValueError("a decode step with slot attention needs slot_cache=, the cache that knows each slot's length")
    if prefill is not None:
        if window is None:
            prefill.observe(query, key, value, scaling, s_aux, softcap)
        else:
            prefill.observe_window(query, key, value, window)
    if window is None and s_aux is None and softcap is None:
        return _causal(query, key, value, scaling), None
    prompts = zip(query.transpose(1, 2), key, value, strict=True)
    return torch.stack([chunk_attention(*prompt, **how, window=window)[0] for prompt in prompts]), None


def _causal(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    earlier = key.shape[2] - query.shape[2]
    seen = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=key.device).tril(earlier)
    output = nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=seen if earlier else None, is_causal=not earlier, scale=scaling, enable_gqa=True
    )
    return output.transpose(1, 2)


def use_slot_attention(model: nn.Module) -> None:
    """Make a transformers model decode over a `SlotCache`; over any other cache it prefills causally."""
    from transformers import AttentionInterface  # with transformers' models, which take as long to import as torch

    AttentionInterface.register(SLOT_ATTENTION, slot_attention)
    model.set_attn_implementation(SLOT_ATTENTION)  # type: ignore[operator]
