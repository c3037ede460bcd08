"""The command `kvsweep-trace`: what one completion looks like inside, drawn and as numbers.

The model work is here, the drawing in analysis.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pandas as pd
import yaml
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from analysis.pictures.attribution import attribution_figure, attribution_table
from analysis.pictures.importance import Layout, Strip, importance_figure, importance_table, lorenz, write_csv
from analysis.pictures.kept import correlation_text, kept_table, read_kept, retention, retention_figure
from analysis.pictures.style import file_name, save_figure
from analysis.records import CELL_FILE, COMPLETIONS_FILE, GRADES_FILE, Completion, UserError, read_shards
from analysis.report.kept_page import kept_html
from harness.inspect.attribution import Method, cost, grad_x_input, removal
from harness.inspect.importance import check_head, importance
from harness.inspect.reasoning_steps import PARAGRAPHS, given, matches, numbers, paragraphs
from harness.inspect.text import NotInText, Source, Traced, live, of_cell, of_completion, of_text
from harness.models.load import load_model
from harness.predictor.recipe import LABEL_KINDS, LabelKind

LIVE = "live"


def read_source(options: argparse.Namespace) -> Source:
    """Where the command line has its text from."""
    path = Path(options.source)
    if options.source == LIVE:
        return live(options.overrides, options.problem, options.draw, options.question)
    if options.question is not None:
        raise UserError(f"--question is for {LIVE} alone: give {LIVE} in place of {path}.")
    if path.is_dir():
        return of_cell(path, options.problem, options.draw, options.overrides)
    if not path.is_file():
        raise UserError(f"{path} does not exist: give a cell's folder, a JSONL of texts, or {LIVE}.")
    return of_text(path, options.problem, options.draw, options.overrides)


def steps_of(options: argparse.Namespace, traced: Traced) -> list[range]:
    """The steps that are averaged, tokens of the thinking: those given, else paragraphs.

    Raises:
        UserError: a step that is given beyond the thinking.
    """
    if not options.steps:
        return paragraphs(traced.thinking, options.split)
    steps, tokens = given(options.steps), len(traced.thinking)
    if steps[-1].stop > tokens:
        raise UserError(
            f"--steps {options.steps} ends at token {steps[-1].stop - 1} and the thinking has 0 to {tokens - 1}: "
            "shorten it."
        )
    return steps


def columns_of(options: argparse.Namespace, traced: Traced) -> list[range]:
    """The steps that are attributed, tokens of the thinking: those given or found; equations, or else paragraphs.

    Raises:
        UserError: the pattern that was asked for matches nothing.
    """
    if options.find:
        if found := matches(traced.thinking, options.find):
            return found
        problem_id = traced.trace.problem_id
        raise UserError(f"--find {options.find} matches nothing in the thinking of {problem_id}: change it.")
    if not options.steps and (found := matches(traced.thinking)):
        return found
    steps = steps_of(options, traced)
    if not options.steps:
        print(f"attribution: no equation like 3 x 4 = 12, so its columns are {len(steps)} paragraphs", file=sys.stderr)
    return steps


def draw_importance(options: argparse.Namespace, traced: Traced) -> Iterator[Path]:
    """Write the strips and their numbers; yield the files."""
    trace = traced.trace
    layout = Layout(
        question=trace.think_start,
        thinking=len(traced.thinking),
        answer=len(trace.token_ids) - trace.think_end,
        steps=numbers(steps_of(options, traced), len(traced.thinking)),
        pieces=traced.thinking,
    )
    labels = options.label or ["answer"]
    found = importance(traced, labels, options.head, options.scores, min_distance=options.min_distance)
    strips = [Strip(title=title, scores=scores) for title, scores in found.items()]
    name = _name("importance", traced)
    yield from _numbers(importance_table(layout, strips), options.out, name)
    figure = importance_figure(layout, strips, title=traced.title, average_steps=options.by == "step")
    yield from _written(figure, options.out, name)


def draw_attribution(options: argparse.Namespace, traced: Traced) -> Iterator[Path]:
    """Write the heat table of the answer's tokens and the steps, and its numbers; yield the files."""
    trace, model = traced.trace, traced.model
    if not traced.closed:
        raise NotInText(f"{trace.problem_id} never answers: there is no answer token to attribute.")
    start = trace.think_start
    steps = [range(start + step.start, start + step.stop) for step in columns_of(options, traced)]
    if options.method == "removal":
        print(cost(model, len(trace.token_ids), trace.think_end, len(steps), options.slots), file=sys.stderr)
        found = removal(model, trace.token_ids, trace.think_end, steps, slots=options.slots)
    else:
        found = grad_x_input(model, trace.token_ids, trace.think_end, steps)
    tokens = traced.pieces[trace.think_end + 1 :]
    heads = ["".join(traced.pieces[step.start : step.stop]) for step in steps]
    values, name = found.double().numpy(force=True), _name("attribution", traced)
    # The numbers first: they were the work.
    yield from _numbers(attribution_table(values, tokens, heads), options.out, name)
    figure = attribution_figure(values, tokens, heads, title=f"{traced.title}, {options.method}")
    yield from _written(figure, options.out, name)


def draw_kept(options: argparse.Namespace, traced: Traced) -> Iterator[Path]:
    """Write the page of what stayed and its numbers; yield the files."""
    if traced.completion is None:
        raise NotInText(f"what stayed is not known of a text from a file: give a cell's folder, or {LIVE}.")
    if not traced.completion.evictions:
        raise NotInText("nothing was evicted from this completion: choose another, or a smaller budget.")
    kept = read_kept(traced.pieces, traced.trace.think_start, traced.completion.evictions)
    name = _name("kept", traced)
    yield from _numbers(kept_table(kept), options.out, name)
    path = options.out / f"{name}.html"
    path.write_text(kept_html(kept, title=traced.title, rows=options.rows))
    yield path


def draw_retention(options: argparse.Namespace) -> Iterator[Path]:
    """Write how much true importance each policy of a run held, against Pass@1; yield the files.

    Importance is that of each text as it was written, read with a full cache.

    Raises:
        UserError: no completion of the run was evicted and has such labels.
    """
    kind: LabelKind = (options.label or ["answer"])[0]
    held: dict[str, list[tuple[int, int, float]]] = {}
    scores: dict[str, list[int]] = {}
    shares: list[tuple[np.ndarray, np.ndarray]] = []
    loaded = cache(load_model)
    for folder in sorted(path.parent for path in Path(options.source).glob(f"*/{CELL_FILE}")):
        policy = policy_title(folder)
        correct = {(g["problem_id"], g["draw"]): g["correct"] for g in read_shards(folder, GRADES_FILE)}
        scores.setdefault(policy, []).extend(correct.values())
        rows = [Completion.from_dict(row) for row in read_shards(folder, COMPLETIONS_FILE)]
        for completion in sorted((c for c in rows if c.evictions), key=lambda c: c.key)[: options.limit]:
            source = of_completion(folder, completion)
            traced = source.read(loaded(source.model))
            if kind == "answer" and not traced.closed:
                continue
            (importances,) = importance(traced, [kind], [], min_distance=options.min_distance).values()
            kept = read_kept(traced.pieces, traced.trace.think_start, completion.evictions)
            found = retention(kept, importances, traced.trace.think_start)
            held.setdefault(policy, []).extend((len(shares), n, float(v)) for n, v in enumerate(found, start=1))
            shares.append(lorenz(importances))
    if not held:
        raise UserError(f"{options.source} has no evicted completion with labels of {kind}: name another run.")
    long = [{"policy": p, "text": t, "eviction": n, "retained": v} for p, found in held.items() for t, n, v in found]
    values = pd.DataFrame(long)
    curves = values.groupby(["policy", "eviction"], as_index=False).agg(
        retained=("retained", "mean"), texts=("retained", "count")
    )
    table = values.groupby("policy", as_index=False).agg(retained=("retained", "mean"), texts=("text", "nunique"))
    table["pass1"] = [float(np.mean(scores[p])) if scores[p] else np.nan for p in table["policy"]]
    grid = np.linspace(0, 1, 101)
    carried = np.mean([np.interp(grid, tokens, share) for tokens, share in shares], axis=0)
    print(f"true importance held ({kind}) and Pass@1 over policies: {correlation_text(table)}")
    print(f"the most important 20% of the thinking tokens carry {carried[20]:.0%} of it, 30% {carried[30]:.0%}")
    name = f"retention_{kind}"
    title = f"{Path(options.source).name}: true importance ({kind}) held at each eviction"
    lorenz_table = pd.DataFrame({"tokens": grid, "importance": carried})
    for suffix, one in (("", table), ("_curves", curves), ("_lorenz", lorenz_table)):
        yield from _numbers(one, options.out, f"{name}{suffix}")
    yield from _written(retention_figure(curves, table, {kind: (grid, carried)}, title=title), options.out, name)


def policy_title(folder: Path) -> str:
    """A cell's policy with its size: `dynts 0.3/48, budget 128`."""
    policy = yaml.safe_load((folder / CELL_FILE).read_text())["policy"]
    if "budget" not in policy:
        return str(policy["name"])
    return f"{policy['name']} {policy['keep_ratio']}/{policy['local_window']}, budget {policy['budget']}"


def _name(picture: str, traced: Traced) -> str:
    return f"{picture}_{file_name(traced.trace.problem_id, f'draw{traced.trace.draw}')}"


def _numbers(table: pd.DataFrame, directory: Path, name: str) -> Iterator[Path]:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}.csv"
    write_csv(table, path)
    yield path


def _written(figure: Any, directory: Path, name: str) -> Iterator[Path]:
    yield from save_figure(figure, directory, name).values()


PICTURES: dict[str, Callable[[argparse.Namespace, Traced], Iterator[Path]]] = {
    "importance": draw_importance,
    "attribution": draw_attribution,
    "kept": draw_kept,
}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="kvsweep-trace",
        usage="kvsweep-trace DIR|FILE|live [KEY=VALUE ...] [options]",
        description="One completion, looked into: pictures, and their numbers as CSV. "
        "--label, --head and --scores may be repeated.",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=20, width=100),
    )
    add, kinds = parser.add_argument, ", ".join(LABEL_KINDS)
    pictures = f"{', '.join(PICTURES)}, all (of these), or of a run retention (importance)"
    add("source", metavar="DIR|FILE|live", help="a cell's folder, a JSONL of problem and text, or written on the spot")
    add(
        "overrides",
        nargs="*",
        metavar="KEY=VALUE",
        help="DIR: where the model lies now; FILE: which model; live: all of kvsweep's but grid",
    )
    add("--problem", metavar="ID", help="which problem; the first if not given")
    add("--draw", type=int, default=0, metavar="N", help="which of its draws (0)")
    add("--question", metavar="TEXT", help="live: ask this in place of a benchmark's problem")
    add("--show", choices=[*PICTURES, "retention", "all"], default="importance", metavar="PICTURE", help=pictures)
    add("--label", choices=LABEL_KINDS, action="append", metavar="KIND", help=f"strip of true labels: {kinds} (answer)")
    add("--head", type=Path, action="append", default=[], metavar="DIR", help="strip of what a predictor says")
    add("--scores", action="append", default=[], metavar="POLICY", help="strip of what a policy scores")
    add("--min-distance", type=int, default=32, metavar="N", help="of the labels, as the recipe's: toy 32, r1 512 (32)")
    add("--by", choices=("token", "step"), default="token", help="strips by token, or the mean of each step (token)")
    add("--split", default=PARAGRAPHS, metavar="REGEX", help="what ends a step (blank lines)")
    add("--steps", metavar="A-B,C-D", help="the steps: first and last tokens, counted in the thinking from 0")
    add("--find", metavar="REGEX", help="steps attributed (equations; where there are none, all steps)")
    methods = " or ".join(get_args(Method))
    add("--method", choices=get_args(Method), default="removal", metavar="NAME", help=f"{methods} (removal)")
    add("--slots", type=int, default=32, metavar="N", help="attribution: steps removed at once (32)")
    add("--rows", action="store_true", help="kept: the text once more after each eviction")
    add("--limit", type=int, default=20, metavar="N", help="retention: evicted completions of each cell (20)")
    add("--out", type=Path, default=Path("trace"), metavar="DIR", help="where the files go (./trace)")
    return parser.parse_intermixed_args(arguments)


def drawn(options: argparse.Namespace) -> Iterator[Path]:
    """Draw what is asked for; yield the files."""
    if options.show == "retention":
        if options.overrides:
            raise UserError(f"{options.overrides[0]} cannot be given with --show retention: leave it out.")
        yield from draw_retention(options)
        return
    source = read_source(options)
    options.scores = source.policies(options.scores)
    for head in options.head:
        check_head(head, source.model)
    traced = source.read(load_model(source.model))
    if not traced.thinking:
        raise UserError(f"{traced.trace.problem_id} has no thinking to look into: choose another text.")
    if options.source == LIVE and (done := traced.completion):
        print(f"{done.num_tokens} tokens ({done.stop_reason}), {len(done.evictions)} evictions", file=sys.stderr)
    for name in PICTURES if options.show == "all" else [options.show]:
        try:
            yield from PICTURES[name](options, traced)
        except NotInText as missing:
            if options.show != "all":
                raise
            print(f"{name} is left out: {missing}", file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> None:
    """Console script: exit code 0 done, 2 bad input."""
    options = parse(arguments)
    try:
        check(options)
        for path in drawn(options):
            print(path)
    except (ValueError, HydraException, OmegaConfBaseException) as error:
        print(f"kvsweep-trace: error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)


def check(options: argparse.Namespace) -> None:
    """Refuse options that no text could serve.

    Raises:
        UserError: there is one.
    """
    paragraphs([], options.split)
    matches([], options.find or "")
    if options.steps:
        given(options.steps)
        if options.find:
            raise UserError(f"--steps {options.steps} and --find {options.find} both name the columns: give one.")
    if options.min_distance < 1:
        raise UserError(f"--min-distance {options.min_distance} is out of range: it must be at least 1 token.")
    for name in ("slots", "limit"):
        if getattr(options, name) < 1:
            raise UserError(f"--{name} {getattr(options, name)} is out of range: it must be at least 1.")


if __name__ == "__main__":
    main()
