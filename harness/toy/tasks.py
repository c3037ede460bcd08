"""Five generated reasoning tasks, and problems of these and of `word_problems` for evaluation and for training.

Every answer of the five is a number. It needs facts from far back in the thinking, which the end of the thinking does
not repeat, so a model cannot answer if its cache dropped the wrong tokens. Only `restated` repeats all values, every
two steps. Arithmetic is modulo 10; only `add` carries.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from random import Random
from typing import NamedTuple

from kvsweep.harness.toy import word_problems
from kvsweep.harness.toy.word_problems import BENCHMARKS, Kind, Story

EVAL_COUNT = 120


class ToyProblem(NamedTuple):
    """A problem of a toy benchmark; `size` counts its variables, columns, operations, items, names, jobs or cities."""

    id: str
    question: str
    answer: int
    size: int


# These tasks have one wording, so that nothing is `held_out`: a hash chooses the questions for evaluation.


def _ask_for_sum(rng: Random, start: str, names: Sequence[str], values: Mapping[str, int]) -> Story:
    """End a question by asking for the sum of three of these names."""
    chosen = rng.sample(names, 3)
    return Story(f"{start} Find {'+'.join(chosen)} mod 10.", (), sum(values[name] for name in chosen) % 10)


def _ask_chain(rng: Random, size: int, held_out: bool) -> Story:
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


def _ask_add(rng: Random, size: int, held_out: bool) -> Story:
    columns = [(rng.randrange(10), rng.randrange(10)) for _ in range(size - 1)]
    # The last column is the highest digit: its sum is 1 to 8, at most 9 with a carry into it. So it carries nothing,
    # and the sum of all columns has `size` digits.
    high = rng.randrange(1, 9)
    columns.append((high, rng.randrange(9 - high)))
    named = zip("abcdefghij", columns, strict=False)  # as many names as there are columns
    question = f"Add with carry: {', '.join(f'{name}={x}+{y}' for name, (x, y) in named)}."
    return Story(question, (), sum((x + y) * 10**place for place, (x, y) in enumerate(columns)))


def _ask_regs(rng: Random, size: int, held_out: bool) -> Story:
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


def _ask_restated(rng: Random, size: int, held_out: bool) -> Story:
    story = _ask_regs(rng, size, held_out)
    # One word more than `regs`, which tells the model to restate.
    return story._replace(question=story.question.replace("Set ", "Set all ", 1))


def _ask_groups(rng: Random, size: int, held_out: bool) -> Story:
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
TASKS: dict[str, Kind] = {
    "chain": Kind(write=_ask_chain, train_sizes=range(3, 11), eval_sizes=range(7, 12)),
    "add": Kind(write=_ask_add, train_sizes=range(3, 10), eval_sizes=range(6, 10)),
    "regs": Kind(write=_ask_regs, train_sizes=range(3, 10), eval_sizes=range(6, 11)),
    "groups": Kind(write=_ask_groups, train_sizes=range(2, 7), eval_sizes=range(3, 8)),
    "restated": Kind(write=_ask_restated, train_sizes=range(3, 10), eval_sizes=range(6, 11)),
}


KINDS = TASKS | word_problems.KINDS


def is_held_out(question: str) -> bool:
    """True for the questions of `TASKS` kept for evaluation and never trained on: 1 in 16, chosen by a hash."""
    return hashlib.sha256(question.encode()).digest()[0] < 256 // 16


def problems(benchmark: str, count: int = EVAL_COUNT) -> list[ToyProblem]:
    """Return the problems of a task or of `BENCHMARKS`: distinct, held out of training, the same on every machine."""
    names = BENCHMARKS.get(benchmark, (benchmark,))
    rng = Random(f"kvsweep-toy-{benchmark}-eval-0" if benchmark in TASKS else f"kvsweep-{benchmark}-eval")
    by_question: dict[str, ToyProblem] = {}
    while len(by_question) < count:
        number = len(by_question)
        name = names[number % len(names)]  # kinds take turns
        sizes = KINDS[name].eval_sizes
        size = sizes[number // len(names) % len(sizes)]
        question, _, answer = KINDS[name].write(rng, size, True)
        is_fit = name not in TASKS or is_held_out(question)
        if is_fit and question not in by_question:  # else draw again
            by_question[question] = ToyProblem(f"{benchmark}-{number:03d}", question, answer, size)
    return list(by_question.values())


def training_problems(name: str, rng: Random, sizes: Sequence[int]) -> Iterator[ToyProblem]:
    """Yield problems of a kind for training without end; none is a question of an evaluation set."""
    number = 0
    while True:
        size = rng.choice(sizes)
        question, _, answer = KINDS[name].write(rng, size, False)
        if name in TASKS and is_held_out(question):
            continue
        yield ToyProblem(f"{name}-train-{number}", question, answer, size)
        number += 1
