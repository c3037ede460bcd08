"""The largest keys and values of a model's layers, beside transformers' own cache, and a sweep that stores by them."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from kvsweep.harness.settings import compose_config
from kvsweep.harness.sweep.execute import decode_all
from kvsweep.harness.sweep.job import make_job
from kvsweep.harness.sweep.share import share_of
from kvsweep.run_files.run_reader import read_cells
from tests.program import predictor as main

TEXT = "a is 4, b is 7. So a is 4. " * 20
FP8 = ["cache.scheme=fp8", "cache.scale=tensor"]


@pytest.fixture(scope="module")
def scales(tmp_path_factory, tiny_model_dir) -> Path:
    folder = tmp_path_factory.mktemp("scales")
    (folder / "text.txt").write_text(TEXT)
    main(["scales", f"model.path={tiny_model_dir}", f"recipe.text={folder / 'text.txt'}", f"recipe.out={folder}"])
    return folder / "scales.safetensors"


@torch.inference_mode()
def test_they_are_those_of_transformers_own_cache(scales, tiny_model_dir):
    network = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tiny_model_dir)
    ids = tokenizer(TEXT, return_tensors="pt", add_special_tokens=False).input_ids
    layers = network(ids).past_key_values.layers
    found = load_file(scales)
    for part, rows in (("keys", [one.keys for one in layers]), ("values", [one.values for one in layers])):
        expected = torch.stack([one.abs().amax() for one in rows])
        torch.testing.assert_close(found[part], expected, rtol=1e-5, atol=0)


@pytest.mark.slow
def test_a_sweep_stores_by_them_and_its_cells_are_named_by_their_contents(scales, kvsweep, tiny, tmp_path):
    words = [*tiny, "benchmark=toy_add", "policy=full", f"results_dir={tmp_path}", *FP8]
    twice = {name: 2 * largest for name, largest in load_file(scales).items()}
    save_file(twice, tmp_path / "twice.safetensors")
    (tmp_path / "twice.json").write_bytes(scales.with_suffix(".json").read_bytes())
    for path in (scales, tmp_path / "twice.safetensors"):
        ended = kvsweep(*words, f"cache.scales={path}")
        assert ended.code == 0, ended.err
    assert len({described["cache"]["scales"] for _, described in read_cells(tmp_path / "default")}) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"keys": torch.ones(3), "values": torch.ones(3)},
            "was made for 3 layers, but model=toy_qwen has 2: give one made for this model",
        ),
        ({"keys": torch.ones(2), "values": -torch.ones(2)}, "holds numbers in 'values' that are none of its kind"),
        ({"keys": torch.ones(2), "values": torch.tensor([1, torch.nan])}, "holds numbers in 'values' that are none"),
        ({"keys": torch.tensor([1.0, 0]), "values": torch.ones(2)}, "holds numbers in 'keys' that are none"),
        ({"keys": torch.ones(2), "values": torch.ones(3)}, "which does not fit its card and kind"),
    ],
)
def test_what_is_no_such_file_is_refused(change, message, scales, kvsweep, tiny, tmp_path):
    save_file(change, tmp_path / "other.safetensors")
    (tmp_path / "other.json").write_bytes(scales.with_suffix(".json").read_bytes())
    words = [*tiny, "benchmark=toy_add", "policy=full", f"results_dir={tmp_path}", *FP8]
    ended = kvsweep(*words, f"cache.scales={tmp_path / 'other.safetensors'}")
    assert ended.code == 2
    assert message in ended.err


def test_a_file_that_changes_before_the_task_starts_stops_it(scales, tiny, tmp_path):
    own = tmp_path / "own.safetensors"
    for suffix in (".safetensors", ".json"):
        own.with_suffix(suffix).write_bytes(scales.with_suffix(suffix).read_bytes())
    words = [*tiny, "benchmark=toy_add", "policy=full", f"results_dir={tmp_path}", *FP8, f"cache.scales={own}"]
    job = make_job(compose_config(*words))
    save_file({name: 2 * largest for name, largest in load_file(own).items()}, own)
    [error] = decode_all([share_of(job)])
    assert f"{own} has changed since" in str(error)


def test_those_of_another_model_are_refused(scales, kvsweep, tmp_path):
    ended = kvsweep("model=toy_qwen", "benchmark=toy_add", f"results_dir={tmp_path}", *FP8, f"cache.scales={scales}")
    assert ended.code == 2
    assert f"cache.scales={scales} was made for hidden size 32, but model=toy_qwen has 128" in ended.err
