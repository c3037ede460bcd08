"""The site of `make site` builds, has the published reports, and none of its links is dead."""

import importlib.util
import re
import subprocess
import sys
import tomllib
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("material") is None, reason="needs MkDocs: pip install -e '.[site]'"),
]


class Links(HTMLParser):
    """The addresses and the ids of a page."""

    def __init__(self, page: Path):
        super().__init__()
        self.addresses: list[str] = []
        self.ids: set[str] = set()
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]):
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.addresses.append(value)
            elif name == "id" and value:
                self.ids.add(value)


def build(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "scripts/site.py", "--folder", folder]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_the_site_builds_and_no_link_is_dead(tmp_path):
    done = build(tmp_path)
    assert done.returncode == 0, done.stderr
    site = tmp_path / "site"
    pages = {page.resolve(): Links(page) for page in site.rglob("*.html")}
    assert {site / "index.html", site / "docs/faq.html", site / "docs/five_minutes.html"} <= set(pages)
    assert (site / "results/published/demo/report.html").is_file()
    dead = []
    for page, links in pages.items():
        if "results/published" in str(page) and page.name == "report.html":
            continue
        for address in links.addresses:
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                assert parts.scheme in ("https", "mailto", "data"), address
                continue
            place = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            place = place / "index.html" if place.is_dir() else place
            if not place.is_file() or (parts.fragment and place in pages and parts.fragment not in pages[place].ids):
                dead.append(f"{page.relative_to(site)}: {address}")
    # Material's own search links to a place that its script makes, and "/" stands for the 404 page's home.
    assert [one for one in dead if not re.search(r"#__|404\.html", one)] == []
    # Nothing is fetched from another server.
    fetched = re.findall(r'(?:src|href)="(https?://[^"]+\.(?:js|css|woff2?))"', (site / "index.html").read_text())
    assert fetched == []


def test_the_badges_say_what_the_package_says():
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", (ROOT / "docs/badges.svg").read_text())
    badges = dict(zip(texts[::2], texts[1::2], strict=True))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (torch,) = [
        one.removeprefix("torch") for one in project["optional-dependencies"]["engine"] if re.match(r"torch\W", one)
    ]

    def span(bounds):
        low, high = (bound.split(".") for bound in re.fullmatch(r">=([\d.]+),<([\d.]+)", bounds).groups())  # type: ignore[union-attr]
        return f"{'.'.join(low)} to {high[0]}.{int(high[1]) - 1}"

    assert badges["Python"] == span(project["requires-python"])
    assert badges["torch"] == span(torch)
    assert badges["license"] == project["license"]
    assert "gpu" not in (ROOT / "Makefile").read_text().lower()
    assert (
        f"![{'; '.join(f'{name} {value}' for name, value in badges.items() if name != 'demo')}"
        in (ROOT / "README.md").read_text()
    )


def test_a_dead_link_ends_the_build(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("site_script", ROOT / "scripts/site.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    for name in script.PAGES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("[here](docs/nothing.md)" if name == "README.md" else "text")
    for name in script.FOLDERS:
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
    monkeypatch.setattr(script, "ROOT", tmp_path)
    with pytest.raises(SystemExit, match=r"links to docs/nothing.md, which does not exist"):
        script.gather(tmp_path / "pages")
