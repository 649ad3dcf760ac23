"""Math problems from a file, their answers compared with math-verify."""

import math
import threading
from functools import lru_cache
from typing import Any

import sympy
from math_verify import parse, verify

from headrace.config import DataConfig, MathConfig
from headrace.environments.dataset import DatasetEnvironment

_TIMEOUT_S = 3
_SOLUTION_MARKS = ("$", r"\boxed", r"\(", r"\[", "####", "\n")
_LONGEST_TEXT = 8192
"""Characters at the end of an answer that are searched for its result."""
_MOST_DIGITS = 10_000
"""Digits of the largest number that a result may write out."""


def math_environment(cfg: MathConfig, data: DataConfig, *, seed: int) -> DatasetEnvironment:
    """Build the environment that gives 1 for an answer equal to the right one as mathematics, else 0.

    The result is looked for at the end of the text: boxed, in LaTeX, or as a plain number. An answer
    that cannot be parsed gets 0.

    Raises:
        ConfigError: see `DatasetEnvironment`; also a right answer that math-verify cannot parse.
    """
    return DatasetEnvironment(cfg, data, judge=is_equal, check_answer=_unparsable, seed=seed)


def is_equal(text: str, answer: str) -> bool:
    """Return whether the result in `text` equals the one in `answer`, as mathematics.

    Works in every thread. A result that takes unbounded work to evaluate (a tower of powers, a huge
    factorial, an unevaluated sum or integral) is never equal, so that verdicts do not hang on a clock;
    in the main thread a time-out guards what is left.

    >>> is_equal(r"so we get $\\frac{2}{4}$", "0.5")
    True
    """
    found = [result for result in _parse(text[-_LONGEST_TEXT:]) if _is_tractable(result)]
    return bool(found) and bool(verify(list(_right_results(answer)), found, timeout_seconds=_timeout_s()))


def _unparsable(answer: str) -> str | None:
    return None if _right_results(answer) else f"holds nothing that math-verify can parse ({answer[:40]!r})"


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
    found = list(parse(text, parsing_timeout=_timeout_s()))
    return found if any(not isinstance(result, str) for result in found) else []


def _timeout_s() -> int | None:
    # math-verify keeps time with SIGALRM, which only the main thread can set.
    return _TIMEOUT_S if threading.current_thread() is threading.main_thread() else None


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
