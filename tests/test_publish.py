"""scripts/publish.py on a small real run."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_a_run_is_published(kvsweep, tmp_path):
    arguments = ["-m", "experiment=demo", "model=toy_qwen", "benchmark=toy_chain", "benchmark.limit=2"]
    ended = kvsweep(*arguments, "grid.keep_ratio=[0.3,0.5]", "grid.local_window=[48,64]", f"results_dir={tmp_path}")
    assert ended.code == 0, ended.err
    script = [sys.executable, "scripts/publish.py", "demo"]
    places = ["--runs", str(tmp_path), "--published", str(tmp_path / "published")]
    subprocess.run([*script, *places], cwd=ROOT, env={"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}, check=True)
    files = {path.name: path for path in (tmp_path / "published" / "demo").iterdir()}
    assert {"report.html", "cells.csv", "provenance.md", "heatmap_toy_qwen_dynts_128.png"} == set(files)
    assert "experiment=demo" in files["provenance.md"].read_text()
    assert files["report.html"].stat().st_size < 4e6
