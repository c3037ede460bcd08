"""Gather README, docs and the published results for `make site`, and build the static site in build/site.

    python scripts/site.py            the site; any dead link ends it with a non-zero status

MkDocs reads pages below one folder alone. This script copies them there in the repository's layout; a link to a file
that is no page, such as a script, becomes plain text, because a site has no source to show.
"""

import argparse
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "results/README.md", "scripts/README.md")
FOLDERS = ("docs", "results/published", "results/reference")
LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|`[^`]*`)*)\]\(([^)#\s]+)(#[^)\s]*)?\)")


def gather(target: Path) -> None:
    """Copy every page, picture and report to the folder, README as its index."""
    shutil.rmtree(target, ignore_errors=True)
    for name in PAGES:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target / name)
    for name in FOLDERS:
        shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    # A page called README would stand beside the folder's index.
    for page in sorted(target.rglob("README.md")):
        page.rename(page.with_name("index.md"))
    for page in sorted(target.rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        page.write_text(LINK.sub(partial(_link, folder=page.parent, target=target), text), encoding="utf-8")


def _link(found: re.Match[str], folder: Path, target: Path) -> str:
    """The link as the site has it: to the index in place of README; only its text where the site has no such file."""
    text, address, anchor = found[1], found[2], found[3] or ""
    if "://" in address or address.startswith("mailto:"):
        return found[0]
    source = folder / address  # as the repository names it: the site may lack it
    address = re.sub(r"README\.md$", "index.md", address)
    place = folder / address
    if place.is_dir() and (place / "index.md").is_file():
        place, address = place / "index.md", f"{address.rstrip('/')}/index.md"
    if place.is_file():
        return f"[{text}]({address}{anchor})"
    inside = source.resolve().is_relative_to(target)
    if not inside or not (ROOT / source.resolve().relative_to(target.resolve())).exists():
        raise SystemExit(f"site.py: error: {folder} links to {address}, which does not exist: mend the link.")
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--folder", type=Path, default=ROOT / "build", help="where pages/ and site/ go")
    options = parser.parse_args()
    pages = options.folder.resolve() / "pages"
    gather(pages)
    config = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    changed = config.replace("build/pages", str(pages)).replace("build/site", str(options.folder.resolve() / "site"))
    (options.folder / "mkdocs.yml").write_text(changed, encoding="utf-8")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-f", str(options.folder / "mkdocs.yml")]
    code = subprocess.run(command, check=False).returncode
    if code:
        sys.exit(code)
    print(options.folder / "site" / "index.html")


if __name__ == "__main__":
    main()
