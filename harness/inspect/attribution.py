"""The contribution of each reasoning step to each answer token.

`removal` takes a step's rows out of the key-value cache where the answer begins, and measures how the log-probability
of each answer token changes. Later thinking tokens, which have read the step, keep what they took from it: an eviction
does the same. `grad_x_input` estimates the effect of a step from one forward and the gradients.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvsweep.compression.cache import SlotCache
from kvsweep.compression.policy import Selection
from kvsweep.compression.rows import Prefill
from kvsweep.harness.models.loaded import LoadedModel
from kvsweep.harness.predictor.labels import read_whole

# Tokens of the answer that every slot is fed at once.
_FED = 64


def cost(model: LoadedModel, length: int, answer_start: int, steps: int, slots: int) -> str:
    """The work and the memory that `removal` will take, as a sentence."""
    slots = min(slots, steps + 1)
    batches = -(-(steps + 1) // slots)
    mib = slots * SlotCache.bytes_per_slot(model.shape, length) / 2**20
    return (
        f"attribution: a prefill of {answer_start} tokens, then {batches} x {length - answer_start} decode steps over "
        f"{slots} slots ({steps} steps and the whole text), {mib:.1f} MiB of keys and values"
    )


@torch.inference_mode()
def removal(
    model: LoadedModel, token_ids: Sequence[int], answer_start: int, steps: Sequence[range], *, slots: int = 32
) -> Tensor:
    """Log-probability of each answer token minus its log-probability without each step, [answer, steps], float32.

    A positive number means that the step supports the token. The later tokens keep their positions. `token_ids` are
    prompt, thinking and answer; `answer_start` is the position of the closing tag's last token, the first that is read
    without the step, and the result's rows are the tokens behind it; `steps` are text positions below it, of which
    `slots` are removed at once.
    """
    prefill = Prefill(keep_queries=False)
    read_whole(model, token_ids[:answer_start], prefill)
    positions = torch.arange(answer_start, device=model.device)
    removed = [range(0), *steps]
    cache = SlotCache(model.shape, slots=min(slots, len(removed)), capacity=len(token_ids), device=model.device)
    found = []
    for start in range(0, len(removed), cache.slots):
        cache.live = 0
        for step in removed[start : start + cache.slots]:
            kept = (positions < step.start) | (positions >= step.stop)
            cache.evict(cache.admit(prefill), Selection(keep=positions[kept]))
        found.append(_read_answer(model, token_ids, answer_start, cache))
    scores = torch.cat(found, dim=1)
    return scores[:, :1] - scores[:, 1:]


def _read_answer(model: LoadedModel, token_ids: Sequence[int], answer_start: int, cache: SlotCache) -> Tensor:
    """Log-probability of each answer token in each live slot, [answer, live]."""
    rows, answer = [], torch.tensor(token_ids[answer_start:], device=model.device)
    positions = torch.arange(answer_start, len(token_ids) - 1, device=model.device)
    for at in positions.split(cache.longest_chunk or _FED):
        cache.begin_chunks(dict.fromkeys(range(cache.live), len(at)), at.repeat(cache.live))
        tokens = answer[at - answer_start].repeat(cache.live)
        logits = model.logits(model.step_hidden(tokens, at.repeat(cache.live), cache)).float()
        following = answer[at + 1 - answer_start].repeat(cache.live)
        rows.append(logits.log_softmax(dim=-1).gather(-1, following[:, None]).view(cache.live, len(at)).T)
    return torch.cat(rows)


def grad_x_input(model: LoadedModel, token_ids: Sequence[int], answer_start: int, steps: Sequence[range]) -> Tensor:
    """Gradient of each answer token's log-probability times the embeddings, summed over each step, [answer, steps].

    The result has the shape and the sign of `removal`'s. It is a linear estimate, and includes what later tokens took
    from the step. One forward, and one backward per answer token.
    """
    ids = torch.tensor([token_ids], device=model.device)
    embedded = model.network.get_input_embeddings()(ids).detach().requires_grad_()
    positions = torch.arange(len(token_ids), device=model.device)[None]
    shape = {"slot_shape": model.shape}
    output = model.network.base_model(inputs_embeds=embedded, position_ids=positions, use_cache=False, **shape)
    scores = model.logits(output.last_hidden_state[0, answer_start:-1]).float().log_softmax(dim=-1)
    rows = []
    for number, target in enumerate(token_ids[answer_start + 1 :]):
        (gradient,) = torch.autograd.grad(scores[number, target], embedded, retain_graph=True)
        product = (gradient * embedded)[0].detach().sum(dim=-1)
        rows.append(torch.stack([product[step.start : step.stop].sum() for step in steps]))
    return torch.stack(rows).float()
