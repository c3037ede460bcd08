"""Is one engine or setting worse than another, by the graded outputs of both? The verdicts of `kvsweep judge`."""

import math
from collections.abc import Mapping, Sequence

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

_NAMED = 3  # problems that a note names
Outputs = Mapping[str, Sequence[Answer]]


def notes(outputs: Outputs, baseline: str, margin: float) -> list[str]:
    """What a reader has to know of the pairs; golds or prompts that differ raise a UserError."""
    known, found = {one.problem: one for one in outputs[baseline]}, list[str]()
    if not noninferiority.can_lose(np.array([one.correct for one in outputs[baseline]], dtype=float), margin):
        share = f"no more than {notation.percent(margin)}% of its answers"
        found.append(f"{baseline} is right in {share}, so nothing can be called safe beside it.")
    for name, answers in outputs.items():
        for one in answers:
            for what in ("gold", "prompt"):
                ours, theirs = (getattr(side, what) for side in (known.get(one.problem, one), one))
                if None not in (ours, theirs) and ours != theirs:
                    differ = f"{baseline} and {name} have another {what} for problem {visible(one.problem)!r:.60}"
                    raise UserError(f"{differ}: give outputs of the same questions.")
        alone = sorted(known.keys() ^ {one.problem for one in answers})
        if alone:
            shown = ", ".join(map(visible, alone[:_NAMED])) + ", ..." * (len(alone) > _NAMED)
            found.append(f"{counted(len(alone), 'problem')} of {baseline} or {name} alone are left out: {shown}.")
        if cut := sum(one.truncated for one in answers):
            found.append(f"{name}: {counted(cut, 'answer')} of {len(answers):,} were cut off at their longest.")
        if ungraded := sum(one.correct is None for one in answers):
            found.append(f"{name}: {counted(ungraded, 'answer')} of {len(answers):,} have no grade and are left out.")
        if name != baseline and lacks_grades(answers, outputs[baseline]):
            found.append(f"{name} is not called safe: what has no grade may be what it loses against {baseline}.")
    return found


def lacks_grades(answers: Sequence[Answer], baseline: Sequence[Answer]) -> bool:
    """Whether an answer has no grade, or a problem of the baseline none: an engine may fail where it would be wrong."""
    lacking = {one.problem for one in baseline} - {one.problem for one in answers}
    return bool(lacking) or any(one.correct is None for one in (*answers, *baseline))


def graded(outputs: Outputs) -> pd.DataFrame:
    """The answers of all files in the columns of a run's: the file as cell_id, problem_id, draw, correct, outcome."""
    rows = [(name, a.problem, a.draw, a.correct, a.outcome) for name, found in outputs.items() for a in found]
    return pd.DataFrame(rows, columns=["cell_id", "problem_id", "draw", "correct", "outcome"])


def verdicts(outputs: Outputs, baseline: str, *, margin: float, sizes: Mapping[str, float]) -> pd.DataFrame:
    """A row per setting: label, difference in points with both intervals, problems lost and won, declared bytes.

    The correction for the number of settings, and the search for one to take, are those of a sweep (docs/report.md).
    """
    scores = dict(zip(outputs, score_array(graded(outputs), list(outputs)), strict=True))
    full = scores.pop(baseline)
    found, losable = noninferiority.decide_grid(scores, full, margin=margin), noninferiority.can_lose(full, margin)
    if nothing := [name for name, one in found.items() if math.isnan(one.difference)]:
        raise UserError(f"{baseline} and {nothing[0]} share no graded pair of problem and draw: check ids and draws.")
    # A sequence from the largest cache down needs all sizes; without them Holm's procedure decides alone.
    chains = [sorted(scores, key=lambda name: -sizes[name])] if scores.keys() <= sizes.keys() else []
    taken = noninferiority.hold_in_search({name: one.p_holds for name, one in found.items()}, chains)
    rows = []
    for name, one in found.items():
        lead = noninferiority.mean_differences(scores[name], full)
        elsewhere = noninferiority.decide(scores[name], full, margin=margin, population="like_these")
        undecided = losable and one.label == "unclear"
        needed = noninferiority.draws_to_hold(scores[name], full, margin=margin) if undecided else None
        is_open = one.label != "worse" and lacks_grades(outputs[name], outputs[baseline])
        rows.append(
            {
                "setting": visible(name),
                "label": "unclear" if is_open else notation.chosen_label(one.label, name in taken),
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
        known = sorted(name for name in sizes if name in found)
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
        lines.append("Unclear: too few answers. `draws to decide` are the draws per problem that would show it (90%).")
    if (table["label"] == notation.MAY_BE_SAFE).any():
        lines.append("May be safe: safe by itself, but of so many settings one may be so by luck; add draws or files.")
    lines.append("Greedy answers have no new draws: for them, and for other problems, read `problems like these`.")
    return "\n".join(lines)
