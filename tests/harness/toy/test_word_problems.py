"""The problems in sentences: solved again from their text alone, and held out of training."""

import hashlib
import json
import re
from random import Random

import pytest

from kvsweep.harness.toy.tasks import problems
from kvsweep.harness.toy.word_problems import BENCHMARKS, THINGS, TRAINED_THINGS
from scripts.train.word_kinds import KINDS

REASONED = [name for name, kind in KINDS.items() if kind.train_sizes]
# The sha256 of 120 problems of a benchmark: ids, questions and answers in order.
PINNED = {
    "words": "4ce33d5e7bc0848e637e2af0ed3e9eb8c77a7e64a5346a75e767be6486948ae4",
    "records": "6f0242ef58c739ff2aa835128514bc6bbadc7fe759e86f1ccdd297d4bca7f1e1",
}


def solve_compare(question):
    values = {name: int(x) for name, x in re.findall(r"(\w+) has (\d+) \w+\.", question)}
    for name, by, word, other in re.findall(r"(\w+) owns (\d+) (more|fewer) \w+ than (\w+) does", question):
        values[name] = values[other] + (int(by) if word == "more" else -int(by))
    first, second = re.search(r"do (\w+) and (\w+) have together", question).groups()
    return values[first] + values[second]


def solve_account(question):
    values = {name: int(x) for name, x in re.findall(r"(\w+) has (\d+) \w+\.", question)}
    for giver, by, taker in re.findall(r"Then (\w+) hands (\d+) of the \w+ over to (\w+)\.", question):
        values[giver] -= int(by)
        values[taker] += int(by)
    assert min(values.values()) >= 0
    first, second = re.search(r"do (\w+) and (\w+) have together at the end", question).groups()
    return values[first] + values[second]


def solve_schedule(question):
    ends = {job: int(day) for job, day in re.findall(r"The (\w+) ends on day (\d+)\.", question)}
    for other, job, days in re.findall(r"Once the (\w+) ends, the (\w+) starts, which takes (\d+) days", question):
        ends[job] = ends[other] + int(days)
    earlier, later = re.search(r"after the end of the (\w+) does the (\w+) end", question).groups()
    return ends[later] - ends[earlier]


def solve_walk(question):
    found, roads = {}, {}
    for x, place, listed in re.findall(r"You find (\d+) \w+ at the (\w+); (.*?)\.", question):
        found[place] = int(x)
        roads[place] = dict(re.findall(r"(\w+) is the (\w+)", listed))
    at, turns = re.search(r"You start at the (\w+) and go ([\w, ]+)\.", question).groups()
    total = 0
    for turn in turns.split(", "):
        at = roads[at][turn]
        total += found[at]
    return total


def solve_records(question):
    asked = re.search(r"What is the number of (\w+)\?$", question)[1]
    [value] = set(re.findall(rf"number of {asked} is (\d+)\.", question))
    return int(value)


SOLVERS = {name.removeprefix("solve_"): solver for name, solver in globals().items() if name.startswith("solve_")}


def test_every_kind_has_a_solver_and_every_benchmark_known_kinds():
    assert set(SOLVERS) == set(KINDS) >= {kind for kinds in BENCHMARKS.values() for kind in kinds}


@pytest.mark.parametrize("kind", KINDS)
def test_the_answer_follows_from_the_question(kind):
    rng = Random(kind)
    for size in KINDS[kind].eval_sizes:
        for _ in range(40):
            story = KINDS[kind].write(rng, size, True)
            assert SOLVERS[kind](story.question) == story.answer, story.question


@pytest.mark.parametrize("kind", REASONED)
@pytest.mark.parametrize("held_out", [False, True], ids=["training", "evaluation"])
def test_every_equation_of_the_steps_is_right_and_the_last_one_gives_the_answer(kind, held_out):
    rng = Random(kind)
    for size in KINDS[kind].train_sizes:
        for _ in range(20):
            story = KINDS[kind].write(rng, size, held_out)
            equations = re.findall(r"(\d+)([+-])(\d+)=(\d+)", " ".join(story.steps))
            assert len(equations) >= size - 1
            for left, sign, right, result in equations:
                assert int(left) + (int(right) if sign == "+" else -int(right)) == int(result) >= 0
            assert int(equations[-1][3]) == story.answer


@pytest.mark.parametrize("kind", REASONED)
def test_no_evaluation_question_can_be_drawn_for_training(kind):
    """Its sentences are worded otherwise, so that no seed can bring one of them into training."""
    rng = Random(kind)
    texts = {held_out: [KINDS[kind].write(rng, 4, held_out).question for _ in range(60)] for held_out in (False, True)}

    def sentences(question):
        generic = re.sub(r"\d+|\b(?:more|fewer)\b", "#", question)
        known = re.sub(rf"\b({'|'.join(THINGS)}|[A-Z][a-z]+)\b", "N", generic)
        return {part.strip() for part in re.split(r"[.?]", known) if part.strip()}

    trained = set().union(*map(sentences, texts[False]))
    assert all(sentences(text) - trained for text in texts[True])
    if kind != "schedule":
        assert not any(thing in text for text in texts[True] for thing in THINGS[:TRAINED_THINGS])
        assert max(KINDS[kind].eval_sizes) > max(KINDS[kind].train_sizes)


@pytest.mark.parametrize("benchmark", BENCHMARKS)
def test_the_problems_of_a_benchmark_are_distinct_and_always_the_same(benchmark):
    found = problems(benchmark, 60)
    assert len({problem.question for problem in found}) == len({problem.id for problem in found}) == 60
    assert problems(benchmark, 25) == found[:25] == problems(benchmark, 60)[:25]
    rows = [[problem.id, problem.question, problem.answer] for problem in problems(benchmark, 120)]
    assert hashlib.sha256(json.dumps(rows).encode()).hexdigest() == PINNED[benchmark]
