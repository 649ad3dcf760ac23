"""Math answers: equal as mathematics, nothing for what cannot be parsed, and a verdict from every thread."""

import json
import threading
import time
from pathlib import Path

import pytest

from headrace.config import DataConfig, MathConfig
from headrace.environments.build import build_environment
from headrace.environments.math import is_equal
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


@pytest.mark.parametrize(("text", "answer"), EQUAL)
def test_results_that_are_equal_as_mathematics_match(text: str, answer: str) -> None:
    assert is_equal(text, answer)


@pytest.mark.parametrize("text", UNEQUAL)
def test_a_wrong_or_unparsable_answer_does_not_match(text: str) -> None:
    assert not is_equal(text, "72")


@pytest.mark.parametrize("text", ENDLESS)
def test_a_result_too_large_to_evaluate_is_refused_at_once(text: str) -> None:
    started = time.perf_counter()
    assert not is_equal(text, "72")
    assert time.perf_counter() - started < 1


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
    results = environment.step(prompts, talks, [True, True, True])
    assert [(r.reward, r.correct) for r in results] == [(1.0, True), (0.0, False), (0.0, False)]


def test_a_right_answer_that_cannot_be_parsed_is_refused_by_line(tmp_path: Path) -> None:
    path = write(tmp_path / "math.jsonl", ["1", "2", "???", "4"])
    with pytest.raises(ConfigError, match=r"line 3: key 'solution' holds nothing that math-verify can parse"):
        build_environment(config(path), DataConfig(train_size=9, validation_size=2), seed=0)


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the file has no rows"):
        build_environment(config(write(tmp_path / "math.jsonl", [])), DataConfig(), seed=0)


def test_bare_latex_is_not_reduced_to_its_last_number() -> None:
    assert not is_equal("10", "2^{10}")
    assert not is_equal("2", r"\frac{\pi}{2}")
