"""GGUF files of a tiny Llama: all that a file says is read, is known to have no effect, or is refused by name."""

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import Gemma3TextConfig, LlamaConfig, LlamaForCausalLM, Olmo3Config

from kvsweep.harness.gguf.fields import scale_rope
from kvsweep.harness.models.config import ModelConfig
from kvsweep.harness.models.load import load_model
from kvsweep.messages.errors import UserError
from tests.harness.decode.fakes import FULL, run
from tests.harness.decode.test_engine import ask

LACKING = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(LACKING), reason=f"the extra smollm2 is not installed: {', '.join(LACKING)}")
ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 128},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}
NO_TAGS = {"think_start": None, "think_end": None}
NAMES = {
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def original(rope: str) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        rope_parameters={"rope_type": rope, "rope_theta": 1e4, **ROPES[rope]},
        initializer_range=0.3,
        eos_token_id=2,
        bos_token_id=1,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config).eval()


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """The order in which llama.cpp stores the rows of queries and keys."""
    return np.ascontiguousarray(weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape))


def written(model: LlamaForCausalLM, path: Path, rope: str, fields: dict[str, Any], tensors: dict[str, Any]) -> Path:
    """The file that llama.cpp's converter makes of the model, with further fields and tensors."""
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    sizes = {"context_length": 512, "embedding_length": 64, "block_count": 2, "feed_forward_length": 96}
    heads = {"head_count": 4, "head_count_kv": 2, "layer_norm_rms_eps": model.config.rms_norm_eps}
    ropes = {"rope_freq_base": 1e4, "rope_dimension_count": 16, "vocab_size": 300}
    special = {"bos_token_id": 1, "eos_token_id": 2, "unk_token_id": 0}
    words = {"tokenizer_model": "gpt2", "tokenizer_pre": "llama-bpe", "token_merges": ["Ġ a"]}
    template = {"chat_template": "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"}
    for name, value in {**sizes, **heads, **ropes, **special, **words, **template}.items():
        getattr(writer, f"add_{name}")(value)
    if rope in ("yarn", "linear"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope))
        writer.add_rope_scaling_factor(4.0)
    if rope == "yarn":
        writer.add_rope_scaling_orig_ctx_len(128)
    letters = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġa"]
    tokens = ["<unk>", "<s>", "</s>", *letters]
    writer.add_token_list([*tokens, *(f"<e{i}>" for i in range(300 - len(tokens)))])
    writer.add_token_types([3] * 3 + [1] * len(letters) + [4] * (297 - len(letters)))
    for name, value in fields.items():
        if value is None:
            del writer.kv_data[0][name]
            continue
        write = {float: "float32", int: "uint32", bool: "bool", str: "string"}[type(value)]
        getattr(writer, f"add_{write}")(name, value)
    own = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    writer.add_tensor("token_embd.weight", own["model.embed_tokens.weight"])
    writer.add_tensor("output.weight", own["lm_head.weight"])
    writer.add_tensor("output_norm.weight", own["model.norm.weight"])
    for i in range(2):
        layer = f"model.layers.{i}."
        for name, source in NAMES.items():
            writer.add_tensor(f"blk.{i}.{name}.weight", own[f"{layer}{source}.weight"])
        for name, source, heads in (("attn_q", "q_proj", 4), ("attn_k", "k_proj", 2)):
            weight = interleaved(own[f"{layer}self_attn.{source}.weight"], heads)
            writer.add_tensor(f"blk.{i}.{name}.weight", weight)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    finish(writer)
    return path


def finish(writer: Any):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def loaded(tmp_path, monkeypatch) -> Any:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def load(model, rope="default", fields=None, tensors=None):
        if rope == "llama3":
            plain = 1e4 ** (-np.arange(0, 16, 2) / 16)
            factors = plain / model.model.rotary_emb.inv_freq.numpy()
            tensors = {"rope_freqs.weight": factors.astype(np.float32)}
        file = written(model, tmp_path / "m.gguf", rope, fields or {}, tensors or {})
        return load_model(ModelConfig(name="g", title="G", gguf=str(file), threads=1, dtype="float32", **NO_TAGS))

    return load


@pytest.mark.parametrize("rope", ROPES)
def test_the_rotary_scaling_of_a_file_is_the_models(rope, loaded):
    model = original(rope)
    ours = loaded(model, rope)
    torch.testing.assert_close(
        ours.network.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq, rtol=1e-6, atol=0
    )
    assert ours.network.model.rotary_emb.attention_scaling == model.model.rotary_emb.attention_scaling
    prompt = tuple(5 + 7 * i % 200 for i in range(100))
    completions, _ = run(ours, ask([prompt], FULL), max_new_tokens=20)
    text = completions["0", "p0", 0].token_ids
    with torch.inference_mode():
        own = model(input_ids=torch.tensor([[*prompt, *text]])).logits[0, 99:-1].argmax(-1).tolist()
    assert text == own
    assert ("gguf_rope" in ours.config.identity()) == (rope != "default")


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"llama.attention.sliding_window": 16}, r"does not read its field llama.attention.sliding_window \(16\)"),
        ({"llama.logit_scale": 0.5}, "does not read its field llama.logit_scale"),
        ({"llama.attention.key_length": 8}, r"does not read its field llama.attention.key_length \(8\)"),
        ({"adapter.type": "lora"}, "does not read its field adapter.type"),
        ({"llama.rope.scaling.type": "longrope"}, "rope.scaling.type=longrope is read neither"),
        ({"llama.rope.scaling.type": "yarn"}, "rope.scaling.type=yarn is read neither"),
        ({"llama.attention.layer_norm_rms_epsilon": None}, "lacks the field llama.attention.layer_norm_rms_epsilon"),
        ({"rope_freqs.weight": np.full(8, 3.0, np.float32)}, "rope_freqs.weight is no scaling of Llama 3's"),
        ({"blk.0.attn_q_norm.weight": np.ones(16, np.float32)}, "leaves out tensors"),
        ({"blk.0.attn_q.bias": np.ones(64, np.float32)}, "leaves out tensors"),
    ],
)
def test_what_is_not_read_is_refused(given, named, loaded):
    kind = "tensors" if isinstance(next(iter(given.values())), np.ndarray) else "fields"
    with pytest.raises(UserError, match=named):
        loaded(original("default"), **{kind: given})


def test_fields_without_effect_are_taken(loaded):
    fields = {"llama.attention.key_length": 16, "llama.rope.scaling.type": "none", "general.author": "someone"}
    fields |= {"llama.expert_count": 0, "llama.attention.causal": True, "tokenizer.ggml.eot_token_id": 0}
    model = loaded(original("default"), "default", fields)
    assert model.stop_ids == (0, 2)
    assert model.config.identity()["gguf_tokenizer"]


def test_the_rotary_scaling_of_gemma_3_is_that_of_its_full_layers(tmp_path):
    import gguf
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding

    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "gemma3")
    writer.add_rope_scaling_type(gguf.RopeScalingType("linear"))
    writer.add_rope_scaling_factor(8.0)
    finish(writer)
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    fields = {name: field.contents() for name, field in reader.fields.items()}
    window = {"rope_type": "default", "rope_theta": 1e4}
    linear = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    kinds = {"sliding_attention": window, "full_attention": {"rope_type": "default", "rope_theta": 1e6}}
    ours = Gemma3TextConfig(num_hidden_layers=6, rope_parameters=kinds)
    original = Gemma3TextConfig(num_hidden_layers=6, rope_parameters={**kinds, "full_attention": linear})
    scale_rope(fields, reader.tensors, ours)
    found, expected = Gemma3RotaryEmbedding(ours), Gemma3RotaryEmbedding(original)
    for name in ("sliding_attention_inv_freq", "full_attention_inv_freq"):
        assert torch.equal(getattr(found, name), getattr(expected, name))
    other = Olmo3Config(rope_parameters=kinds)
    with pytest.raises(UserError, match="its rotary scaling is of some layers"):
        scale_rope(fields, reader.tensors, other)
