"""The tables for a paper: the best compressed score bold, a dagger where accuracy is lost, a caption."""

import pytest

from kvsweep.analysis.load import load_run
from kvsweep.analysis.report.tables import latex, markdown
from kvsweep.analysis.report.warnings import cut_off, endless, not_finite
from kvsweep.analysis.statistics.metrics import cell_metrics
from tests.program import report as main


def test_tables_mark_the_best_and_what_loses(run, make_cell):
    for benchmark in ("one", "two"):
        place = {"benchmark": benchmark, "benchmark_title": benchmark}
        for policy in ("full", "dynts", "control"):
            make_cell([[1]] * 30, policy=policy, **place)
        make_cell([[0]] * 25 + [[1]] * 5, policy="window", done=benchmark == "one", expected=31, **place)
    table = cell_metrics(load_run(run))
    lines = markdown(table).splitlines()
    assert lines[2] == "| full cache | 100.0 ± 0.0 | 100.0 ± 0.0 | 100.0 ± 0.0 |"
    best, score = "**100.0 ± 0.0**", "16.7 ± 6.9"
    assert lines[3] == f"| DynTS 0.3 / 48, trigger 128 | {best} | {best} | {best} |"
    assert lines[4] == rf"| window 0.3 / 48, trigger 128 | {score}† | {score}\* | 16.7 ± 4.9\* |"
    assert "**" not in lines[5]  # a control is no compressed cache
    assert "† worse than the full cache; bold: the highest score of a compressed cache" in lines[-1]
    tex = latex(table)
    assert tex.startswith("\\begin{table}\n\\caption{Pass@1 in \\%, $\\pm$ standard error")
    assert "\\label{tab:toy_qwen}" in tex
    assert r"& \textbf{100.0 $\pm$ 0.0} & \textbf{100.0 $\pm$ 0.0} &" in tex
    assert r"16.7 $\pm$ 6.9$^{\dagger}$ & 16.7 $\pm$ 6.9$^{*}$" in tex


def test_texts_that_are_not_finite_are_counted_in_the_order_of_the_models(run, make_cell):
    broken = {"completion": {"stop_reason": "not_finite"}}
    make_cell([[0], [0]], **broken)
    make_cell([[0]], policy="dynts", **broken)
    make_cell([[0]], model="toy_llama", model_title="Toy-Llama", **broken)
    make_cell([[1]], benchmark="toy_add", benchmark_title="Add")
    said = [sentence.partition(" ended because")[0] for sentence in not_finite(load_run(run))]
    assert said == ["Toy-Qwen | Chain: 3 texts of 2 cells", "Toy-Llama | Chain: 1 text of 1 cell"]


@pytest.mark.parametrize(("stopped", "said"), [(0, True), (1, True), (3, False)])
def test_texts_that_nearly_all_run_to_the_limit_are_told_with_the_likely_cause(stopped, said, run, make_cell):
    cut = {"stop_reason": "length"}
    make_cell([[1]] * 20, policy="window", completion=cut, texts=[{"stop_reason": "stop"}] * stopped)
    told = list(endless(load_run(run)))
    assert len(told) == said
    assert all(f"Toy-Qwen | Chain: {20 - stopped} of 20 texts ran to the limit" in line for line in told)


@pytest.mark.slow
def test_a_full_cache_that_is_cut_off_more_than_the_margin_is_told(tmp_path, make_cell):
    """A compressed cell that is cut off is no concern: its texts count as wrong, which is what its label is about."""
    cut = {"stop_reason": "length"}
    for benchmark, texts in (("Chain", 3), ("Add", 1)):
        place = {"benchmark": benchmark.lower(), "benchmark_title": benchmark}
        make_cell([[1]] * 20, texts=[cut] * texts, **place)
        make_cell([[1]] * 20, policy="dynts", completion=cut, **place)
    run = load_run(tmp_path / "run")
    [said] = cut_off(run)
    assert said.startswith("Toy-Qwen | Chain: 3 of 20 texts of the full cache were cut off and count as wrong")
    page = tmp_path / "run/report/report.html"
    main([str(tmp_path / "run")])
    assert said in page.read_text()
    # The margin is the run's own, or the one asked for: 15% and 5% of the texts were cut off.
    _, _ = cut_off(run, 0.04)
    main([str(tmp_path / "run"), "--margin=20"])
    assert "of the full cache were cut off" not in page.read_text()
    run.provenance.update({name: {"config": {"report": {"margin": 4}}} for name in run.cells["cell_id"]})
    _, _ = cut_off(run)


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--map=reddish", "no colour map of matplotlib"),
        ("--width=1", "1.0 is not in the range 3<=x<=60"),
        ("--completions=-1", "-1 is not in the range x>=0"),
        ("--columns=0", "0 is not in the range x>=1"),
        ("--margin=0", "0.0 is not in the range 0<x<100"),
        ("--scale=none", "'none' is not one of"),
        ("--interval", "a CSV of scores has no intervals"),
    ],
)
def test_a_flag_out_of_range_is_one_sentence(flag, said, tmp_path, refused):
    (tmp_path / "scores.csv").write_text("a\n1\n")
    assert said in refused("report", tmp_path / "scores.csv", flag)
