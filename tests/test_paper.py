"""`scripts/paper.sh`: the whole way of the paper on an embedded model, from the head to the table, and again."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvsweep.run_files.row_types import VERIFY_FILE

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "paper.sh"


@pytest.fixture
def paper(tmp_path):
    """`paper("r1_qwen_7b", OUT, ...)` runs the script with this checkout's code, or with a `program` in its place."""

    def run(*words, program=f'exec "{sys.executable}" -m kvsweep "$@"', **variables):
        for name, text in {"kvsweep": program, "hf": "exit 0", "python": f'exec "{sys.executable}" "$@"'}.items():
            (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
            (tmp_path / name).chmod(0o755)
        environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "LIMIT": "2", **variables}
        environment |= {name.upper(): str(tmp_path / name) for name in ("kvsweep", "python", "hf")}
        words = (SCRIPT, *words)
        return subprocess.run(words, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)

    return run


@pytest.fixture
def lines(paper, tmp_path):
    """`lines(model, mode)` are the commands that the script gives to kvsweep, each a list of words; none is run."""

    def noted(model, *mode, **variables):
        file = tmp_path / "words"
        program = f'for word; do printf "%s\\n" "$word"; done >>{file}; echo >>{file}; [ "$1" != report ]'
        ended = paper(model, str(tmp_path / "out"), *mode, program=program, **variables)
        assert ended.returncode == 1, ended.stderr  # the report fails, because there is no run
        return [block.split("\n") for block in file.read_text().split("\n\n") if block]

    return noted


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("toy_qwen", "out"), "paper.sh: toy_qwen is not of the paper: r1_qwen_7b or r1_llama_8b."),
        (("r1_qwen_7b", "out", "--rehearsal"), "paper.sh: --rehearsal is unknown: --dry-run, --rehearse or nothing."),
    ],
)
def test_other_words_are_refused(words, sentence, paper, tmp_path):
    ended = paper(*words)
    assert (ended.returncode, ended.stderr.strip()) == (2, sentence)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("mode", [(), ("--dry-run",)])
def test_what_is_missing_is_named_at_once(mode, paper):
    """A data set that only GPQA's sweeps read does not stop the others, and is named by itself."""
    program = 'echo "in all"; echo "Dataset $3 is gated. The dry run counts 30 questions." >&2'
    ended = paper("r1_qwen_7b", "out", *mode, program=program, WEIGHTS="w", MATH="m")
    words = ended.stdout + ended.stderr
    assert (ended.returncode, words.count("Dataset "), "204 GB" in words) == ((0, 1, True) if mode else (2, 2, False))
    assert "The dry run counts" not in words
    assert "WEIGHTS=w has no *.safetensors.\n" in words
    assert ("MATH=m is no file.\nDataset" in words) == bool(mode)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["r1_qwen_7b", "r1_llama_8b"])
@pytest.mark.parametrize("mode", [(), ("--rehearse",)], ids=["whole", "rehearsal"])
@pytest.mark.slow_covers(1)
def test_every_line_can_be_planned(model, mode, lines, kvsweep, tmp_path):
    (tmp_path / "aime24.jsonl").write_text(json.dumps({"id": "a", "problem": "1+1", "answer": 2}))
    given = {} if mode else {"DATA": str(tmp_path), "MATH": "aime24.jsonl"}
    found = [words for words in lines(model, *mode, **given) if "policy=full" not in words]
    assert [words[:2] for words in found[:4]] == [["predictor", one] for one in ("traces", "labels", "train", "eval")]
    assert [words[0] for words in found[-2:]] == ["verify", "report"]
    sweeps = found[4:-2]
    # Heatmap and budget have four benchmarks, table and ablations six; of a rehearsal three are one line.
    assert len(sweeps) == (8 if mode else 20)
    for words in sweeps:
        assert words.pop() == f"model.predictor={tmp_path}/out/head/answer"
        built = [] if mode else ["model.random_weights=true", "impl=torch"]
        ended = kvsweep(*[word for word in words if word != "impl=triton" or mode], *built, "--dry-run")
        assert ended.code == 0, ended.err
        assert "nothing was run (--dry-run)." in ended.out


@pytest.mark.slow
@pytest.mark.release
def test_the_rehearsal_makes_head_run_report_and_table(paper, tmp_path):
    ended = paper("r1_qwen_7b", "out", "--rehearse")
    assert ended.returncode == 0, ended.stderr[-2000:]
    out, run = tmp_path / "out", tmp_path / "out" / "runs" / "paper"
    assert (out / "head" / "answer" / "predictor.safetensors").is_file()
    assert json.loads((run / VERIFY_FILE).read_text())["ok"]
    assert (run / "report" / "report.html").is_file()
    rows = [line.split(" | ") for line in (out / "table.md").read_text().splitlines() if line.startswith("| toy_qwen")]
    assert [row[1] for row in rows] == ["toy_chain", "toy_add", "toy_regs", "toy_groups"]
    assert {row[2] for row in rows} == {"20"}
    assert [row[5][:4] for row in rows] == ["45.0", "34.1", "87.2", "47.6"]  # means of the paper's four heatmaps
    before = {path: path.stat().st_mtime_ns for path in run.glob("*/completions.jsonl")}
    assert len(before) == 4 * (21 + 6 + 5 + 3)  # grids, other methods, ablations and budgets
    again = paper("r1_qwen_7b", "out", "--rehearse")
    assert again.returncode == 0, again.stderr[-2000:]
    assert {path: path.stat().st_mtime_ns for path in run.glob("*/completions.jsonl")} == before
