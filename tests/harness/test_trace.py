"""kvsweep-trace: the strips' numbers are the label pipeline's, and every picture is written."""

import json

import numpy as np
import pandas as pd
import pytest
import torch

from analysis.kept import read_kept, retention
from compression.predictor import load_predictor
from harness.attribution import removal
from harness.models import ModelConfig, load_model
from harness.predictor.labels import label_trace
from harness.predictor.recipe import LABEL_KINDS
from harness.records import UserError
from harness.trace import EXPRESSIONS, expressions, importance, main, of_cell, of_text, step_numbers

TEXT = "a is 4, b is 7.\n\nSo a is 4, b is 7, 4+7=1.\n\nSo c is 1. Check 4+7=1 ok. So c is 1. </think>c is 1 \\boxed{1}"


@pytest.fixture
def texts(tmp_path):
    path = tmp_path / "texts.jsonl"
    rows = [{"id": name, "problem": "c=a+b", "text": TEXT} for name in ("first", "second")]
    rows.append({"id": "open", "problem": "c", "text": "a is 4"})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def model(tiny_model_dir):
    return load_model(ModelConfig(name="tiny", title="Tiny", path=str(tiny_model_dir), threads=1))


def test_strips_are_the_label_pipelines_numbers(texts, model, tiny_predictor_dir):
    traced = of_text(texts, "second", 0, model)
    strips = importance(traced, LABEL_KINDS, [tiny_predictor_dir], min_distance=8)
    hidden, labels = label_trace(model, traced.trace, 8)
    assert [s.title for s in strips[:3]] == ["true: answer", "true: far_max", "true: later"]
    for strip, kind in zip(strips, ("answer", "far_max", "later"), strict=False):
        np.testing.assert_array_equal(strip.scores, labels[kind].double().numpy())
    with torch.inference_mode():
        expected = load_predictor(tiny_predictor_dir)(hidden).double().numpy()
    np.testing.assert_array_equal(strips[3].scores, expected)


def test_the_command_writes_pictures_and_the_same_numbers(texts, model, tiny_model_dir, tmp_path, capsys):
    out = tmp_path / "out"
    main([str(texts), "--out", str(out), "--by", "step", f"model.path={tiny_model_dir}", "model.threads=1"])
    written = capsys.readouterr().out.split()
    assert sorted(p.rsplit(".", 1)[1] for p in written) == ["csv", "pdf", "png", "svg"]
    table = pd.read_csv(next(p for p in written if p.endswith(".csv")), keep_default_na=True)
    traced = of_text(texts, None, 0, model)
    strips = importance(traced, ["answer"], [])
    np.testing.assert_allclose(table["true: answer"], strips[0].scores, rtol=1e-12)
    assert "".join(traced.pieces[traced.trace.think_start : traced.trace.think_end]) == TEXT.split("</think>")[0]
    assert table["step"].max() == 2
    assert table["position"].iloc[0] == traced.trace.think_start


def test_a_stored_completion_of_a_cell(kvsweep, tiny, tiny_policy, tmp_path):
    ended = kvsweep("policy=window", *tiny, *tiny_policy, "benchmark=toy_chain", f"results_dir={tmp_path}")
    assert ended.code == 0, ended.err
    folder = next(tmp_path.glob("*/*/cell.yaml")).parent
    row = json.loads((folder / "completions.jsonl").read_text().splitlines()[-1])
    traced = of_cell(folder, row["problem_id"], 0)
    assert traced.trace.token_ids[traced.trace.think_start :] == row["token_ids"]
    assert traced.completion.num_tokens == row["num_tokens"]
    out = tmp_path / "out"
    main([str(folder), "--problem", row["problem_id"], "--show", "kept", "--rows", "--out", str(out)])
    table = pd.read_csv(next(out.glob("kept_*.csv")), keep_default_na=True)
    for number, eviction in enumerate(row["evictions"], start=1):
        assert (table[f"held_{number}"] == 100).sum() == eviction["length_after"]
    assert next(out.glob("kept_*.html")).read_text().count("<h2>") == 1 + len(row["evictions"])
    with pytest.raises(UserError, match="is not among the completions"):
        of_cell(folder, "nobody", 0)


def test_the_attribution_of_equations(texts, tiny_model_dir, model, tmp_path):
    arguments = [str(texts), "--show", "attribution", "--out", str(tmp_path), f"model.path={tiny_model_dir}"]
    main(arguments)
    table = pd.read_csv(next(tmp_path.glob("*.csv")), dtype={"token": str})
    assert [c.split(".")[0] for c in table.columns[1:]] == ["4+7=1", "4+7=1"]
    assert "".join(table["token"]) == TEXT.split("</think>")[1]
    traced = of_text(texts, None, 0, model)
    steps = expressions(traced, EXPRESSIONS)
    expected = removal(model, traced.trace.token_ids, traced.trace.think_end, steps)
    np.testing.assert_allclose(table.iloc[:, 1:], expected.numpy(), atol=1e-5)
    assert next(tmp_path.glob("*.png")).stat().st_size > 5000


def test_steps_end_at_blank_lines():
    assert step_numbers(["a", " b\n", "\nc", "d\n\n", "\n", "e"]) == [0, 0, 0, 1, 1, 2]
    assert step_numbers(["\n\n", "a"]) == [0, 1]
    assert step_numbers(["a. ", "b. ", "c"], r"\. ") == [0, 1, 2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["/nowhere-at-all"], "does not exist"),
        (["/tmp"], "is no cell's folder"),
        (["TEXTS", "--problem", "none"], "is not in"),
        (["TEXTS", "--problem", "open"], "never closes its thinking"),
        (["TEXTS", "--split", "("], "is no regular expression"),
        (["TEXTS", "--min-distance", "0"], "at least 1 token"),
        (["TEXTS", "--slots", "0"], "at least 1"),
        (["TEXTS", "--show", "kept"], "a cell's completions alone"),
        (["TEXTS", "--show", "attribution", "--find", "zebra"], "matches nothing"),
        (["TEXTS", "--head", "/nowhere-at-all"], "holds no importance predictor"),
        (["TEXTS", "model.colour=blue"], "colour"),
    ],
)
def test_bad_input_is_one_sentence(arguments, message, texts, tiny_model_dir, capsys):
    tiny = [f"model.path={tiny_model_dir}"] if "TEXTS" in arguments else []
    with pytest.raises(SystemExit) as ended:
        main([str(texts) if a == "TEXTS" else a for a in arguments] + tiny)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_retention_of_a_run(kvsweep, tiny, tiny_policy, tmp_path, capsys):
    for policy in ("window", "random"):
        ended = kvsweep(f"policy={policy}", *tiny, *tiny_policy, "benchmark=toy_chain", f"results_dir={tmp_path}")
        assert ended.code == 0, ended.err
    run = next(tmp_path.glob("*/*/cell.yaml")).parent.parent
    out = tmp_path / "out"
    capsys.readouterr()
    main([str(run), "--show", "retention", "--label", "far_max", "--min-distance", "8", "--out", str(out)])
    table = pd.read_csv(out / "retention_far_max.csv")
    assert {name.split()[0] for name in table["policy"]} == {"window", "random"}
    assert table["retained"].between(0, 1).all()
    curves = pd.read_csv(out / "retention_far_max_curves.csv")
    assert set(curves["policy"]) == set(table["policy"])
    folder = next(p.parent for p in run.glob("*/cell.yaml") if "name: window" in p.read_text())
    expected = []
    for row in map(json.loads, (folder / "completions.jsonl").read_text().splitlines()):
        traced = of_cell(folder, row["problem_id"], 0)
        if traced.completion.evictions:
            scores = importance(traced, ["far_max"], [], 8)[0].scores
            kept = read_kept(traced.pieces, traced.trace.think_start, traced.completion.evictions)
            expected.append(retention(kept, scores, traced.trace.think_start)[0])
    (first,) = curves[(curves["policy"].str.startswith("window")) & (curves["eviction"] == 1)]["retained"]
    assert first == pytest.approx(np.mean(expected))
    assert "Spearman" in capsys.readouterr().out
