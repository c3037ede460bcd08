"""The command `kvsweep-predictor`: traces, labels, train and eval, or all of them; each goes on where it stopped.

Beside them `oracle` hands the labels themselves to the policy of that name.
"""

import json
import sys
import time
from collections.abc import Sequence
from functools import cache

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from analysis.records import UserError
from harness.models.load import device_of, load_model
from harness.predictor.labels import make_labels, write_oracle
from harness.predictor.recipe import LABEL_KINDS, Plan, read_plan
from harness.predictor.traces import make_traces
from harness.predictor.train import evaluate, train
from harness.provenance import describe_stretch

STAGES = ("traces", "labels", "train", "eval")
ALONE = ("oracle",)  # asked for by name: no head needs it
USAGE = "kvsweep-predictor traces|labels|train|eval|all|oracle [recipe=toy|r1] [KEY=VALUE ...]"
HELP = f"""{USAGE}

An importance head from a model's own correct texts; each stage goes on where it stopped.

  traces   completions of the model that are right, or texts from elsewhere (recipe.import_from=DIR|FILE)
  labels   how much later tokens attend to each token, with the hidden states beside it
  train    the head
  eval     how well it ranks the tokens of texts kept aside
  all      these four
  oracle   the labels themselves, for policy=oracle_answer and policy=oracle_far_max

  recipe=toy|r1            settings for the embedded models, or the paper's (conf/predictor/)
  recipe.out=DIR           where traces, labels and heads lie
  recipe.label=[answer]    kinds of label: {", ".join(LABEL_KINDS)}; a list adds them
  model=NAME, model.KEY=VALUE, benchmark=NAME, benchmark.path=FILE, decoding.KEY=VALUE   as for kvsweep

Exit status: 0 done, 2 bad input, 130 interrupted.
"""


def main(argv: Sequence[str] | None = None) -> None:
    """Console script: exit code 0 done, 2 bad input, 130 interrupted."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if {"-h", "--help"} & set(arguments):
        print(HELP, end="")
        return
    try:
        if not arguments or arguments[0] not in (*STAGES, *ALONE, "all"):
            raise UserError(f"the first word must be a stage: {USAGE}.")
        run(read_plan(arguments[1:]), STAGES if arguments[0] == "all" else arguments[:1])
    except (ValueError, HydraException, OmegaConfBaseException) as error:
        print(f"kvsweep-predictor: error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("kvsweep-predictor: interrupted; the same command goes on where this one stopped.", file=sys.stderr)
        sys.exit(130)


def run(plan: Plan, stages: Sequence[str]) -> None:
    """Work through the stages and record each in provenance.jsonl."""
    model = cache(lambda: load_model(plan.model))
    plan.recipe.directory.mkdir(parents=True, exist_ok=True)
    for stage in stages:
        start = time.perf_counter()
        if stage == "traces":
            outcome: object = {"kept": make_traces(plan, model)}
        elif stage == "labels":
            outcome = make_labels(plan.recipe, model)
        elif stage == "train":
            outcome = {"head": str(train(plan, device_of(plan.model)))}
        elif stage == "oracle":
            outcome = {"labels": str(write_oracle(plan.recipe))}
        else:
            outcome = evaluate(plan.recipe)
        seconds = round(time.perf_counter() - start, 1)
        entry = {"stage": stage, "seconds": seconds, "outcome": outcome, **describe_stretch()}
        with (plan.recipe.directory / "provenance.jsonl").open("a") as file:
            file.write(json.dumps(entry) + "\n")
        print(f"{stage}: {seconds} s, {json.dumps(outcome)}", flush=True)


if __name__ == "__main__":
    main()
