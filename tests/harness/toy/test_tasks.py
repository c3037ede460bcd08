import hashlib
import json
import re
from random import Random

import pytest

from kvsweep.harness.toy.tasks import (
    EVAL_COUNT,
    TASKS,
    is_held_out,
    problems,
    training_problems,
)
from scripts.train.toy_completions import write_completion

PINNED = {
    "chain": "d7ec5a06fae657e26b7c54d797e3ed09a7e26ad646d3f9863f3fe9975ce66476",
    "add": "40bea91c817961cd2d4da654a0d24eb241384c1be39792f138739506ab046318",
    "regs": "cb593dfaea407db6b14a92513f632bef6a82b5b21f8837ffee10595b19c910a9",
    "groups": "2dc9c75119aab5b00e392a0031df64e8c5f87e11349e500b235d0635d43aa6cb",
    "restated": "7eeaff2897fec6405929665b73911c3c0d95d68c83fadc6cbe24c00516204818",
}


def content_hash(task: str) -> str:
    """The sha256 of a task's evaluation problems: ids, questions and answers in order."""
    rows = [[problem.id, problem.question, problem.answer] for problem in problems(task)]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def chain_value(name: str, rules: dict[str, str]) -> int:
    return sum(int(part) if part.isdigit() else chain_value(part, rules) for part in rules[name].split("+"))


def solve_chain(question: str) -> int:
    body, asked = question.removesuffix(" mod 10.").split(" Find ")
    rules = dict(rule.split("=") for rule in body.rstrip(".").split(". "))
    return sum(chain_value(name, rules) for name in asked.split("+")) % 10


def solve_add(question: str) -> int:
    columns = [column.split("=")[1] for column in question.removesuffix(".").split(": ")[1].split(", ")]
    lefts, rights = zip(*(column.split("+") for column in columns), strict=True)
    return int("".join(reversed(lefts))) + int("".join(reversed(rights)))


def solve_regs(question: str) -> int:
    start, rest = question.removeprefix("Set ").split(". ", 1)
    program, asked = rest.removesuffix(" mod 10.").split(" Find ")
    lines = [*start.split(", "), *re.sub(r"\d+: ", "", program).rstrip(".").split(". ")]
    names: dict[str, int] = {}
    exec("\n".join(lines), {}, names)
    return eval(asked, {}, names) % 10


def solve_groups(question: str) -> int:
    body, asked = question.removeprefix("Sum ").removesuffix(" mod 10.").split(" Find ")
    names: dict[str, int] = {}
    exec("\n".join(body.rstrip(".").split(". ")), {}, names)
    return eval(asked, {}, names) % 10


def solve_restated(question: str) -> int:
    return solve_regs(question.replace("Set all ", "Set "))


SOLVERS = {name.removeprefix("solve_"): solver for name, solver in globals().items() if name.startswith("solve_")}


@pytest.mark.parametrize("task", TASKS)
def test_problems_are_pinned(task):
    assert content_hash(task) == PINNED[task]


@pytest.mark.parametrize("task", TASKS)
def test_problems_are_distinct_and_of_the_chosen_sizes(task):
    found = problems(task)
    assert len({p.question for p in found}) == len({p.id for p in found}) == EVAL_COUNT
    assert {p.size for p in found} == set(TASKS[task].eval_sizes)
    assert found[7].id == f"{task}-007"
    assert problems(task, count=10) == found[:10]


@pytest.mark.parametrize("task", TASKS)
def test_training_never_sees_an_evaluation_problem(task):
    assert all(is_held_out(p.question) for p in problems(task))
    stream = training_problems(task, Random("any"), TASKS[task].train_sizes)
    assert not any(is_held_out(next(stream).question) for _ in range(500))


@pytest.mark.parametrize("task", TASKS)
def test_answers_agree_with_an_independent_solver(task):
    rng = Random(3)
    stream = training_problems(task, rng, TASKS[task].train_sizes)
    for problem in [*problems(task), *(next(stream) for _ in range(300))]:
        assert problem.answer == SOLVERS[task](problem.question), problem
        completion = write_completion(task, problem.question, rng)
        assert re.findall(r"\\boxed\{(\d+)\}", completion) == [str(problem.answer)]
        assert completion.endswith("}")


@pytest.mark.parametrize("task", TASKS)
def test_every_equation_of_a_completion_holds(task):
    rng = Random(4)
    for problem in problems(task):
        completion = write_completion(task, problem.question, rng)
        for terms, total in re.findall(r"(\d(?:\+\d)+)=(\d+)", completion):
            exact = sum(int(term) for term in terms.split("+"))
            assert int(total) == (exact if terms.count("+") == 2 else exact % 10)


@pytest.mark.parametrize("task", TASKS)
def test_the_answer_restates_what_the_thinking_found(task):
    rng = Random(5)
    for problem in problems(task, count=40):
        thinking, answer = write_completion(task, problem.question, rng).split("</think>")
        for name, value in re.findall(r"([a-z]) is (\d)", answer):
            found = re.findall(rf"(?:So|Now) {name} is (\d)", thinking)
            # A register that no operation wrote to keeps the value of the question.
            assert found[-1:] == [value] or (task in ("regs", "restated") and not found)


def test_restated_thinking_repeats_every_register_after_every_second_operation():
    for problem in problems("restated", count=40):
        start, operations = re.search(r"Set all (.*?)\. (.*) Find", problem.question).groups()
        texts = write_completion("restated", problem.question, Random(6)).split("So all: ")
        done = [line.split(": ")[1] for line in operations.rstrip(".").split(". ")]
        assert len(texts) == 1 + len(done) // 2
        for count, text in enumerate(texts[1:], start=1):
            names: dict[str, int] = {}
            exec("\n".join([*start.split(", "), *done[: 2 * count]]), {}, names)
            assert text.startswith(", ".join(f"{name} is {value % 10}" for name, value in names.items()) + ". ")
