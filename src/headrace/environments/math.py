"""Math problems from a file, their answers compared as text, and with math-verify where the texts differ."""

from headrace.config import DataConfig, MathConfig
from headrace.environments.dataset import DatasetEnvironment
from headrace.environments.judge_process import NoVerdict, judge_process
from headrace.environments.math_text import normal, same_result, stated_result
from headrace.environments.math_verdicts import verdict

_LONGEST_TEXT = 8192
"""Characters at the end of an answer that are searched for its result."""


def math_environment(cfg: MathConfig, data: DataConfig, *, seed: int) -> DatasetEnvironment:
    """Build the environment that gives 1 for an answer equal to the right one as mathematics, else 0.

    The result is looked for at the end of the text: boxed, after `####` or "the answer is", in LaTeX, or as a plain
    number. An answer that cannot be judged gets 0 and counts in the metric `unscorable`.

    Raises:
        ConfigError: see `DatasetEnvironment`; also a right answer that states no result.
    """
    return DatasetEnvironment(cfg, data, judge=is_equal, check_answer=_resultless, seed=seed, may_fail=True)


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


def _resultless(answer: str) -> str | None:
    result = normal(stated_result(answer))
    if any(character.isalnum() for character in result):
        return None
    return f"states no result ({answer[:40]!r}): neither a letter nor a digit"
