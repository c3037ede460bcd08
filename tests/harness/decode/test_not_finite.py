"""A text whose logits are NaN or infinite ends there, is counted and named, and many of them fail the job."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from kvsweep.compression.config import CacheConfig
from kvsweep.compression.policies.full import FullCache
from kvsweep.compression.policies.window import Window
from kvsweep.harness.decode.request import SamplingConfig
from kvsweep.harness.models.loaded import LoadedModel
from kvsweep.harness.predictor.labels import label_trace
from kvsweep.harness.predictor.recipe import LABEL_KINDS
from kvsweep.harness.predictor.traces import Trace
from kvsweep.harness.sweep.status import read_sweep
from kvsweep.messages.errors import UserError
from tests.harness.decode.fakes import ask, in_slots, random_network, run

CONFIG = LlamaConfig(
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=97,
    eos_token_id=96,
)
POLICIES = [FullCache(name="full"), Window(name="window", keep_ratio=0.3, local_window=6, budget=20)]
SETTINGS = {"greedy": SamplingConfig(temperature=0), "sampled": SamplingConfig(temperature=1.0, top_p=0.95)}
NEW = 40


def model_with(broken: dict[int, float]) -> LoadedModel:
    """A small random model, in which the embeddings of some tokens are not finite."""
    network = random_network(CONFIG)
    for token, number in broken.items():
        network.get_input_embeddings().weight.data[token] = number
    return in_slots(network)


def decoded(model, prompts, sampling, slots, **how):
    how = {"sampling": sampling, "max_new_tokens": NEW, "slots": slots, **how}
    completions, _ = run(model, ask(prompts, *POLICIES), **how)
    return {(cell, int(problem[1:])): done for (cell, problem, _), done in completions.items()}


@pytest.mark.covers(1)
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize("slots", [2, 5])
@pytest.mark.parametrize("sampling", SETTINGS)
def test_a_text_ends_before_the_first_such_token_and_its_neighbours_go_on(sampling, slots, number):
    prompts = [tuple(range(3 + i, 10 + i)) for i in range(4)]
    whole = decoded(model_with({}), prompts, SETTINGS[sampling], slots)
    longest = max(whole.values(), key=lambda done: len(set(done.token_ids)))
    token = longest.token_ids[len(longest.token_ids) // 2]
    found = decoded(model_with({token: number}), prompts, SETTINGS[sampling], slots)
    assert found.keys() == whole.keys()
    ended = set()
    for key, done in found.items():
        ids = whole[key].token_ids
        asked = token in prompts[key[1]]
        at = -1 if asked else ids.index(token) if token in ids[:-1] else None
        if at is None:
            assert done == whole[key]
        else:
            ended.add(key)
            assert (done.stop_reason, done.token_ids) == ("not_finite", ids[: at + 1])
            assert (done.num_tokens, done.text) == (at + 1, " ".join(map(str, ids[: at + 1])))
    assert ended
    assert len(ended) < len(found)


def test_a_question_of_such_numbers_has_an_empty_text():
    found = decoded(model_with({5: float("nan")}), [(5, 6, 7), (6, 7, 8)], SETTINGS["greedy"], 3)
    assert {done.token_ids == [] for (_, problem), done in found.items() if problem == 0} == {True}
    assert {done.stop_reason for (_, problem), done in found.items() if problem == 1} <= {"length", "stop"}


FP8 = [("fp8", "none"), ("fp8", "token")]


@pytest.mark.parametrize(
    ("scheme", "scale"), [("plain", "none"), ("rotated", "none"), ("kivi", "none"), ("kvarn", "none"), *FP8]
)
@pytest.mark.slow_unless(rule=lambda scheme, scale: (scheme, scale) in (("kivi", "none"), ("fp8", "token")))
def test_packed_rows_beside_such_a_text_are_right(scheme, scale):
    cache = CacheConfig(bits=8, group=8, residual=8, scheme=scheme, scale=scale)
    prompts = [(5, 6, 7), (6, 7, 8)]
    clean = decoded(model_with({}), prompts, SETTINGS["greedy"], 4, cache=cache)
    found = decoded(model_with({5: float("nan")}), prompts, SETTINGS["greedy"], 4, cache=cache)
    for key in [key for key in clean if key[1] == 1 and 5 not in clean[key].token_ids]:
        assert found[key] == clean[key]
    assert {done.stop_reason for (_, problem), done in found.items() if problem == 0} == {"not_finite"}


def test_labels_of_hidden_states_that_are_not_finite_are_refused():
    model = model_with({})
    trace = Trace(problem_id="p", draw=0, kept=True, token_ids=list(range(5, 15)), think_start=2, think_end=8)
    label_trace(model, trace, 1, LABEL_KINDS)
    model.network.model.layers[1].mlp.down_proj.weight.data[0, 0] = torch.nan
    where = "a text of 10 tokens has hidden states that are NaN or infinite: "
    with pytest.raises(UserError, match=where):
        label_trace(model, trace, 1, LABEL_KINDS)


@pytest.fixture
def broken_dir(tiny_model_dir, tmp_path) -> Path:
    """The tiny model, whose second layer makes NaN of the token that every question of toy_add has."""
    folder = tmp_path / "broken"
    shutil.copytree(tiny_model_dir, folder)
    from transformers import AutoTokenizer

    [token] = AutoTokenizer.from_pretrained(folder).encode("+", add_special_tokens=False)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][token] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.slow
def test_a_few_are_counted_and_named_and_many_fail_the_job(kvsweep, broken_dir, tiny, tmp_path):
    small = [f"model.path={broken_dir}", *tiny[1:], "benchmark=toy_add", f"results_dir={tmp_path}"]
    few = kvsweep(*small, "benchmark.limit=2", "policy=full", "run_name=few")
    assert few.code == 0, few.err
    assert "2 texts of 1 cell ended because logits were NaN or infinite" in few.out
    [cell] = read_sweep(tmp_path / "few").cells
    assert (cell.not_finite, cell.finished) == (2, 2)
    told = kvsweep("status", str(tmp_path / "few"))
    assert "2 texts of 1 cell ended because logits were NaN or infinite (not_finite)." in told.out
    again = kvsweep(*small, "benchmark.limit=3", "policy=full", "run_name=few")
    assert again.code == 0
    assert read_sweep(tmp_path / "few").cells[0].not_finite == 3
    assert kvsweep("report", str(tmp_path / "few")).code == 0
    assert "Not finite: 1" in (tmp_path / "few/report/report.html").read_text()

    many = kvsweep(*small, "benchmark.limit=9", "policy=full", "run_name=many")
    assert many.code == 1
    assert "6 texts ended because logits were NaN or infinite, the last for" in many.err
    [rows] = (tmp_path / "many").glob("*/completions.jsonl")
    ended = [json.loads(line) for line in rows.read_text().splitlines()]
    assert [row["stop_reason"] for row in ended] == ["not_finite"] * 6
    replayed = kvsweep("replay", str(tmp_path / "few"))
    assert replayed.code == 2
    assert "of the full cache's texts, 3 texts ended because logits were NaN or infinite" in replayed.err
