"""Is one engine or setting worse than another, by the graded outputs of both? The verdicts of `kvsweep judge`."""

import itertools
import math
from collections.abc import Container, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from kvsweep.analysis import notation
from kvsweep.analysis.outputs import Answer
from kvsweep.analysis.statistics import noninferiority
from kvsweep.analysis.statistics.inference import score_array
from kvsweep.analysis.statistics.metrics import pareto_front
from kvsweep.command_line import counted
from kvsweep.errors import UserError
from kvsweep.escape import visible
from kvsweep.records import Pair

_NAMED = 3  # problems that a note names
Outputs = Mapping[str, Sequence[Answer]]


def notes(outputs: Outputs, baseline: str, margin: float, gaps: Mapping[str, Pair]) -> list[str]:
    """What a reader has to know of the pairs; golds, prompts or names of grades that differ raise a UserError.

    `gaps` has the pair that `lacking` finds, of each setting that has one.
    """
    known, found = {one.problem: one for one in outputs[baseline]}, list[str]()
    if not noninferiority.can_lose(np.array([one.correct for one in outputs[baseline]], dtype=float), margin):
        share = f"no more than {notation.percent(margin)}% of its answers"
        found.append(f"{baseline} is right in {share}, so nothing can be called safe beside it.")
    for name, answers in outputs.items():
        for one in answers:
            _check_alike(known.get(one.problem, one), one, baseline, name)
        alone = sorted(known.keys() ^ {one.problem for one in answers})
        if alone:
            shown = ", ".join(repr(visible(one)) for one in alone[:_NAMED]) + ", ..." * (len(alone) > _NAMED)
            found.append(f"{counted(len(alone), 'problem')} of {baseline} or {name} alone are left out: {shown}.")
        if cut := sum(one.truncated for one in answers):
            found.append(f"{name}: {counted(cut, 'answer')} of {len(answers):,} were cut off at their longest.")
        if ungraded := sum(one.correct is None for one in answers):
            found.append(f"{name}: {counted(ungraded, 'answer')} of {len(answers):,} have no grade and are left out.")
        if name in gaps:
            problem, draw = gaps[name]
            lost = f"what has no grade may be what it loses against {baseline}"
            found.append(f"{name} is not called safe: {lost}, as draw {draw} of problem {visible(problem)!r:.60}.")
    return found


def _check_alike(ours: Answer, theirs: Answer, baseline: str, name: str) -> None:
    for what in ("gold", "prompt", "prompt_hash", "grade"):
        values = [getattr(side, what) for side in (ours, theirs)]
        pair = [] if values[0] == values[1] else [_plain(value) for value in values if value is not None]
        if len({*pair} - {None}) > 1:
            files = f"{name} has" if name == baseline else f"{baseline} and {name} have"
            two = f"{what} {pair[0]!r:.60} and {pair[1]!r:.60} for problem {visible(ours.problem)!r:.60}"
            way = "--correct NAME, --where filter=NAME" if what == "grade" else f"--column {what}=NAME"
            raise UserError(f"{files} {two}: give outputs of the same questions and grades, or choose by {way}.")


def _plain(value: Any) -> str | None:
    """A gold, prompt or grade without what makes no difference: spaces, a list around one, and the ids of messages."""
    if isinstance(value, list) and len(value) == 1:
        [value] = value
    parts = value if isinstance(value, list) else [value]
    plain = [{k: v for k, v in part.items() if k != "id"} if isinstance(part, dict) else part for part in parts]
    return " ".join(" ".join(map(str, plain)).split()) or None


def lacking(answers: Sequence[Answer], baseline: Sequence[Answer]) -> Pair | None:
    """The first pair of a problem of the baseline and a draw of both that one side has no grade for, if there is one.

    An engine may fail where it would be wrong.
    """
    graded = [{one.key for one in side if one.correct is not None} for side in (answers, baseline)]
    draws = sorted(set.intersection(*({draw for _, draw in side} for side in graded)))
    asked = itertools.product(dict.fromkeys(one.problem for one in baseline), draws)
    return next((pair for pair in asked if not all(pair in side for side in graded)), None)


def without_copies(answers: Sequence[Answer]) -> Sequence[Answer]:
    """One draw where all draws of each problem have the same text: greedy decoding's copies say nothing more."""
    texts = {(one.problem, one.text) for one in answers}
    problems = {problem for problem, text in texts if text is not None}
    first = min(one.draw for one in answers)
    return [a for a in answers if a.draw == first] if len(problems) == len(texts) < len(answers) else answers


def graded(outputs: Outputs) -> pd.DataFrame:
    """The answers of all files in the columns of a run's: the file as cell_id, problem_id, draw, correct, outcome."""
    rows = [(name, a.problem, a.draw, a.correct, a.outcome) for name, found in outputs.items() for a in found]
    return pd.DataFrame(rows, columns=["cell_id", "problem_id", "draw", "correct", "outcome"])


def verdicts(
    outputs: Outputs, baseline: str, *, margin: float, sizes: Mapping[str, float], gaps: Container[str]
) -> pd.DataFrame:
    """A row per setting: label, difference in points with both intervals, problems lost and won, declared bytes.

    What is among the `gaps` lacks answers, and is not called safe.
    The correction for the number of settings, and the search for one to take, are those of a sweep (docs/report.md).
    """
    scores = dict(zip(outputs, score_array(graded(outputs), list(outputs)), strict=True))
    full = scores.pop(baseline)
    found, losable = noninferiority.decide_grid(scores, full, margin=margin), noninferiority.can_lose(full, margin)
    if nothing := [name for name, one in found.items() if math.isnan(one.difference)]:
        raise UserError(f"{baseline} and {nothing[0]} share no graded pair of problem and draw: check ids and draws.")
    # A sequence from the largest cache down needs all sizes; without them Holm's procedure decides alone.
    chains = [sorted(scores, key=lambda name: -sizes[name])] if scores.keys() <= sizes.keys() else []
    p_holds = {name: 1.0 if name in gaps else one.p_holds for name, one in found.items()}
    taken = noninferiority.hold_in_search(p_holds, chains)
    rows = []
    for name, one in found.items():
        lead = noninferiority.paired(scores[name], full).mean(1)
        elsewhere = noninferiority.decide(scores[name], full, margin=margin, population="like_these")
        undecided = losable and one.label == "unclear"
        needed = noninferiority.draws_to_hold(scores[name], full, margin=margin) if undecided else None
        label = notation.chosen_label(one.label, name in taken)
        label = "unclear" if name in gaps and one.label != "worse" else label
        rows.append(
            {
                "setting": visible(name),
                "label": "unclear"
                if name in gaps and one.label != "worse"
                else notation.chosen_label(one.label, name in taken),
                "points": notation.percent(one.difference, signed=True),
                "interval": notation.interval(one.low, one.high, signed=True),
                "problems like these": notation.interval(elsewhere.low, elsewhere.high, signed=True),
                "lost": int((lead < 0).sum()),
                "won": int((lead > 0).sum()),
                "problems": len(lead),
                "draws": one.draws,
                "draws to decide": "" if needed is None else f"{needed:,}",
                "bytes (declared)": notation.number(sizes[name]) if name in sizes else "",
            }
        )
    table = pd.DataFrame(rows)
    if sizes:
        known = sorted(name for name in sizes if name in found and name not in gaps)
        points = {"bytes": [sizes[name] for name in known], "pass_at_1": [found[name].difference for name in known]}
        best = pareto_front(pd.DataFrame(points, index=known), "bytes").index
        table["best of its bytes"] = ["yes" if name in best else "" for name in found]
    return table


def in_words(table: pd.DataFrame, baseline: str, margin: float) -> str:
    """What the labels speak of, and what to do next."""
    points = counted(notation.number(margin), "point")
    lines = [
        f"Safe: very likely loses less than {points} of accuracy against {visible(baseline)}, on these problems asked "
        f"again. A setting that truly loses {points} is called safe at most once in 40."
    ]
    if (table["draws to decide"] != "").any():
        lines.append('Unclear: too few answers. "Draws to decide" are the draws per problem that would show it (90%).')
    if (table["label"] == notation.MAY_BE_SAFE).any():
        lines.append("May be safe: safe by itself, but of so many settings one may be so by luck; add draws or files.")
    if (table["label"] == "worse").any():
        lines.append("Worse: surely loses; how much is open.")
    if (table["label"] == "small loss").any():
        lines.append(f"Small loss: surely loses, and less than {points}.")
    lines.append('Greedy answers have no new draws: for them, and for other problems, read "problems like these".')
    return "\n".join(lines)
