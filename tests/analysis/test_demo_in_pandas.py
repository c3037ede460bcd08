"""The script of docs/files.md reads a run, and its paired test agrees with the report's."""

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_script_of_the_page_runs(run, make_cell):
    dice = random.Random(0)
    make_cell([[1, int(dice.random() < 0.9)] for _ in range(60)])
    for ratio, chance in ((0.2, 0.6), (0.4, 0.8)):
        make_cell(
            [[int(dice.random() < chance) for _ in range(2)] for _ in range(60)], policy="dynts", keep_ratio=ratio
        )
    command = [sys.executable, "docs/demo_in_pandas.py", str(run)]
    environment = {**os.environ, "MPLBACKEND": "agg", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "3 cells, 360 completions, 480 evictions" in ended.stdout
    points = re.search(
        r"best minus full: (\S+) points, 95% (\S+) to (\S+), p = (\S+) \(the report's, .*: (\S+)\)", ended.stdout
    )
    assert points, ended.stdout
    difference, low, high, p, reported = map(float, points.groups())
    assert low < difference < high < 0
    assert 0 < p < 0.05
    assert abs(p - reported) < 0.01
    assert (run / "report" / "by_evictions.png").stat().st_size > 10_000


def test_the_notebook_has_the_cells_of_the_script():
    parts = re.split(r"^# %% ", (ROOT / "docs/demo_in_pandas.py").read_text(), flags=re.MULTILINE)[1:]
    notebook = json.loads((ROOT / "docs/demo_in_pandas.ipynb").read_text())
    texts = ["".join(cell["source"]) for cell in notebook["cells"][1:]]
    heads, codes = zip(*(part.split("\n", 1) for part in parts), strict=True)
    assert texts[::2] == [f"## {head}" for head in heads]
    assert texts[1::2] == [code.strip() for code in codes]
    assert (notebook["nbformat"], notebook["metadata"]["kernelspec"]["language"]) == (4, "python")
