"""A report of a run whose titles are hostile text."""

import csv
import io
import re

import pytest

from kvsweep.analysis.report.build import build_report


@pytest.mark.slow
def test_a_report_of_hostile_titles_is_inert(make_cell):
    title = '=HYPERLINK("x") </script><img src=x onerror=alert(1)> | \\input{x} $\\frac{$ %\x1b[2J'
    cell = make_cell([[1, 0]], model="=1+1", model_title=title, benchmark_title=title)
    make_cell([[1, 1]], model="=1+1", model_title=title, benchmark_title=title, policy="dynts")
    page = build_report(cell.parent)
    report = page.parent
    html = page.read_text()
    assert "<img src=x" not in html
    assert html.count("</script>") == html.count("<script")
    rows = list(csv.reader(io.StringIO((report / "cells.csv").read_text())))
    texts = [cell for row in rows[1:] for cell in row if not re.fullmatch(r"-?[\d.e-]+", cell)]
    assert not [text for text in texts if text[:1] in set("=+-@\t\r")]
    assert "<img" not in (report / "tables.md").read_text().replace("\\<img", "")
    latex = (report / "tables.tex").read_text()
    assert "\\input" not in latex
    assert "\\frac" not in latex
    for path in report.rglob("*"):
        if path.suffix in {".csv", ".md", ".tex", ".html", ".svg"}:
            assert "\x1b" not in path.read_text(), path
