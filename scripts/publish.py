"""Make results/published/<name> again from the finished run results/runs/<name>: cells, answers, some pictures.

    kvsweep -m experiment=demo_full launcher=local && python scripts/publish.py demo    # README's picture is of it
    kvsweep -m experiment=methods && python scripts/publish.py methods    # methods_pinned and methods_on_top likewise

Of the single completions the demo's page has `TEXTS` a cell, so that git can hold it. answers.csv.gz has all grades,
so that any two cells can be tested again. provenance.md says what ran on what.
"""

import argparse
import json
import shlex
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from PIL import Image

from kvsweep.analysis.load import load_run
from kvsweep.analysis.notation import PAGE_WIDTH, Look
from kvsweep.analysis.report.build import build_report
from kvsweep.analysis.statistics.metrics import graded_rows

PUBLISHED = Path(__file__).parents[1] / "results" / "published"
# Of each cell, beside the full cache's: enough to read why a setting loses, in a page that git can hold.
TEXTS = 2
# The runs whose page has another name.
RUNS = {"demo": "demo_full"}
# What is kept of each report beside cells.csv.
FILES = {
    "demo": ["report.html", "heatmap_toy_qwen_dynts_128.png", "speed_toy_qwen.png"],
    "smol": ["heatmap_*.png"],
    "methods": ["memory_toy_qwen.png"],
    "methods_on_top": ["policies_toy_qwen_ratio0.3_window48_budget128.png"],
    "bytes_smol": ["bytes_*.png"],
    **dict.fromkeys(("methods_pinned", "hybrid", "servers", "servers_own", "servers_rotation", "labels"), ()),
    **dict.fromkeys(("methods_smol", "regimes", "equal_bytes", "equal_bytes_smol"), ()),
}


def main() -> None:
    args = parse_args()
    for name in args.names:
        target = args.published / name
        target.mkdir(parents=True, exist_ok=True)
        publish(args.runs / RUNS.get(name, name), target, FILES[name])
        print(target)


def publish(run: Path, target: Path, kept: Sequence[str]) -> None:
    """Write the files of a run's report that git holds."""
    with tempfile.TemporaryDirectory() as folder:
        cells = len(list(run.glob("*/cell.yaml")))
        look = Look(width=PAGE_WIDTH)  # four panels in a row
        page = build_report(run, folder=Path(folder), completions=TEXTS * cells, look=look)
        wanted = [page.with_name("cells.csv"), *(path for name in kept for path in page.parent.glob(name))]
        for path in wanted:
            shutil.copy(path, target / path.name)
            if path.suffix == ".png":
                with_palette(target / path.name)
    write_answers(graded_rows(load_run(run)), target / "answers.csv.gz")
    (target / "provenance.md").write_text(provenance(run))


def with_palette(picture: Path) -> None:
    """Store a picture in 256 colours, a third of its bytes; its letters and lines look as before."""
    image = Image.open(picture).convert("RGB")
    image.quantize(256, dither=Image.Dither.NONE).save(picture, optimize=True)


def write_answers(graded: pd.DataFrame, path: Path) -> None:
    """Write a row per cell and problem, with a letter per draw: 1 right, 0 wrong, - without a grade."""
    keys = [graded[name].astype("str") for name in ("cell_id", "problem_id")]
    letters = graded["correct"].map({1: "1", 0: "0"}).groupby([*keys, graded["draw"]]).first().unstack().fillna("-")
    table = letters.sum(axis=1).rename("grades").reset_index()
    table.to_csv(path, index=False, compression={"method": "gzip", "compresslevel": 9, "mtime": 0})


def provenance(run: Path) -> str:
    """The commands, code, packages and machines of a run, each named once."""
    records = [json.loads(path.read_text()) for path in sorted(run.glob("*/provenance*.json"))]
    passes = [one for record in records for one in record["decoding_passes"]]
    parts = {
        "Commands": {shlex.join([Path(s["command"][0]).name, *s["command"][1:]]) for s in passes},
        "Code": {f"{s['code']['git_revision']}{', changed' * bool(s['code']['git_dirty'])}" for s in passes},
        "Packages": {pairs(s["code"]["packages"]) for s in passes},
        "Hardware": {
            pairs({k: s["hardware"][k] for k in ("processor", "cores", "gpus")}) if "hardware" in s else "the servers'"
            for s in passes
        },
        "Started": {min(s["started"] for s in passes)},
    }
    lines = [f"{len(records)} cells of {run.name}.\n"]
    lines += [f"- {name}: {'; '.join(f'`{value}`' for value in sorted(values))}" for name, values in parts.items()]
    return "\n".join(lines) + "\n"


def pairs(values: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value or 'none'}" for key, value in values.items())


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="+", choices=sorted(FILES))
    parser.add_argument("--runs", type=Path, default=Path("results/runs"), help="folder of the finished runs")
    parser.add_argument("--published", type=Path, default=PUBLISHED, help="where the folders go")
    return parser.parse_args()


if __name__ == "__main__":
    main()
