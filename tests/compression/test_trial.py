"""A policy's fault is named before a sweep: each shipped policy passes, and each wrong one gets its own sentence."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import kvsweep
from kvsweep.compression.policy import AttentionMass, BudgetPolicy, CacheView, HeadPolicy, RecentQueries, Selection
from kvsweep.compression.trial import check, trials
from kvsweep.harness import notebook, settings
from kvsweep.harness.models.loaded import LoadedModel
from kvsweep.messages.errors import UserError
from tests.compression.views import policy_of

SETTINGS: dict[str, Any] = {"keep_ratio": 0.3, "local_window": 8, "budget": 60}
CALLS: list[int] = []
PROBLEMS = set[str]()


def norms(view: CacheView) -> torch.Tensor:
    return torch.stack([keys.norm(dim=-1) for keys in view.keys])


def between_0_and_1(scores: torch.Tensor) -> torch.Tensor:
    least, most = scores.aminmax(dim=-1, keepdim=True)
    return (scores - least) / (most - least)


def counted(view: CacheView) -> torch.Tensor:
    CALLS.append(0)
    return norms(view) * (-1) ** len(CALLS)


def by_problems(view: CacheView) -> torch.Tensor:
    """As a policy that keeps the problems it has met."""
    PROBLEMS.add(view.problem_id)
    return norms(view) * (-1) ** len(PROBLEMS)


def scaled_in_place(view: CacheView) -> torch.Tensor:
    for keys in view.keys:
        keys /= 2
    return norms(view)


def decayed_in_place(view: CacheView) -> torch.Tensor:
    return view.signals[AttentionMass()].mul_(0.5)


WRONG: list[tuple[str, type[BudgetPolicy], Callable[[CacheView], Any], str]] = [
    ("one head for all", HeadPolicy, lambda view: norms(view)[:, :1], r"several_layers .* they are \[3, 1, 61\]"),
    ("NaN where rows are alike", HeadPolicy, lambda view: between_0_and_1(norms(view)), "ties .* scores are NaN"),
    ("booleans", HeadPolicy, lambda view: norms(view) > 1, "of real numbers: they are of torch.bool"),
    ("another device", HeadPolicy, lambda view: norms(view).to("meta"), "on cpu as the cache: they are on meta"),
    ("chance", HeadPolicy, lambda view: torch.rand_like(norms(view)), "two evictions of equal caches"),
    ("earlier calls", HeadPolicy, counted, "two evictions of equal caches"),
    ("earlier problems", HeadPolicy, by_problems, "two evictions of equal caches"),
    ("keys changed", HeadPolicy, scaled_in_place, "changes view.keys in place"),
    ("a signal changed", HeadPolicy, decayed_in_place, "changes view.signals in place"),
    ("an exception", HeadPolicy, lambda view: {}["decay"], r"views.py, line \d+ raises KeyError: 'decay'"),
    ("three layers", HeadPolicy, lambda view: norms(view)[2].expand_as(norms(view)), "one_layer .* raises IndexError"),
    ("row numbers as positions", BudgetPolicy, lambda view: norms(view)[0, 0][view.positions],
     "second_eviction .* raises IndexError"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "make", "said"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG])
def test_a_wrong_policy_is_named_in_one_sentence(kind, make, said):
    signals = (AttentionMass(),) if make is decayed_in_place else ()
    with pytest.raises(UserError, match=f"^policy=mine on the cache .*{said}") as raised:
        check(trials(policy_of(make, kind, signals, **SETTINGS)))
    assert "\n" not in str(raised.value)


FAULTS = {name: (kind, make, said) for name, kind, make, said in WRONG}
IN_A_SWEEP = ("chance", "a signal changed", "an exception")


@pytest.mark.parametrize("name", IN_A_SWEEP)
def test_decoding_names_the_fault_too(name, toy):
    """What a policy was never checked for shows at the first eviction."""
    kind, make, said = FAULTS[name]
    mine = policy_of(make, kind, (AttentionMass(),) if make is decayed_in_place else (), **SETTINGS)
    with pytest.raises(UserError, match=rf"^policy=mine, token \d+ of problem 0, draw 0: .*{said.split(' .*')[-1]}"):
        kvsweep.generate(toy, mine, ["1+1"], max_new_tokens=80)


@pytest.fixture(scope="module")
def toy() -> LoadedModel:
    return kvsweep.load_model("toy_qwen")


@dataclass(frozen=True, kw_only=True)
class All(BudgetPolicy):
    """It frees nothing, and promises that it does."""

    def scores(self, view: CacheView) -> Any:
        return view.positions

    def select(self, view: CacheView) -> Selection:
        return Selection(keep=torch.arange(view.length))


class Listed(All):
    def select(self, view):
        return Selection(keep=[1, 2])


@dataclass(frozen=True, kw_only=True)
class Tight(All):
    def capacity(self, question_length: int, max_new_tokens: int) -> int:
        return self.budget - 1


def test_rows_that_a_policy_did_not_promise_are_named(toy):
    mine = All(name="all", **SETTINGS)
    with pytest.raises(UserError, match=r"policy=all, .* it keeps 61 rows, and capacity\(\) returns 61: keep fewer"):
        kvsweep.generate(toy, mine, ["1+1"], max_new_tokens=80)
    tight = Tight(name="tight", **SETTINGS)
    with pytest.raises(UserError, match=r"policy=tight: capacity\(\d+, 80\) returns 59, and a text has 61 rows"):
        kvsweep.generate(toy, tight, ["1+1"], max_new_tokens=80)


def test_a_selection_of_too_many_rows_or_no_tensor_is_named():
    with pytest.raises(UserError, match="'list' object has no attribute"):
        check(trials(Listed(name="all", **SETTINGS)))
    with pytest.raises(UserError, match="keeps 61 rows where length_after promises 23"):
        check(trials(All(name="all", **SETTINGS)))


def test_a_size_that_the_policy_refuses_is_not_tried():
    @dataclass(frozen=True, kw_only=True)
    class Large(BudgetPolicy):
        def __post_init__(self):
            super().__post_init__()
            if self.budget < 50:
                raise ValueError("policy.budget is below 50.")

        def scores(self, view):
            return view.positions

    budgets = {trial.name: getattr(trial.policy, "budget", None) for trial in trials(Large(name="large", **SETTINGS))}
    assert budgets["tiny"] == 64


OF_A_MODEL = ("triattention", "oracle_answer", "oracle_far_max", "full")


@pytest.mark.parametrize("name", sorted(set(settings.choices("policy")) - {*OF_A_MODEL}))
@pytest.mark.slow_unless(rule=lambda name: name in ("dynts", "window"))
@pytest.mark.one_in(3)
def test_a_shipped_policy_has_no_fault(name):
    kept = check(trials(notebook.policy(name)))
    assert {"one_layer", "several_layers", "many_heads", "ties", "second_eviction"} <= kept.keys()


def test_recorded_attention_is_that_of_the_queries():
    one = trials(policy_of(norms, HeadPolicy, (AttentionMass(0.0), RecentQueries(1)), **SETTINGS))[1]
    view = one.view()
    [newest] = [value for signal, value in view.signals.items() if isinstance(signal, RecentQueries)]
    for layer, keys in enumerate(view.keys):
        logits = newest[layer].reshape(2, 2, -1) @ keys.transpose(-1, -2) * view.scaling
        expected = logits.softmax(dim=-1).sum(dim=1)
        torch.testing.assert_close(view.signals[AttentionMass(0.0)][layer], expected)


@pytest.mark.parametrize(
    ("name", "said"), [("full", "never evicts"), ("snapkvv", "did you mean snapkv"), ("triattention", "statistics")]
)
def test_what_cannot_be_tried_is_refused(name, said, kvsweep):
    ended = kvsweep("policy", "check", name)
    assert ended.code == 2
    assert said.lower() in ended.err.lower()
