import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from kvsweep.analysis.load import load_run
from kvsweep.analysis.numbers.metrics import cache_rows, cell_metrics, mean_over_benchmarks, score_intervals

MakeCell = Callable[..., Path]


def metrics_of(run: Path) -> pd.DataFrame:
    return cell_metrics(load_run(run)).set_index("policy")


def test_pass_at_1_and_its_error_by_hand(tmp_path: Path, make_cell: MakeCell) -> None:
    make_cell([[1, 1, 0, 0], [1, 1, 1, 1], ["truncated", "no_answer", "grader_timeout", 1]])
    row = metrics_of(tmp_path / "run").loc["full"]
    means = [0.5, 1.0, 0.25]
    assert row["pass_at_1"] == pytest.approx(np.mean(means))
    assert row["se"] == pytest.approx(stats.sem(means))
    assert (row["graded"], row["problems"]) == (12, 3)
    shares = row[["correct", "wrong", "no_answer", "truncated", "grader_timeout"]].astype(float)
    assert np.allclose(shares, np.array([7, 2, 1, 1, 1]) / 12)


def test_problems_weigh_the_same_when_draws_are_missing(tmp_path: Path, make_cell: MakeCell) -> None:
    make_cell([[1, 1, 1], [0, None, None]])
    row = metrics_of(tmp_path / "run").loc["full"]
    assert row["pass_at_1"] == 0.5
    assert (row["graded"], row["ungraded"]) == (4, 2)


@pytest.mark.parametrize("right", [0, 1, 14, 29, 30])
def test_with_one_draw_the_interval_is_wilsons(right: int) -> None:
    correct = [1.0] * right + [0.0] * (30 - right)
    graded = pd.DataFrame({"cell_id": "a", "problem_id": [f"p{i}" for i in range(30)], "correct": correct})
    row = score_intervals(graded).loc["a"]
    expected = stats.binomtest(right, 30).proportion_ci(method="wilson")
    assert row["ci_low"] == pytest.approx(expected.low, abs=1e-12)
    assert row["ci_high"] == pytest.approx(expected.high, abs=1e-12)


@pytest.mark.parametrize("low", [0.0, 1.0])
def test_draws_that_never_differ_do_not_narrow_the_interval(low: float) -> None:
    problems = np.repeat([f"p{i}" for i in range(20)], 5)
    graded = pd.DataFrame({"cell_id": "a", "problem_id": problems, "correct": low})
    row = score_intervals(graded).loc["a"]
    expected = stats.binomtest(int(20 * low), 20).proportion_ci(method="wilson")
    assert (row["ci_low"], row["ci_high"]) == (pytest.approx(expected.low), pytest.approx(expected.high))


def test_the_interval_covers_what_it_claims() -> None:
    random = np.random.default_rng(7)
    runs, problems, draws = 2000, 30, 5
    chance = random.beta(0.8, 0.9, (runs, problems))
    correct = random.random((draws, runs, problems)) < chance
    cell, problem = np.meshgrid(np.arange(runs), np.arange(problems), indexing="ij")
    graded = pd.DataFrame(
        {
            "cell_id": np.tile(cell.ravel(), draws),
            "problem_id": np.tile(problem.ravel(), draws),
            "correct": correct.reshape(-1).astype(float),
        }
    )
    table = score_intervals(graded)
    covered = ((table["ci_low"] <= 0.8 / 1.7) & (table["ci_high"] >= 0.8 / 1.7)).mean()
    assert 0.93 <= covered <= 0.97


def test_one_problem_has_a_score_but_no_error(tmp_path: Path, make_cell: MakeCell) -> None:
    make_cell([[1, 0]])
    row = metrics_of(tmp_path / "run").loc["full"]
    assert row["pass_at_1"] == 0.5
    assert np.isnan(row["se"])
    assert 0 < row["ci_low"] < row["ci_high"] < 1


def test_the_difference_is_paired_on_what_both_have(tmp_path: Path, make_cell: MakeCell) -> None:
    make_cell([[1, 1], [1, 0], [1, 1], [0, 0]])
    make_cell([[1, 0], [1, 0], [None, 0]], policy="dynts", done=False, expected=8)
    make_cell([[0, 0]], policy="dynts", seed=1)
    table = cell_metrics(load_run(tmp_path / "run"))
    row = table[(table["policy"] == "dynts") & (table["seed"] == 0)].iloc[0]
    differences = [-0.5, 0.0, -1.0]
    assert row["diff_to_full"] == pytest.approx(np.mean(differences))
    assert row["diff_se"] == pytest.approx(stats.sem(differences))
    assert row["diff_problems"] == 3
    others = table[(table["policy"] == "full") | (table["seed"] == 1)]
    assert others["diff_to_full"].isna().all()


def test_lengths_evictions_memory_and_speed(tmp_path: Path, make_cell: MakeCell) -> None:
    make_cell([[1], [0]], policy="dynts")
    make_cell([[1], [0]])
    table = metrics_of(tmp_path / "run")
    assert table.loc["dynts", "mean_tokens"] == 201
    assert table.loc["dynts", "mean_evictions"] == 2
    assert table.loc["dynts", "evicted"] == 1
    assert table.loc["dynts", "mean_peak_length"] == 129
    assert table.loc["dynts", "kept_memory"] == pytest.approx(129 / 240)
    assert table.loc["full", ["evicted", "mean_evictions"]].tolist() == [0, 0]
    assert table.loc["full", "kept_memory"] == 1
    assert table.loc["full", "tokens_per_second"] == 4000 / (0.5 + 2.0)


def eviction(step: int, before: int, after: int) -> dict[str, int]:
    return {"step": step, "length_before": before, "length_after": after}


def test_cache_lengths_with_two_evictions_by_hand(tmp_path: Path, make_cell: MakeCell) -> None:
    evictions = [eviction(2, 5, 2), eviction(5, 5, 3)]
    text = {"prompt_tokens": 3, "num_tokens": 8, "peak_length": 5}
    make_cell([[1]], policy="dynts", completion=text | {"evictions": evictions})
    make_cell([[1]], completion=text | {"peak_length": 10})
    table = metrics_of(tmp_path / "run")
    held = [3, 4, 5, 3, 4, 5, 4, 5]
    assert table.loc["dynts", "mean_cache_length"] == pytest.approx(np.mean(held))
    assert table.loc["dynts", "kept_rows"] == pytest.approx(np.sum(held) / np.sum(range(3, 11)))
    assert table.loc["dynts", ["mean_length_before", "mean_length_after"]].tolist() == [5, 2.5]
    assert table.loc["dynts", ["max_peak_length", "mean_peak_length"]].tolist() == [5, 5]
    assert table.loc["full", ["mean_cache_length", "kept_rows"]].tolist() == [6.5, 1]
    assert table.loc["full", ["mean_length_before", "mean_length_after"]].isna().all()


def test_cache_lengths_are_means_over_steps_and_over_evictions(tmp_path: Path, make_cell: MakeCell) -> None:
    folder = make_cell([[1], [1]], policy="dynts")
    texts = [
        {"prompt_tokens": 2, "num_tokens": 2, "peak_length": 3, "evictions": []},
        {"prompt_tokens": 1, "num_tokens": 4, "peak_length": 3, "evictions": [eviction(1, 2, 1), eviction(2, 2, 1)]},
    ]
    lines = (folder / "completions.jsonl").read_text().splitlines()
    rows = [json.loads(line) | text for line, text in zip(lines, texts, strict=True)]
    (folder / "completions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    row = metrics_of(tmp_path / "run").loc["dynts"]
    assert row["mean_cache_length"] == pytest.approx((2 + 3 + 1 + 2 + 2 + 2) / 6)
    assert row["mean_length_after"] == 1
    assert row["mean_evictions"] == 1


def test_cache_rows_against_decoding_step_by_step() -> None:
    random = np.random.default_rng(5)
    rows, sums = [], []
    for _ in range(200):
        prompt, tokens = (int(n) for n in random.integers(1, 50, 2))
        length, events, lengths = prompt - 1, [], []
        for step in range(tokens):
            length += 1
            lengths.append(length)
            if random.random() < 0.2:
                after = int(random.integers(1, length + 1))
                events.append((step, length, after))
                length = after
        sums.append(sum(lengths))
        rows.append(
            {
                "prompt_tokens": prompt,
                "num_tokens": tokens,
                "length_before_sum": sum(before for _, before, _ in events),
                "length_after_sum": sum(after for _, _, after in events),
                "freed_step_sum": sum((before - after) * step for step, before, after in events),
            }
        )
    assert cache_rows(pd.DataFrame(rows))["held"].tolist() == sums


def test_nothing_graded_gives_no_score(tmp_path: Path, make_cell: MakeCell) -> None:
    make_cell([[None, None]])
    row = metrics_of(tmp_path / "run").loc["full"]
    assert row[["pass_at_1", "se", "ci_low", "correct"]].isna().all()
    assert (row["ungraded"], row["mean_tokens"]) == (2, 201)


def test_the_mean_needs_every_benchmark(tmp_path: Path, make_cell: MakeCell) -> None:
    make_cell([[1], [0]])
    make_cell([[1], [1], [0], [1]], benchmark="toy_add")
    make_cell([[1], [0]], policy="dynts")
    table = cell_metrics(load_run(tmp_path / "run"))
    means = mean_over_benchmarks(table, ["toy_chain", "toy_add"]).set_index("policy")
    assert means.loc["full", "pass_at_1"] == pytest.approx((0.5 + 0.75) / 2)
    errors = stats.sem([1, 0]), stats.sem([1, 1, 0, 1])
    assert means.loc["full", "se"] == pytest.approx(np.hypot(*errors) / 2)
    assert np.isnan(means.loc["dynts", "pass_at_1"])
    assert means.loc["full", ["mean_cache_length", "max_peak_length"]].tolist() == [140, 240]
    assert means.loc["dynts", "max_peak_length"] == 129
    assert np.isnan(means.loc["dynts", "mean_cache_length"])
