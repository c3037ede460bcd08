"""`kvsweep-report DIR`: DIR/report with cells.csv, the tables, the pictures, and one HTML file that holds all of it.

pandas and the plotting libraries load slowly, so the functions that need them import them; `--help` does without.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import get_args

from analysis.command_line import one_sentence
from analysis.records import DONE_FILE, UserError, replace_text
from analysis.safe import csv_cell
from analysis.words import Scale

REPORT_FOLDER = "report"

# The page shows at most so many completions: of each cell the same number, those of the first draws.
MAX_COMPLETIONS = 200_000

# The default of --watch.
WATCH_SECONDS = 30.0


def build_report(
    directory: Path | str,
    *,
    folder: Path | None = None,
    scale: Scale = "own",
    interval: bool = False,
    completions: int = MAX_COMPLETIONS,
    margin: float | None = None,
    reload: float | None = None,
) -> Path:
    """Write the report of a run directory, finished or not, to DIR/report.

    Writes cells.csv (one row per cell, see results/README.md), tables.md and tables.tex, each figure as PNG, SVG and
    PDF, and report.html.

    Args:
        directory, folder: the run directory, and another place for the report than DIR/report.
        scale: the heatmaps' colour scale, see `Scale`; the difference to the full cache is always drawn beside it.
        interval: write the 95% interval under each value of the heatmaps.
        completions: the most that the page shows one by one; with 0 the page is a few megabytes, whatever the run.
        margin: the loss of accuracy, a fraction, that a setting which holds stays below; None takes the run's own.
        reload: seconds after which an open page of a running sweep loads itself again; None for never.

    Returns:
        The path of report.html.

    Raises:
        UserError: the directory is missing or holds no cell.
    """
    from analysis.load import load_run
    from analysis.numbers.findings import analyse
    from analysis.report.drilldown import drill_data
    from analysis.report.gallery import draw_all
    from analysis.report.page import run_page
    from analysis.report.tables import latex, markdown

    found = analyse(load_run(directory), margin)
    folder = folder or found.run.directory / REPORT_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    replace_text(folder / "cells.csv", found.metrics.map(csv_cell).to_csv(index=False))
    replace_text(folder / "tables.md", markdown(found.metrics))
    replace_text(folder / "tables.tex", latex(found.metrics))
    pictures = draw_all(found, folder, scale=scale, interval=interval)
    embedded, files = drill_data(found.run, completions, folder)
    page = folder / "report.html"
    replace_text(page, run_page(found, pictures, embedded, files, reload))
    return page


def build_summary_report(path: Path, folder: Path) -> Path:
    """Write the report of grids of which only the scores are known (`verdict.read_summary`): figure, verdicts, page."""
    from analysis.numbers.verdict import read_summary, summary_verdicts
    from analysis.pictures.noise import noise_figure
    from analysis.report.gallery import picture
    from analysis.report.page import summary_page

    verdicts = summary_verdicts(read_summary(path))
    folder.mkdir(parents=True, exist_ok=True)
    caption = "The scores in ascending order, and which are statistically tied with the best"
    noise = picture(noise_figure(verdicts), folder, caption, "noise")
    page = folder / "report.html"
    replace_text(page, summary_page(path.stem, verdicts, [noise]))
    return page


def watch(directory: Path, seconds: float, make: Callable[[], Path]) -> None:
    """Make the report, and again every so many seconds if rows have come, until the sweep neither runs nor waits."""
    from analysis.load import is_live

    seen = None
    while True:
        # The state comes first: rows that come after it are those of a later look.
        live = is_live(directory)
        rows = [*directory.glob("*/*.jsonl"), *directory.glob(f"*/{DONE_FILE}")]
        found = live, {path: path.stat().st_size for path in rows}
        if found != seen:
            print(make(), flush=True)
            seen = found
        if not live:
            return
        time.sleep(seconds)


@one_sentence("kvsweep-report")
def main(arguments: Sequence[str] | None = None) -> None:
    """The console script `kvsweep-report`."""
    parser = argparse.ArgumentParser(
        prog="kvsweep-report",
        description="Numbers (CSV), pictures (PNG, SVG, PDF) and a self-contained page under DIR/report.",
    )
    add = parser.add_argument
    run = "run directory: <results_dir>/<run_name>; or a CSV of scores alone (results/reference/dynts_heatmaps.csv)"
    add("directory", metavar="DIR", type=Path, help=run)
    add("--output", metavar="DIR", type=Path, help="the report's folder (default: DIR/report; a CSV's: <name>_report)")
    shown = "show at most so many completions one by one (default: %(default)s; 0 makes a small page)"
    add("--completions", metavar="N", type=int, default=MAX_COMPLETIONS, help=shown)
    add("--scale", choices=get_args(Scale), default="own", help="colours of the heatmaps (default: each panel's own)")
    add("--interval", action="store_true", help="the 95%% interval under each value of the heatmaps")
    loss = "a setting holds if it loses less than so many points (default: the run's report.margin, else 5)"
    add("--margin", metavar="POINTS", type=float, help=loss)
    again = "while the sweep runs, make the page again every so many seconds if rows have come (default: %(const)g)"
    add("--watch", metavar="SECONDS", type=float, nargs="?", const=WATCH_SECONDS, help=again)
    options = parser.parse_args(arguments)
    if options.watch is not None and not 1 <= options.watch <= 86_400:
        raise UserError(f"--watch={options.watch:g} is out of range: give 1 to 86400 seconds.")
    if options.margin is not None and not 0 < options.margin < 100:
        raise UserError(f"--margin={options.margin:g} is out of range: give points of accuracy between 0 and 100.")
    path = options.directory
    if path.is_file():
        print(build_summary_report(path, options.output or Path(f"{path.stem}_report")))
    else:
        how = {"scale": options.scale, "interval": options.interval, "completions": max(0, options.completions)}
        how["margin"] = None if options.margin is None else options.margin / 100
        make = partial(build_report, path, folder=options.output, reload=options.watch, **how)
        if options.watch is None:
            print(make())
        else:
            watch(path, options.watch, make)


if __name__ == "__main__":
    main()
