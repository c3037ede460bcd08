"""Draw two published pictures again from their tables, in the style of all figures; their runs are gone.

    python scripts/study/stored_pictures.py

Panels whose numbers no table has are left out: the shares of importance, and KL by distance and by entropy.
"""

from pathlib import Path

import matplotlib
import pandas as pd
from matplotlib.figure import Figure

from kvsweep.analysis import notation
from kvsweep.analysis.figures import rankings, style
from kvsweep.analysis.figures.completion import retention_figure
from scripts.publish import with_palette

PUBLISHED = Path(__file__).parents[2] / "results" / "published"


@matplotlib.rc_context(style.STYLE)
def retention(table: Path) -> Figure:
    """The importance that policies hold at each eviction, and their Pass@1 against it."""
    curves = pd.read_csv(table.with_name(f"{table.stem}_curves.csv"))
    # No table has the shares of importance, whose panel is taken away.
    shares = pd.DataFrame({"tokens": [], "importance": []})
    drawn = retention_figure(curves, pd.read_csv(table), shares, "far_max", title="")
    drawn.legends[0].remove()
    drawn.axes[-1].remove()
    places = drawn.add_gridspec(1, 2)
    for axes, place in zip(drawn.axes, places, strict=True):
        axes.set_subplotspec(place)
    style.legend_below(drawn)
    return drawn


@matplotlib.rc_context(style.STYLE)
def replayed(table: Path) -> Figure:
    """The KL of each setting of one model and benchmark, smallest first."""
    rows = pd.read_csv(table).fillna({"question": ""})
    settings = [notation.setting(row, trigger=False) for row in rows.assign(variant="").itertuples()]
    size = f"trigger {rows['budget'].max():.0f}, {rows['texts'].max()} texts"
    named = rows.assign(setting=settings, benchmark_title=size).sort_values("kl")
    drawn = style.new_figure((notation.PAGE_WIDTH, 0.2 * len(named) + 0.6))
    rankings._kl_of_settings(drawn.subplots(), named, pd.Index(named["setting"]))
    style.legend_below(drawn)
    return drawn


def main() -> None:
    tables = {retention: "trace/retention_methods_far_max.csv", replayed: "replay/r1_smollm2.csv"}
    for draw, name in tables.items():
        table = PUBLISHED / name
        picture = table.with_suffix(".png")
        draw(table).savefig(picture, dpi=200)
        with_palette(picture)
        print(picture)


if __name__ == "__main__":
    main()
