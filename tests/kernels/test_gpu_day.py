"""scripts/bench/gpu_day on the CPU: every part in small, its JSON and its table, and the size of what is copied."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scripts.bench.gpu_day import quarter
from scripts.bench.same_texts import differences
from tests.analysis.conftest import write_cell
from tests.kernels.interpreter import skip_without_interpreter

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "scripts/bench/gpu_day"
WHEELS, MOST = 5.1e6, 40e6  # bytes


def quarter_in_small(out, part):
    """What quarter.json holds of one part run through the shell's script, and the lines that were printed."""
    skip_without_interpreter()
    command = [str(FOLDER / "quarter.sh"), str(out), "--small", "--only", part, "--deadline", "1700"]
    env = {**os.environ, "PYTHON": sys.executable}
    ended = subprocess.run(command, cwd=out, env=env, capture_output=True, text=True, timeout=1800, check=False)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    found = json.loads((out / "quarter.json").read_text())
    assert list(found) == [part]
    assert found[part]["exit_code"] == 0
    assert found[part]["seconds"] > 0
    assert (out / "logs.tar.gz").stat().st_size > 0
    assert ended.stdout.startswith(f"{part}: done in ")
    *lines, last = ended.stdout.splitlines()[1:]
    assert last.startswith("no time above means anything")
    return found[part], lines


@pytest.mark.release
def test_the_card(tmp_path):
    found, _ = quarter_in_small(tmp_path, "card")
    assert found["copied"] > 1e6
    assert found["flops"] > 1e6
    assert found["specified"] is None
    assert {"torch", "triton", "transformers", "numpy"} <= found["packages"].keys()
    assert found["hardware"]


@pytest.mark.release
def test_the_toys_write_the_same_texts(tmp_path):
    found, lines = quarter_in_small(tmp_path, "toys")
    assert found["exit_codes"] == {"toy_qwen_cpu": 0, "toy_qwen_triton": 0}
    assert found["same"] == {"toy_qwen": {"cpu_triton": {"texts": 4, "same": 4, "first_differences": []}}}
    assert lines == ["toy_qwen cpu_triton: 4 of 4 texts the same"]


@pytest.mark.release
def test_the_gpu_tests_are_found(tmp_path):
    found, lines = quarter_in_small(tmp_path, "tests")
    assert "2 skipped" in found["summary"]
    assert found["failed"] == []
    assert lines == [f"tests: {found['summary']}"]
    assert all((ROOT / file).is_file() for file in quarter.GPU_TESTS)


@pytest.mark.release
def test_the_steps(tmp_path):
    """Each group's row has all figures, lengths lie between an eviction's ends, and texts are evicted meanwhile."""
    found, (head, *lines) = quarter_in_small(tmp_path, "step")
    assert found["weights"] > 0
    rows = found["rows"]
    groups = [(row["policy"], row["auto"], row["invariant"], row["freed"]) for row in rows]
    assert groups == [
        ("window", False, False, True),
        ("dynts", False, False, True),
        ("h2o", False, False, True),
        ("window", False, True, True),
        ("full", True, False, True),
        ("window", True, False, False),
        ("window", True, False, True),
        ("window", True, True, True),
    ]
    for row in rows:
        assert (row["evictions"] + row["evictions_before"] > 0) == (row["policy"] != "full"), row
        assert row["slots"] == (4 if row["auto"] else 3)
        assert row["step_ms"] >= row["forward_ms"] > 0
        assert row["floor_ms"] > 0
        assert row["estimate_ms"] > 0
        assert row["drawing_r1_ms"] > 0
        if row["policy"] != "full":
            assert 35 < row["mean_rows"] < 64
    assert head.split() == list(quarter.COLUMNS)
    assert [line.split()[:4] for line in lines] == [
        [row["policy"], str(row["slots"]), *("yes" if row[name] else "no" for name in ("invariant", "freed"))]
        for row in rows
    ]


@pytest.mark.release
def test_the_bits(tmp_path):
    found, lines = quarter_in_small(tmp_path, "bits")
    assert found["evictions"] > 0
    assert found["slots_2"] == {"steps": 27, "logits_differ": 0, "texts": 3, "texts_differ": 0}
    assert found["slots_1"] == {"steps": 9, "logits_differ": 0, "texts": 1, "texts_differ": 0}
    assert found["drawing"].keys() == {"r1_torch", "r1_triton", "dynts_torch", "dynts_triton"}
    for row in found["drawing"].values():
        assert row == {"1": 0, "3": 0, "torch": 0, "tokens": 16}
    assert lines[0] == "bits at 2 slots: 0 of 27 logits, 0 of 3 texts differ"


@pytest.mark.release
@pytest.mark.parametrize("part", ["generate", "generate_compiled"])
def test_generate(part, tmp_path):
    found, (line,) = quarter_in_small(tmp_path, part)
    assert found["compiled"] == (part == "generate_compiled")
    assert found["tokens_per_second"] > 0
    assert line == f"{part}: {found['step_ms']:.2f} ms a step, 2 texts of 64 rows"


def test_parts_have_a_limit_and_a_line_of_the_readme():
    page = (FOLDER / "README.md").read_text()
    for name, seconds in quarter.MOST_SECONDS.items():
        assert f"| `{name}` | {seconds}" in page


def step_row(**figures):
    row = {"policy": "window", "invariant": False, "freed": True, "slots": 64, "mean_rows": 3500.4, "step_ms": 15.0}
    row |= {"forward_ms": 11.0, "sampling_ms": 2.5, "scoring_ms": 0.25, "eviction_ms": 0.5, "floor_ms": 10.0}
    return row | {"sheet_ms": 8.0, "estimate_ms": 12.0, "tokens_per_second": 4266.7} | figures


def test_the_table_names_floor_estimate_and_a_group_that_failed():
    failed = {"policy": "full", "invariant": False, "freed": True, "failed": "OutOfMemoryError: no room"}
    head, line, dashes, said = quarter.table({"step": {"rows": [step_row(), failed]}})
    assert dict(zip(head.split(), line.split(), strict=True)) == {
        "policy": "window",
        "slots": "64",
        "invariant": "no",
        "freed": "yes",
        "rows": "3500",
        "step": "15.00",
        "forward": "11.00",
        "drawing": "2.50",
        "evicting": "0.75",
        "floor": "10.00",
        "sheet": "8.00",
        "estimate": "12.00",
        "step/floor": "1.50",
        "step/estimate": "1.25",
        "tokens/s": "4267",
    }
    assert len(head) == len(line) == len(dashes)
    assert dashes.split()[:5] == ["full", "-", "no", "yes", "-"]
    assert said == "full failed: OutOfMemoryError: no room"
    assert quarter.table({"step": {"exit_code": 124, "log": []}, "generate": {"exit_code": 1}}) == []
    assert quarter.step_cells(step_row(sheet_ms=None))[10] == "-"


def test_a_part_that_overruns_is_killed_and_named(tmp_path, monkeypatch, capsys):
    """With what it started, at its own limit or at the deadline; the parts after it are run all the same."""
    monkeypatch.setattr(quarter, "MOST_SECONDS", {"slow": 0.3, "quick": 600})
    found = quarter.Quarter(tmp_path, time.monotonic() + 600, small=False)
    found.began["slow"] = time.monotonic()
    program = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
    process = found.start("slow", ["-c", f"{program}; time.sleep(600)"])
    assert found.ended(process, "slow") == quarter.TOO_LATE
    found.note("slow", quarter.TOO_LATE, {})
    found.began["quick"] = time.monotonic()
    process = found.start("quick", ["-c", """print('{"a": 1}\\n{broken'); raise SystemExit(3)"""])
    assert found.ended(process, "quick") == 3
    found.note("quick", 3, quarter.last_object(found.log("quick")))
    found.close()
    stored = json.loads((tmp_path / "quarter.json").read_text())
    assert stored["slow"]["exit_code"] == 124
    assert (stored["quick"]["exit_code"], stored["quick"]["a"]) == (3, 1)
    assert re.search(r"slow: exit status 124 in \d+ s", capsys.readouterr().out)
    assert not found.work.exists()
    monkeypatch.setattr(quarter, "has_gpu", lambda: False)
    monkeypatch.setattr(sys, "argv", ["quarter.py", str(tmp_path)])
    with pytest.raises(SystemExit, match="no GPU was found: the quarter hour needs one, or --small"):
        quarter.main()


@pytest.mark.parametrize(("deadline", "seconds", "code"), [(0.3, 600, quarter.TOO_LATE), (600, 1, 0)])
def test_in_small_the_deadline_alone_ends_a_part(deadline, seconds, code, tmp_path, monkeypatch):
    monkeypatch.setattr(quarter, "MOST_SECONDS", {"slow": 0.3})
    found = quarter.Quarter(tmp_path, time.monotonic() + deadline, small=True)
    found.began["slow"] = time.monotonic()
    assert found.ended(found.start("slow", ["-c", f"import time; time.sleep({seconds})"]), "slow") == code
    found.close()


def test_texts_pair_whatever_the_implementation(tmp_path):
    """Cells of one policy pair, whose ids differ; a text that differs is told with its place."""
    runs = [tmp_path / name for name in ("torch", "triton")]
    for run, last in zip(runs, (3, 4), strict=True):
        for policy in ("full", "window"):
            folder = write_cell(run, [[1], [1]], policy=policy, extra={})
            cell = (folder / "cell.yaml").read_text()
            (folder / "cell.yaml").write_text(f"{cell}impl: {run.name}\n")
            rows = [json.loads(line) for line in (folder / "completions.jsonl").read_text().splitlines()]
            rows[0]["token_ids"] = [1, 2, last if policy == "window" else 3]
            (folder / "completions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            folder.rename(folder.with_name(f"{folder.name}_{run.name}"))
    assert differences(*runs) == {"full": [None, None], "window": [2, None]}


def test_what_is_copied_to_a_gpu_machine_stays_small():
    """The tracked files and the wheels that pack.sh collects: a checkout is light, and 60 MB could not be carried."""
    if not shutil.which("git"):
        pytest.skip("git is not installed")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    files = [ROOT / name for name in listed.stdout.split("\0") if name]
    if listed.returncode or not files:
        pytest.skip("this is no checkout")
    tracked = sum(file.lstat().st_size for file in files if os.path.lexists(file))
    assert tracked + WHEELS < MOST, f"{tracked / 1e6:.1f} MB of tracked files: let results/published not grow further"


@pytest.mark.parametrize("script", ["pack.sh", "quarter.sh"])
def test_the_shell_scripts_can_be_read(script):
    assert os.access(FOLDER / script, os.X_OK)
    subprocess.run(["bash", "-n", str(FOLDER / script)], check=True)
