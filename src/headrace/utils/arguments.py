"""Arguments of calls, checked: lists that are no texts, and sizes that are whole numbers; else a SchemaError."""

from collections.abc import Sequence
from typing import TypeVar

from headrace.errors import HeadraceError, SchemaError

T = TypeVar("T")
_SHOWN = 8


def names_list(what: str, names: Sequence[T]) -> Sequence[T]:
    """Return `names`, or other values; refuses a text, which would be taken for a list of its letters."""
    if isinstance(names, str | bytes):
        raise SchemaError(f"{what}={names!r} is a text; expected a list of names, for example [{names!r}]")
    return names


def shown(names: Sequence[str]) -> str:
    """Return names for a message, the first few of many: "'a', 'b' and 3 more"."""
    text = ", ".join(f"'{name}'" for name in names[:_SHOWN])
    return text if len(names) <= _SHOWN else f"{text} and {len(names) - _SHOWN} more"


def texts(what: str, names: Sequence[str]) -> list[str]:
    """Return `names` as a list of their own, each as text.

    Refuses a text in place of a list, and a text that no message or file can carry.
    """
    own = list(names_list(what, names))
    own = own if set(map(type, own)) <= {str} else list(map(str, own))
    if not "".join(own).isascii() and (halves := [name for name in own if not is_utf8(name)]):
        raise SchemaError(
            f"{what}: {halves[0]!r} is no UTF-8 text, since it holds half a surrogate pair; expected other letters"
        )
    return own


def is_utf8(text: str) -> bool:
    """Return whether UTF-8 can hold a text; it cannot hold half a surrogate pair, as of a name in another encoding."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def whole_numbers(what: str, expected: str, values: Sequence[int]) -> list[int]:
    """Return `values` as integers of their own; refuses one that is not whole, by its value."""
    if set(map(type, values)) <= {int}:
        return list(values)
    numbers: list[int] = []
    for value in values:
        number = _as_integer(value)
        if number is None:
            raise SchemaError(f"{what} {value!r}; expected {expected}")
        numbers.append(number)
    return numbers


def whole_number(name: str, value: int, least: int, error: type[HeadraceError] = SchemaError) -> int:
    """Return the value of an argument as an integer; raises `error` if it is not whole, or less than `least`."""
    if type(value) is int and value >= least:
        return value
    number = None if isinstance(value, bool) else _as_integer(value)
    if number is None or number < least:
        raise error(f"{name}={value!r}; expected a whole number, {least} or more")
    return number


def _as_integer(value: int) -> int | None:
    try:
        number = int(value)
        return number if number == value else None
    except (TypeError, ValueError, OverflowError, RuntimeError):  # the last for a tensor of several elements
        return None
