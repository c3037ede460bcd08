"""The check of a loaded model: a few tokens over a slot cache against the network's own eager attention."""

from typing import Any

import torch
from torch import Tensor

from kvsweep.base.errors import UserError
from kvsweep.compression.attention import SLOT_ATTENTION
from kvsweep.compression.cache import SlotCache
from kvsweep.compression.policy import Selection
from kvsweep.compression.rows import CacheShape, LayerKind, Prefill
from kvsweep.harness.models.hub import lines_of
from kvsweep.harness.models.loaded import LoadedModel

TOKENS = 9
_KEPT = (0, 1, 4, 6, 7)  # of the 8 rows before the last token
# The largest root mean square of the differences, in standard deviations of the logits; 16 bits round far more.
_ALLOWED = {"float32": 2e-3, "bfloat16": 0.1, "float16": 0.1}


@torch.inference_mode()
def check_steps(model: LoadedModel) -> None:
    """Hold two decode steps, the second after an eviction, to the network's own code; a UserError where they differ."""
    ids = torch.arange(3, 3 + 7 * TOKENS, 7, device=model.device)[None] % model.spec.vocab_size
    try:
        found, expected = _steps(model, ids), _own_logits(model, ids)
    except (UserError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # Each architecture fails in its own way.
        reason = lines_of(error)[0].rstrip(".")[:200]
        raise _refused(model, f"fails over a slot cache ({reason})") from error
    difference = (found - expected).square().mean().sqrt() / expected.std().clamp(min=1e-12)
    if not difference <= _ALLOWED[model.config.dtype]:
        raise _refused(model, f"has other logits over a slot cache, by {difference:.3g} of their standard deviation")


def _refused(model: LoadedModel, what: str) -> UserError:
    return UserError(f"model type {model.spec.family} {what}: choose a model that docs/python.md lists.")


def _steps(model: LoadedModel, ids: Tensor) -> Tensor:
    """Logits [2, vocabulary] of the last two tokens, each a step over a slot cache, with an eviction between them."""
    prefill, cache = Prefill(), SlotCache(model.shape, slots=1, capacity=TOKENS, device=model.device)
    at = torch.arange(TOKENS, device=model.device)
    model.read(ids[:, : TOKENS - 2], 0, prefill, model.new_cache())
    _check_rows(model, prefill)
    cache.admit(prefill)
    logits = []
    for step in (TOKENS - 2, TOKENS - 1):
        cache.begin_step(at[step : step + 1])
        hidden = model.step_hidden(ids[0, step : step + 1], at[step : step + 1], cache)
        logits.append(model.logits(hidden, cache.linear)[0].float())
        if step < TOKENS - 1 and cache.slot_layers:
            cache.evict(0, Selection(keep=torch.tensor(_KEPT, device=model.device)))
    return torch.stack(logits)


def _check_rows(model: LoadedModel, prefill: Prefill) -> None:
    """Refuse a network whose layers compute rows of other shapes than its config says."""
    heads = {"q": model.shape.q_heads, "k": model.shape.kv_heads, "v": model.shape.kv_heads}
    rows = [("q", query) for query in prefill.queries]
    rows += [pair for layer in (*prefill.rows, *prefill.windows) for pair in zip("kv", layer, strict=True)]
    for name, tensor in rows:
        found, expected = (tensor.shape[0], tensor.shape[2]), (heads[name], model.shape.head_dim)
        if found != expected:
            raise _refused(model, f"has {name} of (heads, width) {found}, not {expected}")
    kinds = ("full",) * len(prefill.rows) + ("window",) * len(prefill.windows) + ("linear",) * len(prefill.states)
    if sorted(kinds) != sorted(model.shape.layer_kinds):
        raise _refused(model, f"has layers {', '.join(kinds)}, not {', '.join(model.shape.layer_kinds)}")
    wanted = [(*size, dtype) for size, dtype in zip(model.shape.states, model.shape.state_dtypes, strict=True)]
    for states in prefill.states:
        given = [(*state.shape, state.dtype) for state in states]
        if given != wanted:
            raise _refused(model, f"has linear states of {given}, not {wanted}")


def _own_logits(model: LoadedModel, ids: Tensor) -> Tensor:
    """The same logits by the network's own code, whose last token does not see the rows evicted before it."""
    network, shape = model.network, model.shape
    network.set_attn_implementation("eager")
    try:
        return network(input_ids=ids, attention_mask=_masks(network, shape), use_cache=False).logits[0, -2:].float()
    finally:
        network.set_attn_implementation(SLOT_ATTENTION)


def _masks(network: Any, shape: CacheShape) -> Any:
    """What each token does not see, as the network's code takes it: one mask, or one for each kind of layer."""
    later = torch.ones(TOKENS, TOKENS, dtype=torch.bool, device=network.device).triu(1)
    evicted = later.clone()
    evicted[-1, [i for i in range(TOKENS - 1) if i not in _KEPT]] = True
    beyond = later | ~later.new_ones(later.shape).triu(1 - shape.window)
    zeros, lowest = later.new_zeros(1, 1, TOKENS, TOKENS, dtype=network.dtype), torch.finfo(network.dtype).min
    full, window = (zeros.masked_fill(hidden, lowest) for hidden in (evicted, beyond))
    masks: dict[LayerKind, Tensor | None] = {"full": full, "window": window, "linear": None}
    if len(set(shape.layer_kinds)) == 1:
        return masks[shape.layer_kinds[0]]
    return {name: masks[kind] for name, kind in zip(network.config.layer_types, shape.layer_kinds, strict=True)}
