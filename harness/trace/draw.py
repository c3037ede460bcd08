"""The pictures of `kvsweep trace` and their numbers. These functions compute; `analysis.figures` draws."""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from kvsweep.analysis.figures.completion import (
    Layout,
    correlation_text,
    importance_figure,
    importance_table,
    kept_html,
    kept_table,
    lorenz,
    read_kept,
    retention,
    retention_figure,
)
from kvsweep.analysis.figures.heatmap import attribution_figure, attribution_table
from kvsweep.analysis.figures.style import save_figure
from kvsweep.analysis.notation import csv_text, policy_title, setting_of
from kvsweep.analysis.statistics.metrics import by_eviction, by_policy, mean_lorenz
from kvsweep.compression.policy import BudgetPolicy
from kvsweep.harness.models.load import load_model
from kvsweep.harness.predictor.recipe import LabelKind
from kvsweep.harness.predictor.traces import read_graded
from kvsweep.harness.trace import inspected
from kvsweep.harness.trace.importance import importance, removal
from kvsweep.messages.errors import UserError
from kvsweep.run_files.run_reader import StoredCell
from kvsweep.run_files.safe_files import replace_text

# The most completions of a cell whose importance --show retention computes.
_MOST_TEXTS = 20

Drawing = Figure | str  # a str is an HTML page


def write(directory: Path, name: str, tables: Mapping[str, pd.DataFrame], drawing: Drawing) -> Iterator[Path]:
    """Write tables, which have a suffix of the name each, and what is drawn of them; yield the files."""
    directory.mkdir(parents=True, exist_ok=True)
    for suffix, table in tables.items():
        path = directory / f"{name}{suffix}.csv"
        replace_text(path, csv_text(table))
        yield path
    if isinstance(drawing, Figure):
        yield from save_figure(drawing, directory, name).values()
        return
    path = directory / f"{name}.html"
    replace_text(path, drawing)
    yield path


def draw_importance(
    options: inspected.TraceOptions, text: inspected.InspectedText, policies: Sequence[BudgetPolicy]
) -> tuple[pd.DataFrame, Drawing]:
    """Draw a text's importance: a strip for each label, predictor and policy, of tokens or the means of steps."""
    trace = text.trace
    layout = Layout(
        question=trace.think_start,
        thinking=len(text.thinking),
        answer=len(trace.token_ids) - trace.think_end,
        steps=inspected.step_numbers(averaged_steps(options, text), len(text.thinking)),
        pieces=text.thinking,
    )
    labels: Sequence[LabelKind] = options.label or ["answer"]
    strips = importance(text, labels, options.head, policies)
    scores_by_title = {}
    for column, scores in strips.items():
        # With the policy's usual name: "scores: H2O, mean of layers and heads" for `scores: h2o, mean of ...`.
        title = re.sub("(?<=^scores: )[^,]+", lambda policy: policy_title(policy.group()), column)
        scores_by_title[title] = scores
    figure = importance_figure(layout, scores_by_title, title=text.title, average_steps=options.by == "step")
    return importance_table(layout, strips), figure


def separator(options: inspected.TraceOptions, text: inspected.InspectedText) -> str:
    """Return the regular expression between two steps: --split, else the model's, else blank lines."""
    return str(options.split or text.model.config.split or inspected.PARAGRAPHS)


def averaged_steps(options: inspected.TraceOptions, text: inspected.InspectedText) -> list[range]:
    """Tokens of each step that the strips average over: the steps of --steps, else paragraphs, else derivations."""
    if options.steps:
        steps = inspected.read_steps(options.steps)
        tokens = len(text.thinking)
        if steps[-1].stop > tokens:
            raise UserError(
                f"--steps {options.steps} goes beyond the thinking, whose tokens are 0 to {tokens - 1}: shorten it."
            )
        return steps
    split = separator(options, text)
    steps = inspected.paragraphs(text.thinking, split)
    # Where nobody has named a separator, one paragraph may still have several derivations.
    if len(steps) == 1 and split == inspected.PARAGRAPHS:
        steps = inspected.derivations(text.thinking, split)
    return steps


def draw_attribution(options: inspected.TraceOptions, text: inspected.InspectedText) -> tuple[pd.DataFrame, Drawing]:
    """Draw how much each step of the thinking supports each token of the answer."""
    trace, model = text.trace, text.model
    if not trace.answered:
        raise inspected.NotInText(f"{trace.problem_id} never answers: there is no answer token to attribute.")
    # From positions in the thinking to positions in the text.
    start = trace.think_start
    steps = [range(start + step.start, start + step.stop) for step in attributed_steps(options, text)]
    first_fed = trace.answer_start - 1  # the closing tag's last token, which predicts the answer's first
    values = removal(model, trace.token_ids, first_fed, steps).double().numpy(force=True)
    tokens = text.pieces[trace.answer_start :]
    columns = ["".join(text.pieces[step.start : step.stop]) for step in steps]
    figure = attribution_figure(values, tokens, columns, title=text.title, cmap=options.map)
    return attribution_table(values, tokens, columns), figure


def attributed_steps(options: inspected.TraceOptions, text: inspected.InspectedText) -> list[range]:
    """Tokens of each step to attribute: the steps of --find or --steps, else equations with their conclusions."""
    if options.steps:
        return averaged_steps(options, text)
    if options.find:
        matches = inspected.matches(text.thinking, options.find)
        if matches:
            return matches
        raise UserError(f"--find {options.find} matches nothing in the thinking of {text.trace.problem_id}: change it.")
    return inspected.derivations(text.thinking, separator(options, text))


def draw_kept(_: inspected.TraceOptions, text: inspected.InspectedText) -> tuple[pd.DataFrame, Drawing]:
    """Return the text as a page that shows which tokens each eviction kept."""
    if text.completion is None:
        raise inspected.NotInText(
            "a text from a file does not tell what its cache kept: give a cell's folder, or live."
        )
    if not text.completion.evictions:
        raise inspected.NotInText("nothing was evicted here: choose another completion, or a smaller policy.budget.")
    kept = read_kept(text.pieces, text.trace.think_start, text.completion.evictions)
    return kept_table(kept), kept_html(kept, title=text.title)


def draw_retention(options: inspected.TraceOptions, folders: Sequence[Path]) -> Iterator[Path]:
    """Draw how much true importance (from the full cache) each policy kept of its own completions, and its Pass@1."""
    kind: LabelKind = options.label[0] if options.label else "answer"
    retained, correct, curves = _retained(folders, kind)
    if retained.empty:
        raise UserError(f"{options.source} has no evicted completion with labels of {kind}: name another run.")
    evictions = by_eviction(retained)
    policies = by_policy(retained, correct)
    carried = mean_lorenz(curves)
    twenty, thirty = carried["importance"][[20, 30]]  # row n is of n percent of the tokens
    print(f"true importance held ({kind}) and Pass@1 over policies: {correlation_text(policies)}")
    print(f"the most important 20% of the thinking tokens carry {twenty:.0%} of it, 30% {thirty:.0%}")
    title = f"{Path(options.source).name}: true importance ({kind}) held at each eviction"
    figure = retention_figure(evictions, policies, carried, kind, title=title)
    tables = {"": policies, "_curves": evictions, "_lorenz": carried}
    return write(options.out, f"retention_{kind}", tables, figure)


def _retained(
    folders: Sequence[Path], kind: LabelKind
) -> tuple[pd.DataFrame, dict[str, list[int]], list[tuple[np.ndarray, np.ndarray]]]:
    """Measure cells' evicted completions; return a row per eviction, the grades of each policy, and `lorenz` curves.

    A row has the policy, the text's number, the eviction's (from 1), and the share of true importance that it retained.
    """
    rows = []
    correct = defaultdict[str, list[int]](list)
    curves: list[tuple[np.ndarray, np.ndarray]] = []  # of each text
    loaded = cache(load_model)  # each model once
    for folder in folders:
        policy = setting_of(StoredCell(folder).settings["policy"])
        stored = list(read_graded(folder))
        correct[policy] += [grade.correct for _, _, grade in stored if grade]
        evicted = [(completion.key, question, completion) for question, completion, _ in stored if completion.evictions]
        for _, question, completion in sorted(evicted)[:_MOST_TEXTS]:  # no two have the same key
            source = inspected.of_completion(folder, question, completion)
            text = source.read(loaded(source.model))
            if kind == "answer" and not text.trace.answered:
                continue
            (scores,) = importance(text, [kind], []).values()
            kept = read_kept(text.pieces, text.trace.think_start, completion.evictions)
            for number, share in enumerate(retention(kept, scores), start=1):
                rows.append({"policy": policy, "text": len(curves), "eviction": number, "retained": float(share)})
            curves.append(lorenz(scores))
    return pd.DataFrame(rows), correct, curves
