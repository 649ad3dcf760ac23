"""Collectors and a trainer over one store: whatever the schedule, no group is too old, lost, or trained on twice."""

import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.algorithms.async_utils.producers import Producers
from headrace.algorithms.async_utils.replay_buffer import TRAINS
from headrace.algorithms.prompt_loader import PromptLoader
from headrace.config import RecipeConfig
from headrace.data_plane.adapters.local import LocalDataPlaneClient
from headrace.data_plane.column_io import write_columns
from headrace.data_plane.interfaces import DataPlaneClient, KVBatchMeta
from headrace.data_plane.schema import CLAIM
from headrace.distributed.worker_groups import LocalWorkerGroup
from headrace.errors import ClaimExpired, ConfigError, GenerationError, GeneratorLost
from headrace.experience.collecting_actor import CollectingActor
from headrace.experience.published_weights import PublishedWeights
from headrace.experience.rollouts import RolloutSettings
from headrace.models.generation.interfaces import GenerationOutput, SamplingParams
from headrace.models.generation.weights import Opening
from headrace.utils.run_state import Progress
from reference_experience import BigramGenerator, GuessingGame, character_tokenizer
from tiny_recipe import bare_recipe

TOKENIZER = character_tokenizer()
SETTINGS = RolloutSettings(SamplingParams(max_new_tokens=3), max_total_tokens=64)
GROUP, GROUPS, STEPS = 2, 4, 5


class MoodyGenerator(BigramGenerator):
    """Takes a random time, and fails now and then."""

    def __init__(self, draws: random.Random, *, slow_s: float, fails: float) -> None:
        super().__init__(TOKENIZER)
        self._draws, self._slow_s, self._fails = draws, slow_s, fails

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, *, seed: int
    ) -> GenerationOutput:
        time.sleep(self._draws.random() * self._slow_s)
        if self._draws.random() < self._fails:
            raise GenerationError("out of luck")
        return super().generate(prompts, params, seed=seed)


class Publishing(Producers):
    """Publishes weights of a version that have nothing but it."""

    weights: PublishedWeights

    def publish(self, version: int) -> None:
        self.weights.keep([Opening(None)], version)
        super().publish(version)


def recipe_of(max_refills: int | None = None, **asynchrony: Any) -> RecipeConfig:
    refills = {} if max_refills is None else {"enabled": True, "max_refills": max_refills}
    return bare_recipe(
        None,
        grpo={
            "num_prompts_per_step": GROUPS,
            "num_generations_per_prompt": GROUP,
            "max_num_steps": STEPS,
            "dynamic_sampling": refills,
        },
        policy={"model": {"path": "m"}, "train_global_batch_size": GROUP * GROUPS},
        loss={"importance_correction": "tis"},
        **{"async": {"enabled": True, "max_failures": 50, "prompts_per_call": 1, **asynchrony}},
    )


@contextmanager
def producing(
    recipe: RecipeConfig,
    generators: Sequence[BigramGenerator],
    progress: Progress | None = None,
    judge: Any = None,
    store: DataPlaneClient | None = None,
) -> Iterator[tuple[Producers, Any]]:
    store, game, weights = store or LocalDataPlaneClient(), GuessingGame(), PublishedWeights()
    actors = [CollectingActor(g, TOKENIZER, game, SETTINGS, dp_client=store) for g in generators]
    for actor in actors:
        actor.follow(weights.newer_than)
        actor.judge = judge or actor.judge
    producers = Publishing(
        recipe,
        store,
        "train",
        PromptLoader(game.prompts("train"), seed=0),
        [LocalWorkerGroup(actor) for actor in actors],
        progress or Progress.at_start(),
    )
    producers.weights = weights
    producers.start()
    try:
        yield producers, store
    finally:
        producers.close()
        store.close()


def train(producers: Producers, store: DataPlaneClient, step: int) -> KVBatchMeta:
    """Do with the store what a step does."""
    rows = producers.take(step, GROUPS)
    assert rows is not None
    store.clear_samples(rows.sample_ids, "train", claim=rows.extra_info[CLAIM])
    producers.used([rows])
    producers.publish(step)
    return rows


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 2**31),
    max_lag=st.integers(0, 2),
    on_stale=st.sampled_from(["wait", "drop"]),
    order=st.sampled_from(["oldest", "freshest"]),
    collectors=st.integers(1, 3),
    slow_ms=st.sampled_from([0, 2, 10]),
    train_ms=st.sampled_from([0, 2, 10]),
    fails=st.sampled_from([0.0, 0.3]),
)
def test_no_group_is_older_than_the_bound_or_trained_on_twice(
    seed: int,
    max_lag: int,
    on_stale: str,
    order: str,
    collectors: int,
    slow_ms: int,
    train_ms: int,
    fails: float,
) -> None:
    draws = random.Random(seed)
    recipe = recipe_of(max_lag=max_lag, on_stale=on_stale, order=order, collectors=collectors)
    moods = [MoodyGenerator(draws, slow_s=slow_ms / 1000, fails=fails) for _ in range(collectors)]
    trained: list[str] = []
    positions: set[int] = set()
    with producing(recipe, moods) as (producers, store):
        producers.publish(0)
        for step in range(1, STEPS + 1):
            time.sleep(draws.random() * train_ms / 1000)
            rows = train(producers, store, step)
            assert rows.tags is not None
            assert all(0 <= step - 1 - tag["weight_version_min"] <= max_lag for tag in rows.tags)
            trained += rows.sample_ids
            positions |= {tag["position"] for tag in rows.tags}
            if on_stale == "wait":
                assert positions == set(range(step * GROUPS)), "each step trains on what was made for it"
        first, ahead = producers.tickets.progress()
        dropped = set(range(first)) | set(ahead)
        assert positions <= dropped, "a resume must not train on these again"
    assert len(set(trained)) == len(trained) == STEPS * GROUP * GROUPS
    assert store_is_empty(store)


def store_is_empty(store: LocalDataPlaneClient) -> bool:
    return store._store.stored_bytes() == {} or not any(store._store.stored_bytes().values())


def test_a_generator_that_always_fails_ends_the_run_with_its_words() -> None:
    mood = MoodyGenerator(random.Random(0), slow_s=0, fails=1.0)
    with producing(recipe_of(max_failures=3), [mood]) as (producers, _):
        producers.publish(0)
        with pytest.raises(
            GenerationError, match=r"4 calls .* failed within one step, .*max_failures=3.*out of luck"
        ):
            producers.take(1, GROUPS)


def test_calls_that_fail_keep_no_room_and_lose_no_group() -> None:
    """More failures than the store has room for groups; then it goes on."""
    recipe = recipe_of(max_lag=0, collectors=2)
    moods = [MoodyGenerator(random.Random(n), slow_s=0, fails=0.8) for n in range(2)]
    with producing(recipe, moods) as (producers, store):
        producers.publish(0)
        ids = [sample_id for step in (1, 2, 3) for sample_id in train(producers, store, step).sample_ids]
        failed = producers.take_metrics()["async/failed_calls"]
    assert failed > GROUPS
    assert len(set(ids)) == 3 * GROUPS * GROUP


class Mortal(BigramGenerator):
    """Makes some answers, and never any more."""

    def __init__(self, calls: int) -> None:
        super().__init__(TOKENIZER)
        self._left = calls

    def generate(self, *args: Any, **kwargs: Any) -> GenerationOutput:
        self._left -= 1
        if self._left < 0:
            raise GeneratorLost("no engine is left")
        return super().generate(*args, **kwargs)


def test_what_a_collector_without_engines_leaves_is_made_by_the_others_as_it_would_have_been() -> None:
    def samples(generators: Sequence[BigramGenerator]) -> tuple[list[Any], float]:
        with producing(recipe_of(max_lag=0, collectors=2), generators) as (p, store):
            p.publish(0)
            found = []
            for step in (1, 2, 3):
                rows = p.take(step, GROUPS)
                assert rows is not None
                values = store.get_samples(rows.sample_ids, "train", ["input_ids"])["input_ids"]
                found += [rows.sample_ids, *(row.tolist() for row in values.unbind())]
                store.clear_samples(rows.sample_ids, "train", claim=rows.extra_info[CLAIM])
                p.used([rows])
                p.publish(step)
            return found, p.take_metrics()["async/lost_collectors"]

    whole, _ = samples([BigramGenerator(TOKENIZER), BigramGenerator(TOKENIZER)])
    assert samples([Mortal(0), BigramGenerator(TOKENIZER)]) == (whole, 1.0)


def test_the_run_ends_when_no_collector_has_an_engine_left() -> None:
    with producing(recipe_of(max_lag=0, collectors=2), [Mortal(1), Mortal(3)]) as (p, store):
        p.publish(0)
        train(p, store, 1)
        with pytest.raises(GeneratorLost, match="no engine is left"):
            p.take(2, GROUPS)


@pytest.mark.parametrize("error", [ConfigError, RuntimeError, MemoryError, SystemExit])
def test_a_collector_that_dies_ends_the_run_at_once(error: type[BaseException]) -> None:
    class Refusing(BigramGenerator):
        def generate(self, *args: Any, **kwargs: Any) -> GenerationOutput:
            raise error("no retry mends it")

    with producing(recipe_of(collectors=2), [Refusing(TOKENIZER), BigramGenerator(TOKENIZER)]) as (
        producers,
        _,
    ):
        producers.publish(0)
        with pytest.raises(error, match="no retry mends it"):
            producers.take(1, GROUPS)


def test_collectors_wait_for_room_and_go_on_when_a_step_has_cleared_its_rows() -> None:
    recipe = recipe_of(max_lag=2, on_stale="drop", room=GROUPS)
    with producing(recipe, [BigramGenerator(TOKENIZER)]) as (producers, store):
        producers.publish(0)
        rows = producers.take(1, GROUPS)
        assert rows is not None
        time.sleep(0.05)
        assert len(store.sample_ids("train")) == GROUPS * GROUP, "the store is full, and nobody puts more"
        store.clear_samples(rows.sample_ids, "train", claim=rows.extra_info[CLAIM])
        producers.used([rows])
        producers.publish(1)
        assert producers.take(2, GROUPS) is not None


def flat(share: float) -> Any:
    """Return a judge that finds so many groups without a signal."""

    def judge(sample_ids: Sequence[str], tags: Sequence[Any]) -> list[dict[str, Any]]:
        return [{**tag, TRAINS: int(random.Random(tag["uid"]).random() >= share)} for tag in tags]

    return judge


@pytest.mark.parametrize(("max_lag", "on_stale"), [(0, "wait"), (1, "wait"), (1, "drop")])
def test_groups_without_a_signal_are_dropped_counted_and_made_up_for(max_lag: int, on_stale: str) -> None:
    recipe = recipe_of(max_refills=50, max_lag=max_lag, on_stale=on_stale, collectors=2)
    dropped, trained = 0, set[int]()
    with producing(recipe, [BigramGenerator(TOKENIZER) for _ in range(2)], judge=flat(0.5)) as (p, store):
        p.publish(0)
        for step in range(1, STEPS + 1):
            rows = train(p, store, step)
            assert all(
                tag[TRAINS] and step - 1 - tag["weight_version_min"] <= max_lag for tag in rows.tags or []
            )
            trained |= {tag["position"] for tag in rows.tags or []}
            found = p.buffer.take_flat()
            assert not any(tag[TRAINS] for group in found for tag in group.tags or [])
            dropped += len(found)
        first, ahead = p.tickets.progress()
    assert len(trained) == STEPS * GROUPS
    assert dropped > GROUPS
    assert trained <= {*range(first), *ahead}


def test_a_step_that_finds_no_signal_ends_with_what_there_is() -> None:
    with producing(recipe_of(max_refills=2, max_lag=0), [BigramGenerator(TOKENIZER)], judge=flat(1.0)) as (
        p,
        store,
    ):
        p.publish(0)
        rows = train(p, store, 1)
        assert not any(tag[TRAINS] for tag in rows.tags or [])
        assert len(p.buffer.take_flat()) == 2 * GROUPS


def test_what_is_too_old_is_dropped_and_counted() -> None:
    recipe = recipe_of(max_lag=0, on_stale="drop", room=GROUPS)
    with producing(recipe, [BigramGenerator(TOKENIZER)]) as (producers, store):
        producers.publish(0)
        while len(store.sample_ids("train")) < GROUPS * GROUP:
            time.sleep(0.001)
        producers.publish(1)
        rows = producers.take(2, GROUPS)
        assert rows is not None
        assert {tag["weight_version_min"] for tag in rows.tags or []} == {1}
        assert {tag["position"] for tag in rows.tags or []} == set(range(GROUPS, 2 * GROUPS))
        assert producers.take_metrics()["async/dropped_groups"] == GROUPS


def test_a_lease_that_ran_out_is_told_with_its_key_and_its_groups_are_taken_anew() -> None:
    with producing(recipe_of(max_lag=0, lease_s=0.05), [BigramGenerator(TOKENIZER)]) as (producers, store):
        producers.publish(0)
        rows = producers.take(1, GROUPS)
        assert rows is not None
        producers.buffer.renew([rows])
        time.sleep(0.1)
        for late in (
            lambda: producers.buffer.renew([rows]),
            lambda: write_columns(store, rows, {"advantages": torch.zeros(rows.size)}),
            lambda: store.clear_samples(rows.sample_ids, "train", claim=rows.extra_info["claim"]),
        ):
            words = r"raise async\.lease_s=0\.05"
            with pytest.raises(ClaimExpired, match=words), producers.buffer.leased([rows]):
                late()
        again = producers.take(1, GROUPS)
        assert again is not None
        assert again.sample_ids == rows.sample_ids


def test_a_step_that_fails_gives_its_groups_back() -> None:
    with producing(recipe_of(max_lag=0), [BigramGenerator(TOKENIZER)]) as (producers, store):
        producers.publish(0)
        rows = producers.take(1, GROUPS)
        assert rows is not None
        with pytest.raises(GenerationError), producers.buffer.leased([rows]):
            raise GenerationError("in mid-step")
        assert train(producers, store, 1).sample_ids == rows.sample_ids


def test_a_run_that_goes_on_makes_what_was_not_trained_on_and_nothing_else() -> None:
    recipe = recipe_of(max_lag=1)
    with producing(recipe, [BigramGenerator(TOKENIZER)]) as (producers, store):
        producers.publish(0)
        whole = [train(producers, store, step).sample_ids for step in range(1, 5)]
    with producing(recipe, [BigramGenerator(TOKENIZER)]) as (producers, store):
        producers.publish(0)
        first = [train(producers, store, step).sample_ids for step in (1, 2)]
        position, ahead = producers.tickets.progress()
    at = Progress.at_start().model_copy(
        update={"step": 2, "prompt_position": position, "prompts_ahead": ahead}
    )
    with producing(recipe, [BigramGenerator(TOKENIZER)], at) as (producers, store):
        producers.publish(2)
        rest = [train(producers, store, step).sample_ids for step in (3, 4)]
    assert first + rest == whole


def test_a_wait_for_samples_ends_when_the_user_wants_to_stop() -> None:
    asked = threading.Event()
    with producing(recipe_of(), [BigramGenerator(TOKENIZER)]) as (producers, _):
        asked.set()  # no weights are published, so nothing is ever made
        assert producers.take(1, GROUPS, asked.is_set) is None
