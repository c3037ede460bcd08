"""Five generated reasoning tasks, with problems for evaluation and for training.

Every answer is a number. It needs facts from far back in the thinking, which the end of the thinking does not repeat,
so a model cannot answer if its cache dropped the wrong tokens. Only `restated` repeats all values, every two steps.
Arithmetic is modulo 10; only `add` carries.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from random import Random
from typing import NamedTuple

EVAL_COUNT = 120


class ToyProblem(NamedTuple):
    """A problem of a toy benchmark; `size` counts its variables, columns, operations or items."""

    id: str
    question: str
    answer: int
    size: int


Asked = tuple[str, int]  # a question and its answer


class Task(NamedTuple):
    """A kind of question: how to ask one of a given size, and the sizes for training and evaluation."""

    ask: Callable[[Random, int], Asked]
    train_sizes: Sequence[int]
    eval_sizes: Sequence[int]


def _ask_for_sum(rng: Random, start: str, names: Sequence[str], values: Mapping[str, int]) -> Asked:
    """End a question by asking for the sum of three of these names."""
    chosen = rng.sample(names, 3)
    return f"{start} Find {'+'.join(chosen)} mod 10.", sum(values[name] for name in chosen) % 10


def _ask_chain(rng: Random, size: int) -> Asked:
    names = "abcdefghijklmnop"
    values = {name: rng.randrange(10) for name in names[:2]}
    sentences = [f"{name}={value}." for name, value in values.items()]
    for index in range(2, 2 + size):
        # From the second sum on, `left` is a derived value, which the question does not contain.
        left = names[rng.randrange(2, index)] if index > 2 else names[rng.randrange(2)]
        right = rng.choice([name for name in names[:index] if name != left])
        values[names[index]] = values[left] + values[right]
        pair = [left, right]
        rng.shuffle(pair)
        sentences.append(f"{names[index]}={'+'.join(pair)}.")
    return _ask_for_sum(rng, " ".join(sentences), names[2 : 2 + size], values)


def _ask_add(rng: Random, size: int) -> Asked:
    columns = [(rng.randrange(10), rng.randrange(10)) for _ in range(size - 1)]
    # The last column is the highest digit: its sum is 1 to 8, at most 9 with a carry into it. So it carries nothing,
    # and the sum of all columns has `size` digits.
    high = rng.randrange(1, 9)
    columns.append((high, rng.randrange(9 - high)))
    named = zip("abcdefghij", columns, strict=False)  # as many names as there are columns
    question = f"Add with carry: {', '.join(f'{name}={x}+{y}' for name, (x, y) in named)}."
    return question, sum((x + y) * 10**place for place, (x, y) in enumerate(columns))


def _ask_regs(rng: Random, size: int) -> Asked:
    names = "abcd"
    values = {name: rng.randrange(10) for name in names}
    start = ", ".join(f"{name}={value}" for name, value in values.items())
    operations = []
    for number in range(1, size + 1):
        target = rng.choice(names)
        others = [name for name in names if name != target]
        operand = rng.choice(others) if rng.randrange(4) else str(rng.randrange(1, 10))  # every fourth is a digit
        values[target] += int(operand) if operand.isdigit() else values[operand]
        operations.append(f"{number}: {target}+={operand}.")
    return _ask_for_sum(rng, f"Set {start}. {' '.join(operations)}", names, values)


def _ask_restated(rng: Random, size: int) -> Asked:
    question, answer = _ask_regs(rng, size)
    # One word more than `regs`, which tells the model to restate.
    return question.replace("Set ", "Set all ", 1), answer


def _ask_groups(rng: Random, size: int) -> Asked:
    names = "pqrst"
    # Items of a group differ, so "the item after 4" has one meaning.
    values = {}
    groups = []
    for name in names:
        items = rng.sample(range(1, 10), size)
        values[name] = sum(items)
        groups.append(f"{name}={'+'.join(map(str, items))}.")
    return _ask_for_sum(rng, f"Sum {' '.join(groups)}", names, values)


# Evaluation goes one size beyond training: on the trained sizes the full cache hardly errs, and without errors a
# benchmark cannot show a gain. `add` stays within them; its accuracy is near 0 one size further.
TASKS: dict[str, Task] = {
    "chain": Task(ask=_ask_chain, train_sizes=range(3, 11), eval_sizes=range(7, 12)),
    "add": Task(ask=_ask_add, train_sizes=range(3, 10), eval_sizes=range(6, 10)),
    "regs": Task(ask=_ask_regs, train_sizes=range(3, 10), eval_sizes=range(6, 11)),
    "groups": Task(ask=_ask_groups, train_sizes=range(2, 7), eval_sizes=range(3, 8)),
    "restated": Task(ask=_ask_restated, train_sizes=range(3, 10), eval_sizes=range(6, 11)),
}


def is_held_out(question: str) -> bool:
    """True for the questions kept for evaluation and never trained on: 1 in 16, chosen by a hash."""
    return hashlib.sha256(question.encode()).digest()[0] < 256 // 16


def problems(task: str, count: int = EVAL_COUNT) -> tuple[ToyProblem, ...]:
    """Return a task's evaluation problems: distinct, held out of training, the same on every machine."""
    spec = TASKS[task]
    rng = Random(f"kvsweep-toy-{task}-eval-0")
    by_question: dict[str, ToyProblem] = {}
    while len(by_question) < count:
        number = len(by_question)
        size = spec.eval_sizes[number % len(spec.eval_sizes)]
        question, answer = spec.ask(rng, size)
        if question not in by_question and is_held_out(question):  # else draw again
            by_question[question] = ToyProblem(f"{task}-{number:03d}", question, answer, size)
    return tuple(by_question.values())


def training_problems(task: str, rng: Random, sizes: Sequence[int]) -> Iterator[ToyProblem]:
    """Yield problems for training without end; none is a question of an evaluation set."""
    spec = TASKS[task]
    number = 0
    while True:
        size = rng.choice(sizes)
        question, answer = spec.ask(rng, size)
        if not is_held_out(question):
            yield ToyProblem(f"{task}-train-{number}", question, answer, size)
            number += 1
