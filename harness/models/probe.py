"""Check a loaded model: compare two steps over a slot cache with the network's own code.

The text is short but reaches the limits: during the check the network's windows shrink to a few tokens, and positions
start so late that the steps lie beyond the model's original length.
"""

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import Tensor

from kvsweep.compression.cache import SLOT_ATTENTION, SlotCache
from kvsweep.compression.cache_rows import CacheShape, LayerKind, Prefill
from kvsweep.compression.policy import Selection
from kvsweep.harness.models.hub import first_line
from kvsweep.harness.models.loaded import LoadedModel
from kvsweep.harness.models.spec import rope_parts
from kvsweep.kernels.implementation import Implementation
from kvsweep.messages.errors import UserError

# Tokens of the check's text, and how many of them are the prompt.
_CHECKED, _PROMPT = 9, 7
_KEPT = (0, 1, 4, 6, 7)  # among the 8 rows before the last token
_WINDOW = 4  # the longest window during the check
# The largest root mean square difference, in standard deviations of the logits; 16 bits round much more.
_ALLOWED = {"float32": 2e-3, "bfloat16": 0.1, "float16": 0.1}


def prepare_steps(model: LoadedModel, impl: Implementation) -> None:
    """Pack weights for torch's steps, and compare those steps that loading has not; raises UserError if they differ."""
    step = model.fused_step
    if step is not None and impl == "torch" and model.spec.packed and not step.packed:
        step.pack_weights()
        if step.packed:
            model.compared.discard("torch")  # loading compared steps of unpacked weights
    check_steps(model, impl)


@torch.inference_mode()
def check_steps(model: LoadedModel, impl: Implementation = "torch") -> None:
    """Compare two decode steps, one after an eviction, with the network's own code; raises UserError if they differ.

    An implementation is compared once for a model.
    """
    if impl in model.compared:
        return
    ids = _text(model.device, model.spec.vocab_size)
    prefill = Prefill()
    try:
        with _short_windows(model):
            positions = torch.arange(_CHECKED, device=model.device) + _first_position(model)
            logits = _steps(model, ids, positions, prefill, impl)
            expected = _own_logits(model, ids, positions, prefill)
    except (UserError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # each architecture fails in its own way
        raise _refused(model, f"fails over a slot cache ({first_line(error)})", impl) from error
    difference = _difference(logits, expected)
    if not difference <= _ALLOWED[model.config.dtype]:  # also if it is NaN
        other = f"has other logits over a slot cache, by {difference:.3g} of their standard deviation"
        raise _refused(model, other, impl)
    model.compared.add(impl)


@torch.no_grad()
def merge(wrapped: Any) -> None:
    """Merge a PeftModel's adapter into its network; ValueError if the logits differ from peft's unmerged."""
    expected = _logits(wrapped)
    _check_same(wrapped.merge_and_unload(safe_merge=True), expected, "merged")


@torch.no_grad()
def text_part(whole: Any) -> Any:
    """Return the text model of a multimodal network, with its modules, or a text model itself.

    Raises ValueError if its logits are not those that the network's own class computes with its own config.
    """
    text = whole.config.get_text_config()
    if text is whole.config:
        return whole
    # The class of the text model, without weights, gets the modules of the whole network.
    with torch.device("meta"):
        network = transformers.AutoModelForCausalLM.from_config(text, dtype=whole.dtype)
    setattr(network, network.base_model_prefix, whole.get_decoder())
    network.set_output_embeddings(whole.get_output_embeddings())
    network.config = whole.get_decoder().config
    network.generation_config = whole.generation_config
    _check_same(network, _logits(whole), "without the part that sees")
    return network


def _logits(network: Any) -> Tensor:
    ids = _text(network.device, network.config.get_text_config().vocab_size)
    logits: Tensor = network.eval()(input_ids=ids, use_cache=False).logits
    return logits.float()


def _check_same(network: Any, expected: Tensor, how: str) -> None:
    """Raise ValueError if the network's logits are not the expected ones; `how` says how it was changed."""
    difference = _difference(_logits(network), expected)
    # Also if it is NaN.
    if not difference <= _ALLOWED[str(network.dtype).removeprefix("torch.")]:
        raise ValueError(
            f"{how}, its logits are others by {difference:.3g} of their standard deviation, "
            f"and tie_word_embeddings is {network.config.tie_word_embeddings}"
        )


def _text(device: torch.device, rows: int) -> Tensor:
    """Return the token ids [1, tokens] of the check's text, below the embedding's rows.

    Any ids serve; steps of 7 from 3 make them differ, and pass by the special tokens that often come first.
    """
    return torch.arange(3, 3 + 7 * _CHECKED, 7, device=device)[None] % rows


def _difference(logits: Tensor, expected: Tensor) -> Tensor:
    """Return the root mean square difference, in standard deviations of the expected logits."""
    return (logits - expected).square().mean().sqrt() / expected.std().clamp(min=1e-12)  # logits may all be alike


def _refused(model: LoadedModel, what: str, impl: Implementation = "torch") -> UserError:
    """Return the error that says what this model, with this implementation, has or does."""
    other = "impl=torch" if "torch" in model.compared else "a model that `kvsweep models` lists"
    by = "" if impl == "torch" else f" with impl={impl}"
    return UserError(f"model type {model.spec.family} {what}{by}: choose {other}.")


@contextmanager
def _short_windows(model: LoadedModel) -> Iterator[None]:
    """Shrink the windows in the network's config and modules, and read the model's spec again."""
    _ = model.fused_step  # decide on the fused step by the model's original spec
    holders: list[Any] = [model.network.config, *model.network.modules()]
    long_windows = []
    for holder in holders:
        window = getattr(holder, "sliding_window", None)
        if isinstance(window, int) and window > _WINDOW:
            long_windows.append((holder, window))
    try:
        for holder, _ in long_windows:
            holder.sliding_window = _WINDOW
        model.forget_spec()
        yield
    finally:
        for holder, window in long_windows:
            holder.sliding_window = window
        model.forget_spec()


def _first_position(model: LoadedModel) -> int:
    """The position of the text's first token: the steps lie beyond the original length, unless longer texts are
    refused, and the prompt's rows begin where a window's memory does."""
    if model.spec.limited:
        return 0
    config = model.network.config
    rope = getattr(config, "rope_parameters", None) or {}
    lengths = []
    for part in (vars(config), rope, *rope_parts(rope)):
        length = part.get("original_max_position_embeddings")
        if length is not None:
            lengths.append(length)
    original_length = min(lengths, default=model.spec.positions or 0)
    first = max(0, int(original_length) - _PROMPT)  # the steps come right after the prompt
    window = model.spec.window or 1  # 1: any position will do
    windows = math.ceil(first / window)  # a ring of rows starts anew at each multiple of the window
    return windows * window


def _steps(model: LoadedModel, ids: Tensor, positions: Tensor, prefill: Prefill, impl: Implementation) -> Tensor:
    """Return logits [2, vocabulary] of the last two tokens, each one step over a slot cache, an eviction in between.

    `ids` is [1, tokens], `positions` [tokens]; `prefill` observes the prompt.
    """
    # Only an invariant cache multiplies packed weights.
    packed = model.fused_step is not None and model.fused_step.packed
    cache = SlotCache(model.shape, slots=1, capacity=_CHECKED, device=model.device, impl=impl, invariant=packed)
    model.read(ids[:, :_PROMPT], int(positions[0]), prefill, model.new_cache())
    _check_rows(model, prefill)
    cache.admit(prefill)
    logits = []
    for step in range(_PROMPT, _CHECKED):
        position = positions[step : step + 1]
        cache.begin_step(position)
        hidden = model.step_hidden(ids[0, step : step + 1], position, cache)
        logits.append(model.logits(hidden, cache.linear)[0].float())
        if step < _CHECKED - 1 and cache.slot_layers:
            cache.evict(0, Selection(keep=torch.tensor(_KEPT, device=model.device)))
    return torch.stack(logits)


def _check_rows(model: LoadedModel, prefill: Prefill) -> None:
    """Refuse a network with other layers, or states, than its config says; the cache takes no rows of other heads."""
    shape = model.shape
    # The prefill does not note the order of the layers, only how many there are of each kind.
    layers = Counter(full=len(prefill.rows), window=len(prefill.windows), linear=len(prefill.states))
    expected_layers = Counter(shape.layer_kinds)
    if layers != expected_layers:
        raise _refused(model, f"has layers {dict(layers)}, not {dict(expected_layers)}")
    expected = [(*size, dtype) for size, dtype in zip(shape.states, shape.state_dtypes, strict=True)]
    for states in prefill.states:
        actual = [(*state.shape, state.dtype) for state in states]
        if actual != expected:
            raise _refused(model, f"has linear states of {actual}, not {expected}")


def _own_logits(model: LoadedModel, ids: Tensor, positions: Tensor, prefill: Prefill) -> Tensor:
    """Return the same logits from the network's own code: with its own masks, then with the evicted rows masked."""
    network, shape = model.network, model.shape
    # In 16 bits transformers' eager attention rounds logits and overflows; its sdpa does not, but has no softcap.
    takes_sdpa = type(network)._supports_sdpa and prefill.softcap is None
    network.set_attn_implementation("sdpa" if takes_sdpa else "eager")
    before_last = {"input_ids": ids[:, :-1], "position_ids": positions[None, :-1], "attention_mask": None}
    last = {"input_ids": ids, "position_ids": positions[None], "attention_mask": _masks(network, shape)}
    try:
        logits = [network(**inputs, use_cache=False).logits[0, -1].float() for inputs in (before_last, last)]
        return torch.stack(logits)
    finally:
        network.set_attn_implementation(SLOT_ATTENTION)


def _masks(network: Any, shape: CacheShape) -> Any:
    """Return what each token does not see, as the network's code takes it: one mask, or one per kind of layer."""
    everywhere = torch.ones(_CHECKED, _CHECKED, dtype=torch.bool, device=network.device)
    later = everywhere.triu(1)
    evicted = later.clone()  # in layers of full attention; windows and states are not evicted from
    evicted[-1] = True
    evicted[-1, [*_KEPT, _CHECKED - 1]] = False
    before_window = ~everywhere.triu(1 - shape.window)  # a token sees itself and the window - 1 before it
    zeros = torch.zeros(1, 1, _CHECKED, _CHECKED, dtype=network.dtype, device=network.device)
    lowest = torch.finfo(network.dtype).min
    masks: dict[LayerKind, Tensor | None] = {
        "full": zeros.masked_fill(evicted, lowest),
        "window": zeros.masked_fill(later | before_window, lowest),
        "linear": None,
    }
    # A network with layers of one kind takes one mask.
    if len(set(shape.layer_kinds)) == 1:
        return masks[shape.layer_kinds[0]]
    return {name: masks[kind] for name, kind in zip(network.config.layer_types, shape.layer_kinds, strict=True)}
