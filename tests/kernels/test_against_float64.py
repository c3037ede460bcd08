"""Every reference operation on queries and keys against attention written out in float64, in each dtype.

The inputs are those on which 16-bit logits fail: an offset that all logits share (biases of queries and keys, as Qwen2
has them), products beyond float16's largest number, one key that takes all attention, a single row.
"""

import pytest
import torch

from kvsweep.compression.recorders import decayed_mass
from kvsweep.kernels import reference

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
INPUTS = pytest.mark.parametrize("inputs", ["plain", "shared offset", "large norm", "one hot key", "one row"])
HEADS, GROUP, DIM, SCALING = 2, 3, 64, 0.125


def drawn(inputs: str, dtype: torch.dtype, rows: int = 40, queries: int = 1) -> tuple[torch.Tensor, ...]:
    """Queries [heads * group, queries, dim], keys and values [heads, rows, dim] in a dtype."""
    torch.manual_seed(0)
    rows = 1 if inputs == "one row" else rows
    query = torch.randn(HEADS * GROUP, queries, DIM)
    keys, values = torch.randn(2, HEADS, rows, DIM)
    if inputs == "shared offset":  # the same product, 8192, in every logit
        query[..., -1], keys[..., -1] = 64, 128
    elif inputs == "large norm":  # 262,144 before the factor
        query[..., -1], keys[..., -1] = 512, 512
    elif inputs == "one hot key":
        keys[:, rows // 2] = 40 * query[::GROUP, 0]
    return tuple(tensor.to(dtype) for tensor in (query, keys, values))


def written_out(query, keys, seen, sinks=None, softcap=None):
    """Attention weights [heads, group, queries, rows] in float64, of the rows that each query sees, [queries, rows]."""
    grouped = query.double().unflatten(0, (HEADS, GROUP))
    logits = torch.einsum("hgqd,hrd->hgqr", grouped, keys.double()) * SCALING
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    powers = (logits - logits.amax(dim=-1, keepdim=True)).exp() * seen
    total = powers.sum(dim=-1, keepdim=True)
    if sinks is not None:
        total = total + (sinks.double().view(HEADS, GROUP, 1, 1) - logits.amax(dim=-1, keepdim=True)).exp()
    return powers / total


def weight_error(query: torch.Tensor, keys: torch.Tensor) -> float:
    """What float32 logits may cost a weight: a few roundings of the largest one."""
    largest = SCALING * query.double().norm(dim=-1).max() * keys.double().norm(dim=-1).max()
    return 1e-6 + 4 * torch.finfo(torch.float32).eps * float(largest)


def close(found, expected, allowed):
    assert found.isfinite().all()
    assert (found.double() - expected).abs().max() <= allowed


@INPUTS
@DTYPES
@pytest.mark.parametrize("how", [{}, {"sinks": True}, {"softcap": 30.0}], ids=["plain", "sinks", "softcap"])
def test_a_step_and_a_chunk(inputs, dtype, how):
    query, keys, values = drawn(inputs, dtype, queries=8)
    how = {**how, "sinks": torch.randn(HEADS * GROUP).to(dtype)} if how.get("sinks") else how
    rows, queries = keys.shape[1], 1 if inputs == "one row" else 8
    query = query[:, :queries]
    seen = torch.ones(queries, rows, dtype=torch.bool).tril(rows - queries)
    weights = written_out(query, keys, seen, **how)
    output = torch.einsum("hgqr,hrd->hgqd", weights, values.double()).flatten(0, 1)
    most, error = float(values.abs().max()), weight_error(query, keys)
    rounding = 0 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    allowed = most * (rounding + rows * error)

    lengths = torch.arange(rows - queries, rows) + 1
    beside = [rows_of.expand(queries, -1, -1, -1) for rows_of in (keys, values)]
    step, mass = reference.decode_attention(
        query.transpose(0, 1), *beside, lengths, scaling=SCALING, return_mass=True, **how
    )
    close(step.transpose(0, 1), output, allowed)
    close(mass.transpose(0, 1), weights.sum(dim=1), GROUP * error)
    for return_mass in (False, True):
        chunk, masses = reference.chunk_attention(
            query.transpose(0, 1), keys, values, scaling=SCALING, return_mass=return_mass, **how
        )
        close(chunk.transpose(0, 1), output, 2 * allowed)
    close(masses.transpose(0, 1), weights.sum(dim=1), GROUP * error)


@INPUTS
@DTYPES
def test_an_attention_is_as_near_as_sdpa(inputs, dtype):
    query, keys, values = drawn(inputs, dtype)
    exact = written_out(query, keys, True) @ values.double()[:, None]
    found = reference.decode_attention(
        query.transpose(0, 1), keys[None], values[None], torch.tensor([keys.shape[1]]), scaling=SCALING
    )[0][0]
    repeated = (rows.repeat_interleave(GROUP, dim=0) for rows in (keys, values))
    sdpa = torch.nn.functional.scaled_dot_product_attention(query, *repeated, scale=SCALING)[:, 0]
    ours, theirs = ((one.double() - exact.flatten(0, 1)[:, 0]).abs().max() for one in (found, sdpa))
    assert ours <= 2 * theirs + 1e-6


@INPUTS
@DTYPES
def test_what_the_policies_read(inputs, dtype):
    """The masses of a prompt, the newest queries' attention, and the labels of importance."""
    query, keys, _ = drawn(inputs, dtype, queries=40)
    rows = keys.shape[1]
    query = query[:, :rows]
    weights = written_out(query, keys, torch.ones(rows, rows, dtype=torch.bool).tril())
    error = rows * GROUP * weight_error(query, keys)
    close(reference.causal_mass(query, keys, scaling=SCALING), weights.sum(dim=(1, 2)), error)
    powers = 0.9 ** torch.arange(rows - 1, -1, -1, dtype=torch.float64)
    decayed = (weights.sum(dim=1) * powers[:, None]).sum(dim=1)
    close(decayed_mass(query, keys, scaling=SCALING, decay=0.9), decayed, error)
    if rows > 8:
        newest = reference.observation_scores(query[:, -8:], keys, scaling=SCALING)
        close(newest, weights[:, :, -8:, :-8].mean(dim=2), error)
        answer = weights[:, :, 30:].tril(29).mean(dim=(1, 2))
        how = {"scaling": SCALING, "answer_start": 30, "min_distance": 4}
        close(reference.importance_labels(query, keys, kind="answer", **how), answer, error)
        far = weights.tril(-4).amax(dim=(1, 2))[:, :-4]
        close(reference.importance_labels(query, keys, kind="far_max", **how)[:, :-4], far, error)


@DTYPES
def test_how_much_keys_repeat_each_other(dtype):
    keys = drawn("shared offset", dtype)[1]
    unit = torch.nn.functional.normalize(keys.double(), dim=-1)
    cosines = (unit @ unit.mT).masked_fill(torch.eye(40, dtype=torch.bool), 0.0)
    last = (cosines > 0.5).long().mul(torch.arange(40)).amax(dim=-1, keepdim=True)
    expected = cosines.scatter(-1, last, 0.0).mean(dim=-2).softmax(dim=-1)
    close(reference.redundancy(keys, threshold=0.5), expected, 1e-6)
