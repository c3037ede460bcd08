"""What a sweep takes on a GPU that is not at hand: slots, a step's time and hours, by arithmetic alone.

A step reads the weights once and the cached rows of every slot, at a share of the card's bandwidth; the rest are the
layers' small operations, the drawing of tokens and the host. The shares and the constants were fitted to the steps of
R1-Distill-Qwen-7B that were measured on an H100 (results/published/gpu), and are scaled to other models and cards.
"""

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from pydantic import Field

from kvsweep.compression.policy import BudgetPolicy, Policy
from kvsweep.errors import UserError
from kvsweep.harness.models.spec import BYTES, ModelSpec
from kvsweep.harness.provenance import SECONDS, visible_gpus

GIB = 2**30
# How far the estimate may be off, in percent.
OFF = 30
_CONTEXT = 0.8 * GIB  # of CUDA, the libraries and the compiled kernels
# Shares of the bandwidth that products with the weights, and attention over the rows, reach.
_WEIGHTS_SHARE, _ROWS_SHARE = 0.78, 0.80
# Seconds of a layer's small operations in a step of up to 64 slots, and of the host in a step.
_LAYER_SECONDS, _HOST_SECONDS = 46e-6, 0.1e-3
# Seconds of drawing in a step, and for each slot and entry of the vocabulary.
_DRAWING_SECONDS, _LOGIT_SECONDS = 0.2e-3, 2.35e-11
_H100_BANDWIDTH = 3.35e12


class Card(NamedTuple):
    """A GPU by its makers' figures: its name, bytes of memory that a process can have, bytes a second."""

    title: str
    memory: float
    bandwidth: float


CARDS: Mapping[str, Card] = {
    "h100_pcie": Card("H100 PCIe", 79.1 * GIB, 2.04e12),
    "h100_nvl": Card("H100 NVL", 93.1 * GIB, 3.94e12),
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


@dataclass(frozen=True, kw_only=True)
class AssumeConfig:
    """What an estimate takes for granted: tokens of a text on average, and tokens per second of one task."""

    tokens: Annotated[int, Field(ge=1)] | None = None
    tokens_per_second: Annotated[float, Field(gt=0, description="a number of tokens")] | None = None


NOTHING_ASSUMED = AssumeConfig()


def known_card(name: str) -> Card:
    if name not in CARDS:
        raise UserError(f"card={name} is unknown: choose {', '.join(CARDS)}, or leave it out on the machine itself.")
    return CARDS[name]


def card_here() -> Card | None:
    """The first GPU of this machine; None without one, and where its figures are not known."""
    return card_of(_first_gpu())


def card_of(name: str) -> Card | None:
    """The card of a device's name, such as "NVIDIA H100 80GB HBM3"."""
    return next((card for card in CARDS.values() if card.title in name), None)


def _first_gpu() -> str:
    """The name of this machine's first GPU; empty without one."""
    if shutil.which("nvidia-smi") is None or not (gpus := visible_gpus()):
        return ""
    asked = ["nvidia-smi", f"--id={gpus[0]}", "--query-gpu=name", "--format=csv,noheader"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=False, timeout=SECONDS).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def weights_bytes(spec: ModelSpec, dtype: str) -> tuple[int, int] | None:
    """Bytes of the model's weights, and of those that a step reads; None where a family's layers may have others."""
    if spec.parameters is None:
        return None
    table = 0 if spec.tied else spec.vocab_size * spec.hidden_size  # of the embedding a step reads a row a token
    return spec.parameters * BYTES[dtype], (spec.parameters - table) * BYTES[dtype]


def slots_on(card: Card, weights: int, slot: int, wanted: int) -> int:
    """Slots that decode at once, as `harness.decode.memory.auto_slots` reckons them on the card; 0 if none fits."""
    from kvsweep.harness.decode.memory import MOST_SLOTS, fitting_slots  # with torch

    return min(fitting_slots(card.memory - _CONTEXT - weights, slot), wanted, MOST_SLOTS["cuda"])


def step_seconds(bandwidth: float, *, weights: float, rows: float, slots: int, layers: int, vocabulary: int) -> float:
    """Seconds of one step that reads so many bytes of weights and of cached rows."""
    reading = weights / bandwidth / _WEIGHTS_SHARE + rows / bandwidth / _ROWS_SHARE
    small = layers * _LAYER_SECONDS * max(1.0, 0.66 + slots / 187)
    drawing = _DRAWING_SECONDS + _LOGIT_SECONDS * slots * vocabulary * _H100_BANDWIDTH / bandwidth
    return reading + small + drawing + _HOST_SECONDS


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
