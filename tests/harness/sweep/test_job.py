"""Bad input is one sentence before a model loads; a grid is what its lists say; a cell's id names its outputs."""

import shutil
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvsweep.compression.policies.dynts import DynTS
from kvsweep.compression.policies.full import FullCache
from kvsweep.compression.policies.random import Random
from kvsweep.compression.policies.window import Window
from kvsweep.compression.recorders import ImportancePredictor, save_predictor
from kvsweep.harness.benchmarks.config import BenchmarkConfig
from kvsweep.harness.decode.request import DecodingConfig
from kvsweep.harness.decode.sampling import SamplingConfig
from kvsweep.harness.models import config as model_config
from kvsweep.harness.models.config import ModelConfig
from kvsweep.harness.settings import compose_config
from kvsweep.harness.sweep.cell import Cell
from kvsweep.harness.sweep.grid import build_policies
from kvsweep.harness.sweep.job import Job, make_job
from kvsweep.harness.sweep.share import share_of
from kvsweep.messages.errors import UserError

# --- Bad input ----------------------------------------------------------------------------------------------

OF_THE_KEY = [
    *("policy.keep_ratio=1.5", "policy.keep_ratio=0", "policy.local_window=0", "policy.local_window=200"),
    *("policy.budget=0", "policy.question=kept", "grid.question=[free,kept]", "grid.question=[]", "grid.policy=dynts"),
    *("grid.policy=[]", "grid.beside=h2o", "grid.keep_ratio=[]", "draws=0", "draws=true", "slots=0", "slots=x"),
    *("invariant=1", "seed=-1", "decoding.max_new_tokens=0", "decoding.top_k=-1", "benchmark.limit=0"),
    *("model.dtype=float8", "model.threads=0", "model.path=???"),
]
# What the sentence must name, if not the setting.
BAD_VALUES = {word: word.partition("=")[0] for word in OF_THE_KEY} | {
    "+policy.keep=0.5": "policy.keep is not a setting",
    "policy=nope": "nope",
    "nonsense=1": "nonsense",
    "policy.keep_ratio=[": "policy.keep_ratio=[ cannot be read",
    "grid.policy=[full,nope]": "nope",
    "grid.beside=[{policy:[nope]}]": "nope",
    "grid.beside=[{polcy:[full]}]": "polcy",
    "grid.beside=[{keep_ratio:[1.5]}]": "keep_ratio=1.5",
    "grid.beside=[{beside:[{policy:[full]}]}]": "grid.beside.beside is not a setting",
    "grid.keep_ratio=[0.1,1.5]": "keep_ratio=1.5",
    "grid.local_window=[8,200]": "local_window=200",
    "model.path=/no/such/model": "/no/such/model",
    "model.predictor=null": "name its place by model.predictor=PLACE",
    "model.predictor=/no/such/predictor": "/no/such/predictor",
    "launcher.shards=0": "launcher.shards=0",
    "launcher.gpus=-1": "launcher.gpus=-1",
    "launcher.max_requeues=-1": "launcher.max_requeues=-1",
    "launcher.signal_delay_s=14400": "time limit of 240 minutes",
}


@pytest.fixture
def refused(kvsweep, no_model, tiny, tmp_path, monkeypatch):
    """`refused("key=value")` is the one line of the refused command, which leaves nothing else on stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*overrides):
        base = [*tiny, "policy.budget=128", "policy.local_window=8", f"results_dir={tmp_path / 'runs'}"]
        changed = {override.split("=")[0].lstrip("+") for override in overrides}
        # Hydra takes its own options before the overrides alone.
        ended = kvsweep(*overrides, *(b for b in base if b.split("=")[0] not in changed))
        assert (ended.code, ended.err.count("\n")) == (2, 1), ended.err
        assert ended.err.startswith("kvsweep: error: ")
        assert not list(tmp_path.glob("runs/*/*/completions.jsonl"))
        return ended.err

    return run


@pytest.mark.parametrize("override", BAD_VALUES)
def test_a_bad_value(override, refused):
    launcher = ["launcher=slurm"] if override.startswith("launcher") else []
    assert BAD_VALUES[override] in refused(*launcher, override)


def test_a_bad_value_in_one_job_of_a_sweep(refused):
    assert "keep_ratio=7" in refused("-m", "policy.keep_ratio=0.5,7")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("policy.budget=129", "policy.budget=129 contradicts"),
        ("policy.keep_ratio=0.5", "policy.keep_ratio=0.5 contradicts"),
        ("grid.keep_ratio=[0.5]", "grid.keep_ratio=[0.5] contradicts"),
        ("policy.local_window=40", "policy.rows=40 leaves no row beside policy.local_window=40"),
        ("policy.every=null", "policy.rows is given alone"),
        ("policy.every=0", "policy.every=0 cannot be used"),
    ],
)
def test_a_size_said_in_two_ways(override, said, refused):
    words = ("policy.budget=null", "policy.rows=40", "policy.every=8", override)
    size = dict(word.split("=", 1) for word in words)
    assert said in refused(*map("=".join, size.items()))


def test_a_window_that_nobody_gave_is_said_to_be_the_models():
    with pytest.raises(UserError, match=r"local_window=2000 is larger .*budget=16; .* give policy\.local_window=16"):
        build_policies(compose_config("model=r1_qwen_7b", "policy=window", "policy.budget=16"))


def test_a_predictor_of_another_model(refused, tmp_path):
    save_predictor(ImportancePredictor(48, (4,)), tmp_path / "wide", {})
    assert "hidden size 48, but model=toy_qwen has 32" in refused(f"model.predictor={tmp_path / 'wide'}")


@pytest.mark.parametrize("card", [None, "{"])
def test_a_predictor_without_its_card(card, refused, tiny_predictor_dir, tmp_path):
    directory = Path(shutil.copytree(tiny_predictor_dir, tmp_path / "torn"))
    (directory / "predictor.json").unlink()
    if card is not None:
        (directory / "predictor.json").write_text(card)
    assert "torn" in refused(f"model.predictor={directory}")


def test_results_in_a_place_that_is_no_folder(kvsweep, no_model, tiny, tiny_policy, tmp_path):
    (tmp_path / "file").write_text("")
    ended = kvsweep(*tiny, *tiny_policy, f"results_dir={tmp_path / 'file'}")
    assert (ended.code, "Not a directory" in ended.err.splitlines()[-1]) == (2, True), ended.err


def test_values_at_their_ends_are_taken(compose, tiny):
    ends = ["policy.keep_ratio=1", "policy.local_window=1", "policy.budget=1", "slots=1", "draws=1", "seed=0"]
    assert len(make_job(compose(*tiny, *ends, "decoding.top_p=1", "decoding.temperature=0")).cells) == 1
    equal = ["policy.local_window=128", "policy.budget=128", "policy.keep_ratio=1e-9", "slots=auto"]
    assert make_job(compose(*tiny, *equal)).slots is None


def test_numbers_keep_their_type(compose, tiny):
    """A ratio of 1 and one of 1.0 are one cell."""
    one, other = (make_job(compose(*tiny, f"policy.keep_ratio={value}")) for value in ("1", "1.0"))
    assert one.cells[0].cell_id == other.cells[0].cell_id


# --- Grids --------------------------------------------------------------------------------------------------


@pytest.fixture
def policies(compose, tiny):
    return lambda *overrides: build_policies(compose(*tiny, "policy.budget=128", "policy.local_window=16", *overrides))


def test_without_a_grid_there_is_the_policy(policies, tiny_predictor_dir):
    assert policies("policy.keep_ratio=0.25") == [
        DynTS(name="dynts", keep_ratio=0.25, local_window=16, budget=128, predictor=str(tiny_predictor_dir))
    ]


def test_a_grid_is_the_product_of_its_lists(policies):
    grid = policies("grid.policy=[dynts,random]", "grid.keep_ratio=[0.1,0.5]", "grid.local_window=[8,16,32]")
    settings = [(p.name, p.keep_ratio, p.local_window) for p in grid]
    assert settings == [(n, r, w) for n in ("dynts", "random") for r in (0.1, 0.5) for w in (8, 16, 32)]
    assert {p.budget for p in grid} == {128}
    assert {p.name: type(p) for p in grid} == {"dynts": DynTS, "random": Random}


def test_grids_beside_a_grid(policies):
    others = "grid.beside=[{policy:[random,full]},{policy:[dynts],keep_ratio:[0.5],budget:[96,160]}]"
    grid = policies("grid.policy=[full,dynts]", "grid.keep_ratio=[0.1,0.4]", "policy.keep_ratio=0.4", others)
    assert [(p.name, getattr(p, "keep_ratio", None), getattr(p, "budget", None)) for p in grid] == [
        ("full", None, None),
        ("dynts", 0.1, 128),
        ("dynts", 0.4, 128),
        ("random", 0.4, 128),
        ("dynts", 0.5, 96),
        ("dynts", 0.5, 160),
    ]


def test_a_grid_over_budgets(policies):
    grid = policies("grid.policy=[full,window]", "grid.budget=[96,128,160]")
    assert [getattr(p, "budget", None) for p in grid] == [None, 96, 128, 160]


def test_the_full_cache_has_no_axes(policies):
    grid = policies("grid.policy=[full,dynts,full]", "grid.keep_ratio=[0.1,0.5,0.5]")
    assert [p.name for p in grid] == ["full", "dynts", "dynts"]
    assert grid[0] == FullCache(name="full")


def test_policies_of_a_grid_share_the_settings_of_the_chosen_one(policies, tiny_predictor_dir):
    chosen = ["policy=random", "policy.keep_ratio=0.2", "policy.question=on_top"]
    dynts, window, random = policies(*chosen, "grid.policy=[dynts,window,random]")
    shared = {"keep_ratio": 0.2, "local_window": 16, "budget": 128, "question": "on_top"}
    assert dynts == DynTS(name="dynts", predictor=str(tiny_predictor_dir), **shared)
    assert window == Window(name="window", **shared)
    assert random == Random(name="random", **shared)


# Rows, tokens between evictions and newest rows kept: R-KV, TriAttention, Random Attention, RPC's window, and odd ones.
OTHERS_SIZES = [
    (1024, 128, 8),
    (2048, 128, 128),
    (4096, 64, 64),
    (2048, 128, 16),
    (1024, 64, 64),
    (7, 3, 2),
    (50, 1, 49),
]


@pytest.mark.parametrize(("rows", "every", "window"), OTHERS_SIZES)
def test_rows_and_every_are_another_spelling_of_the_same_cell(rows, every, window, compose, tiny):
    base = [*tiny, "policy=random", f"policy.local_window={window}"]
    [one] = make_job(compose(*base, f"policy.rows={rows}", f"policy.every={every}")).cells
    ratio = one.policy.keep_ratio
    [same] = make_job(compose(*base, f"policy.budget={rows + every}", f"policy.keep_ratio={ratio}")).cells
    assert same.cell_id == one.cell_id
    assert same.describe() == one.describe()
    assert one.policy.size == rows
    assert one.policy.length_after(one.policy.trigger(9) + 1, 9) == rows
    # One digit less gives another size: the ratio is the shortest that does.
    digits = len(str(ratio).partition(".")[2])
    shorter = [round(k / 10 ** (digits - 1), digits) for k in range(1, 10 ** (digits - 1))]
    assert rows not in [window + int((rows + every + 1 - window) * r) for r in shorter]


def test_a_grid_of_windows_has_one_size_for_all(compose, tiny):
    size = ["policy.rows=100", "policy.every=20", "grid.policy=[full,random,window]", "grid.local_window=[8,16,32]"]
    policies = build_policies(compose(*tiny, *size))
    assert [p.size for p in policies[1:]] == [100] * 6
    assert {p.local_window for p in policies[1:]} == {8, 16, 32}


def test_where_full_is_chosen_the_others_keep_their_own(compose, tiny):
    full, random = build_policies(compose(*tiny, "policy=full", "grid.policy=[full,random]"))
    assert full == FullCache(name="full")
    assert (random.keep_ratio, random.local_window, random.budget) == (0.4, 32, 256)


def test_a_job_lists_each_pair_once(compose, tiny):
    job = make_job(compose(*tiny, "draws=3", "benchmark.limit=2"))
    first, second = (problem.id for problem in job.benchmark.problems)
    assert share_of(job).pairs == [(first, 0), (first, 1), (first, 2), (second, 0), (second, 1), (second, 2)]


# --- The name of a cell -------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def no_hub(monkeypatch):
    """Every revision is a commit here: nobody is asked what it names."""
    monkeypatch.setattr(model_config, "commit_of", lambda place, revision: revision)


def synthetic(**changes: Any) -> Cell:
    """A cell that needs no file."""
    fields: dict[str, Any] = {
        "model": ModelConfig(name="m", title="M", path="owner/model", revision="abc", dtype="bfloat16"),
        "benchmark": BenchmarkConfig(name="b", title="B", source="toy", task="add"),
        "dataset_hash": "0123456789abcdef",
        "policy": Random(name="random", keep_ratio=0.3, local_window=16, budget=128, question="pinned"),
        "decoding": DecodingConfig(
            name="d", max_new_tokens=400, sampling=SamplingConfig(temperature=0.6, top_p=0.95, top_k=20)
        ),
        "seed": 7,
    }
    return Cell(**(fields | changes))


def test_the_cell_id_is_pinned():
    """Whoever changes this makes every stored result a stranger: its cells would all run again."""
    assert synthetic().cell_id == "32fbfb5ac1b4f7cb"


@pytest.mark.parametrize("section", ["model", "decoding", "policy"])
def test_every_field_changes_the_id_or_is_known_not_to(section):
    known = {
        # The opening tag matters where it is forced, the architecture where it is built from the configuration.
        "model": {"name", "title", "device", "threads", "predictor", "statistics"}
        | {"think_start", "config", "special_tokens", "safetensors_only", "sizes", "split"},
        "decoding": {"name"},
        "policy": set[str](),
    }[section]
    other: dict[str, Any] = {
        "path": "owner/other", "revision": "abd", "dtype": "float16", "random_weights": True, "think_end": "</t>",
        "think_start": "<t>", "force_think": True, "config": {"model_type": "llama"}, "special_tokens": {"bos": "<b>"},
        "name": "other", "title": "Other", "device": "cpu", "threads": 2, "predictor": "/p", "statistics": "/s",
        "safetensors_only": False, "sizes": {}, "chat_template": "none", "split": "x", "today": "2026-01-02",
        "template": {"a": 1},
        "max_new_tokens": 401, "stop_on_loop": True, "sampling": SamplingConfig(temperature=0.6, top_p=0.9, top_k=20),
        "keep_ratio": 0.31, "local_window": 17, "budget": 129, "question": "free", "sinks": 2,
    }  # fmt: skip
    cell = synthetic()
    part = getattr(cell, section)
    # Files are hashed, so they must be there: tests/harness/models has tests of a GGUF's and an adapter's identity.
    for field in (field.name for field in fields(part) if field.name not in ("gguf", "adapter")):
        changed = replace(cell, **{section: replace(part, **{field: other[field]})})
        assert (changed.cell_id == cell.cell_id) == (field in known), field
    assert replace(cell, impl="triton").cell_id != cell.cell_id
    # Triton's fused steps round differently from those of the runs that say `triton`.
    named = [replace(cell, impl=impl).describe()["impl"] for impl in ("torch", "packed", "triton", "openai")]
    assert named == ["torch", "torch packed", "triton 2", "openai"]


def test_a_question_is_an_axis_of_the_grid(policies):
    grid = policies("policy.question=on_top", "grid.policy=[full,dynts,window]", "grid.question=[free,pinned]")
    assert [getattr(policy, "question", None) for policy in grid] == [None, "free", "pinned", "free", "pinned"]
    own = policies("grid.policy=[dynts,window,no_question]")
    assert [policy.question_rule for policy in own] == ["pinned", "free", "free"]


def test_sinks_are_an_axis_of_the_grid(policies):
    grid = policies("grid.policy=[full,random,streaming_llm]", "grid.sinks=[0,4]")
    assert [getattr(policy, "sinks", None) for policy in grid] == [None, 0, 4, 0, 4]
    own = policies("grid.policy=[random,streaming_llm,sepllm_dynts_code,streaming_llm_dynts_code]")
    assert [policy.identity()["sinks"] for policy in own] == [0, 4, 0, 10]


def test_what_matters_only_with_another_setting_changes_the_id_there():
    cell = synthetic()
    special = {"bos": "<b>", "eos": "<e>", "user": "<u>", "assistant": "<a>"}
    built = {"random_weights": True, "config": {"model_type": "llama"}, "special_tokens": special}
    for base, change in (
        ({"force_think": True}, {"think_start": "<t>"}),
        (built, {"config": {"model_type": "llama", "num_hidden_layers": 2}}),
        (built, {"special_tokens": {**special, "bos": "<s>"}}),
    ):
        first = replace(cell, model=replace(cell.model, **base))
        assert replace(first, model=replace(first.model, **change)).cell_id != first.cell_id, change


@pytest.mark.parametrize("change", [{"temperature": 0.7}, {"top_p": 0.9}, {"top_k": 0}, {"order": "top_p_then_top_k"}])
def test_every_sampling_field_changes_the_id(change):
    cell = synthetic()
    sampling = replace(cell.decoding.sampling, **change)
    assert replace(cell, decoding=replace(cell.decoding, sampling=sampling)).cell_id != cell.cell_id


def test_seed_data_and_class_change_the_id():
    window = Window(name="random", keep_ratio=0.3, local_window=16, budget=128)
    cells = [synthetic(), synthetic(seed=8), synthetic(dataset_hash="f" * 16), synthetic(policy=window)]
    assert len({cell.cell_id for cell in cells}) == 4


@pytest.fixture(scope="module")
def plain():
    """The id of the cell without further overrides, which many tests ask for."""
    return []


@pytest.fixture
def cell_id(compose, tiny, tiny_policy, plain):
    def of(*overrides):
        if not overrides and plain:
            return plain[0]
        [cell] = make_job(compose(*tiny, *tiny_policy, *overrides)).cells
        if not overrides:
            plain.append(cell.cell_id)
        return cell.cell_id

    return of


@pytest.mark.parametrize(
    "override",
    [
        "draws=5", "benchmark.limit=1", "slots=3", "invariant=false", "results_dir=/elsewhere", "run_name=other",
        "model.title=T", "benchmark.title=T", "model.device=cpu", "model.threads=2", "model.name=mine",
        "benchmark.name=mine", "report.margin=3", "decoding.stop_on_loop=false",
    ],
)  # fmt: skip
def test_what_cannot_change_an_output_leaves_the_id(override, cell_id):
    assert cell_id(override) == cell_id()


@pytest.mark.parametrize(
    "override",
    [
        "benchmark=toy_add", "benchmark.count=119", "benchmark.prompt=boxed", "seed=1", "model.dtype=bfloat16",
        "model.random_weights=true", "policy.keep_ratio=0.3", "policy=random", "decoding.max_new_tokens=41",
        "decoding=dynts", "decoding.stop_on_loop=true",
    ],
)  # fmt: skip
def test_what_can_change_an_output_changes_the_id(override, cell_id):
    assert cell_id(override) != cell_id()


def test_the_same_model_elsewhere_is_the_same_cell(cell_id, tiny_model_dir, tiny_predictor_dir, tmp_path):
    shutil.copytree(tiny_model_dir, tmp_path / "model")
    shutil.copytree(tiny_predictor_dir, tmp_path / "predictor")
    (tmp_path / "model" / "README.md").write_text("A copy.")
    assert cell_id(f"model.path={tmp_path / 'model'}", f"model.predictor={tmp_path / 'predictor'}") == cell_id()


@pytest.mark.parametrize("file", ["tokenizer.json", "chat_template.jinja", "config.json", "generation_config.json"])
def test_another_tokenizer_or_shape_is_another_cell(file, cell_id, tiny_model_dir, tmp_path):
    shutil.copytree(tiny_model_dir, tmp_path / "model")
    path = tmp_path / "model" / file
    path.write_text(path.read_text() + " ")
    assert cell_id(f"model.path={tmp_path / 'model'}") != cell_id()


def test_describe_holds_what_the_cell_is(compose, tiny, tiny_policy):
    job: Job = make_job(compose(*tiny, *tiny_policy))
    text = yaml.safe_dump(job.cells[0].describe())
    described = yaml.safe_load(text)
    assert described["cell_id"] == job.cells[0].cell_id
    assert described["policy"] == {**described["policy"], "keep_ratio": 0.4, "local_window": 8, "budget": 64}
    assert described["decoding"]["name"] == "r1"
    assert described["decoding"]["temperature"] == 0.6
    assert described["decoding"]["max_new_tokens"] == 40
    assert described["dataset_hash"] == job.benchmark.content_hash
