"""Our Pass@1 beside the DynTS paper's: each heatmap with the span of chance, and its chosen cell, as a Markdown table.

    python scripts/study/paper_table.py results/runs/paper
    python scripts/study/paper_table.py RUN --stand-in toy_qwen=r1_qwen_7b toy_chain=aime24    # of a rehearsal

`chance` is how far the best and the worst of as many equal settings lie apart, in 95 of 100 runs; that of the
paper's grids follows from their scores alone. The paper's numbers are those of results/reference, with their doubts.
"""

import argparse
from pathlib import Path
from typing import Any

import pandas as pd

from kvsweep.analysis.load import load_run
from kvsweep.analysis.notation import MISSING, markdown, percent, percent_pm
from kvsweep.analysis.statistics.grids import GRID_FILE, REFERENCE, SCORES_FILE
from kvsweep.analysis.statistics.inference import NoiseFloor
from kvsweep.analysis.statistics.sentences import PanelVerdict, analyse, analyse_scores

GRID = ["keep_ratio", "local_window"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--stand-in", nargs="*", default=[], metavar="NAME=NAME", help="a toy and what it stands for")
    options = parser.parse_args()
    stands_for = dict(word.split("=", 1) for word in options.stand_in)
    print(markdown(table(options.run, stands_for)))
    if stands_for:
        print(f"A rehearsal: {', '.join(f'{toy} stands for {real}' for toy, real in stands_for.items())}.")


def table(run: Path, stands_for: dict[str, str]) -> list[list[str]]:
    """A head and a row for each model and benchmark that has a heatmap of DynTS."""
    found, published = analyse(load_run(run)), analyse_scores(REFERENCE / GRID_FILE)
    chosen = pd.read_csv(REFERENCE / SCORES_FILE)
    theirs = {place(verdict): verdict for verdict in published.verdicts}
    head = ["model", "benchmark", "settings", "ours", "chance", "paper", "chance", "chosen cell", "ours", "paper"]
    rows = [head]
    for verdict in panels(found.verdicts):
        model, benchmark = (stands_for.get(name, name) for name in place(verdict))
        cells, other = verdict.cells, theirs.get((model, benchmark))
        best = chosen[(chosen["model"] == model) & (chosen["benchmark"] == benchmark) & (chosen["policy"] == "dynts")]
        rows.append(
            [
                *place(verdict),
                str(len(cells)),
                scores(cells["pass_at_1"]),
                span(verdict.floor),
                MISSING if other is None else scores(other.cells["pass_at_1"]),
                MISSING if other is None else span(other.floor),
                *at_chosen(found.metrics, place(verdict), best, exact=not stands_for),
            ]
        )
    return rows


def place(verdict: PanelVerdict) -> tuple[str, str]:
    first = verdict.cells.iloc[0]
    return str(first["model"]), str(first["benchmark"])


def panels(verdicts: list[PanelVerdict]) -> list[PanelVerdict]:
    """The largest grid of DynTS of each model and benchmark."""
    largest: dict[tuple[str, str], PanelVerdict] = {}
    for verdict in verdicts:
        if (verdict.cells["policy"] == "dynts").all() and verdict.cells[GRID].nunique().min() > 1:
            known = largest.setdefault(place(verdict), verdict)
            largest[place(verdict)] = max(known, verdict, key=lambda one: len(one.cells))
    return list(largest.values())


def scores(values: pd.Series) -> str:
    return f"{percent(values.mean())} ({percent(values.min())} to {percent(values.max())})"


def span(floor: NoiseFloor | None) -> str:
    """The range that equal settings have, from the 2.5% to the 97.5% quantile, and the grid's own."""
    if floor is None:
        return MISSING
    low, _, high = floor.expected_range
    return f"{percent(low)} to {percent(high)}, found {percent(floor.range)}"


def at_chosen(metrics: pd.DataFrame, where: tuple[str, str], best: pd.DataFrame, *, exact: bool) -> list[str]:
    """The cell that the paper chose; of a rehearsal, whose sizes are others, the cell with its keep ratio."""
    if best.empty:
        return [MISSING] * 3
    wanted: Any = best.iloc[0]
    cells = metrics[
        (metrics["model"] == where[0]) & (metrics["benchmark"] == where[1]) & (metrics["policy"] == "dynts")
    ]
    cells = cells[cells["keep_ratio"] == wanted["keep_ratio"]]
    if exact:
        cells = cells[(cells["local_window"] == wanted["local_window"]) & (cells["budget"] == wanted["budget"])]
    name = f"{wanted['keep_ratio']:g} / {wanted['local_window']:g}"
    ours = percent_pm(cells.iloc[0]["pass_at_1"], cells.iloc[0]["se"]) if len(cells) else MISSING
    return [name, ours, f"{wanted['pass_at_1']:.1f}"]


if __name__ == "__main__":
    main()
