r"""One spelling of answers written as LaTeX: the second of the three stages in which an answer is read."""

import re
from collections.abc import Callable
from contextlib import suppress

from kvsweep.harness.grading.languages import in_latex, number_of_words, plain_characters
from kvsweep.harness.grading.units import read_words

_FRACTIONS = ["third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth", "eleventh", "twelfth"]
_MONEY = {"k": "thousand", "K": "thousand", "M": "million", "B": "billion"}
_SIGN = "[€£₹¥₩₽₺₪₫฿]"
_TEXT = r"\\(?:text(?:bf|it|rm|sf|tt|normal)?|math(?:bf|rm|it|sf)|mbox|operatorname)\s*+"
_POWER = r"\^\s*(?:\{\s*-?\d\s*\}|-?\d)"
TEXT_COMMAND = re.compile(rf"{_TEXT}\{{((?:{_POWER}|[^{{}}])*+)\}}")
_UNIT = rf"{_TEXT}\{{(?:{_POWER}|\\cdot|[^\W\d_]|[ .,/()⁻-])*+\}}(?:\s*{_POWER})?"
_FINAL_UNITS = re.compile(rf"(?<=[\w)}}])\s*({_UNIT}(?:(?:\s|\\cdot|/)*{_UNIT})*)[\s.]*$")
# Other words of two or three letters may be products of names, unless a longer word follows.
_SHORT = r"[kcdmn]m|kg|[mn]s|[kMG][WJN]|m[lL]|[kMG]?(?:Pa|Hz|eV)|(?:k?cal|mol|in|ft|yd|mi|min|hr|sec|yr|lb|day)s?"
_WORD = r"[^\W\d_A-Za-z]|[^\W\d_]{4,}|[a-z]{2,3}(?= [a-z]{4})|[apAP]\.?[mM]"
_BARE_WORD = rf"(?:{_WORD}|(?:k?m/[sh]|{_SHORT}|oz|mph|rad|per|sq|men)(?:\^\{{?[23]\}}?)?)"
_BARE_UNITS = re.compile(
    rf"((?:\\[a-z]+|[^A-Za-z\\])*[\d}}])(?:\s+|(?=[^\x00-\x7f]))({_BARE_WORD}(?:[ ./-]+{_BARE_WORD})*)[\s.]*$"
)
_LEAD = re.compile(r"^(?:(?:the|final|answer)\s+)*(?:(?:is|are|equals?|equal to)\b|answer:)\s*(?=[-\d.\\(])", re.I)
_NOTHING = re.compile(
    r"^(?:there (?:is|are) )?no (?:(?:real|integer|positive|valid|such) )*(?:solutions?|roots?)$", re.I
)
_SPELLED_AS = {
    "": r"\left \right \displaystyle \big \Big \bigl \bigr \Bigl \Bigr", "<": r"\lt", ">": r"\gt", "odot": r"\odot",
    r"\{": r"\lbrace", r"\}": r"\rbrace", "(": r"\langle", ")": r"\rangle", " ": r"\quad \qquad ~", "-": "\u2212 –",
    r"\leq ": r"\le \leqslant ≤", r"\geq ": r"\ge \geqslant ≥", r"\neq ": r"\ne ≠", r"\emptyset ": r"\varnothing",
    r"\ldots ": r"\dots \cdots", r"\frac": r"\dfrac \tfrac \cfrac \nicefrac \sfrac", r"\cup ": r"\bigcup ∪",
    r"\in ": "∈", r"\sqrt ": "√",
    "μ": "µ", r"\pi ": "π", r"\cdot ": "·", r"\infty ": "∞", r"^\circ ": r"° \degree",
    r"\mathbb{R}": r"\R \reals ℝ",
}  # fmt: skip
_SPELLED = dict[str, str]()
for _new, _spelled in _SPELLED_AS.items():
    _SPELLED |= dict.fromkeys(_spelled.split(), _new)


def _repeating(decimal: re.Match[str]) -> str:
    r"""`0.1\overline{6}` as a fraction, (16 - 1) / 90."""
    whole, places, period = decimal.groups()
    numerator = int(whole + places + period) - int(whole + places)
    denominator = "9" * len(period) + "0" * len(places)
    return rf"\frac{{{numerator}}}{{{denominator}}}"


_SINE = r"\\(?:(?:arc)?(?:sin|cos|tan|cot|sec|csc)h?|ln|log)"
_INEQUALITIES = re.compile(r"[^,;]*(?:[<>]|\\[lg]eq)[^,;]*")  # a list of them says "and" or "or" with its commas
_GROUP = r"\{((?:[^{}]|\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\})*)\}"
_ANGLE = r"\s*(-?\d+(?:\.\d+)?)\s*\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![A-Za-z]))\s*"
_MINUTES = r"(?:'|\^\s*\{?\\prime\s*\}?)"
# Style around a value: pattern, replacement and an example; used until none is left.
STYLES: tuple[tuple[str, str, str], ...] = (
    (rf"\\(?:boldsymbol|bm|pmb|underline|uline|emph)\s*{_GROUP}", r"\1", r"\bm{x+1} -> x+1"),
    (rf"\\(?:math|text)(?:bf|sf|tt|it)\s*(?=\{{[^{{}}]*[\d\\]){_GROUP}", r"\1", r"\mathbf{\frac{5}{7}} -> \frac{5}{7}"),
    (rf"\\(?:textcolor|colorbox)\s*\{{[^{{}}]*\}}\s*{_GROUP}", r"\1", r"\textcolor{red}{29} -> 29"),
    (r"\\(?:color|hspace\*?|vspace\*?)\s*\{[^{}]*\}\s*", "", r"\color{blue} 29 -> 29"),
    (r"^\s*\*\*([^*]+)\*\*\s*$", r"\1", "**42** -> 42"),
    (rf"\\(?:under|over)brace\s*{_GROUP}(?:\s*[_^]\s*{_GROUP})?", r"\1", r"\underbrace{29}_{\text{sum}} -> 29"),
    (r"(?<=\S)(?:\s|\\[,; ]|\\quad)*(?:\\(?:blacksquare|checkmark|qed|Box)(?![A-Za-z])|[✓✔✅∎])[\s.$]*$", "",
     r"29\ \checkmark -> 29"),
    (r"\\(?:tiny|small|normalsize|large|Large|LARGE|huge|Huge|bf|rm|sf|tt|it|bfseries|(?:display|text|(?:script){1,2})style)"
     r"(?![A-Za-z])\s*", "", r"{\bf 29} -> {29}"),
)  # fmt: skip


def peeled(text: str) -> str:
    """A value without the style around it."""
    for _ in range(9):  # style within style, of which a hostile text could have any depth
        before = text
        for pattern, new, _ in STYLES:
            text = re.sub(pattern, new, text)
        if text == before:
            break
    return text


# One spelling of what can be spelled in several ways: pattern, replacement and an example, in the order of use.
# A group that did not match is empty in a replacement. `(?<!\\)` spares the `\\` between matrix rows.
SPELLINGS: tuple[tuple[str, str | Callable[[re.Match[str]], str], str], ...] = (
    (r"[\u200b-\u200d\u2060\ufeff]", "", "12\u200b -> 12"),
    (r"[\xa0\u2000-\u200a\u202f\u205f\u3000]", " ", "12\u202f345 -> 12 345"),
    (rf"^{_TEXT}\{{(-?[\d.,]+ [^{{}}]*)\}}$", r"\1", r"\text{5 cm} -> 5 cm"),
    (r"^(?:\\text\{)?\s*(?:for )?all (?:(?:positive|real|whole) )*(?:integers|reals|numbers)[ }]*"
     r"(?=[a-z] ?(?:[<>≤≥]|\\[lg]))",
     "", r"\text{all integers }k \ge 3 -> k \ge 3"),
    (r"^\$?\\\$\s*([\d.,]+)\s*(?:\\text\s*\{\s*)?([kKMB])\s*\}?\$?$",
     lambda match: rf"{match[1]}\text{{{_MONEY[match[2]]} dollars}}",
     r"\$5\text{M} -> 5\text{million dollars}"),
    (r"^\$?\\\$\s*([\d.,]+)\s*\\?(?:\s|text\{)\s*([a-z]{3,})\}?\$?$", r"\1\\text{\2 dollars}",
     r"\$5\text{ million} -> 5\text{million dollars}"),
    (r"^(?:\\(?:text|mathrm)\{)?\s*([A-Z]{3}|Rs)\b[.\s}~]*(?=[\d.])(.*)$",
     lambda match: rf"{match[2]}\text{{ {match[1].replace('Rs', 'rupees')}}}",
     r"\text{USD } 18.90 -> 18.90\text{ USD}"),
    (rf"(?<![\d.])(\d+)\s*(?:-|\\text\s*\{{\s*|\s)({'|'.join(_FRACTIONS)})s?\}}?$",
     lambda match: rf"\frac{{{match[1]}}}{{{3 + _FRACTIONS.index(match[2])}}}",
     r"5\text{ sevenths} -> \frac{5}{7}"),
    (rf"(?:\\text\s*\{{)?{_SIGN}\}}?\s*(\d[\d.,]*)|(\d)\s*(?:\\text\s*\{{\s*)?{_SIGN}\}}?|(\d)\s*(?:¢|\\cent)",
     lambda match: match[1] or match[2] or rf"{match[3]}\text{{cents}}", r"75¢ -> 75\text{cents}"),
    (r"(?<=\d)(?:\s|\\[,; ])*([kM]?)\\Omega(?![A-Za-z])", r"\\text{\1ohm}", r"4.2\,\Omega -> 4.2\text{ohm}"),
    (r"\*\*\s*\(?(-?\w+)\)?", r"^{\1}", "x**10 -> x^{10}"),
    (r"(?<![A-Za-z\\])(pi|theta|alpha|beta|lambda)(?![A-Za-z])(?![^{}]*[a-z]{3} [a-z]{2})", r"\\\1 ", "2pi -> 2\\pi "),
    (r"(?<![A-Za-z\\])(sin|cos|tan|ln|log|exp|sqrt)\s*(?=\()", r"\\\1", "ln(5) -> \\ln(5)"),
    (r"\\sqrt\s*\(((?:[^()]|\([^()]*\))*)\)", r"\\sqrt{\1}", r"\sqrt(3) -> \sqrt{3}"),
    (r"(?<![\w!])([A-Za-z]|\d+|\([^()]*\))!\s*(?=\^)", r"(\1!)", "n!^2 -> (n!)^2"),
    (r"\\lg(?![A-Za-z])", r"\\log_{10}", r"\lg 100 -> \log_{10} 100"),
    (r"\\dot\s*\{?(\d)\}?(?:(\d*)\\dot\s*\{?(\d)\}?)?",
     r"\\overline{\1\2\3}",
     r"0.\dot{3} -> 0.\overline{3}"),
    (r"\\hat\s*\{?\s*\\?([ijk])(?:math)?\s*\}?", r"\\mathbf{\1}", r"5\hat{i} -> 5\mathbf{i}"),
    (r"^\$?\\\$\s*(\d(?:\d|\.\d|\{?,\}?|\\!)*)\.?\$?$", r"\1\\text{dollars}", r"\$18.90 -> 18.90\text{dollars}"),
    (r"√\s*(\d+)", r"\\sqrt{\1}", r"√15 -> \sqrt{15}"),
    (r"\\[A-Za-z]+\s*|[^\x00-}]", lambda match: _SPELLED.get(match[0].strip(), match[0]),
     r"\dfrac 12 ≤ 3 -> \frac12 \leq  3"),
    (r"(?<=\d)(?:,?\\[,!]|\{,\}(?:\\!)?)\s*(?=\d{3}(?!\d))", "", r"10,\!080 + 10{,}080 -> 10080 + 10080"),
    (r"\\?\$|(?<!\\)\\[()\[\]]|(?<!\\)\\!\s*|(?<!\\)\\?%", "", r"\(5\!:\!2\) \% -> 5:2 "),
    (r"\{([:,])\}", r"\1", "1{:}2 -> 1:2"),
    (r"(?<![\d.,(\[])(?<!\\\{)[1-9]\d{0,2}(?:,\d{3})+(?![\d,])", lambda match: match[0].replace(",", ""),
     "1,625,000 -> 1625000"),
    (r"(?<![\w.'])\d{1,3}(?:(?:'\d{3})+|(?:\.\d{3}){2,}|(?:\\_\d{3})+)(?![\d'.])",
     lambda match: re.sub(r"\D", "", match[0]), "1'625 + 1.000.000 + 1\\_000 -> 1625 + 1000000 + 1000"),
    (rf"(?<=[\dA-F)])\s*_\s*\{{\s*{_TEXT}\{{\s*([a-z]+)\s*\}}\s*\}}",
     lambda match: match[0] if (base := number_of_words(match[1])) is None else f"_{{{base}}}",
     r"33_{\text{five}} -> 33_{5}"),
    (r"(?<!\\)\\[,;: ]", " ", r"(1,\;2) -> (1, 2)"),
    (r"\\\{\s*\\\}", r"\\emptyset ", r"\{ \} -> \emptyset "),
    (r"\\operatorname\s*\{cis\}|(?<![A-Za-z])cis(?![A-Za-z])", r"\\cis", r"\operatorname{cis} 2 -> \cis 2"),
    (rf"(\\(?:sin|cos|tan|cot|sec|csc|cis)(?:\s*\^\s*(?:\{{-?\d+\}}|\d))?)"
     rf"(?:\s*\({_ANGLE}\)|\s*\{{{_ANGLE}\}}|{_ANGLE})", r"\1(\\frac{\2\3\4\\pi}{180})",
     r"\sin 40^\circ -> \sin(\frac{40\pi}{180})"),
    (r"\\cis\s*\(([^()]*)\)", r"(\\cos(\1)+i \\sin(\1))", r"\cis(x) -> (\cos(x)+i \sin(x))"),
    (rf"(\d+)\s*\^\s*\{{?\\circ\s*\}}?\s*(\d+)\s*{_MINUTES}(?:\s*(\d+)\s*(?:{_MINUTES}{{2}}|\"))?",
     lambda match: rf"\frac{{{3600 * int(match[1]) + 60 * int(match[2]) + int(match[3] or 0)}}}{{3600}}^\circ",
     r"30^\circ 15' -> \frac{108900}{3600}^\circ"),
    (r"\^\s*(?:\\circ(?![A-Za-z])|\{\s*\\circ\s*\})(?:\s*([CF])(?![A-Za-z]))?", r"\\text{degrees \1}",
     r"25^{\circ}C -> 25\text{degrees C}"),
    (rf"\\frac\s*\{{\s*({_UNIT})\s*\}}\s*\{{\s*({_UNIT})\s*\}}", r"\1/\2",
     r"\frac{\text{m}}{\text{s}^2} -> \text{m}/\text{s}^2"),
    (rf"(?<=\d)\s*\\mu\s*({_TEXT}\{{)\s*", r"\1μ", r"5 \mu\text{m} -> 5\text{μm}"),
    (rf"(?<=\d)\s*\^?\{{?(?:{_TEXT}\{{)?\s*(?:st|nd|rd|th)(?![A-Za-z])\s*\}}{{0,2}}", "", r"12^{\text{th}} -> 12"),
    (rf",?\s*(?:{_TEXT}\{{[\s,]*(?:and|or)\s*\}}|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z]))(?:\s*,)?",
     lambda match: (r" \land ", r" \lor ")["or" in match[0]] if _INEQUALITIES.fullmatch(match.string) else ", ",
     "x<1 or x>2 -> x<1 \\lor  x>2"),
    (r"(?<![\w.])(\d+(?:\.\d*)?)\s*[eE]([+-]?\d{1,3})(?!\w)", r"\1 \\cdot 10^{\2}", r"4.5e33 -> 4.5 \cdot 10^{33}"),
    (r"(?<=\d)\s*(?:[x*]|\\times|\\cdot)\s*10\s*\^\s*(\{)?([+-]?\d+)(?(1)\})", r" \\cdot 10^{\2}",
     r"4.6 x 10^-24 -> 4.6 \cdot 10^{-24}"),
    (r"(?<!\d)\.(?=\d)", "0.", "-.5 -> -0.5"),
    (r"(\d+)\.(\d*)\\(?:overline|bar)\s*\{?(\d++)\}?+(?!\s*_)", _repeating, r"0.1\overline{6} -> \frac{15}{90}"),
    (r"(?<=\d)\.(?![\d\\])", "", "3./4 -> 3/4"),
    (r"(?<![\d.}])(\d+)\s+(\d+)\s*/\s*(\d+)(?!\d)", r"\1\\frac{\2}{\3}", r"1 1/2 -> 1\frac{1}{2}"),
    (r"\(([\dA-F]+)\)\s*_", r"\1_", "(2A5)_{16} -> 2A5_{16}"),
    (r"^0[xX]([\dA-Fa-f]+)$", lambda match: f"{match[1].upper()}_{{16}}", "0x1f -> 1F_{16}"),
    (r"\|([^|<>=\\]+)\|\s*(>|\\geq)\s*([^,;<>=]+)$", r"\1 \2 \3 \\lor -(\1) \2 \3",
     r"|x| \geq 2 -> x \geq 2 \lor -(x) \geq 2"),
    (r"\|([^|<>=\\]+)\|\s*(<|\\leq)\s*([^,;<>=]+)$", r"-(\3) \2 \1 \2 \3", "|x| < 2 -> -(2) < x < 2"),
    (r"(?<![A-Za-z\\])C(?:_\{?(\d+)\}?\s*\^\s*\{?(\d+)\}?|\((\d+), ?(\d+)\))",
     r"\\binom{\1\3}{\2\4}", r"C_{10}^3 -> \binom{10}{3}"),
    (r"(?:\{\})?[_^]\{?(\d+)\}?\s*C_\{?(\d+)\}?", r"\\binom{\1}{\2}", r"{}_{10}C_3 -> \binom{10}{3}"),
    (r"([^,;]*)\\pm(?!od)([^,;]*?)\.?(?=[,;]|$)", r"\1+\2, \1-\2", r"2 \pm 1 -> 2 + 1, 2 - 1"),
    (r"(^|[=,(\[])\s*(?:\+|\\approx(?![a-z]))", r"\1", r"x =\approx 3 -> x = 3"),
    # The argument of a function ends with the next product sign; the library reads `\sin^{2}(x)` and not `\sin^2(x)`.
    (rf"({_SINE}(?:\s*[\^_]\s*(?:\{{-?\d+\}}|\d))?)\s*(?![\^_(])"
     r"((?:[\w\s^]|\\(?!cdot|times|sin|cos|tan|ln|log|exp)[a-z]+|\{[^{}]*\})+?)\s*(?=\\cdot|\\times)", r"\1(\2)",
     r"\sin x \cdot 2 -> \sin(x)\cdot 2"),
    (rf"({_SINE}\s*[\^_])\s*(\d)\s*(?=\()", r"\1{\2}", r"\sin^2(x) -> \sin^{2}(x)"),
    (r"\\begin\{cases\}(.*?)\\end\{cases\}", lambda match: re.sub(r"\\\\", ",", match[1].replace("&", "")),
     r"\begin{cases}a=4\\b=7\end{cases} -> a=4,b=7"),
    (r"^\\\{\s*([a-z])\s*(?:\\in\s*\\mathbb\{R\}\s*)?(?:\\mid|\\colon|[:|])\s*(.*)\\\}$",
     lambda match: re.sub(rf"(?<![A-Za-z\\]){match[1]}(?![A-Za-z])", "x", match[2]), r"\{t : t>3\} -> x>3"),
    (r"\\mathbb\{R\}\s*(?:\\(?:small)?setminus|\\backslash|-)\s*\\\{\s*((?:[^{},\\]|\\frac\{\d+\}\{\d+\})+)\\\}",
     r"(-\\infty, \1) \\cup (\1, \\infty)",
     r"\mathbb{R}\setminus\{5\} -> (-\infty, 5) \cup (5, \infty)"),
    (r"^([\[\](])([^\[\]()]*,[^\[\]()]*)([\[\])])$",
     lambda match: match[1].replace("]", "(") + match[2] + match[3].replace("[", ")"), "]2,5[ -> (2,5)"),
    (r"^\((\d{1,3}(?:,0\d\d)+)\)$", lambda match: f"({match[1].replace(',', '')})", "(1,000) -> (1000)"),
    (r"^(-?\d{1,3})((?: \d{3})+)(?=\s*(?:\\text|$))", lambda match: match[1] + match[2].replace(" ", ""),
     "12 345 -> 12345"),
    (r"(^|\\in\s*)\(\s*-\s*\\infty\s*,\s*\+?\s*\\infty\s*\)$", r"\1\\mathbb{R}",
     r"x \in (-\infty, \infty) -> x \in \mathbb{R}"),
)  # fmt: skip


def readable(answer: str) -> tuple[str, str]:
    r"""The answer in one spelling, without `\left`, `\dfrac`, `$`, marks of thousands or final units; and its units."""
    answer = peeled(in_latex(plain_characters(answer)))
    for pattern, new, _ in SPELLINGS:
        answer = re.sub(pattern, new, answer)
    items, _ = split(answer, ",;")
    texts, units = [], []
    for item in items:
        text, unit = _without_unit(item)
        texts.append(text)
        units.append(unit)
    text = TEXT_COMMAND.sub(r" \1 ", ", ".join(texts))
    text = re.sub(r"\s+", " ", text).strip(" .")
    text = _NOTHING.sub(r"\\emptyset ", _LEAD.sub("", text))  # without "the answer is"; "no solution" is empty
    different_units = {*units} - {""}
    if len(different_units) > 1:
        return text, ";".join(units)
    return text, max(units)  # one unit may stand for all items; "" is less than any


def _without_unit(item: str) -> tuple[str, str]:
    """A single item without its final words, multiplied as they say, and its unit; with them if one is not known."""
    item = _BARE_UNITS.sub(r"\1\\text{\2}", item)  # 5 cm as 5\text{cm}
    final_words = _FINAL_UNITS.search(item)
    if final_words is None:
        return item, ""
    number = item[: final_words.start()]
    text = TEXT_COMMAND.sub(r" \1", final_words[1])
    words = read_words(text, single=number.strip() == "1")
    if words is None:
        return item, ""
    if words.factor > 1:
        number += rf" \cdot {words.factor}"
    return number, words.unit


_BASED = re.compile(r"([0-9A-Z]{2,})\s*_\s*\{?\s*(\d{1,2})\s*\}?")


def number_of_base(text: str) -> int | None:
    """The value of a number with its base, `2A_{16}`; None for anything else."""
    match = _BASED.fullmatch(text)
    if not match:
        return None
    digits, base = match[1], int(match[2])
    if 2 <= base <= 36:
        with suppress(ValueError):  # a digit that the base lacks
            return int(digits, base)
    return None


def split(text: str, separators: str | tuple[str, ...]) -> tuple[list[str], list[str]]:
    r"""The parts between separators that stand in no brackets and no matrix, and these separators."""
    depth = 0
    parts = [""]
    signs = []
    for token in re.findall(r"\\[A-Za-z]+|\\.|.", text, re.DOTALL):  # commands and single characters
        if token in ("(", "[", "{", r"\{", r"\begin"):
            depth += 1
        elif token in (")", "]", "}", r"\}", r"\end"):
            depth -= 1
        if token in separators and depth <= 0:  # below 0 after a bracket that nothing opened
            signs.append(token)
            parts.append("")
        else:
            parts[-1] += token
    return [part.strip() for part in parts], signs
