"""Writes small run directories in the form of docs/files.md, without a model."""

import json
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvsweep.run_files.run_reader import StoredCell

MakeCell = Callable[..., Path]


@pytest.fixture
def run(tmp_path):
    """The folder of the cells that `make_cell` writes."""
    return tmp_path / "run"


@pytest.fixture
def make_cell(run):
    """`make_cell(correct, **settings)` writes one cell into `run` and returns its folder."""
    return partial(write_cell, run)


@pytest.fixture
def refused(kvsweep):
    """`refused("report", ...)` is the one sentence of a command that ends with exit status 2 and prints no result."""

    def said(*words):
        code, out, err = kvsweep(*map(str, words))
        assert (code, out, err.count("\n")) == (2, "", 1)
        return str(err)

    return said


def write_cell(
    run: Path,
    correct: Iterable[Iterable[Any]],
    *,
    policy: str = "full",
    keep_ratio: float = 0.3,
    local_window: int = 48,
    budget: int = 128,
    model: str = "toy_qwen",
    model_title: str = "Toy-Qwen",
    benchmark: str = "toy_chain",
    benchmark_title: str = "Chain",
    seed: int = 0,
    done: bool = True,
    extra: dict[str, Any] | None = None,
    limit: int | None = None,
    expected: int | None = None,
    completion: dict[str, Any] | None = None,
    texts: Iterable[dict[str, Any]] = (),
    cell: dict[str, Any] | None = None,
    recorded: dict[str, Any] | None = None,
) -> Path:
    """One cell; `correct`: per problem its draws, each 1, 0, None (ungraded) or an outcome's name.

    `completion` has fields of all completions, `texts` those of each in turn; `cell` has settings, and those of a group
    stand beside its others, `recorded` what provenance.json has.
    """
    outcomes = [list(draws) for draws in correct]
    fields = {
        "keep_ratio": keep_ratio,
        "local_window": local_window,
        "budget": budget,
        "question": "on_top",
    }
    settings: dict[str, Any] = {
        "model": {"name": model, "title": model_title},
        "benchmark": {"name": benchmark, "title": benchmark_title, "answer_kind": "integer", "limit": limit},
        "policy": {"name": policy, **({} if policy == "full" else fields), **(extra or {})},
        "decoding": {"name": "r1", "temperature": 0.6, "max_new_tokens": 400},
        "impl": "openai" if extra and "kind" in extra else "torch",
        "seed": seed,
        "condition": f"{model} {benchmark} {seed}",
    }
    parts = (model, benchmark, policy, *settings["policy"].values(), seed)
    folder = run / "-".join(str(part) for part in parts)
    for name, value in (cell or {}).items():
        settings[name] = {**settings.get(name, {}), **value} if isinstance(value, dict) else value
    folder.mkdir(parents=True)
    (folder / "cell.yaml").write_text(yaml.safe_dump({"schema": 1, "cell_id": folder.name, **settings}))
    provenance = {
        "schema": 1,
        "git": {"revision": "0123abcd", "dirty": False},
        "packages": {"numpy": "2.4"},
        "decoding_passes": [{"command": ["kvsweep", "-m", "experiment=demo"], "started": "2000-01-01T00:00:00"}],
        "dataset_hash": "feed",
        "expected": expected or sum(map(len, outcomes)),
        "draws": max(map(len, outcomes), default=1),
    }
    (folder / "provenance.json").write_text(json.dumps(provenance | (recorded or {})))
    completions, grades = [], []
    for p, draws in enumerate(outcomes):
        for d, outcome in enumerate(draws):
            key = {"problem_id": f"p{p}", "draw": d}
            completions.append(completion_row(policy != "full") | key | (completion or {}))
            if outcome is not None:
                grades.append(grade_row(outcome) | key)
    for row, fields in zip(completions, texts, strict=False):
        row |= fields
    write_rows(folder / "completions.jsonl", completions)
    write_rows(folder / "grades.jsonl", grades)
    write_rows(folder / "stats.jsonl", [stats_row()])
    if done:
        (folder / "DONE").write_text(json.dumps({"files": StoredCell(folder).sizes("completions.jsonl")}))
    return folder


def bare(make_cell: MakeCell, policy: str, *missing: str):
    """A cell whose policy has not all of the usual fields."""
    path = make_cell([[1], [0]], policy=policy) / "cell.yaml"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if line.split(":")[0].strip() not in missing))


def completion_row(evicted: bool) -> dict[str, Any]:
    return {
        "text": "a is 4. So \\boxed{4}",
        "token_ids": [5, 6, 7, 2],
        "num_tokens": 201,
        "prompt_tokens": 40,
        "thinking_tokens": 150,
        "stop_reason": "stop",
        "evictions": [
            {"step": step, "length_before": 129, "length_after": 72, "held": []} for step in (89, 146) if evicted
        ],
        "fork_step": 89 if evicted else None,
        "peak_length": 129 if evicted else 240,
        "seed": 0,
    }


def grade_row(outcome: Any) -> dict[str, Any]:
    name = outcome if isinstance(outcome, str) else "correct" if outcome else "wrong"
    return {"answer": "4", "gold": "4", "outcome": name, "correct": int(name == "correct")}


def stats_row() -> dict[str, Any]:
    return {
        "wall_seconds": 3.0,
        "prefill_seconds": 0.5,
        "decode_seconds": 2.0,
        "forward_seconds": 1.0,
        "sampling_seconds": 0.25,
        "scoring_seconds": 0.25,
        "eviction_seconds": 0.25,
        "host_seconds": 0.25,
        "first_token_seconds": 0.6,
        "tokens": 1000,
        "tokens_total": 4000,
        "cells": 1,
        "completions": 4,
        "slots": 8,
        "steps": 500,
        "kv_bytes_allocated": 4096,
        "kv_bytes_analytic": 4000,
    }


def write_rows(path: Path, rows: Iterable[dict[str, Any]]):
    path.write_text("".join(json.dumps({"schema": 1, **row}) + "\n" for row in rows))
