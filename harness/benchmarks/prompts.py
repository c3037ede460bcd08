"""Prompts: the templates that ask a problem, and the order of a multiple-choice question's options."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

from kvsweep.base.errors import UserError
from kvsweep.harness.settings import CONF

PROMPTS = CONF / "prompt"
LETTERS = "ABCD"
MOST_CHARS = 1_000_000


class Prompt(NamedTuple):
    """A template that asks a problem; `name` is its `benchmark.prompt`."""

    name: str
    template: jinja2.Template

    def ask(self, problem: str, options: Mapping[str, str]) -> str:
        """One problem as asked, with its options by letter if any; a template that fails or is unfit is refused."""
        prompt = ""
        try:
            for piece in self.template.generate(problem=problem, **({"options": options} if options else {})):
                prompt += piece
                if len(prompt) > MOST_CHARS:
                    raise OverflowError(f"more than {MOST_CHARS:,} characters for one problem")
        except Exception as error:  # A template is a program: it can raise anything.
            reason = f"cannot ask this benchmark ({type(error).__name__}: {str(error)[:80]!r})"
            mend = f"choose a prompt that uses problem{' and options' if options else ' alone'}"
            raise UserError(f"benchmark.prompt={self.name} {reason}; {mend}.") from None
        if problem not in prompt:
            raise UserError(f"benchmark.prompt={self.name} leaves the problem out; put {{{{ problem }}}} into it.")
        return prompt


class _Sandbox(ImmutableSandboxedEnvironment):
    """An environment for templates that strangers wrote: they reach no Python object and change no value.

    Text is neither multiplied nor formatted with %, and no number is raised to a power, because a short template could
    fill the memory before any output could be counted.
    """

    intercepted_binops = frozenset({"*", "**", "%"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" or not isinstance(left, int | float) or not isinstance(right, int | float):
            raise SecurityError(f"{operator} is not allowed in a template")
        return super().call_binop(context, operator, left, right)


def read_prompt(name: str) -> Prompt:
    """Read a template of conf/prompt by its name, or any other by its path; raises a UserError if there is none."""
    fault = "is neither a name nor a readable file"
    try:
        known = PROMPTS / f"{name}.jinja"
        path = known if known.is_file() else Path(name).expanduser()
        if not path.is_file():  # Reading a pipe or a device might never end.
            raise FileNotFoundError
        text = path.read_text(encoding="utf-8").rstrip("\n")
        fault = "is no template"
        template = _Sandbox(undefined=jinja2.StrictUndefined, keep_trailing_newline=True).from_string(text)
    except Exception as error:  # Python's own compiler, too, can refuse what jinja2 makes of a template.
        choices = ", ".join(sorted(path.stem for path in PROMPTS.glob("*.jinja")))
        reason = f"benchmark.prompt={name!r:.80} {fault} ({type(error).__name__})"
        raise UserError(f"{reason}; choose one of {choices}, or give a path.") from None
    return Prompt(name=name, template=template)


def option_orders(ids: Sequence[str], seed: int) -> dict[str, tuple[int, ...]]:
    """Order the options of each question: 0 is the right option, 1 to 3 are the wrong ones, listed as A, B, C, D.

    The right options take the letters in turn, in the order of a hash of (seed, id), so that each letter is right
    equally often, to within one. The wrong options follow in the order of a hash of (seed, id, number). The orders
    depend on the seed and on the set of ids, but not on the order of the ids or on the machine.
    """
    orders = {}
    for rank, problem_id in enumerate(sorted(ids, key=lambda problem_id: _digest(seed, problem_id))):
        wrong = sorted((1, 2, 3), key=lambda number: _digest(seed, problem_id, number))
        place = rank % len(LETTERS)
        orders[problem_id] = (*wrong[:place], 0, *wrong[place:])
    return orders


def _digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
