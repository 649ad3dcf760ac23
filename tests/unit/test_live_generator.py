"""Answers in pieces: the same greedy tokens, new weights between two pieces, and turns for those who share."""

import threading
from typing import Any

import pytest
import torch

from headrace.algorithms.run import build_session
from headrace.errors import GenerationError
from headrace.experience.flatten import flatten
from headrace.experience.live_generator import LiveGenerator
from headrace.experience.rollouts import RolloutSettings, run_rollouts
from headrace.models.generation.interfaces import SamplingParams
from reference_experience import BigramGenerator, GuessingGame, character_tokenizer
from tiny_recipe import tiny_recipe

TOKENIZER = character_tokenizer()
PROMPTS = [[5, 6], [7], [8, 9, 10, 11]]


@pytest.mark.parametrize("piece", [1, 2, 5, 64])
@pytest.mark.parametrize("total", [None, 9])
def test_greedy_answers_in_pieces_are_those_made_at_once(piece: int, total: int | None) -> None:
    params = SamplingParams(max_new_tokens=7, greedy=True, max_total_tokens=total)
    whole = BigramGenerator(TOKENIZER, end=0.05).generate(PROMPTS, params, seed=3)
    parts = LiveGenerator(BigramGenerator(TOKENIZER, end=0.05), piece).generate(PROMPTS, params, seed=3)
    assert (parts.token_ids, parts.logprobs, parts.truncated) == (
        whole.token_ids,
        whole.logprobs,
        whole.truncated,
    )
    assert [len(row) for row in parts.weight_versions or []] == [len(row) for row in whole.token_ids]


def test_new_weights_between_two_pieces_go_on_with_the_answer_and_each_token_says_whose_it_is() -> None:
    live = LiveGenerator(BigramGenerator(TOKENIZER, end=0.0), 3)
    versions = iter(range(1, 9))
    live.refresh = lambda: live.update_weights([], next(versions))
    params = SamplingParams(max_new_tokens=8)
    output = live.generate(PROMPTS, params, seed=0)
    assert output.weight_versions == [[1, 1, 1, 2, 2, 2, 3, 3]] * 3
    assert all(map(all, [output.truncated]))
    with live.held():
        assert live.generate(PROMPTS, params, seed=0).weight_versions == [[3] * 8] * 3


@pytest.mark.parametrize("given", [0, 2])
def test_an_answer_that_is_cut_before_its_limit_is_an_error_and_not_asked_for_again(given: int) -> None:
    class Cuts(BigramGenerator):
        def generate(self, *args: Any, **kwargs: Any) -> Any:
            output = super().generate(*args, **kwargs)
            output.token_ids[1], output.logprobs[1] = output.token_ids[1][:given], output.logprobs[1][:given]
            return output

    with pytest.raises(GenerationError, match=f"cut an answer at {given} new tokens; expected 3"):
        LiveGenerator(Cuts(TOKENIZER, end=0.0), 3).generate(PROMPTS, SamplingParams(8), seed=0)


class Telling(BigramGenerator):
    """A generator with the metrics that an engine has; each call has a count and a peak of its own."""

    def generate(self, prompts: Any, params: SamplingParams, *, seed: int) -> Any:
        output = super().generate(prompts, params, seed=seed)
        call, asked = float(len(self.calls)), sum(map(len, prompts))
        output.metrics = {
            **output.rates(2.0),
            "preemptions": call,
            "prefix_hit_tokens": 10 * call,
            "cache_use_max": 1 / call,
            "weights_seconds": call,
            "cached_prompt_fraction": (call - 1) / asked,
        }
        return output


def test_metrics_of_answers_in_pieces_are_of_all_their_pieces() -> None:
    inner = Telling(TOKENIZER, end=0.4)
    output = LiveGenerator(inner, 2).generate(PROMPTS * 4, SamplingParams(max_new_tokens=6), seed=1)
    metrics, tokens = output.metrics, sum(map(len, output.token_ids))
    assert len(inner.calls[2]) < len(PROMPTS * 4)
    assert metrics == {
        "pieces": 3,
        "generated_tokens": tokens,
        "generate_s": 6,
        "tokens_per_s": pytest.approx(tokens / 6),
        "truncated_fraction": pytest.approx(sum(output.truncated) / 12),
        "preemptions": 6,
        "prefix_hit_tokens": 60,
        "cache_use_max": 1,
        "weights_seconds": 3,
        "cached_prompt_fraction": pytest.approx(3 / sum(len(p) for call in inner.calls for p in call)),
    }


def test_versions_become_a_column_and_the_first_and_last_of_a_sample_its_tags() -> None:
    live = LiveGenerator(BigramGenerator(TOKENIZER, end=0.0), 2)
    versions = iter(range(4, 99))
    live.refresh = lambda: live.update_weights([], next(versions))
    game = GuessingGame(secrets="#")
    rollouts, _ = run_rollouts(
        game.prompts("train")[:1],
        generator=live,
        tokenizer=TOKENIZER,
        environment=game,
        settings=RolloutSettings(SamplingParams(max_new_tokens=3), max_total_tokens=64, max_turns=2),
        group_size=1,
        seed=0,
    )
    (rollout,) = rollouts
    sampled = [v for v, mask in zip(rollout.token_versions, rollout.token_mask) if mask]
    assert sampled == [4, 4, 5, 6, 6, 7]
    assert (rollout.weight_version_min, rollout.weight_version) == (4, 7)
    column = flatten(rollouts)["token_weight_version"]
    assert isinstance(column, torch.Tensor)
    values = column.values().tolist()
    assert values == [v if mask else -1 for v, mask in zip(rollout.token_versions, rollout.token_mask)]
    assert len(values) == len(rollout.token_ids)


def test_calls_of_two_threads_take_turns_and_older_weights_do_not_replace_newer_ones() -> None:
    class Watched(BigramGenerator):
        inside = most = 0

        def generate(self, *args: Any, **kwargs: Any) -> Any:
            self.inside += 1
            self.most = max(self.most, self.inside)
            output = super().generate(*args, **kwargs)
            self.inside -= 1
            return output

    inner = Watched(TOKENIZER, end=0.0)
    live = LiveGenerator(inner)
    live.update_weights([], 5)
    live.update_weights([], 4)
    assert live.weight_version == 5
    ask = lambda: live.generate(PROMPTS * 20, SamplingParams(max_new_tokens=20), seed=1)  # noqa: E731
    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert inner.most == 1


def test_a_real_model_goes_on_with_an_answer_as_the_new_weights_would(tmp_path: Any) -> None:
    session = build_session(tiny_recipe(tmp_path, data_plane={"enabled": False}))
    generator = session.rollouts.worker.generator  # type: ignore[attr-defined]
    params = SamplingParams(max_new_tokens=8, greedy=True)
    old = {name: tensor.clone() for name, tensor in session.policy.named_weights()}
    new = {name: tensor * 1.5 + 0.01 for name, tensor in old.items()}
    live = LiveGenerator(generator, 4)
    brought = iter([(old, 1), (new, 2)])

    def refresh() -> None:
        weights, version = next(brought)
        live.update_weights(weights.items(), version)

    live.refresh = refresh
    mixed = live.generate([[3, 4, 5]], params, seed=0)
    if mixed.weight_versions == [[1] * 4 + [2] * 4]:
        generator.update_weights(old.items(), 1)
        first = generator.generate([[3, 4, 5]], SamplingParams(max_new_tokens=4, greedy=True), seed=0)
        generator.update_weights(new.items(), 2)
        rest = generator.generate(
            [[3, 4, 5, *first.token_ids[0]]], SamplingParams(max_new_tokens=4, greedy=True), seed=0
        )
        assert mixed.token_ids[0] == first.token_ids[0] + rest.token_ids[0]
        assert mixed.logprobs[0] == first.logprobs[0] + rest.logprobs[0]
    else:
        pytest.fail(f"the answer ended early: {mixed.weight_versions}")
    session.close()
