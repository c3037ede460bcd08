"""From hidden states to logits through the network's own code, which may scale or cap the logits."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers.modeling_outputs import MoeModelOutputWithPast

Linear = Callable[..., Tensor]


class OwnHead:
    """The forward of a ForCausalLM whose body returns given hidden states and whose last product is a given one."""

    def __init__(self, network: Any) -> None:
        head = network.get_output_embeddings()
        name = next(name for name, module in network.named_children() if module is head)
        self._given, self._product, self._network = _GivenStates(), _Product(head), copy.copy(network)
        parts = {network.base_model_prefix: self._given, name: self._product}
        self._network.__dict__["_modules"] = {**network._modules, **parts}

    def __call__(self, hidden: Tensor, linear: Linear) -> Tensor:
        """Logits [slots, vocabulary] of hidden states [slots, hidden_size]; `linear` multiplies."""
        self._given.states, self._product.linear = hidden[None], linear
        return self._network(inputs_embeds=hidden[None], use_cache=False).logits[0]


@dataclass
class _Output(MoeModelOutputWithPast):
    cross_attentions: Any = None


class _GivenStates(nn.Module):
    states: Tensor

    def forward(self, *_: Any, **__: Any) -> _Output:
        return _Output(last_hidden_state=self.states)


class _Product(nn.Module):
    linear: Linear = staticmethod(nn.functional.linear)

    def __init__(self, head: Any) -> None:
        super().__init__()
        self.weight, self.bias = head.weight, head.bias

    def forward(self, states: Tensor) -> Tensor:
        return self.linear(states[0], self.weight, self.bias)[None]
