"""kvsweep trace: the strips' numbers are the label pipeline's, and every picture is written."""

import json
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from kvsweep.analysis.figures.completion import read_kept, retention
from kvsweep.compression.recorders import load_predictor
from kvsweep.harness.models.config import ModelConfig
from kvsweep.harness.models.load import load_model
from kvsweep.harness.predictor.labels import label_trace
from kvsweep.harness.predictor.recipe import LABEL_KINDS
from kvsweep.harness.predictor.traces import read_graded
from kvsweep.harness.settings import WEIGHTS
from kvsweep.harness.trace.importance import importance, removal
from kvsweep.harness.trace.inspected import derivations, live, of_cell, of_file
from kvsweep.messages.errors import UserError
from tests.program import trace as main

TEXT = "a is 4, b is 7.\n\nSo a is 4, b is 7, 4+7=1.\n\nSo c is 1. Check 4+7=1 ok. So c is 1. </think>c is 1 \\boxed{1}"


@pytest.fixture
def texts(tmp_path):
    path = tmp_path / "texts.jsonl"
    rows = [{"id": name, "problem": "c=a+b", "text": TEXT} for name in ("first", "second")]
    rows.append({"id": "open", "problem": "c", "text": "a is 4"})
    rows.append({"id": "rash", "problem": "c", "text": "</think>4"})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def empty(tmp_path):
    folder = tmp_path / "empty"
    folder.mkdir()
    return folder


@pytest.fixture
def model(tiny_model_dir):
    return load_model(ModelConfig(name="tiny", title="Tiny", path=str(tiny_model_dir), threads=1))


@pytest.fixture
def read(texts, model):
    return lambda name=None: of_file(texts, name, 0).read(model)


@pytest.fixture
def decoded(kvsweep, settings, tmp_path):
    """`decoded(*words)` is the folder of a cell of toy_chain, decoded by the tiny model with a window."""

    def decode(*words):
        ended = kvsweep(*settings, f"results_dir={tmp_path}", *words)
        assert ended.code == 0, ended.err
        return next(tmp_path.glob("*/*/cell.yaml")).parent

    return decode


@pytest.fixture
def settings(tiny, tiny_policy):
    return ["policy=window", *tiny, *tiny_policy, "benchmark=toy_chain"]


def rows_of(folder):
    return [json.loads(line) for line in (folder / "completions.jsonl").read_text().splitlines()]


def table_of(folder, name="*"):
    return pd.read_csv(next(folder.glob(f"{name}.csv")))


def test_strips_are_the_label_pipelines_numbers(read, model, tiny_predictor_dir):
    text = read("second")
    strips = importance(text, LABEL_KINDS, [tiny_predictor_dir])
    hidden, labels = label_trace(model, text.trace, 32, LABEL_KINDS)
    assert list(strips)[:3] == ["true: answer", "true: far_max", "true: later"]
    for kind in ("answer", "far_max", "later"):
        np.testing.assert_array_equal(strips[f"true: {kind}"], labels[kind].double().numpy())
    with torch.inference_mode():
        expected = load_predictor(tiny_predictor_dir)(hidden).double().numpy()
    np.testing.assert_array_equal(list(strips.values())[3], expected)


@pytest.mark.slow
def test_the_command_writes_pictures_and_the_same_numbers(texts, read, tiny_model_dir, tmp_path, capsys):
    out = tmp_path / "out"
    blank = r"--split=\n\s*\n"  # the toys' own separator is another
    main([*f"{texts} --out {out} --by step model.path={tiny_model_dir} model.threads=1".split(), blank])
    written = capsys.readouterr().out.split()
    assert sorted(p.rsplit(".", 1)[1] for p in written) == ["csv", "pdf", "png", "svg", "txt"]
    table = pd.read_csv(next(p for p in written if p.endswith(".csv")), keep_default_na=True)
    text = read()
    strips = importance(text, ["answer"], [])
    np.testing.assert_allclose(table["true: answer"], strips["true: answer"], rtol=1e-12)
    assert "".join(text.pieces[text.trace.think_start : text.trace.think_end]) == TEXT.split("</think>")[0]
    assert table["step"].max() == 2
    # The model's own separator, which --split overrules.
    for named, steps in (([], range(1)), (["--split", " "], range(3, 999))):
        main([str(texts), "--out", str(out), f"model.path={tiny_model_dir}", "model.split=zzz", *named])
        again = pd.read_csv(next(p for p in capsys.readouterr().out.split() if p.endswith(".csv")))
        assert again["step"].max() in steps
    assert table["position"].iloc[0] == text.trace.think_start


@pytest.mark.slow
def test_a_run_is_no_cell_and_of_a_cell_the_first_answered_text_is_taken(kvsweep, tmp_path, monkeypatch):
    toy = ["policy=full", "model=toy_qwen", "benchmark=toy_chain", "benchmark.limit=3", "decoding.max_new_tokens=280"]
    ended = kvsweep(*toy, f"results_dir={tmp_path}", "run_name=run")
    assert ended.code == 0, ended.err
    run = tmp_path / "run"
    with pytest.raises(UserError, match="is no cell's folder"):
        of_cell(run, None, 0)
    full = next(path.parent for path in run.glob("*/cell.yaml") if "name: full\n" in path.read_text())
    # Within 280 tokens the first problem is answered and the last is not.
    last_first = [*read_graded(full)][::-1]
    assert [row[2].answer is None for row in last_first] == [True, True, False]
    monkeypatch.setattr("kvsweep.harness.trace.inspected.read_graded", lambda folder: last_first)
    source = of_cell(full, None, 0)
    assert source.read(load_model(source.model)).trace.problem_id == "chain-000"


def test_a_stored_completion_of_a_cell(decoded, tmp_path, capsys):
    folder = decoded()
    row = rows_of(folder)[-1]
    source = of_cell(folder, row["problem_id"], 0)
    text = source.read(load_model(source.model))
    assert text.trace.token_ids[text.trace.think_start :] == row["token_ids"]
    assert text.completion.num_tokens == row["num_tokens"]
    out = tmp_path / "looked_into" / "out"
    main([*f"{folder} --show kept --out {out} --problem".split(), row["problem_id"]])
    table = table_of(out, "kept_*")
    for number, eviction in enumerate(row["evictions"], start=1):
        assert (table[f"held_{number}"] == 100).sum() == eviction["length_after"]
    assert (out / f"kept_{row['problem_id']}_draw0.html").exists()
    with pytest.raises(UserError, match="is not among the completions"):
        of_cell(folder, "nobody", 0)
    del row["check"]  # a row of another program has none
    row["token_ids"] = [text.model.tokenizer.convert_tokens_to_ids("</think>")] * 2
    (folder / "completions.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(SystemExit):
        main(f"{folder} --out {out}".split())
    assert "has no thinking to look into" in capsys.readouterr().err


@pytest.mark.slow
def test_a_cell_whose_model_has_moved(decoded, tiny_model_dir, model, tmp_path):
    here = shutil.copytree(tiny_model_dir, tmp_path / "here")
    folder = decoded(f"model.path={here}")
    here.rename(tmp_path / "there")
    source = of_cell(folder, None, 0, [f"model.path={tmp_path / 'there'}"])
    same = of_cell(folder, None, 0, [f"model.path={tiny_model_dir}"])
    assert source.read(load_model(source.model)).trace == same.read(model).trace
    with pytest.raises(UserError, match="holds other weights"):
        of_cell(folder, None, 0)
    (other,) = source.policies(["random"])
    assert (other.budget, other.local_window, other.keep_ratio) == (64, 8, 0.4)
    with pytest.raises(UserError, match="holds other weights"):
        of_cell(folder, None, 0, [f"model.path={WEIGHTS / 'toy_qwen'}"])
    with pytest.raises(UserError, match="give only where files lie now"):
        of_cell(folder, None, 0, ["seed=3"])


@pytest.mark.slow
def test_the_attribution_of_equations(texts, read, tiny_model_dir, model, tmp_path):
    main(f"{texts} --show attribution --out {tmp_path} model.path={tiny_model_dir} model.split=null".split())
    table = pd.read_csv(next(tmp_path.glob("*.csv")), dtype={"token": str})
    assert table.columns[1:].tolist() == ["So a is 4, b is 7, 4+7=1.\n\n", "Check 4+7=1 ok. So c is 1. "]
    assert "".join(table["token"]) == TEXT.split("</think>")[1]
    text = read()
    start = text.trace.think_start
    steps = [range(start + step.start, start + step.stop) for step in derivations(text.thinking)]
    expected = removal(model, text.trace.token_ids, text.trace.think_end, steps)
    np.testing.assert_allclose(table.iloc[:, 1:], expected.numpy(), atol=1e-5)
    assert next(tmp_path.glob("*.png")).stat().st_size > 5000


@pytest.mark.slow
def test_the_steps_that_derive_the_answers_facts_are_the_darkest(tmp_path, capsys):
    # The text that Toy-Qwen writes for chain-000 of the demo: c and h are derived once; d stands in later steps too.
    question = "a=1. b=8. c=a+b. d=c+b. e=d+b. f=e+b. g=d+e. h=g+b. i=e+g. Find d+c+h mod 10."
    thinking = (
        "Hmm, let me think. c=a+b: a is 1, b is 8, 1+8=9. So c is 9. d=c+b: c is 9, b is 8, 9+8=7. So d is 7. Check "
        "8+9=7 ok. e=d+b: d is 7, b is 8, 7+8=5. So e is 5. f=e+b: e is 5, b is 8, 5+8=3. So f is 3. g=d+e: d is 7, "
        "e is 5, 7+5=2. So g is 2. Hmm, wait. Let me redo: 5+7=2. h=g+b: g is 2, b is 8, 2+8=0. So h is 0. Let me see "
        "again, 8+2=0. Fine, next one. i=f+c: f is 3, c is 9, 3+9=2. So i is 2. That looks right, let me go on. Ok, "
        "all done."
    )
    row = {"problem": question, "text": f"{thinking}</think>d is 7, c is 9, h is 0. 7+9=6, 6+0=6. \\boxed{{6}}"}
    path = tmp_path / "text.jsonl"
    path.write_text(json.dumps(row))
    main(f"{path} --show attribution --out {tmp_path} model=toy_qwen model.threads=1".split())
    effects = table_of(tmp_path).drop(columns="token").abs().max()
    darkest = effects[effects > 1].index.tolist()
    assert darkest == ["c=a+b: a is 1, b is 8, 1+8=9. So c is 9. ", "h=g+b: g is 2, b is 8, 2+8=0. So h is 0. "]
    svg = next(tmp_path.glob("*.svg")).read_text()
    assert all(label in svg for label in ("c=a+b: a is 1, b is 8, 1+8=9", "h=g+b: g is 2, b is 8, 2+8=0"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("TEXTS --map reddish", "--map reddish is no colour map of matplotlib"),
        ("/nowhere-at-all", "does not exist"),
        ("EMPTY", "is no cell's folder"),
        ("TEXTS --problem none", "is not in"),
        ("TEXTS --problem first --draw 1", "--draw 1 is not in"),
        ("TEXTS --problem open", "never closes its thinking"),
        ("TEXTS --problem rash", "has no thinking or no answer"),
        ("TEXTS --split (", "is no regular expression"),
        ("TEXTS --show kept", "does not tell what its cache kept"),
        ("TEXTS --show attribution --find zebra", "matches nothing"),
        ("TEXTS --head /nowhere-at-all", "holds no predictor"),
        ("TEXTS model.colour=blue", "colour"),
        ("EMPTY --show retention", "holds no cells"),
        ("TEXTS --scores h3o", "h3o is unknown: did you mean h2o"),
        ("TEXTS --scores full", "scores nothing"),
        ("TEXTS --scores snapkv policy.budget=16 policy.local_window=8", "observation_window=32 is out"),
        ("TEXTS --steps 0-4,3-9", "first and last tokens in order"),
        ("TEXTS --steps 0-4000", "whose tokens are 0 to "),
        ("TEXTS --find (", "is no regular expression"),
        ("TEXTS --question why", "is for live alone"),
        ("live benchmark=toy_chain --problem nobody", "nobody is not in toy_chain: it has chain-0"),
        ("live grid.policy=[window,random]", "the grid has 2 cells"),
        ("live policy.budget=8 policy.local_window=9", "local_window"),
    ],
)
def test_bad_input_is_one_sentence(arguments, message, texts, empty, tiny_model_dir, kvsweep):
    tiny = [f"model.path={tiny_model_dir}"] if "TEXTS" in arguments else []
    places = {"TEXTS": str(texts), "EMPTY": str(empty)}
    code, _, error = kvsweep("trace", *(places.get(word, word) for word in arguments.split()), *tiny)
    assert (code, message in error, error.count("\n")) == (2, True, 1)


@pytest.mark.parametrize("field", [{"text": None}, {"text": 5}, {"problem": None}, {"draw": "x"}])
def test_a_row_that_is_no_text_is_one_sentence(field, texts):
    texts.write_text(json.dumps({"problem": "c=a+b", "text": TEXT} | field) + "\n")
    with pytest.raises(UserError, match=rf"texts\.jsonl:1 {next(iter(field))}="):
        of_file(texts, None, 0)


def test_a_head_of_another_model_of_the_same_width_is_refused(texts, tiny_model_dir, tiny_predictor_dir, tmp_path):
    head = Path(shutil.copytree(tiny_predictor_dir, tmp_path / "head"))
    card = json.loads((head / "predictor.json").read_text())
    source = of_file(texts, None, 0, [f"model.path={tiny_model_dir}"])
    own, name = source.model.identity()["weights"], source.model.name
    # A copy of the hub's weights is known by its name alone.
    known = {(own, "toy_llama"): False, ("0123456789abcdef", name): True, ("org/model@main", "toy_llama"): True}
    for (weights, model), other in {**known, ("org/model@main", name): False}.items():
        (head / "predictor.json").write_text(json.dumps({**card, "model": model, "model_weights": weights}))
        with pytest.raises(UserError, match=f"was made for {model}") if other else nullcontext():
            source.check_head(head)


@pytest.mark.slow
def test_retention_of_a_run(decoded, model, tmp_path, capsys):
    decoded()
    run = decoded("policy=random").parent
    out = tmp_path / "out"
    capsys.readouterr()
    main(f"{run} --show retention --label far_max --out {out}".split())
    table = pd.read_csv(out / "retention_far_max.csv")
    assert {name.split()[0] for name in table["policy"]} == {"window", "random"}
    assert table["retained"].between(0, 1).all()
    curves = pd.read_csv(out / "retention_far_max_curves.csv")
    assert set(curves["policy"]) == set(table["policy"])
    folder = next(p.parent for p in run.glob("*/cell.yaml") if "name: window" in p.read_text())
    expected = []
    for row in rows_of(folder):
        text = of_cell(folder, row["problem_id"], 0).read(model)
        if text.completion.evictions:
            scores = importance(text, ["far_max"], [])["true: far_max"]
            kept = read_kept(text.pieces, text.trace.think_start, text.completion.evictions)
            expected.append(retention(kept, scores)[0])
    (first,) = curves[(curves["policy"].str.startswith("window")) & (curves["eviction"] == 1)]["retained"]
    assert first == pytest.approx(np.mean(expected))
    assert "(far_max) and Pass@1 over policies: no correlation over n = 2" in capsys.readouterr().out


@pytest.mark.slow
def test_a_live_completion_is_the_cells(decoded, settings, model, tmp_path, capsys):
    # One slot: a batch of three rounds otherwise, and chain-002 has a draw within 1e-7 of two tokens' edge.
    folder = decoded("slots=1")
    for row in rows_of(folder):
        written = live(settings, row["problem_id"], 0).read(model)
        assert {**written.completion.to_dict(), "check": row["check"]} == row
        assert written.trace == of_cell(folder, row["problem_id"], 0).read(model).trace
    out = tmp_path / "out"
    main(["live", *settings, "--question", "a=1. Find a.", "--show", "all", "--label", "far_max", "--out", str(out)])
    said = capsys.readouterr()
    assert "tokens (" in said.err
    assert "draw 0\nwindow 0.4 / 8, trigger 64" in said.err
    assert live(settings, None, 0, "a=1. Find a.").read(model).completion.text in said.err
    assert "\n\nanswer none; " in said.err  # there is no reference answer to compare with
    problem = live(settings, None, 0).read(model)
    assert problem.title.endswith("trigger 64, truncated")
    assert problem.summary.split("\n\n")[-1].startswith("answer none for ")
    table = pd.read_csv(out / "importance_question_draw0.csv", keep_default_na=False)
    question = live(settings, None, 0, "a=1. Find a.").read(model)
    assert "a=1. Find a." in "".join(question.pieces[: question.trace.think_start])
    assert table["text"].tolist() == question.thinking


@pytest.mark.slow
def test_a_live_completion_has_the_cells_cache(decoded, settings, model):
    packed = ["cache.bits=4", "cache.group=8", "cache.residual=4"]
    rows = rows_of(decoded(*packed, "slots=1"))
    stored = {row["problem_id"]: {name: row[name] for name in row if name != "check"} for row in rows}
    written = {name: live([*settings, *packed], name, 0).read(model).completion.to_dict() for name in stored}
    assert written == stored
    unpacked = {name: live(settings, name, 0).read(model).completion.to_dict() for name in stored}
    assert unpacked != stored


@pytest.mark.slow
def test_all_goes_on_where_a_picture_is_not_in_the_text(texts, tiny_model_dir, tmp_path, capsys):
    main(f"{texts} --show all --out {tmp_path} model.path={tiny_model_dir}".split())
    said = capsys.readouterr()
    assert "kept is left out: a text from a file does not tell what its cache kept" in said.err
    assert {Path(p).name.partition("_")[0] for p in said.out.split()} == {"importance", "attribution"}
    short = [f"model.path={tiny_model_dir}", "policy=full", "benchmark=toy_chain", "decoding.max_new_tokens=5"]
    main(["live", *short, "--show", "all", "--label", "far_max", "--out", str(tmp_path)])
    said = capsys.readouterr()
    assert "attribution is left out: chain-000 never answers" in said.err
    assert "kept is left out: nothing was evicted" in said.err
    assert {Path(p).name.partition("_")[0] for p in said.out.split()} == {"importance"}


@pytest.mark.slow
def test_policies_scores_are_strips_beside_the_labels(texts, read, tiny_model_dir, tmp_path):
    tiny = [f"model.path={tiny_model_dir}", "policy.budget=64", "policy.local_window=8"]
    main([*f"{texts} --scores window --scores h2o --out {tmp_path}".split(), *tiny])
    table = table_of(tmp_path)
    assert table.columns[-3:].tolist() == ["true: answer", "scores: window", "scores: h2o, mean of layers and heads"]
    np.testing.assert_array_equal(table["scores: window"], table["position"])


@pytest.mark.slow
def test_columns_are_paragraphs_where_there_is_no_equation(texts, tiny_model_dir, tmp_path):
    text = "a is 4.\n\nSo a is 4.\n\nDone. </think>4"
    texts.write_text(json.dumps({"problem": "a=4", "text": text}) + "\n")
    main(f"{texts} --show attribution --out {tmp_path} model.path={tiny_model_dir} model.split=null".split())
    assert "".join(table_of(tmp_path).columns[1:]) == text.partition("</think>")[0]


@pytest.mark.slow
def test_given_steps_are_columns_and_are_averaged(texts, read, tiny_model_dir, tmp_path):
    steps = ["--steps", "2-4,7-7", "--by", "step", "--show", "all"]
    main([*f"{texts} --out {tmp_path} model.path={tiny_model_dir}".split(), *steps])
    thinking = read().thinking
    heads = table_of(tmp_path, "attribution*").columns[1:].tolist()
    assert heads == ["".join(thinking[2:5]), thinking[7]]
    table = table_of(tmp_path, "importance*")
    assert table["step"].tolist() == [0, 0, 1, 1, 1, 2, 2, 3, *[4] * (len(thinking) - 8)]


@pytest.mark.slow
def test_the_last_row_of_a_repeated_pair_counts(decoded):
    folder = decoded()
    row = rows_of(folder)[0]
    with (folder / "completions.jsonl").open("a") as file:
        del row["check"]  # a row of another program has none
        file.write(json.dumps({**row, "num_tokens": 7}) + "\n")
    stored = [c for _, c, _ in read_graded(folder)]
    assert [c.num_tokens for c in stored if c.problem_id == row["problem_id"]] == [7]


HELP_AND_REFUSALS = """trace --help
predictor --help
trace /nowhere-at-all
trace EMPTY
trace EMPTY --show retention
trace TEXTS --scores h3o
trace TEXTS --head /nowhere-at-all
trace live benchmark=toy_chain --problem nobody
predictor paint
predictor traces recipe.import_from=/nowhere-at-all
predictor labels
predictor train"""


def test_help_and_refusals_import_neither_torch_nor_matplotlib(texts, empty, tmp_path):
    places = {"TEXTS": str(texts), "EMPTY": str(empty)}
    cases = [[places.get(word, word) for word in line.split()] for line in HELP_AND_REFUSALS.splitlines()]
    program = f"""
import sys
for name in ("torch", "transformers", "matplotlib"):
    sys.modules[name] = None
from kvsweep.cli import main
for words in {cases}:
    code = 0
    try:
        main(words)
    except SystemExit as ended:
        code = ended.code
    assert code == (0 if "--help" in words else 2), (words, code)
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("error: ") == len(cases) - 2
