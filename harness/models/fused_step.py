"""One decode step of a Llama-like model over a slot cache, in a third of the operations of transformers' modules.

The time of a small model's step, and of any step that is not captured in a graph, is the time to launch its operations.
So one product computes queries, keys and values, another gate and up, and nothing is computed that is not needed.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from kvsweep.compression.cache import SlotCache


class _Layer:
    """A decoder layer's modules, some with their weights fused."""

    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        projections = [attention.q_proj, attention.k_proj, attention.v_proj]
        self.qkv = _shared(projections, "weight")  # [(q_heads + 2 kv_heads) * head_dim, hidden_size]
        self.qkv_bias = None if projections[0].bias is None else _shared(projections, "bias")
        self.gate_up = _shared([mlp.gate_proj, mlp.up_proj], "weight")  # [2 * intermediate_size, hidden_size]
        self.out, self.down = attention.o_proj, mlp.down_proj
        self.norm, self.mlp_norm = layer.input_layernorm, layer.post_attention_layernorm
        # Qwen3's, of queries and keys.
        self.head_norms = (attention.q_norm, attention.k_norm) if hasattr(attention, "q_norm") else None


class FusedStep:
    """The decode step of a network whose spec is `fusable`. It fuses the weights in place: they become views."""

    # The engine calls this in inference mode. Tensors made in inference mode could never be used with autograd again.
    @torch.inference_mode(False)
    def __init__(self, network: Any) -> None:
        base = network.base_model
        attention = base.layers[0].self_attn
        self.embedding, self.rotary, self.norm = base.embed_tokens, base.rotary_emb, base.norm
        self.head_dim, self.scaling = attention.head_dim, float(attention.scaling)
        self.q_heads = network.config.num_attention_heads
        self.kv_heads = network.config.num_key_value_heads
        self.layers = [_Layer(layer) for layer in base.layers]

    def __call__(self, tokens: Tensor, positions: Tensor, cache: SlotCache) -> Tensor:
        """Last hidden states [tokens, hidden_size] of tokens at positions [tokens], a step that `cache` has begun."""
        states = functional.embedding(tokens, self.embedding.weight)
        cos, sin = self.rotary(states, positions[:, None])  # [live, 1, head_dim]
        # The rotation exchanges the halves of a head and negates one; the sine takes the sign here.
        sin = torch.cat([-sin[..., : self.head_dim // 2], sin[..., self.head_dim // 2 :]], dim=-1)
        for index, layer in enumerate(self.layers):
            states = states + self._attend(index, layer, _normalized(layer.norm, states), cos, sin, cache)
            gate, up = cache.linear(_normalized(layer.mlp_norm, states), layer.gate_up).chunk(2, dim=-1)
            states = states + cache.linear(functional.silu(gate) * up, layer.down.weight, layer.down.bias)
        return _normalized(self.norm, states)

    def _attend(self, index: int, layer: _Layer, states: Tensor, cos: Tensor, sin: Tensor, cache: SlotCache) -> Tensor:
        tokens, rotated = len(states), self.q_heads + self.kv_heads
        heads = cache.linear(states, layer.qkv, layer.qkv_bias).view(tokens, -1, self.head_dim)
        queries_keys = heads[:, :rotated]
        if layer.head_norms is not None:
            of_queries, of_keys = layer.head_norms
            split = queries_keys.split([self.q_heads, self.kv_heads], dim=1)
            queries_keys = torch.cat([_normalized(of_queries, split[0]), _normalized(of_keys, split[1])], dim=1)
        queries_keys = queries_keys * cos + queries_keys.roll(self.head_dim // 2, dims=-1) * sin
        query, key = queries_keys.split([self.q_heads, self.kv_heads], dim=1)
        cache.layers[index].update(key[:, :, None], heads[:, rotated:, None])
        mixed = cache.layers[index].attend(query, {"scaling": self.scaling}).flatten(1)
        return cache.linear(mixed, layer.out.weight, layer.out.bias)


def _shared(modules: list[nn.Linear], name: str) -> Tensor:
    """Concatenate a parameter of the modules into one tensor, and make the parameters views of it."""
    parts: list[Tensor] = [getattr(module, name) for module in modules]
    whole = torch.cat([part.detach() for part in parts])
    for module, view in zip(modules, whole.split([len(part) for part in parts]), strict=True):
        setattr(module, name, nn.Parameter(view, requires_grad=False))
    return whole


def _normalized(norm: Any, states: Tensor) -> Tensor:
    return functional.rms_norm(states, norm.weight.shape, norm.weight, norm.variance_epsilon)
