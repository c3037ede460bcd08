"""`kvsweep verify`: the same bits, and the name of everything that is another than when the rows were made."""

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from kvsweep.harness.verify.again import differing, drawn
from kvsweep.run_files import row_types
from kvsweep.run_files.row_types import Completion, Grade, Problem, content_hash, read_rows
from kvsweep.run_files.run_reader import StoredCell

ROOT = Path(__file__).parents[3]
STORED = ROOT / "tests" / "stored" / "8ed060b"
FULL, DYNTS = "553cafc26b300795", "9d20523464c47f02"


@pytest.fixture
def run(tmp_path):
    return Path(shutil.copytree(STORED, tmp_path / "run"))


@pytest.fixture
def verify(kvsweep):
    def call(folder, *more, ok=True):
        ended = kvsweep("verify", str(folder), "--json", "--count", "1", *more)
        assert ended.code == (0 if ok else 1), ended.err
        found = json.loads(ended.out)
        assert found["ok"] == ok
        return found

    return call


def checks(found, state):
    return {check["name"]: check for check in found["checks"] if check["state"] == state}


def everything(folder):
    paths = [path for path in folder.rglob("*") if "report" not in path.relative_to(folder).parts]
    return {path: (path.read_bytes() if path.is_file() else None, path.stat().st_mtime_ns) for path in paths}


def rewrite(path, kind, change):
    """Change the rows of a file; their seals are made again, as a forger would."""
    rows = [change(number, row) for number, row in enumerate(read_rows(path, kind))]
    path.write_text("".join(row.to_line(path.parent) for row in rows))


def test_the_same_bits_and_nothing_of_the_run_is_changed(run, kvsweep):
    before = everything(run)
    ended = kvsweep("verify", str(run), "--count", "2")
    assert ended.code == 0, ended.out
    assert ended.out.splitlines()[-1].startswith("2 of 2 completions decoded again with the same bits; no check fails")
    assert everything(run) == before
    assert json.loads((run / row_types.VERIFY_FILE).read_text())["ok"]


@pytest.mark.slow
def test_a_bundle_verifies_where_nothing_of_the_first_machine_is_left(
    tmp_path, kvsweep, monkeypatch, tiny_model_dir, tiny_predictor_dir
):
    here, there = tmp_path / "here", tmp_path / "there"
    shutil.copytree(tiny_model_dir, here / "tiny")
    shutil.copytree(tiny_predictor_dir, here / "heads/mine")
    rows = [{"id": f"p{i}", "problem": f"c=a+b: {i}", "answer": i} for i in range(2)]
    (here / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(here)
    words = ["model.path=./tiny", "model.name=mine", "model.predictor=heads/mine", "model.statistics=null"]
    words += ["benchmark=aime24", "benchmark.path=problems.jsonl", "benchmark.prompt=bare", "benchmark.name=own"]
    words += ["decoding.max_new_tokens=40", "policy.budget=32", "policy.local_window=8", "grid.policy=[full,dynts]"]
    ended = kvsweep("model=toy_qwen", "policy=dynts", *words, f"results_dir={here}", "run_name=run")
    assert ended.code == 0, ended.err
    ended = kvsweep("export", "run", "--bundle", str(tmp_path / "run.zip"))
    assert ended.code == 0, ended.err
    assert "without the weights" in ended.out
    there.mkdir()
    shutil.unpack_archive(tmp_path / "run.zip", there)
    shutil.copytree(here / "tiny", there / "weights/tiny")
    monkeypatch.chdir(there)
    shutil.rmtree(here)
    assert subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], check=False).returncode == 0
    ended = kvsweep("verify", "run", "--count", "2")
    assert ended.code == 0, ended.out
    assert "2 of 2 completions decoded again with the same bits; no check fails" in ended.out
    shutil.rmtree(there / "inputs")
    ended = kvsweep("verify", "run", "--count", "1")
    assert ended.code == 1
    assert "make it with `kvsweep predictor all`" in ended.out


@pytest.mark.slow
def test_an_edited_row_is_named(run, verify):
    path = run / FULL / row_types.COMPLETIONS_FILE
    path.write_text(path.read_text().replace('"draw":1', '"draw":3', 1))
    found = verify(run, ok=False)
    assert list(checks(found, "fails")) == ["rows"]
    [line] = checks(found, "fails")["rows"]["lines"]
    assert f"{FULL}/completions.jsonl:1 is broken" in line
    assert "its check does not fit" in line


@pytest.mark.slow
def test_a_forged_token_is_found_with_its_place(run, verify):
    place, forged = 5, 7

    def forge(number, row):
        ids = [*row.token_ids[:place], forged, *row.token_ids[place + 1 :]]
        return msgspec.structs.replace(row, token_ids=ids)

    [first, *_] = read_rows(run / FULL / row_types.COMPLETIONS_FILE, Completion)
    assert first.token_ids[place] != forged
    rewrite(run / FULL / row_types.COMPLETIONS_FILE, Completion, forge)
    for other in run.glob("*/"):
        if other.name != FULL and (other / row_types.CELL_FILE).exists():
            shutil.rmtree(other)
    found = verify(run, "--all", ok=False)
    assert [one["state"] for one in found["decoded"]] == ["other"] * 4
    one = next(one for one in found["decoded"] if (one["problem_id"], one["draw"]) == first.key)
    assert (one["first_other"], one["fields"]) == (place, ["token_ids"])
    assert one["stored_token"] != one["token"]


@pytest.mark.parametrize(
    ("file", "kind", "change", "name"),
    [
        (row_types.PROBLEMS_FILE, Problem, {"gold": "12345"}, "problems"),
        (row_types.GRADES_FILE, Grade, {"outcome": "correct", "correct": 1, "answer": "12345"}, "grades"),
    ],
)
@pytest.mark.slow_unless(rule=lambda kind, **_: kind is Grade)
def test_a_forged_problem_or_grade_is_named(file, kind, change, name, run, verify, kvsweep):
    assert kvsweep("grade", str(run)).code == 0  # by the rule of today
    rewrite(run / DYNTS / file, kind, lambda number, row: msgspec.structs.replace(row, **change))
    found = verify(run, ok=False)
    assert name in checks(found, "fails")
    assert any("add-000" in line for line in checks(found, "fails")[name]["lines"])


@pytest.mark.slow
def test_other_code_and_another_kernel_set_are_named_and_are_no_fault_by_themselves(run, verify):
    for path in run.glob("*/provenance*.json"):
        stored = json.loads(path.read_text())
        for one in stored["decoding_passes"]:
            one["policy_code"] = "0" * 16
            one["arithmetic"] = {**one["arithmetic"], "vector_instructions": "NEON"}
        path.write_text(json.dumps(stored))
    found = verify(run)
    assert "policy=h2o was decoded by code 0000000000000000" in str(checks(found, "differs")["policy code"]["lines"])
    [one] = found["decoded"]
    assert one["state"] == "same"
    assert "another arithmetic.vector_instructions (NEON, now " in one["cause"]


@pytest.mark.slow
def test_a_changed_byte_of_the_weights_and_missing_weights_are_named(tiny, tiny_model_dir, tmp_path, kvsweep, verify):
    weights = Path(shutil.copytree(tiny_model_dir, tmp_path / "weights"))
    words = [f"model.path={weights}" if word.startswith("model.path=") else word for word in tiny]
    ended = kvsweep(*words, "policy=full", "decoding.max_new_tokens=8", f"results_dir={tmp_path}", "run_name=own")
    assert ended.code == 0, ended.err
    run = tmp_path / "own"
    verify(run)
    path = weights / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    found = verify(run, ok=False)
    assert list(checks(found, "fails")) == ["weights"]
    assert "model.weights was " in checks(found, "fails")["weights"]["lines"][0]
    assert found["decoded"] == []
    shutil.rmtree(weights)
    found = verify(run, ok=False)
    assert checks(found, "cannot").keys() >= {"weights", "data"}
    assert str(weights) in next(iter(found["unread"].values()))


def test_texts_of_a_server_are_graded_and_counted_as_read(run, verify):
    for folder in (path.parent for path in [*run.glob("*/cell.yaml")]):
        cell = StoredCell(folder).settings | {"impl": "openai"}
        (folder / "cell.yaml").write_text(json.dumps({"check": content_hash([folder.name, cell]), **cell}))
        for path in folder.glob("provenance*.json"):
            stored = json.loads(path.read_text())
            stored["config"]["engine"] = {"_target_": "kvsweep.harness.sweep.server.Server"}
            path.write_text(json.dumps(stored))
    found = verify(run)
    assert found["decoded"] == []
    assert all("server" in why for why in found["unread"].values())
    assert "10 completions graded again" in str(found["checks"])


def test_draws_go_over_cells_and_problems_and_change_with_the_seed():
    stored = {f"cell{c}": [(f"p{p}", d) for p in range(4) for d in range(2)] for c in range(4)}
    everything = list(drawn(stored, 0))
    chosen = everything[:8]
    assert len(set(chosen)) == 8
    assert set(Counter(cell for cell, _ in chosen).values()) == {2}
    assert set(Counter(pair[0] for _, pair in chosen).values()) == {2}
    assert set(Counter(pair[1] for _, pair in chosen).values()) == {4}
    assert everything == list(drawn(stored, 0)) != list(drawn(stored, 1))
    assert sorted(everything) == sorted((cell, pair) for cell, pairs in stored.items() for pair in pairs)
    assert list(drawn({}, 0)) == []


def test_what_differs_from_any_pass_is_named_once_and_what_was_not_recorded_is_not():
    today = {"started": "now", "policy_code": "b", "arithmetic": {"vector_instructions": "AVX2", "threads": 2}}
    today |= {"code": {"packages": {"torch": "2"}, "python": "3.11"}, "hardware": {"gpus": [], "host": "here"}}
    other = {"started": "then", "arithmetic": {"vector_instructions": "AVX2", "threads": 1}, "hardware": {"host": "a"}}
    gpu = {"hardware": {"gpus": ["H100"]}, "code": {"packages": {"torch": "1"}, "python": None}}
    assert differing([today, other, gpu, other], today) == [
        "another arithmetic.threads (1, now 2)",
        "another hardware.gpus (['H100'], now [])",
        "another code.packages.torch (1, now 2)",
    ]
    assert differing([{"policy_code": "a"}], today) == ["another policy_code (a, now b)"]


@pytest.mark.slow
def test_another_kernel_set_is_named_by_the_process_that_has_it(run):
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": "default", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    words = [sys.executable, "-m", "kvsweep", "verify", str(run), "--count", "1", "--json"]
    ended = subprocess.run(words, env=environment, cwd=run, capture_output=True, text=True, check=False)
    [one] = json.loads(ended.stdout)["decoded"]
    stored = json.loads((run / FULL / "provenance.json").read_text())["decoding_passes"][0]["arithmetic"]
    assert f"another arithmetic.vector_instructions ({stored['vector_instructions']}, now DEFAULT)" in one["cause"]
