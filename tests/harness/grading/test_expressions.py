# ruff: noqa: E501
"""Equality of expressions: mutants of a gold are rejected, rewrites are accepted, and each rule has a case that needs it."""

import random
import re
import time
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsweep.harness.grading.answers import Rule, judge
from kvsweep.harness.grading.expressions import compare
from kvsweep.harness.grading.grader import Grader
from kvsweep.harness.grading.spelling import SPELLINGS, STYLES, readable
from scripts.study import grade_mutants as mutants

RULE = Rule(answer_from="whole_text")


class TestFoundOnOtherData:
    """Wrong grades that were found on recorded outputs on which no rule was made."""

    @pytest.mark.parametrize(
        ("answer", "gold"),
        [
            ("5x - 7y + 11z - 4 = 0", "5x - 7y + 11z + 4 = 0"),
            ("x^2+y^2=0", "x^2-y^2=0"),
            ("y=3", "x=3"),
            ("x+y=7", "x-y=7"),
            (
                r"\begin{pmatrix} -1 & 2 \\ 0 & -1 \end{pmatrix}",
                r"\begin{pmatrix} -1 & 0 \\ 0 & -1 \end{pmatrix}",
            ),
            ("4343_8", "4343_6"),
            ("16,3,1,3", "16,3,1,1"),
            (r"67\sim75", "67"),
            ("20x - 28y + 44z + 16 = 0", "5x - 7y + 11z + 4 = 0"),
        ],
    )
    def test_wrong(self, answer, gold):
        assert judge(rf"\boxed{{{answer}}}", "stop", gold, "expression", RULE)[1] == "wrong"

    @pytest.mark.parametrize(
        ("answer", "gold"),
        [
            (
                r"\begin{pmatrix} \frac{16}{49} \\ \frac{48}{49} \end{pmatrix}",
                r"\begin{pmatrix} 16/49 \\ 48/49 \end{pmatrix}",
            ),
            (r"\text{(C) Plane}", r"\text{(C)}"),
            ("equal to 0.15", "0.15"),
            (r"15,000 \, \text{kcal m}^{-2} \text{ yr}^{-1}", "15000"),
            (r"15,000 \text{ kcal m⁻² yr⁻¹}", "15000"),
            (r"-\frac{1}{3}", "-1./3"),
            (
                r"\frac{2 \pi c^{2} R^{2}}{\lambda^{5} d^{2}\left[e^{h c /(\lambda k T)}-1\right]}",
                r"\frac{2 \pi c^{2} R^{2}}{\lambda^{5}\left[e^{h c /(\lambda k T)}-1\right] d^{2}}",
            ),
            (r"C e^{-2t} + \frac{1 - i}{4} e^{2it}", r"\frac{e^{2 i t}}{(2+2 i)}+C e^{-2 t}"),
            (r"e^{x^2+y^2+z^2}", r"e^{x^2}e^{y^2}e^{z^2}"),
            (r"\log_2 12", r"2 + \log_2 3"),
            (r"y - 1 = 5e^{kxt}", r"y = 5 e^{kxt} + 1"),
        ],
    )
    def test_right(self, answer, gold):
        assert judge(rf"\boxed{{{answer}}}", "stop", gold, "expression", RULE)[1] == "correct"


# Pairs that math-verify accepts alone and that a grade must reject, each with its rule.
VETOED = [
    (r"\frac{2}{10^{20}}", r"\frac{3}{10^{20}}"),  # it takes differences below 1e-15 for none
    (r"2 \cdot 10^{-19} x", r"3 \cdot 10^{-19} x"),  # the same with a name
    ("0.12345678", "0.12345679"),  # it rounds to six decimals
    ("2 3", "5"),  # it adds numbers side by side
    (r"3(2)", "5"),  # it adds a number in brackets
    (r"\frac{M}{m}", r"\frac{m}{M}"),  # it writes names in small letters
    ("5m", "5"),  # it drops letters that may be units
    (r"5 \text{ million}", "5"),  # it drops words that are no units
    (r"\{1, 1, 2\}", r"\{1, 2\}"),  # its sets forget repeated items
    ("1, 2, 2", "1, 2, 1"),  # its lists are sets
    (r"\{1, 2\}", "(1, 2)"),  # it compares a set with a pair
    ("[3, 1]", "(3, 1)"),  # it reads both as a pair
    ("2x = 5", "5"),  # it takes the right side of any equation
    ("3t + z = -7", "-2x + 5y = -7"),  # in proportion at points on one line
    ("x^2 + 1 = 0", "x^2 + 2 = 0"),  # it compares solutions, and there are none
    ("f(x) = 2x", "f'(x) = 2x"),  # it drops primes
    ("f(x) = x", "f(z) = z"),  # other names
    # equal where both are rounded to the same
    (r"N(n) = \lfloor v \rfloor + 1", r"N(n) = \lfloor n \rfloor + 1"),
    (r"c^2 (\gamma - 3)", r"c^2 (\gamma - 1)"),  # it reads the gamma function
    ("1, 2, n", r"1, 2, \ldots, n"),  # it drops dots
    ("1:3:2", "1:2:3"),  # it divides
    (r"\angle BAC", r"\angle ABC"),  # it multiplies letters
    ("neve", r"\text{even}"),  # it multiplies letters of words
    (r"\text{listen}", r"\text{silent}"),  # and sorts them
    (r"5 \text{ cm}^3", r"5 \text{ cm}^2"),  # it drops units with their powers
    ("43", "43_6"),  # it drops number bases
    (r"\text{not }5", "5"),  # it searches for a number
    (r"6 \text{ m}", r"6 \text{ cm}"),  # it drops units
    (r"18 \text{ radians}", r"18^\circ"),  # it drops units
    (r"8:51 \text{ a.m.}", r"8:51 \text{ p.m.}"),  # it drops words
    (r"60 \text{ hours } 29 \text{ minutes}", r"29 \text{ hours } 60 \text{ minutes}"),  # it multiplies letters
    ("6", r"6 \text{ hours } 20 \text{ minutes}"),  # it drops what it cannot read
    (r"\sin(x) = 5", "5"),  # it takes the right side of any equation
    ("10^{60} + 1", "10^{60}"),  # it rounds
    ("37.5330", r"11 + 8\sqrt{11}"),  # a decimal with fewer than six right places
    ("23.2665", r"10 + 4\sqrt{11}"),  # a rounded value that is right to six places by chance
    (r"\sqrt{x^2}", "x"),  # equal for positive numbers alone
    ("f(x) = x", "f(x) = x + 1"),  # a constant multiple of nothing
    ("1", r"\tanh(50x)"),  # names in one of both alone, and equal where they are large
    ("3", r"\min(x, 3)"),  # the same
    (r"\Theta", r"\theta"),  # it writes names in small letters
    ("m_a v", "m_A v"),  # the same in an index
    ("A^T", "A"),  # it drops what may be a transpose
    (r"\nabla \cdot E", r"\nabla \times E"),  # it multiplies vectors as numbers
    (r"\vec{a} \times \vec{b}", r"\vec{b} \times \vec{a}"),  # the same in another order
    (r"5 \text{ m}", r"5 \text{ mm}"),  # it drops units
    (r"5 \text{ m}", r"5 \text{ m/s}"),  # it drops units
]
# A unit in one of both alone is dropped, and two units must be one, however they are written.
UNITS = [
    (r"9.8 \text{ m s}^{-2}", r"9.8 \text{ m/s}^2"),
    (r"9.8\,\mathrm{m\,s^{-2}}", r"9.8 \text{ meters per square second}"),
    (r"9.8 \ \text{m}\cdot\text{s}^{-2}", r"9.8 \frac{\text{m}}{\text{s}^2}"),
    ("9.8 m/s^2", r"9.8 \text{ m/s}^2"),
    (r"5 \text{ J/(mol K)}", r"5 \text{ J mol}^{-1} \text{ K}^{-1}"),
    (r"5\,\mathrm{m^2\,kg}", r"5\ \text{kg}\cdot\text{m}^2"),
    (r"12 \text{ sq. ft.}", r"12 \text{ ft}^2"),
    (r"60 \text{ mph}", r"60 \text{ mi/h}"),
    (r"5 \text{ megawatts}", r"5 \text{ MW}"),
    (r"5\,\mu\text{m}", r"5 \text{ micrometers}"),
    (r"5 \text{ ml}", r"5 \text{ mL}"),
    (r"5 \text{ kWh}", r"5 \text{ kW h}"),
    (r"5 \text{ lbs}", r"5 \text{ pounds}"),
    ("25°C", r"25^\circ\text{C}"),
    (r"8:51 \text{ P.M.}", "8:51 pm"),
    (r"\text{5 cm}", "5"),
    (r"1 \text{ m}, 2 \text{ m}", r"1, 2 \text{ m}"),
    ("4 up quarks", "4"),
    ("2 xy", "2xy"),
]
OTHER_UNITS = [
    (r"5 \text{ mm}", r"5 \text{ Mm}"),
    (r"3 \text{ MW}", r"3 \text{ mW}"),
    (r"3 \text{ M}", r"3 \text{ m}"),
    (r"3 \text{ Nm}", r"3 \text{ nm}"),
    (r"9.8 \text{ cm/s}^2", r"9.8 \text{ m/s}^2"),
    (r"9.8 \text{ m s}^{-1}", r"9.8 \text{ m/s}^2"),
    (r"9.8 \text{ m s}^{2}", r"9.8 \text{ m/s}^2"),
    (r"5 \text{ ms}", r"5 \text{ meters}"),
    (r"5 \text{ m}", r"5 \text{ minutes}"),
    (r"5 \text{ mm}", r"5 \text{ micrometers}"),
    (r"5 \text{ mm}", r"5\,\mu\text{m}"),
    (r"18.90 \text{ cents}", r"\$18.90"),
    ("25°F", "25°C"),
    (r"1 \text{ m}, 2 \text{ cm}", r"1 \text{ cm}, 2 \text{ m}"),
    ("2 xy", "2"),
]
# Words of many languages that multiply, money in words and signs, and things that are counted.
MULTIPLIED = [
    ("7 Millionen Euro", "7000000"), (r"7\text{ mil millones}", "7000000000"), (r"7\text{ тыс.}", "7000"), ("7億", "700000000"),
    (r"7\text{ milliards}", "7000000000"), (r"1.5\text{ million}", "1500000"), (r"\$2\text{ million}", "2000000"),
    (r"7\text{ dozen eggs}", "84"), (r"7\text{ lakh rupees}", "700000"), (r"\text{EUR }7.50", "7.5"), ("CHF 12", "12"),
    (r"7\text{ miles per gallon}", "7"), (r"7\text{ kg of rice}", "7"), (r"7\text{ different ways in total}", "7"),
    (r"7\text{ approximately}", "7"), (r"1\text{ apple}", "1"), (r"7\text{ kcal}", r"7\text{ kilocalories}"), ("7個", "7"),
]  # fmt: skip
# A word that is no unit and not known to say nothing may change the number.
UNREAD = [
    (f"7 {words}", "7")
    for words in (
        "Millionen", "mil", "万", "тыс", "milliards", "million", "score", "gross", "plus one", "minus two", "doubled",
        "and a half", "modulo five", "or fewer", "factorial", "hundredths", "times pi", "eighths", "in binary", "squared",
    )
]  # fmt: skip
# Inequalities that "and" or "or" joins, columns as tuples, options with their text, functions with no number.
STRUCTURES = [
    (r"x>1 \text{ or } x<-1", r"x<-1 \text{ or } x>1"),
    (r"x<-1, x>1", r"x<-1 \text{ or } x>1"),
    (r"x>0, y>0", r"x>0 \text{ and } y>0"),
    (r"x>1 \text{ and } x \le 5", "(1, 5]"),
    (r"x \le 5 \text{ and } x > 1", r"1 < x \le 5"),
    (r"\langle 1, \tfrac12 \rangle", r"\begin{pmatrix} 1 \\ 1/2 \end{pmatrix}"),
    (r"2\begin{pmatrix} 1 & 2 \\ 3 & x \end{pmatrix}", r"\begin{pmatrix} 2 & 4 \\ 6 & 2x \end{pmatrix}"),
    (r"(B)\ 12", r"\text{(B)}"),
    (r"\textbf{(E)}~\frac{1}{2}", "E"),
    (r"V(0)e^{-t/(RC)}", r"V(0) e^{-\frac{t}{R C}}"),
    (r"\sin^2(\theta)", r"\sin^{2}\theta"),
    (r"\sin x \cdot \cos x", r"\sin x \cos x"),
    (r"\ln 2 \cdot 3", r"3 \ln 2"),
    (r"2 \cdot 2^{1008}", "2^{1009}"),
    (r"\approx 3.14", "3.14"),
    ("Final answer: 3.14", "3.14"),
    (r"n \equiv 1 \pmod 4", r"n\equiv 1\pmod{4}"),
    ("(2A5)_{16}", "2A5_{16}"),
]
OTHER_STRUCTURES = [
    (r"x<-1 \text{ and } x>1", r"x<-1 \text{ or } x>1"),
    (r"x<-1 \text{ and } x>1", r"(-\infty,-1)\cup(1,\infty)"),
    (r"x>1 \text{ or } x<5", "(1, 5)"),
    (r"x<1 \text{ and } x>5", "(1, 5)"),
    (r"y>1 \text{ and } x<5", "1 < x < 5"),
    (r"(\tfrac12, 1)", r"\begin{pmatrix} 1 \\ 1/2 \end{pmatrix}"),
    ("(1, 2)", r"\begin{pmatrix} 1 & 2 \end{pmatrix}"),
    ("(A), (B)", "(A)"),
    (r"(A)\ 12", r"\text{(B)}"),
    ("V(1)", "V(0)"),
    (r"\sin x \cdot 2", r"\sin 2x"),
    (r"\{\emptyset\}", r"\emptyset"),
    ("2^{1009} + 1", "2^{1009}"),
    (r"0.\overline{3}", "0.3"),
    (r"0.\overline{1}_2", r"\frac{1}{9}"),
    (r"\frac{\pi}{6}^\circ", r"\frac{\pi}{6}"),
    (r"(-\infty, \infty]", r"\mathbb{R}"),
    (r"\sqrt[3]{-8}", "2"),
    (r"0.05\%", "0.05"),
    (r"\frac12\%", r"\frac12"),
    (r"-0.5\%", "-0.5"),
    (r"x = 0.05\%", "0.05"),
    (r"5\%", "0.5"),
    (r"500\%", "5"),
    ("5", r"50\%"),
    (r"50\%", r"5\%"),
    (r"\sqrt{-4}", "-2"),
    (r"\sqrt[3]{-8}", r"1 + \sqrt{3}"),
    (r"\sin(3.14159)", "0"),
    ("2 \\cdot 10^{-19}", "0"),
]
# Each spelling that a rule of its own brings to the one that the library reads.
SPELLED = [
    ("√15", r"\sqrt{15}"), ("2√{3}", r"2\sqrt{3}"), (r"\$18.90", "18.90"), (r"\$18.90.", r"\$18.90"), (r"\(5\)", "5"), (r"\[5\]", "5"),
    (r"\left\{1, 2\right\}", r"\{1,2\}"), (r"\bigl(1, 2\bigr)", "(1,2)"), (r"\displaystyle 5", "5"),
    ("10{,}080", r"10,\!080"), (r"10\,080", "10080"), (r"(10,\!080, 5)", "(10080, 5)"), (r"10,080", "10080"), (r"1\!:\!2", "1:2"), (r"1{:}2", "1:2"),
    (r"1\quad", "1"), (r"(1,\;2)", "(1, 2)"), (r"\tfrac{1}{2}", r"\dfrac12"), (r"\frac {1}{2}", "1/2"),
    (r"x \leqslant 2", r"x\le2"), (r"x \ne 2", r"x \neq 2"), (r"x \lt 2", "x < 2"), (r"x \gt 2", "x>2"),
    (r"\lbrace 1, 2 \rbrace", r"\{1,2\}"), (r"\varnothing", r"\{\}"), (r"1, \dots, n", r"1, \ldots, n"),
    (r"\mathbb R", r"\mathbb{R}"), (r"90^{\circ}", "90"),
    ("90°", "90"), (r"5\%", "5"), (r"1 \text{ and } 2", "1, 2"), ("1, 2, and 3", "1,2,3"), (r"1 \text{ or } 2", "2, 1"),
    ("4.5e33", r"4.5 \times 10^{33}"), ("4.6 x 10^-24", "4.6e-24"), (r"7 + 12 \cdot 10^{1/2}", r"7 + 12\sqrt{10}"), (".5", "0.5"), ("3./4", "0.75"), ("1 1/2", "3/2"),
    (r"1\frac{1}{2}", "1.5"), ("(43)_6", "43_{6}"), ("E_1 + x", "x + E_{1}"), (r"[2, +\infty)", r"[2, \infty)"),
    (r"5 \text{ kg} \cdot \text{m}^2", "5"), (r"5\,\mathrm{km/h}", "5"), ("9 boys", "9"), ("1.69 Å", "1.69"),
    (r"\text{the answer is } 5", "5"), (r"\text{(B) } 5", "5"), ("x = 5", "5"), (r"\text{Area} = 5", "5"),
    (r"f(x) = 2x", "2x"), (r"f^{-1}(x) = 2x", "2x"), (r"x \in [1, 2)", "[1,2)"), ("(x, y) = (1, 2)", "(1,2)"), (r"N = 2^5 = 32", "32"), (r"2^5 = 32", "32"),
    ("x = 1, 2", "1, 2"), ("x = 1, x = 2", "2, 1"), ("a = 1, b = 2", "1, 2"), (r"2 \pm 1", "3, 1"), (r"2 \pm \sqrt{3}.", r"2 + \sqrt{3}, 2 - \sqrt{3}"), (r"1 \quad 2", "1 2"),
    (r"1 \qquad 2", "1 2"), ("x¹ + 1", "x + 1"), ("π:2", r"\pi:2"), (r"x < 1 \text{ or } x > 2", "(-∞,1)∪(2,∞)"), (r"\pm 3", "-3, 3"),
    (r"\{2, 1\}", "1, 2"), ("1 < x", "x > 1"), ("x - 2 > 0", "x > 2"), ("2 > x > 1", "1 < x < 2"), ("(1, 2]", r"1 < x \leq 2"),
    ("2y = x + 6", r"y = \frac{1}{2}x + 3"), ("3 = x", "x = 3"), (r"x = \frac{6}{2} = 3", "x = 3"), (r"(3, 4] \cup [1, 2)", r"[1,2)\cup(3,4]"),
    (r"\left[\begin{array}{cc} 1 & 2 \end{array}\right]", r"\begin{pmatrix} 1 & 4/2 \end{pmatrix}"), ("EVEN", r"\text{even}"),
    (r"\text{(C)}", "C"), ("17i - 8", "-8 + 17i"), ("i(17 + 8i)", "-8 + 17i"), ("0.333333", r"\frac{1}{3}"), (r"X + 1", "1 + x"),
    (r"\frac{46}{10^{25}}", "4.6e-24"), (r"\frac{1}{3} \approx 0.33", "1/3"), ("2x = 3", r"2 x = 3"),
    ("5²", "25"), ("2³", "8"), ("3–1", "2"), ("7π", r"7\pi"), ("4×3", "12"), ("4·3", "12"), ("x ≤ 2", r"x \leq 2"), ("x≥2", r"x \geq 2"),
    ("x≠2", r"x \neq 2"), ("(1,∞)", r"(1, \infty)"), ("(3,4]∪[1,2)", r"[1,2)\cup(3,4]"), ("x∈[1,2)", "[1,2)"),
    (r"5~\text{cm}", "5"), ("\\begin{pmatrix} 1 \\\\\n2 \\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
    (r"\big(1, 2\big)", "(1,2)"), (r"\Big(1, 2\Big)", "(1,2)"), (r"\Bigl(1, 2\Bigr)", "(1,2)"),
    (r"(1,\quad 2)", "(1,2)"), (r"(1,\qquad 2)", "(1,2)"), (r"x\ge2", r"x \geq 2"), (r"1, \cdots, n", r"1, \ldots, n"),
    (r"(3,4]\bigcup[1,2)", r"[1,2)\cup(3,4]"), (r"\langle 1, 2 \rangle", "(1,2)"), (r"12^{\mathrm{th}}", "12"), ("12th", "12"),
    (r"12\text{th}", "12"), ("8:51 PM", r"8:51\text{ p.m.}"),
    (r"\text{a circle}", "circle"), (r"6 \text{ in}^2", r"6 \text{ square inches}"), (r"6 \text{ cubic cm}", r"6\text{ cm}^3"), (r"5\text{ J}", "5"),
    (r"6 \text{ centimeters}", r"6 \text{ cm}"), (r"5 \text{ m/s}", r"5 \text{ meters per second}"), (r"5 \text{ hr}", r"5 \text{ h}"), (r"\frac{dy}{dx} = 2x", "2x"), (r"\pm 1, \pm 7", "1, -1, 7, -7"), (r"x < 1 \text{ or } x > 2", r"(-\infty,1)\cup(2,\infty)"),
    (r"\frac{\sinh(at)}{a}", r"\frac{1}{2a}(\exp{a*t} - \exp{-a*t})"), (r"a_{\odot} b", r"b a_{\odot}"),
    (r"0.\overline{3}", r"\frac{1}{3}"), (r"-12.1\bar{6}", r"-\frac{73}{6}"), ("ℝ", r"(-\infty, \infty)"), (r"x \in \R", r"(-\infty,+\infty)"),
    (r"50\%", r"\frac12"), ("0.5", r"50\%"), (r"\frac12", r"$50\%$"), (r"5\%", "0.05"), (r"\frac{1}{2}\%", "0.005"), (r"50\%", "50"), ("50", r"50\%"),
    ("0.5", r"0.5\%"), (r"100\%", "1"), ("5", r"500\%"), (r"0\%", "0"), (r"0.05\%", r"0.05\%"), (r"12.5\%", "12.5"), (r"x = 5\%", "5"), (r"10\%, 20\%", "10, 20"),
    ("1\xa0000", "1000"), ("1\u2009000", "1000"), ("1\u202f000", "1000"), ("12\u200b", "12"),
    (r"\sqrt[3]{-8}", "-2"), (r"\sqrt[3]{-2}", r"-\sqrt[3]{2}"), (r"(-32)^{1/5}", "-2"), (r"\sqrt[3]{-x}", r"-\sqrt[3]{x}"),
    (r"y = \sqrt[3]{-2}x", r"y = -\sqrt[3]{2}x"), (r"\sin(\pi)", "0"), (r"1 + \cos\pi", "0"), (r"\tan(\pi/4) - 1", "0"), (r"0", r"\sin(\pi)"),
]  # fmt: skip
# Answers of recorded outputs.
RECORDED = [
    (r"\dfrac{14}{3}", r"\frac{14}{3}"),
    (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\pi/2)"),
    ("0.00001", "1e-5"),
    (r"4.5 \times 10^{33} \, \text{erg s}^{-1}", "4.5e33"),
    ("4.6 x 10^-24 meters", "4.6e-24"),
    (r"10{,}080", r"10,\!080"),
    (r"90", r"90^\circ"),
    (r"b = m", "m"),
    (r"x = \frac{1}{3}e^{t} + ce^{-2t}", r"\frac{e^{t}}{3}+c e^{-2 t}"),
    ("x = 5 \\text{ or } x = -2", "$5,-2$"),
    ("(-2, -2)", "-2,-2"),
    (r"\{-2, -1, 1, 2\}", "-2,-1,1,2"),
    (r"\frac{1}{3} E_1 + \frac{2}{3} E_2", r"\frac{1}{3} E_{1}+\frac{2}{3} E_{2}"),
    ("2x+1", "1+2x"),
    (r"\text{Evelyn}", "Evelyn"),
    (r"k \geqslant 2", r"$k \geq 2$"),
]
OTHER_RECORDED = [
    ("2.88e-19", "2.89e-19"),
    (r"2.88 \times 10^{-19}", r"2.89 \cdot 10^{-19}"),
    ("4.569 x 10^-24 meters", "4.6e-24"),
    (r"\frac{47}{10^{25}}", "4.6e-24"),
    ("102019", "102018"),
    ("2000", "20"),
    ("0.5", "50"),
    (r"[2, \infty)", r"(2,\infty)"),
    ("5", "5,-2"),
    ("f(x) = x", "$f(x)=-1$,$f(x)=x$"),
    (r"b = m, k = \frac{37}{4} m", r"\frac{37}{4} m"),
    ("x > 5", "5"),
    ("x+1", "x-1"),
    ("(1, 2)", "(2, 1)"),
]


@pytest.mark.parametrize(("answer", "gold"), [*UNITS, *MULTIPLIED, *STRUCTURES, *SPELLED, *RECORDED])
def test_is_the_same(answer, gold):
    verdict = compare(answer, gold)
    assert verdict[0], verdict


@pytest.mark.parametrize(("answer", "gold"), [*VETOED, *OTHER_UNITS, *UNREAD, *OTHER_STRUCTURES, *OTHER_RECORDED])
def test_is_something_else(answer, gold):
    assert not compare(answer, gold)[0]


class TestSpelling:
    @pytest.mark.parametrize("rule", [*STYLES, *SPELLINGS], ids=lambda rule: rule[2])
    def test_each_rule_rewrites_its_example(self, rule):
        pattern, new, example = rule
        before, after = example.split(" -> ")
        assert re.sub(pattern, new, before) == after

    def test_a_fraction_has_one_name(self):
        assert readable(r"\tfrac{1}{2}")[0] == readable(r"\dfrac{1}{2}")[0] == r"\frac{1}{2}"

    def test_a_pair_of_numbers_is_no_thousand(self):
        assert readable("(1,234)")[0] == "(1,234)"
        assert not compare("(1234)", "(1,234)")[0]


def judged(case: object, answer: str) -> bool:
    kind, gold = case.kind, case.gold  # type: ignore[attr-defined]
    return judge(rf"So $\boxed{{{answer}}}$", "stop", gold, kind, RULE)[1] == "correct"


@pytest.mark.slow
@pytest.mark.parametrize("examples", [12, pytest.param(40, marks=pytest.mark.slow)])
def test_mutants_are_rejected_and_rewrites_are_accepted(examples):
    @given(st.sampled_from(mutants.KINDS), st.integers(0, 10**9))
    @settings(max_examples=examples)
    def check(kind, seed):
        case = next(mutants.cleaned(kind(random.Random(seed)) for _ in range(1)))  # type: ignore[operator]
        assert [m for m in case.mutants if judged(case, m)] == []
        assert [r for r in case.rewrites if not judged(case, r)] == []

    check()


def measured(cases: object) -> dict[str, int]:
    with Grader(workers=2, timeout_s=120) as pool:
        result: dict[str, int] = mutants.measured(cases, pool)
        return result


def within_the_limits(result: dict[str, int]) -> bool:
    return (
        result["mutants_accepted"] <= 0.002 * result["mutants"]
        and result["mutants_accepted_integers_letters"] == 0
        and result["rewrites_rejected"] <= 0.005 * result["rewrites"]
    )


@pytest.mark.slow
@pytest.mark.release
def test_a_thousand_mutants_of_every_kind():
    result = measured(mutants.cases(111, seed=7))
    assert result["mutants"] >= 1000
    assert within_the_limits(result), result


@pytest.mark.slow
@pytest.mark.shared
def test_mutants_of_the_recorded_golds(shared_data):
    files = [shared_data / name for name in ("graded_outputs.jsonl", "aime24.jsonl", "aime25.jsonl", "amc23.jsonl")]
    result = measured(islice(mutants.golds(files), 0, None, 4))
    assert result["mutants"] > 500
    assert within_the_limits(result), result


GROWING = (
    r"\frac{(3k+n-2)!!}{(k+n-2)!!}", "(n!)!", "(9!)!", "1000000000!", r"\binom{10^9}{10^8}", "9^{9^{9^9}}", "10^{10^{10}}",
    r"\frac{1}{10^{-10^{10}}}", "1.5^{10^9}", "(1+i)^{10^9}", "x^{9^{9^9}}", "(x+1)^{1000000}", "x^{x^{x^x}}",
    r"e^{e^{e^{e^{e}}}}", r"\sin(10^{10^{10}})", r"\log(9^{9^9})", r"\sqrt[3]{9^{9^9}}", r"\left(1+10^{-12}\right)^{10^{12}}",
)  # fmt: skip


@pytest.mark.covers(1)
@pytest.mark.parametrize("answer", GROWING)
@pytest.mark.parametrize("gold", ["2^{k-n}", "7", "n!", "x = 3", "x = y = 3"])
def test_an_answer_without_bounds_is_judged_within_bounds(answer, gold):
    """No worker that could be killed stands around this judge."""
    started = time.process_time()
    assert judge(rf"\boxed{{{answer}}}", "stop", gold, "expression", RULE)[1] == "wrong"
    assert judge(rf"\boxed{{x = {answer}}}", "stop", gold, "expression", RULE)[1] == "wrong"
    assert time.process_time() - started < 4


# Identities of textbooks, and what looks like them.
IDENTITIES = [
    (r"\frac{(2n)!}{n! n!}", r"\binom{2n}{n}"), ("n (n-1)!", "n!"), ("20!", "2432902008176640000"),
    ("(2n-1)!!", "(2n-1)!!"), (r"\frac{1}{2^{n-k}}", "2^{k-n}"), (r"\log_b a - \log_b c", r"\log_b \frac{a}{c}"),
    (r"\sqrt{a}\sqrt{b}", r"\sqrt{ab}"), (r"\frac{1-\cos 2x}{\sin 2x}", r"\tan x"), (r"\cos^4 x - \sin^4 x", r"\cos 2x"),
    (r"4\cos^3 x - 3\cos x", r"\cos 3x"), (r"\arccos x", r"\frac{\pi}{2} - \arcsin x"), (r"(-1)^n", r"\cos n\pi"),
    (r"\sqrt{7+4\sqrt{3}}", r"2+\sqrt{3}"), (r"\sum_{k=1}^{n} k^2", r"\frac{n(n+1)(2n+1)}{6}"), (r"\sqrt{x^2}", "|x|"),
    (r"\prod_{k=1}^{n} k", "n!"), (r"\sqrt{-x^2-1}", r"i\sqrt{x^2+1}"), ("e^{ix}", r"\cos x + i\sin x"),
    (r"\int_0^1 x^2 dx", r"\frac13"), (r"\binom{n}{k}", r"\binom{n}{n-k}"), (r"x^{2/3}", r"\sqrt[3]{x^2}"),
]  # fmt: skip
NO_IDENTITIES = [
    (r"\frac{(2n)!}{n!}", r"\binom{2n}{n}"), ("(n+1)!", "n! + 1"), (r"\frac{\log a}{\log c}", r"\log \frac{a}{c}"),
    (r"\sqrt{a+b}", r"\sqrt{a}+\sqrt{b}"), (r"\ln x", r"\ln |x|"), (r"\sin n\pi", "0"), ("(a+b)^2", "a^2+b^2"),
    (r"10^{60} + \sqrt2", r"10^{60} + \sqrt3"), ("2^{1009}x + x", "2^{1009}x"), ("2e^{-8t}", "2e^{-9t}"),
    (r"\binom{n}{k}", r"\binom{n}{k+1}"), (r"e^{i\pi/3}", r"e^{-i\pi/3}"), (r"\arctan x", r"\frac{1}{\tan x}"),
    (r"10^{5000}\sqrt2 + 1", r"10^{5000}\sqrt2"), (r"\sqrt[3]{-x}", r"\sqrt[3]{x}"),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "gold"), IDENTITIES)
def test_an_identity_is_equal(answer, gold):
    assert compare(answer, gold)[0]


@pytest.mark.parametrize(("answer", "gold"), NO_IDENTITIES)
def test_what_looks_like_an_identity_is_not(answer, gold):
    assert not compare(answer, gold)[0]


def test_too_much_work_is_no_verdict():
    verdict = judge(r"\boxed{\sum_{k=1}^{10^9} k}", "stop", "5", "expression", RULE)
    assert verdict.outcome == "grader_timeout"
    assert "work" in verdict.rule


def test_a_verdict_says_what_decided():
    verdict = judge(r"\boxed{x = \dfrac{2}{4}}", "stop", "1/2", "expression", RULE)
    assert verdict.outcome == "correct"
    assert verdict.forms == (r"x = \frac{2}{4}", "1/2")
    assert "value of a name" in verdict.rule
    assert "[] for ()" in judge(r"\boxed{[1, 2]}", "stop", "(1, 2)", "expression", RULE).rule
    assert "cut off" in judge(r"\boxed{1}", "length", "1", "integer").rule
