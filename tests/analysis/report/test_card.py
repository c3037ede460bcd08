"""The reproducibility card says what the files of the cells say, and the result of the last verify."""

import json
import shlex
import shutil
from pathlib import Path

import pytest
import yaml

from kvsweep.analysis.load import load_run
from kvsweep.analysis.report.card import CORRECTIONS, card, rows
from kvsweep.analysis.report.page import run_page
from kvsweep.analysis.statistics.sentences import analyse
from kvsweep.run_files.row_types import VERIFY_FILE

STORED = Path(__file__).parents[2] / "stored" / "8ed060b"


@pytest.fixture
def run(tmp_path):
    return Path(shutil.copytree(STORED, tmp_path / "run"))


def facts(run):
    return card(analyse(load_run(run)))


def test_the_card_has_what_the_files_of_the_cells_have(run):
    found = facts(run)
    passes = [json.loads(path.read_text())["decoding_passes"][0] for path in sorted(run.glob("*/provenance*.json"))]
    cells = [yaml.safe_load(path.read_text()) for path in sorted(run.glob("*/cell.yaml"))]
    assert set(found["command"]) == {shlex.join(one["command"]) for one in passes}
    assert found["code of kvsweep"] == [passes[0]["code"]["git_revision"]]
    assert found["versions"][0].count("torch 2.13.0+cpu") == 1
    assert found["kernel set"] == ["AVX512"]
    assert found["machine"] == ["AMD EPYC, 2 cores, no GPU"]
    assert found["weights"] == [f"toy_qwen {cells[0]['model']['weights']} float32"]
    assert found["data"] == [f"toy_add {cells[0]['dataset_hash']} (toy task add)"]
    assert {line.split()[1] for line in found["policy code"]} == {one["policy_code"] for one in passes}
    assert found["heads"] == [cell["policy"]["predictor"] for cell in cells if "predictor" in cell["policy"]]
    assert (found["seed"], found["draws"], found["completions"]) == (["0"], ["2"], ["10"])
    assert not {"margin", "corrections", "protocol"} & found.keys()
    assert found["decoding"][0].startswith("r1: temperature 0.6, top p 0.95")
    assert found["verified"] == ["not yet: kvsweep verify"]


def test_the_card_names_margin_and_protocol(make_cell):
    chosen = {"name": "deepseek", "source": "github.com/a/b at 0123"}
    for policy in ("full", "dynts"):
        recorded = {"config": {"protocol": chosen}}
        folder = make_cell([[1, 1], [1, 0], [0, 0], [1, 1]] * 5, policy=policy, recorded=recorded)
    found = facts(folder.parent)
    assert (found["margin"], found["corrections"]) == (["5 points"], [CORRECTIONS])
    assert found["protocol"] == ["deepseek (github.com/a/b at 0123)"]


@pytest.mark.slow
def test_the_last_verify_stands_on_the_card_and_the_page(run):
    path = run / VERIFY_FILE
    path.parent.mkdir()
    path.write_text(json.dumps({"ok": True, "summary": "8 of 8 <b>", "started": "2026-01-02T03:04:05+0000"}))
    assert facts(run)["verified"] == ["2026-01-02T03:04:05+0000: 8 of 8 <b>"]
    assert "2026-01-02T03:04:05+0000: 8 of 8 &lt;b&gt;" in run_page(analyse(load_run(run)), [], {}, {})
    path.write_text('{"ok": 1}')
    assert facts(run)["verified"] == ["not yet: kvsweep verify"]


def test_strange_passes_of_a_stranger_make_no_error(run):
    for path in run.glob("*/provenance*.json"):
        record = json.loads(path.read_text())
        record["decoding_passes"] = [
            {"command": 3, "code": 4, "hardware": {"processor": 1, "gpus": 5}, "arithmetic": []}
        ]
        path.write_text(json.dumps({**record, "config": {"protocol": 7}}))
    assert rows(facts(run))
