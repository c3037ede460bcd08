"""How a command ends: its exit code, and one sentence on stderr."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvsweep.base.command_line import BAD_INPUT, FAILED, INTERRUPTED, LOCKED, one_sentence
from kvsweep.base.errors import UserError


class Locked(UserError):
    exit_code = LOCKED


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (UserError("x=1 is\nwrong:  use 2."), BAD_INPUT, "x=1 is wrong: use 2."),
        (Locked("held."), LOCKED, "held."),
        (KeyboardInterrupt(), INTERRUPTED, "interrupted; go on."),
        (MemoryError(), FAILED, "the memory does not suffice; what is stored stays."),
        (
            OSError(errno.ENOSPC, "No space left on device"),
            BAD_INPUT,
            "No space left on device: mend that or name another folder, then run the same command again.",
        ),
        (
            OSError(errno.EROFS, "Read-only file system", "a/b"),
            BAD_INPUT,
            "a/b: Read-only file system: mend that or name another folder, then run the same command again.",
        ),
    ],
)
def test_an_end_in_one_sentence(
    error: BaseException, code: int, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    @one_sentence("kvsweep-x", "interrupted; go on.")
    def main() -> None:
        raise error

    for _ in range(2):  # a decorated main can be called again
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == code
        assert capsys.readouterr().err == f"kvsweep-x: error: {sentence}\n"


def test_other_errors_keep_their_traceback() -> None:
    with pytest.raises(ValueError, match="a bug"), one_sentence("kvsweep-x"):
        raise ValueError("a bug")


def test_a_terminal_of_few_characters_gets_escapes_and_no_error(tmp_path: Path) -> None:
    """`rich` writes to the stream below the guard."""
    program = (
        "import sys; from kvsweep.base.command_line import guard_streams; guard_streams()\n"
        "from rich.console import Console; Console().print('Ünïcode ─ 表'); print('Ünïcode 表')"
    )
    env = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    ended = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("\\xdcn\\xefcode") == 2
