"""The page of one completion that shades the evicted tokens of its text."""

from itertools import groupby

import numpy as np

from kvsweep.analysis.pictures.kept import Kept
from kvsweep.analysis.report.rendering import render, script_json


def kept_html(kept: Kept, *, title: str, rows: bool = False) -> str:
    """Write a page with the whole text, evicted tokens shaded by when they went; with `rows` once more per eviction."""
    sections = [("The whole text", len(kept.steps) - 1, True)]
    for number, held in enumerate(kept.held if rows else ()):
        live, written = round(float(np.nansum(held)) / 100), int((~np.isnan(held)).sum())
        sections.append((f"After eviction {number + 1}: {live} of {written} tokens held", number, False))
    data = {
        "text": "".join(kept.pieces),
        "lengths": [len(piece.encode("utf-16-le")) // 2 for piece in kept.pieces],
        "prompt": 0,
        "question": kept.prompt,
        "steps": list(kept.steps),
        "held": [_runs(held[~np.isnan(held)]) for held in kept.held],
    }
    return render("kept.html.jinja", title=title, sections=sections, data=script_json(data))


def _runs(percents: np.ndarray) -> list[int]:
    return [number for percent, run in groupby(percents.tolist()) for number in (int(percent), len(list(run)))]
