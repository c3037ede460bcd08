"""The board of a running sweep: the command that started the tasks draws their progress."""

import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from rich.console import Group
from rich.live import Live

from kvsweep.harness.sweep.job import Job
from kvsweep.harness.sweep.status import SweepStatus, VisibleConsole, read_sweep, render, sentence
from kvsweep.messages.command_line import guard_streams
from kvsweep.messages.errors import UserError

LOOK_S = 2.0
# The most of a process's time that drawing may use.
SHARE = 0.05
# Seconds between two lines if no terminal shows the board.
LINE_S = 60.0


@contextmanager
def board(jobs: Sequence[Job]) -> Iterator[None]:
    """Show on stderr, while the block runs, what status files say of the jobs' cells.

    A terminal has a bar and a table, which are redrawn; a file or a pipe gets one line per minute. An error of the
    board does not reach the sweep.
    """
    cells = defaultdict[Path, set[str]](set)  # ids by the run's folder
    for job in jobs:
        cells[job.run_directory].update(cell.cell_id for cell in job.cells)
    ended = threading.Event()
    is_shown = threading.Event()

    def follow() -> None:
        try:
            # If memory runs out, the board may end; the sweep reports its own errors. A terminal may close meanwhile.
            with suppress(MemoryError, OSError):
                _show(cells, ended, is_shown)
        finally:
            is_shown.set()  # also after an error, so that the sweep does not wait

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    # Later output must go above the board.
    is_shown.wait()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _show(cells: Mapping[Path, set[str]], ended: threading.Event, is_shown: threading.Event) -> None:
    """Print a line per minute, or redraw the bar and the table on a terminal, until the block has ended."""
    if not sys.stderr.isatty():
        is_shown.set()
        while not ended.wait(LINE_S):
            for sweep in _sweeps(cells):
                print(f"{time.strftime('%H:%M:%S')} {sentence(sweep)}", file=sys.stderr, flush=True)
        return
    with _terminal() as file, Live(console=VisibleConsole(file=file), auto_refresh=False) as live:
        guard_streams()  # around the streams that `Live` has put in place of stdout and stderr
        is_shown.set()
        pause = LOOK_S
        while True:
            has_ended = ended.wait(pause)
            start = time.monotonic()
            live.update(Group(*map(render, _sweeps(cells))), refresh=True)
            if has_ended:
                return
            # Reading many cells takes seconds of the decoding process.
            pause = max(LOOK_S, (time.monotonic() - start) / SHARE)


def _sweeps(cells: Mapping[Path, set[str]]) -> Iterator[SweepStatus]:
    for directory, cell_ids in cells.items():
        with suppress(UserError, OSError):  # nothing to read yet
            yield read_sweep(directory, cell_ids)


def _terminal() -> TextIO:
    """Open the terminal behind stderr, even while a launcher redirects stderr."""
    return os.fdopen(os.dup(2), "w")
