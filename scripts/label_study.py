"""The label study on the embedded models: the labels of the evaluation's own texts, for the oracles, then the sweep.

    python scripts/label_study.py [launcher=local launcher.shards=2 ...]

Arguments are passed on to `kvsweep -m experiment=labels`. What exists is not made again. The oracles' files go where
conf/policy/oracle_*.yaml look for them: results_dir/oracle/MODEL/BENCHMARK.
"""

import subprocess
import sys
from dataclasses import replace

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from harness.benchmarks.config import BenchmarkConfig
from harness.predictor.command import run
from harness.predictor.recipe import read_plan
from harness.settings import build
from harness.sweep.job import CONF
from harness.toy.tasks import TASKS

MODELS = ("toy_qwen", "toy_llama")


def main() -> None:
    overrides = sys.argv[1:]
    settings = ["experiment=labels", *(o for o in overrides if not o.startswith("launcher"))]
    for model in MODELS:
        for task in TASKS:
            with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
                config = compose("config", [*settings, f"model={model}", f"benchmark=toy_{task}"])
            for label in ("answer", "far_max"):
                write_labels(config, label)
    subprocess.run([sys.executable, "-m", "harness.sweep.command", "-m", "experiment=labels", *overrides], check=True)


def write_labels(config: DictConfig, label: str) -> None:
    """Let the model write the benchmark with its full cache, as the sweep's full cell does, and label what is right."""
    plan = read_plan(
        [
            f"model={config.model.name}",
            f"decoding.max_new_tokens={config.decoding.max_new_tokens}",
            "recipe.toy_problems=null",
            f"recipe.draws={config.draws}",
            f"recipe.seed={config.seed}",
            f"recipe.out={config.results_dir}/oracle/{config.model.name}/{config.benchmark.name}",
            f"recipe.label=[{label}]",
        ]
    )
    benchmark = build(BenchmarkConfig, "benchmark", config.benchmark)
    run(replace(plan, benchmark=benchmark), ("traces", "labels", "oracle"))


if __name__ == "__main__":
    main()
