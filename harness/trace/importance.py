"""Importance of a completion's thinking tokens: true labels, predictors' predictions, and policies' scores."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from kvsweep.compression.cache import SlotCache
from kvsweep.compression.cache_rows import Prefill
from kvsweep.compression.policies.observation import ObservationPolicy
from kvsweep.compression.policy import BudgetPolicy, LastUse, Selection
from kvsweep.compression.recorders import load_predictor
from kvsweep.compression.slots import Chunks
from kvsweep.harness.decode.memory import slot_cache
from kvsweep.harness.decode.slots import view_slot
from kvsweep.harness.models.loaded import LoadedModel
from kvsweep.harness.predictor.labels import label_trace, read_whole
from kvsweep.harness.predictor.recipe import LabelKind
from kvsweep.harness.predictor.traces import Trace
from kvsweep.harness.trace.inspected import InspectedText, NotInText

# Tokens between a token and the nearest query that counts for its true labels `far_max` and `later`.
MIN_DISTANCE = 32


def importance(
    text: InspectedText,
    kinds: Sequence[LabelKind],
    heads: Sequence[Path],
    policies: Sequence[BudgetPolicy] = (),
) -> dict[str, np.ndarray]:
    """Return the importance of thinking tokens, [thinking] by title: true labels, predictions, policies' scores.

    The full cache gives the labels. A completion that never answers has no label of kind `answer`; it raises NotInText
    if nothing else is asked for. The kind `answer` costs only the answer's queries. The other kinds cost every query,
    so that 7,000 tokens take a minute on a CPU, not seconds.
    """
    possible = [kind for kind in kinds if text.trace.answered or kind != "answer"]
    if not possible and not heads and not policies:
        raise NotInText(
            f"{text.trace.problem_id} never answers, so it has no labels of kind answer: "
            "give --label far_max or later, a --head or --scores."
        )
    strips = {}
    if possible or heads:
        hidden, labels = label_trace(text.model, text.trace, MIN_DISTANCE, possible)
        for kind in possible:
            strips[f"true: {kind}"] = labels[kind]
        for path in heads:
            head = load_predictor(path, dtype=text.model.shape.dtype).to(text.model.device)
            with torch.inference_mode():
                strips[f"predicted: {path.parent.name}/{path.name}"] = head(hidden)
    for policy, scores in zip(policies, policy_scores(text, policies), strict=True):
        mean = ", mean of layers and heads" if policy.per_head else ""
        strips[f"scores: {policy.name}{mean}"] = scores
    return {title: scores.double().numpy(force=True) for title, scores in strips.items()}


@torch.inference_mode()
def policy_scores(text: InspectedText, policies: Sequence[BudgetPolicy]) -> list[Tensor]:
    """Return each policy's scores of the thinking tokens, [thinking], at the end of thinking without evictions.

    Scores per layer and head are averaged over both. A pinned row counts as its head's highest other score; the newest
    rows, which a policy does not score, have NaN. Raises NotInText for a policy that needs more newest rows than the
    completion has, or the attention of each step.
    """
    if not policies:
        return []
    text.model.check_rows("policies score its rows")
    model, trace = text.model, text.trace
    for policy in policies:
        _check_scores(policy, trace)
    cache, slot = _cache_of_thinking(model, trace, policies)
    seed = text.completion.seed if text.completion else 0
    # A view's text has one token more than the cache has rows: the tag's first, or 0 if the text ends in its thinking.
    text_ids = torch.tensor([*trace.token_ids, 0][: trace.think_end + 1], device=model.device)
    scores_of_policies = []
    for policy in policies:
        view = view_slot(
            model,
            cache,
            slot,
            policy,
            problem_id=trace.problem_id,
            draw=trace.draw,
            text_ids=text_ids,
            seed=seed,
            evictions=0,
            question_length=trace.think_start,
            answer_start=trace.think_end,
        )
        scores = _pinned_as_highest(policy.ranking(view)[..., trace.think_start :].double())
        if policy.per_head:
            scores = scores.mean(dim=(0, 1))
        unscored = trace.think_end - trace.think_start - len(scores)
        scores_of_policies.append(functional.pad(scores, (0, unscored), value=torch.nan))
    return scores_of_policies


def _cache_of_thinking(model: LoadedModel, trace: Trace, policies: Sequence[BudgetPolicy]) -> tuple[SlotCache, int]:
    """Read question and thinking at once; return a cache with their rows and what the policies record, and its slot."""
    device, end = model.device, trace.think_end
    prefill = Prefill()
    hidden = read_whole(model, trace.token_ids[:end], prefill)
    cache = slot_cache(model.shape, policies, slots=1, capacity=end, device=device)
    slot = cache.admit(prefill)
    # The cache admits the whole text as a prompt; the recorders learn here which tokens were generated.
    written = torch.arange(trace.think_start, end, device=device)
    for recorder in cache.recorders.values():
        recorder.on_token(torch.full_like(written, slot), written, hidden[written])
    return cache, slot


def _check_scores(policy: BudgetPolicy, trace: Trace) -> None:
    """Raise NotInText if a policy cannot score a trace that is read at once."""
    if any(isinstance(signal, LastUse) for signal in policy.signals):
        raise NotInText(
            f"{policy.name} scores by when each row was used while the text was written, "
            "which a text read at once does not tell: choose another policy."
        )
    if isinstance(policy, ObservationPolicy) and policy.observation_window >= trace.think_end:
        raise NotInText(
            f"{trace.problem_id} thinks to token {trace.think_end} and {policy.name} scores from the newest "
            f"{policy.observation_window}: choose a longer text."
        )


def _pinned_as_highest(scores: Tensor) -> Tensor:
    """Replace infinite scores [..., length] with the highest (lowest) finite one of the row, NaN if it has none."""
    finite = scores.isfinite()
    lowest = scores.where(finite, torch.inf).amin(dim=-1, keepdim=True)
    highest = scores.where(finite, -torch.inf).amax(dim=-1, keepdim=True)  # -inf: no finite score
    return scores.clamp(lowest, highest).where(highest.isfinite(), torch.nan)


# Answer tokens that are fed to every slot at once, and steps that are removed at once.
_FED, _SLOTS = 64, 32


@torch.inference_mode()
def removal(
    model: LoadedModel, token_ids: Sequence[int], first_fed: int, steps: Sequence[range], *, slots: int = _SLOTS
) -> Tensor:
    """Log-probability of each answer token minus its log-probability without each step, [answer, steps], float32.

    A positive number: the step supports the token. Later tokens keep their positions. `first_fed` is the position of
    the closing tag's last token, the first token read without the step; the result has a row for each token behind it.
    `steps` are text positions before it; `slots` of them are removed at once.
    """
    prefill = Prefill(keep_queries=False)
    read_whole(model, token_ids[:first_fed], prefill)
    positions = torch.arange(first_fed, device=model.device)
    removed = [range(0), *steps]  # the first of them removes nothing
    cache = SlotCache(model.shape, slots=min(slots, len(removed)), capacity=len(token_ids), device=model.device)
    batches = []
    for start in range(0, len(removed), cache.slots):
        cache.live = 0  # the next steps take the slots of the last ones
        for step in removed[start : start + cache.slots]:
            kept = (positions < step.start) | (positions >= step.stop)
            cache.evict(cache.admit(prefill), Selection(keep=positions[kept]))
        batches.append(_read_answer(model, token_ids, first_fed, cache))
    scores = torch.cat(batches, dim=1)  # column 0 is of the whole text
    return scores[:, :1] - scores[:, 1:]


def _read_answer(model: LoadedModel, token_ids: Sequence[int], first_fed: int, cache: SlotCache) -> Tensor:
    """Return the log-probability of each token behind `first_fed` in each live slot, [answer, live]."""
    rows = []
    live = cache.live
    ids = torch.tensor(token_ids, device=model.device)
    # The last token is predicted and not fed.
    positions = torch.arange(first_fed, len(token_ids) - 1, device=model.device)
    for chunk in positions.split(cache.longest_chunk or _FED):  # None: the cache has no limit
        chunk_of_slots = chunk.repeat(live)  # [live x chunk], slot by slot
        cache.begin_chunks(Chunks(dict.fromkeys(range(live), len(chunk)), model.device), chunk_of_slots)
        logits = model.logits(model.step_hidden(ids[chunk_of_slots], chunk_of_slots, cache)).float()
        next_tokens = ids[chunk_of_slots + 1]
        scores = logits.log_softmax(dim=-1).gather(-1, next_tokens[:, None])
        rows.append(scores.view(live, len(chunk)).T)
    return torch.cat(rows)
