"""Every command explains itself on one screen, imports what it needs, and ends with the status of docs/sweep.md."""

import importlib.metadata
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from kvsweep.cli import program
from kvsweep.harness.settings import CONF, WEIGHTS
from kvsweep.messages import command_line

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ["kvsweep", *(f"kvsweep {name}" for name in program.commands)]
# What each command is given to refuse.
BAD_INPUT = {
    "kvsweep compare": ["missing", "missing"],
    "kvsweep judge": ["missing", "missing"],
    "kvsweep predictor": ["nothing"],
    "kvsweep policy": ["nothing"],
    "kvsweep init": ["/dev/null"],
}
NAMES = ("FAILED", "BAD_INPUT", "LOCKED", "UNCLEAR", "HUNG_UP", "INTERRUPTED", "TERMINATED")
STATUSES = [getattr(command_line, name) for name in NAMES]
# Packages that take long to import.
MODELS, PLOTS = ("torch", "transformers", "datasets"), ("matplotlib", "statsmodels")
HEAVY = (*MODELS, *PLOTS)


Run = Callable[..., Any]


@pytest.fixture
def call(kvsweep, monkeypatch, tmp_path) -> Run:
    """`call("kvsweep report", *arguments)` runs a command in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return lambda script, *arguments: kvsweep(*script.split()[1:], *arguments)


@pytest.mark.parametrize("columns", ["80", "110"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_help_fits_one_screen(script, columns, call, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    ended = call(script, "--help")
    assert ended.code == 0
    lines = ended.out.rstrip("\n").split("\n")
    assert f"{script} " in lines[0]
    assert len(lines) <= 61
    # A control character that click leaves is written as an escape.
    assert all(line.isprintable() and "\\x" not in line for line in lines)
    assert max(map(len, lines)) <= 110


def test_the_program_alone_shows_its_help(call):
    ended = call("kvsweep")
    assert ended == call("kvsweep", "--help")
    first, _, *lines = ended.out.splitlines()
    assert first.endswith(".")
    assert [line.split("    ")[0] for line in lines[:3]] == [
        "kvsweep -m experiment=demo launcher=local",
        "kvsweep report results/runs/demo",
        "kvsweep init DIR",
    ]


@pytest.mark.parametrize(
    ("word", "near"), [("stat", "status"), ("reports", "report"), ("trak", "trace"), ("demo", None)]
)
def test_a_word_that_is_no_command_is_refused_with_the_nearest(word, near, call):
    ended = call("kvsweep", word, "results/runs/demo")
    assert ended.code == 2
    meant = f"did you mean {near}? " if near else ""
    assert ended.err.startswith(f"kvsweep: error: {word} is no command: {meant}Choose from compare, export, grade, ")
    assert ended.err.count("\n") == 1


def test_the_version_is_kvsweeps(call):
    assert call("kvsweep", "--version").out == f"kvsweep {importlib.metadata.version('kvsweep')}\n"


def test_a_model_of_ones_own_alone_gets_a_way_on(call):
    ended = call("kvsweep", f"model.path={WEIGHTS / 'toy_llama'}")
    assert ended.code == 2
    assert (
        "or take policy=window, which needs no predictor; model.name=NAME model.title=TITLE name a model" in ended.err
    )


def test_help_names_every_choice(call):
    text = call("kvsweep", "--help").out.split("Choices")[1]
    for group in [path.name for path in CONF.iterdir() if path.is_dir()]:
        if group in ("predictor", "prompt"):  # not chosen by a user's GROUP=NAME
            assert f"  {group} " not in text
            continue
        named = re.search(rf"^  {group} +((?:.+\n)(?: {{13}}.+\n)*)", text, re.MULTILINE)
        assert named, group
        assert re.findall(r"\w+", named[1]) == sorted(path.stem for path in (CONF / group).glob("*.yaml")), group


def test_help_names_keys_that_exist(call, compose):
    config = compose("launcher=slurm")
    text = call("kvsweep", "--help").out.split("some of them:\n")[1].split("Exit status")[0]
    keys = [word.partition("=")[0] for line in text.splitlines() for word in line[2:62].split()]
    assert len(keys) > 15
    missing = object()
    assert [key for key in keys if OmegaConf.select(config, key, default=missing) is missing] == []


@pytest.fixture
def fresh(tmp_path) -> Run:
    """`fresh((script, arguments), without=(...))` runs commands in an interpreter that cannot import these packages.

    It finds them as if they were installed; `error` is what an import of one of them raises. Several commands run one
    after the other, each in a fork of the interpreter, and all must end with the same code.
    """
    for name in ("sbatch", "srun"):
        (tmp_path / name).write_text("#!/bin/sh\necho Submitted batch job 7\n")
        (tmp_path / name).chmod(0o755)

    def run(*commands: tuple[str, list[str]], without, error="ImportError"):
        program = (
            "import sys\n"
            "from importlib.machinery import ModuleSpec\n"
            "class Lacking:\n"
            "    def find_spec(self, name, path=None, target=None):\n"
            f"        return ModuleSpec(name, self) if name.split('.')[0] in {set(without)!r} else None\n"
            f"    def create_module(self, spec): raise {error}(spec.name)\n"
            "    def exec_module(self, module): pass\n"
            f"sys.meta_path.insert(0, Lacking()); sys.path.insert(0, {str(ROOT / 'src')!r})\n"
            f"commands = {[[*script.split(), *arguments] for script, arguments in commands]!r}\n"
            "from kvsweep.cli import main; import os\n"
            "if len(commands) > 1: import kvsweep.harness.command  # what the forks share\n"
            "*others, last = commands\n"
            "codes = set()\n"
            "for sys.argv in others:\n"
            "    if not (fork := os.fork()): main(); sys.exit()\n"
            "    codes.add(os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]))\n"
            "sys.argv = last\n"
            "try: main()\n"
            "except SystemExit as end: codes.add(end.code or 0)\n"
            "sys.exit(*codes or [0])\n"
        )
        ended = subprocess.run(
            [sys.executable, "-P", "-c", program],
            cwd=tmp_path,
            env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        return SimpleNamespace(code=ended.returncode, out=ended.stdout, err=ended.stderr)

    return run


@pytest.mark.parametrize("arguments", [["--cfg", "job"], ["--help"], ["--info", "defaults-tree"]])
@pytest.mark.slow_unless(rule=lambda arguments: arguments[0] == "--cfg")
def test_what_only_shows_something_needs_no_torch(arguments, fresh):
    ended = fresh(("kvsweep", arguments), without=HEAVY)
    assert ended.code == 0, ended.err
    assert ended.out


def test_the_help_of_every_command_imports_neither_torch_nor_pandas(tmp_path):
    program = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'src')!r})\n"
        "from kvsweep.cli import main, program\n"
        "for name in [None, *program.commands]:\n"
        "    try: main([name, '--help'] if name else ['--help'])\n"
        "    except SystemExit as end: assert not end.code, name\n"
        f"    assert not {{'pandas', *{HEAVY!r}}} & sys.modules.keys(), name\n"
    )
    command = [sys.executable, "-P", "-c", program]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("Usage: kvsweep ") == len(SCRIPTS) - 1
    assert "--seed N    Another seed draws other completions.  [default: 0; x>=0]" in ended.stdout


REFUSED = [
    ("kvsweep", ["policy.keep_ratio=2"]),
    ("kvsweep", ["grid.policy=[full,h2o,snapkv,rkv,tova,keydiff]", "draws=0"]),
    ("kvsweep", ["+model.nothing=1"]),
    ("kvsweep", ["model.dtype=float8"]),
    ("kvsweep", ["benchmark.path=missing.jsonl"]),
    ("kvsweep", ["decoding.top_p=2"]),
    ("kvsweep", ["grid.policy=[full,nothing]"]),
    ("kvsweep", ["model=toy_llama", f"policy.predictor={WEIGHTS}/predictors/toy_qwen/far_max"]),
    ("kvsweep", ["launcher=slurm", "launcher.shards=0"]),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("commands", "without"),
    [(REFUSED, HEAVY), ([(script, BAD_INPUT.get(script, ["missing"])) for script in SCRIPTS[1:]], MODELS)],
    ids=["sweeps", "other commands"],
)
def test_a_refusal_needs_no_torch(commands, without, fresh):
    ended = fresh(*commands, without=without)
    said = ended.err.splitlines()
    assert [line.partition(": ")[0] for line in said] == [script for script, _ in commands]
    assert all(line.partition(": ")[2].startswith("error: ") for line in said), ended.err
    assert ended.code == command_line.BAD_INPUT


@pytest.mark.slow
def test_slurm_is_refused_where_there_is_none(call, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    ended = call("kvsweep", "experiment=demo", "launcher=slurm", f"results_dir={tmp_path}")
    assert ended.code == command_line.BAD_INPUT
    assert 'launcher=slurm cannot submit: Could not detect "srun"' in ended.err
    assert not any(tmp_path.rglob("*.json"))  # nothing was queued


@pytest.mark.core
def test_an_estimate_a_submission_and_its_status_need_no_torch(fresh, tmp_path):
    sweep = ["experiment=demo", f"results_dir={tmp_path}"]
    estimate = fresh(("kvsweep", [*sweep, "--dry-run"]), without=HEAVY)
    assert estimate.code == 0, estimate.err
    assert "25 cells (0 done)" in estimate.out
    assert "a setting that loses nothing is safe (margin 5 points) with a chance of" in estimate.out
    submitted = fresh(("kvsweep", [*sweep, "launcher=slurm"]), without=HEAVY)
    assert submitted.code == 0, submitted.err
    assert submitted.out.startswith("submitted 2 tasks as job 7\n")
    status = fresh(("kvsweep status", [str(tmp_path / "demo")]), without=HEAVY)
    assert status.code == 0, status.err
    assert "queued" in status.out


@pytest.mark.slow  # two processes that decode
@pytest.mark.release
def test_a_decoding_job_needs_no_plotting_library(fresh, tiny, tmp_path):
    arguments = [*tiny, "benchmark=toy_add", f"results_dir={tmp_path}"]
    for _ in ("decode", "nothing to do"):
        ended = fresh(("kvsweep", arguments), without=PLOTS)
        assert ended.code == 0, ended.err
    # A command that names no policy runs the full cache beside the default one.
    assert len(list((tmp_path / "default").glob("*/DONE"))) == 2


@pytest.mark.slow
@pytest.mark.parametrize("module", ["hydra", "pydantic", "submitit", "torch", "pandas"])
@pytest.mark.one_in(3)
def test_ctrl_c_during_an_import_is_one_sentence(module, fresh, tiny, tmp_path):
    arguments = [*tiny, "benchmark=toy_add", "policy=window", f"results_dir={tmp_path}"]
    ended = fresh(("kvsweep", arguments), without=(module,), error="KeyboardInterrupt")
    assert ended.code == command_line.INTERRUPTED, ended.err
    assert ended.err.rstrip("\n").split("\n")[-1].startswith("kvsweep: error: interrupted; ")
    assert "Traceback" not in ended.err


@pytest.mark.parametrize("wrong", ["nothing=1", "-m", "benchmark=nothing"])
def test_showing_a_configuration_that_is_wrong_is_one_sentence(wrong, call):
    ended = call("kvsweep", "--cfg", "job", wrong)
    assert ended.code == 2
    assert ended.err.count("\n") == 1


def test_showing_runs_nothing(call, tmp_path):
    ended = call("kvsweep", "--cfg", "job", f"results_dir={tmp_path}")
    assert ended.code == 0
    assert "keep_ratio" in ended.out
    assert list(tmp_path.iterdir()) == []


# --- Tab ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("kvsweep policy=keyd", "policy=keydiff"),
        ("kvsweep policy.keep", "policy.keep_ratio="),
        ("kvsweep -m experiment=lab", "experiment=labels"),
        ("kvsweep tracker=wan", "tracker=wandb"),
        ("kvsweep repo", "report"),
        ("kvsweep report --comp", "--completions"),
    ],
)
@pytest.mark.slow_unless(rule=lambda typed, offered: "experiment" in typed)
def test_tab_completes_keys_and_choices_in_bash(typed, offered, tmp_path):
    command = tmp_path / "kvsweep"
    command.write_text(
        f"#!{sys.executable}\nimport sys; sys.path.insert(0, {str(ROOT / 'src')!r})\n"
        "from kvsweep.cli import main; main()\n"
    )
    command.chmod(0o755)
    [lines] = re.findall(r"```sh\n(COMP_WORDBREAKS.+?)```", (ROOT / "docs/sweep.md").read_text(), re.DOTALL)
    # As bash does it at a Tab: the function that `complete -F` names fills COMPREPLY.
    words = " ".join(typed.split())
    script = (
        f'PATH="{tmp_path}:$PATH"\n{lines}\nCOMP_WORDS=({words}); COMP_CWORD={len(typed.split()) - 1}\n'
        "_kvsweep_completion kvsweep\nprintf '%s\\n' \"${COMPREPLY[@]}\"\n"
    )
    ended = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=300, check=False)
    assert offered in ended.stdout.split(), ended.stderr


# --- Exit status --------------------------------------------------------------------------------------------


def documented() -> dict[int, str]:
    """The table of exit statuses: which commands each is of."""
    rows = re.findall(r"^\| (\d+) \| ([^|]+) \|", (ROOT / "docs/sweep.md").read_text(), re.MULTILINE)
    return {int(code): commands for code, commands in rows}


def test_the_table_has_every_status(call):
    assert sorted(documented()) == [0, 1, 2, 3, 4, 129, 130, 143] == [0, *STATUSES]
    told = re.search(r"Exit status: (.+)\.", call("kvsweep", "--help").out)
    assert told is not None
    assert [int(code) for code in re.findall(r"\d+", told[1])] == sorted(documented())
    assert documented()[command_line.BAD_INPUT] == "all"


@pytest.mark.slow  # two processes that decode; the test before has the second in this one
@pytest.mark.parametrize("jobs", [1, 2])
@pytest.mark.one_in(2)
def test_a_failed_job_is_status_1(jobs, start_kvsweep, tiny, tmp_path):
    assert "`kvsweep`" in documented()[command_line.FAILED]
    # The second job's benchmark is whole.
    setup = (
        "import kvsweep.harness.sweep.fill as run; fill = run.fill\n"
        "def fail(work):\n"
        "    if work.share.job.benchmark.name == 'toy_add': raise RuntimeError('broken')\n"
        "    fill(work)\n"
        "run.fill = fail"
    )
    names = ["benchmark=toy_add"] if jobs == 1 else ["-m", "benchmark=toy_add,toy_regs"]
    process = start_kvsweep(*names, *tiny, "policy=window", f"results_dir={tmp_path / 'runs'}", setup=setup)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == command_line.FAILED
    assert "broken" in errors
    assert len(list((tmp_path / "runs/default").glob("*/DONE"))) == jobs - 1


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["model.path={place}"], "mine"),
        (["model.path='{place}'"], "mine"),
        (["model=toy_llama", "model.path={place}"], "toy_llama"),
        (["model.path={place}", "model.name=other", "model.title=Other"], "other"),
    ],
)
@pytest.mark.slow
def test_a_path_alone_names_the_model(words, named, kvsweep, tiny, tmp_path):
    (tmp_path / "mine").symlink_to(tiny[0].partition("=")[2])
    words = [word.format(place=tmp_path / "mine") for word in words]
    ended = kvsweep(
        *words, "policy=window", "benchmark.limit=1", "decoding.max_new_tokens=8", f"results_dir={tmp_path}"
    )
    assert ended.code == 0, ended.err
    [cell] = tmp_path.glob("default/*/cell.yaml")
    assert yaml.safe_load(cell.read_text())["model"]["name"] == named
