"""The engine's input: how to decode, and requests with branches. Importing this module does not import torch."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt

from kvsweep.compression.policy import Policy, checked_capacity
from kvsweep.harness.settings import build
from kvsweep.kernels.row_format import ROW_BLOCK, whole_blocks
from kvsweep.messages.errors import UserError
from kvsweep.run_files.row_types import Completion

SamplingOrder = Literal["top_k_then_top_p", "top_p_then_top_k"]

# Logits divided by a lower temperature would exceed float32's range.
_COLDEST = 1e-3


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How tokens are drawn."""

    temperature: float  # divides the logits; 0 takes the most likely token
    # The token that crosses the nucleus is kept.
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: NonNegativeInt = 0
    # The nucleus is computed from the renormalised top k (transformers, vLLM) or from the whole distribution (DynTS).
    order: SamplingOrder = "top_k_then_top_p"

    def __post_init__(self) -> None:
        if not (self.temperature == 0 or _COLDEST <= self.temperature < float("inf")):
            allowed = f"0 (greedy), or {_COLDEST} and above"
            raise UserError(f"decoding.temperature={self.temperature} is out of range: {allowed}.")


@dataclass(frozen=True, kw_only=True)
class DecodingConfig:
    """How completions are sampled and truncated: at `max_new_tokens`, and with `stop_on_loop` when they loop."""

    name: str
    max_new_tokens: PositiveInt
    sampling: SamplingConfig
    stop_on_loop: bool = False


def build_decoding(node: Mapping[str, Any]) -> DecodingConfig:
    """Build the decoding from its flat section, which also has the fields of the sampling."""
    decoding, sampling = dict[str, Any](), dict[str, Any]()
    for name, value in node.items():
        section = decoding if name in ("name", "max_new_tokens", "stop_on_loop") else sampling
        section[str(name)] = value
    decoding["sampling"] = build(SamplingConfig, "decoding", sampling)
    return build(DecodingConfig, "decoding", decoding)


@dataclass(frozen=True, kw_only=True)
class Branch:
    """A cell that wants a completion, and the policy that evicts from it."""

    cell_id: str
    policy: Policy


@dataclass(frozen=True, kw_only=True)
class Request:
    """One problem and draw, wanted by one or more cells.

    The engine writes the tokens that all branches share once, as a trunk, and forks a branch when its policy first
    evicts. A completion that ends before is every branch's completion.
    """

    problem_id: str
    draw: int
    prompt_ids: tuple[int, ...]
    branches: tuple[Branch, ...]
    forced: tuple[int, ...] = ()  # first tokens, known already (`Completion.shared_ids`), up to an eviction
    replayed: bool = False  # True: `forced` is the whole completion, fed to every branch also after evictions

    @property
    def key(self) -> tuple[str, int]:
        return (self.problem_id, self.draw)

    @cached_property
    def prefilled_ids(self) -> tuple[int, ...]:
        """The prompt without its last token; the first step feeds the last token."""
        return self.prompt_ids[:-1]

    def split(self) -> Iterator[Self]:  # for an engine that has no room to fork
        return (replace(self, branches=(branch,)) for branch in self.branches)


def is_untouched(completion: Completion, policy: Policy) -> bool:
    """True if this policy's own cell would have written the same completion: no eviction in either."""
    trigger = policy.trigger(completion.prompt_tokens)
    assert completion.peak_length is not None
    # The last step evicts nothing. The step before it found peak_length - 2 rows, and evicts if it found `trigger`.
    return not completion.evictions and (trigger is None or completion.peak_length <= trigger + 1)


def grows(policy: Policy, longest: int, limit: int) -> bool:
    """True if a completion may need a row for every token, or more rows than at its first eviction.

    It has `limit` tokens, after `longest` prompt tokens.
    """
    capacity, trigger = policy.capacity(longest, limit), policy.trigger(longest)
    if trigger is None or capacity == longest + limit:
        return True
    rows_at_first_eviction = max(trigger, longest) + 1  # the step that finds `trigger` rows writes one more
    return capacity > rows_at_first_eviction


def first_eviction(policy: Policy, question_length: int) -> int | None:
    """Return the step, in generated tokens fed, at which the policy first evicts; None if it never does."""
    trigger = policy.trigger(question_length)
    if trigger is None:
        return None
    step = max(trigger, question_length) - question_length
    # A policy that frees nothing needs a row for every token of a text that continues after its first eviction. The
    # shortest such text has step + 2 tokens: those fed, the one drawn before the eviction, and the one after it.
    return None if grows(policy, question_length, step + 2) else step


def needed_capacity(requests: Iterable[Request], decoding: DecodingConfig) -> int:
    """Rows per slot that every branch of the requests can run with, a multiple of attention's block.

    Raises UserError if a user's policy promises fewer rows than a text has at its first eviction.
    """
    limit = decoding.max_new_tokens
    most = 0
    for request in requests:
        for branch in request.branches:
            most = max(most, checked_capacity(branch.policy, len(request.prompt_ids), limit))
    return whole_blocks(most, ROW_BLOCK)
