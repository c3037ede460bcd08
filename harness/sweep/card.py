"""Estimate what a sweep takes on a GPU that is not here: slots, step time and hours, computed from a few constants.

A step reads the weights once and every slot's cached rows, at a share of the card's bandwidth; the rest is small
operations of the layers, drawing tokens, and the host. The constants were fitted to steps of R1-Distill-Qwen-7B
measured on an H100 (results/published/gpu), and are scaled to other models and cards.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pydantic import PositiveFloat, PositiveInt

from kvsweep.compression.policy import BudgetPolicy, Policy
from kvsweep.harness.models.spec import BYTES, ModelSpec
from kvsweep.messages.errors import UserError

GIB = 2**30
# The estimate may be off by this many percent.
OFF = 30
CONTEXT = 0.8 * GIB  # CUDA, libraries and compiled kernels
# Shares of the bandwidth that products with weights and attention over rows reach.
_WEIGHTS_SHARE, _ROWS_SHARE = 0.78, 0.80
# Seconds per step: of a layer's small operations, with up to 64 slots, and of the host.
_LAYER_SECONDS, _HOST_SECONDS = 46e-6, 0.1e-3
# Seconds to draw tokens: per step, and per slot and vocabulary entry.
_DRAWING_SECONDS, _LOGIT_SECONDS = 0.2e-3, 2.35e-11
_H100_BANDWIDTH = 3.35e12


class Card(NamedTuple):
    """A GPU by its maker's figures: name, bytes of memory for a process, bytes per second."""

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
    """The price of a GPU hour, in any currency."""

    per_hour: PositiveFloat | None = None


@dataclass(frozen=True, kw_only=True)
class AssumeConfig:
    """What an estimate takes for granted: tokens of a text on average, and tokens per second of one task."""

    tokens: PositiveInt | None = None
    tokens_per_second: PositiveFloat | None = None


def known_card(name: str) -> Card:
    if name not in CARDS:
        raise UserError(f"card={name} is unknown: choose {', '.join(CARDS)}, or leave it out.")
    return CARDS[name]


def weights_bytes(spec: ModelSpec, dtype: str) -> tuple[int, int] | None:
    """Return the bytes of the weights, and those that a step reads; None for a family that may have other layers."""
    if spec.parameters is None:
        return None
    # A step reads one row per token of the embedding; but a tied table it reads whole, for the logits.
    table = 0 if spec.tied else spec.vocab_size * spec.hidden_size
    return spec.parameters * BYTES[dtype], (spec.parameters - table) * BYTES[dtype]


def step_seconds(bandwidth: float, *, weights: float, rows: float, slots: int, layers: int, vocabulary: int) -> float:
    """Return the seconds of one step that reads this many bytes of weights and of cached rows."""
    reading = weights / bandwidth / _WEIGHTS_SHARE + rows / bandwidth / _ROWS_SHARE
    # Fitted: the small operations take the same time up to 64 slots, and above that a time linear in the slots.
    small = layers * _LAYER_SECONDS * max(1.0, 0.66 + slots / 187)
    # Drawing reads the logits; its seconds are those of an H100, and are scaled to this card's bandwidth.
    drawing = _DRAWING_SECONDS + _LOGIT_SECONDS * slots * vocabulary * _H100_BANDWIDTH / bandwidth
    return reading + small + drawing + _HOST_SECONDS


def mean_rows(policies: Sequence[Policy], question: int, length: float) -> float:
    """Return the mean cached tokens of a completion of `length` tokens, over its steps and over the policies."""
    return sum(_rows(policy, question, length) for policy in policies) / len(policies)


def _rows(policy: Policy, question: int, length: float) -> float:
    """Return the mean cached tokens of one policy, over the steps of a completion of `length` tokens."""
    trigger = policy.trigger(question)
    if trigger is None or trigger >= question + length:  # never evicts: the rows grow by one a step
        return question + length / 2
    if not isinstance(policy, BudgetPolicy):  # only the most rows are promised: count them at each step
        return policy.capacity(question, round(length))
    steps_before = max(0, trigger - question)  # until the first eviction
    rows_before = question + steps_before / 2
    # From then on the rows fall to the KV budget at each eviction, and grow to the trigger again. An eviction is at one
    # row more than the trigger, because the step that finds so many rows first writes its own row.
    rows_after = (trigger + policy.length_after(trigger + 1, question)) / 2
    return (rows_before * steps_before + rows_after * (length - steps_before)) / length
