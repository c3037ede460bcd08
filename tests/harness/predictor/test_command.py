"""The whole pipeline on the tiny model's own texts, each stage stopped and gone on with."""

import json

import pytest
import torch
from safetensors.torch import load_file

from kvsweep.compression.artifacts import read_card
from kvsweep.compression.recorders import load_predictor
from kvsweep.harness.predictor.labels import shard_path
from kvsweep.harness.predictor.recipe import read_settings
from kvsweep.harness.predictor.traces import trace_problems
from kvsweep.harness.settings import WEIGHTS
from kvsweep.harness.toy.tasks import BENCHMARKS, TASKS, problems
from kvsweep.run_files.row_types import read_rows
from tests.program import predictor as main

TEXT = "a is 4, b is 7. So a is 4, b is 7, 4+7=1. So c is 1. Check 4+7=1 ok. So c is 1. "


TOYS = ["recipe.toy_tasks=[add]", "recipe.toy_problems=1"]


def refused(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("kvsweep")
    return error


@pytest.fixture
def settings(tmp_path, tiny_model_dir):
    rows = [
        {"problem": f"c=a+b: {i}", "text": f"{TEXT * 3}</think>c is 1 \\boxed{{{i % 2}}}", "gold": "1"}
        for i in range(40)
    ]
    rows.append({"problem": "c", "text": TEXT, "gold": "1"})
    source = tmp_path / "texts.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        f"model.path={tiny_model_dir}",
        f"recipe.import_from={source}",
        f"recipe.out={tmp_path / 'out'}",
        "recipe.epochs=3",
        "recipe.held_out=3",
        "recipe.widths=[8]",
        "recipe.rank_weight=0.1",
    ]


def test_from_texts_to_a_head_and_again_from_any_stage(settings, tmp_path, capsys):
    out = tmp_path / "out"
    main(["all", *settings])
    printed = capsys.readouterr()
    assert "never closes its thinking with </think>" in printed.out + printed.err
    assert printed.out.endswith("'grid.policy=[full,dynts]' --dry-run\n")
    traces = list(read_rows(out / "traces.jsonl", dict))
    assert [t["kept"] for t in traces] == [i % 2 == 1 for i in range(40)]
    report = json.loads((out / "far_max/eval.json").read_text())
    assert report["held_out_traces"] > 0
    assert len(report["true_top_20_percent_found_in_predicted_top"]) == 8
    card = read_card("predictor", out / "far_max")
    assert {"data", "label", "model_weights", "model_revision"} <= card.keys()
    first = load_predictor(out / "far_max").state_dict()

    # Killed in the middle of each stage: half a line of traces, no shard, a checkpoint of an earlier epoch.
    lines = (out / "traces.jsonl").read_text()
    (out / "traces.jsonl").write_text(lines[: len(lines) // 2])
    shard = shard_path(out / "cache", 0)
    before = shard.read_bytes()
    shard.unlink()
    main(["all", *settings])
    assert (out / "traces.jsonl").read_text() == lines
    assert shard.read_bytes() == before
    again = load_predictor(out / "far_max").state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)


RELEASED = ["recipe=r1", "recipe.target=power", "recipe.batch=4", "recipe.whole_traces.ranks=1", "recipe.rank_weight=0"]


def test_a_head_by_the_released_recipe(settings, tmp_path, capsys):
    main(["all", *settings, *RELEASED])
    head, traces = tmp_path / "out/answer", list(read_rows(tmp_path / "out/traces.jsonl", dict))
    assert json.loads((head / "eval.json").read_text())["held_out_traces"] > 0
    card = read_card("predictor", head)
    assert {"target": "power", "batch": 4, "lead": 1}.items() <= card.items()
    assert card["whole_traces"]["betas"] == [0.9, 0.95]
    kept = [trace for trace in traces if trace["kept"]]
    assert card["tokens"] == sum(trace["think_end"] - trace["think_start"] + 1 for trace in kept)
    main(["oracle", *settings, *RELEASED])
    labels = load_file(tmp_path / "out/oracle_answer.safetensors")
    for trace in kept:
        label = labels[f"labels/{trace['problem_id']}/{trace['draw']}"]
        assert (~label.isnan()).nonzero()[:, 0].tolist() == [*range(trace["think_start"], trace["think_end"])]
    assert "recipe.held_out=null keeps no trace to measure on" in refused(
        ["eval", *settings, *RELEASED, "recipe.held_out=null"], capsys
    )


@pytest.mark.slow
def test_the_released_recipe_in_bfloat16_goes_on_from_its_checkpoint(settings, tmp_path, monkeypatch):
    released = [*settings, *RELEASED, "recipe.whole_traces.dtype=bfloat16", "recipe.held_out=null"]
    main(["all", *released])
    assert not (tmp_path / "out/answer/eval.json").exists()
    whole = load_predictor(tmp_path / "out/answer").state_dict()
    (tmp_path / "out/answer/checkpoint.pt").unlink()
    import kvsweep.harness.predictor.trace_batches as stage

    fit, calls = stage.fit_batch, []

    def die_in_the_third_epoch(*arguments):
        calls.append(1)
        if len(calls) == 2 * 5 + 1:  # 20 traces are five steps
            raise KeyboardInterrupt
        return fit(*arguments)

    monkeypatch.setattr(stage, "fit_batch", die_in_the_third_epoch)
    with pytest.raises(SystemExit):
        main(["train", *released])
    main(["train", *released])
    assert len(calls) == 2 * 5 + 1 + 5
    resumed = load_predictor(tmp_path / "out/answer").state_dict()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


@pytest.mark.slow
def test_training_goes_on_from_its_checkpoint(settings, tmp_path, monkeypatch):
    main(["all", *settings])
    whole = load_predictor(tmp_path / "out/far_max").state_dict()
    (tmp_path / "out/far_max/checkpoint.pt").unlink()
    import kvsweep.harness.predictor.train as stage

    fit, calls = stage.fit_shard, []

    def die_in_the_third_epoch(*arguments):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return fit(*arguments)

    monkeypatch.setattr(stage, "fit_shard", die_in_the_third_epoch)
    with pytest.raises(SystemExit) as ended:
        main(["train", *settings])
    assert ended.value.code == 130
    main(["train", *settings])
    assert len(calls) == 4
    resumed = load_predictor(tmp_path / "out/far_max").state_dict()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "Choose from: traces, labels, train"),
        ("train recipe=none", "recipe=none is unknown: choose from r1, r1_llama_8b, r1_qwen_7b"),
        ("train recipe.label=[]", "recipe.label=[] "),
        ("train recipe.epochs=0", "recipe.epochs=0 cannot be used: input should be greater than 0."),
        ("traces recipe.toy_problems=null", "no problems for traces: give recipe.toy_problems=, or recipe=r1"),
        ("train recipe.impl=triton", "impl=triton needs a CUDA GPU"),
        ("train", "run kvsweep predictor labels first"),
        ("labels", "run kvsweep predictor traces"),
        ("traces recipe.import_from=nowhere", "import_from=nowhere does not exist"),
        ("all recipe=r1 model=r1_qwen_7b benchmark.path=MATH.jsonl", "MATH.jsonl cannot be read"),
        ("all model=toy_llama benchmark=toy_add", "or add recipe=r1"),
        (
            "all recipe=r1 model=toy_qwen",
            "recipe.target= is not set, and DynTS has power (10 / 0.3 * x ** 0.3)",
        ),
        (
            "train recipe.target=power recipe.label=[answer,later]",
            "recipe.target=power scales one kind of label",
        ),
        ("train model=r1_qwen_7b recipe.batch=24", "recipe.batch=24 traces are no whole micro-batches of 4"),
        ("train model=r1_qwen_7b recipe.rank_weight=1", "recipe.rank_weight=1.0 is of batches of tokens"),
        ("train model=r1_qwen_7b recipe.whole_traces.dtype=x", "recipe.whole_traces.dtype=x is unknown"),
    ],
)
def test_bad_input_is_one_sentence(arguments, message, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("kvsweep.harness.models.load.load_model", lambda config: pytest.fail("a model was loaded"))
    assert message in refused(arguments.split(), capsys)


def test_other_questions_of_the_same_ids_are_refused(settings, tmp_path, capsys):
    main(["traces", *settings])
    stored = (tmp_path / "out/traces.jsonl").read_bytes()
    source = tmp_path / "texts.jsonl"
    source.write_text(source.read_text().replace("c=a+b", "c=b+a"))
    assert "traces.jsonl holds another question of the id " in refused(["traces", *settings], capsys)
    assert (tmp_path / "out/traces.jsonl").read_bytes() == stored


@pytest.mark.slow
def test_nothing_to_fit_and_a_text_that_is_none_are_one_sentence(settings, tmp_path, capsys):
    far = "recipe.min_distance=100000"
    assert f"with recipe.held_out=3 and {far}: write more" in refused(["all", *settings, far], capsys)
    assert not (tmp_path / "out/far_max/predictor.safetensors").exists()
    (tmp_path / "text").write_bytes(b"\xe6\xff")
    assert "text is no UTF-8 text" in refused(["scales", *settings, f"recipe.text={tmp_path / 'text'}"], capsys)


@pytest.mark.slow
def test_a_foreign_shard_is_refused(settings, tmp_path, capsys):
    main(["all", *settings])
    shard_path(tmp_path / "out/cache", 0).write_bytes(b"nonsense")
    assert "is no shard of labels" in refused(["eval", *settings], capsys)
    other = refused(["labels", *settings, "recipe.min_distance=8"], capsys)
    assert "labels of other traces, model or settings" in other


@pytest.mark.slow
def test_traces_of_another_model_are_refused(settings, tmp_path, capsys):
    main(["all", *settings])
    for stage in ("traces", "labels", "statistics", "oracle", "train", "eval"):
        assert "set recipe.out=" in refused([stage, *settings, f"model.path={WEIGHTS / 'toy_llama'}"], capsys)
    assert "traces of another model, seed" in refused(["traces", *settings, "recipe.import_from=null", *TOYS], capsys)
    (tmp_path / "out/traces.json").unlink()
    assert "or does not name them: delete it" in refused(["traces", *settings], capsys)


@pytest.mark.slow
def test_traces_go_on_with_more_problems_and_no_other_seed(tiny_model_dir, tmp_path, capsys):
    own = [f"model.path={tiny_model_dir}", f"recipe.out={tmp_path}", "decoding.max_new_tokens=20"]
    refused(["traces", *own, *TOYS], capsys)  # the tiny model solves nothing
    refused(["traces", *own, *TOYS, "recipe.toy_problems=2"], capsys)
    assert len(list(read_rows(tmp_path / "traces.jsonl", dict))) == 2
    for other in ("recipe.seed=1", "decoding.max_new_tokens=21"):
        assert "traces of another model, seed, decoding" in refused(["traces", *own, *TOYS, other], capsys)


@pytest.mark.slow
def test_no_cell_and_a_cell_of_another_model_are_no_traces(kvsweep, tiny, tiny_policy, tmp_path, capsys):
    ended = kvsweep("policy=window", *tiny, *tiny_policy, "benchmark=toy_chain", f"results_dir={tmp_path}")
    assert ended.code == 0, ended.err
    folder = next(tmp_path.glob("*/*/cell.yaml")).parent
    other = ["traces", "model=toy_llama", f"recipe.out={tmp_path / 'out'}"]
    error = refused([*other, f"recipe.import_from={folder}"], capsys)
    assert "toy_llama holds other weights than " in error
    assert "or has no cell.yaml: give" in refused([*other, f"recipe.import_from={folder.parent}"], capsys)


@pytest.mark.slow
def test_shards_of_other_traces_are_written_anew(settings, tmp_path):
    main(["all", *settings])
    out = tmp_path / "out"
    (out / "cache/cache.json").unlink()
    rows = (out / "traces.jsonl").read_text().splitlines(keepends=True)
    (out / "traces.jsonl").write_text("".join(rows[:20]))
    shard = shard_path(out / "cache", 0)
    before = len(load_file(shard)["lengths"])
    main(["labels", *settings])
    assert len(load_file(shard)["lengths"]) == before // 2


@pytest.mark.slow
def test_a_head_of_nan_is_not_saved(settings, tmp_path, capsys):
    main(["traces", *settings])
    main(["labels", *settings])
    assert "recipe.lr=1e+30 made weights of the head NaN" in refused(["train", *settings, "recipe.lr=1e30"], capsys)
    assert not any((tmp_path / "out/far_max").iterdir())


def test_a_model_with_a_recipe_of_its_name_has_that_one():
    assert read_settings(["model=smollm2_reasons"]).recipe.toy_tasks == list(BENCHMARKS["words"])
    assert read_settings(["recipe=toy", "model=smollm2_reasons"]).recipe.toy_tasks == list(TASKS)[:4]
    assert read_settings(["model=toy_llama"]).recipe.toy_tasks == list(TASKS)[:4]


def test_traces_of_words_are_of_no_evaluation_problem():
    settings = read_settings(["model=smollm2_reasons", "recipe.toy_problems=80"])
    found, questions, kind = trace_problems(settings)
    assert questions == [problem.prompt for problem in found]
    assert kind == "integer"
    assert len({problem.id for problem in found}) == 80
    assert {problem.id.split("-")[0] for problem in found} == set(BENCHMARKS["words"])
    assert not {problem.prompt for problem in found} & {problem.question for problem in problems("words", 500)}
    assert trace_problems(settings) == (found, questions, kind)


def test_the_recipe_for_r1_takes_a_benchmark_or_a_file_and_nothing_by_itself():
    r1 = ["recipe=r1", "model=r1_qwen_7b"]
    assert read_settings(r1).benchmark is None
    assert read_settings([*r1, "benchmark=toy_add"]).benchmark.task == "add"
    assert read_settings([*r1, "benchmark.path=MATH.jsonl"]).benchmark.path == "MATH.jsonl"


def test_the_recipe_for_r1_scales_importance_by_the_model():
    assert read_settings(["model=r1_qwen_7b"]) == read_settings(["recipe=r1", "model=r1_qwen_7b"])
    assert read_settings(["recipe=r1", "model=r1_qwen_7b", "model.name=mine"]).recipe.target == "power"
    assert read_settings(["recipe=r1", "model=r1_llama_8b"]).recipe.target == "linear"
    assert read_settings(["recipe=r1", "model=toy_qwen", "recipe.target=linear"]).recipe.batch == 256
