"""The random numbers are what they claim to be, and a draw follows its distribution whatever stands beside it."""

import math
from random import Random
from typing import get_args

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from kvsweep.harness.decode.request import SamplingConfig, SamplingOrder, build_decoding
from kvsweep.harness.decode.sampling import cuts, sequence_key, uniform
from kvsweep.harness.settings import build
from kvsweep.kernels import sampling
from kvsweep.kernels.sampling import inverse_cdf
from kvsweep.messages.errors import UserError

MASK = (1 << 64) - 1
LARGEST = 1 - 2.0**-53
SETTINGS = [
    (temperature, top_p, top_k, order)
    for temperature in (0.6, 1.3)
    for top_p in (0.3, 0.95, 1.0)
    for top_k in (0, 1, 7, 1000)
    for order in get_args(SamplingOrder)
]


def sample(logits: Tensor, uniforms: Tensor, settings: SamplingConfig) -> Tensor:
    """A token per row of logits [rows, vocabulary], drawn with uniforms [rows] as these settings say."""
    return inverse_cdf(logits, uniforms, **cuts(settings))


def config(
    temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0, order: SamplingOrder = "top_k_then_top_p"
) -> SamplingConfig:
    return SamplingConfig(temperature=temperature, top_p=top_p, top_k=top_k, order=order)


def doubles(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


# --- Uniform numbers ----------------------------------------------------------------------------------------


def splitmix64(state: int) -> int:
    """One output of the published generator, on unsigned integers; `state` is the one before it."""
    z = (state + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def test_the_reference_gives_the_generators_known_first_outputs():
    # Java's SplittableRandom(1234567), as Rosetta Code lists it.
    outputs = [splitmix64((1234567 + i * 0x9E3779B97F4A7C15) & MASK) for i in range(2)]
    assert outputs == [6457827717110365317, 3203168211198807973]


def test_uniform_is_splitmix64():
    keys = [0, 1, -1, 2**63 - 1, -(2**63), *(Random(0).getrandbits(64) - 2**63 for _ in range(200))]
    counters = [0, 1, 2, 63, 10**6, 2**40]
    drawn = uniform(torch.tensor(keys)[:, None], torch.tensor(counters))
    states = [[(key + counter * 0x9E3779B97F4A7C15) & MASK for counter in counters] for key in keys]
    expected = [[(splitmix64(state) >> 11) / 2**53 for state in row] for row in states]
    assert drawn.tolist() == expected


def test_uniform_takes_a_plain_integer_for_a_key():
    counters = torch.arange(10)
    key = sequence_key(0, "p", 1)
    assert torch.equal(uniform(key, counters), uniform(torch.tensor([key]), counters))


def test_uniform_is_uniform():
    numbers = uniform(sequence_key(0, "p", 0), torch.arange(100_000)).numpy()
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert stats.kstest(numbers, "uniform").pvalue > 1e-3
    keys = torch.tensor([sequence_key(0, f"p{i}", 0) for i in range(20_000)])
    assert stats.kstest(uniform(keys, torch.tensor(77)).numpy(), "uniform").pvalue > 1e-3


def test_neighbours_are_independent():
    counters = torch.arange(100_000)
    here = uniform(sequence_key(0, "p", 0), counters).numpy()
    others = {
        "the next position": uniform(sequence_key(0, "p", 0), counters + 1),
        "the next draw": uniform(sequence_key(0, "p", 1), counters),
        "the next problem": uniform(sequence_key(0, "q", 0), counters),
        "the next seed": uniform(sequence_key(1, "p", 0), counters),
        "the policy's numbers": uniform(sequence_key(0, "p", 0, "select", 0), counters),
        "the next key": uniform(sequence_key(0, "p", 0) + 1, counters),
    }
    for name, there in others.items():
        assert abs(np.corrcoef(here, there.numpy())[0, 1]) < 5 / math.sqrt(len(counters)), name


def test_sequence_key_is_pinned_and_tells_its_parts_apart():
    assert sequence_key(0, "p", 0) == PINNED_KEY
    keys = {sequence_key(*parts) for parts in [(0, "p", 0), (0, "p", 1), (1, "p", 0), (0, "p0"), (0, "p", "0", 0)]}
    assert len(keys) == 5
    assert all(-(2**63) <= key < 2**63 for key in keys)


PINNED_KEY = 5212049305060496540


# --- Draws --------------------------------------------------------------------------------------------------


def kept_reference(logits: list[float], settings: SamplingConfig) -> dict[int, float]:
    """Token id to unnormalised probability, in the vocabulary's order: the two cuts one after the other."""
    peak = max(logits)
    weights = {i: math.exp((x - peak) / settings.temperature) for i, x in enumerate(logits)}

    def normal(kept):
        total = math.fsum(kept.values())
        return {i: w / total for i, w in kept.items()}

    def cut_k(kept):
        best = sorted(kept, key=lambda i: -kept[i])[: settings.top_k or None]
        return {i: kept[i] for i in best}

    def cut_p(kept):
        chosen, mass = {}, 0.0
        for i in sorted(kept, key=lambda i: -kept[i]):
            if mass >= settings.top_p:
                break
            chosen[i] = kept[i]
            mass += kept[i]
        return chosen

    cuts = [cut_k, cut_p] if settings.order == "top_k_then_top_p" else [cut_p, cut_k]
    kept = normal(weights)
    for cut in cuts:
        kept = normal(cut(kept))
    return dict(sorted(kept.items()))


def draw_reference(kept: dict[int, float], number: float) -> int:
    below = 0.0
    for token, probability in kept.items():
        below += probability
        if number < below:
            return token
    return max(kept)


def random_logits(rows: int, vocabulary: int, seed: int, spread: float = 2.0) -> Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * spread


@pytest.mark.parametrize(("temperature", "top_p", "top_k", "order"), SETTINGS)
@pytest.mark.parametrize(("vocabulary", "spread"), [(29, 2.0), (3000, 2.0), (3000, 9.0)])
def test_sample_equals_the_reference(vocabulary, spread, temperature, top_p, top_k, order):
    settings, rows = config(temperature, top_p, top_k, order), 60 if vocabulary < 100 else 8
    logits = random_logits(rows, vocabulary, seed=top_k, spread=spread)
    numbers = uniform(7, torch.arange(rows))
    expected = [
        draw_reference(kept_reference(row, settings), number)
        for row, number in zip(logits.tolist(), numbers.tolist(), strict=True)
    ]
    assert sample(logits, numbers, settings).tolist() == expected


@pytest.mark.slow
def test_equal_tokens_at_the_edge_of_a_wide_nucleus_are_kept_together():
    logits = torch.full((1, 4000), -1e4)
    logits[0, 1000], logits[0, 2000:2010] = 1.0, 0.0  # .21 for the first, .08 for each of the ten
    kept = {sample(logits, doubles(u / 500), config(top_p=0.25)).item() for u in range(500)}
    assert kept == {1000, *range(2000, 2010)}
    assert {sample(logits, doubles(u / 500), config(top_p=0.2)).item() for u in range(500)} == {1000}


@pytest.mark.parametrize(("spread", "top_p"), [(9.0, 0.5), (9.0, 0.95), (14.0, 0.999), (0.1, 0.95)])
def test_the_edge_of_the_nucleus_is_that_of_the_search(monkeypatch, spread, top_p):
    logits = random_logits(6, 3000, seed=4, spread=spread)
    logits[1:3] = logits[1:3].round()  # equal probabilities at the edge
    probabilities = logits.softmax(dim=-1)
    among_largest = sampling._edge_among_largest(probabilities, top_p)
    assert (among_largest is None) == (spread < 1)  # such a nucleus has more tokens than are looked at
    edge = sampling._nucleus_edge(probabilities, top_p)
    monkeypatch.setattr(sampling, "_edge_among_largest", lambda *_: None)
    assert torch.equal(edge, sampling._nucleus_edge(probabilities, top_p))


def test_greedy_is_the_most_likely_token():
    logits = random_logits(50, 31, seed=3)
    assert torch.equal(sample(logits, uniform(0, torch.arange(50)), config(temperature=0.0)), logits.argmax(-1))


@pytest.mark.parametrize(("temperature", "top_p", "top_k", "order"), SETTINGS)
def test_no_number_draws_a_token_that_was_cut(temperature, top_p, top_k, order):
    settings = config(temperature, top_p, top_k, order)
    logits = random_logits(40, 29, seed=11)
    # Tokens that can never be drawn, at both ends of the vocabulary.
    logits[:, [0, 1, 27, 28]] = -torch.inf
    for number in (0.0, 2.0**-53, 0.5, LARGEST):
        drawn = sample(logits, torch.full((40,), number, dtype=torch.float64), settings).tolist()
        for row, token in zip(logits.tolist(), drawn, strict=True):
            assert token in {i for i, p in kept_reference(row, settings).items() if p > 0}


def test_rounding_noise_does_not_change_a_draw():
    """Two tokens of nearly the same probability swap ranks under noise, and must not swap places."""
    rows = 20_000
    logits = random_logits(1, 50, seed=17).repeat(rows, 1)
    logits[:, 31] = logits[:, 8] = logits.max()
    noisy = logits + torch.randn(logits.shape, generator=torch.Generator().manual_seed(1)) * 1e-6
    assert ((noisy[:, 8] > noisy[:, 31]) != (logits[:, 8] > logits[:, 31])).float().mean() > 0.2
    numbers = uniform(3, torch.arange(rows))
    for settings in (config(0.6), config(0.6, 0.95), config(0.6, 0.95, 20), config(0.6, 0.95, 20, "top_p_then_top_k")):
        changed = sample(logits, numbers, settings) != sample(noisy, numbers, settings)
        assert changed.sum() <= 3, settings


def test_half_precision_logits_are_drawn_in_full_precision():
    logits = random_logits(200, 40, seed=19).bfloat16()
    numbers, settings = uniform(0, torch.arange(200)), config(0.6, 0.95)
    assert torch.equal(sample(logits, numbers, settings), sample(logits.float(), numbers, settings))


# --- Settings -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("temperature", value) for value in (-1e-9, 1e-40, math.nan, math.inf)),
        *(("top_p", value) for value in (0.0, 1.0000001, math.nan)),
        ("top_k", -1),
        ("order", "top_k"),
        ("max_new_tokens", 0),
    ],
)
def test_a_setting_out_of_range(field, value):
    with pytest.raises(UserError, match=rf"decoding\.{field}={value}"):
        build_decoding({"name": "d", "max_new_tokens": 9, "temperature": 1.0, field: value})


def test_settings_at_their_ends_are_allowed():
    build(SamplingConfig, "decoding", {"temperature": 0.0, "top_p": 1.0, "top_k": 0})
    build(SamplingConfig, "decoding", {"temperature": 100.0, "top_p": 1e-9, "top_k": 10**9})
