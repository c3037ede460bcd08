"""What a reader must know before the numbers: each warning is a condition on a run's texts, and a sentence."""

import shlex
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import PurePosixPath
from typing import Any

import pandas as pd

from kvsweep.analysis import notation
from kvsweep.analysis.load import Run, is_control
from kvsweep.analysis.server_records import MISCOUNTED, ROUTED, cache_words, record_of, same_cache
from kvsweep.analysis.statistics.against_full import decide_cells, plan_of
from kvsweep.analysis.statistics.metrics import beside_full, difference_to_full, full_first, graded_rows, texts_differ
from kvsweep.messages.command_line import counted
from kvsweep.messages.escape import visible

# From this share of truncated completions on, the limit is hardly the cause.
_NEARLY_ALL = 0.95


def warnings(run: Run, margin: float | None = None) -> dict[str, Iterable[str]]:
    """Return warnings by heading: what was seen, why it matters, what to type.

    `margin` (a fraction) replaces the run's own margin.
    """
    return {
        "Without answers": chain(unanswered(run), otherwise_answered(run, margin)),
        "Texts that ran to the limit": endless(run),
        "Full caches that were cut off": cut_off(run, margin),
        "Cut off by their server": cut_by_server(run),
        "Asked with other prompts": other_prompts(run),
        "Answered by other models": other_models(run),
        "Compression not seen": same_caches(run),
        "The full setting asked again": beside_control(run, margin),
        "Not finite": not_finite(run),
        "Not evicted": not_evicted(run),
    }


# --- Tables that the conditions read --------------------------------------------------------------------------


def _cells(run: Run) -> pd.DataFrame:
    """The run's cells, with `served`, the token `limit`, and the `baseline` of their condition (its full cell)."""
    cells = run.cells.drop(columns="completions")
    return cells.assign(
        served=cells["engine"] == "server",
        limit=cells.get("decoding_max_new_tokens"),  # None: a table of scores has no decoding
        # Without a full cell the first cell.
        baseline=full_first(cells).groupby("condition")["cell_id"].transform("first"),
    ).astype({"limit": "float64"})


def _texts(run: Run) -> pd.DataFrame:
    """The run's texts with their cells' columns; `cut`: truncated, `early`: by a server below the limit."""
    texts = _cells(run).merge(run.completions, on="cell_id")  # in the order of the cells
    cut = texts["stop_reason"] == "length"
    # Servers count a few tokens more or less, so a text just below the limit may have reached it.
    below_limit = texts["num_tokens"] < texts["limit"] - MISCOUNTED
    return texts.assign(cut=cut, early=cut & texts["served"] & below_limit)


def _panels(rows: pd.DataFrame) -> Iterator[tuple[Any, pd.DataFrame]]:
    """Yield a row, and all rows, of each model and benchmark."""
    return _groups(rows, "model_title", "benchmark_title")


def _groups(rows: pd.DataFrame, *columns: str) -> Iterator[tuple[Any, pd.DataFrame]]:
    """Yield the first row, and all rows, of each group by these columns."""
    for _, group in rows.groupby([*columns], sort=False, observed=True):
        yield group.iloc[0], group


def _panel_title(row: Any) -> str:
    return f"{row.model_title} | {row.benchmark_title}"


def cell_title(row: Any) -> str:
    """Name the model, benchmark and setting of a row of metrics."""
    return f"{_panel_title(row)}: {notation.setting(row)}"


def _settings(cells: pd.DataFrame) -> str:
    return "; ".join(notation.settings(cells)) or "none"


def _why(run: Run, texts: pd.DataFrame) -> str:
    """The command that shows how texts were graded, with two of their problems."""
    examples = [f"--why {shlex.quote(name)}" for name in texts["problem_id"].astype(str).unique()[:2]]
    return f"`kvsweep grade {shlex.quote(str(run.directory))}` with {' or '.join(examples)}"


# --- Texts of kvsweep and of servers --------------------------------------------------------------------------


def unanswered(run: Run) -> Iterator[str]:
    """Most completions of a cell lack an answer."""
    texts = _texts(run).dropna(subset="outcome")
    is_silent = texts["outcome"] == "no_answer"
    most_are_silent = is_silent.groupby(texts["cell_id"]).transform("mean") > 0.5
    for row, panel in _panels(texts[most_are_silent]):
        yield (
            f"{_panel_title(row)}: most texts of {counted(panel['cell_id'].nunique(), 'cell')} hold no answer. Is "
            "model.think_end the tag that this model writes (null if it does not think), and does the prompt ask for a "
            f"\\boxed answer? See {_why(run, panel[panel['outcome'] == 'no_answer'])}."
        )


def endless(run: Run) -> Iterator[str]:
    """Nearly all completions ran to the limit with every cache. A server decides its texts' ends: they are left out."""
    texts = _texts(run)
    for row, panel in _panels(texts[~texts["served"]]):
        if panel["cut"].mean() >= _NEARLY_ALL:
            yield (
                f"{_panel_title(row)}: {panel['cut'].sum()} of {counted(len(panel), 'text')} ran to the limit. Does "
                "the model end its answers with a token that eos_token_id in its generation_config.json lacks?"
            )


def cut_off(run: Run, margin: float | None = None) -> Iterator[str]:
    """More of the full cache's completions were truncated than the margin."""
    texts = _texts(run)
    # `cut_by_server` is about the early ones.
    for row, panel in _panels(texts[~texts["early"] & (texts["policy"] == "full")]):
        plan = plan_of(run.provenance.get(row["cell_id"], {}), margin)
        if panel["cut"].mean() > plan.margin:
            yield (
                f"{_panel_title(row)}: {panel['cut'].sum()} of {counted(len(panel), 'text')} of the full cache were "
                "cut off and count as wrong, so that a setting may seem as good which is not. Raise "
                "decoding.max_new_tokens."
            )


def not_finite(run: Run) -> Iterator[str]:
    """Completions ended in NaN or infinite logits."""
    texts = _texts(run)
    for row, panel in _panels(texts[texts["stop_reason"] == "not_finite"]):
        yield (
            f"{_panel_title(row)}: {counted(len(panel), 'text')} of {counted(panel['cell_id'].nunique(), 'cell')} "
            "ended because logits were NaN or infinite, and count as wrong. The network is the cause, not the policy: "
            "take model.dtype=bfloat16 or float32, or look at the weights."
        )


def not_evicted(run: Run) -> Iterator[str]:
    """No cache outgrew its trigger; the sentence has triggers that would evict."""
    texts = _texts(run).dropna(subset=["budget", "peak_length", "prompt_tokens"])
    # The last step evicts nothing, and a question on top does not count towards the trigger.
    texts["length"] = texts["peak_length"] - 1 - texts["prompt_tokens"].where(texts["question"] == "on_top", 0)
    for row, panel in _panels(texts):
        lengths = panel["length"]
        if panel["evictions"].sum() or lengths.max() <= 1:  # no trigger, at least 1, would evict from a length of 1
            continue
        largest = int(lengths.max()) - 1  # a cache evicts when it is longer than its trigger
        half_of_median = max(1, int(lengths.median()) // 2)
        triggers = (largest, half_of_median)  # the largest that some text outgrows, and one that most texts do
        suggestions = [f"policy.budget={trigger} would evict in {(lengths > trigger).sum()}" for trigger in triggers]
        yield (
            f"{_panel_title(row)}: nothing was evicted, because no cache outgrew its trigger. Of "
            f"{counted(len(lengths), 'text')} {', '.join(suggestions)}."
        )


# --- Servers beside their baseline ----------------------------------------------------------------------------


def otherwise_answered(run: Run, margin: float | None = None) -> Iterator[str]:
    """A server's whole texts lack an answer more or less often than the baseline's, by more than the margin.

    In kvsweep's own texts the cache alone makes such a difference, because tags and prompt are the same; two servers
    may differ in both.
    """
    graded = run.completions.dropna(subset="outcome")
    is_silent = graded["outcome"].eq("no_answer") & graded["stop_reason"].eq("stop")
    cells = _cells(run)
    pairs = beside_full(run.cells, graded.assign(silent=is_silent), ["silent"])
    not_itself = pairs["cell_id"] != pairs["full"]  # a full cache is also paired with itself
    cell_of = cells.set_index("cell_id")
    for row, cell in _groups(pairs[not_itself].merge(cells[cells["served"]], on="cell_id"), "cell_id"):
        silent, silent_full = cell[["silent", "silent_full"]].sum()
        plan = plan_of(run.provenance.get(row["cell_id"], {}), margin)
        if abs(silent - silent_full) / len(cell) > plan.margin:
            yield (
                f"{cell_title(row)}: {silent} of {counted(len(cell), 'text')} ended by themselves without an answer, "
                f"and {silent_full} with {notation.setting(cell_of.loc[row['full']])}, so that the difference may be "
                "one of reading and not of the cache. Look at the texts and at both servers' reasoning parsers: one "
                f"may take the tags of thinking away. See {_why(run, cell[cell['silent'] != cell['silent_full']])}."
            )


def cut_by_server(run: Run) -> Iterator[str]:
    """A server truncated completions before `decoding.max_new_tokens`."""
    texts = _texts(run)
    for row, cell in _groups(texts[texts["served"]], "cell_id"):
        lengths = cell.loc[cell["early"], "num_tokens"]
        if lengths.empty:
            continue
        # Room for the longest prompt and all tokens that may follow.
        context = cell["prompt_tokens"].max() + row["limit"]
        yield (
            f"{cell_title(row)}: the server cut off {len(lengths)} of {counted(len(cell), 'text')} at "
            f"{notation.span(lengths)} tokens, before decoding.max_new_tokens={row['limit']:.0f}. They count as wrong, "
            "so that a loss may be the server's limit and not its cache's. Start the server with a context of "
            f"{context:,.0f} tokens or more."
        )


def other_prompts(run: Run) -> Iterator[str]:
    """A server counts other prompt tokens than the baseline, for the same questions."""
    texts = _texts(run)
    texts = texts[texts["served"]]
    # A row per problem, a column per cell. All draws of a problem have one prompt, so `max` takes its number.
    prompt_tokens = texts.groupby(["cell_id", "problem_id"], observed=True)["prompt_tokens"].max().unstack(0)
    cells = texts.drop_duplicates("cell_id").set_index("cell_id", drop=False)
    for row in notation.rows(cells):
        if row.cell_id == row.baseline or row.baseline not in prompt_tokens:
            continue
        both = prompt_tokens[[row.baseline, row.cell_id]].dropna()
        differ = both[both[row.baseline] != both[row.cell_id]]
        if differ.empty:
            continue
        problem = visible(str(differ.index[0]))
        baseline_tokens, tokens = differ.iloc[0]
        yield (
            f"{cell_title(row)}: the prompts of {len(differ)} of {counted(len(both), 'problem')} have other numbers of "
            f"tokens than with {notation.setting(cells.loc[row.baseline])} ({problem}: {tokens:.0f} and "
            f"{baseline_tokens:.0f}), so that a difference may be the prompt's. Start both servers with one chat "
            "template and a context that holds every question, or ask without a template by engine.api=completions."
        )


def _records(run: Run) -> pd.DataFrame:
    """The cells of servers, with the model `requested` of each, and the `record` of what it says of itself.

    `requested_full` and `record_full` are those of its baseline.
    """
    cells = _cells(run)
    cells = cells[cells["served"]]
    cell_ids = cells["cell_id"]
    cells = cells.assign(
        requested=cell_ids.map(lambda cell_id: str(run.settings[cell_id]["policy"].get("model"))),
        record=cell_ids.map(lambda cell_id: record_of(run.provenance[cell_id].get("decoding_passes", []))),
    )
    sides = cells[["cell_id", "requested", "record"]]
    return cells.merge(sides, left_on="baseline", right_on="cell_id", suffixes=("", "_full"))


def other_models(run: Run) -> Iterator[str]:
    """A server's answers name several makers, or another one than the baseline's, or another model than asked for."""
    cells = _records(run)
    models_of_condition = cells.groupby("condition")["requested"].nunique()
    for row in notation.rows(cells):
        record = row.record
        model = record.get("model")
        full_model = row.record_full.get("model")
        # Such as "provider A and B": the answers name each maker.
        several = [f"{name} {' and '.join(record[name])}" for name in ROUTED if len(record.get(name, ())) > 1]
        is_other_model = model and full_model and model != full_model
        # Folders or an owner before a name are no part of it.
        is_unrequested = model and PurePosixPath(model).name != PurePosixPath(row.requested).name
        if several or record.get("provider") != row.record_full.get("provider"):
            names = ", ".join(several) or "another provider than those of the full setting"
            difference = f"its answers name {names}"
            hint = "Ask one server, or let engine.extra choose one provider of the router for all settings"
        # A setting that asks for another model than the baseline is expected to get another one.
        elif row.requested == row.requested_full and is_other_model:
            difference = f"its answers are of the model {model}, and of {full_model} with the full setting"
            hint = "Start both servers with one model, or give each setting its engine.model if they shall differ"
        # If all settings ask for one model, its name at the server may be another one.
        elif models_of_condition[row.condition] > 1 and is_unrequested:
            difference = f"asked for engine.model={row.requested}, its answers are of the model {model}"
            hint = "Start the server with the model that is asked for, or ask for the one that it has"
        else:
            continue
        yield f"{cell_title(row)}: {visible(difference)}, so that a difference may be the model's. {hint}."


def same_caches(run: Run) -> Iterator[str]:
    """A server says of its cache what the baseline's server says, where both say something."""
    cells = _records(run)
    is_full = cells["policy"] == "full"
    has_full = cells["baseline"].isin(cells.loc[is_full, "cell_id"])
    for row in notation.rows(cells[has_full & ~is_full & ~is_control(cells)]):
        if same_cache(row.record, row.record_full):
            words = visible(cache_words(row.record))
            yield (
                f"{cell_title(row)}: compression is not seen. Its cache is the full setting's by what the servers say "
                f"({words}): it was not on. Look at how the server was started, and at its log."
            )


def beside_control(run: Run, margin: float | None = None) -> Iterator[str]:
    """What chance alone changes where the baseline is asked again, and which settings surely change more."""
    if not is_control(run.cells).any():
        return
    graded = graded_rows(run)
    decisions = decide_cells(run.cells, graded, run.provenance, margin)
    differences = difference_to_full(run.cells, graded)
    table = run.cells.set_index("cell_id").join([decisions, differences, texts_differ(run)])
    for row in notation.rows(table[is_control(table) & table["status"].eq("done")].dropna(subset="decision")):
        others = table[table["condition"] == row.condition]
        beyond = _settings(others[others["beyond_control"].eq(True)])
        within = _settings(others[others["beyond_control"].eq(False)])
        yield (
            f"{cell_title(row)}: {row.texts_differ:.0f} of {counted(row.completions, 'text')} differ, "
            f"answers that flip: {row.regressions + row.gains:.0f}; {row.decision}. "
            f"Settings that surely flip more answers: {beyond}. Other settings: {within}."
        )
