"""What a reader must know before the numbers: each warning is a condition on a run's texts, and a sentence."""

import shlex
from collections.abc import Callable
from typing import Any

import pandas as pd

from kvsweep.analysis import notation
from kvsweep.analysis.load import Run, is_control
from kvsweep.analysis.server_records import MISCOUNTED, ROUTED, cache_words, record_of, same_cache
from kvsweep.analysis.statistics.against_full import decide_cells, plan_of
from kvsweep.analysis.statistics.metrics import beside_full, difference_to_full, graded_rows, texts_differ
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
    settings = cells["cell_id"].map(lambda name: run.settings.get(name, {}))
    first = cells.assign(other=cells["policy"] != "full").sort_values("other", kind="stable")
    return cells.assign(
        served=settings.map(is_served),
        limit=settings.map(lambda one: one.get("decoding", {}).get("max_new_tokens")).astype("float64"),
        baseline=cells["condition"].map(first.groupby("condition")["cell_id"].first()),
    )


def _texts(run: Run) -> pd.DataFrame:
    """The run's texts with their cells' columns; `cut`: truncated, `early`: by a server below the limit."""
    texts = _cells(run).merge(run.completions, on="cell_id")  # in the order of the cells
    cut = texts["stop_reason"] == "length"
    return texts.assign(cut=cut, early=cut & texts["served"] & (texts["num_tokens"] < texts["limit"] - MISCOUNTED))


def _per_panel(rows: pd.DataFrame, say: Callable[[pd.DataFrame], str | None]) -> list[str]:
    """The sentence of each model and benchmark for which there is one."""
    sentences = []
    for (model, benchmark), panel in rows.groupby(["model_title", "benchmark_title"], sort=False):
        sentence = say(panel)
        if sentence:
            sentences.append(f"{model} | {benchmark}: {sentence}")
    return sentences


def _per_cell(rows: pd.DataFrame, say: Callable[[pd.DataFrame], str | None]) -> list[str]:
    """The sentence of each cell for which there is one."""
    sentences = []
    for _, cell in rows.groupby("cell_id", sort=False, observed=True):
        sentence = say(cell)
        if sentence:
            sentences.append(f"{_name(cell.iloc[0])}: {sentence}")
    return sentences


def _name(row: Any) -> str:
    return f"{row['model_title']} | {row['benchmark_title']}: {notation.setting(row)}"


def _settings(cells: pd.DataFrame) -> str:
    return "; ".join(map(notation.setting, notation.rows(cells))) or "none"


def _why(run: Run, texts: pd.DataFrame) -> str:
    """The command that shows how texts were graded, with two of their problems."""
    examples = [f"--why {shlex.quote(name)}" for name in texts["problem_id"].astype(str).unique()[:2]]
    return f"`kvsweep grade {shlex.quote(str(run.directory))}` with {' or '.join(examples)}"


# --- Texts of kvsweep and of servers --------------------------------------------------------------------------


def unanswered(run: Run) -> list[str]:
    """Most completions of a cell lack an answer."""
    texts = _texts(run).dropna(subset="outcome")
    silent = texts["outcome"] == "no_answer"
    most = silent.groupby(texts["cell_id"]).transform("mean") > 0.5
    return _per_panel(
        texts[most],
        lambda ours: (
            f"most texts of {counted(ours['cell_id'].nunique(), 'cell')} hold no answer. Is model.think_end the "
            "tag that this model writes (null if it does not think), and does the prompt ask for a \\boxed answer? "
            f"See {_why(run, ours[ours['outcome'] == 'no_answer'])}."
        ),
    )


def endless(run: Run) -> list[str]:
    """Nearly all completions ran to the limit with every cache. A server decides its texts' ends: they are left out."""
    texts = _texts(run)

    def say(ours: pd.DataFrame) -> str | None:
        cut = int(ours["cut"].sum())
        if cut < _NEARLY_ALL * len(ours):
            return None
        return (
            f"{cut} of {counted(len(ours), 'text')} ran to the limit. Does the model end "
            "its answers with a token that eos_token_id in its generation_config.json lacks?"
        )

    return _per_panel(texts[~texts["served"]], say)


def cut_off(run: Run, margin: float | None = None) -> list[str]:
    """More of the full cache's completions were truncated than the margin."""
    texts = _texts(run)

    def say(ours: pd.DataFrame) -> str | None:
        if ours["cut"].mean() <= plan_of(run.provenance.get(ours["cell_id"].iloc[0], {}), margin).margin:
            return None
        return (
            f"{ours['cut'].sum()} of {counted(len(ours), 'text')} of the full cache were cut off and "
            "count as wrong, so that a setting may seem as good which is not. Raise decoding.max_new_tokens."
        )

    return _per_panel(texts[~texts["early"] & (texts["policy"] == "full")], say)


def not_finite(run: Run) -> list[str]:
    """Completions ended in NaN or infinite logits."""
    texts = _texts(run)
    return _per_panel(
        texts[texts["stop_reason"] == "not_finite"],
        lambda ours: (
            f"{counted(len(ours), 'text')} of {counted(ours['cell_id'].nunique(), 'cell')} ended "
            "because logits were NaN or infinite, and count as wrong. The network is the cause, not the policy: take "
            "model.dtype=bfloat16 or float32, or look at the weights."
        ),
    )


def not_evicted(run: Run) -> list[str]:
    """No cache outgrew its trigger; the sentence has triggers that would evict."""
    texts = _texts(run).dropna(subset=["budget", "peak_length", "prompt_tokens"])
    # The last step evicts nothing, and a question on top does not count towards the trigger.
    texts["length"] = texts["peak_length"] - 1 - texts["prompt_tokens"].where(texts["question"] == "on_top", 0)

    def say(ours: pd.DataFrame) -> str | None:
        lengths = ours["length"]
        if ours["evictions"].sum() or lengths.max() <= 1:
            return None
        triggers = [int(lengths.max()) - 1, max(1, int(lengths.median()) // 2)]
        would = [f"policy.budget={size} would evict in {(lengths > size).sum()}" for size in triggers]
        nothing = "nothing was evicted, because no cache outgrew its trigger"
        return f"{nothing}. Of {counted(len(lengths), 'text')} {', '.join(would)}."

    return _per_panel(texts, say)


# --- Servers beside their baseline ----------------------------------------------------------------------------


def otherwise_answered(run: Run, margin: float | None = None) -> list[str]:
    """A server's whole texts lack an answer more or less often than the baseline's, by more than the margin.

    In kvsweep's own texts the cache alone makes such a difference, because tags and prompt are the same; two servers
    may differ in both.
    """
    graded = run.completions.dropna(subset="outcome")
    graded = graded.assign(silent=graded["outcome"].eq("no_answer") & graded["stop_reason"].eq("stop"))
    cells = _cells(run)
    pairs = beside_full(run.cells, graded, ["silent"]).astype({"cell_id": "object"})
    pairs = pairs[pairs["cell_id"] != pairs["full"]].merge(cells[cells["served"]], on="cell_id")
    settings = cells.set_index("cell_id")

    def say(ours: pd.DataFrame) -> str | None:
        own, theirs = int(ours["silent"].sum()), int(ours["silent_full"].sum())
        plan = plan_of(run.provenance.get(str(ours["cell_id"].iloc[0]), {}), margin)
        if abs(own - theirs) / len(ours) <= plan.margin:
            return None
        return (
            f"{own} of {counted(len(ours), 'text')} ended by themselves without an answer, and {theirs} "
            f"with {notation.setting(settings.loc[ours['full'].iloc[0]])}, so that the difference may be one of "
            "reading and not of the cache. Look at the texts and at both servers' reasoning parsers: one may take the "
            f"tags of thinking away. See {_why(run, ours[ours['silent'] != ours['silent_full']])}."
        )

    return _per_cell(pairs, say)


def cut_by_server(run: Run) -> list[str]:
    """A server truncated completions before `decoding.max_new_tokens`."""
    texts = _texts(run)

    def say(ours: pd.DataFrame) -> str | None:
        cut = ours.loc[ours["early"], "num_tokens"]
        if cut.empty:
            return None
        limit = int(ours["limit"].iloc[0])
        room = ours["prompt_tokens"].max() + limit
        tokens = " to ".join(dict.fromkeys(f"{size:,}" for size in (cut.min(), cut.max())))
        return (
            f"the server cut off {len(cut)} of {counted(len(ours), 'text')} at {tokens} "
            f"tokens, before decoding.max_new_tokens={limit}. They count as wrong, so that a loss may be the "
            f"server's limit and not its cache's. Start the server with a context of {room:,} tokens or more."
        )

    return _per_cell(texts[texts["served"]], say)


def other_prompts(run: Run) -> list[str]:
    """A server counts other prompt tokens than the baseline, for the same questions."""
    texts = _texts(run)
    texts = texts[texts["served"]]
    counts = texts.groupby(["cell_id", "problem_id"], observed=True)["prompt_tokens"].max().unstack(0)
    cells = texts.drop_duplicates("cell_id").set_index("cell_id")

    def say(ours: pd.DataFrame) -> str | None:
        cell_id, base = ours[["cell_id", "baseline"]].iloc[0]
        if cell_id == base or base not in counts:
            return None
        both = counts[[base, cell_id]].dropna()
        differ = both[both[base] != both[cell_id]]
        if differ.empty:
            return None
        problem = visible(str(differ.index[0]))
        baseline_tokens, tokens = differ.iloc[0]
        return (
            f"the prompts of {len(differ)} of {counted(len(both), 'problem')} have other numbers of tokens than with "
            f"{notation.setting(cells.loc[base])} ({problem}: {tokens:.0f} and {baseline_tokens:.0f}), so that a "
            "difference may be the prompt's. Start both servers with one chat template and a context that holds every "
            "question, or ask without a template by engine.api=completions."
        )

    return _per_cell(texts, say)


def _records(run: Run) -> pd.DataFrame:
    """The cells of servers, with the `record` of what each server says of itself, and that of its baseline, `full`."""
    cells = _cells(run)
    cells = cells[cells["served"]]
    records = {name: record_of(run.provenance[name].get("decoding_passes", [])) for name in cells["cell_id"]}
    return cells.assign(record=cells["cell_id"].map(records), full=cells["baseline"].map(records))


def other_models(run: Run) -> list[str]:
    """A server's answers name several makers, or another one than the baseline's, or another model than asked for."""
    cells = _records(run)
    asked = {name: str(run.settings[name]["policy"].get("model")) for name in cells["cell_id"]}
    alike = cells.assign(asked=cells["cell_id"].map(asked)).groupby("condition")["asked"].nunique() == 1

    def say(ours: pd.DataFrame) -> str | None:
        row = ours.iloc[0]
        record, full = row["record"], row["full"]
        wanted = asked[row["cell_id"]]
        model = record.get("model")
        other = full.get("model")
        several = [f"{name} {' and '.join(record[name])}" for name in ROUTED if len(record.get(name, ())) > 1]
        if several or record.get("provider") != full.get("provider"):
            names = ", ".join(several) or "another provider than those of the full setting"
            said = f"its answers name {names}"
            mend = "Ask one server, or let engine.extra choose one provider of the router for all settings"
        elif wanted == asked[row["baseline"]] and model and other and model != other:
            said = f"its answers are of the model {model}, and of {other} with the full setting"
            mend = "Start both servers with one model, or give each setting its engine.model if they shall differ"
        elif not alike[row["condition"]] and model and _last(model) != _last(wanted):
            said = f"asked for engine.model={wanted}, its answers are of the model {model}"
            mend = "Start the server with the model that is asked for, or ask for the one that it has"
        else:
            return None
        return f"{visible(said)}, so that a difference may be the model's. {mend}."

    return _per_cell(cells, say)


def _last(model: str) -> str:
    """A model's own name, without the owner or the folders before it."""
    return model.rstrip("/").rpartition("/")[2]


def same_caches(run: Run) -> list[str]:
    """A server says of its cache what the baseline's server says, where both say something."""
    cells = _records(run)

    def say(ours: pd.DataFrame) -> str | None:
        row = ours.iloc[0]
        if not same_cache(row["record"], row["full"]):
            return None
        words = visible(cache_words(row["record"]))
        return (
            f"compression is not seen. Its cache is the full setting's by what the servers say ({words}): it was not "
            "on. Look at how the server was started, and at its log."
        )

    baselines = cells.loc[cells["policy"] == "full", "cell_id"]
    beside = cells["baseline"].isin(baselines) & ~cells["cell_id"].isin(baselines) & ~is_control(cells)
    return _per_cell(cells[beside], say)


def beside_control(run: Run, margin: float | None = None) -> list[str]:
    """What chance alone changes where the baseline is asked again, and which settings surely change more."""
    if not is_control(run.cells).any():
        return []
    graded = graded_rows(run)
    parts = [decide_cells(run.cells, graded, run.provenance, margin), difference_to_full(run.cells, graded)]
    table = run.cells.set_index("cell_id").join([*parts, texts_differ(run)]).reset_index()

    def say(ours: pd.DataFrame) -> str:
        row = ours.iloc[0]
        others = table[(table["condition"] == row["condition"]) & table["beyond_control"].notna()]
        beyond = _settings(others[others["beyond_control"].eq(True)])
        within = _settings(others[others["beyond_control"].eq(False)])
        flips = row["regressions"] + row["gains"]
        return (
            f"{row['texts_differ']:.0f} of {counted(row['completions'], 'text')} differ, "
            f"answers that flip: {flips:.0f}; {row['decision']}. "
            f"With these settings surely more answers flip: {beyond}. With these not surely more: {within}."
        )

    return _per_cell(table[is_control(table) & table["status"].eq("done")].dropna(subset="decision"), say)
