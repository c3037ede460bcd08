"""Numbers per cell: Pass@1 and its error, the difference to the full cache, lengths, evictions, memory.

Accuracies and rates are fractions (0 to 1), lengths tokens. A quantity that cannot be known yet is missing
(NaN).
"""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from scipy import stats

from analysis.load import Run
from analysis.numbers.inference import bootstrap_interval, paired_tests, pass_at_k, powers_of_two, score_array
from analysis.records import OUTCOMES

CONFIDENCE = 0.95
SETTING = ["model", "policy", "variant", "budget", "keep_ratio", "local_window"]
PAIR_SUMS = ["regressions", "gains", "diff_evicted", "diff_untouched", "untouched_differ", "tokens_to_full"]

# What a policy holds: cache lengths in tokens, and as fractions of a full cache.
HOLDINGS = [
    "mean_peak_length",
    "mean_length_before",
    "mean_length_after",
    "mean_cache_length",
    "kept_memory",
    "kept_rows",
]


def cell_metrics(run: Run) -> pd.DataFrame:
    """The cells of a run with all their metrics, one row each, in the order of `run.cells`.

    Added to the columns of `load_cells`:
    graded, ungraded: completions with and without a grade; problems: how many have at least one grade.
    pass_at_1, se, ci_low, ci_high: see `pass_at_1`; boot_low, boot_high: `inference.bootstrap_interval`;
    bayes_low, bayes_high: `beta_interval`. Missing for a model with random weights, whose answers mean nothing.
    pass_at_2, pass_at_4, ...: `inference.pass_at_k`; maj_at_n: `majority`.
    diff_to_full, diff_se, diff_low, diff_high, diff_problems, p_to_full, p_holm, p_bh, regressions, gains,
    diff_evicted, diff_untouched, untouched_differ, tokens_to_full: see `difference_to_full`.
    correct, wrong, no_answer, truncated, grader_timeout: share of the graded completions with that outcome.
    hit_limit: share of all completions that stopped at the token limit.
    mean_tokens, mean_thinking_tokens, mean_peak_length, mean_evictions: means over all completions;
    max_peak_length: the largest.
    mean_length_before, mean_length_after: cache length at an eviction and just after it, mean over all
    evictions of the cell; missing without any.
    mean_cache_length: mean over all decoding steps of all completions, see `cache_rows`.
    kept_rows: mean_cache_length over what a full cache would hold in the mean for the same texts.
    evicted: share of completions that were evicted at least once.
    kept_memory: cache rows held at the peak over the rows a full cache would hold for the same texts.
    tokens_per_second: tokens of all sequences decoded together, per second of decoding, eviction included.
    kv_bytes_allocated, kv_bytes_analytic: largest over the cell's stretches, for all slots together.
    """
    graded = graded_rows(run)
    parts: list[pd.DataFrame | pd.Series] = [
        pass_at_1(graded),
        several_draws(graded),
        difference_to_full(run.cells, run.completions.loc[graded.index]),
        _outcome_shares(graded),
        _completion_means(run.completions),
        _throughput(run.stats),
    ]
    table = run.cells.set_index("cell_id")
    table = table.join(parts).reset_index()
    for column in ("graded", "problems", "diff_problems"):
        table[column] = table[column].fillna(0).astype("int64")
    table["ungraded"] = (table["completions"] - table["graded"]).where(~table["random_weights"], 0)
    return table


def graded_rows(run: Run) -> pd.DataFrame:
    """The completions that have a grade worth counting: those of a model with random weights do not."""
    meaningless = run.cells.loc[run.cells["random_weights"], "cell_id"]
    rows = run.completions
    return rows[rows["correct"].notna() & ~rows["cell_id"].isin(meaningless)]


def pass_at_1(graded: pd.DataFrame) -> pd.DataFrame:
    """Pass@1 per cell: the mean over problems of the mean over draws; every outcome but "correct" counts 0.

    The draws of one problem are not independent, so the standard error is the clustered one: the standard
    deviation (n - 1) of the n per-problem means over sqrt(n) (Miller 2024, "Adding error bars to evals",
    arXiv 2411.00640, section 2.2, for draws averaged per problem). It speaks of problems like these, not of
    these problems run again. The interval is `wilson_interval` on the effective sample size.

    Args:
        graded: rows with cell_id, problem_id, correct.

    Returns:
        Indexed by cell_id: graded, problems, pass_at_1, se (missing with one problem), ci_low, ci_high.
    """
    per_problem = graded.groupby(["cell_id", "problem_id"], observed=True, sort=False)["correct"].agg(["mean", "size"])
    cells = per_problem.groupby("cell_id", observed=True)
    table = pd.DataFrame({"graded": cells["size"].sum(), "problems": cells["mean"].size()})
    table["pass_at_1"] = cells["mean"].mean()
    table["se"] = cells["mean"].std(ddof=1) / np.sqrt(table["problems"])
    size = effective_size(table["pass_at_1"], table["se"], table["problems"], table["graded"])
    table["ci_low"], table["ci_high"] = wilson_interval(table["pass_at_1"], size)
    table["bayes_low"], table["bayes_high"] = beta_interval(table["pass_at_1"], size)
    table["boot_low"] = table["boot_high"] = np.nan
    means = {name: rows.to_numpy() for name, rows in cells["mean"]}
    # Cells with the same number of problems are resampled together.
    for count in table["problems"].unique():
        names = table.index[table["problems"] == count]
        low, high = bootstrap_interval(np.stack([means[name] for name in names]))
        table.loc[names, "boot_low"], table.loc[names, "boot_high"] = low, high
    return table


def beta_interval(p: pd.Series, size: pd.Series) -> tuple[pd.Series, pd.Series]:
    """The central 95% of the posterior Beta(1/2 + p n, 1/2 + (1 - p) n): Jeffreys' prior, n the effective size.

    For few problems: it is never empty, and at p = 0 or 1 it ends there (Brown, Cai and DasGupta 2001).
    """
    low = stats.beta.ppf((1 - CONFIDENCE) / 2, 0.5 + p * size, 0.5 + (1 - p) * size)
    high = stats.beta.ppf((1 + CONFIDENCE) / 2, 0.5 + p * size, 0.5 + (1 - p) * size)
    return pd.Series(np.where(p <= 0, 0.0, low), p.index), pd.Series(np.where(p >= 1, 1.0, high), p.index)


def several_draws(graded: pd.DataFrame) -> pd.DataFrame:
    """What needs more than one draw per problem: pass@k for k = 2, 4, ... and all, and the majority's answer.

    Returns:
        Indexed by cell_id: pass_at_2, pass_at_4, ..., maj_at_n; no column that no cell has.
    """
    key = ["cell_id", "problem_id"]
    counts = graded.groupby(key, observed=True, sort=False)["correct"].agg(["sum", "size"])
    most = int(counts["size"].max()) if len(counts) else 1
    table = pd.DataFrame(index=pd.Index(counts.index.unique("cell_id"), name="cell_id"))
    for k in powers_of_two(most):
        counts["value"] = pass_at_k(counts["sum"], counts["size"], k)
        # One problem without k draws, and the mean would be over other problems than its neighbour's.
        table[f"pass_at_{k}"] = counts.groupby("cell_id", observed=True)["value"].agg(lambda v: v.mean(skipna=False))
    if most > 1:
        table["maj_at_n"] = majority(graded).groupby("cell_id", observed=True).mean()
    return table


def majority(graded: pd.DataFrame) -> pd.Series:
    """Per (cell, problem) the chance that the most frequent answer is right; several of them share the chance.

    A completion without an answer has no vote; a problem without any answer is not solved.
    """
    key = ["cell_id", "problem_id"]
    votes = graded.assign(answer=graded["answer"].astype("str").where(graded["answer"].notna()))
    tally = votes.groupby([*key, "answer"], observed=True)["correct"].agg(["size", "max"]).reset_index()
    top = tally[tally["size"] == tally.groupby(key, observed=True)["size"].transform("max")]
    won = top.groupby(key, observed=True)["max"].mean()
    every = graded.groupby(key, observed=True).size().index
    return won.reindex(every, fill_value=0.0)


def effective_size(p: pd.Series, se: pd.Series, problems: pd.Series, completions: pd.Series) -> pd.Series:
    """How many independent answers a cell is worth: p (1 - p) / se^2, within [problems, completions].

    The standard error is known no better than from so many problems: the size is scaled by the squared ratio of
    Student's quantiles at completions - 1 and problems - 1 degrees of freedom (Korn and Graubard 1998). With one
    draw it is the number of problems. At p = 0 or 1 the draws say nothing about how alike they are,
    so a problem counts once, which is the cautious end.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        size = p * (1 - p) / se**2
        quantiles = [stats.t.ppf((1 + CONFIDENCE) / 2, count - 1) for count in (completions, problems)]
        size = size * (quantiles[0] / quantiles[1]) ** 2
    return size.fillna(problems).clip(lower=problems, upper=completions)


def wilson_interval(p: pd.Series, size: pd.Series) -> tuple[pd.Series, pd.Series]:
    """The 95% Wilson score interval of a proportion `p` in `size` independent trials (need not be whole).

    A t interval is empty at p = 0 or 1 and leaves [0, 1] near them, where small benchmarks often lie; Wilson
    does neither. Sources: Wilson 1927; Brown, Cai and DasGupta 2001 (small n); with the effective sample size
    of clustered data, Korn and Graubard 1998 and Franco et al. 2019 (J. Surv. Stat. Methodol. 7). With one
    draw per problem it is the plain Wilson interval,
    `scipy.stats.binomtest(...).proportion_ci(method="wilson")`.
    """
    z = stats.norm.ppf((1 + CONFIDENCE) / 2)
    middle = (p + z**2 / (2 * size)) / (1 + z**2 / size)
    half = z / (1 + z**2 / size) * np.sqrt(p * (1 - p) / size + z**2 / (4 * size**2))
    return (middle - half).clip(lower=0.0), (middle + half).clip(upper=1.0)


def difference_to_full(cells: pd.DataFrame, graded: pd.DataFrame) -> pd.DataFrame:
    """Pass@1 minus the full cache's, on the (problem, draw) pairs that both have graded.

    Paired with the full-cache cell of the same model, benchmark, decoding and seed. Draws that share a seed
    share their random numbers, so a pair is equal until eviction acts; what the two have in common cancels.
    Tests, intervals and corrections (over the cells of one condition) are `inference.paired_tests`'.

    Args:
        cells: `load_cells`; graded: rows of `load_completions` with a grade.

    Returns:
        Indexed by cell_id, cells that have a full-cache twin only: diff_to_full, diff_se, diff_low, diff_high,
        diff_problems, p_to_full, p_holm, p_bh; regressions and gains (pairs that only the full cache, only this
        cell has right); diff_evicted and diff_untouched (mean difference over the pairs in which eviction acted and
        over the rest); untouched_differ (pairs of the rest whose outcome or length differs: none, if the seed and
        the arithmetic are the same); tokens_to_full (tokens written, over the full cache's for the same pairs).
    """
    parts = []
    for _, group in cells.groupby("condition", sort=False):
        full = group.loc[group["policy"] == "full", "cell_id"]
        others = list(group.loc[group["policy"] != "full", "cell_id"])
        rows = graded[graded["cell_id"].isin(group["cell_id"])]
        if full.empty or not others or rows.empty:
            continue
        scores = score_array(rows, [full.iloc[0], *others])
        tests = paired_tests(scores[1:], scores[0]).set_index(pd.Index(others, name="cell_id"))
        parts.append(tests.join(_where_eviction_acted(rows, full.iloc[0])))
    names = {"difference": "diff_to_full", "se": "diff_se", "low": "diff_low", "high": "diff_high"}
    names |= {"problems": "diff_problems", "p": "p_to_full"}
    table = pd.concat(parts) if parts else _no_differences()
    table = table.rename(columns=names)
    return table[table["diff_problems"] > 0]


def _no_differences() -> pd.DataFrame:
    empty = paired_tests(np.empty((0, 1, 1)), np.empty((1, 1)))
    return empty.reindex(columns=[*empty.columns, *PAIR_SUMS]).astype("float64")


def _where_eviction_acted(rows: pd.DataFrame, full: str) -> pd.DataFrame:
    key = ["problem_id", "draw"]
    twin = rows.loc[rows["cell_id"] == full, [*key, "correct", "num_tokens"]]
    ours = rows.loc[rows["cell_id"] != full, ["cell_id", *key, "correct", "num_tokens", "evictions"]]
    pairs = ours.merge(twin, on=key, suffixes=("", "_full"))
    difference = pairs["correct"] - pairs["correct_full"]
    acted = pairs["evictions"] > 0
    changed = (difference != 0) | (pairs["num_tokens"] != pairs["num_tokens_full"])
    pairs = pairs.assign(
        regressions=difference < 0,
        gains=difference > 0,
        diff_evicted=difference.where(acted),
        diff_untouched=difference.where(~acted),
        untouched_differ=changed & ~acted,
    )
    groups = pairs.groupby("cell_id", observed=True)
    table = groups[["regressions", "gains", "untouched_differ"]].sum()
    table = table.join(groups[["diff_evicted", "diff_untouched"]].mean())
    tokens = groups[["num_tokens", "num_tokens_full"]].sum()
    table["tokens_to_full"] = tokens["num_tokens"] / tokens["num_tokens_full"]
    table.index = table.index.astype("object")
    return table[PAIR_SUMS]


def cache_rows(completions: pd.DataFrame) -> pd.DataFrame:
    """The cache length summed over a completion's decoding steps, in tokens times steps.

    Step s = 0 .. n - 1, with n = num_tokens, feeds the s-th generated token (step 0: the prompt's last token)
    and draws the next. Its length is what it attends over: its own token counts, and so do the tokens that
    an eviction frees right after it. With a full cache that is prompt_tokens + s. An eviction at step t from
    b to a tokens makes each of the n - 1 - t later steps shorter by b - a, so between evictions the length
    grows by one a step, and the sum is

        n prompt_tokens + n (n - 1) / 2  -  sum over evictions of (b - a) (n - 1 - t).

    Args:
        completions: rows with prompt_tokens, num_tokens, length_before_sum, length_after_sum, freed_step_sum.

    Returns:
        full: the sum for a full cache and the same text; held: the sum with the evictions.
    """
    steps = completions["num_tokens"]
    full = steps * completions["prompt_tokens"] + steps * (steps - 1) // 2
    freed = completions["length_before_sum"] - completions["length_after_sum"]
    return pd.DataFrame({"full": full, "held": full - (steps - 1) * freed + completions["freed_step_sum"]})


def mean_over_benchmarks(metrics: pd.DataFrame, benchmarks: Sequence[str]) -> pd.DataFrame:
    """Each policy setting's mean Pass@1 over `benchmarks`; missing where one of them has no grade.

    Benchmarks are independent, so the standard error is sqrt(sum of se^2) / number of benchmarks. What the
    cache holds is averaged too, each benchmark alike; a length just after an eviction is missing where one
    of the benchmarks saw none.

    Returns:
        One row per setting (model, model_title and `SETTING`): pass_at_1, se, `HOLDINGS`, max_peak_length
        (the largest), status (done if all of them are), completions.
    """
    chosen = metrics[metrics["benchmark"].isin(benchmarks)].drop_duplicates([*SETTING, "benchmark"])
    chosen = chosen.assign(variance=chosen["se"] ** 2, unfinished=chosen["status"] != "done")
    groups = chosen.groupby([*SETTING, "model_title"], dropna=False, sort=False)
    table = groups.agg(unfinished=("unfinished", "any"), completions=("completions", "sum"))
    count = len(benchmarks)
    means = groups[["pass_at_1", *HOLDINGS]].sum(min_count=count) / count
    table = table.join(means).join(groups["max_peak_length"].max())
    table["se"] = np.sqrt(groups["variance"].sum(min_count=count)) / count
    table["status"] = np.where(table.pop("unfinished"), "partial", "done")
    return table.reset_index()


def _outcome_shares(graded: pd.DataFrame) -> pd.DataFrame:
    counts = graded.groupby(["cell_id", "outcome"], observed=True).size().unstack(fill_value=0)
    counts = counts.reindex(columns=list(OUTCOMES), fill_value=0)
    counts.columns = pd.Index(list(OUTCOMES))
    return counts.div(counts.sum(axis=1), axis=0)


def _completion_means(completions: pd.DataFrame) -> pd.DataFrame:
    rows = completions.assign(
        hit_limit=completions["stop_reason"] == "length",
        evicted=completions["evictions"] > 0,
        # The last token of a text is drawn but never enters the cache.
        full_length=completions["prompt_tokens"] + completions["num_tokens"] - 1,
    ).join(cache_rows(completions))
    table = rows.groupby("cell_id", observed=True).agg(
        hit_limit=("hit_limit", "mean"),
        mean_tokens=("num_tokens", "mean"),
        mean_thinking_tokens=("thinking_tokens", "mean"),
        mean_peak_length=("peak_length", "mean"),
        max_peak_length=("peak_length", "max"),
        mean_evictions=("evictions", "mean"),
        evicted=("evicted", "mean"),
        full_length=("full_length", "mean"),
    )
    table["kept_memory"] = (table["mean_peak_length"] / table.pop("full_length")).clip(upper=1.0)
    sums = rows.groupby("cell_id", observed=True)[
        ["num_tokens", "evictions", "length_before_sum", "length_after_sum", "full", "held"]
    ].sum()
    evictions = sums["evictions"].where(sums["evictions"] > 0)
    table["mean_length_before"] = sums["length_before_sum"] / evictions
    table["mean_length_after"] = sums["length_after_sum"] / evictions
    table["mean_cache_length"] = sums["held"] / sums["num_tokens"].where(sums["num_tokens"] > 0)
    table["kept_rows"] = sums["held"] / sums["full"].where(sums["full"] > 0)
    return table


def _throughput(stat_rows: pd.DataFrame) -> pd.DataFrame:
    table = stat_rows.set_index("cell_id")
    speed = table["tokens_total"] / table["decode_seconds"].where(table["decode_seconds"] > 0)
    return table[["kv_bytes_allocated", "kv_bytes_analytic"]].assign(tokens_per_second=speed)
