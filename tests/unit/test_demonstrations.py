"""Demonstrations: right answers and copies, drawn by seed."""

import pytest

from headrace.algorithms.warm_start import demonstrations
from headrace.errors import ConfigError
from headrace.experience.types import Message, Prompt

PROMPTS = [
    Prompt(f"w{i}", (Message("system", "spell"), Message("user", word)), answer=word[::-1])
    for i, word in enumerate(["cat", "dog", "horse"])
]


def test_without_copies_every_text_is_the_right_answer() -> None:
    drawn = demonstrations(PROMPTS, copy_fraction=0.0, seed=0, count=200)
    assert len(drawn) == 200
    assert all(text == prompt.answer for prompt, text in drawn)
    assert {prompt.uid for prompt, _ in drawn} == {"w0", "w1", "w2"}


def test_with_copies_only_every_text_is_the_last_message_of_its_prompt() -> None:
    drawn = demonstrations(PROMPTS, copy_fraction=1.0, seed=0, count=50)
    assert len(drawn) == 50
    assert all(text == prompt.messages[-1].content for prompt, text in drawn)


def test_the_copies_have_their_share_and_do_not_depend_on_the_prompt() -> None:
    drawn = demonstrations(PROMPTS, copy_fraction=0.3, seed=1, count=6000)
    for uid in ("w0", "w1", "w2"):
        copies = [text != prompt.answer for prompt, text in drawn if prompt.uid == uid]
        assert sum(copies) / len(copies) == pytest.approx(0.3, abs=0.05)


def test_the_seed_decides_the_draw() -> None:
    first, again, other = (demonstrations(PROMPTS, copy_fraction=0.5, seed=s, count=64) for s in (4, 4, 5))
    assert first == again
    assert first != other


def test_a_prompt_without_an_answer_is_named() -> None:
    prompts = [Prompt("riddle", (Message("user", "?"),))]
    with pytest.raises(ConfigError, match=r"'riddle' has no single right answer.*warm_start.enabled=false"):
        demonstrations(prompts, copy_fraction=0.0, seed=0, count=1)


def test_no_prompts_are_refused() -> None:
    with pytest.raises(ConfigError, match="needs training prompts"):
        demonstrations([], copy_fraction=0.0, seed=0, count=1)
