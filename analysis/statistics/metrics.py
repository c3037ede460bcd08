"""Numbers per cell: Pass@1 and its error, the difference to the full cache, lengths, evictions, memory.

report/columns.txt describes every column. Accuracies and rates are fractions (0 to 1), lengths tokens. An unknown
quantity is missing (NaN). scipy and statsmodels load slowly, so the functions that need them import them.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from kvsweep.analysis import notation
from kvsweep.analysis.load import COUNTS, Run, load_texts
from kvsweep.analysis.statistics.against_full import decide_cells
from kvsweep.analysis.statistics.inference import LEVEL, pass_at_k
from kvsweep.analysis.statistics.pass_at_1 import mean_and_error
from kvsweep.messages.errors import UserError
from kvsweep.run_files.loops import LEAST_REPEATS, LEAST_TOKENS, find_loop
from kvsweep.run_files.row_types import Completion, ignore, view
from kvsweep.run_files.run_reader import StoredCell

SETTING = ["model", "policy", "variant", "budget", "keep_ratio", "local_window"]
PAIR_SUMS = ["regressions", "gains", "diff_evicted", "diff_untouched", "untouched_differ", "tokens_to_full"]

# Cache lengths in tokens, and as fractions of the full cache's length.
HOLDINGS = ["mean_peak_length", "mean_length_before", "mean_length_after", "mean_cache_length"]
HOLDINGS += ["kept_memory", "kept_memory_mean", "kept_rows", "kept_memory_own", "kept_rows_own"]


def cell_metrics(run: Run, margin: float | None = None) -> pd.DataFrame:
    """Return `run.cells` with all columns of cells.csv; `margin` (a fraction) replaces the run's own margin."""
    graded = graded_rows(run)
    parts: list[pd.DataFrame | pd.Series] = [
        score_intervals(graded),
        several_draws(graded),
        difference_to_full(run.cells, graded),
        decide_cells(run.cells, graded, run.provenance, margin),
        texts_differ(run),
        _outcomes(graded),
        _completion_means(run),
        _kept_of_full(run),
        looping(run),
        run.stats,
    ]
    table = run.cells.set_index("cell_id").join(parts).reset_index()
    for column in ("graded", "problems", "diff_problems"):
        table[column] = table[column].fillna(0).astype("int64")
    # The answers of random weights mean nothing and wait for no grade.
    table["ungraded"] = (table["completions"] - table["graded"]).where(~table["random_weights"], 0)
    # Bytes of a completion (mean over steps, longest, fixed part) and of the weights; missing in older runs.
    sizes = _sizes(table["cell_id"], run.provenance)
    return table.assign(
        kv_bytes_mean=sizes["row"] * table["mean_cache_length"] + sizes["newest"] + sizes["fixed"],
        kv_bytes_peak=sizes["row"] * table["max_peak_length"] + sizes["newest"] + sizes["fixed"],
        kv_bytes_fixed=sizes["fixed"],
        weight_bytes=sizes["weights"],
    )


def cell_scores(run: Run) -> pd.DataFrame:
    """Return a run's cells with Pass@1, its error and the means of texts; after rounds also what stopped early.

    Without rounds neither scipy nor statsmodels is imported.
    """
    graded = graded_rows(run)
    scores = run.cells.set_index("cell_id").join(pass_at_1(graded))
    has_rounds = any(record.get("rounds") for record in run.provenance.values())
    if has_rounds:
        scores = scores.join(decide_cells(run.cells, graded, run.provenance)["stopped_early"])
    return scores.join(_completion_means(run)).reset_index()


def model_title(metrics: pd.DataFrame, model: str) -> str:
    return metrics.loc[metrics["model"] == model, "model_title"].iloc[0]


def cells_of_model(metrics: pd.DataFrame, model: str) -> pd.DataFrame:
    """Return a model's cells; of several with one setting and benchmark, such as several seeds, only the first."""
    return metrics[metrics["model"] == model].drop_duplicates([*SETTING, "benchmark"])


def full_first(cells: pd.DataFrame) -> pd.DataFrame:
    """Return the cells with the full caches before the others, each in their order."""
    return cells.sort_values("policy", key=lambda policy: policy != "full", kind="stable")


def graded_rows(run: Run) -> pd.DataFrame:
    """Return the completions with a grade; a model with random weights has none, because its answers mean nothing."""
    meaningless = run.cells.loc[run.cells["random_weights"], "cell_id"]
    rows = run.completions
    return rows[rows["correct"].notna() & ~rows["cell_id"].isin(meaningless)]


def pass_at_1(graded: pd.DataFrame) -> pd.DataFrame:
    """Return Pass@1 per cell: the mean over problems of the mean over draws, with the error of `mean_and_error`.

    Columns, by cell_id: graded (completions), problems, pass_at_1, se.
    """
    draws = graded.groupby(["cell_id", "problem_id"], observed=True, sort=False)["correct"]
    problems = draws.agg(["mean", "size"])
    cells = problems.groupby("cell_id", observed=True)
    # Of each cell: the draws of all problems, and the number of problems.
    table = pd.DataFrame({"graded": cells["size"].sum(), "problems": cells["mean"].size()})
    scores = [mean_and_error(means.to_list()) for _, means in cells["mean"]]
    return table.join(pd.DataFrame(scores, table.index, ["pass_at_1", "se"], dtype="float64"))


def score_intervals(graded: pd.DataFrame) -> pd.DataFrame:
    """Add Wilson's 95% score interval to `pass_at_1`, as ci_low and ci_high.

    Small benchmarks are often near 0 or 1, where a t interval is empty or leaves [0, 1]. Wilson's does neither (Brown,
    Cai and DasGupta 2001); with `effective_size` it holds for clustered data (Korn and Graubard 1998, Franco et al.
    2019, J. Surv. Stat. Methodol. 7).
    """
    from statsmodels.stats.proportion import proportion_confint

    table = pass_at_1(graded)
    score, size = table["pass_at_1"], effective_size(table)
    table["ci_low"], table["ci_high"] = proportion_confint(score * size, size, method="wilson")
    return table


def effective_size(table: pd.DataFrame) -> pd.Series:
    """Return the effective number of independent answers per cell: p (1 - p) / se^2, within [problems, graded].

    Few problems give an uncertain standard error, so the size is scaled by the squared ratio of Student's quantiles at
    graded - 1 and problems - 1 degrees of freedom (Korn and Graubard 1998). With one draw the size is the number of
    problems. At p = 0 or 1 the draws do not show how much they depend on each other; each problem then counts once, the
    cautious choice.
    """
    from scipy import stats

    score = table["pass_at_1"]
    with np.errstate(divide="ignore", invalid="ignore"):
        size = score * (1 - score) / table["se"] ** 2
        by_answers, by_problems = stats.t.ppf(1 - LEVEL / 2, table[["graded", "problems"]] - 1).T
        size = size * (by_answers / by_problems) ** 2
    return size.fillna(table["problems"]).clip(lower=table["problems"], upper=table["graded"])


def several_draws(graded: pd.DataFrame) -> pd.DataFrame:
    """Return each cell's scores over several draws: pass_at_2, pass_at_4, ..., pass@k of all draws, and maj_at_n."""
    problems = graded.groupby(["cell_id", "problem_id"], observed=True, sort=False)["correct"].agg(["sum", "size"])
    table = pd.DataFrame(index=problems.index.unique("cell_id"))
    if not (problems["size"] > 1).any():
        return table
    draws = int(problems["size"].max())
    # 2, 4, 8, ... up to the number of draws, and this number.
    ks = {draws} | {2**exponent for exponent in range(1, draws.bit_length())}
    for k in sorted(ks):
        problems["value"] = pass_at_k(problems["sum"], problems["size"], k)
        # A problem with fewer draws makes the mean missing: without it, cells would be compared on different problems.
        of_cell = problems.groupby("cell_id", observed=True)["value"]
        table[f"pass_at_{k}"] = of_cell.agg(lambda values: values.mean(skipna=False))
    table["maj_at_n"] = majority(graded).groupby("cell_id", observed=True).mean()
    return table


def majority(graded: pd.DataFrame) -> pd.Series:
    """Chance per (cell, problem) that the most frequent answer is right; ties share it, a missing answer never wins."""
    of_problem = ["cell_id", "problem_id"]
    # An answer is right if any of its equals was graded right. Missing answers form no group.
    answers = graded.groupby([*of_problem, "answer"], observed=True)["correct"].agg(["size", "max"])
    most_votes = answers.groupby(of_problem, observed=True)["size"].transform("max")
    winners = answers[answers["size"] == most_votes]
    chance_right = winners.groupby(of_problem, observed=True)["max"].mean()
    all_problems = graded.groupby(of_problem, observed=True).size().index
    return chance_right.reindex(all_problems, fill_value=0.0)


def difference_to_full(cells: pd.DataFrame, graded: pd.DataFrame) -> pd.DataFrame:
    """Return Pass@1 minus the full cache's, on the (problem, draw) pairs that both have, and `PAIR_SUMS`, by cell.

    Draws with one seed share their random numbers, so a pair is equal until eviction acts, and the common part cancels.
    `PAIR_SUMS` counts what changed, split by where eviction acted. A cell without a pair has no row.
    """
    pairs = beside_full(cells, graded, ["correct", "num_tokens"])
    pairs = pairs[pairs["cell_id"] != pairs["full"]]
    difference = pairs["correct"] - pairs["correct_full"]
    is_evicted = pairs["evictions"] > 0
    is_untouched = pairs["evictions"] == 0  # a server reports neither
    changed = (difference != 0) | (pairs["num_tokens"] != pairs["num_tokens_full"])
    untouched_differ = (changed & is_untouched).where(pairs["evictions"].notna())
    pairs = pairs.assign(
        difference=difference,
        regressions=difference < 0,
        gains=difference > 0,
        diff_evicted=difference.where(is_evicted),
        diff_untouched=difference.where(is_untouched),
        untouched_differ=untouched_differ.astype("float64"),
    )
    problem_means = pairs.groupby(["cell_id", "problem_id"], observed=True)["difference"].mean()
    table = problem_means.groupby("cell_id").agg(["mean", "sem", "count"])
    table.columns = ["diff_to_full", "diff_se", "diff_problems"]
    of_cell = pairs.groupby("cell_id")
    # `min_count`: where all is missing, as in a server's texts, the sum is missing and not 0.
    sums = of_cell[["regressions", "gains", "untouched_differ", "num_tokens", "num_tokens_full"]].sum(min_count=1)
    sums["tokens_to_full"] = sums["num_tokens"] / sums["num_tokens_full"]
    means = of_cell[["diff_evicted", "diff_untouched"]].mean()
    return table.join(means.join(sums)[PAIR_SUMS])


def texts_differ(run: Run) -> pd.Series:
    """Count each server's completions that differ from the baseline's of the same problem and draw; by cell_id."""
    served = run.cells[run.cells["engine"] == "server"]
    with_full = served.loc[served["policy"] == "full", "condition"]
    served = served[served["condition"].isin(with_full)]  # other texts are compared with nothing
    # Of several full caches the first is the baseline, and the others are settings.
    cells = served.assign(policy=served["policy"].mask(served.duplicated(["condition", "policy"])))
    rows = []
    for cell_id in served["cell_id"]:
        for pair, completion in load_texts(run.directory / cell_id).items():
            rows.append((cell_id, *pair, hash(completion.text)))
    texts = pd.DataFrame(rows, columns=["cell_id", "problem_id", "draw", "text"])
    pairs = beside_full(cells, texts, ["text"])
    pairs = pairs[pairs["cell_id"] != pairs["full"]]
    differ = pairs["text"] != pairs["text_full"]
    return differ.groupby(pairs["cell_id"]).sum().astype("float64").rename("texts_differ")


def beside_full(cells: pd.DataFrame, rows: pd.DataFrame, names: list[str]) -> pd.DataFrame:
    """Join completions with the full cache's of the same problem and draw; without one, a completion is left out.

    `rows` has a row per completion. Adds `full`, the full cache's cell_id, and its columns of these `names`, NAME_full.
    The completions of a full cache that is compared with are joined with themselves.
    """
    pair = ["problem_id", "draw"]
    is_full = cells["policy"] == "full"
    baselines = cells[is_full].drop_duplicates("condition").rename(columns={"cell_id": "full"})
    compared = cells[~is_full].merge(baselines[["condition", "full"]], on="condition")[["cell_id", "full"]]
    # A full cache with which a cell is compared is compared with itself too.
    itself = compared.assign(cell_id=compared["full"]).drop_duplicates()
    # Ids as plain objects, because categories match only the same categories.
    full_of_cell = pd.concat([compared, itself]).astype("object")
    rows = rows.assign(cell_id=rows["cell_id"].astype("object"))
    full_rows = rows[["cell_id", *pair, *names]].rename(columns={"cell_id": "full"})
    return rows.merge(full_of_cell, on="cell_id").merge(full_rows, on=["full", *pair], suffixes=("", "_full"))


def _kept_of_full(run: Run) -> pd.DataFrame:
    """Divide the cells' memory and cache lengths by the full cache's, on the pairs that both have."""
    completions = run.completions
    held = cache_rows(completions)["held"]  # cached rows, summed over the steps
    sizes = _sizes(completions["cell_id"], run.provenance)
    rest_bytes = sizes["newest"] + sizes["fixed"]  # at each step, beside the cached rows
    rows = completions[["cell_id", "problem_id", "draw", "num_tokens"]].assign(
        held=held,
        peak_length=completions["peak_length"] + sizes["fixed_rows"],
        # At the peak, and summed over the steps.
        bytes=completions["peak_length"] * sizes["row"] + rest_bytes,
        held_bytes=held * sizes["row"] + completions["num_tokens"] * rest_bytes,
    )
    summed = ["bytes", "peak_length", "num_tokens", "held", "held_bytes"]
    pairs = beside_full(run.cells, rows, summed).groupby("cell_id")
    sums = pairs[summed].sum(min_count=1)
    sums_of_full = pairs[[f"{name}_full" for name in summed]].sum(min_count=1).set_axis(summed, axis=1)
    kept = sums / sums_of_full
    # Means over steps are compared, and the two caches may have written texts of different lengths.
    steps_ratio = sums_of_full["num_tokens"] / sums["num_tokens"]
    kept_rows = kept["held"] * steps_ratio
    # Runs of older versions have no bytes of a row: there the rows are compared.
    kept_memory = kept["bytes"].fillna(kept["peak_length"])
    kept_memory_mean = (kept["held_bytes"] * steps_ratio).fillna(kept_rows)
    return pd.DataFrame({"kept_memory": kept_memory, "kept_memory_mean": kept_memory_mean, "kept_rows": kept_rows})


def _outcomes(graded: pd.DataFrame) -> pd.DataFrame:
    """Return by cell_id the share of each outcome, and tokens written per answer and per right answer.

    The tokens of wrong answers count too.
    """
    counts = pd.get_dummies(graded["outcome"]).groupby(graded["cell_id"], observed=True).sum()
    tokens = graded.groupby("cell_id", observed=True)["num_tokens"].sum()
    # As text, because nothing can be added to the categories of the outcomes.
    shares = counts.div(counts.sum(axis=1), axis=0).rename(columns=str)
    answered = counts["correct"] + counts["wrong"]
    # Tokens per answer are missing without an answer.
    return shares.assign(
        tokens_per_answer=tokens / answered.where(answered > 0),
        tokens_per_solved=tokens / counts["correct"].where(counts["correct"] > 0),
    )


def cache_rows(completions: pd.DataFrame) -> pd.DataFrame:
    """Sum the cache length over the decoding steps of each completion, in tokens times steps.

    Step s = 0 .. n - 1, with n = num_tokens, feeds the s-th generated token (step 0: the prompt's last token) and draws
    the next. The length of a step is the number of tokens that it attends over: it includes the token that it feeds,
    and the tokens that an eviction frees right after it. With a full cache the length is prompt_tokens + s. An eviction
    at step t from b to a tokens makes each of the n - 1 - t later steps shorter by b - a, so the sum is

    n prompt_tokens + n (n - 1) / 2 - sum over evictions of (b - a) (n - 1 - t).

    Returns the columns `full`, the sum for a full cache and the same tokens, and `held`, the sum with the evictions.
    Raises UserError for evictions that free more than a completion has: each step attends over one token at least.
    """
    steps = completions["num_tokens"]
    full = steps * completions["prompt_tokens"] + steps * (steps - 1) // 2
    freed = completions["length_before_sum"] - completions["length_after_sum"]
    held = full - (steps - 1) * freed + completions["freed_step_sum"]
    impossible = completions[held < steps]
    if len(impossible):
        cell, problem = impossible.iloc[0][["cell_id", "problem_id"]]
        freed_more = f"the evictions of problem {problem!r:.80} in cell {cell} free more tokens than its completion has"
        raise UserError(f"{freed_more}: delete the cell's completions, and run it again.")
    return pd.DataFrame({"full": full, "held": held})


def mean_over_benchmarks(metrics: pd.DataFrame, count: int = 0) -> pd.DataFrame:
    """Average each policy setting over all benchmarks with equal weights; the mean is missing if one benchmark is.

    `count` is the number of benchmarks, if `metrics` may lack one of them.

    Benchmarks are independent, so the standard error is sqrt(sum of se^2) / number of benchmarks. A length just after
    an eviction is missing if a benchmark had no eviction. Columns: model_title and `SETTING`, pass_at_1, se, status
    (done if all are), completions, and the `HOLDINGS` and largest max_peak_length that `metrics` has.
    """
    count = count or metrics["benchmark"].nunique()
    chosen = metrics.drop_duplicates([*SETTING, "benchmark"])
    chosen = chosen.assign(variance=chosen["se"] ** 2, unfinished=chosen["status"] != "done")
    groups = chosen.groupby([*SETTING, "model_title"], dropna=False, sort=False)
    table = groups.agg(unfinished=("unfinished", "any"), completions=("completions", "sum"))
    averaged = [name for name in ("pass_at_1", *HOLDINGS) if name in metrics]
    # `min_count`: the sum is missing if a benchmark is.
    table = table.join(groups[averaged].sum(min_count=count) / count)
    if "max_peak_length" in metrics:
        table = table.join(groups["max_peak_length"].max())
    table["se"] = np.sqrt(groups["variance"].sum(min_count=count)) / count
    table["status"] = np.where(table.pop("unfinished"), "partial", "done")
    return table.reset_index()


def benchmark_views(cells: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """Split one model's cells by benchmark into titles and rows; if there are several, their mean comes first."""
    views = [(str(rows.iloc[0]["benchmark_title"]), rows) for _, rows in cells.groupby("benchmark", sort=False)]
    if len(views) > 1:
        mean = mean_over_benchmarks(cells)
        views.insert(0, (f"mean of {len(views)} benchmarks", mean))
    return views


def compressed_benchmarks(cells: pd.DataFrame) -> list[str]:
    return list(cells.loc[cells["policy"] != "full", "benchmark"].unique())


def pareto_front(points: pd.DataFrame, memory: str) -> pd.DataFrame:
    """Return the points without a better one at equal or less `memory` (a column), in order of memory."""
    ordered = points.sort_values([memory, "pass_at_1"], ascending=[True, False], kind="stable")
    # The best score at less memory, or at the same in the order above.
    before = ordered["pass_at_1"].cummax().shift(fill_value=-np.inf)
    return ordered[ordered["pass_at_1"] > before]


def _completion_means(run: Run) -> pd.DataFrame:
    """Return by cell_id the means over its completions: shares that were cut or evicted, lengths, and cached rows."""
    completions = run.completions
    fixed_rows = _sizes(completions["cell_id"], run.provenance)["fixed_rows"]
    unpacked_rows = run.cells.set_index("cell_id")["unpacked_rows"]
    unpacked = completions["cell_id"].astype("str").map(unpacked_rows).astype("float64")
    # The mean of num_tokens has another name, and that of prompt_tokens says nothing.
    means = {"mean_tokens": completions["num_tokens"]}
    for name in (*COUNTS[2:], "evictions"):
        means[f"mean_{name}"] = completions[name]
    rows = completions.assign(
        # Quantized rows exist once a cache is longer than what stays unpacked; missing without quantization. These are
        # floats, because truth values beside missing ones have no mean.
        packed=(completions["peak_length"] > unpacked).where(unpacked.notna()).astype("float64"),
        hit_limit=completions["stop_reason"] == "length",
        not_finite=completions["stop_reason"] == "not_finite",
        # Missing in a server's texts.
        evicted=(completions["evictions"] > 0).where(completions["evictions"].notna()).astype("float64"),
        # The last token is drawn but never enters the cache.
        full_length=completions["prompt_tokens"] + completions["num_tokens"] - 1 + fixed_rows,
        own_length=completions["peak_length"] + fixed_rows,
        **means,
    ).join(cache_rows(completions))
    of_cell = rows.groupby("cell_id", observed=True)
    table = of_cell[["hit_limit", "not_finite", *means, "evicted", "packed", "full_length", "own_length"]].mean()
    # As in cells.csv behind mean_peak_length.
    table.insert(5, "max_peak_length", of_cell["peak_length"].max())
    # A text that ends not finite has all its tokens in the cache, one more than `full_length` counts.
    table["kept_memory_own"] = (table.pop("own_length") / table.pop("full_length")).clip(upper=1.0)
    # The rows of a batch that holds one text of each problem, all at their peak.
    problem_peaks = rows.groupby(["cell_id", "problem_id"], observed=True)["peak_length"].mean()
    table["peak_rows_together"] = problem_peaks.groupby("cell_id", observed=True).sum(min_count=1)
    summed = ["num_tokens", "evictions", "length_before_sum", "length_after_sum", "full", "held"]
    sums = of_cell[summed].sum()
    sums = sums.where(sums > 0)  # a mean over nothing is missing
    table["mean_length_before"] = sums["length_before_sum"] / sums["evictions"]
    table["mean_length_after"] = sums["length_after_sum"] / sums["evictions"]
    table["mean_cache_length"] = sums["held"] / sums["num_tokens"]
    table["kept_rows_own"] = sums["held"] / sums["full"]
    return table


def _sizes(cell_ids: "pd.Series[str]", provenance: dict[str, dict[str, Any]]) -> pd.DataFrame:
    """Return the bytes of a cached row, of the newest rows, of a slot's fixed part and of the weights, for each id.

    Then fixed_rows, how many unquantized tokens the fixed part equals; 0 if a run names none.
    """
    records = [record.get("bytes", {}) for record in provenance.values()]
    names = ["row", "newest", "fixed", "weights", "fixed_rows"]
    sizes = pd.DataFrame(records, index=[*provenance], columns=names, dtype="float64")
    return sizes.reindex(cell_ids).set_axis(cell_ids.index).fillna({"fixed_rows": 0})


def size(count: float) -> str:
    """Write a number of bytes: "12.3 KiB", "4.5 GiB"; a dash if missing."""
    if notation.missing(count):
        return notation.MISSING
    if count < 1024:
        return f"{notation.decimal(count, 0)} bytes"
    for unit in ("KiB", "MiB"):
        count /= 1024
        if count < 1024:
            return f"{notation.decimal(count, 1)} {unit}"
    return f"{notation.decimal(count / 1024, 1)} GiB"


def by_eviction(held: pd.DataFrame) -> pd.DataFrame:
    """Return the mean share of importance kept after each eviction: policy, eviction, retained, texts (a count).

    `held` has one row per completion and eviction: policy, text (its number), eviction (from 1), retained (0 to 1).
    """
    groups = held.groupby(["policy", "eviction"], as_index=False)
    return groups.agg(retained=("retained", "mean"), texts=("retained", "count"))


def by_policy(held: pd.DataFrame, correct: Mapping[str, Sequence[int]]) -> pd.DataFrame:
    """Return the mean share of importance kept over all evictions, and Pass@1: policy, retained, texts, pass1.

    `held` is as in `by_eviction`; `correct` has each policy's grades, 1 or 0.
    """
    table = held.groupby("policy", as_index=False).agg(retained=("retained", "mean"), texts=("text", "nunique"))
    scores = {policy: np.mean(grades) for policy, grades in correct.items() if grades}
    return table.assign(pass1=table["policy"].map(scores).astype("float64"))


def mean_lorenz(curves: Iterable[tuple[np.ndarray, np.ndarray]]) -> pd.DataFrame:
    """Average Lorenz curves (shares of tokens, shares of importance) at every percent: tokens, importance."""
    percents = np.linspace(0, 1, 101)
    carried = np.mean([np.interp(percents, tokens, shares) for tokens, shares in curves], axis=0)
    return pd.DataFrame({"tokens": percents, "importance": carried})


_Ends = view(Completion, "stop_reason", "token_ids")


def looping(run: Run) -> pd.DataFrame:
    """Count each cell's truncated completions, and those that end in a loop; by cell_id.

    Then the loops' median period in tokens and copies, and the tokens that decoding.stop_on_loop would have saved.
    """
    # A server sends no token ids to search.
    cell_ids = run.cells.loc[run.cells["engine"] == "kvsweep", "cell_id"]
    is_truncated = run.completions["stop_reason"] != "stop"
    truncated = is_truncated.groupby(run.completions["cell_id"], observed=False).sum()
    rows = []
    # Without a truncated text there is no loop: the cell's tokens are not read.
    for cell_id in cell_ids[cell_ids.map(truncated) > 0]:
        for text in StoredCell(run.directory / cell_id).rows(_Ends, on_bad=ignore):
            loop = None if text.stop_reason == "stop" else find_loop(text.token_ids)
            if loop is not None:
                # decoding.stop_on_loop waits for so many copies and so many tokens of a loop.
                saved = loop.tokens - max(LEAST_REPEATS * loop.period, LEAST_TOKENS)
                rows.append((cell_id, loop.period, loop.count, saved))
    loops = pd.DataFrame(rows, columns=["cell_id", "loop_period", "loop_count", "saved"]).groupby("cell_id")
    table = pd.DataFrame({"truncated_texts": truncated, "looping_texts": loops.size()}, index=cell_ids)
    table = table.fillna(0).astype("int64")
    # Without any loop these are objects.
    medians = loops[["loop_period", "loop_count"]].median().astype("float64")
    saved_tokens = loops["saved"].sum().reindex(cell_ids, fill_value=0)
    return table.join(medians).assign(tokens_in_loops=saved_tokens.astype("int64"))


def settings_by_bytes(metrics: pd.DataFrame, model: str) -> pd.DataFrame:
    """A model's settings with Pass@1, error, bits, bytes, and whether all cells are safe; cheapest first."""
    cells = cells_of_model(metrics, model)
    # The cheapest is chosen among all settings, so a setting that is safe by itself may not be safe in the search.
    cells = cells.assign(safe=cells["recommendable"].eq(True))
    rules = {"bits": "first", "safe": "all", "kv_bytes_mean": "mean", "kv_bytes_peak": "max", "weight_bytes": "max"}
    sizes = cells.groupby(SETTING, dropna=False, sort=False).agg(rules).reset_index()
    means = mean_over_benchmarks(cells)
    table = means.merge(sizes, on=SETTING).dropna(subset=["pass_at_1", "kv_bytes_mean"])
    return table.sort_values(["kv_bytes_mean", "pass_at_1"], ascending=[True, False], kind="stable", ignore_index=True)


def cheapest_in_words(settings: pd.DataFrame) -> str:
    """Name the safe setting with the fewest bytes in `settings_by_bytes`."""
    is_full = settings["policy"] == "full"
    safe = settings[settings["safe"] & ~is_full]
    if safe.empty:
        return "By bytes, no setting is shown to be safe in a search."
    cheapest = safe.iloc[0]
    mean = f"{size(cheapest.kv_bytes_mean)} of keys and values a text in the mean over its steps"
    if is_full.any():
        share = cheapest.kv_bytes_mean / settings.loc[is_full, "kv_bytes_mean"].iloc[0]
        mean += f", {notation.percent(share)}% of the full's"
    peak = f"{size(cheapest.kv_bytes_peak)} at the peak, beside {size(cheapest.weight_bytes)} of weights"
    return f"By bytes, the cheapest safe setting is {notation.setting(cheapest)}: {mean}, {peak}."
