"""A model that decodes over slots, with its tokenizer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.cache_utils import DynamicCache
from transformers.modeling_outputs import MoeModelOutputWithPast

from kvsweep.compression.cache import SlotCache
from kvsweep.compression.cache_rows import CacheShape, PaddedPrefill, Prefill
from kvsweep.harness.models.config import ModelConfig
from kvsweep.harness.models.dialogue import Dialogue
from kvsweep.harness.models.spec import ModelSpec
from kvsweep.kernels.implementation import Implementation
from kvsweep.kernels.packed import pack
from kvsweep.kernels.pointwise import HeadNorms
from kvsweep.messages.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast


class _Layer:
    """The modules of a decoder layer, some with fused weights."""

    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        projections = [attention.q_proj, attention.k_proj, attention.v_proj]
        self.qkv = _shared(projections, "weight")  # [(q_heads + 2 kv_heads) * head_dim, hidden_size]
        self.qkv_bias = None if projections[0].bias is None else _shared(projections, "bias")
        self.gate_up = _shared([mlp.gate_proj, mlp.up_proj], "weight")  # [2 * intermediate_size, hidden_size]
        self.out, self.down = attention.o_proj, mlp.down_proj
        self.norm, self.mlp_norm = _norm(layer.input_layernorm), _norm(layer.post_attention_layernorm)
        self.head_norms: HeadNorms | None = None
        if hasattr(attention, "q_norm"):  # Qwen3 normalises queries and keys
            self.head_norms = (attention.q_norm.weight, *_norm(attention.k_norm))  # both have one epsilon


class FusedStep:
    """The decode step of a network with a `fusable` spec. Weights are fused in place and become views."""

    # The engine calls this in inference mode. Tensors made in inference mode can never be used with autograd again.
    @torch.inference_mode(False)
    def __init__(self, network: Any) -> None:
        base = network.base_model
        attention = base.layers[0].self_attn
        self.embedding = base.embed_tokens
        self.rotary = base.rotary_emb
        self.norm = _norm(base.norm)
        self.head_dim = attention.head_dim
        self.scaling = float(attention.scaling)
        self.q_heads = network.config.num_attention_heads
        self.layers = [_Layer(layer) for layer in base.layers]
        self.output_weight = network.get_output_embeddings().weight

    @property
    def packed(self) -> bool:
        """Whether the weights have packed copies: not on a GPU, nor where the processor cannot multiply them."""
        return hasattr(self.output_weight, "packed_product")

    @torch.inference_mode(False)
    def pack_weights(self) -> None:
        """Multiply later steps in oneDNN's order where `kernels.packed` can."""
        for layer in self.layers:
            for weight in (layer.qkv, layer.out.weight, layer.gate_up, layer.down.weight):
                pack(weight)
        pack(self.output_weight)

    def __call__(self, tokens: Tensor, positions: Tensor, cache: SlotCache) -> Tensor:
        """Last hidden states [tokens, hidden_size] of tokens at positions [tokens]; `cache` has begun the step."""
        states = self.embedding(tokens)
        update = None  # what the last block adds to the states; each norm adds it first, in one kernel
        cos, sin = self.rotary(states, positions[:, None])  # [tokens, 1, head_dim] each
        # The rotation swaps the halves of a head and negates one half; here the sine gets the sign.
        sin[..., : self.head_dim // 2].neg_()
        operations = cache.operations
        for layer, memory in zip(self.layers, cache.layers, strict=True):
            states, normed = operations.add_norm(states, update, *layer.norm)
            # The heads of queries, keys and values side by side.
            heads = cache.linear(normed, layer.qkv, layer.qkv_bias).view(len(tokens), -1, self.head_dim)
            # This also writes the keys and values into the layer's memory.
            query = memory.rotate(heads, cos, sin, q_heads=self.q_heads, norms=layer.head_norms)
            mixed = memory.attend(query, {"scaling": self.scaling}).flatten(1)
            update = cache.linear(mixed, layer.out.weight, layer.out.bias)
            states, normed = operations.add_norm(states, update, *layer.mlp_norm)
            gated = operations.gated(cache.linear(normed, layer.gate_up))
            update = cache.linear(gated, layer.down.weight, layer.down.bias)
        hidden: Tensor = operations.add_norm(states, update, *self.norm)[1]
        return hidden


def _shared(modules: list[nn.Linear], name: str) -> Tensor:
    """Concatenate a parameter of the modules into one tensor; the parameters become views of it."""
    parameters: list[Tensor] = [getattr(module, name) for module in modules]
    joined = torch.cat(parameters).detach()
    views = joined.split([len(parameter) for parameter in parameters])
    for module, view in zip(modules, views, strict=True):
        setattr(module, name, nn.Parameter(view, requires_grad=False))
    return joined


def _norm(module: Any) -> tuple[Tensor, float]:
    return module.weight, float(module.variance_epsilon)


Linear = Callable[..., Tensor]
# transformers' names of the layers that make up a prompt's cache.
_LAYER_TYPES = {"full": "full_attention", "window": "sliding_attention", "linear": "linear_attention"}


@dataclass(frozen=True)
class LoadedModel:
    """A causal language model that is ready to decode over slots, and its tokenizer."""

    config: ModelConfig
    network: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast

    @cached_property
    def compared(self) -> set[Implementation]:  # those whose steps `probe.check_steps` has found right
        return set()

    @cached_property
    def spec(self) -> ModelSpec:
        return ModelSpec.of(self.network.config)

    @cached_property
    def dialogue(self) -> Dialogue:
        return Dialogue(self.config, self.tokenizer, self.spec.vocab_size)

    @cached_property
    def shape(self) -> CacheShape:
        return self.spec.cache_shape(self.config.dtype)

    def check_length(self, tokens: int) -> None:
        """Raise UserError for a text longer than the model's rotary embeddings, position table or window."""
        positions = self.spec.positions
        if self.spec.limited and positions is not None and tokens > positions:
            raise UserError(
                f"a text may take {tokens} tokens, prompt and completion, and {self.config.name} can be decoded over "
                f"slots up to {positions} alone: lower decoding.max_new_tokens."
            )

    @property
    def device(self) -> torch.device:
        return self.network.device

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """The end tokens of generation_config, or else the tokenizer's; empty without any."""
        end = self.network.generation_config.eos_token_id
        if end is None:
            end = self.tokenizer.eos_token_id
        if end is None:
            return ()
        return tuple(end) if isinstance(end, list) else (end,)

    @cached_property
    def scaling(self) -> float:  # of the attention logits
        prefill = Prefill()  # notes the scaling of the full layers that it observes
        with torch.inference_mode():
            self.read(torch.zeros(1, 1, dtype=torch.int64, device=self.device), 0, prefill, self.new_cache())
        return float(prefill.scaling)

    @cached_property
    def separators(self) -> Tensor:
        """[vocabulary] true at SepLLM's separators: one punctuation mark or line break, spaces, the text's start."""
        start_token = getattr(self.tokenizer, "bos_token_id", None)
        marks = {"", *".,?!;:\n"}
        # Encode behind another token, since a tokenizer may drop a space at a text's start.
        first = self.tokenizer.encode("a", add_special_tokens=False)
        before = self.dialogue.decode(first)
        are_separators = []
        for token in range(self.spec.vocab_size):
            text = self.dialogue.decode([*first, token]).removeprefix(before)
            is_mark = text != "" and text.strip(" ") in marks
            are_separators.append(is_mark or token == start_token)
        return torch.tensor(are_separators, device=self.device)

    def forget_spec(self) -> None:
        """Read the network's config again, after it has changed."""
        for name in ("spec", "shape", "_cache_config"):
            self.__dict__.pop(name, None)

    @cached_property
    def fused_step(self) -> FusedStep | None:
        if not self.spec.fusable:
            return None
        return FusedStep(self.network)

    def step_hidden(self, tokens: Tensor, positions: Tensor, cache: SlotCache) -> Tensor:
        """Return last hidden states [tokens, hidden_size] of tokens at positions [tokens]; `cache` has begun the step.

        Behind the step's own tokens may stand padding, up to `cache.step_tokens`; its hidden states mean nothing.
        """
        if self.fused_step is not None:
            return self.fused_step(tokens, positions, cache)
        inputs = {"input_ids": tokens[:, None], "position_ids": positions[:, None]}
        # One cache under two names: the layers' updates take the first, `slot_attention` the second.
        caches = {"past_key_values": cache, "slot_cache": cache, "use_cache": True}
        with self._products_by(cache.linear):
            return self.network.base_model(**inputs, **caches).last_hidden_state[:, 0]

    def new_cache(self) -> DynamicCache:
        return DynamicCache(config=self._cache_config)

    @cached_property
    def _cache_config(self) -> Any:
        """The network's config with `spec`'s layers: transformers' caches obey fields that some families ignore."""
        config = copy.copy(self.network.config)
        config.layer_types = [_LAYER_TYPES[kind] for kind in self.spec.layer_kinds]
        config.sliding_window = self.spec.window or None
        return config

    def check_rows(self, needed: str) -> None:
        """Raise UserError for a model without a full attention layer; `needed` says what needs its rows."""
        if not self.spec.layers:
            raise UserError(
                f"model={self.config.name} has no layer of full attention, and {needed}: choose another model."
            )

    def read(self, ids: Tensor, start: int, prefill: Prefill | PaddedPrefill, cache: DynamicCache | None) -> Tensor:
        """Read prompts, or the next chunk of one, from position `start` on; return normed last hidden states.

        ids [prompts, tokens]. `prefill` observes. `cache` (`new_cache`) passes what was read from one chunk to the
        next; it may be None for a model without linear layers.
        """
        positions = torch.arange(start, start + ids.shape[1], device=ids.device).expand(len(ids), -1)
        inputs = {"input_ids": ids, "position_ids": positions}
        caches = {"past_key_values": cache, "use_cache": cache is not None}
        observer = {"prefill": prefill, "slot_shape": self.shape}
        hidden: Tensor = self.network.base_model(**inputs, **caches, **observer).last_hidden_state
        if cache is not None and "linear" in self.shape.kinds:
            assert len(ids) == 1, "a linear layer would read the padding of a shorter prompt"
            [(observer_of_prompt, _)] = prefill.parts
            observer_of_prompt.states = []
            layers: list[Any] = cache.layers
            for layer, kind in zip(layers, self.shape.kinds, strict=True):
                if kind == "linear":
                    # transformers numbers a layer's states; these families have one of a kind, or no recurrent one.
                    states = (layer.conv_states[0], layer.recurrent_states[0])
                    observer_of_prompt.states.append([state[0] for state in states if state is not None])
        return hidden

    def check_finite(self, hidden: Tensor, text: str) -> None:
        """Raise UserError if last hidden states of a text are NaN or infinite."""
        if not bool(hidden.isfinite().all()):
            raise UserError(
                f"{text} has hidden states that are NaN or infinite: "
                "take model.dtype=bfloat16 or float32, or look at the weights."
            )

    def logits(self, hidden: Tensor, linear: Linear = functional.linear) -> Tensor:
        """Return logits [slots, vocabulary] of hidden states [slots, hidden_size]; `linear` multiplies."""
        if self.spec.plain_head:
            head = self.network.get_output_embeddings()
            return linear(hidden, head.weight, head.bias)
        # The network's own forward, which may scale or cap the logits, with these states in place of its layers.
        network = self._head
        states = hidden[None]
        network._modules[network.base_model_prefix] = lambda *_, **__: _Output(last_hidden_state=states)
        with self._products_by(linear):
            return network(inputs_embeds=states, use_cache=False).logits[0]

    @cached_property
    def _head(self) -> Any:
        """A copy of the network with the same modules, which `logits` replaces in part."""
        network: Any = copy.copy(self.network)
        network.__dict__["_modules"] = dict(network._modules)
        return network

    @cached_property
    def _linear_modules(self) -> list[nn.Linear]:
        # A subclass may compute more than a product.
        return [module for module in self.network.modules() if type(module) is nn.Linear]

    @contextmanager
    def _products_by(self, linear: Linear) -> Iterator[None]:
        """Let `linear`, the cache's operation, compute the products of the network's `nn.Linear` modules in the block.

        Outside they are torch's own products, for prompts, which are read one at a time.
        """
        for module in self._linear_modules:
            module.__dict__["forward"] = partial(_multiply, linear, module)
        try:
            yield
        finally:
            for module in self._linear_modules:
                del module.__dict__["forward"]


def _multiply(linear: Linear, module: nn.Linear, inputs: Tensor) -> Tensor:
    rows = inputs.reshape(-1, inputs.shape[-1])
    return linear(rows, module.weight, module.bias).view(*inputs.shape[:-1], -1)


@dataclass
class _Output(MoeModelOutputWithPast):
    """What a network reads of its layers' output: some families read their experts' logits, GPT-2 cross attentions."""

    cross_attentions: Any = None
