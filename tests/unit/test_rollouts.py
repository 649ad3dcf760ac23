"""Rollouts: ids, masks and logprobs token by token, budgets, faults of their parts, sample ids."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from headrace.environments.interfaces import StepResult
from headrace.errors import ConfigError, GenerationError, RewardError
from headrace.experience.rollouts import RolloutSettings, group_ids, run_rollouts, tell_of_one_turn
from headrace.experience.types import Message, Prompt
from headrace.models.generation.interfaces import GenerationOutput, SamplingParams
from headrace.utils.seeding import derive_seed
from reference_experience import BigramGenerator, GuessingGame, Played, character_tokenizer, naive_rollouts

TOKENIZER = character_tokenizer()
SETTINGS = RolloutSettings(SamplingParams(max_new_tokens=5), max_total_tokens=64, max_turns=4)


def play(
    prompts: Sequence[Prompt] | None = None,
    *,
    generator: Any = None,
    environment: Any = None,
    settings: RolloutSettings = SETTINGS,
    group_size: int = 3,
    seed: int = 7,
    **options: Any,
) -> Played:
    game = environment if environment is not None else GuessingGame()
    played = run_rollouts(
        game.prompts("train") if prompts is None else prompts,
        generator=generator if generator is not None else BigramGenerator(TOKENIZER),
        tokenizer=TOKENIZER,
        environment=game,
        settings=settings,
        group_size=group_size,
        seed=seed,
        **options,
    )
    return Played(*played)


def test_an_environment_that_goes_on_where_one_turn_is_all_is_told_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tell_of_one_turn.cache_clear()
    play()
    assert caplog.messages == []
    for _ in range(2):
        play(settings=replace(SETTINGS, max_turns=1))
    (told,) = caplog.messages
    assert "grpo.max_rollout_turns=1 ends it there" in told


@pytest.mark.parametrize("max_total_tokens", [12, 16, 24, 64])
@pytest.mark.parametrize("max_turns", [1, 2, 5])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_rollouts_equal_the_game_played_token_by_token(
    max_total_tokens: int, max_turns: int, seed: int
) -> None:
    game = GuessingGame()
    settings = RolloutSettings(SamplingParams(max_new_tokens=5), max_total_tokens, max_turns)
    batch = play(environment=game, settings=settings, seed=seed)
    truth = naive_rollouts(
        game.prompts("train"),
        BigramGenerator(TOKENIZER),
        TOKENIZER,
        game,
        group_size=3,
        max_new_tokens=5,
        max_total_tokens=max_total_tokens,
        max_turns=max_turns,
        seeds=[derive_seed(seed, "turn", t) for t in range(max_turns)],
    )
    assert len(batch.rollouts) == len(truth) == 12
    for got, want in zip(batch.rollouts, truth):
        assert got.token_ids == want.token_ids
        assert got.token_mask == want.token_mask
        assert got.logprobs == want.logprobs
        assert [m.content for m in got.messages if m.role == "assistant"] == want.texts
        assert (got.reward, got.truncated, got.turns) == (want.reward, want.truncated, want.turns)
        assert len(got.token_ids) <= max_total_tokens


def test_the_games_of_one_batch_end_after_different_numbers_of_turns() -> None:
    batch = play()
    assert len({r.turns for r in batch.rollouts}) > 1
    assert len({len(r.token_ids) for r in batch.rollouts}) > 1


def test_ids_of_finished_samples_are_those_of_the_rendered_conversation() -> None:
    batch = play(settings=replace(SETTINGS, sampling=SamplingParams(max_new_tokens=40)))
    finished = [r for r in batch.rollouts if not r.truncated]
    assert any(r.turns > 1 for r in finished)
    for rollout in finished:
        messages = [{"role": m.role, "content": m.content} for m in rollout.messages]
        text = TOKENIZER.apply_chat_template(messages, tokenize=False)
        assert rollout.token_ids == TOKENIZER.encode(text, add_special_tokens=False)


def test_an_answer_cut_by_its_own_limit_is_closed_before_the_next_turn() -> None:
    settings = RolloutSettings(SamplingParams(max_new_tokens=1), max_total_tokens=64, max_turns=2)
    batch = play(generator=BigramGenerator(TOKENIZER, end=1e-9), settings=settings)
    going_on = [r for r in batch.rollouts if r.turns == 2]
    assert going_on
    for rollout in going_on:
        cut = rollout.token_mask.index(1)
        assert rollout.token_ids[cut + 1] == TOKENIZER.eos_token_id
        assert rollout.token_mask[cut + 1] == 0


def test_rows_are_prompt_major_and_named_by_group() -> None:
    batch = play(tag="3.0", group_size=2)
    assert [r.sample_id for r in batch.rollouts][:3] == ["train0@3.0_g0", "train0@3.0_g1", "train1@3.0_g0"]
    assert [r.group_index for r in batch.rollouts][:3] == [0, 1, 0]
    assert batch.rollouts[1].uid == "train0@3.0"


def test_each_turn_is_one_call_for_the_rows_still_active() -> None:
    generator, game = BigramGenerator(TOKENIZER), GuessingGame()
    batch = play(generator=generator, environment=game)
    turns = [r.turns for r in batch.rollouts]
    active = [sum(t > turn for t in turns) for turn in range(max(turns))]
    assert [len(call) for call in generator.calls] == active
    assert game.judged == active


def test_the_longest_prompt_gets_what_room_it_has_and_the_others_their_full_answer() -> None:
    prompts = [Prompt("short", (Message("user", "a"),), {"secret": "Z"})]
    prompts.append(Prompt("long", (Message("user", "a" * 9),), {"secret": "Z"}))
    settings = RolloutSettings(SamplingParams(max_new_tokens=6), max_total_tokens=15)
    short, long = play(
        prompts, generator=BigramGenerator(TOKENIZER, end=1e-9), settings=settings, group_size=1
    ).rollouts
    assert (len(short.token_ids), short.response_tokens, short.truncated) == (10, 6, True)
    assert (len(long.token_ids), long.response_tokens, long.truncated) == (15, 3, True)


def test_the_generator_gets_a_limit_of_its_own_for_every_row() -> None:
    generator = BigramGenerator(TOKENIZER, end=0.05)
    settings = RolloutSettings(SamplingParams(max_new_tokens=9), max_total_tokens=14, max_turns=3)
    play(generator=generator, settings=settings)
    assert len(generator.calls) > 1
    assert generator.limits == [[min(9, 14 - len(row)) for row in call] for call in generator.calls]


def test_an_answer_that_fills_the_row_exactly_and_ends_is_finished() -> None:
    prompts = [Prompt("p", (Message("user", "a"),), {"secret": "Z"})]
    settings = RolloutSettings(SamplingParams(max_new_tokens=6), max_total_tokens=5)
    (rollout,) = play(
        prompts, generator=BigramGenerator(TOKENIZER, end=1.0), settings=settings, group_size=1
    ).rollouts
    assert rollout.token_mask == [0, 0, 0, 0, 1]
    assert not rollout.truncated


class SilentGenerator(BigramGenerator):
    """Ends every answer before its first token."""

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, *, seed: int
    ) -> GenerationOutput:
        return GenerationOutput([[] for _ in prompts], [[] for _ in prompts], [False] * len(prompts))


def test_a_whole_batch_of_empty_responses_is_legal() -> None:
    batch = play(generator=SilentGenerator(TOKENIZER), settings=replace(SETTINGS, max_turns=2))
    for rollout in batch.rollouts:
        assert rollout.response_tokens == 0
        assert sum(rollout.token_mask) == 0
        assert [m.content for m in rollout.messages if m.role == "assistant"] == ["", ""]
    assert batch.metrics["rollout/response_tokens_max"] == 0


def test_an_empty_answer_is_closed_by_the_template_alone() -> None:
    batch = play(generator=SilentGenerator(TOKENIZER), settings=replace(SETTINGS, max_turns=2), group_size=1)
    messages = [{"role": m.role, "content": m.content} for m in batch.rollouts[0].messages[:-1]]
    text = TOKENIZER.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert batch.rollouts[0].token_ids == TOKENIZER.encode(text, add_special_tokens=False)


class Parrot(BigramGenerator):
    """Gives every prompt the same answer, cut or ended."""

    def __init__(self, tokenizer: Any, text: str, *, truncated: bool) -> None:
        super().__init__(tokenizer)
        self._answer = tokenizer.encode(text, add_special_tokens=False)
        self._truncated = truncated

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, *, seed: int
    ) -> GenerationOutput:
        logprobs = [-1.0] * len(self._answer)
        rows = [(list(self._answer), list(logprobs), self._truncated) for _ in prompts]
        return GenerationOutput(*map(list, zip(*rows)))


class Refusal(GuessingGame):
    """Says no to everything."""

    def step(self, prompts: Sequence[Prompt], *_: Any, **__: Any) -> list[StepResult]:
        return [StepResult(0.0, done=False, observation=(Message("user", "no"),)) for _ in prompts]


@pytest.mark.parametrize(
    ("text", "truncated", "row"),
    [
        ("", False, "hi/" + "/no/"),
        ("ay", False, "hi/" + "ay" + "/no/"),
        ("ay/", False, "hi/" + "ay/" + "no/"),
        ("ay/", True, "hi/" + "ay/" + "/no/"),
    ],
)
def test_an_answer_is_closed_once_where_prompts_and_answers_end_alike(
    text: str, truncated: bool, row: str
) -> None:
    tokenizer = character_tokenizer("{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}")
    end = tokenizer.eos_token
    answer = text.replace("/", end)
    (rollout,), _ = run_rollouts(
        [Prompt("p", (Message("user", "hi"),), {"secret": "Z"})],
        generator=Parrot(tokenizer, answer, truncated=truncated),
        tokenizer=tokenizer,
        environment=Refusal(),
        settings=RolloutSettings(SamplingParams(max_new_tokens=5), max_total_tokens=64, max_turns=2),
        group_size=1,
        seed=0,
    )
    expected = tokenizer.encode(row.replace("/", end), add_special_tokens=False)
    assert rollout.token_ids[: len(expected)] == expected
    assert rollout.token_ids[len(expected) :] == tokenizer.encode(answer, add_special_tokens=False)


def test_a_custom_stop_token_ends_an_answer_and_is_not_part_of_its_text() -> None:
    stop = TOKENIZER.convert_tokens_to_ids("e")
    sampling = SamplingParams(max_new_tokens=40, stop_token_ids=(stop,))
    batch = play(settings=replace(SETTINGS, sampling=sampling, max_turns=1), group_size=16)
    stopped = [r for r in batch.rollouts if r.token_ids[-1] == stop]
    assert stopped
    assert all(not r.truncated and "e" not in r.messages[-1].content for r in stopped)


def test_the_same_seed_gives_the_same_rollouts_and_another_one_others() -> None:
    assert play(seed=3).rollouts == play(seed=3).rollouts
    texts = [[m.content for r in play(seed=s).rollouts for m in r.messages] for s in (3, 4)]
    assert texts[0] != texts[1]


def test_greedy_rollouts_do_not_depend_on_the_seed() -> None:
    ids = [[r.token_ids for r in play(seed=s, greedy=True).rollouts] for s in (3, 4)]
    assert ids[0] == ids[1]


# Ids.


def test_a_prompt_drawn_twice_in_a_step_gives_two_groups() -> None:
    prompts = GuessingGame().prompts("train")
    batch = play([prompts[0], prompts[1], prompts[0]], group_size=2, tag="5")
    assert len({r.sample_id for r in batch.rollouts}) == 6
    assert len({r.uid for r in batch.rollouts}) == 3
    assert group_ids([prompts[0], prompts[0]], "5") == ["train0@5", "train0@5#2"]


def test_a_prompt_at_two_weight_versions_or_seeds_gets_different_ids() -> None:
    generator = BigramGenerator(TOKENIZER)
    ids = [{r.sample_id for r in play(generator=generator, seed=s).rollouts} for s in (1, 2)]
    generator.update_weights([], version=1)
    ids.append({r.sample_id for r in play(generator=generator, seed=1).rollouts})
    assert len(set.union(*ids)) == sum(map(len, ids))
    assert {r.weight_version for r in play(generator=generator).rollouts} == {1}


# Prompts that do not fit.


def test_a_prompt_without_room_for_an_answer_is_refused_before_anything_is_generated() -> None:
    generator = BigramGenerator(TOKENIZER)
    prompts = [
        *GuessingGame().prompts("train"),
        Prompt("huge", (Message("user", "a" * 61),), {"secret": "a"}),
    ]
    with pytest.raises(ConfigError, match=r"'huge' has 64 tokens.*max_total_sequence_length=64"):
        play(prompts, generator=generator)
    assert generator.calls == []


def test_a_rollout_of_no_prompts_is_refused() -> None:
    with pytest.raises(ConfigError, match="0 prompts x 3"):
        play([])


# Faults of the generator.


class FaultyGenerator(BigramGenerator):
    """Damages the output of its second call."""

    def __init__(self, fault: str) -> None:
        super().__init__(TOKENIZER)
        self._fault = fault

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, *, seed: int
    ) -> GenerationOutput:
        output = super().generate(prompts, params, seed=seed)
        if len(self.calls) < 2:
            return output
        if self._fault == "drops the last row":
            return GenerationOutput(output.token_ids[:-1], output.logprobs[:-1], output.truncated[:-1])
        if self._fault == "adds a row":
            return GenerationOutput(
                *([*part, part[0]] for part in (output.token_ids, output.logprobs, output.truncated))
            )
        if self._fault == "drops logprobs":
            output.logprobs.pop()
        if self._fault == "short logprobs":
            output.logprobs[1] = output.logprobs[1][:-1]
        if self._fault == "nan":
            output.logprobs[1][-1] = math.nan
        if self._fault == "infinite":
            output.logprobs[1][0] = -math.inf
        if self._fault == "overlong":
            extra = params.limit(len(prompts[1])) + 1 - len(output.token_ids[1])
            output.token_ids[1] += [9] * extra
            output.logprobs[1] += [-1.0] * extra
        return output


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            "drops the last row",
            r"returned token_ids for \d+ samples in place of \d+; sample '.*_g\d' has none",
        ),
        ("adds a row", r"returned token_ids for \d+ samples in place of \d+; some belong to no sample"),
        ("drops logprobs", r"returned logprobs for \d+ samples in place of \d+; sample '.*_g\d' has none"),
        ("short logprobs", r"sample '(\S+)': the generator returned \d logprobs for \d tokens"),
        ("nan", r"sample '(\S+)': the generator returned logprob nan for new token \d"),
        ("infinite", r"sample '(\S+)': the generator returned logprob -inf for new token 0"),
        ("overlong", r"sample '(\S+)': the generator returned 6 tokens; expected at most 5"),
    ],
)
def test_a_generator_that_returns_other_than_asked_is_refused_by_sample(fault: str, message: str) -> None:
    # Row 1 of the second call: the second sample whose first guess was wrong.
    wrong = [r.sample_id for r in play().rollouts if r.turns > 1]
    with pytest.raises(GenerationError) as error:
        play(generator=FaultyGenerator(fault))
    assert error.match(message)
    if "'(" in message:
        assert f"'{wrong[1]}'" in str(error.value)


# Faults of the environment.


AnyResult: Any = StepResult


class FaultyGame(GuessingGame):
    """Damages one result."""

    fault: Any = None

    def step(self, *args: Any, **kwargs: Any) -> list[StepResult]:
        results = super().step(*args, **kwargs)
        if self.fault == "missing":
            return results[:-2]
        if self.fault == "surplus":
            return [*results, results[0]]
        results[4] = self.fault
        return results


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("missing", r"returned 10 results for 12 samples; sample 'train3@0_g1', turn 1, has none"),
        ("surplus", r"returned 13 results for 12 samples; some belong to no sample"),
        (
            None,
            r"result 4 \(sample 'train1@0_g1', turn 1\) with None of type NoneType in place of a StepResult",
        ),
        (1.0, r"result 4 .*with 1.0 of type float in place of a StepResult; return StepResult\(reward=...\)"),
        (AnyResult(reward=math.nan), r"result 4 .*with reward nan of type float; expected a finite number"),
        (AnyResult(reward=-math.inf), r"result 4 .*with reward -inf"),
        (AnyResult(reward=10**400), r"result 4 .*with reward 1000"),
        (AnyResult(reward=1e39), r"result 4 .*with reward 1e\+39 of type float; .*fits in float32"),
        (
            AnyResult(reward=-3e38, done=False, observation=(Message("user", "no"),)),
            r"sample 'train1@0_g1': the rewards of 2 turns add up to -6e\+38",
        ),
        (AnyResult(reward=None), r"result 4 .*with reward None of type NoneType"),
        (AnyResult(reward="1"), r"result 4 .*with reward '1' of type str"),
        (AnyResult(reward=torch.ones(2)), r"result 4 .*with reward tensor\(\[1., 1.\]\) of type Tensor"),
        (
            AnyResult(0.0, correct="yes"),
            r"result 4 .*with correct 'yes' of type str; expected True, False or",
        ),
        (AnyResult(0.0, metrics={"why": "long"}), r"result 4 .*with metric 'why' 'long' of type str"),
        (AnyResult(0.0, metrics={"why": math.nan}), r"result 4 .*with metric 'why' nan of type float"),
        (AnyResult(0.0, metrics=[1.0]), r"result 4 .*with metrics \[1.0\] of type list; expected a dict"),
        (AnyResult(0.0, done=None), r"result 4 .*with done None of type NoneType"),
        (AnyResult(0.0, done=False), r"result 4 \(sample 'train1@0_g1'.*done=False without an observation"),
        (AnyResult(0.0, done=False, observation="no"), r"result 4 .*with observation 'no' of type str"),
        (
            AnyResult(0.0, done=False, observation=({"a": 1},)),
            r"result 4 .*observation of \{'a': 1\} of type dict",
        ),
        (
            AnyResult(0.0, done=False, observation=(Message("me", "x"),)),
            r"result 4 .*of role 'me'; expected one",
        ),
    ],
)
def test_a_result_that_is_missing_or_not_finite_is_refused_by_sample(fault: Any, message: str) -> None:
    game = FaultyGame()
    game.fault = fault
    with pytest.raises(RewardError, match=message):
        play(environment=game, tag="0")


class TotalledGame(GuessingGame):
    """Returns no list of results."""

    def step(self, *_: Any, **__: Any) -> Any:
        return self.secrets if len(self.secrets) > 1 else None


@pytest.mark.parametrize(("secrets", "shown"), [("x", "None of type NoneType"), ("xy", "'xy' of type str")])
def test_an_environment_that_returns_no_list_is_refused_by_type(secrets: str, shown: str) -> None:
    with pytest.raises(RewardError, match=f"returned {shown} from step.*; expected a list of 12 StepResult"):
        play(environment=TotalledGame(secrets))


# Metrics.


def test_metrics_are_those_of_the_samples() -> None:
    generator = BigramGenerator(TOKENIZER)
    batch = play(generator=generator)
    rewards = [r.reward for r in batch.rollouts]
    mean = sum(rewards) / 12
    assert batch.metrics["rollout/reward_mean"] == pytest.approx(mean)
    assert batch.metrics["rollout/reward_std"] == pytest.approx(
        math.sqrt(sum((r - mean) ** 2 for r in rewards) / 12)
    )
    assert batch.metrics["rollout/reward_min"] == min(rewards)
    assert batch.metrics["rollout/reward_max"] == max(rewards)
    assert batch.metrics["rollout/accuracy"] == sum(bool(r.correct) for r in batch.rollouts) / 12
    assert batch.metrics["rollout/truncated_fraction"] == sum(r.truncated for r in batch.rollouts) / 12
    assert batch.metrics["rollout/turns_mean"] == sum(r.turns for r in batch.rollouts) / 12
    right = [r for r in batch.rollouts if r.correct]
    lengths = [len(r.messages[-1].content) for r in right]
    assert batch.metrics["environment/guess_length"] == pytest.approx(sum(lengths) / len(lengths))
    assert batch.generation_metrics["generation/calls"] == len(generator.calls)
    assert batch.generation_metrics["generation/new_tokens"] == sum(r.response_tokens for r in batch.rollouts)
    assert batch.generation_metrics["generation/prompt_tokens"] == sum(
        len(row) for call in generator.calls for row in call
    )
    assert batch.generation_metrics["generator/rows_max"] == 12
    assert batch.generation_metrics["rollout/tokens_per_s"] > 0


class SilentJudge(GuessingGame):
    """Rewards without a verdict."""

    def step(self, prompts: Sequence[Prompt], *_: Any, **__: Any) -> list[StepResult]:
        return [StepResult(reward=0.5) for _ in prompts]


def test_accuracy_is_absent_where_no_sample_has_a_verdict() -> None:
    batch = play(environment=SilentJudge())
    assert "rollout/accuracy" not in batch.metrics
    assert {r.correct for r in batch.rollouts} == {None}
