"""A separate stage: a model's mean queries, with which the policy triattention predicts future queries."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvsweep.compression.cache_rows import Prefill
from kvsweep.compression.policies.triattention import save_statistics
from kvsweep.harness.models.loaded import LoadedModel
from kvsweep.harness.predictor.labels import read_whole
from kvsweep.harness.predictor.recipe import PredictorSettings
from kvsweep.harness.predictor.traces import read_traces
from kvsweep.messages.errors import UserError

# The released code reads one text of at most this many tokens (TriAttention, 2604.04921, scripts/calibrate.py).
MOST_TOKENS = 32_768
_BLOCK = 4096
# Position and number of tokens for a test of a model's rotation, and how much rounding may change a query.
_FAR, _TEXTS = 57, 8
_ROUNDING = {"float32": 1e-3, "bfloat16": 0.03, "float16": 5e-3}


class QueryMeans(Prefill):
    """Receives each layer's queries during a forward, undoes their rotation, and sums them.

    `frequencies` is the model's inverse frequencies, [head_dim / 2], `scaling` the rotation's factor on queries.
    """

    def __init__(self, frequencies: Tensor, scaling: float) -> None:
        super().__init__()
        self.frequencies = frequencies.double()
        self.scaling_of_rotation = scaling
        # Of each layer, [2, heads, head_dim / 2]: of queries and of their sizes.
        self.sums: defaultdict[int, Any] = defaultdict(float)
        self.tokens = 0

    def observe(self, query: Tensor, key: Tensor, value: Tensor, *how: Any) -> None:
        """Add one full layer of one text, [1, heads, length, head_dim] each."""
        layer = self._layer
        self._layer += 1
        length = query.shape[2]
        if layer == 0:
            self.tokens += length
        for positions in torch.arange(length, device=query.device).split(_BLOCK):
            # A rotation turns the pair of channels i and i + head_dim / 2 as one complex number.
            angles = positions[:, None] * self.frequencies
            turn_back = torch.polar(torch.full_like(angles, 1 / self.scaling_of_rotation), -angles)
            real, imaginary = query[0, :, positions].double().chunk(2, dim=-1)
            unrotated = torch.complex(real, imaginary) * turn_back  # [heads, tokens, head_dim / 2]
            self.sums[layer] += torch.stack([unrotated.sum(dim=1), unrotated.abs().sum(dim=1)])

    def result(self) -> dict[str, Tensor]:
        """Return the mean query (complex) and a query's mean size, [layers, q_heads, head_dim / 2] each."""
        mean, size = torch.stack(list(self.sums.values()), dim=1) / self.tokens
        return {"mean": mean, "mean_size": size.real}  # sizes are real numbers, summed beside complex ones


def rotation_of(model: LoadedModel) -> tuple[Tensor, float]:
    """Return the inverse frequencies [head_dim / 2] and the factor of a model's rotation.

    Raises UserError unless every full layer's last change to queries turns the first half of each head against the
    second by these angles: some families pair neighbouring channels, turn the other way, normalise afterwards, or leave
    layers out.
    """
    rotary: Any = getattr(model.network.base_model, "rotary_emb", None)
    frequencies = getattr(rotary, "inv_freq", torch.empty(0))
    kind = getattr(rotary, "rope_type", "default")
    if 2 * len(frequencies) != model.shape.head_dim or kind == "longrope" or "dynamic" in kind:
        raise UserError(
            f"model={model.config.name} has no rotation of whole heads by fixed frequencies, which triattention needs: "
            "choose another model or policy."
        )
    # A trial: queries at position _FAR must be those at position 0, turned.
    angles = _FAR * frequencies.double()
    turn = torch.polar(torch.ones_like(angles), angles)
    queries = zip(_queries_at(model, 0), _queries_at(model, _FAR), strict=True)
    for layer, (at_start, far_away) in enumerate(queries):
        expected = turn * torch.complex(*at_start.chunk(2, dim=-1))
        observed = torch.complex(*far_away.chunk(2, dim=-1))
        if (observed - expected).norm() > _ROUNDING[model.config.dtype] * expected.norm():
            raise UserError(
                f"model={model.config.name} does not rotate the halves of its heads, alone and last, in layer {layer}, "
                "which triattention needs: choose another model or policy."
            )
    return frequencies, float(rotary.attention_scaling)


@torch.inference_mode()
def _queries_at(model: LoadedModel, position: int) -> list[Tensor]:
    """Return each full layer's queries [tokens, q_heads, head_dim] of one-token texts at a position, in float64.

    A single token attends only to itself, so its layers' inputs do not depend on the position.
    """
    texts = []
    # About _TEXTS tokens from all over the vocabulary, behind the special tokens that often come first.
    for token in range(5, model.spec.vocab_size, max(1, model.spec.vocab_size // _TEXTS)):
        prefill = Prefill()
        model.read(torch.tensor([[token]], device=model.device), position, prefill, model.new_cache())
        texts.append(torch.stack([query[:, -1].double() for query in prefill.queries]))
    return list(torch.stack(texts, dim=1))  # from [layers, q_heads, head_dim] of each text


@torch.inference_mode()
def make_statistics(settings: PredictorSettings) -> dict[str, Any]:
    """Write the mean queries of a text file, or of the traces, to recipe.out/statistics.safetensors."""
    texts = texts_of(settings)
    settings.loaded.check_rows("statistics are of its queries")
    frequencies, scaling = rotation_of(settings.loaded)
    means = QueryMeans(frequencies, scaling)
    card = read_texts(settings, texts, means)
    path = settings.recipe.out / "statistics.safetensors"
    rotation = {"inverse_frequencies": frequencies, "attention_scaling": torch.tensor(scaling)}
    save_statistics(str(path), {**means.result(), **rotation}, card)
    return {"statistics": str(path), "tokens": means.tokens}


def texts_of(settings: PredictorSettings) -> list[list[int]]:
    """Return token ids of the text file, or of the traces, at most MOST_TOKENS in total."""
    text = settings.recipe.text
    if text:
        try:
            token_ids = settings.loaded.dialogue.encode(Path(text).read_text(encoding="utf-8-sig"))
        except UnicodeDecodeError:
            raise UserError(f"recipe.text={text} is no UTF-8 text: give one, or null.") from None
        return [list(token_ids[:MOST_TOKENS])]
    texts = []
    left = MOST_TOKENS
    for trace in read_traces(settings):
        if left <= 0:
            break
        texts.append(trace.token_ids[:left])
        left -= len(trace.token_ids)
    return texts


def read_texts(settings: PredictorSettings, texts: list[list[int]], prefill: Prefill) -> dict[str, Any]:
    """Read the texts, which `prefill` observes; return the artifact's card."""
    model = settings.loaded
    for token_ids in texts:
        prefill.begin_chunk()  # from the first layer again, here for the next text
        read_whole(model, token_ids, prefill)
    text = settings.recipe.text
    return {
        "hidden_size": model.spec.hidden_size,
        "model": model.config.name,
        "model_weights": model.config.identity()["weights"],
        "text": Path(text).name if text else "traces",
        "tokens": sum(map(len, texts)),
    }
