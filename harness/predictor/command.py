"""The command `kvsweep predictor`. Each stage resumes where it stopped, and loads the model after its input."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from kvsweep.harness.predictor.recipe import PredictorSettings, read_manifest, read_settings
from kvsweep.harness.predictor.traces import make_traces, read_traces
from kvsweep.harness.provenance import describe_process

if TYPE_CHECKING:
    from kvsweep.harness.models.loaded import LoadedModel

# What `all` runs; no predictor needs the stages oracle, statistics and scales.
STAGES = ("traces", "labels", "train", "eval")


def make(stage: str, overrides: Sequence[str]) -> None:
    """Run one stage, or all stages that a predictor needs (`all`); eval needs traces that are held out."""
    settings = read_settings(overrides)
    needed = STAGES if settings.recipe.held_out else STAGES[:-1]
    run(settings, needed if stage == "all" else [stage])


def run(settings: PredictorSettings, stages: Sequence[str]) -> None:
    """Run the stages, record each in provenance.jsonl, and print what it made and what comes next."""

    @cache  # one model for all stages, loaded when the first of them needs it
    def load() -> LoadedModel:
        from kvsweep.harness.models.load import load_model

        return load_model(settings.model)

    out = settings.recipe.out
    out.mkdir(parents=True, exist_ok=True)
    head: str | None = None
    for stage in stages:
        start = time.perf_counter()
        outcome = run_stage(stage, settings, load)
        seconds = round(time.perf_counter() - start, 1)
        entry = {"stage": stage, "seconds": seconds, "outcome": outcome, **describe_process()}
        with (out / "provenance.jsonl").open("a") as file:
            file.write(json.dumps(entry) + "\n")
        print(f"{stage}: {seconds} s; {json.dumps(outcome)}", flush=True)
        head = outcome.get("head", head)
    if head is not None:
        sweep = f"kvsweep model={settings.model.name} model.predictor={head} 'grid.policy=[full,dynts]'"
        print(f"next: {sweep} --dry-run", flush=True)


def run_stage(stage: str, settings: PredictorSettings, load: Callable[[], LoadedModel]) -> dict[str, Any]:
    """Run one stage and return what it made. A stage without input is refused before torch is imported."""
    recipe = settings.recipe
    if stage == "traces":
        return {"kept": make_traces(settings, load)}
    measures_rows = stage in ("statistics", "scales")
    needs_traces = stage in ("labels", "oracle") or (measures_rows and recipe.text is None)
    needs_manifest = stage in ("oracle", "train", "eval")
    traces = read_traces(settings) if needs_traces else []
    manifest = read_manifest(settings, recipe.manifest, "labels") if needs_manifest else {}
    from kvsweep.harness.predictor.labels import make_labels, write_oracle
    from kvsweep.harness.predictor.train import evaluate, train

    if stage == "statistics":
        from kvsweep.harness.predictor.query_means import make_statistics

        return make_statistics(recipe, traces, load())
    if stage == "scales":
        from kvsweep.harness.predictor.scales import make_scales

        return make_scales(recipe, traces, load())
    if stage == "labels":
        return make_labels(recipe, traces, load())
    if stage == "oracle":
        return {"labels": str(write_oracle(recipe, traces, manifest))}
    if stage == "train":
        return {"head": str(train(settings, manifest))}
    return evaluate(recipe, manifest)
