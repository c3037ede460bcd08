"""GGUF fields that transformers skips: rotary scaling is read here, every other unknown field is refused by name.

transformers reads only the fields that it knows and the tensors that the network has, and skips all others without a
message (`modeling_gguf_pytorch_utils`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvsweep.messages.errors import UserError

if TYPE_CHECKING:
    from gguf import ReaderTensor
    from transformers import PreTrainedConfig, PreTrainedModel

Fields = Mapping[str, Any]  # a file's fields by their names
Tensors = Sequence["ReaderTensor"]

# Groups of fields that do not change what the network computes, or that `tokenizer` checks.
_OTHER_GROUPS = {"GGUF", "general", "tokenizer", "quantize", "imatrix"}
# Fields without effect if they have this value; None: any value.
_WITHOUT_EFFECT: dict[str, Any] = {
    "tensor_data_layout": None,
    "rope.scaling.finetuned": None,
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_ext_factor": -1.0,
    "rope.scaling.yarn_beta_fast": 32.0,
    "rope.scaling.yarn_beta_slow": 1.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
    "attention.causal": True,
    "expert_count": 0,
    "expert_used_count": 0,
    "attention.sliding_window": 0,
}
_LAYERS_OF_GEMMA3_27B = 62
ROPE_FREQUENCIES = "rope_freqs.weight"
_ARCHITECTURE = "general.architecture"
# Fields that `scale_rope` reads.
SCALING = ("rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length")


def scale_rope(fields: Fields, tensors: Tensors, config: PreTrainedConfig) -> None:
    """Add a file's rotary scaling to a config; raises UserError for an unknown scaling.

    Gemma 3 has separate parameters for each kind of layer; the scaling is that of its full layers.
    """
    scaling = _rope_scaling(fields, tensors, config)
    if not scaling:
        return
    plain: dict[str, Any] = config.rope_parameters
    if "full_attention" not in plain:
        config.rope_parameters = {**plain, **scaling}
    elif config.model_type == "gemma3_text":
        config.rope_parameters = {**plain, "full_attention": {**plain["full_attention"], **scaling}}
    else:
        raise UserError("its rotary scaling is of some layers, and the file does not say of which")


def _rope_scaling(fields: Fields, tensors: Tensors, config: PreTrainedConfig) -> dict[str, Any]:
    """Return a file's rotary scaling as transformers writes it, without `rope_theta`; UserError if unknown.

    llama.cpp stores linear and yarn scaling as fields, and Llama 3.1's as factors that divide the frequencies.
    """
    scaling = [fields.get(f"{fields[_ARCHITECTURE]}.{key}") for key in SCALING]
    kind, factor, original_length = scaling
    divisors = next((tensor.data for tensor in tensors if tensor.name == ROPE_FREQUENCIES), None)
    if kind in (None, "none"):
        return {} if divisors is None else _llama3(divisors, config)
    if divisors is None and factor:
        stored = {"rope_type": kind, "factor": float(factor)}
        if kind == "linear":
            return stored
        if kind == "yarn" and original_length:
            return {**stored, "original_max_position_embeddings": int(original_length)}
    raise UserError(f"rope.scaling.type={kind} is read neither by transformers nor here")


def _llama3(factors: Any, config: PreTrainedConfig) -> dict[str, Any]:
    """Return Llama 3's scaling with these divisors of the frequencies: the usual bounds, and the context that fits."""
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    plain = config.rope_parameters
    divisors = torch.tensor(factors)  # [head_dim / 2]
    exponents = torch.arange(len(divisors)) / len(divisors)
    unscaled = plain["rope_theta"] ** -exponents  # the rotary embedding's frequencies
    bounds = {"factor": round(float(divisors.max()), 3), "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    # The file does not say the original context: try each power of two, up to a million tokens.
    for power in range(5, 21):
        scaling = {"rope_type": "llama3", **bounds, "original_max_position_embeddings": 2**power}
        config.rope_parameters = {**plain, **scaling}  # the next line calculates from it
        frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
        if torch.allclose(unscaled / frequencies, divisors, rtol=1e-4):
            return scaling
    config.rope_parameters = plain
    raise UserError(f"its tensor {ROPE_FREQUENCIES} is no scaling of Llama 3's")


# transformers has a value of its own for these where a file lacks them. Another missing size leaves tensors unread.
_NEEDED = ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon")


def check_all_is_read(fields: Fields, tensors: Tensors, network: PreTrainedModel) -> None:
    """Raise UserError for a field, which it names, or a tensor of the file that the loaded network does not have."""
    config = network.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    sizes_of_heads = ("rope.dimension_count", "attention.key_length", "attention.value_length")
    harmless = _WITHOUT_EFFECT | dict.fromkeys(sizes_of_heads, head_dim)
    architecture = fields[_ARCHITECTURE]
    if architecture == "gemma3" and config.num_hidden_layers == _LAYERS_OF_GEMMA3_27B:
        raise UserError("it may be Gemma 3 27B, whose scaling of queries is its own, and the file does not say it")
    read_keys = {*SCALING, *_read_keys(architecture)}
    for key in _NEEDED:
        if key in read_keys and f"{architecture}.{key}" not in fields:
            raise UserError(f"it lacks the field {architecture}.{key}, which llama.cpp needs too")
    for name, value in fields.items():
        group, _, key = name.partition(".")  # "llama.rope.scaling.type" -> "llama", "rope.scaling.type"
        if group in _OTHER_GROUPS or (group == architecture and key in read_keys):
            continue
        is_harmless = key in harmless and harmless[key] in (None, value)
        if group != architecture or not is_harmless:
            raise UserError(f"transformers does not read its field {name} ({value!r:.60})")
    # transformers skips tensors without a message, so the numbers of all tensors are counted.
    numbers = sum(int(tensor.n_elements) for tensor in tensors if tensor.name != ROPE_FREQUENCIES)
    parameters = network.num_parameters()
    if numbers != parameters:
        raise UserError(f"it has {numbers:,} numbers and the network {parameters:,}: transformers leaves out tensors")


def _read_keys(architecture: str) -> set[str]:
    """Return the fields of an architecture that become settings of the network."""
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

    mapping: dict[str, Any] = GGUF_CONFIG_MAPPING
    settings: dict[str, str | None] = {}
    # transformers spells some architectures otherwise: qwen2moe is its qwen2_moe.
    for name in (architecture, architecture.replace("-", "_"), architecture.replace("moe", "_moe")):
        settings |= mapping.get(name, {})
    return {key for key, setting in settings.items() if setting is not None}  # transformers skips the others
