import re
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from kvsweep.analysis.compare import compare
from kvsweep.analysis.figures.cost import cost_figure, flops
from kvsweep.analysis.figures.tradeoffs import tradeoff
from kvsweep.analysis.load import load_run
from kvsweep.analysis.statistics.against_full import decide_cells
from kvsweep.analysis.statistics.metrics import (
    by_eviction,
    by_policy,
    cache_rows,
    cell_metrics,
    cheapest_in_words,
    mean_lorenz,
    mean_over_benchmarks,
    score_intervals,
    settings_by_bytes,
    size,
)
from kvsweep.harness.settings import WEIGHTS
from kvsweep.messages.errors import UserError


def metrics_of(run: Path) -> pd.DataFrame:
    return cell_metrics(load_run(run)).set_index("policy")


def test_each_column_stands_in_the_table_of_columns(run, make_cell, kvsweep):
    make_cell([[1, 0, 1, 1], [1, 1, 1, 0]])
    make_cell([[1, 0, 0, 1], [1, 1, 1, 0]], policy="dynts")
    known = set(re.findall(r"\w+", kvsweep("report", "--columns-help").out))
    columns = [name for name in cell_metrics(load_run(run)) if not name.startswith("decoding_")]
    assert set(columns) - known == set()


def test_pass_at_1_and_its_error_by_hand(run, make_cell):
    make_cell([[1, 1, 0, 0], [1, 1, 1, 1], ["truncated", "no_answer", "grader_timeout", 1]])
    row = metrics_of(run).loc["full"]
    means = [0.5, 1.0, 0.25]
    assert row["pass_at_1"] == pytest.approx(np.mean(means))
    assert row["se"] == pytest.approx(stats.sem(means))
    assert (row["graded"], row["problems"]) == (12, 3)
    shares = row[["correct", "wrong", "no_answer", "truncated", "grader_timeout"]].astype(float)
    assert np.allclose(shares, np.array([7, 2, 1, 1, 1]) / 12)


def test_problems_weigh_the_same_when_draws_are_missing(run, make_cell):
    make_cell([[1, 1, 1], [0, None, None]])
    row = metrics_of(run).loc["full"]
    assert row["pass_at_1"] == 0.5
    assert (row["graded"], row["ungraded"]) == (4, 2)


@pytest.mark.parametrize("right", [0, 1, 14, 29, 30])
def test_with_one_draw_the_interval_is_wilsons(right):
    correct = [1.0] * right + [0.0] * (30 - right)
    graded = pd.DataFrame({"cell_id": "a", "problem_id": [f"p{i}" for i in range(30)], "correct": correct})
    row = score_intervals(graded).loc["a"]
    expected = stats.binomtest(right, 30).proportion_ci(method="wilson")
    assert row["ci_low"] == pytest.approx(expected.low, abs=1e-12)
    assert row["ci_high"] == pytest.approx(expected.high, abs=1e-12)


@pytest.mark.parametrize("low", [0.0, 1.0])
def test_draws_that_never_differ_do_not_narrow_the_interval(low):
    problems = np.repeat([f"p{i}" for i in range(20)], 5)
    graded = pd.DataFrame({"cell_id": "a", "problem_id": problems, "correct": low})
    row = score_intervals(graded).loc["a"]
    expected = stats.binomtest(int(20 * low), 20).proportion_ci(method="wilson")
    assert (row["ci_low"], row["ci_high"]) == (pytest.approx(expected.low), pytest.approx(expected.high))


def test_the_interval_covers_what_it_claims():
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


def test_one_problem_has_a_score_but_no_error(run, make_cell):
    make_cell([[1, 0]])
    row = metrics_of(run).loc["full"]
    assert row["pass_at_1"] == 0.5
    assert np.isnan(row["se"])
    assert 0 < row["ci_low"] < row["ci_high"] < 1


def test_the_difference_is_paired_on_what_both_have(run, make_cell):
    make_cell([[1, 1], [1, 0], [1, 1], [0, 0]])
    make_cell([[1, 0], [1, 0], [None, 0]], policy="dynts", done=False, expected=8)
    make_cell([[0, 0]], policy="dynts", seed=1)
    table = cell_metrics(load_run(run))
    row = table[(table["policy"] == "dynts") & (table["seed"] == 0)].iloc[0]
    differences = [-0.5, 0.0, -1.0]
    assert row["diff_to_full"] == pytest.approx(np.mean(differences))
    assert row["diff_se"] == pytest.approx(stats.sem(differences))
    assert row["diff_problems"] == 3
    others = table[(table["policy"] == "full") | (table["seed"] == 1)]
    assert others["diff_to_full"].isna().all()


def test_lengths_evictions_memory_and_speed(run, make_cell):
    make_cell([[1], [0]], policy="dynts")
    make_cell([[1], [0]])
    table = metrics_of(run)
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


def test_cache_lengths_with_two_evictions_by_hand(run, make_cell):
    evictions = [eviction(2, 5, 2), eviction(5, 5, 3)]
    text = {"prompt_tokens": 3, "num_tokens": 8, "peak_length": 5}
    make_cell([[1]], policy="dynts", completion=text | {"evictions": evictions})
    make_cell([[1]], completion=text | {"peak_length": 10})
    table = metrics_of(run)
    held = [3, 4, 5, 3, 4, 5, 4, 5]
    assert table.loc["dynts", "mean_cache_length"] == pytest.approx(np.mean(held))
    assert table.loc["dynts", "kept_rows"] == pytest.approx(np.sum(held) / np.sum(range(3, 11)))
    assert table.loc["dynts", "kept_memory_mean"] == table.loc["dynts", "kept_rows"]
    assert table.loc["dynts", ["mean_length_before", "mean_length_after"]].tolist() == [5, 2.5]
    assert table.loc["dynts", ["max_peak_length", "mean_peak_length"]].tolist() == [5, 5]
    assert table.loc["full", ["mean_cache_length", "kept_rows"]].tolist() == [6.5, 1]
    assert table.loc["full", ["mean_length_before", "mean_length_after"]].isna().all()


def test_cache_lengths_are_means_over_steps_and_over_evictions(run, make_cell):
    texts = [
        {"prompt_tokens": 2, "num_tokens": 2, "peak_length": 3, "evictions": []},
        {"prompt_tokens": 1, "num_tokens": 4, "peak_length": 3, "evictions": [eviction(1, 2, 1), eviction(2, 2, 1)]},
    ]
    make_cell([[1], [1]], policy="dynts", texts=texts)
    row = metrics_of(run).loc["dynts"]
    assert row["mean_cache_length"] == pytest.approx((2 + 3 + 1 + 2 + 2 + 2) / 6)
    assert row["mean_length_after"] == 1
    assert row["mean_evictions"] == 1


def test_cache_rows_against_decoding_step_by_step():
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
    impossible = pd.DataFrame(rows).assign(length_before_sum=10**6, cell_id="c", problem_id="p")
    with pytest.raises(UserError, match="problem 'p' in cell c free more"):
        cache_rows(impossible)


def test_nothing_graded_gives_no_score(run, make_cell):
    make_cell([[None, None]])
    row = metrics_of(run).loc["full"]
    assert row[["pass_at_1", "se", "ci_low", "correct"]].isna().all()
    assert (row["ungraded"], row["mean_tokens"]) == (2, 201)


def test_the_mean_needs_every_benchmark(run, make_cell):
    make_cell([[1], [0]])
    make_cell([[1], [1], [0], [1]], benchmark="toy_add")
    make_cell([[1], [0]], policy="dynts")
    table = cell_metrics(load_run(run))
    means = mean_over_benchmarks(table).set_index("policy")
    assert means.loc["full", "pass_at_1"] == pytest.approx((0.5 + 0.75) / 2)
    errors = stats.sem([1, 0]), stats.sem([1, 1, 0, 1])
    assert means.loc["full", "se"] == pytest.approx(np.hypot(*errors) / 2)
    assert np.isnan(means.loc["dynts", "pass_at_1"])
    assert means.loc["full", ["mean_cache_length", "max_peak_length"]].tolist() == [140, 240]
    assert means.loc["dynts", "max_peak_length"] == 129
    assert np.isnan(means.loc["dynts", "mean_cache_length"])


# Bytes of a row and of the newest rows, by bits.
SIZES = {16: (1536, 0), 8: (864, 24576), 4: (480, 24576)}


def make_packed(make_cell, cache, correct=((1,),), **settings):
    """A cell of the one condition with this cache; its seed gives the folder a name of its own."""
    packed = {"cache": cache} if cache else {}
    make_cell(correct, cell={"condition": "same", "seed": 0, **packed}, **settings)


@pytest.fixture
def metrics(make_cell, run):
    """Full cache and dynts at three widths; 4 bits lose every second answer."""
    right = [[1, 1]] * 40
    for bits, policy in ((b, p) for b in SIZES for p in ("full", "dynts")):
        wrong = [[1, 0]] * 40 if bits == 4 else right
        cache = {} if bits == 16 else {"bits": bits, "group": 32, "residual": 16}
        sizes = dict(zip(("row", "newest"), SIZES[bits], strict=True)) | {"fixed": 0, "weights": 5 * 2**19}
        make_packed(make_cell, cache, wrong, policy=policy, seed=bits, recorded={"bytes": sizes})
    return cell_metrics(load_run(run))


def test_bytes_and_the_cheapest_that_holds(metrics):
    names = metrics.set_index(["policy", "bits"])
    packed = {(policy, bits) for policy in ("full_packed", "dynts") for bits in (8, 4)}
    assert set(names.index) == packed | {("full", 16), ("dynts", 16)}
    assert names.loc[("dynts", 4), "variant"] == "bits=4"
    assert names.loc[("full", 16), "variant"] == ""
    # A text of 201 tokens after 40: lengths 40 .. 240 with all rows, 129 at the peak with eviction.
    assert names.loc[("full", 16), "kv_bytes_mean"] == 1536 * 140
    assert names.loc[("full_packed", 8), "kv_bytes_mean"] == 864 * 140 + 24576
    assert names.loc[("dynts", 4), "kv_bytes_peak"] == 480 * 129 + 24576
    # The memory of packed rows is less at equal lengths.
    assert names.loc[("full_packed", 8), "kept_memory"] == pytest.approx((864 * 240 + 24576) / (1536 * 240))
    assert names.loc[("dynts", 16), "kept_memory"] == pytest.approx(129 / 240)
    assert names.loc[("full_packed", 8), "kept_rows"] == 1
    assert names.loc[("full_packed", 8), "kept_memory_mean"] == pytest.approx((864 * 140 + 24576) / (1536 * 140))
    # Every cell is compared with the full cache of 16 bits, a packed full cache too.
    assert names["diff_to_full"].drop(("full", 16)).notna().all()
    assert names.loc[("full_packed", 4), "diff_to_full"] == -0.5
    # Six settings of few problems hold by themselves, which may be luck, and none holds in a search.
    assert not settings_by_bytes(metrics, "toy_qwen")["safe"].any()
    metrics = metrics.assign(recommendable=metrics["decision"].isin(["safe", "small loss"]))
    settings = settings_by_bytes(metrics, "toy_qwen")
    assert list(settings["bits"][settings["safe"]].drop_duplicates()) == [8, 16]
    said = cheapest_in_words(settings)
    assert "DynTS 0.3 / 48, trigger 128, bits=8" in said
    assert "2.5 MiB of weights" in said
    assert cheapest_in_words(settings[settings["bits"] == 4]) == "By bytes, no setting is shown to be safe in a search."


@pytest.mark.slow
def test_the_picture_has_a_curve_for_each_width(metrics):
    figure = tradeoff("bytes", metrics, "toy_qwen")
    labels = {text.get_text() for text in figure.legends[0].get_texts()}
    assert {"DynTS, 16 bits", "DynTS, 8 bits", "DynTS, 4 bits", "all rows, packed, 8 bits", "Pareto front"} <= labels
    assert tradeoff("bytes", metrics[metrics["bits"] == 16], "toy_qwen") is None


@pytest.mark.slow
def test_the_cost_of_packed_rows_is_drawn_in_bytes(metrics, run):
    figure = cost_figure(load_run(run), metrics, "toy_qwen")
    # The first step attends over 40 rows, nothing evicted.
    first = [float(line.get_ydata()[0]) for line in figure.axes[1].lines]
    assert first == pytest.approx([1536 * 40 / (row * 40 + newest) for row, newest in (SIZES[4], SIZES[8], SIZES[16])])


def test_layers_with_windows_do_not_attend_to_the_cache():
    """Of two models of four query heads of 32, one has two layers with windows of 32 rows among four."""
    model = {name: {"config": {"model": {"path": str(WEIGHTS / name)}}} for name in ("toy_qwen", "toy_qwen_windows")}
    run = Mock(provenance=model)
    row = 4 * 4 * 32
    plain, windows = flops(run, "toy_qwen"), flops(run, "toy_qwen_windows")
    assert plain[1] == 3 * row
    assert windows[1] == 2 * row
    per_layer = (plain[0] - 2 * 128 * 128) / 3
    assert windows[0] == 4 * per_layer + 2 * 128 * 128 + 2 * 32 * row


def test_schemes_and_bits_of_keys_and_values_are_told_apart(make_cell, run):
    """Also where a run has only the default scheme and one other, or one uneven pair of bits."""
    stored = [{"bits": 4}, {"bits": 4, "scheme": "kivi"}, {"key_bits": 4, "value_bits": 2}]
    for seed, cache in enumerate(stored):
        make_packed(make_cell, {**cache, "group": 32, "residual": 16}, policy="dynts", seed=seed)
    cells = load_run(run).cells.set_index("variant")
    names = ["bits=4, scheme=rotated", "bits=4, scheme=kivi", "bits=4/2, scheme=rotated"]
    assert sorted(cells.index) == sorted(names)
    assert list(cells.loc[names, "bits"]) == [4, 4, 3]
    assert list(cells.loc[names, "unpacked_rows"]) == [16, 47, 16]


def test_fp8_is_named_where_it_is_the_only_packed_setting(make_cell, run):
    make_cell([[1]])
    make_packed(make_cell, {"bits": 8, "scheme": "fp8", "format": "e4m3", "scale": "none"}, seed=1)
    cells = load_run(run).cells.set_index("policy")
    assert cells.loc["full_packed", "variant"] == "bits=8, scheme=fp8"
    assert cells.loc["full_packed", "unpacked_rows"] == 0


def test_two_files_of_scales_are_told_apart(make_cell, run):
    """Each has its row and its comparison, and neither stands for the other."""
    for scales in "ab":
        make_packed(make_cell, {"bits": 8, "scheme": "fp8", "scale": "tensor", "scales": scales}, seed=scales)
    table = compare(load_run(run), load_run(run))
    assert [*table["variant"]] == ["bits=8, scheme=fp8, scales=a", "bits=8, scheme=fp8, scales=b"]


def test_bits_are_named_where_all_cells_but_the_full_cache_have_them(make_cell, run):
    make_cell([[1]])
    for policy in ("full", "dynts"):
        make_packed(make_cell, {"bits": 2, "group": 32, "residual": 16}, policy=policy, seed=1)
    cells = load_run(run).cells
    assert dict(zip(cells["policy"], cells["variant"], strict=True)) == {
        "full": "",
        "full_packed": "bits=2",
        "dynts": "bits=2",
    }


def test_sizes_in_words():
    assert [size(n) for n in (12, 2048, 5.5 * 2**20, 2**30)] == ["12 bytes", "2.0 KiB", "5.5 MiB", "1.0 GiB"]
    assert size(float("nan")) == "–"


@pytest.fixture
def held():
    rows = [("dynts", 0, 1, 0.9), ("dynts", 0, 2, 0.6), ("window", 1, 1, 0.2), ("dynts", 2, 1, 0.3)]
    return pd.DataFrame(rows, columns=["policy", "text", "eviction", "retained"])


def test_the_curve_of_a_policy_is_the_mean_over_its_texts(held):
    expected = [["dynts", 1, 0.6, 2], ["dynts", 2, 0.6, 1], ["window", 1, 0.2, 1]]
    assert by_eviction(held).to_numpy().tolist() == expected


def test_a_policys_row_is_the_mean_over_its_evictions_beside_its_grades(held):
    table = by_policy(held, {"dynts": [1, 0, 1, 1], "window": []})
    assert table["policy"].tolist() == ["dynts", "window"]
    np.testing.assert_allclose(table["retained"], [0.6, 0.2])
    assert table["texts"].tolist() == [2, 1]
    np.testing.assert_array_equal(table["pass1"], [0.75, np.nan])


def test_lorenz_curves_of_different_lengths_are_averaged_at_each_percent():
    straight = np.array([0, 1.0]), np.array([0, 1.0])
    bent = np.array([0, 0.5, 1.0]), np.array([0, 0.9, 1.0])
    table = mean_lorenz([straight, bent])
    assert len(table) == 101
    assert table.loc[[0, 25, 50, 100], "importance"].tolist() == pytest.approx([0, (0.25 + 0.45) / 2, 0.7, 1])


def decided(rows, record):
    """The decisions about cells of these names, problems, draws and grades; the first cell is the full cache."""
    graded = pd.DataFrame(rows, columns=["cell_id", "problem_id", "draw", "correct"])
    names = graded["cell_id"].unique()
    cells = pd.DataFrame({"cell_id": names, "policy": names, "condition": "c", "status": "done", "variant": ""})
    cells = cells.assign(keep_ratio=0.5, local_window=16, budget=64, engine="kvsweep")
    return decide_cells(cells, graded, dict.fromkeys(names, record))


def test_a_cell_that_has_later_draws_alone_is_decided_by_these():
    """A sweep in shards may have written a cell's later draws first."""
    sides = {"full": range(4), "cell": (2, 3), "first": (0, 1)}
    rows = [
        (name, f"p{p}", d, float(name == "full" or p > 0)) for name in sides for p in range(30) for d in sides[name]
    ]
    found = decided(rows, {})
    assert found.loc["cell"].equals(found.loc["first"])
    assert found.loc["cell", "these_low"] < -1 / 30


def test_the_labels_of_variants_test_their_questions():
    """Of 66 questions with three equal variants each the interval is that of 66 problems."""
    rows = [(name, f"p{p}", 0, 1.0) for name in ("full", "cell") for p in range(198)]
    found = decided(rows, {"groups": {f"p{p}": str(p // 3) for p in range(198)}}).loc["cell"]
    assert (found["decision"], found["population"]) == ("unclear", "groups")
    assert found["these_low"] == pytest.approx(0.025 ** (1 / 66) - 1)
