"""Where reasoning steps begin and end, by hand."""

from random import Random

import pytest
from tokenizers import Tokenizer

from kvsweep.harness.settings import WEIGHTS, compose_config
from kvsweep.harness.toy.tasks import TASKS, problems
from kvsweep.harness.toy.word_problems import KINDS
from kvsweep.harness.trace.inspected import derivations, matches, paragraphs, read_steps, step_numbers, token_range
from kvsweep.messages.errors import UserError
from scripts.train.toy_completions import SOLVE


def test_paragraphs_end_at_blank_lines():
    assert paragraphs(["a", " b\n", "\nc", "d\n\n", "\n", "e"]) == [range(3), range(3, 5), range(5, 6)]
    assert paragraphs(["\n\n", "a"]) == [range(1), range(1, 2)]
    assert paragraphs(["a. ", "b. ", "c"], r"\. ") == [range(1), range(1, 2), range(2, 3)]
    assert paragraphs(["a", "b"]) == [range(2)]


@pytest.mark.parametrize("task", TASKS)
def test_the_toys_separator_finds_the_steps_of_their_solutions(task):
    """The steps are those of the generator that the models have learnt from."""
    separator = compose_config("model=toy_qwen_restated" if task == "restated" else "model=toy_qwen").model.split
    tokenizer = Tokenizer.from_file(str(WEIGHTS / "toy_qwen" / "tokenizer.json"))
    for problem in problems(task, 20):
        written = [step.text.strip() for step in SOLVE[task](problem.question).steps]
        written[-1] += " Let me see again, 1+2=3. Fine, next one. Done."
        ids = tokenizer.encode(" ".join(["Let me start.", *written]), add_special_tokens=False).ids
        pieces = [tokenizer.decode([token]) for token in ids]
        found = ["".join(pieces[step.start : step.stop]).strip() for step in paragraphs(pieces, separator)]
        assert found == ["Let me start.", *written]


def test_other_models_write_lines_or_blank_lines():
    story = KINDS["schedule"].write(Random(0), 6, True)
    pieces = [part for step in story.steps for part in (step, "\n")]
    lines = paragraphs(pieces, compose_config("model=smollm2_reasons").model.split)
    assert len(lines) == len(story.steps) > 2
    for model in ("r1_qwen_7b", "r1_llama_8b", "qwen3_8b"):
        assert len(paragraphs(["a", "\n", "b\n\n", "c"], compose_config(f"model={model}").model.split)) == 2


def test_equations_as_tokens():
    assert matches(["so ", "3", " x ", "4 =", " 12", ". 1", "+1", "=2"]) == [range(1, 5), range(5, 8)]
    assert matches(["no", "ne"]) == []
    assert token_range(["ab", "cd", "ef"], 1, 3) == range(2)


def test_a_step_is_an_equation_with_the_sentences_that_go_on_with_it():
    text = "Hmm, |let me |see. |c: |1+8|=9. |So |c is |9. |Fine. |It is 9. |9-|2=7."
    pieces = text.split("|")
    assert derivations(pieces) == [range(3, 9), range(11, 13)]
    assert derivations(["3.5 x 2 = 7.\n\n", "So 7. ", "\n", "ok 7"]) == [range(1)]
    # Without an equation: paragraphs, or the sentences of the only one.
    assert derivations(["a b\n\n", "c. ", "d"]) == paragraphs(["a b\n\n", "c. ", "d"])
    assert derivations(["a. ", "b! ", "c"]) == [range(1), range(1, 2), range(2, 3)]


def test_steps_are_given_by_their_first_and_last_tokens():
    steps = read_steps("2-3, 6-6")
    assert steps == [range(2, 4), range(6, 7)]
    assert step_numbers(steps, 9) == [0, 0, 1, 1, 2, 2, 3, 4, 4]
    assert step_numbers(read_steps("0-1,2-3"), 4) == [0, 0, 1, 1]


@pytest.mark.parametrize("text", ["", "4", "3-2", "0-3,3-5", "5-6,0-1", "a-b", "0-1,"])
def test_steps_that_cannot_be_read(text):
    with pytest.raises(UserError, match="in order"):
        read_steps(text)
