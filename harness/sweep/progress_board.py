"""The board of a running sweep: the command that started the tasks draws their progress."""

import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
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


class Board:
    """Shows on stderr, while the block runs, what status files say of the jobs' cells. A context manager.

    A terminal has a bar and a table, which are redrawn; a file or a pipe gets one line per minute.
    """

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._cells: dict[Path, set[str]] = defaultdict(set)
        for job in jobs:
            self._cells[job.run_directory].update(cell.cell_id for cell in job.cells)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._is_shown = threading.Event()

    def __enter__(self) -> None:
        self._thread.start()
        # Later output must go above the board.
        self._is_shown.wait()

    def __exit__(self, *exception: object) -> None:
        self._end.set()
        self._thread.join()

    def _follow(self) -> None:
        """Show the board in this thread; an error of the board does not reach the sweep."""
        try:
            # If memory runs out, the board may end; the sweep reports its own errors. A terminal may close meanwhile.
            with suppress(MemoryError, OSError):
                self._show()
        finally:
            self._is_shown.set()  # also after an error, so that the sweep does not wait

    def _show(self) -> None:
        """Print a line per minute, or redraw the bar and the table on a terminal, until the block ends."""
        if not sys.stderr.isatty():
            self._is_shown.set()
            while not self._end.wait(LINE_S):
                for sweep in self._sweeps():
                    print(f"{time.strftime('%H:%M:%S')} {sentence(sweep)}", file=sys.stderr, flush=True)
            return
        with _terminal() as file, Live(console=VisibleConsole(file=file), auto_refresh=False) as live:
            guard_streams()  # around the streams that `Live` has put in place of stdout and stderr
            self._is_shown.set()
            pause = LOOK_S
            while True:
                has_ended = self._end.wait(pause)
                start = time.monotonic()
                live.update(Group(*map(render, self._sweeps())), refresh=True)
                if has_ended:
                    return
                # Reading many cells takes seconds of the decoding process.
                pause = max(LOOK_S, (time.monotonic() - start) / SHARE)

    def _sweeps(self) -> Iterator[SweepStatus]:
        for directory, cells in self._cells.items():
            with suppress(UserError, OSError):  # nothing to read yet
                yield read_sweep(directory, cells)


def _terminal() -> TextIO:
    """Open the terminal behind stderr, even while a launcher redirects stderr."""
    return os.fdopen(os.dup(2), "w")
