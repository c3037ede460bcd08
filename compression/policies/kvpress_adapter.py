"""The presses of NVIDIA/kvpress that score rows, under this cache, budget and clocks."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

from kvsweep.compression import artifacts
from kvsweep.compression.policies.triattention import TriAttention, read_statistics
from kvsweep.compression.policy import CacheView, Count, HeadPolicy
from kvsweep.compression.signals import AttentionMass, RecentQueries, Signal
from kvsweep.kernels.lazy_torch import Tensor, torch

Rotation = tuple[Tensor, Tensor]  # cosine and sine, [1, positions, head_dim]


class NeedsMoreError(Exception):
    """A press has asked for something that a policy does not have."""


class _Absent:
    """Stands for an input of a press of which a policy has only what is `known`; any other use says so."""

    def __init__(self, what: str, **known: Any) -> None:
        self._what = what
        self.__dict__.update(known)

    def __getattr__(self, name: str) -> Any:
        raise NeedsMoreError(self._what)

    def __getitem__(self, key: Any) -> Any:
        return _hidden(self.queries[key])


def _hidden(queries: Tensor) -> _Absent:
    """Hidden states of which only the queries are known, [1, tokens, q_heads * head_dim]."""
    return _Absent("hidden states themselves", queries=queries, shape=queries.shape)


_NOTHING = ("the attention module", "hidden states", "attention weights", "the arguments of the model's forward")
_MODULE, _HIDDEN, _ATTENTIONS, _ARGUMENTS = map(_Absent, _NOTHING)


@dataclass(frozen=True, kw_only=True)
class KVPress(HeadPolicy):
    """A `ScorerPress` of kvpress, whose scores rank the rows per layer and head; no row stays for certain.

    kvpress itself prunes once, after the prefill, or by its own schedule; here a press scores at every eviction. This
    package cannot require kvpress, whose requirements exclude this package's transformers; `pip install --no-deps
    kvpress` installs it. How sure: the code that scores is kvpress's own.

    A press that reads attention weights gets what each row has received so far, summed over the heads of a group, and
    one that reads hidden states gets the newest queries before rotation. A ValueError refuses a press that wants more,
    such as KVzapPress the hidden states of each layer, and one that draws random numbers.

    Attributes:
        press: the class's name, such as KeyDiffPress.
        press_args: its arguments. Its compression_ratio is set at each eviction to what goes.
        queries: newest queries for a press that reads hidden states; kvpress's DecodingPress holds as many states.
        statistics: file of `kvsweep-predictor statistics`, which has the model's rotation, for such a press.
    """

    press: str
    press_args: Mapping[str, Any] = field(default_factory=dict, hash=False)  # a mapping has no hash
    queries: Count = 256
    statistics: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if find_spec("kvpress") is None:
            lacks = f"policy.press={self.press} needs the package kvpress, which is not installed"
            raise ValueError(f"{lacks}: `pip install --no-deps kvpress` installs it, or choose another policy.")
        # A copy in another process brings the press along, and so imports kvpress before a model is loaded.
        object.__setattr__(self, "_scorer", self._make_press())
        object.__setattr__(self, "_signal", self._tried_signal())
        if isinstance(self._wanted, RecentQueries):
            object.__setattr__(self, "ARTIFACTS", TriAttention.ARTIFACTS)
            artifacts.check("statistics", self.statistics, TriAttention.ARTIFACTS["statistics"])

    @property
    def _wanted(self) -> Signal | None:
        """The signal that the press reads; None for one that scores keys and values alone."""
        return self.__dict__["_signal"]

    @property
    def signals(self) -> tuple[Signal, ...]:
        return (self._wanted,) if self._wanted else ()

    newest_kept = 0

    def scores(self, view: CacheView) -> Tensor:
        kept = self.length_after(view.length, view.question_length, view.evictions)
        newest, rotated = int(view.positions.flatten()[-1]), isinstance(self._wanted, RecentQueries)
        statistics = read_statistics(str(self.statistics), view.positions.device) if rotated else {}
        recorded = view.signals[self._wanted] if self._wanted else view.positions
        layers = [
            self._score(k[None], v[None], kept, _inputs(self._wanted, numbers, positions, newest, statistics))[0]
            for k, v, numbers, positions in zip(view.keys, view.values, recorded, view.positions, strict=True)
        ]
        return torch.stack(layers).float()

    def identity(self) -> dict[str, Any]:
        """The fields that count, and kvpress's version."""
        unused = () if isinstance(self._wanted, RecentQueries) else ("queries", "statistics")
        named = {name: value for name, value in super().identity().items() if name not in unused}
        return {**named, "kvpress": metadata.version("kvpress")}

    def _score(self, keys: Tensor, values: Tensor, kept: int, given: tuple[Any, ...]) -> Tensor:
        scorer: Any = self.__dict__["_scorer"]
        # Half a row more, so that no rounding makes the press count a row less.
        scorer.compression_ratio = max(0.0, 1 - (kept + 0.5) / keys.shape[2])
        return scorer.score(*given[:2], keys, values, *given[2:])

    def _make_press(self) -> Any:
        kvpress = _import_kvpress()
        cls = getattr(kvpress, self.press, None)
        if not (isinstance(cls, type) and issubclass(cls, kvpress.ScorerPress)):
            other = f"policy.press={self.press} is no ScorerPress of kvpress, so more than scores decides what it keeps"
            raise ValueError(f"{other}: choose one that scores rows, such as KeyDiffPress.")
        if "compression_ratio" in self.press_args:
            raise ValueError("policy.press_args.compression_ratio contradicts policy.keep_ratio: leave the first out.")
        try:
            return cls(**self.press_args)
        except (TypeError, ValueError, AssertionError) as error:
            reason = str(error).splitlines()[0].rstrip(".")
            unfit = f"policy.press_args={dict(self.press_args)} do not fit {self.press} ({reason})"
            raise ValueError(f"{unfit}: correct them.") from error

    def _tried_signal(self) -> Signal | None:
        """Score random rows, to learn which signal the press needs before any model is loaded."""
        generator, count = torch.Generator().manual_seed(0), self.budget + 1
        rows = torch.randn(2, 1, 2, count, 16, generator=generator)
        positions = torch.arange(count).expand(2, -1)
        statistics = {"inverse_frequencies": torch.ones(8).double(), "attention_scaling": torch.tensor(1.0)}
        recorded = {
            None: rows,
            AttentionMass(): torch.rand(2, count, generator=generator),
            RecentQueries(self.queries): torch.randn(4, self.queries, 16, generator=generator),
        }
        needs = ""
        for signal, numbers in recorded.items():
            given = _inputs(signal, numbers, positions, count - 1, statistics)
            try:
                scores, again = (self._score(rows[0], rows[1], self.size, given) for _ in range(2))
            except NeedsMoreError as error:
                needs = needs if needs and signal else str(error)
                continue
            except Exception as error:  # a press raises what it likes
                reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
                fails = f"policy.press={self.press} cannot score {count} rows from what is recorded here ({reason})"
                raise ValueError(f"{fails}: choose another press or other policy.press_args.") from error
            if not torch.equal(scores, again):
                draws = f"policy.press={self.press} draws random numbers that differ from call to call"
                mend = "give policy.press_args.seed if it has one, or choose policy=random_head"
                raise ValueError(f"{draws}: {mend}.")
            return signal
        raise ValueError(
            f"policy.press={self.press} needs {needs}, and at an eviction there are keys, values, the attention that "
            "rows have received and the newest queries: choose a press that scores from these."
        )


def _inputs(
    signal: Signal | None, recorded: Any, positions: Tensor, newest: int, statistics: Mapping[str, Tensor]
) -> tuple[Any, ...]:
    """What a press gets beside a layer's keys and values: module, hidden states, attention weights, arguments.

    The layer's recording is [kv_heads, rows] or [q_heads, queries, head_dim]; positions are [kv_heads, rows].
    """
    if signal is None:
        return _MODULE, _HIDDEN, _ATTENTIONS, _ARGUMENTS
    if isinstance(signal, AttentionMass):
        # A press divides by the queries behind each row, and counts them as if no row had been evicted between.
        counted = torch.arange(recorded.shape[-1], 0, -1, device=recorded.device)
        sums = {2: (recorded * counted / (newest + 1 - positions))[None]}
        known = {"sum": sums.__getitem__, "device": recorded.device, "dtype": recorded.dtype}
        return _MODULE, _HIDDEN, _Absent("attention weights of single queries", **known), _ARGUMENTS
    frequencies, scaling = (statistics[name].double() for name in ("inverse_frequencies", "attention_scaling"))
    count = min(recorded.shape[1], newest + 1)

    def rotation(at: Tensor) -> Rotation:
        angles = (at.double()[..., None] * frequencies).repeat(1, 1, 2)
        return (angles.cos() * scaling).float(), (angles.sin() * scaling).float()

    at = torch.arange(newest + 1 - count, newest + 1, device=recorded.device)
    pairs = torch.complex(*recorded[:, -count:].double().chunk(2, dim=-1))
    turned = pairs * torch.polar(1 / scaling.expand(count, len(frequencies)), -at[:, None] * frequencies)
    queries = torch.cat([turned.real, turned.imag], dim=-1).float().transpose(0, 1).flatten(1)[None]
    # A press counts positions from the first of the hidden states.
    module = _Absent(
        "more of the attention module than queries and rotation",
        config=SimpleNamespace(num_attention_heads=len(recorded), num_key_value_heads=len(positions)),
        head_dim=recorded.shape[-1],
        q_proj=lambda hidden: hidden.queries,
        rotary_emb=lambda _, given: rotation(given + at[0]),
    )
    return module, _hidden(queries), None, {"position_embeddings": rotation(at[None])}


def _import_kvpress() -> Any:
    """Import kvpress, and undo what its first import does to this package's attention function.

    It wraps every attention function that transformers knows, and the wrapper passes an argument that ours refuses.
    """
    imported = "kvpress" in sys.modules
    try:
        import kvpress
    except ImportError as error:
        raise ValueError(f"kvpress cannot be imported ({error}): install what it names.") from error
    if not imported:
        from transformers import AttentionInterface

        from kvsweep.compression.attention import SLOT_ATTENTION, slot_attention

        AttentionInterface.register(SLOT_ATTENTION, slot_attention)
    return kvpress
