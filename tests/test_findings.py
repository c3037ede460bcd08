"""Each sentence about a finding in results/published says what its CSV says."""

import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from statsmodels.stats.multitest import multipletests

from kvsweep.analysis.statistics.noninferiority import decide, decide_grid

PUBLISHED = Path(__file__).resolve().parents[1] / "results" / "published"


def said(page: str) -> str:
    return " ".join((PUBLISHED / page).read_text().split())


def holm(differences: pd.Series, errors: pd.Series) -> np.ndarray:
    """Two-sided normal p-values, corrected."""
    return multipletests(2 * stats.norm.sf((differences / errors).abs()), method="holm")[1]


def test_the_tests_that_were_compared() -> None:
    table = pd.read_csv(PUBLISHED / "tests_compared.csv")
    page = (PUBLISHED.parents[1] / "docs/report.md").read_text()
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
    assert table.loc[table["rule"].str.contains("ours") & (table["loss_points"] == 5), "called_safe"].max() < 0.03


VERDICTS = ["pass_percent", "fail_percent", "inconclusive_percent"]
WRONG = ["wrong_pass_percent", "wrong_fail_percent"]


def rules_page() -> str:
    return (PUBLISHED.parents[1] / "docs/valid_at_thirty.md").read_text()


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


def test_five_percent_lost_for_certain() -> None:
    """The chances of the numbers of lost problems are binomial, so each rule's shares can be computed exactly."""
    table = pd.read_csv(PUBLISHED / "valid_at_thirty.csv").set_index(["case", "n", "draws", "truth", "rule"])
    own = table.loc["5% of all problems lost for certain"]
    exact = 100 * 0.95**30
    for rule in table.index.unique("rule").drop(["judge", "judge, problems like these"]):
        assert own.loc[(30, 1, "5 of problems like these", rule), "wrong_pass_percent"] == pytest.approx(exact, abs=3)
    assert f"{exact:.0f}%" in rules_page()
    for draws in (1, 8):
        full = np.ones((30, draws))
        labels = [decide(full * (np.arange(30) >= lost)[:, None], full).label for lost in range(31)]
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


def test_what_published_claims_can_carry() -> None:
    page = " ".join(rules_page().split())
    labels = []
    for won in range(20):
        full, cell = np.zeros((2, 90, 1))
        cell[:won], full[won : 2 * won + 6] = 1, 1
        labels.append(decide(cell, full).label)
    assert labels == ["worse"] + ["unclear"] * 19
    assert "20 tables of pairs, from 6 answers lost and none won to 25 and 19" in page
    assert "*worse* in one (nothing won) and *unclear* in 19" in page
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
    assert f"rows of 2 bits: [0 to {two.max():.0%} right, of {full['pass_at_1']:.0%}]" in front_page()
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
