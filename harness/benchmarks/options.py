"""Options of multiple-choice questions: order them, and refuse options that would be asked wrongly."""

import hashlib
import json
import random
import re
from collections.abc import Mapping, Sequence

from kvsweep.harness.benchmarks.config import OptionOrder
from kvsweep.harness.benchmarks.sources import FileRow
from kvsweep.messages.errors import UserError

LETTERS = "ABCD"
_OPTION_COLUMNS = {"choices", "options", "candidates"}
_HINT = "write options into the problem or into columns that benchmark.columns.wrong_1 to wrong_3 name"
_LABEL = re.compile(r"\(?([A-D])[).:]\s")


def option_orders(ids: Sequence[str], seed: int, rule: OptionOrder = "balanced") -> dict[str, tuple[int, ...]]:
    """Return the order of each question's options: 0 is the right option, 1 to 3 the wrong ones, listed A, B, C, D.

    `balanced`: right options take the letters in turn, in the order of a hash of (seed, id), so that all letters are
    right equally often, within one. Wrong options follow in the order of a hash of (seed, id, number). The other rules
    draw one order after another: simple-evals as in its first repeat, NeMo-Skills as in its rows.
    """
    orders = {}
    if rule != "balanced":
        numbers = random.Random(seed)
        for problem_id in ids:
            if rule == "simple_evals":
                order = numbers.sample(range(4), 4)
            else:
                order = [1, 2, 3, 0]  # NeMo-Skills appends the right option to the wrong ones
                numbers.shuffle(order)
            orders[problem_id] = tuple(order)
        return orders
    by_hash = sorted(ids, key=lambda problem_id: _digest(seed, problem_id))
    for rank, problem_id in enumerate(by_hash):
        order = sorted((1, 2, 3), key=lambda number: _digest(seed, problem_id, number))
        order.insert(rank % len(LETTERS), 0)
        orders[problem_id] = tuple(order)
    return orders


def _digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def check_options(choices: Sequence[str], row: FileRow) -> None:
    """Refuse equal options, options that carry their own letters, and a letter as the right option, the first."""
    for choice in choices:
        if choices.count(choice) > 1:
            raise UserError(f"{row.where} has the option {choice!r:.60} twice; options must differ, so correct one.")
    right, *wrong = choices
    # A question about letters, such as "which blood type", has letters as all its options.
    if right in LETTERS and all(len(choice) > 1 for choice in wrong):
        raise UserError(
            f"{row.where} has the right option {right!r}, a letter beside options that are texts; give a column with "
            "the right option's text as benchmark.columns.answer."
        )
    labels = [label[1] for label in map(_LABEL.match, choices) if label]
    if sorted(labels) == [*LETTERS]:
        raise UserError(
            f"{row.where} has options with letters of their own, such as {right!r:.60}; delete these letters, since "
            "kvsweep writes its own."
        )


def check_letter(row: FileRow, prompt: str, gold: str) -> None:
    """Refuse a letter as the gold of a problem that is asked without options."""
    needed = LETTERS[: max(2, LETTERS.index(gold) + 1)]  # A and B, and those up to the gold
    for letter in needed:
        # Labels are "A 6 J" at a line's start; behind no letter or digit "A) 6 J" and "\textbf{(B)}", an A that ends a
        # line or stands before a wide gap, and "A or B". An article within a line is none.
        at_start = rf"^\s*{letter}\s"
        before_label = r"[^\w\s]|\s*$|\s{2}|\s(?:or|and)\b"
        label = rf"(?<![^\W_]){letter}(?={before_label})"
        if not re.search(f"{at_start}|{label}", prompt, re.MULTILINE):
            raise UserError(f"{row.where} has the answer {gold} and is asked without an option {letter}; {_HINT}.")


def check_lists(row: FileRow, text: str, *, named: bool) -> None:
    """Refuse a list of texts beside a problem that does not contain them: options that no prompt would ask.

    `named`: only in a column with a name that promises options.
    """
    for column, value in row.values.items():
        is_candidate = not named or column.lower() in _OPTION_COLUMNS
        if is_candidate and isinstance(value, list | Mapping) and not all(choice in text for choice in _texts(value)):
            raise UserError(
                f"{row.where} has a list in column {column!r}, which no prompt asks; {_HINT}, or delete the column."
            )


def _texts(value: object) -> list[str]:
    """Return the texts of a value: one, or those in a list and in an object's values."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if not isinstance(value, list):
        return [str(value).strip()]
    texts = []
    for inner in value:
        texts += _texts(inner)
    return texts
