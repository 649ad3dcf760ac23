"""What ends a warm start: a row that does not fit, before the first step; a loss that is not finite, at once."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.algorithms.run import Session, build_session
from headrace.algorithms.warm_start import warm_start
from headrace.errors import ConfigError, HeadraceError
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
        on_progress=lambda *_: None,
        should_stop=lambda: False,
    )


def test_a_row_that_does_not_fit_or_lacks_its_answer_is_refused_before_the_first_step(
    session: Session,
) -> None:
    prompts = session.environment.prompts("train")
    before = session.policy.weight_version
    long = replace(prompts[-1], answer="a" * 30)
    with pytest.raises(ConfigError, match=rf"'{long.uid}' and its answer have \d+ and 31 tokens.*length=24"):
        steps_done(session, [*prompts[:-1], long])
    with pytest.raises(ConfigError, match="no single right answer"):
        steps_done(session, [*prompts[:-1], replace(prompts[-1], answer=None)])
    assert session.policy.weight_version == before


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
