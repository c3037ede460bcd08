import base64
import csv
import itertools
import json
import os
import platform
import random
import re
import subprocess
import sys
import time
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from kvsweep.analysis.load import load_run
from kvsweep.analysis.report.build import build_report, follow
from kvsweep.analysis.report.drilldown import common_length, outcome_maps, token_lengths
from kvsweep.analysis.report.page import run_page
from kvsweep.analysis.report.tables import fidelity_text, summary_table
from kvsweep.analysis.statistics.sentences import analyse
from kvsweep.messages.errors import UserError
from kvsweep.run_files.run_reader import StoredCell
from kvsweep.run_files.task_status import CellProgress, TaskStatus, process_mark
from tests.analysis.conftest import bare
from tests.program import report as main

SCRIPT = "<script>alert(1)</script>"
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def formats(monkeypatch):
    """Pictures as SVG alone, which is what a page holds."""
    monkeypatch.setattr("kvsweep.analysis.figures.style.FORMATS", ("svg",))


@pytest.mark.slow
def test_a_page_of_scores_has_the_problems_of_its_table(tmp_path):
    problems = {"easy": 30, "hard": 198}
    rows = [f"m,{name},p,{ratio},500,5000,{count},2,50" for name, count in problems.items() for ratio in (0.1, 0.2)]
    heads = "model,benchmark,policy,keep_ratio,local_window,budget,problems,draws,pass_at_1"
    (tmp_path / "s.csv").write_text("\n".join([heads, *rows]) + "\n")
    main([str(tmp_path / "s.csv"), "--output", str(tmp_path / "page")])
    html = (tmp_path / "page/report.html").read_text()
    assert all(f"{name} ({count} problems)" in html for name, count in problems.items())


def test_one_cell_alone(run, make_cell):
    make_cell([[1], [0], [1], [1]])
    page = build_report(run)
    assert page == run / "report" / "report.html"
    html = page.read_text()
    assert "1 of 1 cell is done." in html
    assert "75.0 ± 25.0" in html
    assert "0123abcd" in html
    assert "kvsweep -m experiment=demo" in html
    (row,) = csv.DictReader((page.parent / "cells.csv").open())
    assert float(row["pass_at_1"]) == 0.75


@pytest.mark.slow
def test_a_page_without_completions_is_small_and_says_so(tmp_path, run, make_cell):
    make_cell([[1], [0], [1], [1]])
    main([str(run), "--output", str(tmp_path / "out"), "--completions", "0"])
    html = (tmp_path / "out" / "report.html").read_text()
    assert not (run / "report").exists()
    (packed,) = re.findall(r'data-for="[^"]*">([A-Za-z0-9+/]+=*)<', html)
    assert unpacked(packed) == {"base": None, "left_out": 4, "problems": {}, "draws": []}
    assert "75.0 ± 25.0" in html


@pytest.mark.slow
def test_a_partial_sweep_says_what_is_missing(run, make_cell):
    for ratio in (0.1, 0.2, 0.3):
        for window in (16, 48):
            if (ratio, window) != (0.2, 16):
                make_cell([[1], [0]], policy="dynts", keep_ratio=ratio, local_window=window)
    make_cell([[1]], policy="dynts", keep_ratio=0.4, local_window=48, done=False, expected=9)
    make_cell([[None]], policy="dynts", keep_ratio=0.5, local_window=48)
    html = build_report(run).read_text()
    assert "6 of 7 cells are done, 1 unfinished, 3 missing from the grids, 1 completion not graded yet." in html
    assert "Toy-Qwen | Chain: DynTS 0.4 / 48, trigger 128: 1 of 9 completions" in html
    assert "Toy-Qwen | Chain: DynTS 0.2 / 16, trigger 128" in html
    assert "No full-cache cell" in html
    assert (run / "report/heatmap_toy_qwen_dynts_128.svg").stat().st_size > 1000


@pytest.mark.slow
def test_cells_on_fewer_problems_or_with_uneven_draws_are_named(run, make_cell):
    make_cell([[1, 1], [0, 1], [1, 0]])
    make_cell([[1, 1], [0, 1]], policy="window")
    make_cell([[1, 1], [0], [1]], policy="h2o")
    make_cell([[1, 1], [0, 1], [1, 1]], policy="dynts")
    page = build_report(run).read_text()
    named = page.partition("Not on all problems and draws of the others")[2].partition("</ul>")[0]
    assert "2</summary>" in named
    assert "4 answers to 2 of 3 problems" in named
    assert "4 answers to 3 of 3 problems" in named


@pytest.mark.core
def test_policies_are_compared(run, make_cell):
    for benchmark, title in (("toy_chain", "Chain"), ("toy_add", "Add")):
        place = {"benchmark": benchmark, "benchmark_title": title}
        make_cell([[1], [1]], **place)
        for policy in ("dynts", "window", "random"):
            make_cell([[1], [0]], policy=policy, done=benchmark == "toy_chain", expected=2, **place)
    html = build_report(run).read_text()
    setting = "Toy-Qwen | Chain, keep ratio 0.3, window 48, trigger 128, question on top"
    assert f"<b>{setting}</b>: 0 of 3 pairs differ. The best, DynTS, is not shown to be better than" in html
    assert "Toy-Qwen | mean of 2 benchmarks" in html
    table = html[html.index("<h3>Equal memory") : html.index('<h2 id="scores">')]
    assert table.count("DynTS 0.3 / 48, trigger 128") == 3
    # 201 steps: 40 to 129, and 73 to 129, and 73 to 127.
    held = [*range(40, 130), *range(73, 130), *range(73, 127)]
    mean, share = sum(held) / 201, sum(held) / sum(range(40, 241))
    assert f"<td>{mean:.1f}</td><td>53.8</td><td>{100 * share:.1f}</td>" in table
    assert "Toy-Qwen: Pass@1 per policy at keep ratio 0.3, window 48, trigger 128" in html


@pytest.mark.slow
def test_settings_without_a_score_have_no_heatmap_and_no_bars(run, make_cell):
    """As where a grid was only replayed."""
    make_cell([[1], [0]])
    for ratio, policy in itertools.product((0.2, 0.3, 0.4), ("dynts", "window")):
        make_cell([], policy=policy, keep_ratio=ratio, done=False, expected=2)
    page = build_report(run)
    assert not [path.name for path in page.parent.iterdir() if path.name.startswith(("heatmap", "policies"))]
    assert not any(page_data(page.read_text(), "heatmap-data").values())


@pytest.mark.slow
def test_policies_without_keep_ratio_or_window(run, make_cell):
    for policy in ("sepllm", "h2o"):
        bare(make_cell, policy, "keep_ratio", "local_window", *["budget"] * (policy == "h2o"))
    html = build_report(run).read_text()
    assert '<td class="text">SepLLM, trigger 128</td><td>50.0 ± 50.0</td>' in html
    assert '<td class="text">H2O</td><td>50.0 ± 50.0</td>' in html
    assert summary_table(run).splitlines()[1].startswith("H2O ")


@pytest.mark.slow
def test_bar_charts_that_are_too_many_are_named(run, make_cell, monkeypatch):
    for name in ("gallery", "page"):
        monkeypatch.setattr(f"kvsweep.analysis.report.{name}.MAX_COMPARED", 1)
    for ratio in (0.1, 0.2):
        for policy in ("dynts", "window", "random"):
            make_cell([[1], [0]], policy=policy, keep_ratio=ratio)
    page = build_report(run)
    assert len(list(page.parent.glob("policies_*.svg"))) == 1
    html = page.read_text()
    assert "there are too many: keep ratio 0.2, window 48, trigger 128, question on top." in html


@pytest.mark.slow
def test_a_report_is_not_written_through_a_link_of_the_run(tmp_path, make_cell):
    run = make_cell([[1], [0]]).parent
    (tmp_path / "elsewhere").mkdir()
    (run / "report").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="is a link"):
        build_report(run)
    assert not list((tmp_path / "elsewhere").iterdir())
    (tmp_path / "named").symlink_to(tmp_path / "elsewhere")
    assert build_report(run, folder=tmp_path / "named").is_file()


@pytest.mark.slow
def test_a_second_report_takes_the_place_of_the_first(run, make_cell):
    folder = make_cell([[1]], done=False, expected=2)
    assert "1 unfinished" in build_report(run).read_text()
    (folder / "DONE").write_text(json.dumps({"files": StoredCell(folder).sizes("completions.jsonl")}))
    assert "1 of 1 cell is done." in build_report(run).read_text()
    assert not list((run / "report").glob(".*"))


def test_names_and_texts_are_escaped_and_nothing_is_fetched(tmp_path, make_cell):
    for ratio in (0.1, 0.2, 0.3):
        make_cell(
            [[1]],
            policy="dynts",
            keep_ratio=ratio,
            model_title=f"M {SCRIPT}",
            benchmark_title="B <img src=x onerror=alert(1)>",
            extra={"note": "<script>"},  # it names the folder, so it has no slash
            completion={"text": SCRIPT},
        )
    make_cell([[1]], policy="dynts", keep_ratio=0.1, model_title=f"M {SCRIPT}", extra={"note": "'\"&"})
    html = build_report(tmp_path / "run").read_text()
    # The page's own scripts alone carry the number that its policy asks for, and text in their data is escaped.
    own = re.findall(r"<script[^>]* nonce=[^>]*>(.*?)</script>", html, flags=re.DOTALL)
    data = [text for text in own if text.startswith(("{", "["))]
    assert len(data) == 4, "the list of files, the cells, the heatmaps and the outcomes"
    texts = [text for text in own if re.fullmatch(r"[A-Za-z0-9+/]+=*", text)]
    assert {unpacked(text)["draws"][0]["text"] for text in texts} == {SCRIPT, "a is 4. So \\boxed{4}"}
    assert not any("<" in text for text in data)
    html = re.sub(r"<script[^>]* nonce=[^>]*>.*?</script>", "", html, flags=re.DOTALL)
    assert "<script" not in html
    assert "<img src=x" not in html
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in html
    assert not re.search(r"""src\s*=\s*["'](?!data:)""", html)
    links = set(re.findall(r"""href\s*=\s*["'](?!#)([^"']*)""", html))
    assert links <= {path.name for path in (tmp_path / "run/report").iterdir()}, "files beside the page"
    assert "url(" not in html


def test_summary_table(run, make_cell):
    for benchmark, title in (("toy_chain", "Chain"), ("toy_add", "Add")):
        make_cell([[1], [1]], benchmark=benchmark, benchmark_title=title)
    make_cell([[1], [0]], policy="dynts", done=False, expected=4)
    lines = summary_table(run).splitlines()
    assert lines[0].split() == ["Toy-Qwen", "Chain", "Add", "mean", "evicted", "KV", "budget", "+", "question"]
    assert lines[1].split() == ["full", "cache", *(["100.0", "±", "0.0"] * 3), "0", "of", "4", "–"]
    name = ["DynTS", "0.3", "/", "48,", "trigger", "128"]
    assert lines[2].split() == [*name, "50.0", "±", "50.0*", "–", "–", "2", "of", "2", "72.0"]


@pytest.mark.slow
def test_cells_in_which_most_texts_hold_no_answer_are_named(run, make_cell):
    """In the sweep's summary and on the page, with two examples to look at."""
    make_cell([["no_answer"], ["no_answer"], ["no_answer"], [1]])
    make_cell([[1], ["no_answer"]], policy="dynts")
    expected = f"most texts of 1 cell hold no answer.*See `kvsweep grade {run}` with --why p0 or --why p1"
    assert re.search(rf"note: Toy-Qwen \| Chain: {expected}", summary_table(run))
    assert "Without answers: 1" in build_report(run).read_text()


@pytest.mark.slow
def test_what_was_left_out_is_printed(run, make_cell, capsys):
    make_cell([[1, 0]])
    folder = make_cell([[1, 0]], policy="dynts", cell={"check": "0" * 16})
    main([str(run)])
    assert capsys.readouterr().out.startswith(f"note: {folder / 'cell.yaml'} was edited, or is another cell's: restore")


@pytest.mark.slow
@pytest.mark.parametrize("question", ["free", "on_top"])
@pytest.mark.one_in(2)
def test_a_run_without_evictions_names_budgets_that_evict(question, kvsweep, tmp_path):
    words = ["model=toy_qwen", "benchmark=toy_chain", "benchmark.limit=3", "policy=window"]
    words += ["grid.policy=[full,window]", f"results_dir={tmp_path}", f"policy.question={question}"]
    said = kvsweep(*words, "policy.budget=800", "run_name=none").out
    pattern = r"note: Toy-Qwen \| Chain: nothing was evicted, because no cache outgrew its trigger. Of 3 texts (.*)\."
    found = re.search(pattern, said)
    assert found, said
    budgets = dict(re.findall(r"policy\.budget=(\d+) would evict in (\d+)", found[1]))
    assert len(budgets) == 2
    largest = max(map(int, budgets))
    for budget, texts in {**budgets, str(largest + 1): "0"}.items():
        out = kvsweep(*words, f"policy.budget={budget}", f"run_name=b{budget}").out
        assert re.search(r"^window .* (\d+) of 3", out, re.MULTILINE)[1] == texts
        assert ("nothing was evicted, because" in out) == (texts == "0")


def test_the_replays_table_fits_the_terminal_and_has_no_nan(run, make_cell, monkeypatch):
    make_cell([[1], [1]])
    names = ("kl", "change", "flips", "answer_change")
    table = load_run(run).cells.assign(evictions=1.25, texts=2, **dict.fromkeys(names, -0.12345))
    table = table.assign(**{f"{name}_se": 0.5 for name in names}).assign(answer_change=float("nan"))
    table["answer_change_se"] = float("nan")
    for columns in (80, 140):
        monkeypatch.setenv("COLUMNS", str(columns))
        text, note = fidelity_text(table).split("\n\nkl, change")
        lines = text.splitlines()
        assert max(map(len, lines)) <= columns
        assert "nan" not in text
        assert "–" in text
        header, row = lines[:2]
        assert header.index("kl") + len("kl") == row.index("-0.1235 ± 0.5000") + len("-0.1235 ± 0.5000")
        assert "log-likelihood" in note


@pytest.mark.slow
def test_a_cell_without_evictions_is_marked_as_the_full_cache(run, make_cell):
    """In the sweep's summary, the tables, the heatmaps and the page; packed rows are no full cache."""
    untouched = {"evictions": [], "peak_length": 60}
    make_cell([[1], [0]])
    for ratio in (0.3, 0.4, 0.5):
        make_cell([[1], [0]], policy="dynts", keep_ratio=ratio, completion=untouched if ratio == 0.5 else None)
    packed = {"cache": {"bits": 4, "group": 32, "residual": 16}}
    make_cell([[1], [0]], policy="snapkv", completion=untouched, cell=packed)
    lines = summary_table(run).splitlines()
    marked = [line for line in lines[:7] if "=" in line and "bits" not in line]
    assert [line.split()[:3] for line in marked] == [["DynTS", "0.5", "/"]]
    assert "0 of 2" in marked[0]
    assert "50.0 ± 50.0=" in marked[0]
    page = build_report(run).read_text()
    marked = {cell["setting"]: cell["marks"] for cell in page_data(page, "cell-data")}
    assert [name for name, marks in marked.items() if marks == "="] == ["DynTS 0.5 / 48, trigger 128"]
    assert (run / "report" / "tables.tex").read_text().count("$^{=}$") == 2  # the cell and the caption


@pytest.mark.slow
def test_a_cell_in_which_nothing_was_packed_is_marked(run, make_cell):
    """In cells.csv, the sweep's summary, the tables and the page; a cache that was longer than the residual is not."""
    make_cell([[1], [0]])
    for ratio, residual, scheme in ((0.3, 128, "rotated"), (0.4, 129, "rotated"), (0.5, 119, "kivi")):
        packed = {"cache": {"bits": 4, "group": 10, "residual": residual, "scheme": scheme}}
        make_cell([[1], [0]], policy="dynts", keep_ratio=ratio, cell=packed)
    lines = summary_table(run).splitlines()
    marked = [line for line in lines[:6] if "§" in line]
    assert [line.split()[:2] for line in marked] == [["DynTS", "0.4"]]
    assert "§ no row was packed" in "\n".join(lines)
    page = build_report(run).read_text()
    marks = {cell["setting"]: cell["marks"] for cell in page_data(page, "cell-data")}
    assert [name.split(" /")[0] for name, mark in marks.items() if mark == "§"] == ["DynTS 0.4"]
    folder = run / "report"
    assert (folder / "tables.tex").read_text().count(r"$^{\S}$") == 2  # the cell and the caption
    cells = pd.read_csv(folder / "cells.csv").set_index("keep_ratio")
    assert cells["packed"].dropna().to_dict() == {0.3: 1, 0.4: 0, 0.5: 1}


@pytest.mark.slow
def test_the_command(run, make_cell, kvsweep, refused):
    assert refused("report", run).startswith("kvsweep report: error: ")
    make_cell([[1]])
    assert kvsweep("report", str(run)).out.strip() == str(run / "report" / "report.html")


def run_without(packages: tuple[str, ...], program: str):
    """Run a program for which some packages cannot be imported."""
    # Not by sys.modules["torch"] = None: scipy takes that for a loaded torch.
    block = (
        "import sys\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.split('.')[0] in {packages!r}: raise ImportError(name)\n"
        "sys.meta_path.insert(0, Block())\n"
    )
    subprocess.run([sys.executable, "-c", block + program], cwd=ROOT, check=True)


@pytest.mark.slow
def test_the_sweeps_summary_needs_no_plotting_and_no_statistics(tmp_path, make_cell):
    make_cell([[1], [0]])
    make_cell([[1], [0]], policy="dynts")
    program = f"from kvsweep.analysis.report.tables import summary_table; summary_table({str(tmp_path / 'run')!r})"
    run_without(("torch", "matplotlib", "statsmodels", "scipy", "jinja2"), program)


def test_the_help_needs_neither_pandas_nor_plotting():
    program = "from kvsweep.cli import main\ntry: main(['report', '--help'])\nexcept SystemExit: pass"
    run_without(("pandas", "numpy", "matplotlib", "statsmodels", "scipy", "jinja2"), program)


@pytest.mark.slow
def test_several_draws_show_pass_at_k_and_the_majority(run, make_cell):
    make_cell([[1, 0, 0], [0, 0, 0]])
    (cell,) = page_data(build_report(run).read_text(), "cell-data")
    # All answers read "4", so the majority's answer counts as right where one of its draws does.
    assert (cell["pass_at_3"], cell["maj_at_n"], cell["partial"]) == (0.5, 0.5, False)


@pytest.mark.slow
def test_heatmaps_with_a_shared_scale_and_intervals(run, make_cell, monkeypatch):
    for ratio in (0.1, 0.2):
        for window in (16, 48):
            make_cell([[1], [0]], policy="dynts", keep_ratio=ratio, local_window=window, budget=128)
    main([str(run), "--scale", "shared", "--interval"])
    [picture] = (run / "report").glob("heatmap*.svg")
    asked = picture.read_text()
    main([str(run)])
    assert picture.read_text() != asked


def write_task(run: Path, cells: list[Path], **settings: Any) -> TaskStatus:
    """The status file of a task of this process that lives now."""
    named = {
        path.name: CellProgress(model="toy_qwen", benchmark="toy_chain", policy=path.name, finished=0, expected=9)
        for path in cells
    }
    host = {"host": platform.node(), "pid": os.getpid(), "process": process_mark(os.getpid())}
    host |= {"started": time.time(), "heartbeat": time.time()}
    known = {"task": "t", "state": "running", "shard": "1/1", "command": "kvsweep again", "cells": named, **host}
    task = TaskStatus(**known | settings)
    task.write(run)
    return task


def unpacked(text: str) -> Any:
    """The data of a cell, as the page reads them."""
    return json.loads(zlib.decompress(base64.b64decode(text)))


def page_data(html: str, name: str) -> Any:
    return json.loads(re.findall(rf'id="{name}">(.*?)</script>', html)[0])


def page_of(run: Path) -> str:
    return run_page(analyse(load_run(run)), [], {}, {})


@pytest.mark.slow
def test_a_running_sweep_shows_what_is_graded_so_far(tmp_path, make_cell):
    run = tmp_path / "run"
    full = make_cell([[1], [1], [0], [None]], done=False, expected=9)
    cells = [make_cell([[1], [0]], policy="dynts", keep_ratio=r, done=False, expected=9) for r in (0.1, 0.3, 0.5)]
    write_task(run, [full, *cells, run / "not-begun"])
    html = page_of(run)
    assert '<span class="state">running</span>' in html
    assert "10 of 45 completions are stored, 9 of them graded; 1 cell has not begun." in html
    assert f"<code>kvsweep grade {run}</code>" in html
    assert "There is no full cache to compare with, or it is not finished" in html
    # Two of the full cache's three grades are right: 2/3, and the standard error is sqrt(2/9 / 2).
    data = page_data(html, "cell-data")
    assert (data[0]["pass_at_1"], data[0]["se"]) == pytest.approx((2 / 3, 1 / 3), abs=1e-6)
    assert [(cell["graded"], cell["completions"], cell["partial"], cell["marks"]) for cell in data] == [
        (3, 4, True, "*"),
        *[(2, 2, True, "*")] * 3,
    ]
    write_task(run, [full, *cells], pid=2**22 + 1)
    assert '<span class="state">stopped</span>' in page_of(run)


@pytest.mark.slow
def test_failed_cells_and_their_errors_are_on_the_page(run, make_cell):
    folders = [make_cell([[1]]), make_cell([[1]], policy="dynts", done=False, expected=9)]
    error = f"ValueError: {SCRIPT} \x1b[31m"
    write_task(run, folders, state="failed", error=error, command=f"kvsweep {SCRIPT}")
    html = page_of(run)
    assert '<span class="state">stopped</span>' in html
    alert = html[html.index('<details class="alert">') :]
    assert "Failed: t, 1 unfinished cell" in alert
    assert "ValueError: &lt;script&gt;alert(1)&lt;/script&gt; \\x1b[31m" in alert
    assert f"<li>toy_qwen | toy_chain: {folders[1].name}: 0 of 9</li>" in alert
    assert "<code>kvsweep &lt;script&gt;" in alert


def test_the_watch_makes_the_page_again_until_the_sweep_ends(tmp_path, make_cell, monkeypatch):
    run = tmp_path / "run"
    folder = make_cell([[1], [0]], done=False, expected=3)
    write_task(run, [folder])

    def more_rows():
        with (folder / "grades.jsonl").open("a") as file:
            file.write("\n")

    steps = iter([more_rows, lambda: None, lambda: write_task(run, [folder], state="done")])
    # Other threads sleep, too: of this module alone.
    monkeypatch.setattr("kvsweep.analysis.report.build.time", SimpleNamespace(sleep=lambda seconds: next(steps)()))
    made: list[str] = []
    follow(run, 5, lambda: made.append(load_run(run).state) or run)
    assert made == ["running", "running", "stopped"]
    assert next(steps, None) is None


@pytest.mark.slow
def test_ctrl_c_ends_the_watch_with_one_sentence(tmp_path, run, make_cell, monkeypatch, capsys):
    write_task(run, [make_cell([[1]], done=False)])

    def interrupt(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr("kvsweep.analysis.report.build.time", SimpleNamespace(sleep=interrupt))
    with pytest.raises(SystemExit) as stop:
        main([str(run), "--watch", "7"])
    assert stop.value.code == 130
    assert capsys.readouterr().err == "kvsweep report: error: interrupted.\n"
    assert 'data-reload="7.0"' in (tmp_path / "run/report/report.html").read_text()


def test_the_outcomes_of_all_cells_are_told_in_letters(run, make_cell):
    make_cell([[1, 0], ["truncated", None]])
    make_cell([["no_answer", "grader_timeout"], [1]], policy="dynts")
    make_cell([[0]], benchmark="toy_sort", benchmark_title="Sort")
    panel, single = outcome_maps(load_run(run))
    assert (panel["problems"], panel["draws"]) == (["p0", "p1"], [0, 1])
    assert [(cell["full"], cell["outcomes"]) for cell in panel["cells"]] == [(True, "cwtu"), (False, "ngc-")]
    assert [cell["outcomes"] for cell in single["cells"]] == ["w"]
    assert json.dumps(panel)


def test_the_common_beginning_is_found():
    numbers = random.Random(0)
    for _ in range(300):
        first, second = ("".join(numbers.choices("ab", k=numbers.randrange(9))) for _ in range(2))
        same = next((i for i, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]), None)
        same = min(len(first), len(second)) if same is None else same
        assert common_length(first, second) == same
        assert common_length([*map(ord, first)], [*map(ord, second)]) == same


def test_the_length_of_a_token_is_what_a_browser_counts():
    tokenizer = Tokenizer(models.BPE({byte: i for i, byte in enumerate(pre_tokenizers.ByteLevel.alphabet())}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    # UTF-8 has 1, 4 and 2 bytes for these, each a token, and UTF-16 has 1, 2 and 1 units.
    row: Any = SimpleNamespace(text="a😀é", token_ids=tokenizer.encode("a😀é").ids)
    assert token_lengths(row, tokenizer) == [1, 0, 0, 0, 2, 0, 1]
