"""The label study on the embedded models: the labels of the evaluation's own texts, for the oracles, then the sweep.

    python scripts/label_study.py [launcher=local launcher.shards=2 ...]

Arguments are passed on to `kvsweep -m experiment=labels`. What exists is not made again. The oracles' files go where
conf/policy/oracle_*.yaml look for them: results_dir/oracle/MODEL/BENCHMARK.
"""

import subprocess
import sys

from hydra import compose, initialize_config_dir

from harness.config import CONF
from harness.predictor.command import run
from harness.predictor.recipe import read_plan
from harness.toy.tasks import TASKS

MODELS = ("toy_qwen", "toy_llama")


def main() -> None:
    overrides = sys.argv[1:]
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        config = compose("config", ["experiment=labels", *(o for o in overrides if not o.startswith("launcher"))])
    for model in MODELS:
        for task in TASKS:
            for label in ("answer", "far_max"):
                write_labels(config, model, f"toy_{task}", label)
    subprocess.run([sys.executable, "-m", "harness.run", "-m", "experiment=labels", *overrides], check=True)


def write_labels(config, model: str, benchmark: str, label: str) -> None:
    """Let the model write the benchmark with its full cache, as the sweep's full cell does, and label what is right."""
    plan = read_plan(
        [
            f"model={model}",
            f"+benchmark={benchmark}",
            f"benchmark.limit={config.benchmark.limit}",
            f"decoding.max_new_tokens={config.decoding.max_new_tokens}",
            "recipe.toy_problems=null",
            f"recipe.draws={config.draws}",
            f"recipe.seed={config.seed}",
            f"recipe.out={config.results_dir}/oracle/{model}/{benchmark}",
            f"recipe.label=[{label}]",
        ]
    )
    run(plan, ("traces", "labels", "oracle"))


if __name__ == "__main__":
    main()
