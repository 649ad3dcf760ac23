"""Tasks by name: distinct and stable prompts, rewards, and every way to get the config wrong."""

import logging
from typing import Any

import pytest

from headrace.config import DataConfig, ReasoningGymConfig
from headrace.environments.build import build_environment
from headrace.environments.interfaces import Environment, StepResult
from headrace.environments.judge_process import judge_process
from headrace.environments.task_scorer import TaskScorer
from headrace.errors import ConfigError
from headrace.experience.types import Message, Prompt
from headrace.utils.renamed import with_new_keys

SPELL = {"task": "spell_backward", "config": {"min_word_len": 3, "max_word_len": 6}}
SMALL = DataConfig(train_size=200, validation_size=50)


def build(data: DataConfig = SMALL, *, seed: int = 0, **cfg: Any) -> Environment:
    return build_environment(ReasoningGymConfig(**{**SPELL, **cfg}), data, seed=seed)


def judge(environment: Environment, prompt: Prompt, text: str, *, truncated: bool = False) -> StepResult:
    talk = (*prompt.messages, Message("assistant", text))
    return environment.step([prompt], [talk], [truncated])[0]


def questions(prompts: list[Prompt]) -> list[str]:
    return [p.messages[-1].content for p in prompts]


def test_no_training_question_equals_another_or_one_of_validation() -> None:
    environment = build(DataConfig(train_size=3000, validation_size=500), prompt_from="metadata.word")
    train, validation = (questions(environment.prompts(s)) for s in ("train", "validation"))
    assert (len(train), len(validation)) == (3000, 500)
    assert len({*train, *validation}) == 3500
    assert len({p.uid for s in ("train", "validation") for p in environment.prompts(s)}) == 3500


def test_seeds_share_both_splits_and_differ_in_the_order_of_training() -> None:
    first, second = build(seed=0), build(seed=1)
    assert first.prompts("validation") == second.prompts("validation")
    assert first.prompts("train") != second.prompts("train")
    by_uid = {p.uid: p for p in first.prompts("train")}
    assert by_uid == {p.uid: p for p in second.prompts("train")}
    assert build(seed=1).prompts("train") == second.prompts("train")


def test_without_shuffle_training_prompts_come_as_drawn() -> None:
    environment = build(SMALL.model_copy(update={"shuffle": False}), seed=5)
    assert [p.uid for p in environment.prompts("train")] == [f"spell_backward-train-{i}" for i in range(200)]


def test_a_prompt_is_the_question_or_an_entry_of_the_metadata() -> None:
    word = build(prompt_from="metadata.word").prompts("train")[0]
    assert word.answer == word.messages[0].content[::-1]
    question = build().prompts("train")[0]
    assert question.messages[0].content.startswith("Spell this word backward")


def test_a_number_in_the_metadata_is_written_as_text() -> None:
    environment = build(DataConfig(train_size=3, validation_size=1), prompt_from="metadata.word_len")
    assert {*questions(environment.prompts("train"))} <= {"3", "4", "5", "6"}


def test_a_system_prompt_opens_every_conversation() -> None:
    prompt = build(SMALL.model_copy(update={"system_prompt": "Be brief."})).prompts("validation")[0]
    assert [m.role for m in prompt.messages] == ["system", "user"]
    assert prompt.messages[0].content == "Be brief."


def test_an_exact_reward_needs_the_right_text_and_its_end() -> None:
    environment = build(prompt_from="metadata.word", score="exact")
    prompt = environment.prompts("train")[0]
    right = prompt.answer or ""
    assert judge(environment, prompt, right) == StepResult(reward=1.0, correct=True)
    assert judge(environment, prompt, right, truncated=True).reward == 0.0
    for wrong in (right + " ", right.upper() + "!", right[:-1], "", prompt.messages[0].content + "x"):
        assert judge(environment, prompt, wrong) == StepResult(reward=0.0, correct=False)


def test_the_last_number_counts_whatever_stands_around_it() -> None:
    environment = build(task="chain_sum", config={"min_terms": 2, "max_terms": 2}, score="last_number")
    prompt = environment.prompts("train")[0]
    right = prompt.answer or ""
    for text, reward in (
        (f"1 and 1 make 2, so the sum is {right}.", 1.0),
        (f"{right} it is, not {int(right) + 1}", 0.0),
        ("no number", 0.0),
        ("", 0.0),
    ):
        assert judge(environment, prompt, text) == StepResult(reward, correct=bool(reward))


def test_a_recipe_with_the_switch_of_before_has_the_score_that_it_meant() -> None:
    for switch, score in ((True, "exact"), (False, "task")):
        assert ReasoningGymConfig(task="x", exact=switch).score == score  # type: ignore[call-arg]
    old = {"env": {"environments": {"a": {"kind": "reasoning_gym", "exact": True}}, "kind": "by_column"}}
    assert with_new_keys(old)["env"]["environments"]["a"] == {"kind": "reasoning_gym", "score": "exact"}


def test_otherwise_the_task_scores_the_text_or_the_tagged_answer() -> None:
    environment = build()
    prompt = environment.prompts("train")[0]
    right = prompt.answer or ""
    assert judge(environment, prompt, f" {right}\n").reward == 1.0
    assert judge(environment, prompt, f"Let me see. <answer>{right}</answer> Done.").correct is True
    partly = judge(environment, prompt, right[:-1] + "#")
    assert 0 < partly.reward < 1
    assert partly.correct is False


def test_an_answer_on_which_the_scorer_fails_gets_nothing_and_is_counted() -> None:
    environment = build(task="prime_factorization", config={})
    prompt = environment.prompts("train")[0]
    assert judge(environment, prompt, "two times x") == StepResult(
        0.0, correct=False, metrics={"unscorable": 1.0}
    )
    assert judge(environment, prompt, prompt.answer or "").metrics == {"unscorable": 0.0}


@pytest.mark.parametrize("text", ["9**9**9**9", "__import__('os')._exit(1)", "[" * 3000])
def test_an_answer_that_is_evaluated_cannot_hold_up_or_end_the_run(text: str) -> None:
    environment = build(
        DataConfig(train_size=2, validation_size=1), task="polynomial_multiplication", config={}
    )
    prompt = environment.prompts("train")[0]
    result = judge(environment, prompt, text)
    assert (result.reward, result.correct, set(result.metrics)) == (0.0, False, {"unscorable"})
    assert judge(environment, prompt, prompt.answer or "").reward == 1.0


def test_a_task_that_compares_texts_needs_no_process() -> None:
    environment = build()
    before = judge_process().pid
    judge(environment, environment.prompts("train")[0], "x")
    assert judge_process().pid == before
    compared = {
        task: TaskScorer(task, {}).compares_text for task in ("spell_backward", "leg_counting", "countdown")
    }
    assert compared == {"spell_backward": True, "leg_counting": True, "countdown": False}


def test_answers_are_judged_in_order() -> None:
    environment = build(prompt_from="metadata.word", score="exact")
    prompts = environment.prompts("train")[:4]
    texts = [p.answer or "" for p in prompts]
    texts[2] = "wrong"
    talks = [(Message("assistant", t),) for t in texts]
    assert [r.reward for r in environment.step(prompts, talks, [False] * 4)] == [1.0, 1.0, 0.0, 1.0]


def test_a_prompt_of_another_environment_is_refused() -> None:
    stranger = Prompt("gsm-1", (Message("user", "1+1"),))
    with pytest.raises(ValueError, match="'gsm-1' does not come from this 'spell_backward'"):
        judge(build(), stranger, "2")


@pytest.mark.parametrize("task", ["leg_counting", "basic_arithmetic", "word_ladder"])
def test_other_tasks_work_by_name_and_their_right_answers_score_one(task: str) -> None:
    environment = build(DataConfig(train_size=6, validation_size=3), task=task, config={})
    prompts = environment.prompts("train")
    assert [judge(environment, prompt, prompt.answer or "").reward for prompt in prompts] == [1.0] * 6


def test_a_task_that_tells_no_right_answers_scores_wrong_ones_low() -> None:
    environment = build(DataConfig(train_size=6, validation_size=3), task="rush_hour", config={})
    prompts = environment.prompts("train")
    assert [prompt.answer for prompt in prompts] == [None] * 6
    assert all(judge(environment, prompt, "B+1").reward < 0.1 for prompt in prompts)


def test_a_task_with_few_questions_serves_validation_first_and_warns(
    caplog: pytest.LogCaptureFixture,
) -> None:
    # Four word lengths exist: as prompts they make four distinct questions.
    with caplog.at_level(logging.WARNING):
        environment = build(DataConfig(train_size=50, validation_size=3), prompt_from="metadata.word_len")
    assert len(environment.prompts("validation")) == 3
    assert len(environment.prompts("train")) == 1
    assert "gives only 1 distinct questions beside the 3 for validation" in caplog.text


@pytest.mark.parametrize("validation_size", [4, 5])
def test_a_validation_split_that_leaves_nothing_for_training_is_refused(validation_size: int) -> None:
    data = DataConfig(train_size=50, validation_size=validation_size)
    with pytest.raises(ConfigError, match=rf"only 4 distinct.*data.validation_size={validation_size}"):
        build(data, prompt_from="metadata.word_len")


@pytest.mark.parametrize(
    ("cfg", "message"),
    [
        ({"task": "spell_backwards"}, r"env.task=spell_backwards is no .* did you mean spell_backward"),
        (
            {"config": {"min_word_length": 3}},
            r"env.config.min_word_length is unknown .* did you mean min_word_len",
        ),
        ({"config": {"zzz": 3}}, r"env.config.zzz is unknown.*known: data_file, max_word_len, min_word_len$"),
        ({"config": {"min_word_len": 0}}, r"refuses env.config=.*min_word_len must be positive"),
        ({"config": {"min_word_len": "a"}}, r"refuses env.config="),
        ({"config": {"min_word_len": 40, "max_word_len": 50}}, r"refuses env.config="),
        ({"config": {"data_file": "nowhere.txt"}}, r"refuses env.config=.*nowhere.txt"),
        ({"config": {"seed": 1}}, r"env.config.seed cannot be set"),
        ({"config": {"size": 1}}, r"env.config.size cannot be set"),
        (
            {"prompt_from": "metadata.wrod"},
            r"env.prompt_from=metadata.wrod: the key is not there.*usable: .*word",
        ),
        ({"prompt_from": "metadata.difficulty"}, r"env.prompt_from=metadata.difficulty: the key is a dict"),
        ({"prompt_from": "answer"}, r"env.prompt_from=answer: expected 'question' or 'metadata.KEY'"),
        ({"prompt_from": "metadata"}, r"env.prompt_from=metadata: expected"),
        (
            {"task": "rush_hour", "config": {}, "score": "exact"},
            r"env.score=exact needs a single right answer",
        ),
        (
            {"score": "last_number"},
            r"env.score=last_number needs answers with a number.*spell_backward gives",
        ),
    ],
)
def test_a_wrong_setting_is_one_line_that_names_the_key(cfg: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        build(**cfg)
    assert "\n" not in str(error.value)


def test_an_unknown_split_is_refused() -> None:
    with pytest.raises(ValueError, match="split 'test'; expected 'train' or 'validation'"):
        build().prompts("test")
