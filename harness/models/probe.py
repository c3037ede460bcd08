"""Check a loaded model: compare two steps over a slot cache with the network's own code.

The text is short but reaches the limits: during the check the network's windows shrink to a few tokens, and positions
start so late that the steps lie beyond the model's original length.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import Tensor

from kvsweep.compression.cache import SLOT_ATTENTION, SlotCache
from kvsweep.compression.cache_rows import CacheShape, LayerKind, Prefill
from kvsweep.compression.policy import Selection
from kvsweep.harness.models.hub import lines_of
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
        model.compared.discard("torch")  # loading compared steps of unpacked weights
    check_steps(model, impl)


@torch.inference_mode()
def check_steps(model: LoadedModel, impl: Implementation = "torch") -> None:
    """Compare two decode steps, one after an eviction, with the network's own code; raises UserError if they differ.

    An implementation is compared once for a model.
    """
    if impl in model.compared:
        return
    # Earlier versions of transformers read a delta rule's state from elsewhere than the cache.
    if len(model.shape.states) > 1 and not hasattr(transformers.Cache, "get_recurrent_state"):
        needs = "has a delta rule, which needs transformers 5.21 or later"
        installed = f"{transformers.__version__} is installed"
        raise UserError(f"model type {model.spec.family} {needs}, and {installed}: pip install -U transformers.")
    ids = _text(model.device, model.spec.vocab_size)
    prefill = Prefill()
    try:
        with _short_windows(model):
            at = torch.arange(_CHECKED, device=model.device) + _first_position(model)
            found = _steps(model, ids, at, prefill, impl)
            expected = _own_logits(model, ids, at, prefill)
    except (UserError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # each architecture fails in its own way
        fails = f"fails over a slot cache ({lines_of(error)[0].rstrip('.')[:200]})"
        raise _refused(model, fails, impl) from error
    difference = _difference(found, expected)
    if not difference <= _ALLOWED[model.config.dtype]:
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
    with torch.device("meta"):
        network = transformers.AutoModelForCausalLM.from_config(text, dtype=whole.dtype)
    setattr(network, network.base_model_prefix, whole.get_decoder())
    network.set_output_embeddings(whole.get_output_embeddings())
    network.config, network.generation_config = whole.get_decoder().config, whole.generation_config
    _check_same(network, _logits(whole), "without the part that sees")
    return network


def _logits(network: Any) -> Tensor:
    ids = _text(network.device, network.config.get_text_config().vocab_size)
    logits: Tensor = network.eval()(input_ids=ids, use_cache=False).logits
    return logits.float()


def _check_same(network: Any, expected: Tensor, how: str) -> None:
    difference = _difference(_logits(network), expected)
    if not difference <= _ALLOWED[str(network.dtype).removeprefix("torch.")]:
        tied = f"tie_word_embeddings is {network.config.tie_word_embeddings}"
        raise ValueError(f"{how}, its logits are others by {difference:.3g} of their standard deviation, and {tied}")


def _text(device: torch.device, rows: int) -> Tensor:
    return torch.arange(3, 3 + 7 * _CHECKED, 7, device=device)[None] % rows


def _difference(found: Tensor, expected: Tensor) -> Tensor:
    """Return the root mean square difference, in standard deviations of the expected logits."""
    return (found - expected).square().mean().sqrt() / expected.std().clamp(min=1e-12)


def _refused(model: LoadedModel, what: str, impl: Implementation = "torch") -> UserError:
    other = "impl=torch" if "torch" in model.compared else "a model that `kvsweep models` lists"
    by = "" if impl == "torch" else f" with impl={impl}"
    return UserError(f"model type {model.spec.family} {what}{by}: choose {other}.")


@contextmanager
def _short_windows(model: LoadedModel) -> Iterator[None]:
    """Shrink the windows in the network's config and modules, and read the model's spec again."""
    _ = model.fused_step  # decide on the fused step by the model's original spec
    holders: list[Any] = [model.network.config, *model.network.modules()]
    windows = [(holder, getattr(holder, "sliding_window", None)) for holder in holders]
    long = [(holder, window) for holder, window in windows if isinstance(window, int) and window > _WINDOW]
    try:
        for holder, _ in long:
            holder.sliding_window = _WINDOW
        model.forget_spec()
        yield
    finally:
        for holder, window in long:
            holder.sliding_window = window
        model.forget_spec()


def _first_position(model: LoadedModel) -> int:
    """The position of the text's first token: the steps lie beyond the original length, unless longer texts are
    refused, and the prompt's rows begin where a window's memory does."""
    config, window = model.network.config, model.spec.window or 1
    if model.spec.limited:
        return 0
    rope = getattr(config, "rope_parameters", None) or {}
    parts = [vars(config), rope, *rope_parts(rope)]
    lengths = [part.get("original_max_position_embeddings") for part in parts]
    made_for = min([length for length in lengths if length is not None], default=model.spec.positions or 0)
    return -(-max(0, int(made_for) - _PROMPT) // window) * window


def _steps(model: LoadedModel, ids: Tensor, at: Tensor, prefill: Prefill, impl: Implementation) -> Tensor:
    """Return logits [2, vocabulary] of the last two tokens, each one step over a slot cache, an eviction in between."""
    # Only an invariant cache multiplies packed weights.
    packed = model.fused_step is not None and model.fused_step.packed
    cache = SlotCache(model.shape, slots=1, capacity=_CHECKED, device=model.device, impl=impl, invariant=packed)
    model.read(ids[:, :_PROMPT], int(at[0]), prefill, model.new_cache())
    _check_rows(model, prefill)
    cache.admit(prefill)
    logits = []
    for step in range(_PROMPT, _CHECKED):
        cache.begin_step(at[step : step + 1])
        hidden = model.step_hidden(ids[0, step : step + 1], at[step : step + 1], cache)
        logits.append(model.logits(hidden, cache.linear)[0].float())
        if step < _CHECKED - 1 and cache.slot_layers:
            cache.evict(0, Selection(keep=torch.tensor(_KEPT, device=model.device)))
    return torch.stack(logits)


def _check_rows(model: LoadedModel, prefill: Prefill) -> None:
    """Refuse a network with layers that compute rows of other shapes than its config says."""
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


def _own_logits(model: LoadedModel, ids: Tensor, at: Tensor, prefill: Prefill) -> Tensor:
    """Return the same logits from the network's own code: with its own masks, then with the evicted rows masked."""
    network, shape = model.network, model.shape
    # In 16 bits transformers' eager attention rounds logits and overflows; its sdpa does not, but has no softcap.
    plain = type(network)._supports_sdpa and prefill.softcap is None
    network.set_attn_implementation("sdpa" if plain else "eager")
    reads = [(ids[:, :-1], at[None, :-1], None), (ids, at[None], _masks(network, shape))]
    try:
        found = [
            network(input_ids=text, position_ids=positions, attention_mask=mask, use_cache=False).logits[0, -1].float()
            for text, positions, mask in reads
        ]
        return torch.stack(found)
    finally:
        network.set_attn_implementation(SLOT_ATTENTION)


def _masks(network: Any, shape: CacheShape) -> Any:
    """Return what each token does not see, as the network's code takes it: one mask, or one per kind of layer."""
    later = torch.ones(_CHECKED, _CHECKED, dtype=torch.bool, device=network.device).triu(1)
    evicted = later.clone()
    evicted[-1, [i for i in range(_CHECKED - 1) if i not in _KEPT]] = True
    beyond = later | ~later.new_ones(later.shape).triu(1 - shape.window)
    zeros = later.new_zeros(1, 1, _CHECKED, _CHECKED, dtype=network.dtype)
    lowest = torch.finfo(network.dtype).min
    masks: dict[LayerKind, Tensor | None] = {
        "full": zeros.masked_fill(evicted, lowest),
        "window": zeros.masked_fill(beyond, lowest),
        "linear": None,
    }
    if len(set(shape.layer_kinds)) == 1:
        return masks[shape.layer_kinds[0]]
    return {name: masks[kind] for name, kind in zip(network.config.layer_types, shape.layer_kinds, strict=True)}
