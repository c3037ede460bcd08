"""No row is written under the id of other weights, whenever a file that the outputs depend on changes."""

import json
import os
import pickle
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from kvsweep.analysis.load import load_run
from kvsweep.compression.artifacts import read_card
from kvsweep.compression.policies.oracle import save_labels
from kvsweep.harness.command import init
from kvsweep.harness.models.config import ModelConfig
from kvsweep.harness.replay.replay_share import read_jobs
from kvsweep.harness.settings import WEIGHTS, compose_config
from kvsweep.harness.sweep.execute import decode_all
from kvsweep.harness.sweep.job import Job, make_job
from kvsweep.harness.sweep.share import lacking, share_of
from kvsweep.harness.trace.inspected import of_cell
from kvsweep.messages.errors import UserError
from kvsweep.run_files import safe_files
from kvsweep.run_files.row_types import COMPLETIONS_FILE
from kvsweep.run_files.run_reader import StoredCell
from kvsweep.run_files.safe_files import digests

INPUTS = {
    "weights": "model/model.safetensors",
    "chat template": "model/chat_template.jinja",
    "a new file of the checkpoint": "model/added_tokens.json",
    "predictor": "head/predictor.safetensors",
    "statistics": "statistics.safetensors",
    "oracle labels": "oracle/toy_qwen/toy_add/oracle_answer.safetensors",
}


@pytest.fixture
def place(tmp_path):
    """A model, a predictor and statistics that a test may change."""
    shutil.copytree(WEIGHTS / "toy_qwen", tmp_path / "model")
    shutil.copytree(WEIGHTS / "predictors/toy_qwen/answer", tmp_path / "head")
    for suffix in ("safetensors", "json"):
        shutil.copy(WEIGHTS / f"statistics/toy_qwen.{suffix}", tmp_path / f"statistics.{suffix}")
    card = {"hidden_size": read_card("predictor", WEIGHTS / "predictors/toy_qwen/answer")["hidden_size"]}
    save_labels(str(tmp_path / INPUTS["oracle labels"]), {"none/0": (torch.arange(999), torch.rand(999))}, card)
    return tmp_path


@pytest.fixture
def settings(place):
    own = [
        f"model.path={place}/model",
        f"model.predictor={place}/head",
        f"model.statistics={place}/statistics.safetensors",
    ]
    grid = [
        "grid.policy=[full,dynts,triattention,oracle_answer]",
        "policy.budget=64",
        "policy.keep_ratio=0.4",
        "policy.local_window=16",
    ]
    small = ["benchmark=toy_add", "benchmark.limit=2", "decoding.max_new_tokens=24", "slots=2"]
    return ["model=toy_qwen", *own, *grid, *small, f"results_dir={place}"]


def change(path: Path):
    """Other contents of the same size, where the file is there; the dates stay."""
    if not path.exists():
        path.write_text("{}")
        return
    found, data = path.stat(), bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))


def rows(place: Path) -> list[bytes]:
    return [line for path in place.glob(f"default/*/{COMPLETIONS_FILE}") for line in path.read_bytes().splitlines()]


def shipped(settings: list[str], *more: str) -> Job:
    """The job as a scheduler hands it to a task: its ids were made earlier, by another process."""
    return pickle.loads(pickle.dumps(make_job(compose_config(*settings, *more))))


def decode(job: Job):
    assert decode_all([share_of(job)]) == []


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A folder that `kvsweep init` made, as the working directory."""
    init(tmp_path / "own")
    monkeypatch.chdir(tmp_path / "own")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", "")
    sys.modules.pop("my_policies", None)
    yield tmp_path / "own"
    sys.modules.pop("my_policies", None)


SPREAD = ["policy=spread", "benchmark=toy_add", "benchmark.limit=1", "policy.budget=64", "policy.local_window=16"]


def spread(*more: str) -> Job:
    """A job of the policy of one's own folder, whose module is imported anew, as by another process."""
    sys.modules.pop("my_policies", None)
    return make_job(compose_config(*SPREAD, *more))


def test_a_users_policy_of_other_code_is_another_cell(own):
    job = spread()
    [cell] = job.cells
    assert cell.describe()["policy"]["class"].startswith("my_policies.Spread ")
    source = own / "my_policies.py"
    source.write_text(source.read_text().replace("Positions [length]", "Positions, [length],"))
    assert spread().cells[0].cell_id == cell.cell_id
    source.write_text(source.read_text().replace("% self.stride", "% 2"))
    assert spread().cells[0].cell_id != cell.cell_id
    with pytest.raises(UserError, match=r"my_policies\.py has changed since the cells of .* were planned"):
        job.check_inputs()


@pytest.mark.slow
def test_a_replay_leaves_out_cells_of_other_code(own, capsys):
    job = spread("grid.policy=[full,spread]", "decoding.max_new_tokens=8")
    decode(job)
    [full] = [cell for cell in job.cells if cell.policy.name == "full"]
    source = own / "my_policies.py"
    source.write_text(source.read_text().replace("% self.stride", "% 2"))
    sys.modules.pop("my_policies")
    [replayed] = read_jobs(job.run_directory)
    assert replayed.cells == (full,)
    assert "is not replayed, because the weights or the code of its policy have changed" in capsys.readouterr().err


@pytest.mark.slow
def test_a_replay_has_the_cells_of_a_grid_that_were_not_begun(own, capsys):
    job = spread("grid.policy=[full,spread]", "decoding.max_new_tokens=8")
    decode(replace(job, cells=job.cells[:1]))
    (job.run_directory / job.cells[1].cell_id).mkdir()
    (job.run_directory / job.cells[1].cell_id / "cell.yaml").write_text(yaml.safe_dump(job.cells[1].describe()))
    [replayed] = read_jobs(job.run_directory)
    assert [cell.cell_id for cell in replayed.cells] == [cell.cell_id for cell in job.cells]
    assert "is not replayed" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "message"),
    [("spread2.yaml", "has the name spread, .* write `name: spread2`"), ("full.yaml", "the name of a shipped file")],
)
def test_a_policy_has_the_name_of_its_file(own, file, message):
    shutil.copy(own / "conf/policy/spread.yaml", own / "conf/policy" / file)
    with pytest.raises(UserError, match=message):
        spread()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("full", "policy.name=full is the name of FullCache, not of H2O"),
        ("../x", "policy.name=../x is no word"),
        ("mine", "is no file of conf/policy, and H2O has one"),
    ],
)
def test_no_policy_takes_the_name_of_another(name, message):
    words = ["benchmark=toy_add", "policy=h2o", f"policy.name={name}"]
    for more in ([], [f"grid.policy=[{name},dynts]"]):
        with pytest.raises(UserError, match=message):
            make_job(compose_config(*words, *more))


@pytest.mark.parametrize("name", INPUTS.values(), ids=INPUTS)
def test_a_file_that_changes_between_submission_and_start_stops_the_task(place, settings, name):
    job = shipped(settings)
    change(place / name)
    [error] = decode_all([share_of(job)])
    assert isinstance(error, UserError)
    assert str(place / name) in str(error)
    assert rows(place) == []
    [status] = (place / "default/status").glob("*.json")
    assert json.loads(status.read_text())["state"] == "failed"


@pytest.mark.slow
@pytest.mark.parametrize("name", INPUTS.values(), ids=INPUTS)
def test_a_file_that_changes_between_two_rounds_ends_the_sweep(place, settings, name):
    job = shipped(settings, "until=decided", "draws=4")
    first, second = (replace(job, draws=draws) for draws in job.rounds)
    decode(first)
    stored = rows(place)
    change(place / name)
    [error] = decode_all([share_of(second)])
    assert str(place / name) in str(error)
    assert rows(place) == stored


@pytest.mark.slow
@pytest.mark.parametrize("name", INPUTS.values(), ids=INPUTS)
def test_a_file_that_changes_between_resume_and_report_changes_no_row(place, settings, name):
    job = shipped(settings)
    decode(job)
    decode(shipped(settings))
    stored, before = rows(place), load_run(place / "default")
    change(place / name)
    after = load_run(place / "default")
    assert after.completions.equals(before.completions)
    assert set(after.cells["cell_id"]) == {cell.cell_id for cell in job.cells}
    if name.startswith("model/"):  # the head was made for the model as it was
        with pytest.raises(UserError, match="was made for toy_qwen"):
            shipped(settings)
    else:  # the cell that the file has a part in would be another
        assert len({cell.cell_id for cell in shipped(settings).cells} - {cell.cell_id for cell in job.cells}) == 1
    assert rows(place) == stored


@pytest.mark.slow
def test_a_resume_with_other_weights_has_cells_of_its_own(place, settings):
    settings = [*settings, "grid.policy=[full,random]"]
    before = {cell.cell_id for cell in shipped(settings).cells}
    decode(shipped(settings))
    stored = rows(place)
    saved = (place / INPUTS["weights"]).read_bytes()
    change(place / INPUTS["weights"])
    assert before.isdisjoint(cell.cell_id for cell in shipped(settings).cells)
    (place / INPUTS["weights"]).write_bytes(saved)
    assert {cell.cell_id for cell in shipped(settings).cells} == before
    decode(shipped(settings))
    assert rows(place) == stored
    change(place / INPUTS["weights"])  # between the resume and the report, which reads what was written
    assert set(load_run(place / "default").cells["cell_id"]) == before
    cell = next(path.parent for path in place.glob("default/*/cell.yaml"))
    with pytest.raises(UserError, match="holds other weights"):
        of_cell(cell, None, 0)


def test_a_file_that_changes_while_the_model_is_loaded_stops_the_task(place, settings, monkeypatch):
    from kvsweep.harness.sweep import fill as decode_cells

    job, load = shipped(settings), decode_cells.load_model

    def slow_load(config):
        model = load(config)
        change(place / INPUTS["weights"])
        return model

    monkeypatch.setattr(decode_cells, "load_model", slow_load)
    decode_cells.unload()
    [error] = decode_all([share_of(job)])
    assert str(place / INPUTS["weights"]) in str(error)
    assert rows(place) == []


def test_every_byte_of_a_checkpoint_is_in_its_identity(tmp_path):
    """A checkpoint of 64 MB of which three quarters change, between the blocks that an identity once sampled."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(64 << 20))
    model = ModelConfig(name="x", title="x", path=str(tmp_path))
    before = model.identity()["weights"]
    with path.open("rb+") as file:
        for block in range(256):
            file.seek((block * 4 + 1) << 16)
            file.write(b"1" * (3 << 16))
    assert model.identity()["weights"] != before


@pytest.mark.slow
def test_a_large_checkpoint_is_read_once(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(safe_files.MOST_BYTES))
    aged = safe_files.time.time_ns() + 10**10  # as if ten seconds had passed since the file was written
    monkeypatch.setattr(safe_files.time, "time_ns", lambda: aged)
    found = digests([path], named=True)
    program = (
        "import sys; from pathlib import Path; from kvsweep.run_files import safe_files\n"
        "safe_files.hashlib = None\n"
        "print(safe_files.digests([Path(sys.argv[1])], named=True))"
    )
    command = [sys.executable, "-c", program, str(path)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == str(found)
    change(path)
    assert "sha256" in subprocess.run(command, capture_output=True, text=True).stderr  # it reads the file again
    assert digests([path], named=True) != found


@pytest.mark.slow
@pytest.mark.parametrize("change", ["benchmark.answer_from=whole_text", "model.think_start=begin"])
def test_a_sweep_with_another_grading_rule_grades_its_cells_again(place, settings, change):
    settings = [*settings, "grid.policy=[full]", "decoding.max_new_tokens=400"]
    first, second = shipped(settings), shipped(settings, change)
    assert [cell.cell_id for cell in first.cells] == [cell.cell_id for cell in second.cells]
    decode(first)
    folder, stored = first.run_directory / first.cells[0].cell_id, rows(place)
    before = StoredCell(folder).grades().values()
    assert not lacking(share_of(first))
    assert lacking(share_of(second))
    decode(second)
    after = StoredCell(folder).grades().values()
    assert rows(place) == stored
    assert len(after) == len(before) == 2
    assert {row.rule for row in after}.isdisjoint(row.rule for row in before)
    assert not lacking(share_of(second))


@pytest.mark.slow
def test_a_prompt_longer_than_the_model_was_made_for_is_refused(place, settings):
    problems = place / "problems.jsonl"
    rows_ = [{"id": "short", "problem": "1+1?", "answer": 2}, {"id": "long", "problem": "1 + " * 100_000, "answer": 2}]
    problems.write_text("".join(json.dumps(row) + "\n" for row in rows_))
    own = [f"benchmark.path={problems}", "benchmark.source=file", "grid.policy=[full]"]
    [error] = decode_all([share_of(shipped(settings, *own))])
    assert isinstance(error, UserError)
    assert "problem 'long' asks" in str(error)
    assert rows(place) == []
