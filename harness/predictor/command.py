"""The command `kvsweep-predictor`. Each stage goes on where it stopped, and loads the model after its own input."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from kvsweep.base.command_line import GOES_ON, one_sentence
from kvsweep.base.errors import UserError
from kvsweep.harness.predictor.recipe import LABEL_KINDS, PredictorSettings, read_manifest, read_settings
from kvsweep.harness.predictor.traces import make_traces, read_traces
from kvsweep.harness.provenance import describe_process

if TYPE_CHECKING:
    from kvsweep.harness.models.loaded import LoadedModel

STAGES = ("traces", "labels", "train", "eval")
ALONE = ("oracle", "statistics")  # no head needs these stages, so `all` leaves them out
USAGE = "kvsweep-predictor traces|labels|train|eval|all|oracle|statistics [recipe=toy|r1] [KEY=VALUE ...]"
HELP = f"""{USAGE}

Make an importance head from a model's own correct texts. Each stage goes on where it stopped.

  traces   correct completions of the model, or texts from elsewhere (recipe.import_from=DIR|FILE)
  labels   how much later tokens attend to each token, and the hidden state of each token
  train    fit the head
  eval     how well the head ranks the tokens of held-out texts
  all      these four stages
  oracle   write the labels for policy=oracle_answer and policy=oracle_far_max
  statistics   write the mean queries for policy=triattention, from recipe.text=FILE or the traces

  recipe=toy|r1            settings for the embedded models, or the paper's (conf/predictor/)
  recipe.out=DIR           folder of the traces, labels and heads
  recipe.label=[answer]    kinds of label: {", ".join(LABEL_KINDS)}; of several kinds the head learns the sum
  model=NAME, model.KEY=VALUE, benchmark=NAME, benchmark.path=FILE, decoding.KEY=VALUE   as for kvsweep

Exit status: 0 done, 2 bad input, 130 interrupted.
"""


@one_sentence("kvsweep-predictor", GOES_ON)
def main(argv: Sequence[str] | None = None) -> None:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if {"-h", "--help"} & set(arguments):
        print(HELP, end="")
        return
    if not arguments or arguments[0] not in (*STAGES, *ALONE, "all"):
        raise UserError(f"the first word must be a stage: {USAGE}.")
    run(read_settings(arguments[1:]), STAGES if arguments[0] == "all" else arguments[:1])


def run(settings: PredictorSettings, stages: Sequence[str]) -> None:
    @cache
    def load() -> LoadedModel:
        from kvsweep.harness.models.load import load_model

        return load_model(settings.model)

    out = settings.recipe.out
    out.mkdir(parents=True, exist_ok=True)
    for stage in stages:
        start = time.perf_counter()
        outcome = run_stage(stage, settings, load)
        seconds = round(time.perf_counter() - start, 1)
        entry = {"stage": stage, "seconds": seconds, "outcome": outcome, **describe_process()}
        with (out / "provenance.jsonl").open("a") as file:
            file.write(json.dumps(entry) + "\n")
        print(f"{stage}: {seconds} s, {json.dumps(outcome)}", flush=True)


def run_stage(stage: str, settings: PredictorSettings, load: Callable[[], LoadedModel]) -> dict[str, Any]:
    """Work through one stage; return what it made. A stage without its input is refused before torch is imported."""
    recipe = settings.recipe
    if stage == "traces":
        return {"kept": make_traces(settings, load)}
    from_text = stage == "statistics" and recipe.text is not None
    traces = read_traces(recipe.out) if stage in ("labels", *ALONE) and not from_text else []
    manifest = read_manifest(recipe) if stage not in ("labels", "statistics") else {}
    from kvsweep.harness.predictor.labels import make_labels, write_oracle
    from kvsweep.harness.predictor.train import evaluate, train

    if stage == "statistics":
        from kvsweep.harness.predictor.statistics import make_statistics

        return make_statistics(recipe, traces, load())
    if stage == "labels":
        return make_labels(recipe, traces, load())
    if stage == "oracle":
        return {"labels": str(write_oracle(recipe, traces, manifest))}
    if stage == "train":
        return {"head": str(train(settings, manifest))}
    return evaluate(recipe, manifest)
