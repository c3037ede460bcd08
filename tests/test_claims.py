"""Each sentence with a measured number in README, docs and results/published is a row of claims.csv.

results/published/test_findings.py computes the numbers again.
"""

import re
from pathlib import Path

import pandas as pd
import pytest

ROOT = Path(__file__).resolve().parents[1]
PUBLISHED = ROOT / "results" / "published"
CLAIMS = pd.read_csv(PUBLISHED / "claims.csv", dtype=str, keep_default_na=False)
STANDING = CLAIMS[CLAIMS["verdict"] != "gone"]
# A percentage, a correlation or p as ".64", N of M, an error, seconds, minutes, points and times, a share as 1/16.
MEASURED = re.compile(r"\d%|(?<![\w.])\.\d|\d of \d|± ?\d|\d (?:seconds|minutes|points|times)\b|\d/\d")
# What a policy keeps, the margin, levels, suppositions, and a shard.
SETTINGS = re.compile(
    r"30% of the others|(?<![\d.])5 points|2\.5%|the 5% level|5% of (searches|all problems)"
    r"|\d\d% differ|95% (Wilson )?interval"
    r"|probability of 90%|10 points apart|shard 2/4"
)
# One script makes all numbers of a page, and test_findings.py holds its tables and its sentences.
WHOLE = {"results/published/valid_at_thirty.md"}
DOCS = sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))
DOCS.append("results/published/gallery.md")


def page(name: str) -> str:
    """A page of the repository as one line."""
    return " ".join((ROOT / name).read_text().split())


def test_each_claim_stands_on_its_page_and_on_a_table_and_a_test():
    assert set(CLAIMS["verdict"]) <= {"kept", "reworded", "gone"}
    assert not CLAIMS.duplicated(["file", "sentence"]).any()
    for claim in CLAIMS.itertuples():
        assert (claim.sentence in page(claim.file)) == (claim.verdict != "gone"), claim.sentence
    for claim in STANDING.itertuples():
        assert claim.n, claim.sentence
        assert claim.command, claim.sentence
        assert (ROOT / claim.rests_on).is_file(), claim.rests_on
        if not re.fullmatch(r"measured by hand, 20\d\d-\d\d-\d\d.*, .+", claim.held):
            file, name = claim.held.split("::")
            assert f"def {name}(" in (ROOT / file).read_text(), claim.held
        for script in re.findall(r"scripts/\S+\.py", claim.command):
            assert (ROOT / script).is_file(), script


@pytest.mark.parametrize("name", ["README.md", "results/published/README.md", *DOCS])
def test_each_measured_number_is_claimed(name):
    text = " ".join(re.sub(r"```.*?```", "", (ROOT / name).read_text(), flags=re.DOTALL).split())
    for sentence in STANDING.loc[STANDING["file"] == name, "sentence"]:
        text = text.replace(sentence, "")
    text = SETTINGS.sub("", text)
    assert [text[max(0, one.start() - 60) : one.end() + 20] for one in MEASURED.finditer(text)] == []


def test_the_scripts_page_says_what_makes_each_published_folder():
    scripts = ROOT / "scripts"
    page = (scripts / "README.md").read_text()
    folders = {path.name for path in PUBLISHED.iterdir() if path.is_dir() and path.name[0] != "_"}
    rows = re.findall(r"^\| ((?:`\w+/`(?:, )?)+) \| .+ \|$", page.partition("made by")[2], re.MULTILINE)
    assert sorted(name for row in rows for name in re.findall(r"\w+", row)) == sorted(folders)
    for script in re.findall(r"`([\w/]+\.(?:py|sh))`", page):
        assert (scripts / script).is_file(), script
