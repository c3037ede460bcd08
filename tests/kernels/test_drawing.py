"""The drawing kernel in the interpreter beside the reference, which tests/harness/decode/test_sampling.py holds."""

import itertools

import pytest
import torch
from torch import Tensor

from kvsweep.kernels import sampling
from tests.kernels.interpreter import DTYPES, INTERPRETED

pytest.importorskip("triton")
inside = pytest.mark.skipif(not INTERPRETED, reason="runs in the process that test_triton.py starts")
SETTINGS = [
    {"temperature": temperature, "top_p": top_p, "top_k": top_k, "k_first": k_first}
    for temperature, (top_p, top_k, k_first) in zip(
        itertools.cycle((0.6, 1.3)),
        ((0.95, 0, True), (0.3, 0, False), (0.95, 20, False), (0.95, 20, True), (0.3, 7, True), (1.0, 1, True),
         (1.0, 20, False), (1.0, 0, True)),
    )
]  # fmt: skip


def logits_of(rows: int, vocabulary: int, dtype: torch.dtype, spread: float = 3.0) -> Tensor:
    """Random logits in a buffer that is wider, and NaN beyond them."""
    wide = torch.full((rows, vocabulary + 7), torch.nan, dtype=dtype)
    wide[:, :vocabulary] = spread * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(vocabulary))
    return wide[:, :vocabulary]


def numbers_of(rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator), torch.arange(rows)


@inside
@pytest.mark.covers(1)
@DTYPES
@pytest.mark.parametrize("vocabulary", [1, 29, 5001])
@pytest.mark.parametrize("several", [[*SETTINGS[3:5], SETTINGS[7]], [*SETTINGS[:3], *SETTINGS[5:7]]], ids=["3", "5"])
@pytest.mark.slow_unless(
    rule=lambda vocabulary, dtype, several: (vocabulary, dtype, len(several)) == (5001, torch.float16, 3)
)
def test_tokens_are_those_of_the_reference(vocabulary, dtype, several):
    from kvsweep.kernels.draw_tokens import draw_tokens

    logits, numbers = logits_of(2, vocabulary, dtype), numbers_of(2)
    seen = set()
    for settings in several:
        drawn = draw_tokens(logits, *numbers, **settings)
        assert torch.equal(drawn, sampling.draw_tokens(logits, *numbers, **settings)), settings
        seen.add(tuple(drawn.tolist()))
    assert len(seen) > 1 or vocabulary == 1


@inside
def test_numbers_are_those_of_the_reference_for_any_key():
    """With equal logits, the token is the number times the vocabulary."""
    from kvsweep.kernels.draw_tokens import draw_tokens

    keys = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63), 77])
    counters = torch.tensor([0, 1, 2, 63, 10**6, 2**40])
    found = draw_tokens(torch.zeros(6, 8192), keys, counters, temperature=1.0, top_p=1.0, top_k=0, k_first=True)
    assert torch.equal(found, (sampling.uniform(keys, counters) * 8192).long())


@inside
@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS[:1], ids=str)
def test_a_token_does_not_depend_on_the_rows_beside_it(settings):
    from kvsweep.kernels.draw_tokens import draw_tokens

    logits, (keys, counters) = logits_of(5, 4500, torch.bfloat16), numbers_of(5)
    together = draw_tokens(logits, keys, counters, **settings)
    for few in (1, 3):
        parts = zip(logits.split(few), keys.split(few), counters.split(few), strict=True)
        assert torch.equal(torch.cat([draw_tokens(*part, **settings) for part in parts]), together)


@inside
@pytest.mark.slow
def test_equal_tokens_at_the_edge_of_a_cut_are_kept_together():
    """One of .21 and ten of .08 each, among tokens that are never drawn, in two blocks of the vocabulary."""
    from kvsweep.kernels.draw_tokens import draw_tokens

    logits = torch.full((1, 4200), -torch.inf, dtype=torch.bfloat16)
    logits[0, 1000], logits[0, [0, *range(4090, 4098), 4199]] = 1.0, torch.tensor([-0.0, *[0.0] * 9]).bfloat16()
    for top_p, top_k, k_first, several in (
        (0.25, 0, True, True),
        (0.2, 0, True, False),
        # Of the two largest, the first one is .73.
        (0.7, 2, True, False),
        (0.75, 2, True, True),
        (0.25, 2, False, True),
    ):
        settings = {"temperature": 1.0, "top_p": top_p, "top_k": top_k, "k_first": k_first}
        rows, numbers = logits.expand(3, -1), numbers_of(3)
        drawn = draw_tokens(rows, *numbers, **settings)
        assert len(set(drawn.tolist())) > 1 if several else set(drawn.tolist()) == {1000}, settings
        assert torch.equal(drawn, sampling.draw_tokens(rows, *numbers, **settings)), settings


@inside
@pytest.mark.slow
def test_logits_that_are_not_finite_give_a_token_of_the_vocabulary():
    """The engine ends such a text, and reads no row beyond the vocabulary until then."""
    from kvsweep.kernels.draw_tokens import draw_tokens

    logits = torch.randn(4, 5000)
    logits[0], logits[1, 17], logits[2, 4999], logits[3] = torch.nan, torch.nan, torch.inf, -torch.inf
    for settings in SETTINGS[1:3]:
        drawn = draw_tokens(logits, *numbers_of(4), **settings)
        assert ((drawn >= 0) & (drawn < 5000)).all()
