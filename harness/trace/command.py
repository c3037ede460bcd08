"""The command `kvsweep trace`: pictures and numbers of one completion, or of a run's completions."""

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from kvsweep.harness.trace import inspected
from kvsweep.messages.errors import UserError
from kvsweep.messages.escape import file_name
from kvsweep.run_files.run_reader import stored_cells

LIVE = "live"


def trace(source: Path, **values: Any) -> None:
    """Draw the pictures of a completion or a run, and print their files; options as in `kvsweep trace --help`."""
    options = inspected.TraceOptions(source=str(source), **values)
    check(options)
    if options.show == "retention":
        folders = [cell.folder for cell in stored_cells(source)]
        if not folders:
            raise UserError(f"{source} holds no cells: name a run's directory, such as results/runs/demo.")
        from kvsweep.harness.trace.draw import draw_retention

        paths = draw_retention(options, folders)
    else:
        paths = draw_text(options)
    for path in paths:
        print(path)


def check(options: inspected.TraceOptions) -> None:
    """Refuse options that cannot be read, before anything is loaded."""
    # On no text, only to compile the expressions.
    inspected.paragraphs([], options.split or inspected.PARAGRAPHS)
    inspected.matches([], options.find or "")
    if options.steps:
        inspected.read_steps(options.steps)
    if options.map is not None:
        from kvsweep.analysis.figures.style import check_map

        check_map(options.map)
    if options.question is not None and options.source != LIVE:
        raise UserError(f"--question is for {LIVE} alone: give {LIVE} in place of {options.source}.")


def draw_text(options: inspected.TraceOptions) -> Iterator[Path]:
    """Draw the pictures of one completion; yield the files. Bad input is refused before the model is loaded."""
    path = Path(options.source)
    if options.source == LIVE:
        source = inspected.live(options.overrides, options.problem, options.draw, options.question)
    elif path.is_dir():
        source = inspected.of_cell(path, options.problem, options.draw, options.overrides)
    elif path.exists():
        source = inspected.of_file(path, options.problem, options.draw, options.overrides)
    else:
        raise UserError(f"{options.source} does not exist: give a cell's folder, a file of texts, or {LIVE}.")
    policies = source.policies(options.scores)
    for head in options.head:
        source.check_head(head)
    from kvsweep.harness.models.load import load_model
    from kvsweep.harness.trace.draw import draw_attribution, draw_importance, draw_kept, write

    text = source.read(load_model(source.model))
    if options.source == LIVE:
        print(f"{text.title}\n\n{text.summary}", file=sys.stderr)
    if not text.thinking:
        raise UserError(f"{text.trace.problem_id} has no thinking to look into: choose another text.")
    draw: dict[str, Any] = {
        "importance": partial(draw_importance, policies=policies),
        "attribution": draw_attribution,
        "kept": draw_kept,
    }
    pictures = list(draw) if options.show == "all" else [options.show]
    for name in pictures:
        try:
            table, drawing = draw[name](options, text)
        except inspected.NotInText as missing:
            if options.show != "all":
                raise
            print(f"{name} is left out: {missing}", file=sys.stderr)
            continue
        stem = f"{name}_{file_name(text.trace.problem_id, f'draw{text.trace.draw}')}"
        yield from write(options.out, stem, {"": table}, drawing)
