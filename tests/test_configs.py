"""Every YAML under conf/ composes, becomes its dataclass and gives a job that could run."""

import csv
import itertools
import re
import shutil
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from safetensors.torch import load_file, save_file

from kvsweep.compression.policies.oracle import save_labels
from kvsweep.compression.policy import Policy
from kvsweep.compression.recorders import ImportancePredictor, save_predictor
from kvsweep.harness.benchmarks.config import BenchmarkConfig
from kvsweep.harness.decode.request import DecodingConfig, build_decoding
from kvsweep.harness.models.config import ModelConfig
from kvsweep.harness.predictor.recipe import read_settings
from kvsweep.harness.settings import CONF, WEIGHTS, build
from kvsweep.harness.sweep.grid import build_policies
from kvsweep.harness.sweep.job import make_job
from kvsweep.messages.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
GROUPS = ("model", "benchmark", "policy", "decoding", "experiment")
OPTIONS = {f"wrong_{i}": 10 + i for i in (1, 2, 3)}


def names(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


EXPERIMENTS = names("experiment")
# Models of whose hub folders no commit is known to us; a sweep of them says that they are not pinned.
UNPINNED = {"gemma3_4b", "gpt_oss_20b", "olmo3_7b_think", "qwen3_30b_a3b_thinking", "qwen3_next_80b_thinking"}


@pytest.fixture
def offline(tiny, write_problems) -> Callable[[Any], list[str]]:
    """Overrides that leave a configuration as it is, save that no network and no trained weights are needed."""

    def overrides(benchmark):
        source = yaml.safe_load((CONF / "benchmark" / f"{benchmark}.yaml").read_text())["source"]
        rows = [{"id": i, "problem": f"{i}+1 in {benchmark}?", "answer": i + 1, **OPTIONS} for i in (1, 2)]
        local = [f"benchmark.path={write_problems(rows)}"] if source == "hub" else []
        return [*tiny[:3], "model.gguf=null", "model.adapter=null", *local]

    return overrides


def test_every_group_of_the_configuration_has_its_test():
    groups = {path.name for path in CONF.iterdir() if path.is_dir()} - {
        "launcher",
        "hydra",
        "prompt",
        "tracker",
        "engine",
    }
    assert groups == {*GROUPS, "predictor", "protocol"}  # protocols: tests/harness/benchmarks/test_protocols.py
    assert all(names(group) for group in GROUPS)


@pytest.mark.parametrize(("group", "name"), [(g, n) for g in GROUPS[:-1] for n in names(g)])
def test_a_file_holds_the_name_it_goes_by(group, name):
    assert yaml.safe_load((CONF / group / f"{name}.yaml").read_text())["name"] == name


@pytest.mark.parametrize("name", names("model"))
def test_every_model(name, compose):
    config = compose(f"model={name}")
    model = build(ModelConfig, "model", config.model)
    assert model.name == name
    assert model.title
    assert set(config.model) == {field.name for field in fields(ModelConfig)}, "a setting without a line is hidden"


@pytest.mark.parametrize("name", names("benchmark"))
def test_every_benchmark(name, compose, offline):
    config = compose(f"benchmark={name}", *offline(name))
    assert set(config.benchmark) == {field.name for field in fields(BenchmarkConfig)}
    job = make_job(config)
    assert job.benchmark.name == name
    assert job.benchmark.problems


def write_labels(results: Path, model: str, benchmark: str, hidden_size: int = 32):
    """The files that the oracles name, of no text."""
    folder = results / "oracle" / model / benchmark
    folder.mkdir(parents=True, exist_ok=True)
    for label in ("answer", "far_max"):
        save_labels(folder / f"oracle_{label}.safetensors", {}, {"hidden_size": hidden_size})


@pytest.mark.parametrize("name", names("policy"))
def test_every_policy(name, compose, tiny, tmp_path):
    config = compose(f"policy={name}", *tiny, f"results_dir={tmp_path}")
    write_labels(tmp_path, str(config.model.name), str(config.benchmark.name))
    [policy] = build_policies(config)
    assert isinstance(policy, Policy)
    assert policy.name == name
    # rows and every are another spelling of keep_ratio and budget.
    assert set(config.policy) - {"_target_", "rows", "every"} == {field.name for field in fields(policy)}


def test_a_policy_lies_in_the_file_of_its_name_or_its_family():
    for file in (CONF / "policy").glob("*.yaml"):
        module = yaml.safe_load(file.read_text())["_target_"].split(".")[-2]
        ablations = {"no_question", "no_window", "bottom"}
        assert (
            file.stem == module
            or file.stem.startswith(f"{module}_")
            or (module == "dynts_ablations" and file.stem in ablations)
        )


@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", names("predictor"))
def test_every_predictor_recipe(name, step, write_problems):
    for model in names("model")[::step]:
        given = [f"recipe={name}", f"model={model}"]
        if name.startswith("r1"):
            path = write_problems([{"id": "a", "problem": "1+1?", "answer": 2}])
            given += [f"benchmark.path={path}", "recipe.target=linear"]
        plan = read_settings(given)
        assert plan.model.name == model
        assert plan.recipe.head.parent == plan.recipe.out
        assert (plan.recipe.toy_problems is None) == (plan.benchmark is not None)


@pytest.mark.parametrize("name", names("decoding"))
def test_every_decoding(name, compose):
    config = compose(f"decoding={name}")
    decoding = build_decoding(config.decoding)
    assert isinstance(decoding, DecodingConfig)
    assert decoding.name == name
    settings = {field.name for part in (decoding, decoding.sampling) for field in fields(part)}
    assert set(config.decoding) == settings - {"sampling"}


def sweep(experiment: str, compose: Callable[..., Any]) -> list[list[str]]:
    """The overrides of each job of an experiment's sweep, read as Hydra reads them."""
    parameters = compose(f"experiment={experiment}", return_hydra_config=True).hydra.sweeper.params or {}
    overrides = OverridesParser.create().parse_overrides([f"{key}={value}" for key, value in parameters.items()])
    return [list(job) for job in itertools.product(*map(values_of, overrides))]


def values_of(override: Override) -> list[str]:
    key = override.get_key_element()
    if not override.is_sweep_override():
        return [f"{key}={override.get_value_element_as_str()}"]
    return [f"{key}={value}" for value in override.sweep_string_iterator()]


@pytest.mark.parametrize("most", [1, pytest.param(None, marks=pytest.mark.slow)], ids=["first", "all"])
@pytest.mark.parametrize("name", EXPERIMENTS)
@pytest.mark.slow_unless(rule=lambda name, most: name.startswith(("demo", "heatmap", "methods_r1", "ablation_r1_qwen")))
@pytest.mark.one_in(3)
def test_every_job_of_every_experiment(name, most, compose, offline, tmp_path):
    # The heads of the label study are for the embedded models alone, and the tiny model's are too narrow for 2 bits.
    embedded = name in ("labels", "bytes_toy", "equal_bytes", "equal_bytes_packed")
    jobs = [job for job in sweep(name, compose) if embedded or "cache.bits=2" not in job][:most]
    cells: list[str] = []
    for overrides in jobs:
        chosen = dict(override.split("=", 1) for override in overrides)
        benchmark = chosen.get("benchmark") or compose(f"experiment={name}").benchmark.name
        of_tiny = [*offline(benchmark), "cache.group=8", "cache.residual=2"]
        local = ["benchmark.limit=2", f"results_dir={tmp_path}"] if embedded else of_tiny
        write_labels(tmp_path, chosen.get("model", ""), benchmark, hidden_size=128)
        job = make_job(compose(f"experiment={name}", *overrides, *local))
        assert job.run_directory.name != "default", "an experiment has a run directory of its own"
        assert "full" in {cell.policy.name for cell in job.cells}, "a grid without its baseline says little"
        cells += [cell.cell_id for cell in job.cells]
    # Both toy models are the same tiny one here, so only what else differs can be told apart.
    models = {override for job in jobs for override in job if override.startswith("model=")} if not embedded else ()
    assert len(cells) == len(set(cells)) * max(1, len(models))


def test_the_demo_is_the_whole_grid(compose, offline):
    assert len(sweep("demo", compose)) == 2
    cells = make_job(compose("experiment=demo", *offline("toy_chain"))).cells
    points = {
        name: {(cell.policy.keep_ratio, cell.policy.local_window) for cell in cells if cell.policy.name == name}
        for name in ("dynts", "random", "h2o", "snapkv", "rkv")
    }
    assert points.pop("dynts") == set(itertools.product((0.1, 0.2, 0.3, 0.4, 0.5), (16, 32, 48, 64)))
    assert list(points.values()) == [{(0.3, 48)}] * 4
    # The full cache once.
    assert len(cells) == 1 + 5 * 4 + 4


@pytest.mark.slow
def test_the_demos_published_sweep_has_its_cells(compose):
    """Cell by cell: nothing that decides a completion has changed since the pages were published."""
    with (ROOT / "results/published/demo/cells.csv").open() as file:
        published = [row["cell_id"] for row in csv.DictReader(file)]
    assert len(published) == len(set(published)) == 216
    jobs = [make_job(compose("experiment=demo_full", *job)) for job in sweep("demo_full", compose)]
    assert {cell.cell_id for job in jobs for cell in job.cells} == set(published)


def test_a_head_made_for_another_model_is_refused(compose, tmp_path):
    other = WEIGHTS / "predictors/toy_llama/far_max"
    with pytest.raises(
        UserError, match=r"was made for toy_llama .* but model=toy_qwen is .*: give one made for this model"
    ):
        make_job(compose("model=toy_qwen", "policy=dynts", f"policy.predictor={other}", "benchmark=toy_add"))
    save_predictor(ImportancePredictor(64, (5,)), tmp_path / "narrow", {})
    with pytest.raises(UserError, match="was made for hidden size 64, but model=toy_qwen has 128"):
        make_job(compose("model=toy_qwen", "policy=dynts", f"policy.predictor={tmp_path}/narrow", "benchmark=toy_add"))


def test_statistics_of_other_sizes_are_refused(compose, tmp_path):
    """Of fewer heads, scores would be those of some heads alone."""
    shipped, place = WEIGHTS / "statistics/toy_qwen.safetensors", tmp_path / "statistics.safetensors"
    shutil.copy(shipped.with_suffix(".json"), place.with_suffix(".json"))
    layers, heads, _ = load_file(shipped)["mean_real"].shape
    for part, said in (
        ((slice(1),), f"1 layers, but model=toy_qwen has {layers}"),
        ((slice(None), slice(1)), f"1 query heads, but model=toy_qwen has {heads}"),
    ):
        parts = {n: t[part].contiguous() if n.startswith("mean_") else t for n, t in load_file(shipped).items()}
        save_file(parts, place)
        with pytest.raises(UserError, match=f"statistics.safetensors was made for {said}: give one made for"):
            make_job(
                compose("model=toy_qwen", "policy=triattention", f"policy.statistics={place}", "benchmark=toy_add")
            )


@pytest.mark.parametrize("name", names("model"))
def test_a_model_of_the_hub_has_a_whole_commit_and_a_licence(name):
    text = (CONF / "model" / f"{name}.yaml").read_text()
    fields = yaml.safe_load(text)
    if "/" in str(fields.get("path")):
        assert re.search("^# Licence: .+", text, re.MULTILINE)
        assert name in UNPINNED or re.fullmatch("[0-9a-f]{40}", fields["revision"])
