from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsweep.harness.toy.tasks import TASKS, training_problems
from scripts.train.toy_completions import write_completion
from scripts.train.toy_tokenizer import build_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


@pytest.mark.parametrize("task", TASKS)
def test_task_texts_round_trip(tokenizer, task):
    rng = Random(0)
    stream = training_problems(task, rng, TASKS[task].train_sizes)
    for problem in (next(stream) for _ in range(100)):
        for text in (problem.question, write_completion(task, problem.question, rng)):
            ids = tokenizer.encode(text, add_special_tokens=False)
            assert tokenizer.unk_token_id not in ids
            assert tokenizer.decode(ids) == tokenizer.decode(ids, skip_special_tokens=True) == text


@settings(max_examples=200)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_encodes(tokenizer, text):
    ids = tokenizer.encode(text)
    assert all(0 <= i < 128 for i in ids)
    tokenizer.decode(ids)
    tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)


def test_the_prompt_opens_the_thinking(tokenizer):
    chat = [{"role": "user", "content": "Find a mod 10."}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert text == "<bos><user>Find a mod 10.<assistant><think>"
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert ids == tokenizer.encode(text, add_special_tokens=False)
    assert ids[0] == tokenizer.bos_token_id
    assert ids[-1] == tokenizer.convert_tokens_to_ids("<think>")


def test_think_end_and_box_are_one_token_each(tokenizer):
    ids = tokenizer.encode(r"Done.</think>c is 1. \boxed{7}", add_special_tokens=False)
    assert ids.count(tokenizer.convert_tokens_to_ids("</think>")) == 1
    assert tokenizer.convert_ids_to_tokens(ids)[-3:] == ["\\boxed{", "7", "}"]
