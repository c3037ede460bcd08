"""What a sweep takes on a GPU that is not at hand: slots, a step's time and hours, by arithmetic alone.

A step reads the weights once and the cached rows of every slot, at a share of the card's bandwidth; the rest are the
layers' small operations, the drawing of tokens and the host. The shares and the constants were estimated for
R1-Distill-Qwen-7B on an H100 and are scaled to other models and cards. Nothing here has been measured.
"""

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from pydantic import Field

from kvsweep.compression.policy import BudgetPolicy, Policy
from kvsweep.errors import UserError
from kvsweep.harness.decode.request import DecodingConfig
from kvsweep.harness.models.spec import BYTES, ModelSpec
from kvsweep.harness.provenance import SECONDS, visible_gpus

GIB = 2**30
# How far the estimate may be off, in percent.
OFF = 30
_CONTEXT = 0.8 * GIB  # of CUDA, the libraries and the compiled kernels
# Shares of the bandwidth that products with the weights, and attention over the rows, are taken to reach.
_WEIGHTS_SHARE, _ROWS_SHARE = 0.78, 0.85
# Seconds of a layer's small operations in a step of up to 64 slots, and of the host in a step.
_LAYER_SECONDS, _HOST_SECONDS = 40e-6, 0.3e-3
# Seconds of drawing in a step, and for each slot and entry of the vocabulary: with top_k, and in the whole vocabulary.
_DRAWING = {True: (0.3e-3, 4.1e-11), False: (0.7e-3, 2.0e-10)}
_H100_BANDWIDTH = 3.35e12


class Card(NamedTuple):
    """A GPU by its makers' figures: its name, bytes of memory that a process can have, bytes a second."""

    title: str
    memory: float
    bandwidth: float


CARDS: Mapping[str, Card] = {
    "h100": Card("H100", 79.1 * GIB, _H100_BANDWIDTH),
    "h200": Card("H200", 139.8 * GIB, 4.8e12),
    "a100": Card("A100", 79.1 * GIB, 2.04e12),
    "l40s": Card("L40S", 44.4 * GIB, 0.864e12),
}


@dataclass(frozen=True, kw_only=True)
class CostConfig:
    """What an hour of the GPU costs, in any currency."""

    per_hour: Annotated[float, Field(gt=0, description="a price")] | None = None


UNPRICED = CostConfig()


def known_card(name: str) -> str:
    if name not in CARDS:
        raise UserError(f"card={name} is unknown: choose {', '.join(CARDS)}, or leave it out on the machine itself.")
    return name


def card_here() -> Card | None:
    """The first GPU of this machine; None without one, and where its figures are not known."""
    name = _first_gpu()
    return next((card for card in CARDS.values() if name and card.title in name), None)


def _first_gpu() -> str:
    """The name of this machine's first GPU, such as "NVIDIA H100 80GB HBM3"; empty without one."""
    if shutil.which("nvidia-smi") is None or not (gpus := visible_gpus()):
        return ""
    asked = ["nvidia-smi", f"--id={gpus[0]}", "--query-gpu=name", "--format=csv,noheader"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=False, timeout=SECONDS).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def weights_bytes(spec: ModelSpec, dtype: str) -> int | None:
    """Bytes of the model's weights; None for a family whose config does not name all sizes."""
    return None if spec.parameters is None else spec.parameters * BYTES[dtype]


def slots_on(card: Card, weights: int, slot: int, wanted: int) -> int:
    """Slots that decode at once, as `harness.decode.memory.auto_slots` reckons them on the card; 0 if none fits."""
    from kvsweep.harness.decode.memory import MEMORY_SHARE, MOST_SLOTS  # with torch

    free = card.memory - _CONTEXT - weights
    return min(max(0, int(free * MEMORY_SHARE)) // slot, wanted, MOST_SLOTS["cuda"])


def step_seconds(
    card: Card, spec: ModelSpec, dtype: str, slots: int, row_bytes: float, rows: float, decoding: DecodingConfig
) -> float:
    """Seconds of one step of `slots` texts with `rows` cached tokens each, on average."""
    assert spec.parameters is not None
    read = (spec.parameters - spec.vocab_size * spec.hidden_size * (not spec.tied)) * BYTES[dtype]
    weights = read / card.bandwidth / _WEIGHTS_SHARE
    cached = slots * rows * row_bytes / card.bandwidth / _ROWS_SHARE
    layers = len(spec.layer_kinds) * _LAYER_SECONDS * max(1.0, 0.5 + slots / 128)
    sampling = decoding.sampling
    once, each = _DRAWING[bool(sampling.top_k) or sampling.top_p == 1 or sampling.temperature == 0]
    drawing = once + each * slots * spec.vocab_size * _H100_BANDWIDTH / card.bandwidth
    return weights + cached + layers + drawing + _HOST_SECONDS


def mean_rows(policies: Sequence[Policy], question: int, length: float) -> float:
    """Cached tokens of a text of `length` behind the question, on average over its steps and over the policies."""
    return sum(_rows(policy, question, length) for policy in policies) / len(policies)


def _rows(policy: Policy, question: int, length: float) -> float:
    trigger = policy.trigger(question)
    if trigger is None or trigger >= question + length:
        return question + length / 2
    if not isinstance(policy, BudgetPolicy):
        return policy.capacity(question, round(length))
    before = max(0, trigger - question)  # generated tokens until the first eviction
    after = (trigger + policy.length_after(trigger + 1, question)) / 2
    return ((question + before / 2) * before + after * (length - before)) / length
