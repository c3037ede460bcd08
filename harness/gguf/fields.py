"""GGUF fields that transformers skips: rotary scaling is read here, every other unknown field is refused by name.

transformers reads only the fields that it knows and the tensors that the network has, and skips all others without a
message (`modeling_gguf_pytorch_utils`).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvsweep.messages.errors import UserError
from kvsweep.run_files.safe_files import contains

if TYPE_CHECKING:
    from gguf import GGUFReader
    from transformers import PreTrainedConfig, PreTrainedModel

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
_ROPE_FREQUENCIES = "rope_freqs.weight"
# The field as its bytes in the file, with type and length: Qwen2's pre-tokenizer.
_CUT_OF_QWEN2 = "tokenizer.ggml.pre" + "\x08\0\0\0" + "\x05\0\0\0\0\0\0\0" + "qwen2"
# Fields that `scale_rope` reads.
_SCALING = ("rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length")


def scales_rope(file: Path) -> bool:
    """True if a file names a rotary scaling."""
    return contains(file, _ROPE_FREQUENCIES) or contains(file, _SCALING[0])


def is_cut_otherwise(file: Path) -> bool:
    """True if this file's tokens may differ from those that an earlier kvsweep took from transformers."""
    return not contains(file, _CUT_OF_QWEN2)


def scale_rope(reader: GGUFReader, config: PreTrainedConfig) -> None:
    """Add a file's rotary scaling to a config; raises UserError for an unknown scaling.

    Gemma 3 has separate parameters for each kind of layer; the scaling is that of its full layers.
    """
    if not (scaling := _rope_scaling(reader, config)):
        return
    plain: dict[str, Any] = config.rope_parameters
    if "full_attention" not in plain:
        config.rope_parameters = {**plain, **scaling}
    elif config.model_type == "gemma3_text":
        config.rope_parameters = {**plain, "full_attention": {**plain["full_attention"], **scaling}}
    else:
        raise UserError("its rotary scaling is of some layers, and the file does not say of which")


def _rope_scaling(reader: GGUFReader, config: PreTrainedConfig) -> dict[str, Any]:
    """Return a file's rotary scaling as transformers writes it, without `rope_theta`; UserError if unknown.

    llama.cpp stores linear and yarn scaling as fields, and Llama 3.1's as factors that divide the frequencies.
    """
    scaling = [_value(reader, name) for name in _SCALING]
    kind, factor, original = scaling
    factors = next((tensor.data for tensor in reader.tensors if tensor.name == _ROPE_FREQUENCIES), None)
    if factors is not None and kind in (None, "none"):
        return _llama3(factors, config)
    if factors is None and kind in (None, "none"):
        return {}
    if factors is None and kind == "linear" and factor:
        return {"rope_type": "linear", "factor": float(factor)}
    if factors is None and kind == "yarn" and factor and original:
        return {"rope_type": "yarn", "factor": float(factor), "original_max_position_embeddings": int(original)}
    raise UserError(f"rope.scaling.type={kind} is read neither by transformers nor here")


def _llama3(factors: Any, config: PreTrainedConfig) -> dict[str, Any]:
    """Return Llama 3's scaling with these divisors of the frequencies: the usual bounds, and the context that fits."""
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    plain = config.rope_parameters
    found = torch.tensor(factors)
    theta = 1.0 / plain["rope_theta"] ** (torch.arange(0, 2 * len(found), 2) / (2 * len(found)))
    bounds = {"factor": round(float(found.max()), 3), "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    for original in (2**power for power in range(5, 21)):
        scaling = {"rope_type": "llama3", **bounds, "original_max_position_embeddings": original}
        config.rope_parameters = {**plain, **scaling}
        frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
        if torch.allclose(theta / frequencies, found, rtol=1e-4):
            return scaling
    config.rope_parameters = plain
    raise UserError(f"its tensor {_ROPE_FREQUENCIES} is no scaling of Llama 3's")


# transformers has a value of its own for these where a file lacks them. Another missing size leaves tensors unread.
_NEEDED = ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon")


def check_all_is_read(reader: GGUFReader, network: PreTrainedModel) -> None:
    """Raise UserError, naming a field or tensor of the file that the loaded network does not have."""
    heads = network.config.hidden_size // network.config.num_attention_heads
    head_dim = getattr(network.config, "head_dim", None) or heads
    known = {**_WITHOUT_EFFECT, "rope.dimension_count": head_dim}
    known |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    architecture = _value(reader, "general.architecture", whole=True)
    if architecture == "gemma3" and network.config.num_hidden_layers == _LAYERS_OF_GEMMA3_27B:
        raise UserError("it may be Gemma 3 27B, whose scaling of queries is its own, and the file does not say it")
    read = {*_SCALING, *_read_keys(architecture)}
    if lacking := [key for key in _NEEDED if key in read and _value(reader, key) is None]:
        raise UserError(f"it lacks the field {architecture}.{lacking[0]}, which llama.cpp needs too")
    for name in reader.fields:
        group, _, key = name.partition(".")
        if group in _OTHER_GROUPS or (group == architecture and key in read):
            continue
        value = _value(reader, name, whole=True)
        if group != architecture or key not in known or known[key] not in (None, value):
            raise UserError(f"transformers does not read its field {name} ({value!r:.60})")
    numbers = sum(int(tensor.n_elements) for tensor in reader.tensors if tensor.name != _ROPE_FREQUENCIES)
    parameters = sum(parameter.numel() for parameter in network.parameters())
    if numbers != parameters:
        unread = ", ".join(_unread_tensors(reader, network)) or "some of its tensors"
        raise UserError(f"it has {numbers:,} numbers and the network {parameters:,}: transformers leaves out {unread}")


def _value(reader: GGUFReader, name: str, *, whole: bool = False) -> Any:
    """Return a field's value, None if missing; `name` leaves out the architecture unless `whole`."""
    prefix = "" if whole else f"{_value(reader, 'general.architecture', whole=True)}."
    field = reader.fields.get(prefix + name)
    return None if field is None else field.contents()


def _read_keys(architecture: str) -> set[str]:
    """Return the fields of an architecture that become settings of the network."""
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

    mapping: dict[str, Any] = GGUF_CONFIG_MAPPING
    alike = {architecture, architecture.replace("-", "_"), architecture.replace("moe", "_moe")}
    # transformers skips a field that is mapped to None.
    return {key for name in alike for key, setting in mapping.get(name, {}).items() if setting is not None}


def _unread_tensors(reader: GGUFReader, network: PreTrainedModel) -> list[str]:
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    architecture = _value(reader, "general.architecture", whole=True)
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=network.config.to_dict())
    known = get_gguf_hf_weights_map(network, processor)
    return sorted(tensor.name for tensor in reader.tensors if tensor.name not in known)[:3]


def reader_of(file: Path) -> GGUFReader:
    from gguf import GGUFReader

    return GGUFReader(file)
