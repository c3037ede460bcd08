"""scripts/publish.py on a small real run."""

import base64
import json
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from kvsweep.analysis.load import load_run
from kvsweep.analysis.report.drilldown import cells_data

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow  # a script that makes what is published
@pytest.mark.release
def test_a_run_is_published(kvsweep, tmp_path):
    arguments = [
        "-m",
        "experiment=demo_full",
        "model=toy_qwen",
        "benchmark=toy_chain",
        "benchmark.limit=2",
        "grid.beside=[]",
    ]
    ended = kvsweep(*arguments, "grid.keep_ratio=[0.3,0.5]", "grid.local_window=[48,64]", f"results_dir={tmp_path}")
    assert ended.code == 0, ended.err
    script = [sys.executable, "scripts/publish.py", "demo"]
    places = ["--runs", str(tmp_path), "--published", str(tmp_path / "published")]
    subprocess.run([*script, *places], cwd=ROOT, env={"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}, check=True)
    files = {path.name: path for path in (tmp_path / "published" / "demo").iterdir()}
    assert {"report.html", "cells.csv", "answers.csv.gz", "provenance.md", "heatmap_toy_qwen_dynts_128.png"} == set(
        files
    )
    answers = pd.read_csv(files["answers.csv.gz"], dtype=str)
    assert answers["grades"].str.len().eq(2).all()
    scores = answers.groupby("cell_id")["grades"].agg(lambda grades: np.mean([*map(int, "".join(grades))]))
    cells = pd.read_csv(files["cells.csv"]).set_index("cell_id")["pass_at_1"]
    assert scores.to_dict() == cells.to_dict()
    assert "experiment=demo_full" in files["provenance.md"].read_text()
    assert files["report.html"].stat().st_size < 4e6
    # The page knows where the tokens of each text lie, so that it can shade those that went.
    cells = dict(cells_data(load_run(tmp_path / "demo_full"), 10))
    draws = [draw for data in cells.values() for draw in json.loads(zlib.decompress(base64.b64decode(data)))["draws"]]
    assert draws
    assert all(sum(draw["lengths"]) == len(draw["text"]) for draw in draws if "text" in draw)
