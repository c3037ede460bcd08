"""Stages 3 and 4: fit the predictor, and measure how well it ranks the tokens of held-out traces."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr
from torch import Tensor
from torch.nn.functional import softplus
from tqdm import tqdm

from kvsweep.compression.artifacts import read_card
from kvsweep.compression.recorders import ImportancePredictor, load_predictor, save_predictor
from kvsweep.harness.models.load import device_of
from kvsweep.harness.predictor.labels import StoredTrace, open_shard, open_shards, target
from kvsweep.harness.predictor.recipe import PredictorSettings, Recipe, read_manifest
from kvsweep.harness.predictor.trace_batches import Fitting, trace_fitting
from kvsweep.harness.predictor.traces import read_questions
from kvsweep.harness.provenance import describe_code
from kvsweep.messages.errors import UserError
from kvsweep.run_files.safe_files import replacing

# The settings of a recipe that decide a head's weights.
_CONDITIONS = ("label", "target", "widths", "epochs", "lr", "weight_decay", "batch", "rank_weight", "held_out", "seed")
# Eval counts how many of the true top 20% of tokens are in the predicted top 20%, 30%, ..., and compares the mean true
# and predicted importance in ten equal parts of the thinking.
TOP, DEPTHS, BINS = 0.2, (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9), 10


def train(settings: PredictorSettings) -> dict[str, Any]:
    """Fit the predictor; write a checkpoint after each epoch; return its folder."""
    recipe, model = settings.recipe, settings.model
    manifest = read_manifest(settings, recipe.manifest, "labels")
    device = device_of(model)
    # A checkpoint made under other conditions is not continued.
    conditions = {name: manifest[name] for name in ("data", "min_distance")}
    conditions |= {name: getattr(recipe, name) for name in _CONDITIONS}
    conditions["model_weights"] = manifest["model"]["weights"]
    torch.manual_seed(recipe.seed)
    if recipe.whole_traces:
        conditions |= {"lead": manifest.get("lead", 0), "whole_traces": asdict(recipe.whole_traces)}
        parts, fit_epoch = trace_fitting(recipe, recipe.whole_traces, manifest, device)
    else:
        parts, fit_epoch = token_fitting(recipe, manifest, device)
    head = parts["head"]
    recipe.head.mkdir(parents=True, exist_ok=True)
    path = recipe.head / "checkpoint.pt"
    start = _resume(path, conditions, parts, device)
    for epoch in tqdm(range(start, recipe.epochs), desc=f"train {'+'.join(recipe.label)}"):
        torch.manual_seed(recipe.seed + epoch)  # so that a resumed epoch draws as in one go
        tokens = fit_epoch(epoch)
        if not tokens:
            raise UserError(
                f"no token of {manifest['traces']} traces is left to fit, with recipe.held_out={recipe.held_out} and "
                f"recipe.min_distance={manifest['min_distance']}: write more traces, or lower the distance."
            )
        if not all(weight.isfinite().all() for weight in head.parameters()):
            raise UserError(
                f"recipe.lr={recipe.lr} made weights of the head NaN or infinite in epoch {epoch + 1}: "
                "choose a smaller one."
            )
        state = {name: part.state_dict() for name, part in parts.items()}
        with replacing(path) as temporary:
            torch.save({"settings": conditions, "epoch": epoch + 1, **state}, temporary)
    place = Path(model.place).name if model.files() else model.place  # a hub id, or a folder's name without its path
    card = {
        **conditions,
        "model": model.name,
        "model_path": place,
        "model_revision": model.revision,
        "traces": manifest["traces"],
        "tokens": manifest["tokens"],
        "questions": read_questions(recipe.out),
        "versions": describe_code()["packages"],
    }
    save_predictor(head.to(torch.bfloat16), recipe.head, card)
    return {"head": str(recipe.head)}


def _resume(path: Path, conditions: Mapping[str, Any], parts: Mapping[str, Any], device: torch.device) -> int:
    """Load the parts' states from a checkpoint made under these conditions; return its epochs, 0 without one."""
    if not path.exists():
        return 0
    checkpoint = torch.load(path, weights_only=True, map_location=device)
    if checkpoint.get("settings") != conditions:
        return 0
    for name, part in parts.items():
        part.load_state_dict(checkpoint[name])
    return int(checkpoint["epoch"])


def token_fitting(recipe: Recipe, manifest: Mapping[str, Any], device: torch.device) -> Fitting:
    """Return a new head with its optimizer. A batch is tokens of one shard's traces, and the rate falls by shards."""
    head = ImportancePredictor(manifest["hidden_size"], recipe.widths).to(device)
    optimizer = torch.optim.AdamW(head.parameters(), lr=recipe.lr, weight_decay=recipe.weight_decay)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, recipe.epochs * manifest["shards"])

    def fit_epoch(epoch: int) -> int:
        tokens = 0
        # All shards, in an order that is drawn for each epoch.
        for number in Random(f"{recipe.seed}-{epoch}").sample(range(manifest["shards"]), manifest["shards"]):
            tokens += fit_shard(head, optimizer, recipe, open_shard(recipe, manifest, number))
            schedule.step()
        return tokens

    return {"head": head, "optimizer": optimizer, "schedule": schedule}, fit_epoch


def fit_shard(
    head: ImportancePredictor, optimizer: torch.optim.Optimizer, recipe: Recipe, traces: Iterable[StoredTrace]
) -> int:
    """Fit one shard's traces that are not held out; return the number of their tokens with a label."""
    device = next(head.parameters()).device
    states = []
    targets = list[Tensor]()
    owners = []  # the number of its trace for each token
    for trace in traces:
        if trace.held_out:
            continue
        trace_hidden, labels = trace.read()
        trace_target = target(labels, recipe.label, recipe.target)
        owners.append(torch.full_like(trace_target, len(targets)))
        states.append(trace_hidden)
        targets.append(trace_target)
    if not targets:
        return 0
    hidden, goals, owner = torch.cat(states), torch.cat(targets), torch.cat(owners)
    labelled = (~goals.isnan()).nonzero()[:, 0]
    for rows in labelled[torch.randperm(len(labelled))].split(recipe.batch):
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            scores = head(hidden[rows].to(device, torch.float32)).float()
        goal = goals[rows].to(device)
        loss = (scores - goal).square().mean()
        if recipe.rank_weight:
            loss = loss + recipe.rank_weight * rank_loss(scores, goal, owner[rows].to(device))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
    return len(labelled)


def rank_loss(scores: Tensor, goal: Tensor, owner: Tensor) -> Tensor:
    """Mean logistic loss of neighbours in a trace, for Kendall's tau; all are [batch], `owner` numbers traces."""
    order = owner.argsort(stable=True)  # a trace's tokens side by side, in the batch's own drawn order
    scores, goal, owner = scores[order], goal[order], owner[order]
    same_trace = owner[1:] == owner[:-1]  # [batch - 1], of each token and the next
    # Small where the scores of two neighbours lie in the order of their goals.
    losses = softplus(-10 * (goal[1:] - goal[:-1]).sign() * (scores[1:] - scores[:-1]))
    return (losses * same_trace).sum() / same_trace.sum().clamp(min=1)


@torch.inference_mode()
def evaluate(settings: PredictorSettings) -> dict[str, Any]:
    """Write eval.json: ranking and calibration on held-out traces; UserError without a predictor or such traces."""
    recipe = settings.recipe
    manifest = read_manifest(settings, recipe.manifest, "labels")
    if recipe.held_out is None:
        raise UserError("recipe.held_out=null keeps no trace to measure on: choose one in so many, and train again.")
    head = load_predictor(recipe.head)
    card = read_card("predictor", recipe.head)
    # A predictor says nothing by ranking well a trace that it was fitted to.
    if card.get("data") != manifest["data"] or card.get("held_out") != recipe.held_out:
        raise UserError(
            f"{recipe.head} was fitted to other traces, or with recipe.held_out={card.get('held_out')}: "
            "run kvsweep predictor train again."
        )
    shares = []  # of each trace, for each of DEPTHS
    correlations = []
    tenths = []  # of each trace, the true and the predicted means, [2, BINS]
    for trace in open_shards(recipe, manifest):
        if not trace.held_out:
            continue
        hidden, labels = trace.read()
        goal = target(labels, recipe.label, recipe.target)
        has_label = ~goal.isnan()
        if has_label.sum() < 2 * BINS:  # a tenth of fewer tokens has no mean worth the name
            continue
        goal = goal[has_label]
        scores = head(hidden[has_label].float())
        shares.append(shares_of_top(goal, scores))
        correlations.append(spearmanr(goal, scores).statistic)
        true_means = [float(tenth.mean()) for tenth in goal.tensor_split(BINS)]
        predicted_means = [float(tenth.mean()) for tenth in scores.tensor_split(BINS)]
        tenths.append([true_means, predicted_means])
    if not shares:
        raise UserError(f"{recipe.labels} holds out no trace of {2 * BINS} tokens: train with a lower recipe.held_out.")
    mean_shares = np.mean(shares, axis=0).round(4)
    result = {
        "held_out_traces": len(shares),
        "true_top_20_percent_found_in_predicted_top": {
            f"{depth:.0%}": share for depth, share in zip(DEPTHS, mean_shares, strict=True)
        },
        "rank_correlation": np.mean(correlations).round(4),
        "calibration_by_tenth_of_thinking_true_predicted": np.mean(tenths, axis=0).round(4).T.tolist(),
    }
    (recipe.head / "eval.json").write_text(json.dumps(result, indent=2) + "\n")
    return result


def shares_of_top(goal: Tensor, scores: Tensor) -> list[float]:
    """Return, for each of DEPTHS, the share of a trace's true top tokens that are in this predicted top."""
    true_top = goal.topk(max(1, int(len(goal) * TOP))).indices
    # argsort lists the tokens by score; its inverse, argsort of that, is each token's rank from 0.
    predicted_rank = scores.argsort(descending=True, stable=True).argsort()
    return [float((predicted_rank[true_top] < depth * len(goal)).float().mean()) for depth in DEPTHS]
