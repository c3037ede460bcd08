"""Every console script explains itself on one screen and ends with the status that docs/sweep.md says."""

import contextlib
import importlib
import io
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from kvsweep.base import command_line
from kvsweep.harness.settings import CONF
from kvsweep.harness.toy.paths import WEIGHTS

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
# What each command is given to refuse.
BAD_INPUT = {
    "kvsweep": ["policy.keep_ratio=2"],
    "kvsweep-compare": ["missing", "missing"],
    "kvsweep-predictor": ["nothing"],
    "kvsweep-trace": ["missing"],
}
REFUSED_LATE = ["grid.policy=[full,h2o,snapkv,rkv,tova,keydiff]", "draws=0"]
# Packages that take long to import.
MODELS, PLOTS = ("torch", "transformers", "datasets"), ("matplotlib", "seaborn", "statsmodels")
HEAVY = (*MODELS, *PLOTS)


class Ended(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Ended]:
    """`call(script, *arguments)` runs a console script in this process, as its entry point does."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")

    def call(script: str, *arguments: str) -> Ended:
        GlobalHydra.instance().clear()
        module, _, name = SCRIPTS[script].partition(":")
        monkeypatch.setattr(sys, "argv", [script, *arguments])
        out, err, code = io.StringIO(), io.StringIO(), 0
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code = getattr(importlib.import_module(module), name)() or 0
            except SystemExit as end:
                code = int(end.code or 0)
        return Ended(code, out.getvalue(), err.getvalue())

    return call


@pytest.mark.parametrize("columns", ["80", "110"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_help_fits_one_screen(
    script: str, columns: str, call: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    ended = call(script, "--help")
    assert ended.code == 0
    lines = ended.out.rstrip("\n").split("\n")
    assert script in lines[0]
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 110


def test_help_names_every_choice(call: Callable[..., Ended]) -> None:
    text = call("kvsweep", "--help").out
    for group in sorted(path.name for path in CONF.iterdir() if path.is_dir()):
        if group in ("hydra", "predictor", "prompt"):  # not chosen by a user's GROUP=NAME
            assert f"  {group} " not in text
            continue
        named = re.search(rf"^  {group} +((?:.+\n)(?: {{13}}.+\n)*)", text, re.MULTILINE)
        assert named is not None, group
        assert re.findall(r"\w+", named[1]) == sorted(path.stem for path in (CONF / group).glob("*.yaml")), group


def test_help_names_keys_that_exist(call: Callable[..., Ended], compose: Callable[..., Any]) -> None:
    config = compose("launcher=slurm")
    text = call("kvsweep", "--help").out.split("some of them:\n")[1].split("Exit status")[0]
    keys = [word.partition("=")[0] for line in text.splitlines() for word in line[2:62].split()]
    assert len(keys) > 15
    missing = object()
    assert [key for key in keys if OmegaConf.select(config, key, default=missing) is missing] == []


@pytest.fixture
def fresh(tmp_path: Path) -> Callable[..., Ended]:
    """`fresh(script, *arguments, without=(...))` runs a console script in an interpreter that lacks these packages.

    `error` is what importing one of them raises.
    """
    for name in ("sbatch", "srun"):
        (tmp_path / name).write_text("#!/bin/sh\necho Submitted batch job 7\n")
        (tmp_path / name).chmod(0o755)

    def run(script: str, *arguments: str, without: Iterable[str], error: str = "ImportError") -> Ended:
        module, _, name = SCRIPTS[script].partition(":")
        program = (
            "import sys\n"
            "class Lacking:\n"
            "    def find_spec(self, name, path=None, target=None):\n"
            f"        if name.split('.')[0] in {set(without)!r}: raise {error}(name)\n"
            f"sys.meta_path.insert(0, Lacking()); sys.path.insert(0, {str(ROOT / 'src')!r}); sys.argv[0] = {script!r}\n"
            f"from {module} import {name}; sys.exit({name}())\n"
        )
        ended = subprocess.run(
            [sys.executable, "-P", "-c", program, *arguments],
            cwd=tmp_path,
            env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        return Ended(ended.returncode, ended.stdout, ended.stderr)

    return run


@pytest.mark.parametrize(
    "arguments", [["--cfg", "job"], ["--help"], ["--info", "defaults-tree"], ["-sc", "install=bash"]]
)
@pytest.mark.slow_unless(rule=lambda arguments: arguments[0] in ("--cfg", "--help"))
def test_what_only_shows_something_needs_no_torch(arguments: list[str], fresh: Callable[..., Ended]) -> None:
    ended = fresh("kvsweep", *arguments, without=HEAVY)
    assert ended.code == 0, ended.err
    assert ended.out


@pytest.mark.slow  # the refusals import the same
@pytest.mark.parametrize("script", sorted(SCRIPTS.keys() - {"kvsweep"}))
def test_help_needs_no_torch(script: str, fresh: Callable[..., Ended]) -> None:
    ended = fresh(script, "--help", without=HEAVY)
    assert ended.code == 0, ended.err


@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        *((script, BAD_INPUT.get(script, ["missing"])) for script in SCRIPTS),
        ("kvsweep", ["+model.nothing=1"]),
        ("kvsweep", ["model.dtype=float8"]),
        ("kvsweep", ["benchmark.path=missing.jsonl"]),
        ("kvsweep", ["decoding.top_p=2"]),
        ("kvsweep", ["grid.policy=[full,nothing]"]),
        ("kvsweep", REFUSED_LATE),
        ("kvsweep", ["model=toy_llama", f"policy.predictor={WEIGHTS}/predictors/toy_qwen/far_max"]),
        ("kvsweep", ["launcher=slurm", "launcher.shards=0"]),
    ],
    ids=str,
)
@pytest.mark.slow_unless(rule=lambda script, arguments: arguments in (BAD_INPUT.get(script, ["missing"]), REFUSED_LATE))
def test_a_refusal_needs_no_torch(script: str, arguments: list[str], fresh: Callable[..., Ended]) -> None:
    ended = fresh(script, *arguments, without=HEAVY if script == "kvsweep" else MODELS)
    assert ended.code == command_line.BAD_INPUT, ended.err
    assert ended.err.startswith(f"{script}: error: ")
    assert ended.err.count("\n") == 1


def test_slurm_is_refused_where_there_is_none(
    call: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    ended = call("kvsweep", "experiment=demo", "launcher=slurm", f"results_dir={tmp_path}")
    assert ended.code == command_line.BAD_INPUT
    assert "launcher=slurm finds no srun on this machine" in ended.err
    assert not (tmp_path / "demo").exists()  # nothing was queued


def test_an_estimate_a_submission_and_its_status_need_no_torch(fresh: Callable[..., Ended], tmp_path: Path) -> None:
    sweep = ["experiment=demo", f"results_dir={tmp_path}"]
    estimate = fresh("kvsweep", *sweep, "--dry-run", without=HEAVY)
    assert estimate.code == 0, estimate.err
    assert "25 cells (0 done)" in estimate.out
    assert "a setting that loses nothing holds (margin 5 points) with a chance of" in estimate.out
    submitted = fresh("kvsweep", *sweep, "launcher=slurm", without=HEAVY)
    assert submitted.code == 0, submitted.err
    assert submitted.out.startswith("submitted 2 tasks as job 7\n")
    status = fresh("kvsweep-status", str(tmp_path / "demo"), without=HEAVY)
    assert status.code == 0, status.err
    assert "queued" in status.out


@pytest.mark.slow  # two processes that decode
def test_a_decoding_job_needs_no_plotting_library(fresh: Callable[..., Ended], tiny: list[str], tmp_path: Path) -> None:
    arguments = [*tiny, "benchmark=toy_add", f"results_dir={tmp_path}"]
    for _ in ("decode", "nothing to do"):
        ended = fresh("kvsweep", *arguments, without=PLOTS)
        assert ended.code == 0, ended.err
    # A command that names no policy runs the full cache beside the default one.
    assert len(list((tmp_path / "default").glob("*/DONE"))) == 2


@pytest.mark.parametrize("module", ["hydra", "pydantic", "submitit", "torch", "pandas"])
@pytest.mark.slow_unless(rule=lambda module: module in ("hydra", "torch"))
def test_ctrl_c_during_an_import_is_one_sentence(
    module: str, fresh: Callable[..., Ended], tiny: list[str], tmp_path: Path
) -> None:
    arguments = [*tiny, "benchmark=toy_add", "policy=window", f"results_dir={tmp_path}"]
    ended = fresh("kvsweep", *arguments, without=(module,), error="KeyboardInterrupt")
    assert ended.code == command_line.INTERRUPTED, ended.err
    assert ended.err.rstrip("\n").split("\n")[-1].startswith("kvsweep: error: interrupted; ")
    assert "Traceback" not in ended.err


# A command that is interrupted inside a finalizer, where Python drops exceptions, and then works on.
DROPPED = """
import os, signal, sys, time, types
from kvsweep.harness import console

class Held:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        sum(range(1000))

# A job in the background of a shell ignores Ctrl-C, and so do its children.
signal.signal(signal.SIGINT, signal.default_int_handler)

def main():
    held = Held()
    del held
    time.sleep(20)

sys.modules["slow_command"] = types.SimpleNamespace(main=main)
console._run("kvsweep-report", "slow_command")
"""


def test_ctrl_c_inside_a_finalizer_is_not_dropped() -> None:
    ended = subprocess.run([sys.executable, "-c", DROPPED], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (command_line.INTERRUPTED, "kvsweep-report: error: interrupted.\n")


@pytest.mark.parametrize("wrong", ["nothing=1", "-m", "benchmark=nothing"])
def test_showing_a_configuration_that_is_wrong_is_one_sentence(wrong: str, call: Callable[..., Ended]) -> None:
    ended = call("kvsweep", "--cfg", "job", wrong)
    assert ended.code == 2
    assert ended.err.count("\n") == 1


def test_showing_runs_nothing(kvsweep: Callable[..., Any], tmp_path: Path) -> None:
    ended = kvsweep("--cfg", "job", f"results_dir={tmp_path}")
    assert ended.code == 0
    assert "keep_ratio" in ended.out
    assert list(tmp_path.iterdir()) == []


def test_a_reader_that_has_seen_enough_is_no_disk_that_cannot_be_written_to(tmp_path: Path) -> None:
    program = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'src')!r})\nfrom kvsweep.harness.sweep.command import main; main()"
    )
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", program, "--cfg", "job"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.close()
    process.wait(120)
    assert process.stderr is not None
    with process.stderr as errors:
        assert errors.read() == ""


# --- Tab ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("kvsweep policy=keyd", "policy=keydiff"),
        ("kvsweep policy.keep", "policy.keep_ratio="),
        ("kvsweep -m experiment=lab", "experiment=labels"),
        ("kvsweep tracker=wan", "tracker=wandb"),
    ],
)
@pytest.mark.slow_unless(rule=lambda typed, offered: "experiment" in typed)
def test_tab_completes_keys_and_choices_in_bash(typed: str, offered: str, tmp_path: Path) -> None:
    command = tmp_path / "kvsweep"
    command.write_text(
        f"#!{sys.executable}\nimport sys; sys.path.insert(0, {str(ROOT / 'src')!r})\n"
        "from kvsweep.harness.sweep.command import main; main()\n"
    )
    command.chmod(0o755)
    line = next(line for line in (ROOT / "docs/sweep.md").read_text().splitlines() if "-sc install=bash" in line)
    # As bash does it at a Tab: the function that `complete -F` names fills COMPREPLY.
    script = (
        f'PATH="{tmp_path}:$PATH"\n{line.partition("#")[0]}\nCOMP_LINE="{typed}"; COMP_POINT=${{#COMP_LINE}}\n'
        f"COMP_CWORD={len(typed.split()) - 1}\n"
        "$(complete -p kvsweep | sed 's/.*-F \\([^ ]*\\).*/\\1/')\n"
        "printf '%s\\n' \"${COMPREPLY[@]}\"\n"
    )
    ended = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert ended.stdout.split() == [offered], ended.stderr


# --- Exit status --------------------------------------------------------------------------------------------


def documented() -> dict[int, str]:
    """The table of exit statuses: which commands each is of."""
    rows = re.findall(r"^\| (\d+) \| ([^|]+) \|", (ROOT / "docs/sweep.md").read_text(), re.MULTILINE)
    return {int(code): commands for code, commands in rows}


def test_the_table_has_every_status() -> None:
    assert sorted(documented()) == [
        0,
        command_line.FAILED,
        command_line.BAD_INPUT,
        command_line.LOCKED,
        command_line.INTERRUPTED,
        command_line.TERMINATED,
    ]
    help_text = (CONF / "hydra/help/kvsweep.yaml").read_text()
    told = re.search(r"Exit status: (.+)\.", help_text)
    assert told is not None
    assert [int(code) for code in re.findall(r"\d+", told[1])] == sorted(documented())


@pytest.mark.parametrize("script", SCRIPTS)
def test_bad_input_is_status_2_and_one_sentence(script: str, call: Callable[..., Ended]) -> None:
    assert documented()[command_line.BAD_INPUT] == "all"
    ended = call(script, *BAD_INPUT.get(script, ["missing"]))
    assert ended.code == command_line.BAD_INPUT
    assert ended.err.startswith(f"{script}: error: ")
    assert ended.err.count("\n") == 1


def test_the_job_after_a_failed_one_is_done(
    kvsweep: Callable[..., Any], tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvsweep.harness.sweep.run import execute

    decode = execute.decode

    def fail(work: Any) -> None:
        if work.job.benchmark.name == "toy_add":
            raise RuntimeError("broken")
        decode(work)

    monkeypatch.setattr(execute, "decode", fail)
    with pytest.raises(RuntimeError, match="broken"):
        kvsweep("-m", "benchmark=toy_add,toy_regs", *tiny, "policy=window", f"results_dir={tmp_path / 'runs'}")
    assert len(list((tmp_path / "runs/default").glob("*/DONE"))) == 1


@pytest.mark.slow  # two processes that decode; the test before has the second in this one
@pytest.mark.parametrize("jobs", [1, 2])
def test_a_failed_job_is_status_1(
    jobs: int, start_kvsweep: Callable[..., Any], tiny: list[str], tmp_path: Path
) -> None:
    assert "`kvsweep`" in documented()[command_line.FAILED]
    # The second job's benchmark is whole.
    setup = (
        "import kvsweep.harness.sweep.run.execute as run; decode = run.decode\n"
        "def fail(work):\n"
        "    if work.job.benchmark.name == 'toy_add': raise RuntimeError('broken')\n"
        "    decode(work)\n"
        "run.decode = fail"
    )
    names = ["benchmark=toy_add"] if jobs == 1 else ["-m", "benchmark=toy_add,toy_regs"]
    process = start_kvsweep(*names, *tiny, "policy=window", f"results_dir={tmp_path / 'runs'}", setup=setup)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == command_line.FAILED
    assert "broken" in errors
    assert len(list((tmp_path / "runs/default").glob("*/DONE"))) == jobs - 1
