"""The command `kvsweep-trace`: pictures of one completion, or of a run's completions, and their numbers."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvsweep.base.command_line import one_sentence
from kvsweep.base.errors import UserError
from kvsweep.base.records import CELL_FILE
from kvsweep.harness.inspect.reasoning_steps import PARAGRAPHS, given, matches, paragraphs
from kvsweep.harness.inspect.text import NotInText, live, of_cell, of_file
from kvsweep.harness.predictor.recipe import LABEL_KINDS

LIVE = "live"
PICTURES = ("importance", "attribution", "kept")
METHODS = ("removal", "grad_x_input")


@one_sentence("kvsweep-trace")
def main(arguments: Sequence[str] | None = None) -> None:
    """Console script: exit code 0 done, 2 bad input, 130 interrupted."""
    options = parse(arguments)
    check(options)
    for path in draw_run(options) if options.show == "retention" else draw_text(options):
        print(path)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="kvsweep-trace",
        usage="kvsweep-trace DIR|FILE|live [KEY=VALUE ...] [options]",
        description="Pictures of one completion, and the numbers as CSV. --label, --head and --scores can be repeated.",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=20, width=100),
    )
    add = parser.add_argument
    add("source", metavar="DIR|FILE|live", help="a cell's folder, a JSONL of texts, or live to write a completion now")
    changes = "DIR: where the model lies now; FILE: which model; live: all settings of kvsweep but grid"
    add("overrides", nargs="*", metavar="KEY=VALUE", help=changes)
    add("--problem", metavar="ID", help="the problem (the first one)")
    add("--draw", type=int, default=0, metavar="N", help="the draw of the problem (0)")
    add("--question", metavar="TEXT", help="live: ask this question instead of a benchmark's problem")
    pictures = f"{', '.join(PICTURES)}, all of these, or retention of a run's folder (importance)"
    add("--show", choices=[*PICTURES, "retention", "all"], default="importance", metavar="PICTURE", help=pictures)
    kinds = f"a strip of true labels: {', '.join(LABEL_KINDS)} (answer)"
    add("--label", choices=LABEL_KINDS, action="append", metavar="KIND", help=kinds)
    add("--head", type=Path, action="append", default=[], metavar="DIR", help="a strip of a predictor's scores")
    add("--scores", action="append", default=[], metavar="POLICY", help="a strip of a policy's scores")
    distance = "tokens between a token and what counts for far_max and later: toy models 32, R1 512 (32)"
    add("--min-distance", type=int, default=32, metavar="N", help=distance)
    add("--by", choices=("token", "step"), default="token", help="strips of tokens, or of each step's mean (token)")
    add("--split", metavar="REGEX", help="what separates the steps (model.split, else blank lines, else equations)")
    add("--steps", metavar="A-B,C-D", help="first and last token of each step, counted in the thinking from 0")
    add("--find", metavar="REGEX", help="the steps to attribute (equations with what they state)")
    add("--map", metavar="NAME", help="attribution: a colour map of matplotlib (RdBu; RdYlGn is the paper's)")
    methods = f"attribution: {' or '.join(METHODS)} (removal)"
    add("--method", choices=METHODS, default="removal", metavar="NAME", help=methods)
    add("--slots", type=int, default=32, metavar="N", help="attribution: steps removed at once (32)")
    add("--rows", action="store_true", help="kept: repeat the text after each eviction")
    add("--limit", type=int, default=20, metavar="N", help="retention: evicted completions of each cell (20)")
    add("--out", type=Path, default=Path("trace"), metavar="DIR", help="folder for the files (./trace)")
    return parser.parse_intermixed_args(arguments)


def check(options: argparse.Namespace) -> None:
    paragraphs([], options.split or PARAGRAPHS)
    matches([], options.find or "")
    if options.steps:
        given(options.steps)
        if options.find:
            raise UserError(f"--steps {options.steps} and --find {options.find} both name the columns: give one.")
    if options.map is not None:
        from kvsweep.analysis.pictures.style import check_map

        check_map(options.map)
    if options.min_distance < 1:
        raise UserError(f"--min-distance {options.min_distance} is out of range: it must be at least 1 token.")
    for name in ("slots", "limit"):
        if getattr(options, name) < 1:
            raise UserError(f"--{name} {getattr(options, name)} is out of range: it must be at least 1.")
    if options.show == "retention" and options.overrides:
        raise UserError(f"{options.overrides[0]} cannot be given with --show retention: leave it out.")
    if options.question is not None and options.source != LIVE:
        raise UserError(f"--question is for {LIVE} alone: give {LIVE} in place of {options.source}.")


def draw_run(options: argparse.Namespace) -> Iterator[Path]:
    folders = sorted(path.parent for path in Path(options.source).glob(f"*/{CELL_FILE}"))
    if not folders:
        raise UserError(f"{options.source} holds no cells: name a run's directory, such as results/runs/demo.")
    from kvsweep.harness.inspect.draw import draw_retention

    yield from draw_retention(options, folders)


def draw_text(options: argparse.Namespace) -> Iterator[Path]:
    """Draw the pictures of one text; yield the files. Bad input is refused before the model is loaded."""
    if options.source != LIVE and not Path(options.source).exists():
        raise UserError(f"{options.source} does not exist: give a cell's folder, a JSONL of texts, or {LIVE}.")
    if options.source == LIVE:
        source = live(options.overrides, options.problem, options.draw, options.question)
    else:
        stored = of_cell if Path(options.source).is_dir() else of_file
        source = stored(Path(options.source), options.problem, options.draw, options.overrides)
    options.scores = source.policies(options.scores)
    for head in options.head:
        source.check_head(head)
    from kvsweep.harness.inspect.draw import draw_attribution, draw_importance, draw_kept
    from kvsweep.harness.models.load import load_model

    text = source.read(load_model(source.model))
    if options.source == LIVE:
        print(f"{text.title}\n\n{text.summary}", file=sys.stderr)
    if not text.thinking:
        raise UserError(f"{text.trace.problem_id} has no thinking to look into: choose another text.")
    draw = {"importance": draw_importance, "attribution": draw_attribution, "kept": draw_kept}
    for name in PICTURES if options.show == "all" else [options.show]:
        try:
            yield from draw[name](options, text)
        except NotInText as missing:
            if options.show != "all":
                raise
            print(f"{name} is left out: {missing}", file=sys.stderr)
