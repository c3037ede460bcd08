"""Write numbers, settings and names, the same in pictures, tables and the terminal."""

import math
from collections import Counter, namedtuple
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

from kvsweep.messages.escape import csv_cell, markdown_text

# Colour scales of heatmaps: each over its own values, all over the same, or by the paired difference to the full cache.
Scale = Literal["own", "shared", "diff_from_full"]

MISSING, UNFINISHED, UNGRADED, UNTOUCHED, UNPACKED = "–", "*", "?", "=", "§"
UNSURE, STOPPED = "‡", "°"
SAFE, SMALL_LOSS, WORSE = "✓", "(✓)", "†"
MARKS = {
    MISSING: "no result",
    UNGRADED: "not graded yet",
    UNFINISHED: "not finished",
    SAFE: "safe: very likely loses less than the margin",
    SMALL_LOSS: "small loss: surely loses, by less than the margin",
    WORSE: "worse: surely loses, how much is unclear",
    UNTOUCHED: "nothing was evicted: the full cache itself",
    UNPACKED: "no row was packed: all in the model's precision",
    STOPPED: "decided early: fewer draws, so the score leans the way of its label",
    UNSURE: "a reading of the published figure is doubted",
}
DECISION_MARKS = {"safe": SAFE, "small loss": SMALL_LOSS, "worse": WORSE}

# Inches: the width of a paper's column, and of a printed page between its margins (18 cm).
COLUMN_WIDTH, PAGE_WIDTH = 3.3, 18 / 2.54

# A sweep's axes as sentences name them, in this order. Papers call what stays the KV budget; the key `budget` is the
# cache length at which eviction fires.
AXES = {"keep_ratio": "keep ratio", "local_window": "window", "budget": "trigger"}

# An equation between numbers, such as `3 x 4 = 12`.
EQUATION = r"\d+(?:\s*[-+*/×·x]\s*\d+)+\s*=\s*-?\d+"

# The policies' names in their papers, in display order.
POLICY_TITLES = {
    "full": "full cache", "full_packed": "all rows, packed", "dynts": "DynTS", "no_question": "DynTS (no question)",
    "no_window": "DynTS (no window)", "question_window": "question + window",
    "rkv": "R-KV", "rkv_paper": "R-KV (paper)",
    "rkv_dynts_code": "R-KV (DynTS code)", "snapkv": "SnapKV", "snapkv_dynts_code": "SnapKV (DynTS code)",
    "h2o": "H2O", "h2o_dynts_code": "H2O (DynTS code)", "tova": "TOVA", "tova_kvpress": "TOVA (kvpress)",
    "vase": "VaSE", "gkv": "G-KV", "triattention": "TriAttention", "rpc": "RPC", "caote": "CAOTE",
    "longflow": "LongFlow", "inertia": "InertiaKV", "raas": "RaaS", "lazyeviction": "LazyEviction",
    "keydiff": "KeyDiff", "knorm": "K-norm", "lagkv": "LagKV", "lagkv_16": "LagKV (16)", "sepllm": "SepLLM",
    "sepllm_dynts_code": "SepLLM (DynTS code)", "streaming_llm": "StreamingLLM",
    "streaming_llm_dynts_code": "StreamingLLM (DynTS code)", "window": "window", "random_head": "random per head",
    "random": "random", "bottom": "bottom", "dynts_answer": "DynTS (answer)", "dynts_far_max": "DynTS (far_max)",
    "dynts_later": "DynTS (later)", "dynts_sum": "DynTS (answer + far_max)", "oracle_answer": "oracle (answer)",
    "oracle_far_max": "oracle (far_max)",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Look:
    """How the figures of a report are drawn."""

    width: float = COLUMN_WIDTH  # of a figure, in inches; text keeps its size
    row: float = PAGE_WIDTH  # the most of a row of heatmaps, in inches
    columns: int | None = None  # heatmaps in a row; None: as many as fit
    scale: Scale = "own"  # of the heatmaps' colours
    marks: bool = False  # draw the captions' verdicts, full caches and chance spans into the heatmaps
    interval: bool = False  # write the 95% interval under each value of a heatmap
    map: str | None = None  # a matplotlib colour map for scores; None: the figures' own
    title: str | None = None  # over each figure of heatmaps
    pdf: bool = False  # write each figure as PDF too, which takes as long as PNG and SVG together


DEFAULT_LOOK = Look()


def rows(table: Any) -> Iterator[Any]:
    """Yield the rows of a data frame as named tuples; fields may have any type."""
    row_type = namedtuple("Row", ["Index", *table.columns], rename=True)  # type: ignore[misc]
    # `itertuples` makes a series of each column, which takes most of its time where columns are many and rows are few.
    return map(row_type, table.index, *table.to_numpy(object).T)


def missing(value: Any) -> bool:
    """Say if a number is None or NaN."""
    return value is None or math.isnan(float(value))


def number(value: Any) -> str:
    """Write a setting without needless digits: "0.3", "48"; a dash if missing."""
    if missing(value):
        return MISSING
    return f"{value:.10g}"


def percent(fraction: float, *, signed: bool = False) -> str:
    """Write a fraction in percent with one decimal: 0.4733 -> "47.3", signed "+47.3"; a dash if missing."""
    if missing(fraction):
        return MISSING
    sign = "+" if signed else ""
    # z: no minus sign before 0.0.
    return f"{100 * fraction:{sign}z.1f}"


def percent_pm(fraction: float, error: float, *, signed: bool = False) -> str:
    """Write percent and standard error: "47.3 ± 2.1", or "47.3" if the error is unknown; a dash if missing."""
    value = percent(fraction, signed=signed)
    if missing(fraction) or missing(error):
        return value
    return f"{value} ± {percent(error)}"


def interval(low: float, high: float, *, signed: bool = False) -> str:
    """Write the ends of an interval in percent: "-3.1 to +0.5" if signed."""
    return f"{percent(low, signed=signed)} to {percent(high, signed=signed)}"


def span(counts: Any) -> str:
    """Write the least and the largest number of a column: "1,200 to 1,300", or "8" if all are equal."""
    low, high = counts.min(), counts.max()
    return f"{low:,.10g}" if low == high else f"{low:,.10g} to {high:,.10g}"


def decimal(value: float, digits: int = 1) -> str:
    """Write a mean with this many decimals, thousands separated; a dash if missing."""
    if missing(value):
        return MISSING
    return f"{value:,.{digits}f}"


def p_value(p: float) -> str:
    """Write a p-value with three decimals, or "<0.001"; a dash if missing."""
    if missing(p):
        return MISSING
    if p < 0.001:
        return "<0.001"
    return f"{p:.3f}"


def p_equals(p: float) -> str:
    """Write a p-value as an equation: "p = 0.023", "p < 0.001"."""
    if p < 0.001:
        return "p < 0.001"
    return f"p = {p:.3f}"


def axes(values: Any) -> str:
    """Name the axes that `values` (a mapping or a row) has: "keep ratio 0.3, window 48, trigger 128"."""
    texts = []
    for name, title in AXES.items():
        if name in values and not missing(values[name]):
            texts.append(f"{title} {number(values[name])}")
    return ", ".join(texts)


def setting(row: Any, *, trigger: bool = True) -> str:
    """Name a row's policy setting: "DynTS 0.3 / 48, trigger 128, question=free", or without the trigger."""
    name = policy_title(row.policy)
    # A grid has a policy and a trigger, and neither of these.
    sizes = [getattr(row, axis, None) for axis in ("keep_ratio", "local_window")]
    numbers = [number(size) for size in sizes if not missing(size)]
    parts = [f"{name} {' / '.join(numbers)}".rstrip()]
    if trigger:
        parts.append(axes({"budget": row.budget}))
    parts.append(row.variant)
    return ", ".join(filter(None, parts))


def settings(table: Any, *, trigger: bool = True) -> list[str]:
    """Name the policy setting of each row of a data frame."""
    return [setting(row, trigger=trigger) for row in rows(table)]


def setting_of(policy: Mapping[str, Any]) -> str:
    """Name the policy section of a cell.yaml: "DynTS 0.3 / 48, trigger 128"."""
    sizes = {name: policy.get(name) for name in AXES}
    return setting(SimpleNamespace(policy=policy["name"], variant="", **sizes))


def marks(texts: Iterable[str]) -> dict[str, int]:
    """Count how many texts have each mark, in the order of MARKS; a small loss's mark includes that of a safe cell."""
    counts = Counter[str]()
    for text in texts:
        if SMALL_LOSS in text:
            counts[SMALL_LOSS] += 1
        # "(✓)" contains "✓", the mark of a safe cell.
        other_marks = text.replace(SMALL_LOSS, "")
        counts.update(mark for mark in MARKS if mark in other_marks)
    return {mark: counts[mark] for mark in MARKS if counts[mark]}


def state_marks(row: Any) -> str:
    """Return the marks of a cell's score: nothing evicted or quantized, unfinished, fewer draws, a doubted reading."""
    marks = ""
    # A mean over benchmarks has not all of these columns.
    # With fewer bits a cache differs from the full one even if nothing was evicted.
    is_untouched = getattr(row, "evicted", None) == 0 and row.bits == 16
    if row.policy != "full" and is_untouched:
        marks += UNTOUCHED
    if getattr(row, "packed", None) == 0:
        marks += UNPACKED
    if row.status != "done":
        marks += UNFINISHED
    if getattr(row, "stopped_early", None) == True:  # noqa: E712, NaN, which is truthy, if nothing is compared
        marks += STOPPED
    # Only published scores say how sure their reading is.
    if getattr(row, "sure", "") == "no":
        marks += UNSURE
    return marks


def markdown(lines: Iterable[Iterable[str]]) -> str:
    """Write a Markdown table; the first line has the heads."""
    rows = [[*map(markdown_text, line)] for line in lines]
    rows.insert(1, ["---"] * len(rows[0]))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def csv_text(table: Any) -> str:
    """Write a data frame as CSV with all digits; no text runs as a formula."""
    return table.map(csv_cell).to_csv(index=False, lineterminator="\n")


def policy_title(policy: str, variant: str = "") -> str:
    """Name a policy in a picture: "SnapKV", "DynTS (question=free)"; `variant` is as in cells.csv."""
    title = POLICY_TITLES.get(policy, policy)
    return f"{title} ({variant})" if variant else title
