"""The label study on the embedded models: label the evaluation's own texts for the oracles, then run the sweep.

    python scripts/study/label_study.py [launcher=local launcher.shards=2 ...]

The script passes its arguments on to `kvsweep -m experiment=labels`, and does not make again what exists. The oracles'
files go to results_dir/oracle/MODEL/BENCHMARK, where conf/policy/oracle_*.yaml look for them.
"""

import subprocess
import sys
from dataclasses import replace

from omegaconf import DictConfig

from kvsweep.harness.benchmarks.config import BenchmarkConfig
from kvsweep.harness.predictor.command import run
from kvsweep.harness.predictor.recipe import read_settings
from kvsweep.harness.settings import build, compose_config

MODELS = ("toy_qwen", "toy_llama")


def main() -> None:
    overrides = sys.argv[1:]
    settings = ["experiment=labels", *(o for o in overrides if not o.startswith("launcher"))]
    for model in MODELS:
        for task in ("chain", "add", "regs", "groups"):
            config = compose_config(*settings, f"model={model}", f"benchmark=toy_{task}")
            for label in ("answer", "far_max"):
                write_labels(config, label)
    subprocess.run([sys.executable, "-m", "kvsweep.cli", "-m", "experiment=labels", *overrides], check=True)


def write_labels(config: DictConfig, label: str) -> None:
    """Let the model answer the benchmark with its full cache, as the sweep's full cell does, and label right texts."""
    settings = read_settings(
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
    run(replace(settings, benchmark=benchmark), ("traces", "labels", "oracle"))


if __name__ == "__main__":
    main()
