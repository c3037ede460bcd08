"""LoRA adapters: found, checked, and added to a network's weights by plain arithmetic."""

import json
from pathlib import Path
from typing import Any

from kvsweep.base.errors import UserError

# The fields of peft's adapter_config.json that `add_adapter` reads, and those that change no weight.
_KNOWN = {
    *("peft_type", "r", "lora_alpha", "target_modules", "bias", "fan_in_fan_out"),
    *("base_model_name_or_path", "inference_mode", "init_lora_weights", "lora_dropout", "megatron_core"),
    *("peft_version", "qalora_group_size", "revision", "task_type", "auto_mapping"),
}
_PREFIX = "base_model.model."


def adapter_files(folder: str) -> list[Path]:
    """The two files of an adapter, as peft saves them."""
    files = [Path(folder) / name for name in ("adapter_config.json", "adapter_model.safetensors")]
    if not all(file.is_file() for file in files):
        mend = f"name a folder with {files[0].name} and {files[1].name}, or null"
        raise UserError(f"model.adapter={folder} holds no adapter: {mend}.")
    _scale(folder, files[0])
    return files


def add_adapter(network: Any, folder: str) -> None:
    """Add the adapter's product to each weight that it names: W + lora_alpha / r · B A, computed in float32."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    config, weights_file = adapter_files(folder)
    scale = _scale(folder, config)
    try:
        factors = load_file(weights_file)
    except (OSError, SafetensorError) as error:
        raise _unusable(folder, f"cannot be read ({error})") from error
    names = {name.removeprefix(_PREFIX).rsplit(".lora_", 1)[0] for name in factors}
    expected = {f"{_PREFIX}{name}.lora_{part}.weight" for name in names for part in "AB"}
    weights = dict(network.named_parameters())
    if factors.keys() != expected or not {f"{name}.weight" for name in names} <= weights.keys():
        raise _unusable(folder, "names weights that this model lacks")
    for name in sorted(names):
        weight = weights[f"{name}.weight"]
        down, up = (factors[f"{_PREFIX}{name}.lora_{part}.weight"].float() for part in "AB")
        if (len(up), down.shape[1]) != tuple(weight.shape) or up.shape[1] != len(down):
            raise _unusable(folder, f"does not fit the shape of {name}.weight")
        weight.data = (weight.data.float() + scale * (up @ down)).to(weight.dtype)


def _scale(folder: str, config: Path) -> float:
    try:
        fields: dict[str, Any] = json.loads(config.read_text())
        rank, alpha = fields["r"], float(fields["lora_alpha"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise _unusable(folder, f"has a config that cannot be read ({error})") from error
    others = sorted(name for name, value in fields.items() if value and name not in _KNOWN)
    if fields.get("peft_type") != "LORA" or fields.get("bias", "none") != "none" or fields.get("fan_in_fan_out"):
        others = [*others, "peft_type, bias or fan_in_fan_out"]
    if others:
        raise _unusable(folder, f"is no plain LoRA ({others[0]})")
    if not isinstance(rank, int) or rank < 1:
        raise _unusable(folder, f"has the rank {rank}, which must be a whole number of at least 1")
    return alpha / rank


def _unusable(folder: str, what: str) -> UserError:
    return UserError(f"model.adapter={folder} {what}: name a LoRA adapter that peft saved for this model, or null.")
