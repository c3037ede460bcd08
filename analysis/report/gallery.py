"""The figures of a report, saved and captioned."""

import base64
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from matplotlib.figure import Figure

from kvsweep.analysis import format
from kvsweep.analysis.format import PAGE_WIDTH, Look
from kvsweep.analysis.numbers import reference, seconds
from kvsweep.analysis.numbers.findings import MAX_COMPARED, Findings
from kvsweep.analysis.numbers.grids import PolicyGrid
from kvsweep.analysis.numbers.metrics import model_title
from kvsweep.analysis.pictures import cost, heatmap, noise, policies, tradeoffs
from kvsweep.analysis.pictures.style import save_figure
from kvsweep.analysis.report.fidelity import drawn_fidelity
from kvsweep.base.escape import file_name

# A figure, its caption and the parts of its file's name.
Drawn = tuple[Figure | None, str, tuple[str, ...]]


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A figure on the page: `address` holds its SVG as a data URL, `width` is its share of a page's."""

    caption: str
    name: str
    address: str
    width: float = 1.0


def picture(figure: Figure, folder: Path, caption: str, *name: str) -> Picture:
    stem = file_name(*name)
    svg = save_figure(figure, folder, stem)["svg"].read_bytes()
    address = f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}"
    return Picture(caption=caption, name=stem, address=address, width=min(1.0, figure.get_figwidth() / PAGE_WIDTH))


def draw_all(found: Findings, folder: Path, look: Look) -> list[Picture]:
    return [picture(figure, folder, caption, *name) for figure, caption, name in _of_run(found, look) if figure]


def _of_grid(found: Findings, grid: PolicyGrid, model: str, look: Look) -> Iterator[Drawn]:
    title, metrics = grid.title, found.metrics
    name = (model, grid.policy, "" if format.missing(grid.budget) else format.number(grid.budget), grid.variant)
    yield heatmap.grid_figure(grid, model, metrics, look), title, ("heatmap", *name)
    published = reference.published_grid(grid, model)
    if published is not None and len(found.run.completions):
        figure = heatmap.published_figure(grid, model, metrics, published, look)
        yield figure, f"{title}, beside the published scores", ("published", *name)
    if grid.cells.loc[grid.cells["model"] == model, "diff_to_full"].notna().any():
        figure = heatmap.grid_figure(grid, model, metrics, replace(look, scale="diff_from_full"))
        yield figure, f"{title}, difference to the full cache in points", ("difference", *name)
    if len(grid.benchmarks) > 1:
        yield heatmap.mean_figure(grid, model, metrics, look), f"{title}, mean", ("mean", *name)


def _of_model(found: Findings, model: str, look: Look) -> Iterator[Drawn]:
    metrics = found.metrics
    for grid in found.grids:
        if model in grid.models:
            yield from _of_grid(found, grid, model, look)
    yield tradeoffs.budget_figure(metrics, model, look), "Pass@1 against budget", ("budget", model)
    for setting in found.settings[:MAX_COMPARED]:
        if model in setting.models:
            figure = policies.policy_bars_figure(setting, model, metrics, look)
            yield figure, f"Pass@1 per policy at {setting.title}", ("policies", model, setting.file_part)
    yield tradeoffs.accuracy_memory_figure(metrics, model, look), "Pass@1 against memory", ("memory", model)
    yield tradeoffs.bytes_figure(metrics, model, look), "Pass@1 against bytes", ("bytes", model)
    yield cost.cost_figure(found.run, metrics, model, look), "KV memory and FLOPs", ("cost", model)
    speed = tradeoffs.speed_figure(seconds.timings(found.run), metrics, model, look)
    yield speed, "Pass@1 against speed", ("speed", model)


def _of_run(found: Findings, look: Look) -> Iterator[Drawn]:
    for model in found.models:
        title = model_title(found.metrics, model)
        yield from ((figure, f"{title}, {caption}", name) for figure, caption, name in _of_model(found, model, look))
    for name, title, figure in drawn_fidelity(found.run, look):
        yield figure, f"{title}, KL of replayed texts", ("fidelity", name)
    if floors := [verdict for verdict in found.verdicts if verdict.floor is not None]:
        caption = "Each grid's scores in ascending order, and which are statistically tied with the best"
        yield noise.noise_figure(floors, look), caption, ("noise",)
