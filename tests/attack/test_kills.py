"""Commands that are killed at random moments, or that work beside each other: no row is lost, doubled or changed."""

import re
import signal
import time
from pathlib import Path

import pytest

from kvsweep.messages.command_line import LOCKED
from tests.attack.field import READERS, Command, Field, readers

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGSTOP)
pytestmark = pytest.mark.slow


def strike(command: Command, number: signal.Signals):
    """Send the signal and see the command's end; a stopped one goes on for a moment and is killed."""
    command.send(number)
    if number == signal.SIGSTOP:
        time.sleep(0.3)
        command.send(signal.SIGCONT)
        command.watch(0.5)
        command.send(signal.SIGKILL)
    command.end()


def test_kills_of_sweeps(field, lives):
    """Two shards of a running sweep are killed again and again, start again at once, and then both end.

    Of four processes one starts an interpreter of its own, so that start-up is struck too.
    """
    results, shards = field.scratch / "storm", ("shard=1/2", "shard=2/2")

    def start(shard):
        return field.start("kvsweep", *field.sweep(results, shard), fresh=field.dice.random() < 0.25)

    running = {shard: start(shard) for shard in shards}
    while field.tally.tried < (90 if field.long else 4):
        shard = field.dice.choice(shards)
        if not running[shard].watch(field.dice.uniform(0, lives[running[shard].is_fresh])):
            strike(running[shard], SIGNALS[field.tally.tried % len(SIGNALS)])
            field.tally.tried += 1
        else:
            lose_rows(field, results, shard)
        field.tally.add(running[shard].tally())
        running[shard] = start(shard)
    for command in running.values():
        command.send(signal.SIGKILL)
        command.watch()
    for shard in shards:
        field.run("kvsweep", *field.sweep(results, shard), codes=[0])
    field.compare(results)
    assert field.tally.is_clean, field.tally


def lose_rows(field: Field, results: Path, shard: str):
    """Cut rows from the files of a shard that is done, so that there is work again."""
    for path in results.glob(f"default/*/completions-{shard[6]}of2.jsonl"):
        path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[: field.dice.randrange(4)]))


@pytest.mark.parametrize("reader", READERS)
def test_kills_of_other_commands(reader, field, lives):
    """A command is killed at random moments; run once more, it writes what an undisturbed one writes."""
    script, place = f"kvsweep {reader}", READERS.index(reader)
    arguments, written, suffixes = readers(field.copy("killed"), field.scratch / "struck")[reader]
    calm, expected, _ = readers(field.copy("read"), field.scratch / "peace")[reader]
    began = time.monotonic()
    peace = field.start(script, *calm).end()
    life = time.monotonic() - began
    for kill in range(16 if field.long else 1):
        fresh = field.dice.random() < 0.25
        command = field.start(script, *arguments, fresh=fresh)
        if not command.watch(field.dice.uniform(0, life + fresh * (lives[True] - lives[False]))):
            strike(command, SIGNALS[(kill + place) % len(SIGNALS)])
        field.tally.add(command.tally())
        field.tally.tried += 1
    field.run(script, *arguments, codes=[peace.code or 0])
    calm_files, files = plain_files(expected, *suffixes), plain_files(written, *suffixes)
    changed = [name for name in calm_files if files.get(name) != calm_files[name]]
    field.tally.changed += len(changed)
    assert field.tally.is_clean, (field.tally, changed)


def plain_files(folder: Path, *suffixes: str) -> dict[str, bytes]:
    """The files with these suffixes, by their place in the folder, without names and times that differ by the run."""
    differs = re.compile(rb"killed|read|struck|peace|\"seconds\": [\d.]+|\d{4}-\d\d-\d\dT[\d:.+]+")
    paths = [path for path in folder.rglob("*") if path.suffix in suffixes and not path.name.startswith(".")]
    return {str(path.relative_to(folder)): differs.sub(b"", path.read_bytes()) for path in paths}


def test_ctrl_c_of_the_local_launcher(field, lives):
    """The terminal sends Ctrl-C to every process in front, while launcher=local works; the sweep goes on later."""
    results = field.scratch / "local"
    sweep = field.sweep(results, "launcher=local", "launcher.shards=2")
    for _ in range(8 if field.long else 1):
        command = field.start("kvsweep", *sweep, fresh=True)
        command.watch(field.dice.uniform(0.5, lives[True]))
        command.press(b"\x03")
        command.end()
        field.tally.tried += 1
        field.tally.add(command.tally())
        field.tally.changed += command.code not in (0, 130, -signal.SIGINT) and not command.is_interrupted_at_start
    end = time.monotonic() + 120
    for shard in ("shard=1/2", "shard=2/2"):
        ended = field.run("kvsweep", *field.sweep(results, shard), codes=[0, LOCKED])
        while ended.code == LOCKED and time.monotonic() < end:  # by a worker that was cancelled
            time.sleep(0.2)
            ended = field.run("kvsweep", *field.sweep(results, shard), codes=[0, LOCKED])
        field.tally.lost += ended.code == LOCKED
    field.compare(results)
    assert field.tally.is_clean, (field.tally, command.said)


def test_two_writers_of_one_cell(field):
    results = field.scratch / "rivals"
    pair = [field.start("kvsweep", *field.sweep(results)) for _ in range(2)]
    for command in pair:
        field.tally.add(command.end().tally())
        field.tally.tried += 1
    field.finish(results)
    assert {command.code for command in pair} <= {0, 3}
    assert field.tally.is_clean, field.tally


def test_shards_of_different_counts_one_after_the_other(field):
    results = field.scratch / "counts"
    for shard in ("1/3", "2/2", "1/1"):
        field.run("kvsweep", *field.sweep(results, f"shard={shard}"))
        field.tally.tried += 1
    field.compare(results)
    assert field.tally.is_clean, field.tally
