"""What a reader must know before the numbers: each warning is a condition on a run's texts, and a sentence."""

import shlex
from collections.abc import Callable
from typing import Any

import pandas as pd

from kvsweep.analysis import notation
from kvsweep.analysis.load import Run, is_control
from kvsweep.analysis.server_records import MISCOUNTED, ROUTED, cache_words, record_of, same_cache
from kvsweep.analysis.statistics.against_full import decide_cells, plan_of
from kvsweep.analysis.statistics.metrics import beside_full, difference_to_full, full_first, graded_rows, texts_differ
from kvsweep.messages.command_line import counted
from kvsweep.messages.escape import visible
from kvsweep.run_files.run_reader import is_served

# From this share of truncated completions on, the limit is hardly the cause.
_NEARLY_ALL = 0.95


def warnings(run: Run, margin: float | None = None) -> dict[str, list[str]]:
    """Return warnings by heading: what was seen, why it matters, what to type.

    `margin` (a fraction) replaces the run's own margin.
    """
    return {
        "Without answers": [*unanswered(run), *otherwise_answered(run, margin)],
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
    settings = cells["cell_id"].map(lambda cell_id: run.settings.get(cell_id, {}))
    limits = settings.map(lambda section: section.get("decoding", {}).get("max_new_tokens"))
    return cells.assign(
        served=settings.map(is_served),
        limit=limits.astype("float64"),
        # Without a full cell the first cell.
        baseline=full_first(cells).groupby("condition")["cell_id"].transform("first"),
    )


def _texts(run: Run) -> pd.DataFrame:
    """The run's texts with their cells' columns; `cut`: truncated, `early`: by a server below the limit."""
    texts = _cells(run).merge(run.completions, on="cell_id")  # in the order of the cells
    cut = texts["stop_reason"] == "length"
    # Servers count a few tokens more or less, so a text just below the limit may have reached it.
    below_limit = texts["num_tokens"] < texts["limit"] - MISCOUNTED
    return texts.assign(cut=cut, early=cut & texts["served"] & below_limit)


_Say = Callable[[pd.DataFrame], str | None]


def _per_panel(rows: pd.DataFrame, say: _Say) -> list[str]:
    """The sentences of the models and benchmarks for which `say` has one; it gets their rows."""
    return _sentences(rows, ["model_title", "benchmark_title"], _panel_title, say)


def _per_cell(rows: pd.DataFrame, say: _Say) -> list[str]:
    """The sentences of the cells for which `say` has one; it gets a cell's rows."""
    return _sentences(rows, ["cell_id"], cell_title, say)


def _sentences(rows: pd.DataFrame, columns: list[str], title: Callable[[Any], str], say: _Say) -> list[str]:
    """The sentences of the groups by these columns for which `say` has one, each behind its group's title."""
    sentences = []
    for _, group in rows.groupby(columns, sort=False, observed=True):
        sentence = say(group)
        if sentence:
            sentences.append(f"{title(group.iloc[0])}: {sentence}")
    return sentences


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


def unanswered(run: Run) -> list[str]:
    """Most completions of a cell lack an answer."""
    texts = _texts(run).dropna(subset="outcome")
    is_silent = texts["outcome"] == "no_answer"
    most_are_silent = is_silent.groupby(texts["cell_id"]).transform("mean") > 0.5
    return _per_panel(
        texts[most_are_silent],
        lambda panel: (
            f"most texts of {counted(panel['cell_id'].nunique(), 'cell')} hold no answer. Is model.think_end the "
            "tag that this model writes (null if it does not think), and does the prompt ask for a \\boxed answer? "
            f"See {_why(run, panel[panel['outcome'] == 'no_answer'])}."
        ),
    )


def endless(run: Run) -> list[str]:
    """Nearly all completions ran to the limit with every cache. A server decides its texts' ends: they are left out."""
    texts = _texts(run)

    def say(panel: pd.DataFrame) -> str | None:
        cut = int(panel["cut"].sum())
        if cut < _NEARLY_ALL * len(panel):
            return None
        return (
            f"{cut} of {counted(len(panel), 'text')} ran to the limit. Does the model end "
            "its answers with a token that eos_token_id in its generation_config.json lacks?"
        )

    return _per_panel(texts[~texts["served"]], say)


def cut_off(run: Run, margin: float | None = None) -> list[str]:
    """More of the full cache's completions were truncated than the margin."""
    texts = _texts(run)

    def say(panel: pd.DataFrame) -> str | None:
        plan = plan_of(run.provenance.get(panel["cell_id"].iloc[0], {}), margin)
        if panel["cut"].mean() <= plan.margin:
            return None
        return (
            f"{panel['cut'].sum()} of {counted(len(panel), 'text')} of the full cache were cut off and "
            "count as wrong, so that a setting may seem as good which is not. Raise decoding.max_new_tokens."
        )

    # `cut_by_server` is about the early ones.
    return _per_panel(texts[~texts["early"] & (texts["policy"] == "full")], say)


def not_finite(run: Run) -> list[str]:
    """Completions ended in NaN or infinite logits."""
    texts = _texts(run)
    return _per_panel(
        texts[texts["stop_reason"] == "not_finite"],
        lambda panel: (
            f"{counted(len(panel), 'text')} of {counted(panel['cell_id'].nunique(), 'cell')} ended "
            "because logits were NaN or infinite, and count as wrong. The network is the cause, not the policy: take "
            "model.dtype=bfloat16 or float32, or look at the weights."
        ),
    )


def not_evicted(run: Run) -> list[str]:
    """No cache outgrew its trigger; the sentence has triggers that would evict."""
    texts = _texts(run).dropna(subset=["budget", "peak_length", "prompt_tokens"])
    # The last step evicts nothing, and a question on top does not count towards the trigger.
    texts["length"] = texts["peak_length"] - 1 - texts["prompt_tokens"].where(texts["question"] == "on_top", 0)

    def say(panel: pd.DataFrame) -> str | None:
        lengths = panel["length"]
        if panel["evictions"].sum() or lengths.max() <= 1:  # no trigger, at least 1, would evict from a length of 1
            return None
        largest = int(lengths.max()) - 1  # a cache evicts when it is longer than its trigger
        half_of_median = max(1, int(lengths.median()) // 2)
        suggestions = []
        # The largest trigger that some text outgrows, and one that most texts do.
        for trigger in (largest, half_of_median):
            suggestions.append(f"policy.budget={trigger} would evict in {(lengths > trigger).sum()}")
        nothing = "nothing was evicted, because no cache outgrew its trigger"
        return f"{nothing}. Of {counted(len(lengths), 'text')} {', '.join(suggestions)}."

    return _per_panel(texts, say)


# --- Servers beside their baseline ----------------------------------------------------------------------------


def otherwise_answered(run: Run, margin: float | None = None) -> list[str]:
    """A server's whole texts lack an answer more or less often than the baseline's, by more than the margin.

    In kvsweep's own texts the cache alone makes such a difference, because tags and prompt are the same; two servers
    may differ in both.
    """
    graded = run.completions.dropna(subset="outcome")
    is_silent = graded["outcome"].eq("no_answer") & graded["stop_reason"].eq("stop")
    cells = _cells(run)
    pairs = beside_full(run.cells, graded.assign(silent=is_silent), ["silent"])
    not_itself = pairs["cell_id"] != pairs["full"]  # a full cache is also paired with itself
    pairs = pairs[not_itself].merge(cells[cells["served"]], on="cell_id")
    cell_of = cells.set_index("cell_id")

    def say(cell: pd.DataFrame) -> str | None:
        first = cell.iloc[0]
        silent, silent_full = cell[["silent", "silent_full"]].sum()
        plan = plan_of(run.provenance.get(first["cell_id"], {}), margin)
        if abs(silent - silent_full) / len(cell) <= plan.margin:
            return None
        return (
            f"{silent} of {counted(len(cell), 'text')} ended by themselves without an answer, and {silent_full} "
            f"with {notation.setting(cell_of.loc[first['full']])}, so that the difference may be one of "
            "reading and not of the cache. Look at the texts and at both servers' reasoning parsers: one may take the "
            f"tags of thinking away. See {_why(run, cell[cell['silent'] != cell['silent_full']])}."
        )

    return _per_cell(pairs, say)


def cut_by_server(run: Run) -> list[str]:
    """A server truncated completions before `decoding.max_new_tokens`."""
    texts = _texts(run)

    def say(cell: pd.DataFrame) -> str | None:
        lengths = cell.loc[cell["early"], "num_tokens"]
        if lengths.empty:
            return None
        limit = int(cell["limit"].iloc[0])
        # Room for the longest prompt and all tokens that may follow.
        context = cell["prompt_tokens"].max() + limit
        return (
            f"the server cut off {len(lengths)} of {counted(len(cell), 'text')} at {notation.span(lengths)} "
            f"tokens, before decoding.max_new_tokens={limit}. They count as wrong, so that a loss may be the "
            f"server's limit and not its cache's. Start the server with a context of {context:,} tokens or more."
        )

    return _per_cell(texts[texts["served"]], say)


def other_prompts(run: Run) -> list[str]:
    """A server counts other prompt tokens than the baseline, for the same questions."""
    texts = _texts(run)
    texts = texts[texts["served"]]
    # A row per problem, a column per cell. All draws of a problem have one prompt, so `max` takes its number.
    prompt_tokens = texts.groupby(["cell_id", "problem_id"], observed=True)["prompt_tokens"].max().unstack(0)
    cell_of = texts.drop_duplicates("cell_id").set_index("cell_id")

    def say(cell: pd.DataFrame) -> str | None:
        cell_id, baseline = cell[["cell_id", "baseline"]].iloc[0]
        if cell_id == baseline or baseline not in prompt_tokens:
            return None
        both = prompt_tokens[[baseline, cell_id]].dropna()
        differ = both[both[baseline] != both[cell_id]]
        if differ.empty:
            return None
        problem = visible(str(differ.index[0]))
        baseline_tokens, tokens = differ.iloc[0]
        return (
            f"the prompts of {len(differ)} of {counted(len(both), 'problem')} have other numbers of tokens than with "
            f"{notation.setting(cell_of.loc[baseline])} ({problem}: {tokens:.0f} and {baseline_tokens:.0f}), so that a "
            "difference may be the prompt's. Start both servers with one chat template and a context that holds every "
            "question, or ask without a template by engine.api=completions."
        )

    return _per_cell(texts, say)


def _records(run: Run) -> pd.DataFrame:
    """The cells of servers, with the `record` of what each server says of itself, and its baseline's, `full_record`."""
    cells = _cells(run)
    cells = cells[cells["served"]]
    records = {}
    for cell_id in cells["cell_id"]:
        records[cell_id] = record_of(run.provenance[cell_id].get("decoding_passes", []))
    return cells.assign(record=cells["cell_id"].map(records), full_record=cells["baseline"].map(records))


def other_models(run: Run) -> list[str]:
    """A server's answers name several makers, or another one than the baseline's, or another model than asked for."""
    cells = _records(run)
    requested = {cell_id: str(run.settings[cell_id]["policy"].get("model")) for cell_id in cells["cell_id"]}
    models_of_condition = cells["cell_id"].map(requested).groupby(cells["condition"]).nunique()

    def say(cell: pd.DataFrame) -> str | None:
        row = cell.iloc[0]
        record = row["record"]
        full_record = row["full_record"]
        requested_model = requested[row["cell_id"]]
        model = record.get("model")
        full_model = full_record.get("model")
        # Such as "provider A and B": the answers name each maker.
        several = [f"{name} {' and '.join(record[name])}" for name in ROUTED if len(record.get(name, ())) > 1]
        # A setting that asks for another model than the baseline is expected to get another one.
        same_request = requested_model == requested.get(row["baseline"])
        is_other_model = model and full_model and model != full_model
        if several or record.get("provider") != full_record.get("provider"):
            names = ", ".join(several) or "another provider than those of the full setting"
            difference = f"its answers name {names}"
            hint = "Ask one server, or let engine.extra choose one provider of the router for all settings"
        elif same_request and is_other_model:
            difference = f"its answers are of the model {model}, and of {full_model} with the full setting"
            hint = "Start both servers with one model, or give each setting its engine.model if they shall differ"
        # If all settings ask for one model, its name at the server may be another one.
        elif models_of_condition[row["condition"]] > 1 and model and _last(model) != _last(requested_model):
            difference = f"asked for engine.model={requested_model}, its answers are of the model {model}"
            hint = "Start the server with the model that is asked for, or ask for the one that it has"
        else:
            return None
        return f"{visible(difference)}, so that a difference may be the model's. {hint}."

    return _per_cell(cells, say)


def _last(model: str) -> str:
    """A model's own name, without the owner or the folders before it."""
    return model.rstrip("/").rpartition("/")[2]


def same_caches(run: Run) -> list[str]:
    """A server says of its cache what the baseline's server says, where both say something."""
    cells = _records(run)

    def say(cell: pd.DataFrame) -> str | None:
        row = cell.iloc[0]
        if not same_cache(row["record"], row["full_record"]):
            return None
        words = visible(cache_words(row["record"]))
        return (
            f"compression is not seen. Its cache is the full setting's by what the servers say ({words}): it was not "
            "on. Look at how the server was started, and at its log."
        )

    is_full = cells["policy"] == "full"
    has_full = cells["baseline"].isin(cells.loc[is_full, "cell_id"])
    return _per_cell(cells[has_full & ~is_full & ~is_control(cells)], say)


def beside_control(run: Run, margin: float | None = None) -> list[str]:
    """What chance alone changes where the baseline is asked again, and which settings surely change more."""
    if not is_control(run.cells).any():
        return []
    graded = graded_rows(run)
    decisions = decide_cells(run.cells, graded, run.provenance, margin)
    differences = difference_to_full(run.cells, graded)
    table = run.cells.set_index("cell_id").join([decisions, differences, texts_differ(run)]).reset_index()

    def say(cell: pd.DataFrame) -> str:
        row = cell.iloc[0]
        same_condition = table["condition"] == row["condition"]
        beyond = _settings(table[same_condition & table["beyond_control"].eq(True)])
        within = _settings(table[same_condition & table["beyond_control"].eq(False)])
        flips = row["regressions"] + row["gains"]
        return (
            f"{row['texts_differ']:.0f} of {counted(row['completions'], 'text')} differ, "
            f"answers that flip: {flips:.0f}; {row['decision']}. "
            f"Settings that surely flip more answers: {beyond}. Other settings: {within}."
        )

    return _per_cell(table[is_control(table) & table["status"].eq("done")].dropna(subset="decision"), say)
