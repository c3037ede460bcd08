"""Captured steps and a host that runs ahead: the same completions; and a step that a graph can hold."""

import time
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvsweep.compression.policies.dynts import DynTS
from kvsweep.compression.policies.h2o import H2O
from kvsweep.harness.decode.graphs import StepGraphs, bucket
from kvsweep.harness.decode.request import SamplingConfig, build_decoding
from kvsweep.harness.decode.sampling import cuts
from kvsweep.harness.settings import CONF, WEIGHTS
from kvsweep.harness.toy.tasks import TASKS, problems
from kvsweep.kernels import sampling
from kvsweep.kernels.sampling import inverse_cdf
from tests.harness.decode.fakes import FAKE_POLICIES, T1, FakeModel, ask, fake_requests, run, toy_model

ATEN = torch.ops.aten
ASKING = {ATEN.item.default, ATEN.is_nonzero.default, ATEN._local_scalar_dense.default, ATEN.nonzero.default}


class Tape(TorchDispatchMode):
    """A CUDA graph's work on a CPU: records each operation with the tensors it ran on, and runs them all again.

    Numbers that the host computed stay those of the capture, and asking a tensor for its value is refused.
    """

    def __init__(self):
        super().__init__()
        self.notes = []

    def __torch_dispatch__(self, operation, kinds, args=(), kwargs=None):
        assert operation not in ASKING, "the step asks the device"
        kwargs = kwargs or {}
        result = operation(*args, **kwargs)
        given_memory = {t.untyped_storage().data_ptr() for t in tensors((args, kwargs))}
        view = all(t.untyped_storage().data_ptr() in given_memory for t in tensors(result))
        if operation._schema.is_mutable or not view:
            self.notes.append((operation, args, kwargs, result))
        return result

    def replay(self):
        for operation, args, kwargs, before in self.notes:
            after = operation(*args, **kwargs)
            if not operation._schema.is_mutable:
                for old, new in zip(tensors(before), tensors(after), strict=True):
                    old.copy_(new)


def tensors(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


@dataclass
class Graph:
    """A capture, which on a GPU does nothing yet; here it was a step, and the first replay has none to do."""

    tape: Tape
    fresh: bool = True

    def replay(self):
        if not self.fresh:
            self.tape.replay()
        self.fresh = False


class TapedGraphs(StepGraphs):
    """Step graphs that need no GPU."""

    def _capture(self, step, rows):
        with Tape() as tape:
            logits = step(rows)
        return Graph(tape), logits


def ragged(engine):
    # The reference, over all rows of a slot: as many operations of the same sizes at every step.
    engine.cache.ragged = True


def captured(engine):
    ragged(engine)
    engine.graphs = TapedGraphs(engine.table.slots, engine.clock)


def ahead(engine):
    ragged(engine)
    engine.ahead = True


def both(engine):
    captured(engine)
    engine.ahead = True


@pytest.mark.parametrize("examples", [6, pytest.param(60, marks=pytest.mark.slow)])
def test_completions_are_the_same(examples):
    @settings(max_examples=examples)
    @given(
        seed=st.integers(0, 10**6),
        problems=st.integers(1, 7),
        policies=st.lists(st.sampled_from(FAKE_POLICIES), min_size=1, max_size=6, unique=True),
        slots=st.integers(1, 9),
        max_new_tokens=st.integers(1, 40),
        way=st.sampled_from([captured, ahead, both]),
    )
    def check(seed, problems, policies, slots, max_new_tokens, way):
        requests = fake_requests(seed, problems, policies)
        options = {"sampling": T1, "max_new_tokens": max_new_tokens, "slots": slots}
        plain, engine = run(FakeModel(), requests, prepare=ragged, **options)
        other, other_engine = run(FakeModel(), requests, prepare=way, **options)
        assert other == plain
        assert other_engine.clock.tokens == engine.clock.tokens

    check()


def test_graphs_are_captured_and_replayed():
    requests = fake_requests(0, 6, FAKE_POLICIES[:1])
    _, engine = run(FakeModel(), requests, sampling=T1, max_new_tokens=30, slots=6, prepare=both)
    graphs = engine.graphs._captured
    assert 6 in graphs
    assert not any(graph.fresh for graph, _ in graphs.values())


def test_no_second_is_counted_twice():
    class Slow(FakeModel):
        def logits(self, hidden, *_):
            time.sleep(0.01)
            return super().logits(hidden)

    _, engine = run(Slow(), fake_requests(0, 4, FAKE_POLICIES[:1]), max_new_tokens=9, slots=4, prepare=captured)
    assert engine.clock.host >= 0


def test_a_step_that_asks_the_device_cannot_be_captured():
    class Asking(FakeModel):
        def logits(self, hidden, *_):
            assert hidden.sum().item() == hidden.sum()
            return super().logits(hidden)

    with pytest.raises(AssertionError, match="asks the device"):
        run(Asking(), fake_requests(0, 4, FAKE_POLICIES[:1]), sampling=T1, max_new_tokens=9, slots=4, prepare=captured)


@pytest.mark.parametrize("name", ["dynts", "greedy", "qwen3", "r1"])
def test_drawing_from_a_large_vocabulary_asks_the_device_nothing(name, monkeypatch):
    # Only a CPU reads its own numbers before it draws.
    monkeypatch.setattr(sampling, "_edge_among_largest", lambda *_: None)
    file = OmegaConf.load(CONF / "decoding" / f"{name}.yaml")
    settings = build_decoding(OmegaConf.merge(file, {"max_new_tokens": 9})).sampling
    logits, numbers = torch.randn(3, 5000), torch.rand(3, dtype=torch.float64)
    with Tape():
        drawn = inverse_cdf(logits, numbers, **cuts(settings))
        torch.isin(drawn, torch.tensor([1, 2]))


def test_a_number_that_the_host_computed_is_that_of_the_capture():
    """The tape itself: else the tests above could not fail."""

    class Counting(FakeModel):
        count = 0

        def logits(self, hidden, *_):
            self.count += 1
            return super().logits(hidden) * self.count

    options = {"sampling": T1, "max_new_tokens": 30, "slots": 4}
    requests = fake_requests(0, 4, FAKE_POLICIES[:1])
    assert run(Counting(), requests, prepare=captured, **options)[0] != run(Counting(), requests, **options)[0]


def test_buckets_hold_the_live_slots_with_little_to_spare():
    sizes = [bucket(live, 48) for live in range(1, 49)]
    assert sorted(set(sizes)) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48]
    assert all(live <= size <= live * 1.5 for live, size in enumerate(sizes, start=1))
    assert bucket(33, 40) == 40


def embedded(name):
    """An embedded model, and requests for it with a branch whose policy records scores and one that records mass."""
    model = toy_model(name)
    rule = {"keep_ratio": 0.3, "local_window": 16, "budget": 48, "question": "on_top"}
    head = str(WEIGHTS / "predictors" / name / "far_max")
    policies = DynTS(name="dynts", predictor=head, **rule), H2O(name="h2o", **rule)
    return model, ask([model.dialogue.prompt_ids(problems(task)[0].question) for task in TASKS], *policies)


OPTIONS = {"sampling": SamplingConfig(temperature=0.6, top_p=0.95), "max_new_tokens": 120, "slots": 5}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["toy_qwen", "toy_llama"])
def test_an_embedded_models_step_can_be_captured(name):
    model, requests = embedded(name)
    assert model.spec.fusable
    plain, _ = run(model, requests, prepare=ragged, **OPTIONS)
    assert any(completion.evictions for completion in plain.values())
    assert run(model, requests, prepare=both, **OPTIONS)[0] == plain


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("name", ["toy_qwen", "toy_llama"])
def test_on_a_gpu_replayed_graphs_write_what_eager_steps_write(name):
    def eager(engine):
        engine.graphs, engine.ahead = None, False

    model, requests = embedded(name)
    plain, _ = run(model, requests, impl="triton", prepare=eager, **OPTIONS)
    replayed, engine = run(model, requests, impl="triton", **OPTIONS)
    assert engine.ahead
    assert engine.graphs._captured
    assert replayed == plain
