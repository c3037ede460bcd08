# ruff: noqa: E501, E731
"""Answers whose grade is known without a label: made from a gold, by changes that keep its meaning or break it.

    python scripts/attack/grade_mutants.py --cases 2000 --golds graded_outputs.jsonl aime24.jsonl

A *mutant* of a gold is wrong (a digit changed, an item dropped, a bracket closed), a *rewrite* of a gold is right
(spacing, `\\left`, the order of a set). Generated cases are built from their parts, so that both are known by
construction; golds of files are changed as text. Everything follows from the seed. The last line is one JSON object.
"""

import argparse
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sympy

NAMES = "xyzabkmnprst"
x, y, z, t = sympy.symbols("x y z t")


@dataclass
class Case:
    """A gold with answers that must be rejected and answers that must be accepted, each with the change's name."""

    name: str
    gold: str
    kind: str = "expression"
    mutants: list[tuple[str, str]] = field(default_factory=list)
    rewrites: list[tuple[str, str]] = field(default_factory=list)


# --- changes of a text -----------------------------------------------------------------------------------------------

COMMAND = re.compile(r"\\(?:text|mathrm|mbox|textbf)\s*\{[^{}]*\}|\\[A-Za-z]+|\\.")


def free_places(text: str, pattern: str) -> list[re.Match[str]]:
    """Matches outside commands and text."""
    taken = [match.span() for match in COMMAND.finditer(text)]
    return [m for m in re.finditer(pattern, text) if not any(a < m.end() and m.start() < b for a, b in taken)]


def swap(text: str, match: re.Match[str], new: str) -> str:
    return text[: match.start()] + new + text[match.end() :]


def digit_changed(text: str, rng: random.Random) -> str:
    match = rng.choice(free_places(text, r"\d"))
    return swap(text, match, rng.choice([d for d in "123456789" if d != match.group()]))


def sign_flipped(text: str, rng: random.Random) -> str:
    places = free_places(text, r"(?<=[\w})\]\s])\s*[-+](?!\s*\\infty)|(?<![\w})\]\s^{])-(?=[\w\\(])")
    match = rng.choice(places)
    old = match.group().strip()
    # A sign between two terms is turned around, a sign in front of a term is dropped.
    binary = match.start() > 0 and text[: match.start()].rstrip()[-1:] not in ("", "(", "[", ",", "=", "{", "<", ">")
    return swap(text, match, " - " if old == "+" else " + " if binary else "")


def variable_renamed(text: str, rng: random.Random) -> str:
    """One letter on the right side of the last relation is renamed everywhere on that side."""
    sides = re.split(r"(=|<|>|\\leq?|\\geq?)", text)
    letters = {m.group() for m in free_places(sides[-1], r"(?<![A-Za-z_])[a-df-hj-z](?![A-Za-z(])")}
    letter = rng.choice(sorted(letters))
    other = rng.choice([n for n in "uvwqhgjl" if n not in text])
    for match in reversed(free_places(sides[-1], rf"(?<![A-Za-z_]){letter}(?![A-Za-z(])")):
        sides[-1] = swap(sides[-1], match, other)
    return "".join(sides)


def items_of(text: str) -> list[str]:
    """The parts between commas outside brackets, once one pair of brackets around the whole is off."""
    depth, items = 0, [""]
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            items.append("")
        else:
            items[-1] += character
    return [item.strip() for item in items]


def loose(text: str) -> str:
    """Spaces where LaTeX ignores them."""
    text = re.sub(r"(?<=[\w})])(?<!\de)([-+=<>])(?=[\w\\(])", r" \1 ", text)
    return re.sub(r",(?=[^\d\\])", ", ", text)


def tight(text: str) -> str:
    if "\\text" in text or "\\mbox" in text or re.search(r"\\ |[A-Za-z]{3,} [A-Za-z]|\d \d|\d, \d{3}", text):
        return text
    return re.sub(r"(?<!\\[a-zA-Z])(?<!\\[a-zA-Z]{2})(?<!\\[a-zA-Z]{3})(?<!\\[a-zA-Z]{4})(?<!\\[a-zA-Z]{5})"
                  r"(?<!\\[a-zA-Z]{6})(?<!\\[a-zA-Z]{7})(?<!\\[a-zA-Z]{8})(?<!\\) ", "", text)  # fmt: skip


def with_left(text: str) -> str:
    text = re.sub(r"(?<!\\left)(?<!\\)([(\[])", r"\\left\1", text)
    text = re.sub(r"(?<!\\right)(?<!\\)([)\]])", r"\\right\1", text)
    return re.sub(r"(?<!\\left)\\\{(.*?)\\\}", r"\\left\\{\1\\right\\}", text)


def thousands(text: str, mark: str) -> str:
    def grouped(match: re.Match[str]) -> str:
        return f"{int(match.group()):,}".replace(",", mark)

    return re.sub(r"(?<![\d._])[1-9]\d{3,}(?![\d.])", grouped, text)


def slashed(text: str) -> str:
    return re.sub(r"^(-?)\\d?frac\{(\w+)\}\{(\w+)\}$", r"\1\2/\3", text)


REWRITES: dict[str, Callable[[str], str]] = {
    "spacing": loose,
    "no spaces": tight,
    "thin spaces": lambda s: re.sub(r"(?<=[\w})])(?<!\de)([-+=])(?=[\w\\(])", r"\\,\1\\;", s),
    "left right": with_left,
    "dfrac": lambda s: re.sub(r"\\frac(?![A-Za-z])", r"\\dfrac", s),
    "tfrac": lambda s: re.sub(r"\\frac(?![A-Za-z])", r"\\tfrac", s),
    "slash": slashed,
    "dollars": lambda s: f"${s.strip('$')}$",
    "parentheses": lambda s: rf"\( {re.sub(r'(?<!' + chr(92) * 2 + r')[$]', '', s)} \)",
    "displaystyle": lambda s: rf"\displaystyle {s}",
    "full stop": lambda s: s + ".",
    "spaces around": lambda s: f" {s} ",
    "thousands {,}": lambda s: thousands(s, "{,}"),
    "thousands ,\\!": lambda s: thousands(s, r",\!"),
    "braced exponents": lambda s: re.sub(r"\^(\d)", r"^{\1}", s),
    "bare exponents": lambda s: re.sub(r"(?<!\})\^\{(\d)\}(?!\d)", r"^\1", s),
    "unicode minus": lambda s: s if "text" in s else s.replace("-", "\u2212"),
    "geqslant": lambda s: re.sub(r"\\(le|ge)q?(?![A-Za-z])", r"\\\1qslant", s),
    "le": lambda s: re.sub(r"\\(le|ge)q(slant)?(?![A-Za-z])", r"\\\1", s),
    "unicode": lambda s: re.sub(r"\\pi(?![A-Za-z])", "π", re.sub(r"\\leq?(?![A-Za-z])", "≤", s)),
    "space in the command": lambda s: s.replace(r"\frac{", r"\frac {"),
    "newline after rows": lambda s: re.sub(r"\\\\\s*", "\\\\\\\\\n", s) if "matrix" in s else s,
}


def attempt(change: Callable[..., str], *arguments: object) -> str | None:
    try:
        return change(*arguments)
    except IndexError:  # nothing there to change
        return None


def of_text(gold: str, rng: random.Random, name: str, kind: str = "expression") -> Case:
    """The changes that can be made to a gold of unknown kind."""
    case = Case(name, gold, kind)
    plain = gold.strip().strip("$")
    for label, change in (("digit", digit_changed), ("sign", sign_flipped), ("variable", variable_renamed)):
        if (mutant := attempt(change, plain, rng)) and mutant != plain:
            case.mutants.append((label, mutant))
    if "=" not in plain and "\\in" not in plain:
        items = items_of(plain)
        bracketed = re.fullmatch(r"(\(|\\\{|\\left\(|\\left\\\{)(.*)(\)|\\\})", plain)
        if len(items) == 1 and bracketed:
            inner = items_of(bracketed[2].removesuffix("\\right"))
            if len(inner) > 1:
                around = ("\\{", "\\}") if "{" in bracketed[1] else ("(", ")")
                case.mutants.append(("item dropped", ", ".join(inner[:-1]).join(around)))
                case.mutants.append(("item repeated", ", ".join([*inner, inner[-1]]).join(around)))
                if around[0] == "(" and inner[0] != inner[1]:
                    case.mutants.append(("items swapped", ", ".join([inner[1], inner[0], *inner[2:]]).join(around)))
                    case.mutants.append(("brackets", ", ".join(inner).join(("[", "]"))))
        elif len(items) > 1 and not re.fullmatch(r"[\d,{}\\!$ ]+", plain):
            case.mutants.append(("item dropped", ", ".join(items[:-1])))
            case.mutants.append(("item repeated", ", ".join([*items, items[-1]])))
            case.rewrites.append(("order of a list", ", ".join(reversed(items))))
    if plain != "0" and re.fullmatch(r"-?[\d.]+|-?\\d?frac\{\d+\}\{\d+\}|\d*\\sqrt\{\d+\}|\d*\\pi", plain):
        case.mutants += [("sign in front", plain.removeprefix("-") if plain[0] == "-" else f"-{plain}")]
        case.mutants += [("a variable behind", f"{plain} x"), ("left side", f"2x = {plain}")]
        case.mutants += [("power", f"({plain})^2")] if plain.strip("-") not in ("0", "1") else []
        case.mutants += [("other number behind", rf"{plain} \text{{ or }} 7777")]
        case.mutants += [("not", rf"\text{{not }} {plain}"), ("tilde", rf"{plain}\sim 7777"), ("bound", f"x > {plain}")]
        case.rewrites += [("name", f"x = {plain}")] if kind == "expression" else []
        case.rewrites += [("unit", rf"{plain} \text{{ cm}}"), ("unit", rf"{plain} \, \mathrm{{km}}")]
    if kind == "integer":
        digits = plain.lstrip("-")
        case.mutants += [("base", f"{plain}_8"), ("decimal", f"{plain}.5"), ("one digit more", f"{plain}1")]
        case.mutants += (
            [("million", rf"{plain} \text{{ million}}"), ("times ten", f"{plain}0")] if digits != "0" else []
        )
        case.rewrites += [("leading zero", plain.replace(digits, f"0{digits}")), ("decimal", f"{plain}.0")]
        case.rewrites += [("text", rf"\text{{{plain}}}"), ("option", rf"\textbf{{(B)}} {plain}")]
    case.rewrites += [(label, new) for label, change in REWRITES.items() if (new := change(gold)) != gold]
    if kind == "integer":
        wanted = {"dollars", "spaces around", "thousands {,}", "thousands ,\\!", "unicode minus", "full stop"}
        case.rewrites = [(n, r) for n, r in case.rewrites if n not in REWRITES or n in wanted]
    return case


# --- generated kinds -------------------------------------------------------------------------------------------------


def with_texts(case: Case, rng: random.Random) -> Case:
    """The case with the changes of its text added; a digit may have made an equal number, which its maker tells."""
    case.rewrites += [(label, new) for label, change in REWRITES.items() if (new := change(case.gold)) != case.gold]
    return case


def integer(rng: random.Random) -> Case:
    n = rng.choice([rng.randint(0, 999), rng.randint(-99, -1), rng.randint(1000, 10**9)])
    case = of_text(str(n), rng, "integer", rng.choice(["integer", "expression"]))
    case.mutants += [("off by one", str(n + 1)), ("off by one", str(n - 1)), ("list", f"{n}, {n + 1}")]
    case.mutants += [("base", rf"{n}_{{{rng.randint(2, 9)}}}"), ("imaginary", f"{n}i"), ("half", rf"\frac{{{n}}}{{7}}")]
    if n:
        case.mutants += [
            ("sign", str(-n)),
            ("times pi", rf"{n}\pi"),
            ("percent of", rf"{n}00"),
            ("word", rf"{n} \text{{ dozen}}"),
        ]
    else:
        case.mutants = [
            (a, b) for a, b in case.mutants if a not in ("sign in front", "half", "imaginary", "a variable behind")
        ]
    case.mutants += [("two numbers", f"{n} {rng.randint(1, 9)}"), ("factorial", f"{n}!")] if 2 < abs(n) < 10**4 else []
    return case


def fraction(rng: random.Random) -> Case:
    p, q = rng.randint(-60, 60) or 7, rng.randint(2, 99)
    while sympy.gcd(p, q) != 1:
        p, q = rng.randint(1, 60), rng.randint(2, 99)
    s, a = ("-" if p < 0 else ""), abs(p)
    case = Case("fraction", rf"{s}\frac{{{a}}}{{{q}}}")
    case.mutants = [("digit", rf"{s}\frac{{{a + 1}}}{{{q}}}"), ("digit", rf"{s}\frac{{{a}}}{{{q + 1}}}"),
                    ("sign", rf"{'' if s else '-'}\frac{{{a}}}{{{q}}}"),
                    ("numerator alone", f"{p}"), ("denominator alone", f"{q + a * q}"), ("tail", rf"\frac{{{a}}}{{{q}}} + \frac{{1}}{{{q}}}"),
                    ("root", rf"{s}\sqrt{{\frac{{{a}}}{{{q}}}}}" if a != 1 else "1"), ("equal number", rf"x = y + {s}\frac{{{a}}}{{{q}}}"),
                    ("mixed", rf"{s}1\frac{{{a}}}{{{q}}}"), ("list", rf"\frac{{{a}}}{{{q}}}, \frac{{{a}}}{{{q}}}")]  # fmt: skip
    case.mutants += [("upside down", rf"{s}\frac{{{q}}}{{{a}}}")]
    case.rewrites = [("slash", f"{p}/{q}"), ("slash spaced", f"{p} / {q}"), ("multiple", rf"{s}\frac{{{3 * a}}}{{{3 * q}}}"),
                     ("sign inside", rf"\frac{{{p}}}{{{q}}}"), ("name", rf"k = {s}\frac{{{a}}}{{{q}}}"), ("name", rf"P(A) = {p}/{q}"),
                     ("unit", rf"{s}\frac{{{a}}}{{{q}}} \text{{ cm}}^2"), ("unit", rf"{s}\frac{{{a}}}{{{q}}}\text{{ hours}}"),
                     ("words before", rf"\text{{equal to }} {s}\frac{{{a}}}{{{q}}}"), ("brackets", rf"\left({s}\frac{{{a}}}{{{q}}}\right)")]  # fmt: skip
    if a > q:
        case.rewrites += [
            ("mixed number", rf"{s}{a // q}\frac{{{a % q}}}{{{q}}}"),
            ("mixed number", rf"{s}{a // q} {a % q}/{q}"),
        ]
        case.mutants += [("mixed number", rf"{s}{a // q + 1}\frac{{{a % q}}}{{{q}}}")]
    if p > 0:
        case.rewrites += [("bare python", f"{p}./{q}")]
    return with_texts(case, rng)


def decimal(rng: random.Random) -> Case:
    places = rng.choice([1, 2, 3, 7, 9])
    digits = rng.randint(1, 10**places - 1)
    whole, part = rng.randint(0, 2000), f"{digits:0{places}d}".rstrip("0") or "5"
    gold = f"{rng.choice(['', '-'])}{whole}.{part}"
    last = str((int(part[-1]) + 1) % 10 or 7)
    case = Case("decimal", gold)
    case.mutants = [("last digit", gold[:-1] + (last if last != part[-1] else "3")), ("point moved", gold.replace(".", "")), ("one digit more", gold + "1"),
                    ("sign", gold[1:] if gold[0] == "-" else f"-{gold}"), ("rounded", str(whole)), ("times ten", f"{gold} \\times 10"),
                    ("hundred times", gold + " \\cdot 100"), ("range", f"{gold} - {whole + 3}"), ("other unit word", rf"{gold} \text{{ thousand}}"),
                    ("bound", rf"\text{{less than }} {gold}"), ("bound", rf"\geq {gold}")]  # fmt: skip
    case.rewrites = [("trailing zeros", gold + "0"), ("trailing zeros", gold + "000"), ("unit", rf"{gold} \text{{ m/s}}"), ("unit", rf"{gold}\,\mathrm{{kg}}"),
                     ("unit", rf"{gold} \, \text{{kcal m}}^{{-2}} \text{{ yr}}^{{-1}}"), ("unit", rf"{gold} \text{{ kg}} \cdot \text{{m}}^2"),
                     ("words before", f"equal to {gold}"), ("words before", rf"\text{{is }}{gold}"), ("unit words", f"{gold} miles per hour"),
                     ("name", f"v = {gold}"), ("name", rf"\text{{Area}} = {gold}"), ("name", rf"v_{{0}} = {gold}"), ("power of ten", rf"{gold} \times 10^{{0}}"),
                     ("dollar", rf"\${gold}"), ("fraction", rf"{'-' if gold[0] == '-' else ''}\frac{{{int(gold.lstrip('-').replace('.', ''))}}}{{{10 ** len(part)}}}")]  # fmt: skip
    if whole == 0:
        case.rewrites += [("no leading zero", gold.replace("0.", ".", 1))]
    return with_texts(case, rng)


def scientific(rng: random.Random) -> Case:
    m, e = rng.randint(101, 999), rng.choice([*range(-30, -3), *range(4, 34)])
    head = f"{m // 100}.{m % 100:02d}"
    case = Case("scientific", rng.choice([f"{head}e{e}", rf"{head} \times 10^{{{e}}}"]))
    other = f"{m // 100}.{(m % 100 + 1) % 100:02d}"
    case.mutants = [("digit", rf"{other} \times 10^{{{e}}}"), ("exponent", rf"{head} \times 10^{{{e + 1}}}"), ("exponent", f"{head}e{e - 1}"),
                    ("sign of the exponent", rf"{head} \times 10^{{{-e}}}"), ("sign", rf"-{head} \times 10^{{{e}}}"), ("no power", head),
                    ("power alone", f"10^{{{e}}}"), ("times a name", rf"{head} \times 10^{{{e}}} x"), ("zero", "0"),
                    ("other fraction", rf"\frac{{{m + 1}}}{{100}} \cdot 10^{{{e}}}")]  # fmt: skip
    case.rewrites = [("times", rf"{head} \times 10^{{{e}}}"), ("cdot", rf"{head} \cdot 10^{{{e}}}"), ("e", f"{head}e{e}"), ("E", f"{head}E{e}"),
                     ("shifted", rf"{m} \times 10^{{{e - 2}}}"), ("x", f"{head} x 10^{e}"), ("unicode", f"{head} × 10^{{{e}}}"),
                     ("unit", rf"{head} \times 10^{{{e}}} \text{{ erg s}}^{{-1}}"), ("unit", rf"{head} \times 10^{{{e}}} \, \mathrm{{cm}}"),
                     ("name", rf"E = {head} \times 10^{{{e}}}"), ("fraction", rf"\frac{{{m}}}{{100}} \times 10^{{{e}}}")]  # fmt: skip
    return case


def root(rng: random.Random) -> Case:
    a, b, r = rng.randint(1, 12), rng.randint(2, 12), rng.choice([2, 3, 5, 6, 7, 10, 11, 13])
    value = a + b * sympy.sqrt(r)
    case = Case("root", rf"{a} + {b}\sqrt{{{r}}}")
    case.mutants = [("sign", rf"{a} - {b}\sqrt{{{r}}}"), ("radicand", rf"{a} + {b}\sqrt{{{r + 1}}}"), ("factor", rf"{a} + {b + 1}\sqrt{{{r}}}"), ("no root", f"{a} + {b * r}"),
                    ("digit", rf"{a + 1} + {b}\sqrt{{{r}}}"), ("other root", rf"{a} + {b}\sqrt[3]{{{r}}}"), ("term dropped", rf"{b}\sqrt{{{r}}}"),
                    ("rounded", f"{float(value):.4f}"), ("both signs", rf"{a} \pm {b}\sqrt{{{r}}}"), ("times", rf"{a} \cdot {b}\sqrt{{{r}}}" if a > 1 else "0")]  # fmt: skip
    case.rewrites = [("order", rf"{b}\sqrt{{{r}}} + {a}"), ("cdot", rf"{a} + {b} \cdot \sqrt{{{r}}}"), ("inside", rf"{a} + \sqrt{{{b * b * r}}}"),
                     ("power", rf"{a} + {b} \cdot {r}^{{1/2}}"), ("power", rf"{a} + {b} \cdot {r}^{{\frac{{1}}{{2}}}}"), ("denominator", rf"{a} + \frac{{{b * r}}}{{\sqrt{{{r}}}}}"),
                     ("name", rf"r = {a} + {b}\sqrt{{{r}}}"), ("unit", rf"({a} + {b}\sqrt{{{r}}}) \text{{ cm}}"), ("unicode", f"{a} + {b}√{r}" if r < 10 else f"{a} + {b}√{{{r}}}"),
                     ("unbraced", rf"{a} + {b}\sqrt {r}" if r < 10 else rf"{a} + {b} \sqrt {{{r}}}")]  # fmt: skip
    return with_texts(case, rng)


def pi_multiple(rng: random.Random) -> Case:
    a, q = rng.randint(2, 19), rng.choice([1, 3, 7, 11])
    a += a % q == 0
    gold = rf"{a}\pi" if q == 1 else rf"\frac{{{a}\pi}}{{{q}}}"
    case = Case("pi", gold)
    case.mutants = [("digit", gold.replace(str(a), str(a + 1), 1) if a + 1 != q else "2"), ("no pi", gold.replace(r"\pi", "")), ("sign", "-" + gold), ("square", gold.replace(r"\pi", r"\pi^2")),
                    ("degrees", rf"{a * 180}^\circ"), ("rounded", f"{a * 3.14159 / q:.3f}"), ("a variable", gold.replace(r"\pi", "p")), ("plus", gold + "+1")]  # fmt: skip
    case.rewrites = [("factor", rf"\frac{{{a}}}{{{q}}}\pi"), ("cdot", rf"{a} \cdot \pi / {q}"), ("order", rf"\pi \cdot \frac{{{a}}}{{{q}}}"), ("name", rf"\theta = {gold}"),
                     ("unit", rf"{gold} \text{{ radians}}"), ("unit", rf"{gold}\text{{ cm}}^3"), ("spaced", gold.replace(r"\pi", r" \pi"))]  # fmt: skip
    return with_texts(case, rng)


def latex(expression: object) -> str:
    return sympy.latex(expression)


def polynomial(rng: random.Random) -> Case:
    names = rng.choice([(x,), (t,), (x, y), (x, y, z)])
    terms = [
        rng.choice([-1, 1]) * rng.randint(1, 9) * sympy.prod([n ** rng.randint(0, 3) for n in names])
        for _ in range(rng.randint(2, 4))
    ]
    p = sympy.expand(sum(terms))
    if not p.free_symbols:
        p = p + 3 * x
    v = sorted(p.free_symbols, key=str)[0]
    others = [
        p + 1,
        -p,
        p + v,
        p.subs(v, sympy.Symbol("w")),
        p * v,
        sympy.diff(p, v) + 11 * p,
        p.subs(v, v + 1),
        p.subs(v, 2 * v),
        p * 2,
    ]
    names_ = ["constant", "sign", "coefficient", "variable", "exponent", "other", "shifted", "scaled", "doubled"]
    case = Case("polynomial", latex(p))
    case.mutants = [(n, latex(o)) for n, o in zip(names_, others, strict=True) if sympy.expand(o - p) != 0]
    case.mutants += [("equals nought", latex(p) + " = 1")]
    factored = sympy.factor(p)
    case.rewrites = [("factored", latex(factored)), ("order", " + ".join(f"({latex(term)})" for term in reversed(sympy.Add.make_args(p)))),
                     ("name", f"y = {latex(p)}" if y not in p.free_symbols else f"f(x) = {latex(p)}"), ("cdot", latex(p).replace(" ", r" \cdot ") if "+" not in latex(p) and "-" not in latex(p) else latex(p)),
                     ("brackets", rf"\left({latex(p)}\right)"), ("sum of halves", rf"\frac{{{latex(2 * p)}}}{{2}}"), ("mul symbol", sympy.latex(p, mul_symbol="dot")), ("times", sympy.latex(p, mul_symbol="times"))]  # fmt: skip
    return with_texts(case, rng)


def function(rng: random.Random) -> Case:
    a, b, c = rng.randint(2, 9), rng.randint(2, 9), rng.randint(1, 9)
    shapes: list[Callable[[int, int, int], object]] = [
        lambda a, b, c: (a * x + c) / (x + a + b), lambda a, b, c: a * sympy.exp(-b * t) + c, lambda a, b, c: a * sympy.sin(b * x) + c,
        lambda a, b, c: sympy.sqrt(a * x + b) - c, lambda a, b, c: a * sympy.cos(b * t + c), lambda a, b, c: sympy.log(x + a) / b + c,
        lambda a, b, c: a / (b * x**2 + c), lambda a, b, c: sympy.exp(a * x) * (b * x + c), lambda a, b, c: a * x ** sympy.Rational(1, b) + c,
        lambda a, b, c: abs(a * x - b) + c, lambda a, b, c: a ** (x + b) + c, lambda a, b, c: a * sympy.Symbol("m") / sympy.Symbol("M") + b * c,
    ]  # fmt: skip
    shape = rng.choice(shapes)
    f = shape(a, b, c)
    write = lambda e: sympy.latex(e, ln_notation=True)
    case = Case("function", write(f))
    v = sorted(f.free_symbols, key=str)[-1]
    case.mutants = [("number", write(shape(a + 1, b, c))), ("number", write(shape(a, b + 1, c))), ("number", write(shape(a, b, c + 1))),
                    ("sign", write(-f)), ("variable", write(f.subs(v, sympy.Symbol("u")))), ("doubled", write(2 * f)), ("tiny term", write(f) + f" + {c}")]  # fmt: skip
    for old, new in ((r"\sin", r"\cos"), (r"\cos", r"\sin"), (r"\ln", r"\sin"), (r"\left|", r"\left(")):
        if old in write(f):
            case.mutants += [
                (
                    "function",
                    write(f).replace(old, new).replace(r"\right|", r"\right)")
                    if old == r"\left|"
                    else write(f).replace(old, new),
                )
            ]
    case.rewrites = [
        ("sum", write(f + x - x)),
        ("name", f"f({v}) = {write(f)}"),
        ("name", f"y = {write(f)}"),
        ("apart", rf"\frac{{1}}{{2}} \cdot \left({write(2 * f)}\right)"),
    ]
    return with_texts(case, rng)


def point(rng: random.Random) -> Case:
    size = rng.choice([2, 2, 3, 4])
    parts = [str(rng.randint(-20, 20)) for _ in range(size)]
    if rng.random() < 0.5:
        parts[0] = rng.choice([r"\frac{7}{3}", r"\sqrt{2}", r"\frac{\pi}{2}", "-1.5", r"2\sqrt{3}"])
    while parts[0] == parts[1]:
        parts[1] = str(rng.randint(21, 99))
    case = Case("tuple", f"({', '.join(parts)})")
    changed = [*parts[:-1], str(int(parts[-1]) + 1)]
    case.mutants = [("entry", f"({', '.join(changed)})"), ("order", f"({', '.join([parts[1], parts[0], *parts[2:]])})"), ("dropped", f"({', '.join(parts[:-1])})"),
                    ("repeated", f"({', '.join([*parts, parts[-1]])})"), ("brackets", f"[{', '.join(parts)}]"), ("brackets", f"({', '.join(parts)}]"),
                    ("set", rf"\{{{', '.join(parts)}\}}"), ("first alone", parts[0]), ("product", " ".join(f"({p})" for p in parts)), ("twice", f"({', '.join(parts)}), ({', '.join(parts)})")]  # fmt: skip
    if parts[-1] != "0":
        case.mutants += [("sign", f"({', '.join([*parts[:-1], str(-int(parts[-1]))])})")]
    case.rewrites = [("tight", f"({','.join(parts)})"), ("left", rf"\left({', '.join(parts)}\right)"), ("name", f"(x, y) = ({', '.join(parts)})" if size == 2 else f"P = ({', '.join(parts)})"),
                     ("entry as a fraction", "(" + ", ".join([*parts[:-1], rf"\frac{{{2 * int(parts[-1])}}}{{2}}"]) + ")"), ("big", rf"\bigl({', '.join(parts)}\bigr)"),
                     ("spaces inside", f"( {' , '.join(parts)} )"), ("quad", "(" + r", \quad ".join(parts) + ")")]  # fmt: skip
    return with_texts(case, rng)


def numbers(rng: random.Random, size: int) -> list[str]:
    pool = [str(n) for n in rng.sample([*range(-30, 0), *range(1, 60)], size)]
    if rng.random() < 0.4:
        pool[0] = rng.choice([r"\frac{1}{3}", r"\sqrt{5}", r"-\frac{3}{7}", r"1+\sqrt{2}", r"\pi"])
    if rng.random() < 0.2:
        pool = [str(n) for n in rng.sample(range(100, 1000), size)]
    return pool


def set_of(rng: random.Random) -> Case:
    parts = numbers(rng, rng.randint(2, 5))
    inside = lambda items: rf"\{{{', '.join(items)}\}}"
    case = Case("set", inside(parts))
    other = [*parts[:-1], str(int(parts[-1]) + 101)]
    case.mutants = [("item", inside(other)), ("dropped", inside(parts[:-1])), ("added", inside([*parts, "77"])), ("repeated", inside([*parts, parts[-1]])),
                    ("repeated for another", inside([*parts[:-1], parts[0]])), ("sign", inside([*parts[:-1], str(-int(parts[-1]))])), ("tuple", f"({', '.join(parts)})"),
                    ("interval", f"[{', '.join(parts)}]"), ("one alone", parts[-1])]  # fmt: skip
    case.rewrites = [("order", inside(parts[::-1])), ("tight", rf"\{{{','.join(parts)}\}}"), ("left", rf"\left\{{{', '.join(parts)}\right\}}"), ("without braces", ", ".join(parts)),
                     ("lbrace", rf"\lbrace {', '.join(parts)} \rbrace"), ("name", rf"x \in {inside(parts)}"), ("name", f"S = {inside(parts)}"), ("order", inside(rng.sample(parts, len(parts))))]  # fmt: skip
    return with_texts(case, rng)


def list_of(rng: random.Random) -> Case:
    parts = numbers(rng, rng.randint(2, 4))
    if rng.random() < 0.4:
        parts.append(parts[-1])
    case = Case("list", ", ".join(parts))
    case.mutants = [("item", ", ".join([*parts[:-1], str(int(parts[-1]) + 101)])), ("dropped", ", ".join(parts[:-1])), ("repeated", ", ".join([*parts, parts[-1]])), ("added", ", ".join([*parts, "77"])),
                    ("repeated for another", ", ".join([*parts[:-1], parts[0]]) if parts[0] != parts[-1] else "5"), ("sum", " + ".join(parts)), ("one alone", parts[-1])]  # fmt: skip
    case.rewrites = [("order", ", ".join(parts[::-1])), ("and", r" \text{ and } ".join(parts) if len(parts) == 2 else rf"{', '.join(parts[:-1])}, \text{{ and }} {parts[-1]}"),
                     ("or", r" \text{ or } ".join(parts)), ("and in words", ", ".join(parts[:-1]) + " and " + parts[-1]), ("semicolons", "; ".join(parts)),
                     ("names", ", ".join(f"x = {p}" for p in parts)), ("name", f"x = {', '.join(parts)}"), ("names", r" \text{ or } ".join(f"x = {p}" for p in parts)),
                     ("indexed names", ", ".join(f"x_{i} = {p}" for i, p in enumerate(parts, 1)))]  # fmt: skip
    if len(set(parts)) == len(parts):
        case.rewrites += [("braces", rf"\{{{', '.join(parts)}\}}")]
    return with_texts(case, rng)


def points(rng: random.Random) -> Case:
    parts = [f"({rng.randint(-9, 9)}, {n})" for n in rng.sample(range(1, 40), rng.randint(2, 4))]
    case = Case("list of tuples", ", ".join(parts))
    flipped = [f"({b}, {a})" for a, b in (p.strip("()").split(", ") for p in parts)]
    case.mutants = [("dropped", ", ".join(parts[:-1])), ("repeated", ", ".join([*parts, parts[0]])), ("repeated for another", ", ".join([*parts[:-1], parts[0]])),
                    ("entry", ", ".join([*parts[:-1], parts[-1].replace(")", "1)")])), ("flat", ", ".join(p.strip("()") for p in parts)), ("entries swapped", ", ".join(flipped)),
                    ("intervals", ", ".join(p.replace("(", "[").replace(")", "]") for p in parts))]  # fmt: skip
    case.rewrites = [("order", ", ".join(parts[::-1])), ("set", rf"\{{{', '.join(parts)}\}}"), ("and", r" \text{ and } ".join(parts)), ("tight", ",".join(p.replace(" ", "") for p in parts)),
                     ("semicolons", "; ".join(parts)), ("name", f"(x, y) = {', '.join(parts)}")]  # fmt: skip
    return with_texts(case, rng)


def interval(rng: random.Random) -> Case:
    a = rng.randint(-20, 20)
    b = a + rng.randint(1, 30)
    low, high = rng.choice(
        [
            (f"{a}", f"{b}"),
            (r"-\infty", f"{b}"),
            (f"{a}", r"\infty"),
            (r"\frac{1}{3}", r"\frac{7}{2}"),
            (f"{a}", rf"{b + 50}\pi"),
        ]
    )
    left = "(" if "infty" in low else rng.choice("([")
    right = ")" if "infty" in high else rng.choice(")]")
    if left + right == "()" and "infty" not in low + high:
        right = "]"
    case = Case("interval", f"{left}{low}, {high}{right}")
    other = {"(": "[", "[": "(", ")": "]", "]": ")"}
    if "infty" not in low:
        case.mutants += [
            ("left bracket", f"{other[left]}{low}, {high}{right}"),
            ("left end", f"{left}{low} - 1, {high}{right}"),
            ("left end infinite", rf"(-\infty, {high}{right}"),
        ]
    if "infty" not in high:
        case.mutants += [
            ("right bracket", f"{left}{low}, {high}{other[right]}"),
            ("right end", f"{left}{low}, {high} + 1{right}"),
            ("right end infinite", f"{left}{low}, \\infty)"),
        ]
    ops = {"(": "<", "[": r"\leq", ")": "<", "]": r"\leq"}
    case.mutants += [
        ("set", rf"\{{{low}, {high}\}}"),
        ("ends alone", high),
        (
            "a point more",
            rf"{left}{low}, {high}{right} \cup \{{-999\}}"
            if "infty" not in low
            else rf"{left}{low}, {high}{right} \cup \{{999\}}",
        ),
        ("reversed", f"{left}{high}, {low}{right}"),
    ]
    case.rewrites = [
        ("tight", f"{left}{low},{high}{right}"),
        ("left", rf"\left{left}{low}, {high}\right{right}"),
        ("name", rf"x \in {case.gold}"),
        ("plus infinity", case.gold.replace(r", \infty", r", +\infty")),
    ]
    both = f"{low} {ops[left]} x {ops[right]} {high}"
    one = f"x {ops[right]} {high}" if "infty" in low else f"x {ops[left].replace('<', '>').replace('leq', 'geq')} {low}"
    wrong = {"<": r"\leq", r"\leq": "<", ">": r"\geq", r"\geq": ">"}
    relation = both if "infty" not in low + high else one
    first = re.search(r"<|>|\\[lg]eq", relation)
    assert first is not None
    case.mutants += [("as an inequality", swap(relation, first, wrong[first.group()]))]
    case.rewrites += [("as an inequality", relation)]
    return with_texts(case, rng)


def union(rng: random.Random) -> Case:
    a = rng.randint(-20, 5)
    b, c, d = a + 3, a + rng.randint(4, 9), a + 20
    first, second = rng.choice(
        [
            (rf"(-\infty, {a})", f"({b}, {c})"),
            (f"[{a}, {b})", f"({c}, {d}]"),
            (rf"(-\infty, {a}]", rf"[{c}, \infty)"),
            (f"({a}, {b})", f"({c}, {d})"),
        ]
    )
    case = Case("union", rf"{first} \cup {second}")
    flip = {"(": "[", "[": "("}
    case.mutants = [("bracket", rf"{first} \cup {flip[second[0]]}{second[1:]}"), ("dropped", first), ("dropped", second), ("intersection", rf"{first} \cap {second}"), ("end", rf"{first} \cup {second[0]}{second[1:].replace(',', ' + 1,')}"), ("difference", rf"{first} \setminus {second}")]  # fmt: skip
    case.rewrites = [
        ("order", rf"{second} \cup {first}"),
        ("tight", rf"{first.replace(' ', '')}\cup{second.replace(' ', '')}"),
        ("name", rf"x \in {first} \cup {second}"),
        ("unicode", f"{first} ∪ {second}"),
    ]
    return with_texts(case, rng)


def inequality(rng: random.Random) -> Case:
    a, v = rng.choice([str(rng.randint(-50, 50)), rf"\frac{{{rng.randint(1, 9)}}}{{17}}"]), rng.choice("xykn")
    ops = ["<", ">", r"\leq", r"\geq"]
    op = rng.choice(ops)
    turned = {"<": ">", ">": "<", r"\leq": r"\geq", r"\geq": r"\leq"}
    strict = {"<": r"\leq", ">": r"\geq", r"\leq": "<", r"\geq": ">"}
    case = Case("inequality", f"{v} {op} {a}")
    case.mutants = [("direction", f"{v} {turned[op]} {a}"), ("strictness", f"{v} {strict[op]} {a}"), ("number", f"{v} {op} {a} + 1"), ("equation", f"{v} = {a}"), ("variable", f"w {op} {a}"),
                    ("unequal", rf"{v} \neq {a}"), ("value", a), ("left side", f"{v}^3 {op} {a}"), ("left side", f"2{v} {op} {a}") if a != "0" else ("left side", f"{v}+1 {op} {a}"), ("sides swapped", f"{a} {op} {v}")]  # fmt: skip
    case.rewrites = [
        ("flipped", f"{a} {turned[op]} {v}"),
        ("tight", f"{v}{op}{a}"),
        ("to one side", f"{v} - ({a}) {op} 0"),
    ]
    return with_texts(case, rng)


def chain(rng: random.Random) -> Case:
    a, v = rng.randint(-20, 20), rng.choice("xyk")
    b, lo, r = a + rng.randint(1, 40), rng.choice(["<", r"\leq"]), rng.choice(["<", r"\leq"])
    strict, turned = {"<": r"\leq", r"\leq": "<"}, {"<": ">", r"\leq": r"\geq"}
    case = Case("double inequality", f"{a} {lo} {v} {r} {b}")
    case.mutants = [("strictness", f"{a} {strict[lo]} {v} {r} {b}"), ("strictness", f"{a} {lo} {v} {strict[r]} {b}"), ("end", f"{a - 1} {lo} {v} {r} {b}"), ("end", f"{a} {lo} {v} {r} {b + 1}"), ("one side", f"{v} {r} {b}"),
                    ("direction", f"{a} {turned[lo]} {v} {turned[r]} {b}"), ("variable", f"{a} {lo} w {r} {b}"), ("ends swapped", f"{b} {lo} {v} {r} {a}")]  # fmt: skip
    case.rewrites = [
        ("turned", f"{b} {turned[r]} {v} {turned[lo]} {a}"),
        ("as an interval", f"{'(' if lo == '<' else '['}{a}, {b}{')' if r == '<' else ']'}"),
    ]
    return with_texts(case, rng)


def equation(rng: random.Random) -> Case:
    a, b, c = (rng.choice([-1, 1]) * rng.randint(1, 9) for _ in range(3))
    left, right = rng.choice(
        [
            (a * x + b * y, 7 * c),
            (5 * x - 7 * y + 11 * z + a, 0),
            (x**2 + a * y**2, 0),
            (x**2 + y**2, c * c + 1),
            (a * x**2 + b * x + c, 0),
            (y - a * x, b),
            (x * y + a, 7 * b),
        ]
    )
    difference = left - right
    common = sympy.gcd_list([int(n) for n in sympy.Poly(difference).coeffs()])
    left, right, difference = left / common, sympy.Integer(right) / common, difference / common
    write = lambda a, b: f"{latex(sympy.expand(a))} = {latex(sympy.expand(b))}"
    case = Case("equation", write(left, right))
    case.mutants = [("right side", write(left, right + 1)), ("left side", write(left + x, right)), ("left side", write(left.subs(y, -y) if difference.subs(y, -y) not in (difference, -difference) else left + y**3, right)),
                    ("variable", write(left.subs(x, sympy.Symbol("w")), right)), ("not lowest terms", write(4 * left, 4 * right)), ("left side alone", latex(sympy.expand(left))), ("exponent", write(left.subs(x, x**2) if difference.has(x) else left + 1, right)),
                    ("inequality", write(left, right).replace("=", "<")), ("other left side", write(z + 3 * t, right)), ("sign of one side", write(left, -right) if right != 0 else write(left - 2 * x * y, 0)), ("names swapped", write(left.subs({x: y, y: x}, simultaneous=True), right) if sympy.expand(difference.subs({x: y, y: x}, simultaneous=True) - difference) != 0 and sympy.expand(difference.subs({x: y, y: x}, simultaneous=True) + difference) != 0 else "0 = 1"), ("true of everything", "0 = 0"), ("true of nothing", "x^2 + 1 = 0" if len(difference.free_symbols) > 1 else "y = y + 1")]  # fmt: skip
    if right != 0:
        case.mutants += [("right side alone", latex(right))]
    case.rewrites = [
        ("sides swapped", write(right, left)),
        ("to one side", write(difference, 0)),
        ("negated", write(-left, -right)),
        ("moved", write(left + 3, right + 3)),
        (
            "order",
            " + ".join(f"({latex(term)})" for term in reversed(sympy.Add.make_args(sympy.expand(left))))
            + f" = {latex(right)}",
        ),
    ]
    return with_texts(case, rng)


def assignment(rng: random.Random) -> Case:
    name, value = (
        rng.choice(["x", "y", "k", "f(x)", "a_1", "x_{0}", "T"]),
        rng.choice([str(rng.randint(2, 99)), rf"\frac{{{rng.randint(1, 9)}}}{{11}}", r"2\sqrt{3}", r"\frac{\pi}{4}"]),
    )
    case = Case("assignment", f"{name} = {value}")
    case.mutants = [
        ("name", f"w = {value}"),
        ("value", f"{name} = {value} + 1"),
        ("left side", f"2{name} = {value}"),
        ("left side", f"{name} + 1 = {value}"),
        ("value alone, wrong", f"{value} + 1"),
        ("sign", f"{name} = -{value}"),
        ("relation", f"{name} > {value}"),
        ("square", f"{name}^3 = {value}"),
        ("twice", f"{name} = {value}, {name} = {value}"),
        ("unequal", rf"{name} \neq {value}"),
        ("name alone", name),
    ]
    case.rewrites = [
        ("value alone", value),
        ("swapped", f"{value} = {name}"),
        ("tight", f"{name}={value}"),
        ("a step between", f"{name} = \\frac{{{value} + {value}}}{{2}} = {value}"),
        ("dollar", f"${name} = {value}$"),
    ]
    return with_texts(case, rng)


def assignments(rng: random.Random) -> Case:
    a, b = rng.sample(range(-30, 60), 2)
    names = rng.choice([("x", "y"), ("a", "b"), ("m", "n")])
    case = Case("assignments", f"{names[0]} = {a}, {names[1]} = {b}")
    case.mutants = [
        ("values swapped", f"{names[0]} = {b}, {names[1]} = {a}"),
        ("dropped", f"{names[0]} = {a}"),
        ("value", f"{names[0]} = {a}, {names[1]} = {b + 1}"),
        ("name", f"{names[0]} = {a}, w = {b}"),
        ("repeated", f"{names[0]} = {a}, {names[1]} = {b}, {names[1]} = {b}"),
    ]
    case.rewrites = [
        ("order", f"{names[1]} = {b}, {names[0]} = {a}"),
        ("and", rf"{names[0]} = {a} \text{{ and }} {names[1]} = {b}"),
        ("semicolon", f"{names[0]} = {a}; {names[1]} = {b}"),
        ("quad", rf"{names[0]} = {a}, \quad {names[1]} = {b}"),
    ]
    return with_texts(case, rng)


def matrix(rng: random.Random) -> Case:
    rows, columns = rng.choice([(2, 2), (3, 1), (2, 1), (2, 3), (3, 3), (1, 3)])
    entries = [
        [
            rng.choice(
                [str(rng.randint(-12, 12)), str(rng.randint(1, 99)), rf"\frac{{{rng.randint(1, 50)}}}{{49}}", "x"]
            )
            for _ in range(columns)
        ]
        for _ in range(rows)
    ]
    entries[0][0] = str(rng.randint(200, 300))
    write = lambda e, kind="pmatrix", row=r" \\ ", cell=" & ": (
        rf"\begin{{{kind}}} {row.join(cell.join(r) for r in e)} \end{{{kind}}}"
    )
    case = Case("matrix", write(entries))
    i, j = rng.randrange(rows), rng.randrange(columns)
    changed = [[(e if (a, b) != (i, j) else f"{e} + 1") for b, e in enumerate(row)] for a, row in enumerate(entries)]
    digit = [["201" if entries[0][0] != "201" else "207", *entries[0][1:]], *entries[1:]]
    case.mutants = [
        ("entry", write(changed)),
        ("entry", write(digit)),
        ("row dropped", write(entries[:-1]) if rows > 1 else write([entries[0][:-1]])),
        ("row repeated", write([*entries, entries[-1]])),
        ("determinant", write(entries, "vmatrix")),
        ("times", "2" + write(entries)),
        ("sign", "-" + write(entries)),
        ("first entry", entries[0][0]),
    ]
    turned = [list(column) for column in zip(*entries, strict=True)]
    case.mutants += [("transposed", write(turned))] if turned != entries else []
    case.mutants += [("rows swapped", write([entries[1], entries[0], *entries[2:]]))] if rows > 1 else []
    plain = [[re.sub(r"\\frac\{(\d+)\}\{(\d+)\}", r"\1/\2", e) for e in row] for row in entries]
    whole = [[rf"\frac{{{2 * int(e)}}}{{2}}" if re.fullmatch(r"-?\d+", e) else e for e in row] for row in entries]
    case.rewrites = [
        ("brackets", write(entries, "bmatrix")),
        ("tight", write(entries, row=r"\\", cell="&")),
        ("slashes", write(plain)),
        ("fractions", write(whole)),
        ("left", rf"\left( {write(entries, 'matrix')} \right)"),
        ("new lines", write(entries, row="\\\\\n")),
        ("name", f"A = {write(entries)}"),
        ("last row closed", write(entries).replace(r" \end", r" \\ \end")),
        ("array", rf"\left[\begin{{array}}{{{'c' * columns}}} {write(entries)[15:-13]} \end{{array}}\right]"),
    ]
    return with_texts(case, rng)


def base(rng: random.Random) -> Case:
    digits, b = "".join(rng.choice("1234") for _ in range(rng.randint(2, 5))), rng.randint(5, 9)
    case = Case("number base", f"{digits}_{b}")
    case.mutants = [
        ("base", f"{digits}_{{{b % 9 + 2 if b % 9 + 2 != b else b + 3}}}"),
        ("digit", f"{digits[:-1]}{int(digits[-1]) % 4 + 1}_{b}"),
        ("one digit more", f"{digits}1_{b}"),
        ("base and number swapped", f"{b}_{{{digits}}}"),
        ("sign", f"-{digits}_{b}"),
        ("value", str(int(digits, b))),
    ]
    case.rewrites = [
        ("braces", f"{digits}_{{{b}}}"),
        ("brackets", f"({digits})_{{{b}}}"),
        ("text", rf"{digits}_{{\text{{{b}}}}}"),
        ("text", rf"\text{{{digits}}}_{b}"),
        ("name", f"n = {digits}_{b}"),
        ("spaced", f"{digits}_ {b}"),
    ]
    return case


WORDS = (
    "even",
    "odd",
    "Evelyn",
    "Monday",
    "parabola",
    "increasing",
    "east",
    "July",
    "ellipse",
    "neither",
    "hexagon",
    "listen",
    "north",
    "yes",
)


def words(rng: random.Random) -> Case:
    word, other = rng.sample(WORDS, 2)
    case = Case("words", rf"\text{{{word}}}")
    letters = list(word)
    while (turned := "".join(letters)) == word:
        rng.shuffle(letters)
    case.mutants = [
        ("other word", rf"\text{{{other}}}"),
        ("other word", other),
        ("letters shuffled", turned),
        ("not", rf"\text{{not {word}}}"),
        ("letter dropped", word[:-1]),
        ("both", rf"\text{{{word}}}, \text{{{other}}}"),
        ("or", rf"\text{{{word} or {other}}}"),
        ("number", "5"),
        ("letter changed", word.replace(word[1], "q")),
    ]
    case.rewrites = [
        ("bare", word),
        ("mbox", rf"\mbox{{{word}}}"),
        ("mathrm", rf"\mathrm{{{word}}}"),
        ("bold", rf"\textbf{{{word}}}"),
        ("upper case", word.upper()),
        ("spaces", rf"\text{{ {word} }}"),
        ("capital", rf"\text{{{word.capitalize()}}}"),
        ("full stop", rf"\text{{{word}.}}"),
        ("dollar", rf"$\text{{{word}}}$"),
    ]
    return case


def option(rng: random.Random) -> Case:
    letter, other = rng.sample("ABCDE", 2)
    case = Case("option", rf"\text{{({letter})}}")
    case.mutants = [
        ("other letter", rf"\text{{({other})}}"),
        ("other letter", other),
        ("two", rf"\text{{({letter})}}, \text{{({other})}}"),
        ("other with words", rf"\text{{({other}) Plane}}"),
        ("number", "3"),
        ("words", rf"\text{{{letter}n apple}}"),
        ("word", rf"\text{{{letter}bcd}}"),
    ]
    case.rewrites = [
        ("bare", letter),
        ("brackets", f"({letter})"),
        ("bold", rf"\textbf{{({letter})}}"),
        ("with words", rf"\text{{({letter}) Plane}}"),
        ("without brackets", rf"\text{{{letter}}}"),
        ("mathrm", rf"\mathrm{{({letter})}}"),
        ("with words", rf"\text{{({letter})}} \text{{ Plane}}"),
    ]
    return case


def letter(rng: random.Random) -> Case:
    gold, other = rng.sample("ABCD", 2)
    case = Case("letter", gold, "letter")
    case.mutants = [
        ("other letter", other),
        ("other letter", rf"\text{{({other})}}"),
        ("small letter", gold.lower()),
        ("two", f"{gold}, {other}"),
        ("two", f"{gold}{other}"),
        ("or", rf"{gold} \text{{ or }} {other}"),
        ("word", f"{gold}pple"),
        ("number", "1"),
        ("not", rf"\text{{not }}{gold}"),
        ("words", rf"\text{{{gold} proton}}"),
    ]
    case.rewrites = [
        ("brackets", f"({gold})"),
        ("text", rf"\text{{{gold}}}"),
        ("bold", rf"\textbf{{({gold})}}"),
        ("with words", rf"\text{{{gold}) 12 legs}}"),
        ("full stop", f"{gold}."),
        ("mathrm", rf"\mathrm{{{gold}}}"),
        ("dollars", f"${gold}$"),
    ]
    return case


def imaginary(rng: random.Random) -> Case:
    a, b = rng.randint(-9, 9) or 3, rng.randint(2, 30)
    case = Case("complex", f"{a} + {b}i")
    case.mutants = [
        ("conjugate", f"{a} - {b}i"),
        ("swapped", f"{b} + {a}i" if a != b else "0"),
        ("real part", f"{a + 1} + {b}i"),
        ("imaginary part", f"{a} + {b + 1}i"),
        ("no i", f"{a} + {b}"),
        ("variable", f"{a} + {b}x"),
        ("modulus", rf"\sqrt{{{a * a + b * b}}}"),
        ("sign", f"-({a} + {b}i)"),
        ("pair", f"({a}, {b})"),
    ]
    case.rewrites = [
        ("order", f"{b}i + {a}"),
        ("cdot", rf"{a} + {b} \cdot i"),
        ("factor", f"i({b} - {a}i)" if a > 0 else f"i({b} + {-a}i)"),
        ("name", f"z = {a} + {b}i"),
        ("mathrm", rf"{a} + {b}\mathrm{{i}}"),
        ("spaced", f"{a} + {b} i"),
        ("order", f"{a} + i {b}"),
    ]
    return with_texts(case, rng)


def marked(rng: random.Random) -> Case:
    """Numbers with a mark or a unit of their own: degrees, percent, money, a unit."""
    n = rng.randint(2, 350)
    mark, others = rng.choice(
        [
            (r"{}^\circ", [r"{}^{{\circ}}", r"{}°", r"{} \text{{ degrees}}", "{}", r"{}^{{\,\circ}}"]),
            (r"{}\%", [r"{} \%", "{}%", r"{} \text{{ percent}}", "{}", "{} percent"]),
            (r"\${}", [r"\$ {}", r"{} \text{{ dollars}}", "{}", r"\${}.00", "{} dollars"]),
            (
                r"{}\text{{ cm}}^2",
                [
                    r"{}\text{{ cm}}^{{2}}",
                    r"{} \mathrm{{cm}}^2",
                    "{}",
                    r"{}\,\text{{cm}}^2",
                    r"{} \mathrm{{~cm}}^{{2}}",
                    r"{} \text{{ cm}}^2.",
                ],
            ),
            (r"{}\text{{ inches}}", ["{}", "{} inches", r"{} \mbox{{ inches}}", r"{}~\text{{inches}}"]),
            (r"{}\mbox{{ cm}}^2", ["{}", r"{} \text{{ cm}}^2"]),
        ]
    )
    case = Case("marked number", mark.format(n))
    case.mutants = [
        ("digit", mark.format(n + 1)),
        ("digit", str(n * 10 + 1)),
        ("sign", "-" + mark.format(n)),
        ("bare digit", str(n + 1)),
        ("hundred", mark.format(n * 100)),
        ("radians", rf"{n}\pi"),
        ("a name behind", f"{n}x"),
        ("million", rf"{n} \text{{ million}}"),
        ("list", f"{mark.format(n)}, {mark.format(n + 3)}"),
    ]
    if "cm" in mark:
        case.mutants += [("power of the unit", rf"{n} \text{{ cm}}^3")]
    case.rewrites = [("mark", other.format(n)) for other in others] + [("name", f"x = {mark.format(n)}")]
    return case


def expression_of_numbers(rng: random.Random) -> Case:
    a, b, c = rng.randint(2, 9), rng.randint(3, 9), rng.randint(2, 30)
    gold, value = rng.choice(
        [
            (rf"{a}^{{{b}}} \cdot {c}", a**b * c),
            (rf"\binom{{{a + b}}}{{{a}}}", sympy.binomial(a + b, a)),
            (f"{b}! + {c}", sympy.factorial(b) + c),
            (rf"\frac{{{a}^{{{b}}} - 1}}{{{c}}}", sympy.Rational(a**b - 1, c)),
            (rf"{a}^{{{b}}} + {c}^2", a**b + c * c),
            (rf"\log_{{{a}}} {a**b}", sympy.Integer(b)),
            (rf"{a} \cdot {b} \cdot {c * 101}", a * b * c * 101),
            (f"10^{{{b * 10}}}", sympy.Integer(10) ** (b * 10)),
        ]
    )
    case = Case("arithmetic", gold)
    case.mutants = [
        ("value", latex(value + 1)),
        ("value", latex(-value)),
        ("value", latex(value * 10)),
        ("term", f"{gold} + 1"),
        ("variable", f"{gold} + x"),
        ("list", f"{gold}, {latex(value)}"),
    ]
    case.rewrites = [
        ("value", latex(value)),
        ("name", f"N = {gold}"),
        ("both", f"{gold} = {latex(value)}"),
        ("name and both", f"N = {gold} = {latex(value)}"),
    ]
    return with_texts(case, rng)


def formula(rng: random.Random) -> Case:
    gold, wrong, right = rng.choice([
        (r"\frac{m}{M} c", [r"\frac{M}{m} c", "c", r"\frac{m}{M}", r"\frac{M}{M} c"], [r"\frac{m c}{M}", r"c \frac{m}{M}", r"v = \frac{m}{M} c"]),
        (r"\frac{1}{3} E_1 + \frac{2}{3} E_2", [r"\frac{2}{3} E_1 + \frac{1}{3} E_2", r"\frac{1}{3} E_1 + \frac{2}{3} E_3", r"\frac{1}{3} E + \frac{2}{3} E", r"E_1 + E_2"], [r"\frac{1}{3} E_{1} + \frac{2}{3} E_{2}", r"\frac{E_1 + 2 E_2}{3}"]),
        (r"C_1 e^{t} + C_2 e^{-t}", [r"C_1 e^{t} + C_1 e^{-t}", r"C_1 e^{t} - C_2 e^{-t}", r"C_1 e^{2t} + C_2 e^{-t}", r"c e^t"], [r"C_{1} e^{t} + C_{2} e^{-t}", r"e^{-t} C_2 + C_1 e^{t}", r"y(t) = C_1 e^{t} + C_2 e^{-t}", r"C_1 \exp(t) + C_2 \exp(-t)"]),
        (r"x_{0} \cos (\omega t) + \frac{v_0}{\omega} \sin (\omega t)", [r"x_{0} \sin (\omega t) + \frac{v_0}{\omega} \cos (\omega t)", r"x_{0} \cos (\omega t)", r"x_{0} \cos (\omega t) + v_0 \omega \sin (\omega t)"], [r"x_0 \cos(\omega t) + \frac{v_0 \sin(\omega t)}{\omega}", r"x(t) = x_0 \cos(\omega t) + \frac{v_0}{\omega} \sin(\omega t)"]),
        (r"\frac{s+\sigma}{(s+\sigma)^{2}+\omega^{2}}", [r"\frac{s-\sigma}{(s+\sigma)^{2}+\omega^{2}}", r"\frac{\omega}{(s+\sigma)^{2}+\omega^{2}}", r"\frac{s+\sigma}{s^2+\omega^{2}}"], [r"\frac{s + \sigma}{s^2 + 2 s \sigma + \sigma^2 + \omega^2}", r"(s+\sigma)/((s+\sigma)^2+\omega^2)"]),
        (r"\sqrt{2 g h}", [r"\sqrt{2 g k}", r"2 g h", r"\sqrt{g h}", r"\sqrt{2 g}"], [r"\sqrt{2gh}", r"(2 g h)^{1/2}", r"v = \sqrt{2gh}", r"\sqrt{2} \sqrt{g h}"]),
        (r"\mathbb{R}", [r"\mathbb{Q}", r"\mathbb{Z}", r"\emptyset", "R"], [r"\mathbb R"]), (r"\emptyset", [r"\{0\}", "0", r"\mathbb{R}"], [r"\varnothing", r"\{\}"]),
        (r"1, 2, \ldots, n", ["1, 2, n", r"1, 2, \ldots, m", "n"], [r"1,2,\dots,n", r"1, 2, \cdots, n"]),
        ("f'(x) = 2x", ["f(x) = 2x", "f'(x) = 3x", "f''(x) = 2x"], ["f'(x)=2x", "f'(x) = x + x"]),
        (r"\overline{AB}", [r"\overline{AC}", r"\overline{CD}"], [r"\overline{A B}", r"\overline {AB}"]),
        (r"\angle ABC", [r"\angle ABD", r"\angle BAC"], [r"\angle A B C", r"\angle  ABC"]),
        (r"1:2:3", ["1:3:2", "1:2", "1:2:4"], ["1 : 2 : 3"]), ("3:5", ["5:3", "3:6", "3, 5"], ["3 : 5"]), ("10:30", ["10:31", "11:30", "1030"], [r"10{:}30", r"10\!:\!30"]),
        (r"\frac{\pi}{6} + k\pi, k \in \mathbb{Z}", [r"\frac{\pi}{3} + k\pi, k \in \mathbb{Z}", r"\frac{\pi}{6} + 2k\pi, k \in \mathbb{Z}", r"\frac{\pi}{6}"], [r"\frac{\pi}{6}+k\pi, \quad k\in\mathbb{Z}"]),
        (r"x \neq 3", ["x = 3", r"x \neq 4", r"y \neq 3", "3"], [r"x \ne 3", r"x\neq3", r"3 \neq x"]), (r"a^2 b", ["a b^2", "a^2 c", "a^3 b"], ["b a^2", r"a \cdot a \cdot b", "a^{2}b"]),
        (r"\lfloor x \rfloor", [r"\lceil x \rceil", "x", r"\lfloor y \rfloor"], [r"\left\lfloor x \right\rfloor"]), (r"0.\overline{3}", [r"0.\overline{4}", "0.3", r"0.\overline{33}5"], [r"0.\overline{3}", r"0.\bar{3}" if False else r"0.\overline{3} "]),
        (r"\pm 3", ["3", "-3", r"\pm 4", r"3, 3"], ["3, -3", r"-3, 3", r"\{-3, 3\}", r"x = \pm 3"]), (r"2 \pm \sqrt{3}", [r"2 + \sqrt{3}", r"2 \pm \sqrt{5}", r"3 \pm \sqrt{3}"], [r"2 + \sqrt{3}, 2 - \sqrt{3}", r"x = 2 \pm \sqrt{3}", r"2-\sqrt 3, 2+\sqrt 3"]),
        (r"f(x) = x, f(x) = -x", ["f(x) = x", "f(x) = x, f(x) = x", "f(x) = x, f(x) = -2x", "g(x) = 0, f(x) = x"], ["f(x)=-x, f(x)=x", r"f(x) = x \text{ and } f(x) = -x", r"f(x) = x \text{ or } f(x) = -x"]),
        ("p - q", ["q - p", "p + q"], ["-q + p", "p-q", "-(q-p)"]), (r"\sqrt[3]{7}", [r"\sqrt{7}", r"\sqrt[3]{8}", r"\sqrt[4]{7}", "37"], [r"7^{1/3}", r"7^{\frac{1}{3}}", r"\sqrt[3]7"]),
        (r"\log_2 3", [r"\log_3 2", r"\log 3", r"\log_2 5", r"\ln 3"], [r"\log_{2}{3}", r"\log_{2} 3", r"\frac{\ln 3}{\ln 2}", r"\log_2(3)"]), ("e^2", ["2e", "e^3", "2^e", "x^2"], ["e^{2}", r"\exp(2)", r"e \cdot e"]),
        (r"10^{100}, 10^{1/100}", [r"10^{100}", r"10^{100}, 10^{-100}", r"10^{100}, 10^{1/10}"], [r"10^{1/100}, 10^{100}", r"10^{100}, 10^{\frac{1}{100}}", r"10^{100} \text{ and } 10^{1/100}"]),
    ])  # fmt: skip
    case = Case("formula", gold, mutants=[("other", w) for w in wrong], rewrites=[("same", r) for r in right])
    return with_texts(case, rng)


def exponential(rng: random.Random) -> Case:
    """Powers with several names in the exponent, as growth, decay, waves and counting have them."""
    a, b = rng.sample(range(2, 9), 2)
    u, v, w = rng.sample("kquvw", 3)
    gold, wrong, right = rng.choice([
        (rf"{a} e^{{-{b}{u}{v}}}", [rf"{a} e^{{{b}{u}{v}}}", rf"{a} e^{{-{b}{u}}}", rf"{a} e^{{-{b + 1}{u}{v}}}"], [rf"{a} \exp(-{b}{u}{v})", rf"\frac{{{a}}}{{e^{{{b}{v}{u}}}}}"]),
        (rf"e^{{-\frac{{{u}}}{{{v}{w}}}}}", [rf"e^{{\frac{{{u}}}{{{v}{w}}}}}", rf"e^{{-\frac{{{u}{w}}}{{{v}}}}}"], [rf"e^{{-{u}/({v}{w})}}", rf"\exp\left(-\frac{{{u}}}{{{w}{v}}}\right)"]),
        (rf"P(1+{u})^{{{v}{w}}}", [rf"P(1+{u})^{{{v}}}", rf"P(1-{u})^{{{v}{w}}}", rf"P(1+{u})^{{{v}+{w}}}"], [rf"({u}+1)^{{{w}{v}}}P", rf"P(1+{u})^{{{v} \cdot {w}}}"]),
        (rf"{a}^{{{u}{v}}}-{b}", [rf"{a}^{{{u}+{v}}}-{b}", rf"{a}^{{{u}{v}}}+{b}", rf"{a + 1}^{{{u}{v}}}-{b}"], [rf"-{b}+{a}^{{{v}{u}}}"]),
        (rf"{a}^{{{u}+{v}+{w}}}", [rf"{a}^{{{u}+{v}-{w}}}", rf"{a}^{{{u}{v}{w}}}"], [rf"{a}^{u} \cdot {a}^{v} \cdot {a}^{w}", rf"{a}^{{{w}+{u}+{v}}}"]),
        (rf"\frac{{{a}}}{{e^{{{u}{v}/{w}}}-1}}", [rf"\frac{{{a}}}{{e^{{{u}{v}/{w}}}+1}}", rf"\frac{{{a}}}{{e^{{{u}{v}{w}}}-1}}"], [rf"{a}\left(e^{{\frac{{{u}{v}}}{{{w}}}}}-1\right)^{{-1}}"]),
        (rf"A e^{{{a}i{u}}} + B e^{{-{a}i{u}}}", [rf"A e^{{{a}i{u}}} - B e^{{-{a}i{u}}}", rf"A e^{{{b}i{u}}} + B e^{{-{a}i{u}}}"], [rf"B e^{{-{a}i{u}}} + A e^{{{a}i{u}}}"]),
        (rf"y = C e^{{-{a}{u}{v}}}", [rf"y = C e^{{-{b}{u}{v}}}", rf"y = C e^{{-{a}{u}}}", rf"{w} = C e^{{-{a}{u}{v}}}"], [rf"y=C e^{{-{a}{v}{u}}}", rf"C e^{{-{a}{u}{v}}} = y"]),
    ])  # fmt: skip
    case = Case("exponential", gold, mutants=[("other", m) for m in wrong], rewrites=[("same", r) for r in right])
    return with_texts(case, rng)


def everyday(rng: random.Random) -> Case:
    """Units, times, ordinals, money, cases and words as problems in words have them."""
    a, b = rng.sample(range(2, 60), 2)
    h, m = rng.randint(1, 11), rng.randint(10, 58)
    word, other = rng.sample(["circle", "rectangle", "scalene", "positive", "Saturday"], 2)
    gold, wrong, right = rng.choice([
        (rf"{a} \text{{ cm}}", [rf"{a} \text{{ m}}", rf"{a}\text{{ cm}}^2", rf"{a} \text{{ km}}", rf"{a}.5 \text{{ cm}}"], [rf"{a} \text{{ centimeters}}", f"{a} cm", f"{a}"]),
        (rf"{a} \text{{ square inches}}", [rf"{a + 1} \text{{ square inches}}", rf"{a} \text{{ cubic inches}}"], [rf"{a} \text{{ in}}^2", rf"{a} \text{{ inches}}^2", f"{a}"]),
        (rf"{a}^\circ", [rf"{a} \text{{ radians}}", rf"{a + 1}^\circ"], [f"{a}°", rf"{a} \text{{ degrees}}", rf"\angle A = {a}^\circ"]),
        (rf"{h}:{m} \text{{ p.m.}}", [rf"{h}:{m} \text{{ a.m.}}", f"{h}:{m} AM", f"{h}:{m + 1} p.m.", f"{h}{m}"], [f"{h}:{m} PM", rf"{h}:{m}\text{{ pm}}", f"{h}:{m}"]),
        (rf"{a} \text{{ hours }} {b} \text{{ minutes}}", [rf"{b} \text{{ hours }} {a} \text{{ minutes}}", f"{a}", f"{b}"], [rf"{a}\text{{ hours }}{b}\text{{ minutes}}"]),
        (rf"{a}\text{{th}}", [rf"{a + 1}\text{{th}}", f"{a * 10}"], [rf"{a}^{{\text{{th}}}}", rf"{a}^{{th}}", f"{a}th", f"{a}"]),
        (rf"\text{{{word}}}", [rf"\text{{{other}}}", rf"\text{{not a {word}}}", rf"\text{{{word}s}}"], [rf"\text{{a {word}}}", rf"\text{{The {word}}}"]),
        (rf"\begin{{cases}} {a}x & x<{b} \\ x+7 & x\geq {b} \end{{cases}}",
         [rf"\begin{{cases}} {a + 1}x & x<{b} \\ x+7 & x\geq {b} \end{{cases}}", rf"\begin{{cases}} {a}x & x\leq {b} \\ x+7 & x > {b} \end{{cases}}"],
         [rf"\begin{{cases}}{a}x&x<{b}\\x+7&x\ge {b}\end{{cases}}"]),
        (rf"\pm {a}, \pm {b}", [f"{a}, {b}", rf"\pm {a}", rf"\pm {a}, {b}"], [f"{a}, -{a}, -{b}, {b}", rf"x = \pm {b}, \pm {a}"]),
        (rf"\begin{{pmatrix}} {a} \\ -{b} \end{{pmatrix}}", [rf"\begin{{pmatrix}} {a} & -{b} \end{{pmatrix}}", rf"\begin{{pmatrix}} -{b} \\ {a} \end{{pmatrix}}"], [rf"\begin{{bmatrix}} {a} \\ -{b} \end{{bmatrix}}"]),
        (rf"\langle {a}, {b} \rangle", [rf"\langle {b}, {a} \rangle", rf"\langle {a}, -{b} \rangle"], [rf"\left\langle {a}, {b} \right\rangle"]),
    ])  # fmt: skip
    return Case("everyday", gold, mutants=[("other", w) for w in wrong], rewrites=[("same", r) for r in right])


KINDS: tuple[Callable[[random.Random], Case], ...] = (
    integer, integer, fraction, decimal, scientific, root, pi_multiple, polynomial, polynomial, function, function, point, set_of, list_of, points,
    interval, union, inequality, chain, equation, equation, assignment, assignments, matrix, matrix, base, words, option, letter, imaginary, marked,
    expression_of_numbers, formula, formula, everyday, exponential,
)  # fmt: skip


def cleaned(made: Iterable[Case]) -> Iterator[Case]:
    """The cases without mutants that are spelled as the gold or as one of its rewrites."""
    for case in made:
        rights = {re.sub(r"\s", "", r) for _, r in [("", case.gold), *case.rewrites]}
        case.mutants = [(n, m) for n, m in case.mutants if re.sub(r"\s", "", m) not in rights]
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


def measure(made: Iterable[Case], judge: Callable[[list[tuple[str, str, str]]], list[bool]]) -> dict[str, object]:
    """Judge all answers of the cases, given as (answer, gold, kind); what went wrong, by kind and change."""
    rows = [
        (c, wanted, change, answer)
        for c in made
        for wanted, changes in ((False, c.mutants), (True, c.rewrites))
        for change, answer in changes
    ]
    verdicts = judge([(answer, case.gold, case.kind) for case, _, _, answer in rows])
    wrong = [row for row, verdict in zip(rows, verdicts, strict=True) if verdict != row[1]]
    strict = [row for row in wrong if not row[1] and row[0].kind != "expression"]
    return {
        "mutants": sum(not row[1] for row in rows),
        "mutants_accepted": sum(not row[1] for row in wrong),
        "mutants_accepted_integers_letters": len(strict),
        "rewrites": sum(row[1] for row in rows),
        "rewrites_rejected": sum(row[1] for row in wrong),
        "failures": [(c.name, "rejected" if wanted else "accepted", change, answer, c.gold) for c, wanted, change, answer in wrong],
    }  # fmt: skip


def measured(made: Iterable[Case], pool: Any) -> dict[str, object]:
    """As `measure`, judged in the workers of a `harness.grading.pool.Pool`; what went wrong is printed by its change."""
    from kvsweep.harness.grading.pool import Job

    def judge(rows: list[tuple[str, str, str]]) -> list[bool]:
        rule = {"answer_from": "whole_text"}
        jobs = [
            Job(text=f"So $\\boxed{{{a}}}$", stop_reason="stop", gold=g, kind=k, rule=rule)  # type: ignore[arg-type]
            for a, g, k in rows
        ]
        return [reply.get("outcome") == "correct" for reply in pool.judge(jobs)]

    result = measure(made, judge)
    failures: Any = result.pop("failures")
    for (name, verdict, change), count in Counter(row[:3] for row in failures).most_common():
        example = next(row for row in failures if row[:3] == (name, verdict, change))
        print(f"{count:5} {verdict} {name}: {change}: {example[3]!r} for {example[4]!r}")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=1000, help="generated cases (default: 1000)")
    parser.add_argument(
        "--golds", type=Path, nargs="*", default=[], help="JSONL files with a gold or an answer in each row"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    from kvsweep.harness.grading.pool import Pool

    with Pool(workers=arguments.workers) as pool:
        made = [*cases(arguments.cases, arguments.seed), *golds(arguments.golds, arguments.seed)]
        print(json.dumps(measured(made, pool)))


if __name__ == "__main__":
    main()
