"""The tokens that evictions left of a completion, and how much of the important tokens each policy keeps."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from scipy.stats import PermutationMethod, pearsonr

from kvsweep.analysis import format
from kvsweep.analysis.format import PAGE_WIDTH
from kvsweep.analysis.pictures.style import LINE_COLORS, MARKERS, STYLE, new_figure, tidy
from kvsweep.base.errors import UserError
from kvsweep.base.records import Eviction, held_percents

MAX_NAMED = 6


@dataclass(frozen=True, kw_only=True)
class Kept:
    """The tokens that a completion's cache held after each eviction.

    Attributes:
        pieces, prompt: the text of each token of prompt and completion, and the number of the prompt's tokens.
        steps: tokens written before each eviction.
        held: [evictions, tokens] percent of (layer, key head) pairs that hold a token, NaN before it is written.
    """

    pieces: Sequence[str]
    prompt: int
    steps: Sequence[int]
    held: np.ndarray

    @property
    def gone_at(self) -> np.ndarray:
        """[tokens] number, from 0, of the eviction after which no head holds the token; -1 if a head still does."""
        gone = self.held == 0
        return np.where(gone.any(axis=0), gone.argmax(axis=0), -1)


def read_kept(pieces: Sequence[str], prompt: int, evictions: Sequence[Eviction]) -> Kept:
    """Decode the tokens that each eviction of a completion left; raises a UserError if none is stored."""
    if not evictions:
        raise UserError("this completion was never evicted: all of it stayed; choose another, or a smaller budget.")
    held = np.full((len(evictions), len(pieces)), np.nan)
    for row, eviction in zip(held, evictions, strict=True):
        percents = held_percents(eviction.held)[: len(pieces)]
        row[: len(percents)] = percents
    return Kept(pieces=pieces, prompt=prompt, steps=[e.step for e in evictions], held=held)


def kept_table(kept: Kept) -> pd.DataFrame:
    """A row per token: position, text, the eviction (from 1) that took it or 0, percent held after each eviction."""
    columns = {f"held_{number}": row for number, row in enumerate(kept.held, start=1)}
    position = np.arange(len(kept.pieces))
    return pd.DataFrame({"position": position, "text": kept.pieces, "gone_at": kept.gone_at + 1, **columns})


def retention(kept: Kept, importance: np.ndarray, start: int) -> np.ndarray:
    """Compute the share of the importance written so far that the cache holds after each eviction, [evictions].

    `importance`, [thinking], is that of the thinking tokens from position `start` on, none below 0; NaN counts nothing.
    """
    held = kept.held[:, start : start + len(importance)]
    weight = np.where(np.isnan(held) | np.isnan(importance), 0.0, importance)
    total = weight.sum(axis=1)
    return (np.nan_to_num(held) / 100 * weight).sum(axis=1) / np.where(total > 0, total, np.nan)


def rank_correlation(table: pd.DataFrame) -> tuple[float, float, int]:
    """Spearman's rho of `retained` and `pass1` over the policies, its p, and how many policies have both.

    p is that of a permutation test, exact for up to 7 policies: the usual approximation needs more of them. rho and p
    are NaN for fewer than three policies, or if all policies have the same value.
    """
    ranks = table[["retained", "pass1"]].dropna().rank()
    if len(ranks) < 3 or (ranks.nunique() == 1).any():
        return float("nan"), float("nan"), len(ranks)
    shuffled = PermutationMethod(rng=np.random.default_rng(0))
    result = pearsonr(ranks["pass1"], ranks["retained"], method=shuffled)
    return float(result.statistic), float(result.pvalue), len(ranks)


def correlation_text(table: pd.DataFrame) -> str:
    rho, p, n = rank_correlation(table)
    return f"no correlation over n = {n}" if np.isnan(rho) else f"Spearman rho {rho:.2f}, {format.p_equals(p)}, n = {n}"


def retention_figure(
    curves: pd.DataFrame, table: pd.DataFrame, lorenz: dict[str, tuple[np.ndarray, np.ndarray]], *, title: str
) -> Figure:
    """Draw the true importance that each policy holds, its score against that, and how unequal importance is.

    `curves` and `table` are `retention.by_eviction` and `by_policy`; `lorenz` has shares of tokens and importance.
    """
    # More names leave no room for the curves: the best policies have a colour, the others are grey.
    best = list(table.nlargest(MAX_NAMED, "pass1")["policy"])
    rest: dict[str, Any] = {"color": "0.8", "marker": ".", "zorder": 1}
    looks = {name: {"color": LINE_COLORS[n], "marker": MARKERS[n], "zorder": 2} for n, name in enumerate(best)}
    with matplotlib.rc_context(STYLE):
        figure = new_figure((PAGE_WIDTH, 3.0))
        left, middle, right = figure.subplots(1, 3)
        for name, rows in curves.groupby("policy", sort=False):
            left.plot(rows["eviction"], rows["retained"], markersize=3.5, linewidth=1, **looks.get(str(name), rest))
        left.set(xlabel="eviction", ylabel="true importance held", ylim=(0, 1.02))
        left.xaxis.get_major_locator().set_params(integer=True)
        for row in format.rows(table):
            label = row.policy if row.policy in looks else None
            look = looks.get(row.policy, rest)
            middle.plot(row.retained, 100 * row.pass1, linestyle="none", markersize=5, label=label, **look)
        middle.set(xlabel="true importance held", ylabel="Pass@1 (%)", xlim=(0, 1.02), ylim=(-2, 102))
        middle.set_title(correlation_text(table), fontsize=7)
        for label, (tokens, carried) in lorenz.items():
            right.plot(tokens, carried, color=LINE_COLORS[0], label=label)
        right.plot([0, 1], [0, 1], color="0.5", linestyle=":", label="all alike")
        right.axvspan(0.2, 0.3, color="0.5", alpha=0.2, linewidth=0, label="20 to 30% of the tokens")
        right.set(xlabel="tokens, most important first", ylabel="importance they carry")
        right.legend(loc="lower right")
        for axes in (left, middle, right):
            tidy(axes, grid="both")
        figure.legend(*middle.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
        figure.suptitle(title)
    return figure
