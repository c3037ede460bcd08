"""Figures depend on no matplotlibrc, locale or backend of a user, and on fonts only where they must."""

import os
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytest
from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen
from matplotlib.font_manager import fontManager
from matplotlib.text import Text

from kvsweep.analysis.figures import style
from tests.analysis.conftest import write_cell

ROOT = Path(__file__).resolve().parents[3]
MATPLOTLIBRC = """
figure.dpi: 50
figure.facecolor: red
figure.constrained_layout.h_pad: 0.5
font.size: 20
font.sans-serif: Verdana
savefig.bbox: tight
savefig.transparent: True
axes.prop_cycle: cycler("color", ["r", "g"])
axes.formatter.use_locale: True
axes.titleweight: bold
lines.linewidth: 5
xtick.direction: in
image.cmap: jet
path.sketch: 1, 100, 2
svg.fonttype: none
pdf.compression: 0
"""


def report(run: Path, output: Path, **environment: str) -> dict[str, str]:
    """The digests of a report's pictures, drawn by a process of its own."""
    command = [sys.executable, "-m", "kvsweep.cli", "report", str(run), "--pdf", "--output", str(output)]
    ended = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    pictures = [path for path in output.rglob("*") if path.suffix in (".png", ".svg", ".pdf")]
    return {path.name: sha256(path.read_bytes()).hexdigest() for path in pictures}


@pytest.mark.slow
def test_a_users_matplotlibrc_locale_and_backend_change_nothing(tmp_path, run):
    write_cell(run, [[1], [1], [1]])
    for policy in ("window", "random"):
        for budget in (100, 200):
            write_cell(run, [[1], [0], [1]], policy=policy, budget=budget)
    (tmp_path / "matplotlibrc").write_text(MATPLOTLIBRC)
    mine = {
        "MATPLOTLIBRC": str(tmp_path / "matplotlibrc"),
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
        "LC_ALL": "C",
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
    }
    plain = report(run, tmp_path / "plain")
    assert report(run, tmp_path / "mine", **mine) == plain


def test_a_report_has_png_files_and_pdf_only_with_its_option(run, kvsweep):
    for policy in ("full", "dynts"):
        write_cell(run, [[1]], policy=policy)
    kvsweep("report", str(run))
    assert {path.suffix for path in run.glob("report/memory*")} == {".png", ".svg", ".txt"}
    kvsweep("report", str(run), "--pdf")
    assert [*run.glob("report/memory*.pdf")]


@pytest.fixture
def fonts(tmp_path, monkeypatch):
    """The folder of all fonts of a machine, which is empty."""
    listed = list(fontManager.ttflist)
    monkeypatch.setattr(style, "findSystemFonts", lambda: [str(path) for path in tmp_path.glob("*.ttf")])
    style._families_with.cache_clear()
    yield tmp_path
    fontManager.ttflist[:] = listed
    style._families_with.cache_clear()


def write_font(path: Path, characters: str):
    """A font with these characters, each a filled square."""
    pen = TTGlyphPen(None)
    pen.moveTo((0, 0))
    for corner in ((0, 800), (800, 800), (800, 0)):
        pen.lineTo(corner)
    pen.closePath()
    names = [".notdef", *(f"u{ord(character):x}" for character in characters)]
    font = FontBuilder(1000)
    font.setupGlyphOrder(names)
    font.setupCharacterMap(dict(zip(map(ord, characters), names[1:], strict=True)))
    font.setupGlyf(dict.fromkeys(names, pen.glyph()))
    font.setupHorizontalMetrics(dict.fromkeys(names, (1000, 0)))
    font.setupHorizontalHeader(ascent=800, descent=-200)
    font.setupNameTable({"familyName": path.stem, "styleName": "Regular"})
    font.setupOS2()
    font.setupPost()
    font.save(path)


def saved(title: str, folder: Path) -> bytes:
    figure = style.new_figure((2, 2))
    figure.suptitle(title)
    figure.subplots().set_xticks([0, 1], [title, "b"])
    folder.mkdir(exist_ok=True)
    style.save_figure(figure, folder, "a")
    assert all(isinstance(text, Text) for text in figure.findobj(Text))
    return (folder / "a.png").read_bytes()


def test_a_users_own_font_of_that_name_changes_nothing(fonts):
    plain = saved("a", fonts)
    write_font(fonts / "STIXGeneral.ttf", "ab")
    fontManager.addfont(fonts / "STIXGeneral.ttf")
    assert saved("a", fonts) == plain


def test_the_caption_lies_beside_the_figure(tmp_path):
    figure = style.new_figure((2, 2))
    figure.set_label("Toy-Qwen: Pass@1 ± standard error")
    saved_as = style.save_figure(figure, tmp_path, "a")
    assert saved_as["txt"].read_text() == "Toy-Qwen: Pass@1 ± standard error\n"
    assert b"standard error" not in saved_as["svg"].read_bytes()


@pytest.mark.slow
def test_a_font_that_has_the_characters_is_used(fonts, recwarn):
    plain = saved("a", fonts)
    with pytest.warns(UserWarning, match="Glyph"):
        boxes = saved("模型", fonts)
    style._families_with.cache_clear()
    write_font(fonts / "Whole.ttf", "模型")
    (fonts / "none.ttf").write_text("no font")
    assert saved("模型", fonts) != boxes
    assert style._families_with("型模") == ["Whole"]
    assert saved("a", fonts) == plain
    assert not recwarn.list
