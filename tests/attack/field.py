"""What every attack needs: commands on a pseudo-terminal, the rows that they store, the counts of what went wrong."""

import logging
import os
import pty
import random
import re
import select
import shutil
import signal
import sys
import termios
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

import kvsweep.cli
from kvsweep.run_files.row_types import COMPLETIONS_FILE, PairRow, decode, shard_files

ROOT = Path(__file__).resolve().parents[2]
GRID = (
    *("model=toy_qwen", "benchmark=toy_chain", "grid.policy=[full,dynts,h2o]", "policy.budget=96", "slots=2"),
    *("policy.keep_ratio=0.4", "policy.local_window=32", "policy.question=on_top"),
)
STORED = (COMPLETIONS_FILE, "grades.jsonl", "problems.jsonl", "stats.jsonl", "cell.yaml", "provenance.json", "DONE")
READERS = ("grade", "status", "report", "compare", "export", "trace", "predictor")
PATIENCE_S = 400.0
# What a terminal would act on; a carriage return belongs to the progress bar.
RAW = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]|\xc2[\x80-\x9f]|\xe2\x80[\xa8-\xae]|\xe2\x81[\xa6-\xa9]")
TRACEBACK = re.compile(rb"Traceback \(most recent call last\)|Exception ignored")
# What Python prints in a process that it starts, if the one that started it is killed before it has said what to run.
# An interrupt in the constructor of tqdm, whose __del__ then has no bar to close.
TQDM = re.compile(
    rb"Exception ignored in: <function tqdm\.__del__.*?AttributeError: 'tqdm' object has no attribute 'pos'", re.DOTALL
)
ORPHAN = re.compile(
    rb'Traceback [^\n]*\n  File "<string>", line 1, in <module>\r?\n(?:  [^\n]*\n)*EOFError: Ran out of input'
)
MARK = "ran_by_attack"


@dataclass
class Tally:
    """The counts of one attack; all but `tried` must be 0."""

    tried: int = 0
    lost: int = 0
    doubled: int = 0
    changed: int = 0
    tracebacks: int = 0
    code_run: int = 0
    raw_controls: int = 0

    def add(self, other: "Tally"):
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))

    @property
    def is_clean(self) -> bool:
        return not any(getattr(self, field.name) for field in fields(self)[1:])


# --- Commands -----------------------------------------------------------------------------------------------


class Command:
    """A command that runs on a pseudo-terminal of its own.

    Args:
        script: the words that it begins with, such as kvsweep report.
        fresh: start an interpreter; otherwise a fork of this process runs it, which has imported everything.
        limits: what to do in the new process before the script begins.
    """

    def __init__(
        self, script: str, *arguments: str | Path, cwd: Path, fresh: bool = False, limits: Callable[[], None] = int
    ) -> None:
        self.name, self.is_fresh = script, fresh
        self.said, self.hangs = b"", False
        self.code: int | None = None
        words = [*script.split(), *map(str, arguments)]
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # until the new process is the command
        self.pid, self._terminal = pty.fork()
        if not self.pid:
            try:
                _become(words, cwd, fresh, limits)
            finally:  # Ctrl-C has struck while the command was ending: this copy of pytest must not go on
                os._exit(130)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        termios.tcsetwinsize(self._terminal, (50, 200))

    def watch(self, seconds: float = PATIENCE_S) -> bool:
        """Read what the command says until it ends or the time is over; returns True if it has ended."""
        end = time.monotonic() + seconds
        while self.code is None and (left := end - time.monotonic()) > 0:
            if not select.select([self._terminal], [], [], min(left, 0.2))[0]:
                self._reap(os.WNOHANG)
                continue
            piece = b""
            with suppress(OSError):  # every process has closed the terminal
                piece = os.read(self._terminal, 1 << 16)
            self.said += piece
            if not piece:
                self._reap(0)
        return self.code is not None

    def _reap(self, how: int):
        pid, status = os.waitpid(self.pid, how)
        if pid:
            self.code = os.waitstatus_to_exitcode(status)
            with suppress(OSError):
                while select.select([self._terminal], [], [], 0)[0] and (piece := os.read(self._terminal, 1 << 16)):
                    self.said += piece
            os.close(self._terminal)

    def end(self, seconds: float = PATIENCE_S) -> "Command":
        """Wait for the end; a command that hangs is killed and counts as lost."""
        if not self.watch(seconds):
            self.hangs = True
            self.send(signal.SIGKILL)
            self.watch()
        return self

    def send(self, number: signal.Signals):
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def press(self, keys: bytes):
        with suppress(OSError):  # the command has ended
            os.write(self._terminal, keys)

    @property
    def is_interrupted_at_start(self) -> bool:
        """True if Ctrl-C came before an interpreter of its own began the command: Python prints a traceback there."""
        return self.is_fresh and b"KeyboardInterrupt" in self.said and b", in main\r\n" not in self.said

    def tally(self) -> Tally:
        """What the terminal saw."""
        said = ORPHAN.sub(b"", self.said) if self.code == -signal.SIGKILL else self.said
        said = TQDM.sub(b"", said)
        tracebacks = bool(TRACEBACK.search(said)) and not self.is_interrupted_at_start
        raw = bool(RAW.search(self.said))
        if tracebacks or raw or self.hangs:
            print(f"{self.name} ({self.code}) said {self.said[-3000:]!r}")
        return Tally(lost=self.hangs, tracebacks=tracebacks, raw_controls=raw)


def _become(words: list[str], cwd: Path, fresh: bool, limits: Callable[[], None]):
    """Be the command, in the process that was forked for it; the process ends here."""
    code: Any = 1
    try:
        _forget_pytest()
        os.chdir(cwd)
        os.environ |= {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1", "TERM": "dumb", "COLUMNS": "200"}
        limits()
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        except KeyboardInterrupt:
            os._exit(130)
        if fresh:
            os.execv(sys.executable, [sys.executable, "-P", "-m", "kvsweep.cli", *words[1:]])
        # A fork makes torch's threads anew without a lock, and several threads of the command may be the first.
        torch.set_num_threads(1)
        sys.argv = words
        kvsweep.cli.main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _forget_pytest():
    """Write to the terminal, say what a destructor or a thread raises, and obey Ctrl-C, as a new interpreter does."""
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", encoding="utf-8", buffering=1, closefd=False)
    sys.unraisablehook, threading.excepthook = sys.__unraisablehook__, threading.__excepthook__
    logging.getLogger().handlers.clear()
    signal.signal(signal.SIGINT, signal.default_int_handler)


# --- Rows ---------------------------------------------------------------------------------------------------


def rows(results: Path) -> dict[str, Counter[bytes]]:
    """Every cell's whole lines of completions, each with its count."""
    found: dict[str, Counter[bytes]] = {}
    for cell in results.glob("default/*/"):
        for path in shard_files(cell, COMPLETIONS_FILE).values():
            if path.is_file():
                found.setdefault(cell.name, Counter()).update(path.read_bytes().split(b"\n")[:-1])
    return found


def compared(expected: dict[str, Counter[bytes]], found: dict[str, Counter[bytes]]) -> Tally:
    """The numbers of pairs that are lost, doubled, or have another row than expected."""
    tally = Tally()
    for cell_id, lines in expected.items():
        here = found.get(cell_id, Counter())
        pairs = Counter(_pair(line) for line in here.elements())
        tally.lost += len({_pair(line) for line in lines} - pairs.keys())
        tally.doubled += sum(count - 1 for count in pairs.values())
        tally.changed += sum((here - lines).values())
    return tally


def _pair(line: bytes) -> Any:
    try:
        return decode(line, PairRow).key
    except ValueError:
        return line


# --- The field ----------------------------------------------------------------------------------------------


@dataclass
class Field:
    """The place of one attack.

    Attributes:
        scratch: a folder of its own.
        grid: the words of the undisturbed run.
        calm: the results folder of the undisturbed run, finished and graded.
        dice: all that is random.
        long: try more.
        tally: what was counted so far.
    """

    scratch: Path
    grid: list[str]
    calm: Path
    dice: random.Random
    long: bool
    tally: Tally

    def sweep(self, results: Path, *more: str) -> list[str]:
        # A size that a grid gives cannot be given beside it.
        given = {word.partition("=")[0] for word in more}
        own = [word for word in self.grid if word.replace("policy.", "grid.").partition("=")[0] not in given]
        return [*own, f"results_dir={results}", *more]

    def copy(self, name: str) -> Path:
        """A copy of the undisturbed run's results."""
        return shutil.copytree(self.calm, self.scratch / name)

    def start(self, script: str, *arguments: str | Path, **how: Any) -> Command:
        return Command(script, *arguments, cwd=self.scratch, **how)

    def run(self, script: str, *arguments: str | Path, codes: Sequence[int] | None = None, **how: Any) -> Command:
        """Run a command to its end and count what its terminal saw; an exit code outside `codes` counts as lost."""
        ended = self.start(script, *arguments, **how).end()
        self.tally.add(ended.tally())
        if codes is not None and ended.code not in codes:
            print(f"{script} ended with {ended.code}: {ended.said[-1500:]!r}")
            self.tally.lost += 1
        return ended

    def compare(self, results: Path):
        """Count the rows that differ from those of the undisturbed run."""
        self.tally.add(compared(rows(self.calm), rows(results)))

    def finish(self, results: Path):
        """Finish a run after an attack on its files and compare its rows."""
        words = self.sweep(results)
        ended = self.run("kvsweep", *words)
        if ended.code == 2 and b"grades" in ended.said and b"delete that line" in ended.said:
            for path in results.glob("default/*/grades*.jsonl"):  # as the sentence says
                path.unlink()
            ended = self.run("kvsweep", *words)
        if ended.code:
            print(f"the last run ended with {ended.code}: {ended.said[-2000:]!r}")
            self.tally.lost += 1
        self.compare(results)


def readers(folder: Path, scratch: Path) -> dict[str, tuple[list[str | Path], Path, tuple[str, ...]]]:
    """The READERS: each one's arguments, the folder that it writes to, and the files there that must be equal."""
    run_folder = folder / "default"
    cell = next((path.parent for path in sorted(run_folder.glob("*/DONE"))), run_folder)
    pages = (".csv", ".md", ".tex", ".html")
    head = ["all", "recipe=toy", "recipe.toy_problems=8", "recipe.epochs=1", "decoding.max_new_tokens=120"]
    return {
        "grade": ([run_folder, "--all"], run_folder, (".jsonl",)),
        "status": ([run_folder, "--cells"], run_folder / "none", ()),
        "report": ([run_folder, "--completions", "50"], run_folder / "report", pages),
        "compare": ([run_folder, run_folder], run_folder / "none", ()),
        "export": ([run_folder, "--token-ids"], run_folder / "export", (".parquet", ".md")),
        "trace": ([cell, "--out", scratch / "trace"], scratch / "trace", (".csv",)),
        "predictor": ([*head, f"recipe.out={scratch / 'head'}"], scratch / "head", (".jsonl",)),
    }
