r"""Equality of two expressions by their values at points, where the names have numbers.

Two forms are equal if they agree at every tried point of their common domain: `\ln\frac{x}{y}` and `\ln x - \ln y`
where both names are positive. The points are always the same. By Schwartz and Zippel two other polynomials of degree d,
made without a look at the points, agree with a probability of at most d/9,972 at a point whose numbers are drawn from
9,972, and twelve such points lie in the domain of every polynomial. Of other forms nothing is proven: two that differ
nowhere but between the points pass for equal.

Fractions are exact; other numbers have 50 digits, and more where the forms disagree or a part is large. The work of a
pair is counted in parts of forms, so that no verdict depends on a machine's speed.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from random import Random
from typing import Any

_DIGITS = (50, 200, 800)
_BITS_PER_DIGIT = 3.33
_MOST_BITS = 700_000  # of an exact number
_MOST_ARGUMENT = 10**6  # of a function that grows
_MOST_WORK = 100_000  # parts of forms at 50 digits, about 2 s
_TRIES, _FEWEST = 18, 3
_PRIME = 9973
# Functions of which a large argument makes no large value.
_FLAT = {"log", "Abs", "sign", "floor", "ceiling", "Max", "Min", "sin", "cos", "tan", "cot", "atan", "re", "im", "Mod"}


class NoValue(Exception):
    """A form has no values that can be calculated, as an integral has none."""


class TooLarge(Exception):
    """A part of a form has too many digits to be calculated exactly."""


class TooMuchWork(BaseException):
    """A pair needs more work than any pair may. No `Exception`: those say that sympy cannot read it, and decide."""


class _Undefined(Exception):
    """A form has no value at a point, or no real one where only real ones count."""


class Values:
    """The values of forms at points; counts the work of all its calls.

    `has_i` says that the name i is the imaginary unit.
    """

    def __init__(self, *, has_i: bool) -> None:
        self._has_i = has_i
        self._work = 0
        self._too_large: TooLarge | None = None  # the last one met; raised if the values do not decide
        self._size = 0.0
        self._digits = _DIGITS[0]
        self._is_real = True  # only real values count, and a complex one is undefined

    def equal(self, left: Any, right: Any, slack: float) -> bool:
        """Whether two forms agree within `slack` times the right one's size, or `slack` where its size is above 1.

        Raises NoValue or TooLarge if they agree at too few points to tell.
        """
        if left == right:
            return True
        names = self._names(left, right)
        fewest = _FEWEST if names else 1
        for only_real in (True, False):  # where no real point lies in both domains, complex points tell
            self._is_real = only_real and not self._has_i  # with i, real points have complex values
            agreements = 0
            for point in _points(names, is_real=only_real):
                # True: the values agree. False: they differ. None: the point says nothing.
                agree = self._agree(left, right, point, slack)
                if agree is False:
                    return False
                if agree:
                    agreements += 1
            if agreements >= fewest:
                return True
        raise self._too_large or NoValue("too few points of a common domain")

    def ratio(self, left: Any, right: Any) -> float | None:
        """The number that the left form is of the right one at every point, or None."""
        from mpmath import workdps
        from sympy import Mul

        self._is_real = not self._has_i
        for point in _points(self._names(left, right), is_real=True):
            above = self._at(left, point, _DIGITS[-1])
            below = self._at(right, point, _DIGITS[-1])
            if above and below:  # else a form is undefined or zero here
                with workdps(_DIGITS[-1]):
                    ratio = above / below
                    product = Mul(ratio, right, evaluate=False)  # evaluated, it could be of any size
                return float(ratio.real) if self.equal(left, product, 1e-18) else None
        return None

    def check(self, form: Any) -> None:
        """Raise TooLarge if the ends of an interval, or the members of a set, are too large."""
        from sympy import Expr

        self._is_real = True
        for part in form.args:
            if isinstance(part, Expr):
                # Calculated at one point only to see its size: `_at` notes what is too large.
                self._at(part, next(_points(self._names(part), is_real=True)), _DIGITS[0])
            else:
                self.check(part)
        if self._too_large:
            raise self._too_large

    def _names(self, *forms: Any) -> list[str]:
        """The names in some forms, also those of functions, without the imaginary unit."""
        from sympy.core.function import AppliedUndef

        names = set[str]()
        for form in forms:
            names.update(map(str, form.free_symbols | form.atoms(AppliedUndef)))
        if self._has_i:
            names.discard("i")
        return sorted(names)

    def _agree(self, left: Any, right: Any, point: Mapping[str, Any], slack: float) -> bool | None:
        """Whether two forms agree at a point; None outside their common domain, and where the digits do not suffice."""
        from mpmath import mpf
        from sympy import Abs

        for digits in _DIGITS:
            left_value = self._at(left, point, digits)
            right_value = self._at(right, point, digits)
            if left_value is None or right_value is None:
                # \ln|x| has values where \ln x has none: then a point without one of the values tells them apart.
                only_one_has_abs = self._is_real and left.has(Abs) != right.has(Abs)
                only_one_is_undefined = left_value is not right_value  # else both are None
                return False if only_one_has_abs and only_one_is_undefined else None
            # Below 10 ** (25 - digits) lies the noise of the calculation. The `_size` digits of the largest part may
            # cancel, so 30 must be left beside them.
            least = max(slack * min(1, abs(right_value)), mpf(10) ** (25 - digits))
            if self._size < digits - 30 and abs(left_value - right_value) <= least:
                return True
        # With the most digits.
        if self._size < digits - 30:
            return False
        self._too_large = TooLarge(f"more than {digits} digits")
        return None

    def _at(self, form: Any, point: Mapping[str, Any], digits: int) -> Any:
        """The value in so many digits, or None where the form has none. Raises NoValue and TooMuchWork.

        `_part` keeps in `_size` the digits before the point of the largest part since the number of digits changed.
        """
        from mpmath import convert, isfinite, workdps
        from mpmath.libmp import NoConvergence

        if digits != self._digits:
            self._digits, self._size = digits, 0.0
        with workdps(digits):
            try:
                value = convert(self._part(form, point))
            except TooLarge as error:
                self._too_large = error
                return None
            except (_Undefined, ZeroDivisionError, ValueError, NoConvergence, NotImplementedError):
                return None
            return value if isfinite(value) else None

    def _part(self, form: Any, point: Mapping[str, Any]) -> Any:
        """The value of a part of a form: a Fraction, or a number of mpmath. Counts its work and its size."""
        self._work += self._digits // _DIGITS[0]  # the more digits, the more a part costs
        if self._work > _MOST_WORK:
            raise TooMuchWork(f"more than {_MOST_WORK:,} parts")
        value = self._calculated(form, point)
        from mpmath import mpc

        if isinstance(value, mpc) and value.imag == 0:
            value = value.real
        if isinstance(value, mpc) and self._is_real:
            raise _Undefined
        if value:
            bits = _bits(value)  # below 0 for a small number, which takes no digits away
            if form.func.__name__ == "exp":
                bits = abs(bits)  # a small exp has a large exponent, whose digits it lacks
            if math.isfinite(bits):
                self._size = max(self._size, bits / _BITS_PER_DIGIT)
        return value

    def _calculated(self, form: Any, point: Mapping[str, Any]) -> Any:
        """The value of a form by its kind; raises NoValue for a kind without one, _Undefined without one here."""
        import mpmath
        from sympy.core.function import AppliedUndef

        name = form.func.__name__
        if form.is_Rational:
            return Fraction(int(form.p), int(form.q))
        # Only a name is turned into a text: to write a sum, sympy would calculate its parts and put them in order.
        if form.is_Symbol or isinstance(form, AppliedUndef):
            return point.get(str(form), mpmath.mpc(0, 1))  # only i, the imaginary unit, has no number
        if name == "ImaginaryUnit":
            return mpmath.mpc(0, 1)
        if form.is_NumberSymbol or form.is_Float:
            return mpmath.mp.make_mpf(form._as_mpf_val(mpmath.mp.prec))
        if name in ("Sum", "Product"):
            return self._repeated(form, point, is_sum=name == "Sum")
        if form.is_Number:
            raise _Undefined  # an infinite one
        if form.is_Atom or not (form.is_Add or form.is_Mul or form.is_Pow or form.is_Function):
            raise NoValue(name)
        values = [self._part(part, point) for part in form.args]
        if form.is_Add:
            return sum(values)
        if form.is_Mul:
            return math.prod(values)
        return self._power(form, *values) if form.is_Pow else self._function(name, values)

    def _repeated(self, form: Any, point: Mapping[str, Any], *, is_sum: bool) -> Any:
        """The value of a sum or a product over one name with whole ends."""
        # sympy's Sum(term, (name, low, high)); one without both ends has no value.
        term, (name, *ends), *other_names = form.args
        if other_names or len(ends) != 2:
            raise NoValue("sums over several names")
        low = self._part(ends[0], point)
        high = self._part(ends[1], point)
        if not _is_whole(low) or not _is_whole(high) or high < low - 1:  # high = low - 1: an empty sum
            raise _Undefined
        total: Any = Fraction(0 if is_sum else 1)
        for number in range(int(low), int(high) + 1):
            value = self._part(term, {**point, str(name): Fraction(number)})
            total = total + value if is_sum else total * value
        return total

    def _power(self, form: Any, base: Any, exponent: Any) -> Any:
        """The value of a power; real where the form is real at real points, as the cube root of -8 is -2."""
        import mpmath

        if not base:
            if exponent.real < 0:
                raise _Undefined
            return Fraction(1 if exponent == 0 else 0)
        # The base's bits times the exponent are about those of the power.
        if abs(exponent) * max(abs(_bits(base)), 1) > _MOST_BITS:
            raise TooLarge("a power")
        if isinstance(base, Fraction) and _is_whole(exponent):
            return base ** int(exponent)
        number = mpmath.convert(base)
        if _is_whole(exponent):
            return number ** int(exponent)
        is_negative = self._is_real and not isinstance(number, mpmath.mpc) and number < 0
        is_odd_root = isinstance(exponent, Fraction) and exponent.denominator % 2 == 1
        if is_negative and is_odd_root and not form.exp.free_symbols:
            # As in schools, and not the principal root: (-8)^{1/3} is -2. An exponent with names is no root, and it may
            # only by chance be an odd one at a point.
            sign = (-1) ** exponent.numerator
            return sign * (-number) ** mpmath.convert(exponent)
        return number ** mpmath.convert(exponent)

    def _function(self, name: str, values: list[Any]) -> Any:
        """The value of sympy's function of this name, with the values of its arguments; exact where it can be."""
        import mpmath
        from sympy.utilities.lambdify import MPMATH_TRANSLATIONS

        if name not in _FLAT and any(abs(value) > _MOST_ARGUMENT for value in values):
            raise TooLarge(name)
        are_whole = all(map(_is_whole, values))
        if name in ("factorial", "binomial") and are_whole and min(values) >= 0:
            if values[0] > _MOST_BITS // 16:  # n! has at most n * log2(n) bits: below 16 each, up to n = 43,750
                raise TooLarge(name)
            numbers = map(int, values)
            return Fraction(math.factorial(*numbers) if name == "factorial" else math.comb(*numbers))
        if name == "Mod":
            if not are_whole:
                raise _Undefined
            return values[0] % values[1]
        if name in ("floor", "ceiling") and isinstance(values[0], Fraction):
            return Fraction(math.floor(values[0]) if name == "floor" else math.ceil(values[0]))
        functions = {"Max": max, "Min": min, "factorial2": mpmath.fac2}
        calculate: Any = functions.get(name) or getattr(mpmath, MPMATH_TRANSLATIONS.get(name, name), None)
        if calculate is None:
            raise NoValue(name)
        return calculate(*map(mpmath.convert, values))


def _is_whole(value: Any) -> bool:
    return isinstance(value, Fraction) and value.denominator == 1


def _bits(value: Any) -> float:
    """The bits of a fraction's longer part, or the binary exponent of a number of mpmath."""
    if isinstance(value, Fraction):
        return max(value.numerator.bit_length(), value.denominator.bit_length())
    from mpmath import mag

    return float(mag(value))


def _points(names: Sequence[str], *, is_real: bool) -> Iterator[dict[str, Any]]:
    """Numbers for the names: small and large, whole and broken, of both signs, and complex ones."""
    from mpmath import mpc

    random = Random(0)

    def broken() -> Fraction:
        return Fraction(random.randrange(1, _PRIME), _PRIME)

    def signed() -> Fraction:
        """Draw a number between -1 and 1."""
        return 2 * broken() - 1

    tries = _TRIES if names else 1  # without names every point is the same
    for count in range(tries):
        # In turn small whole numbers, positive fractions up to 100, and fractions of both signs. Without `is_real`
        # every second point is complex instead.
        if not is_real and count % 2:
            yield {name: mpc(float(signed()), float(signed())) for name in names}
        elif count % 3 == 0:
            first = {name: Fraction(count // 3 + 1) for name in names[:1]}
            yield first | {name: Fraction(random.randint(1, 8)) for name in names[1:]}
        elif count % 3 == 1:
            yield {name: broken() * 10 ** (count // 8) for name in names}
        else:
            yield {name: signed() * (count // 4 + 1) for name in names}
