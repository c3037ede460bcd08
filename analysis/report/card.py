"""The reproducibility card: what a stranger needs to make a run's numbers again, read from the cells' files."""

import shlex
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pandas as pd

from kvsweep.analysis import notation
from kvsweep.analysis.load import Run
from kvsweep.analysis.statistics.sentences import Findings
from kvsweep.messages.escape import in_one_line
from kvsweep.run_files.row_types import VERIFY_FILE, decode, leaves
from kvsweep.run_files.safe_files import read_file

CORRECTIONS = (
    "the chance of any wrong loss is 2.5% over the settings of a model and benchmark (Holm); safe by Holm "
    "or in a fixed sequence from the largest cache"
)
# A fact with more different values than this says nothing about the run as a whole.
_MOST_VALUES = 4


class _Verified(msgspec.Struct):
    ok: bool
    summary: str
    started: str


def card(findings: Findings) -> dict[str, list[str]]:
    """Return the facts by name, each with its different values; the last is the result of the last verify."""
    facts = defaultdict[str, dict[str, None]](dict)  # the values as keys, in order
    for name, value in _facts(findings.run, findings.metrics):
        # Missing values, also where a text was made of one, are no facts.
        if value not in (None, "", "None", "[]"):
            facts[name][str(value)] = None
    return {name: list(values) for name, values in facts.items()}


def _facts(run: Run, metrics: pd.DataFrame) -> Iterator[tuple[str, Any]]:
    """Yield each fact of the table, and of each pass and cell, by its name; in the order of the names on the card."""
    yield from _table_facts(run, metrics)
    for cell_id, settings in run.settings.items():
        record = run.provenance[cell_id]
        for decoding_pass in record.get("decoding_passes", []):
            yield from _pass_facts(decoding_pass)
            code = decoding_pass.get("policy_code")
            if code:
                yield "policy code", f"{settings['policy']['name']} {code}"
        git = record.get("git") or {}
        yield "code of kvsweep", _revision(git.get("revision"), git.get("dirty"))
        yield "protocol", protocol_of(record.get("config"))
        yield from _cell_facts(dict(leaves(settings)), record.get("dataset_origin"))
    if run.provenance:
        yield "verified", verified(run.directory)


def _pass_facts(decoding_pass: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the facts of one decoding pass: its command, code, packages, machine and arithmetic."""
    words = decoding_pass.get("command")
    if isinstance(words, list):
        yield "command", shlex.join(map(str, words))
    values = dict(leaves(decoding_pass))
    yield "code of kvsweep", _revision(values.get("code.git_revision"), values.get("code.git_dirty"))
    yield "versions", _words(values, "code.packages.", "code.python")
    if "hardware.processor" in values:
        yield "machine", _machine(values)
    instructions = "arithmetic.vector_instructions"
    yield "kernel set", values.get(instructions)
    yield "arithmetic", _words(values, "arithmetic.", but=instructions)


def _cell_facts(settings: dict[str, Any], origin: Any) -> Iterator[tuple[str, Any]]:
    """Yield the facts in a cell's settings, by their names with dots, and in the origin of its dataset."""
    get = settings.get
    yield "weights", f"{get('model.name')} {get('model.weights')} {get('model.dtype')}"
    yield "data", f"{get('benchmark.name')} {get('dataset_hash')} ({origin})"
    yield "prompt", _words(settings, "benchmark.prompt", "benchmark.option_seed")
    yield "answers", _words(settings, "benchmark.answer_kind", "benchmark.answer_from")
    for kind in ("predictor", "statistics", "labels"):
        yield "heads", get(f"policy.{kind}")
    yield "decoding", f"{get('decoding.name')}: {_words(settings, 'decoding.', but='decoding.name')}"


def _table_facts(run: Run, metrics: pd.DataFrame) -> Iterator[tuple[str, Any]]:
    """Yield the facts that the table of the cells has: what was run, how often, and the margin."""
    for name, column in (("models", "model_title"), ("policies", "policy"), ("seed", "seed")):
        for value in metrics[column].unique():
            yield name, value
    # A CSV of scores has no completions, and its rows say how many problems they are about.
    stored_problems = run.completions.groupby("cell_id", observed=True)["problem_id"].nunique()
    problems = metrics["cell_id"].map(stored_problems).fillna(metrics["problems"])
    for title, count in problems.groupby(metrics["benchmark_title"], sort=False).max().items():
        yield "benchmarks", f"{title} ({count:g} problems)"
    yield "draws", _draws(metrics)
    yield "completions", f"{metrics['completions'].sum():,}"
    for margin in 100 * metrics["margin"].dropna().unique():
        yield "margin", f"{margin:.3g} points"
        yield "corrections", CORRECTIONS


def rows(facts: dict[str, list[str]]) -> dict[str, str]:
    """Return the facts for the page, one text each."""
    texts = {}
    for name, values in facts.items():
        if name in ("models", "benchmarks", "policies"):
            texts[name] = ", ".join(values)
        else:
            texts[name] = "; ".join(values) if len(values) <= _MOST_VALUES else f"{len(values)} different values"
    return texts


def protocol_of(config: Any) -> str | None:
    """Return a configuration's protocol, its changes, and the source; None without a protocol."""
    chosen = config.get("protocol") if isinstance(config, dict) else None
    if not isinstance(chosen, dict) or not chosen.get("name"):
        return None
    name = chosen["name"]
    if chosen.get("changed"):
        name = f"{name}, but {', '.join(map(str, chosen['changed']))}"
    return f"{name} ({chosen.get('source')})"


def verified(directory: Path) -> str:
    """The result of the last `kvsweep verify`, in words."""
    try:
        last = decode(read_file(directory / VERIFY_FILE), _Verified)
    except (OSError, ValueError):
        return "not yet: kvsweep verify"
    return in_one_line(f"{last.started}: {last.summary}")


def _words(values: dict[str, Any], *prefixes: str, but: str = "") -> str:
    """Return the values with one of the prefixes in their names, as text: "torch 2.13.0, numpy 2.4.6"."""
    words = []
    for name, value in values.items():
        if name.startswith(prefixes) and name != but and value is not None:
            _, _, field = name.rpartition(".")
            words.append(f"{field.replace('_', ' ')} {value}")
    return ", ".join(words)


def _draws(metrics: pd.DataFrame) -> str:
    """Return the numbers of draws, and the rounds of a sequential sweep: "2, 8; sequential: in rounds of 2, 4, 8"."""
    draws = ", ".join(dict.fromkeys(metrics["draws"].sort_values().map(notation.number)))
    # "2 4 8"; a single number is no sequence of rounds.
    rounds = [text.replace(" ", ", ") for text in metrics["rounds"].dropna().unique() if " " in text]
    if not rounds:
        return draws
    ends = "until a cell was decided, which leaves it fewer draws"
    return f"{draws}; sequential: in rounds of {'; '.join(rounds)}, {ends}"


def _revision(revision: Any, is_dirty: Any) -> Any:
    return f"{revision}, changed" if revision and is_dirty else revision


def _machine(values: dict[str, Any]) -> str:
    gpus = values.get("hardware.gpus")
    if not gpus or not isinstance(gpus, list):
        gpus = ["no GPU"]
    return ", ".join(map(str, [values["hardware.processor"], f"{values.get('hardware.cores')} cores", *gpus]))
