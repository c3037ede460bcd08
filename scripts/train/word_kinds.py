"""Two kinds of problems with which the training of smollm2_reasons began.

After 162,000 tokens of these and of the kinds in `kvsweep.harness.toy.word_problems` the model solved none of these at
the sizes of an evaluation, so the rest of its training left them out, and no benchmark has them.
"""

from random import Random

from kvsweep.harness.toy.word_problems import KINDS as OF_BENCHMARKS
from kvsweep.harness.toy.word_problems import NAMES, Kind, Story, ask_sum, draw_thing, phrase

_PLACES = "mill church bridge school market harbor tower library garden bakery station castle inn farm"
_WORDINGS = """\
{giver} gives {by} {thing} to {taker}.
{giver} gives {taker} {by} {thing}.
{taker} gets {by} {thing} from {giver}.
Then {giver} hands {by} of the {thing} over to {taker}.

At the {place} lie {x} {thing}; {roads}.
The {place} has {x} {thing}; {roads}.
There are {x} {thing} at the {place}; {roads}.
You find {x} {thing} at the {place}; {roads}."""
PLACES, (GIVEN, LIES) = _PLACES.split(), (block.splitlines() for block in _WORDINGS.split("\n\n"))


def account(rng: Random, size: int, held_out: bool) -> Story:
    thing, names = draw_thing(rng, held_out), rng.sample(NAMES, 4)
    values = {name: rng.randrange(8, 25) for name in names}
    said, steps = [f"{name} has {value} {thing}." for name, value in values.items()], []
    for number in range(1, size + 1):
        giver = rng.choice([name for name in names if values[name] > 3])
        taker = rng.choice([name for name in names if name != giver])
        x, y, by = values[giver], values[taker], rng.randrange(2, min(10, values[giver]))
        values[giver], values[taker] = x - by, y + by
        said.append(phrase(rng, held_out, GIVEN, giver=giver, taker=taker, by=by, thing=thing))
        step = f"{giver} gives {taker} {by}. {giver}: {x}-{by}={x - by}. {taker}: {y}+{by}={y + by}."
        if number % 4 == 0:
            step += f" Now {', '.join(f'{name} has {value}' for name, value in values.items())}."
        steps.append(step)
    said.append(f"How many {thing} do {{}} have together at the end?")
    return ask_sum(rng, names, values, said, steps)


def walk(rng: Random, size: int, held_out: bool) -> Story:
    thing, places = draw_thing(rng, held_out), rng.sample(PLACES, size + 2)
    found, total = {place: rng.randrange(2, 10) for place in places}, 0
    said, steps, turns = [], [], []
    for number, place in enumerate(places):
        turn, other_turn = rng.sample(["north", "east", "south", "west"], 2)
        following = places[number + 1] if number < size else None
        roads = [(other_turn, rng.choice([other for other in places if other not in (place, following)]))]
        if following is not None:
            x = found[following]
            total += x
            turns.append(turn)
            roads.append((turn, following))
            steps.append(f"From the {place} {turn} to the {following}: {x}. {total - x}+{x}={total}.")
        rng.shuffle(roads)
        listed = " and ".join(f"{turn} is the {other}" for turn, other in roads)
        said.append(phrase(rng, held_out, LIES, place=place, x=found[place], thing=thing, roads=listed))
    rng.shuffle(said)
    said.append(f"You start at the {places[0]} and go {', '.join(turns)}.")
    said.append(f"How many {thing} lie at the places that you come to?")
    return Story(" ".join(said), tuple(steps), total)


KINDS: dict[str, Kind] = {
    "compare": OF_BENCHMARKS["compare"],
    "account": Kind(write=account, train_sizes=range(2, 8), eval_sizes=range(5, 9)),
    "schedule": OF_BENCHMARKS["schedule"],
    "walk": Kind(write=walk, train_sizes=range(2, 8), eval_sizes=range(5, 9)),
    "records": OF_BENCHMARKS["records"],
}
