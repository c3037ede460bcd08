"""The command from end to end on an untrained model: what it writes, what it skips, and that it writes it again."""

import itertools
import json
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import yaml

from kvsweep.harness.decode import slots as slot_table
from kvsweep.harness.decode.engine import Engine
from kvsweep.harness.grading.grader import Grader
from kvsweep.harness.models.config import ModelConfig
from kvsweep.harness.models.load import load_model
from kvsweep.harness.models.loaded import LoadedModel
from kvsweep.harness.sweep.cell_store import CellStore
from kvsweep.messages.errors import UserError
from kvsweep.run_files import loops
from kvsweep.run_files.row_types import OUTCOMES, Completion, PairRow, read_rows
from kvsweep.run_files.thinking import DEFAULT_TAGS
from tests.program import beside

Rows = dict[str, list[str]]
GRID = ["benchmark=toy_add", "grid.policy=[full,dynts,random,window]", "grid.keep_ratio=[0.2,0.6]"]


@pytest.fixture
def command(kvsweep, tiny, tiny_policy, tmp_path, monkeypatch):
    """`command(*overrides, run=NAME)` runs the tiny model into tmp_path / "runs" / NAME and must succeed."""
    monkeypatch.chdir(tmp_path)

    def run(*overrides, run="default"):
        options = [o for o in overrides if o.startswith("-")]
        rest = [o for o in overrides if not o.startswith("-")]
        ended = kvsweep(
            *options, *tiny, *beside(tiny_policy, rest), f"results_dir={tmp_path / 'runs'}", f"run_name={run}", *rest
        )
        assert ended.code == 0, ended.err
        return ended

    return run


@pytest.fixture
def cells(tmp_path):
    """`cells(run=NAME)` is every cell as its cell.yaml describes it, its completions, grades and statistics."""

    def read(run="default"):
        found = []
        for path in sorted((tmp_path / "runs" / run).glob("*/cell.yaml")):
            folder = path.parent
            files = {"rows": [*read_rows(folder / "completions.jsonl", Completion)]}
            files |= {name: [*read_rows(folder / f"{name}.jsonl", dict)] for name in ("grades", "stats")}
            found.append({**yaml.safe_load(path.read_text()), **files, "folder": folder})
        return found

    return read


# --- A grid -------------------------------------------------------------------------------------------------


def test_a_grid_in_one_job(command, cells, model_loads, tmp_path):
    ended = command(*GRID, "draws=2")
    assert model_loads == ["toy_qwen"]
    found = cells()
    assert Counter(cell["policy"]["name"] for cell in found) == {"full": 1, "dynts": 2, "random": 2, "window": 2}
    for cell in found:
        folder = cell["folder"]
        assert folder.name == cell["cell_id"]
        pairs = [row.key for row in cell["rows"]]
        assert len(pairs) == len(set(pairs)) == 6
        assert keys(folder / "grades.jsonl") == pairs
        assert {grade["outcome"] for grade in cell["grades"]} <= set(OUTCOMES)
        assert (folder / "DONE").exists()
        [stats] = cell["stats"]
        assert stats["completions"] == 6
        assert stats["tokens"] == sum(row.num_tokens for row in cell["rows"])
        assert stats["kv_bytes_allocated"] == stats["kv_bytes_analytic"]
    assert "Toy-Qwen" in ended.out
    assert f"results: {tmp_path / 'runs/default'}" in ended.out
    assert f"kvsweep report {tmp_path / 'runs/default'}" in ended.out


@pytest.mark.slow
def test_grades_that_a_killed_shard_left_out_are_made(command, tmp_path):
    words = ["benchmark=toy_add", "grid.policy=[random]", "grid.keep_ratio=[0.6]"]
    command(*words, "shard=1/2")
    [folder] = [path.parent for path in (tmp_path / "runs/default").glob("*/cell.yaml")]
    (folder / "grades-1of2.jsonl").unlink()
    command(*words, "shard=2/2")
    assert (folder / "DONE").exists()
    for part in ("1of2", "2of2"):
        rows = [[*read_rows(folder / f"{name}-{part}.jsonl", dict)] for name in ("completions", "grades")]
        assert len(rows[0]) == len(rows[1]) > 0


@pytest.mark.slow
def test_a_deleted_description_of_a_cell_comes_again(command, tmp_path):
    command(*GRID)
    path, *_ = (tmp_path / "runs/default").glob("*/cell.yaml")
    text = path.read_bytes()
    path.unlink()
    command(*GRID)
    assert path.read_bytes() == text


def check_evictions(row: Completion, policy: dict[str, Any]):
    """Every eviction of a row is where and as large as the published rule has it."""
    budget, question = policy["budget"], row.prompt_tokens
    # An overlong question is first evicted with one generated token after it.
    length, step = question, 0
    for eviction in row.evictions:
        fullest = max(budget, length) + 1
        step += fullest - length
        window = policy["local_window"]
        length = window + int((fullest - window) * policy["keep_ratio"])
        assert (eviction.step, eviction.length_before, eviction.length_after) == (step, fullest, length)
    fed = row.num_tokens - 1
    longest = max([e.length_before for e in row.evictions], default=0)
    last = length + fed - step
    assert last <= max(budget, length) + 1, "an eviction is missing"
    assert row.peak_length == max(longest, last)


@pytest.mark.parametrize("budget", [24, pytest.param(64, marks=pytest.mark.slow)])
def test_evictions_follow_the_rule(budget, command, cells):
    command(*GRID, f"policy.budget={budget}", "draws=3")
    evictions = 0
    for cell in cells():
        for row in cell["rows"]:
            if cell["policy"]["name"] == "full":
                assert row.evictions == []
                assert row.peak_length == row.prompt_tokens + row.num_tokens - 1
            else:
                check_evictions(row, cell["policy"])
                evictions += len(row.evictions)
    assert evictions > 30


@pytest.mark.slow
def test_rows_are_consistent(command, cells, tiny_model_dir):
    command(*GRID, "draws=3", "seed=5")
    model = load_model(ModelConfig(name="t", title="T", path=str(tiny_model_dir)))
    reasons = set()
    for row in (row for cell in cells() for row in cell["rows"]):
        reasons.add(row.stop_reason)
        stopped = row.token_ids[-1] in model.stop_ids
        assert row.stop_reason == ("stop" if stopped else "length")
        assert stopped or row.num_tokens == 40
        assert row.num_tokens == len(row.token_ids) <= 40
        assert not set(row.token_ids[:-1]) & set(model.stop_ids)
        assert row.seed == 5
        closing = DEFAULT_TAGS.closing(row.text)  # as grading reads the text
        thinking = model.tokenizer.decode(row.token_ids[: row.thinking_tokens])
        assert thinking == row.text[:closing] if closing is not None else row.thinking_tokens == row.num_tokens
        assert row.text == model.tokenizer.decode(row.token_ids[: -1 if stopped else None])
    assert reasons == {"stop", "length"}, "the untrained model is to give both"


@pytest.mark.slow
def test_cells_agree_until_the_first_eviction(command, cells):
    command(*GRID, "draws=4")
    found = cells()
    [full] = [cell for cell in found if cell["policy"]["name"] == "full"]
    whole = {row.key: row for row in full["rows"]}
    parted = 0
    for cell in found:
        for row in cell["rows"]:
            reference = whole[row.key].token_ids
            if not row.evictions:
                assert row.token_ids == reference
                continue
            # The step that fed token `step` had drawn the next one before it evicted.
            same = row.evictions[0].step + 1
            assert row.token_ids[:same] == reference[:same]
            parted += row.token_ids != reference
    assert parted > 20, "eviction is to change what this model writes"


@pytest.mark.slow
def test_the_full_cache_comes_first_and_the_others_write_only_what_an_eviction_touched(command, cells):
    command(*GRID, "policy.budget=64", "draws=8")
    for cell in cells():
        touched = sum(bool(row.evictions) for row in cell["rows"])
        stats = cell["stats"]
        if cell["policy"]["name"] == "full":
            assert sum(row["completions"] for row in stats) == len(cell["rows"]) == 24
            assert [row["cells"] for row in stats] == [1]
        else:
            assert sum(row["completions"] for row in stats) == touched
            assert 0 < touched < 24


# --- The same again -----------------------------------------------------------------------------------------


@pytest.fixture
def small_memory(monkeypatch):
    """`small_memory(n)`: from now on the model has room for n rows in its 20th step, and for any before."""

    def limit(slots):
        steps, logits = itertools.count(1), LoadedModel.logits

        def run_out(self, hidden, linear):
            if next(steps) > 20 and len(hidden) > slots:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return logits(self, hidden, linear)

        monkeypatch.setattr(LoadedModel, "logits", run_out)

    return limit


@pytest.mark.slow
def test_out_of_memory_halves_the_slots_and_loses_nothing(command, read_completions, small_memory, tmp_path):
    command(*GRID, "draws=2", run="plenty")
    small_memory(20)
    ended = command(*GRID, "draws=2", "slots=64", run="short")
    assert "(out of memory with 32)" in ended.out
    assert read_completions(tmp_path / "runs/short") == read_completions(tmp_path / "runs/plenty")


def test_memory_for_not_even_one_slot_is_said_plainly(kvsweep, tiny, small_memory, tmp_path):
    small_memory(0)
    ended = kvsweep(*tiny, "benchmark=toy_add", f"results_dir={tmp_path}")
    assert (ended.code, "does not hold one sequence" in ended.err) == (2, True), ended.err


@pytest.mark.slow  # four sweeps of six policies
def test_a_killed_grid_of_every_kind_of_policy_resumes_to_the_same_rows(command, cells):
    grid = ["benchmark=toy_add", "grid.policy=[dynts,random,window,h2o,snapkv,rkv]", "grid.keep_ratio=[0.7]", "draws=2"]
    command(*grid, run="plenty")
    command(*grid, "slots=2", run="scarce")

    def rows(run):
        return {c["cell_id"]: sorted(json.dumps(r.to_dict()) for r in c["rows"]) for c in cells(run)}

    expected = rows("plenty")
    assert len(expected) == 6
    assert rows("scarce") == expected
    command(
        "-m", "policy=dynts,random,window,h2o,snapkv,rkv", "policy.keep_ratio=0.7", *grid[:1], "draws=2", run="apart"
    )
    assert rows("apart") == expected
    for number, cell in enumerate(cells("scarce")):
        path = cell["folder"] / "completions.jsonl"
        lines = path.read_text().splitlines(keepends=True)
        # What a kill leaves: some rows, the last one torn; in one cell all are there, in another none.
        path.write_text("".join(lines[:number]) + (lines[number][:40] if number < len(lines) else ""))
    command(*grid, "slots=3", run="scarce")
    assert rows("scarce") == expected


# --- What is skipped ----------------------------------------------------------------------------------------


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def test_a_finished_run_does_nothing(command, tmp_path, request):
    first = command(*GRID)
    before = contents(tmp_path / "runs")
    request.getfixturevalue("no_model")
    again = command(*GRID)
    assert contents(tmp_path / "runs") == before
    said, *rest = again.out.splitlines()
    assert said.startswith("nothing to do: ")
    assert first.out.splitlines()[-2:] == rest


@pytest.mark.slow
def test_only_what_is_missing_runs(command, cells, tmp_path):
    command(*GRID[:1], "grid.policy=[full,dynts]", "grid.keep_ratio=[0.2]")
    before = contents(tmp_path / "runs")
    command(*GRID)
    after = contents(tmp_path / "runs")
    assert {path: after[path] for path in before} == before, "finished cells are left alone"
    assert len(cells()) == 7


@pytest.mark.slow
def test_more_draws_extend_a_cell(command, cells, read_completions, tmp_path):
    command("benchmark=toy_add", run="grown")
    [first] = cells("grown")
    stored = (first["folder"] / "completions.jsonl").read_bytes()
    command("benchmark=toy_add", "draws=3", run="grown")
    command("benchmark=toy_add", "draws=3", run="at_once")
    assert (first["folder"] / "completions.jsonl").read_bytes().startswith(stored)
    assert read_completions(tmp_path / "runs/grown") == read_completions(tmp_path / "runs/at_once")
    [grown] = cells("grown")
    assert len(grown["grades"]) == 9
    provenance = json.loads((grown["folder"] / "provenance.json").read_text())
    assert (provenance["expected"], provenance["draws"], len(provenance["decoding_passes"])) == (9, 3, 2)


@pytest.mark.slow
def test_done_is_away_while_more_is_made(command, monkeypatch):
    command("benchmark=toy_add")
    seen: list[bool] = []
    append = CellStore.append

    def watch(self, completion):
        seen.append((self.directory / "DONE").exists())
        append(self, completion)

    monkeypatch.setattr(CellStore, "append", watch)
    command("benchmark=toy_add", "draws=2")
    assert seen == [False] * 3


@pytest.mark.slow
def test_a_smaller_run_of_the_same_cell_is_done_already(command, cells, request):
    command("benchmark=toy_add", "benchmark.limit=4", "draws=2")
    request.getfixturevalue("no_model")
    command("benchmark=toy_add", "benchmark.limit=2")
    [cell] = cells()
    assert len(cell["rows"]) == len(cell["grades"]) == 8


def test_lost_grades_are_made_again_without_a_model(command, cells, request):
    command("benchmark=toy_add")
    [cell] = cells()
    grades = cell["folder"] / "grades.jsonl"
    before = grades.read_text()
    grades.unlink()
    request.getfixturevalue("no_model")
    command("benchmark=toy_add")
    assert grades.read_text() == before


@pytest.mark.slow
def test_an_interrupted_run_says_how_to_go_on(command, kvsweep, read_completions, tiny, tiny_policy, tmp_path):
    forward, steps = Engine._forward, 0

    def interrupted(self):
        nonlocal steps
        steps += 1
        if steps > 60:
            raise KeyboardInterrupt
        return forward(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "_forward", interrupted)
        arguments = [*tiny, *tiny_policy, f"results_dir={tmp_path / 'runs'}", "run_name=stopped"]
        ended = kvsweep(*arguments, "benchmark=toy_add", "slots=1")
    assert ended.code == 130
    assert ended.err.splitlines()[-1].startswith("kvsweep: error: interrupted; ")
    [rows] = read_completions(tmp_path / "runs/stopped").values()
    assert 0 < len(rows) < 3
    for run in ("stopped", "whole"):
        command("benchmark=toy_add", "slots=1", run=run)
    assert read_completions(tmp_path / "runs/stopped") == read_completions(tmp_path / "runs/whole")


# --- Grading beside decoding --------------------------------------------------------------------------------


def keys(path: Path) -> list[tuple[str, int]]:
    return [row.key for row in read_rows(path, PairRow)]


def grades(folder: Path) -> list[str]:
    return sorted((folder / "grades.jsonl").read_text().splitlines())


@pytest.fixture
def busy_grading(monkeypatch):
    """The thread and the pair of every completion that is graded."""
    graded: list[tuple[str, tuple[str, int]]] = []
    grade = Grader.grade

    def note(self, completions, *rest):
        graded.extend((threading.current_thread().name, row.key) for row in completions)
        return grade(self, completions, *rest)

    monkeypatch.setattr(Grader, "grade", note)
    return graded


def wait_for_grades(store: CellStore):
    """Wait until every stored completion of the cell is graded."""
    end = time.monotonic() + 240
    path = store.directory / "grades.jsonl"
    while not path.exists() or len(keys(path)) < len(store.finished_pairs):
        assert time.monotonic() < end, "the grades do not come while the job decodes"
        time.sleep(0.005)


@pytest.mark.slow
def test_a_sweep_killed_at_40_percent_has_grades_and_each_completion_is_graded_once(
    command, kvsweep, cells, busy_grading, tiny, tiny_policy, tmp_path
):
    command(*GRID, "draws=2", run="calm")
    expected = {cell["cell_id"]: cell["folder"] for cell in cells("calm")}
    append, made = CellStore.append, 0
    stores: dict[str, CellStore] = {}

    def killed(self, completion):
        nonlocal made
        append(self, completion)
        stores[self.cell.cell_id] = self
        made += 1
        if made == 16:  # 40% of 7 cells with 6 completions each
            for store in stores.values():
                wait_for_grades(store)
            raise KeyboardInterrupt

    busy_grading.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CellStore, "append", killed)
        arguments = [*tiny, *beside(tiny_policy, GRID), f"results_dir={tmp_path / 'runs'}", "run_name=storm", *GRID]
        arguments.append("draws=2")
        assert kvsweep(*arguments).code == 130
    begun = [cell for cell in cells("storm") if cell["rows"]]
    assert sum(len(cell["rows"]) for cell in begun) == 16
    assert "full" in {cell["policy"]["name"] for cell in begun}
    for cell in begun:
        assert set(keys(cell["folder"] / "grades.jsonl")) == {row.key for row in cell["rows"]}
        assert set(grades(cell["folder"])) <= set(grades(expected[cell["cell_id"]]))
    assert len(busy_grading) == 16
    assert {name for name, _ in busy_grading} != {"MainThread"}
    command(*GRID, "draws=2", run="storm")
    assert len(busy_grading) == 42, "no completion is graded twice"
    for cell in cells("storm"):
        assert keys(cell["folder"] / "grades.jsonl") == [row.key for row in cell["rows"]]
        assert grades(cell["folder"]) == grades(expected[cell["cell_id"]])
        assert (cell["folder"] / "DONE").exists()


@pytest.mark.parametrize("trouble", ["an error", "a full disk", "too slow"])
@pytest.mark.slow
def test_trouble_in_grading_beside_decoding_leaves_the_grades_to_the_end(
    trouble, command, cells, busy_grading, monkeypatch
):
    command("benchmark=toy_add", run="calm")
    struck = threading.Event()
    grade, append = Grader.grade, CellStore.append

    def grade_badly(self, completions, standard):
        if threading.current_thread() is threading.main_thread():
            return grade(self, completions, standard)
        struck.set()
        if trouble == "an error":
            raise RuntimeError("a judge that makes no sense")
        if trouble == "a full disk":
            raise UserError("the disk is full")
        return [msgspec.structs.replace(row, outcome="grader_timeout") for row in grade(self, completions, standard)]

    def append_and_wait(self, completion):
        append(self, completion)
        assert struck.wait(240)

    monkeypatch.setattr(Grader, "grade", grade_badly)
    monkeypatch.setattr(CellStore, "append", append_and_wait)
    ended = command("benchmark=toy_add", run="troubled")
    assert ("note: all completions are graded after decoding" in ended.err) == (trouble != "too slow")
    [calm], [troubled] = cells("calm"), cells("troubled")
    assert troubled["rows"] == calm["rows"]
    assert grades(troubled["folder"]) == grades(calm["folder"])


# --- Sweeps -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_sweep_loads_each_model_once(command, cells, model_loads, tmp_path):
    # Both names stand for the same tiny model here: only their precision makes them two.
    models = ["model=toy_qwen,toy_llama", "model.dtype=float32,bfloat16"]
    ended = command("-m", "benchmark=toy_add,toy_chain", *models, "benchmark.limit=1")
    assert model_loads == ["toy_qwen", "toy_qwen"]
    assert {(cell["benchmark"]["name"], cell["model"]["dtype"]) for cell in cells()} == {
        (benchmark, dtype) for benchmark in ("toy_add", "toy_chain") for dtype in ("float32", "bfloat16")
    }
    assert ended.out.count("results: ") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["runs"], "nothing else is left in the working directory"


# --- Real problems ------------------------------------------------------------------------------------------


def test_problems_in_latex_run_to_their_end(command, cells, write_problems):
    path = write_problems(
        [
            {"id": "2024-I-1", "problem": r"Let $x_1 = \frac{3}{4}$ and $\sum_{k\ge 1} x_k \ne \infty$.", "answer": 25},
            {"id": "2024-I-2", "problem": "Größe, 数学, \U0001f9ee, a\u2028b\tc\x00d.\n[asy]draw();", "answer": "007"},
            {"id": "ünïcode/../3", "problem": "?", "answer": "0"},
        ]
    )
    command("benchmark=aime24", f"benchmark.path={path}", "draws=2", "benchmark.limit=null")
    [cell] = cells()
    assert cell["benchmark"]["name"] == "aime24"
    assert Counter(row.problem_id for row in cell["rows"]) == {"2024-I-1": 2, "2024-I-2": 2, "ünïcode/../3": 2}
    assert len(cell["grades"]) == 6
    assert {grade["outcome"] for grade in cell["grades"]} <= {"no_answer", "truncated", "wrong"}
    assert {grade["gold"] for grade in cell["grades"]} == {"25", "7", "0"}


@pytest.mark.slow
def test_a_text_that_loops_is_stopped_and_counts_as_truncated(command, cells, monkeypatch):
    for module in (loops, slot_table):
        monkeypatch.setattr(module, "LEAST_REPEATS", 2)
        monkeypatch.setattr(module, "LEAST_TOKENS", 2)
    command("policy=random", "benchmark.limit=6", run="whole")
    command("policy=random", "benchmark.limit=6", "decoding.stop_on_loop=true", run="stopped")
    [whole], [stopped] = cells("whole"), cells("stopped")
    assert whole["condition"] != stopped["condition"]
    texts = {row.key: row for row in whole["rows"]}
    outcomes = {(grade["problem_id"], grade["draw"]): grade["outcome"] for grade in stopped["grades"]}
    looped = [row for row in stopped["rows"] if row.stop_reason == "loop"]
    assert looped
    for row in looped:
        assert row.token_ids == texts[row.key].token_ids[: row.num_tokens]
        assert loops.find_loop(row.token_ids) is not None
        assert loops.find_loop(row.token_ids[:-1]) is None
        assert outcomes[row.key] == "truncated"
    assert all(row == texts[row.key] for row in stopped["rows"] if row not in looped)


@pytest.mark.slow
def test_a_text_beyond_the_models_context_is_noted(command):
    ended = command("benchmark=toy_add", "benchmark.limit=1", "decoding.max_new_tokens=1000")
    assert ended.err.count("was made for 1024") == 1


@pytest.mark.slow
@pytest.mark.shared
def test_real_aime24_runs_to_the_end_and_every_outcome_is_counted(kvsweep, shared_data, tmp_path):
    path = shared_data / "aime24.jsonl"
    settings = ["policy.budget=128", "policy.local_window=48", "decoding.max_new_tokens=200", "draws=2"]
    arguments = ["model=toy_qwen", "benchmark=aime24", f"benchmark.path={path}", f"results_dir={tmp_path}", *settings]
    ended = kvsweep(*arguments)
    assert ended.code == 0
    (cell,) = (tmp_path / "default").glob("*/DONE")
    grades = [*read_rows(cell.parent / "grades.jsonl", dict)]
    assert len({(g["problem_id"], g["draw"]) for g in grades}) == len(grades) == 60
    assert {g["outcome"] for g in grades} <= set(OUTCOMES)
    # A model that has never seen such a problem may hit a one-digit answer by luck, and no more.
    assert sum(g["correct"] for g in grades) <= 3
