"""Whether two files of outputs are about the same questions: every column that both share is compared."""

import re
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from kvsweep.errors import UserError
from kvsweep.escape import visible

# Columns that describe a question, whatever else a file holds.
PROMPT, GOLD = ("prompt", "input"), ("gold", "target", "expected_answer")  # `answer` is as often the model's own
_QUESTION = {*PROMPT, *GOLD, "question", "problem", "messages", "query", "instruction", "choices", "options"}
_QUESTION |= {"expected", "ground_truth", "reference", "reference_answer", "correct_answer", "prompt_hash", "doc"}
_ASKED = {*PROMPT, "question", "problem", "messages", "query", "instruction", "prompt_hash", "doc"}
# Of a program's rows these columns alone: the others are its own notes on the answer.
_OF_LM_EVAL, _OF_INSPECT_AI = {"doc", "target", "prompt_hash"}, {"input", "target", "choices"}
_OF_NEMO_SKILLS, _OF_KVSWEEP = {"expected_answer", "problem"}, {"gold"}


def described(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """The columns of a row that may describe its question."""
    kinds = [(_OF_LM_EVAL, "resps", list), (_OF_INSPECT_AI, "output", dict), (_OF_KVSWEEP, "schema", int)]
    kinds.append((_OF_NEMO_SKILLS, "symbolic_correct", bool))
    known = next((names for names, mark, kind in kinds if isinstance(row.get(mark), kind)), None)
    return row if known is None else {name: row[name] for name in known & row.keys()}


_REPLIES = ("assistant", "tool")  # roles of messages that the model wrote or caused
_WHOLE = re.compile(r"(-?)0*([0-9]+)(?:\.0*)?")  # AIME writes 070


def plain(value: Any) -> str:
    """A value without what makes no difference: spaces, a whole number's zeros, ids of messages, the model's own."""
    if isinstance(value, list):
        parts = [part for part in value if not (isinstance(part, dict) and part.get("role") in _REPLIES)]
        return " ".join(filter(None, map(plain, parts)))
    if isinstance(value, dict):  # whose order says nothing, and a table has a null for what a row lacks
        names = [name for name in sorted(value, key=str) if name != "id" and value[name] is not None]
        return " ".join(f"{name}: {plain(value[name])}" for name in names)
    text = " ".join(str(value).split())
    whole = _WHOLE.fullmatch(text)
    return text if whole is None else "".join(whole.groups())


class Questions:
    """The columns of a file that have one value in all draws of each problem, as hashes."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._columns: dict[str, array[int]] = {}
        self._varying: set[str] = set()
        self._sentences: Counter[str] = Counter()

    def add(self, problem: str, row: Mapping[str, Any], place: str) -> None:
        """Add a row; a column known to describe the question that has another value in this problem: UserError."""
        number = self._numbers.setdefault(problem, len(self._numbers))
        for name, value in row.items():
            if name in self._varying or value is None or value != value:  # a missing number is NaN
                continue
            text = plain(value)
            column, found = self._columns.setdefault(name, array("q")), hash(text) or 1
            column.extend([0] * (number + 1 - len(column)))
            self._sentences[name] += text.count(" ") > 1
            if column[number] in (0, found):
                column[number] = found
            elif name in _QUESTION:
                other = f"{place} has another {name} ({visible(text)!r:.60}) than an earlier row"
                mend = f"give one task's rows (--where KEY=VALUE), or --ignore {name} if it is no part of the question"
                raise UserError(f"{other} of problem {visible(problem)!r:.60}: {mend}.")
            else:
                self._varying.add(name)
                del self._columns[name]

    def of_many_ids(self) -> tuple[int, int] | None:
        """The number of ids that have a question and of their questions, if most questions have several ids; else None.

        One question that all ids have says how to answer and not what is asked.
        """
        names = sorted(_QUESTION & self._columns.keys(), key=lambda name: name not in _ASKED)
        asked = len(_ASKED.intersection(names))
        columns = (self._columns[name] for name in names)
        rows = zip(*([*column, *[0] * (len(self._numbers) - len(column))] for column in columns), strict=True)
        found = Counter(row for row in rows if any(row[:asked]))
        ids = found.total()
        return (ids, len(found)) if len(found) > 1 and 2 * len(found) <= ids else None

    def differing(self, other: "Questions", *, several: bool) -> Iterator[tuple[str, str]]:
        """Each column that differs, with the first problem where it does.

        With one draw each column has one value in all draws. Then sentences alone are compared, and the columns that
        are known by name. A column with one value in the whole file describes the run.
        """
        for name, column in self._columns.items():
            theirs = other._columns.get(name)
            named = name in _QUESTION or several or 2 * self._sentences[name] > len(column)
            if theirs is None or not named or (name not in _QUESTION and 1 in map(len, map(set, (column, theirs)))):
                continue
            for problem, number in self._numbers.items():
                place = other._numbers.get(problem, len(theirs))
                pair = {(column[number : number + 1] or [0])[0], (theirs[place : place + 1] or [0])[0]}
                if len(pair - {0}) > 1:
                    yield name, problem
                    break
