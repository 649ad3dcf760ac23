"""Verdicts of math-verify on whether two texts give the same result; runs in the judge process."""

import math
import re
from functools import lru_cache
from typing import Any

import sympy
from math_verify import parse, verify

_SOLUTION_MARKS = ("$", r"\boxed", r"\(", r"\[", "####", "\n")
_LONGEST_BARE = 200
_WORD = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{3,}")
_MOST_DIGITS = 10_000
"""Digits of the largest number that a result may write out."""


def verdict(text: str, answer: str) -> bool:
    """Return whether the results in `text` and `answer` are equal as mathematics.

    A result that takes unbounded work to evaluate (a tower of powers, a huge factorial, an unevaluated sum or
    integral) is never equal.
    """
    right = list(_right_results(answer))
    texts = [text, f"${text}$"] if _is_bare(text) else [text]
    return any(
        bool(verify(right, found, timeout_seconds=None))
        for found in ([r for r in _parse(t) if _is_tractable(r)] for t in texts)
        if right and found
    )


def _is_bare(text: str) -> bool:
    """Return whether a text is mathematics without marks around it, and not prose."""
    marked = any(mark in text for mark in _SOLUTION_MARKS)
    return not marked and len(text) <= _LONGEST_BARE and _WORD.search(text) is None


@lru_cache(maxsize=65536)
def _right_results(answer: str) -> tuple[Any, ...]:
    """Return what a right answer means: a solution with marks around or before its result, or bare LaTeX.

    Without dollar signs around it, only the last plain number of bare LaTeX would be found: 2 in `2^{10}`.
    """
    if any(mark in answer for mark in _SOLUTION_MARKS):
        return tuple(_parse(answer))
    return tuple(_parse(f"${answer}$") or _parse(answer))


def _parse(text: str) -> list[Any]:
    """Return what math-verify finds: expressions, and their source text; empty if it is text alone."""
    found = list(parse(text, parsing_timeout=None))
    return found if any(not isinstance(result, str) for result in found) else []


def _is_tractable(result: Any) -> bool:
    if isinstance(result, sympy.MatrixBase):
        return all(map(_is_tractable, result.flat()))
    return not isinstance(result, sympy.Basic) or _digits(result) <= _MOST_DIGITS


def _digits(expression: Any) -> float:
    """Return an upper bound on the decimal digits of any number that evaluating `expression` can make.

    Symbols count as 1, which has none. Sums, products, integrals and limits have no bound.
    """
    if isinstance(expression, sympy.Sum | sympy.Product | sympy.Integral | sympy.Limit):
        return math.inf
    if isinstance(expression, sympy.Rational):
        return max(int(expression.p).bit_length(), int(expression.q).bit_length()) * math.log10(2)
    if not expression.args:
        return 0.0 if isinstance(expression, sympy.Symbol) else 1.0
    digits = [_digits(arg) for arg in expression.args]
    if isinstance(expression, sympy.Pow):
        return max(digits[0], 1.0) * _power_of_ten(digits[1])
    if isinstance(expression, sympy.factorial):
        return _power_of_ten(digits[0]) * (digits[0] + 1)
    return sum(digits) if expression.is_Mul else max(digits) + math.log10(len(digits))


def _power_of_ten(exponent: float) -> float:
    return 10.0**exponent if exponent < 300 else math.inf
