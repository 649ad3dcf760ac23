"""Sums as text, computed by a few operators and nothing else; runs in the judge process, within its limits."""

import ast
import operator
from collections.abc import Callable
from typing import Any

_LONGEST = 200
_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


def compute(text: str) -> str:
    """Return the value of a sum of numbers, `+ - * / // % **` and brackets.

    >>> compute("(12 + 8) * 3 / 4"), compute("2 ** 0.5")
    ('15', '1.41421356237')

    Raises:
        ValueError: another text, or one of more than 200 characters.
        ArithmeticError: a division by 0, or a number that is too large.
    """
    if len(text) > _LONGEST:
        raise ValueError(f"{len(text)} characters; at most {_LONGEST}")
    value = _value(ast.parse(text.strip(), mode="eval").body)
    if isinstance(value, complex):
        raise ValueError("no real number")
    return f"{value:.12g}" if isinstance(value, float) else str(value)


def _value(node: ast.AST) -> Any:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.operand))
    raise ValueError("no sum of numbers")
