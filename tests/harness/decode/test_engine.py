"""The engine against transformers' own generation, against a slow reference that evicts, and against itself."""

import itertools
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AttentionInterface, AutoModelForCausalLM, DynamicCache, LlamaConfig, Qwen2Config

from kvsweep.compression.policies.h2o import H2O
from kvsweep.compression.policies.knorm import KNorm
from kvsweep.compression.policies.lagkv import LagKV
from kvsweep.compression.policies.lazyeviction import LazyEviction
from kvsweep.compression.policies.raas import RaaS
from kvsweep.compression.policies.random import Random
from kvsweep.compression.policies.rkv import RKV
from kvsweep.compression.policies.snapkv import SnapKV
from kvsweep.compression.policies.window import Window
from kvsweep.compression.policy import AttentionMass, CacheView, LastUse, RecentQueries, RowMemory
from kvsweep.compression.recorders import ImportancePredictor, load_predictor, save_predictor
from kvsweep.harness.decode.engine import Engine
from kvsweep.harness.decode.request import DecodingConfig, SamplingConfig, is_untouched
from kvsweep.harness.decode.sampling import sequence_key, uniforms_of_rows
from kvsweep.harness.settings import WEIGHTS
from kvsweep.harness.toy.tasks import TASKS, problems
from kvsweep.run_files.row_types import held_percents
from tests.compression.test_policies import MATRIX, QUESTIONS, QUESTIONS_OF, write_statistics
from tests.harness.decode.fakes import (
    EOS,
    FAKE_POLICIES,
    FULL,
    GREEDY,
    NEW_TOKENS,
    T1,
    FakeModel,
    ask,
    fake_requests,
    in_slots,
    random_network,
    run,
    toy_model,
)

QWEN = Qwen2Config(
    hidden_size=112,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=14,
    num_key_value_heads=2,
    vocab_size=97,
    eos_token_id=EOS,
)
LLAMA = LlamaConfig(
    hidden_size=96,
    intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=8,
    num_key_value_heads=2,
    vocab_size=97,
    eos_token_id=EOS,
)


@pytest.fixture(scope="module", params=[QWEN, LLAMA], ids=["qwen2-group7", "llama-group4"])
def networks(request):
    """The same weights twice: one left as transformers made it, one for the engine."""
    return random_network(request.param), in_slots(random_network(request.param))


def prompts(*lengths):
    generator = torch.Generator().manual_seed(7)
    return [tuple(torch.randint(0, 90, (n,), generator=generator).tolist()) for n in lengths]


@pytest.mark.core
@pytest.mark.parametrize(
    ("name", "every"),
    [("toy_qwen", 4), *(pytest.param(name, 1, marks=pytest.mark.slow) for name in ("toy_qwen", "toy_llama"))],
)
def test_full_cache_of_an_embedded_model_equals_transformers_generate(name, every):
    model = toy_model(name)
    stock = AutoModelForCausalLM.from_pretrained(WEIGHTS / name, dtype=torch.float32).eval()
    texts = [model.dialogue.prompt_ids(problems(task)[i].question) for i, task in enumerate(TASKS)]
    texts = [*texts, texts[0][:1], texts[1][:9]][::every]
    completions, _ = run(model, ask(texts, FULL), max_new_tokens=300)
    how = {"max_new_tokens": 300, "do_sample": False, "pad_token_id": 0}
    for i, ids in enumerate(texts):
        expected = stock.generate(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), **how)
        assert completions["0", f"p{i}", 0].token_ids == expected[0, len(ids) :].tolist()


class Spy:
    """Plain attention over whatever a DynamicCache holds, which keeps every query and what each row received."""

    def __init__(self, config, signals):
        self.layers, self.kv_heads = config.num_hidden_layers, config.num_key_value_heads
        self.queries = [[] for _ in range(self.layers)]
        self.decay = next((s.decay for s in signals if isinstance(s, AttentionMass)), 1.0)
        self.threshold = next((s.threshold for s in signals if isinstance(s, LastUse)), 1.0)
        self.asked = [0] * self.layers
        # Per row: attention received, last use, longest interval between two uses, what a policy wrote.
        self.columns = [torch.zeros(4, self.kv_heads, 0) for _ in range(self.layers)]

    def attend(self, module, query, key, value, attention_mask, *, scaling, **_):
        layer, group = module.layer_idx, query.shape[1] // key.shape[1]
        self.scaling = scaling
        self.queries[layer].append(query[0])
        rows, columns = query.shape[2], key.shape[2]
        hidden = torch.arange(columns) > torch.arange(columns - rows, columns)[:, None]
        logits = query @ key.repeat_interleave(group, dim=1).transpose(-1, -2) * scaling
        weights = logits.masked_fill(hidden, float("-inf")).softmax(-1)
        for row, received in enumerate(weights[0].unflatten(0, (self.kv_heads, group)).sum(dim=1).unbind(dim=1)):
            self.count(layer, received[:, : columns - rows + row + 1], in_prefill=rows > 1 and row < rows - 1)
        return (weights @ value.repeat_interleave(group, dim=1)).transpose(1, 2), None

    def count(self, layer, received, *, in_prefill):
        """One query's attention, of all rows up to its own, which is new."""
        now = self.asked[layer]
        self.asked[layer] += 1
        new = torch.tensor([0, now - 1, 0, torch.nan]).expand(self.kv_heads, 1, 4).movedim(-1, 0)
        mass, last, interval, memory = torch.cat([self.columns[layer], new], dim=-1)
        used = received >= self.threshold
        interval = torch.where(used, torch.maximum(interval, now - last), interval)
        last = torch.where(used, now, last)
        if in_prefill:  # which counts as one use of all rows, by its last query
            last, interval = torch.full_like(last, now), torch.zeros_like(interval)
        self.columns[layer] = torch.stack([mass * self.decay + received, last, interval, memory])

    def evict(self, keep, written):
        for layer, columns in enumerate(self.columns):
            if written:
                [values] = written.values()
                columns[3] = values[layer]
            self.columns[layer] = columns.gather(-1, keep[layer].expand(4, -1, -1))

    def signal(self, signal, scores):
        mass, last, interval, memory = torch.stack(self.columns, dim=1)
        if isinstance(signal, AttentionMass):
            return mass
        if isinstance(signal, LastUse):
            return torch.stack([last, interval])
        if isinstance(signal, RowMemory):
            return memory
        if isinstance(signal, RecentQueries):
            return torch.stack([torch.cat(q, dim=1)[:, -signal.window :] for q in self.queries])
        return scores


@torch.inference_mode()
def decode_slowly(network, model, ids, policy, *, max_new_tokens, seed, problem_id):
    """One sequence over a DynamicCache that is gathered at each eviction, positions passed by hand."""
    spy, cache, text, evictions = Spy(network.config, policy.signals), DynamicCache(), list(ids), []
    AttentionInterface.register("spy", spy.attend)
    network.set_attn_implementation("spy")
    score = load_predictor(Path(policy.predictor)) if hasattr(policy, "predictor") else lambda h: h[..., 0]
    positions = torch.zeros(spy.layers, spy.kv_heads, 0, dtype=torch.int64)
    scores, feed = torch.zeros(0), list(ids)
    [closes] = model.tokenizer.encode(model.config.think_end, add_special_tokens=False)
    while True:
        before, start = positions.shape[-1], len(text) - len(feed)
        new = torch.arange(start, len(text))
        inputs = {"input_ids": torch.tensor([feed]), "position_ids": new[None], "past_key_values": cache}
        output = network(**inputs, output_hidden_states=True)
        positions = torch.cat([positions, new.expand(spy.layers, spy.kv_heads, -1)], dim=-1)
        scores = torch.cat([scores, score(output.hidden_states[-1][0])])
        if before >= (policy.trigger(len(ids), len(evictions)) or 10**9) and len(text) > len(ids):
            stream = sequence_key(seed, problem_id, 0, "select", len(evictions))
            own = positions if policy.per_head else positions[0, 0]
            answer = text[len(ids) :]
            view = CacheView(
                problem_id=problem_id,
                draw=0,
                text_ids=torch.tensor(text),
                positions=own,
                token_ids=torch.tensor(text)[own],
                separating=lambda own=own, text=text: model.separators[torch.tensor(text)[own]],
                question_length=len(ids),
                answer_start=len(ids) + answer.index(closes) if closes in answer else None,
                keys=[layer.keys[0] for layer in cache.layers],
                values=[layer.values[0] for layer in cache.layers],
                scaling=spy.scaling,
                signals={signal: spy.signal(signal, scores) for signal in policy.signals},
                uniform=lambda stream=stream, own=own: uniforms_of_rows(stream, own),
                evictions=len(evictions),
            )
            selection = policy.select(view)
            keep = selection.keep
            evictions.append((len(text) - len(ids), positions.shape[-1], keep.shape[-1]))
            keep = keep.expand(spy.layers, spy.kv_heads, -1)
            positions = positions.gather(-1, keep)
            scores = scores[keep[0, 0]]
            spy.evict(keep, selection.written)
            for index, layer in enumerate(cache.layers):
                rows = keep[index][None, :, :, None].expand(-1, -1, -1, layer.keys.shape[-1])
                layer.keys, layer.values = layer.keys.gather(2, rows), layer.values.gather(2, rows)
        token = int(output.logits[0, -1].argmax())
        text.append(token)
        feed = [token]
        if token in model.stop_ids or len(text) - len(ids) == max_new_tokens:
            return text[len(ids) :], evictions


@dataclass(frozen=True, kw_only=True)
class AgedKNorm(KNorm):
    """A token has one norm in the first layer wherever it stands: here its place decides, and not the rounding."""

    def scores(self, view):
        return super().scores(view) + 1e-3 * view.positions


RULE = {"keep_ratio": 0.3, "local_window": 6, "budget": 24}
# Settings other than those of the brute force, since fewer rows compete.
OTHERWISE = {
    "knorm": (AgedKNorm, {}),
    "lagkv": (LagKV, {"sinks": 2, "lag": 5}),
    "raas": (RaaS, {"threshold": 0.05}),
    "lazyeviction": (LazyEviction, {"threshold": 0.05}),
}
ALIKE = ("full", "dynts_", "oracle", "rkv_paper", "lagkv_16")  # without evictions, or of another's class
POLICIES = {name: OTHERWISE.get(name, row[:2]) for name, row in MATRIX.items() if not name.startswith(ALIKE)}


def make_policy(name, predictor, **rule):
    cls, own = POLICIES[name]
    if "predictor" in {f.name for f in fields(cls)}:
        own = {**own, "predictor": str(predictor)}
    if "statistics" in {f.name for f in fields(cls)}:
        own = {**own, "statistics": str(predictor / "statistics.safetensors")}
    return cls(name=name, **own, **rule)


ASKED = [(QWEN, "free"), (LLAMA, "free"), (QWEN, "pinned"), (LLAMA, "on_top")]


def is_its_turn(networks, question, name):
    """Every eleventh policy with one of the settings, all of which have their turn."""
    place = 0 if name == "no_question" else list(POLICIES).index(name)
    return place % 11 == 0 and (networks, question) == ASKED[place % len(ASKED)]


@pytest.mark.parametrize("name", list(POLICIES))
@pytest.mark.parametrize(
    ("networks", "question"),
    ASKED,
    indirect=["networks"],
    ids=["qwen2-free", "llama-free", "qwen2-pinned", "llama-on_top"],
)
@pytest.mark.slow_unless(rule=is_its_turn)
@pytest.mark.one_in(3)  # each policy once, each setting with every fourth
def test_eviction_equals_a_gathered_dynamic_cache(networks, name, question, tmp_path):
    if question not in QUESTIONS_OF.get(name, QUESTIONS):
        pytest.skip(f"{name} is about its own treatment of the question")
    stock, model = networks
    torch.manual_seed(3)
    save_predictor(ImportancePredictor(stock.config.hidden_size, (16,)), tmp_path, {})
    shape = model.shape
    pairs = {"pairs": shape.head_dim // 2}
    write_statistics(str(tmp_path / "statistics.safetensors"), layers=shape.layers, q_heads=shape.q_heads, **pairs)
    policy = make_policy(name, tmp_path, question=question, **RULE)
    short, _, *others = prompts(7, 23, 1, 40)
    texts = [short, *others]
    completions, engine = run(model, ask(texts, policy), seed=5)
    for i, ids in enumerate(texts):
        options = {"max_new_tokens": NEW_TOKENS, "seed": 5, "problem_id": f"p{i}"}
        expected, evictions = decode_slowly(stock, model, ids, policy, **options)
        completion = completions["0", f"p{i}", 0]
        assert completion.token_ids == expected
        found = [(e.step, e.length_before, e.length_after) for e in completion.evictions]
        # Left out: an eviction that frees nothing, and one after the last token's step, which no token sees.
        freeing = [e for e in evictions if e[1] > e[2]]
        assert found == [e for e in freeing if e[0] < len(expected) - 1]
        assert completion.peak_length <= engine.cache.capacity
        assert len(found) > 1


def test_eviction_fires_when_the_step_before_reached_the_budget(networks):
    _, model = networks
    policy = Window(name="window", keep_ratio=0.5, local_window=4, budget=20)
    completion = run(model, ask(prompts(8), policy))[0]["0", "p0", 0]
    first = completion.evictions[0]
    # The question's 8 and 13 generated tokens make 21 = budget + 1 rows; 4 + int(17 * 0.5) = 12 stay.
    assert (first.step, first.length_before, first.length_after) == (13, 21, 12)
    assert all(e.length_before == 21 for e in completion.evictions)
    assert [e.step for e in completion.evictions] == list(range(13, completion.num_tokens - 1, 9))
    assert completion.peak_length == 21


class Joined(RKV):
    """Evicts the same rows of all heads, except at the first eviction."""

    def select(self, view):
        selection = super().select(view)
        return replace(selection, keep=selection.keep[0, 0]) if view.evictions else selection


def test_rows_say_where_they_fork_and_what_is_held(networks):
    _, model = networks
    rule = {"keep_ratio": 0.3, "local_window": 6, "budget": 24}
    policies = [Window(name="window", **rule), Joined(name="rkv", observation_window=4, **rule), FULL]
    completions, _ = run(model, ask(prompts(7, 40), *policies))
    for (cell, _, _), row in completions.items():
        assert row.fork_step == (row.evictions[0].step if row.evictions else None)
        assert (row.fork_step is None) == (cell == "2")
        gone = set()
        for eviction in row.evictions:
            percents = held_percents(eviction.held)
            assert len(percents) == row.prompt_tokens + eviction.step
            assert set(percents[-4:]) == {100}
            assert set(percents) <= ({0, 100} if cell == "0" else set(range(0, 101, 10)))
            assert not {p for p in gone if percents[p]}, "an evicted position came back"
            gone = {p for p, percent in enumerate(percents) if not percent}
            if cell == "0":
                assert percents.count(100) == eviction.length_after
            else:
                # Rounded shares: each of at most five points off.
                assert abs(sum(percents) / 100 - eviction.length_after) <= 0.05 * len(percents)
                assert set(percents) - {0, 100}


def test_live_slots_hold_no_more_than_the_capacity_whatever_the_length(networks):
    _, model = networks
    policy = Random(name="random", keep_ratio=0.3, local_window=4, budget=16)
    _, short = run(model, ask(prompts(5), policy), max_new_tokens=20)
    _, long = run(model, ask(prompts(5), policy), max_new_tokens=80)
    assert short.cache.kv_bytes == long.cache.kv_bytes


class BrokenError(RuntimeError):
    """An error that a model raises in the middle of a step."""


@dataclass
class BreakingModel(FakeModel):
    """Raises at its call number `breaks_at`, after the cache has taken in the step's rows."""

    breaks_at: int | None = None
    calls: int = 0

    def step_hidden(self, *args):
        self.calls += 1
        hidden = super().step_hidden(*args)
        if self.calls == self.breaks_at:
            raise BrokenError
        return hidden


@pytest.mark.core
@pytest.mark.parametrize("examples", [15, pytest.param(150, marks=pytest.mark.release)])
def test_grid_in_one_batch_equals_one_cell_at_a_time(examples):
    """Any lengths, budgets, slots: ends, loses nothing, doubles nothing, and every completion is what it is alone."""

    @settings(max_examples=examples)
    @given(
        seed=st.integers(0, 10**6),
        problems=st.integers(1, 7),
        policies=st.lists(st.sampled_from(FAKE_POLICIES), min_size=1, max_size=6, unique=True),
        slots=st.integers(1, 9),
        max_new_tokens=st.integers(1, 40),
    )
    def check(seed, problems, policies, slots, max_new_tokens):
        requests = fake_requests(seed, problems, policies)
        wanted = Counter((b.cell_id, r.problem_id, 0) for r in requests for b in r.branches)
        options = {"sampling": T1, "max_new_tokens": max_new_tokens}
        together, engine = run(FakeModel(), requests, slots=slots, **options)
        assert Counter(together.keys()) == wanted
        alone, _ = run(FakeModel(), requests, slots=1, **options)
        assert together == alone
        if slots > 1:
            assert engine.clock.tokens == tokens_of_trunks_and_branches(requests, together)
        for request in requests:
            rows = [(b.policy, together[b.cell_id, request.problem_id, 0]) for b in request.branches]
            for (_, one), (policy, other) in itertools.product(rows, rows):
                if is_untouched(one, policy):
                    assert other == one
                elif getattr(policy, "keep_ratio", 1) < 1 and len(request.prompt_ids) < policy.budget:
                    assert one.evictions or other.evictions

    check()


@pytest.mark.slow
@pytest.mark.parametrize("examples", [20, pytest.param(75, marks=pytest.mark.slow)])
def test_a_killed_grid_resumes_to_the_same_completions(examples):
    """Killed or broken twice, at any moment, each time with other slots: nothing lost, doubled or changed."""

    @settings(max_examples=examples)
    @given(
        seed=st.integers(0, 10**6),
        problems=st.integers(1, 6),
        policies=st.lists(st.sampled_from(FAKE_POLICIES), min_size=1, max_size=6, unique=True),
        slots=st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9)),
        kills=st.tuples(st.integers(0, 12), st.integers(0, 12)),
        failures=st.tuples(st.integers(1, 80), st.integers(1, 80)),
        max_new_tokens=st.integers(1, 40),
    )
    def check(seed, problems, policies, slots, kills, failures, max_new_tokens):
        requests = fake_requests(seed, problems, policies)
        options = {"sampling": T1, "max_new_tokens": max_new_tokens}
        whole, _ = run(FakeModel(), requests, slots=slots[0], **options)
        stored = {}
        for count, kill, failure in zip(slots, (*kills, None), (*failures, None), strict=True):
            rest = [r for r in (without(r, stored) for r in requests) if r.branches]
            if not rest:
                break
            decoding = DecodingConfig(name="test", max_new_tokens=max_new_tokens, sampling=T1)
            engine = Engine.sized_for(rest, BreakingModel(breaks_at=failure), decoding=decoding, seed=0, slots=count)
            with suppress(BrokenError):
                for cell_id, completion in itertools.islice(engine.generate(rest), kill):
                    assert (cell_id, completion.problem_id, 0) not in stored
                    stored[cell_id, completion.problem_id, 0] = completion
        assert stored == whole

    check()


def without(request, stored):
    """The rest of a request, with the tokens that its stored completions share with it."""
    rows = {cell_id: row for (cell_id, problem_id, _), row in stored.items() if problem_id == request.problem_id}
    left = tuple(b for b in request.branches if b.cell_id not in rows)
    known = max((row.shared_ids for row in rows.values()), key=len, default=[])
    return replace(request, branches=left, forced=tuple(known))


def test_forced_tokens_are_fed_and_end_with_the_first_eviction(networks):
    _, model = networks
    policy = Window(name="window", keep_ratio=0.5, local_window=4, budget=20)
    forced = tuple(prompts(30)[0])
    [request] = ask(prompts(8), FULL, policy)
    completions, _ = run(model, [replace(request, forced=forced)])
    full, window = completions["0", "p0", 0], completions["1", "p0", 0]
    assert full.token_ids[:30] == list(forced)
    assert window.shared_ids == list(forced[: window.fork_step + 1])
    assert window.token_ids[:30] != list(forced)


def tokens_of_trunks_and_branches(requests, completions):
    """Tokens that a forked grid must decode, from its completions: a shared prefix once, then each branch's rest."""
    total = 0
    for request in requests:
        mine = {b.cell_id: completions[b.cell_id, request.problem_id, 0] for b in request.branches}
        starts = []
        for branch in request.branches:
            trigger = branch.policy.trigger(len(request.prompt_ids))
            length = mine[branch.cell_id].num_tokens
            # A trunk feeds its last prompt token with its first step and forks after sampling at the trigger's step.
            reached = length if trigger is None else max(trigger + 2 - len(request.prompt_ids), 2)
            starts.append(min(reached, length))
        trunk = max(starts)
        total += trunk + sum(c.num_tokens - s for c, s in zip(mine.values(), starts, strict=True))
    return total


@pytest.mark.slow
def test_questions_in_chunks_or_side_by_side_give_the_same_completions(networks):
    _, model = networks
    policies = [
        H2O(name="h2o", keep_ratio=0.4, local_window=6, budget=30),
        SnapKV(name="snapkv", keep_ratio=0.5, local_window=8, budget=28, observation_window=4),
        FULL,
    ]
    requests = ask(prompts(1, 23, 2, 17, 40, 9, 33), *policies, draws=2)
    whole, _ = run(model, requests, slots=6)
    for step_tokens in (1, 5, 16, 64):
        assert run(model, requests, slots=6, step_tokens=step_tokens)[0] == whole


def test_a_long_question_does_not_stop_the_others(networks):
    _, model = networks
    [short, long] = ask(prompts(4, 60), FULL)
    decoding = DecodingConfig(name="test", max_new_tokens=40, sampling=GREEDY)
    engine = Engine.sized_for([short, long], model, decoding=decoding, seed=0, slots=2)
    engine.prefiller.step_tokens = 6
    generator = engine.generate([short, long])
    list(itertools.islice(generator, 1))
    assert engine.clock.steps == 40
    list(generator)
    # The long question took ten calls; meanwhile the short one wrote, and the long one then overlapped with it.
    assert 49 <= engine.clock.steps <= 51


def test_another_seed_or_draw_writes_another_text(networks):
    _, model = networks
    sampling = SamplingConfig(temperature=1.0)
    requests = ask(prompts(9), FULL, draws=3)
    texts = [c.token_ids for c in run(model, requests, sampling=sampling)[0].values()]
    texts += [c.token_ids for c in run(model, requests, sampling=sampling, seed=1)[0].values()]
    assert len({tuple(t) for t in texts}) == 6
