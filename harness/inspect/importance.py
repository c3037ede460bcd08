"""Importance of a text's thinking tokens: true labels, what a head predicts, and what policies score."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from analysis.records import UserError
from compression.cache import SlotCache
from compression.policies.observation import ObservationPolicy
from compression.policy import BudgetPolicy
from compression.predictor import load_predictor, read_card
from compression.rows import Prefill
from harness.decode.engine import view_slot
from harness.decode.sampling import sequence_key
from harness.inspect.text import NotInText, Traced
from harness.models.config import ModelConfig
from harness.models.load import read_architecture
from harness.predictor.labels import label_trace
from harness.predictor.recipe import LabelKind


def importance(
    traced: Traced,
    kinds: Sequence[LabelKind],
    heads: Sequence[Path],
    policies: Sequence[BudgetPolicy] = (),
    *,
    min_distance: int = 32,
) -> dict[str, np.ndarray]:
    """What the thinking tokens are worth, [thinking] by title: true labels, each head's and each policy's scores.

    Labels are those that the text has with a full cache, whatever it was written with, of each kind that it has any of.
    `answer` costs the answer's queries alone, the other kinds every query: 7,000 tokens on a CPU take seconds or a
    minute.

    Raises:
        NotInText: the text never answers, and nothing but its answer's labels is asked for.
    """
    known = tuple(kind for kind in kinds if traced.closed or kind != "answer")
    if not known and not heads and not policies:
        raise NotInText(
            f"{traced.trace.problem_id} never answers: draw it by --label far_max, later, a --head or --scores."
        )
    strips: dict[str, Tensor] = {}
    if known or heads:
        hidden, labels = label_trace(traced.model, traced.trace, min_distance, known)
        strips |= {f"true: {kind}": labels[kind] for kind in known}
        for path in heads:
            head = load_predictor(path, dtype=traced.model.shape.dtype).to(traced.model.device)
            with torch.inference_mode():
                strips[f"predicted: {path.parent.name}/{path.name}"] = head(hidden)
    for policy, scores in zip(policies, policy_scores(traced, policies), strict=True):
        averaged = ", mean of layers and heads" if policy.per_head else ""
        strips[f"scores: {policy.name}{averaged}"] = scores
    return {title: scores.double().numpy(force=True) for title, scores in strips.items()}


def check_head(path: Path, config: ModelConfig) -> None:
    """Refuse a directory that holds no importance predictor of a model's width.

    Raises:
        UserError: it holds none.
    """
    try:
        width = read_card(path)["hidden_size"]
    except (OSError, ValueError) as error:
        raise UserError(f"--head {path} holds no importance predictor ({error}): name the directory of one.") from error
    expected = read_architecture(config).hidden_size
    if width != expected:
        raise UserError(
            f"--head {path} is for hidden states of {width} numbers and {config.name} has {expected}: name a head of "
            "this model."
        )


@torch.inference_mode()
def policy_scores(traced: Traced, policies: Sequence[BudgetPolicy]) -> list[Tensor]:
    """What each policy would score the thinking tokens, [thinking] each, where the thinking ends and all is held.

    Scores per layer and head are averaged over both. A pinned row has the highest score that its head gives to another;
    the newest rows, which stay unscored, have NaN.

    Raises:
        NotInText: a policy would look at more rows than there are.
    """
    if not policies:
        return []
    model, trace = traced.model, traced.trace
    for policy in policies:
        if isinstance(policy, ObservationPolicy) and policy.observation_window >= trace.think_end:
            raise NotInText(
                f"{trace.problem_id} thinks to token {trace.think_end} and {policy.name} scores from the newest "
                f"{policy.observation_window}: choose a longer text."
            )
    ids = torch.tensor([*trace.token_ids[: trace.think_end], model.think_end_id], device=model.device)
    positions = torch.arange(trace.think_end, device=model.device)
    prefill = Prefill()
    hidden = model.decode_hidden(
        input_ids=ids[None, :-1], position_ids=positions[None], past_key_values=DynamicCache(), prefill=prefill
    )
    cache = SlotCache(
        model.shape,
        slots=1,
        capacity=trace.think_end,
        device=model.device,
        signals=dict.fromkeys(signal for policy in policies for signal in policy.signals),
        per_head=any(policy.per_head for policy in policies),
    )
    slot = cache.admit(prefill)
    # Admitted is the whole text at once; what is recorded of each generated token the steps would have told.
    written = positions[trace.think_start :]
    for recorder in cache.recorders.values():
        recorder.on_token(torch.full_like(written, slot), written, hidden[0, written])
    seed = traced.completion.seed if traced.completion else 0
    found = []
    for policy in policies:
        view = view_slot(
            model,
            cache,
            slot,
            policy,
            problem_id=trace.problem_id,
            draw=trace.draw,
            text_ids=ids,
            question_length=trace.think_start,
            answer_start=trace.think_end,
            stream=sequence_key(seed, trace.problem_id, trace.draw, "select", 0),
        )
        scores = _pinned_as_highest(policy.scores(view)[..., trace.think_start :].double())
        scores = scores.mean(dim=(0, 1)) if policy.per_head else scores
        unscored = torch.full((len(written) - len(scores),), torch.nan, device=model.device)
        found.append(torch.cat([scores, unscored]))
    return found


def _pinned_as_highest(scores: Tensor) -> Tensor:
    """Infinite scores [..., length] as the highest (lowest) finite one of their row, NaN where it has none."""
    finite = scores.isfinite()
    lowest = scores.where(finite, torch.inf).amin(dim=-1, keepdim=True)
    highest = scores.where(finite, -torch.inf).amax(dim=-1, keepdim=True)
    return scores.clamp(lowest, highest).where(highest.isfinite(), torch.nan)
