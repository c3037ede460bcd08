"""Answers beside each other: values without what makes no difference, and draws that are copies of each other."""

import re
from collections.abc import Mapping
from typing import Any

import pandas as pd

GREEDY_BELOW = 2  # Answers that count as fewer draws say nothing about new draws.
_REPLIES = ("assistant", "tool")  # roles of messages that the model wrote or caused
# A whole number: sign, leading zeros, the digits that count, and zeros after a point. AIME writes 070.
_WHOLE = re.compile(r"^(-?)0*([0-9]+)(?:\.0*)?$")


def plain(value: Any) -> str:
    """A value as text, without what makes no difference.

    That is spaces, a whole number's needless zeros, the ids of messages, and the messages that the model wrote itself.
    """
    if isinstance(value, list):
        parts = []
        for part in value:
            is_reply = isinstance(part, dict) and part.get("role") in _REPLIES
            if not is_reply:
                parts.append(plain(part))
        return " ".join(filter(None, parts))
    if isinstance(value, dict):
        # The order of keys says nothing. A table has None where a row lacks a column.
        names = [name for name in sorted(value, key=str) if name != "id" and value[name] is not None]
        return " ".join(f"{name}: {plain(value[name])}" for name in names)
    return _WHOLE.sub(r"\1\2", " ".join(str(value).split()))


def counted_shares(answers: Mapping[str, pd.DataFrame]) -> dict[str, float]:
    """Return `counted_share` of each setting; draws are told apart if some problem has two grades or texts."""
    # One table is enough: where draws differ with one setting, no setting was decoded greedily.
    told_apart = False
    for table in answers.values():
        told_apart |= bool(table.groupby("problem_id")[["text", "correct"]].nunique().gt(1).any(axis=None))
    return {name: counted_share(table, told_apart=told_apart) for name, table in answers.items()}


def counted_share(answers: pd.DataFrame, *, told_apart: bool = True) -> float:
    """Which share of the draws of a problem counts: less than all if texts repeat.

    Two draws of a problem with one text and one grade are one draw. So as many draws count as would leave the same
    chance that two answers of a problem, drawn with replacement, are the same one. Two draws may both say "C", so a
    text that two problems have is no sign of a copy, unless no problem has two texts and the problems have different
    ones. Answers without a text are different ones, or the same one if nothing tells draws apart.
    """
    # Numbers stand for the texts: pandas' own strings refuse half a character (a lone surrogate).
    codes, _ = pd.factorize(answers["text"].to_numpy(dtype=object))
    texts = pd.Series(codes, index=answers.index).where(codes >= 0)  # -1: no text
    problems = answers["problem_id"]
    problems_of_text = problems.groupby(texts).nunique()
    texts_of_problem = texts.groupby(problems).nunique()
    # Every problem has one text in all its draws, and not all problems have the same.
    is_greedy = len(problems_of_text) > 1 and texts.notna().all() and texts_of_problem.max() == 1
    is_no_copy = texts.isna() & told_apart
    if not is_greedy:
        is_no_copy |= texts.map(problems_of_text) > 1
    grades = answers["correct"].fillna(-1)
    # Answers of one text and grade have one number, from 0. Each that is no copy gets a number below 0 for itself.
    numbers = pd.DataFrame({"text": texts, "grade": grades}).groupby(["text", "grade"], dropna=False).ngroup()
    numbers = numbers.where(~is_no_copy, -1 - numbers.index.to_series())
    copies = problems.groupby([problems, numbers]).size()
    draws = problems.groupby(problems).size()
    # The chance that two answers, drawn with replacement, are the same one: at least 1 / draws, more with copies.
    chance_same = (copies**2).groupby(level=0).sum() / draws**2
    # Without copies 1 / chance_same draws would have this chance; their share of all draws is the chances' quotient.
    # Rounded, because it must be 1 exactly where nothing is a copy: callers test if it is less.
    return round(float((1 / draws).mean() / chance_same.mean()), 6)
