"""Answers whose grade is known without a label: made from a gold, by changes that keep its meaning or break it.

A *mutant* of a gold is wrong (a digit changed, an item dropped, a bracket closed), a *rewrite* of a gold is right
(spacing, `\\left`, the order of a set). Generated cases come from the templates of grade_kinds.txt, so that both are
known by construction; golds of files are changed as text. Everything follows from the seed.
`python scripts/study/grade_audit.py --mutants 2000 --golds FILE...` judges more of them.
"""

import json
import math
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import sympy

from kvsweep.harness.grading.answers import Rule, Ungraded
from kvsweep.harness.grading.grader import Grader

SYMBOLS = dict(zip("xyztw", sympy.symbols("x y z t w"), strict=True))


@dataclass
class Case:
    """A gold with answers that must be rejected and answers that must be accepted."""

    name: str
    gold: str
    kind: str = "expression"
    mutants: list[str] = field(default_factory=list)
    rewrites: list[str] = field(default_factory=list)


# --- changes of a text -----------------------------------------------------------------------------------------------

COMMAND = re.compile(r"\\(?:text|mathrm|mbox|textbf)\s*\{[^{}]*\}|\\[A-Za-z]+|\\.")


def free_places(text: str, pattern: str) -> list[re.Match[str]]:
    """Matches outside commands and text."""
    taken = [match.span() for match in COMMAND.finditer(text)]
    return [m for m in re.finditer(pattern, text) if not any(a < m.end() and m.start() < b for a, b in taken)]


def swap(text: str, match: re.Match[str], new: str) -> str:
    return text[: match.start()] + new + text[match.end() :]


def digit_changed(text: str, rng: random.Random) -> str:
    places = free_places(text, r"\d")
    if not places:
        return text
    match = rng.choice(places)
    return swap(text, match, rng.choice([d for d in "123456789" if d != match.group()]))


def sign_flipped(text: str, rng: random.Random) -> str:
    """The text with one sign between two terms turned around, or one in front of a term dropped."""
    places = free_places(text, r"(?<=[\w})\]\s])\s*[-+](?!\s*\\infty)|(?<![\w})\]\s^{])-(?=[\w\\(])")
    if not places:
        return text
    match = rng.choice(places)
    binary = match.start() > 0 and text[: match.start()].rstrip()[-1:] not in ("", "(", "[", ",", "=", "{", "<", ">")
    return swap(text, match, " - " if match.group().strip() == "+" else " + " if binary else "")


def variable_renamed(text: str, rng: random.Random) -> str:
    """One letter on the right side of the last relation is renamed everywhere on that side."""
    sides = re.split(r"(=|<|>|\\leq?|\\geq?)", text)
    letters = sorted({m.group() for m in free_places(sides[-1], r"(?<![A-Za-z_])[a-df-hj-z](?![A-Za-z(])")})
    others = [name for name in "uvwqhgjl" if name not in text]
    if not letters or not others:
        return text
    letter, other = rng.choice(letters), rng.choice(others)
    for match in reversed(free_places(sides[-1], rf"(?<![A-Za-z_]){letter}(?![A-Za-z(])")):
        sides[-1] = swap(sides[-1], match, other)
    return "".join(sides)


def items_of(text: str) -> list[str]:
    """The parts between commas outside brackets."""
    depth, items = 0, [""]
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            items.append("")
        else:
            items[-1] += character
    return [item.strip() for item in items]


def tight(text: str) -> str:
    """No spaces, except behind a command, where LaTeX needs them."""
    if "\\text" in text or "\\mbox" in text or re.search(r"\\ |[A-Za-z]{3,} [A-Za-z]|\d \d|\d, \d{3}", text):
        return text
    return re.sub(r"(\\[A-Za-z]+ |\\ )| ", lambda found: found[1] or "", text)


def with_left(text: str) -> str:
    text = re.sub(r"(?<!\\left)(?<!\\)([(\[])", r"\\left\1", text)
    text = re.sub(r"(?<!\\right)(?<!\\)([)\]])", r"\\right\1", text)
    return re.sub(r"(?<!\\left)\\\{(.*?)\\\}", r"\\left\\{\1\\right\\}", text)


def thousands(mark: str, text: str) -> str:
    grouped = lambda match: f"{int(match.group()):,}".replace(",", mark)  # noqa: E731
    return re.sub(r"(?<![\d._])[1-9]\d{3,}(?![\d.])", grouped, text)


def sub(pattern: str, new: str) -> Callable[[str], str]:
    return partial(re.compile(pattern).sub, new)


# The changes after which an integer is still one, and those of every other gold.
INTEGER_REWRITES: tuple[Callable[[str], str], ...] = (
    lambda s: f"${s.strip('$')}$", " {} ".format, "{}.".format, partial(thousands, "{,}"), partial(thousands, r",\!"),
    lambda s: s if "text" in s else s.replace("-", "\u2212"),
)  # fmt: skip
REWRITES = (
    *INTEGER_REWRITES,
    # Spaces where LaTeX ignores them.
    lambda s: re.sub(r",(?=[^\d\\])", ", ", re.sub(r"(?<=[\w})])(?<!\de)([-+=<>])(?=[\w\\(])", r" \1 ", s)),
    tight,
    sub(r"(?<=[\w})])(?<!\de)([-+=])(?=[\w\\(])", r"\\,\1\\;"),
    with_left,
    sub(r"\\frac(?![A-Za-z])", r"\\dfrac"),
    sub(r"\\frac(?![A-Za-z])", r"\\tfrac"),
    sub(r"^(-?)\\d?frac\{(\w+)\}\{(\w+)\}$", r"\1\2/\3"),
    lambda s: r"\( " + re.sub(r"(?<!\\)[$]", "", s) + r" \)",
    r"\displaystyle {}".format,
    sub(r"\^(\d)", r"^{\1}"),
    sub(r"(?<!\})\^\{(\d)\}(?!\d)", r"^\1"),
    sub(r"\\(le|ge)q?(?![A-Za-z])", r"\\\1qslant"),
    sub(r"\\(le|ge)q(slant)?(?![A-Za-z])", r"\\\1"),
    lambda s: re.sub(r"\\pi(?![A-Za-z])", "π", re.sub(r"\\leq?(?![A-Za-z])", "≤", s)),
    sub(r"\\frac\{", r"\\frac {"),
    lambda s: re.sub(r"\\\\\s*", "\\\\\\\\\n", s) if "matrix" in s else s,
)


def of_text(gold: str, rng: random.Random, name: str, kind: str = "expression") -> Case:
    """The changes that can be made to a gold of unknown kind."""
    case = Case(name, gold, kind)
    plain = gold.strip().strip("$")
    changed = [change(plain, rng) for change in (digit_changed, sign_flipped, variable_renamed)]
    case.mutants += [mutant for mutant in changed if mutant != plain]
    if "=" not in plain and "\\in" not in plain:
        change_items(case, plain)
    if plain != "0" and re.fullmatch(r"-?[\d.]+|-?\\d?frac\{\d+\}\{\d+\}|\d*\\sqrt\{\d+\}|\d*\\pi", plain):
        case.mutants += [plain.removeprefix("-") if plain[0] == "-" else f"-{plain}", f"{plain} x", f"2x = {plain}"]
        case.mutants += [f"({plain})^2"] * (plain.strip("-") != "1") + [rf"{plain} \text{{ or }} 7777"]
        case.mutants += [rf"\text{{not }} {plain}", rf"{plain}\sim 7777", f"x > {plain}"]
        case.rewrites += [f"x = {plain}"] * (kind == "expression")
        case.rewrites += [rf"{plain} \text{{ cm}}", rf"{plain} \, \mathrm{{km}}"]
    if kind == "integer":
        digits = plain.lstrip("-")
        case.mutants += [f"{plain}_8", f"{plain}.5", f"{plain}1"]
        case.mutants += [rf"{plain} \text{{ million}}", f"{plain}0"] if digits != "0" else []
        case.rewrites += [plain.replace(digits, f"0{digits}"), f"{plain}.0", rf"\text{{{plain}}}"]
        case.rewrites += [rf"\textbf{{(B)}} {plain}"]
    return rewritten(case)


def change_items(case: Case, plain: str) -> None:
    """Drop, repeat, swap and turn the items of a list, a tuple or a set."""
    items, bracketed = items_of(plain), re.fullmatch(r"(\(|\\\{|\\left\(|\\left\\\{)(.*)(\)|\\\})", plain)
    if len(items) == 1 and bracketed and len(inner := items_of(bracketed[2].removesuffix("\\right"))) > 1:
        around = ("\\{", "\\}") if "{" in bracketed[1] else ("(", ")")
        wrong = [inner[:-1], [*inner, inner[-1]]]
        if around[0] == "(" and inner[0] != inner[1]:
            wrong.append([inner[1], inner[0], *inner[2:]])
            case.mutants.append(f"[{', '.join(inner)}]")
        case.mutants += [", ".join(some).join(around) for some in wrong]
    elif len(items) > 1 and not re.fullmatch(r"[\d,{}\\!$ ]+", plain):
        case.mutants += [", ".join(items[:-1]), ", ".join([*items, items[-1]])]
        case.rewrites.append(", ".join(reversed(items)))


def rewritten(case: Case) -> Case:
    """The case with the changes of its text that keep its meaning."""
    changes = INTEGER_REWRITES if case.kind == "integer" else REWRITES
    case.rewrites += [new for change in changes if (new := change(case.gold)) != case.gold]
    return case


# --- generated kinds -------------------------------------------------------------------------------------------------

OTHER = {"(": "[", "[": "(", ")": "]", "]": ")", "<": r"\leq", r"\leq": "<", ">": r"\geq", r"\geq": ">"}
TURNED = {"<": ">", ">": "<", r"\leq": r"\geq", r"\geq": r"\leq"}
_x, _t = SYMBOLS["x"], SYMBOLS["t"]
SHAPES: tuple[Callable[[int, int, int], Any], ...] = (
    lambda a, b, c: (a * _x + c) / (_x + a + b),
    lambda a, b, c: a * sympy.exp(-b * _t) + c,
    lambda a, b, c: a * sympy.sin(b * _x) + c,
    lambda a, b, c: sympy.sqrt(a * _x + b) - c,
    lambda a, b, c: a * sympy.cos(b * _t + c),
    lambda a, b, c: sympy.log(_x + a) / b + c,
    lambda a, b, c: a / (b * _x**2 + c),
    lambda a, b, c: sympy.exp(a * _x) * (b * _x + c),
    lambda a, b, c: a * _x ** sympy.Rational(1, b) + c,
    lambda a, b, c: abs(a * _x - b) + c,
    lambda a, b, c: a ** (_x + b) + c,
    lambda a, b, c: a * sympy.Symbol("m") / sympy.Symbol("M") + b * c,
)


def turned(expression: Any) -> str:
    """The terms of a sum in reversed order."""
    return " + ".join(f"({sympy.latex(term)})" for term in reversed(sympy.Add.make_args(expression)))


def numbers(rng: random.Random, size: int) -> list[str]:
    """Different numbers; at times the first is no integer, or all are large."""
    if rng.random() < 0.2:
        return [str(n) for n in rng.sample(range(100, 1000), size)]
    pool = [str(n) for n in rng.sample([*range(-30, 0), *range(1, 60)], size)]
    first = [r"\frac{1}{3}", r"\sqrt{5}", r"-\frac{3}{7}", r"1+\sqrt{2}", r"\pi"]
    return [rng.choice(first), *pool[1:]] if rng.random() < 0.4 else pool


def table(entries: list[list[str]], kind: str = "pmatrix", row: str = r" \\ ", cell: str = " & ") -> str:
    return rf"\begin{{{kind}}} {row.join(cell.join(r) for r in entries)} \end{{{kind}}}"


HELPERS: dict[str, Any] = {
    **SYMBOLS, "OTHER": OTHER, "SHAPES": SHAPES, "TURNED": TURNED, "gcd": math.gcd, "latex": sympy.latex,
    "numbers": numbers, "re": re, "sympy": sympy, "table": table, "turned": turned,
}  # fmt: skip


def made(name: str, lines: list[tuple[str, str]], rng: random.Random) -> Case:
    """A case of a block of grade_kinds.txt: its variables drawn, one of its golds chosen, its templates filled."""
    names = HELPERS | {"rng": rng, "randint": rng.randint, "choice": rng.choice, "sample": rng.sample}

    def fill(template: str) -> str:
        return re.sub("«(.*?)»", lambda found: str(eval(found[1], names)), template)

    chosen, current = rng.randrange(sum(word == "gold" for word, _ in lines)), -1
    case, texts = Case(name, ""), True
    for word, rest in lines:
        current += word == "gold"
        if word == "let":
            exec(rest, names)
        elif word == "as":
            case.kind = fill(rest)
        elif word == "texts":
            texts = False
        elif word == "gold" and current == chosen:
            case.gold = fill(rest)
        elif word in ("no", "yes") and current in (-1, chosen):
            answers = [answer for part in fill(rest).split(";;") if (answer := part.strip())]
            (case.mutants if word == "no" else case.rewrites).extend(answers)
    if name == "integer":
        more = of_text(case.gold, rng, name, case.kind)
        more.mutants += case.mutants
        return more
    return rewritten(case) if texts else case


def kinds() -> Iterator[Callable[[random.Random], Case]]:
    """The blocks of grade_kinds.txt as makers of cases, each as often as its head says."""
    text = Path(__file__).with_name("grade_kinds.txt").read_text(encoding="utf-8")
    for name, times, block in re.findall(r"^\[(.*)\](?: x(\d))?\n((?:.+\n)+)", text, flags=re.MULTILINE):
        lines = [(word, rest) for word, _, rest in (line.partition(" ") for line in block.splitlines())]
        yield from [partial(made, name, lines)] * int(times or 1)


KINDS = tuple(kinds())


def cleaned(made: Iterable[Case]) -> Iterator[Case]:
    """The cases without mutants that are spelled as the gold or as one of its rewrites."""
    for case in made:
        rights = {re.sub(r"\s", "", right) for right in [case.gold, *case.rewrites]}
        case.mutants = [mutant for mutant in case.mutants if re.sub(r"\s", "", mutant) not in rights]
        yield case


def cases(count: int, seed: int = 0) -> Iterator[Case]:
    """Generated cases, all kinds in turn."""
    return cleaned(KINDS[n % len(KINDS)](random.Random(f"{seed}/{n}")) for n in range(count))


def golds(paths: Iterable[Path], seed: int = 0) -> Iterator[Case]:
    """Every gold of the files once, changed as text."""
    seen = set()
    for path in paths:
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            gold = str(row.get("gold", row.get("answer", "")))
            kind = "expression" if row.get("benchmark", "aime24") not in ("aime24", "amc23") else "integer"
            if gold and (gold, kind) not in seen and len(gold) <= 200:
                seen.add((gold, kind))
                yield of_text(gold, random.Random(f"{seed}/{gold}"), f"gold, {row.get('benchmark', 'integer')}", kind)


def measured(made: Iterable[Case], pool: Grader) -> dict[str, int]:
    """Judge all answers of the cases in the workers of a pool; print what went wrong, by kind, with an example each."""
    rule = Rule(answer_from="whole_text")
    rows = []
    for case in made:
        rows += [(case, False, mutant) for mutant in case.mutants] + [(case, True, right) for right in case.rewrites]
    jobs: Any = [
        Ungraded(text=f"So $\\boxed{{{answer}}}$", stop_reason="stop", gold=case.gold, kind=case.kind, rule=rule)  # type: ignore[arg-type]
        for case, _, answer in rows
    ]
    replies = [reply.outcome == "correct" for reply in pool.judge(jobs)]
    wrong = [row for row, correct in zip(rows, replies, strict=True) if correct != row[1]]
    for (name, wanted), count in Counter((case.name, wanted) for case, wanted, _ in wrong).most_common():
        example, answer = next((case, a) for case, w, a in wrong if (case.name, w) == (name, wanted))
        print(f"{count:5} {'rejected' if wanted else 'accepted'} {name}: {answer!r} for {example.gold!r}")
    accepted = [case for case, wanted, _ in wrong if not wanted]
    return {
        "mutants": sum(not wanted for _, wanted, _ in rows),
        "mutants_accepted": len(accepted),
        "mutants_accepted_integers_letters": sum(case.kind != "expression" for case in accepted),
        "rewrites": sum(wanted for _, wanted, _ in rows),
        "rewrites_rejected": len(wrong) - len(accepted),
    }
