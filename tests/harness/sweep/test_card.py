"""The estimate of a GPU that is not at hand, against published sizes and a reckoning by hand."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kvsweep.compression.policies.full import FullCache
from kvsweep.compression.policies.window import Window
from kvsweep.harness.models.spec import ModelSpec
from kvsweep.harness.sweep.card import CARDS, mean_rows, step_seconds
from kvsweep.harness.sweep.job import make_job

PUBLISHED = Path(__file__).resolve().parents[3] / "results" / "published"
HEATMAP = ["experiment=heatmap_r1_qwen", "benchmark=toy_chain", "grid.policy=[full,window]"]


@pytest.fixture
def dry_run(kvsweep, tmp_path, no_model):
    return lambda *words: kvsweep("--dry-run", *words, f"results_dir={tmp_path}")


@pytest.mark.parametrize(("model", "billions"), [("r1_qwen_7b", 7.616), ("r1_llama_8b", 8.030), ("qwen3_8b", 8.191)])
def test_the_weights_are_the_published_ones(model, billions, compose):
    """The parameters that the checkpoints' safetensors hold, norms and offsets among them."""
    spec = make_job(compose(f"model={model}", "policy=window")).spec
    assert spec is not None
    assert spec.parameters == pytest.approx(billions * 1e9, rel=1e-3)


def test_a_step_is_what_was_measured_on_an_h100():
    """R1-Distill-Qwen-7B with random weights, in the middle of a sweep; H2O's attention sums take more."""
    step = json.loads((PUBLISHED / "gpu" / "h100_243d065.json").read_text())["step"]
    rows = [row for row in step["rows"] if not row["invariant"]]
    assert {(row["policy"], row["slots"]) for row in rows} >= {("window", 64), ("dynts", 64), ("full", 57)}
    for row in rows:
        of = {"weights": step["weights"], "rows": row["slots"] * row["mean_rows"] * 57_344, "slots": row["slots"]}
        found = step_seconds(CARDS["h100"].bandwidth, layers=28, vocabulary=152_064, **of)
        assert 1000 * found == pytest.approx(row["step_ms"], rel=0.1 if row["policy"] == "h2o" else 0.03)


def test_rows_on_average_over_a_text():
    window = Window(name="window", keep_ratio=0.3, local_window=2000, budget=5000)
    whole = mean_rows([FullCache(name="full")], 100, 16_000)
    assert whole == 100 + 8000
    steps, length, total = 16_000, 100, 0  # the text token by token
    for _ in range(steps):
        total += length
        length = window.length_after(length + 1, 100) if length >= 5000 else length + 1
    assert mean_rows([window], 100, 16_000) == pytest.approx(total / steps, rel=0.02)
    assert mean_rows([window], 100, 3000) == 1600, "nothing is evicted"


def test_each_group_has_its_slots_speed_and_hours(dry_run):
    ended = dry_run("-m", *HEATMAP, "benchmark=toy_chain,toy_add", "card=h100", "cost.per_hour=2.5")
    assert ended.code == 0, ended.err
    assert ended.out.count("on one H100, by arithmetic fitted to steps measured on an H100, ±30%: 14.2 GiB") == 2
    assert ended.out.count("    full cache: 58 slots, ") == 2
    assert ended.out.count("    20 cells: 188 slots, ") == 2
    rows = [line.split()[-3:-1] for line in ended.out.splitlines() if line.startswith(("r1_qwen_7b toy", "in all"))]
    *groups, whole = [(float(hours), float(price)) for hours, price in rows[2:]]
    assert len(groups) == 4
    assert whole[0] == pytest.approx(sum(hours for hours, _ in groups), abs=0.03)
    assert whole[1] == pytest.approx(2.5 * whole[0], abs=0.03)
    assert ended.out.splitlines()[-1].endswith("nothing was run (--dry-run).")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["card=b300"], "card=b300 is unknown: choose h100_pcie, h100_nvl, h100, h200, a100, l40s"),
        (["cost.per_hour=0"], "cost.per_hour=0 cannot be used"),
        (["card=l40s", "slots=99"], "14.2 GiB and 99 slots of 0.88 GiB each do not fit into one L40S (44 GiB)"),
        (["card=l40s", "model.dtype=float32", "decoding.max_new_tokens=131000"], "do not fit into one L40S (44 GiB)"),
    ],
)
def test_what_is_unknown_or_does_not_fit_is_refused(words, said, dry_run):
    ended = dry_run(*HEATMAP, *words)
    assert (ended.code, said in ended.err) == (2, True), ended.err


# What a plan says, or why it is refused.
PLANS = {
    "replay=only": "1 cell; nothing was run (--dry-run).",
    "replay=only draws=2": "replay=only decodes the full cache alone.",
    "replay=only texts=texts.jsonl": "Nothing is decoded.",
    "replay=true": "2 cells; nothing was run (--dry-run).",
    "screen=1": "screen=1 will leave out cells: this is the most that can come.",
    "screen=1 launcher=slurm": "take launcher=inline or local.",
    "screen=1 grid.policy=[window]": "add full to grid.policy, or give texts=.",
    "policy.question=on_top": " tokens beside the question, trigger ",
}


@pytest.mark.parametrize("words", PLANS)
def test_what_a_replay_or_a_screen_decodes(words, dry_run):
    grid = ["model=toy_qwen", "benchmark=toy_chain", "grid.policy=[full,window]", "policy=window"]
    ended = dry_run(*grid, *words.split())
    assert PLANS[words] in ended.out + ended.err


def test_without_a_dry_run_the_settings_are_refused(kvsweep, tmp_path, no_model):
    ended = kvsweep("model=toy_qwen", "benchmark=toy_add", "card=h100", f"results_dir={tmp_path}")
    assert (ended.code, "add --dry-run" in ended.err) == (2, True)


def test_a_family_without_arithmetic_is_named(dry_run, monkeypatch):
    monkeypatch.setattr(
        ModelSpec, "of", classmethod(lambda cls, config, of=ModelSpec.of: replace(of(config), parameters=None))
    )
    ended = dry_run(*HEATMAP, "card=h100")
    assert ended.code == 0, ended.err
    assert "on one H100: not known, because no arithmetic here fits model type qwen2" in ended.out
