"""What each reasoning step does for each answer token: the change of its log-probability without the step.

`removal` takes the step's rows out of the key-value cache where the answer begins; later thinking tokens, which have
read the step, keep what they took from it. That is what an eviction does.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from transformers import DynamicCache

from compression.cache import SlotCache
from compression.policy import Selection
from compression.rows import Prefill
from harness.models.load import LoadedModel

Method = Literal["removal", "grad_x_input"]


def cost(model: LoadedModel, length: int, answer_start: int, steps: int, slots: int) -> str:
    """What `removal` will take, in words, before it is begun."""
    slots = min(slots, steps + 1)
    batches = -(-(steps + 1) // slots)
    fed = length - answer_start
    mib = slots * SlotCache.bytes_per_slot(model.shape, length) / 2**20
    return (
        f"attribution: a prefill of {answer_start} tokens, then {batches} x {fed} decode steps over {slots} slots "
        f"({steps} steps and the whole text), {mib:.1f} MiB of keys and values"
    )


@torch.inference_mode()
def removal(
    model: LoadedModel, token_ids: Sequence[int], answer_start: int, steps: Sequence[range], *, slots: int = 32
) -> Tensor:
    """Log-probability of each answer token less what it is without each step's rows, [answer, steps], float32.

    Positive: the step speaks for the token. One step is removed per slot; positions stay as they are in the text.

    Args:
        model: what reads the text.
        token_ids: prompt, thinking and answer.
        answer_start: position of the closing tag, the first token that is read without the step; the answer's tokens,
            the rows of the result, are those behind it.
        steps: text positions of each step, below answer_start.
        slots: steps removed at once.
    """
    prefill = Prefill(keep_queries=False)
    prefill.begin_chunk()
    ids = torch.tensor([token_ids[:answer_start]], device=model.device)
    positions = torch.arange(answer_start, device=model.device)
    model.decode_hidden(input_ids=ids, position_ids=positions[None], past_key_values=DynamicCache(), prefill=prefill)
    wanted = [range(0), *steps]
    cache = SlotCache(model.shape, slots=min(slots, len(wanted)), capacity=len(token_ids), device=model.device)
    found = []
    for start in range(0, len(wanted), cache.slots):
        batch = wanted[start : start + cache.slots]
        cache.live = 0
        for step in batch:
            slot = cache.admit(prefill)
            gone = torch.zeros(answer_start, dtype=torch.bool, device=model.device)
            gone[step.start : step.stop] = True
            cache.evict(slot, Selection(keep=positions[~gone]))
        found.append(_read_answer(model, token_ids, answer_start, cache))
    scores = torch.cat(found, dim=1)
    return scores[:, :1] - scores[:, 1:]


def _read_answer(model: LoadedModel, token_ids: Sequence[int], answer_start: int, cache: SlotCache) -> Tensor:
    """Log-probability of each answer token in each live slot, [answer, live]."""
    rows = []
    for position in range(answer_start, len(token_ids) - 1):
        tokens = torch.full((cache.live,), token_ids[position], device=model.device)
        at = torch.full((cache.live,), position, device=model.device)
        cache.begin_step(at)
        logits = model.logits(model.step_hidden(tokens, at, cache)).float()
        rows.append(logits.log_softmax(dim=-1)[:, token_ids[position + 1]])
    return torch.stack(rows)


def grad_x_input(model: LoadedModel, token_ids: Sequence[int], answer_start: int, steps: Sequence[range]) -> Tensor:
    """Gradient of each answer token's log-probability times the embeddings, summed over each step, [answer, steps].

    One forward, and one backward per answer token; shaped and signed as `removal`, of which it is a linear guess that
    counts what later tokens took from the step as well.
    """
    ids = torch.tensor([token_ids], device=model.device)
    embedded = model.network.get_input_embeddings()(ids).detach().requires_grad_()
    positions = torch.arange(len(token_ids), device=model.device)[None]
    output = model.network.base_model(inputs_embeds=embedded, position_ids=positions, use_cache=False)
    scores = model.logits(output.last_hidden_state[0, answer_start:-1]).float().log_softmax(dim=-1)
    rows = []
    for number, target in enumerate(token_ids[answer_start + 1 :]):
        (gradient,) = torch.autograd.grad(scores[number, target], embedded, retain_graph=True)
        product = (gradient * embedded)[0].detach().sum(dim=-1)
        rows.append(torch.stack([product[step.start : step.stop].sum() for step in steps]))
    return torch.stack(rows).float()
