"""Importance of a text's thinking tokens: true labels, the predictions of heads, and the scores of policies."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvsweep.compression.cache import SlotCache
from kvsweep.compression.policies.observation import ObservationPolicy
from kvsweep.compression.policy import BudgetPolicy
from kvsweep.compression.predictor import load_predictor
from kvsweep.compression.rows import Prefill
from kvsweep.compression.signals import LastUse
from kvsweep.harness.decode.sampling import sequence_key
from kvsweep.harness.decode.view import view_slot
from kvsweep.harness.inspect.text import InspectedText, NotInText
from kvsweep.harness.predictor.labels import label_trace, read_whole
from kvsweep.harness.predictor.recipe import LabelKind


def importance(
    text: InspectedText,
    kinds: Sequence[LabelKind],
    heads: Sequence[Path],
    policies: Sequence[BudgetPolicy] = (),
    *,
    min_distance: int = 32,
) -> dict[str, np.ndarray]:
    """Importance of the thinking tokens, [thinking] by title: true labels, each head's and each policy's scores.

    The labels are those of the text read with a full cache, whatever cache it was written with. A text that never
    answers has no label of kind `answer`, and raises NotInText if nothing else is asked for. That kind costs only the
    answer's queries; the other kinds cost every query, so that 7,000 tokens take a minute on a CPU instead of seconds.
    """
    known = [kind for kind in kinds if text.trace.answered or kind != "answer"]
    if not known and not heads and not policies:
        unanswered = f"{text.trace.problem_id} never answers, so it has no labels of kind answer"
        raise NotInText(f"{unanswered}: give --label far_max or later, a --head or --scores.")
    strips: dict[str, Tensor] = {}
    if known or heads:
        hidden, labels = label_trace(text.model, text.trace, min_distance, known)
        strips |= {f"true: {kind}": labels[kind] for kind in known}
        for path in heads:
            head = load_predictor(path, dtype=text.model.shape.dtype).to(text.model.device)
            with torch.inference_mode():
                strips[f"predicted: {path.parent.name}/{path.name}"] = head(hidden)
    for policy, scores in zip(policies, policy_scores(text, policies), strict=True):
        strips[f"scores: {policy.name}{', mean of layers and heads' if policy.per_head else ''}"] = scores
    return {title: scores.double().numpy(force=True) for title, scores in strips.items()}


@torch.inference_mode()
def policy_scores(text: InspectedText, policies: Sequence[BudgetPolicy]) -> list[Tensor]:
    """Each policy's scores of the thinking tokens, [thinking], where the thinking ends and nothing was evicted.

    Scores per layer and head are averaged over both. A pinned row counts as the highest score that its head gives to
    another row. The newest rows, which a policy leaves unscored, have NaN. A policy that scores from more of the newest
    rows than the text has, or from each step's attention, raises NotInText.
    """
    if not policies:
        return []
    model, trace, device, end = text.model, text.trace, text.model.device, text.trace.think_end
    for policy in policies:
        if any(isinstance(signal, LastUse) for signal in policy.signals):
            by_use = f"{policy.name} scores by when each row was used while the text was written"
            raise NotInText(f"{by_use}, which a text read at once does not tell: choose another policy.")
        if isinstance(policy, ObservationPolicy) and policy.observation_window >= end:
            from_newest = f"{policy.name} scores from the newest {policy.observation_window}"
            raise NotInText(f"{trace.problem_id} thinks to token {end} and {from_newest}: choose a longer text.")
    prefill = Prefill()
    hidden = read_whole(model, trace.token_ids[:end], prefill)
    signals = dict.fromkeys(signal for policy in policies for signal in policy.signals)
    per_head = any(policy.per_head for policy in policies)
    cache = SlotCache(model.shape, slots=1, capacity=end, device=device, signals=signals, per_head=per_head)
    slot = cache.admit(prefill)
    # Admission takes the whole text for a prompt; the recorders learn here which of its tokens were generated.
    written = torch.arange(trace.think_start, end, device=device)
    for recorder in cache.recorders.values():
        recorder.on_token(torch.full_like(written, slot), written, hidden[written])
    seed = text.completion.seed if text.completion else 0
    place: dict[str, Any] = {
        "problem_id": trace.problem_id,
        "draw": trace.draw,
        "text_ids": torch.tensor([*trace.token_ids[:end], *model.think_end_ids[:1]], device=device),
        "question_length": trace.think_start,
        "answer_start": end,
        "stream": sequence_key(seed, trace.problem_id, trace.draw, "select", 0),
    }
    found = []
    for policy in policies:
        view = view_slot(model, cache, slot, policy, **place)
        scores = _pinned_as_highest(policy.ranking(view)[..., trace.think_start :].double())
        scores = scores.mean(dim=(0, 1)) if policy.per_head else scores
        found.append(torch.cat([scores, torch.full((len(written) - len(scores),), torch.nan, device=device)]))
    return found


def _pinned_as_highest(scores: Tensor) -> Tensor:
    """Replace infinite scores [..., length] by the highest (lowest) finite one of their row, NaN if it has none."""
    finite = scores.isfinite()
    lowest = scores.where(finite, torch.inf).amin(dim=-1, keepdim=True)
    highest = scores.where(finite, -torch.inf).amax(dim=-1, keepdim=True)
    return scores.clamp(lowest, highest).where(highest.isfinite(), torch.nan)
