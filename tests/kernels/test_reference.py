import pytest
import torch

from kvsweep.kernels import reference
from kvsweep.kernels.reference import (
    causal_mass,
    compact_layers,
    decode_attention,
    importance_labels,
    observation_scores,
    redundancy,
)


def attend_row_by_row(query, keys, values, lengths, scaling):
    """Float64, one slot and one query head at a time: the definition."""
    slots, q_heads, head_dim = query.shape
    group = q_heads // keys.shape[1]
    output = torch.zeros(slots, q_heads, head_dim, dtype=torch.float64)
    mass = torch.zeros(slots, keys.shape[1], keys.shape[2], dtype=torch.float64)
    for slot in range(slots):
        n = int(lengths[slot])
        for head in range(q_heads):
            k, v = keys[slot, head // group, :n].double(), values[slot, head // group, :n].double()
            weights = torch.softmax(k @ query[slot, head].double() * scaling, dim=0)
            output[slot, head] = weights @ v
            mass[slot, head // group, :n] += weights
    return output, mass


@pytest.mark.parametrize("group", [1, 4, 7, 16])
@pytest.mark.parametrize(("capacity", "lengths"), [(1, [1, 1]), (13, [1, 13]), (37, [5, 36])])
def test_decode_attention_equals_the_definition(group, capacity, lengths):
    torch.manual_seed(group * capacity)
    query = torch.randn(2, 2 * group, 24)
    keys, values = torch.randn(2, 2, 2, capacity, 24)
    # Dead rows may hold anything finite, however large.
    for slot, n in enumerate(lengths):
        keys[slot, :, n:], values[slot, :, n:] = 1e30, -1e30
    lengths = torch.tensor(lengths)
    output, mass = decode_attention(query, keys, values, lengths, scaling=0.3, return_mass=True)
    expected, expected_mass = attend_row_by_row(query, keys, values, lengths, 0.3)
    torch.testing.assert_close(output.double(), expected, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(mass.double(), expected_mass, rtol=2e-6, atol=2e-6)
    assert decode_attention(query, keys, values, lengths, scaling=0.3)[1] is None


@pytest.mark.parametrize("kept", [0, 1, 5, 11])
def test_compact_moves_rows_bit_exactly(kept):
    torch.manual_seed(kept)
    before = torch.randn(3, 11, 4)
    shared, per_head = before.clone(), before.clone()
    keep = torch.randperm(11)[:kept].sort().values
    keeps = torch.stack([torch.randperm(11)[:kept].sort().values for _ in range(3)])
    compact_layers([shared], keep)
    compact_layers([per_head], keeps[None])
    assert torch.equal(shared[:, :kept], before[:, keep])
    for head in range(3):
        assert torch.equal(per_head[head, :kept], before[head, keeps[head]])
    assert torch.equal(shared[:, kept:], before[:, kept:])


@pytest.mark.parametrize("group", [1, 4, 7])
@pytest.mark.parametrize("length", [1, 2, 13])
@pytest.mark.parametrize("block", [1, 5, 256])
def test_causal_mass_equals_the_columns_of_the_attention_matrix(group, length, block, monkeypatch):
    monkeypatch.setattr(reference, "_TILE", block)
    torch.manual_seed(length)
    query, key = torch.randn(2 * group, length, 8), torch.randn(2, length, 8)
    logits = query.double() @ key.repeat_interleave(group, dim=0).double().transpose(-1, -2) * 0.4
    later = torch.ones(length, length, dtype=torch.bool).triu(diagonal=1)
    weights = logits.masked_fill(later, -torch.inf).softmax(-1)
    expected = weights.sum(dim=1).view(2, group, length).sum(dim=1)
    found = causal_mass(query, key, scaling=0.4)
    torch.testing.assert_close(found.double(), expected, rtol=2e-6, atol=2e-6)


def label_by_definition(query, key, scaling, kind, answer_start, min_distance):
    """From the whole attention matrix in float64, token by token."""
    (kv_heads, length, _), group = key.shape, len(query) // len(key)
    logits = query.double() @ key.repeat_interleave(group, dim=0).double().transpose(-1, -2) * scaling
    weights = logits.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf).softmax(-1)
    weights = weights.view(kv_heads, group, length, length)
    label = torch.full((kv_heads, length), torch.nan, dtype=torch.float64)
    for token in range(length):
        if kind == "answer":
            from_answer = weights[:, :, answer_start:, token].clone()
            if token >= answer_start:
                from_answer[:, :, token - answer_start] = 0
            label[:, token] = from_answer.mean(dim=(1, 2))
        elif token + min_distance < length:
            far = weights[:, :, token + min_distance :, token]
            label[:, token] = far.mean(dim=(1, 2)) if kind == "later" else far.amax(dim=(1, 2))
    return label


@pytest.mark.parametrize("kind", ["answer", "far_max", "later"])
@pytest.mark.parametrize("group", [1, 4, 7])
@pytest.mark.parametrize(("length", "answer_start"), [(2, 1), (13, 12), (37, 20), (64, 0)])
@pytest.mark.parametrize("block", [1, 5, 512])
@pytest.mark.slow_unless(
    rule=lambda kind, group, length, answer_start, block: group * length in (13, 4 * 37, 7 * 2) and block != 512
)
@pytest.mark.slow_covers(2)
def test_importance_labels_equal_those_of_the_whole_attention_matrix(
    kind, group, length, answer_start, block, monkeypatch
):
    monkeypatch.setattr(reference, "_TILE", block)
    torch.manual_seed(length + group)
    # Wide enough that some logits are far from the others.
    query, key = 3 * torch.randn(2 * group, length, 8), torch.randn(2, length, 8)
    for min_distance in (1, 6, length):
        expected = label_by_definition(query, key, 0.4, kind, answer_start, min_distance)
        found = importance_labels(
            query, key, kind=kind, scaling=0.4, answer_start=answer_start, min_distance=min_distance
        )
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=2e-6, equal_nan=True)


def test_importance_labels_never_hold_a_matrix_of_the_whole_length(monkeypatch):
    monkeypatch.setattr(reference, "_TILE", 50)

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                self.seen = max(self.seen, result.numel())
            return result

    query, key = torch.randn(4, 1000, 8), torch.randn(2, 1000, 8)
    with Largest() as largest:
        importance_labels(query, key, kind="far_max", scaling=1.0, answer_start=0)
    assert largest.seen == query.numel()  # a tile has 4 * 50 * 50, the matrix 4 * 1000 * 1000


@pytest.mark.parametrize("pool_logits", [False, True])
@pytest.mark.parametrize("past_only", [False, True])
def test_observation_scores_equal_the_last_rows_of_the_attention_matrix(past_only, pool_logits):
    torch.manual_seed(1)
    group, length, window = 7, 23, 5
    queries, keys = torch.randn(2 * group, window, 8), torch.randn(2, length, 8)
    logits = queries.double().view(2, group, window, 8) @ keys.double()[:, None].transpose(-1, -2) * 0.4
    if pool_logits:
        logits = logits.max(dim=1, keepdim=True).values
    expected = torch.zeros(*logits.shape[:2], length - window, dtype=torch.float64)
    for q in range(window):
        visible = length - window if past_only else length - window + q + 1
        expected += logits[:, :, q, :visible].softmax(-1)[..., : length - window] / window
    options = {"scaling": 0.4, "past_only": past_only, "pool_logits": pool_logits}
    found = observation_scores(queries, keys, **options)
    torch.testing.assert_close(found.double(), expected, rtol=2e-6, atol=2e-6)


def test_redundancy_spares_the_newest_of_a_run_of_equal_keys():
    keys = torch.eye(6)[[0, 1, 1, 1, 2, 3]][None]
    cosine = torch.tensor(
        [
            [0, 0, 0, 0, 0, 0],
            [0, 0, 1, 0, 0, 0],  # of its two likes, the last column is not held against it
            [0, 1, 0, 0, 0, 0],
            [0, 1, 0, 0, 0, 0],
            [0, 0, 0, 0, 0, 0],
            [0, 0, 0, 0, 0, 0],
        ],
        dtype=torch.float64,
    )
    expected = cosine.mean(dim=0).softmax(-1)
    torch.testing.assert_close(redundancy(keys, threshold=0.5)[0].double(), expected)
