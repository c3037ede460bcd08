"""The command `kvsweep-trace`: what one completion looks like inside, drawn and as numbers.

The model work is here, the drawing in analysis.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pandas as pd
import torch
import yaml
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException
from tokenizers.decoders import DecodeStream

from analysis.attribution import attribution_figure, attribution_table
from analysis.figures import file_name, save_figure
from analysis.importance import Layout, Strip, importance_figure, importance_table, lorenz, write_csv
from analysis.kept import correlation_text, kept_html, kept_table, read_kept, retention, retention_figure
from compression.predictor import load_predictor
from harness.attribution import Method, cost, grad_x_input, removal
from harness.config import CONF, build
from harness.models import LoadedModel, ModelConfig, load_model
from harness.predictor.labels import label_trace
from harness.predictor.recipe import LABEL_KINDS, LabelKind
from harness.predictor.traces import Trace, trace_of_text
from harness.records import (
    CELL_FILE,
    COMPLETIONS_FILE,
    GRADES_FILE,
    PROBLEMS_FILE,
    PROVENANCE_FILE,
    Completion,
    Problem,
    UserError,
    read_rows,
    shard_files,
)

PARAGRAPHS = r"\n\s*\n"
# An equation between numbers, as `3 x 4 = 12`.
EXPRESSIONS = r"\d+(?:\s*[-+*/×·x]\s*\d+)+\s*=\s*-?\d+"


@dataclass(frozen=True, kw_only=True)
class Traced:
    """One text to look into, with its model.

    Attributes:
        trace: its tokens and where the thinking lies; `think_end` is the text's end where the thinking never closes.
        completion: what the cell stored, None for a text from elsewhere.
    """

    model: LoadedModel
    trace: Trace
    completion: Completion | None = None

    @property
    def closed(self) -> bool:
        """Whether an answer follows the thinking."""
        return self.trace.think_end + 1 < len(self.trace.token_ids)

    @property
    def name(self) -> str:
        """What files of it are called."""
        return file_name(self.trace.problem_id, f"draw{self.trace.draw}")

    @cached_property
    def pieces(self) -> list[str]:
        """The text of each token; one that ends inside a character has none, the one that completes it has it."""
        stream = DecodeStream(skip_special_tokens=False)
        backend = self.model.tokenizer.backend_tokenizer
        return [stream.step(backend, token) or "" for token in self.trace.token_ids]

    def layout(self, split: str) -> Layout:
        """The parts of the text, its thinking divided into steps behind each match of the pattern `split`."""
        trace = self.trace
        pieces = self.pieces[trace.think_start : trace.think_end]
        return Layout(
            question=trace.think_start,
            thinking=len(pieces),
            answer=len(trace.token_ids) - trace.think_end,
            steps=step_numbers(pieces, split),
            pieces=pieces,
        )


def step_numbers(pieces: Sequence[str], split: str = PARAGRAPHS) -> list[int]:
    """The step of each token: a new one begins with the first token that lies wholly behind a match of `split`.

    Raises:
        UserError: `split` is no regular expression.
    """
    try:
        ends = [match.end() for match in re.finditer(split, "".join(pieces))]
    except re.error as error:
        raise UserError(f"--split {split} is no regular expression ({error}): correct it.") from error
    begins = [0, *accumulate(map(len, pieces))][:-1]
    numbers = np.searchsorted(ends, begins, side="right")
    # A match at the text's start, or two without a token between, would leave a number out.
    return np.unique(numbers, return_inverse=True)[1].tolist()


def token_range(pieces: Sequence[str], begin: int, end: int) -> range:
    """The tokens that hold any of the characters from `begin` up to `end` of the pieces' text."""
    ends = list(accumulate(map(len, pieces)))
    return range(int(np.searchsorted(ends, begin, side="right")), int(np.searchsorted(ends, end, side="left")) + 1)


def expressions(traced: Traced, pattern: str) -> list[range]:
    """Text positions of each match of a pattern in the thinking, in order.

    Raises:
        UserError: there is none, or `pattern` is no regular expression.
    """
    start, end = traced.trace.think_start, traced.trace.think_end
    pieces = traced.pieces[start:end]
    try:
        matches = [m for m in re.finditer(pattern, "".join(pieces)) if m.group()]
    except re.error as error:
        raise UserError(f"--find {pattern} is no regular expression ({error}): correct it.") from error
    if not matches:
        raise UserError(f"--find {pattern} matches nothing in the thinking of {traced.trace.problem_id}: change it.")
    found = [token_range(pieces, *match.span()) for match in matches]
    return [range(start + r.start, start + r.stop) for r in found]


def importance(
    traced: Traced, kinds: Sequence[LabelKind], heads: Sequence[Path], min_distance: int = 32
) -> list[Strip]:
    """The true labels of the thinking tokens, of each kind that the text has, and what each head predicts of them.

    Labels are those that the text has with a full cache, whatever it was written with. `answer` costs the answer's
    queries alone, the other kinds every query: 7,000 tokens on a CPU take seconds or a minute.

    Raises:
        UserError: a directory that holds no head, or one for another model.
    """
    predictors = [(path, read_head(path, traced.model)) for path in heads]
    known = tuple(kind for kind in kinds if traced.closed or kind != "answer")
    if not known and not heads:
        raise UserError(f"{traced.trace.problem_id} never answers: draw it by --label far_max, later, or a --head.")
    hidden, labels = label_trace(traced.model, traced.trace, min_distance, known)
    strips = [Strip(title=f"true: {kind}", scores=labels[kind].double().numpy(force=True)) for kind in known]
    for path, predict in predictors:
        scores = predict(hidden).double().numpy(force=True)
        strips.append(Strip(title=f"predicted: {path.parent.name}/{path.name}", scores=scores))
    return strips


def read_head(path: Path, model: LoadedModel) -> Callable[[torch.Tensor], torch.Tensor]:
    """The importance predictor of a directory, on the model's device.

    Raises:
        UserError: there is none, or it is for another width.
    """
    try:
        head = load_predictor(path, dtype=model.shape.dtype).to(model.device)
    except (OSError, ValueError) as error:
        raise UserError(f"--head {path} holds no importance predictor ({error}): name the directory of one.") from error
    if head.hidden_size != model.network.config.hidden_size:
        raise UserError(
            f"--head {path} is for hidden states of {head.hidden_size} numbers and {model.config.name} has "
            f"{model.network.config.hidden_size}: name a head of this model."
        )
    return head


def of_cell(folder: Path, problem_id: str | None, draw: int) -> Traced:
    """A stored completion of a cell, with the cell's model.

    Raises:
        UserError: the folder is no cell's, or holds no such completion, or the model is not on this machine.
    """
    if not (folder / CELL_FILE).is_file():
        raise UserError(
            f"{folder} is no cell's folder: name one that holds {CELL_FILE}, a folder in a run's directory."
        )
    return of_completion(folder, _find(folder, problem_id, draw), load_model)


def of_completion(folder: Path, completion: Completion, load: Callable[[ModelConfig], LoadedModel]) -> Traced:
    """A completion of a cell, with the cell's model."""
    questions = {p.id: p.prompt for p in map(Problem.from_dict, read_rows(folder / PROBLEMS_FILE))}
    config = json.loads((folder / PROVENANCE_FILE).read_text())["config"]["model"]
    # A run of another version may name settings that this one does not have.
    known = {field.name for field in fields(ModelConfig)}
    model = load(build(ModelConfig, "model", {k: v for k, v in config.items() if k in known}))
    prompt = model.prompt_ids(questions[completion.problem_id])
    ids = [i for i in completion.token_ids if i not in model.stop_ids]
    closing = ids.index(model.think_end_id) if model.think_end_id in ids else len(ids)
    trace = Trace(
        problem_id=completion.problem_id,
        draw=completion.draw,
        kept=True,
        token_ids=[*prompt, *ids],
        think_start=len(prompt),
        think_end=len(prompt) + closing,
    )
    return Traced(model=model, trace=trace, completion=completion)


def _find(folder: Path, problem_id: str | None, draw: int) -> Completion:
    found: list[str] = []
    for row in _rows(folder, COMPLETIONS_FILE):
        if problem_id in (None, row["problem_id"]) and row["draw"] == draw:
            return Completion.from_dict(row)
        found.append(f"{row['problem_id']}/{row['draw']}")
    some = ", ".join(sorted(found)[:5]) or "none"
    raise UserError(f"--problem {problem_id} --draw {draw} is not among the completions of {folder}: it has {some} ...")


def of_text(path: Path, problem_id: str | None, draw: int, model: LoadedModel) -> Traced:
    """A row of a JSONL of texts (problem, text; id and draw where there are several), through a model's tokenizer.

    Raises:
        UserError: no such row, or one without problem, text or a closed thinking.
    """
    for number, row in enumerate(read_rows(path), start=1):
        name = str(row.get("id", number))
        if problem_id in (None, name) and int(row.get("draw", 0)) == draw:
            where = f"{path}:{number}"
            if not {"problem", "text"} <= row.keys():
                raise UserError(f"{where} must name problem and text.")
            trace = trace_of_text(row, name, model.config.tags, model, where)
            return Traced(model=model, trace=replace(trace, draw=draw))
    raise UserError(f"--problem {problem_id} --draw {draw} is not in {path}: name the id of a row, or its line number.")


def read_model(overrides: Sequence[str]) -> ModelConfig:
    """The model that `model=NAME model.KEY=VALUE ...` describes."""
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        return build(ModelConfig, "model", compose("config", list(overrides)).model)


def read_source(options: argparse.Namespace) -> Traced:
    """The text that the command line names."""
    source: Path = options.source
    if source.is_dir():
        if options.overrides:
            raise UserError(
                f"{options.overrides[0]} cannot be given with a cell's folder: its model is the cell's own."
            )
        return of_cell(source, options.problem, options.draw)
    if not source.is_file():
        raise UserError(f"{source} does not exist: give a cell's folder or a JSONL of texts.")
    return of_text(source, options.problem, options.draw, load_model(read_model(options.overrides)))


def draw_importance(options: argparse.Namespace, traced: Traced) -> Iterator[Path]:
    """Write the strips and their numbers; yield the files."""
    layout, strips = (
        traced.layout(options.split),
        importance(traced, options.label or ["answer"], options.head, options.min_distance),
    )
    title = f"{traced.model.config.title}: {traced.trace.problem_id}, draw {traced.trace.draw}"
    figure = importance_figure(layout, strips, title=title, average_steps=options.by == "step")
    yield from _written(figure, options.out, f"importance_{traced.name}")
    path = options.out / f"importance_{traced.name}.csv"
    write_csv(importance_table(layout, strips), path)
    yield path


def draw_attribution(options: argparse.Namespace, traced: Traced) -> Iterator[Path]:
    """Write the heat table of the answer's tokens and the expressions found, and its numbers; yield the files."""
    trace, model = traced.trace, traced.model
    if not traced.closed:
        raise UserError(f"{trace.problem_id} never answers: there is no answer token to attribute.")
    steps = expressions(traced, options.find)
    if options.method == "removal":
        print(cost(model, len(trace.token_ids), trace.think_end, len(steps), options.slots), file=sys.stderr)
        found = removal(model, trace.token_ids, trace.think_end, steps, slots=options.slots)
    else:
        found = grad_x_input(model, trace.token_ids, trace.think_end, steps)
    tokens = traced.pieces[trace.think_end + 1 :]
    heads = ["".join(traced.pieces[step.start : step.stop]) for step in steps]
    title = f"{model.config.title}: {trace.problem_id}, draw {trace.draw}, {options.method}"
    values, name = found.double().numpy(force=True), f"attribution_{traced.name}"
    yield from _written(attribution_figure(values, tokens, heads, title=title), options.out, name)
    path = options.out / f"{name}.csv"
    write_csv(attribution_table(values, tokens, heads), path)
    yield path


def draw_kept(options: argparse.Namespace, traced: Traced) -> Iterator[Path]:
    """Write the page of what stayed and its numbers; yield the files."""
    if traced.completion is None:
        raise UserError("what stayed is known of a cell's completions alone: give a cell's folder in place of a file.")
    kept = read_kept(traced.pieces, traced.trace.think_start, traced.completion.evictions)
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"kept_{traced.name}.html"
    title = f"{traced.model.config.title}: {traced.trace.problem_id}, draw {traced.trace.draw}"
    path.write_text(kept_html(kept, title=title, rows=options.rows))
    yield path
    write_csv(kept_table(kept), path.with_suffix(".csv"))
    yield path.with_suffix(".csv")


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
    for folder in sorted(path.parent for path in options.source.glob(f"*/{CELL_FILE}")):
        policy = policy_title(folder)
        correct = {(g["problem_id"], g["draw"]): g["correct"] for g in _rows(folder, GRADES_FILE)}
        scores.setdefault(policy, []).extend(correct.values())
        rows = [Completion.from_dict(row) for row in _rows(folder, COMPLETIONS_FILE)]
        for completion in sorted((c for c in rows if c.evictions), key=lambda c: c.key)[: options.limit]:
            traced = of_completion(folder, completion, loaded)
            if kind == "answer" and not traced.closed:
                continue
            (strip,) = importance(traced, [kind], [], options.min_distance)
            kept = read_kept(traced.pieces, traced.trace.think_start, completion.evictions)
            found = retention(kept, strip.scores, traced.trace.think_start)
            held.setdefault(policy, []).extend((len(shares), n, float(v)) for n, v in enumerate(found, start=1))
            shares.append(lorenz(strip.scores))
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
    print(f"true importance held ({kind}) and Pass@1 over {len(table)} policies: {correlation_text(table)}")
    print(f"the most important 20% of the thinking tokens carry {carried[20]:.0%} of it, 30% {carried[30]:.0%}")
    name = f"retention_{kind}"
    title = f"{options.source.name}: true importance ({kind}) held at each eviction"
    yield from _written(retention_figure(curves, table, {kind: (grid, carried)}, title=title), options.out, name)
    lorenz_table = pd.DataFrame({"tokens": grid, "importance": carried})
    for suffix, one in (("", table), ("_curves", curves), ("_lorenz", lorenz_table)):
        path = options.out / f"{name}{suffix}.csv"
        write_csv(one, path)
        yield path


def policy_title(folder: Path) -> str:
    """A cell's policy with its size: `dynts 0.3/48, budget 128`."""
    policy = yaml.safe_load((folder / CELL_FILE).read_text())["policy"]
    if "budget" not in policy:
        return str(policy["name"])
    return f"{policy['name']} {policy['keep_ratio']}/{policy['local_window']}, budget {policy['budget']}"


def _rows(folder: Path, name: str) -> Iterator[dict[str, Any]]:
    for path in shard_files(folder, name).values():
        yield from read_rows(path)


def _written(figure: Any, directory: Path, name: str) -> Iterator[Path]:
    directory.mkdir(parents=True, exist_ok=True)
    yield from save_figure(figure, directory, name).values()


PICTURES: dict[str, Callable[[argparse.Namespace, Traced], Iterator[Path]]] = {
    "importance": draw_importance,
    "attribution": draw_attribution,
    "kept": draw_kept,
}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="kvsweep-trace", description="One completion, looked into.")
    parser.add_argument("source", type=Path, metavar="DIR|FILE", help="a cell's folder, or a JSONL of problem and text")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="with a JSONL: model=NAME model.KEY=VALUE")
    parser.add_argument("--problem", metavar="ID", help="which problem; the first if not given")
    parser.add_argument("--draw", type=int, default=0)
    parser.add_argument("--show", choices=[*PICTURES, "retention", "all"], default="importance")
    parser.add_argument("--label", choices=LABEL_KINDS, action="append", help="true scores; answer if not given")
    parser.add_argument("--head", type=Path, action="append", default=[], help="directory of a predictor; repeatable")
    parser.add_argument("--min-distance", type=int, default=32, help="as the predictor recipe's: toy 32, r1 512")
    parser.add_argument("--by", choices=("token", "step"), default="token")
    parser.add_argument(
        "--split", default=PARAGRAPHS, metavar="REGEX", help="what ends a step; blank lines if not given"
    )
    parser.add_argument("--find", default=EXPRESSIONS, metavar="REGEX", help="columns; equations if not given")
    parser.add_argument("--method", choices=get_args(Method), default="removal", help="of the attribution")
    parser.add_argument("--slots", type=int, default=32, help="steps removed at once")
    parser.add_argument("--rows", action="store_true", help="what stayed: the text once more after each eviction")
    parser.add_argument("--limit", type=int, default=20, help="retention: evicted completions of each cell")
    parser.add_argument("--out", type=Path, default=Path("trace"), help="directory of the files; ./trace if not given")
    return parser.parse_intermixed_args(arguments)


def drawn(options: argparse.Namespace) -> Iterator[Path]:
    """Draw what is asked for; yield the files."""
    if options.show == "retention":
        yield from draw_retention(options)
        return
    traced = read_source(options)
    for name in PICTURES if options.show == "all" else [options.show]:
        yield from PICTURES[name](options, traced)


def main(arguments: Sequence[str] | None = None) -> None:
    """Console script: exit code 0 done, 2 bad input."""
    options = parse(arguments)
    try:
        step_numbers([], options.split)
        if options.min_distance < 1:
            raise UserError(f"--min-distance {options.min_distance} is out of range: it must be at least 1 token.")
        if options.slots < 1:
            raise UserError(f"--slots {options.slots} is out of range: it must be at least 1.")
        for path in drawn(options):
            print(path)
    except (ValueError, HydraException, OmegaConfBaseException) as error:
        print(f"kvsweep-trace: error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
