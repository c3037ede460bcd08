"""Problems in sentences for a language model: two kinds of reasoning with worked solutions, and records to look up.

A solution needs facts that only the question or much earlier steps contain. Evaluation has its own wordings (the last
of each block below) and things, and in all kinds but `schedule` larger sizes.
"""

from collections.abc import Callable, Sequence
from random import Random
from typing import NamedTuple

_WORDS = """\
Anna Ben Carl Daniel Emma Frank Grace Henry Ivan Jack Kate Leo Mary Nina Oscar Paul Rose Sam Tom Victor Will Alice Bob \
Clara David Eric Fred George Helen James Laura Mark Nick Peter Ruth Simon
drying painting cleaning roofing digging planting baking packing sorting welding printing sewing
Oslo Paris Rome Cairo Lima Berlin Madrid Vienna Tokyo London Dublin Athens Boston Sydney Moscow"""
NAMES, JOBS, CITIES = map(str.split, _WORDS.splitlines())
THINGS = ("coins", "books", "cards", "apples", "shells", "stamps", "pencils", "marbles")
TRAINED_THINGS = 6
_WORDINGS = """\
{name} has {by} {word} {thing} than {other}.
{name} has {by} {thing} {word} than {other}.
Compared with {other}, {name} has {by} {word}.
{name} owns {by} {word} {thing} than {other} does.

The {job} takes {days} days and starts when the {other} ends.
When the {other} ends, the {job} starts and takes {days} days.
The {job} follows the {other} and takes {days} days.
Once the {other} ends, the {job} starts, which takes {days} days."""
COMPARED, FOLLOWS = map(str.splitlines, _WORDINGS.split("\n\n"))


class Story(NamedTuple):
    """A question, the steps of its solution (none for a lookup), and the answer."""

    question: str
    steps: tuple[str, ...]
    answer: int


class Kind(NamedTuple):
    """A kind of story: its writer, and its sizes for training and evaluation."""

    write: Callable[[Random, int, bool], Story]
    train_sizes: Sequence[int]
    eval_sizes: Sequence[int]


def phrase(rng: Random, held_out: bool, wordings: Sequence[str], **facts: object) -> str:
    return (wordings[-1] if held_out else rng.choice(wordings[:-1])).format(**facts)


def draw_thing(rng: Random, held_out: bool) -> str:
    return rng.choice(THINGS[TRAINED_THINGS:] if held_out else THINGS[:TRAINED_THINGS])


def ask_sum(rng: Random, names: list[str], values: dict[str, int], sentences: list[str], steps: list[str]) -> Story:
    """Return the story of these sentences; the last one, with a gap for two names, asks for the sum of their values."""
    first, second = rng.sample(names, 2)
    x, y = values[first], values[second]
    question = " ".join(sentences).format(f"{first} and {second}")
    return Story(question, (*steps, f"{first} has {x}, {second} has {y}. {x}+{y}={x + y}."), x + y)


def _compare(rng: Random, size: int, held_out: bool) -> Story:
    thing = draw_thing(rng, held_out)
    names = rng.sample(NAMES, size)
    values = {names[0]: rng.randrange(5, 20)}
    sentences, steps = [f"{names[0]} has {values[names[0]]} {thing}."], []
    for number, name in enumerate(names[1:], start=1):
        other = names[number - 1] if rng.randrange(2) else rng.choice(names[:number])  # half of them form a chain
        x = values[other]
        by = rng.randrange(2, 10)
        more = x <= by + 1  # fewer would be less than 2
        if not more and x + by < 40:  # more would be at most 39
            more = bool(rng.randrange(2))
        word = "more" if more else "fewer"
        values[name] = x + by if more else x - by
        sentences.append(phrase(rng, held_out, COMPARED, name=name, by=by, word=word, thing=thing, other=other))
        if rng.randrange(5) == 0:  # a fact that no step needs
            sentences.append(f"{rng.choice(names)} is {rng.randrange(6, 80)} years old.")
        sign = "+" if more else "-"
        steps.append(f"{name}: {by} {word} than {other}. {other} has {x}. {x}{sign}{by}={values[name]}.")
    sentences.append(f"How many {thing} do {{}} have together?")
    return ask_sum(rng, names[: max(2, size - 2)], values, sentences, steps)  # of early names, far back in the solution


def _schedule(rng: Random, size: int, held_out: bool) -> Story:
    jobs = rng.sample(JOBS, size)
    ends = {jobs[0]: rng.randrange(3, 10)}
    sentences, steps = [f"The {jobs[0]} ends on day {ends[jobs[0]]}."], []
    for number, job in enumerate(jobs[1:], start=1):
        other = jobs[number - 1] if rng.randrange(2) else rng.choice(jobs[:number])
        days = rng.randrange(2, 10)
        ends[job] = ends[other] + days
        sentences.append(phrase(rng, held_out, FOLLOWS, job=job, other=other, days=days))
        x = ends[other]
        steps.append(f"The {job} takes {days} days after the {other}, day {x}. {x}+{days}={ends[job]}.")
    earlier, later = sorted(rng.sample(jobs, 2), key=lambda job: ends[job])
    x, y = ends[later], ends[earlier]
    steps.append(f"The {later} ends on day {x}, the {earlier} on day {y}. {x}-{y}={x - y}.")
    ask = f"How many days after the end of the {earlier} does the {later} end?"
    return Story(" ".join([*sentences, ask]), tuple(steps), x - y)


def _records(rng: Random, size: int, held_out: bool) -> Story:
    # Records have one wording, so that nothing is `held_out`.
    cities = rng.sample(CITIES, size)
    numbers = {city: rng.randrange(2, 10) for city in cities}
    sentences = [f"The number of {city} is {number}." for city, number in numbers.items()]
    city = rng.choice(cities)
    # If each fact is said only once, the questions are too hard for SmolLM2: it answers 28 of 40.
    facts = " ".join([*sentences, *rng.sample(sentences, size)])
    return Story(f"{facts}\nWhat is the number of {city}?", (), numbers[city])


KINDS: dict[str, Kind] = {
    "compare": Kind(write=_compare, train_sizes=range(3, 9), eval_sizes=range(6, 10)),
    "schedule": Kind(write=_schedule, train_sizes=range(3, 9), eval_sizes=range(5, 8)),
    "records": Kind(write=_records, train_sizes=(), eval_sizes=range(4, 7)),
}

# The kinds that a benchmark alternates. Of `schedule` with 9 jobs smollm2_reasons solves 1 of 8.
BENCHMARKS = {"words": ("compare", "schedule"), "records": ("records",)}
