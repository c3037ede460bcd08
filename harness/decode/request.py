"""What the engine is asked for: requests, their branches, and the slots and rows that they need."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from omegaconf import DictConfig

from analysis.records import Completion
from compression.cache import SlotCache
from compression.policy import Policy
from harness.decode.sampling import SamplingConfig
from harness.models.load import LoadedModel, free_memory
from harness.settings import build, plain

# Beyond these little is gained (CPU: results/published/benchmarks.md; CUDA: a guess until it is measured).
_MOST_SLOTS = {"cpu": 64, "cuda": 256}
_MEMORY_SHARE = 0.8


@dataclass(frozen=True, kw_only=True)
class DecodingConfig:
    """How completions are written: the sampling, and where they are cut.

    Raises:
        ValueError: max_new_tokens below 1.
    """

    name: str
    max_new_tokens: int
    sampling: SamplingConfig

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(
                f"decoding.max_new_tokens={self.max_new_tokens} is out of range: it must be at least 1 token."
            )


@dataclass(frozen=True, kw_only=True)
class Branch:
    """One cell's wish for a completion: the policy that prunes it from its first eviction on."""

    cell_id: str
    policy: Policy


@dataclass(frozen=True, kw_only=True)
class Request:
    """One problem and draw, wanted by one cell or more.

    Until a branch's policy first evicts, every branch would write the same tokens: they are written once, by a trunk,
    and a branch forks off where its policy first fires. A text that ends before is every branch's completion.

    Attributes:
        forced: the text's first tokens where they are known, as `Completion.shared_ids` tells them: the trunk feeds
            them in place of those it would draw. A branch that has evicted draws for itself.
    """

    problem_id: str
    draw: int
    prompt_ids: tuple[int, ...]
    branches: tuple[Branch, ...]
    forced: tuple[int, ...] = ()

    @property
    def key(self) -> tuple[str, int]:
        """What identifies its completions within their cells."""
        return (self.problem_id, self.draw)

    @cached_property
    def question(self) -> tuple[int, ...]:
        """The prompt but its last token: what is prefilled."""
        return self.prompt_ids[:-1]


def _one_by_one(requests: Iterable[Request]) -> Iterator[Request]:
    """Requests of one branch each, for a single slot, which has no room to fork into."""
    for request in requests:
        for branch in request.branches:
            yield replace(request, branches=(branch,))


def serves(completion: Completion, policy: Policy) -> bool:
    """Whether a completion is also what this policy would have written: nothing was evicted, nor would it have been."""
    trigger = policy.trigger(completion.prompt_tokens)
    # The step that ends a text evicts no more; the one before it left the cache a row shorter, having found it another.
    return not completion.evictions and (trigger is None or completion.peak_length <= trigger + 1)


def needed_capacity(requests: Iterable[Request], decoding: DecodingConfig) -> int:
    """Rows per slot that serve every branch of the requests."""
    limit = decoding.max_new_tokens
    return max(b.policy.capacity(len(r.prompt_ids), limit) for r in requests for b in r.branches)


@dataclass(frozen=True)
class AutoSlots:
    """How many slots to decode with, and the arithmetic in words."""

    slots: int
    reason: str


def auto_slots(model: LoadedModel, *, capacity: int, requests: int) -> AutoSlots:
    """Slots that fit into the free memory, and no more than there are requests or than helps."""
    one, free = SlotCache.bytes_per_slot(model.shape, capacity), free_memory(model.device)
    fitting, most = int(free * _MEMORY_SHARE) // one, _MOST_SLOTS[model.device.type]
    reason = (
        f"{fitting:,} fit into {_MEMORY_SHARE:.0%} of {free / 2**30:.1f} GiB free, "
        f"{requests:,} completions are wanted, more than {most} hardly help on {model.device.type}"
    )
    return AutoSlots(slots=max(1, min(fitting, requests, most)), reason=reason)


def build_decoding(node: DictConfig) -> DecodingConfig:
    """Make the decoding of its flat section: name and max_new_tokens beside the sampling's fields."""
    values = plain(node)
    own: dict[str, Any] = {name: values.pop(name) for name in ("name", "max_new_tokens") if name in values}
    return build(DecodingConfig, "decoding", {**own, "sampling": build(SamplingConfig, "decoding", values)})
