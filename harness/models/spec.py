"""The facts about a model that a slot cache needs, read once from its config; other models are refused."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvsweep.compression.config import LayerKind
from kvsweep.harness.models.config import ModelConfig
from kvsweep.harness.models.hub import first_line, from_place, json_of, lack_of, reason
from kvsweep.messages.errors import UserError

if TYPE_CHECKING:
    from kvsweep.compression.cache_rows import CacheShape

_FULL: dict[str, LayerKind] = {"full_attention": "full", "attention": "full"}
_WINDOW: dict[str, LayerKind] = {"sliding_attention": "window"}
# With these fields, these families' config.json gives every size.
_PLAIN = {"llama", "qwen2", "qwen3"}
_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "max_position_embeddings",
)
# Of a model whose weights are packed, at least. The embedded models have a twentieth, SmolLM2-135M eight times as many.
_PACKED_PARAMETERS = 1 << 24
# Families that tests/harness/models/test_families.py decodes like transformers' `generate`.
FAMILIES = _PLAIN | {
    *("apertus", "arcee", "aria_text", "bitnet", "cohere", "cohere2", "dots1", "ernie4_5", "ernie4_5_moe"),
    *("exaone4", "flex_olmo", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "glm4_moe", "gpt2", "gpt_bigcode"),
    *("gpt_neox", "gpt_oss", "granite", "granitemoe", "granitemoeshared", "helium", "hunyuan_v1_dense"),
    *("hunyuan_v1_moe", "hy_v3", "hyperclovax", "internlm3", "iquestcoder", "jais2", "lfm2", "lfm2_moe"),
    *("minimax_m2", "ministral", "ministral3", "mistral", "mixtral", "nanochat", "olmo", "olmo2", "olmo3", "olmoe"),
    *("persimmon", "phi", "phi3", "phimoe", "qwen2_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe"),
    *("qwen3_next", "seed_oss", "smollm3", "solar_open", "starcoder2"),
}
# Layers where each family's own attention code in transformers uses `sliding_window`. Other families have only full
# attention, and their code reads neither `sliding_window` nor `layer_types`. In the layers that `layer_types` calls
# sliding_attention:
_TYPED = {"cohere2", "dots1", "exaone4", "gemma2", "gemma3_text", "gpt_oss", "ministral", "olmo3"}
_TYPED |= {"qwen2", "qwen2_moe", "qwen3", "smollm3"}
# In every layer:
_WINDOWED = {"ministral3", "mistral", "mixtral", "phi3", "phimoe", "qwen3_moe", "starcoder2"}
# Families, of both groups, with windows only if `use_sliding_window` is true; others do not read this field.
_SWITCHED = {"qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3"}
# What `layer_types` calls a family's linear layers.
_LINEAR = {"lfm2": "conv", "lfm2_moe": "conv"}
_LINEAR |= dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), "linear_attention")
# Multimodal wrappers; only the text model is read, which has its own family.
_WRAPPERS = {"gemma3", "qwen3_5", "qwen3_5_moe"}
# Families with a position table, which has no row for a longer text.
_TABLES = {"gpt2", "gpt_bigcode"}
_FIXED_ROPES = {"default", "linear", "llama3", "yarn"}
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A model that a slot cache supports."""

    family: str  # the config's model_type
    layer_kinds: tuple[LayerKind, ...]
    window: int  # 0 if no layer has one
    states: tuple[tuple[int, ...], ...]
    q_heads: int
    kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    positions: int | None  # tokens of the longest text that the model was made for; None if its config gives no number
    limited: bool  # True: beyond `positions`, decoding would differ from the model's own code
    plain_head: bool  # True: the logits are one product of the last hidden states
    fusable: bool  # True: `harness.models.loaded.FusedStep` computes the model's step
    experts: bool  # True: tokens are routed to experts, and products depend on the other tokens
    tied: bool  # True: the logits use the embedding's weights
    parameters: int | None  # without norms and offsets; None for a family that may have other layers

    @classmethod
    def of(cls, config: Any) -> ModelSpec:
        """Return the spec of a transformers config or a config.json; raises UserError if no slot cache supports it."""
        facts = _Facts(config)
        family = str(facts["model_type"])
        _check_family(facts, family)
        rope = facts["rope_parameters"] or facts["rope_scaling"] or {}
        ropes = {str(settings.get("rope_type", settings.get("type", "default"))) for settings in rope_parts(rope)}
        lengths = [facts["max_position_embeddings"]]
        # dynamic, longrope: another embedding beyond the original length, which stands beside or in their settings.
        if not ropes <= _FIXED_ROPES:
            name = "original_max_position_embeddings"
            lengths += [facts[name], rope.get(name)]
        positions = min((length for length in lengths if length is not None), default=None)
        named_kinds, window = _layers(facts, family)
        # A window as long as all positions is full attention, as long as no text is longer.
        window_acts = window is not None and (positions is None or window < positions)
        kinds = [kind if window_acts or kind != "window" else "full" for kind in named_kinds]
        unknown = sorted(ropes - _FIXED_ROPES - {"dynamic", "longrope"})
        if unknown:
            raise _refused(family, f"rotary embeddings of type {', '.join(unknown)}")
        heads, hidden = facts.size("num_attention_heads"), facts.size("hidden_size")
        is_plain = family in _PLAIN
        # None: the family's default, silu.
        has_plain_mlp = facts["hidden_act"] in (None, "silu") and not facts["mlp_bias"]
        # Limited: ropes that change with the text's length, a table of positions, a window that would begin to act.
        limited = not ropes <= _FIXED_ROPES or family in _TABLES or ("window" in named_kinds and not window_acts)
        return cls(
            family=family,
            layer_kinds=tuple(kinds),
            window=window if window and "window" in kinds else 0,  # `kinds` may have made windows full
            states=_states(facts) if "linear" in kinds else (),
            q_heads=heads,
            # gpt_bigcode says multi_query.
            kv_heads=1 if facts["multi_query"] else facts.size("num_key_value_heads", heads),
            head_dim=facts.size("head_dim", hidden // heads),
            hidden_size=hidden,
            vocab_size=facts.size("vocab_size"),
            positions=positions,
            limited=limited,
            plain_head=is_plain,
            fusable=is_plain and has_plain_mlp and not limited,
            # Each family with experts has one of these names for the experts of a token.
            experts=any(facts[name] for name in ("num_experts_per_tok", "moe_topk", "moe_k")),
            tied=bool(facts["tie_word_embeddings"]),
            parameters=_parameters(facts) if is_plain else None,
        )

    @property
    def layers(self) -> int:  # layers of full attention, where policies choose the rows
        return self.layer_kinds.count("full")

    @property
    def packed(self) -> bool:
        """Whether steps on a CPU multiply with packed weights (`kernels.packed`): small models gain nothing."""
        return self.fusable and (self.parameters or 0) >= _PACKED_PARAMETERS

    def cache_shape(self, dtype: str) -> CacheShape:
        """Return the shape of a slot's cache, with rows in this precision."""
        import torch

        from kvsweep.compression.cache_rows import CacheShape

        return CacheShape(
            layers=self.layers,
            kinds=self.layer_kinds,
            window=self.window,
            states=self.states,
            q_heads=self.q_heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            dtype=getattr(torch, dtype),
        )


_REFUSED_FIELDS = {
    "use_bidirectional_attention": "attention to later tokens",
    "is_heterogeneous": "layers of several shapes",
    "attention_chunk_size": "attention in chunks",
    "kv_lora_rank": "latent attention (MLA), whose rows are no keys and values of heads",
    "mamba_d_state": "layers of Mamba, whose states no test holds against its own code",
    "ssm_state_size": "layers of Mamba, whose states no test holds against its own code",
    "is_encoder_decoder": "an encoder",
    "add_cross_attention": "cross attention",
    "alibi": "attention biases by distance",
    "scale_attn_by_inverse_layer_idx": "another scaling in each layer",
}


def _refused(family: str, what: str) -> UserError:
    return UserError(f"model type {family} has {what}: choose a model that `kvsweep models` lists.")


class _Facts:
    """The fields of a config; a missing field is None."""

    def __init__(self, config: Any) -> None:
        self._config = config

    def __getitem__(self, name: str) -> Any:
        return self._config.get(name) if isinstance(self._config, Mapping) else getattr(self._config, name, None)

    def size(self, name: str, default: int | None = None) -> int:
        """Return a field, or the default if it is missing; raises UserError unless it is a positive whole number."""
        value = default if self[name] is None else self[name]
        if type(value) is not int or value < 1:  # True is an int to isinstance
            raise _refused(str(self["model_type"]), f"{name}={value}, which must be a whole number of at least 1")
        return value


def _check_family(facts: _Facts, family: str) -> None:
    """Refuse a family that no test has decoded, and fields that change its attention or its layers."""
    for field, what in _REFUSED_FIELDS.items():
        if facts[field]:
            raise _refused(family, f"{what} ({field})")
    if facts["is_causal"] is False:
        raise _refused(family, "attention to later tokens (is_causal=false)")
    if family not in FAMILIES:
        raise _refused(family, "no proof that a slot cache decodes it as its own code does")


def _parameters(facts: _Facts) -> int:
    """Count the weights of a plain family's products and embedding."""
    hidden, heads = facts.size("hidden_size"), facts.size("num_attention_heads")
    head_dim = facts.size("head_dim", hidden // heads)
    # Twice `heads` for queries and output, twice the kv heads for keys and values; then gate, up and down.
    attention = 2 * hidden * head_dim * (heads + facts.size("num_key_value_heads", heads))
    mlp = 3 * hidden * facts.size("intermediate_size")
    tables = 1 if facts["tie_word_embeddings"] else 2
    return facts.size("num_hidden_layers") * (attention + mlp) + tables * facts.size("vocab_size") * hidden


def _layers(facts: _Facts, family: str) -> tuple[list[LayerKind], int | None]:
    """Return the kinds of the layers and the window size (None without windows), as the family's own code reads them.

    Raises UserError if this code fails, or if its attention implementations read a config differently.
    """
    count = facts.size("num_hidden_layers")
    window = facts["sliding_window"]
    if family in _SWITCHED and not facts["use_sliding_window"]:
        window = None
    if family == "olmoe" and window is not None:
        raise _refused(family, f"sliding_window={window}, which its attention takes and its masks ignore")
    types = ["full_attention"] * count
    if family in _TYPED or family in _LINEAR:
        types = facts["layer_types"] or types
    elif family in _WINDOWED and window is not None:
        types = ["sliding_attention"] * count
    if len(types) != count:
        raise _refused(family, f"{len(types)} layer_types for {count} layers")
    kinds = dict(_FULL)  # by the names that this family's code knows
    if family in _TYPED or family in _WINDOWED:
        kinds |= _WINDOW
    if family in _LINEAR:
        kinds[_LINEAR[family]] = "linear"
    others = sorted({str(name) for name in types} - set(kinds))
    if others:
        raise _refused(family, f"layers of kind {', '.join(others)}, and only {', '.join(kinds)} work")
    layers = [kinds[name] for name in types]
    if "window" not in layers:
        return layers, None
    if window is None:
        off = "use_sliding_window=false" if family in _SWITCHED else "no sliding_window"
        raise _refused(family, f"layers of kind {', '.join(_WINDOW)}, and {off}")
    return layers, facts.size("sliding_window")  # refuses what is no positive whole number


def _states(facts: _Facts) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of a linear layer's states: a short convolution's inputs, or also a delta rule's sum."""
    if facts["conv_L_cache"]:  # lfm2: a short convolution alone
        return ((facts.size("hidden_size"), facts.size("conv_L_cache")),)
    key_heads, key_dim = facts.size("linear_num_key_heads"), facts.size("linear_key_head_dim")
    value_heads, value_dim = facts.size("linear_num_value_heads"), facts.size("linear_value_head_dim")
    channels = 2 * key_heads * key_dim + value_heads * value_dim  # queries and keys, and values
    return (channels, facts.size("linear_conv_kernel_dim")), (value_heads, key_dim, value_dim)


def rope_parts(rope: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """Return the settings of rotary embeddings: those for all layers, or those of each kind of layer, by whose name
    some families nest them."""
    rope = rope or {}
    of_kinds = [part for part in rope.values() if isinstance(part, Mapping)]
    return of_kinds or [rope]


def read_spec(config: ModelConfig) -> ModelSpec:
    """Return a model's spec; the weights need not lie on this disk.

    The spec comes from the checkpoint's config.json on this disk. For a hub id that was never downloaded, it comes from
    `config`, which `load_model` compares with the download. If a config does not give all sizes, transformers reads it.
    Raises UserError for a config that cannot be read, or a model that no slot cache supports.
    """
    if not config.is_built:
        fields = json_of(config.checkpoint, config.commit, "config.json") or config.config or {}
        if _is_plain(fields):
            return ModelSpec.of(fields)
    return ModelSpec.of(text_of(read_architecture(config)))


def _is_plain(fields: Mapping[str, Any]) -> bool:
    """True if a config.json has every field that a spec needs, without transformers' defaults."""
    family = fields.get("model_type")
    if family not in _PLAIN or "per_layer_config" in fields:  # each layer may have other sizes
        return False
    # transformers decides which layers slide, and fills in null.
    if not isinstance(fields.get("layer_types", None if fields.get("use_sliding_window") else []), list):
        return False
    # Without head_dim, qwen3's default is no quotient of other fields.
    needed = (*_SIZES, "head_dim") if family == "qwen3" else _SIZES
    return all(isinstance(fields.get(name), int) for name in needed)


def read_architecture(config: ModelConfig) -> Any:
    """Return a model's transformers config, built from `config` or read; UserError if `ModelSpec` refuses it."""
    from transformers import AutoConfig

    try:
        if config.is_built:
            # transformers changes the dictionaries of rotary embeddings, and the model's identity hashes `config`.
            architecture = AutoConfig.for_model(**copy.deepcopy(dict(config.config or {})))
        else:
            load = AutoConfig.from_pretrained
            architecture = from_place(load, config.checkpoint, config.commit, trust_remote_code=False)
        ModelSpec.of(text_of(architecture))
    except UserError:
        raise
    except Exception as error:  # each architecture checks its fields and raises its own errors
        raise cannot_load(config, error) from error
    return architecture


def text_of(architecture: Any) -> Any:
    """Return the config of a multimodal model's text model; another config itself."""
    return architecture.get_text_config() if architecture.model_type in _WRAPPERS else architecture


def cannot_load(config: ModelConfig, error: Exception) -> UserError:
    if config.is_built:
        return UserError(f"model.config cannot be built ({first_line(error)}): correct its fields.")
    safe = config.safetensors_only and not config.random_weights
    why = lack_of(Path(config.place), safetensors_only=safe) or reason(config.place, config.revision, error)
    return UserError(f"model={config.name} cannot be loaded from {config.place}: {why}.")
