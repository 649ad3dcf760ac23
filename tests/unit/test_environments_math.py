"""Math answers: equal as mathematics, nothing for what cannot be parsed, and a verdict from every thread."""

import json
import re
import threading
import time
from pathlib import Path

import pytest

from headrace.config import DataConfig, MathConfig
from headrace.environments.build import build_environment
from headrace.environments.math import _lacks_result, is_equal, same_result
from headrace.errors import ConfigError
from headrace.experience.types import Message

EQUAL = [
    ("the answer is 1/2", r"\frac{1}{2}"),
    (r"so \boxed{0.5}.", r"$\frac{1}{2}$"),
    ("72", "3 + 4 is not 72 but here #### 72"),
    ("1,234", "1234"),
    (r"$1 + 2x + x^2$", r"x^2+2x+1"),
    (r"$x = 5$", "5"),
    (r"$\{2, 1\}$", r"\{1,2\}"),
    (r"$(1, 2]$", "(1,2]"),
    (r"$2^{\sqrt{2}}$", r"2^{\sqrt{2}}"),
    (r"$2^{100}$", str(2**100)),
    (r"$10!$", "3628800"),
    ("1024", "2^{10}"),
    (r"$3\sqrt{2}$", r"3\sqrt{2}"),
    ("7", "7 apples"),
    ("$7", "She pays 3 + 4 dollars.\n#### 7"),
    ("5", "x=5"),
    (r"$e^{1000x}$", r"e^{1000x}"),
    (r"$\begin{pmatrix}1\\2\end{pmatrix}$", r"\begin{pmatrix}1\\2\end{pmatrix}"),
]
UNEQUAL = ["73", "7", "2", "no idea", "", "$($((", r"\frac{1}{0}", "1" * 20_000, "nan", "\x00", "{" * 500]
ENDLESS = [
    "$9^{9^{9^{9}}}$",
    "2**2**2**2**2**2",
    r"\boxed{\frac{10^{10^{9}}}{3}}",
    r"\boxed{100000000!}",
    r"$\sum_{k=1}^{100000000} k^k$",
    r"$x^{9^{9^{9}}}$",
    r"$((10^{1000})^{1000})^{1000}$",
    r"$\begin{pmatrix}9^{9^{9}}\end{pmatrix}$",
]
# Right answers as data sets write them, each to be recognised where it is given word for word.
FORMS = r"""
\frac12 | \frac{1}{2} | \dfrac{3}{4} | \tfrac34 | -\frac{5}{7} | 1/2 | .5 | \frac{a}{b} | 3\frac{1}{2} | 2\tfrac{3}{5}
7.41\% | 50% | 33\frac{1}{3}\% | 5\text{ cm} | 12\ \text{inches} | 10\text{ m}^2 | \$18.90 | \$1,250
1,234,567 | 10{,}000 | 12\,345 | 90^\circ | 90^{\circ} | 45° | 0.\overline{3} | 2516_8 | 12:30 \text{ p.m.}
3e8 | 1.2\times10^{-3} | 6.02 \times 10^{23} | 1.5\cdot 10^4 | \text{Tuesday} | \text{(C)} | \textbf{(B)} | (A) | C
\mathrm{even} | yes | 1\text{ and }2 | -1 \text{ or } 3 | 1, 2, 3 | [0,1) | (-\infty, 3] | (-\infty,2)\cup(2,\infty)
\left(3,\frac{\pi}{2}\right) | \left[-2,7\right] | \{1,2,3\} | \left\{1,2\right\} | \emptyset | \sqrt3 | 2\sqrt{5}
\sqrt[3]{2} | x^2+1 | x=5 | x \in [2,3] | x\le 3 | 2+3i | \pm 3 | 1:2 | 3 : 4 | \begin{pmatrix}1\\2\end{pmatrix}
\boxed{42} | \pi | e^{i\pi} | \log_2 3 | \overline{AB} | 5! | \binom{5}{2} | a_n = 2n
"""
SAME = [
    (r"\frac12", "1/2"),
    (r"\dfrac{1}{2}", r"\frac12"),
    (r"\frac{1}{\frac12}", r"\frac1{\frac{1}{2}}"),
    (r"7.41\%", "7.41%"),
    (r"\sqrt2", r"\sqrt{2}"),
    ("x^2", "x^{2}"),
    (r"10{,}000", "10,000"),
    (r"12\,345", "12345"),
    ("1 234 567", "1,234,567"),
    ("3.141 592", "3.141592"),
    (r"1,\!000", "1000"),
    ("1  2", "1 2"),
    ("x  y = 2 x", "xy=2x"),
    ("12 .", "12"),
    (r"90^\circ", "90°"),
    (r"\text{even}", "even"),
    (r"\{1, 2\}", r"\left\{1,2\right\}"),
    (r"1.2\times 10^{3}", "1.2·10^3"),
    (r"\boxed{\boxed{5}}", "5"),
    (r"\$18.90", "18.90"),
    ("$(1,2)$ or $(3,4)$", "(1,2) or (3,4)"),
    ("**Answer:** C.", "C"),
    ("The final answer is $C$. I hope it is correct.", r"\text{C}"),
    ("It is \\boxed{A}, or rather \\boxed{B}.", "B"),
    ("The answer is A.\nThe answer is B.", "B"),
    ("Let us see.\n#### even\n", "even"),
]
APART = [
    ("[0,1)", "(0,1)"),
    ("x-7", "7"),
    ("The answer is not C", "C"),
    ("A or B", "A"),
    (r"\boxed{A} B", "B"),
    ("(1,234)", "1234"),
    (r"\boxed{1 2}", "12"),
    ("5 5", "55"),
    ("3 1/2", "31/2"),
    ("5 .5", "5.5"),
    ("1 2 3", "123"),
    (r"12\ 34", "1234"),
    ("1 2" + " x" * 300, "12" + " x" * 300),
]
HOSTILE = [
    "{" * 8000,
    r"\boxed{" * 2000,
    "^{" * 4000,
    "^" * 8000,
    r"\frac" * 2000,
    "answer is " * 900,
    "$" * 8000,
    "\n" * 8000,
]


@pytest.mark.parametrize(("text", "answer"), EQUAL)
def test_results_that_are_equal_as_mathematics_match(text: str, answer: str) -> None:
    assert is_equal(text, answer)


@pytest.mark.parametrize("text", UNEQUAL)
def test_a_wrong_or_unparsable_answer_does_not_match(text: str) -> None:
    assert not is_equal(text, "72")


@pytest.mark.parametrize("answer", re.split(r" \| |\n", FORMS.strip()))
def test_a_right_answer_given_word_for_word_matches_as_text(answer: str) -> None:
    for text in (
        answer,
        rf"so \boxed{{{answer}}}.",
        f"The answer is ${answer}$.",
        f"Answer: {answer}",
        f"Thus\n{answer}",
    ):
        assert same_result(text, answer), text
    assert not _lacks_result(answer)


@pytest.mark.parametrize(("text", "answer"), SAME)
def test_one_result_spelt_in_two_ways_matches_as_text(text: str, answer: str) -> None:
    assert same_result(text, answer)
    assert same_result(answer, text)


@pytest.mark.parametrize(("text", "answer"), APART)
def test_results_that_differ_do_not_match_as_text(text: str, answer: str) -> None:
    assert not same_result(text, answer)


@pytest.mark.parametrize("text", HOSTILE)
def test_a_hostile_text_is_compared_at_once(text: str) -> None:
    started = time.perf_counter()
    assert not same_result(text, "5")
    assert time.perf_counter() - started < 0.5


def test_bare_latex_is_judged_as_mathematics() -> None:
    assert is_equal(r"\dfrac{2}{4}", r"\frac{1}{2}")
    assert is_equal("x^2+2x+1", r"(x+1)^2")


@pytest.mark.parametrize("text", ENDLESS)
def test_a_result_too_large_to_evaluate_is_refused_at_once(text: str) -> None:
    is_equal("71", "72")  # the judge process is there
    started = time.perf_counter()
    assert not is_equal(text, "72")
    assert time.perf_counter() - started < 1


def test_an_expansion_without_end_is_no_verdict_outside_the_main_thread() -> None:
    verdicts: list[bool | None] = []
    thread = threading.Thread(
        target=lambda: verdicts.append(is_equal(r"\boxed{(x+y+z)^{5000}}", "5")), daemon=True
    )
    thread.start()
    thread.join(timeout=60)
    assert verdicts == [None]


def test_verdicts_are_the_same_outside_the_main_thread() -> None:
    verdicts: list[bool] = []

    def judge() -> None:
        verdicts.extend(is_equal(text, answer) for text, answer in EQUAL)
        verdicts.extend(not is_equal(text, "72") for text in [*UNEQUAL, *ENDLESS])

    thread = threading.Thread(target=judge, daemon=True)
    thread.start()
    thread.join(timeout=30)
    assert not thread.is_alive()
    assert verdicts == [True] * (len(EQUAL) + len(UNEQUAL) + len(ENDLESS))


def write(path: Path, answers: list[str]) -> Path:
    rows = [{"problem": f"p{i}", "solution": answer} for i, answer in enumerate(answers)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def config(path: Path) -> MathConfig:
    return MathConfig(path=str(path), question_key="problem", answer_key="solution")


def test_a_file_of_problems_gives_prompts_and_rewards(tmp_path: Path) -> None:
    path = write(tmp_path / "math.jsonl", [r"\frac{1}{2}"] * 5)
    environment = build_environment(config(path), DataConfig(train_size=9, validation_size=2), seed=0)
    prompts = environment.prompts("train")
    assert len(prompts) == 3
    assert prompts[0].answer == r"\frac{1}{2}"
    talks = [(*p.messages, Message("assistant", t)) for p, t in zip(prompts, ["0.5", "2", "half"])]
    results = environment.step(prompts, talks, [False, False, False])
    assert [(r.reward, r.correct) for r in results] == [(1.0, True), (0.0, False), (0.0, False)]
    assert [r.metrics for r in results] == [{"unscorable": 0.0}] * 3


def test_a_right_answer_without_a_result_is_refused_by_line(tmp_path: Path) -> None:
    path = write(tmp_path / "math.jsonl", ["1", "2", "???", "4"])
    with pytest.raises(ConfigError, match=r"line 3: key 'solution' states no result \('\?\?\?'\)"):
        build_environment(config(path), DataConfig(train_size=9, validation_size=2), seed=0)


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the file has no rows"):
        build_environment(config(write(tmp_path / "math.jsonl", [])), DataConfig(), seed=0)


def test_bare_latex_is_not_reduced_to_its_last_number() -> None:
    assert not is_equal("10", "2^{10}")
    assert not is_equal("2", r"\frac{\pi}{2}")
