"""One reading of a config: the same facts from plain JSON and from transformers, and refusals in one sentence."""

import json
import re
from typing import Any

import pytest
from transformers import AutoConfig, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from kvsweep.harness.models.config import ModelConfig
from kvsweep.harness.models.spec import ModelSpec, read_spec
from kvsweep.messages.errors import UserError

SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 50,
    "max_position_embeddings": 777,
}


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SIZES),
        LlamaConfig(**SIZES, head_dim=8, mlp_bias=True),
        Qwen2Config(**SIZES),
        Qwen3Config(**SIZES, head_dim=16),
        LlamaConfig(**SIZES, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}),
        LlamaConfig(**SIZES, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
    ],
)
def test_plain_json_says_what_transformers_says(config, tmp_path):
    config.save_pretrained(tmp_path)
    found = read_spec(ModelConfig(name="a", title="", path=str(tmp_path)))
    assert found == ModelSpec.of(config)
    assert (found.layers, found.layer_kinds) == (3, ("full",) * 3)
    assert (found.q_heads, found.kv_heads, found.hidden_size, found.vocab_size) == (4, 2, 48, 50)
    assert found.head_dim == (getattr(config, "head_dim", None) or 12)
    assert found.positions == 777


@pytest.mark.parametrize(
    ("config", "part"),
    [
        (
            Qwen2Config(**SIZES, layer_types=["full_attention", "chunked_attention", "full_attention"]),
            "chunked_attention",
        ),
        (LlamaConfig(**{**SIZES, "num_hidden_layers": 0}), "num_hidden_layers=0"),
    ],
)
def test_a_refusal_names_the_family_and_what_it_has(config, part):
    with pytest.raises(UserError, match=part) as refused:
        ModelSpec.of(config)
    assert config.model_type in str(refused.value)
    assert "\n" not in str(refused.value)


def test_windows_that_are_switched_off_are_full_attention(tmp_path):
    fields = {**SIZES, "model_type": "qwen2", "use_sliding_window": False, "sliding_window": 8}
    assert ModelSpec.of(fields).layer_kinds == ("full",) * 3
    switched_on = {**fields, "use_sliding_window": True, "max_window_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(switched_on))
    spec = read_spec(ModelConfig(name="a", title="", path=str(tmp_path)))
    assert (spec.layer_kinds, spec.window) == (("full", "window", "window"), 8)


@pytest.mark.parametrize(
    ("family", "part"),
    [
        ("deepseek_v2", "latent attention (MLA)"),
        ("deepseek_v3", "latent attention (MLA)"),
        ("minicpm3", "latent attention (MLA)"),
        ("kimi_linear", "latent attention (MLA)"),
        ("falcon_h1", "layers of Mamba"),
        ("nemotron_h", "layers of Mamba"),
        ("jamba", "layers of Mamba"),
        ("gemma3", "no proof"),
    ],
)
def test_a_known_family_is_refused_with_its_reason(family, part):
    with pytest.raises(UserError, match=re.escape(part)) as refused:
        ModelSpec.of(AutoConfig.for_model(family))
    assert family in str(refused.value)


def test_windows_are_those_of_transformers():
    """Qwen2 has them from layer `max_window_layers` on, Mistral in all layers; one of all positions never acts."""
    qwen = ModelSpec.of(Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=8, max_window_layers=1))
    assert (qwen.layer_kinds, qwen.window, qwen.layers) == (("full", "window", "window"), 8, 1)
    assert ModelSpec.of(MistralConfig(**SIZES, sliding_window=8)).layer_kinds == ("window",) * 3
    far = ModelSpec.of(MistralConfig(**SIZES, sliding_window=777))
    assert (far.layer_kinds, far.limited, far.window) == (("full",) * 3, True, 0)


def test_a_rope_that_changes_with_the_text_limits_its_length():
    longrope = {"rope_type": "longrope", "short_factor": [1.0] * 6, "long_factor": [2.0] * 6, "rope_theta": 1e4}
    config = LlamaConfig(**SIZES, rope_parameters={**longrope, "original_max_position_embeddings": 99})
    spec = ModelSpec.of(config)
    assert (spec.positions, spec.limited, spec.fusable) == (99, True, False)
