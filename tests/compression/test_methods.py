"""Methods of 2025 and 2026 against what code keeps that their authors, or a later paper's, have released.

`methods.npz` holds the recorded cases in the form of `rivals.npz`, data alone. Each case names the repository, file and
commit that was run. Held are the kept rows, all equal where the rule makes no ties, and the scores.
"""

from pathlib import Path

import pytest
import torch

from kvsweep.compression.artifacts import load
from kvsweep.compression.policies.caote import CAOTE
from kvsweep.compression.policies.gkv import GKV
from kvsweep.compression.policies.lagkv import LagKV
from kvsweep.compression.policies.lazyeviction import LazyEviction
from kvsweep.compression.policies.longflow import LongFlow
from kvsweep.compression.policies.rpc import RPC
from kvsweep.compression.policies.triattention import TriAttention, save_statistics
from kvsweep.compression.policy import LastUse, RecentQueries
from tests.compression.test_rivals import Cases, sized
from tests.compression.views import view_at

FILE = Cases(Path(__file__).with_name("methods.npz"))
STATISTICS = "statistics.safetensors"
# Of these rules' equal scores, which lie close by construction, topk keeps any.
TIES = ("lagkv", "lazyeviction")


def policy_of(case, given):
    """The policy and settings that stand for a recorded case."""
    rule, told, length, total = case["rule"], case["parameters"], given["length"], case["total"]
    size, window = sized(length, total), case["newest"]
    if rule == "gkv":
        own = {"observation_window": window, "pooling": told["kernel_size"]}
        return GKV(name=rule, mix=told["mix_lambda"], decay=told["alpha"], **own, **size)
    if rule == "rpc":
        # As `RPC` says: P, R and c are budget P + R - 1, local_window and observation_window R, keep_ratio 1 / c.
        own = {"local_window": window, "observation_window": window, "pooling": told["kernel_size"]}
        return RPC(name=rule, keep_ratio=1 / told["c"], budget=told["P"] + told["R"] - 1, **own)
    if rule == "lagkv":
        return LagKV(name=rule, sinks=told["n_sink"], lag=told["lag_size"], **size)
    if rule == "caote":
        return CAOTE(name=rule, observation_window=window, pooling=5 if told["smooth"] else 1, **size)
    if rule == "longflow":
        return LongFlow(name=rule, **size)
    if rule == "lazyeviction":
        return LazyEviction(name=rule, threshold=told["alpha"], **sized(length, total, window))
    assert rule == "triattention"
    return TriAttention(name=rule, statistics=STATISTICS, share_layers=told["share_layers"], **size)


def view_of(case, policy):
    """The recorded cache as a policy sees it."""
    name, given = case["input"], FILE.inputs[case["input"]]
    shape = (given["layers"], given["kv_heads"], given["length"])
    queries, stored = FILE.get(name, "queries"), given["queries_stored"]
    signals = {RecentQueries(n): queries[:, :, stored - n :] for n in range(1, stored + 1)}
    if f"{name}/memory" in FILE.arrays:
        signals[GKV.MEMORY] = FILE.get(name, "memory")
    if f"{name}/last" in FILE.arrays:
        times = torch.stack([FILE.rows(name, "last"), FILE.rows(name, "interval")])
        signals[LastUse(case["parameters"]["alpha"])] = times
    return view_at(
        FILE.rows(name, "positions").expand(shape),
        question_length=given["prompt"],
        keys=FILE.get(name, "keys"),
        values=FILE.get(name, "values"),
        scaling=given["scaling"],
        signals=signals,
        evictions=case["parameters"].get("eviction", 1) - 1,
    )


@pytest.fixture
def held(request, tmp_path, monkeypatch):
    """A case, its policy, and the cache that the policy sees."""
    monkeypatch.chdir(tmp_path)
    case = FILE.cases[request.param]
    given = case["input"]
    if case["rule"] == "triattention":
        tensors = {n: FILE.get(given, n) for n in ("mean_size", "inverse_frequencies", "attention_scaling")}
        mean = torch.complex(FILE.get(given, "mean_real"), FILE.get(given, "mean_imaginary"))
        save_statistics(STATISTICS, {**tensors, "mean": mean}, {"hidden_size": 8})
        assert set(load(STATISTICS)) == {*tensors, "mean_real", "mean_imaginary"}
    policy = policy_of(case, FILE.inputs[given])
    return case, policy, view_of(case, policy)


every_case = pytest.mark.parametrize("held", list(FILE.cases), indirect=True)


@every_case
def test_a_policy_keeps_what_the_recorded_code_keeps(held):
    case, policy, view = held
    kept, expected = policy.select(view).keep, FILE.rows(case["id"])
    assert kept.shape == expected.shape
    if case["rule"] in TIES:
        scores = torch.nn.functional.pad(FILE.get(case["id"], "scores"), (0, case["newest"]), value=torch.inf)
        assert torch.equal(scores.gather(-1, kept).sort().values, scores.gather(-1, expected).sort().values)
    else:
        assert torch.equal(kept, expected)


@every_case
def test_a_policy_ranks_by_the_recorded_codes_scores(held):
    case, policy, view = held
    expected = FILE.get(case["id"], "scores")
    scores = policy.scores(view)
    if scores.shape[-1] > expected.shape[-1]:  # RPC and TriAttention rank no row of the question
        start = view.question_length if case["rule"] in ("rpc", "triattention") else 0
        scores = scores[..., start : start + expected.shape[-1]]
    # TriAttention's code takes cosines of angles up to 65,636 in float32, in steps of 0.004; ours are in float64.
    tolerance = 1e-3 if case["rule"] == "triattention" else 1e-6
    torch.testing.assert_close(scores.float(), expected, rtol=1e-5, atol=tolerance)


@pytest.mark.parametrize("held", [n for n, case in FILE.cases.items() if case["rule"] == "gkv"], indirect=True)
def test_gkv_remembers_what_its_authors_code_remembers(held):
    case, policy, view = held
    rows = FILE.rows(case["id"])[..., : -case["newest"]]
    written = policy.written(view)[GKV.MEMORY].gather(-1, rows)
    torch.testing.assert_close(written, FILE.get(case["id"], "written"), rtol=0, atol=1e-6)


def test_seven_methods_are_held_at_first_and_later_evictions():
    rules = {case["rule"] for case in FILE.cases.values()}
    assert rules == {"gkv", "rpc", "lagkv", "caote", "lazyeviction", "triattention", "longflow"}
    later = {case["rule"] for case in FILE.cases.values() if case["parameters"].get("eviction", 1) > 1}
    assert later == {"gkv", "rpc", "lazyeviction"}
