"""Every rival's rule against what its authors' own code kept.

`rivals.npz` beside this file is a part of the recorded cases, data alone; the whole file lies where KVSWEEP_SHARED
says. Each case names the repository, file and commit that was run. Held are the kept rows, all equal, and the scores.
"""

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from kvsweep.compression.policies.dynts import DynTS
from kvsweep.compression.policies.dynts_ablations import Bottom, NoQuestion
from kvsweep.compression.policies.h2o import H2O, H2ODynTSCode
from kvsweep.compression.policies.keydiff import KeyDiff
from kvsweep.compression.policies.knorm import KNorm
from kvsweep.compression.policies.rkv import RKV, RKVDynTSCode
from kvsweep.compression.policies.sepllm import SepLLM, SepLLMDynTSCode
from kvsweep.compression.policies.snapkv import SnapKV, SnapKVDynTSCode
from kvsweep.compression.policies.streaming_llm import StreamingLLM, StreamingLLMDynTSCode
from kvsweep.compression.policies.tova import TOVA
from kvsweep.compression.policies.vase import VaSE
from kvsweep.compression.policies.window import Window
from kvsweep.compression.policy import AttentionMass, PredictedImportance, RecentQueries
from kvsweep.compression.recorders import ImportancePredictor, save_predictor
from tests.compression.views import view_at

HERE = Path(__file__).with_name("rivals.npz")
WHOLE = Path(os.environ.get("KVSWEEP_SHARED") or "nowhere") / "data" / "rivals_golden.npz"
PREDICTOR = "predictor"


class Cases:
    """The recorded inputs and cases of one file."""

    def __init__(self, path):
        self.arrays = np.load(path)
        meta = json.loads(bytes(self.arrays["meta"]))
        self.inputs = {one["id"]: one for one in meta["inputs"]}
        self.cases = {one["id"]: one for one in meta["cases"]}

    def get(self, case, name):
        found = torch.from_numpy(self.arrays[f"{case}/{name}"])
        return found if found.dtype in (torch.bool, torch.float32) else found.float()

    def rows(self, case, name="kept"):
        return torch.from_numpy(self.arrays[f"{case}/{name}"].astype(np.int64))


FILES = {path: Cases(path) for path in (HERE, WHOLE) if path.is_file()}


def every(array):
    """The cases that hold an array, those of the whole file marked as such."""
    found = [(path, name) for path, file in FILES.items() for name in file.cases if f"{name}/{array}" in file.arrays]
    marks = {HERE: (), WHOLE: pytest.mark.shared}
    return pytest.mark.parametrize(
        ("file", "name"), [pytest.param(FILES[p], n, marks=marks[p], id=f"{p.stem}-{n}") for p, n in found]
    )


@pytest.fixture(autouse=True)
def predictor(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_predictor(ImportancePredictor(8, (4,)), Path(PREDICTOR), {})


def sized(length, total, window=1):
    """The settings under which `length` rows become `total`, `window` of which are the local window."""
    ratio = min(1.0, (total - window + 0.5) / (length - window))
    return {"keep_ratio": ratio, "local_window": window, "budget": length - 1}


def policy_of(case, given):
    """The policy and settings that stand for a recorded case."""
    rule, told, length, total = case["rule"], case["parameters"], given["length"], case["total"]
    size = sized(length, total)
    # The DynTS code's size is its own arithmetic, ours too.
    code = {"keep_ratio": told.get("ratio"), "local_window": told.get("kept_window"), "budget": length - 1}
    observed = {"observation_window": told.get("window_size", told.get("ob_window"))}
    if rule in ("rkv", "snapkv_of_rkv"):
        return RKV(name="rkv", mix=told.get("mix_lambda", 1.0), pooling=told["kernel_size"], **observed, **size)
    if rule == "snapkv":
        return SnapKV(name="snapkv", pooling=told["kernel_size"], **observed, **size)
    if rule == "snapkv_dynts_code":
        return SnapKVDynTSCode(name="snapkv_dynts_code", **observed, **code)
    if rule == "rkv_dynts_code":
        own = {"mix": told["mix_lambda"], "pooling": told["max_pool_kernel_size"], "threshold": told["sim_threshold"]}
        return RKVDynTSCode(name="rkv_dynts_code", **own, **observed, **code)
    if rule == "h2o":
        return H2O(name="h2o", recent=told["recent_size"] / total, **size)
    if rule == "h2o_dynts_code":
        return H2ODynTSCode(name="h2o_dynts_code", **code)
    if rule == "tova":
        return TOVA(name="tova", keep_last="kvpress" in case["by"], **size)
    if rule in ("keydiff", "knorm"):
        return {"keydiff": KeyDiff, "knorm": KNorm}[rule](name=rule, **size)
    if rule == "vase":
        window, large = told["residual_length"], told["n_large"] / total
        return VaSE(name="vase", observation_window=window, large=large, **size)
    if rule == "streaming_llm":
        size = sized(length, total, told["recent_size"])
        return StreamingLLM(name="streaming_llm", sinks=told["start_size"], **size)
    if rule == "streaming_dynts_code":
        window = told["kept_window"] + int((length - told["kept_window"]) * told["ratio"])
        return StreamingLLMDynTSCode(name="streaming_llm_dynts_code", sinks=total - window, **code)
    if rule == "sepllm":
        rooms = told["init_cache_size"] + told["sep_cache_size"] + told["local_size"]
        return SepLLM(name="sepllm", sinks=told["init_cache_size"], **sized(length, rooms, told["local_size"]))
    if rule == "sep_dynts_code":
        return SepLLMDynTSCode(name="sepllm_dynts_code", **code)
    if rule == "window":
        return Window(name="window", **code)
    return {"dynts": DynTS, "no_question": NoQuestion, "bottom": Bottom}[rule](name=rule, predictor=PREDICTOR, **code)


def view_of(file, case, policy):
    """The recorded cache as a policy sees it."""
    name, given = case["input"], file.inputs[case["input"]]
    shape = (given["layers"], given["kv_heads"], given["length"]) if policy.per_head else (given["length"],)

    def rows(array):
        return torch.from_numpy(file.arrays[f"{name}/{array}"]).long().expand(shape)

    # No head is fed the question.
    importance = file.get(name, "importance").masked_fill(file.rows(name, "positions") < given["prompt"], torch.nan)
    signals = {PredictedImportance(PREDICTOR): importance}
    if f"{name}/queries" in file.arrays:
        queries, stored = file.get(name, "queries"), given["queries_stored"]
        signals[AttentionMass()] = file.get(name, "mass")
        signals |= {RecentQueries(n): queries[:, :, stored - n :] for n in range(1, stored + 1)}
    has_keys, has_values = f"{name}/keys" in file.arrays, f"{name}/values" in file.arrays
    positions = rows("positions")
    numbers = torch.rand(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    separators = "separators_dynts" if case["rule"] == "sep_dynts_code" else "separators"
    return view_at(
        positions,
        token_ids=rows("token_ids"),
        separating=lambda: rows(separators).bool(),
        question_length=given["prompt"],
        keys=file.get(name, "keys") if has_keys else [],
        values=file.get(name, "values") if has_values else [],
        scaling=given["scaling"],
        signals=signals,
        uniform=lambda: numbers,
    )


def held(file, case):
    case = file.cases[case]
    policy = policy_of(case, file.inputs[case["input"]])
    return case, policy, view_of(file, case, policy)


@every("kept")
def test_a_policy_keeps_what_its_authors_code_keeps(file, name):
    case, policy, view = held(file, name)
    kept, expected = policy.select(view).keep, file.rows(name)
    assert kept.shape == expected.shape
    if case["rule"] == "vase":
        # One draw of many: what it is drawn from is held below. What must stay stays.
        assert (kept[..., -case["newest"] :] == expected[..., -case["newest"] :]).all()
    elif case["rule"] == "snapkv_of_rkv":
        # Max-pooling makes ties, which topk breaks as it likes: rows of the same scores are kept.
        scores = torch.nn.functional.pad(file.get(name, "scores"), (0, case["newest"]), value=torch.inf)
        assert torch.equal(scores.gather(-1, kept).sort().values, scores.gather(-1, expected).sort().values)
    else:
        assert torch.equal(kept, expected)


@every("scores")
def test_a_policy_ranks_by_its_authors_scores(file, name):
    case, policy, view = held(file, name)
    expected = file.get(name, "scores")
    if case["by"].startswith("SnapKV "):
        expected = expected / case["parameters"]["window_size"]  # summed over the window's queries there, averaged here
    scores = policy.ranking(view)[..., : expected.shape[-1]]
    if case["rule"] == "bottom":
        scores = -scores  # there the lowest stay, here the highest
    tolerance = 1e-5 if case["rule"] == "h2o" else 1e-6
    torch.testing.assert_close(scores.float(), expected, rtol=0, atol=tolerance)


@every("weights")
def test_vase_protects_and_draws_by_its_authors_numbers(file, name):
    _, policy, view = held(file, name)
    ours, theirs = policy.protected(view), file.get(name, "protected")
    # Up to ties: a token's values in the first layer are the same wherever it stands.
    values = torch.stack(list(view.values))[:, :, : ours.shape[-1]]
    spread = values.amax(dim=-1) - values.amin(dim=-1)
    spread[..., :4] = torch.inf
    order = [spread.masked_fill(~rows, 0).sort().values for rows in (ours, theirs)]
    assert torch.equal(*order)
    weights = policy.weights(view).masked_fill(theirs, 0)
    torch.testing.assert_close(weights, file.get(name, "weights"), rtol=0, atol=1e-6)


def test_the_part_beside_this_file_holds_every_rule():
    rules = {case["rule"] for case in FILES[HERE].cases.values()}
    whole = {case["rule"] for file in FILES.values() for case in file.cases.values()}
    assert len(rules) == 19
    assert rules == whole
    assert {case["parameters"].get("eviction", 1) for case in FILES[HERE].cases.values()} == {1, 2}


@pytest.mark.slow  # many draws
def test_vase_draws_in_proportion_to_its_weights():
    """Drawn 4,000 times, a row's frequency is that of numpy's draws without replacement from the same weights."""
    file = FILES[HERE]
    name = next(n for n, case in file.cases.items() if case["rule"] == "vase")
    case, policy, view = held(file, name)
    weights = file.get(name, "weights")[0, 0].double()
    drawn = case["parameters"]["drawn"]
    rng, count, draws = np.random.default_rng(0), np.zeros(len(weights)), 4000
    for _ in range(draws):
        count[rng.choice(len(weights), drawn, replace=False, p=weights / weights.sum())] += 1
    ours = np.zeros(len(weights))
    for seed in range(draws):
        numbers = torch.rand(view.positions.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        scores = policy.scores(replace(view, uniform=lambda numbers=numbers: numbers))[0, 0]
        ours[scores.masked_fill(scores.isinf(), -torch.inf).topk(drawn).indices] += 1
    assert np.abs(ours - count).max() / draws < 0.05
