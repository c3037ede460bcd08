"""The means of a model's queries against the queries that its modules compute before the rotation."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from kvsweep.compression.artifacts import read_card
from kvsweep.compression.cache import use_slot_attention
from kvsweep.compression.policies.triattention import read_statistics
from kvsweep.harness.models.config import ModelConfig
from kvsweep.harness.models.loaded import LoadedModel
from kvsweep.harness.predictor.labels import read_whole
from kvsweep.harness.predictor.query_means import QueryMeans, rotation_of
from kvsweep.messages.errors import UserError
from tests.harness.models.test_families import loaded
from tests.program import predictor as main

SIZES = {
    "hidden_size": 48,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 60,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}


def build(kind, **fields):
    torch.manual_seed(0)
    network = AutoModelForCausalLM.from_config(kind(**SIZES, **fields)).eval()
    use_slot_attention(network)
    return LoadedModel(ModelConfig(name="m", title="M", path="none"), network, None)


@pytest.mark.parametrize(
    ("kind", "fields", "before"),
    [(LlamaConfig, {}, "q_proj"), (Qwen3Config, {}, "q_norm"), (Qwen3Config, {"rope_parameters": YARN}, "q_norm")],
    ids=["llama", "qwen3-normed-queries", "qwen3-yarn"],
)
@torch.inference_mode()
def test_the_means_are_those_of_the_queries_before_rotation(kind, fields, before):
    model = build(kind, **fields)
    frequencies, scaling = rotation_of(model)
    seen = [[] for _ in model.network.base_model.layers]
    for kept, layer in zip(seen, model.network.base_model.layers, strict=True):
        module = getattr(layer.self_attn, before)
        module.register_forward_hook(lambda _, __, out, kept=kept: kept.append(out.reshape(-1, 6, 8).double()))
    assert (scaling > 1) == ("rope_parameters" in fields)
    means = QueryMeans(frequencies, scaling)
    for length in (37, 12):
        means.begin_chunk()
        read_whole(model, torch.randint(0, 60, (length,)).tolist(), means)
    found = means.result()
    assert means.tokens == 49
    for layer, kept in enumerate(seen):
        queries = torch.cat(kept)  # [tokens, heads, head_dim]
        pairs = torch.complex(queries[..., :4], queries[..., 4:])
        torch.testing.assert_close(found["mean"][layer], pairs.mean(dim=0), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found["mean_size"][layer], pairs.abs().mean(dim=0), rtol=1e-5, atol=1e-6)


def test_a_rotation_that_changes_with_the_length_is_refused():
    with pytest.raises(UserError, match="no rotation of whole heads by fixed frequencies"):
        rotation_of(build(LlamaConfig, rope_parameters=DYNAMIC))


FULL, WINDOWED = {"layer_types": ["full_attention"] * 2}, {"layer_types": ["sliding_attention", "full_attention"]}
ROTATIONS = [("llama", {}), ("qwen2", {}), ("qwen3", {}), ("olmo2", {}), ("granite", {}), ("seed_oss", {})]
# Neighbours are paired; the other direction; a norm after the rotation; a layer without one.
OTHERS = [("cohere", {}), ("cohere2", FULL), ("ernie4_5", {}), ("helium", {}), ("nanochat", {})]
OTHERS += [
    ("hunyuan_v1_dense", {}),
    ("smollm3", {"no_rope_layers": [1, 0]}),
    ("exaone4", {**WINDOWED, "sliding_window": 16}),
]


@pytest.mark.parametrize(("family", "fields"), ROTATIONS)
def test_a_rotation_of_halves_is_taken(family, fields):
    rotation_of(loaded(family, fields))


@pytest.mark.parametrize(("family", "fields"), OTHERS)
def test_another_rotation_is_refused(family, fields):
    with pytest.raises(UserError, match="choose another model or policy"):
        rotation_of(loaded(family, fields))


def test_the_stage_takes_any_text(tmp_path, tiny_model_dir, capsys):
    text = tmp_path / "text.txt"
    text.write_text("a is 4, b is 7. So a is 4. " * 20)
    out = tmp_path / "out"
    main(["statistics", f"model.path={tiny_model_dir}", f"recipe.text={text}", f"recipe.out={out}"])
    told = json.loads(capsys.readouterr().out.split("; ", 1)[1])
    card = read_card("statistics", out / "statistics.safetensors")
    assert card["hidden_size"] == 32
    assert card["text"] == "text.txt"
    assert int(card["tokens"]) == told["tokens"] > 200
    tensors = read_statistics(str(out / "statistics.safetensors"), "cpu")
    assert tensors["mean"].shape == tensors["mean_size"].shape == (2, 4, 4)
    assert (tensors["mean_size"] >= tensors["mean"].abs() - 1e-6).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [([], "run kvsweep predictor traces"), (["recipe.text=nowhere"], "recipe.text=nowhere is no file")],
)
def test_a_stage_without_its_text_is_refused(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("kvsweep.harness.models.load.load_model", lambda config: pytest.fail("a model was loaded"))
    with pytest.raises(SystemExit) as ended:
        main(["statistics", *arguments])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
