"""A multirun over policies gives each the settings that it has, and a cell belongs to one job of a command."""

import re

import pytest

from kvsweep.harness.benchmarks import sources
from kvsweep.harness.command import init
from kvsweep.messages.errors import UserError

TOY = ("model=toy_qwen", "benchmark=toy_chain", "benchmark.limit=3")


@pytest.fixture
def dry_run(kvsweep, tmp_path):
    return lambda *words: kvsweep(*TOY, *words, f"results_dir={tmp_path}", "--dry-run")


@pytest.mark.slow
def test_a_setting_reaches_the_policies_that_have_it_and_the_full_cache_runs_once(dry_run):
    ended = dry_run("-m", "policy=full,window,dynts", "policy.budget=128,192", "policy.predictor=${model.predictor}")
    assert ended.code == 0, ended.err
    # One eviction over the budget: 32 + int(0.4 * (129 - 32)) and 32 + int(0.4 * (193 - 32)), said once.
    assert re.findall(r"KV budget: (\d+) tokens", ended.out) == ["70", "96"]
    assert ended.out.count("1 cell (0 done) of 3 completions") == 5
    assert "5 jobs in 5 tasks, 5 cells; nothing was run" in ended.out


REFUSED = {
    "policy=full,window policy.predictor=DIR": "policy.predictor=DIR has no effect, because no policy of the command",
    "policy=full,window policy.bugdet=128": "policy.bugdet is not a setting: did you mean policy.budget?",
    "policy=window draws=1,2 launcher=local": "have the same cells and differ in draws",
    "policy=window benchmark.limit=1,2": "have the same cells and differ in problem_ids",
    "policy=window benchmark.answer_from=after_think,whole_text": "differ in benchmark.answer_from",
    "grid.policy=[full],[full,window] slots=4,8": "have the same cells and differ in slots",
}


@pytest.mark.parametrize("words", REFUSED)
def test_a_multirun_that_is_refused(words, dry_run):
    ended = dry_run("-m", *words.split())
    assert (ended.code, REFUSED[words] in ended.err) == (2, True), ended.err


@pytest.mark.slow
def test_jobs_that_share_some_cells(dry_run):
    ended = dry_run("-m", "grid.policy=[full,window]", "grid.budget=[128],[192]")
    assert [int(cells) for cells in re.findall(r"(\d+) cells? \(0 done\)", ended.out)] == [2, 1]
    # Each of two jobs in rounds, and two shards of one job, compare with or write to the full cache.
    ended = dry_run("-m", "grid.policy=[full,window]", "grid.budget=[128],[192]", "until=decided", "draws=2")
    assert [int(cells) for cells in re.findall(r"(\d+) cells? \(0 done\)", ended.out)] == [2, 2]
    assert "1 job in 2 tasks, 1 cell;" in dry_run("-m", "policy=full", "shard=1/2,2/2").out


@pytest.mark.parametrize(
    "words",
    [
        ["experiment=mine", "--cfg", "job"],
        ["--cfg", "job", "experiment=mine"],
        ["experiment=mine", "-m", "benchmark.limit=2", "--dry-run", "seed=1,2"],
    ],
)
def test_words_and_options_in_any_order(words, kvsweep, tmp_path, monkeypatch, no_own_module):
    init(tmp_path / "mine")
    monkeypatch.chdir(tmp_path / "mine")
    ended = kvsweep(*words)
    assert ended.code == 0, ended.err
    assert "mine" in ended.out


@pytest.mark.slow
def test_a_multirun_without_a_full_cache_says_the_words_that_add_it(kvsweep, tmp_path):
    typed = ["policy=h2o,random", "policy.keep_ratio=0.2,0.4", "policy.local_window=32"]
    where = [f"results_dir={tmp_path}", "benchmark.limit=2", "--dry-run"]
    ended = kvsweep("-m", *typed, *where)
    assert ended.code == 0
    [said] = [line for line in ended.err.splitlines() if "no full cache" in line]
    assert "write 'grid.policy=[full,h2o,random]'" in said
    assert "no full cache" not in kvsweep("-m", "policy=full,h2o", *where).err


def test_two_benchmarks_with_the_same_problems_are_one_job(dry_run, tmp_path):
    (tmp_path / "problems.jsonl").write_text('{"problem": "What is 2+3?", "answer": "5"}\n')
    ended = dry_run("-m", "benchmark=aime24,aime25", f"benchmark.path={tmp_path}/problems.jsonl", "policy=window")
    assert "benchmark=aime25 asks the problems of benchmark=aime24" in ended.err
    assert "1 job in 1 task" in ended.out


def test_a_dry_run_plans_a_data_set_that_the_hub_does_not_give(dry_run, kvsweep, monkeypatch):
    def refused(config):
        raise UserError(f"{config.hub_id} is gated.")

    monkeypatch.setattr(sources, "_read_hub", refused)
    words = ("-m", "benchmark=aime24,aime25,gpqa_diamond,math500", "benchmark.limit=null", "policy=window")
    ended = dry_run(*words)
    assert ended.code == 0, ended.err
    # Two sets of 30 problems are two jobs: their stand-ins differ.
    assert [int(count) for count in re.findall(r": 1 cell \(0 done\) of (\d+) completions", ended.out)] == [
        30,
        30,
        198,
        500,
    ]
    assert "gated" in ended.err
    ended = kvsweep(*TOY, *words)
    assert ended.code == 2
    assert "gated" in ended.err
