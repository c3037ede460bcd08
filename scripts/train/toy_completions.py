"""Worked completions of the toy tasks, the texts that the embedded models were trained on."""

import re
from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import NamedTuple

_OPENINGS = ("Let me go step by step. ", "Ok, let me see. ", "Let me start. ", "Hmm, let me think. ")
_ENDINGS = ("Done.", "That is all.", "Ok, all done.")
# A remark carries no new fact, so a good policy drops its tokens.
_REMARKS = (
    "",
    "",
    "Good, go on. ",
    "Ok, next one. ",
    "That looks right, let me go on. ",
    "Check {equation} ok. ",
    "Hmm, wait. Let me redo: {equation}. ",
    "Wait, is it right? Yes, {equation}. ",
    "Let me see again, {equation}. Fine, next one. ",
)


class Step(NamedTuple):
    """A thinking step, and the equation of the step that a remark may repeat."""

    text: str
    equation: str


class Solution(NamedTuple):
    """The steps of a solution, the closing text that restates the facts it needs, and the answer."""

    steps: Sequence[Step]
    closing: str
    answer: int


def _sum_asked_for(question: str, values: dict[str, int]) -> tuple[str, int]:
    """The closing text of a question that asks for the sum of three named values, and that sum."""
    names = question.partition("Find ")[2].removesuffix(" mod 10.").split("+")
    first, second, third = (values[name] for name in names)
    partial = (first + second) % 10
    total = (partial + third) % 10
    facts = ", ".join(f"{name} is {values[name]}" for name in names)
    return f"{facts}. {first}+{second}={partial}, {partial}+{third}={total}.", total


def _solve_chain(question: str) -> Solution:
    values = {name: int(digit) for name, digit in re.findall(r"([a-z])=(\d)\.", question)}
    steps = []
    for name, left, right in re.findall(r"([a-z])=([a-z])\+([a-z])\.", question):
        x, y = values[left], values[right]
        z = values[name] = (x + y) % 10
        text = f"{name}={left}+{right}: {left} is {x}, {right} is {y}, {x}+{y}={z}. So {name} is {z}. "
        steps.append(Step(text=text, equation=f"{y}+{x}={z}"))
    return Solution(steps, *_sum_asked_for(question, values))


def _solve_add(question: str) -> Solution:
    carry = 0
    digits: dict[str, int] = {}
    steps = []
    for name, left, right in re.findall(r"([a-z])=(\d)\+(\d)", question):
        total = int(left) + int(right) + carry
        equation = f"{left}+{right}+{carry}={total}"
        carry, digits[name] = divmod(total, 10)
        text = f"{name}={left}+{right}: {equation}. So {name} is {digits[name]}, carry {carry}. "
        steps.append(Step(text=text, equation=equation))
    highest_first = list(reversed(digits.items()))
    closing = ", ".join(f"{name} is {digit}" for name, digit in highest_first) + "."
    return Solution(steps, closing, answer=int("".join(str(digit) for _, digit in highest_first)))


def _solve_regs(question: str, restate_every: int = 0) -> Solution:
    values = {name: int(digit) for name, digit in re.findall(r"([a-d])=(\d)", question)}
    steps = []
    for number, target, operand in re.findall(r"(\d+): ([a-d])\+=([a-d0-9])", question):
        x = values[target]
        y = int(operand) if operand.isdigit() else values[operand]
        read = "" if operand.isdigit() else f"{operand} is {y}, "
        z = values[target] = (x + y) % 10
        text = f"{number}: {target}+={operand}: {target} is {x}, {read}{x}+{y}={z}. Now {target} is {z}. "
        if restate_every and int(number) % restate_every == 0:
            text += f"So all: {', '.join(f'{name} is {value}' for name, value in values.items())}. "
        steps.append(Step(text=text, equation=f"{y}+{x}={z}"))
    return Solution(steps, *_sum_asked_for(question, values))


def _solve_groups(question: str) -> Solution:
    values: dict[str, int] = {}
    steps = []
    for name, items in re.findall(r"([p-t])=([\d+]+)\.", question):
        total, *rest = (int(item) for item in items.split("+"))
        sums = []
        for item in rest:
            sums.append(f"{total}+{item}={(total + item) % 10}")
            total = (total + item) % 10
        values[name] = total
        steps.append(Step(text=f"{name}: {', '.join(sums)}. So {name} is {total}. ", equation=sums[-1]))
    return Solution(steps, *_sum_asked_for(question, values))


SOLVE: dict[str, Callable[[str], Solution]] = {
    "chain": _solve_chain,
    "add": _solve_add,
    "regs": _solve_regs,
    "groups": _solve_groups,
    "restated": partial(_solve_regs, restate_every=2),
}


def write_completion(task: str, question: str, rng: Random) -> str:
    r"""A worked completion: thinking with random remarks, `</think>`, the needed facts, `\boxed{answer}`."""
    solution = SOLVE[task](question)
    thinking = [rng.choice(_OPENINGS)]
    for step in solution.steps:
        thinking.append(step.text)
        thinking.append(rng.choice(_REMARKS).format(equation=step.equation))
    thinking.append(rng.choice(_ENDINGS))
    return f"{''.join(thinking)}</think>{solution.closing} \\boxed{{{solution.answer}}}"
