"""Damaged and changed files, full disks, small limits: a run goes on, and no wrong row is accepted."""

import json
import os
import random
import resource
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvsweep.messages.errors import UserError
from kvsweep.run_files.row_types import (
    Completion,
    Problem,
    ignore,
    read_rows,
)
from kvsweep.run_files.run_reader import StoredCell
from tests.attack.field import MARK, READERS, STORED, Field, readers

pytestmark = pytest.mark.slow

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


@pytest.mark.drawn("kind", [*DAMAGE], 4)
def test_damaged_files(kind, field):
    """Each kind of file of a finished run is damaged; every command reads the run, and a sweep mends it."""
    results = field.copy("damaged")
    paths = [*results.glob("default/status/*.json")]
    for cell in sorted(results.glob("default/*/")):
        paths += [cell / name for name in field.dice.sample(STORED, len(STORED) if field.long else 3)]
    for path in filter(Path.is_file, paths):
        left = DAMAGE[kind](path.read_bytes(), field.dice)
        path.unlink() if left is None else path.write_bytes(left)
    plan = readers(results, field.scratch / "damage")
    for reader in READERS[:-1] if field.long else ("status", "export", "grade"):
        field.run(f"kvsweep {reader}", *plan[reader][0])
    # A row that lost its problems file or its DONE is asked for again by a sweep that looks at every cell.
    for path in results.glob("default/*/DONE"):
        path.unlink()
    field.finish(results)
    field.tally.tried += 1
    assert field.tally.is_clean, field.tally


# --- Limits -------------------------------------------------------------------------------------------------


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


def limit_memory():
    # The process has torch's libraries in it already; this leaves it some hundred megabytes to work with. With 350 or
    # 400 it gets as far as scipy, whose OpenBLAS then asks for ever for 32 that are missing.
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit(resource.RLIMIT_AS, pages * resource.getpagesize() + (300 << 20))()


@pytest.mark.drawn("state", ["full", "read-only", "file too large"], 3)
def test_disks(state, field):
    """A sweep and its readers meet a disk that is full or cannot be written to, and go on when it is mended."""
    place = field.scratch / "disk"
    with small_disk(place, 60 if state == "full" else 20_000) as mounted:
        limits: Callable[[], None] = int
        if state == "file too large" or not mounted:
            limits = limit(resource.RLIMIT_FSIZE, 4096)
        elif state == "read-only":
            forbid_writing(field, place)
        # One sentence of a disk that cannot be written to.
        field.run("kvsweep", *field.sweep(place), codes=[2], limits=limits)
        for reader in ("status", "grade", "report", "export"):
            field.run(f"kvsweep {reader}", *readers(place, field.scratch / "disks")[reader][0], limits=limits)
        if mounted:
            subprocess.run(["mount", "-o", "remount,rw,size=100m", str(place)], check=True)
        field.finish(place)
    field.tally.tried += 1
    assert field.tally.is_clean, field.tally


def forbid_writing(field: Field, place: Path):
    """Put a run without its last rows onto the disk, and let nobody write there."""
    shutil.copytree(field.calm / "default", place / "default")
    for path in place.glob("default/*/completions.jsonl"):
        path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:2]))
    subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)


def test_many_cells_with_few_open_files(field):
    axes = "grid.local_window=[" + ",".join(str(n) for n in range(16, 16 + (40 if field.long else 6))) + "]"
    more = ("grid.keep_ratio=[0.2,0.3,0.4,0.5]", "benchmark.limit=1", "run_name=many", "decoding.max_new_tokens=8")
    many = field.sweep(field.scratch / "few", axes, *more)
    field.run("kvsweep", *many, codes=[0], limits=limit(resource.RLIMIT_NOFILE, 128))
    field.tally.tried += 1
    assert field.tally.is_clean, field.tally


def test_little_memory(field):
    for reader, (arguments, _, _) in readers(field.copy("memory"), field.scratch / "memories").items():
        field.run(f"kvsweep {reader}", *arguments, limits=limit_memory)
    low = field.scratch / "low"
    field.run("kvsweep", *field.sweep(low), limits=limit_memory)
    field.finish(low)
    field.tally.tried += len(READERS) + 1
    assert field.tally.is_clean, field.tally


# --- Tampering ----------------------------------------------------------------------------------------------

EXTREMES: tuple[Any, ...] = (
    0, -1, 1 << 31, 1 << 62, 1 << 70, 10**12, 1e300, -1e300, 0.5, True, None, "", "x", "${oc.env:HOME}", "\x00", "1",
    [], [10**12], [100, 10**12], {}, {"_target_": f"{MARK}.x"}, [[[]]],
)  # fmt: skip


def truncate(path: Path, dice: random.Random):
    os.truncate(path, dice.randrange(path.stat().st_size))


def flip(path: Path, dice: random.Random):
    data = bytearray(path.read_bytes())
    for _ in range(dice.choice((1, 1, 1, 8))):
        data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    path.write_bytes(data)


def swap(path: Path, dice: random.Random):
    if others := [other for other in path.parents[1].glob(f"*/{path.name}") if other != path]:
        other = dice.choice(others)
        data = path.read_bytes()
        path.write_bytes(other.read_bytes())
        other.write_bytes(data)


def double(path: Path, dice: random.Random):
    """The file's copy as another shard's, or as another cell's, or the whole cell under another name."""
    cells = [cell for cell in path.parents[1].glob("*/") if cell.name != "status"]
    places = [path.with_name(f"{path.stem}-1of2{path.suffix}"), dice.choice(cells) / f"{path.stem}-2of2{path.suffix}"]
    if dice.random() < 0.3:
        shutil.copytree(path.parent, path.parents[1] / f"copy-{dice.randrange(9)}")
    else:
        shutil.copy(path, dice.choice(places))


def another_value(path: Path, dice: random.Random):
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


def link(path: Path, dice: random.Random):
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


def pipe(path: Path, dice: random.Random):
    path.unlink()
    os.mkfifo(path)


# Another value twice, since values are of so many kinds.
TAMPER = (truncate, flip, swap, double, another_value, another_value, link, pipe)


def accepted(results: Path) -> list[tuple[str, str]]:
    """What the readers of a run take for its completions, grades, costs and problems, each with the cell's id."""
    found = []
    for cell in sorted(results.glob("default/*/cell.yaml")):
        with suppress(UserError, OSError):
            settings = StoredCell(cell.parent).settings
            found.append((cell.parent.name, json.dumps(settings, sort_keys=True, default=str)))
            rows: list[Any] = [*StoredCell(cell.parent).rows(Completion, on_bad=ignore)]
            rows += StoredCell(cell.parent).grades(on_bad=ignore).values()
            rows += read_rows(cell.parent / "problems.jsonl", Problem, on_bad=ignore)
            found += [(cell.parent.name, str(row)) for row in rows]
    return found


def test_tampering(seed, field, monkeypatch):
    """One file of a finished run is changed at random, and every command reads the run.

    Every row that a reader accepts must be a row of the run, in its cell. The report and the pictures of a text, which
    take seconds, are made of each tenth seed, and of all in the long form; the numbers below the report are read every
    time.
    """
    victim, module, dice = field.scratch / "victim", field.scratch / f"{MARK}.py", random.Random(seed)
    module.write_text(f"open({str(field.scratch / MARK)!r}, 'w')\n")
    monkeypatch.syspath_prepend(field.scratch)
    results = field.copy("tampered")
    victim.write_text("mine")
    cells = [path.parent for path in sorted(results.glob("default/*/DONE"))]
    paths = [path for path in (dice.choice(cells) / name for name in STORED) if path.is_file()]
    path = dice.choice([*paths, *results.glob("default/status/*.json")])
    kind = dice.choice(TAMPER)
    kind(path, dice)
    field.tally.changed += sum((Counter(accepted(results)) - Counter(accepted(field.calm))).values())
    plan = readers(results, field.scratch / "drawn")
    plan["trace"] = ([path.parent, "--out", field.scratch / "drawn"], path.parent, ())
    whole = field.long or seed % 10 == 0
    for reader in READERS[:-1] if whole else ("grade", "status", "compare", "export"):
        field.run(f"kvsweep {reader}", *plan[reader][0], codes=(0, 1, 2, 3))
    if whole:
        field.run("kvsweep", *field.sweep(results), codes=(0, 1, 2, 3))
    field.tally.changed += victim.read_text() != "mine"
    field.tally.code_run += (field.scratch / MARK).exists()
    field.tally.tried += 1
    assert field.tally.is_clean, (field.tally, kind.__name__, path)
