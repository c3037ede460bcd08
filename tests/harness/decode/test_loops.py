"""Stopping on a loop: every text ends where its own tokens first loop, whatever the batch."""

from dataclasses import replace

import pytest
from torch.nn import functional

from kvsweep.harness.decode import slots as slot_table
from kvsweep.harness.decode.engine import Engine
from kvsweep.harness.decode.request import DecodingConfig
from kvsweep.run_files import loops
from kvsweep.run_files.loops import find_loop
from tests.harness.decode.fakes import FAKE_POLICIES, T1, FakeModel, fake_requests

LIMIT = 60


class CountingModel(FakeModel):
    """Likes to count 1, 2, 3, 4, 1, ..., and now and then writes what its cache tells it."""

    def step_hidden(self, tokens, positions, cache):
        self.fed = tokens
        return super().step_hidden(tokens, positions, cache)

    def logits(self, hidden, linear=functional.linear):
        return super().logits(hidden) + 8 * functional.one_hot(self.fed % 4 + 1, self.vocabulary)


@pytest.fixture
def short_loops(monkeypatch):
    """Loops of three copies and eight tokens, which many of the model's texts come to."""
    for module in (loops, slot_table):
        monkeypatch.setattr(module, "LEAST_REPEATS", 3)
        monkeypatch.setattr(module, "LEAST_TOKENS", 8)


def write(requests, *, stop_on_loop, slots=3, ahead=False):
    model = CountingModel()
    decoding = DecodingConfig(name="test", max_new_tokens=LIMIT, sampling=T1, stop_on_loop=stop_on_loop)
    engine = Engine.sized_for(requests, model, decoding=decoding, seed=0, slots=slots)
    engine.ahead = ahead
    return {(cell_id, c.problem_id): c for cell_id, c in engine.generate(requests)}


def first_loop(ids):
    """The length at which a text first loops, by the search for loops at the end of each of its beginnings."""
    return next((n for n in range(1, len(ids) + 1) if find_loop(ids[:n])), None)


@pytest.mark.slow
def test_a_text_ends_where_it_first_loops(short_loops):
    requests = fake_requests(4, 6, FAKE_POLICIES)
    whole = write(requests, stop_on_loop=False, slots=16)
    found = write(requests, stop_on_loop=True)
    looped = 0
    for key, text in whole.items():
        end = first_loop(text.token_ids)
        if end is None or end == text.num_tokens:
            assert found[key] == text
            continue
        looped += 1
        assert found[key].stop_reason == "loop"
        assert found[key].token_ids == text.token_ids[:end]
        assert found[key].evictions == [e for e in text.evictions if e.step < end - 1]
    assert looped > 10
    for way in ({"slots": 1}, {"slots": 16}, {"slots": 7, "ahead": True}):
        assert write(requests, stop_on_loop=True, **way) == found
    # A resumed grid gives the shared beginning of each text.
    forced = [replace(r, forced=tuple(found[r.branches[0].cell_id, r.problem_id].shared_ids)) for r in requests]
    assert write(forced, stop_on_loop=True, slots=16) == found
