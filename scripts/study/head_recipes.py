"""Heads by DynTS's released recipe beside heads by the toys' recipe: how well each ranks tokens, and what it keeps.

    python scripts/study/head_recipes.py OUT [--models toy_qwen toy_llama smollm2_reasons]

For each model: traces and labels once, then a head for each recipe, target and label on the same traces (OUT/MODEL),
and then a sweep of these heads at equal rows beside the labels' oracles, the full cache and random rows. What exists
is not made again. `python scripts/study/head_recipes.py OUT --tables` writes heads.csv, pass_at_1.csv and
differences.csv into OUT.

The released recipe is scaled to the number of traces at hand: 27 steps an epoch, 15 epochs, 405 steps, and about 16
micro-batches whose gradients add up, as released; a batch has 28 traces of a toy in place of 256.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pandas as pd

from kvsweep.analysis.statistics.inference import paired_tests, score_array
from kvsweep.analysis.statistics.metrics import pass_at_1
from kvsweep.harness.settings import compose_config
from scripts.study.compare_policies import SETTING, rows_of_policies
from scripts.study.label_study import write_labels

# One trace in so many is held out.
HELD_OUT = {"toy_qwen": 10, "toy_llama": 10, "smollm2_reasons": 5}
STEPS_AN_EPOCH = 27
ADDED_GRADIENTS = 14
RELEASED = ["recipe.epochs=15", "recipe.lr=5e-4", "recipe.weight_decay=0.01"]
LONG = ["recipe.epochs=135"]  # nine times the released steps: about as many as the toys' recipe takes
WHOLE_TRACES = (
    "{{ranks: 1, micro_batch: {micro_batch}, heavy: [4.0, 5.0], heavy_weight: 5.0, clip: 1.0, betas: [0.9, 0.95],"
    " warm_up: 0.1, first_spread: 0.02, dtype: float32}}"
)
# The heads of each model: the recipe's target and the label.
HEADS = {
    "toy_answer": ("standardised", "answer"),
    "toy_far_max": ("standardised", "far_max"),
    "toy_power_answer": ("power", "answer"),
    "released_power_answer": ("power", "answer"),
    "released_linear_answer": ("linear", "answer"),
    "released_power_far_max": ("power", "far_max"),
    "long_power_answer": ("power", "answer"),
}
TRACES = {
    "toy_qwen": [],
    "toy_llama": [],
    "smollm2_reasons": ["model.dtype=float32", "recipe.toy_problems=180"],
}
LABELS = ("answer", "far_max")
TOY_MODELS = ("toy_qwen", "toy_llama")  # they have embedded heads, whose oracles are conf/policy/oracle_*.yaml
TOYS = ["experiment=labels", "run_name=heads"]
SWEEPS = {
    "toy_qwen": [*TOYS, "benchmark=toy_chain,toy_add,toy_regs,toy_groups"],
    "toy_llama": [*TOYS, "benchmark=toy_chain,toy_add,toy_regs,toy_groups"],
    "smollm2_reasons": [
        *("experiment=methods_smol", "decoding=r1", "decoding.max_new_tokens=320", "draws=1", "run_name=heads"),
        *("benchmark.limit=60", "policy.budget=96", "model.dtype=float32", "benchmark=words"),
    ],
}
GRIDS = {
    "toy_qwen": ["grid.keep_ratio=[0.3,0.5]", "grid.local_window=[48]"],
    "toy_llama": ["grid.keep_ratio=[0.3,0.5]", "grid.local_window=[48]"],
    "smollm2_reasons": ["policy.keep_ratio=0.5", "policy.local_window=32"],
}
# Pairs of heads whose difference is tested: the released recipe and the toys' recipe for the same label.
COMPARED = {
    "released_power_answer": "toy_answer",
    "released_linear_answer": "toy_answer",
    "released_power_far_max": "toy_far_max",
    "long_power_answer": "toy_answer",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--models", nargs="+", default=list(TRACES), choices=list(TRACES))
    parser.add_argument("--tables", action="store_true", help="write the tables of what is there")
    parser.add_argument("--swept", nargs="+", default=list(TRACES), help="models whose sweeps have ended")
    options = parser.parse_args()
    if options.tables:
        write_tables(options.out.resolve(), options.models, options.swept)
        return
    for model in options.models:
        make_heads(options.out.resolve(), model)
        sweep(options.out.resolve(), model)


def kvsweep(*arguments: str, folder: Path | None = None) -> None:
    subprocess.run([sys.executable, "-m", "kvsweep.cli", *arguments], check=True, cwd=folder)


def make_heads(out: Path, model: str) -> None:
    """Write traces and labels into OUT/MODEL/shared, and each head into OUT/MODEL/HEAD with links to them."""
    shared = out / model / "shared"
    common = [f"model={model}", f"recipe.held_out={HELD_OUT[model]}", *TRACES[model]]
    for stage in ("traces", "labels"):
        kvsweep("predictor", stage, *common, f"recipe.out={shared}")
    manifest = json.loads((shared / "cache" / "cache.json").read_text())
    fitted = manifest["traces"] - manifest["traces"] // HELD_OUT[model]
    batch = fitted // STEPS_AN_EPOCH
    micro_batch = max(1, batch // ADDED_GRADIENTS)
    batch -= batch % micro_batch
    whole_traces = WHOLE_TRACES.format(micro_batch=micro_batch)
    released = [*RELEASED, f"recipe.batch={batch}", f"recipe.whole_traces={whole_traces}"]
    for head, (target, label) in HEADS.items():
        folder = out / model / head
        if (folder / label / "eval.json").exists():
            continue
        folder.mkdir(parents=True, exist_ok=True)
        for file in shared.iterdir():
            link = folder / file.name
            if file.name != "provenance.jsonl" and not link.exists():
                link.symlink_to(file)
        recipe = []
        if not head.startswith("toy"):
            recipe = [*released]
        if head.startswith("long"):
            recipe += LONG
        settings = [*common, f"recipe.out={folder}", f"recipe.target={target}", f"recipe.label=[{label}]", *recipe]
        kvsweep("predictor", "train", *settings)
        kvsweep("predictor", "eval", *settings)


def sweep(out: Path, model: str) -> None:
    """Decode with each head, each label's oracle, the full cache and random rows, at equal rows."""
    common = [f"model={model}", f"results_dir={out}", *SWEEPS[model]]
    benchmarks = SWEEPS[model][-1].removeprefix("benchmark=").split(",")
    settings = [item for item in common if not item.startswith("benchmark=")]
    for benchmark in benchmarks:
        config = compose_config(*settings, f"benchmark={benchmark}")
        for label in LABELS:
            write_labels(config, label)
    add_policies(out)
    oracles = [f"oracle_{label}" if model in TOY_MODELS else f"true_{label}" for label in LABELS]
    policies = ",".join(["full", *HEADS, *oracles, "random"])
    kvsweep("-m", *common, *GRIDS[model], f"grid.policy=[{policies}]", folder=out)


def add_policies(out: Path) -> None:
    """Write a configuration folder with DynTS on each head, and with oracles for models without an embedded head."""
    folder = out / "conf" / "policy"
    folder.mkdir(parents=True, exist_ok=True)
    (out / "conf" / "kvsweep.yaml").touch()
    for head, (_, label) in HEADS.items():
        predictor = f"${{results_dir}}/${{model.name}}/{head}/{label}"
        write_policy(folder / f"{head}.yaml", "dynts.DynTS", predictor=predictor)
    for label in LABELS:
        predictor = f"${{results_dir}}/${{model.name}}/toy_{label}/{label}"
        labels = f"${{results_dir}}/oracle/${{model.name}}/${{benchmark.name}}/oracle_{label}.safetensors"
        write_policy(folder / f"true_{label}.yaml", "oracle.Oracle", predictor=predictor, labels=labels)


def write_policy(path: Path, policy: str, **fields: str) -> None:
    lines = [
        "defaults: [base/budget, _self_]",
        f"_target_: kvsweep.compression.policies.{policy}",
        f"name: {path.stem}",
    ]
    lines += [f"{name}: {value}" for name, value in fields.items()]
    path.write_text("\n".join(lines) + "\n")


def write_tables(out: Path, models: list[str], swept: list[str]) -> None:
    heads = []
    for model in models:
        for head, (_, label) in HEADS.items():
            file = out / model / head / label / "eval.json"
            if not file.exists():
                continue
            measured = json.loads(file.read_text())
            shares = measured["true_top_20_percent_found_in_predicted_top"]
            row = {"model": model, "head": head, "recall_in_20%": shares["20%"], "recall_in_30%": shares["30%"]}
            row |= {"recall_in_50%": shares["50%"], "rank_correlation": measured["rank_correlation"]}
            heads.append({**row, "held_out_traces": measured["held_out_traces"]})
    pd.DataFrame(heads).to_csv(out / "heads.csv", index=False)
    rows = rows_of_policies(out / "heads")
    rows = rows[rows["model"].isin(swept)]
    scores, differences = [], []
    for setting, group in rows.groupby(SETTING, observed=True):
        place = pd.Series(setting, index=SETTING).to_dict()
        means = pass_at_1(group)[["problems", "pass_at_1", "se"]].rename_axis("policy").reset_index()
        scores.append(means.assign(**place))
        policies = set(group["cell_id"])
        for released, toy in COMPARED.items():
            if {released, toy} <= policies:
                pair = score_array(group, [toy, released])
                test = paired_tests(pair, pair[0]).iloc[[1]]
                differences.append(test.assign(**place, head=released, beside=toy))
    columns = [*SETTING, "policy", "problems", "pass_at_1", "se"]
    pd.concat(scores)[columns].round(4).to_csv(out / "pass_at_1.csv", index=False)
    pd.concat(differences).round(4).to_csv(out / "differences.csv", index=False)


if __name__ == "__main__":
    main()
