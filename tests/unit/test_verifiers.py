"""Environments of the package `verifiers`: prompts, turns, rewards; run by `make test-extras`."""

import importlib
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.algorithms.run import build_session, start_loop
from headrace.config import DataConfig, RecipeConfig, VerifiersConfig
from headrace.environments.verifiers import VerifiersEnvironment
from headrace.errors import ConfigError, RewardError
from headrace.experience.types import Message
from recorder import NeverStop, Recorder
from tiny_recipe import tiny_recipe

pytestmark = pytest.mark.slow
FOLDER = Path(sys.prefix) / "verifiers"
OWN = """
import asyncio
import sys
import verifiers as vf
from datasets import Dataset

QUESTIONS = [{"question": f"{n}+1=", "answer": str(n + 1)} for n in range(8)]


def right(completion, answer, **kwargs):
    return float(completion[-1]["content"].strip() == answer)


async def short(completion, **kwargs):
    return 1 / (1 + len(completion[-1]["content"]))


class Again(vf.MultiTurnEnv):
    async def setup_state(self, state):
        state["tries"] = []
        return state

    async def env_response(self, messages, state, **kwargs):
        if messages[-1]["content"] == "crash":
            raise ValueError("no such word")
        if messages[-1]["content"] == "leave":
            sys.exit(3)
        if messages[-1]["content"] == "cancel":
            raise asyncio.CancelledError
        state["tries"].append(messages[-1]["content"])
        return [{"role": "user", "content": "not " + ", ".join(state["tries"])}]

    @vf.stop
    async def found(self, state):
        said = state["trajectory"]
        return bool(said) and said[-1]["completion"][-1]["content"] == state["answer"]


def load_environment(turns=1, kind=None, held_out=0):
    rubric = vf.Rubric(funcs=[right, short], weights=[1.0, 0.5])
    data = Dataset.from_list(QUESTIONS)
    options = {"dataset": data, "rubric": rubric}
    if held_out:
        options["eval_dataset"] = Dataset.from_list(QUESTIONS[:held_out])
    if kind == "tools":
        options["tool_defs"] = [vf.Tool(name="t", description="d", parameters={})]
    if kind == "group":
        def best(completions, **kwargs):
            return [1.0 for _ in completions]
        rubric.add_reward_func(best)
    return vf.SingleTurnEnv(**options) if turns == 1 else Again(max_turns=turns, **options)
"""


@pytest.fixture(scope="module", autouse=True)
def own_module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("own")
    (folder / "sums_of_mine.py").write_text(OWN)
    sys.path[:0] = [str(folder)]
    sys.path.append(str(FOLDER))
    levels = [logging.root.level]
    if not FOLDER.is_dir():
        pytest.skip("needs the package verifiers (make test-extras)")
    yield folder
    sys.path.remove(str(folder))
    sys.path.remove(str(FOLDER))
    logging.root.setLevel(levels[0])


def environment(data: dict[str, Any] | None = None, **args: Any) -> VerifiersEnvironment:
    cfg = VerifiersConfig(id="sums-of-mine", args=args)
    return VerifiersEnvironment(cfg, DataConfig.model_validate({"validation_size": 2, **(data or {})}))


def said(prompt: Any, *words: str) -> tuple[Message, ...]:
    """Return a prompt's conversation: completions, with what is said between them."""
    roles = ("assistant", "user")
    return (*prompt.messages, *(Message(roles[i % 2], word) for i, word in enumerate(words)))


def test_prompts_are_the_datasets_and_none_is_in_both_splits() -> None:
    made = environment(held_out=3)
    train, held_out = made.prompts("train"), made.prompts("validation")
    assert [p.messages for p in held_out] == [(Message("user", f"{n}+1="),) for n in range(2)]
    assert [p.answer for p in train] == [str(n + 1) for n in range(2, 8)]
    alone = environment()
    assert [len(alone.prompts(split)) for split in ("train", "validation")] == [6, 2]
    assert len({p.uid for split in ("train", "validation") for p in alone.prompts(split)}) == 8
    assert len(environment({"train_size": 5}).prompts("train")) == 3


def test_one_turn_is_scored_by_the_rubric_part_by_part() -> None:
    made = environment()
    prompts = made.prompts("train")[:2]
    answers = [prompts[0].answer or "", "wrong"]
    talks = [said(p, text) for p, text in zip(prompts, answers)]
    first, second = made.step(prompts, talks, [False, False])
    assert first.metrics["reward/right"] == 1
    assert first.metrics["reward/short"] == 0.5
    assert first.reward == 1.25
    assert (second.reward, second.metrics["reward/right"]) == (0.5 / 6, 0)
    assert first.done
    assert second.done


def test_turns_go_on_in_the_rollouts_of_their_samples_whatever_the_order() -> None:
    made = environment(turns=3)
    prompt = made.prompts("train")[0]
    right = prompt.answer or ""
    group = [prompt] * 3
    first = made.step(group, [said(prompt, "x"), said(prompt, right), said(prompt, "x")], [False] * 3)
    assert [r.done for r in first] == [False, True, False]
    assert first[1].reward == 1.25
    assert first[0].observation == (Message("user", "not x"),)
    second = made.step(
        group[:2], [said(prompt, "x", "not x", "y"), said(prompt, "x", "not x", right)], [False] * 2
    )
    assert [r.done for r in second] == [False, True]
    assert second[0].observation == (Message("user", "not x, y"),)
    (third,) = made.step([prompt], [said(prompt, "x", "not x", "y", "not x, y", "z")], [True])
    assert (third.done, third.reward, third.metrics["reward/num_turns"]) == (True, 0.25, 3)
    assert not made._waiting


def test_a_run_trains_on_them_and_logs_the_parts(tmp_path: Path) -> None:
    env = {"kind": "verifiers", "id": "sums-of-mine", "args": {"turns": 2}}
    plain = tiny_recipe(tmp_path, grpo={"max_num_steps": 1, "max_rollout_turns": 2})
    values = {**plain.model_dump(), "env": env, "data": {"validation_size": 2}}
    values["policy"]["tokenizer"]["characters"] = "0123456789+= ,not"
    values["policy"]["max_total_sequence_length"] = 64
    session, recorder = build_session(RecipeConfig.model_validate(values)), Recorder()
    try:
        assert start_loop(session, recorder, NeverStop()).run()
    finally:
        session.close()
    step = recorder.steps[0].metrics
    assert step["reward/mean"] == pytest.approx(step["reward/right"] + 0.5 * step["reward/short"], abs=1e-6)
    assert 1 < step["reward/num_turns"] <= 2


def test_signals_stay_with_the_run() -> None:
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    environment()
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.mark.parametrize(
    ("args", "told"),
    [
        ({"kind": "tools"}, "its tools are called by a server"),
        ({"kind": "group"}, "scores groups of samples together"),
        ({"turn": 3}, r"Failed to load environment .*unexpected keyword argument 'turn'"),
    ],
)
def test_what_cannot_be_used_is_one_line(args: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=rf"env.id=sums-of-mine: .*{told}"):
        environment(**args)


def test_a_name_that_is_not_there_and_too_few_prompts_are_one_line() -> None:
    with pytest.raises(ConfigError, match=r"env.id=nowhere: Could not import 'nowhere'"):
        VerifiersEnvironment(VerifiersConfig(id="nowhere"), DataConfig())
    with pytest.raises(ConfigError, match=r"8 prompts leave none to train on beside data.validation_size=8"):
        environment({"validation_size": 8})


def test_an_environment_that_fails_ends_the_run_by_its_name() -> None:
    made = environment(turns=2)
    prompt = made.prompts("train")[0]
    with pytest.raises(
        RewardError, match=r"env.id=sums-of-mine: a rollout failed with ValueError: no such word"
    ):
        made.step([prompt], [said(prompt, "crash")], [False])
    with pytest.raises(RewardError, match="no rollout of prompt 'train-2' waits at this turn"):
        made.step([prompt], [said(prompt, "a", "b", "c")], [False])


@pytest.mark.parametrize(("word", "told"), [("leave", "SystemExit: 3"), ("cancel", "CancelledError: ")])
def test_an_environment_that_leaves_or_is_cancelled_ends_the_run_by_its_name_too(
    word: str, told: str
) -> None:
    made = environment(turns=2)
    prompt = made.prompts("train")[0]
    with pytest.raises(RewardError, match=rf"env.id=sums-of-mine: a rollout failed with {told}"):
        made.step([prompt], [said(prompt, word)], [False])
    (result,) = made.step([prompt], [said(prompt, "x")], [False])
    assert result.observation == (Message("user", "not x"),)


LEFT_WAITING = """
import gc
from test_verifiers import environment, said

made = environment(turns=2)
prompt = made.prompts("train")[0]
print(made.step([prompt] * 3, [said(prompt, "x")] * 3, [False] * 3)[2].done)
del made
gc.collect()
"""


def test_a_process_ends_without_a_word_of_rollouts_that_nobody_goes_on_with(own_module: Path) -> None:
    path = os.pathsep.join([str(own_module), str(Path(__file__).parent), *sys.path])
    command = [sys.executable, "-W", "ignore", "-c", LEFT_WAITING]
    ended = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=True
    )
    assert ended.stdout == "False\n"
    assert "Task" not in ended.stderr


def test_a_missing_package_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    importlib.import_module("verifiers")
    monkeypatch.setitem(sys.modules, "verifiers.legacy", None)
    with pytest.raises(ConfigError, match=r"needs the package verifiers below 0.4 .*headrace\[verifiers\]"):
        VerifiersEnvironment(VerifiersConfig(id="sums-of-mine"), DataConfig())
