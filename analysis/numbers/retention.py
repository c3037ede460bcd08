"""How much true importance the policies of a run held at their evictions, and what the policies scored."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import pandas as pd


def by_eviction(held: pd.DataFrame) -> pd.DataFrame:
    """The mean share of importance held after each eviction: policy, eviction, retained, texts (a count).

    `held` has one row per text and eviction: policy, text (its number), eviction (from 1), retained (0 to 1).
    """
    groups = held.groupby(["policy", "eviction"], as_index=False)
    return groups.agg(retained=("retained", "mean"), texts=("retained", "count"))


def by_policy(held: pd.DataFrame, correct: Mapping[str, Sequence[int]]) -> pd.DataFrame:
    """The mean share of importance held over all evictions, and Pass@1: policy, retained, texts, pass1.

    `held` is as in `by_eviction`; `correct` has 1 or 0 per graded completion of a policy, else pass1 is NaN.
    """
    table = held.groupby("policy", as_index=False).agg(retained=("retained", "mean"), texts=("text", "nunique"))
    grades = [correct.get(policy) for policy in table["policy"]]
    return table.assign(pass1=[float(np.mean(own)) if own else np.nan for own in grades])


def mean_lorenz(curves: Iterable[tuple[np.ndarray, np.ndarray]]) -> pd.DataFrame:
    """The mean of Lorenz curves (shares of tokens, shares of importance) at every percent: tokens, importance."""
    percents = np.linspace(0, 1, 101)
    carried = np.mean([np.interp(percents, tokens, shares) for tokens, shares in curves], axis=0)
    return pd.DataFrame({"tokens": percents, "importance": carried})
