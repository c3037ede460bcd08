"""What a run tells about its servers: other prompts, models or caches, and completions cut at a server's own limit."""

from typing import Any

import pandas as pd

from kvsweep.analysis import notation
from kvsweep.analysis.load import Run, is_control
from kvsweep.analysis.server_caches import bytes_per_token, kinds_of_cache, said_of_cache
from kvsweep.analysis.statistics.against_full import decide_cells
from kvsweep.analysis.statistics.metrics import difference_to_full, graded_rows, texts_differ
from kvsweep.command_line import counted
from kvsweep.escape import visible
from kvsweep.stored import is_served, models_told


def other_prompts(run: Run) -> list[str]:
    """Return a sentence for each server that counts other prompt tokens than the baseline, for the same questions."""
    texts = _texts(run)
    sentences = []
    for _, ours in texts.groupby("condition", sort=False):
        counts = ours.groupby(["cell_id", "problem_id"], observed=True)["prompt_tokens"].max().unstack(0)
        cells = ours.drop_duplicates("cell_id").set_index("cell_id")
        base = next(iter(cells.index[cells["policy"] == "full"]), cells.index[0])
        for cell_id in cells.index.drop(base):
            both = counts[[base, cell_id]].dropna()
            differ = both[both[base] != both[cell_id]]
            if len(differ):
                first, (theirs, own) = differ.index[0], differ.iloc[0]
                problems = f"{len(differ)} of {counted(len(both), 'problem')}"
                example = f"{visible(str(first))}: {own:.0f} and {theirs:.0f}"
                sentences.append(
                    f"{_name(cells.loc[cell_id])}: the prompts of {problems} have other numbers of tokens than with "
                    f"{notation.setting(cells.loc[base])} ({example}), so that a difference may be the prompt's. Start "
                    "both servers with one chat template and a context that holds every question, or ask without a "
                    "template by engine.api=completions."
                )
    return sentences


def other_models(run: Run) -> list[str]:
    """A sentence for each server whose answers name another model than the baseline's, or than the one asked for."""
    served = run.cells[_are_served(run)]
    told = {name: _told(run, name) for name in served["cell_id"]}
    asked = {name: str(run.settings[name]["policy"].get("model")) for name in served["cell_id"]}
    sentences = []
    for _, cells in served.groupby("condition", sort=False):
        cells = cells.set_index("cell_id")
        base = next(iter(cells.index[cells["policy"] == "full"]), cells.index[0])
        one_model = cells.index.map(asked).nunique() == 1
        for cell_id, cell in cells.iterrows():
            models = ", ".join(sorted(told[cell_id]))
            if asked[cell_id] == asked[base] and told[base] and told[cell_id] and told[cell_id] != told[base]:
                theirs = f"{', '.join(sorted(told[base]))} with {notation.setting(cells.loc[base])}"
                said = f"its answers are of the model {models}, and of {theirs}"
                mend = "Start both servers with one model, or give each setting its engine.model if they shall differ"
            elif not one_model and any(_last(name) != _last(asked[cell_id]) for name in told[cell_id]):
                said = f"asked for engine.model={visible(asked[cell_id])}, its answers are of the model {models}"
                mend = "Start the server with the model that is asked for, or ask for the one that it has"
            else:
                continue
            sentences.append(f"{_name(cell)}: {said}, so that a difference may be the model's. {mend}.")
    return sentences


def _told(run: Run, cell_id: str) -> set[str]:
    """The models that a cell's answers name."""
    models = models_told(run.provenance.get(cell_id, {}).get("decoding_passes", []))
    return {visible(model) for model in models if model}


def _last(model: str) -> str:
    """A model's own name, without the owner or the folders before it."""
    return model.rstrip("/").rpartition("/")[2]


def same_caches(run: Run) -> list[str]:
    """A sentence for each server that says the same of its cache as the baseline's server, where both say something."""
    said = {name: _cache(run, name) for name in run.cells.loc[~is_control(run.cells), "cell_id"]}
    sentences = []
    for _, cells in run.cells.groupby("condition", sort=False):
        full = next(iter(cells.loc[cells["policy"] == "full", "cell_id"]), None)
        for _, cell in cells.iterrows():
            if full and cell["cell_id"] != full and said[full] and said.get(cell["cell_id"]) == said[full]:
                words = visible(", ".join(f"{name} {value}" for name, value in said[full].items()))
                alike = f"Its server says the same of its cache as the full setting's ({words})"
                mend = "Look at how the server was started, and at its log"
                sentences.append(f"{_name(cell)}: compression is not seen. {alike}. {mend}.")
    return sentences


def _cache(run: Run, cell_id: str) -> dict[str, str]:
    """The types that a cell's server says its cache has, and its bytes per token where it says both numbers."""
    said = said_of_cache(run.provenance.get(cell_id, {}))
    size = bytes_per_token(said)
    return {**kinds_of_cache(said), **({} if size is None else {"bytes a token": f"{size:,.0f}"})}


def beside_control(run: Run, margin: float | None = None) -> list[str]:
    """A sentence for each control: what chance alone changes, and which settings surely change more."""
    if not is_control(run.cells).any():
        return []
    graded = graded_rows(run)
    parts = [decide_cells(run.cells, graded, run.provenance, margin), difference_to_full(run.cells, graded)]
    table = run.cells.set_index("cell_id").join([*parts, texts_differ(run)])
    sentences = []
    for _, row in table[is_control(table) & table["status"].eq("done")].dropna(subset="decision").iterrows():
        others = table[(table["condition"] == row["condition"]) & table["beyond_control"].notna()]
        kinds = (notation.rows(others[others["beyond_control"].eq(kind)]) for kind in (True, False))
        beyond, within = ("; ".join(map(notation.setting, kind)) or "none" for kind in kinds)
        changed = f"{row['texts_differ']:.0f} of {counted(row['completions'], 'text')} differ"
        sentences.append(
            f"{_name(row)}: {changed}, answers that flip: {row['regressions'] + row['gains']:.0f}; {row['decision']}. "
            f"With these settings surely more answers flip: {beyond}. With these not surely more: {within}."
        )
    return sentences


def cut_by_server(run: Run) -> list[str]:
    """Return a sentence for each server that truncated completions before `decoding.max_new_tokens`."""
    texts, early = _texts(run), cut_early(run)
    sentences = []
    for cell_id, ours in texts.groupby("cell_id", sort=False, observed=True):
        cut = ours[early.reindex(ours["row"]).to_numpy()]
        if len(cut):
            limit = _limit(run, str(cell_id))
            room = ours["prompt_tokens"].max() + limit
            least, longest = (f"{size:,}" for size in (cut["num_tokens"].min(), cut["num_tokens"].max()))
            tokens = least if least == longest else f"{least} to {longest}"
            sentences.append(
                f"{_name(ours.iloc[0])}: the server cut off {len(cut)} of {counted(len(ours), 'text')} at {tokens} "
                f"tokens, before decoding.max_new_tokens={limit}. They count as wrong, so that a loss may be the "
                f"server's limit and not its cache's. Start the server with a context of {room:,} tokens or more."
            )
    return sentences


def cut_early(run: Run) -> pd.Series:
    """True for each completion of a server that was truncated below `decoding.max_new_tokens`."""
    limits = {name: _limit(run, name) for name in run.cells["cell_id"] if is_served(run.settings.get(name, {}))}
    limit = run.completions["cell_id"].astype("object").map(limits).astype("float64")
    return (run.completions["stop_reason"] == "length") & (run.completions["num_tokens"] < limit)


def _texts(run: Run) -> pd.DataFrame:
    """Return servers' completions with the columns of their cells; `row` is their place in the run."""
    cells = run.cells[_are_served(run)]
    own = run.completions.assign(row=run.completions.index)
    return own.merge(cells.drop(columns="completions"), on="cell_id")


def _are_served(run: Run) -> list[bool]:
    return [is_served(run.settings.get(name, {})) for name in run.cells["cell_id"]]


def _limit(run: Run, cell_id: str) -> Any:
    return run.settings[cell_id]["decoding"].get("max_new_tokens")


def _name(row: Any) -> str:
    return f"{row['model_title']} | {row['benchmark_title']}: {notation.setting(row)}"
