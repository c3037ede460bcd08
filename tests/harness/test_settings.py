"""A section of the configuration becomes its dataclass, or one sentence that names the value and the allowed range."""

import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import pytest
from omegaconf import OmegaConf
from pydantic import Field

from kvsweep.compression.policy import Policy
from kvsweep.compression.source import code_hash
from kvsweep.harness.command import init
from kvsweep.harness.overrides import hydra_overrides
from kvsweep.harness.settings import (
    build,
    build_target,
    choices,
    compose_config,
    plain,
    plain_config_errors,
    target_class,
    target_classes,
)
from kvsweep.harness.sweep.job import make_job
from kvsweep.harness.sweep.slurm import Slurm
from kvsweep.messages.errors import UserError
from kvsweep.run_files.row_types import leaves


@dataclass(frozen=True, kw_only=True)
class Example:
    ratio: Annotated[float, Field(gt=0, le=1)] = 0.5
    count: Annotated[int, Field(ge=1)] = 1
    threads: Annotated[int, Field(ge=1)] | None = None
    values: Annotated[Sequence[Annotated[float, Field(ge=0, lt=2)]], Field(min_length=1)] | None = None
    name: Literal["a", "b"] = "a"

    def __post_init__(self):
        if self.name == "b" and self.count > 3:
            raise ValueError(f"example.count={self.count} is too many for b.")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"ratio": 1.5}, "ratio=1.5 cannot be used: input should be less than or equal to 1."),
        ({"ratio": True}, "ratio=True cannot be used"),
        ({"count": 0}, "count=0 cannot be used: input should be greater than or equal to 1."),
        ({"count": True}, "count=True cannot be used"),
        ({"count": float("inf")}, "count=inf cannot be used"),
        ({"threads": 0}, "threads=0 cannot be used"),
        ({"values": [1, 2]}, "values.1=2 cannot be used: input should be less than 2."),
        ({"values": []}, "values=[] cannot be used"),
        ({"name": "b", "count": 4}, "count=4 is too many for b."),
        ({1: 2, "?": 3}, "1 is not a setting: example has ratio, count, threads, values, name."),
        ({"count": "many"}, "count='many' "),
        ({"count": 1.5}, "count=1.5 "),
        ({"count": None}, "count=None "),
        ({"name": "c"}, "name=c is unknown: choose 'a' or 'b'."),
    ],
)
def test_a_refusal(settings, words):
    with pytest.raises(UserError) as refused:
        build(Example, "example", settings)
    assert str(refused.value).startswith(f"example.{words}")


def test_the_ends_of_a_range_are_taken():
    assert build(Example, "example", {"ratio": 1, "count": 1, "values": [0]}).ratio == 1.0
    assert build(Example, "example", {"threads": None, "values": None}) == Example()


@pytest.mark.parametrize(
    ("path", "fault"),
    [
        ("os.system", "is no policy"),
        ("json.JSONDecoder", "is no policy"),
        ("kvsweep.harness.benchmarks.config.BenchmarkConfig", "is no policy"),
        ("kvsweep.compression.policies.window.Nothing", "is no policy"),
        ("no_such_module.Mine", r"cannot be imported \(No module named 'no_such_module'\)"),
        ("no_module", r"cannot be imported \(Empty module name\)"),
    ],
)
def test_a_target_that_is_no_policy(path, fault):
    way_out = "name a dataclass that extends kvsweep.compression.policy.Policy"
    with pytest.raises(UserError, match=f"^policy._target_={path} {fault}: {way_out}"):
        build_target("policy", {"_target_": path, "budget": 64}, Policy)


def test_a_word_of_a_script_with_windows_line_ends():
    with pytest.raises(UserError, match=r"^policy=full\\r ends in a carriage return"):
        hydra_overrides(["policy=full\r"], target_classes, multirun=False)


TEXTS = ["1e5", "1_000", "1.50", "1e400", "12345e7", "00123", "null", "true", "ü", "½#", "\u2028", "[x]", "{a: 1}"]
TEXTS += ["a b", "a,b", "lr=0.1,bs=2/p.jsonl", "a b(1)/x", "it's", 'a"b', "a\\", 'a\\"b', "x:y", "%"]


@pytest.mark.covers(1)
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("key", ["run_name", "results_dir", "benchmark.path", "launcher.account", "policy.predictor"])
def test_a_text_is_what_was_typed(key, text):
    config = compose_config("launcher=slurm", f"{key}={text}")
    is_null = text == "null" and key not in ("run_name", "results_dir")
    assert OmegaConf.select(config, key) == (None if is_null else text)


@pytest.mark.parametrize(
    ("word", "key", "value"),
    [
        ("texts=null", "texts", None),
        ("model.revision=null", "model.revision", None),
        ("model.revision=1234567", "model.revision", "1234567"),
        ("run_name=", "run_name", ""),
        ("run_name='1e5'", "run_name", "1e5"),
        ('run_name="a\\"b"', "run_name", 'a"b'),
        ("benchmark.limit=1e1", "benchmark.limit", 10.0),
        ("policy.keep_ratio=0.25", "policy.keep_ratio", 0.25),
        ("launcher.setup=[a,b]", "launcher.setup", ["a", "b"]),
        ("launcher.additional={constraint: h200}", "launcher.additional", {"constraint": "h200"}),
        ("launcher.additional.comment=hello", "launcher.additional.comment", "hello"),
        ("+launcher.additional.comment=hello", "launcher.additional.comment", "hello"),
        ("model.config={model_type: qwen2}", "model.config.model_type", "qwen2"),
        ("benchmark.keep_if={year: 'x'}", "benchmark.keep_if.year", "x"),
    ],
)
def test_null_lists_mappings_numbers_and_quotes_keep_the_grammar_of_hydra(word, key, value):
    assert OmegaConf.select(compose_config("launcher=slurm", word), key) == value


def test_a_comma_separates_texts_of_a_sweep(monkeypatch, tmp_path):
    words = ["run_name=1e5,ü", "model.device=cpu", "seed=1,2", "hydra.verbose=true", "-m", "benchmark=toy_add"]
    made = hydra_overrides(words, target_classes, multirun=True)
    assert made == ['run_name="1e5","ü"', 'model.device="cpu"', *words[2:]]


@pytest.mark.parametrize("key", ["results_dir", "model.path", "benchmark.path", "benchmark.prompt", "policy.predictor"])
def test_a_path_begins_with_the_home_folder(key, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert dict(leaves(plain(compose_config(f"{key}=~/x/~y"))))[key] == "/home/me/x/~y"


MISREAD = {
    "~tracker": "would remove a setting",
    "+experiment=demo": "begins with +, which no choice of kvsweep needs: write experiment=demo.",
    "policy.keep_ratio = 0.4": "has spaces around the equals sign: write policy.keep_ratio=0.4.",
    "grid.policy=[full,": """cannot be read: write 'grid.policy="TEXT"' for a text, 'grid.policy=[A,B]' for a list""",
    "window]": "cannot be read: write 'KEY=",
    "hydra/launcher=joblib": "give launcher=local or launcher=slurm",
    "grid.policy=full,window": "has several values: write 'grid.policy=[full,window]'.",
    "policy=full,window": "has several values: add -m for a job of each.",
    "=3": "begins with no setting's name",
}


@pytest.mark.parametrize("word", MISREAD)
def test_a_word_that_hydra_would_misread(word):
    with pytest.raises(UserError) as caught, plain_config_errors():
        compose_config(word)
    assert MISREAD[word] in str(caught.value)


def test_a_users_variable_of_hydra_changes_no_sentence(kvsweep, monkeypatch):
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    ended = kvsweep("policy.nosuch=1")
    assert (ended.code, ended.err.count("\n")) == (2, 1)
    assert "policy.nosuch is not a setting" in ended.err


def test_a_list_that_is_a_single_name_and_a_variable_that_is_not_set():
    with pytest.raises(UserError, match=r"^grid\.policy='full' is no list: write 'grid\.policy=\[full\]'\.$"):
        make_job(compose_config("grid.policy=full"))
    with pytest.raises(UserError, match=r"^grid\.keep_ratio=0\.2 is no list: write 'grid\.keep_ratio=\[0\.2\]'\.$"):
        make_job(compose_config("grid.keep_ratio=0.2"))
    with pytest.raises(UserError, match=r"^the environment variable UNSET is not set"), plain_config_errors():
        make_job(compose_config("results_dir=${oc.env:UNSET}/r"))


def test_a_number_where_a_file_has_a_text():
    with pytest.raises(UserError, match=r"^launcher\.account=123 is read as a number: write it in quotes, \"123\"\.$"):
        build(Slurm, "launcher", {"account": 123})


@pytest.fixture
def own(tmp_path, monkeypatch):
    init(tmp_path / "own")
    monkeypatch.chdir(tmp_path / "own")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    for name in ("my_policies", "math"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    importlib.invalidate_caches()
    return tmp_path / "own"


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (b"\xef\xbb\xbf# @package _global_\nseed: 1\n", " begins with a byte order mark"),
        (b"# @package _global_\nseed:\t- 1\n\tx: 2\n", ":2 is no YAML ("),
        (b"# @package _global_\nrun_name: \xff\n", " is no YAML ("),
        (b"# @package _global_\n- seed: 1\n", ":2 is no setting: write NAME: VALUE lines."),
    ],
)
def test_a_file_of_the_users_own_folder(own, data, fault):
    path = own / "conf/experiment/odd.yaml"
    path.write_bytes(b"# @package _global_\r\nseed: 1\r\n")
    assert compose_config("experiment=odd").seed == 1
    path.write_bytes(data)
    with pytest.raises(UserError) as caught:
        compose_config("experiment=odd")
    assert str(caught.value).startswith(f"{path}{fault}")


def test_hidden_files_of_editors_and_file_systems_are_no_choices(own):
    (own / "conf/experiment/.#mine.yaml").symlink_to("me@machine.4711:1")
    (own / "conf/experiment/._mine.yaml").write_bytes(b"\x00\x05\x16\x07")
    (own / "conf/experiment/.ipynb_checkpoints").mkdir()
    (own / "conf/experiment/.ipynb_checkpoints/mine-checkpoint.yaml").write_text("seed:\t- 1\n\tx: 2\n")
    assert compose_config("experiment=mine").run_name == "mine"
    assert not [name for name in choices("experiment") if name.startswith(".")]


SLIPS = {
    "def broken(:": "",
    "x = undefined_name": "NameError",
    "raise ValueError('not yet')": "ValueError: not yet",
    "import no_such_module": "ModuleNotFoundError",
    "raise SystemExit(3)": "SystemExit: 3",
}


@pytest.mark.parametrize("slip", SLIPS)
def test_a_slip_in_ones_own_code_has_file_and_line(own, slip):
    path = own / "my_policies.py"
    text = path.read_text()
    path.write_text(f"{text}{slip}\n")
    with pytest.raises(UserError) as caught:
        build_target("policy", compose_config("policy=spread").policy, Policy)
    assert f"{path}:{len(text.splitlines()) + 1}: {SLIPS[slip]}" in str(caught.value)
    assert str(caught.value).endswith(": correct that line.")


def test_ones_own_code_is_found_where_nothing_is_composed(own):
    """As `kvsweep verify` reads the settings of stored cells."""
    found = target_class("policy", {"_target_": "my_policies.Spread"}, Policy)
    assert found.__name__ == "Spread"


def test_a_file_with_null_bytes_is_named(own):
    (own / "my_policies.py").write_bytes("seed = 1\n".encode("utf-16"))
    with pytest.raises(UserError, match=r"my_policies.* \(source code string cannot contain null bytes\)"):
        build_target("policy", compose_config("policy=spread").policy, Policy)


@pytest.mark.parametrize("head", [b"\xef\xbb\xbf", b"# -*- coding: latin-1 -*-\n# J\xf6rg\n"])
def test_ones_own_code_is_read_as_python_reads_it(own, head):
    path = own / "my_policies.py"
    before = code_hash(target_class("policy", compose_config("policy=spread").policy, Policy))
    path.write_bytes(head + path.read_bytes())
    del sys.modules["my_policies"]
    assert code_hash(target_class("policy", compose_config("policy=spread").policy, Policy)) == before


def test_ones_own_file_with_the_name_of_pythons_is_named(own):
    (own / "statistics.py").write_text((own / "my_policies.py").read_text())
    with pytest.raises(UserError, match=rf"statistics\.py is taken in place of {own}/statistics\.py, so rename"):
        build_target("policy", {"_target_": "statistics.Spread"}, Policy)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("# @package _global_\ndefaults:\n  - /benchmark: mine\n", "use 'override benchmark: mine'"),
        ("# @package _global_\ndefaults:\n  - benchmark: mine\n", "write `- override /benchmark: mine` there."),
        ("defaults:\n  - override /benchmark: mine\n", "with the line `# @package _global_`."),
    ],
)
def test_a_usual_slip_in_ones_own_experiment_has_its_way_out(own, text, words):
    (own / "conf/experiment/odd.yaml").write_text(text)
    with pytest.raises(UserError) as caught, plain_config_errors():
        compose_config("experiment=odd")
    assert words in str(caught.value)


def test_another_ending_of_yaml_and_a_sweeper_that_is_not_there(own):
    (own / "conf/experiment/odd.yml").write_text("seed: 1\n")
    words = {
        "experiment=odd": f"name {own}/conf/experiment/odd.yml odd.yaml.",
        "hydra/sweeper=optuna": "no plugin of that",
    }
    for word, way_out in words.items():
        with pytest.raises(UserError, match=f"^{word} is unknown: ") as caught, plain_config_errors():
            compose_config(word)
        assert way_out in str(caught.value)


HYDRAS = {
    "--config-name=predictor/toy": "--config-name=predictor/toy is no option here: a sweep has one configuration",
    "-cntoy": "-cntoy is no option here",
    "--experimental-rerun=x": "provenance.json of a cell has the command to run again",
    'hydra.job.env_set={A: "1"}': "hydra.job.env_set cannot be set so: `kvsweep --cfg hydra` shows",
    "hydra.nosuch=1": "begins with a plus (+hydra.nosuch.NAME=VALUE).",
    "hydra.job.env_copy=[NOSUCH]": "Hydra cannot use hydra.job.env_copy=[NOSUCH] (KeyError('NOSUCH')): give it",
    "hydra.run.dir=/proc/nosuch": "Hydra cannot use hydra.run.dir=/proc/nosuch (FileNotFoundError(",
    "hydra.verbose=3.5": "Hydra cannot use hydra.verbose=3.5 (AssertionError(",
}


@pytest.mark.parametrize("word", HYDRAS)
def test_words_of_hydras_own_are_told_their_way(word, kvsweep):
    ended = kvsweep(word, "--dry-run")
    assert (ended.code, ended.err.count("\n")) == (2, 1)
    assert HYDRAS[word] in ended.err


@pytest.mark.parametrize("name", ["my dir", "Jörg", "a,b=c", "x(1)", "ha#sh", "per%cent", "it's", 'qu"ote', "$x", "~"])
def test_the_users_own_folder_may_lie_anywhere(name, tmp_path, monkeypatch):
    init(tmp_path / name / "own")
    monkeypatch.chdir(tmp_path / name / "own")
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert compose_config("experiment=mine").run_name == "mine"
