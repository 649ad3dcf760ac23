"""What a warm start refuses before a run begins, answers that cannot be learned from, and what ends it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.algorithms.grpo import Session
from headrace.algorithms.run import build_session
from headrace.algorithms.warm_start import check_demonstrations, warm_start
from headrace.config import WarmStartConfig
from headrace.errors import ConfigError, HeadraceError
from headrace.experience.types import Message, Prompt
from headrace.models.tokenizers import build_character_tokenizer
from tiny_recipe import tiny_recipe


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    folder: Path = tmp_path_factory.mktemp("run")
    warm = {"enabled": True, "steps": 3, "batch_size": 16}
    session = build_session(tiny_recipe(folder, data_plane={"enabled": False}, warm_start=warm))
    yield session
    session.close()


def steps_done(session: Session, prompts: Any, on_non_finite: Any = "stop") -> int:
    return warm_start(
        session.policy,
        prompts,
        session.recipe.warm_start,
        seed=0,
        first=0,
        on_non_finite=on_non_finite,
        filtered=False,
        on_progress=lambda *_: None,
        should_stop=lambda: False,
    )


def test_a_loss_that_is_not_finite_stops_the_warm_start_by_step_and_prompt(session: Session) -> None:
    prompts = session.environment.prompts("train")
    assert steps_done(session, prompts) == 3
    weight = dict(session.policy.named_weights())["model.norm.weight"]
    with torch.no_grad():
        weight.fill_(torch.nan)
    with pytest.raises(
        HeadraceError, match=rf"warm-start step 1, update 1 of 1: loss nan.*at fault: '{prompts[0].uid[:4]}"
    ):
        steps_done(session, prompts)
    assert steps_done(session, prompts, "skip_step") == 3


TOKENIZER = build_character_tokenizer("abc")


def check(*answers: str | None, tokenizer: Any = TOKENIZER, **cfg: Any) -> None:
    prompts = [
        Prompt(f"p{i}", (Message("user", "ab"),), {}, answer, place=f"line {i + 1}")
        for i, answer in enumerate(answers)
    ]
    check_demonstrations(tokenizer, prompts, WarmStartConfig(**cfg), max_total_tokens=8)


def test_answers_that_fit_pass() -> None:
    # Begin, two characters, separator; three characters and end-of-text.
    check("abc", "", "c")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("a?", r"the answer to prompt 'p1' \(line 2\): the tokenizer does not know a character of 'a\?'"),
        (
            "a<|end|>",
            r"the answer to prompt 'p1' \(line 2\): the tokenizer does not know a character of 'a<\|end",
        ),
        (
            "abca",
            r"prompt 'p1' \(line 2\) and its answer have 4 \+ 5 tokens, more than policy.max_total_seq.*=8",
        ),
        (None, r"prompt 'p1' has no single right answer"),
    ],
)
def test_an_answer_that_cannot_be_learned_from_is_refused_by_row(answer: str | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        check("abc", answer, copy_fraction=0.5)
    assert "\n" not in str(error.value)
    # Copies of the question are all that is drawn.
    check("abc", answer, copy_fraction=1.0)


def test_a_tokenizer_without_end_of_text_teaches_no_end() -> None:
    tokenizer = build_character_tokenizer("abc")
    tokenizer.eos_token = None
    with pytest.raises(ConfigError, match="the tokenizer has no end-of-text token"):
        check("abc", tokenizer=tokenizer)
