"""Each sentence about a finding says what its table here says: `make release` runs this file, and CI."""

import json
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml
from scipy import stats
from statsmodels.stats.multitest import multipletests

from kvsweep.analysis.notation import policy_title
from kvsweep.analysis.statistics.noninferiority import beyond_control, decide, decide_grid, paired_test, power

PUBLISHED = Path(__file__).resolve().parent


def said(page: str) -> str:
    return " ".join((PUBLISHED / page).read_text().split())


def holm(differences: pd.Series, errors: pd.Series) -> np.ndarray:
    """Two-sided normal p-values, corrected."""
    return multipletests(2 * stats.norm.sf((differences / errors).abs()), method="holm")[1]


def test_the_tests_that_were_compared() -> None:
    table = pd.read_csv(PUBLISHED / "tests_compared.csv")
    page = (PUBLISHED.parents[1] / "docs/statistics.md").read_text()
    rows = re.findall(
        r"^\| (.*) \| ([\d.]+)% \| ([\d.]+)% \| ([\d.]+) / ([\d.]+) / ([\d.]+) / ([\d.]+) \|$", page, re.M
    )
    assert [name for name, *_ in rows] == list(table["rule"].unique())
    for name, *numbers in rows:
        own = table[table["rule"] == name]
        null, lossless = own[own["loss_points"] == 5], own[own["loss_points"] == 0]
        assert (len(null), len(lossless)) == (208, 96)
        found = [null["called_safe"].max(), null["called_safe"].mean()]
        found += list(lossless.groupby("draws")["called_safe"].mean())
        assert [float(number) for number in numbers] == pytest.approx([100 * share for share in found], abs=0.06)
    worst = table.loc[table["rule"].str.contains("ours") & (table["loss_points"] == 5), "called_safe"].max()
    assert worst < 0.03
    assert f"({worst:.1%} in the worst cell simulated below)" in page


def test_the_ways_to_count_problems_with_fewer_answers() -> None:
    table = pd.read_csv(PUBLISHED / "tests_with_gaps.csv")
    page = (PUBLISHED.parents[1] / "docs/statistics.md").read_text()
    for way, own in table.groupby("way", sort=False):
        null, lossless = (own.loc[own["loss_points"].eq(loss), "called_safe"] for loss in (5, 0))
        assert (len(null), len(lossless)) == (195, 195)
        [row] = re.findall(rf"^\| {re.escape(str(way))} \| ([\d.]+)% \| ([\d.]+)% \| ([\d.]+) \|$", page, re.M)
        found = [null.max(), null.mean(), lossless.mean()]
        assert [float(number) for number in row] == pytest.approx([100 * share for share in found], abs=0.06)
        assert (null.max() < 0.0255) == ("ours" in str(way)), "ours alone keeps its promise"


VERDICTS = ["pass_percent", "fail_percent", "inconclusive_percent"]
WRONG = ["wrong_pass_percent", "wrong_fail_percent"]


def rules_page() -> str:
    return (PUBLISHED.parents[1] / "results/published/valid_at_thirty.md").read_text()


def test_five_rules_on_the_same_answers() -> None:
    table = pd.read_csv(PUBLISHED / "valid_at_thirty.csv")
    rules = list(table["rule"].unique())
    assert len(rules) == 6
    assert table[VERDICTS].sum(axis=1).to_numpy() == pytest.approx(100, abs=0.01)
    shown = re.findall(r"^\| ([^|]+) \| (\d+) x (\d+) \| ([^|]+) \| (.*) \|$", rules_page(), re.M)
    assert len(shown) == 19
    found = dict(list(table.groupby(["case", "n", "draws", "truth"])))
    for case, n, draws, truth, cells in shown:
        own = found[case, int(n), int(draws), truth].set_index("rule").loc[rules, VERDICTS].to_numpy()
        said_here = [[float(share) for share in cell.split("/")] for cell in cells.split("|")]
        assert np.array(said_here) == pytest.approx(own, abs=0.501), (case, n, draws)
    free = table[table["case"].str.startswith("new draws") & (table["truth"] == "0")]
    summary = re.findall(r"^\| ([^|]+) \| " + r" \| ".join([r"([\d.]+)"] * 8) + r" \|$", rules_page(), re.M)
    assert [rule for rule, *_ in summary] == rules
    for rule, *shares in summary:
        own = table[table["rule"] == rule]
        elsewhere = own["truth"].str.endswith("like these")
        expected = [own[~elsewhere]["wrong_pass_percent"].max(), own[elsewhere]["wrong_pass_percent"].max()]
        expected.append(own["wrong_fail_percent"].max())
        mine = free[free["rule"] == rule]
        expected += list(mine.groupby(["n", "draws"])["pass_percent"].mean())
        expected.append(mine["inconclusive_percent"].mean())
        assert [float(share) for share in shares] == pytest.approx(expected, abs=0.06)


def test_how_often_judge_errs_where_rows_are_odd() -> None:
    table = pd.read_csv(PUBLISHED / "judge_errors.csv")
    [again] = table[table["sets"] == 4000].to_dict("records")
    assert (again["case"], again["n"], again["draws"]) == ("even", 198, 16)
    table = table[table["sets"] == 1000]
    section = rules_page().partition("## When rows are odd")[2].partition("\n## ")[0]
    largest = table.groupby("case", sort=False)[["wrong_safe", "wrong_worse", "beyond_control"]].max() / 10
    shown = re.findall(r"^\| [^|]+ \| ([\d.]+) \| ([\d.]+) \|$", section, re.M)
    both = largest[["wrong_safe", "wrong_worse"]].drop("control")
    assert [[float(safe), float(worse)] for safe, worse in shown] == both.to_numpy().tolist()
    assert f"at most {largest.loc['control', 'beyond_control']}% are beyond" in section
    share = {name: f"{100 * again[name] / 4000:.1f}" for name in ("wrong_worse", "wrong_safe")}
    assert f"wrongly worse in {share['wrong_worse']}% and wrongly safe in {share['wrong_safe']}%" in section
    assert stats.binom.sf(again["wrong_safe"] - 1, 4000, 0.025) > 0.1
    # All cases but the one that judge does not promise.
    promised = table[table["case"] != "no group"].set_index(["case", "n", "draws", "sets"]).stack().dropna()
    assert (len(promised), (promised > 25).sum(), promised.max()) == (78, 6, 34)
    chance = stats.binom.sf(promised.max() - 1, 1000, 0.025)
    assert chance == pytest.approx(0.05, abs=0.005)
    first_row = 2 * (table["case"] == "even").sum()
    assert (first_row, 1 - (1 - chance) ** first_row) == (12, pytest.approx(0.44, abs=0.005))
    without = table.loc[table["case"] == "no group", "wrong_safe"].max()
    assert stats.binom.sf(without - 1, 1000, 0.025) < 1e-9


def test_five_percent_lost_for_certain() -> None:
    """The chances of the numbers of lost problems are binomial, so each rule's shares can be computed exactly."""
    table = pd.read_csv(PUBLISHED / "valid_at_thirty.csv").set_index(["case", "n", "draws", "truth", "rule"])
    own = table.loc["5% of all problems lost for certain"]
    exact = 100 * 0.95**30
    for rule in table.index.unique("rule").drop(["judge", "judge, problems like these"]):
        assert own.loc[(30, 1, "5 of problems like these", rule), "wrong_pass_percent"] == pytest.approx(exact, abs=3)
    assert f"{exact:.0f}%" in rules_page()
    for draws in (1, 8):
        full, population = np.ones((30, draws)), "these" if draws > 1 else "like_these"
        labels = [
            decide(full * (np.arange(30) >= lost)[:, None], full, population=population).label for lost in range(31)
        ]
        chances = stats.binom.pmf(range(31), 30, 0.05)
        for label, column in (("safe", "pass_percent"), ("worse", "fail_percent")):
            share = 100 * chances[[one == label for one in labels]].sum()
            truth = "of these problems, as drawn"
            assert own.loc[(30, draws, truth, "judge"), column] == pytest.approx(share, abs=4.5)


@pytest.mark.parametrize(
    ("sentence", "cells"),
    [
        (r"(\d+)% of settings that lose 10 points at 30 x 8 in texts that are else equal", [("nel compare", 1, 8, 10)]),
        (
            r"lose 10 points at 30 x 8 with new draws gate fails (\d+)%, judge (\d+)%",
            [("nel gate", 0, 8, 10, "fail"), ("judge", 0, 8, 10, "fail")],
        ),
        (
            r"lose 5 points at 30 x 8 the t interval passes (\d+)%, the bootstrap (\d+)% and judge (\d+)%",
            [("t interval", 0, 8, 5), ("bootstrap", 0, 8, 5), ("judge", 0, 8, 5)],
        ),
        (
            r"the t interval passes (\d+)% at 30 x 1 and (\d+)% at 30 x 8, judge (\d+)% and (\d+)%",
            [("t interval", 1, 1, 5), ("t interval", 1, 8, 5), ("judge", 1, 1, 5), ("judge", 1, 8, 5)],
        ),
        (
            r"it passes (\d+)% at 30 x 8 of settings that never solve 5% of problems, like gate \((\d+)%\)",
            [("judge", 2, 8, "5 of problems like these"), ("nel gate", 2, 8, "5 of problems like these")],
        ),
    ],
)
def test_sentences_on_five_rules(sentence: str, cells: list[tuple]) -> None:
    table = pd.read_csv(PUBLISHED / "valid_at_thirty.csv")
    table["rule"] = table["rule"].str.replace(" (0.3.0)", "")
    table = table.set_index(["case", "n", "draws", "truth", "rule"])
    cases = ("new draws, accuracy 0.6", "texts equal but for the loss", "5% of all problems lost for certain")
    found = re.search(sentence, " ".join(rules_page().split()))
    assert found
    for said_here, (rule, case, draws, truth, *verdict) in zip(found.groups(), cells, strict=True):
        share = table.loc[(cases[case], 30, draws, str(truth), rule), f"{[*verdict, 'pass'][0]}_percent"]
        assert float(said_here) == pytest.approx(share, abs=0.501)


def labels_of_totals(full: int, cell: int, problems: int, draws: int) -> Counter[str]:
    """The labels of all tables of pairs with these totals of right answers, the pairs laid out here one by one."""
    answers, found = problems * draws, Counter[str]()
    for lost in range(max(0, full - cell), min(full, answers - cell) + 1):
        ours = np.arange(answers) < full
        theirs = (np.arange(answers) >= lost) & (np.arange(answers) < cell + lost)
        population = "these" if draws > 1 else "like_these"
        pairs = (one.reshape(problems, draws).astype(float) for one in (theirs, ours))
        found[decide(*pairs, population=population).label] += 1
    return found


@pytest.mark.slow
def test_our_rule_on_fewer_simulations() -> None:
    """Five points lost in proportion, with new draws: simulated here in other words than in the script."""
    table = pd.read_csv(PUBLISHED / "valid_at_thirty.csv").set_index(["case", "n", "draws", "truth", "rule"])
    rng = np.random.default_rng(7)
    runs, verdicts = 300, []
    for _ in range(runs):
        chance = rng.beta(0.3, 0.2, (30, 1))
        luck, again = rng.random((2, 30, 8))
        full, cell = luck < chance, again < chance * (1 - 0.05 / chance.mean())
        verdicts.append(decide(cell.astype(float), full.astype(float)).label)
    own = table.loc[("new draws, accuracy 0.6", 30, 8, "5", "judge")]
    for label, column in (("safe", "pass_percent"), ("worse", "fail_percent")):
        share = own[column] / 100
        error = np.sqrt(max(share, 0.01) * (1 - share) / runs)
        assert np.mean([one == label for one in verdicts]) == pytest.approx(share, abs=4 * error)
    assert own[WRONG].to_list() == [own["pass_percent"], 0]


@pytest.mark.slow
def test_what_published_claims_can_carry() -> None:
    page = " ".join(rules_page().split())
    assert labels_of_totals(71, 65, 90, 1) == {"worse": 1, "unclear": 19}
    assert "20 tables of pairs, from 6 answers lost and none won to 25 and 19" in page
    assert "*worse* in one (nothing won) and *unclear* in 19" in page
    rows = re.findall(
        r"^\| ([\w.-]+) \| (fp[48]) \| (\d+) and (\d+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", rules_page(), re.M
    )
    assert len(rows) == 6
    fits = r"The totals fit (\d+) tables, and judge says \*worse\* in (\d+) and \*unclear\* in (\d+)"
    own = re.findall(rf"(\d+) and (\d+) of 120. {fits}", page)
    totals = [([int(n) for n in row[2:]], 30, 5) for row in rows] + [([int(n) for n in (*own[0], "0")], 120, 1)]
    for (right, left, *counts), problems, draws in totals:
        found = labels_of_totals(right, left, problems, draws)
        assert counts == [found.total(), found["worse"], found["unclear"], found["safe"]]
    for right, of in ((124, 200), (58, 210)):
        low, high = 100 * stats.beta.ppf([0.025, 0.975], [right, right + 1], [of - right + 1, of - right])
        assert f"{low:.1f} to {high:.1f}%" in page
        assert f"{100 * right / of:.1f}% of {of}" in page
    grids = pd.read_csv(PUBLISHED / "paper_grids/grids.csv")
    differ = (grids["p_holm"] < 0.05).groupby(grids["concentration"]).sum()
    assert differ.to_dict() == {0.2: 4, 0.3: 0, 0.6: 0, 1.0: 0}
    assert "none of the eight grids" in page


def test_the_slope_of_the_published_heatmaps() -> None:
    rows = pd.read_csv(PUBLISHED / "paper_grids/slopes.csv").set_index("cells")
    text = said("paper_grids/README.md")
    for name, points, p in (
        ("all grids", "+0.28", ".004"),
        ("R1-Qwen", "+0.41", ".005"),
        ("R1-Llama", "+0.16", ".28"),
        ("all grids without keep ratio 0.1", "+0.04", ".76"),
    ):
        assert float(points) == pytest.approx(rows.loc[name, "points_per_tenth"], abs=0.006)
        assert float(p) == pytest.approx(rows.loc[name, "p"], abs=0.006 if len(p) == 3 else 0.0006)
        assert points in text
        assert f"(p {p}" in text
    scores = pd.read_csv(PUBLISHED.parent / "reference/dynts_heatmaps.csv")
    fits = [
        np.polyfit(cells["keep_ratio"], cells["pass_at_1"], 1)[0] / 10
        for _, cells in scores.groupby(["model", "benchmark"])
    ]
    assert np.mean(fits) == pytest.approx(rows.loc["all grids", "points_per_tenth"], abs=1e-4)


def test_protection_among_the_policies_with_a_window() -> None:
    scores = pd.read_csv(PUBLISHED / "protection/scores.csv")
    own = scores[scores["policy"].isin(["dynts", "inertia", "lazyeviction", "raas", "random"])]
    for model, share in (("Toy-Llama", "16.0%"), ("Toy-Qwen", "9.8%")):
        cells = own[own["model"] == model].pivot(index="policy", columns="protected", values="pass_at_1").to_numpy()
        explained = cells.shape[0] * ((cells.mean(0) - cells.mean()) ** 2).sum() / ((cells - cells.mean()) ** 2).sum()
        assert float(share[:-1]) == pytest.approx(100 * explained, abs=0.05)
        assert f"{share} ({model})" in said("protection/README.md")
    closing = pd.read_csv(PUBLISHED / "protection/smol/closing.csv").set_index(["policy", "question"])
    free = closing.loc[("h2o", "free")]
    assert (free["last_box_right"], free["completions"]) == (54, 128)
    assert "54 of its 128 texts" in said("protection/smol/README.md")


@pytest.mark.slow
def test_the_policies_beside_dynts() -> None:
    cells = pd.read_csv(PUBLISHED / "methods" / "cells.csv")
    text = said("methods/README.md")
    for model, expected in (
        ("toy_qwen", {"lagkv_16": (-13.8, 4.2, 0.002), "no_window": (-17.1, 4.2, 0), "rpc": (0.8, 3.6, 0.82)}),
        (
            "toy_llama",
            {"rkv": (3.8, 4.4, 1), "lagkv_16": (10.8, 4.2, 0.07), "gkv": (10.8, 4.2, 0.07), "rpc": (20, 4.4, 0)},
        ),
    ):
        groups = cells[(cells["model"] == model) & (cells["policy"] != "full")].groupby("policy")
        assert (groups["problems"].sum() == 240).all()
        means = groups["pass_at_1"].mean()
        errors = groups["se"].agg(lambda se: np.sqrt((se**2).sum()) / len(se))
        rest = means.index != "dynts"
        differences = means[rest] - means["dynts"]
        spread = np.hypot(errors[rest], errors["dynts"])
        p = pd.Series(holm(differences, spread), index=differences.index)
        assert len(p) == 30
        for policy, (points, error, corrected) in expected.items():
            assert 100 * differences[policy] == pytest.approx(points, abs=0.06)
            assert 100 * spread[policy] == pytest.approx(error, abs=0.06)
            assert p[policy] == pytest.approx(corrected, abs=0.005)
            assert f"{abs(points)} ± {error}" in text.replace("20.0", "20")
    equal = cells[(cells["model"] == "toy_qwen") & (cells["mean_length_after"] < 150)]
    best = equal[~equal["policy"].isin(["full", "dynts"])].groupby("policy")["pass_at_1"].mean().idxmax()
    assert best == "lagkv_16"


@pytest.mark.parametrize(
    ("name", "count", "left"),
    [
        (
            "regimes_larger",
            28,
            {
                ("toy_llama_restated", "dynts"): 0.0001,
                ("toy_qwen_restated", "random"): 0.023,
                ("toy_qwen_restated", "keydiff"): 0.024,
                ("toy_qwen_restated", "random_head"): 0.040,
            },
        ),
        ("regimes", 62, {("toy_llama_restated", name): 0.004 for name in ("lagkv_16", "gkv", "no_window", "dynts")}),
    ],
)
def test_where_the_text_restates(name: str, count: int, left: dict[tuple[str, str], float]) -> None:
    table = pd.read_csv(PUBLISHED / "regimes" / f"{name}.csv").query("policy != 'full'")
    corrected = pd.Series(
        holm(table["difference"], table["difference_se"]), index=list(zip(table["model"], table["policy"], strict=True))
    )
    assert len(corrected) == count
    shown = {key: p for key, p in corrected.items() if p < 0.05}
    assert shown.keys() == left.keys()
    text = said("regimes/README.md")
    assert f"{count} differences" in text
    assert all(f"{p:.4f}".strip("0") in text for p in left.values())
    if name == "regimes":
        assert max(shown.values()) < 0.004
    else:
        assert shown == pytest.approx(left, abs=0.0005)
        assert corrected["toy_llama_restated", "random"] == pytest.approx(1)
        assert corrected["toy_llama_restated", "random_head"] == pytest.approx(0.17, abs=0.005)
        assert corrected["toy_qwen_restated", "h2o"] == pytest.approx(0.08, abs=0.005)


def test_four_bits() -> None:
    cells = pd.read_csv(PUBLISHED / "bits" / "cells.csv").set_index(["model", "policy", "bits"])
    text = said("bits/README.md")
    slower = {}
    for model, name in (("toy_qwen", "Toy-Qwen"), ("toy_llama", "Toy-Llama")):
        four, full = cells.loc[(model, "full_packed", 4)], cells.loc[(model, "full", 16)]
        # No problem differs twice, so these counts are the whole table; the family is all other settings of the model.
        assert (four["regressions"] + four["gains"], four["problems"], four["draws"]) in [(0, 60, 2), (1, 60, 2)]
        right = np.ones((60, 2))
        wrong = right.copy()
        wrong[: int(four["regressions"]), 0] = 0
        found = decide_grid({0: wrong}, right, family=len(cells.loc[model]) - 1)[0]
        points = re.search(rf"(\S+)(?: points)? \((?:interval )?(\S+) to (\S+), {name}\)", text)
        assert points
        exact = [100 * value for value in (found.difference, found.low, found.high)]
        assert [float(number) for number in points.groups()] == pytest.approx(exact, abs=0.05)
        assert found.difference == pytest.approx(four["diff_to_full"])
        assert found.label == "safe"
        slower[model] = full["tokens_per_second"] / four["tokens_per_second"]
        assert four["kv_bytes_mean"] / full["kv_bytes_mean"] == pytest.approx(0.35, abs=0.005)
    assert f"{slower['toy_qwen']:.1f} times (Toy-Qwen) and {slower['toy_llama']:.1f} times (Toy-Llama)" in text


def test_bits_and_rows_on_a_real_model() -> None:
    cells = pd.read_csv(PUBLISHED / "bytes_smol" / "cells.csv")
    cells["share"] = cells["kv_bytes_mean"] / cells["kv_bytes_mean"].max()
    packed = cells[cells["policy"] == "full_packed"].set_index("variant")
    four, full = packed.loc["bits=4, scheme=rotated"], cells[cells["policy"] == "full"].iloc[0]
    half = cells[(cells["policy"] == "dynts") & (cells["variant"] == "bits=8") & (cells["keep_ratio"] == 0.5)].iloc[0]
    assert [round(one["pass_at_1"], 2) for one in (four, half, full)] == [0.91, 0.31, 0.94]
    assert [round(one["share"], 2) for one in (four, half)] == [0.39, 0.53]
    two = packed.filter(like="bits=2", axis=0)["pass_at_1"]
    assert sorted(two) == [0, 0, 0.15625]
    assert f"in a cache of 2 bits: [from {full['pass_at_1']:.0%} right down to 0 to {two.max():.0%}]" in front_page()
    assert f"at 2 bits 0 to {two.max():.0%} are left, by the packing scheme" in said("README.md")


def front_page() -> str:
    return " ".join((PUBLISHED.parents[1] / "README.md").read_text().split())


def test_every_policy_tried_on_a_real_model_loses() -> None:
    cells = pd.read_csv(PUBLISHED / "methods_smol" / "cells.csv")
    compressed = cells[cells["policy"] != "full"]
    assert "[21 of 21 policies lose]" in front_page()
    assert (compressed["decision"] == "worse").sum() == len(compressed) == 21
    assert set(cells["problems"]) == {32}


def test_protection_on_a_real_model() -> None:
    scores = pd.read_csv(PUBLISHED / "protection" / "smol" / "scores.csv").set_index(["policy", "protected"])[
        "pass_at_1"
    ]
    costs = {name: 100 * (scores[name, "question"] - scores[name, "nothing"]) for name in ("keydiff", "gkv", "caote")}
    assert costs == pytest.approx({"keydiff": -43.75, "gkv": -37.5, "caote": -34.375})
    assert 100 * scores["dynts", "question+sinks+window"] == pytest.approx(43.75)
    kl = pd.read_csv(PUBLISHED / "protection" / "smol" / "kl.csv").set_index(["policy", "protected"])["kl"]
    assert (len(kl), kl.groupby("policy").nunique().sum()) == (112, 58)
    assert "Over the 112 cells (58 of them distinct" in said("protection/smol/README.md")
    assert scores.corr(kl, method="spearman") == pytest.approx(-0.88, abs=0.005)
    closing = pd.read_csv(PUBLISHED / "protection" / "smol" / "closing.csv").set_index(["policy", "question"])
    h2o = closing.loc[("h2o", "free")]
    assert h2o["never_closed"] == h2o["completions"]


def test_what_a_head_should_be_taught() -> None:
    table = pd.read_csv(PUBLISHED / "labels" / "differences.csv").set_index(["policy", "model", "keep_ratio"])
    answer, oracle = table.loc["dynts_answer"], table.loc["oracle_far_max"]
    assert sorted(answer["p_holm"].round(3)) == [0.004, 0.014, 0.115, 1.0]
    assert sorted(-100 * answer["difference"].round(3)) == pytest.approx([2.5, 3.7, 6.0, 7.7], abs=0.06)
    assert oracle["p_holm"].max() == pytest.approx(0.015, abs=0.0005)
    assert [100 * oracle["difference"].min(), 100 * oracle["difference"].max()] == pytest.approx([3.7, 6.7], abs=0.06)
    best = table["pass_at_1"].xs(("toy_llama", 0.5), level=("model", "keep_ratio"))
    assert best["dynts_sum"] > best["oracle_far_max"]
    assert "p .004 and .014 at 0.3" in said("labels/README.md")


def test_the_papers_grids() -> None:
    grids = pd.read_csv(PUBLISHED / "paper_grids" / "grids.csv")
    assert (grids.groupby("concentration").size() == 8).all()
    least = grids.groupby("concentration")["p_holm"].min()
    assert least[1.0] == least[0.6] == 1
    assert least[0.3] == pytest.approx(0.11, abs=0.005)
    assert (grids[grids["concentration"] == 0.2]["p_holm"] < 0.05).sum() == 4
    found = pd.read_csv(PUBLISHED / "paper_grids" / "concentrations.csv")
    assert found["concentration"].round(2).tolist() == [0.32, 0.53]
    repeated = pd.read_csv(PUBLISHED / "paper_grids" / "repeated.csv")
    # Two answers to one problem differ with the chance 2 m (1 - m) (1 - r), with r = 1 / (1 + a + b).
    for (_, rows), size in zip(repeated.groupby("source", sort=False), found["concentration"], strict=True):
        right, answers = rows["right"], rows["answers"]
        differ = (2 * right * (answers - right) / (answers * (answers - 1))).mean()
        mean = (right / answers).mean()
        assert 1 - differ / (2 * mean * (1 - mean)) == pytest.approx(1 / (1 + size), abs=0.08)
    text = said("paper_grids/README.md")
    assert "0.32 (95% interval 0.12 to 0.75" in text
    assert "0.53 (0.21 to 1.2" in text


def test_windows_in_half_of_the_layers() -> None:
    table = pd.read_csv(PUBLISHED / "hybrid/hybrid.csv").set_index("policy")
    above = {
        model: set(table.index[(table[f"{model}_above_random_p"] < 0.05) & (table[f"{model}_above_random"] > 0)])
        for model in ("toy_qwen", "toy_qwen_windows")
    }
    assert above == {"toy_qwen": {"dynts", "rkv", "triattention", "keydiff"}, "toy_qwen_windows": {"dynts"}}
    assert table["p_holm"].min() == pytest.approx(0.06, abs=0.005)
    assert table.loc["rkv", "difference"] == pytest.approx(-0.133, abs=0.001)
    cells = pd.read_csv(PUBLISHED / "hybrid/cells.csv").groupby(["model", "policy"])["pass_at_1"].mean()
    for model in above:
        assert cells[model, "dynts"] == pytest.approx(table.loc["dynts", model], abs=1e-3)
        assert cells[model, "full"] == pytest.approx(table.loc["dynts", f"{model}_full"], abs=1e-3)


def test_the_scorer_decides_and_not_the_protection() -> None:
    scores = pd.read_csv(PUBLISHED / "protection" / "scores.csv")
    shares = pd.read_csv(PUBLISHED / "protection" / "variance.csv").set_index("model")
    text = said("protection/README.md")
    for model, rows in scores.groupby("model"):
        table = rows.pivot(index="policy", columns="protected", values="pass_at_1")
        assert table.shape == (14, 8)
        total = table.to_numpy().var()
        found = (table.mean(axis=1).var(ddof=0) / total, table.mean(axis=0).var(ddof=0) / total)
        for share, column in zip(found, ("policy %", "protection %"), strict=True):
            assert float(shares.loc[model, column].split()[0]) == pytest.approx(100 * share, abs=0.05)
            assert shares.loc[model, column] in text
        gain = (table["question+sinks+window"] - table["nothing"])["dynts"]
        assert f"{100 * gain:+.1f}"[:5] in text or f"{100 * gain:.1f}" in text
        # A window of 32 beside the newest token alone changes nothing in these nine, at any protection.
        still = table[(table["window"] == table["nothing"]) & (table["question+window"] == table["question"])].index
        assert set(still) == {"caote", "gkv", "h2o", "keydiff", "knorm", "lagkv_16", "rkv", "snapkv", "tova"}


# --- What README, docs and results/published/README.md say ---------------------------------------------------


def page(name: str) -> str:
    """A page of the repository as one line."""
    return " ".join((PUBLISHED.parents[1] / name).read_text().split())


def test_the_demo() -> None:
    cells = pd.read_csv(PUBLISHED / "demo/cells.csv").query("benchmark == 'toy_chain'")
    grid = cells.query("policy == 'dynts' and budget == 128")
    best = grid.groupby("model")["pass_at_1"].max()
    assert grid.groupby("model").size().tolist() == [20, 20]
    assert set(grid["decision"]) == {"worse"}
    assert set(cells.loc[cells["policy"] == "full", "pass_at_1"].round(2)) == {0.96}
    said_so = f"the best of 20 settings answers {best['toy_qwen']:.0%} with Toy-Qwen and {best['toy_llama']:.0%}"
    assert said_so in said("README.md")


def short(number: float) -> str:
    """A correlation as the pages write it."""
    return f"{number:.2f}".lstrip("0")


def test_what_replayed_texts_tell() -> None:
    table = pd.read_csv(PUBLISHED / "replay/correlations.csv").query("number == 'kl'")
    whole = table[table["cohort"] == "all"].groupby("experiment")["spearman"]
    low, high = whole.min(), whole.max()
    methods = ["methods", "methods_on_top", "methods_pinned", "regimes"]
    demo = f"{short(low['demo'])} to {short(high['demo'])}"
    others = f"{short(low[methods].min())} to {short(high[methods].max())}"
    near = table[table["cohort"] == "near"]["spearman"].dropna()
    assert (whole.size()["demo"], whole.size()[methods].sum(), len(near)) == (8, 28, 7)
    report = page("docs/statistics.md")
    assert f"is {demo} in the demo's eight panels, {others} in 28 panels of methods" in report
    assert f"and {short(low['bytes_toy'])} and {short(high['bytes_toy'])} in panels of rows and bits" in report
    assert f"({short(near.min())} to {short(near.max())} in the seven panels" in report
    assert f"(Spearman {demo})" in said("README.md")
    assert f"over 31 methods {others}" in said("README.md")
    ranks = pd.read_csv(PUBLISHED / "replay/cells.csv").query("experiment == 'demo' and decision == 'safe'")["rank"]
    assert sorted(ranks) == [6, 8, 9, 11]
    cost = pd.read_csv(PUBLISHED / "replay/cost.csv")
    share = cost.filter(like="replay").median(axis=1) / cost["decoding_cpu_seconds"]
    assert sorted((1 / share).round()) == [15, 16]
    assert sorted((share * 100 / 20).round(2)) == [0.31, 0.32]
    assert "took about 1/16 of the CPU seconds of decoding 100 problems" in said("README.md")


def test_what_a_screen_finds() -> None:
    table = pd.read_csv(PUBLISHED / "replay/screening.csv").set_index(["experiment", "rule"])
    assert (table.loc["all", "holding"] == 11).all()
    assert (table.loc["all", "within_5_points"] == 55).all()
    for rule, lost, near, tokens in (("loss:0.005", 0, 4, 0.10), ("loss:0.002", 1, 8, 0.08), ("8", 2, 10, 0.32)):
        row = table.loc["all", f"screen={rule}"]
        assert (11 - row["holding_found"], 55 - row["within_5_points_found"]) == (lost, near)
        assert row["share_of_tokens"] == pytest.approx(tokens, abs=0.005)
    assert table.loc[("demo", "screen=loss:0.005"), "share_of_tokens"] == pytest.approx(0.35, abs=0.005)
    halves = pd.read_csv(PUBLISHED / "replay/halves.csv").set_index("factor")["holding_screened_out"]
    assert halves.round(2).to_dict() == {1: 0.1, 2: 0.04, 4: 0.02}
    text = page("docs/statistics.md")
    assert "leaves out none of the eleven and four of the 55, and decodes 10% of the grids' tokens (35% in" in text
    assert "`screen=loss:0.002` leaves out one and eight, for 8% of the tokens" in text
    assert "`screen=8` leaves out two and ten, for 32%" in text
    assert "left out 10% of the settings that are safe in the other half" in text
    assert "twice this bound left out 4%" in text


def test_a_few_decoded_texts_beside_replayed_ones() -> None:
    table = pd.read_csv(PUBLISHED / "replay/few_texts.csv")
    medians = table.groupby(["way", "texts"])[["both_draws", "other_draw"]].median()
    rows = re.findall(
        r"\| (\d+) (decoded|replayed)[^|]* \| (\S+) \| (\S+) \|", (PUBLISHED / "replay/README.md").read_text()
    )
    assert len(rows) == len(medians) == 6
    for texts, way, *numbers in rows:
        assert [short(number) for number in medians.loc[(way, int(texts))]] == numbers
    both = {key: short(number) for key, number in medians["both_draws"].items()}
    words = f"ranks the settings by {both['decoded', 6]}, decoding 20 by {both['decoded', 20]} and 40 by"
    assert f"{words} {both['decoded', 40]}, where 20 replayed ones do by {both['replayed', 20]} (med" in said(
        "README.md"
    )
    # All problems with one draw are one choice. The cells hold Pass@1 with both draws, and pass@2 of two draws.
    replayed = table[table["way"] == "replayed"].set_index(["model", "benchmark"])["both_draws"]
    known = pd.read_csv(PUBLISHED / "replay/correlations.csv").query(
        "experiment == 'demo' and cohort == 'all' and number == 'kl'"
    )
    assert replayed.to_dict() == known.set_index(["model", "benchmark"])["spearman"].to_dict()
    # What 20 replayed texts cost is what six decoded ones do.
    cost = pd.read_csv(PUBLISHED / "replay/cost.csv")
    assert ((cost.filter(like="replay").median(axis=1) / cost["decoding_cpu_seconds"] * 100).astype(int) == 6).all()


def test_the_answers_of_the_few_texts_are_those_of_the_cells() -> None:
    html = (PUBLISHED / "demo/report.html").read_text()
    found = re.search(r'id="outcome-data">(.*?)</script>', html, re.DOTALL)
    assert found
    right = {cell["id"]: cell["outcomes"].count("c") / 150 for one in json.loads(found[1]) for cell in one["cells"]}
    cells = pd.read_csv(PUBLISHED / "demo/cells.csv").set_index("cell_id")["pass_at_1"]
    assert right == pytest.approx(cells.to_dict())


def test_a_real_model_ranks_the_methods_otherwise() -> None:
    cells = pd.read_csv(PUBLISHED / "methods_smol/cells.csv").set_index("policy")
    text = said("README.md")
    assert cells["pass_at_1"].sort_values().index[-2:].tolist() == ["h2o", "full"]
    assert f"{cells.loc['full', 'pass_at_1']:.0%} of 32 new problems" in text
    assert f"H2O is the first ({cells.loc['h2o', 'pass_at_1']:.0%})" in text
    share = cells.loc["h2o", "kv_bytes_mean"] / cells.loc["full", "kv_bytes_mean"]
    assert f"H2O at 16 bits has {cells.loc['h2o', 'pass_at_1']:.0%} at {share:.0%}" in text
    pinned = pd.read_csv(PUBLISHED / "protection/smol/scores.csv").pivot(
        index="policy", columns="protected", values="pass_at_1"
    )
    assert pinned.loc["h2o"].tolist() == [0] * 8
    both = pd.concat([cells["pass_at_1"], pinned.mean(axis=1)], axis=1, join="inner")
    toy = pd.read_csv(PUBLISHED / "protection/scores.csv").query("model == 'Toy-Qwen' and protected == 'nothing'")
    beside = pd.concat([pinned["nothing"], toy.set_index("policy")["pass_at_1"]], axis=1)
    orders = [one.corr(method="spearman").iloc[0, 1] for one in (both, beside)]
    assert (len(both), len(beside.dropna())) == (13, 14)
    assert f"correlate by {short(orders[0])} (means" in text
    assert f"with nothing protected by {short(orders[1])};" in text


def test_what_protection_gives_and_costs() -> None:
    text = said("README.md")
    shares = pd.read_csv(PUBLISHED / "protection/variance.csv")
    policy = sorted(float(one.split()[0]) for one in shares["policy %"])
    assert f"the scorer explains {policy[0]:.0f} and {policy[1]:.0f}% of the variance" in text
    assert max(float(one.split()[0]) for one in shares["protection %"]) < 1
    scores = pd.read_csv(PUBLISHED / "protection/scores.csv").query("policy == 'dynts'")
    table = 100 * scores.pivot(index="model", columns="protected", values="pass_at_1")
    gains = sorted(table["question+sinks+window"] - table["nothing"])
    assert gains == [47.5, 63.75]
    assert "DynTS gains 48 and 64 points by it" in text
    smol = pd.read_csv(PUBLISHED / "protection/smol/scores.csv").pivot(
        index="policy", columns="protected", values="pass_at_1"
    )
    costs = 100 * (smol["nothing"] - smol["question"])
    # The four whose difference is shown, by the table of the page.
    rows = re.findall(
        r"^\| ([\w-]+) \| [\d.]+ \| -\S+ \([^)]*\), p (\S+) \|",
        (PUBLISHED / "protection/smol/README.md").read_text().split("## KL")[0],
        re.M,
    )
    assert {name for name, p in rows if float(p) < 0.05} == {"CAOTE", "G-KV", "KeyDiff", "LazyEviction"}
    four = costs[["caote", "gkv", "keydiff", "lazyeviction"]]
    assert f"costs four scorers {four.min():.0f} to {four.max():.0f} points" in text


def test_where_the_order_changes() -> None:
    text, orders = said("README.md"), {}
    for name in ("regimes", "regimes_larger"):
        table = pd.read_csv(PUBLISHED / "regimes" / f"{name}.csv").query("policy != 'full'")
        for model, rows in table.groupby("model"):
            orders[name, model] = short(rows["pass_at_1_once"].corr(rows["pass_at_1_again"], method="spearman"))
    small = [orders["regimes", f"toy_{name}_restated"] for name in ("llama", "qwen")]
    large = [orders["regimes_larger", f"toy_{name}_restated"] for name in ("llama", "qwen")]
    assert f"(rank correlations {small[0]} and {small[1]}, at 211 rows {large[0]} and {large[1]})" in text
    table = pd.read_csv(PUBLISHED / "regimes/regimes_larger.csv").set_index(["model", "policy"])["difference"]
    few = pd.read_csv(PUBLISHED / "regimes/regimes.csv").set_index(["model", "policy"])
    qwen, alone = table["toy_qwen_restated"], few.loc[("toy_qwen_restated", "random")]
    assert f"gain {100 * qwen['random']:.0f} points ({100 * qwen['random_head']:.0f} per head)" in text
    assert f"nothing, {100 * alone['difference']:.0f} ± {100 * alone['difference_se']:.0f})" in text
    assert f"DynTS loses {-100 * table['toy_llama_restated', 'dynts']:.0f} there" in text


def test_the_price_of_an_answer() -> None:
    text = said("README.md")
    for name, problems in (("toy_chain_12", 12), ("toy_chain_100", 100)):
        told = json.loads((PUBLISHED / f"answer/{name}.json").read_text())
        seconds = {way: figures["cpu_seconds"] for way, figures in told["figures"].items()}
        times = seconds["paper"] / seconds["sequential"]
        assert told["problems"] == problems
        assert f"{times:.1f} times ({problems} problems" in text or f"{times:.0f} times ({problems} problems" in text
        assert {label for one in told["each_round"]["paper"] for label in one["labels"].values()} == {"loses"}


def test_rows_and_bits_on_the_front_pages() -> None:
    toys = pd.read_csv(PUBLISHED / "bits/cells.csv")
    full = toys[toys["policy"] == "full"].set_index("model")["pass_at_1"]
    dynts = toys[toys["policy"] == "dynts"]
    losses = dynts["model"].map(full) - dynts["pass_at_1"]
    text = said("README.md")
    assert f"(DynTS) loses {100 * losses.min():.0f} points and more at each size tried" in text
    cells = pd.read_csv(PUBLISHED / "bytes_smol/cells.csv").set_index(["policy", "variant"])
    share = cells["kv_bytes_mean"] / cells["kv_bytes_mean"].max()
    four, plain = (("full_packed", f"bits=4, scheme={scheme}") for scheme in ("rotated", "plain"))
    assert share[four] == pytest.approx(share[plain], abs=0.001)
    words = (
        f"answer {cells.loc[four, 'pass_at_1']:.0%} of 32 problems at {share[four]:.0%} of the bytes (full cache 94%;"
    )
    error = cells.loc[plain, "se"]
    assert f"{words} packed plainly {100 * cells.loc[plain, 'pass_at_1']:.0f} ± {100 * error:.0f}% at the same" in text
    eight = cells.loc[("dynts", "bits=8")].sort_values("keep_ratio").iloc[-1]
    eight_share = eight["kv_bytes_mean"] / cells["kv_bytes_mean"].max()
    assert f"at 8 bits {eight['pass_at_1']:.0%} at {eight_share:.0%};" in text
    assert eight["kept_rows"] == pytest.approx(0.81, abs=0.005)
    assert set(cells.index.get_level_values("policy")) == {"full", "full_packed", "dynts"}


def answers(folder: str) -> dict[tuple[str, str], np.ndarray]:
    """The grades of a published run by policy and bits, [problems, draws], recomputed from its answers.csv.gz."""
    rows = pd.read_csv(PUBLISHED / folder / "answers.csv.gz", dtype=str)
    names = pd.read_csv(PUBLISHED / folder / "cells.csv", dtype=str).set_index("cell_id")[["policy", "bits"]]
    return {
        (names.loc[cell, "policy"], str(names.loc[cell, "bits"])): np.array([[*map(float, one)] for one in own])
        for cell, own in rows.groupby("cell_id")["grades"]
    }


def test_the_labels_of_a_head_from_the_grades_of_each_answer() -> None:
    """The table of results/published/labels, recomputed from answers.csv.gz: means over 300 problems."""
    rows = pd.read_csv(PUBLISHED / "labels/answers.csv.gz", dtype=str)
    cells = pd.read_csv(PUBLISHED / "labels/cells.csv").set_index("cell_id")
    rows = rows.join(cells[["model", "benchmark", "policy", "keep_ratio"]], on="cell_id")
    rows["mean"] = [np.mean([*map(int, grades)]) for grades in rows["grades"]]
    keys = ["model", "keep_ratio", "policy", "benchmark", "problem_id"]
    means = rows[rows["policy"] != "full"].set_index(keys)["mean"].unstack(["model", "keep_ratio", "policy"])
    assert len(means) == 300
    table = re.findall(r"^\| `(\w+)` \| (.*) \|$", (PUBLISHED / "labels/README.md").read_text(), re.M)
    assert {name for name, _ in table} == {*cells["policy"]} - {"full"}
    for policy, line in table:
        told = [re.findall(r"[-+]?[\d.]+", cell) for cell in line.split(" | ")]
        for place, setting in enumerate((model, ratio) for model in ("toy_qwen", "toy_llama") for ratio in (0.3, 0.5)):
            own, head = means[(*setting, policy)], means[(*setting, "dynts_far_max")]
            compared = [own] if policy == "dynts_far_max" else [own, own - head]
            for found, numbers in zip(compared, told[2 * place : 2 * place + 2], strict=False):
                assert float(numbers[0]) == pytest.approx(100 * found.mean(), abs=0.051), (policy, setting)
                assert float(numbers[1]) == pytest.approx(100 * found.sem(), abs=0.11), (policy, setting)


def test_the_cache_types_of_llama_cpp() -> None:
    served, own = answers("servers"), answers("servers_own")
    full, ours = served["full", "nan"], own["full", "16.0"]
    told = re.findall(
        r"^\| (q\d_0) \| ([\d.]+) \| .* \| (.*) \((.*) to (.*)\) \| (\d+) \| (\d+) \| (.*) \|$",
        (PUBLISHED / "servers/README.md").read_text(),
        re.M,
    )
    assert [name for name, *_ in told] == ["q8_0", "q4_0"]
    cells = {name: served[name.partition("_")[0], "nan"] for name, *_ in told}
    verdicts = decide_grid(cells, full, margin=0.05, population="like_these")
    for name, size, points, low, high, lost, won, label in told:
        scores = served[name.partition("_")[0], "nan"]
        found = verdicts[name]
        assert found.label == label
        numbers = [100 * number for number in (found.difference, found.low, found.high)]
        assert [float(points), float(low), float(high)] == pytest.approx(numbers, abs=0.06)
        assert ((scores < full).sum(), (scores > full).sum()) == (int(lost), int(won))
        sizes = pd.read_csv(PUBLISHED / "servers/cells.csv").set_index("policy")["declared_bytes"]
        assert sizes[name.partition("_")[0]] == float(size)
    assert f"[q8_0 is safe, q4_0 loses {told[1][2].strip('-')} points]" in page("README.md")
    own_page, front = said("servers/README.md"), said("README.md")
    assert f"differ on {(full != ours).sum()} of {len(full)}" in own_page
    assert f"differ on {(full != ours).sum()} of {len(full)}" in front
    assert f"(+{float(told[0][2]):.1f} points on {len(full)} problems), q4_0 is worse ({told[1][2]} points" in front
    four = own["full_packed", "4.0"]
    assert f"({(four < ours).sum()} lost, {(four > ours).sum()} won)" in own_page
    assert f"{100 * (four - served['q4', 'nan']).mean():.1f} points above q4_0" in own_page
    assert decide(four, ours, margin=0.05, population="like_these").label == "unclear"


def test_the_rotation_of_llama_cpp() -> None:
    found, before = answers("servers_rotation"), answers("servers")
    full = found["full", "nan"]
    told = re.findall(
        r"^\| (control|q\d\w*) \| ([\d,]+) \| ([\d.]+) ± .* \| (\S+) \((.*) to (.*)\) "
        r"\| (\d+) \| (\d+) \| \d+ \| (\w+) \| (.*) \|$",
        (PUBLISHED / "servers_rotation/README.md").read_text(),
        re.M,
    )
    cells = {name: found[name, "nan"] for name, *_ in told}
    control = cells.pop("control")
    assert [*cells] == ["q8", "q8_unrotated", "q4", "q4_unrotated"]
    verdicts = decide_grid(cells, full, margin=0.05, population="like_these")
    verdicts |= decide_grid({"control": control}, full, margin=0.05, population="like_these")
    tests = {name: paired_test(cell, full, "like_these") for name, cell in cells.items()}
    surely = beyond_control(tests, cells, full, control)
    sizes = pd.read_csv(PUBLISHED / "servers_rotation/cells.csv").set_index("policy")["measured_bytes"]
    for name, size, score, points, low, high, lost, won, label, beyond in told:
        scores, verdict = found[name, "nan"], verdicts[name]
        numbers = [scores.mean(), verdict.difference, verdict.low, verdict.high]
        assert [*map(float, (score, points, low, high))] == pytest.approx([100 * one for one in numbers], abs=0.06)
        assert ((scores < full).sum(), (scores > full).sum(), verdict.label) == (int(lost), int(won), label)
        assert beyond == ("–" if name == "control" else "yes" if name in surely else "no")
        assert size == f"{sizes[name]:,.0f}"
    rotated, plain = cells["q4"], cells["q4_unrotated"]
    own_page = said("servers_rotation/README.md")
    assert f"worth {100 * (rotated - plain).mean():.1f} points of q4_0" in own_page
    assert f"({(plain < rotated).sum()} answers lost without it, {(plain > rotated).sum()} won)" in own_page
    assert (rotated == before["q4", "nan"]).all()
    assert f"Those of f16 differ on {(full != before['full', 'nan']).sum()}," in own_page
    lost = [f"{-100 * verdicts[name].difference:.1f}" for name in ("q4", "q4_unrotated")]
    assert f"q4_0 loses {lost[0]} points with it and {lost[1]} without, q8_0 nothing either way" in said("README.md")
    assert f"q4_0 loses {lost[1]} points" in said("servers/README.md")


def test_windows_on_the_front_page() -> None:
    dynts = pd.read_csv(PUBLISHED / "hybrid/hybrid.csv").set_index("policy").loc["dynts"]
    words = f"({dynts['toy_qwen_windows']:.0%}, of {dynts['toy_qwen_windows_full']:.0%} with the full cache)"
    assert f"only DynTS is shown to stay above chance there {words}" in said("README.md")


def test_the_paper_grids_on_the_front_page() -> None:
    p = pd.read_csv(PUBLISHED / "paper_grids/slopes.csv").set_index("cells")["p"]
    words = f"(p {p['all grids']:.3f} for the slope, {short(p['all grids without keep ratio 0.1'])} without 0.1)"
    assert words.replace("0.0", ".0", 1) in said("README.md")
    sure = pd.read_csv(PUBLISHED.parent / "reference/dynts_heatmaps.csv").groupby("model")["sure"]
    assert sure.apply(lambda rows: (rows == "no").sum()).to_dict() == {"r1_qwen_7b": 80, "r1_llama_8b": 40}
    assert "all 80 cells of R1-Qwen" in said("paper_grids/README.md")
    grids = pd.read_csv(PUBLISHED / "paper_grids/grids.csv").query("benchmark.str.startswith('AIME')")
    spread = f"{grids['range_low'].min():.0f} to {grids['range_high'].max():.0f} points"
    assert f"20 equal cells of 30 problems with five draws spread over {spread}" in page("docs/faq.md")
    alike = grids.groupby("concentration")["range_high"].mean()
    assert alike.is_monotonic_increasing


def test_the_policies_page() -> None:
    cells = pd.read_csv(PUBLISHED / "methods/cells.csv")
    rows = cells.groupby("policy")["mean_length_after"].mean()
    means = cells.groupby(["model", "policy"])["pass_at_1"].mean()
    question = pd.read_csv(PUBLISHED / "methods/question.csv").set_index(["model", "policy"])
    text = page("results/published/gallery.md")
    order = {model: means[model][rows < 150].sort_values(ascending=False) for model in ("toy_qwen", "toy_llama")}
    qwen, llama = order["toy_qwen"], order["toy_llama"]
    assert (qwen.index[:2].tolist(), set(llama.index[:2])) == (["dynts", "lagkv_16"], {"lagkv_16", "gkv"})
    assert f"pinned ({qwen['dynts']:.1%}; LagKV is next with {qwen['lagkv_16']:.1%})" in text
    assert f"lead ({llama['gkv']:.1%}; R-KV {llama['rkv']:.1%}, DynTS {llama['dynts']:.1%})" in text
    assert llama["gkv"] == pytest.approx(llama["lagkv_16"])
    assert f"R-KV has {question.loc[('Toy-Llama', 'rkv'), 'pass_pinned']:.1%} if its question is pinned too" in text
    assert {f"{means[model, 'rpc']:.1%}" for model in order} == {"60.8%"}
    assert "RPC, with a third more cached tokens on average, has 60.8% on both" in text
    length = cells[cells["model"] == "toy_qwen"].groupby("policy")["mean_cache_length"].mean()
    assert length["rpc"] / length["dynts"] == pytest.approx(1.33, abs=0.03)
    free = sorted(question["pass_free"].xs("dynts", level="policy"))
    assert f"the level of chance ({100 * free[0]:.0f} and {free[1]:.0%})" in text


@pytest.mark.slow
def test_the_plan_of_the_report_page() -> None:
    text = (PUBLISHED.parents[1] / "docs/report.md").read_text()
    rows = re.findall(r"^\| (\d+) × (\d+) \| (\d+)% \| (\d+)% \|$", text, re.M)
    assert len(rows) == 8
    for problems, draws, quarter, tenth in rows:
        found = [100 * power(int(problems), int(draws), differ) for differ in (0.25, 0.1)]
        assert [float(quarter), float(tenth)] == pytest.approx(found, abs=0.5)
    found = re.search(
        r"30 problems need (\d+) draws \(25% differ\) or (\d+) draws \(10% differ\), "
        r"and 198 problems need (\d+) or (\d+) draws",
        " ".join(text.split()),
    )
    assert found
    for problems, differ, draws in zip((30, 30, 198, 198), (0.25, 0.1) * 2, map(int, found.groups()), strict=True):
        assert power(problems, draws, differ) >= 0.95 > power(problems, draws - 1, differ)


def test_the_simulated_searches() -> None:
    table = pd.read_csv(PUBLISHED / "statistics.csv")
    worst = table.groupby("quantity")["rate"].max()
    assert 0.2 < worst["any wrong holds of 20 cells"] < 0.25
    assert "up to one in four has a false *safe*" in page("docs/report.md")
    assert worst["wrong recommendation of 20 cells"] <= 0.05
    assert worst["wrong recommendation of 20 cells, in rounds"] <= 0.05
    assert "wrong in at most 1 of 20 searches" in page("docs/report.md")
    assert f"{0.95**30:.0%} of runs with 30 problems" in page("docs/statistics.md")


def test_the_texts_that_were_looked_into() -> None:
    table = pd.read_csv(PUBLISHED / "trace/retention_answer.csv").set_index("policy")["pass1"]
    dynts, h2o = (table[f"{name} 0.3 / 48, budget 128"] for name in ("DynTS", "H2O"))
    assert f"DynTS keeps {dynts:.1%} of 40 problems right and H2O {h2o:.1%}" in page("results/published/gallery.md")


def test_sizes_of_files_and_commands() -> None:
    sizes = json.loads((PUBLISHED / "sizes.json").read_text())
    report, judge = sizes["report of 200,000 completions"], sizes["judge of two files of 200,000 rows"]
    words = f"made in {report['cpu_seconds']:.0f} CPU seconds with {report['peak_gb']:.1f} GB; an export of"
    text = page("docs/limits.md")
    assert f"{words} a million rows in {sizes['export of 1,000,000 rows']['cpu_seconds']:.0f} CPU seconds" in text
    assert sizes["sweep of 2,000 cells, ulimit -n 256"]["code"] == 0
    words = f"200,000 rows took {judge['cpu_seconds']:.0f} CPU seconds and {judge['peak_gb']:.2f} GB"
    assert words in text
    weights = PUBLISHED.parents[1] / "harness/toy/weights"
    adapter = (weights / "smollm2_reasons/adapter_model.safetensors").stat().st_size
    assert f"a LoRA adapter of {adapter / 1e6:.0f} MB" in page("docs/models.md")
    stored = pd.read_csv(PUBLISHED / "methods_smol/cells.csv")["weight_bytes"].iloc[0]  # in bfloat16
    assert f"in float32 ({round(2 * stored / 1e6, -1):.0f} MB in" in page("docs/models.md")


def test_a_toy_question_is_nearly_half_of_the_demos_budget() -> None:
    cells = pd.read_csv(PUBLISHED / "demo/cells.csv").query("policy == 'full'")
    question = (cells["mean_peak_length"] - cells["mean_tokens"]).mean()
    budget = yaml.safe_load((PUBLISHED.parents[1] / "conf/experiment/demo.yaml").read_text())["policy"]["budget"]
    assert question / budget == pytest.approx(0.45, abs=0.02)
    assert "nearly half as long as the demo's trigger" in page("docs/sweep.md")


def test_the_traces_of_r1() -> None:
    table = pd.read_csv(PUBLISHED / "replay/r1_traces.csv")
    assert table.groupby("rows")["policy"].nunique().tolist() == [19, 19, 19]
    assert set(table["texts"]) == {14}


def test_steps_on_an_h100() -> None:
    before, after = (
        json.loads((PUBLISHED / "gpu" / f"h100_{code}.json").read_text()) for code in ("aa6d3c2", "243d065")
    )
    rows = {(row["policy"], row["slots"], row["invariant"]): row for row in after["step"]["rows"]}
    assert {name: round(row["step_ms"], 2) for name, row in rows.items()} == {
        ("window", 64, False): 12.93,
        ("dynts", 64, False): 13.01,
        ("h2o", 64, False): 13.9,
        ("window", 64, True): 14.06,
        ("full", 57, False): 16.82,
        ("window", 187, False): 25.24,
        ("window", 187, True): 28.08,
    }
    over = {name: row["step_ms"] / row["floor_ms"] for name, row in rows.items()}
    assert round(over["window", 64, False], 1) == 1.3
    assert (round(min(over.values()), 1), round(max(over.values()), 1)) == (1.2, 1.4)
    price = [rows["window", slots, True]["step_ms"] / rows["window", slots, False]["step_ms"] for slots in (64, 187)]
    assert [round(ratio, 2) for ratio in price] == [1.09, 1.11]
    bits = [after["bits"][f"slots_{slots}"] for slots in (7, 1)]
    assert sum(one["texts"] for one in bits) == 74
    assert not any(one["logits_differ"] + one["texts_differ"] for one in bits)
    assert before["bits"]["slots_7"]["logits_differ"] == 22
    for pairs in after["toys"]["same"].values():
        assert all(one["same"] == one["texts"] == 120 for one in pairs.values())


def equal_bytes(name: str, shape: tuple[int, int]) -> pd.DataFrame:
    """The cells of a run at equal bytes, after the page's table was recomputed from `shape` answers of each cell."""
    folder = PUBLISHED / name
    cells = pd.read_csv(folder / "cells.csv").set_index("cell_id")
    rows = pd.read_csv(folder / "answers.csv.gz", dtype=str)
    letters = rows.pivot(index="cell_id", columns="problem_id", values="grades").fillna("-" * shape[1])
    value = {"1": 1.0, "0": 0.0, "-": np.nan}
    grades = {cell: np.array([[*map(value.get, one)] for one in own], float) for cell, own in letters.iterrows()}
    assert set(grades) == set(cells.index)
    assert all(one.shape == shape for one in grades.values())
    cells["mean"] = [pd.DataFrame(grades[cell]).mean(axis=1).mean() for cell in cells.index]
    assert list(cells["mean"]) == pytest.approx(list(cells["pass_at_1"]))
    full = cells[cells["policy"] == "full"].iloc[0]
    cells["share"] = cells["kv_bytes_mean"] / full["kv_bytes_mean"]
    told = re.findall(r"^\| (?!setting|---)(.*) \|$", (folder / "README.md").read_text(), re.M)
    assert len(told) == len(cells)
    cells = cells.sort_values(["share", "pass_at_1"], ascending=False, kind="stable")
    for line, cell in zip(told, cells.index, strict=True):
        _, _, _, share, _, answered, score, compared = line.split(" | ")
        assert int(answered) == (~np.isnan(grades[cell])).sum()
        assert share == f"{cells['share'][cell]:.1%}"
        assert float(score.split()[0]) == pytest.approx(100 * cells["mean"][cell], abs=0.051)
        if cells["policy"][cell] != "full":
            both = grades[cell] - grades[full.name]
            differences = np.nanmean(both[~np.isnan(both).all(1)], axis=1)
            count = len(differences)
            half = stats.t.ppf(0.975, count - 1) * differences.std(ddof=1) / np.sqrt(count)
            numbers = [float(one) for one in re.findall(r"[-+][\d.]+", compared)]
            exact = np.clip([differences.mean(), differences.mean() - half, differences.mean() + half], -1, 1)
            assert numbers == pytest.approx([100 * one for one in exact], abs=0.051)
    return cells


def stored_as(cells: pd.DataFrame, words: str) -> pd.Series:
    """The cell with all rows that are stored so."""
    variant = cells["variant"].fillna("")
    return cells[(cells["policy"] == "full_packed") & variant.str.contains(words)].iloc[0]


def test_fp8_packing_and_evictions_at_equal_bytes() -> None:
    """The table of results/published/equal_bytes recomputed from the answers, and the sentences from the table."""
    cells = equal_bytes("equal_bytes", (120, 2))
    full = cells[cells["policy"] == "full"].iloc[0]
    fp8, four, kivi = (stored_as(cells, one) for one in ("scheme=fp8", "bits=4, scheme=rotated", "scheme=kivi"))
    evicted = cells[~cells["policy"].isin(["full", "full_packed"])]
    half = evicted[evicted["share"].between(0.45, 0.55)].nlargest(1, "mean").iloc[0]
    quarter = evicted[evicted["share"].between(0.2, 0.3)].nlargest(1, "mean").iloc[0]
    taken = (
        f"fp8 at {fp8['share']:.0%} of the bytes answers {fp8['mean']:.1%} and 4 bits at {four['share']:.0%} "
        f"{four['mean']:.1%}, where the full cache answers {full['mean']:.1%}; the best eviction answers "
        f"{half['mean']:.1%} at half of the bytes and {quarter['mean']:.1%} at a quarter"
    )
    assert taken in said("equal_bytes/README.md")
    assert taken in said("README.md")
    assert min(fp8["mean"], four["mean"], kivi["mean"]) > half["mean"]


def test_fp8_packing_and_evictions_at_equal_bytes_on_a_language_model() -> None:
    cells = equal_bytes("equal_bytes_smol", (60, 1))
    full = cells[cells["policy"] == "full"].iloc[0]
    words = (
        "bits=8, scheme=rotated",
        "fp8, scale=none",
        "fp8, scale=tensor",
        "fp8, scale=token",
        "bits=4, scheme=rotated",
    )
    eight, fp8, layer, token, four = (stored_as(cells, one) for one in words)
    kivi, kvarn, two = (stored_as(cells, one) for one in ("scheme=kivi", "scheme=kvarn", "bits=4/2, scheme=rotated"))
    evicted = cells[~cells["policy"].isin(["full", "full_packed"])]
    best = evicted.nlargest(1, "mean").iloc[0]
    half = evicted[evicted["share"].between(0.45, 0.55)].nlargest(1, "mean").iloc[0]
    assert (best["policy"], half["policy"]) == ("h2o", "rkv")
    taken = (
        f"All rows at 8 bits, rotated, answer {eight['mean']:.1%} with {eight['share']:.0%} of the bytes, as the full "
        f"cache does ({full['mean']:.1%}); fp8 answers {fp8['mean']:.1%} with {fp8['share']:.0%}, and 4 bits "
        f"{four['mean']:.1%} with {four['share']:.0%}; the best eviction answers {best['mean']:.1%} with "
        f"{best['share']:.0%}"
    )
    said_here = said("equal_bytes_smol/README.md")
    assert taken in said_here
    assert taken.replace("All", "all") in said("README.md")
    assert f"(R-KV) answers {half['mean']:.1%}" in said_here
    assert f"KIVI's 2 bits ({kivi['mean']:.1%}) answers {two['mean']:.1%} or more" in said_here
    lost = [int(one["regressions"]) for one in (fp8, layer, token, eight, kvarn, four, two)]
    assert lost == [3, 2, 1, 0, 6, 6, 7]
    assert not any(int(one["gains"]) for one in (fp8, layer, token, eight, kvarn, four, two))
    assert full["mean"] == 57 / 60
    kept = evicted[evicted["question"] == "on_top"].set_index(["policy", "variant"])["mean"]
    for policy, told in (("h2o", "H2O 45.0 and 41.7%"), ("rkv", "R-KV 20.0 and 26.7%")):
        plain, packed = (float(kept[policy].filter(regex=one).iloc[0]) for one in ("^$|bits=16", "fp8"))
        assert [100 * plain, 100 * packed] == pytest.approx([*map(float, re.findall(r"\d+\.\d", told))], abs=0.051)
        assert told in said_here


# A line of a table: name, rows, Pass@1, lost, won, difference, its ends, label.
COMPARED = r"^\| (\S.*) \| (\S+) \| (\S+) \| (\d+), (\d+) \| (.+) \((.+) to (.+)\) \| (.+) \|$"


def gsm8k_grades(run: str, heading: str) -> pd.DataFrame:
    """Grades by setting and problem of a further run; the page's table below `heading` says what they say."""
    folder = PUBLISHED / "gsm8k"
    rows = pd.read_csv(folder / f"answers_{run}.csv.gz", dtype=str)
    grades = rows.pivot(index="cell_id", columns="problem_id", values="grades").astype(float)
    names = {}
    for row in pd.read_csv(folder / f"settings_{run}.csv").itertuples():
        names[row.cell_id] = row.policy if row.policy == "full" else f"{policy_title(row.policy)} {row.keep_ratio:g}"
        if row.policy == "full_packed":
            names[row.cell_id] = f"all rows, packed, {row.stored}"
    grades = grades.rename(index=names)
    assert grades.notna().all(axis=None)
    full = grades.loc["full"].to_numpy()[:, None]
    settings = {name: grades.loc[name].to_numpy()[:, None] for name in grades.index if name != "full"}
    decisions = decide_grid(settings, full, population="like_these")
    section = (folder / "README.md").read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = re.findall(COMPARED, section, re.M)
    assert {name for name, *_ in lines} == decisions.keys()
    for name, _, score, lost, won, *interval, label in lines:
        change = grades.loc[name] - grades.loc["full"]
        assert (int(lost), int(won)) == ((change < 0).sum(), (change > 0).sum())
        decision = decisions[name]
        numbers = [grades.loc[name].mean(), change.mean(), decision.low, decision.high]
        assert [float(score), *map(float, interval)] == pytest.approx([100 * number for number in numbers], abs=0.051)
        assert label == decision.label
    assert f"| full cache | all | {100 * grades.loc['full'].mean():.1f} |" in section
    return grades


def test_more_problems_of_gsm8k() -> None:
    """The page's table recomputed from the answers."""
    grades = gsm8k_grades("power", "More problems")
    assert grades.shape[1] == 384
    full = grades.loc["full"].to_numpy()[:, None]
    p_values = {
        "all rows, packed, bits=4, scheme=kivi": 0.0015,
        "all rows, packed, bits=8, scheme=rotated": 0.017,
        "all rows, packed, bits=8/4, scheme=rotated": 0.019,
        "window 0.7": 0.0022,
    }
    for name, p_value in p_values.items():
        holds = decide(grades.loc[name].to_numpy()[:, None], full, population="like_these").p_holds
        assert holds == pytest.approx(p_value, rel=0.04)
        assert (holds < 0.025 / 14) == ("kivi" in name)


def test_dynts_on_gsm8k() -> None:
    """The page's table and its sign tests recomputed from the answers."""
    grades = gsm8k_grades("dynts", "DynTS beside its rivals")
    assert grades.shape == (13, 96)
    page = (PUBLISHED / "gsm8k" / "README.md").read_text()
    worse = set(re.findall(r"^\| (\S+) 0\.[35] .* \| worse \|$", page.split("## DynTS")[1], re.M))
    assert worse == {"random", "H2O"}
    counts, p_values = {}, {}
    for ratio in (0.3, 0.5):
        for rival in ("random", "H2O", "window", "R-KV"):
            change = grades.loc[f"DynTS {ratio}"] - grades.loc[f"{rival} {ratio}"]
            won, lost = int((change > 0).sum()), int((change < 0).sum())
            counts[rival, ratio] = won, lost
            p_values[rival, ratio] = stats.binomtest(won, won + lost).pvalue
    adjusted = dict(zip(p_values, multipletests([*p_values.values()], method="holm")[1], strict=True))
    better = {pair for pair, p in adjusted.items() if p < 0.05}
    assert better == {("random", 0.5), ("H2O", 0.5), ("H2O", 0.3)}
    text = " ".join(page.split())
    for pair in better:
        won, lost = counts[pair]
        rival = pair[0].replace("random", "random rows")
        p_value = f"{adjusted[pair]:.3f}".removeprefix("0")
        assert re.search(rf"wins {won} and loses {lost} beside {rival} \(p = {p_value}\)", text)


def test_the_policies_on_gsm8k() -> None:
    """The page's table recomputed from the answers; interval and label are those of docs/statistics.md."""
    folder = PUBLISHED / "gsm8k"
    rows = pd.read_csv(folder / "answers_drawn.csv.gz", dtype=str)
    grades = rows.pivot(index="cell_id", columns="problem_id", values="grades").astype(float)
    cells = pd.read_csv(folder / "settings.csv").set_index("cell_id")
    grades = grades.loc[cells.index]
    assert grades.shape == (21, 96)
    assert grades.notna().all(axis=None)
    [full] = cells.index[cells["policy"] == "full"]
    scores = {cell: grades.loc[cell].to_numpy()[:, None] for cell in grades.index}
    decisions = decide_grid({c: s for c, s in scores.items() if c != full}, scores[full], population="like_these")
    page = (folder / "README.md").read_text()
    text = " ".join(page.split())
    lines = re.findall(COMPARED, page.split("\n## ")[0], re.M)
    assert len(lines) == 20
    for name, _, score, lost, won, *interval, label in lines:
        if name.startswith("all rows"):
            [cell] = cells.index[cells["stored"] == name.removeprefix("all rows, packed, ")]
        else:
            title, ratio = name.removesuffix(", bits=16").rsplit(" ", 1)
            policy = {policy_title(one): one for one in cells["policy"]}[title]
            [cell] = cells.index[(cells["policy"] == policy) & (cells["keep_ratio"] == float(ratio))]
        change = grades.loc[cell] - grades.loc[full]
        assert (int(lost), int(won)) == ((change < 0).sum(), (change > 0).sum())
        decision = decisions[cell]
        numbers = [grades.loc[cell].mean(), change.mean(), decision.low, decision.high]
        assert [float(score), *map(float, interval)] == pytest.approx([100 * number for number in numbers], abs=0.051)
        assert label == decision.label
        assert (label == "worse") == (
            "0.2" in name or "0.5" in name or name.endswith(("=4, scheme=rotated", "whole_layers=0"))
        )
    evicting = cells[cells["keep_ratio"].notna()]
    losses = -100 * evicting["difference"]
    assert f"it loses {losses.min():.1f} to {losses.max():.1f} points" in text
    by_format = (-100 * cells.set_index("stored")["difference"]).map("{:.1f}".format)
    assert f"4 rotated bits lose {by_format['bits=4, scheme=rotated']} points (*worse*)" in text
    plain, scaled = (by_format[f"bits=8, scheme=fp8, scale={scale}, whole_layers=0"] for scale in ("none", "tensor"))
    assert f"loses {plain} without scales and {scaled} with a layer's" in text
    formats = ("scale=none, whole_layers=0", "scale=none, whole_layers=2", "scale=tensor, keys / 1.25, whole_layers=0")
    fp8, whole, divided = (grades.loc[cells["stored"] == f"bits=8, scheme=fp8, {one}"].iloc[0] for one in formats)
    won, lost = ((whole - fp8) > 0).sum(), ((whole - fp8) < 0).sum()
    assert f"it wins {won} problems and loses {lost} (p = .002, a sign test)" in text
    assert stats.binomtest(int(won), int(won + lost)).pvalue == pytest.approx(0.0023, abs=5e-5)
    won, lost = ((divided - fp8) > 0).sum(), ((divided - fp8) < 0).sum()
    p_value = stats.binomtest(int(won), int(won + lost)).pvalue
    difference = f"no difference is shown ({won} won, {lost} lost, p = {p_value:.2f})".replace("0.", ".")
    assert f"fp8 has {divided.mean():.1%} (*worse*), and beside plain fp8 {difference}" in text
    weights = pd.read_csv(folder / "settings_channels.csv").set_index("policy")["cell_id"]
    by_channel = pd.read_csv(folder / "answers_channels.csv.gz", dtype={"grades": float}).pivot(
        index="cell_id", columns="problem_id", values="grades"
    )
    channels, whole = by_channel.loc[weights["full_packed"]], by_channel.loc[weights["full"]]
    decision = decide(channels.to_numpy()[:, None], whole.to_numpy()[:, None], population="like_these")
    lost, won = (channels < whole).sum(), (channels > whole).sum()
    interval = (
        f"{100 * decision.difference:.1f}, {100 * decision.low:.1f} to {100 * decision.high:+.1f}: *{decision.label}*"
    )
    assert f"fp8 has {channels.mean():.1%} beside {whole.mean():.1%}" in text
    assert f"({lost} lost, {won} won, {interval})" in text
    won, lost = (channels > fp8).sum(), (channels < fp8).sum()
    assert f"it wins {won} and loses {lost}: no difference is shown (p = .12)" in text
    assert stats.binomtest(int(won), int(won + lost)).pvalue == pytest.approx(0.122, abs=5e-4)
    kl = pd.read_csv(folder / "key_rounding.csv").set_index("layer")
    assert kl.loc[0, "fp8, by channel"] == pytest.approx(0.84, abs=0.005)
    schemes = ["4 bits, rotated", "fp8", "8 bits, rotated", "4 bits, KIVI"]
    numbers = [f"{n:.2g}".removeprefix("0") if n < 1 else f"{n:.1f}" for n in kl.loc[0, schemes]]
    first = "KL of {} nats (4 bits, rotated), {} (fp8), {} (8 bits, rotated) and {} (KIVI's 4 bits"
    assert first.format(*numbers) in text
    assert kl.loc[1, schemes].tolist() == pytest.approx([0.487, 0.108, 0.002, 0.004], abs=0.0011)
    assert kl.loc[2:, schemes].max().max() == pytest.approx(0.1645, abs=0.001)


def test_the_recipes_of_heads() -> None:
    """The page's two tables are those of the files."""
    folder = PUBLISHED / "predictors"
    page = (folder / "README.md").read_text()
    heads = pd.read_csv(folder / "recipes" / "heads.csv")
    pairs = heads["recall_in_20%"].map("{:.3f}".format) + ", " + heads["rank_correlation"].map("{:.3f}".format)
    assert len(heads) == 21
    assert [pair for pair in pairs if f" {pair} |" not in page] == []
    differences = pd.read_csv(folder / "recipes" / "differences.csv")
    for_answers = differences["beside"].eq("toy_answer") & differences["model"].str.startswith("toy")
    assert (differences.loc[for_answers, "p_holm"] < 0.001).all()
    for row in differences.itertuples():
        points = [f"{100 * number:+.1f}" for number in (row.difference, row.low, row.high)]
        assert f"{points[0]} ({points[1]} to {points[2]})" in page


@pytest.mark.parametrize(
    "folder",
    [path.parent for path in sorted(PUBLISHED.glob("*/cells.csv")) if path.with_name("answers.csv.gz").exists()],
)
def test_the_numbers_of_each_cell_follow_from_its_answers(folder: Path) -> None:
    answers = pd.read_csv(folder / "answers.csv.gz", dtype={"grades": str})
    cells = pd.read_csv(folder / "cells.csv").set_index("cell_id")
    assert set(answers["cell_id"]) == set(cells.index)
    answers["draws"] = answers["grades"].str.replace("-", "")
    answers = answers[answers["draws"] != ""]
    answers["score"] = [draws.count("1") / len(draws) for draws in answers["draws"]]
    for cell_id, rows in answers.groupby("cell_id"):
        stated = cells.loc[cell_id]
        assert (stated["graded"], stated["problems"]) == (rows["draws"].str.len().sum(), len(rows))
        assert stated["pass_at_1"] == pytest.approx(rows["score"].mean(), rel=1e-9, abs=1e-12)
        assert stated["se"] == pytest.approx(rows["score"].std(ddof=1) / np.sqrt(len(rows)), rel=1e-9, abs=1e-12)
