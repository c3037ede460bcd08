"""The check of a loaded model: a few tokens over a slot cache against the network's own eager attention."""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from kvsweep.base.errors import UserError
from kvsweep.compression.attention import SLOT_ATTENTION
from kvsweep.compression.cache import SlotCache
from kvsweep.compression.policy import Selection
from kvsweep.compression.rows import Prefill
from kvsweep.harness.models.loaded import LoadedModel

TOKENS = 9
_KEPT = (0, 1, 4, 6, 7)  # of the 8 rows before the last token
# The largest root mean square of the differences, in standard deviations of the logits; 16 bits round far more.
_ALLOWED = {"float32": 2e-3, "bfloat16": 0.1, "float16": 0.1}


@torch.inference_mode()
def check_steps(model: LoadedModel) -> None:
    """Compare the logits of two decode steps, the second after an eviction, with those of the network's own code.

    Raises:
        UserError: shapes or logits differ, or the network fails.
    """
    ids = torch.arange(3, 3 + 7 * TOKENS, 7, device=model.device)[None] % model.spec.vocab_size
    try:
        found, expected = _steps(model, ids), _own_logits(model.network, ids)
    except (UserError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # Each architecture fails in its own way.
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")[:200]
        raise _refused(model, f"fails over a slot cache ({reason})") from error
    difference = (found - expected).square().mean().sqrt() / expected.std().clamp(min=1e-12)
    if not difference <= _ALLOWED[model.config.dtype]:
        raise _refused(model, f"has other logits over a slot cache, by {difference:.3g} of their standard deviation")


def _refused(model: LoadedModel, what: str) -> UserError:
    return UserError(f"model type {model.spec.family} {what}: choose a model that docs/python.md lists.")


def _steps(model: LoadedModel, ids: Tensor) -> Tensor:
    """Logits [2, vocabulary] of the last two tokens, each a step over a slot cache, with an eviction between them."""
    prefill, cache = Prefill(), SlotCache(model.shape, slots=1, capacity=TOKENS, device=model.device)
    before, at = ids[:, : TOKENS - 2], torch.arange(TOKENS, device=model.device)
    model.decode_hidden(input_ids=before, position_ids=at[None, :-2], past_key_values=DynamicCache(), prefill=prefill)
    _check_rows(model, prefill)
    cache.admit(prefill)
    logits = []
    for step in (TOKENS - 2, TOKENS - 1):
        cache.begin_step(at[step : step + 1])
        hidden = model.step_hidden(ids[0, step : step + 1], at[step : step + 1], cache)
        logits.append(model.logits(hidden, cache.linear)[0].float())
        if step < TOKENS - 1:
            cache.evict(0, Selection(keep=torch.tensor(_KEPT, device=model.device)))
    return torch.stack(logits)


def _check_rows(model: LoadedModel, prefill: Prefill) -> None:
    """Refuse a network whose layers compute rows of other shapes than its config says."""
    heads = {"q": model.shape.q_heads, "k": model.shape.kv_heads, "v": model.shape.kv_heads}
    for query, (key, value) in zip(prefill.queries, prefill.rows, strict=True):
        for name, tensor in {"q": query, "k": key, "v": value}.items():
            found, expected = (tensor.shape[0], tensor.shape[2]), (heads[name], model.shape.head_dim)
            if found != expected:
                raise _refused(model, f"has {name} of (heads, width) {found}, not {expected}")
    if len(prefill.rows) != model.shape.layers:
        raise _refused(model, f"has {len(prefill.rows)} layers of attention, not {model.shape.layers}")


def _own_logits(network: Any, ids: Tensor) -> Tensor:
    """The same logits by the network's own code, in which the last token does not see the rows evicted before it."""
    hidden = torch.ones(TOKENS, TOKENS, dtype=torch.bool, device=ids.device).triu(1)
    hidden[-1, [i for i in range(TOKENS - 1) if i not in _KEPT]] = True
    lowest = torch.finfo(network.dtype).min
    mask = torch.zeros(1, 1, TOKENS, TOKENS, dtype=network.dtype, device=ids.device).masked_fill(hidden, lowest)
    network.set_attn_implementation("eager")
    try:
        return network(input_ids=ids, attention_mask=mask, use_cache=False).logits[0, -2:].float()
    finally:
        network.set_attn_implementation(SLOT_ATTENTION)
