"""`kvsweep-report DIR`: DIR/report with cells.csv, the tables, the pictures, and one HTML file that holds all of it.

pandas and the plotting libraries load slowly, so the functions that need them import them; `--help` does without.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import get_args

from kvsweep.analysis.format import DEFAULT_LOOK, PAGE_WIDTH, Look, Scale, csv_text
from kvsweep.base.command_line import one_sentence
from kvsweep.base.errors import UserError
from kvsweep.base.files import make_folder, replace_text
from kvsweep.base.records import DONE_FILE

REPORT_FOLDER = "report"

# The page shows at most so many completions: of each cell the same number.
MAX_COMPLETIONS = 200_000

# The default of --watch.
WATCH_SECONDS = 30.0


def build_report(
    directory: Path | str,
    *,
    folder: Path | None = None,
    look: Look = DEFAULT_LOOK,
    completions: int = MAX_COMPLETIONS,
    margin: float | None = None,
    reload: float | None = None,
    tell: Callable[[str], object] | None = None,
) -> Path:
    """Write cells.csv, tables.md, tables.tex, the figures as PNG, SVG and PDF, and report.html; return its path.

    Args:
        directory: a run directory, finished or not, or a CSV of grids of which only the scores are known.
        folder: another place for the report than DIR/report, or of a CSV than <name>_report.
        look: how the figures are drawn; the difference to the full cache is drawn whatever the scale.
        completions: the most that the page shows one by one; with 0 the page is a few megabytes, whatever the run.
        margin: the loss of accuracy, a fraction, that a setting which holds stays below; None takes the run's own.
        reload: seconds after which an open page of a running sweep loads itself again; None for never.
        tell: gets the best setting of each model and benchmark as a table in plain text.
    """
    from kvsweep.analysis.load import load_run
    from kvsweep.analysis.numbers.findings import analyse, analyse_scores
    from kvsweep.analysis.report import drilldown, gallery, page, tables

    directory = Path(directory)
    if directory.is_file():
        found, own = analyse_scores(directory), Path(f"{directory.stem}_report").absolute()
    else:
        found, own = analyse(load_run(directory), margin), directory.resolve() / REPORT_FOLDER
    # The user may name a link; in a run's directory nothing is written through one.
    folder = make_folder(own if folder is None else folder.resolve())
    replace_text(folder / "cells.csv", csv_text(found.metrics))
    replace_text(folder / "tables.md", tables.markdown(found.metrics))
    replace_text(folder / "tables.tex", tables.latex(found.metrics))
    pictures = gallery.draw_all(found, folder, look)
    embedded, files = drilldown.drill_data(found.run, completions, folder)
    path = folder / "report.html"
    replace_text(path, page.run_page(found, pictures, embedded, files, reload))
    if tell and (verdicts := tables.headline_text(found.metrics)):
        tell(verdicts)
    return path


def watch(directory: Path, seconds: float, make: Callable[[], Path]) -> None:
    """Make the report, and again every so many seconds if rows have come, until the sweep neither runs nor waits."""
    from kvsweep.analysis.load import is_live

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
    add("--columns", metavar="N", type=int, help="heatmaps in a row (default: as many as fit)")
    wide = "width of the figures, whose text keeps its size (default: %(default).2f, which is 18 cm)"
    add("--width", metavar="INCHES", type=float, default=PAGE_WIDTH, help=wide)
    colours = "colours of the scores: a colour map of matplotlib (default: YlGnBu, safe for colour-blind readers)"
    add("--map", metavar="NAME", help=colours)
    loss = "a setting holds if it loses less than so many points (default: the run's report.margin, else 5)"
    add("--margin", metavar="POINTS", type=float, help=loss)
    again = "while the sweep runs, make the page again every so many seconds if rows have come (default: %(const)g)"
    add("--watch", metavar="SECONDS", type=float, nargs="?", const=WATCH_SECONDS, help=again)
    options = parser.parse_args(arguments)
    if options.watch is not None and not 1 <= options.watch <= 86_400:
        raise UserError(f"--watch={options.watch:g} is out of range: give 1 to 86400 seconds.")
    if options.margin is not None and not 0 < options.margin < 100:
        raise UserError(f"--margin={options.margin:g} is out of range: give points of accuracy between 0 and 100.")
    if options.completions < 0:
        raise UserError(f"--completions={options.completions} is out of range: give 0, for a small page, or more.")
    how = {"look": _chosen_look(options), "completions": options.completions, "tell": print}
    how |= {"margin": None if options.margin is None else options.margin / 100, "reload": options.watch}
    make = partial(build_report, options.directory, folder=options.output, **how)
    if options.watch is None or options.directory.is_file():
        print(make())
    else:
        watch(options.directory, options.watch, make)


def _chosen_look(options: argparse.Namespace) -> Look:
    if not 3 <= options.width <= 60:
        raise UserError(f"--width={options.width:g} is out of range: give 3 to 60 inches.")
    if options.directory.is_file() and (options.interval or options.scale == "diff_from_full"):
        raise UserError("a CSV of scores has no intervals and no full cache: leave out --interval and diff_from_full.")
    if options.columns is not None and options.columns < 1:
        raise UserError(f"--columns={options.columns} is out of range: give 1 or more heatmaps in a row.")
    if options.map is not None:
        from kvsweep.analysis.pictures.style import check_map

        check_map(options.map)
    names = ("width", "columns", "scale", "interval", "map")
    return Look(**{name: getattr(options, name) for name in names})


if __name__ == "__main__":
    main()
