"""Math problems from a file: results compared as text, and with math-verify where the texts differ.

Two ways of writing one result become one text (`\\frac12`, `\\dfrac{1}{2}` and `1/2`; `7.41\\%` and `7.41%`). What
takes mathematics to see (0.5 for a half) is left to math-verify, which runs in the judge process.
"""

import re
from functools import lru_cache

from headrace.config import DataConfig, MathConfig
from headrace.environments.interfaces import StepResult
from headrace.environments.judge_process import NoVerdict, judge_process
from headrace.environments.math_verdicts import verdict
from headrace.environments.prompts import Splits, read_splits
from headrace.environments.single_turn import SingleTurnEnvironment
from headrace.experience.types import Prompt

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

_NAMES = "le ge ne infty times times times emptyset cup cap in pi pm sqrt"
_SYMBOLS = {
    ord(symbol): rf"\{name} "
    for symbol, name in zip("≤≥≠∞×·*∅∪∩∈π±√", _NAMES.split(), strict=True)  # noqa: RUF001 - signs as texts have them
}
_COMMANDS = (
    ("[dtc]frac", r"\\frac"),
    ("[dt]binom", r"\\binom"),
    ("left|right|[bB]igg?[lrm]?", ""),
    ("displaystyle|textstyle|limits|quad|qquad", " "),
    ("lbrace", r"\\{"),
    ("rbrace", r"\\}"),
    ("leq", r"\\le "),
    ("geq", r"\\ge "),
    ("neq", r"\\ne "),
    ("infin", r"\\infty "),
    ("varnothing", r"\\emptyset "),
    ("cdot", r"\\times "),
)
_SPELLINGS = (
    ("[−–]", "-"),  # noqa: RUF001
    *((rf"\\(?:{name})(?![a-zA-Z])", into) for name, into in _COMMANDS),
    (r"\{,\}", ","),
    (r"\^\s*(?:\\circ(?![a-zA-Z])|\{\s*\\circ\s*\})|\\degree(?![a-zA-Z])", "°"),
    (r"(?<!\\)\\[!,;:> ]|~", " "),
    (r"\\%", "%"),
    (r"\\?\$", ""),
    (
        r"\\(?:text(?:bf|it|rm|sf|normal|tt)?|math(?:rm|bf|it|sf|tt)|mbox|operatorname)\s*\{([^{}]*)\}",
        r" \1 ",
    ),
)
_SUBSTITUTIONS = [(re.compile(pattern), into) for pattern, into in _SPELLINGS]
_FRACTION = re.compile(r"([-+]?)(\d+)/(\d+)")
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
_SPACED_THOUSANDS = re.compile(r"(?<!\d)\d{1,3}(?:\s+\d{3})+(?!\d)")
_BLANKS = re.compile(r"(?:(?<=\d)(\s)\s*(?=\.?\d))|\s+")
_BARE_POINT = re.compile(r"(?<![\d.])\.(?=\d)")


def math_environment(
    cfg: MathConfig, data: DataConfig, *, seed: int, splits: Splits | None = None
) -> SingleTurnEnvironment:
    """Build the environment that gives 1 for a completion whose result equals the answer as mathematics, else 0.

    The result is looked for at the end of the text: boxed, after `####` or "the answer is", in LaTeX, or as a plain
    number. A completion that cannot be judged gets 0 and counts in the metric `unscorable`.

    Raises:
        ConfigError: see `read_splits`; also an answer that states no result.
    """
    splits = splits or read_splits(data, cfg, task=cfg.kind)
    splits.check(lambda prompt: _fault_of_answer(prompt, cfg.answer_key))
    return SingleTurnEnvironment(splits.train, splits.validation, math_reward, data, seed=seed)


def math_reward(prompt: Prompt, completion: str, truncated: bool) -> StepResult:
    correct = is_equal(completion, prompt.answer or "")
    metrics = {"unscorable": float(correct is None)}
    said = _normal(_stated_result(completion))[:_LONGEST_RESULT]
    return StepResult(reward=float(bool(correct)), correct=bool(correct), metrics=metrics, answer=said)


def is_equal(text: str, answer: str) -> bool | None:
    """Return whether the result in `text` equals the one in `answer`, as text or as mathematics.

    Works in every thread. None: math-verify came to no verdict within its limit.

    >>> is_equal(r"so we get $\\frac{2}{4}$", "0.5")
    True
    """
    text = text[-_LONGEST_TEXT:]
    if same_result(text, answer):
        return True
    try:
        return bool(judge_process().ask(verdict, text, answer))
    except NoVerdict:
        return None


def same_result(text: str, answer: str) -> bool:
    """Return whether both texts state the same result in the same words, spelling of LaTeX aside.

    >>> same_result(r"so it is $\\boxed{\\dfrac12}$.", "1/2")
    True
    """
    return _normal(_stated_result(text)) == _answer_result(answer)


@lru_cache(maxsize=65536)
def _answer_result(answer: str) -> str:
    return _normal(_stated_result(answer))


def _fault_of_answer(prompt: Prompt, key: str) -> str | None:
    if prompt.answer is None:
        return "there is no answer to compare with; name its column (columns: {answer: ...})"
    fault = _lacks_result(prompt.answer)
    return fault and f"key '{key}' {fault}"


def _lacks_result(answer: str) -> str | None:
    if any(character.isalnum() for character in _answer_result(answer)):
        return None
    return f"states no result ({answer[:40]!r}): neither a letter nor a digit"


def _stated_result(text: str) -> str:
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
    return _unwrapped(lines[0 if after else -1]) if lines else ""


def _normal(result: str) -> str:
    """Return the one way of writing `result` that stands for all of the same text.

    >>> _normal(r"\\left( 1{,}000, \\frac12 \\right)")
    '(1,000,\\\\frac{1}{2})'
    """
    if len(result) > _LONGEST_RESULT:
        return _without_blanks(result)
    result = result.translate(_SYMBOLS)
    for pattern, into in _SUBSTITUTIONS:
        result = pattern.sub(into, result)
    result = _without_blanks(_with_braces(result)).rstrip(".,; ")
    if fraction := _FRACTION.fullmatch(result):
        result = "{}\\frac{{{}}}{{{}}}".format(*fraction.groups())
    if not any(bracket in result for bracket in "([{;"):
        result = _THOUSANDS.sub(lambda match: match[0].replace(",", ""), result)
    return _BARE_POINT.sub("0.", result)


def _without_blanks(result: str) -> str:
    """Return a result without blanks, but with one where two numbers would become one.

    >>> _without_blanks("1 2 x"), _without_blanks("1 234 567")
    ('1 2x', '1234567')
    """
    result = _SPACED_THOUSANDS.sub(lambda match: "".join(match[0].split()), result)
    return _BLANKS.sub(lambda match: " " if match[1] else "", result)


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
        is_whole = mark and (not rest or rest.startswith((".", " .")))
        if line.startswith(opening) and is_whole and content.strip():
            return content
    return line


def _with_braces(text: str) -> str:
    """Return LaTeX with braces around every argument that may stand without: `\\frac12` is `\\frac{1}{2}`."""
    out, place = [], 0
    while command := _COMMAND.search(text, place):
        out.append(text[place : command.end()])
        place = command.end()
        for _ in range(_ARGUMENTS[command[1] or command[2]]):
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
