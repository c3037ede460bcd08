"""The report as a reader sees it, in headless Chromium."""

import csv
import html
import http.server
import json
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvsweep.analysis import notation
from kvsweep.analysis.figures.completion import kept_html, read_kept
from kvsweep.analysis.load import load_run
from kvsweep.analysis.report.build import build_report
from kvsweep.analysis.report.drilldown import drill_data
from kvsweep.analysis.report.page import run_page
from kvsweep.analysis.statistics.sentences import analyse
from kvsweep.cli import main
from kvsweep.run_files.row_types import Eviction
from tests.analysis.report.screen import DRAWN, open_sections, set_size

MakeCell = Callable[..., Path]

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(
        not (shutil.which("chromium") and shutil.which("chromedriver")),
        reason="needs the Debian packages chromium and chromium-driver",
    ),
]
EVIL = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'></script>"


def requests(browser: Any) -> set[str]:
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    sent = [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]
    # The browser's own first tab asks too, for chrome: and chrome-untrusted:.
    return {url for url in sent if not url.startswith(("file:", "data:", "chrome"))}


@pytest.fixture
def written_run(tmp_path, make_cell) -> Path:
    row = {"text": f"a is 4. {EVIL}</think>So {EVIL}", "token_ids": [1, 2]}
    folders = [make_cell([[1], [1], [0]], completion=row)]
    for ratio in (0.1, 0.3, 0.5):
        for window in (16, 48):
            right = [[1], [int(ratio > 0.2)], [int(window == 48)]]
            folders.append(make_cell(right, policy="dynts", keep_ratio=ratio, local_window=window, completion=row))
    for folder in folders:
        problems = [{"id": f"p{i}", "prompt": f"{EVIL} number {i}?", "gold": EVIL} for i in range(3)]
        (folder / "problems.jsonl").write_text(
            "".join(json.dumps({"schema": 1, **problem}) + "\n" for problem in problems)
        )
    return tmp_path / "run"


# As Jenkins shows the pages of a build, but for the pictures' addresses.
NO_SCRIPTS = "sandbox allow-same-origin; default-src 'none'; img-src data:; style-src 'unsafe-inline'"


@contextmanager
def served(folder: Path, policy: str = "") -> Iterator[str]:
    """The address of a web server that shows a folder, with a Content-Security-Policy of its own if one is given."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def end_headers(self):
            if policy:
                self.send_header("Content-Security-Policy", policy)
            super().end_headers()

        def log_message(self, *_: object):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_files_beside_the_page_are_read_over_http_too(written_run, browser, monkeypatch):
    monkeypatch.setattr("kvsweep.analysis.report.drilldown.MAX_EMBEDDED_BYTES", 0)
    page = build_report(written_run)
    with served(page.parent) as address:
        browser.get(f"{address}/report.html")
        opened = browser.execute_async_script(
            """const done = arguments[0];
            document.querySelector("table.heatmap td button.cell").click();
            const look = () => {
              const shown = document.querySelector("#drill .pair, #drill .alert");
              shown ? done(document.getElementById("drill").innerText) : setTimeout(look, 20);
            };
            look();"""
        )
    assert "DynTS 0.1 / 48" in opened
    assert "cannot be loaded" not in opened


def test_the_page_without_scripts_has_its_pictures_and_says_what_lacks(written_run, browser):
    page = build_report(written_run)
    with served(page.parent, NO_SCRIPTS) as address:
        browser.get(f"{address}/report.html")
        [said] = browser.find_elements("css selector", "main noscript > p")
        pictures = browser.find_elements("css selector", "main noscript img")
        assert said.text.startswith("Scripts are off here")
        assert pictures
        assert all(picture.is_displayed() for picture in pictures)
        assert not [one for one in browser.find_elements("css selector", ".scripted, .bar") if one.is_displayed()]
        links = [link for link in browser.find_elements("css selector", "nav a") if link.is_displayed()]
        sections = [browser.find_element("id", link.get_attribute("href").partition("#")[2]) for link in links]
        assert {"Heatmaps", "Verdicts", "Comparisons", "Scores"} <= {link.text for link in links}
        assert all(section.is_displayed() for section in sections)
        for section in browser.find_elements("css selector", "details.section:not(.scripted)"):
            section.find_element("tag name", "summary").click()
            assert [one for one in section.find_elements("css selector", "td, dd, img") if one.is_displayed()], (
                section.text
            )
        files = [
            link.get_attribute("href").rpartition("/")[2]
            for link in browser.find_elements("css selector", "figcaption a")
        ]
        assert files
        assert all((page.parent / file).is_file() for file in files)
    assert any("'allow-scripts' permission is not set" in entry["message"] for entry in browser.get_log("browser"))


@pytest.mark.parametrize("embedded", [True, False])
def test_the_page_works_offline(written_run, browser, embedded, monkeypatch):
    if not embedded:
        monkeypatch.setattr("kvsweep.analysis.report.drilldown.MAX_EMBEDDED_BYTES", 0)
    page = build_report(written_run)
    assert (page.parent / "data").exists() is not embedded
    browser.get_log("performance")
    browser.get(page.as_uri())
    wait = browser.execute_async_script
    opened = wait(
        """const done = arguments[0];
        document.querySelector("table.heatmap td button.cell").click();
        const look = () => {
          if (!document.querySelector("#drill[open] .pair")) return setTimeout(look, 20);
          document.querySelectorAll("#drill details").forEach((part) => { part.open = true; });
          DRAWN.then(() => done(document.getElementById("drill").innerText));
        };
        look();""".replace("DRAWN", DRAWN)
    )
    # The first button is the largest window's smallest ratio; the second problem is the first that it loses.
    assert "DynTS 0.1 / 48" in opened
    assert "p1, draw 0" in opened
    assert "right with the full cache, wrong here (1)" in opened
    assert opened.count("window.hacked = 1") >= 6
    assert "number 1?" in opened
    assert re.search(r"full cache\n+correct, answer 4, 201 tokens\n", opened)
    assert re.search(r"DynTS 0.1 / 48, trigger 128\n+wrong, answer 4, 201 tokens, 2 evictions\n", opened)
    assert browser.execute_script("return window.hacked") is None
    assert not browser.execute_script("return document.querySelectorAll('img[src=x]').length")
    assert requests(browser) == set()
    assert browser.get_log("browser") == []


@pytest.mark.parametrize("sandbox", ["", 'sandbox="allow-scripts"'])
def test_the_page_works_in_a_frame_without_an_address(sandbox, written_run, browser, tmp_path):
    """As notebooks, Gradio and Streamlit show HTML."""
    page = html.escape(build_report(written_run).read_text(encoding="utf-8"))
    host = tmp_path / "host.html"
    host.write_text(
        f'<!doctype html><iframe {sandbox} width=1200 height=900 srcdoc="{page}"></iframe>', encoding="utf-8"
    )
    browser.get(host.as_uri())
    browser.switch_to.frame(0)
    for selector in ("table.heatmap td button.cell", "#outcomes td"):
        click(browser, selector)
        assert "draw 0" in browser.execute_script("return drill.innerText")
    browser.execute_script("drill.close()")
    count = "return document.querySelectorAll('#cell-table tbody tr').length"
    before = browser.execute_script(count)
    browser.execute_script(
        """const choice = document.getElementById("filter-policy");
        choice.value = choice.options[1].value;
        choice.onchange();"""
    )
    assert browser.execute_script(count) < before
    browser.find_element("css selector", "nav a[href='#cells']").click()
    assert browser.execute_script("return document.getElementById('cells').getBoundingClientRect().top") < 450
    assert browser.get_log("browser") == []


def test_the_page_of_judge_opens_with_a_lost_answer(tmp_path, browser):
    files = []
    for name, lost in (("full", ()), ("fp8", (3, 5))):
        rows = [{"id": f"p{p}", "correct": p not in lost, "text": f"{EVIL} {p in lost}"} for p in range(8)]
        files.append(tmp_path / f"{name}.jsonl")
        files[-1].write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(SystemExit):
        main(["judge", *map(str, files), "--html", str(tmp_path / "page.html")])
    browser.get((tmp_path / "page.html").as_uri())
    browser.execute_script("document.querySelector('button.open').click()")
    opened = browser.execute_async_script(
        """const done = arguments[0];
        const look = () => {
          if (!document.querySelector("#drill[open] .pair")) return setTimeout(look, 20);
          done([document.getElementById("drill").textContent, document.querySelectorAll("#list button").length]);
        };
        look();"""
    )
    assert "100.0% -> 75.0%, -25.0 points" in opened[0]
    assert "right with full, wrong here (2)" in opened[0]
    assert "p3, draw 0" in opened[0]
    assert opened[1] == 2  # the list shows what was lost
    assert browser.execute_script("return window.hacked ?? null") is None
    assert browser.execute_script("return document.querySelectorAll('#outcomes td').length") == 16
    assert not requests(browser)
    with served(tmp_path, NO_SCRIPTS) as address:
        browser.get(f"{address}/page.html")
        assert browser.find_element("css selector", "main noscript > p").is_displayed()
        assert not [one for one in browser.find_elements("css selector", ".scripted") if one.is_displayed()]


def test_a_phone_and_python_read_the_same(written_run, browser):
    """At 390 px the best settings stand below each other in full, and halves are rounded as `format` rounds them."""
    browser.get(build_report(written_run).as_uri())
    shares = [n / 32 for n in range(-32, 33)] + [0.1435, 0.0005, 0.9995, -0.0003]
    shown = browser.execute_script("return arguments[0].map((share) => percent(share, true))", shares)
    assert shown == [notation.percent(share, signed=True) for share in shares]
    set_size(browser, 390, 844)
    inside = """return [...document.querySelectorAll("#headline td *")].map((part) => part.getBoundingClientRect())
        .filter((box) => box.left < 0 || box.right > 390).length"""
    assert browser.execute_script(inside) == 0
    named = "return getComputedStyle(document.querySelector('#headline td'), '::before').content"
    assert browser.execute_script(named) == '"Chain"'
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_tables_sort(written_run, browser):
    browser.get(build_report(written_run).as_uri())
    column = """const table = [...document.querySelectorAll("table:not(.heatmap)")].at(-1);
        const at = [...table.tHead.rows[0].cells].findIndex((c) => c.textContent.startsWith("Pass@1"));
        table.tHead.rows[0].cells[at].querySelector("button").click();
        return [...table.tBodies[0].rows].map((r) => parseFloat(r.cells[at].textContent));"""
    once, twice = browser.execute_script(column), browser.execute_script(column)
    assert once == sorted(once)
    assert twice == sorted(once, reverse=True)
    assert len(set(once)) > 1


def test_a_completion_lies_beside_the_full_caches(tmp_path, make_cell, browser):
    from tokenizers import Tokenizer

    from kvsweep.harness.settings import WEIGHTS

    weights = WEIGHTS / "toy_qwen"
    tokenizer = Tokenizer.from_file(str(weights / "tokenizer.json"))
    texts = ["c is 4. So d is 5. Let me see again. Done</think>5", "c is 4. So d is 5. Fine, next one. Done</think>6"]
    ids = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    pieces = [[tokenizer.decode([token]) for token in one] for one in ids]
    differs = next(i for i, pair in enumerate(zip(*ids, strict=False)) if pair[0] != pair[1])
    # Two prompt tokens stay; of the text's first three tokens one head in four holds the second.
    first = {"step": 6, "length_before": 8, "length_after": 5, "held": [100, 2, 0, 1, 25, 1, 0, 1, 100, 3]}
    step = differs + 2
    second = {"step": step, "length_before": step + 2, "length_after": 5, "held": [100, 2, 0, step - 3, 100, 3]}
    events = [first, second]
    rows = [{"text": texts[0], "token_ids": ids[0], "num_tokens": len(ids[0]), "evictions": []}]
    rows += [{"text": texts[1], "token_ids": ids[1], "num_tokens": len(ids[1]), "evictions": events}] * 3
    for ratio, row in zip((None, 0.1, 0.3, 0.5), rows, strict=True):
        cell = {"policy": "dynts", "keep_ratio": ratio} if ratio else {}
        folder = make_cell([[0 if ratio else 1]], **cell, completion=row | {"prompt_tokens": 2})
        provenance = json.loads((folder / "provenance.json").read_text())
        provenance["tokenizer"] = "tokenizers/toy.json"
        (folder / "provenance.json").write_text(json.dumps(provenance))
    (tmp_path / "run" / "tokenizers").mkdir()
    shutil.copy(weights / "tokenizer.json", tmp_path / "run" / "tokenizers" / "toy.json")
    browser.get(build_report(tmp_path / "run").as_uri())
    show = """const slider = document.querySelector("#drill input[type=range]");
        slider.value = arguments[0];
        slider.dispatchEvent(new Event("input"));"""
    state = """return [...document.querySelectorAll("#drill .pair section")].map((pane) => [
          pane.querySelector(".draw").textContent,
          [...pane.querySelectorAll(".evicted")].map((one) => [one.textContent, one.title]),
          [...pane.querySelectorAll(".differs")].map((one) => one.textContent)]);"""
    show += state
    click(browser, "table.heatmap td button.cell")
    titles = [f"{share}% of the heads still hold it" for share in (0, 25, 0)]
    shaded = [[piece, title] for piece, title in zip(pieces[1][:3], titles, strict=True)]
    # At an eviction, no token that was written after it; the full cache's text goes as far.
    begin = "".join(pieces[0][:6])
    assert browser.execute_script(show, 1) == [[begin, [], []], [begin, shaded, []]]
    found = browser.execute_script(show, 2)
    assert [pane[0] for pane in found] == ["".join(one[:step]) for one in pieces]
    assert "".join(piece for piece, _ in found[1][1]) == "".join(pieces[1][: step - 3])
    marked = [[one[differs]] for one in pieces]
    end = browser.execute_script(show, 3)
    assert [pane[0] for pane in end] == texts
    assert [pane[2] for pane in end] == marked
    # The button shows the cache as the first token that differs found it: after the first eviction, up to that token.
    jump = (
        "[...document.querySelectorAll('#drill .bar button')].find((one) => one.textContent === arguments[0]).click()"
    )
    browser.execute_script(jump, f"first difference, token {differs}")
    found = browser.execute_script(state)
    assert found == [["".join(one[: differs + 1]), shaded if i else [], marked[i]] for i, one in enumerate(pieces)]
    assert browser.execute_script("return document.querySelector('#drill input[type=range]').value") == "1"
    assert f"Evictions came at token 6, {step}." in browser.execute_script("return drill.textContent")
    browser.execute_script(show, 3)
    # The fork stands behind the last token that both must share.
    before = """const fork = document.querySelector("#drill .pair section:last-child .fork"), range = new Range();
        range.setStart(fork.closest(".draw"), 0);
        range.setEndBefore(fork);
        return range.toString();"""
    assert browser.execute_script(before) == "".join(pieces[1][:7])
    assert browser.execute_script("return document.querySelectorAll('#drill svg polyline').length") == 2
    assert browser.get_log("browser") == []


def test_the_kept_page_shades_what_went_and_escapes_the_text(browser, tmp_path):
    pieces = ["<q>", "a", "b", "c", "d", "</script>"]
    evictions = [
        Eviction(step=3, length_before=4, length_after=3, held=[100, 1, 0, 1, 50, 1, 100, 1]),
        Eviction(step=4, length_before=5, length_after=3, held=[100, 1, 0, 2, 100, 2]),
    ]
    kept = read_kept(pieces, 1, evictions)
    page = tmp_path / "kept.html"
    page.write_text(kept_html(kept, title="a<b"))
    browser.get(page.as_uri())
    sections = browser.execute_script(
        """return [...document.querySelectorAll(".text")].map((box) => [
          box.textContent,
          [...box.querySelectorAll(".evicted")].map((one) =>
            [one.textContent, one.style.backgroundColor || getComputedStyle(one).textDecorationLine])]);"""
    )
    assert sections == [["".join(pieces), [["a", "line-through"], ["b", "line-through"]]]]
    legend = browser.execute_script("return document.getElementById('legend').textContent")
    assert legend.endswith("Gone with: eviction 1 (token 3) eviction 2 (token 4)")
    assert browser.execute_script("return document.querySelector('.question').textContent") == "<q>"
    assert browser.get_log("browser") == []


def click(browser: Any, selector: str, number: int = 0):
    """Open a completion by a click on the selected part, and wait until the texts are there."""
    browser.execute_script(
        "drill.close(); drill.replaceChildren(); document.querySelectorAll(arguments[0])[arguments[1]].click()",
        selector,
        number,
    )
    wait_for_pair(browser)


def wait_for_pair(browser: Any):
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(browser, 30).until(lambda one: one.execute_script("return document.querySelector('#drill .pair')"))


CHECKS = (Path(__file__).parent / "accessibility.js").read_text()


def test_the_page_answers_on_its_first_screen_and_every_reader_can_use_it(written_run, browser):
    from selenium.webdriver.common.keys import Keys

    page = build_report(written_run)
    regressions = [
        row["regressions"] for row in csv.DictReader((page.parent / "cells.csv").open()) if row["regressions"]
    ]
    set_size(browser, 1400, 900)
    browser.get(page.as_uri())
    # The contents and the heatmap lie on the first screen.
    place = "const box = document.querySelector(arguments[0]).getBoundingClientRect(); return [box.top, box.bottom]"
    for part in ("nav a:last-child", "#headline", "table.heatmap"):
        top, bottom = browser.execute_script(place, part)
        assert 0 <= top < bottom <= 900, part
    open_sections(browser)
    texts, problems = browser.execute_script(CHECKS)
    assert texts > 100
    assert problems == []

    # A keyboard reaches every control.
    browser.execute_script(
        """window.reached = new Set();
        document.addEventListener("focusin", (event) => window.reached.add(event.target));
        document.querySelectorAll("main details").forEach((part) => { part.open = true; });"""
    )
    controls = """const parts = "nav a, main :is(a, button, select, summary, [tabindex='0'])";
        const all = [...document.querySelectorAll(parts)].filter((node) => node.checkVisibility()); """
    count = browser.execute_script(f"{controls} return all.length")
    assert count > 40
    browser.switch_to.active_element.send_keys(*([Keys.TAB] * (count + 5)))
    missed = "return all.filter((node) => !window.reached.has(node)).map((node) => node.outerHTML)"
    assert browser.execute_script(controls + missed) == []
    # In a map of outcomes the arrows move, Enter opens the completion, and Escape closes it.
    browser.execute_script("document.querySelector('#outcomes td').focus()")
    for key in (Keys.ARROW_DOWN, Keys.ARROW_RIGHT, Keys.ENTER):
        browser.switch_to.active_element.send_keys(key)
    wait_for_pair(browser)
    opened = "return document.querySelector('#drill[open] h3')?.textContent"
    assert re.fullmatch(r"p\d, draw 0", browser.execute_script(opened))
    browser.switch_to.active_element.send_keys(Keys.ESCAPE)
    assert browser.execute_script(opened) is None

    # Two clicks lead from a heatmap to a completion beside the full cache's.
    click(browser, "table.heatmap td button.cell")
    browser.execute_script("document.querySelector('#drill input[type=checkbox]').click()")  # it lists what was lost
    browser.execute_script("document.querySelectorAll('#list button')[2].click()")
    assert browser.execute_script(opened) == "p2, draw 0"
    heads = "return [...document.querySelectorAll('#drill .pair h4')].map((head) => head.textContent)"
    assert browser.execute_script(heads) == ["full cache", "Toy-Qwen | Chain: DynTS 0.1 / 48, trigger 128"]
    assert browser.execute_script(CHECKS)[1] == []
    # A search leaves the completions that have its words, and its letters (p and n are keys) open no other completion.
    field = browser.find_element("css selector", "#drill input[type=search]")
    field.send_keys("P2")
    listed = "return [...document.querySelectorAll('#list button')].map((one) => one.textContent)"
    assert {text.partition(",")[0] for text in browser.execute_script(listed)} == {"p2"}
    assert browser.execute_script(opened) == "p2, draw 0"
    field.send_keys(*[Keys.BACKSPACE] * 2, "nothing has this")
    assert browser.execute_script(listed) == []
    # The filter counts what the report calls regressions, and shows as many.
    counted = []
    for number in range(browser.execute_script("return document.querySelectorAll('td button.cell').length")):
        click(browser, "table.heatmap td button.cell", number)
        counted.append(
            browser.execute_script(
                """const filter = document.querySelector("#drill input[type=checkbox]");
                if (!filter.checked) filter.click();
                const said = filter.parentElement.textContent.match(/[(](\\d+)[)]/)[1];
                return [said, document.querySelectorAll("#list button").length];"""
            )
        )
    assert sorted(float(said) for said, _ in counted) == sorted(map(float, regressions))
    assert all(int(said) == listed for said, listed in counted)

    # On a narrow screen nothing makes the page scroll sideways, be the dialog open or closed.
    for is_open in (True, False):
        set_size(browser, 420, 900)
        wide = "return [document.documentElement, drill].map((box) => box.scrollWidth - box.clientWidth)"
        assert browser.execute_script(wide) == [0, 0], is_open
        browser.execute_script("drill.close()")
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert browser.get_log("browser") == []


def test_a_page_of_20_000_completions_is_ready_within_five_seconds(tmp_path, make_cell, browser):
    row = {"text": "Let me see. a is 4, b is 5. " * 40, "token_ids": [1] * 300}
    for benchmark in range(5):
        for ratio in range(20):
            cell = {"policy": "dynts", "keep_ratio": ratio / 20} if ratio else {}
            correct = [[int((p + ratio + draw) % 3 > 0) for draw in range(4)] for p in range(50)]
            make_cell(correct, **cell, benchmark=f"b{benchmark}", benchmark_title=f"B{benchmark}", completion=row)
    run = load_run(tmp_path / "run")
    assert len(run.completions) == 20_000
    page = tmp_path / "page.html"
    page.write_text(run_page(analyse(run), [], *drill_data(run, 20_000, tmp_path)))
    browser.get("about:blank")
    # The processor's time, not the clock's: other programs on the machine make no difference.
    browser.execute_cdp_cmd("Performance.enable", {"timeDomain": "threadTicks"})
    browser.get(page.as_uri())
    click(browser, "table.heatmap td button.cell")
    assert browser.execute_script("return document.querySelectorAll('#drill .pair section').length") == 2
    metrics = browser.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
    (seconds,) = [entry["value"] for entry in metrics if entry["name"] == "TaskDuration"]
    assert 0 < seconds < 5
