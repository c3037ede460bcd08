"""What a reader does on the page beyond reading: filter, link, step through completions, print, read in the dark."""

import base64
import csv
import re
import shutil
import subprocess
import tarfile
from collections import Counter
from typing import Any

import pytest

from kvsweep.analysis.notation import MARKS
from kvsweep.analysis.report.build import build_report
from tests.analysis.report.screen import open_sections, set_size
from tests.program import report as main

AXE = "axe-core@4.10.3"
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(
        not (shutil.which("chromium") and shutil.which("chromedriver")),
        reason="needs the Debian packages chromium and chromium-driver",
    ),
]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Where the first test leaves a copy of the run with its report, whose figures take ten seconds."""
    return tmp_path_factory.mktemp("made") / "run"


@pytest.fixture
def page(run, make_cell, made):
    """Two models and two benchmarks; the scores of a compressed cell lie below those of its full cache."""
    if made.exists():
        return shutil.copytree(made, run) / "report" / "report.html"
    for model, title in (("toy_qwen", "Toy-Qwen"), ("toy_llama", "Toy-Llama")):
        for benchmark, name in (("toy_chain", "Chain"), ("toy_add", "Add")):
            place = {"model": model, "model_title": title, "benchmark": benchmark, "benchmark_title": name}
            make_cell([[1]] * 30, **place)
            for i, ratio in enumerate((0.1, 0.3, 0.5)):
                for j, window in enumerate((16, 48)):
                    right = [[int(k >= (25, 12, 0)[i] - 3 * j)] for k in range(30)]
                    make_cell(right, policy="dynts", keep_ratio=ratio, local_window=window, **place)
            make_cell([[0]] * 30, policy="window", **place)
    page = build_report(run)
    shutil.copytree(run, made)
    return page


def wait_for(browser: Any, script: str) -> Any:
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(browser, 30).until(lambda one: one.execute_script(f"return {script}"))


def test_the_headline_names_the_best_setting_in_words_and_numbers(page, browser, capsys):
    browser.get(page.as_uri())
    texts = """const textsOf = (cell) => [...cell.children].map((one) => one.textContent.trim());
        return [...document.querySelectorAll("#headline td")].map(textsOf);"""
    cells = browser.execute_script(texts)
    assert len(cells) == 4
    rows = list(csv.DictReader((page.parent / "cells.csv").open()))
    for verdict, chosen, difference, saved, setting, counted in cells:
        ratio, window = re.search(r"DynTS (\S+) / (\S+),", setting).groups()
        (row, *_) = (row for row in rows if (row["keep_ratio"], row["local_window"]) == (ratio, f"{window}.0"))
        assert verdict.lstrip("✓() †") == row["decision"]
        # The heatmap's cell has the mark and the word of the same label.
        mark, spoken = browser.execute_script(
            """const cell = document.querySelector(`#boards [data-cell="${arguments[0]}"]`);
            return [cell.querySelector("b")?.textContent ?? "", cell.title.split(", ")];""",
            row["cell_id"],
        )
        assert verdict.startswith(mark)
        assert row["decision"] in spoken
        alone = row["decision"] in ("safe", "small loss") and row["recommendable"] == "False"
        assert chosen.startswith("recommended" if row["recommendable"] == "True" else "loses least")
        assert alone == chosen.endswith("settings one may be safe by luck")
        points, low, high = (f"{100 * float(row[name]):+.1f}" for name in ("diff_to_full", "these_low", "these_high"))
        assert difference.replace("+0.0", "0.0") == f"{points} points ({low} to {high})".replace("+0.0", "0.0")
        peak, mean = (f"{100 - 100 * float(row[name]):.1f}%" for name in ("kept_memory", "kept_memory_mean"))
        assert saved == f"memory saved: {peak} at the peak, {mean} in the mean"
        of_benchmark = [one for one in rows if (one["model"], one["benchmark"]) == (row["model"], row["benchmark"])]
        labels = Counter(one["decision"] for one in of_benchmark if one["decision"])
        ranked = ("safe", "small loss", "unclear", "worse")
        listed = ", ".join(f"{labels[name]} {name}" for name in ranked if labels[name] or name == "safe")
        assert counted == f"of {labels.total()} settings: {listed}"
    main([str(page.parent.parent)])
    printed = capsys.readouterr().out
    for model in ("Toy-Qwen", "Toy-Llama"):
        for benchmark in ("Chain", "Add"):
            assert re.search(rf"{model} +{benchmark} +\S.*points|{model} +{benchmark} +\w", printed)
    assert printed.splitlines()[-1] == str(page)


def test_the_filter_holds_for_every_table(page, browser):
    browser.get(page.as_uri())
    open_sections(browser)
    shown = """const parts = ["#boards table.heatmap:not(.policies)", "#cell-table tbody tr", "#outcomes details",
          "#headline tbody td", "main .wide table[data-model]"], seen = (one) => one.checkVisibility();
        return parts.map((part) => [...document.querySelectorAll(part)].filter(seen).length);"""
    choose = """const [name, value] = arguments, choice = document.getElementById(`filter-${name}`);
        choice.value = value; choice.dispatchEvent(new Event("change")); return choice.value === value;"""
    everything = browser.execute_script(shown)
    assert everything[:4] == [4, 32, 4, 4]
    for name, value, left in (
        ("model", "Toy-Llama", [2, 16, 2, 2]),
        ("benchmark", "Add", [1, 8, 1, 1]),
        ("policy", "DynTS", [1, 6, 1, 1]),
    ):
        assert browser.execute_script(choose, name, value)
        assert browser.execute_script(shown)[:4] == left, name
    assert browser.execute_script(shown)[4] < everything[4]
    said = "return document.getElementById('constant').textContent"
    rows = "return document.querySelectorAll('#cell-table tbody tr').length"
    assert browser.execute_script(choose, "verdict", "worse")
    assert "verdict worse" in browser.execute_script(said)
    faded = "return [...document.querySelectorAll('#boards td button.off')].length"
    assert browser.execute_script(faded) == 6 - browser.execute_script(rows)
    # The address leads to the page as it is filtered.
    link = browser.current_url
    assert "verdict=worse" in link
    browser.get("about:blank")
    browser.get(link)
    open_sections(browser)
    assert "verdict worse" in browser.execute_script(said)


def test_what_is_the_same_in_every_cell_is_said_once(page, browser):
    browser.get(page.as_uri())
    open_sections(browser)
    heads = "return [...document.querySelectorAll('#cell-table thead th')].map((head) => head.textContent)"
    said = browser.execute_script("return document.getElementById('constant').textContent")
    assert said.startswith("The same in every compressed cell below: draws 1; ")
    assert "draws" not in browser.execute_script(heads)
    browser.execute_script("view.value = 'settings'; view.dispatchEvent(new Event('change'));")
    assert "keep ratio" in browser.execute_script(heads)


def test_the_legend_has_the_marks_that_occur(page, browser):
    browser.get(page.as_uri())
    legend, boards = browser.execute_script(
        "return [document.querySelector('#heatmaps + p').textContent, document.getElementById('boards').textContent]"
    )
    for mark, meaning in MARKS.items():
        if mark not in "–(✓)✓":
            assert (meaning in legend) == (mark in boards), mark
    assert MARKS["†"] in legend
    assert MARKS["*"] not in legend
    assert "right in some of the draws" not in browser.execute_script("return outcomes.textContent")


def test_on_a_phone_the_completion_comes_before_its_controls(page, browser):
    set_size(browser, 390, 844)
    try:
        browser.get(page.as_uri())
        browser.execute_script("document.querySelector('#boards td button.cell').click()")
        wait_for(browser, "document.querySelector('#drill .pair')")
        place = "return document.querySelector(arguments[0]).getBoundingClientRect().top"
        text, controls = (browser.execute_script(place, f"#drill {part}") for part in (".pair .draw", ".bar"))
        assert text < 844
        assert controls > text
        assert not browser.execute_script("return document.querySelector('#list').checkVisibility()")
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_a_link_leads_to_a_completion_and_back_closes_it(page, browser):
    from selenium.webdriver.common.keys import Keys

    browser.get(page.as_uri())
    wait_for(browser, "document.querySelector('#boards button.cell')")
    browser.execute_script("document.querySelector('#boards td button.cell').focus(); document.activeElement.click()")
    wait_for(browser, "document.querySelector('#drill .pair')")
    asked = "return Object.fromEntries(new URLSearchParams(location.hash.slice(1)))"
    first = browser.execute_script(asked)
    # The focus lies on the open completion, and n and the arrows lead on.
    assert browser.execute_script("return document.activeElement.dataset.key") == f"0 {first['problem']}"
    assert browser.execute_script("return getComputedStyle(document.body).overflow") == "hidden"
    assert browser.execute_script("return document.querySelector('#drill details[open] .draw') !== null")
    for key, back in (("n", "p"), (Keys.ARROW_DOWN, Keys.ARROW_UP)):
        browser.switch_to.active_element.send_keys(key)
        assert browser.execute_script(asked)["problem"] != first["problem"]
        browser.switch_to.active_element.send_keys(back)
        assert browser.execute_script(asked) == first
    link = browser.current_url
    browser.back()
    wait_for(browser, "!drill.open")
    assert browser.execute_script("return document.activeElement.className") == "cell"
    browser.get("about:blank")
    browser.get(link)
    wait_for(browser, "document.querySelector('#drill .pair')")
    heading = "return document.querySelector('#drill h3').textContent"
    assert browser.execute_script(heading) == f"{first['problem']}, draw 0"


def test_colours_stand_for_true_places_on_a_scale(page, browser):
    browser.get(page.as_uri())
    wait_for(browser, "document.querySelector('#boards .panels > div')")
    seen = """const panel = document.querySelector("#boards .panels > div");
        const cells = [...panel.querySelectorAll("button.cell")];
        return [cells.map((one) => [parseFloat(one.textContent), one.style.background]),
          [...panel.querySelectorAll(".scale span")].map((one) => parseFloat(one.textContent))];"""
    cells, ends = browser.execute_script(seen)
    scores = [score for score, _ in cells]
    assert ends == [min(scores), max(scores)]
    assert scores[0] == 100.0, "the full cache"
    # Equal scores have one colour, others have others.
    assert len({colour for _, colour in cells}) == len(set(scores))
    browser.execute_script("scale.value = 'diff_from_full'; scale.dispatchEvent(new Event('change'));")
    _, ends = browser.execute_script(seen)
    assert ends[0] == -ends[1] < 0


def test_the_printed_answer_takes_three_pages_in_its_colours(page, browser):
    browser.get(page.as_uri())
    printed = base64.b64decode(browser.execute_cdp_cmd("Page.printToPDF", {"printBackground": False})["data"])
    assert len(re.findall(rb"/Type\s*/Page\b", printed)) <= 3
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    try:
        style = """const it = getComputedStyle(document.querySelector(arguments[0]));
            return [it.printColorAdjust, it.textDecorationLine];"""
        assert browser.execute_script(style, "#boards button.cell")[0] == "exact"
        assert browser.execute_script(style, "#headline button.open") == ["exact", "none"]
        panels = "return [...document.querySelectorAll('details.verdicts')].map((one) => one.open)"
        assert all(browser.execute_script(panels))
        hidden = "return ['nav', '#cells', '#filter'].map((one) => document.querySelector(one).checkVisibility())"
        assert browser.execute_script(hidden) == [False] * 3
        assert browser.execute_script("return document.querySelector('#headline').checkVisibility()")
    finally:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


@pytest.fixture(scope="session")
def axe(tmp_path_factory):
    """The code of axe-core, as npm has it."""
    if shutil.which("npm") is None:
        pytest.skip("npm is missing, which fetches axe-core: install Debian's package npm.")
    folder = tmp_path_factory.mktemp("axe")
    done = subprocess.run(["npm", "pack", AXE, "--silent"], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"npm cannot fetch {AXE}: {done.stderr.strip().splitlines()[-1:]}")
    with tarfile.open(folder / done.stdout.strip().splitlines()[-1]) as archive:
        file = archive.extractfile("package/axe.min.js")
        assert file is not None
        return file.read().decode()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing_serious(page, browser, axe, theme):
    feature = {"name": "prefers-color-scheme", "value": theme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    # axe-core may make functions from texts, which the page's own policy forbids.
    browser.execute_cdp_cmd("Page.setBypassCSP", {"enabled": True})
    try:
        browser.get(page.as_uri())
        dark = browser.execute_script("return matchMedia('(prefers-color-scheme: dark)').matches")
        assert dark == (theme == "dark")
        open_sections(browser)
        browser.execute_script(axe)
        check = """const done = arguments[0], grave = ["serious", "critical"];
            axe.run().then(({ violations }) => done(violations.filter((one) => grave.includes(one.impact))
              .map((one) => `${one.id}: ${one.nodes[0].html.slice(0, 200)} ${one.nodes[0].failureSummary}`)));"""
        assert browser.execute_async_script(check) == []
        browser.execute_script("document.querySelector('#boards td button.cell').click()")
        wait_for(browser, "document.querySelector('#drill .pair')")
        assert browser.execute_async_script(check) == []
    finally:
        browser.execute_cdp_cmd("Page.setBypassCSP", {"enabled": False})
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
