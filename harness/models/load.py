"""From a model's configuration to a model that decodes: architecture, weights and tokenizer."""

import ctypes
import os
import re
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from string import Template
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from kvsweep.compression.cache import SLOT_ATTENTION, SlotCache, use_slot_attention
from kvsweep.compression.policy import Selection
from kvsweep.compression.rows import CacheShape, LayerKind, Prefill
from kvsweep.errors import UserError
from kvsweep.harness.models.chat import TEMPLATES
from kvsweep.harness.models.config import ROLES, ModelConfig
from kvsweep.harness.models.hub import adapter_files, check_tensors, from_place, lines_of
from kvsweep.harness.models.loaded import OTHER_QUESTION, LoadedModel
from kvsweep.harness.models.spec import cannot_load, read_architecture, read_spec
from kvsweep.harness.provenance import VISIBLE, named_gpus

# As in R1: beginning of text, user, message, assistant, and the opening tag of the thinking.
_CHAT_TEMPLATE = Template(
    "{{ bos_token }}{% for message in messages %}${user}{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}${assistant}${think}\n{% endif %}"
)

# Where a multimodal checkpoint keeps its text model, and what else it holds.
_KEYS = {"gemma3_text": {r"^language_model\.": "", r"^model\.language_model\.": "model."}}
_OTHER_PARTS = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")

# mallopt's parameters of glibc (malloc.h), and the most that glibc takes for the second.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MOST_MMAP = -1, -3, 32 << 20

# What torch chose for this process before any model was loaded.
_MOST_THREADS = torch.get_num_threads()
# On two cores a second thread made the step of 0.6 to 8 million parameters .8 to 1.3 times as fast, and beside other
# processes 3 to 200 times slower, since threads wait for each other many times a step.
_PARAMETERS_PER_THREAD = 32_000_000

# Tokens that the check of a loaded model takes.
_CHECKED = 9
_KEPT = (0, 1, 4, 6, 7)  # of the 8 rows before the last token
# The largest root mean square of the differences, in standard deviations of the logits; 16 bits round far more.
# What a template of Jinja draws at random by.
_DRAWN = re.compile(r"\|\s*random\b|\blipsum\b")
_ALLOWED = {"float32": 2e-3, "bfloat16": 0.1, "float16": 0.1}


def load_model(config: ModelConfig) -> LoadedModel:
    """Load weights and tokenizer, check that slots decode them, and move them to the device."""
    from transformers import AutoModelForCausalLM, logging  # as slow as torch

    _keep_freed_memory()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    dtype: torch.dtype = getattr(torch, config.dtype)
    if config.chat_template == "own":
        TEMPLATES.start()  # beside the weights
    architecture = read_architecture(config)
    try:
        tokenizer = _load_tokenizer(config)
        if config.random_weights:
            torch.manual_seed(0)
            with torch.device(device_of(config)):  # a CPU takes minutes to draw the weights of a large model
                network = AutoModelForCausalLM.from_config(architecture, dtype=dtype)
        else:
            how = {"revision": config.revision, "dtype": dtype, "config": architecture, "trust_remote_code": False}
            how |= {"key_mapping": _KEYS.get(architecture.model_type), "output_loading_info": True}
            how |= {"use_safetensors": config.safetensors_only or None}
            # With `output_loading_info` transformers returns a pair, which its types do not say.
            load: partial[Any] = partial(AutoModelForCausalLM.from_pretrained, config.checkpoint, **how)
            network, told = from_place(load, config.checkpoint, config.revision)
            others = [name for name in told["unexpected_keys"] if not name.startswith(_OTHER_PARTS)]
            check_tensors(told["missing_keys"], others)
    except (UserError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a damaged file: each library raises what it likes
        raise cannot_load(config, error) from error
    if config.is_built:
        vocabulary = int((config.config or {})["vocab_size"])
        if vocabulary < len(tokenizer):
            least = f"the stand-in tokenizer's {len(tokenizer)}"
            raise UserError(f"model.config.vocab_size={vocabulary} is below {least}: raise it.")
        # The id in the config belongs to the model's real tokenizer.
        network.generation_config.eos_token_id = tokenizer.eos_token_id
    if config.adapter is not None:
        network = add_adapter(network, config.adapter)
    network = network.to(device_of(config)).eval().requires_grad_(False)
    parameters = sum(parameter.numel() for parameter in network.parameters())
    torch.set_num_threads(config.threads or min(_MOST_THREADS, 1 + parameters // _PARAMETERS_PER_THREAD))
    use_slot_attention(network)
    model = LoadedModel(config, network, tokenizer)
    _check_planned(model)
    check_steps(model)
    _check_text(model)
    return model


def add_adapter(network: Any, folder: str) -> Any:
    """Add a LoRA adapter to the weights that it names; a UserError for another kind of adapter or of model."""
    from peft import PeftModel, get_peft_model_state_dict
    from safetensors import safe_open

    try:
        wrapped = PeftModel.from_pretrained(network, folder)
        with safe_open(adapter_files(folder)[1], "pt") as stored:
            check_tensors(get_peft_model_state_dict(wrapped).keys() ^ stored.keys())
        return wrapped.merge_and_unload(safe_merge=True)
    except Exception as error:  # a damaged file, a shape that does not fit: peft raises what its parts raise
        unfit = f"model.adapter={folder} cannot be added to the weights ({_first_line(error)})"
        raise UserError(f"{unfit}: name a LoRA adapter that peft saved for this model, or null.") from error


def _first_line(error: Exception) -> str:
    return lines_of(error)[0].rstrip(".")[:200]


def _check_planned(model: LoadedModel) -> None:
    """Refuse a download that is not what `model.config` says, by which memory and predictors were planned."""
    config = model.config
    if config.config is None or config.is_built or config.gguf is not None or Path(config.place).is_dir():
        return
    said, found = read_spec(replace(config, random_weights=True)), model.spec
    if said.cache_shape(config.dtype) != model.shape or said.hidden_size != found.hidden_size:
        other = f"model.config describes another model than {config.place} has ({said} and {found})"
        raise UserError(f"{other}: correct model.config, or set it to null.")


def _check_text(model: LoadedModel) -> None:
    """Refuse tags that the tokenizer cannot write, and a chat template that is missing or fails."""
    _ = model.think_end_ids
    if drawn := _DRAWN.search(str(model.tokenizer.chat_template or "")):
        random = f"the chat template of model={model.config.name} draws at random ({drawn.group()})"
        raise UserError(f"{random}, so a question would differ each time: name another model, or correct the template.")
    model.asked(OTHER_QUESTION)  # a template may hold a shorter question by chance
    try:
        model.prompt_ids("?")
    except UserError:
        raise
    except Exception as error:  # each kind of tokenizer fails in its own way
        lacks = f"model={model.config.name} has no chat template that takes a question ({_first_line(error)})"
        raise UserError(f"{lacks}: give model.chat_template=none for a base model.") from error


def _keep_freed_memory() -> None:
    """Let glibc keep 64 MiB of freed memory: each page given back costs a fault, with packed rows half of the time."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, 2 * _MOST_MMAP)
        mallopt(_MMAP_THRESHOLD, _MOST_MMAP)


def _load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerFast:
    if config.is_built:
        return _stand_in_tokenizer(config)
    # AutoTokenizer gives every Qwen2 model Qwen2's own pre-tokenizer, even if its tokenizer.json names another.
    load = partial(PreTrainedTokenizerFast.from_pretrained, config.checkpoint, revision=config.revision or "main")
    return from_place(load, config.checkpoint, config.revision)


def _stand_in_tokenizer(config: ModelConfig) -> PreTrainedTokenizerFast:
    """A tokenizer of single bytes, which restores any text, with a built model's special tokens and thinking tags."""
    special = config.special_tokens or {}
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(dict.fromkeys(special[role] for role in ROLES)))
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in (config.think_start, config.think_end) if tag])
    roles = {role: special[role] for role in ("user", "assistant")}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=special["bos"],
        eos_token=special["eos"],
        pad_token=special["eos"],
        chat_template=_CHAT_TEMPLATE.substitute(roles, think=config.think_start or ""),
        clean_up_tokenization_spaces=False,
    )


def device_of(config: ModelConfig) -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda" if config.device == "auto" else config.device)
    if config.device.startswith("cuda"):
        raise UserError(f"model.device={config.device} needs a GPU, and this process sees none: set model.device=cpu.")
    if config.device == "auto" and named_gpus():
        unseen = f"this process was given a GPU ({VISIBLE}={os.environ[VISIBLE]}), and torch finds none"
        raise UserError(f"{unseen}: mend the driver or torch's build, or set model.device=cpu.")
    return torch.device("cpu" if config.device == "auto" else config.device)


@torch.inference_mode()
def check_steps(model: LoadedModel) -> None:
    """Hold two decode steps, the second after an eviction, to the network's own code; a UserError where they differ."""
    ids = torch.arange(3, 3 + 7 * _CHECKED, 7, device=model.device)[None] % model.spec.vocab_size
    prefill = Prefill()
    try:
        found = _steps(model, ids, prefill)
        expected = _own_logits(model, ids, prefill)
    except (UserError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # Each architecture fails in its own way.
        raise _refused(model, f"fails over a slot cache ({_first_line(error)})") from error
    difference = (found - expected).square().mean().sqrt() / expected.std().clamp(min=1e-12)
    if not difference <= _ALLOWED[model.config.dtype]:
        raise _refused(model, f"has other logits over a slot cache, by {difference:.3g} of their standard deviation")


def _refused(model: LoadedModel, what: str) -> UserError:
    return UserError(f"model type {model.spec.family} {what}: choose a model that docs/python.md lists.")


def _steps(model: LoadedModel, ids: Tensor, prefill: Prefill) -> Tensor:
    """Logits [2, vocabulary] of the last two tokens, each a step over a slot cache, with an eviction between them."""
    cache = SlotCache(model.shape, slots=1, capacity=_CHECKED, device=model.device)
    at = torch.arange(_CHECKED, device=model.device)
    model.read(ids[:, : _CHECKED - 2], 0, prefill, model.new_cache())
    _check_rows(model, prefill)
    cache.admit(prefill)
    logits = []
    for step in (_CHECKED - 2, _CHECKED - 1):
        cache.begin_step(at[step : step + 1])
        hidden = model.step_hidden(ids[0, step : step + 1], at[step : step + 1], cache)
        logits.append(model.logits(hidden, cache.linear)[0].float())
        if step < _CHECKED - 1 and cache.slot_layers:
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


def _own_logits(model: LoadedModel, ids: Tensor, prefill: Prefill) -> Tensor:
    """The same logits by the network's own code, whose last token does not see the rows evicted before it."""
    network, shape = model.network, model.shape
    # In 16 bits transformers' eager attention rounds logits and overflows; its sdpa does neither, and has no softcap.
    plain = type(network)._supports_sdpa and prefill.softcap is None
    network.set_attn_implementation("sdpa" if plain else "eager")
    try:
        return network(input_ids=ids, attention_mask=_masks(network, shape), use_cache=False).logits[0, -2:].float()
    finally:
        network.set_attn_implementation(SLOT_ATTENTION)


def _masks(network: Any, shape: CacheShape) -> Any:
    """What each token does not see, as the network's code takes it: one mask, or one for each kind of layer."""
    later = torch.ones(_CHECKED, _CHECKED, dtype=torch.bool, device=network.device).triu(1)
    evicted = later.clone()
    evicted[-1, [i for i in range(_CHECKED - 1) if i not in _KEPT]] = True
    beyond = later | ~later.new_ones(later.shape).triu(1 - shape.window)
    zeros, lowest = later.new_zeros(1, 1, _CHECKED, _CHECKED, dtype=network.dtype), torch.finfo(network.dtype).min
    full, window = (zeros.masked_fill(hidden, lowest) for hidden in (evicted, beyond))
    masks: dict[LayerKind, Tensor | None] = {"full": full, "window": window, "linear": None}
    if len(set(shape.layer_kinds)) == 1:
        return masks[shape.layer_kinds[0]]
    return {name: masks[kind] for name, kind in zip(network.config.layer_types, shape.layer_kinds, strict=True)}
