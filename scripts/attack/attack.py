"""Attack every command and count what is lost, doubled or changed, the tracebacks, and the code that ran.

The commands are killed at random moments, meet full disks, damaged files, hostile rows and small limits, and each
result is compared with that of an undisturbed run. All commands write to a pseudo-terminal. A find becomes a line of
attack_corpus.jsonl beside this file. Prints one table and, as its last line, one JSON object; exit code 1 says that a
number that must be zero is not.

    python scripts/attack/attack.py         the short form, which `make slow` runs
    python scripts/attack/attack.py --long  200 kills, every line of the corpus, 8 kinds of damage, 3 full disks
"""

import argparse
import csv
import json
import os
import pty
import random
import re
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import termios
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import yaml

from kvsweep.errors import UserError
from kvsweep.records import (
    COMPLETIONS_FILE,
    Completion,
    PairRow,
    Problem,
    decode,
    ignore,
    read_cell,
    read_grades,
    read_rows,
    read_shards,
    shard_files,
)

ROOT = Path(__file__).resolve().parents[2]
CORPUS = Path(__file__).with_name("attack_corpus.jsonl")
GRID = (
    *("model=toy_qwen", "benchmark=toy_chain", "grid.policy=[full,dynts,h2o]", "policy.budget=96", "slots=2"),
    *("policy.keep_ratio=0.4", "policy.local_window=32", "policy.question=on_top"),
)
STORED = (COMPLETIONS_FILE, "grades.jsonl", "problems.jsonl", "stats.jsonl", "cell.yaml", "provenance.json", "DONE")
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGSTOP)
PATIENCE_S = 400.0
# What a terminal would act on; a carriage return belongs to the progress bar.
RAW = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]|\xc2[\x80-\x9f]|\xe2\x80[\xa8-\xae]|\xe2\x81[\xa6-\xa9]")
TRACEBACK = re.compile(rb"Traceback \(most recent call last\)|Exception ignored")
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

    def __iadd__(self, other: "Tally") -> "Tally":
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))
        return self

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
        self.pid, self._terminal = pty.fork()
        if self.pid:
            termios.tcsetwinsize(self._terminal, (50, 200))
            return
        os.chdir(cwd)
        os.environ |= {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1", "TERM": "dumb", "COLUMNS": "200"}
        limits()
        if fresh:
            os.execv(sys.executable, [sys.executable, "-P", "-m", "kvsweep.cli", *words[1:]])
        _run_here(words)

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

    def _reap(self, how: int) -> None:
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

    def send(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def tally(self) -> Tally:
        """What the terminal saw."""
        tracebacks = bool(TRACEBACK.search(self.said))
        raw = bool(RAW.search(self.said))
        if tracebacks or raw or self.hangs:
            print(f"{self.name} ({self.code}) said {self.said[-3000:]!r}", file=sys.stderr)
        return Tally(tried=1, lost=self.hangs, tracebacks=tracebacks, raw_controls=raw)


def _run_here(words: list[str]) -> None:
    """Run the program in this forked process, and end the process as the interpreter would."""
    import traceback

    import kvsweep.cli

    code: Any = 1
    sys.argv = words
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", encoding="utf-8", buffering=1, closefd=False)
    try:
        kvsweep.cli.main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    with suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


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


def files(folder: Path, *suffixes: str) -> dict[str, bytes]:
    """The contents of the files with these suffixes, by their place in the folder."""
    paths = [path for path in folder.rglob("*") if path.suffix in suffixes and not path.name.startswith(".")]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


# --- Attacks ------------------------------------------------------------------------------------------------


@dataclass
class Field:
    """The place of the attacks: an undisturbed run, and scratch space.

    Attributes:
        calm: the results folder of the undisturbed run, finished and graded.
        lives: seconds of that run in an interpreter of its own (True), and in a fork that needs no import (False).
    """

    scratch: Path
    grid: list[str]
    calm: Path
    lives: dict[bool, float]
    dice: random.Random
    long: bool

    def sweep(self, results: Path, *more: str) -> list[str]:
        # A size that a grid gives cannot be given beside it.
        given = {word.partition("=")[0] for word in more}
        own = [word for word in self.grid if word.replace("policy.", "grid.").partition("=")[0] not in given]
        return [*own, f"results_dir={results}", *more]

    def copy(self, name: str) -> Path:
        """A copy of the undisturbed run's results."""
        shutil.rmtree(self.scratch / name, ignore_errors=True)
        return shutil.copytree(self.calm, self.scratch / name)

    def run(
        self, tally: Tally, script: str, *arguments: str | Path, codes: Sequence[int] | None = None, **how: Any
    ) -> Command:
        """Run a command to its end and count what its terminal saw; an exit code outside `codes` counts as lost."""
        ended = Command(script, *arguments, cwd=self.scratch, **how).end()
        tally += ended.tally()
        if codes is not None and ended.code not in codes:
            print(f"{script} ended with {ended.code}: {ended.said[-1500:]!r}", file=sys.stderr)
            tally.lost += 1
        return ended

    def finish(self, tally: Tally, results: Path, *more: str) -> None:
        """Finish a run after an attack and compare its rows."""
        words, found = self.sweep(results, *more), Tally()
        ended = self.run(found, "kvsweep", *words)
        if ended.code == 2 and b"grades" in ended.said and b"delete that line" in ended.said:
            for path in results.glob("default/*/grades*.jsonl"):  # as the sentence says
                path.unlink()
            ended = self.run(found, "kvsweep", *words)
        if ended.code:
            print(f"the last run ended with {ended.code}: {ended.said[-2000:]!r}", file=sys.stderr)
            found.lost += 1
        found += compared(rows(self.calm), rows(results))
        found.tried = 0
        tally += found


def prepare(scratch: Path, *, long: bool, seed: int) -> Field:
    """Import everything once, so that a fork needs no import, and make the undisturbed run."""
    import kvsweep.harness.inspect.draw
    import kvsweep.harness.predictor.train
    import kvsweep.harness.sweep.execute  # noqa: F401

    problems, tokens = (6, 160) if long else (3, 112)
    grid = [*GRID, f"benchmark.limit={problems}", f"decoding.max_new_tokens={tokens}"]
    field = Field(scratch, grid, scratch / "calm", {}, random.Random(seed), long)
    for fresh in (True, False):
        shutil.rmtree(field.calm, ignore_errors=True)
        start = time.monotonic()
        field.run(Tally(), "kvsweep", *field.sweep(field.calm), fresh=fresh)
        field.lives[fresh] = time.monotonic() - start
    return field


def kill_sweeps(field: Field, kills: int) -> Tally:
    """Kill two shards of a running sweep again and again, start each again at once, then let both end.

    Of four processes one starts an interpreter of its own, so that start-up is struck too.
    """
    results, tally, made = field.scratch / "storm", Tally(), 0
    shards = ("shard=1/2", "shard=2/2")

    def start(shard: str) -> Command:
        fresh = field.dice.random() < 0.25
        return Command("kvsweep", *field.sweep(results, shard), cwd=field.scratch, fresh=fresh)

    running = {shard: start(shard) for shard in shards}
    while made < kills:
        shard = field.dice.choice(shards)
        number = SIGNALS[made % len(SIGNALS)]
        if not running[shard].watch(field.dice.uniform(0, field.lives[running[shard].is_fresh])):
            made += 1
            strike(running[shard], number)
            if made % 10 == 0:
                print(f"{made} kills of sweeps", file=sys.stderr, flush=True)
        else:  # the shard is done: its cells lose their mark and some rows, so that there is work again
            for path in results.glob(f"default/*/completions-{shard[6]}of2.jsonl"):
                path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[: field.dice.randrange(4)]))
        tally += running[shard].tally()
        running[shard] = start(shard)
    for command in running.values():
        command.send(signal.SIGKILL)
        command.watch()
    tally.tried = made
    for shard in shards:
        field.run(tally, "kvsweep", *field.sweep(results, shard))
    tally += compared(rows(field.calm), rows(results))
    return tally


def strike(command: Command, number: signal.Signals) -> None:
    """Send the signal and see the command's end; a stopped one goes on for a moment and is killed."""
    command.send(number)
    if number == signal.SIGSTOP:
        time.sleep(0.3)
        command.send(signal.SIGCONT)
        command.watch(0.5)
        command.send(signal.SIGKILL)
    command.end()


def readers(folder: Path, scratch: Path) -> dict[str, tuple[list[str | Path], Path, tuple[str, ...]]]:
    """Each command but kvsweep: its arguments, the folder that it writes to, and the files there that must be equal."""
    run_folder = folder / "default"
    cell = next((path.parent for path in sorted(run_folder.glob("*/DONE"))), run_folder)
    pages = (".csv", ".md", ".tex", ".html")
    head = ["all", "recipe=toy", "recipe.toy_problems=8", "recipe.epochs=1", "decoding.max_new_tokens=120"]
    return {
        "kvsweep grade": ([run_folder, "--all"], run_folder, (".jsonl",)),
        "kvsweep status": ([run_folder, "--cells"], run_folder / "none", ()),
        "kvsweep report": ([run_folder, "--completions", "50"], run_folder / "report", pages),
        "kvsweep compare": ([run_folder, run_folder], run_folder / "none", ()),
        "kvsweep export": ([run_folder, "--token-ids"], run_folder / "export", (".parquet", ".md")),
        "kvsweep trace": ([cell, "--out", scratch / "trace"], scratch / "trace", (".csv",)),
        "kvsweep predictor": ([*head, f"recipe.out={scratch / 'head'}"], scratch / "head", (".jsonl",)),
    }


def kill_readers(field: Field, kills: int) -> Tally:
    """Kill every other command at random moments, run it once more to its end, and compare what it wrote."""
    tally = Tally()
    plan = readers(field.copy("killed"), field.scratch / "struck")
    calm = readers(field.copy("read"), field.scratch / "peace")
    for place, (script, (arguments, written, suffixes)) in enumerate(plan.items()):
        start = time.monotonic()
        peace = field.run(Tally(), script, *calm[script][0])
        life = time.monotonic() - start
        lives = {False: life, True: life + field.lives[True] - field.lives[False]}
        for kill in range(place, kills, len(plan)):
            fresh = field.dice.random() < 0.25
            command = Command(script, *arguments, cwd=field.scratch, fresh=fresh)
            if not command.watch(field.dice.uniform(0, lives[fresh])):
                strike(command, SIGNALS[(kill // len(plan) + place) % len(SIGNALS)])
            tally += command.tally()
        field.run(tally, script, *arguments, codes=[peace.code or 0])
        tally.tried -= 1
        expected, found = files(calm[script][1], *suffixes), files(written, *suffixes)
        changed = [name for name in expected if _plain(found.get(name)) != _plain(expected[name])]
        if changed:
            print(f"{script}: {changed} differ", file=sys.stderr)
        tally.changed += len(changed)
        print(f"{script}: {tally} so far", file=sys.stderr, flush=True)
    return tally


def _plain(data: bytes | None) -> bytes | None:
    """A file's contents without the names of the folders and the times that differ from run to run."""
    return data and re.sub(rb"killed|read|struck|peace|\"seconds\": [\d.]+|\d{4}-\d\d-\d\dT[\d:.+]+", b"", data)


def interrupt_local(field: Field, times: int) -> Tally:
    """Press Ctrl-C, which the terminal sends to every process in front, while launcher=local works."""
    tally = Tally()
    for _ in range(times):
        results = field.scratch / "local"
        sweep = field.sweep(results, "launcher=local", "launcher.shards=2")
        command = Command("kvsweep", *sweep, cwd=field.scratch, fresh=True)
        command.watch(field.dice.uniform(0.5, field.lives[True]))
        with suppress(OSError):
            os.write(command._terminal, b"\x03")
        command.end()
        tally += command.tally()
        if command.code not in (0, 130, -signal.SIGINT):
            print(f"Ctrl-C ended launcher=local with {command.code}: {command.said[-1000:]!r}", file=sys.stderr)
            tally.changed += 1
    time.sleep(2)  # the workers that were cancelled let go of their locks
    field.finish(tally, results, "shard=1/2")
    field.finish(tally, results, "shard=2/2")
    tally.lost = compared(rows(field.calm), rows(results)).lost
    tally.tried = times
    return tally


# Damage to the files of a cell: what is left of the bytes of a file, or None of a missing one.
DAMAGE: dict[str, Callable[[bytes, random.Random], bytes | None]] = {
    "torn last line": lambda data, dice: data[: -dice.randint(2, 40)],
    "cut in the middle": lambda data, dice: data[: len(data) // 2],
    "missing": lambda data, dice: None,
    "empty": lambda data, dice: b"",
    "zeros at the end": lambda data, dice: data[:-50] + bytes(50),
    "noise in the middle": lambda data, dice: data[: len(data) // 2] + dice.randbytes(20) + data[len(data) // 2 + 20 :],
    "a line of something else": lambda data, dice: b'[1, {"problem_id": 3}]\n' + data,
    "a missing line": lambda data, dice: data.partition(b"\n")[2],
}


def damage(field: Field, kinds: Sequence[str]) -> Tally:
    """Damage each kind of file of a finished run, let every command read it, finish it, compare."""
    tally = Tally()
    for kind in kinds:
        results = field.copy("damaged")
        paths = [*results.glob("default/status/*.json")]
        for cell in sorted(results.glob("default/*/")):
            paths += [cell / name for name in field.dice.sample(STORED, len(STORED) if field.long else 3)]
        for path in filter(Path.is_file, paths):
            left = DAMAGE[kind](path.read_bytes(), field.dice)
            path.unlink() if left is None else path.write_bytes(left)
        plan = readers(results, field.scratch / "damage")
        for script in plan if field.long else ("kvsweep status", "kvsweep export", "kvsweep grade"):
            if script != "kvsweep predictor":
                field.run(tally, script, *plan[script][0])
                tally.tried -= 1
        # A row that lost its problems file or its DONE is asked for again by a sweep that looks at every cell.
        for path in results.glob("default/*/DONE"):
            path.unlink()
        field.finish(tally, results)
        tally.tried += 1
    return tally


@contextmanager
def small_disk(place: Path, kilobytes: int) -> Iterator[bool]:
    """A file system of this size at the place, if this user may mount one; yields whether there is one."""
    place.mkdir(parents=True, exist_ok=True)
    options = ["-t", "tmpfs", "-o", f"size={kilobytes}k", "kvsweep-attack", str(place)]
    mounted = os.getuid() == 0 and subprocess.run(["mount", *options], capture_output=True, check=False).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(place)], check=False)


def limit(what: int, most: int) -> Callable[[], None]:
    return partial(resource.setrlimit, what, (most, most))


def limit_memory() -> None:
    # The process has torch's libraries in it already; this leaves it some hundred megabytes to work with.
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit(resource.RLIMIT_AS, pages * resource.getpagesize() + (400 << 20))()


def disks(field: Field, states: Sequence[str]) -> Tally:
    """A sweep and its readers meet a disk that is full or cannot be written to, and go on when it is mended."""
    tally = Tally()
    for state in states:
        place = field.scratch / "disk"
        shutil.rmtree(place, ignore_errors=True)
        with small_disk(place, 60 if state == "full" else 20_000) as mounted:
            limits: Callable[[], None] = int
            if state == "file too large" or not mounted:
                limits = limit(resource.RLIMIT_FSIZE, 4096)
            elif state == "read-only":
                shutil.copytree(field.calm / "default", place / "default")
                for path in place.glob("default/*/completions.jsonl"):
                    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:2]))
                subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
            # One sentence of a disk that cannot be written to.
            field.run(tally, "kvsweep", *field.sweep(place), codes=[2], limits=limits)
            for script in ("kvsweep status", "kvsweep grade", "kvsweep report", "kvsweep export"):
                arguments = readers(place, field.scratch / "disks")[script][0]
                field.run(tally, script, *arguments, limits=limits)
                tally.tried -= 1
            if mounted:
                subprocess.run(["mount", "-o", "remount,rw,size=100m", str(place)], check=True)
            field.finish(tally, place)
    return tally


def rivals(field: Field) -> Tally:
    """Two writers of one cell, and shards of different counts one after the other."""
    results = field.scratch / "rivals"
    pair = [Command("kvsweep", *field.sweep(results), cwd=field.scratch) for _ in range(2)]
    tally = Tally()
    for command in pair:
        tally += command.end().tally()
    if not {command.code for command in pair} <= {0, 3}:
        tally.lost += 1
    results = field.scratch / "counts"
    for shard in ("1/3", "2/2", "1/1"):
        field.run(tally, "kvsweep", *field.sweep(results, f"shard={shard}"))
    tally += compared(rows(field.calm), rows(results))
    field.finish(tally, field.scratch / "rivals")
    return tally


def small_limits(field: Field) -> Tally:
    """Few open files with many cells, and little memory."""
    results, tally = field.scratch / "few", Tally()
    axes = "grid.local_window=[" + ",".join(str(n) for n in range(16, 16 + (40 if field.long else 6))) + "]"
    many = field.sweep(results, axes, "grid.keep_ratio=[0.2,0.3,0.4,0.5]", "benchmark.limit=1", "run_name=many")
    field.run(
        tally, "kvsweep", *many, "decoding.max_new_tokens=8", codes=[0], limits=limit(resource.RLIMIT_NOFILE, 128)
    )
    for script, (arguments, _, _) in readers(field.copy("memory"), field.scratch / "memories").items():
        field.run(tally, script, *arguments, limits=limit_memory)
    field.run(tally, "kvsweep", *field.sweep(field.scratch / "low"), limits=limit_memory)
    field.finish(tally, field.scratch / "low")
    return tally


# --- Tampering ----------------------------------------------------------------------------------------------

EXTREMES: tuple[Any, ...] = (
    0, -1, 1 << 31, 1 << 62, 1 << 70, 10**12, 1e300, -1e300, 0.5, True, None, "", "x", "${oc.env:HOME}", "\x00", "1",
    [], [10**12], [100, 10**12], {}, {"_target_": f"{MARK}.x"}, [[[]]],
)  # fmt: skip


def truncate(path: Path, dice: random.Random) -> None:
    os.truncate(path, dice.randrange(path.stat().st_size))


def flip(path: Path, dice: random.Random) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(dice.choice((1, 1, 1, 8))):
        data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    path.write_bytes(data)


def swap(path: Path, dice: random.Random) -> None:
    if others := [other for other in path.parents[1].glob(f"*/{path.name}") if other != path]:
        other = dice.choice(others)
        data = path.read_bytes()
        path.write_bytes(other.read_bytes())
        other.write_bytes(data)


def double(path: Path, dice: random.Random) -> None:
    """The file's copy as another shard's, or as another cell's, or the whole cell under another name."""
    cells = [cell for cell in path.parents[1].glob("*/") if cell.name != "status"]
    places = [path.with_name(f"{path.stem}-1of2{path.suffix}"), dice.choice(cells) / f"{path.stem}-2of2{path.suffix}"]
    if dice.random() < 0.3:
        shutil.copytree(path.parent, path.parents[1] / f"copy-{dice.randrange(9)}")
    else:
        shutil.copy(path, dice.choice(places))


def another_value(path: Path, dice: random.Random) -> None:
    """Another value somewhere in a row or in the whole file, which is then written as Python or kvsweep writes it."""
    lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
    number = dice.randrange(len(lines))
    value = yaml.safe_load(lines[number]) if path.suffix == ".yaml" else json.loads(lines[number])
    place: Any = value
    while True:
        key = dice.choice(list(place) if isinstance(place, dict) else range(len(place)))
        if not isinstance(place[key], dict | list) or not place[key] or dice.random() < 0.2:
            break
        place = place[key]
    if dice.random() < 0.1 and isinstance(place, dict):
        del place[key]
    else:
        place[key] = dice.choice(EXTREMES)
    separators = dice.choice(((",", ":"), (", ", ": ")))
    dump = yaml.safe_dump if path.suffix == ".yaml" else partial(json.dumps, separators=separators)
    lines[number] = dump(value)
    path.write_text("\n".join(lines) + "\n")


def link(path: Path, dice: random.Random) -> None:
    target = dice.choice(
        (
            path.parents[3] / "victim",
            Path("/dev/zero"),
            Path("/dev/full"),
            path,
            path.parents[2],
            Path("/proc/self/mem"),
        )
    )
    name = dice.choice((path, path, path.with_name(".lock.owner"), path.with_name(".lock"), path.parents[1] / "report"))
    name.unlink(missing_ok=True)
    name.symlink_to(target)


def pipe(path: Path, dice: random.Random) -> None:
    path.unlink()
    os.mkfifo(path)


# Another value twice, since values are of so many kinds.
TAMPER = (truncate, flip, swap, double, another_value, another_value, link, pipe)


def tamper(field: Field, seeds: Sequence[int], slow: int) -> Tally:
    """Change one file of a finished run at random, let every command read the run, and see which rows are accepted.

    Every row that a reader accepts must be a row of the run, in its cell. The report and the pictures of a text, which
    take seconds, are made of each `slow`-th seed; the numbers below the report are read every time.
    """
    tally = Tally()
    victim, module = field.scratch / "victim", field.scratch / f"{MARK}.py"
    module.write_text(f"open({str(field.scratch / MARK)!r}, 'w')\n")
    sys.path.insert(0, str(field.scratch))
    calm = accepted(field.calm)
    for seed in seeds:
        dice, found = random.Random(seed), Tally(tried=1)
        results = field.copy("tampered")
        victim.write_text("mine")
        cells = [path.parent for path in sorted(results.glob("default/*/DONE"))]
        paths = [path for path in (dice.choice(cells) / name for name in STORED) if path.is_file()]
        path = dice.choice([*paths, *results.glob("default/status/*.json")])
        kind = dice.choice(TAMPER)
        kind(path, dice)
        rest = Counter(accepted(results))
        found.changed += sum((rest - Counter(calm)).values())
        plan = readers(results, field.scratch / "drawn")
        plan["kvsweep trace"] = ([path.parent, "--out", field.scratch / "drawn"], path.parent, ())
        plan["kvsweep"] = ([*field.sweep(results)], results, ())
        for script, (arguments, _, _) in plan.items():
            if script == "kvsweep predictor" or (
                seed % slow and script in ("kvsweep report", "kvsweep trace", "kvsweep")
            ):
                continue
            field.run(found, script, *arguments, codes=(0, 1, 2, 3))
        found.changed += victim.read_text() != "mine"
        found.code_run += (field.scratch / MARK).exists()
        found.tried = 1
        if not found.is_clean:
            print(f"seed {seed}, {kind.__name__} {path.relative_to(results)}: {found}", file=sys.stderr, flush=True)
        tally += found
    return tally


def accepted(results: Path) -> list[tuple[str, str]]:
    """What the readers of a run take for its completions, grades, costs and problems, each with the cell's id."""
    found = []
    for cell in sorted(results.glob("default/*/cell.yaml")):
        with suppress(UserError, OSError):
            settings = read_cell(cell.parent)
            found.append((cell.parent.name, json.dumps(settings, sort_keys=True, default=str)))
            rows: list[Any] = [*read_shards(cell.parent, COMPLETIONS_FILE, Completion, on_bad=ignore)]
            rows += read_grades(cell.parent, on_bad=ignore)
            rows += read_rows(cell.parent / "problems.jsonl", Problem, on_bad=ignore)
            found += [(cell.parent.name, str(row)) for row in rows]
    return found


# --- Hostile rows -------------------------------------------------------------------------------------------


def corpus() -> list[dict[str, Any]]:
    """The hostile rows: each has a `name`, and a `text` for any place of a text or a `line` for any file of lines."""
    return [json.loads(line) for line in CORPUS.read_text().splitlines()]


def hostile(field: Field, entries: Sequence[dict[str, Any]]) -> Tally:
    """Put each text into problems, rows, titles and statuses, and let every command work on them."""
    tally = Tally()
    for entry in entries:
        entry_tally = Tally(tried=1)
        results = field.copy("hostile")
        text = entry.get("text", entry.get("line", "")) * entry.get("times", 1)
        text = text.replace("MARK", str(field.scratch / MARK))
        problems = _hostile_problems(field, text, raw="line" in entry)
        small = ["benchmark.limit=2", "decoding.max_new_tokens=16", "grid.policy=[full,dynts]", "run_name=own"]
        own = field.sweep(results, f"benchmark.path={problems}", "benchmark.source=file", *small)
        for part in (own, [*own, f"benchmark.prompt={problems}"]):
            field.run(entry_tally, "kvsweep", *part)
        _plant(results / "default", text, raw="line" in entry)
        plan = readers(results, field.scratch / "traced")
        cell = next(path.parent for path in sorted((results / "default").glob("*/DONE")))
        plan["kvsweep predictor"] = (["traces", "recipe=toy", f"recipe.out={field.scratch / 'stolen'}"], cell, ())
        plan["kvsweep predictor"][0].append(f"recipe.import_from={cell}")
        for script, (arguments, _, _) in plan.items():
            field.run(entry_tally, script, *arguments, codes=(0, 1, 2))
        left = {cell_id: lines - (lines - rows(field.calm)[cell_id]) for cell_id, lines in rows(results).items()}
        entry_tally += compared(rows(field.calm), left)
        entry_tally.code_run += _ran(field.scratch, results)
        if not entry_tally.is_clean:
            print(f"corpus {entry['name']}: {entry_tally}", file=sys.stderr)
        entry_tally.tried = 1
        tally += entry_tally
    return tally


# --- Inputs that are accepted and mean something else ----------------------------------------------------------

POLICIES = ("full", "dynts", "h2o", "snapkv", "rkv", "window", "streaming_llm", "random", "keydiff", "tova")
NO_GOLDS = (
    '["7"]',
    "b'7'",
    "N/A",
    "None",
    "nan",
    "The answer is 5 because 2+3.",
    "2+3=5\\n#### 5",
    "{'a': 7}",
    "\\ud800",
)
GOLDS = ("7", "\\\\frac{1}{2}", "x^2 + 1", "[2, 3)", "(1, 2)", "5 \\\\text{ cm}", "-4, 9")


def meaning(field: Field, times: int) -> Tally:
    """Give inputs that mean something else, and for each one its sound sibling: one is refused, the other is not."""
    tally, place = Tally(), field.scratch / "own"
    field.run(tally, "kvsweep", "init", place, codes=(0,))
    draws = (_renamed, _unused, _golds, _columns, _own_policy)
    for number in range(times):
        words, files, is_sound = draws[number % len(draws)](field.dice)
        shutil.rmtree(place / "conf/policy")
        shutil.copytree(ROOT / "harness/template/conf/policy", place / "conf/policy")
        for name, text in files.items():
            (place / name).write_text(text)
        words = ["model=toy_qwen", *words, f"results_dir={field.scratch / 'never'}", "--dry-run"]
        ended = Command("kvsweep", *words, cwd=place).end()
        tally += ended.tally()
        if ended.code != (0 if is_sound else 2):
            print(f"{'refused' if is_sound else 'accepted'}: {words} {files} {ended.said[-500:]!r}", file=sys.stderr)
            tally.changed += 1
    return tally


Drawn = tuple[list[str], dict[str, str], bool]  # words of the command, files beside it, whether it means what it says


def _renamed(dice: random.Random) -> Drawn:
    policy, name = dice.choice(POLICIES), dice.choice((*POLICIES, "../x", "mine"))
    return [f"policy={policy}", f"policy.name={name}"], {}, policy == name


def _unused(dice: random.Random) -> Drawn:
    names, width = dice.sample(("full", "h2o", "snapkv"), 2), dice.randint(1, 32)
    words = ["policy=snapkv", f"grid.policy=[{','.join(names)}]", f"policy.observation_window={width}"]
    bits = dice.choice((16, 4))
    packed = [f"cache.bits={bits}", f"cache.group={dice.choice((16, 32))}"] if "snapkv" in names else []
    return [*words, *packed], {}, "snapkv" in names and bits == 4 if packed else "snapkv" in names


def _golds(dice: random.Random) -> Drawn:
    is_sound = dice.random() < 0.5
    gold = dice.choice(GOLDS if is_sound else NO_GOLDS)
    lines = [f'{{"id": "a", "problem": "One?", "answer": "{gold}"}}', '{"id": "b", "problem": "Two?", "answer": "8"}']
    dice.shuffle(lines)
    words = ["benchmark=mine", "benchmark.path=drawn.jsonl", "benchmark.answer_kind=expression"]
    return words, {"drawn.jsonl": "\n".join(lines) + "\n"}, is_sound


def _columns(dice: random.Random) -> Drawn:
    kind = dice.choice(("sound", "key", "problem", "keep_if"))
    row = {"id": "a", "problem": "One?", "answer": 7, "kind": "y"}
    lines = [json.dumps(row), json.dumps({**row, "id": "b", "problem": "One?" if kind == "problem" else "Two?"})]
    if kind == "key":
        lines[0] = lines[0].replace('"answer": 7', '"answer": 8, "answer": 7')
    column = "knd" if kind == "keep_if" else "kind"
    words = ["benchmark=mine", "benchmark.path=drawn.jsonl", f"+benchmark.keep_if={{{column}: y}}"]
    return words, {"drawn.jsonl": "\n".join(lines) + "\n"}, kind == "sound"


def _own_policy(dice: random.Random) -> Drawn:
    name, file = dice.choice(("mine2", "h2o", "full")), dice.choice(("mine2", "full"))
    text = (ROOT / "harness/template/conf/policy/spread.yaml").read_text().replace("name: spread", f"name: {name}")
    return ["policy=spread"], {f"conf/policy/{file}.yaml": text}, name == file == "mine2"


def _hostile_problems(field: Field, text: str, *, raw: bool) -> Path:
    path = field.scratch / "hostile.jsonl"
    if raw:
        path.write_bytes(text.encode("utf-8", "surrogatepass") + b'\n{"id": 1, "problem": "1+1?", "answer": 2}\n')
    else:
        lines = [{"id": text, "problem": f"What is {text}?", "answer": 7}, {"id": "b", "problem": text, "answer": 8}]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def _plant(run_folder: Path, text: str, *, raw: bool) -> None:
    """Put the text into every file of a run's cells, beside the rows that are there."""
    for number, cell in enumerate(sorted(path.parent for path in run_folder.glob("*/DONE"))):
        if raw:
            for name in (COMPLETIONS_FILE, "grades.jsonl", "stats.jsonl", "provenance.json", "cell.yaml", "DONE"):
                if number == 0 or name.endswith(".jsonl"):
                    with (cell / name).open("ab") as file:
                        file.write(text.encode("utf-8", "surrogatepass") + b"\n")
            continue
        for name, own in {
            COMPLETIONS_FILE: {"problem_id": text, "text": f"{text}</think>{text} \\boxed{{{text}}}"},
            "grades.jsonl": {"problem_id": text, "answer": text, "gold": "7"},
            "problems.jsonl": {"id": text, "prompt": text, "gold": "7"},
        }.items():
            with (cell / name).open("a+") as file:
                file.seek(0)
                first = json.loads(file.readline())
                first.pop("check")  # as a program that knows no check would write the row
                file.write(json.dumps({**first, **own}) + "\n")
        settings = yaml.safe_load((cell / "cell.yaml").read_text())
        del settings["check"]
        settings["model"]["title"] = settings["benchmark"]["title"] = settings["policy"]["mode"] = text
        settings["model"]["name"] = settings["decoding"]["name"] = text
        with suppress(UnicodeEncodeError):
            (cell / "cell.yaml").write_text(yaml.safe_dump(settings))
        told = json.loads((cell / "provenance.json").read_text())
        told["packages"] = {text: text}
        told["decoding_passes"][0]["command"] = [text]
        (cell / "provenance.json").write_text(json.dumps(told))
    for path in run_folder.glob("status/*.json"):
        status = json.loads(path.read_text())
        status |= {"state": "failed", "error": text, "command": text, "task": text, "host": text}
        for cell_status in status["cells"].values():
            cell_status |= {"model": text, "benchmark": text, "policy": text}
        path.write_bytes((text if raw else json.dumps(status)).encode("utf-8", "surrogatepass"))


class _Page(HTMLParser):
    """Counts what a page would run that kvsweep did not put there."""

    def __init__(self) -> None:
        super().__init__()
        self.runs = 0

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        names = {name for name, _ in attributes}
        values = [value or "" for name, value in attributes if name in ("src", "href")]
        inert = tag == "script" and ("nonce" in names or ("type", "application/json") in attributes)
        self.runs += tag in {"iframe", "object", "embed", "svg"} or (tag == "script" and not inert)
        self.runs += any(name.startswith("on") for name in names)
        self.runs += any(value.strip().lower().startswith("javascript:") or value == "x" for value in values)


def _ran(scratch: Path, results: Path) -> int:
    """How much of the text from outside has run or would run: as a program, in a page, in a spreadsheet."""
    mark = scratch / MARK
    ran = int(mark.exists())
    mark.unlink(missing_ok=True)
    for path in results.rglob("*.html"):
        page = _Page()
        page.feed(path.read_text())
        ran += page.runs
        if page.runs:
            print(f"{path}: {page.runs}", file=sys.stderr)
    for path in [*results.rglob("*.csv"), *(scratch / "traced").rglob("*.csv")]:
        with path.open(newline="") as file:
            cells = [cell for row in csv.reader(file) for cell in row[:8]]
        ran += any(len(cell) > 1 and cell[0] in "=+-@" and not re.fullmatch(r"[+-][\d.e+-]+", cell) for cell in cells)
    for path in results.rglob("*.md"):
        if found := re.search(r"(?<!\\)<(script|img).*", re.sub(r"`[^`]*`", "", path.read_text())):
            print(f"{path}: {found[0]}", file=sys.stderr)
            ran += 1
    return ran


# --- The table ----------------------------------------------------------------------------------------------


def _cpu_seconds() -> float:
    """Seconds of processor that the commands which have ended took."""
    spent = os.times()
    return spent.children_user + spent.children_system


def main() -> None:
    """Run the attacks and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--long", action="store_true", help="the long form")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", default="", help="only the hostile rows whose name holds this")
    parser.add_argument("--times", type=int, default=8, metavar="N", help="how many random tamperings (8)")
    parser.add_argument("--slow", type=int, default=10, metavar="N", help="of each N-th seed, draw the run too (10)")
    parser.add_argument("--only", nargs="*", help="names of attacks")
    parser.add_argument("--scratch", type=Path, help="an empty folder to work in, which is kept")
    options = parser.parse_args()
    csv.field_size_limit(sys.maxsize)
    with tempfile.TemporaryDirectory(prefix="kvsweep-attack-") as folder:
        if options.scratch:
            options.scratch.mkdir(parents=True, exist_ok=True)
        started = time.monotonic()
        field = prepare((options.scratch or Path(folder)).resolve(), long=options.long, seed=options.seed)
        long, entries = options.long, [entry for entry in corpus() if options.rows in entry["name"]]
        attacks: dict[str, Callable[[], Tally]] = {
            "hostile rows": lambda: hostile(field, entries if long or options.rows else field.dice.sample(entries, 2)),
            "meaning": lambda: meaning(field, 200 if long else 20),
            "tampering": lambda: tamper(field, range(options.seed, options.seed + options.times), options.slow),
            "damaged files": lambda: damage(field, [*DAMAGE] if long else field.dice.sample([*DAMAGE], 2)),
            "disks": lambda: disks(field, ("full", "read-only", "file too large")[: 3 if long else 1]),
            "two writers": lambda: rivals(field),
            "small limits": lambda: small_limits(field),
            "kills of sweeps": lambda: kill_sweeps(field, 90 if long else 4),
            "kills of other commands": lambda: kill_readers(field, 112 if long else 7),
            "Ctrl-C, launcher=local": lambda: interrupt_local(field, 8 if long else 1),
        }
        found = {}
        for name, attack in attacks.items():
            if options.only is None or name in options.only:
                start, cpu = time.monotonic(), _cpu_seconds()
                found[name] = attack()
                seconds = f"{time.monotonic() - start:.0f} s, {_cpu_seconds() - cpu:.0f} s of processor"
                print(f"{name}: {seconds}, {found[name]}", file=sys.stderr)
    heads = [field.name.replace("_", " ") for field in fields(Tally)]
    print("| attack | " + " | ".join(heads) + " |\n|---" * 1 + "|---" * len(heads) + "|")
    for name, tally in found.items():
        print(f"| {name} | " + " | ".join(str(getattr(tally, field.name)) for field in fields(Tally)) + " |")
    seconds = round(time.monotonic() - started, 1)
    print(json.dumps({"seconds": seconds, **{name: vars(tally) for name, tally in found.items()}}))
    sys.exit(not all(tally.is_clean for tally in found.values()))


if __name__ == "__main__":
    main()
