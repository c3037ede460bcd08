"""Every command ends quietly, and with one status, where nobody reads what it prints."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvsweep.cli import program
from kvsweep.messages.command_line import BAD_INPUT, FAILED

PROGRAM = (sys.executable, "-m", "kvsweep.cli")
ENDS = ("raise SystemExit(0)", "raise SystemExit(2)", "pass", "raise UserError('wrong.')")


def end(command: tuple[str, ...], how: str) -> tuple[int, str]:
    """The status and the errors of a command whose stdout has no reader, or is full."""
    # As users have it: what is printed waits in a buffer, which is written as the command ends.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    reader, writer = os.pipe()
    os.close(reader)
    with Path("/dev/full").open("w") as full, os.fdopen(writer, "w") as pipe:
        stdout = full if how == "full" else pipe
        done = subprocess.run(
            command, stdout=stdout, stderr=subprocess.PIPE, env=env, text=True, timeout=300, check=False
        )
    return done.returncode, done.stderr


@pytest.mark.parametrize("name", ["", *program.commands])
@pytest.mark.slow_unless(rule=lambda name: name in ("", "report", "judge"))
def test_the_help_of_every_command(name):
    assert end((*PROGRAM, *name.split(), "--help"), "no reader") == (FAILED, "")


@pytest.mark.slow
def test_a_status_and_a_sweep(tmp_path, kvsweep, tiny):
    how = "no reader"
    kvsweep(*tiny, f"results_dir={tmp_path}", "run_name=a")
    assert end((*PROGRAM, "status", str(tmp_path / "a")), how) == (FAILED, "")
    assert end((*PROGRAM, "benchmark=toy_add", f"results_dir={tmp_path}", "--dry-run"), how) == (FAILED, "")
    assert end((*PROGRAM, "benchmark=toy_add", "--cfg", "job"), how) == (FAILED, "")


@pytest.mark.parametrize("body", ENDS)
@pytest.mark.parametrize("how", ["no reader", "full"])
def test_each_way_in_which_a_command_ends(body, how):
    code = (
        "from kvsweep.messages.command_line import one_sentence\nfrom kvsweep.messages.errors import UserError\n"
        f"with one_sentence('x'):\n    print('said')\n    {body}\n"
    )
    status, errors = end((sys.executable, "-c", code), how)
    if "UserError" in body:
        assert (status, errors) == (BAD_INPUT, "x: error: wrong.\n")
    elif how == "full":
        assert status == BAD_INPUT
        assert errors.startswith("x: error: No space left on device: mend that")
        assert errors.count("\n") == 1
    else:
        assert (status, errors) == (FAILED, "")
