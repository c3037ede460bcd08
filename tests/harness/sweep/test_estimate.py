"""The estimate of --dry-run against the work that the engine then did."""

import re
from unittest.mock import Mock

import numpy as np
import pytest

from kvsweep.compression.cache import SlotCache
from kvsweep.compression.policies.full import FullCache
from kvsweep.compression.policies.random import Random
from kvsweep.harness.decode.request import first_eviction
from kvsweep.harness.models.config import ModelConfig
from kvsweep.harness.models.spec import ModelSpec, read_architecture
from kvsweep.harness.settings import WEIGHTS
from kvsweep.harness.sweep import plan
from kvsweep.harness.sweep.estimate import TokensLeft, forked_tokens, question_tokens, saving
from kvsweep.harness.sweep.job import make_job
from kvsweep.harness.sweep.share import share_of
from kvsweep.run_files.row_types import read_rows


def table_of(output: str) -> list[dict[str, str]]:
    """The rows of the table, whose columns are two spaces or more apart or have no space in their heads."""
    lines = output.splitlines()
    start = next(i for i, line in enumerate(lines) if line.strip().startswith("completions"))
    heads = re.findall(r"tokens at most|tokens expected|disk, MiB|\S+", lines[start])
    rows = lines[start + 1 : lines.index("", start)]
    found = [line.rsplit(maxsplit=len(heads)) for line in rows]
    plain = ([name, *(value.replace(",", "") for value in values)] for name, *values in found)
    return [{"name": name, **dict(zip(heads, values, strict=True))} for name, *values in plain]


def test_forked_tokens_by_hand():
    # A text of 10: shared up to step 6, one branch goes on from 6 and one from 4.
    assert forked_tokens([10], [4, 6]) == 6 + 6 + 4
    assert forked_tokens([3], [4, 6]) == 3, "ends before any cell evicts"
    assert forked_tokens([10], [None, None]) == 10
    assert forked_tokens([10], [4]) == 10, "one cell alone saves nothing"
    assert saving([10, 3], [4, 6]) == 2 * 13 / 19
    assert saving([0, 0], [0, 0]) == 0, "a server's answers may be empty"


def test_what_is_stored_already_costs_nothing():
    """Of two texts of 10 and 20 tokens and three cells, the full cache and two that fork at 4 and 6."""
    lacking = np.array([[True, False, True], [False, True, True]])
    # The first text: the trunk to its end for the full cache, and 4 tokens of the third cell's own.
    # The second: the trunk to 6, then 16 and 14.
    assert forked_tokens([10, 20], [None, 4, 6], lacking) == 10 + 4 + 6 + 16 + 14
    assert forked_tokens([10, 20], [None, 4, 6], np.zeros((2, 3), bool)) == 0


def test_the_tokens_left_follow_what_is_stored(compose, tiny):
    cache = ["policy.budget=64", "policy.local_window=8", "policy.keep_ratio=0.4", "policy.question=on_top"]
    job = make_job(compose(*tiny, *cache, "benchmark=toy_add", "grid.policy=[full,window]"))
    full, window = (cell.cell_id for cell in job.cells)
    share = share_of(job)
    left = TokensLeft(share, {full: set(), window: {share.pairs[2]}})
    # Three texts of at most 40 tokens, which end before an eviction: once for both cells.
    assert int(left) == 3 * 40
    left.store(full, share.pairs[0], 10)
    assert int(left) == 3 * 10, "the mean of the known lengths in place of the limit; a cell lacks the first text"
    left.store(window, share.pairs[0], 11)
    assert int(left) == 2 * 10, "a text is as long as the first cell wrote it"
    left.know(share.pairs[1], 30)
    assert int(left) == 30 + 20
    for pair in share.pairs[1:]:
        left.store(full, pair, 5)
    assert int(left) == 30
    left.store(window, share.pairs[1], 30)
    assert int(left) == 0


def test_the_first_eviction_of_a_policy():
    policy = Random(name="random", keep_ratio=0.5, local_window=8, budget=50)
    on_top = Random(name="random", keep_ratio=0.5, local_window=8, budget=50, question="on_top")
    assert first_eviction(FullCache(name="full"), 20) is None
    assert first_eviction(policy, 20) == 30
    assert first_eviction(on_top, 20) == 50
    never = Random(name="random", keep_ratio=1.0, local_window=8, budget=50)
    assert first_eviction(never, 20) is None


@pytest.mark.slow
def test_what_is_assumed_gives_tokens_hours_a_price_and_the_hours_of_all_tasks(kvsweep, tmp_path, no_model):
    """Of two jobs of 6 and 8 texts, a full cache and a cell that forks at 128: by hand, at 10 tokens a second."""
    words = ["-m", "model=toy_qwen", "benchmark=toy_chain,toy_add", "benchmark.limit=6", "policy.question=on_top"]
    words += ["grid.policy=[full,window]", "policy.budget=128", "policy.local_window=16", "--dry-run"]
    words += ["decoding.max_new_tokens=400", "assume.tokens=200", "assume.tokens_per_second=10", "cost.per_hour=2"]
    ended = kvsweep(*words, "launcher=local", "launcher.shards=3", "launcher.parallel=2", f"results_dir={tmp_path}")
    assert ended.code == 0, ended.err
    *groups, whole = table_of(ended.out)
    assert [group["completions"] for group in groups] == ["6"] * 4
    # The full cache writes its texts whole, and the window the 72 or 272 tokens behind its fork.
    assert [float(group["tokens expected"]) for group in groups] == [6 * 200, 6 * 72] * 2
    most = [float(group["tokens at most"]) for group in groups]
    assert most == pytest.approx([6 * 400, 6 * 272] * 2, rel=0.01)
    hours = 2 * 6 * (200 + 72) / 10 / 3600
    assert sum(most) == pytest.approx(float(whole["tokens at most"]), rel=0.01)
    assert whole["name"] == "in all, 2 tasks at once"
    assert float(whole["price"]) == pytest.approx(2 * hours, abs=0.01)
    assert float(whole["hours"]) == pytest.approx(hours / 2, abs=0.01)
    assert "GPU-hours" not in whole
    refused = kvsweep(*words, "assume.tokens=401", f"results_dir={tmp_path}")
    assert "assume.tokens=401 is more than decoding.max_new_tokens=400 lets a text have" in refused.err


GRID = ["grid.policy=[random,window]", "grid.keep_ratio=[0.3,0.5]", "policy.local_window=16", "policy.budget=128"]


@pytest.mark.slow
def test_the_calculation_agrees_with_the_engine(kvsweep, tmp_path):
    """On the toy model's own texts: decoded tokens as the engine counts them, forks as the rows tell them."""
    arguments = ["model=toy_qwen", "benchmark=toy_chain", "benchmark.limit=6", "policy.question=on_top", *GRID]
    assert kvsweep(*arguments, "decoding.max_new_tokens=200", f"results_dir={tmp_path}").code == 0
    cells = list((tmp_path / "default").glob("*/cell.yaml"))
    rows = [[*read_rows(cell.with_name("completions.jsonl"), dict)] for cell in cells]
    [stats] = read_rows(cells[0].with_name("stats.jsonl"), dict)
    texts: dict[str, list[tuple[int, int | None]]] = {}
    for row in (row for cell in rows for row in cell):
        texts.setdefault(row["problem_id"], []).append((row["num_tokens"], row["fork_step"]))
    expected = 0
    for branches in texts.values():
        steps = [length if fork is None else fork for length, fork in branches]
        assert {fork for _, fork in branches} <= {128, 129, None}
        expected += max(steps) + sum(length - step for (length, _), step in zip(branches, steps, strict=True))
    assert stats["tokens_total"] == pytest.approx(expected, rel=0.02)
    lengths = [max(length for length, _ in branches) for branches in texts.values()]
    assert forked_tokens(lengths, [128] * 4) == pytest.approx(expected, rel=0.15), "compressed texts differ in length"


def test_the_command_runs_nothing(kvsweep, tmp_path, no_model):
    arguments = ["model=toy_qwen", "benchmark=toy_chain", "benchmark.limit=6", *GRID, f"results_dir={tmp_path}/runs"]
    ended = kvsweep(*arguments, "--dry-run")
    assert ended.code == 0
    for part in ("4 cells (0 done) of 6 completions", "times fewer", "not known until", "3 layers x 2 heads x 32"):
        assert part in ended.out
    assert not (tmp_path / "runs").exists()
    assert kvsweep("--dry-run", *arguments, "policy.budget=-1").code == 2


@pytest.mark.slow
def test_a_list_of_an_experiment_that_is_not_swept_is_named(kvsweep, tmp_path, no_model):
    arguments = ["experiment=demo", "--dry-run", f"results_dir={tmp_path}"]
    note = "note: benchmark=toy_chain,toy_groups needs -m; without it benchmark is the default.\n"
    assert note in kvsweep(*arguments).err
    for swept in (["-m"], ["benchmark=toy_add"]):
        assert "needs -m" not in kvsweep(*arguments, *swept).err


@pytest.mark.parametrize("model", ["toy_qwen", "toy_llama"])
def test_the_memory_is_the_caches_own(model, kvsweep, tmp_path):
    """The estimate reads config.json by hand; transformers reads the same file, and the cache counts its own bytes."""
    shape = ModelSpec.of(read_architecture(ModelConfig(name=model, title="", path=str(WEIGHTS / model)))).cache_shape(
        "bfloat16"
    )
    words = ["model.dtype=bfloat16", "policy.budget=2000", "decoding.max_new_tokens=9000", f"results_dir={tmp_path}"]
    ended = kvsweep("--dry-run", f"model={model}", *words)
    assert f"{SlotCache.bytes_per_slot(shape, 2001) / 2**20:.1f} MiB a slot of 2001 tokens" in ended.out


@pytest.mark.slow
def test_a_folder_of_weights_that_borrows_an_embedded_models_settings_is_said(kvsweep, tiny_model_dir, tmp_path):
    arguments = ["--dry-run", "benchmark=toy_chain", "policy=window", f"results_dir={tmp_path}"]
    alone = kvsweep(*arguments, f"model.path={tiny_model_dir}").err
    assert f"model={tiny_model_dir.name} takes precision, tags and sizes of toy_qwen: choose the nearest with" in alone


@pytest.mark.slow
def test_the_command_measures_what_is_there(kvsweep, tiny, tmp_path):
    arguments = [*tiny, "policy=full", f"results_dir={tmp_path}"]
    assert kvsweep(*arguments).code == 0
    ended = kvsweep(*arguments, "draws=2", "--dry-run")
    assert "1 cell (0 done) of 6 completions" in ended.out
    [rows] = tmp_path.glob("default/*/completions.jsonl")
    written = sum(row["num_tokens"] for row in read_rows(rows, dict))
    last = table_of(ended.out)[-1]
    assert float(last["tokens expected"]) == pytest.approx(written, rel=0.01), "one of two draws is stored"
    assert last["completions"] == "3"
    size = rows.stat().st_size
    assert float(last["disk, MiB"]) == pytest.approx(size / 2**20, abs=0.05)
    assert " tokens/s measured" in ended.out
    assert "(1 done)" in kvsweep(*arguments, "--dry-run").out


@pytest.mark.parametrize(
    ("words", "said"),
    {
        "policy.question=free": "in 1 of 2 compressed cells the KV budget is smaller than the longest question (54 and",
        "policy.question=on_top": None,
        "policy.question=on_top policy.budget=448": "in 2 of 2 compressed cells nothing would be evicted, since texts",
        "policy.question=on_top assume.tokens=200": "in 2 of 2 compressed cells nothing would be evicted, since texts",
    }.items(),
)
def test_a_dry_run_warns_of_caches_that_hold_no_question_or_the_whole_text(words, said, kvsweep, tmp_path):
    grid = ["policy=window", "grid.policy=[full,window]", "grid.keep_ratio=[0.1,0.9]", f"results_dir={tmp_path}"]
    notes = [line for line in kvsweep(*grid, *words.split(), "--dry-run").out.splitlines() if "note: " in line]
    assert len(notes) == bool(said)
    assert not said or said in notes[0]


@pytest.mark.parametrize(
    ("dtype", "flags", "faster"),
    [("float32", "sse avx512_bf16", "bfloat16"), ("bfloat16", "sse avx2", "float32"), ("float32", "sse avx2", None)],
)
def test_a_dry_run_names_the_precision_that_is_faster_on_the_processor(dtype, flags, faster, kvsweep, monkeypatch):
    monkeypatch.setattr(plan, "processor", lambda field: flags)
    words = ["model=qwen3_1_7b", "model.random_weights=true", f"model.dtype={dtype}", "benchmark=toy_chain"]
    assert (f"model.dtype={faster} is faster" in kvsweep(*words, "policy=full", "--dry-run").out) == bool(faster)


def test_a_tokenizer_in_the_working_directory_is_not_that_of_a_gguf_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    job = Mock(**{"model.path": None, "benchmark.problems": [Mock(prompt="12 characters")]})
    assert question_tokens(job) > 1


@pytest.mark.parametrize("card", [[], ["card=h100"]])
def test_a_sweep_is_estimated_before_its_head_is_made(card, kvsweep, tmp_path):
    """Without the head the estimate is that with the head; the sweep itself is refused."""
    words = ["policy=dynts", "grid.policy=[full,dynts]", "grid.keep_ratio=[0.2,0.4]", f"results_dir={tmp_path}", *card]
    words += ["launcher=local", "launcher.shards=2"]
    known, lacking = (kvsweep(*words, *head, "--dry-run") for head in ((), ("model.predictor=null",)))
    assert (known.code, lacking.code) == (0, 0)
    lines = lacking.out.splitlines()
    [said] = [line for line in lines if "lacking" in line]
    assert "model.predictor, which `kvsweep predictor all` makes" in said
    assert [line for line in lines if line != said] == known.out.splitlines()
    assert "  policies: full, dynts (2)" in lines
    *groups, whole = table_of(lacking.out)
    assert [group["name"] for group in groups] == ["toy_qwen toy_chain, full cache", "toy_qwen toy_chain, 2 cells"]
    assert float(whole["tokens at most"]) == pytest.approx(
        sum(float(group["tokens at most"]) for group in groups), rel=0.01
    )
    assert whole["tokens expected"] == "?", "nothing is stored, and nothing assumed"
    assert "in 2 tasks" in lines[-1]
    ended = kvsweep(*words[:-2], "model.predictor=null")
    assert ended.code == 2
    assert not any(tmp_path.iterdir())
