"""The result that a solution states, as text in a normal form: equal texts need no mathematics.

Two ways of writing one result become one (`\\frac12`, `\\dfrac{1}{2}` and `1/2`; `7.41\\%` and `7.41%`); what takes
mathematics to see (0.5 for a half) stays apart.
"""

import re
from functools import lru_cache

_LONGEST_TEXT = 8192
"""Characters at the end of a text that are searched for its result."""
_LONGEST_RESULT = 500
"""Characters of a result at most that are brought into normal form; longer ones are compared as they are."""

_ANSWER_IS = re.compile(r"answer\W{0,4}(?:\s(?:is|are)\b|:|=)\W{0,4}?(?=[^\s*:=])", re.IGNORECASE)
_MATH = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))
_BOX = re.compile(r"\\f?box(?:ed)?\s*\{")
_BRACE = re.compile(r"(?<!\\)[{}]")
_COMMAND = re.compile(r"\\(frac|binom|sqrt)(?:\s*\[[^\]]*\])?(?![a-zA-Z])|([\^_])")
_SINGLE = re.compile(r"\s*(\\[a-zA-Z]+|[^\\}\s])")
_ARGUMENTS = {"frac": 2, "binom": 2, "sqrt": 1, "^": 1, "_": 1}
_SAME = (
    (r"[−–]", "-"),  # noqa: RUF001 - signs as texts have them
    (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
    (r"\\[dt]binom(?![a-zA-Z])", r"\\binom"),
    (r"\\(?:left|right|[bB]igg?[lrm]?)(?![a-zA-Z])", ""),
    (r"\\(?:displaystyle|textstyle|limits|quad|qquad)(?![a-zA-Z])", " "),
    (r"\\lbrace(?![a-zA-Z])", r"\\{"),
    (r"\\rbrace(?![a-zA-Z])", r"\\}"),
    (r"\\leq(?![a-zA-Z])|≤", r"\\le "),
    (r"\\geq(?![a-zA-Z])|≥", r"\\ge "),
    (r"\\neq(?![a-zA-Z])|≠", r"\\ne "),
    (r"\\infin(?![a-zA-Z])|∞", r"\\infty "),
    (r"\\varnothing(?![a-zA-Z])|∅", r"\\emptyset "),
    (r"\\cdot(?![a-zA-Z])|[×·*]", r"\\times "),  # noqa: RUF001
    (r"∪", r"\\cup "),  # noqa: RUF001
    (r"∩", r"\\cap "),
    (r"∈", r"\\in "),
    (r"π", r"\\pi "),
    (r"±", r"\\pm "),
    (r"√", r"\\sqrt "),
    (r"\{,\}", ","),
    (r"\^\s*(?:\\circ(?![a-zA-Z])|\{\s*\\circ\s*\})|\\degree(?![a-zA-Z])", "°"),
    (r"(?<!\\)\\[!,;:> ]|~", " "),
    (r"\\%", "%"),
    (r"\\?\$", ""),
)
_SUBSTITUTIONS = [(re.compile(pattern), into) for pattern, into in _SAME]
_UPRIGHT = re.compile(
    r"\\(?:text(?:bf|it|rm|sf|normal|tt)?|math(?:rm|bf|it|sf|tt)|mbox|operatorname)\s*\{([^{}]*)\}"
)
_FRACTION = re.compile(r"([-+]?)(\d+)/(\d+)")
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
_BARE_POINT = re.compile(r"(?<![\d.])\.(?=\d)")


def same_result(text: str, answer: str) -> bool:
    """Return whether both texts state the same result in the same words, spelling of LaTeX aside.

    >>> same_result(r"so it is $\\boxed{\\dfrac12}$.", "1/2")
    True
    """
    return normal(stated_result(text)) == _right(answer)


@lru_cache(maxsize=65536)
def _right(answer: str) -> str:
    return normal(stated_result(answer))


def stated_result(text: str) -> str:
    """Return what a solution gives as its result: the last box, or what follows `####` or the words `answer is`.

    Without any of them it is the last line.
    """
    text = text[-_LONGEST_TEXT:]
    boxed = _last_boxed(text)
    if boxed is not None:
        return _unwrapped(boxed)
    _, mark, after = text.rpartition("####")
    if not mark:
        found = [*_ANSWER_IS.finditer(text)]
        after = text[found[-1].end() :] if found else ""
    lines = [line for line in (after or text).split("\n") if line.strip()]
    if not lines:
        return ""
    return _unwrapped(lines[0] if after else lines[-1])


def normal(result: str) -> str:
    """Return the one way of writing `result` that stands for all of the same text.

    >>> normal(r"\\left( 1{,}000, \\frac12 \\right)")
    '(1,000,\\\\frac{1}{2})'
    """
    if len(result) > _LONGEST_RESULT:
        return "".join(result.split())
    for pattern, into in _SUBSTITUTIONS:
        result = pattern.sub(into, result)
    result = _UPRIGHT.sub(r" \1 ", result)
    result = "".join(_with_braces(result).split()).rstrip(".,;")
    fraction = _FRACTION.fullmatch(result)
    if fraction:
        result = "{}\\frac{{{}}}{{{}}}".format(*fraction.groups())
    if not any(bracket in result for bracket in "([{;"):
        result = _THOUSANDS.sub(lambda match: match[0].replace(",", ""), result)
    return _BARE_POINT.sub("0.", result)


def _last_boxed(text: str) -> str | None:
    """Return what is in the last `\\boxed{...}` or `\\fbox{...}` that is closed; of nested ones, in the innermost."""
    boxes = {match.end() for match in _BOX.finditer(text)}
    opened: list[int] = []
    last: tuple[int, int] | None = None
    for brace in _BRACE.finditer(text):
        if brace[0] == "{":
            opened.append(brace.end())
        elif opened and (start := opened.pop()) in boxes and (last is None or start > last[0]):
            last = start, brace.start()
    return None if last is None else text[slice(*last)]


def _unwrapped(line: str) -> str:
    """Return a line without emphasis, without the marks of mathematics around it, and without what follows those."""
    line = line.strip().strip("*").strip()
    for opening, closing in _MATH:
        content, mark, rest = line.removeprefix(opening).partition(closing)
        # Something else may follow a sentence's end only: `$x$ and $y$` is one result.
        if (
            line.startswith(opening)
            and mark
            and content.strip()
            and (not rest or rest.startswith((".", " .")))
        ):
            return content
    return line


def _with_braces(text: str) -> str:
    """Return LaTeX with braces around every argument that may stand without: `\\frac12` is `\\frac{1}{2}`."""
    out, place = [], 0
    while command := _COMMAND.search(text, place):
        out.append(text[place : command.end()])
        place = command.end()
        for _ in range(_ARGUMENTS.get(command[1] or command[2], 0)):
            argument = _SINGLE.match(text, place)
            if argument is None:
                break
            start, end = argument.span(1)
            if argument[1] == "{":
                start, end = end, _closing(text, end)
            out.append(f"{{{_with_braces(text[start:end])}}}")
            place = end + (argument[1] == "{")
    return "".join([*out, text[place:]])


def _closing(text: str, place: int) -> int:
    """Return where the group ends that `place` is in."""
    depth = 1
    for brace in _BRACE.finditer(text, place):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return brace.start()
    return len(text)
