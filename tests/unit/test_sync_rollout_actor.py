"""The rollout actor: one put per call, ids and tags that match the rows, and nothing left behind by an error."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from headrace.config import ValidationConfig
from headrace.data_plane.adapters.local import LocalDataPlaneClient
from headrace.data_plane.column_io import read_columns
from headrace.data_plane.interfaces import KVBatchMeta
from headrace.data_plane.schema import DP_TRAIN_FIELDS, ROLLOUT_FIELDS
from headrace.data_plane.store.sample_store import SampleStore
from headrace.environments.interfaces import StepResult
from headrace.errors import (
    CapacityExceeded,
    ConfigError,
    GenerationError,
    HeadraceError,
    RewardError,
    SampleNotFound,
)
from headrace.experience.flatten import PER_SAMPLE_KEYS, flatten, per_sample_values
from headrace.experience.metrics import rollout_metrics
from headrace.experience.rollouts import RolloutSettings, run_rollouts
from headrace.experience.sync_rollout_actor import MADE_AT, TAGS, SyncRolloutActor
from headrace.experience.types import Message, Prompt
from headrace.models.generation.interfaces import GenerationOutput, SamplingParams
from reference_experience import BigramGenerator, GuessingGame, character_tokenizer

TOKENIZER = character_tokenizer()
SETTINGS = RolloutSettings(
    SamplingParams(max_new_tokens=5), max_total_tokens=64, max_turns=3, pad_to_multiple=8
)
PARTITION = "train"


class CountingStore(LocalDataPlaneClient):
    """The local store, counting its puts."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.puts: list[int] = []

    def put_samples(self, sample_ids: Sequence[str], *args: Any, **kwargs: Any) -> KVBatchMeta:
        self.puts.append(len(sample_ids))
        return super().put_samples(sample_ids, *args, **kwargs)


@pytest.fixture
def store() -> Iterator[CountingStore]:
    client = CountingStore()
    client.register_partition(PARTITION, DP_TRAIN_FIELDS, 24, ["train"], grpo_group_size=3)
    yield client
    client.close()


def make_actor(store: CountingStore, **parts: Any) -> SyncRolloutActor:
    generator = parts.pop("generator", None) or BigramGenerator(TOKENIZER)
    environment = parts.pop("environment", None) or GuessingGame()
    return SyncRolloutActor(generator, TOKENIZER, environment, SETTINGS, dp_client=store, **parts)


def prompts() -> list[Prompt]:
    return GuessingGame().prompts("train")


def rows_in(store: CountingStore, ids: Sequence[str]) -> list[str]:
    """Return which of the ids the store holds."""
    there = []
    for sample_id in ids:
        try:
            store.get_samples([sample_id], PARTITION, ["input_ids"])
        except SampleNotFound:
            continue
        there.append(sample_id)
    return there


def all_ids(tag: str) -> list[str]:
    return [f"{p.uid}@{tag}_g{i}" for p in prompts() for i in range(3)]


def test_one_call_makes_one_put_of_all_rows(store: CountingStore) -> None:
    meta, *_ = make_actor(store).rollout_to_tq(prompts(), partition_id=PARTITION, group_size=3)
    assert store.puts == [12]
    assert meta.size == 12
    assert {*ROLLOUT_FIELDS, "message_log"} == set(meta.fields or [])


def test_the_store_holds_what_a_rollout_in_memory_gives(store: CountingStore) -> None:
    meta, carry, metrics, made_by = make_actor(store).rollout_to_tq(
        {"prompts": prompts(), "seed": 11, "tag": "4.1"}, partition_id=PARTITION, group_size=3
    )
    rollouts, calls = run_rollouts(
        prompts(),
        generator=BigramGenerator(TOKENIZER),
        tokenizer=TOKENIZER,
        environment=GuessingGame(),
        settings=SETTINGS,
        group_size=3,
        seed=11,
        tag="4.1",
    )
    assert meta.sample_ids == [r.sample_id for r in rollouts] == all_ids("4.1")
    assert meta.sequence_lengths == [len(r.token_ids) for r in rollouts]
    assert made_by["generation/new_tokens"] == calls["generation/new_tokens"]
    assert metrics == rollout_metrics(per_sample_values(rollouts))
    stored = read_columns(store, meta, [*ROLLOUT_FIELDS, "message_log"], layout="jagged")
    for name, column in flatten(rollouts).items():
        if isinstance(column, torch.Tensor) and column.is_nested:
            pairs = zip(stored[name].unbind(), column.unbind(), strict=True)
            assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in pairs), name
        elif isinstance(column, torch.Tensor):
            assert torch.equal(stored[name], column), name
        else:
            assert list(stored[name]) == list(column)
    for key, want in per_sample_values(rollouts).items():
        got = carry[key]
        assert torch.equal(got, want) if isinstance(want, torch.Tensor) else got == want, key


def test_tags_are_on_the_meta_and_agree_with_the_carry(store: CountingStore) -> None:
    generator = BigramGenerator(TOKENIZER)
    generator.update_weights([], version=6)
    meta, carry, *_ = make_actor(store, generator=generator).rollout_to_tq(
        prompts(), partition_id=PARTITION, group_size=3
    )
    assert meta.tags is not None
    for i, tag in enumerate(meta.tags):
        assert set(tag) == {*TAGS, MADE_AT}
        assert tag["reward"] == carry["reward"][i].item()
        assert tag["truncated"] is bool(carry["truncated"][i])
        assert (tag["uid"], tag["group_index"]) == (carry["uid"][i], i % 3)
        assert tag["weight_version"] == 6
        assert meta.sample_ids[i] == f"{tag['uid']}_g{tag['group_index']}"


def test_the_pad_multiple_of_the_settings_travels_with_the_meta(store: CountingStore) -> None:
    meta, *_ = make_actor(store).rollout_to_tq(prompts(), partition_id=PARTITION, group_size=3)
    assert meta.extra_info["pad_to_multiple"] == 8


def test_no_tensor_that_comes_back_has_a_value_per_token(store: CountingStore) -> None:
    meta, carry, *_ = make_actor(store).rollout_to_tq(prompts(), partition_id=PARTITION, group_size=3)
    assert tuple(carry) == PER_SAMPLE_KEYS
    for value in carry.values():
        assert value.shape == (12,) if isinstance(value, torch.Tensor) else len(value) == 12
    values = [*meta.extra_info.values(), *(v for tag in meta.tags or [] for v in tag.values())]
    assert not any(isinstance(v, torch.Tensor) for v in values)


def test_the_carry_holds_the_keys_asked_for(store: CountingStore) -> None:
    actor = make_actor(store)
    _, carry, *_ = actor.rollout_to_tq(
        prompts(), partition_id=PARTITION, group_size=3, carry_keys=["uid", "reward"]
    )
    assert list(carry) == ["uid", "reward"]
    _, carry, *_ = actor.rollout_to_tq(prompts(), partition_id=PARTITION, carry_keys=[])
    assert carry == {}


def test_a_prompt_drawn_twice_and_a_refill_never_share_an_id(store: CountingStore) -> None:
    actor = make_actor(store)
    twice = [prompts()[0], prompts()[0]]
    first, *_ = actor.rollout_to_tq(twice, partition_id=PARTITION, group_size=2)
    refill, *_ = actor.rollout_to_tq(twice, partition_id=PARTITION, group_size=2, first_iter=False)
    later, *_ = actor.rollout_to_tq(twice, partition_id=PARTITION, group_size=2)
    ids = [*first.sample_ids, *refill.sample_ids, *later.sample_ids]
    assert len(set(ids)) == 12
    assert rows_in(store, ids) == ids


def test_actors_with_the_same_seed_make_the_same_rows(store: CountingStore) -> None:
    def rewards(seed: int) -> tuple[list[str], list[float]]:
        actor = make_actor(store, seed=seed)
        meta, carry, *_ = actor.rollout_to_tq(prompts(), partition_id=PARTITION, group_size=3)
        return meta.sample_ids, [*carry["reward"].tolist(), *carry["total_tokens"].tolist()]

    assert rewards(1) == rewards(1)
    assert rewards(1) != rewards(2)


def test_greedy_samples_of_a_group_are_alike(store: CountingStore) -> None:
    meta, carry, *_ = make_actor(store).rollout_to_tq(
        {"prompts": prompts(), "greedy": True}, partition_id=PARTITION, group_size=3
    )
    assert carry["reward"].view(4, 3).unique(dim=1).shape == (4, 1)
    assert len(set(meta.sample_ids)) == 12


def test_the_generator_is_released_when_generation_is_finished(store: CountingStore) -> None:
    generator = BigramGenerator(TOKENIZER)
    actor = make_actor(store, generator=generator)
    actor.rollout_to_tq(prompts(), partition_id=PARTITION, finish_generation=False)
    assert generator.releases == 0
    actor.rollout_in_memory({"prompts": prompts()}, group_size=1, finish_generation=False)
    assert generator.releases == 0
    actor.rollout_to_tq(prompts(), partition_id=PARTITION, first_iter=False)
    assert generator.releases == 1
    actor.rollout_in_memory({"prompts": prompts()}, group_size=1)
    assert generator.releases == 2
    actor.make_way_for_training()
    assert generator.releases == 3


class HardGame(GuessingGame):
    """Rewards nothing."""

    def step(self, given: Sequence[Prompt], *_: Any, **__: Any) -> list[StepResult]:
        self.judged.append(len(given))
        return [StepResult(reward=-9.0, correct=False) for _ in given]


class DyingEngines(BigramGenerator):
    """Tells of one engine lost in each call."""

    def generate(self, *args: Any, **kwargs: Any) -> GenerationOutput:
        output = super().generate(*args, **kwargs)
        output.metrics["engines_lost"] = 1.0
        return output


def test_engines_that_die_in_a_probe_or_a_validation_are_told_by_the_next_rollout(
    store: CountingStore,
) -> None:
    validation = ValidationConfig()
    generator = DyingEngines(TOKENIZER)
    actor = make_actor(store, generator=generator, validation=validation)
    actor.probe(2, [], max_new_tokens=4, seed=1, sampled=True)
    actor.validate(seed=1)
    for number in range(2):
        before = len(generator.calls) if number else 0
        *_, calls = actor.rollout_to_tq(prompts(), partition_id=PARTITION, group_size=3)
        store.clear_samples(None, PARTITION)
        assert calls["generator/engines_lost"] == len(generator.calls) - before


def test_an_override_judges_the_prompts_of_its_task_and_no_other(store: CountingStore) -> None:
    mixed = prompts()
    mixed[1] = Prompt("hard", mixed[1].messages, {**mixed[1].info, "task": "hard"})
    hard, easy = HardGame(), GuessingGame()
    _, carry, *_ = make_actor(store, environment=easy).rollout_to_tq(
        mixed, partition_id=PARTITION, group_size=3, task_to_env_override={"hard": hard, "unused": HardGame()}
    )
    assert (carry["reward"] == -9.0).tolist() == [3 <= i < 6 for i in range(12)]
    assert (hard.judged, easy.judged[0]) == ([3], 9)


class ForgetfulGame(GuessingGame):
    """Forgets a reward."""

    def step(self, *args: Any, **kwargs: Any) -> list[StepResult]:
        return super().step(*args, **kwargs)[:-1]


def test_an_override_that_forgets_a_reward_names_the_prompt(store: CountingStore) -> None:
    with pytest.raises(RewardError, match=r"task 'guess' returned 11 results for 12 samples.*train3"):
        make_actor(store).rollout_to_tq(
            prompts(), partition_id=PARTITION, group_size=3, task_to_env_override={"guess": ForgetfulGame()}
        )
    assert store.puts == []


# Errors leave nothing behind.


class FailingGenerator(BigramGenerator):
    """Loses a row in its second call."""

    def generate(self, *args: Any, **kwargs: Any) -> GenerationOutput:
        output = super().generate(*args, **kwargs)
        if len(self.calls) == 2:
            output.token_ids.pop()
        return output


@pytest.mark.parametrize("finish_generation", [True, False])
@pytest.mark.parametrize(
    ("generator", "game", "error"),
    [
        (FailingGenerator, GuessingGame, GenerationError),
        (BigramGenerator, ForgetfulGame, RewardError),
    ],
)
def test_an_error_in_the_middle_leaves_no_row_and_releases_the_generator(
    store: CountingStore, generator: Any, game: Any, error: type[HeadraceError], finish_generation: bool
) -> None:
    model = generator(TOKENIZER)
    actor = make_actor(store, generator=model, environment=game())
    with pytest.raises(error):
        actor.rollout_to_tq(
            {"prompts": prompts(), "tag": "0"},
            partition_id=PARTITION,
            group_size=3,
            finish_generation=finish_generation,
        )
    assert model.releases == 1
    assert store.puts == []
    assert rows_in(store, all_ids("0")) == []


def test_a_logprob_that_overflows_its_column_leaves_no_row(store: CountingStore) -> None:
    class Overflowing(BigramGenerator):
        def generate(self, *args: Any, **kwargs: Any) -> GenerationOutput:
            output = super().generate(*args, **kwargs)
            output.logprobs[0][0] = -1e300
            return output

    with pytest.raises(HeadraceError, match=r"'generation_logprobs' of sample 'train0@0_g0' is -inf"):
        make_actor(store, generator=Overflowing(TOKENIZER)).rollout_to_tq(
            {"prompts": prompts(), "tag": "0"}, partition_id=PARTITION, group_size=3
        )
    assert store.puts == []


def test_a_put_that_does_not_fit_leaves_no_row() -> None:
    small = CountingStore(SampleStore(5))
    small.register_partition(PARTITION, DP_TRAIN_FIELDS, 5, ["train"])
    generator = BigramGenerator(TOKENIZER)
    with pytest.raises(CapacityExceeded):
        make_actor(small, generator=generator).rollout_to_tq(
            {"prompts": prompts(), "tag": "0"}, partition_id=PARTITION, group_size=3, finish_generation=False
        )
    assert generator.releases == 1
    assert rows_in(small, all_ids("0")) == []
    small.close()


@pytest.mark.parametrize(
    ("batch", "options", "message"),
    [
        ({"prompts": [], "seed": 0}, {}, "0 prompts"),
        ({"seed": 0}, {}, "missing key 'prompts'; known keys: prompts, seed, tag, greedy"),
        ({"prompts": [], "sed": 0}, {}, "unknown key 'sed'"),
        ([], {"carry_keys": ["rewards"]}, "carry_keys: unknown key 'rewards'; known: .*reward"),
        ([Prompt("huge", (Message("user", "a" * 80),))], {}, "'huge' has 83 tokens"),
    ],
)
def test_a_faulty_request_is_refused_before_anything_is_generated(
    store: CountingStore, batch: Any, options: dict[str, Any], message: str
) -> None:
    generator = BigramGenerator(TOKENIZER)
    with pytest.raises(ConfigError, match=message):
        make_actor(store, generator=generator).rollout_to_tq(batch, partition_id=PARTITION, **options)
    assert generator.calls == []
    assert store.puts == []
