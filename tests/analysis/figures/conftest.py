"""What the figures of policies are drawn from."""

from pathlib import Path

import pandas as pd
import pytest

from kvsweep.analysis.load import load_run
from kvsweep.analysis.statistics.metrics import cell_metrics

PLACES = (
    {"benchmark": "toy_chain", "benchmark_title": "Chain"},
    {"benchmark": "toy_add", "benchmark_title": "Add"},
)


def read(tmp_path: Path) -> pd.DataFrame:
    return cell_metrics(load_run(tmp_path / "run"))


@pytest.fixture
def metrics(tmp_path, make_cell):
    """Two benchmarks: the full cache, four policies and a variant at one setting, two at another."""
    for place in PLACES:
        make_cell([[1], [1], [1], [0]], **place)
        make_cell([[1], [1], [0], [0]], policy="window", **place)
        make_cell([[1], [0], [0], [0]], policy="unheard_of", **place)
        make_cell([[1], [1], [1], [0]], policy="dynts", **place)
        make_cell([[0], [0]], policy="snapkv", extra={"variant": "dynts_code"}, **place)
        make_cell([[0], [1]], policy="snapkv", extra={"variant": "original"}, **place)
        for policy in ("dynts", "window"):
            make_cell([[1], [1]], policy=policy, keep_ratio=0.5, **place)
    return read(tmp_path)
