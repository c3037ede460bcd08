"""Every policy against a brute-force reading of its rule. A new policy adds one row to MATRIX."""

import cmath
import inspect
import itertools
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvsweep.compression.policies.caote import CAOTE
from kvsweep.compression.policies.dynts import DynTS
from kvsweep.compression.policies.dynts_ablations import Bottom, NoQuestion, NoWindow
from kvsweep.compression.policies.full import FullCache
from kvsweep.compression.policies.gkv import GKV
from kvsweep.compression.policies.h2o import H2O, H2ODynTSCode
from kvsweep.compression.policies.inertia import Inertia
from kvsweep.compression.policies.keydiff import KeyDiff
from kvsweep.compression.policies.knorm import KNorm
from kvsweep.compression.policies.lagkv import LagKV
from kvsweep.compression.policies.lazyeviction import LazyEviction
from kvsweep.compression.policies.longflow import LongFlow
from kvsweep.compression.policies.oracle import Oracle, save_labels
from kvsweep.compression.policies.question_window import QuestionWindow
from kvsweep.compression.policies.raas import RaaS
from kvsweep.compression.policies.random import Random, RandomHead
from kvsweep.compression.policies.rkv import RKV, RKVDynTSCode
from kvsweep.compression.policies.rpc import RPC
from kvsweep.compression.policies.sepllm import SepLLM, SepLLMDynTSCode
from kvsweep.compression.policies.snapkv import SnapKV, SnapKVDynTSCode
from kvsweep.compression.policies.streaming_llm import StreamingLLM, StreamingLLMDynTSCode
from kvsweep.compression.policies.tova import TOVA
from kvsweep.compression.policies.triattention import TriAttention, read_statistics, save_statistics
from kvsweep.compression.policies.vase import VaSE
from kvsweep.compression.policies.window import Window
from kvsweep.compression.policy import (
    AttentionMass,
    BudgetPolicy,
    LastUse,
    PredictedImportance,
    RecentQueries,
    SizeInRows,
)
from kvsweep.compression.recorders import ImportancePredictor, save_predictor
from kvsweep.harness.settings import WEIGHTS, build
from kvsweep.harness.toy.tasks import problems
from kvsweep.messages.errors import UserError
from tests.compression.views import view_at
from tests.harness.decode.fakes import ask, run, toy_model

POLICY_FILES = sorted(Path(__file__).parents[2].glob("conf/policy/*.yaml"))
PREDICTOR = "predictor-of-the-test"
LABELS = "labels-of-the-test.safetensors"
STATISTICS = "statistics-of-the-test.safetensors"


LAYERS, KV_HEADS, HEAD_DIM = 2, 2, 6


def layers_of(view):
    return range(len(view.keys))


def heads_of(view):
    return range(view.keys[0].shape[0])


def each(view, score):
    """[layers, kv_heads] of score(layer, head)."""
    return [[score(i, h) for h in heads_of(view)] for i in layers_of(view)]


def grid(view, score):
    """[layers, kv_heads, length] of score(layer, head, row)."""
    return each(view, lambda i, h: [score(i, h, r) for r in range(view.length)])


def row(view, score):
    """[length] of score(row)."""
    return [score(r) for r in range(view.length)]


def is_answer(view, r):
    return view.answer_start is not None and int(view.positions[r]) >= view.answer_start


def is_question(view, r):
    return int(view.positions[r]) < view.question_length


def importance(view, r):
    if is_question(view, r):
        return 0.0
    return float(next(v for signal, v in view.signals.items() if isinstance(signal, PredictedImportance))[r])


def dynts(view, policy):
    return row(view, lambda r: math.inf if is_answer(view, r) else importance(view, r))


def bottom(view, policy):
    """As released the lowest stay and question and answer have infinity; with the question kept, both are kept."""
    end = -math.inf if policy.question_rule == "free" else math.inf
    return row(view, lambda r: end if is_question(view, r) or is_answer(view, r) else -importance(view, r))


def random_scores(view, policy):
    numbers, kept = view.uniform(), policy.question_rule != "free"
    return row(view, lambda r: math.inf if kept and is_answer(view, r) else float(numbers[r]))


def window(view, policy):
    return row(view, lambda r: int(view.positions[r]))


def sepllm(view, policy):
    """None where a row has no claim: it goes even where there is room."""

    return row(view, lambda r: int(view.positions[r]) if view.separators[r] else None)


def h2o(view, policy):
    return grid(view, lambda i, h, r: float(view.signals[AttentionMass()][i, h, r]))


def probabilities(view, layer, head, newest):
    """[group, newest, length] in float64: the queries of a key head's group over all rows that each may see."""
    recorded = max((s for s in view.signals if isinstance(s, RecentQueries)), key=lambda s: s.window)
    queries = view.signals[recorded][layer].double()[:, -newest:]
    group = queries.shape[0] // len(heads_of(view))
    keys, length = view.keys[layer][head].double(), view.length
    found = torch.zeros(group, newest, length, dtype=torch.float64)
    for g, q in itertools.product(range(group), range(newest)):
        seen = length - newest + q + 1
        logits = keys[:seen] @ queries[head * group + g, q] * view.scaling
        found[g, q, :seen] = torch.softmax(logits, dim=0)
    return found


def past_attention(view, policy, layer, head, *, largest_logit):
    """[group or 1, rows before the window]: softmax over those rows alone, averaged over the window's queries."""
    size = policy.observation_window
    queries = view.signals[RecentQueries(size)][layer].double()
    group = queries.shape[0] // len(heads_of(view))
    logits = queries[head * group : (head + 1) * group] @ view.keys[layer][head].double().T * view.scaling
    logits = logits[:, :, : view.length - size]
    logits = logits.amax(dim=0, keepdim=True) if largest_logit else logits
    return torch.softmax(logits, dim=-1).mean(dim=1)


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
    return each(view, lambda i, h: torch.cat([score(i, h), window_rows]).tolist())


def snapkv(view, policy):
    size = policy.observation_window

    def score(i, h):
        rows = probabilities(view, i, h, size)[:, :, : view.length - size].mean(dim=1)
        return torch.stack([pooled(r, policy.pooling, "mean") for r in rows]).mean(dim=0)

    return outside_window(view, policy, score)


def mean_over_heads(view, newest):
    """[newest, length] attention averaged over all layers and query heads."""
    every = [probabilities(view, i, h, newest) for i in layers_of(view) for h in heads_of(view)]
    return torch.cat(every).mean(dim=0)


def queries_summed(view, policy):
    """One more than the observation window at a first eviction, which leaves no hole behind; two more later."""
    first = int(view.positions[-1]) == view.length - 1
    return policy.observation_window + (1 if first else 2)


def snapkv_code(view, policy):
    return mean_over_heads(view, queries_summed(view, policy)).sum(dim=0).tolist()


def h2o_code(view, policy):
    return mean_over_heads(view, 1)[0].tolist()


def tova(view, policy):
    layers = [torch.cat([probabilities(view, i, h, 1) for h in heads_of(view)]).mean(dim=0)[0] for i in layers_of(view)]
    return [[layer.tolist() for _ in heads_of(view)] for layer in layers]


def redundancy(keys, threshold):
    """R-KV's: of each row the last similar column counts zero, then mean over rows and softmax."""
    size = keys.norm(dim=1)
    cosine = keys @ keys.T / (size[:, None] * size)
    cosine.fill_diagonal_(0.0)
    for row in cosine:
        above = [b for b, one in enumerate(row.tolist()) if one > threshold]
        row[above[-1] if above else 0] = 0.0
    return torch.softmax(cosine.mean(dim=0), dim=0)


def rkv(view, policy):
    def score(i, h):
        (attention,) = past_attention(view, policy, i, h, largest_logit=True)
        repeated = redundancy(view.keys[i][h].double(), policy.threshold)[: len(attention)]
        return policy.mix * pooled(attention, policy.pooling, "max") - (1 - policy.mix) * repeated

    return outside_window(view, policy, score)


def rkv_code(view, policy):
    outside = view.length - policy.local_window
    attention = mean_over_heads(view, queries_summed(view, policy)).sum(dim=0)[:outside] / policy.observation_window
    every = [redundancy(view.keys[i][h].double(), policy.threshold) for i in layers_of(view) for h in heads_of(view)]
    repeated = torch.stack(every).mean(dim=0)[:outside]
    scores = policy.mix * pooled(attention, policy.pooling, "max") - (1 - policy.mix) * repeated
    return [*scores.tolist(), *[0.0] * policy.local_window]


def vase(view, policy):
    outside = view.length - policy.observation_window
    numbers = view.uniform()

    def score(i, h):
        rows = past_attention(view, policy, i, h, largest_logit=False)
        weights = torch.stack([pooled(r, policy.pooling, "mean") for r in rows]).mean(dim=0)
        values = view.values[i][h, :outside].double()
        size = [
            math.inf if view.positions[i, h, r] < policy.sinks_kept else float(values[r].max() - values[r].min())
            for r in range(outside)
        ]
        total = policy.local_window + int((policy.budget + 1 - policy.local_window) * policy.keep_ratio)
        large = sorted(range(outside), key=lambda r: (-size[r], r))[: round(policy.large * total)]
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
    return grid(view, lambda i, h, r: -float(view.keys[i][h, r].double().norm()))


def random_head(view, policy):
    numbers = view.uniform()
    return grid(view, lambda i, h, r: float(numbers[i, h, r]))


def lagkv(view, policy):
    lag, first = policy.lag, policy.sinks_kept
    parts = (view.length - first) // lag

    def spread(rows, start):
        """A part's deviations over the channels, each channel scaled by its range in the next part, then a softmax."""
        part, reference = rows[start : start + lag], rows[start + lag : start + 2 * lag]
        low = reference.min(dim=0).values
        scaled = (part - low) / (reference.max(dim=0).values - low)
        mean = scaled.mean(dim=1, keepdim=True)
        return torch.softmax((((scaled - mean) ** 2).sum(dim=1) / (rows.shape[1] - 1)).sqrt(), dim=0)

    def score(i, h):
        if parts < 2:
            return [1.0 if r < first else (r - first) / (view.length - first) for r in range(view.length)]
        found = [1.0] * view.length
        keys, values = view.keys[i][h].double(), view.values[i][h].double()
        for start in range(first, first + (parts - 1) * lag, lag):
            of_part = ((spread(keys, start) + spread(values, start)) / 2).tolist()
            for r, one in enumerate(of_part):
                found[start + r] = sum((other, -q) < (one, -r) for q, other in enumerate(of_part)) / lag
        return found

    return each(view, score)


def caote(view, policy):
    def score(i, h):
        rows = past_attention(view, policy, i, h, largest_logit=False)
        a = torch.stack([pooled(r, policy.pooling, "mean") for r in rows]).mean(dim=0)
        values = view.values[i][h, : len(a)].double()
        output = sum(a[r] * values[r] for r in range(len(a)))
        return torch.stack([a[r] / (1 - a[r]) * (values[r] - output).norm() for r in range(len(a))])

    return outside_window(view, policy, score)


def longflow(view, policy):
    def score(i):
        total = torch.zeros(view.length, dtype=torch.float64)
        for h in heads_of(view):
            for of_query_head in probabilities(view, i, h, 1)[:, 0]:
                total += (of_query_head[:, None] * view.values[i][h].double()).abs().sum(dim=1)
        return total.tolist()

    return [[score(i) for _ in heads_of(view)] for i in layers_of(view)]


def inertia(view, policy):
    return grid(view, lambda i, h, r: float(view.signals[AttentionMass(policy.decay)][i, h, r]))


def raas(view, policy):
    return grid(view, lambda i, h, r: int(view.signals[LastUse(policy.threshold)][0, i, h, r]))


def sigmoid_twice(x):
    return 2 / (1 + math.exp(x)) if x < 700 else 0.0


def lazyeviction(view, policy):
    def score(i, h, r):
        last, longest = view.signals[LastUse(policy.threshold)][:, i, h, r].tolist()
        age = int(view.positions[i, h, -1]) - last
        again = sigmoid_twice(longest - 1) if longest else 0.0
        return sigmoid_twice(1 + age / (longest + 1e-5)) + again

    return grid(view, score)


def gkv(view, policy):
    size = policy.observation_window

    def score(i, h):
        attention = probabilities(view, i, h, size)[:, :, : view.length - size].amax(dim=0).mean(dim=0)
        remembered = view.signals[GKV.MEMORY][i, h].double()
        memory = [
            a if math.isnan(old) else max(a, policy.decay * old)
            for a, old in zip((attention / attention.max()).tolist(), remembered.tolist(), strict=False)
        ]
        repeated = redundancy(view.keys[i][h].double(), policy.threshold)[: len(memory)]
        mixed = policy.mix * pooled(memory, policy.pooling, "max")
        return mixed - (1 - policy.mix) * repeated / repeated.max()

    return outside_window(view, policy, score)


def rpc(view, policy):
    size, found = policy.observation_window, []
    for i in layers_of(view):
        queries = view.signals[RecentQueries(size)][i].double()
        group = queries.shape[0] // len(heads_of(view))
        kept = int((view.positions[i, 0] < view.question_length).sum()) if policy.question_rule != "free" else 0
        heads = []
        for q in range(queries.shape[0]):
            keys = view.keys[i][q // group, kept : view.length - size].double()
            # The released code takes the newest query twice, and the oldest of the window not at all.
            each = [torch.softmax(keys @ queries[q, n] * view.scaling, dim=0) for n in (*range(1, size), size - 1)]
            heads.append(sum(each) / size)
        layer = pooled(sum(heads) / len(heads), policy.pooling, "mean").tolist()
        found.append([[0.0] * kept + layer + [0.0] * size for _ in heads_of(view)])
    return found


def triattention(view, policy):
    """Each key turned back by its own position, and its cosine with a mean query at every distance to come."""
    stats = read_statistics(policy.statistics, "cpu")
    frequencies, scaling = stats["inverse_frequencies"].tolist(), float(stats["attention_scaling"])
    newest = int(view.positions.flatten()[-1]) + 1

    def of_query_head(layer, head, q):
        scores = []
        for r in range(view.length):
            key, position = view.keys[layer][head, r].double().tolist(), int(view.positions[layer, head, r])
            total = 0.0
            for f, w in enumerate(frequencies):
                turned = complex(key[f], key[f + len(frequencies)]) / scaling
                before = turned * cmath.exp(-1j * w * position)
                mean, size = complex(stats["mean"][layer, q, f]), float(stats["mean_size"][layer, q, f])
                amplitude, phase = abs(mean) * abs(before), cmath.phase(mean * before.conjugate())
                waves = [math.cos(w * (newest - position + 2**d) + phase) for d in range(17)]
                total += scaling**2 * (amplitude * sum(waves) / 17 + (size - abs(mean)) * abs(before))
            scores.append(total)
        asked = [policy.question_rule != "free" and p < view.question_length for p in view.positions[layer, head]]
        competing = torch.tensor([s for s, a in zip(scores, asked, strict=True) if not a], dtype=torch.float64)
        scores = torch.tensor(scores, dtype=torch.float64)
        return (scores - competing.mean()) / competing.std(correction=0)

    group = stats["mean"].shape[1] // len(heads_of(view))
    every = [
        [torch.stack([of_query_head(i, h, h * group + g) for g in range(group)]).amax(dim=0) for h in heads_of(view)]
        for i in layers_of(view)
    ]
    if policy.share_layers:
        every = [[sum(layer[h] for layer in every) / len(every) for h in heads_of(view)]] * len(every)
    return [[head.tolist() for head in layer] for layer in every]


def write_statistics(path, *, layers, q_heads, pairs):
    """Random means of queries, for a model with a factor on its rotation, as YaRN has one."""
    generator = torch.Generator().manual_seed(5)
    mean = torch.randn(layers, q_heads, pairs, dtype=torch.complex64, generator=generator)
    size = mean.abs() + torch.rand(mean.shape, generator=generator)
    rotation = {"inverse_frequencies": 0.3 ** torch.arange(pairs), "attention_scaling": torch.tensor(1.2)}
    save_statistics(path, {"mean": mean, "mean_size": size, **rotation}, {"hidden_size": 8})


# A text of 40 tokens whose labels fall from 1 at position 10 to 0 at position 29; none are known outside.
LABELLED = (
    torch.arange(100, 140),
    torch.cat([torch.full((10,), torch.nan), torch.linspace(1, 0, 20), torch.full((10,), torch.nan)]),
)


def oracle(view, policy):
    # The text of the matrix differs from the labelled one at once: all that is left is the head's score.
    return dynts(view, policy)


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
    "no_question": (NoQuestion, {}, dynts),
    "no_window": (NoWindow, {}, dynts),
    "question_window": (QuestionWindow, {}, window),
    "streaming_llm": (StreamingLLM, {"sinks": 3}, window),
    "streaming_llm_dynts_code": (StreamingLLMDynTSCode, {"sinks": 3}, window),
    "sepllm": (SepLLM, {"sinks": 2}, sepllm),
    "sepllm_dynts_code": (SepLLMDynTSCode, {}, sepllm),
    "h2o": (H2O, {}, h2o),
    "h2o_dynts_code": (H2ODynTSCode, {}, h2o_code),
    "snapkv": (SnapKV, {"observation_window": 7}, snapkv),
    "snapkv_dynts_code": (SnapKVDynTSCode, {"observation_window": 5}, snapkv_code),
    "rkv": (RKV, {"observation_window": 4}, rkv),
    "rkv_paper": (RKV, {"observation_window": 4, "mix": 0.1}, rkv),
    "rkv_dynts_code": (RKVDynTSCode, {"observation_window": 4}, rkv_code),
    "tova": (TOVA, {}, tova),
    "tova_kvpress": (TOVA, {"keep_last": True}, tova),
    "keydiff": (KeyDiff, {}, keydiff),
    "knorm": (KNorm, {}, knorm),
    "vase": (VaSE, {"observation_window": 5, "sinks": 2, "large": 0.2}, vase),
    "random_head": (RandomHead, {}, random_head),
    "inertia": (Inertia, {}, inertia),
    "lagkv": (LagKV, {"sinks": 3, "lag": 13}, lagkv),
    "lagkv_16": (LagKV, {"lag": 16}, lagkv),
    "caote": (CAOTE, {"observation_window": 5}, caote),
    "longflow": (LongFlow, {}, longflow),
    "raas": (RaaS, {}, raas),
    "lazyeviction": (LazyEviction, {}, lazyeviction),
    "gkv": (GKV, {"observation_window": 6, "pooling": 3}, gkv),
    "rpc": (RPC, {"observation_window": 7}, rpc),
    "triattention": (TriAttention, {"statistics": STATISTICS}, triattention),
}
EVICTING = [name for name in MATRIX if name != "full"]
# Newest rows that stay for certain, where these are not the local window.
NEWEST = {
    "no_window": 1,
    "tova": 0,
    "tova_kvpress": 1,
    "keydiff": 0,
    "knorm": 0,
    "snapkv": 7,
    "rkv": 4,
    "rkv_paper": 4,
    "vase": 5,
    "lagkv": 0,
    "lagkv_16": 0,
    "caote": 5,
    "longflow": 1,
    "gkv": 6,
    "rpc": 7,
    "triattention": 0,
}
QUESTIONS = ("free", "pinned", "on_top")
QUESTIONS_OF = {"no_question": ("free",), "question_window": ("on_top",)}  # the others are refused
PINNING = ("dynts", "oracle", "no_window", "random_head", "raas", "triattention")
ITS_AUTHORS = {"rpc": "on_top", "question_window": "on_top"} | {
    name: "pinned" for name in EVICTING if name.startswith(PINNING)
}


def is_its_turn(name, question):
    """Each policy with one of the questions, all of which have their turn; the slow yardsticks of two take seconds."""
    questions = QUESTIONS_OF.get(name, QUESTIONS)
    return name not in ("keydiff", "triattention") and question == questions[EVICTING.index(name) % len(questions)]


@pytest.fixture(autouse=True)
def predictor(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_predictor(ImportancePredictor(8, (4,)), Path(PREDICTOR), {})
    save_labels(LABELS, {"p0/0": (torch.arange(100), torch.linspace(1, 0, 100)), "p0/1": LABELLED}, {"hidden_size": 8})
    write_statistics(STATISTICS, layers=LAYERS, q_heads=4 * KV_HEADS, pairs=HEAD_DIM // 2)


def make(name, **settings):
    cls, own, _ = MATRIX[name]
    predictor = {"predictor": PREDICTOR} if issubclass(cls, DynTS) else {}
    return build(cls, "policy", {"name": name, **predictor, **own, **settings})


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
    signals = {RecentQueries(n): queries[:, :, 7 - n :] for n in (1, 4, 5, 6, 7)}
    mass = torch.rand(LAYERS, KV_HEADS, length, generator=generator).mul(20).round()
    if not per_head:
        scores[own < question_length] = torch.nan
        signals[PredictedImportance(PREDICTOR)] = scores
    numbers = torch.rand(own.shape, generator=generator, dtype=torch.float64)
    if per_head:
        signals[AttentionMass(0.8)] = torch.rand(LAYERS, KV_HEADS, length, generator=generator).mul(20).round()
        # Few different ages and intervals, so that many rows tie.
        ages = torch.randint(0, 5, (LAYERS, KV_HEADS, length), generator=generator)
        intervals = torch.randint(0, 4, ages.shape, generator=generator)
        signals[LastUse(1e-4)] = torch.stack([own[..., -1:] - ages, intervals])
        memory = torch.rand(LAYERS, KV_HEADS, length, generator=generator)
        signals[GKV.MEMORY] = memory.masked_fill(memory < 0.3, torch.nan)
    separators = torch.rand(own.shape, generator=generator) < 0.3
    return view_at(
        own,
        text_ids=torch.randint(0, 50, (2 * length,), generator=torch.Generator().manual_seed(seed)),
        token_ids=torch.randint(0, 50, own.shape, generator=generator),
        separating=lambda: separators,
        question_length=question_length,
        answer_start=answer_start,
        keys=torch.randn(LAYERS, KV_HEADS, length, HEAD_DIM, generator=generator) + 0.5,
        values=torch.randn(LAYERS, KV_HEADS, length, HEAD_DIM, generator=generator),
        scaling=HEAD_DIM**-0.5,
        signals={**signals, AttentionMass(): mass},
        uniform=lambda: numbers,
    )


def brute_force(name, policy, view):
    """The published rule, a row at a time: shared rows, or rows per layer and head."""
    scores = MATRIX[name][2](view, policy)
    question = policy.question_rule
    on_top = view.question_length if question == "on_top" else 0
    total = on_top + policy.local_window + int((view.length - on_top - policy.local_window) * policy.keep_ratio)
    newest = NEWEST.get(name, policy.local_window)
    if name == "h2o":
        newest = round((policy.local_window + int((policy.budget + 1 - policy.local_window) * policy.keep_ratio)) / 2)
    if name == "question_window":
        total = min(view.length, view.question_length + policy.local_window)
    if name == "rpc":  # each eviction leaves as many more as the first one left outside the window
        growth = int((policy.budget + 1 - policy.local_window) * policy.keep_ratio)
        past = view.evictions * growth
        total = on_top + policy.local_window + past
        total += int((view.length - on_top - policy.local_window - past) * policy.keep_ratio)
    if name == "streaming_llm_dynts_code":
        total = min(view.length, total + policy.sinks_kept)
    first_newest = max(on_top, view.length - newest)

    def keep(one, positions):
        kept = set(range(first_newest, view.length))
        first = max(view.question_length if question != "free" else 0, policy.sinks_kept)
        asked = [r for r in range(first_newest) if positions[r] < first]
        claims = [r for r in range(first_newest) if r not in asked and one[r] is not None]
        for r in [*asked, *sorted(claims, key=lambda r: (-one[r], r))]:
            if len(kept) < total:
                kept.add(r)
        return sorted(kept)

    if not isinstance(scores[0], list):
        return keep(scores, view.positions)
    return [[keep(scores[i][h], view.positions[i, h]) for h in heads_of(view)] for i in layers_of(view)]


def test_the_matrix_covers_every_policy_file():
    assert {path.stem for path in POLICY_FILES} == {*MATRIX}


@pytest.mark.parametrize("name", EVICTING)
@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.slow_unless(rule=is_its_turn)
@pytest.mark.slow_covers(1)
def test_kept_rows_equal_brute_force(name, question):
    if question not in QUESTIONS_OF.get(name, QUESTIONS):
        pytest.skip(f"{name} is about its own treatment of the question")
    cases = itertools.product([65, 38], [0.1, 0.29, 0.5, 1.0], [8, 17])
    for seed, (length, keep_ratio, local_window) in enumerate(cases):
        if name.startswith(("streaming", "sepllm")) and int((65 - local_window) * keep_ratio) < 4:
            continue  # no room for the sinks
        policy = make(name, keep_ratio=keep_ratio, local_window=local_window, budget=64, question=question)
        # The question is unevicted when it lies on top, so its rows stand at the front without holes.
        options = {"seed": seed, "holes": question != "on_top", "per_head": policy.per_head, "group": (4, 7)[seed % 2]}
        if name == "triattention":
            group = options["group"]
            write_statistics(STATISTICS, layers=LAYERS, q_heads=group * KV_HEADS, pairs=HEAD_DIM // 2)
        view = make_view(length, 1 + seed % 13, answer_start=length - 5 if seed % 2 else None, **options)
        kept = policy.select(view).keep
        assert kept.tolist() == brute_force(name, policy, view)


@pytest.mark.parametrize("name", EVICTING)
@pytest.mark.slow_unless(rule=lambda name: EVICTING.index(name) % 10 == 0)
@pytest.mark.one_in(3)
def test_kept_rows_equal_brute_force_on_an_embedded_models_cache(name, monkeypatch):
    compared, toy_qwen = [], toy_model()
    if name == "triattention":
        shape = toy_qwen.shape
        write_statistics(STATISTICS, layers=shape.layers, q_heads=shape.q_heads, pairs=shape.head_dim // 2)
    predictor = (
        {"predictor": str(WEIGHTS / "predictors/toy_qwen/far_max")} if issubclass(MATRIX[name][0], DynTS) else {}
    )
    policy = make(name, keep_ratio=0.4, local_window=12, budget=70, **predictor)
    plain_select = type(policy).select

    def select(policy, view):
        selection = plain_select(policy, view)
        compared.append((view, selection.keep, brute_force(name, policy, view)))
        return selection

    monkeypatch.setattr(type(policy), "select", select)
    prompt = toy_qwen.dialogue.prompt_ids(problems("add")[0].question)
    [request] = ask([prompt], policy)
    assert name == "rpc" or policy.capacity(len(prompt), 90) == 71
    run(toy_qwen, [replace(request, problem_id="p")], slots=1, max_new_tokens=90)
    # A first eviction leaves SepLLM so few rows that the text ends before a second; RPC's question lies on top.
    assert len(compared) >= (1 if name in ("sepllm", "rpc") else 2)
    for view, kept, expected in compared:
        if name == "knorm":
            # In the first layer a token has one norm wherever it stands: rounding decides, as in the authors' code.
            norms = torch.stack(list(view.keys)).norm(dim=-1)
            kept, expected = norms.gather(-1, kept), norms.gather(-1, torch.tensor(expected))
            torch.testing.assert_close(kept.sort().values, expected.sort().values, rtol=1e-6, atol=0)
        else:
            assert kept.tolist() == expected


@pytest.mark.parametrize("name", EVICTING)
def test_a_question_is_what_the_authors_make_of_it_unless_one_says_otherwise(name):
    settings = {"keep_ratio": 0.3, "local_window": 20, "budget": 64}
    assert make(name, **settings).question_rule == ITS_AUTHORS.get(name, "free")


def test_question_and_window_are_the_rows_that_the_authors_code_keeps():
    """Recorded: inference/window.py of Robin930/DynTS at a55dc37, sink_type="question", a question of 7 of 61 rows."""
    view = make_view(61, 7, holes=False)
    for local_window, kept in ((20, [*range(7), *range(41, 61)]), (60, [*range(61)])):
        policy = make("question_window", keep_ratio=0.4, local_window=local_window, budget=60)
        assert policy.select(view).keep.tolist() == kept


@pytest.mark.parametrize("sinks", [0, 4])
@pytest.mark.parametrize("name", EVICTING)
def test_sinks_stay_inside_the_size(name, sinks):
    if name == "question_window" and sinks:
        pytest.skip("question_window has no room beside its window")
    policy = make(name, keep_ratio=0.5, local_window=20, budget=64, sinks=sinks)
    view = make_view(65, 12, per_head=policy.per_head, holes=False)
    kept = policy.select(view).keep
    assert kept.tolist() == brute_force(name, policy, view)
    assert (kept[..., :sinks] == torch.arange(sinks)).all()


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


def test_a_long_question_counts_against_the_kept_fraction_unless_on_top():
    # Ratio 0.1 and window 3,000 leave k = 200 of 5,001: a 250-token question fills it and loses its last 50 tokens.
    view = make_view(5001, 250, holes=False)
    inside = make("dynts", keep_ratio=0.1, local_window=3000, budget=5000).select(view).keep
    assert inside[:200].tolist() == list(range(200))
    assert inside[200:].tolist() == list(range(2001, 5001))
    on_top = make("dynts", keep_ratio=0.1, local_window=3000, budget=5000, question="on_top").select(view).keep
    assert on_top[:250].tolist() == list(range(250))
    assert len(on_top) == 250 + 175 + 3000


def test_the_answer_is_pinned_over_any_thinking():
    view = make_view(129, 4, answer_start=60, holes=False)
    kept = set(make("dynts", keep_ratio=0.5, local_window=8, budget=128).select(view).keep.tolist())
    assert set(range(4)) <= kept
    # 121 tokens lie outside the window: k = 60, so 4 question tokens and the lowest 56 of the 61 answer tokens.
    assert kept == set(range(4)) | set(range(60, 116)) | set(range(121, 129))


@pytest.mark.parametrize(
    ("name", "settings", "named"),
    [
        ("streaming_llm", {"sinks": 25}, "sinks=25.*of the 72 tokens that stay 48 are the newest"),
        ("streaming_llm", {"sinks": -1}, "sinks=-1"),
        ("sepllm", {"sinks": 25}, "sinks=25"),
        ("snapkv", {"observation_window": 0}, "observation_window=0"),
        ("snapkv", {"observation_window": 73}, "observation_window=73.*the 72 tokens"),
        ("snapkv", {"pooling": 4}, "pooling=4.*odd"),
        ("rkv", {"pooling": 0}, "pooling=0"),
        ("rkv", {"mix": 1.5}, "mix=1.5"),
        ("vase", {"large": 2.0}, "large=2.0"),
        ("h2o", {"recent": 1.5}, "recent=1.5"),
        ("vase", {"sinks": -1}, "sinks=-1"),
        ("lagkv", {"sinks": -1}, "sinks=-1"),
        ("lagkv", {"lag": 0}, "lag=0"),
        ("inertia", {"decay": 1.5}, "decay=1.5"),
        ("gkv", {"decay": -0.1}, "decay=-0.1"),
        ("raas", {"threshold": 0.0}, "threshold=0.0"),
        ("lazyeviction", {"threshold": math.nan}, "threshold=nan"),
        ("no_question", {"question": "on_top"}, "question=on_top contradicts"),
        ("no_question", {"question": "pinned"}, "question=pinned contradicts"),
        ("question_window", {"question": "free"}, "question=free contradicts"),
        ("dynts", {"predictor": None}, r"model\.predictor is not set"),
        ("dynts", {"predictor": "nowhere"}, "holds no"),
        ("dynts", {"predictor": STATISTICS}, "holds no predictor"),
        ("oracle_far_max", {"labels": "nowhere"}, "kvsweep predictor oracle"),
        ("triattention", {"statistics": None}, "kvsweep predictor statistics"),
    ],
)
def test_a_setting_that_a_policy_refuses(name, settings, named):
    with pytest.raises(UserError, match=named):
        make(name, **{"keep_ratio": 0.3, "local_window": 48, "budget": 128, **settings})


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


def test_triattention_may_keep_rows_of_their_own_in_each_layer():
    policy = make("triattention", keep_ratio=0.3, local_window=9, budget=64, share_layers=False)
    view = make_view(65, 6, per_head=True)
    kept = policy.select(view).keep
    assert kept.tolist() == brute_force("triattention", policy, view)
    assert not torch.equal(kept[0], kept[1])


def test_identity_names_the_predictors_content_and_not_its_place(tmp_path):
    first = make("dynts", keep_ratio=0.3, local_window=4, budget=8).identity()
    (tmp_path / PREDICTOR).rename(tmp_path / "moved")
    settings = {"name": "dynts", "keep_ratio": 0.3, "local_window": 4, "budget": 8}
    assert DynTS(predictor="moved", **settings).identity() == first
    save_predictor(ImportancePredictor(8, (5,)), tmp_path / "other", {})
    assert DynTS(predictor="other", **settings).identity() != first


# Rows, tokens and window of Random Attention, G-KV and TriAttention, and a ratio that was found by hand for each.
@pytest.mark.parametrize(
    ("rows", "every", "window", "by_hand"), [(1024, 64, 64, 0.937), (2048, 128, 16, 0.9405), (2048, 128, 128, 0.9371)]
)
def test_sizes_of_other_papers_keep_the_same_rows_said_either_way(rows, every, window, by_hand):
    hand = make("random", keep_ratio=by_hand, local_window=window, budget=rows + every)
    ours = make("random", local_window=window, **SizeInRows(rows=rows, every=every, local_window=window).settings())
    positions = torch.arange(rows + every + 1)
    for eviction in range(5):
        view = make_view(rows + every + 1, 7, seed=eviction, holes=False)
        kept = ours.select(replace(view, positions=positions)).keep
        assert len(kept) == rows
        assert torch.equal(kept, hand.select(replace(view, positions=positions)).keep)
        newest = int(positions[-1]) + 1
        positions = torch.cat([positions[kept], torch.arange(newest, newest + every + 1)])


@pytest.mark.parametrize("question", [1, 50, 300])
@pytest.mark.parametrize("on_top", [False, True])
@pytest.mark.slow_unless(rule=lambda question, on_top: question == 50 and on_top)
def test_capacity_holds_every_length_the_rule_can_reach(question, on_top):
    for keep_ratio, local_window in itertools.product([0.1, 0.9, 1.0], [1, 64, 128]):
        sizes = {"keep_ratio": keep_ratio, "local_window": local_window, "budget": 128}
        policy: BudgetPolicy = make("window", **sizes, question="on_top" if on_top else "free")
        length, peak = question, question
        for _ in range(400):
            before, length = length, length + 1
            peak = max(peak, length)
            if before >= policy.trigger(question):
                length = len(policy.select(make_view(length, question, holes=False)).keep)
        assert peak <= policy.capacity(question, 400)
        assert keep_ratio == 1.0 or policy.capacity(question, 400) <= max(128 + on_top * question, question) + 1


def test_the_cache_of_rpc_grows_with_the_text():
    """The published P 1024, R 32 and c 4, and a capacity that the longest text fills."""
    policy = make("rpc", keep_ratio=0.25, local_window=32, budget=1024 + 32 - 1, observation_window=32)
    question, generated, held, found, fullest = 100, 1, 100, [], 100
    while generated < 6000:
        before, held, generated = held, held + 1, generated + 1
        fullest = max(fullest, held)
        if before >= policy.trigger(question, len(found)):
            found.append((generated, held - question, policy.length_after(held, question, len(found)) - question))
            held = found[-1][-1] + question
    # The n-th block of 1,024 tokens is complete when the window of 32 lies behind it; 256 more rows stay each time.
    assert found == [(1024 * n + 33, 1024 + 256 * (n - 1) + 32, 256 * n + 32) for n in range(1, 6)]
    assert fullest <= policy.capacity(question, 6000) <= fullest + 1  # the last token is never fed


@pytest.mark.parametrize("question", [1, 40, 90])
@pytest.mark.parametrize("rule", ["free", "on_top"])
def test_the_capacity_of_rpc_holds_every_length_it_can_reach(question, rule):
    for keep_ratio, local_window, tokens in itertools.product([0.1, 0.5, 0.9, 1.0], [7, 30], [1, 30, 31, 300]):
        settings = {"keep_ratio": keep_ratio, "local_window": local_window, "budget": 50, "question": rule}
        policy = make("rpc", **settings)
        held, peak, evictions = question, question, 0
        for _ in range(tokens - 1):
            before, held = held, held + 1
            peak = max(peak, held)
            if before >= policy.trigger(question, evictions):
                left = policy.length_after(held, question, evictions)
                evictions, held = evictions + (left < held), left
        capacity = policy.capacity(question, tokens)
        assert peak <= capacity <= peak + 1, (keep_ratio, local_window, tokens)
