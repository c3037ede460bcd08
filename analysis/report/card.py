"""The reproducibility card: what a stranger needs to make a run's numbers again, read from the cells' files."""

import shlex
from collections.abc import Iterable, Iterator
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
_MOST_VALUES, _LONGEST = 4, 200
# Provenance that the card has already, or that is no fact about the run as a whole.
_NOT_APART = {"expected", "draws", "rounds", "margin", "config", "decoding_passes", "schema"}
_NOT_APART |= {"git", "packages", "hardware", "dataset_hash", "dataset_origin"}


class _Verified(msgspec.Struct):
    ok: bool
    summary: str
    started: str


def card(found: Findings) -> dict[str, list[str]]:
    """Return the facts by name, each with its different values; the last is the result of the last verify."""
    run, metrics = found.run, found.metrics
    passes = [one for record in run.provenance.values() for one in record.get("decoding_passes", [])]
    flat = [dict(leaves(one)) for one in passes]
    cells = [(name, dict(leaves(settings))) for name, settings in run.settings.items()]
    records = [dict(leaves({"git": record.get("git") or {}})) for record in run.provenance.values()]
    origins = {name: record.get("dataset_origin") for name, record in run.provenance.items()}
    facts = {
        "command": (_command(one.get("command")) for one in passes),
        "protocol": (protocol_of(record.get("config")) for record in run.provenance.values()),
        "models": metrics["model_title"],
        "weights": (f"{one.get('model.name')} {one.get('model.weights')} {one.get('model.dtype')}" for _, one in cells),
        "benchmarks": _problems(run, metrics),
        "data": (f"{one.get('benchmark.name')} {one.get('dataset_hash')} ({origins.get(name)})" for name, one in cells),
        "prompt": (_words(one, "benchmark.prompt", "benchmark.option_seed") for _, one in cells),
        "answers": (_words(one, "benchmark.answer_kind", "benchmark.answer_from") for _, one in cells),
        "policies": metrics["policy"],
        "policy code": _policy_codes(run),
        "heads": (one.get(f"policy.{kind}") for _, one in cells for kind in ("predictor", "statistics", "labels")),
        "decoding": (
            f"{one.get('decoding.name')}: {_words(one, 'decoding.', but='decoding.name')}" for _, one in cells if one
        ),
        "draws": [_draws(metrics)],
        "seed": metrics["seed"],
        "completions": [f"{metrics['completions'].sum():,}"],
        "margin": (f"{margin:.3g} points" for margin in 100 * metrics["margin"].dropna().unique()),
        "corrections": [CORRECTIONS] if metrics["margin"].notna().any() else [],
        "code of kvsweep": [*map(_revision, flat), *(_revision(record, "git.") for record in records)],
        "versions": (_words(one, "code.packages.", "code.python") for one in flat),
        "machine": (_machine(one) for one in flat),
        "kernel set": (one.get("arithmetic.vector_instructions") for one in flat),
        "arithmetic": (_words(one, "arithmetic.", but="arithmetic.vector_instructions") for one in flat),
        "verified": [verified(run.directory)] if run.provenance else [],
    }
    return {name: known for name, values in facts.items() if (known := _different(values))}


def rows(facts: dict[str, list[str]], run: Run) -> list[tuple[str, str]]:
    """Return the facts for the page, one text each, then the other provenance of the cells."""
    others: dict[str, list[str]] = {}
    for record in run.provenance.values():
        for name, item in leaves({k: v for k, v in record.items() if k not in _NOT_APART}):
            others.setdefault(name.replace(".", " ").replace("_", " "), []).append(str(item)[:_LONGEST])
    others = {name: known for name, values in others.items() if (known := _different(values))}
    return [(name, _one_text(name, values)) for name, values in (facts | others).items()]


def _one_text(name: str, values: list[str]) -> str:
    if name in ("models", "benchmarks", "policies"):
        return ", ".join(values)
    return "; ".join(values) if len(values) <= _MOST_VALUES else f"{len(values)} different values"


def protocol_of(config: Any) -> str | None:
    """Return a configuration's protocol, its changes, and the source; None without a protocol."""
    chosen = config.get("protocol") if isinstance(config, dict) else None
    if not isinstance(chosen, dict) or not chosen.get("name"):
        return None
    changed = ", ".join(map(str, chosen.get("changed") or []))
    return f"{chosen['name']}{f', but {changed}' if changed else ''} ({chosen.get('source')})"


def verified(directory: Path) -> str:
    """The result of the last `kvsweep verify`, in words."""
    try:
        last = decode(read_file(directory / VERIFY_FILE), _Verified)
    except (OSError, ValueError):
        return "not yet: kvsweep verify"
    return in_one_line(f"{last.started}: {last.summary}")


def _different(values: Iterable[Any]) -> list[str]:
    return list(dict.fromkeys(str(value) for value in values if value not in (None, "", "None", "[]")))


def _command(words: Any) -> str:
    return shlex.join(map(str, words)) if isinstance(words, list) else ""


def _words(one: dict[str, Any], *prefixes: str, but: str = "") -> str:
    """Return the values with one of the prefixes in their names, as text: "torch 2.13.0, numpy 2.4.6"."""
    known = [name for name in one if name.startswith(prefixes) and name != but and one[name] is not None]
    return ", ".join(f"{name.rpartition('.')[2].replace('_', ' ')} {one[name]}" for name in known)


def _problems(run: Run, metrics: pd.DataFrame) -> Iterator[str]:
    asked = run.completions.groupby("cell_id", observed=True)["problem_id"].nunique()
    counted = metrics.assign(count=metrics["cell_id"].map(asked).fillna(metrics["problems"]))
    for name, most in counted.groupby("benchmark_title", sort=False)["count"].max().items():
        yield f"{name} ({most:g} problems)"


def _policy_codes(run: Run) -> Iterator[str]:
    for name, record in run.provenance.items():
        for one in record.get("decoding_passes", []):
            if one.get("policy_code") and name in run.settings:
                yield f"{run.settings[name]['policy']['name']} {one['policy_code']}"


def _draws(metrics: pd.DataFrame) -> str:
    listed = ", ".join(_different(metrics["draws"].sort_values().map(notation.number)))
    rounds = [text.replace(" ", ", ") for text in metrics["rounds"].dropna().unique() if " " in text]
    ends = "until a cell was decided, which leaves it fewer draws"
    return f"{listed}; sequential: in rounds of {'; '.join(rounds)}, {ends}" if rounds else listed


def _revision(one: dict[str, Any], prefix: str = "code.git_") -> str | None:
    revision = one.get(f"{prefix}revision")
    return revision and f"{revision}{', changed' * bool(one.get(f'{prefix}dirty'))}"


def _machine(one: dict[str, Any]) -> str:
    if "hardware.processor" not in one:
        return ""
    gpus = found if isinstance(found := one.get("hardware.gpus"), list) else []
    return ", ".join(map(str, [one["hardware.processor"], f"{one.get('hardware.cores')} cores", *(gpus or ["no GPU"])]))
