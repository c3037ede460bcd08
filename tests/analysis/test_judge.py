"""`kvsweep judge`: real files of other programs, hostile files, verdicts on outputs whose truth is known."""

import base64
import json
import math
import os
import re
import shutil
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pyarrow import parquet
from scipy import stats

from kvsweep.analysis.answers import counted_share
from kvsweep.analysis.outputs import Reading, read_outputs
from kvsweep.analysis.statistics.noninferiority import decide
from kvsweep.messages.errors import UserError

# Written by these programs at these versions, on two questions: inspect_ai with its mock model, two epochs, and
# lm-evaluation-harness with its dummy model.
REAL = Path(__file__).parent / "judged"


Row = dict[str, Any]


@pytest.fixture
def judge(kvsweep):
    """`judge(file, file, *words)` is the exit status, and what the command prints to either stream."""
    return lambda *words: kvsweep("judge", *map(str, words))


ROW = r"^ *{} +(?P<verdict>[a-z ]+?) +(?P<accuracy>\S+)% +(?P<points>\S+) \((?P<low>\S+) to (?P<high>\S+)\)"
ROW += r" +(?P<lost>\d+)/(?P<won>\d+) *(?P<rest>.*)$"
SIZE = r"^{}: .* on (?P<problems>\d+) problems? x (?P<draws>\d+) draws?(?: that count as (?P<counted>\S+?))?(?:;|$)"


def row_of(out: str, name: str) -> dict[str, str]:
    """A setting's row in the printed table, and the sizes of its sentence."""
    row, size = (re.search(shape.format(name), out, re.MULTILINE) for shape in (ROW, SIZE))
    assert row, out
    assert size, out
    return row.groupdict() | size.groupdict()


def answers_of(path: Path, **options: Any) -> dict[tuple[str, int], Any]:
    """The answers of a file, by problem and draw."""
    rows = read_outputs([path], Reading(**options)).answers.itertuples()
    return {(row.problem_id, row.draw): row for row in rows}


def rows(problems: int, draws: int, lost: int = 0, **more: Any) -> list[Row]:
    """Outputs of different texts that are right but for the first `lost` problems, all of whose draws are wrong."""
    pairs = [(problem, draw) for problem in range(problems) for draw in range(draws)]
    texts = [{"text": f"{problem} in {draw}"} if draws > 1 else {} for problem, draw in pairs]
    known = [{"id": f"p{p}", "draw": d, "correct": p >= lost, "gold": "7"} for p, d in pairs]
    return [one | text | more for one, text in zip(known, texts, strict=True)]


def write(path: Path, items: list[Row]) -> Path:
    path.write_text("".join(json.dumps(item) + "\n" for item in items))
    return path


def write_all(folder: Path, **sides: list[Row]) -> list[Path]:
    """A file of each setting's outputs, which has its name."""
    return [write(folder / f"{name}.jsonl", items) for name, items in sides.items()]


def test_the_logs_of_inspect_ai(judge):
    full, fp8 = (REAL / f"inspect_ai_0.3.285_{name}.json" for name in ("full", "fp8"))
    found = {key: (row.correct, row.text) for key, row in answers_of(fp8).items()}
    assert found == {("p1", 0): (0, "8"), ("p1", 1): (0, "8"), ("p2", 0): (1, "7"), ("p2", 1): (1, "7")}
    code, out, _ = judge(f"full={full}", f"fp8={fp8}")
    assert code == 4
    assert "fp8: unclear. 100.0% -> 50.0%, -50.0 points" in out


def test_the_zipped_logs_of_inspect_ai(tmp_path):
    # inspect_ai packs with zstd, which Python's zipfile cannot read before 3.14.
    zipped, plain = (answers_of(REAL / f"inspect_ai_0.3.285{end}") for end in (".eval", "_full.json"))
    assert {key: row.correct for key, row in zipped.items()} == {key: row.correct for key, row in plain.items()}
    samples = json.loads((REAL / "inspect_ai_0.3.285_fp8.json").read_text())["samples"]
    with zipfile.ZipFile(tmp_path / "log.eval", "w", zipfile.ZIP_DEFLATED) as log:
        log.writestr("header.json", "{}")
        for sample in samples:
            log.writestr(f"samples/{sample['id']}_epoch_{sample['epoch']}.json", json.dumps(sample))
    found, expected = (
        {key: (row.correct, row.text) for key, row in answers_of(path).items()}
        for path in (tmp_path / "log.eval", REAL / "inspect_ai_0.3.285_fp8.json")
    )
    assert found == expected


def test_the_details_of_lighteval():
    found = answers_of(REAL / "lighteval_0.13.0.parquet")
    assert (found["0", 0].correct, found["0", 0].gold) == (1, "Let 11111111111111111111111")
    last = found["1", 0]
    assert (last.correct, last.gold, last.text) == (0, "random baseline", "Let 66666666666666666666666")


@pytest.mark.parametrize(
    ("name", "points", "file"),
    [("nemo_evaluator_0.3.0", "-16.7", "results.jsonl"), ("sgl_eval_0.1.3", "-25.0", "output-rs0.jsonl")],
)
def test_the_folders_of_evaluators(name, points, file, judge, tmp_path):
    """Two repeats of three sums by `nel eval run` and of two problems by sgl-eval; the server of fp8 is wrong once."""
    full, fp8 = (REAL / f"{name}_{side}" for side in ("full", "fp8"))
    for words in ((), ("--grades", "ours", "--kind", "integer")):
        code, out, _ = judge(full, fp8, *words)
        line = row_of(out, f"{name}_fp8")
        assert (code, line["verdict"], line["points"], line["lost"], line["won"]) == (4, "unclear", points, "1", "0")
    shutil.copytree(fp8, tmp_path / "fp8")
    moved = (tmp_path / "fp8" / file).rename(tmp_path / "fp8/output-rs10.jsonl")
    if name.startswith("sgl"):
        found = answers_of(fp8)["sum-0", 0]
        text = "<think>I add them, call 1.</think>The answer is \\boxed{8}."
        assert (found.correct, found.gold, found.ending, found.text) == (0, "7", "stop", text)
        # A repeat that lacks moves no other one to another draw.
        assert {draw for _, draw in answers_of(tmp_path / "fp8")} == {1, 10}
        return
    assert f"is read from {fp8 / file}." in out
    # Without its results the folder has two files that hold answers.
    moved.unlink()
    with pytest.raises(UserError, match="fp8 has 2 files of outputs"):
        answers_of(tmp_path / "fp8")


def llama_eval(cases: list[tuple[int, int, bool | None]]) -> Row:
    """A state of llama.cpp's examples/llama-eval with the fields of `EvalState.dump`; None is a pending case."""
    found = {}
    for chunk, problem, correct in cases:
        task, done = f"aime2025_{chunk:03d}_{problem:03d}", correct is not None
        case = {"task_id": task, "prompt": f"Add {problem}.", "expected": "7", "correct": bool(correct)}
        case |= {"response": "It is \\boxed{7}." if done else None, "answer": "7" if done else None}
        case |= {"grader_log": {"pred": "7"} if done else {}, "status": "ok" if done else "pending", "tokens": None}
        found[task] = case | {"reasoning_content": "so" if done else None, "chunk_idx": chunk, "problem_idx": problem}
    states = {"total": len(found), "correct": 0, "total_time": 1.0, "ci_lower": 0.0, "ci_upper": 1.0, "cases": found}
    return {"id": "aime2025", "model_name": "m", "tasks": [*found], "task_states": states, "sampling_config": {}}


def test_the_state_of_llama_eval(judge, tmp_path):
    for name, lost in (("f16", 0), ("q4", 3)):
        (tmp_path / name).mkdir()
        cases = [(chunk, p, p >= lost if (chunk, p) != (7, 29) else None) for chunk in range(8) for p in range(30)]
        (tmp_path / name / "llama-eval-state.json").write_text(json.dumps(llama_eval(cases), indent=2))
        (tmp_path / name / "llama-eval-state.json.html").write_text("<html>")
    last = answers_of(tmp_path / "f16")["29", 7]
    assert (math.isnan(last.correct), last.text) == (True, None)
    code, out, _ = judge(tmp_path / "f16", tmp_path / "q4")
    assert (code, "q4: worse. 100.0% -> 90.0%" in out) == (1, True)
    assert "q4: 1 of 240 pairs with f16 have no grade" in out
    assert f"note: q4 is read from {tmp_path / 'q4' / 'llama-eval-state.json'}." in out


FOLDERS = {
    "lm_eval_0.4.13.jsonl": "model/samples_task_2026-01-01.jsonl",
    "inspect_ai_0.3.285.eval": "logs/2026-01-01_task.eval",
    "inspect_ai_0.3.285_fp8.json": "logs/2026-01-01_task.json",
    "lighteval_0.13.0.parquet": "details/model/2026-01-01/details_task.parquet",
}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_stands_for_its_one_file_of_outputs(name, tmp_path):
    place = tmp_path / "run" / FOLDERS[name]
    place.parent.mkdir(parents=True)
    shutil.copy(REAL / name, place)
    (tmp_path / "run/results.json").write_text(json.dumps({"results": {"task": {"exact_match": 0.5}}}, indent=2))
    found, expected = (
        {key: row.correct for key, row in answers_of(place).items()} for place in (tmp_path / "run", REAL / name)
    )
    assert found == expected
    write(place.with_name("other.jsonl"), [{"id": "another", "draw": 0, "correct": 1}])
    with pytest.raises(UserError, match="run has 2 files of outputs: "):
        answers_of(tmp_path / "run")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="empty has 0 files of outputs: name a file"):
        answers_of(tmp_path / "empty")


def asked_again(rng: np.random.Generator, flips: float) -> list[Row]:
    """Answers with texts of their own; each problem is right with a chance that is the same in all calls."""
    right = rng.random((30, 8)) < np.random.default_rng(5).beta(0.6, 0.4, 30)[:, None]
    right ^= rng.random(right.shape) < flips
    pairs = [(p, d) for p in range(30) for d in range(8)]
    return [{"id": p, "draw": d, "correct": int(right[p, d]), "text": f"{rng.random()}"} for p, d in pairs]


def test_a_control_is_the_baseline_asked_again(judge, tmp_path):
    rng = np.random.default_rng(0)
    full, again, fp8, q4 = (asked_again(rng, flips) for flips in (0, 0, 0, 0.4))
    files = write_all(tmp_path, full=full, again=full[:3] + again[3:], fp8=fp8, q4=q4)
    _, out, _ = judge(*files, "--control", "again")
    assert re.search("^again: .*; 237 of 240 texts differ$", out, re.MULTILINE)
    assert re.search("^fp8: .*; 240 of 240 texts differ, and no more answers surely change", out, re.MULTILINE)
    assert re.search("^q4: .*; 240 of 240 texts differ, and surely more answers change", out, re.MULTILINE)
    # The control is none of the settings that are tried: no correction for it, and no exit status by it.
    alone, both = judge(files[0], files[2]), judge(*files[:3], "--control", "again")
    assert alone[0] == both[0]
    assert row_of(alone[1], "fp8") == row_of(both[1], "fp8")


def test_worse_is_never_beside_a_control_without_its_reason(judge, tmp_path):
    """Sampled answers change everywhere; those that are lost and not won are a loss all the same."""

    def flipped(lost: int, won: int) -> list[Row]:
        """240 answers, half of them right; so many of either half are turned around."""
        right = [n >= lost if n < 120 else n < 120 + won for n in range(240)]
        return [{"id": n // 8, "draw": n % 8, "correct": int(right[n]), "text": f"{lost} {n}"} for n in range(240)]

    files = write_all(tmp_path, full=flipped(0, 0), again=flipped(30, 30), other=flipped(50, 15))
    _, out, _ = judge(*files, "--control", "again")
    assert row_of(out, "other")["verdict"] == "worse"
    assert "no more answers surely change than in the control, but more are lost than won" in out


def test_files_of_one_name_are_the_draws_of_one_setting(judge, tmp_path):
    words = []
    for name, lost in (("full", 0), ("fp8", 3)):
        for run in range(8):
            items = [row | {"text": str(run)} for row in rows(30, 1, lost) if row.pop("draw") == 0]
            words.append(f"{name}={write(tmp_path / f'{name}{run}.jsonl', items)}")
    code, out, _ = judge(*words)
    line = row_of(out, "fp8")
    assert (code, line["verdict"], line["points"]) == (1, "worse", "-10.0")
    assert (line["problems"], line["draws"]) == ("30", "8")


def test_a_column_that_tells_rows_apart_is_named(tmp_path):
    items = [row | {"seed": row.pop("draw") + 40} for row in rows(3, 2)]
    file = write(tmp_path / "a.jsonl", items)
    with pytest.raises(UserError, match=r"--column draw=NAME, .* differ in seed: 40, 41"):
        answers_of(file)
    assert {draw for _, draw in answers_of(file, columns={"draw": "seed"})} == {40, 41}


def test_a_log_of_inspect_ai_whose_model_thinks(tmp_path):
    parts = [{"type": "reasoning", "reasoning": "3 and 4"}, {"type": "text", "text": "7"}]
    output = {"choices": [{"message": {"role": "assistant", "content": parts}, "stop_reason": "max_tokens"}]}
    sample = {"id": "p1", "epoch": 1, "target": "7", "scores": {"match": {"value": "C"}}, "output": output}
    [answer] = answers_of(write(tmp_path / "log.jsonl", [sample])).values()
    assert (answer.text, answer.ending) == ("<think>3 and 4</think>7", "length")


@pytest.mark.parametrize(
    "more",
    [
        {"output": {"choices": [5]}},
        {"output": {"choices": {"a": 1}}},
        {"output": {"choices": [{"message": "x"}]}},
        {"output": {"choices": [{"message": {"content": [5]}}]}},
        {"resps": [[]]},
        {"stop_reason": ["length"]},
        {"doc": {"id": "a"}, "model_response": {"text": 5}, "metric": {"em": 1}},
        {"doc": {"id": "a", "choices": {"x": 1}, "gold_index": 0}, "model_response": {}, "metric": {"em": 1}},
    ],
    ids=str,
)
def test_a_field_of_another_shape_takes_no_grade_away(more, tmp_path):
    [answer] = answers_of(write(tmp_path / "a.jsonl", [{"id": "a", "correct": 1, **more}])).values()
    assert (answer.problem_id, answer.correct, answer.ending == "length", answer.gold) == ("a", 1.0, False, None)


def texts(right: int) -> list[Row]:
    """Thirty answers of which so many are right, the others wrong, by the file's own grade all right."""
    said = [f"<think>so</think>It is \\boxed{{{p if p < right else p + 1}}}" for p in range(30)]
    return [{"id": f"p{p}", "said": text, "ok": 1, "gold": str(p)} for p, text in enumerate(said)]


@pytest.mark.core
def test_our_grades_in_place_of_theirs(judge, tmp_path):
    """A grade of the file that is wrong is named, whichever grades are asked for by whoever wrote the file."""
    full, worse = write(tmp_path / "full.jsonl", texts(30)), write(tmp_path / "worse.jsonl", texts(15))
    own = ["--correct", "ok", "--column", "text=said"]
    assert judge(full, worse, *own)[0] == 4
    code, out, _ = judge(full, worse, *own, "--grades", "ours")
    assert code == 1
    assert "note: full: 0 of 30 grades differ from the file's own: none." in out
    assert "note: worse: 15 of 30 grades differ from the file's own: p15 draw 0 (ours wrong); " in out
    # Golds of a file of their own count before those of the outputs.
    golds = write(tmp_path / "golds.jsonl", [{"id": f"p{p}", "gold": f"{p}.0"} for p in range(30)])
    assert judge(full, worse, *own, "--grades", "ours", "--gold", golds)[0] == 1
    solved = [[one | {"gold": f"One of them.\n#### {one['gold']}"} for one in texts(right)] for right in (30, 15)]
    files = write_all(tmp_path, full=solved[0], worse=solved[1])
    assert judge(*files, *own, "--grades", "ours", "--kind", "integer")[0] == 1


@pytest.mark.parametrize(
    ("golds", "words", "said"),
    [
        ([{"id": "p0", "draw": d, "gold": str(d)} for d in range(2)], "", "has another gold ('1')"),
        ([{"id": "p0"}], "", "draw 0 has no gold: give it"),
        ([{"id": f"p{p}", "gold": "5cm"} for p in range(30)], "", "draw 0 has the gold '5cm', which is no expression"),
        (None, "--kind letter", "draw 0 has the gold '0', which is no letter"),
        (None, "--column text=gone", "no text: give --column text=NAME"),
        ([], "--grades theirs", "is read by --grades ours alone"),
    ],
)
def test_golds_and_texts_that_cannot_be_graded_are_refused(golds, words, said, refused, tmp_path):
    items = [{**one, "gone": None} for one in texts(30)]
    files = write_all(tmp_path, full=items, worse=items)
    named = [] if golds is None else ["--gold", write(tmp_path / "golds.jsonl", golds)]
    own = ["--correct", "ok", "--grades", "ours", *(() if "--column" in words else ("--column", "text=said"))]
    assert said in refused("judge", *files, *own, *named, *words.split())


GUESS = "Is it \\boxed{%d}? I add again"
# How a wrong text ends and a right one: with a guess in the thinking, or with tags that are none of thinking.
ENDS = {
    "the prompt opens": (GUESS, GUESS + "</think>It is \\boxed{%d}."),
    "the text opens": ("◁think▷" + GUESS, "◁think▷" + GUESS + "◁/think▷It is \\boxed{%d}.<|im_end|>"),
    "channels": (
        "<|channel|>analysis<|message|>" + GUESS,
        "<|channel|>analysis<|message|>" + GUESS + "<|end|><|start|>assistant<|channel|>final<|message|>\\boxed{%d}",
    ),
    "a tag of any name": (f"<analysis>{GUESS}", f"<analysis>{GUESS}</analysis>It is \\boxed{{%d}}."),
    "any name, the prompt opens": (
        f"H<sub>2</sub>: {GUESS}",
        f"H<sub>2</sub>: {GUESS}[/CoT]\\boxed{{%d}}",
    ),
    "concludes nothing": ("[THINK]" + GUESS + "[/THINK]I cannot say.", "[THINK]" + GUESS + "[/THINK]\\boxed{%d}</s>"),
    "a heading": ("<b>Solution</b>\nThe answer is 99.", "<b>Solution</b>\nThe answer is %d."),
    "around all": ("<p>We add both and get \\boxed{99}.</p>", "<p>We add both and get \\boxed{%d}.</p>"),
    "around the answer": ("<answer>I get \\boxed{99}</answer>", "<answer>I get \\boxed{%d}</answer>"),
    "a box": ("<|begin_of_box|>99<|end_of_box|> is it.", "<|begin_of_box|>%d<|end_of_box|> is it."),
    "units": ("It is 4 m<sup>2</sup>, so \\boxed{99}.", "It is 4 m<sup>2</sup>, so \\boxed{%d}."),
}


@pytest.mark.parametrize("way", ENDS)
def test_a_guess_in_the_thinking_is_no_answer_and_another_tag_takes_none_away(way, judge, tmp_path):
    def outputs(name, lost):
        said = [ENDS[way][p >= lost] for p in range(30)]
        items = [{"id": p, "gold": str(p), "text": t % ((p,) * t.count("%d"))} for p, t in enumerate(said)]
        return write(tmp_path / name, items)

    full, small = outputs("full.jsonl", 0), outputs("small.jsonl", 6)
    assert "small: worse. 100.0% -> 80.0%" in judge(full, small, "--grades", "ours", "--kind", "integer")[1]


@pytest.mark.parametrize("closed", [0, 3])
def test_texts_that_may_be_answers_or_thinking_need_their_endings(closed, judge, refused, tmp_path):
    """A file without its thinking beside one with it, or in which a few texts alone close it."""
    answers = [f"It is \\boxed{{{p}}}." for p in range(30)]
    full = [{"id": p, "gold": str(p), "text": f"hm</think>{text}"} for p, text in enumerate(answers)]
    other = [{"id": p, "gold": str(p), "text": "</think>" * (p < closed) + text} for p, text in enumerate(answers)]
    sides = {"full": other if closed else full, "other": other}
    ours = ["--grades", "ours", "--kind", "integer"]
    assert f"{closed} of 30 texts close their thinking" in refused("judge", *write_all(tmp_path, **sides), *ours)
    told = {name: [item | {"finish_reason": "stop"} for item in items] for name, items in sides.items()}
    assert "other: unclear. 100.0% -> 100.0%" in judge(*write_all(tmp_path, **told), *ours)[1]


@pytest.mark.parametrize(
    ("lost", "row", "code", "said"),
    [
        (1, {"error": "content_filter"}, 4, "note: other: 1 answer of 30 are missing and not wrong"),
        # As vLLM's rows are with a reasoning parser, where the thinking took all tokens.
        (15, {"finish_reason": "length", "reasoning_content": "let me"}, 1, " 15/0 "),
    ],
)
def test_what_has_no_text_is_ungraded_or_was_cut_off_and_is_wrong(lost, row, code, said, judge, tmp_path):
    full = [{"id": p, "gold": str(p), "text": f"\\boxed{{{p}}}", "finish_reason": "stop"} for p in range(30)]
    other = [*({**one, "text": None, **row} for one in full[:lost]), *full[lost:]]
    ended, out, _ = judge(*write_all(tmp_path, full=full, other=other), "--grades", "ours", "--kind", "integer")
    assert (ended, said in out, "are missing" in out) == (code, True, code == 4)


def test_the_repeats_of_lm_evaluation_harness_are_draws(tmp_path):
    plain = {"doc_id": 1, "target": "7", "metrics": ["exact_match"], "exact_match": 1.0, "filter": "first"}
    path = write(tmp_path / "samples.jsonl", [plain | {"resps": [["7", "8", "9"]], "filtered_resps": ["7"]}])
    assert [(row.draw, row.correct, row.text) for row in answers_of(path).values()] == [(0, 1.0, "7")]
    found = [(row.draw, math.isnan(row.correct), row.text) for row in answers_of(path, graded=False).values()]
    assert found == [(0, True, "7"), (1, True, "8"), (2, True, "9")]
    choices = write(tmp_path / "choices.jsonl", [plain | {"resps": [[["-1.5", "True"]], [["-2.5", "False"]]]}])
    assert [row.text for row in answers_of(choices, graded=False).values()] == [None]


def test_columns_of_other_names(tmp_path):
    items = [{"question": f"q{p}", "run": 0, "ok": 1} for p in range(3)]
    path = write(tmp_path / "a.jsonl", items)
    found = answers_of(path, correct="ok", columns={"id": "question", "draw": "run"})
    assert [*found] == [("q0", 0), ("q1", 0), ("q2", 0)]
    with pytest.raises(UserError, match=r"a\.jsonl has no column name: it has question, run, ok"):
        answers_of(path, columns={"id": "question", "draw": "run", "prompt": "name"}, correct="ok")
    with pytest.raises(UserError, match="--column colour="):
        Reading(columns={"colour": "run"})


def test_the_page_holds_the_answers_that_differ_first(judge, tmp_path, monkeypatch):
    monkeypatch.setattr("kvsweep.analysis.report.judged.MOST_TEXTS", 8)
    evil = "</script><script>alert(1)</script>"
    full, other = rows(30, 1, text=f"{evil} 7"), rows(30, 1, text="8")
    other[20]["correct"] = other[21]["correct"] = False
    page = tmp_path / "page.html"
    judge(write(tmp_path / "full.jsonl", full), write(tmp_path / "<b>.jsonl", other), "--html", page)
    html = page.read_text()
    assert "alert(1)" not in html
    assert "<b>" not in html.partition("<script")[0]
    blocks = re.findall(r'data-for="(\w+)">([^<]+)<', html)
    data = {name: json.loads(zlib.decompress(base64.b64decode(block))) for name, block in blocks}
    assert [draw["problem"] for draw in data["file1"]["draws"]] == ["p0", "p1", "p20", "p21"]
    assert data["file1"]["base"] == "file0"
    assert data["file0"]["draws"][0]["text"] == f"{evil} 7"
    assert data["file1"]["left_out"] == 26


def test_the_samples_of_lm_evaluation_harness(tmp_path):
    path = REAL / "lm_eval_0.4.13.jsonl"
    answers = answers_of(path)
    assert [(*key, row.correct, row.gold) for key, row in answers.items()] == [("0", 0, 0, "7"), ("1", 0, 1, "lol")]
    assert answers["0", 0].text == "lol"
    # A task with two filters writes each problem twice.
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    both = write(
        tmp_path / "both.jsonl", [line | {"filter": name} for name in ("strict", "flexible") for line in lines]
    )
    with pytest.raises(UserError, match="differ in filter: flexible, strict"):
        answers_of(both)
    chosen = read_outputs([both], Reading(where={"filter": ["strict"]}))
    assert chosen.answers["correct"].tolist() == [row.correct for row in answers.values()]
    assert chosen.score == "exact_match strict"


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet", "bom", "crlf"])
def test_the_same_rows_in_every_form(kind, tmp_path):
    items, path = rows(3, 2, 1), tmp_path / "a.txt"
    table, lines = pd.DataFrame(items), "".join(json.dumps(item) + "\n" for item in items)
    forms = {"json": json.dumps(items, indent=1), "csv": table.to_csv(index=False), "bom": "\ufeff" + lines}
    forms["crlf"] = lines.replace("\n", "\r\n")
    path.write_bytes(table.to_parquet() if kind == "parquet" else forms.get(kind, lines).encode())
    found = [(*key, row.correct) for key, row in answers_of(path).items()]
    assert found == [("p0", 0, 0), ("p0", 1, 0), ("p1", 0, 1), ("p1", 1, 1), ("p2", 0, 1), ("p2", 1, 1)]


def test_thirty_problems_asked_once_and_eight_times(judge, tmp_path):
    for draws, expected in ((1, {"same": "unclear", "five": "unclear"}), (8, {"same": "safe", "five": "worse"})):
        whole = rows(30, draws)
        files = write_all(tmp_path, full=whole, same=whole, five=rows(30, draws, 2))
        code, out, _ = judge(*files, "--bytes", "same=0.5", "--markdown", tmp_path / "m.md")
        assert {name: row_of(out, name)["verdict"] for name in expected} == expected
        assert code == (4 if draws == 1 else 1)
        # Labels of one draw each, as greedy decoding has it, are about other problems.
        page = (tmp_path / "m.md").read_text()
        assert page.startswith(out.splitlines()[0])
        assert "| setting | verdict | accuracy | difference | lost/won | to decide | bytes |" in page
        assert ("on new problems" in page, "about problems like these" in page) == (draws > 1, draws == 1)
        assert ("this can show nothing; 99 problems would decide" in page) == (draws == 1)
        assert judge(*files[:2])[0] == (4 if draws == 1 else 0)


@pytest.mark.parametrize("lost", [5, 12])
def test_the_label_of_greedy_answers_is_about_problems_like_these(lost, judge, tmp_path):
    """One draw, and copies of one: there are no gains, so that the lower end is that of Clopper and Pearson."""
    low = -100 * stats.beta.ppf(0.975, lost + 1, 100 - lost)
    found = decide(np.arange(100)[:, None] >= lost, np.ones((100, 1)), population="like_these")
    for draws in (1, 3):
        full, other = ([one | {"text": one["id"]} for one in rows(100, draws, wrong)] for wrong in (0, lost))
        code, out, _ = judge(*write_all(tmp_path, full=full, other=other))
        line = row_of(out, "other")
        assert (line["verdict"], line["points"]) == (found.label, f"{-lost:.1f}")
        assert (line["low"], line["high"]) == (f"{low:.1f}", f"{100 * found.high:+.1f}")
        assert code == {"worse": 1, "unclear": 4}[found.label]


def test_the_table_of_the_page(judge, tmp_path):
    words = ["full.jsonl", "fp8.jsonl", "q4.jsonl", "--bytes", "fp8=0.5,q4=0.28"]
    page = (Path(__file__).resolve().parents[2] / "docs/judge.md").read_text()
    assert f"kvsweep judge {' '.join(words)}" in page
    for name, lost in zip(words[:3], (0, 0, 2), strict=True):
        write(tmp_path / name, rows(30, 8, lost))
    _, out, _ = judge(*(tmp_path / word if word in words[:3] else word for word in words))
    printed = [line.rstrip() for line in page.split("```")[3].strip("\n").splitlines()]
    assert printed == [line.rstrip() for line in out.splitlines()[: len(printed)]]
    assert len(printed) == 6


@pytest.mark.parametrize(("margin", "problems"), [(5, 72), (10, 36)])
def test_the_margin_is_in_points(judge, tmp_path, margin, problems):
    # A part m of all problems is lost: n of them lose nothing with the chance (1 - m)^n, which is 2.5% or 1 in 40.
    assert problems - 1 < -math.log(40) / math.log1p(-margin / 100) < problems
    for number, code in ((problems - 1, 4), (problems, 0)):
        files = write_all(tmp_path, full=rows(number, 1), same=rows(number, 1))
        assert judge(*files, "--margin", margin)[0] == code


def test_one_of_many_that_is_safe_may_be_so_by_luck(judge, tmp_path):
    names = ["full", *(f"s{number}" for number in range(5))]
    full, *alike = write_all(tmp_path, **dict.fromkeys(names, rows(90, 1)))
    assert "s0: safe." in judge(full, alike[0])[1]
    code, out, _ = judge(full, *alike)
    assert code == 4
    assert out.count(": may be safe.") == 5
    # From the largest cache down each has the whole level, until the first that is not safe.
    sizes = [word for number in range(5) for word in ("--bytes", f"s{number}=0.{9 - number}")]
    assert judge(full, *alike, *sizes)[0] == 0


def test_nothing_is_safe_beside_a_baseline_that_solves_nothing(judge, tmp_path):
    code, out, _ = judge(*write_all(tmp_path, full=rows(30, 8, lost=30), same=rows(30, 8, lost=30)))
    assert code == 4
    assert "note: full is right in at most 5%: nothing is safe beside it." in out


@pytest.mark.parametrize("way", ["ungraded", "left out", "baseline", "worse"])
def test_an_engine_that_fails_where_it_would_be_wrong_is_not_safe(way, judge, tmp_path):
    full, other = rows(100, 4), rows(100, 4)
    for row in other[:40]:  # ten problems, which a safe file could not lose
        row["correct"] = None
    if way == "left out":
        other = other[40:]
    elif way == "baseline":
        full, other = other, full
    elif way == "worse":
        other = [*other[:40], *(row | {"correct": row["id"] > "p4"} for row in other[40:])]
    code, out, _ = judge(*write_all(tmp_path, full=full, other=other))
    assert code == (1 if way == "worse" else 4)
    assert "; 10 of 100 problems have no graded pair" in out
    assert "note: other: 40 of 400 pairs with full have no grade: ask these again" in out


def test_one_answer_that_lacks_leaves_a_file_safe(judge, tmp_path):
    full = write(tmp_path / "full.jsonl", rows(60, 8))
    for lacking, code in ((1, 0), (16, 4)):  # of 24 that a file may lose
        other = write(tmp_path / "other.jsonl", rows(60, 8)[lacking:])
        assert judge(full, other)[0] == code


@pytest.mark.parametrize(
    ("full", "other", "code", "said"),
    [
        # Two other draws of each problem lack: an engine that fails where it would be wrong.
        ({}, lambda p, d: {"left out": (p + d) % 4 == 0}, 4, "other: 80 of 320 pairs with full have no grade"),
        (
            lambda p, d: {"text": f"{p} {d}"},
            lambda p, d: {"text": f"{p}!"},
            4,
            "other: 8 draws of a problem count as 1.0: the",
        ),
        # A score that every answer has, beside the grade.
        ({"scores": {"form": 1}}, {"scores": {"form": 1}, "correct": 0}, 2, "has the grades form, correct"),
        (
            {"score": 1},
            lambda p, d: {"score": 1, "correct": p % 2},
            2,
            "has the grades correct, score, which differ: name",
        ),
        (
            {"metrics": ["em"], "em": 1, "filter": "strict"},
            {"metrics": ["em"], "em": 1, "filter": "flexible"},
            2,
            "full and other have the grades 'em strict' and 'em flexible'",
        ),
        ({"scores": {"a": 1}}, {"scores": {"b": 1}}, 2, "have the grades 'a' and 'b'"),
        # A row's own number beside the problem.
        (
            lambda p, d: {"problem_id": p},
            lambda p, d: {"problem_id": p},
            2,
            "has problem_id and id, which differ, and each may be the id",
        ),
        # The model's own answer is no gold.
        (lambda p, d: {"gold": None, "answer": d}, lambda p, d: {"gold": None, "answer": d + 1}, 0, "other: safe."),
        # What makes no difference.
        ({"gold": "070", "correct": "yes"}, {"gold": 70, "correct": "C"}, 0, "other: safe."),
        ({"gold": "70"}, {"gold": "700"}, 2, "differ in gold for problem 'p0'"),
        # A reason that nobody knows.
        (
            {"finish_reason": {"type": "stop"}},
            lambda p, d: {"finish_reason": "refusal" if p == d == 0 else "FinishReason.STOP"},
            0,
            "note: other: 1 answer of 320 ended by 'refusal', which is no known end or limit: the text alone says",
        ),
        ({"gold": 7, "filter": "none"}, {"gold": [" 7"]}, 0, "other: safe."),
        ({"gold": math.nan}, {"gold": math.nan}, 0, "other: safe."),
        (lambda p, d: {"id": p, "draw": float(d)}, lambda p, d: {"id": float(p), "draw": f"{d}.0"}, 0, "other: safe."),
        # Draws that one file has, and grades that are the other file's.
        (
            {},
            lambda p, d: {"left out": d > 5},
            0,
            "note: full: 80 answers are unused, of draws that other",
        ),
        (
            lambda p, d: {"left out": d > 5},
            {},
            0,
            "note: other: 80 answers are unused, of draws that full",
        ),
        (
            {},
            lambda p, d: {"text": "Error\ud800", "correct": 0} if p < 5 else {},
            1,
            "'Error?' is the text of 5 of 40 problems",
        ),
        ({}, lambda p, d: {"text": f"{p}{d}!"}, 0, "note: other: all 320 grades are those of full: check"),
        ({}, lambda p, d: {"correct": math.nan if p == d == 0 else 1}, 0, "other: safe."),
        ({}, {"correct": None}, 2, "other has no grade in any row"),
        # Draws that nothing tells apart may be copies.
        ({"text": None}, {"text": None}, 4, "note: other: 8 draws of a problem count as 1.0: the"),
        ({"text": None}, lambda p, d: {"text": None, "correct": p + d > 0}, 0, "other: safe."),
        (
            lambda p, d: {"messages": [{"role": "user", "content": f"Add {p}"}, {"role": "tool", "content": f"{d}"}]},
            lambda p, d: {"messages": [{"role": "user", "content": f"Add {p}"}, {"role": "tool", "content": f"{d}!"}]},
            0,
            "other: safe.",
        ),
        # A question that several ids have, and several questions of one id.
        (lambda p, d: {"id": 8 * p + d, "prompt": p}, {}, 2, "full has 320 ids for 40 questions, so that"),
        (lambda p, d: {"prompt": None if p % 3 else p}, {}, 0, "other: safe."),
        (lambda p, d: {"query": int(p == d == 1)}, {}, 2, "full.jsonl:10 has another query ('1') than an earlier row"),
        (lambda p, d: {"doc": {"q": d}, "resps": [""]}, {}, 2, "--ignore doc if it is no part of the"),
        (lambda p, d: {"prompt": f"Add {p}"}, lambda p, d: {"prompt_hash": f"8fa{p}"}, 0, "other: safe."),
        (
            {"prompt_hash": "a"},
            {"prompt_hash": "b"},
            2,
            "full and other differ in prompt_hash for problem 'p0': give outputs of the same questions, or --ignore",
        ),
        (
            lambda p, d: {"prompt": [{"id": f"{p}{d}", "content": "Add"}]},
            lambda p, d: {"prompt": [{"id": f"{d}{p}", "content": "Add"}]},
            0,
            "other: safe.",
        ),
    ],
)
def test_rows_that_could_be_misread(full, other, code, said, judge, tmp_path):
    """All answers have a grade of 1 where nothing else is said, and there are too few problems for one draw."""
    pairs = [(p, d) for p in range(40) for d in range(8)]
    sides = {}
    for name, more in (("full", full), ("other", other)):
        own = more if callable(more) else lambda p, d, more=more: more
        items = [{"id": f"p{p}", "draw": d, "correct": 1, "gold": "7", "text": f"{p}{d}"} | own(p, d) for p, d in pairs]
        sides[name] = [item for item in items if not item.pop("left out", False)]
    ended, out, err = judge(*write_all(tmp_path, **sides))
    assert (ended, said in out + err) == (code, True), out + err


ASKED = "Contest of {year}, no. {p}: find x."
# A column of one value in all draws of a problem, of the years 2031 and 2032, and the draws.
QUESTIONS: dict[str, tuple[Callable[[int, int], Any], int]] = {
    "question": (lambda p, year: ASKED.format(p=p, year=year), 8),
    "messages": (lambda p, year: [{"role": "user", "content": ASKED.format(p=p, year=year), "id": str(year)}], 8),
    "ground_truth": (lambda p, year: (p + 1) * year, 8),
    "answer": (lambda p, year: str(p + year), 8),
    "Aufgabe": (lambda p, year: ASKED.format(p=p, year=year), 8),
    "Frage": (lambda p, year: ASKED.format(p=p, year=year), 1),
    "expected": (lambda p, year: p + year, 1),
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_other_questions_under_the_same_ids(name, judge, tmp_path):
    column, draws = QUESTIONS[name]
    sides = {
        str(year): [row | {name: column(int(row["id"][1:]), year)} for row in rows(80, draws)] for year in (2031, 2032)
    }
    full, other = write_all(tmp_path, **sides)
    assert f"2031 and 2032 differ in {name} for problem 'p0'" in judge(full, other)[2]
    assert judge(full, other, "--ignore", name)[0] == 0


def test_the_order_of_a_question_s_parts_is_no_difference(judge, tmp_path):
    parts = {"text": "find x", "choices": {"A": 1.0, "B": 2}, "hint": None}
    others = {"choices": {"B": 2, "A": 1, "C": None}, "text": "find x"}
    full, other = ([row | {"problem": problem} for row in rows(80, 8)] for problem in (parts, others))
    assert judge(*write_all(tmp_path, full=full, other=other))[0] == 0


@pytest.mark.parametrize("draws", [1, 8])
def test_what_an_engine_says_of_its_run_is_no_question(draws, judge, tmp_path):
    def side(engine):
        own = {"model": f"a model of {engine}", "seconds": 0.5, "answer": 7, "raw": ""}
        items = [
            row
            | own
            | {"seconds": n / len(engine), "raw": f"{engine} says {n}", "reasoning": f"{engine} thinks of {n}"}
            for n, row in enumerate(rows(80, draws))
        ]
        return write(tmp_path / f"{engine}.jsonl", items if draws > 1 else [{**item, "raw": None} for item in items])

    assert judge(side("vllm"), side("llama"))[0] == 0


def right(p: int, d: int) -> int:
    return 1


@pytest.mark.parametrize(
    ("draws", "text", "correct"),
    [
        (8, lambda p, d: f"{p} {d}", lambda p, d: p > 2),
        (1, lambda p, d: f"{p}", lambda p, d: p > 2),
        # Two versions of each text, as often, and one cold text beside seven equal ones, in each second problem.
        (2, lambda p, d: f"{p} {d % 2}", right),
        (1 / ((1 + 50 / 64) / 2), lambda p, d: f"{p} {(d == 0) * (p % 2)}", right),
        (1 / ((1 + 1 / 8) / 2), lambda p, d: f"{p} {d * (p % 2)}", right),
        # Two problems' texts are equal: an agent's last one, or letters, which greedy decoding alone never varies.
        (8, lambda p, d: "Submitted.", lambda p, d: p > 2 or d > 5),
        (1, lambda p, d: "ABCD"[p % 4], lambda p, d: p > 2),
        (8, lambda p, d: "ABCD"[(p + (p < 2) * (d % 2)) % 4], lambda p, d: p > 2),
        # A text with two grades is two answers, in one problem of 40.
        (1 / ((39 + 50 / 64) / 40), lambda p, d: f"{p}", lambda p, d: (p, d) != (7, 7)),
        (8, lambda p, d: None, right),
    ],
)
def test_a_text_that_a_problem_has_twice_is_one_draw(draws, text, correct):
    answers = [(str(p), d, text(p, d), correct(p, d)) for p in range(40) for d in range(8)]
    share = counted_share(pd.DataFrame(answers, columns=["problem_id", "draw", "text", "correct"]))
    assert 8 * share == pytest.approx(draws, abs=1e-4)


def test_a_file_that_lacks_answers_beats_none_of_its_bytes(judge, tmp_path):
    whole = rows(30, 8)
    torn = [row for n, row in enumerate(whole) if n % 11]
    _, out, _ = judge(*write_all(tmp_path, full=whole, fp8=whole, torn=torn), "--bytes", "fp8=0.5,torn=0.4")
    assert [row_of(out, name)["rest"].split()[-1] for name in ("fp8", "torn")] == ["(best)", "0.4"]


def test_what_is_lost_is_counted_where_points_are(judge, tmp_path):
    full, other = rows(30, 8), rows(30, 8)
    other = [row | {"correct": row["draw"] == 0 or row["id"] > "p2"} for row in other if row["id"] != "p0"] + other[:1]
    code, out, _ = judge(*write_all(tmp_path, full=full, other=other))
    line = row_of(out, "other")
    assert (code, line["points"], line["lost"], line["won"]) == (1, "-35.0", "84", "0")
    assert "note: other: 7 of 240 pairs with full have no grade" in out


def test_a_sample_that_ended_in_an_error_has_no_grade(tmp_path):
    items = [{"id": "a", "error": "timeout"}, {"id": "b", "scores": {}, "error": {"message": "x"}}]
    for name in (None, "match"):
        found = answers_of(write(tmp_path / "a.jsonl", items), correct=name)
        assert [(math.isnan(row.correct), row.sign) for row in found.values()] == [(True, "error")] * 2


def test_a_column_that_numbers_the_rows_is_no_draw(tmp_path):
    items = [{"id": f"p{n % 10}", "sample": n, "correct": 1} for n in range(200)]
    file = write(tmp_path / "a.jsonl", items)
    with pytest.raises(UserError, match=r"20 times.*--draws rows"):
        answers_of(file)
    assert [*answers_of(file, by_rows=True)] == [(f"p{n % 10}", n // 10) for n in range(200)]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--html other.jsonl", "name one that is none of the others"),
        ("--html a --markdown a", "name one that is none of the others"),
        ("--html none/a.html", "none/a.html is a folder, or would lie in none"),
        ("--markdown .", "is a folder, or would lie in none"),
    ],
)
def test_a_target_is_refused_before_the_files_are_read(words, said, refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files = write_all(tmp_path, full=rows(30, 8), other=rows(30, 8))
    before = [file.read_bytes() for file in files]
    assert said in refused("judge", *files, *words.split())
    assert [file.read_bytes() for file in files] == before
    assert not (tmp_path / "a").exists()


def test_what_does_not_pair_is_named(judge, tmp_path):
    other = rows(31, 8, stop_reason="length")
    other[0]["correct"] = None
    _, out, _ = judge(*write_all(tmp_path, full=rows(30, 8), other=other))
    assert "note: full lacks 1 of the 31 problems of other: 'p30'." in out
    assert "note: other: 248 answers of 248 were cut off, at their longest or in their thinking." in out
    assert "1 answer of 248 are missing and not wrong, as no answer is known: 1 by no grade." in out


BAD_FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "no row of a graded output"),
    "no id": (b'{"correct": 1}\n', "has no problem's id"),
    "id of true": (b'{"id": true, "correct": 1}\n', "has no problem's id"),
    "no grade": (b'{"id": "a"}\n', "has no grade: name one with --correct"),
    "infinite": (b'{"id": "a", "correct": 1e999}\n', "has correct=inf in "),
    "control characters": (b'{"id": "a", "correct": "\\u001b[2J"}\n', "has correct=\\x1b[2J in "),
    "pandas' columns": (b'{"id": {"0": 4}, "correct": {"0": 1}}', "holds columns, as pandas' to_json"),
    "twice": (b'{"id": "a", "correct": 1}\n' * 2, "has draw 0 of problem 'a' 2 times"),
    "a space apart": (
        b'{"id": "a b", "correct": 1}\n{"id": "a  b", "correct": 1}\n',
        "has draw 0 of problem 'a b' 2 times",
    ),
    "torn": (b'{"id": "a", "correct": 1}\n{"id": "b", "cor', ":2 is not a JSON object"),
    "a list of numbers": (b"[1, 2]", "holds no list of rows"),
    "JSON of something": (b'{\n "a": 1}', "holds no list of rows"),
    "JSON that ends": (b'{\n "samples": [', "is not JSON that can be read"),
    "deep": (b"[" * 100_000, "is not JSON that can be read"),
    "not UTF-8": (b"id,correct\n\xff\xfe,1\n", "is not UTF-8 text"),
    "a quote that never ends": (b'id,correct\n"a,1\n', ":2 is not a CSV row"),
    "a stray comma": (b"id,text,correct\na,1, 2,1\n", ":2 has not the header's count of cells"),
    "half a character": (b'{"id": "\\ud800", "correct": 1}\n', "has no problem's id"),
    "a column twice": (b"id,correct,correct\na,1,0\n", "has 'correct' twice"),
    "a key twice": (b'{"id": "a", "correct": 1, "correct": 0}\n', ":1 has 'correct' twice"),
    "half a Parquet": (b"PAR1xxxx", "is not a Parquet file that can be read"),
    "gzip": (b"\x1f\x8b\x08\x00", "is packed by gzip"),
    "half a zip": (b"PK\x03\x04xxxx", "cannot be unpacked"),
    "two scores": (b'{"id": "a", "scores": {"x": {"value": "C"}, "y": {"value": "I"}}}\n', "has the grades x, y"),
    "partial credit": (b'{"id": "a", "scores": {"x": {"value": "P"}}}\n', "has x=P in "),
    "half a character names a column": (b'{"id": "a", "correct": 1, "\\ud800": 1}\n', "no text"),
    "half a character names a score": (b'{"id": "a", "scores": {"\\ud800": {"value": "P"}}}\n', "no text"),
    "metrics that are no names": (b'{"doc_id": 1, "metrics": [["x"]]}\n', "has no grade"),
    "two answers": (b'{"id": "a", "correct": 1, "text": "x", "response": "y"}\n', "text and response, which differ"),
    "two reasons": (
        b'{"id": "a", "correct": 1, "stop_reason": "stop", "finish_reason": "length"}\n',
        "stop_reason and finish_reason, which",
    ),
    "two golds": (b'{"id": "a", "correct": 1, "gold": "7", "target": "8"}\n', "gold and target, which differ"),
    "a probability": (b'{"id": "a", "correct": null, "score": 0.7, "is_correct": 1}\n', "the grades correct, is_c"),
    "two metrics": (b'{"doc_id": 1, "metrics": ["x", "y"], "x": 1, "y": 0}\n', "has the grades x, y"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_file_that_says_nothing_is_refused(name, tmp_path):
    data, said = BAD_FILES[name]
    (tmp_path / "bad").write_bytes(data)
    with pytest.raises(UserError, match=re.escape(said)) as refusal:
        answers_of(tmp_path / "bad")
    assert "\n" not in str(refusal.value)


def test_a_date_that_python_cannot_hold_is_refused(tmp_path):
    far = pa.array([2**62], type=pa.timestamp("us"))
    parquet.write_table(pa.table({"id": ["a"], "correct": [1], "when": far}), tmp_path / "far.parquet")
    with pytest.raises(UserError, match="a value that Python cannot hold"):
        answers_of(tmp_path / "far.parquet")


ROWS = {
    "samples in one line": '{"samples": [{"id": "a", "correct": 1}]}',
    "empty lines first": '\n \n{"id": "a", "correct": 1}\n',
    "scores that have a column's name": '{"id": "a", "scores": {"draw": 1, "gold": 1}}',
    "a long text of CSV": f'id,text,correct\na,"{"word, " * 50_000}",1\n',
}


@pytest.mark.parametrize("form", ROWS)
def test_one_row_is_read(form, tmp_path):
    (tmp_path / "rows").write_text(ROWS[form])
    [answer] = answers_of(tmp_path / "rows").values()
    assert (answer.problem_id, answer.draw, answer.correct) == ("a", 0, 1)


def test_a_setting_of_two_programs_compares_all_columns(tmp_path):
    (tmp_path / "rows").write_text('{"id": 0, "draw": 0, "match": 1, "metrics": ["match"], "topic": "sums"}')
    (tmp_path / "lm_eval").write_text('{"doc_id": 0, "draw": 1, "match": 1, "metrics": ["match"], "resps": [["2"]]}')
    assert "topic" in read_outputs([tmp_path / "rows", tmp_path / "lm_eval"], Reading()).questions


@pytest.mark.parametrize("packed", ["zstd", "deflate", "unknown"])
def test_a_zip_with_torn_bytes_is_one_sentence(packed, tmp_path):
    path = tmp_path / "log.eval"
    shutil.copy(REAL / "inspect_ai_0.3.285.eval", path)
    if packed != "zstd":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as log:
            log.writestr("samples/a.json", json.dumps({"id": "a", "correct": 1, "text": "x" * 200}))
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as log:
        part = next(part for part in log.infolist() if part.filename.startswith("samples/"))
    if packed == "unknown":
        data[data.index(b"PK\x01\x02") + 10] = data[8] = 77
    start = part.header_offset + 30 + len(part.filename)
    data[start + 4 : start + 24] = bytes(20)
    path.write_bytes(data)
    with pytest.raises(UserError, match="cannot be unpacked"):
        answers_of(path)


def test_a_zip_that_is_a_bomb_or_no_log(tmp_path):
    with zipfile.ZipFile(tmp_path / "bomb", "w", zipfile.ZIP_DEFLATED) as log, log.open("samples/a.json", "w") as part:
        for _ in range(80):
            part.write(b" " * (1 << 20))
    with pytest.raises(UserError, match="a file of more than"):
        answers_of(tmp_path / "bomb")
    with zipfile.ZipFile(tmp_path / "other", "w") as log:
        log.writestr("a.json", "{}")
    with pytest.raises(UserError, match="no row of a graded output"):
        answers_of(tmp_path / "other")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("x=missing x=other", "2 files and the names x: give"),
        ("FULL FULL", "full.jsonl is given 2 times"),
        ("FULL OTHER --full none", "none names none of the files: choose from full, other."),
        ("FULL OTHER --control full", "--control full is the baseline"),
        ("FULL OTHER --bytes other=half", "--bytes other=half must be a number above 0"),
        ("FULL OTHER --bytes other", "other is no NAME=VALUE"),
        ("FULL OTHER --where draw=9", "no row of a graded output with that --where"),
        ("FULL OTHER --where colour=9", "has no column colour: it has id, draw"),
        ("FULL OTHER --correct colour", "has no grade"),
        ("FULL OTHER --ignore colour", "--ignore colour names no column: choose from correct, draw"),
        ("FULL OTHER --bytes other=0.5,other=0.4", "--bytes has several values for other (0.5, 0.4)"),
        ("FULL OTHER --column id=id --column id=draw", "--column has several values for id"),
        ("PROMPT PROMPT2 --column draw=prompt", "has prompt=b, which is no draw"),
        ("FULL GOLD", "full and gold differ in gold for problem 'p0'"),
        ("FULL APART", "full has p0, p1, ... and apart q, ..., and they share no problem"),
        ("FULL LATER", "full counts draws from 0 and later from 1"),
        ("FULL missing.jsonl", "missing.jsonl cannot be read (No such file or directory)"),
        ("FULL PIPE", "is no plain file"),
        ("FULL OTHER --margin nan", "nan is no number"),
    ],
)
def test_a_mistake_is_one_sentence(words, said, refused, tmp_path):
    items = {"full": rows(3, 1, prompt="a"), "other": rows(3, 1), "gold": [row | {"gold": "8"} for row in rows(3, 1)]}
    items |= {"prompt": rows(3, 1, prompt="b"), "prompt2": rows(3, 1, prompt="b")}
    items |= {"apart": [{"id": "q", "correct": 1}], "later": [row | {"draw": 1} for row in rows(3, 1)]}
    files = {name.upper(): write(tmp_path / f"{name}.jsonl", some) for name, some in items.items()}
    os.mkfifo(tmp_path / "pipe")
    files["PIPE"] = tmp_path / "pipe"
    earlier = write(tmp_path / "earlier.md", [])
    assert said in refused("judge", *(files.get(word, word) for word in words.split()), "--markdown", earlier)
    assert not earlier.exists()


FAILED: dict[str, Row] = {
    "error": {"error": "APITimeoutError: Request timed out.", "text": ""},
    "scoring_details.error": {"scoring_details": {"error": "ConnectError", "method": "solve_failed"}},
    "a.b.exception": {"a": {"b": {"exception": {"message": "out of memory"}}}},
    "invalidation": {"invalidation": {"timestamp": "2026-11-01", "reason": "wrong prompt"}},
    "an empty text": {"text": " \n"},
    "abort": {"finish_reason": "abort"},
}


@pytest.mark.parametrize("sign", FAILED)
def test_a_failed_request_is_no_wrong_answer(sign, judge, tmp_path):
    """Four of 240 requests fail, as other programs write it, with the grade of a wrong answer; none else is lost."""
    nothing = {"error": None, "scoring_details": {"error": ""}, "invalidation": None, "finish_reason": "stop"}
    full = [row | nothing for row in rows(60, 4)]
    other = [row | FAILED[sign] | {"correct": 0} if n % 64 == 5 else row for n, row in enumerate(full)]
    code, out, _ = judge(*write_all(tmp_path, full=full, other=other))
    line = row_of(out, "other")
    assert (code, line["accuracy"], line["lost"]) == (0, "100.0", "0")
    assert f"4 answers of 240 are missing and not wrong, as no answer is known: 4 by {sign}." in out


def test_an_answer_that_was_cut_off_or_thought_about_is_an_answer(tmp_path):
    items = [
        {"id": "a", "text": "", "finish_reason": "length", "correct": 0},
        {"id": "b", "text": "", "reasoning_content": "I add", "finish_reason": "stop", "correct": 0},
        {"id": "c", "text": "7", "error": "no", "errors": [], "correct": 1},
    ]
    assert [row.correct for row in answers_of(write(tmp_path / "a.jsonl", items)).values()] == [0, 0, 1]


def test_several_values_of_one_column_are_all_taken(judge, tmp_path):
    """Two tasks of 30 problems, the first of which the other file loses."""
    tasks = [row | {"id": f"{task}{row['id']}", "task": task} for task in "abc" for row in rows(30, 4)]
    other = [row | {"correct": row["task"] != "a"} for row in tasks]
    files = write_all(tmp_path, full=tasks, other=other)
    code, out, _ = judge(*files, "--where", "task=a", "--where", "task=b")
    assert (code, row_of(out, "other")["points"], row_of(out, "other")["problems"]) == (1, "-50.0", "60")
    assert "note: rows with task a or b count: 240 of 360 of full, 240 of 360 of other." in out


COLUMNS: dict[str, tuple[Row, Row]] = {
    # A row's columns, by the problem and the draw; what is read.
    "a question as text": ({"text": "Add {p}.", "response": "{p} {d}"}, {"text": "{p} {d}"}),
    "one reason": ({"stop_reason": 151643, "finish_reason": "length"}, {"ending": "length"}),
    "a score beside a grade": ({"score": 0.7, "acc": 1}, {"correct": 1}),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_a_column_has_a_meaning_by_its_values(name, tmp_path):
    columns, expected = COLUMNS[name]
    items = []
    for p, d in [(p, d) for p in range(3) for d in range(2)]:
        own = {key: value.format(p=p, d=d) if isinstance(value, str) else value for key, value in columns.items()}
        items.append({"id": f"p{p}", "sample": d, "correct": 1} | own)
    file = write(tmp_path / "a.jsonl", items)
    last = answers_of(file)["p2", 1]
    assert {key: getattr(last, key) for key in expected} == {
        key: value.format(p=2, d=1) if isinstance(value, str) else value for key, value in expected.items()
    }


def test_variants_of_a_question_count_as_one(judge, tmp_path):
    """66 questions of three variants: 198 equal answers show what 66 do, which is less than 72."""
    items = [row | {"id": f"{row['id']}-{n}", "question_no": row["id"]} for row in rows(66, 1) for n in range(3)]
    files = write_all(tmp_path, full=items, other=[row | {"text": "7"} for row in items])
    assert judge(*files)[0] == 0
    code, out, _ = judge(*files, "--group", "question_no")
    assert code == 4
    assert "on 66 groups of 198 problems x 1 draw" in out
    low = -100 * (1 - 0.025 ** (1 / 66))
    assert f"({low:.1f} to" in out
