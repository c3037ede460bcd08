"""What stayed of a completion: its text with the evicted tokens shaded by when they went, as a page of its own."""

import html
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from scipy.stats import permutation_test

from analysis import words as formats
from analysis.pictures.style import PAGE_WIDTH, STYLE, new_figure
from analysis.records import Eviction, UserError, held_percents

# From the first eviction to the last; more evictions than shades share them.
_SHADES = ("#8c2d04", "#cc4c02", "#ec7014", "#fe9929", "#fec44f", "#fee391")
_DARK = 3
MAX_NAMED = 6


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What a completion's cache held.

    Attributes:
        pieces: the text of each token, prompt and completion.
        prompt: tokens of the prompt.
        steps: tokens written before each eviction.
        held: [evictions, tokens] percent of (layer, key head) pairs that hold a token after an eviction; NaN where the
            token was not yet written.
    """

    pieces: Sequence[str]
    prompt: int
    steps: Sequence[int]
    held: np.ndarray

    @property
    def gone_at(self) -> np.ndarray:
        """[tokens] the number, from 0, of the eviction after which no head holds the token; -1 if some still does."""
        gone = self.held == 0
        return np.where(gone.any(axis=0), gone.argmax(axis=0), -1)


def read_kept(pieces: Sequence[str], prompt: int, evictions: Sequence[Eviction]) -> Kept:
    """Decode what the evictions of a completion left.

    Raises:
        UserError: nothing was evicted, or the run did not store what was.
    """
    if not evictions:
        raise UserError("this completion was never evicted: all of it stayed; choose another, or a smaller budget.")
    if not all(e.held for e in evictions):
        raise UserError(
            "this run did not store what each eviction left (it is of an older version): run the cell again."
        )
    held = np.full((len(evictions), len(pieces)), np.nan)
    for row, eviction in enumerate(evictions):
        percents = held_percents(eviction.held)[: len(pieces)]
        held[row, : len(percents)] = percents
    return Kept(pieces=pieces, prompt=prompt, steps=[e.step for e in evictions], held=held)


def kept_table(kept: Kept) -> pd.DataFrame:
    """One row per token: position, text, the eviction (from 1) that took it or 0, percent held after each eviction."""
    columns = {f"held_{number}": row for number, row in enumerate(kept.held, start=1)}
    position = np.arange(len(kept.pieces))
    return pd.DataFrame({"position": position, "text": kept.pieces, "gone_at": kept.gone_at + 1, **columns})


def kept_html(kept: Kept, *, title: str, rows: bool = False) -> str:
    """A page of its own: the whole text, evicted tokens shaded by when they went; with `rows` once per eviction."""
    legend = "".join(
        f'<span style="{_shade(number, len(kept.steps))}"> eviction {number + 1} (token {step}) </span> '
        for number, step in enumerate(kept.steps)
    )
    parts = [_text(kept, kept.gone_at, "The whole text", len(kept.pieces))]
    for number, step in enumerate(kept.steps) if rows else ():
        held = kept.held[number]
        gone = np.where(np.isin(kept.gone_at, range(number + 1)), kept.gone_at, -1)
        live = round(float(np.nansum(held)) / 100)
        head = f"After eviction {number + 1}: {live} of {int((~np.isnan(held)).sum())} tokens held"
        parts.append(_text(kept, gone, head, kept.prompt + step))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f"<title>{html.escape(title)}</title><style>"
        "body{font:14px/1.6 'DejaVu Sans',sans-serif;max-width:60em;margin:2em auto;padding:0 1em}"
        ".text{white-space:pre-wrap;overflow-wrap:anywhere;border:1px solid #ccc;padding:.6em}"
        ".prompt{border-bottom:1px solid #999}h2{font-size:1em}</style></head><body>"
        f"<h1 style='font-size:1.2em'>{html.escape(title)}</h1>"
        f"<p>Plain: kept to the end. Underlined: the question. Gone with: {legend}</p>{''.join(parts)}</body></html>\n"
    )


def _text(kept: Kept, gone: np.ndarray, head: str, length: int) -> str:
    spans = []
    for number, piece in enumerate(kept.pieces[:length]):
        style = f' style="{_shade(int(gone[number]), len(kept.steps))}"' if gone[number] >= 0 else ""
        question = ' class="prompt"' if number < kept.prompt else ""
        spans.append(f"<span{question}{style}>{html.escape(piece)}</span>")
    return f'<h2>{html.escape(head)}</h2><div class="text">{"".join(spans)}</div>'


def _shade(number: int, evictions: int) -> str:
    index = number * (len(_SHADES) - 1) // max(1, evictions - 1) if evictions > 1 else 1
    return f"background:{_SHADES[index]};color:{'#fff' if index < _DARK else '#000'}"


def retention(kept: Kept, importance: np.ndarray, start: int) -> np.ndarray:
    """[evictions] share of the importance written so far that the cache still holds after each eviction, 0 to 1.

    Args:
        kept: what was held.
        importance: [thinking] importance of the thinking tokens, none below 0; NaN counts nothing.
        start: position of the first thinking token.
    """
    held = kept.held[:, start : start + len(importance)]
    weight = np.where(np.isnan(held) | np.isnan(importance), 0.0, importance)
    total = weight.sum(axis=1)
    return (np.nan_to_num(held) / 100 * weight).sum(axis=1) / np.where(total > 0, total, np.nan)


def rank_correlation(table: pd.DataFrame) -> tuple[float, float, int]:
    """Spearman's rho of `retained` and `pass1` over the policies, its p, and how many policies have both.

    p is of a permutation test, exact for up to 7 policies: the usual approximation asks for more than there may be. NaN
    for fewer than three policies or where all have one value.
    """
    known = table.dropna(subset=["retained", "pass1"])
    ranks = known[["retained", "pass1"]].rank()
    if len(known) < 3 or (ranks.nunique() == 1).any():
        return float("nan"), float("nan"), len(known)
    one, other = ((ranks - ranks.mean()) / ranks.std(ddof=0)).to_numpy().T

    def mean_product(shuffled: np.ndarray, axis: int) -> np.ndarray:
        return (shuffled * other).mean(axis=axis)

    result: Any = permutation_test(
        (one,), mean_product, permutation_type="pairings", vectorized=True, rng=np.random.default_rng(0)
    )
    return float(result.statistic), float(result.pvalue), len(known)


def correlation_text(table: pd.DataFrame) -> str:
    """Spearman's rho, its p and the number of policies in words."""
    rho, p, n = rank_correlation(table)
    if np.isnan(rho):
        return f"no correlation over n = {n}"
    shown = formats.p_value(p)
    sign, digits = ("<", shown[1:]) if shown.startswith("<") else ("=", shown)
    return f"Spearman rho {rho:.2f}, p {sign} {digits}, n = {n}"


def retention_figure(
    curves: pd.DataFrame, table: pd.DataFrame, lorenz: dict[str, tuple[np.ndarray, np.ndarray]], *, title: str
) -> Figure:
    """How much true importance each policy holds, what it scores, and how unequal importance is.

    Args:
        curves: policy, eviction (from 1), retained (0 to 1), texts.
        table: policy, retained (mean over its evictions), pass1 (0 to 1).
        lorenz: per label, shares of the tokens and of the importance they carry.
        title: the label and the run.
    """
    with matplotlib.rc_context(STYLE):
        figure = new_figure((PAGE_WIDTH, 3.5))
        left, middle, right = figure.subplots(1, 3)
        # More names than these leave no room for the curves: the best are told apart, the others are grey.
        best = set(table.nlargest(MAX_NAMED, "pass1")["policy"])
        numbers = itertools.count()
        colors = {name: f"C{next(numbers)}" if name in best else "lightgrey" for name in table["policy"]}
        for name, rows in sorted(curves.groupby("policy", sort=False), key=lambda item: item[0] in best):
            shown = {"color": colors[name], "label": name if name in best else None}
            left.plot(rows["eviction"], rows["retained"], marker="o", markersize=3, **shown)
        left.set(xlabel="Eviction", ylabel="True importance held", ylim=(0, 1.02))
        left.xaxis.get_major_locator().set_params(integer=True)
        figure.legend(loc="outside lower center", ncols=3, fontsize=6, frameon=False)
        middle.scatter(table["retained"], table["pass1"], c=[colors[name] for name in table["policy"]])
        middle.set(xlabel="True importance held", ylabel="Pass@1", xlim=(0, 1.02), ylim=(-0.02, 1.02))
        middle.set_title(correlation_text(table), fontsize=7)
        for label, (tokens, carried) in lorenz.items():
            right.plot(tokens, carried, label=label)
        right.plot([0, 1], [0, 1], color="grey", linestyle=":")
        right.axvspan(0.2, 0.3, color="grey", alpha=0.2, linewidth=0)
        right.set(xlabel="Tokens, most important first", ylabel="Importance they carry")
        right.legend(fontsize=6)
        figure.suptitle(title, fontsize=10)
    return figure
