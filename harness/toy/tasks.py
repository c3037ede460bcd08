"""Five generated reasoning tasks, with problems for evaluation and for training.

Every answer is a number. It needs facts from far back in the thinking, which the end of the thinking does not repeat,
so a model cannot answer if its cache dropped the wrong tokens. Only `restated` repeats all values, every two steps.
Arithmetic is modulo 10; only `add` carries.
"""

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from random import Random
from typing import NamedTuple

EVAL_COUNT = 120


class ToyProblem(NamedTuple):
    """A problem of a toy benchmark; `size` counts its variables, columns, operations or items."""

    id: str
    question: str
    answer: int
    size: int


class Task(NamedTuple):
    """A kind of question: how to ask one of a given size, its answer, and the sizes for training and evaluation."""

    ask: Callable[[Random, int], str]
    answer: Callable[[str], int]
    train_sizes: Sequence[int]
    eval_sizes: Sequence[int]


def _sum_asked_for(question: str, values: Mapping[str, int]) -> int:
    names = question.partition("Find ")[2].removesuffix(" mod 10.").split("+")
    return sum(values[name] for name in names) % 10


def _ask_chain(rng: Random, size: int) -> str:
    names = "abcdefghijklmnop"
    sentences = [f"{name}={rng.randrange(10)}." for name in names[:2]]
    for index in range(2, 2 + size):
        # From the second sum on, `left` is a derived value, which the question does not contain.
        left = names[rng.randrange(2, index)] if index > 2 else names[rng.randrange(2)]
        right = rng.choice([name for name in names[:index] if name != left])
        pair = [left, right]
        rng.shuffle(pair)
        sentences.append(f"{names[index]}={'+'.join(pair)}.")
    return f"{' '.join(sentences)} Find {'+'.join(rng.sample(names[2 : 2 + size], 3))} mod 10."


def _answer_chain(question: str) -> int:
    values = {name: int(digit) for name, digit in re.findall(r"([a-z])=(\d)\.", question)}
    for name, left, right in re.findall(r"([a-z])=([a-z])\+([a-z])\.", question):
        values[name] = values[left] + values[right]
    return _sum_asked_for(question, values)


def _ask_add(rng: Random, size: int) -> str:
    columns = [(rng.randrange(10), rng.randrange(10)) for _ in range(size - 1)]
    # The last column is the highest digit: its sum is 1 to 8, at most 9 with a carry into it. So it carries nothing,
    # and the sum of all columns has `size` digits.
    high = rng.randrange(1, 9)
    columns.append((high, rng.randrange(9 - high)))
    named = zip("abcdefghij", columns, strict=False)  # as many names as there are columns
    return f"Add with carry: {', '.join(f'{name}={x}+{y}' for name, (x, y) in named)}."


def _answer_add(question: str) -> int:
    columns = re.findall(r"[a-z]=(\d)\+(\d)", question)
    return sum((int(left) + int(right)) * 10**place for place, (left, right) in enumerate(columns))


def _ask_regs(rng: Random, size: int) -> str:
    names = "abcd"
    start = ", ".join(f"{name}={rng.randrange(10)}" for name in names)
    operations = []
    for number in range(1, size + 1):
        target = rng.choice(names)
        others = [name for name in names if name != target]
        operand = rng.choice(others) if rng.randrange(4) else str(rng.randrange(1, 10))  # every fourth is a digit
        operations.append(f"{number}: {target}+={operand}.")
    return f"Set {start}. {' '.join(operations)} Find {'+'.join(rng.sample(names, 3))} mod 10."


def _answer_regs(question: str) -> int:
    values = {name: int(digit) for name, digit in re.findall(r"([a-d])=(\d)", question)}
    for target, operand in re.findall(r"\d+: ([a-d])\+=([a-d0-9])", question):
        values[target] += int(operand) if operand.isdigit() else values[operand]
    return _sum_asked_for(question, values)


def _ask_restated(rng: Random, size: int) -> str:
    # One word more than `regs`, which tells the model to restate.
    return _ask_regs(rng, size).replace("Set ", "Set all ", 1)


def _ask_groups(rng: Random, size: int) -> str:
    names = "pqrst"
    # Items of a group differ, so "the item after 4" has one meaning.
    groups = []
    for name in names:
        items = "+".join(map(str, rng.sample(range(1, 10), size)))
        groups.append(f"{name}={items}.")
    return f"Sum {' '.join(groups)} Find {'+'.join(rng.sample(names, 3))} mod 10."


def _answer_groups(question: str) -> int:
    sums = re.findall(r"([p-t])=([\d+]+)\.", question)
    return _sum_asked_for(question, {name: sum(map(int, items.split("+"))) for name, items in sums})


# Evaluation goes one size beyond training: on the trained sizes the full cache hardly errs, and without errors a
# benchmark cannot show a gain. `add` stays within them; its accuracy is near 0 one size further.
TASKS: dict[str, Task] = {
    "chain": Task(ask=_ask_chain, answer=_answer_chain, train_sizes=range(3, 11), eval_sizes=range(7, 12)),
    "add": Task(ask=_ask_add, answer=_answer_add, train_sizes=range(3, 10), eval_sizes=range(6, 10)),
    "regs": Task(ask=_ask_regs, answer=_answer_regs, train_sizes=range(3, 10), eval_sizes=range(6, 11)),
    "groups": Task(ask=_ask_groups, answer=_answer_groups, train_sizes=range(2, 7), eval_sizes=range(3, 8)),
    "restated": Task(ask=_ask_restated, answer=_answer_regs, train_sizes=range(3, 10), eval_sizes=range(6, 11)),
}


def is_held_out(question: str) -> bool:
    """True for the questions kept for evaluation and never trained on: 1 in 16, chosen by a hash."""
    return hashlib.sha256(question.encode()).digest()[0] < 256 // 16


@lru_cache  # a sweep's jobs ask for the same problems, and most drawn problems are thrown away
def problems(task: str, count: int = EVAL_COUNT) -> tuple[ToyProblem, ...]:
    """Return a task's evaluation problems: distinct, held out of training, the same on every machine."""
    spec = TASKS[task]
    rng = Random(f"kvsweep-toy-{task}-eval-0")
    by_question: dict[str, ToyProblem] = {}
    while len(by_question) < count:
        number = len(by_question)
        size = spec.eval_sizes[number % len(spec.eval_sizes)]
        question = spec.ask(rng, size)
        if question not in by_question and is_held_out(question):  # else draw again
            by_question[question] = ToyProblem(f"{task}-{number:03d}", question, spec.answer(question), size)
    return tuple(by_question.values())


def training_problems(task: str, rng: Random, sizes: Sequence[int]) -> Iterator[ToyProblem]:
    """Yield problems for training without end; none is a question of an evaluation set."""
    spec = TASKS[task]
    number = 0
    while True:
        size = rng.choice(sizes)
        question = spec.ask(rng, size)
        if not is_held_out(question):
            yield ToyProblem(f"{task}-train-{number}", question, spec.answer(question), size)
            number += 1
