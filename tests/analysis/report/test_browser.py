"""The report as a reader sees it, in headless Chromium."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from analysis.pictures.kept import read_kept
from analysis.records import Eviction
from analysis.report.build import build_report
from analysis.report.kept_page import kept_html

MakeCell = Callable[..., Path]

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(
        not (shutil.which("chromium") and shutil.which("chromedriver")),
        reason="needs the Debian packages chromium and chromium-driver",
    ),
]
EVIL = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'></script>"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    profile = tmp_path_factory.mktemp("profile")
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    driver.set_window_size(1300, 1000)
    yield driver
    driver.quit()


def requests(browser: Any) -> set[str]:
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    sent = [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]
    return {url for url in sent if not url.startswith(("file:", "data:", "chrome:"))}


@pytest.fixture
def run(tmp_path: Path, make_cell: MakeCell) -> Path:
    row = {"text": f"a is 4. {EVIL}</think>So {EVIL}", "token_ids": [1, 2]}
    folders = [make_cell([[1], [1], [0]], completion=row)]
    for ratio in (0.1, 0.3, 0.5):
        for window in (16, 48):
            right = [[1], [int(ratio > 0.2)], [int(window == 48)]]
            folders.append(make_cell(right, policy="dynts", keep_ratio=ratio, local_window=window, completion=row))
    for folder in folders:
        problems = [{"id": f"p{i}", "prompt": f"{EVIL} number {i}?", "gold": EVIL} for i in range(3)]
        (folder / "problems.jsonl").write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    return tmp_path / "run"


@pytest.mark.parametrize("embedded", [True, False])
def test_the_page_works_offline(run: Path, browser: Any, embedded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not embedded:
        monkeypatch.setattr("analysis.report.drilldown.MAX_EMBEDDED_BYTES", 0)
    page = build_report(run)
    assert (page.parent / "data").exists() is not embedded
    browser.get_log("performance")
    browser.get(page.as_uri())
    wait = browser.execute_async_script
    opened = wait(
        """const done = arguments[0];
        document.querySelector("table.heatmap button.cell").click();
        const look = () => {
          const found = document.querySelectorAll("#drill .problem");
          if (!found.length) return setTimeout(look, 20);
          found[1].open = true;
          setTimeout(() => done(document.getElementById("drill").innerText), 200);
        };
        look();"""
    )
    # The first button is the largest window's smallest ratio.
    assert "keep ratio 0.1, window 48" in opened
    assert "p1: 0 of 1 right" in opened
    assert "right with the full cache, not here" in opened
    assert opened.count("window.hacked = 1") >= 6
    assert "number 1?" in opened
    assert browser.execute_script("return window.hacked") is None
    assert not browser.execute_script("return document.querySelectorAll('img[src=x]').length")
    assert requests(browser) == set()
    assert browser.get_log("browser") == []


def test_tables_sort(run: Path, browser: Any) -> None:
    browser.get(build_report(run).as_uri())
    column = """const table = [...document.querySelectorAll("table:not(.heatmap)")].at(-1);
        const at = [...table.tHead.rows[0].cells].findIndex((c) => c.textContent.startsWith("Pass@1"));
        table.tHead.rows[0].cells[at].click();
        return [...table.tBodies[0].rows].map((r) => parseFloat(r.cells[at].textContent));"""
    once, twice = browser.execute_script(column), browser.execute_script(column)
    assert once == sorted(once)
    assert twice == sorted(once, reverse=True)
    assert len(set(once)) > 1


def test_evicted_tokens_are_shaded(tmp_path: Path, make_cell: MakeCell, browser: Any) -> None:
    from harness.toy.paths import WEIGHTS

    weights = WEIGHTS / "toy_qwen"
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(weights / "tokenizer.json"))
    text = "c is 4. So d is 5. Done</think>5"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    # Two prompt tokens stay, of the text's first three one head in four holds the second.
    event = {"step": 6, "length_before": 8, "length_after": 5, "held": [100, 2, 0, 1, 25, 1, 0, 1, 100, 3]}
    row = {"text": text, "token_ids": ids, "prompt_tokens": 2, "evictions": [event]}
    for ratio in (0.1, 0.3, 0.5):
        folder = make_cell([[1]], policy="dynts", keep_ratio=ratio, completion=row)
        provenance = json.loads((folder / "provenance.json").read_text())
        provenance["config"] = {"model": {"path": os.fspath(weights)}}
        (folder / "provenance.json").write_text(json.dumps(provenance))
    browser.get(build_report(tmp_path / "run").as_uri())
    shaded = browser.execute_script(
        """document.querySelector("table.heatmap button.cell").click();
        const problem = document.querySelector("#drill .problem");
        problem.open = true; problem.dispatchEvent(new Event("toggle"));
        return [...problem.querySelectorAll(".evicted")].map((one) => [one.textContent, one.title]);"""
    )
    pieces = [tokenizer.decode([token]) for token in ids[:3]]
    titles = [f"{share}% of the heads still hold it" for share in (0, 25, 0)]
    assert shaded == [list(pair) for pair in zip(pieces, titles, strict=True)]


def test_the_kept_page_shades_what_went_and_escapes_the_text(browser: Any, tmp_path: Path) -> None:
    pieces = ["<q>", "a", "b", "c", "d", "</script>"]
    evictions = [
        Eviction(step=3, length_before=4, length_after=3, held=[100, 1, 0, 1, 50, 1, 100, 1]),
        Eviction(step=4, length_before=5, length_after=3, held=[100, 1, 0, 2, 100, 2]),
    ]
    kept = read_kept(pieces, 1, evictions)
    page = tmp_path / "kept.html"
    page.write_text(kept_html(kept, title="a<b", rows=True))
    browser.get(page.as_uri())
    sections = browser.execute_script(
        """return [...document.querySelectorAll(".text")].map((box) => [
          box.previousElementSibling.textContent, box.textContent,
          [...box.querySelectorAll(".evicted")].map((one) => [one.textContent, one.style.backgroundColor])]);"""
    )
    first, second, partly = "rgb(140, 45, 4)", "rgb(254, 227, 145)", "rgba(213, 94, 0, 0.224)"
    assert sections == [
        ["The whole text", "".join(pieces), [["a", first], ["b", second]]],
        ["After eviction 1: 2 of 4 tokens held", "<q>abc", [["a", first], ["b", partly]]],
        ["After eviction 2: 3 of 5 tokens held", "<q>abcd", [["a", first], ["b", second]]],
    ]
    legend = browser.execute_script("return document.getElementById('legend').textContent")
    assert legend.endswith("Gone with: eviction 1 (token 3) eviction 2 (token 4)")
    assert browser.execute_script("return document.querySelector('.question').textContent") == "<q>"
    assert kept_html(kept, title="t").count("<h2>") == 1
    assert browser.get_log("browser") == []
