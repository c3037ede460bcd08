"""Every policy against a brute-force reading of its rule. A new policy adds one row to MATRIX."""

import inspect
import itertools
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from compression.policies.ablations import Bottom, NoQuestion, NoWindow
from compression.policies.dynts import DynTS
from compression.policies.full import FullCache
from compression.policies.h2o import H2O
from compression.policies.keydiff import KeyDiff
from compression.policies.knorm import KNorm
from compression.policies.oracle import Oracle, save_labels
from compression.policies.oracle import _read as read_labels
from compression.policies.random import Random
from compression.policies.rkv import RKV
from compression.policies.sepllm import SepLLM
from compression.policies.snapkv import SnapKV
from compression.policies.streaming_llm import StreamingLLM
from compression.policies.tova import TOVA
from compression.policies.vase import VaSE
from compression.policies.window import Window
from compression.policy import BudgetPolicy, CacheView
from compression.predictor import ImportancePredictor, save_predictor
from compression.signals import AttentionMass, PredictedImportance, RecentQueries
from harness.decode.engine import Engine
from harness.decode.request import Branch, DecodingConfig, Request
from harness.decode.sampling import SamplingConfig
from harness.models.config import ModelConfig
from harness.models.load import load_model
from harness.toy.paths import WEIGHTS
from harness.toy.tasks import problems

POLICY_FILES = sorted(Path(__file__).parents[2].glob("conf/policy/*.yaml"))
PREDICTOR = "predictor-of-the-test"
LABELS = "labels-of-the-test.safetensors"


LAYERS, KV_HEADS, HEAD_DIM = 2, 2, 6


def layers_of(view):
    return range(len(view.keys))


def heads_of(view):
    return range(view.keys[0].shape[0])


def in_half(number):
    """Rounded so that a token's equal norms at different places are ties, as the policies state."""
    return float(number.half())


def grid(view, score):
    """[layers, kv_heads, length] of score(layer, head, row)."""
    return [[[score(i, h, r) for r in range(view.length)] for h in heads_of(view)] for i in layers_of(view)]


def row(view, score):
    """[length] of score(row)."""
    return [score(r) for r in range(view.length)]


def pinned(view, r):
    position = int(view.positions[r])
    return position < view.question_length or (view.answer_start is not None and position >= view.answer_start)


def importance(view, r):
    return float(next(v for signal, v in view.signals.items() if isinstance(signal, PredictedImportance))[r])


def dynts(view, policy):
    return row(view, lambda r: math.inf if pinned(view, r) else importance(view, r))


def bottom(view, policy):
    return row(view, lambda r: math.inf if pinned(view, r) else -importance(view, r))


def no_question(view, policy):
    def score(r):
        position = int(view.positions[r])
        if view.answer_start is not None and position >= view.answer_start:
            return math.inf
        return 0.0 if position < view.question_length else importance(view, r)

    return row(view, score)


def random_scores(view, policy):
    numbers = view.uniform()
    return row(view, lambda r: math.inf if pinned(view, r) else float(numbers[r]))


def window(view, policy):
    return row(view, lambda r: int(view.positions[r]))


def streaming_llm(view, policy):
    return row(view, lambda r: math.inf if view.positions[r] < policy.sinks else int(view.positions[r]))


def sepllm(view, policy):
    def score(r):
        position = int(view.positions[r])
        return math.inf if position < policy.sinks else position + (10**9 if view.separators[r] else 0)

    return row(view, score)


def token_mean(scores):
    """The dynts_code form: a token's mean over layers and heads."""
    return torch.tensor(scores, dtype=torch.float64).mean(dim=(0, 1)).tolist()


def h2o(view, policy):
    return grid(view, lambda i, h, r: float(view.signals[AttentionMass()][i, h, r]))


def attention_rows(view, policy, layer, head, *, past_only, pool_logits):
    """Per query head of the group (or of their largest logits), per query of the window: weights over the rows."""
    size, length = policy.observation_window, view.length
    queries = view.signals[RecentQueries(size)][layer].double()
    group = queries.shape[0] // len(heads_of(view))
    keys = view.keys[layer][head].double()
    logits = queries[head * group : (head + 1) * group] @ keys.T * view.scaling
    if pool_logits:
        logits = logits.max(dim=0, keepdim=True).values
    rows = []
    for one in logits:
        weights = torch.zeros(size, length, dtype=torch.float64)
        for q in range(size):
            visible = length - size if past_only else length - size + q + 1
            weights[q, :visible] = torch.softmax(one[q, :visible], dim=0)
        rows.append(weights[:, : length - size].mean(dim=0))
    return rows


def pooled(numbers, width, how):
    """Over each position's neighbourhood; beyond the ends stand zeros for a mean, nothing for a maximum."""
    reach = width // 2
    found = []
    for r in range(len(numbers)):
        near = [float(numbers[c]) for c in range(max(0, r - reach), min(len(numbers), r + reach + 1))]
        found.append(sum(near) / width if how == "mean" else max(near))
    return torch.tensor(found, dtype=torch.float64)


def outside_window(view, policy, score):
    """[layers, kv_heads, length] of a score of the rows before the observation window."""
    window_rows = torch.zeros(policy.observation_window, dtype=torch.float64)
    return [[torch.cat([score(i, h), window_rows]).tolist() for h in heads_of(view)] for i in layers_of(view)]


def snapkv(view, policy):
    def score(i, h):
        rows = attention_rows(view, policy, i, h, past_only=False, pool_logits=False)
        return torch.stack([pooled(r, policy.pooling, "mean") for r in rows]).mean(dim=0)

    return outside_window(view, policy, score)


def tova(view, policy):
    def score(i, h):
        heads = [attention_rows(view, policy, i, k, past_only=False, pool_logits=False) for k in heads_of(view)]
        return torch.stack([r for rows in heads for r in rows]).mean(dim=0)

    return outside_window(view, policy, score)


def rkv(view, policy):
    def score(i, h):
        (attention,) = attention_rows(view, policy, i, h, past_only=True, pool_logits=True)
        keys = view.keys[i][h, : view.length - policy.observation_window].double()
        n = len(keys)
        cosine = torch.zeros(n, n, dtype=torch.float64)
        for a in range(n):
            for b in range(n):
                cosine[a, b] = 0.0 if a == b else keys[a] @ keys[b] / (keys[a].norm() * keys[b].norm())
            above = [b for b in range(n) if cosine[a, b] > policy.threshold]
            cosine[a, above[-1] if above else 0] = 0.0
        repeated = torch.softmax(cosine.mean(dim=0), dim=0)
        return policy.mix * pooled(attention, policy.pooling, "max") - (1 - policy.mix) * repeated

    return outside_window(view, policy, score)


def vase(view, policy):
    outside = view.length - policy.observation_window
    numbers = view.uniform()

    def score(i, h):
        rows = attention_rows(view, policy, i, h, past_only=True, pool_logits=False)
        weights = torch.stack([pooled(r, policy.pooling, "mean") for r in rows]).mean(dim=0)
        values = view.values[i][h, :outside].double()
        size = [
            math.inf if view.positions[i, h, r] < policy.sinks else in_half(values[r].max() - values[r].min())
            for r in range(outside)
        ]
        total = policy.local_window + int((policy.budget + 1 - policy.local_window) * policy.keep_ratio)
        count = int(policy.protected * (total - policy.observation_window))
        large = sorted(range(outside), key=lambda r: (-size[r], r))[:count]
        # A race: row r ends at an exponential time of rate weight; the first to end are drawn.
        ends = [-math.log(max(float(numbers[i, h, r]), 1e-12)) / float(weights[r]) for r in range(outside)]
        return torch.tensor([math.inf if r in large else 1 / ends[r] for r in range(outside)], dtype=torch.float64)

    return outside_window(view, policy, score)


def keydiff(view, policy):
    def score(i, h, r):
        keys = view.keys[i][h].double()
        mean = sum(k / k.norm() for k in keys) / len(keys)
        return float(-(keys[r] @ mean) / (keys[r].norm() * mean.norm()))

    return grid(view, score)


def knorm(view, policy):
    return grid(view, lambda i, h, r: -in_half(view.keys[i][h, r].double().norm()))


# A text of 40 tokens whose labels fall from 1 at position 10 to 0 at position 29; none are known outside.
LABELLED = (
    torch.arange(100, 140),
    torch.cat([torch.full((10,), torch.nan), torch.linspace(1, 0, 20), torch.full((10,), torch.nan)]),
)


def oracle(view, policy):
    # The text of the matrix differs from the labelled one at once: all that is left is the head's score.
    return dynts(view, policy)


def in_code(scores):
    return lambda view, policy: token_mean(scores(view, policy))


CODE = {"variant": "dynts_code"}
# Per policy file: its class, settings to test it with, its scores as its source states them (None: it never evicts).
MATRIX = {
    "full": (FullCache, {}, None),
    "window": (Window, {}, window),
    "random": (Random, {}, random_scores),
    "dynts": (DynTS, {}, dynts),
    "dynts_answer": (DynTS, {}, dynts),
    "dynts_far_max": (DynTS, {}, dynts),
    "dynts_later": (DynTS, {}, dynts),
    "dynts_sum": (DynTS, {}, dynts),
    "oracle_answer": (Oracle, {"labels": LABELS}, oracle),
    "oracle_far_max": (Oracle, {"labels": LABELS}, oracle),
    "bottom": (Bottom, {}, bottom),
    "no_question": (NoQuestion, {}, no_question),
    "no_window": (NoWindow, {}, dynts),
    "streaming_llm": (StreamingLLM, {"sinks": 3}, streaming_llm),
    "sepllm": (SepLLM, {"sinks": 2}, sepllm),
    "h2o": (H2O, {}, h2o),
    "h2o_dynts_code": (H2O, CODE, in_code(h2o)),
    "snapkv": (SnapKV, {"observation_window": 7}, snapkv),
    "snapkv_dynts_code": (SnapKV, {"observation_window": 7, **CODE}, in_code(snapkv)),
    "rkv": (RKV, {"observation_window": 4}, rkv),
    "rkv_dynts_code": (RKV, {"observation_window": 4, **CODE}, in_code(rkv)),
    "tova": (TOVA, {}, tova),
    "keydiff": (KeyDiff, {}, keydiff),
    "knorm": (KNorm, {}, knorm),
    "vase": (VaSE, {"observation_window": 5, "sinks": 2, "protected": 0.3}, vase),
}
EVICTING = [name for name in MATRIX if name != "full"]
NEWEST = {"no_window": 1, "tova": 1, "snapkv": 7, "snapkv_dynts_code": 7, "rkv": 4, "rkv_dynts_code": 4, "vase": 5}


@pytest.fixture(autouse=True)
def predictor(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_predictor(ImportancePredictor(8, (4,)), Path(PREDICTOR), {})
    save_labels(Path(LABELS), {"p0/0": (torch.arange(100), torch.linspace(1, 0, 100)), "p0/1": LABELLED})
    read_labels.cache_clear()


def make(name, **settings):
    cls, own, _ = MATRIX[name]
    predictor = {"predictor": PREDICTOR} if issubclass(cls, DynTS) else {}
    return cls(name=name, **{**predictor, **own, **settings})


def make_view(length, question_length, *, answer_start=None, seed=0, holes=True, per_head=False, group=4):
    """A cache of random numbers; the rows stand for positions 0, 1, ... or, with holes, for some of twice as many."""
    generator = torch.Generator().manual_seed(seed)

    def positions():
        return torch.randperm(2 * length, generator=generator)[:length].sort().values if holes else torch.arange(length)

    own = positions()
    if per_head:
        own = torch.stack([torch.stack([positions() for _ in range(KV_HEADS)]) for _ in range(LAYERS)])
    # Ties are common in practice (bf16); they go to the lowest position.
    scores = (torch.rand(length, generator=generator) * 8).round() / 8
    queries = torch.randn(LAYERS, KV_HEADS * group, 7, HEAD_DIM, generator=generator)
    signals = {RecentQueries(n): queries[:, :, 7 - n :] for n in (1, 4, 5, 7)}
    mass = torch.rand(LAYERS, KV_HEADS, length, generator=generator).mul(20).round()
    if not per_head:
        scores[own < question_length] = torch.nan
        signals[PredictedImportance(PREDICTOR)] = scores
    numbers = torch.rand(own.shape, generator=generator, dtype=torch.float64)
    return CacheView(
        problem_id="p0",
        draw=0,
        text_ids=torch.randint(0, 50, (2 * length,), generator=torch.Generator().manual_seed(seed)),
        positions=own,
        token_ids=torch.randint(0, 50, own.shape, generator=generator),
        separators=torch.rand(own.shape, generator=generator) < 0.3,
        question_length=question_length,
        answer_start=answer_start,
        keys=torch.randn(LAYERS, KV_HEADS, length, HEAD_DIM, generator=generator) + 0.5,
        values=torch.randn(LAYERS, KV_HEADS, length, HEAD_DIM, generator=generator),
        scaling=HEAD_DIM**-0.5,
        signals={**signals, AttentionMass(): mass},
        uniform=lambda: numbers,
    )


def brute_force(name, policy, view, *, newest=None):
    """The published rule, a row at a time: shared rows, or rows per layer and head."""
    scores = MATRIX[name][2](view, policy)
    on_top = view.question_length if policy.question_on_top else 0
    total = policy.local_window + int((view.length - on_top - policy.local_window) * policy.keep_ratio)
    first_newest = max(on_top, view.length - (newest or NEWEST.get(name, policy.local_window)))

    def keep(one):
        others = sorted(range(on_top, first_newest), key=lambda r: (-one[r], r))
        chosen = others[: total - (view.length - first_newest)]
        return sorted([*range(on_top), *chosen, *range(first_newest, view.length)])

    return [[keep(head) for head in layer] for layer in scores] if isinstance(scores[0], list) else keep(scores)


def test_the_matrix_covers_every_policy_file():
    assert {path.stem for path in POLICY_FILES} == set(MATRIX)


@pytest.mark.parametrize("name", EVICTING)
@pytest.mark.parametrize("on_top", [False, True])
def test_kept_rows_equal_brute_force(name, on_top):
    if name == "no_question" and on_top:
        pytest.skip("no_question evicts the question, which question_on_top keeps")
    cases = itertools.product([65, 38], [0.1, 0.29, 0.5, 1.0], [8, 17])
    for seed, (length, keep_ratio, local_window) in enumerate(cases):
        policy = make(name, keep_ratio=keep_ratio, local_window=local_window, budget=64, question_on_top=on_top)
        # The question is unevicted when it lies on top, so its rows stand at the front without holes.
        options = {"seed": seed, "holes": not on_top, "per_head": policy.per_head, "group": (4, 7)[seed % 2]}
        view = make_view(length, 1 + seed % 13, answer_start=length - 5 if seed % 2 else None, **options)
        kept = policy.select(view).keep
        assert kept.tolist() == brute_force(name, policy, view)


@pytest.mark.parametrize("name", EVICTING)
def test_kept_rows_equal_brute_force_on_an_embedded_models_cache(name, toy_qwen, monkeypatch):
    compared = []

    def select(policy, view):
        selection = plain_select(policy, view)
        compared.append((selection.keep.tolist(), brute_force(name, policy, view)))
        return selection

    plain_select = BudgetPolicy.select
    monkeypatch.setattr(BudgetPolicy, "select", select)
    predictor = (
        {"predictor": str(WEIGHTS / "predictors/toy_qwen/far_max")} if issubclass(MATRIX[name][0], DynTS) else {}
    )
    policy = make(name, keep_ratio=0.4, local_window=12, budget=70, **predictor)
    prompt = toy_qwen.prompt_ids(problems("add")[0].question)
    request = Request(problem_id="p", draw=0, prompt_ids=prompt, branches=(Branch(cell_id="c", policy=policy),))
    decoding = DecodingConfig(name="greedy", max_new_tokens=90, sampling=SamplingConfig(temperature=0))
    engine = Engine(toy_qwen, decoding=decoding, seed=0, slots=1, capacity=71, policies=[policy])
    list(engine.generate([request]))
    assert len(compared) >= 2
    for kept, expected in compared:
        assert kept == expected


@pytest.fixture(scope="module")
def toy_qwen():
    return load_model(ModelConfig(name="toy_qwen", title="Toy", path=str(WEIGHTS / "toy_qwen"), threads=1))


@pytest.mark.parametrize("name", EVICTING)
def test_all_policies_hold_the_same_after_an_eviction(name):
    policy = make(name, keep_ratio=0.3, local_window=20, budget=64)
    view = make_view(65, 5, per_head=policy.per_head)
    assert policy.select(view).keep.shape[-1] == 20 + int(45 * 0.3)
    assert policy.capacity(5, 1000) == 65


@pytest.mark.parametrize("name", list(MATRIX))
def test_a_reused_policy_gives_what_a_fresh_one_gives(name):
    if name == "full":
        assert FullCache(name="full").trigger(10) is None
        return
    settings = {"keep_ratio": 0.3, "local_window": 9, "budget": 64}
    used = make(name, **settings)
    used.select(make_view(65, 12, seed=1, per_head=used.per_head))
    view = make_view(70, 20, seed=2, per_head=used.per_head)
    assert torch.equal(used.select(view).keep, make(name, **settings).select(view).keep)


def test_the_policies_own_code_stays_short():
    for name, (cls, _, _) in MATRIX.items():
        lines = [line.strip() for line in inspect.getsource(cls).splitlines()]
        assert len([line for line in lines if line and not line.startswith("#")]) <= 80, name


def test_published_arithmetic():
    # 5,001 tokens at the eviction, window 2,000, ratio 0.4: 1,200 others stay (paper's settings).
    policy = make("window", keep_ratio=0.4, local_window=2000, budget=5000)
    assert policy.trigger(250) == 5000
    assert policy.capacity(250, 16384) == 5001
    assert len(policy.select(make_view(5001, 250)).keep) == 3200


def test_a_long_question_counts_against_the_kept_fraction_unless_on_top():
    # Ratio 0.1 and window 3,000 leave k = 200 of 5,001: a 250-token question fills it and loses its last 50 tokens.
    view = make_view(5001, 250, holes=False)
    inside = make("dynts", keep_ratio=0.1, local_window=3000, budget=5000).select(view).keep
    assert inside[:200].tolist() == list(range(200))
    assert inside[200:].tolist() == list(range(2001, 5001))
    on_top = make("dynts", keep_ratio=0.1, local_window=3000, budget=5000, question_on_top=True).select(view).keep
    assert on_top[:250].tolist() == list(range(250))
    assert len(on_top) == 250 + 175 + 3000


def test_the_answer_is_pinned_over_any_thinking():
    view = make_view(129, 4, answer_start=60, holes=False)
    kept = set(make("dynts", keep_ratio=0.5, local_window=8, budget=128).select(view).keep.tolist())
    assert set(range(4)) <= kept
    # 121 tokens lie outside the window: k = 60, so 4 question tokens and the lowest 56 of the 61 answer tokens.
    assert kept == set(range(4)) | set(range(60, 116)) | set(range(121, 129))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"keep_ratio": 1.5}, "keep_ratio=1.5"),
        ({"keep_ratio": 0.0}, "keep_ratio=0.0"),
        ({"keep_ratio": math.nan}, "keep_ratio=nan"),
        ({"local_window": 0}, "local_window=0"),
        ({"local_window": 200}, "local_window=200"),
    ],
)
def test_settings_out_of_range(settings, named):
    with pytest.raises(ValueError, match=named):
        make("window", **{"keep_ratio": 0.3, "local_window": 48, "budget": 128, **settings})


@pytest.mark.parametrize(
    ("name", "settings", "named"),
    [
        ("streaming_llm", {"sinks": 25}, "sinks=25.*24 tokens stay outside"),
        ("streaming_llm", {"sinks": -1}, "sinks=-1"),
        ("sepllm", {"sinks": 25}, "sinks=25"),
        ("snapkv", {"observation_window": 0}, "observation_window=0"),
        ("snapkv", {"observation_window": 73}, "observation_window=73.*to the 72 tokens"),
        ("snapkv", {"pooling": 4}, "pooling=4.*odd"),
        ("rkv", {"pooling": 0}, "pooling=0"),
        ("rkv", {"mix": 1.5}, "mix=1.5"),
        ("vase", {"protected": 2.0}, "protected=2.0"),
        ("vase", {"sinks": -1}, "sinks=-1"),
        ("h2o", {"variant": "mine"}, "variant=mine"),
        ("no_question", {"question_on_top": True}, "question_on_top=True contradicts"),
    ],
)
def test_a_policys_own_settings_out_of_range(name, settings, named):
    with pytest.raises(ValueError, match=named):
        make(name, **{"keep_ratio": 0.3, "local_window": 48, "budget": 128, **settings})


def test_dynts_needs_a_predictor():
    with pytest.raises(ValueError, match=r"policy\.predictor is not set"):
        DynTS(name="dynts", keep_ratio=0.3, local_window=4, budget=8, predictor=None)
    with pytest.raises(ValueError, match="holds no"):
        DynTS(name="dynts", keep_ratio=0.3, local_window=4, budget=8, predictor="nowhere")


def test_the_oracle_takes_true_labels_while_the_text_is_the_labelled_one():
    policy = make("oracle_far_max", keep_ratio=0.5, local_window=4, budget=24)
    text = LABELLED[0].clone()
    text[25] = 0  # from here on another text
    rows = torch.tensor([0, 5, 9, 10, 14, 24, 25, 26, 30, 35])
    view = replace(make_view(10, 5, holes=False), problem_id="p0", draw=1, text_ids=text, positions=rows)
    predicted = view.signals[PredictedImportance(PREDICTOR)]
    true = LABELLED[1][rows]
    expected = torch.where(torch.tensor([0, 0, 0, 1, 1, 1, 0, 0, 0, 0], dtype=torch.bool), true, predicted)
    torch.testing.assert_close(policy.importance(view), expected, equal_nan=True)
    other = replace(view, draw=7)
    torch.testing.assert_close(policy.importance(other), predicted, equal_nan=True)
    shorter = replace(view, text_ids=LABELLED[0][:12])
    assert policy.importance(shorter)[3] == true[3]


def test_the_oracle_needs_its_labels():
    with pytest.raises(ValueError, match=r"policy\.labels=nowhere is no file.*kvsweep-predictor oracle"):
        make("oracle_far_max", keep_ratio=0.3, local_window=4, budget=8, labels="nowhere")


def test_identity_names_the_predictors_content_and_not_its_place(tmp_path):
    first = make("dynts", keep_ratio=0.3, local_window=4, budget=8).identity()
    (tmp_path / PREDICTOR).rename(tmp_path / "moved")
    settings = {"name": "dynts", "keep_ratio": 0.3, "local_window": 4, "budget": 8}
    assert DynTS(predictor="moved", **settings).identity() == first
    save_predictor(ImportancePredictor(8, (5,)), tmp_path / "other", {})
    assert DynTS(predictor="other", **settings).identity() != first


@pytest.mark.parametrize("question", [1, 50, 300])
@pytest.mark.parametrize("on_top", [False, True])
def test_capacity_holds_every_length_the_rule_can_reach(question, on_top):
    for keep_ratio, local_window in itertools.product([0.1, 0.9, 1.0], [1, 64, 128]):
        policy: BudgetPolicy = make(
            "window", keep_ratio=keep_ratio, local_window=local_window, budget=128, question_on_top=on_top
        )
        length, peak = question, question
        for _ in range(400):
            before, length = length, length + 1
            peak = max(peak, length)
            if before >= policy.trigger(question):
                length = len(policy.select(make_view(length, question, holes=False)).keep)
        assert peak <= policy.capacity(question, 400)
        assert keep_ratio == 1.0 or policy.capacity(question, 400) <= max(128 + on_top * question, question) + 1
