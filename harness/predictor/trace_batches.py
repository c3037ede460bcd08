"""Training on batches of whole traces, as DynTS's released code does (Robin930/DynTS a55dc37, trained by verl 0.4.1).

`tests/harness/predictor/dynts_head.npz` has numbers of that code. Its file is verl_sft_fsdp.py; verl's are
trainer/fsdp_sft_trainer.py (`training_step`) and utils/torch_functional.py, whose schedule is transformers'.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LRScheduler
from tqdm import tqdm
from transformers import get_cosine_schedule_with_warmup

from kvsweep.compression.recorders import ImportancePredictor
from kvsweep.harness.predictor.labels import StoredTrace, open_shards, target
from kvsweep.harness.predictor.recipe import Recipe, WholeTraces
from kvsweep.messages.errors import UserError

Goals = tuple[Tensor, Tensor]  # hidden states [T, hidden_size] and targets [T] of some traces


# What training changes ("head", "optimizer", "schedule"), and a function that trains for an epoch and returns how many
# tokens it fitted.
Fitting = tuple[dict[str, Any], Callable[[int], int]]


def trace_fitting(recipe: Recipe, rules: WholeTraces, manifest: Mapping[str, Any], device: torch.device) -> Fitting:
    """Return a new head with its optimizer; raises UserError for fewer traces than a batch."""
    traces = [trace for trace in open_shards(recipe, manifest) if not trace.held_out]
    if len(traces) < recipe.batch:
        raise UserError(
            f"{len(traces)} traces that are not held out are less than recipe.batch={recipe.batch} traces: "
            "write more traces, or choose a smaller batch."
        )
    head = new_head(manifest["hidden_size"], recipe.widths, rules).to(device)
    steps = recipe.epochs * (len(traces) // recipe.batch)
    optimizer, schedule = new_optimizer(head, recipe, rules, steps)

    def fit_epoch(epoch: int) -> int:
        tokens = 0
        for batch in tqdm(batches(len(traces), recipe.batch, recipe.seed + epoch), desc="steps", leave=False):
            parts = micro_batches(batch, rules).tolist()
            # Each is read when its turn comes.
            goals = (read_traces(traces, numbers, recipe, rules) for numbers in parts)
            tokens += fit_batch(head, optimizer, goals, rules)
            schedule.step()
        return tokens

    return {"head": head, "optimizer": optimizer, "schedule": schedule}, fit_epoch


def new_head(hidden_size: int, widths: Sequence[int], rules: WholeTraces) -> ImportancePredictor:
    """Return a head with normal weights, as transformers draws weights that a checkpoint lacks."""
    head = ImportancePredictor(hidden_size, widths)
    for weight in head.parameters():
        torch.nn.init.normal_(weight, std=rules.first_spread)
    return head.to(getattr(torch, rules.dtype))


def new_optimizer(
    head: ImportancePredictor, recipe: Recipe, rules: WholeTraces, steps: int
) -> tuple[torch.optim.Optimizer, LRScheduler]:
    """Return AdamW and its schedule: linear from 0 in the first share `warm_up` of the steps, then a cosine to 0."""
    decay = recipe.weight_decay
    first, second = rules.betas
    optimizer = torch.optim.AdamW(head.parameters(), lr=recipe.lr, betas=(first, second), weight_decay=decay)
    return optimizer, get_cosine_schedule_with_warmup(optimizer, int(steps * rules.warm_up), steps)


def batches(traces: int, size: int, seed: int) -> Sequence[Tensor]:
    """Return the numbers of the traces of each step of an epoch, [size] each; a smaller rest is left out."""
    order = torch.randperm(traces, generator=torch.Generator().manual_seed(seed))
    return order[: traces // size * size].split(size)


def micro_batches(batch: Tensor, rules: WholeTraces) -> Tensor:
    """Deal a batch's traces to the ranks in turn; return the micro-batches of all ranks, [batches, micro_batch]."""
    # Column r of the view is rank r's share; transposed, each share lies in one row and is cut into micro-batches.
    return batch.view(-1, rules.ranks).T.reshape(-1, rules.micro_batch)


def read_traces(traces: Sequence[StoredTrace], numbers: list[int], recipe: Recipe, rules: WholeTraces) -> Goals:
    """Read the traces of one micro-batch by their numbers.

    The released code rounds importance to its weights' dtype before it scales it.
    """
    dtype = getattr(torch, rules.dtype)
    states, goals = [], []
    for number in numbers:
        hidden, labels = traces[number].read()
        rounded = {kind: label.to(dtype) for kind, label in labels.items()}
        states.append(hidden)
        goals.append(target(rounded, recipe.label, recipe.target))
    return torch.cat(states).to(dtype), torch.cat(goals)


def fit_batch(
    head: ImportancePredictor, optimizer: torch.optim.Optimizer, parts: Iterable[Goals], rules: WholeTraces
) -> int:
    """Take one step; return its tokens. The micro-batches' gradients add up within a rank, whose sums are averaged.

    verl divides by the number of micro-batches only what it prints, so the clipped gradient is that many times larger.
    A step whose norm is not finite changes nothing.
    """
    device = next(head.parameters()).device
    optimizer.zero_grad(set_to_none=True)
    tokens = 0
    for hidden, goal in parts:
        goal = goal.to(device)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            scores = head(hidden.to(device))
        (weighted_error(scores, goal, rules) / rules.ranks).backward()
        tokens += int((~goal.isnan()).sum())
    norm = clip_grad_norm_(head.parameters(), rules.clip)
    if norm.isfinite():
        optimizer.step()
    return tokens


def weights_of(goal: Tensor, rules: WholeTraces) -> Tensor:
    """Return each token's weight, [T]: `heavy_weight` for a target from the first number of `heavy` to the second."""
    low, high = rules.heavy
    return torch.where((goal >= low) & (goal < high), rules.heavy_weight, 1.0)


def weighted_error(scores: Tensor, goal: Tensor, rules: WholeTraces) -> Tensor:
    """Return the sum of the tokens' weighted squared errors divided by their number (not by the sum of weights).

    `scores` and `goal` are [T]; a token with NaN as its target does not count.
    """
    has_target = ~goal.isnan()
    goal = goal[has_target]
    errors = (scores[has_target] - goal).square()
    return (weights_of(goal, rules) * errors).sum() / has_target.sum().clamp(min=1)
