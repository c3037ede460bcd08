"""`kvsweep report DIR`: write numbers, card.json, tables, pictures and one HTML file with all of them to DIR/report.

pandas and the plotting libraries load slowly, so functions import them; `--help` needs none of them.
"""

import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from kvsweep.analysis.notation import DEFAULT_LOOK, Look, csv_text
from kvsweep.messages.errors import UserError
from kvsweep.run_files.row_types import DONE_FILE
from kvsweep.run_files.safe_files import make_folder, replace_text

REPORT_FOLDER = "report"

# The page shows at most this many completions, the same number of each cell.
MAX_COMPLETIONS = 200_000
_NOTES = 20  # that the command prints; the page has all
_PAIRS = 8  # tables of policies whose sentence the command prints


def build_report(
    directory: Path | str,
    *,
    folder: Path | None = None,
    look: Look = DEFAULT_LOOK,
    completions: int = MAX_COMPLETIONS,
    margin: float | None = None,
    order: Sequence[str] = (),
    reload: float | None = None,
    tell: Callable[[str], object] | None = None,
) -> Path:
    """Write cells.csv, card.json, tables.md, tables.tex, figures as PNG and SVG, and report.html; return its path.

    Args:
        directory: a run directory, finished or not, or a CSV of grids of which only the scores are known.
        folder: another place for the report than DIR/report, or of a CSV than <name>_report.
        look: how the figures are drawn; the difference to the full cache is drawn whatever the scale.
        completions: the most that the page shows one by one; with 0 the page is a few megabytes, whatever the run.
        margin: the loss of accuracy, a fraction, that a setting which holds stays below; None takes the run's own.
        order: the benchmarks that come first, by name or title.
        reload: seconds after which an open page of a running sweep loads itself again; None for never.
        tell: gets what was skipped or looks wrong, and the best setting of each model and benchmark, in plain text.
    """
    from kvsweep.analysis.load import load_run
    from kvsweep.analysis.report import card, drilldown, gallery, page, tables
    from kvsweep.analysis.statistics.sentences import analyse, analyse_scores

    directory = Path(directory)
    if directory.is_file():
        findings = analyse_scores(directory, order)
        usual_folder = Path(f"{directory.stem}_report").absolute()
    else:
        findings = analyse(load_run(directory), margin, order)
        usual_folder = directory.resolve() / REPORT_FOLDER
    # The user may name a link; in a run's directory nothing is written through a link.
    folder = make_folder(usual_folder if folder is None else folder.resolve())
    replace_text(folder / "cells.csv", csv_text(findings.metrics))
    replace_text(folder / "tables.md", tables.markdown(findings.metrics))
    replace_text(folder / "tables.tex", tables.latex(findings.metrics))
    pictures = gallery.draw_all(findings, folder, look)
    embedded, files = drilldown.drill_data(findings.run, completions, folder)
    replace_text(folder / "card.json", json.dumps(card.card(findings), indent=2) + "\n")
    path = folder / "report.html"
    replace_text(path, page.run_page(findings, pictures, embedded, files, reload))
    if tell:
        notes = [*dict.fromkeys(findings.run.notices)]
        for note in notes[:_NOTES]:
            tell(f"note: {note}")
        if len(notes) > _NOTES:
            tell(f"note: {len(notes) - _NOTES} more notes are on the page.")
        headline = tables.headline_text(findings.metrics)
        if headline:
            tell(headline)
        for pairs in findings.pairs[:_PAIRS]:
            tell(f"{pairs.title}: {pairs.line}")
    return path


def follow(directory: Path, seconds: float, make: Callable[[], Path]) -> None:
    """Make the report, and again every `seconds` if rows have come, until the sweep neither runs nor waits."""
    from kvsweep.run_files.task_status import read_tasks

    reported = None
    while True:
        # Read the state first: rows that come later belong to the next round.
        live = any(task.state in ("running", "queued") for task in read_tasks(directory))
        files = [*directory.glob("*/*.jsonl"), *directory.glob(f"*/{DONE_FILE}")]
        state = live, {path: path.stat().st_size for path in files}
        if state != reported:
            print(make(), flush=True)
            reported = state
        if not live:
            return
        time.sleep(seconds)


def report(
    directory: Path,
    output: Path | None,
    completions: int,
    margin: float | None,
    watch: float | None,
    width: float | None,
    order: str,
    **look: Any,
) -> None:
    """Make the report of a run or of a CSV of scores; `watch` repeats it every so many seconds while the sweep runs.

    `margin` is in points, `order` has names with commas between, and `look` the fields of `Look` but width and row.
    """
    is_table = directory.is_file()
    if is_table and (look["interval"] or look["scale"] == "diff_from_full"):
        raise UserError("a CSV of scores has no intervals and no full cache: leave out --interval and diff_from_full.")
    if look["map"] is not None:
        from kvsweep.analysis.figures.style import check_map

        check_map(look["map"])
    make = partial(
        build_report,
        directory,
        folder=output,
        # From points.
        margin=None if margin is None else margin / 100,
        # A width is that of a figure and of a row of heatmaps.
        look=Look(**look) if width is None else Look(width=width, row=width, **look),
        completions=completions,
        order=[name.strip() for name in order.split(",") if name.strip()],
        tell=print,
        reload=watch,
    )
    if watch is None or is_table:
        print(make())
    else:
        follow(directory, watch, make)
