"""The command `kvsweep predictor`. Each stage resumes where it stopped."""

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

from kvsweep.harness.predictor.recipe import PredictorSettings, read_settings
from kvsweep.harness.predictor.traces import make_traces
from kvsweep.harness.provenance import describe_process

# What `all` runs; no predictor needs the stages oracle, statistics and scales.
STAGES = ("traces", "labels", "train", "eval")


def make(stage: str, overrides: Sequence[str]) -> None:
    """Run one stage, or all stages that a predictor needs (`all`); eval needs traces that are held out."""
    settings = read_settings(overrides)
    needed = STAGES if settings.recipe.held_out else STAGES[:-1]
    run(settings, needed if stage == "all" else [stage])


def run(settings: PredictorSettings, stages: Sequence[str]) -> None:
    """Run the stages, record each in provenance.jsonl, and print what it made and what comes next."""
    out = settings.recipe.out
    out.mkdir(parents=True, exist_ok=True)
    head: str | None = None
    for stage in stages:
        start = time.perf_counter()
        outcome = _function_of(stage)(settings)
        seconds = round(time.perf_counter() - start, 1)
        entry = {"stage": stage, "seconds": seconds, "outcome": outcome, **describe_process()}
        with (out / "provenance.jsonl").open("a") as file:
            file.write(json.dumps(entry) + "\n")
        print(f"{stage}: {seconds} s; {json.dumps(outcome)}", flush=True)
        head = outcome.get("head", head)
    if head is not None:
        print(
            f"next: kvsweep model={settings.model.name} model.predictor={head} 'grid.policy=[full,dynts]' --dry-run",
            flush=True,
        )


def _function_of(stage: str) -> Callable[[PredictorSettings], dict[str, Any]]:
    """Return the function that runs a stage and returns what it made. All but traces import torch at once."""
    if stage == "traces":
        return make_traces
    from kvsweep.harness.predictor import labels, query_means, scales, train

    functions = {
        "labels": labels.make_labels,
        "oracle": labels.make_oracle,
        "statistics": query_means.make_statistics,
        "scales": scales.make_scales,
        "train": train.train,
        "eval": train.evaluate,
    }
    return functions[stage]
