"""Configurations drawn at random, with fields that a family may ignore: each is exact or refused in one sentence.

The prompts are longer than every window and every original length of rotary embeddings; the reference is a forward of
the family's own code without a cache.
"""

import json
import random
import shutil
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from kvsweep.compression.cache import SLOT_ATTENTION
from kvsweep.harness.models import spec
from kvsweep.harness.models.config import ModelConfig
from kvsweep.harness.models.generation import unapplied_settings
from kvsweep.harness.models.load import load_model
from kvsweep.harness.models.spec import FAMILIES, ModelSpec, read_spec
from kvsweep.messages.errors import UserError
from tests.harness.models.test_families import DELTA, DYNAMIC, LINEAR, LLAMA3, LONGROPE, YARN, decode, loaded

FULL, SLIDING = "full_attention", "sliding_attention"
# Each field with the values that it is drawn from; a case has a random half of these fields.
STRAY: dict[str, list[Any]] = {
    "sliding_window": [3, 8, 16, 17, 512, None],
    "use_sliding_window": [True, False],
    "max_window_layers": [0, 1, 2],
    "layer_types": [[FULL] * 2, [SLIDING] * 2, [SLIDING, FULL], [FULL, SLIDING], ["linear_attention", FULL]],
    "rope_parameters": [rope["rope_parameters"] for rope in (YARN, LINEAR, LLAMA3, DYNAMIC, LONGROPE)],
    "max_position_embeddings": [24, 512],
    "no_rope_layers": [[1, 0]],
    "sliding_window_pattern": [2],
}
CASES, SMALL = 60, 12
PROMPTS = (21, 33)


def drawn() -> list[tuple[str, dict[str, Any]]]:
    """Random cases of as many families as there are, each family once before one comes again."""
    rng, families = random.Random(0), sorted(FAMILIES)
    rng.shuffle(families)
    cases = []
    for number in range(CASES):
        fields = {name: rng.choice(values) for name, values in STRAY.items() if rng.random() < (0.3, 0.6)[number % 2]}
        cases.append((families[number % len(families)], fields))
    return cases


def check_exact_or_refused(family: str, fields: dict[str, Any]) -> str:
    """Decode over slots and return "exact", or the sentence of the refusal."""
    sizes = DELTA if family.startswith(("qwen3_next", "qwen3_5")) else {}
    try:
        model = loaded(family, {**sizes, **fields})
        texts, logits = decode(model, 1, 4, PROMPTS)
    except UserError as refused:
        return str(refused)
    network = model.network
    network.set_attn_implementation("sdpa" if network._supports_sdpa else "eager")
    with torch.inference_mode():
        own = [network(input_ids=torch.tensor([text]), use_cache=False).logits[0] for text in texts]
    network.set_attn_implementation(SLOT_ATTENTION)
    expected = torch.cat([rows[prompt - 1 : -1] for rows, prompt in zip(own, PROMPTS, strict=True)])
    # A linear layer's own code reads a whole text in another order of sums than its steps.
    tolerance = 1e-2 if model.spec.states else 1e-4
    torch.testing.assert_close(logits, expected, rtol=tolerance, atol=tolerance * float(expected.std()))
    return "exact"


@pytest.mark.parametrize("number", range(CASES))
@pytest.mark.slow_unless(rule=lambda number: number < SMALL)
def test_a_random_configuration_is_exact_or_refused(number):
    assert "\n" not in check_exact_or_refused(*drawn()[number])


# By what a family's own code does with these fields: it ignores them, or reads them as windows.
IGNORED = ("llama", "olmo2", "granite", "gemma", "phi", "seed_oss")
WINDOWS = ("mistral", "phi3", "starcoder2", "mixtral", "phimoe")


@pytest.mark.parametrize(
    ("family", "fields"),
    [(family, {"sliding_window": 16, "layer_types": [SLIDING, FULL]}) for family in IGNORED]
    + [(family, {"sliding_window": 16, "use_sliding_window": False}) for family in WINDOWS]
    + [("qwen3", {"sliding_window": 16, "use_sliding_window": True, "layer_types": [SLIDING] * 2})],
)
def test_a_field_acts_as_in_the_familys_own_code(family, fields):
    assert check_exact_or_refused(family, fields) == "exact"


@pytest.mark.parametrize(
    ("family", "fields", "part"),
    [
        ("olmoe", {"sliding_window": 16}, "its attention takes and its masks ignore"),
        ("lfm2", {"layer_types": [SLIDING, FULL]}, "layers of kind sliding_attention"),
        ("qwen2", {"layer_types": ["linear_attention", FULL]}, "layers of kind linear_attention"),
        ("smollm3", {"sliding_window": 16, "layer_types": [SLIDING, FULL]}, "and use_sliding_window=false"),
        ("exaone4", {"sliding_window": None, "layer_types": [SLIDING, FULL]}, "and no sliding_window"),
        ("llama", {"is_causal": False}, "attention to later tokens"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(family, fields, part):
    assert part in check_exact_or_refused(family, fields)


def test_a_plain_config_json_has_the_windows_of_its_family(tmp_path):
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"vocab_size": 300, "max_position_embeddings": 512}
    for family in ("llama", "qwen2"):  # whose default is use_sliding_window=false
        (tmp_path / "config.json").write_text(json.dumps({**sizes, "model_type": family, "sliding_window": 16}))
        assert read_spec(ModelConfig(name="a", title="", path=str(tmp_path))).layer_kinds == ("full", "full")


@pytest.mark.parametrize(("family", "believed"), [("mistral", "full"), ("llama", "window")])
def test_the_check_of_a_model_finds_a_wrong_belief_about_its_windows(family, believed, monkeypatch):
    """The check is what stands between a new version of transformers and wrong logits, also for a long window."""

    def wrong(facts, family):
        return [believed] * 2, None if believed == "full" else facts["sliding_window"]

    monkeypatch.setattr(spec, "_layers", wrong)
    with pytest.raises(UserError, match=f"model type {family} (has other logits|fails) over a slot cache"):
        loaded(family, {"sliding_window": 64})


def test_the_windows_are_as_long_after_the_check_as_before():
    model = loaded("gemma2", {"sliding_window": 16})
    assert (model.spec, model.spec.window) == (ModelSpec.of(model.network.config), 16)
    assert {module.sliding_window for module in model.network.modules() if hasattr(module, "sliding_window")} == {
        *(16, None)
    }


def test_settings_of_generate_that_change_nothing_are_not_named():
    run = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "max_length": 99, "eos_token_id": 3}
    inert = {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "num_beams": 1, "min_p": 0.0, "suppress_tokens": []}
    assert unapplied_settings(GenerationConfig(**run, **inert)) == []
    acting = {"repetition_penalty": 1.1, "forced_bos_token_id": 0, "bad_words_ids": [[5]], "min_new_tokens": 4}
    expected = ["repetition_penalty=1.1", "min_new_tokens=4", "bad_words_ids=[[5]]", "forced_bos_token_id=0"]
    assert unapplied_settings(GenerationConfig(**run, **acting)) == expected
    assert unapplied_settings(GenerationConfig(do_sample=True, min_p=0.1)) == ["min_p=0.1"]
    assert unapplied_settings(GenerationConfig(min_p=0.1)) == []


def test_a_setting_of_generate_that_is_not_applied_is_named_at_load(tiny_model_dir, tmp_path, capsys):
    folder = shutil.copytree(tiny_model_dir, tmp_path / "model")
    load_model(ModelConfig(name="tiny", title="", path=str(folder)))
    assert "generation_config" not in capsys.readouterr().err
    (folder / "generation_config.json").write_text(json.dumps({"repetition_penalty": 1.3}))
    load_model(ModelConfig(name="tiny", title="", path=str(folder)))
    named = "note: the generation_config of model=tiny sets repetition_penalty=1.3; transformers' generate applies this"
    assert f"{named}, and kvsweep does not.\n" in capsys.readouterr().err


def test_a_model_of_windows_alone_has_no_rows_to_look_into():
    model = loaded("mistral", {"sliding_window": 16})
    with pytest.raises(UserError, match="has no layer of full attention, and labels are attention to its rows"):
        model.check_rows("labels are attention to its rows")
