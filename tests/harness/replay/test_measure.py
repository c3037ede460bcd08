"""Replayed numbers against transformers, which reads each text whole under an explicit mask over evicted positions."""

import itertools
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from kvsweep.harness.decode.request import Branch
from kvsweep.harness.models.config import ModelConfig
from kvsweep.harness.models.load import load_model
from kvsweep.harness.replay.measure import replay
from kvsweep.harness.replay.references import Text
from kvsweep.harness.settings import WEIGHTS, compose_config
from kvsweep.harness.sweep.job import make_job
from kvsweep.harness.toy.tasks import problems
from tests.harness.decode.test_feed import Watched

BUDGET, WINDOW, RATIO, SINKS = 48, 12, 0.5, 4


@cache
def stock():
    return AutoModelForCausalLM.from_pretrained(WEIGHTS / "toy_qwen", dtype=torch.float32, attn_implementation="eager")


@pytest.fixture(scope="module")
def model():
    return load_model(ModelConfig(name="toy_qwen", title="Toy", path=str(WEIGHTS / "toy_qwen"), threads=1))


def job_of(name, *more):
    rule = [f"policy.budget={BUDGET}", f"policy.local_window={WINDOW}", f"policy.keep_ratio={RATIO}"]
    more = [*more, *([] if name == "window" else [f"policy.sinks={SINKS}"])]
    return make_job(
        compose_config(f"policy={name}", f"grid.policy=[full,{name}]", "policy.question=free", *rule, *more)
    )


def texts(model):
    found = []
    for number, problem in enumerate(problems("chain")[:2]):
        following = model.dialogue.prompt_ids(problems("regs")[number].question)
        closes = model.tokenizer.convert_tokens_to_ids("</think>")
        ids = (*following, closes, *following[: 20 + number], model.stop_ids[0])
        found.append(Text(pair=(problem.id, 0), prompt=problem.question, token_ids=ids))
    return found


def masked(question, text, sinks):
    """The published rule: log-probabilities [text, vocabulary], and the number of evictions.

    Once a step has found BUDGET rows, the next one sees the first `sinks` and the newest: WINDOW rows, and
    int((rows - WINDOW) * RATIO) more.
    """
    ids = [*question, *text]
    length = len(ids) - 1
    alive, mask = [], torch.full((length, length), -torch.inf)
    evictions = 0
    for row in range(length):
        before = len(alive)
        alive.append(row)
        mask[row, alive] = 0.0
        is_generated = row >= len(question)
        if before >= BUDGET and is_generated and row < length - 1:
            kept = WINDOW + int((len(alive) - WINDOW) * RATIO)
            first = alive[:sinks]
            alive = first + alive[sinks:][-(kept - len(first)) :]
            evictions += 1
    with torch.no_grad():
        logits = stock()(input_ids=torch.tensor([ids[:-1]]), attention_mask=mask[None, None]).logits[0]
    return logits[len(question) - 1 :].double().log_softmax(-1), evictions


@pytest.mark.parametrize(("name", "sinks"), [("window", 0), ("streaming_llm", SINKS), ("full", None)])
def test_numbers_equal_those_of_transformers_under_a_mask(model, name, sinks):
    job = job_of("window" if name == "full" else name)
    [cell] = [cell for cell in job.cells if cell.policy.name == name]
    wanted = {text: [cell] for text in texts(model)}
    rows = dict(replay_by_text(model, job, wanted))
    for text in wanted:
        row, question = rows[text.pair], model.dialogue.prompt_ids(text.prompt)
        following = torch.tensor(text.token_ids)
        full = plain(question, text.token_ids)
        found, evictions = (full, 0) if sinks is None else masked(question, text.token_ids, sinks)
        kl = (full.exp() * (full - found)).sum(-1)
        own, reference = (one.gather(-1, following[:, None])[:, 0] for one in (found, full))
        same = full.argmax(-1) == found.argmax(-1)
        answer = text.token_ids.index(model.tokenizer.convert_tokens_to_ids("</think>")) + 1
        assert row.evictions == evictions
        assert (evictions > 1) == (name != "full")
        assert row.tokens == len(following)
        assert row.prompt_tokens == len(question)
        assert row.answer_tokens == len(following) - answer
        for value, expected in [
            (row.loglik, own.sum()),
            (row.change, (own - reference).sum()),
            (row.answer_loglik, own[answer:].sum()),
            (row.answer_change, (own - reference)[answer:].sum()),
            (row.kl_mean, kl.mean()),
            (row.kl_median, kl.median() if len(kl) % 2 else np.median(kl)),
            (row.kl_p99, np.quantile(kl, 0.99)),
        ]:
            assert value == pytest.approx(float(expected), abs=1e-4, rel=1e-4)
        assert row.top1 == pytest.approx(float(same.double().mean()))
        assert row.first_other == (None if same.all() else int((~same).nonzero()[0]))
        for bins in (row.by_distance, row.by_entropy):
            assert sum(part.tokens for part in bins) == row.tokens
            assert sum(part.kl for part in bins) == pytest.approx(float(kl.sum()), abs=1e-3)
            assert sum(part.top1 for part in bins) == int(same.sum())
        if name == "full":
            assert row.by_distance[0].tokens == row.tokens
            assert row.kl_mean == 0


@pytest.mark.slow
@pytest.mark.parametrize("bits", [8, 2])
def test_packed_rows_count_from_the_first_token(model, bits):
    """Against the cache's own logits token by token, with and without evictions, and the formula in float64."""
    job = job_of("window", f"cache.bits={bits}", "cache.residual=8")
    wanted = dict.fromkeys(texts(model), job.cells)
    rows = {(cell_id, row.key): row for cell_id, row in replay(model, job, wanted, None)}
    for cell, text in itertools.product(job.cells, wanted):
        [request] = [text.request(model, None, [Branch(cell_id=cell.cell_id, policy=cell.policy)])]
        engine = Watched.sized_for(
            [request], model, decoding=job.decoding, seed=0, slots=1, cache=job.cache, invariant=False
        )
        list(engine.generate([request]))
        [logits] = engine.seen.values()
        found = torch.stack(logits).double().log_softmax(-1)[: len(text.token_ids)]
        full = plain(model.dialogue.prompt_ids(text.prompt), text.token_ids)
        kl = (full.exp() * (full - found)).sum(-1)
        row = rows[cell.cell_id, text.pair]
        assert (row.evictions > 1) == (cell.policy.name == "window")
        assert row.kl_mean == pytest.approx(float(kl.mean()), abs=1e-4, rel=1e-3)
        assert row.by_distance[0].kl > (0.1 if bits == 2 else 0)
        assert row.loglik == pytest.approx(
            float(found.gather(-1, torch.tensor(text.token_ids)[:, None]).sum()), abs=1e-2
        )


def plain(question, text):
    with torch.no_grad():
        logits = stock()(input_ids=torch.tensor([[*question, *text][:-1]])).logits[0]
    return logits[len(question) - 1 :].double().log_softmax(-1)


def replay_by_text(model, job, wanted):
    for cell_id, row in replay(model, job, wanted, None):
        assert cell_id in {cell.cell_id for cells in wanted.values() for cell in cells}
        yield row.key, row


def test_fewer_tokens_are_the_beginning_of_more(model):
    [text, _], job = texts(model), job_of("streaming_llm")
    cells = list(job.cells)
    short = dict(replay(model, job, {text: cells}, 30))
    cut = replace(text, token_ids=text.token_ids[:30])
    whole = dict(replay(model, job, {cut: cells}, None))
    assert short == whole
    assert all(row.tokens == 30 for row in short.values())
