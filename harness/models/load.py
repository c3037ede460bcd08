"""Load a model from its configuration: architecture, weights and tokenizer."""

import ctypes
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from string import Template
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvsweep.compression.cache import use_slot_attention
from kvsweep.harness.models.config import ROLES, ModelConfig
from kvsweep.harness.models.dialogue import OTHER_QUESTION
from kvsweep.harness.models.generation import unapplied_settings
from kvsweep.harness.models.hub import adapter_files, check_tensors, first_line, from_place, json_of
from kvsweep.harness.models.loaded import LoadedModel
from kvsweep.harness.models.notes import warnings_as_notes
from kvsweep.harness.models.probe import check_steps, merge, text_part
from kvsweep.harness.models.spec import cannot_load, read_architecture, read_spec, rope_parts, text_of
from kvsweep.harness.provenance import VISIBLE, named_gpus
from kvsweep.messages.errors import UserError
from kvsweep.processes.granted import granted_cores

# As in R1: start of text, user, message, assistant, opening thinking tag.
_CHAT_TEMPLATE = Template(
    "{{ bos_token }}{% for message in messages %}${user}{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}${assistant}${think}\n{% endif %}"
)

# Tensors of a multimodal checkpoint that its text model does not use.
_SEEING = ("model.vision_tower.", "model.multi_modal_projector.", "model.visual.")

# mallopt's parameters in glibc (malloc.h), and the largest value that glibc accepts for the second.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MOST_MMAP = -1, -3, 32 << 20

# The number of threads that torch chose before any model was loaded.
_MOST_THREADS = torch.get_num_threads()
# Two cores, 0.6 to 8 million parameters: a second thread made a step .8 to 1.3 times as fast, and beside other
# processes 3 to 200 times slower, since threads wait for each other many times per step.
_PARAMETERS_PER_THREAD = 32_000_000

# How a Jinja template draws at random.
_DRAWN = re.compile(r"\|\s*random\b|\blipsum\b")


@warnings_as_notes()
def load_model(config: ModelConfig) -> LoadedModel:
    """Load weights and tokenizer, check that slots decode them, move them to the device, and return the model."""
    from transformers import logging  # as slow as torch

    _keep_freed_memory()
    logging.disable_progress_bar()
    architecture = read_architecture(config)
    _check_no_adapter(config)
    try:
        tokenizer = _load_tokenizer(config)
        whole = _load_weights(config, architecture).to(device_of(config))
        network = text_part(whole)  # all of it, unless it is multimodal
    except (UserError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a damaged file: each library raises its own error
        raise cannot_load(config, error) from error
    if config.is_built:
        # The id in the config belongs to the model's real tokenizer.
        network.generation_config.eos_token_id = tokenizer.eos_token_id
    if config.adapter is not None:
        add_adapter(network, config.adapter, whole)
    network = network.eval().requires_grad_(False)
    _set_threads(config, network)
    use_slot_attention(network)
    model = LoadedModel(config, network, tokenizer)
    _check_planned(model)
    _check_files(model)
    check_steps(model)
    _check_text(model)
    unapplied = unapplied_settings(network.generation_config)
    if unapplied:
        print(
            f"note: the generation_config of model={config.name} sets {', '.join(unapplied)}; "
            "transformers' generate applies this, and kvsweep does not.",
            file=sys.stderr,
        )
    return model


def _load_weights(config: ModelConfig, architecture: Any) -> Any:
    """Return the network with the checkpoint's weights, or with random ones.

    Raises ValueError for a checkpoint with other tensors than the network, and transformers' errors for damaged files.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    # config.json may name an attention whose package is not installed; slots bring their own.
    options: dict[str, Any] = {"dtype": getattr(torch, config.dtype), "attn_implementation": "eager"}
    text_architecture = text_of(architecture)
    if config.random_weights:
        torch.manual_seed(0)
        with torch.device(device_of(config)):  # on a CPU, drawing the weights of a large model takes minutes
            return AutoModelForCausalLM.from_config(text_architecture, **options)
    options |= {
        "trust_remote_code": False,
        "config": architecture,
        # Without `safetensors_only`, None lets transformers take either kind of file.
        "use_safetensors": config.safetensors_only or None,
        "output_loading_info": True,
    }
    is_text = text_architecture is architecture
    auto_class: Any = AutoModelForCausalLM if is_text else AutoModelForImageTextToText
    # With `output_loading_info` transformers returns a pair; its type hints do not say so.
    network, loading = from_place(auto_class.from_pretrained, config.checkpoint, config.commit, **options)
    missing = [name for name in loading["missing_keys"] if not name.startswith(_SEEING)]
    check_tensors(missing, loading["unexpected_keys"])
    return network


def _set_threads(config: ModelConfig, network: Any) -> None:
    """Let torch use `config.threads`, by default as many as are granted and make a step of this network faster."""
    worthwhile = 1 + network.num_parameters() // _PARAMETERS_PER_THREAD
    # torch counts the machine's cores, and a container may grant fewer.
    threads = min(_MOST_THREADS, granted_cores(), worthwhile)
    torch.set_num_threads(config.threads or threads)


def _check_no_adapter(config: ModelConfig) -> None:
    """Refuse a model with an adapter beside its weights: transformers would add this adapter by itself."""
    from transformers.utils import find_adapter_config_file

    if config.is_built:
        return
    if from_place(find_adapter_config_file, config.checkpoint, config.commit) is not None:
        raise UserError(
            f"model={config.name} has a LoRA adapter beside its weights (adapter_config.json in {config.place}): "
            "move the adapter to a folder of its own, and name this as model.adapter or not."
        )


def add_adapter(network: Any, folder: str, whole: Any = None) -> None:
    """Add a LoRA adapter to the weights that it names; raises UserError for another kind of adapter or model.

    `whole` is the multimodal network whose part the network is: the adapter may name weights as this one does.
    """
    from peft import PeftModel, get_peft_model_state_dict
    from safetensors import safe_open

    try:
        with safe_open(adapter_files(folder)[1], "pt") as stored:
            names = stored.keys()
        of_whole = any(".language_model." in name for name in names)
        wrapped = PeftModel.from_pretrained(whole if of_whole else network, folder)
        # Names on one side alone are an adapter's tensors that the network has no place for, or places left empty.
        check_tensors(get_peft_model_state_dict(wrapped).keys() ^ names)
        merge(wrapped)  # into the network itself
    except Exception as error:  # a damaged file, a shape that does not fit: peft raises many errors
        raise UserError(
            f"model.adapter={folder} cannot be added to the weights ({first_line(error)}): "
            "name another LoRA adapter, or null."
        ) from error


def _check_planned(model: LoadedModel) -> None:
    """Refuse a download that differs from `model.config`, from which memory and predictors were planned."""
    config = model.config
    if config.config is None or config.commit is None:  # no commit: not a model of the hub
        return
    # With random weights a spec is read from `model.config` alone.
    planned = read_spec(replace(config, random_weights=True))
    loaded = model.spec
    if planned.cache_shape(config.dtype) != model.shape or planned.hidden_size != loaded.hidden_size:
        raise UserError(
            f"model.config describes another model than {config.place} has ({planned} and {loaded}): "
            "correct model.config, or set it to null."
        )


def _check_files(model: LoadedModel) -> None:
    """Refuse a file of the checkpoint that is no JSON, and rotary settings that transformers silently drops."""
    config = model.config
    if config.is_built:
        return
    read = partial(json_of, config.checkpoint, config.commit)
    read("generation_config.json")  # in place of a broken one, transformers takes the end tokens of config.json
    fields = read("config.json")
    rope = getattr(model.network.config, "rope_parameters", None)
    if not rope:
        return
    loaded = _rope_settings({"rope_parameters": rope})
    for name, value in _rope_settings(fields.get("text_config") or fields):  # of a multimodal model the text model's
        if value is not None and (name, value) not in loaded:
            raise UserError(
                f"the files of model={config.name} say {name}={value}, which transformers drops: "
                "correct config.json, where settings contradict each other."
            )


def _rope_settings(fields: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return the settings of rotary embeddings, without their types, which transformers may rename."""
    # Older files have these two beside the ropes' own settings, which go by either of two names.
    beside = {name: fields.get(name) for name in ("rope_theta", "partial_rotary_factor")}
    settings = []
    for part in (beside, *rope_parts(fields.get("rope_scaling")), *rope_parts(fields.get("rope_parameters"))):
        for name, value in part.items():
            if name not in ("type", "rope_type"):
                settings.append((name, value))
    return settings


def _check_text(model: LoadedModel) -> None:
    """Refuse tags that the tokenizer cannot write, a missing end token, and a missing or failing chat template."""
    name = model.config.name
    tag = model.config.think_end
    if tag is not None and model.dialogue.closing_tag(list(model.dialogue.encode(tag))) is None:
        raise UserError(
            f"model.think_end={tag} cannot be written by the tokenizer of {model.config.place}: "
            "name the tag that this model closes its thinking with, or null if it thinks nothing aloud."
        )
    if not model.stop_ids:
        raise UserError(
            f"model={name} names no end token, so that no text would end before its limit: "
            "give eos_token_id in its generation_config.json, or name another model."
        )
    _check_ends(model)
    drawing = _DRAWN.search(str(model.tokenizer.chat_template or ""))
    if drawing:
        raise UserError(
            f"the chat template of model={name} draws at random ({drawing.group()}), "
            "so a question would differ each time: name another model, or correct the template."
        )
    _check_spaces(model)
    # `asked` refuses a template that leaves out the question. A short question might stand in the template by chance.
    model.dialogue.asked(OTHER_QUESTION)
    model.dialogue.prompt_ids("?")


def _check_ends(model: LoadedModel) -> None:
    """Refuse end tokens that no model writes; print a note if only the tokenizer or only the template names one."""
    ends = model.stop_ids
    vocabulary = model.spec.vocab_size
    name = model.config.name
    # True is an int to isinstance.
    impossible = [end for end in ends if type(end) is not int or not 0 <= end < vocabulary]
    if impossible:
        raise UserError(
            f"model={name} names the end tokens {list(ends)}, and no model of {vocabulary:,} tokens writes "
            f"{impossible}: correct eos_token_id in its generation_config.json."
        )
    text_of_ids = model.tokenizer.convert_ids_to_tokens
    other_ends = {"tokenizer": model.tokenizer.eos_token_id, "chat template": model.dialogue.turn_end}
    for place, end in other_ends.items():
        if end is not None and end not in ends:
            print(
                f"note: texts of model={name} end at {' or '.join(map(str, text_of_ids(list(ends))))} alone, "
                f"and its {place} ends an answer with {text_of_ids(end)}: "
                f"if the model ends its answers so, add {end} to eos_token_id in its generation_config.json.",
                file=sys.stderr,
            )


def _check_spaces(model: LoadedModel) -> None:
    """Refuse a SentencePiece GGUF that does not say whether a text behind a control token starts with a space.

    transformers writes the space only at the start of a text, llama.cpp also behind each control token.
    """
    splitter = model.tokenizer.backend_tokenizer.pre_tokenizer
    if model.config.gguf is None or not isinstance(splitter, pre_tokenizers.Metaspace):
        return
    if splitter.prepend_scheme != "first":  # "never": the file says that no space is added
        return
    text = model.dialogue.asked("?")
    ids = model.dialogue.encode(text)
    splitter.prepend_scheme = "always"  # as llama.cpp does: only a difference matters
    ids_of_llama_cpp = model.dialogue.encode(text)
    splitter.prepend_scheme = "first"
    if ids_of_llama_cpp != ids:
        raise UserError(
            f"model.gguf={model.config.gguf} leaves open whether a space stands before text behind a control token: "
            "take the model's own folder as model.path."
        )


def _keep_freed_memory() -> None:
    """Let glibc keep 64 MiB of freed memory: page faults otherwise take half of a quantized cache's time."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # else another library than glibc
        # The heap keeps 64 MiB at its end, and takes blocks of up to 32 MiB, which would else be given back at once.
        mallopt(_TRIM_THRESHOLD, 2 * _MOST_MMAP)
        mallopt(_MMAP_THRESHOLD, _MOST_MMAP)


def _load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerFast:
    """Return the checkpoint's tokenizer, or the stand-in of a built model."""
    if config.is_built:
        return _stand_in_tokenizer(config)
    # AutoTokenizer gives every Qwen2 model Qwen2's pre-tokenizer, even if its tokenizer.json names another.
    tokenizer = from_place(PreTrainedTokenizerFast.from_pretrained, config.checkpoint, config.commit)
    if config.adapter is not None:
        _check_template(config, str(tokenizer.chat_template or ""))
    return tokenizer


def _check_template(config: ModelConfig, template: str) -> None:
    """Refuse another chat template beside the adapter, where trainers save the tokenizer of the training."""
    file = Path(str(config.adapter)) / "chat_template.jinja"
    adapter_template = json_of(str(config.adapter), None, "tokenizer_config.json").get("chat_template")
    if file.is_file():  # the template's own file wins
        adapter_template = file.read_text(encoding="utf-8")
    if adapter_template is not None and str(adapter_template).strip() != template.strip():
        raise UserError(
            f"model.adapter={config.adapter} has another chat template than {config.place}: "
            "put its template into the model's folder, or delete it beside the adapter."
        )


def _stand_in_tokenizer(config: ModelConfig) -> PreTrainedTokenizerFast:
    """Return a tokenizer of single bytes, which restores any text, with a built model's special tokens and tags."""
    special = config.special_tokens or {}
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([special[role] for role in ROLES])
    think_tags = [tag for tag in (config.think_start, config.think_end) if tag]
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in think_tags])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=special["bos"],
        eos_token=special["eos"],
        pad_token=special["eos"],
        chat_template=_CHAT_TEMPLATE.substitute(special, think=config.think_start or ""),
        clean_up_tokenization_spaces=False,
    )


def device_of(config: ModelConfig) -> torch.device:
    """Return the device that model.device names, for `auto` a GPU if there is one; UserError without the GPU."""
    is_auto = config.device == "auto"
    if torch.cuda.is_available():
        return torch.device("cuda" if is_auto else config.device)
    if config.device.startswith("cuda"):
        raise UserError(f"model.device={config.device} needs a GPU, and this process sees none: set model.device=cpu.")
    if is_auto and named_gpus():
        raise UserError(
            f"this process was given a GPU ({VISIBLE}={os.environ[VISIBLE]}), and torch finds none: "
            "mend the driver or torch's build, or set model.device=cpu."
        )
    return torch.device("cpu" if is_auto else config.device)
