"""Prompts: templates, and the order of the options of a multiple-choice question."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import jinja2

from analysis.records import UserError
from harness.settings import CONF

PROMPTS = CONF / "prompt"
LETTERS = "ABCD"


def option_orders(ids: Sequence[str], seed: int) -> dict[str, tuple[int, ...]]:
    """For each question the order of its options: 0 is the right one, 1 to 3 are the others, as A, B, C, D.

    The right ones take the letters in turn, in the order of a hash of (seed, id), so that each letter is right equally
    often, to within one; the others follow in the order of a hash of (seed, id, number). So it depends on the seed and
    on which questions there are, and on neither their order nor the machine.
    """
    ranked = sorted(ids, key=lambda problem_id: _digest(seed, problem_id))
    orders = {}
    for rank, problem_id in enumerate(ranked):
        wrong = sorted((1, 2, 3), key=lambda number: _digest(seed, problem_id, number))
        place = rank % len(LETTERS)
        orders[problem_id] = (*wrong[:place], 0, *wrong[place:])
    return orders


def _digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _read_prompt(name: str) -> jinja2.Template:
    choices = ", ".join(sorted(p.stem for p in PROMPTS.glob("*.jinja")))
    try:
        known = PROMPTS / f"{name}.jinja"
        path = known if known.is_file() else Path(name).expanduser()
        text = path.read_text(encoding="utf-8").rstrip("\n")
        return jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True).from_string(text)
    except (OSError, ValueError, RuntimeError, jinja2.TemplateError) as error:
        reason = (
            "is no template" if isinstance(error, jinja2.TemplateError) else "is neither a name nor a readable file"
        )
        raise UserError(
            f"benchmark.prompt={name!r:.80} {reason} ({type(error).__name__}); choose one of {choices}, or give a path."
        ) from None


def _ask(template: jinja2.Template, name: str, text: str, options: dict[str, str]) -> str:
    try:
        prompt = template.render(problem=text, **({"options": options} if options else {}))
    except Exception as error:  # A template is a program: it can raise anything.
        raise UserError(
            f"benchmark.prompt={name} cannot ask this benchmark ({type(error).__name__}: {str(error)[:80]!r}); choose "
            f"a prompt that uses problem{' and options' if options else ' alone'}."
        ) from None
    if text not in prompt:
        raise UserError(f"benchmark.prompt={name} leaves the problem out; put {{{{ problem }}}} into the template.")
    return prompt
