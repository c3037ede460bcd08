"""Whether a text's bits depend on the slots beside it, and a drawn token on the rows beside it."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvsweep.compression.policies.h2o import H2O
from kvsweep.compression.policies.window import Window
from kvsweep.harness.decode.engine import Engine
from kvsweep.harness.decode.request import Branch, Request, SamplingConfig
from kvsweep.harness.decode.sampling import cuts
from kvsweep.harness.models.loaded import LoadedModel
from kvsweep.kernels.implementation import Implementation, operations
from kvsweep.run_files.row_types import Completion
from scripts.bench.gpu_day.common import SAMPLINGS, decoding_of, random_ids, random_r1

NARROW = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 300,
}
Sums = dict[tuple[str, int], int]


def bits(small: bool) -> dict[str, Any]:
    """How many logits and texts differ at fewer slots with `invariant=true`, and how many drawn tokens."""
    model = random_r1(small, **(NARROW if small else {"num_hidden_layers": 4}))
    tokens, plans = (9, ((3, 3), (2, 3), (1, 1))) if small else (48, ((64, 66), (7, 66), (1, 8)))
    requests = asked(model, most=plans[0][1], small=small)
    (sums, texts), *others = (decoded(model, requests[:count], slots, tokens) for slots, count in plans)
    found: dict[str, Any] = {"vocabulary": model.spec.vocab_size}
    found["evictions"] = sum(len(text.evictions) for text in texts.values())
    for (slots, _), (own_sums, own_texts) in zip(plans[1:], others, strict=True):
        found[f"slots_{slots}"] = {
            "steps": len(own_sums),
            "logits_differ": sum(sums[key] != value for key, value in own_sums.items()),
            "texts": len(own_texts),
            "texts_differ": sum(texts[name].token_ids != text.token_ids for name, text in own_texts.items()),
        }
    return found | {"drawing": drawing(small, model.device)}


def asked(model: LoadedModel, *, most: int, small: bool) -> list[Request]:
    """Requests of random prompts of many lengths, by turns with two policies that evict early."""
    size: dict[str, Any] = {"keep_ratio": 0.4, "question": "on_top"}
    size |= {"local_window": 2, "budget": 5} if small else {"local_window": 8, "budget": 24}
    policies = [Window(name="window", **size), H2O(name="h2o", **size)]
    return [
        Request(
            problem_id=str(number),
            draw=0,
            prompt_ids=tuple(random_ids(model, 5 + 3 * number % 90, seed=number).tolist()),
            branches=(Branch(cell_id="bits", policy=policies[number % 2]),),
        )
        for number in range(most)
    ]


def decoded(
    model: LoadedModel, requests: Sequence[Request], slots: int, tokens: int
) -> tuple[Sums, dict[str, Completion]]:
    """A checksum of the logits before each token, by problem and token, and the texts, by problem."""
    engine = Engine.sized_for(
        requests, model, decoding=decoding_of("r1", tokens), seed=0, slots=slots, impl="triton", invariant=True
    )
    engine.stop_ids = torch.tensor([-1], device=model.device)
    sums, draw = dict[tuple[str, int], Tensor](), engine._sample

    def noted(logits: Tensor) -> None:
        found = checksums(logits)
        for slot in range(engine.cache.live):
            sums[engine.table[slot].request.problem_id, int(engine.table.generated[slot])] = found[slot]
        draw(logits)

    engine._sample = noted  # type: ignore[method-assign]
    texts = {text.problem_id: text for _, text in engine.generate(requests)}
    # On a GPU a text that has ended takes one more step, whose token is dropped.
    return {key: int(value) for key, value in sums.items() if key[1] < texts[key[0]].num_tokens}, texts


def checksums(rows: Tensor) -> Tensor:
    """A number for each row that changes with its bits; sums of whole numbers are the same in any order."""
    numbers = rows.view(torch.int16 if rows.itemsize == 2 else torch.int32).long()
    return (numbers * torch.arange(1, 1 + rows.shape[1], device=rows.device)).sum(-1)


def drawing(small: bool, device: torch.device) -> dict[str, dict[str, int]]:
    """For each sampling and implementation, how many tokens are others where fewer rows are drawn at once.

    `torch` counts the tokens that torch draws otherwise on the same device, where sums round to another side.
    """
    torch.manual_seed(0)
    rows, vocabulary, fewer, times = (8, 3000, (1, 3), 2) if small else (192, 152064, (1, 7, 50, 64), 8)
    logits = 3 * torch.randn(rows, vocabulary, device=device).bfloat16()
    found: dict[str, dict[str, int]] = {}
    for sampling, config in SAMPLINGS.items():
        whole = drawn("torch", config, logits, rows, times)
        for impl in ("torch", "triton"):
            tokens = drawn(impl, config, logits, rows, times)
            row = {str(few): int((drawn(impl, config, logits, few, times) != tokens).sum()) for few in fewer}
            found[f"{sampling}_{impl}"] = row | {"torch": int((tokens != whole).sum()), "tokens": tokens.numel()}
    return found


def drawn(impl: Implementation, config: SamplingConfig, logits: Tensor, at_once: int, times: int) -> Tensor:
    """Tokens [times, rows], of which so many rows are drawn at once."""
    keys = torch.arange(len(logits), device=logits.device)
    draw = partial(operations(impl).draw_tokens, **cuts(config))
    parts = [
        (rows, own, torch.full_like(own, 0))
        for rows, own in zip(logits.split(at_once), keys.split(at_once), strict=True)
    ]
    return torch.stack(
        [torch.cat([draw(rows, own, counters + time) for rows, own, counters in parts]) for time in range(times)]
    )
