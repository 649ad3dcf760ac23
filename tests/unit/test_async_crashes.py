"""A run that crashes and goes on from checkpoint and journal trains on every group once, and makes few twice."""

import random
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_async_schedules import GROUP, GROUPS, MoodyGenerator, producing, recipe_of, train

from headrace.algorithms.async_utils.producers import Producers, worth_restoring
from headrace.config import RecipeConfig
from headrace.data_plane.adapters.local import LocalDataPlaneClient
from headrace.data_plane.interfaces import KVBatchMeta
from headrace.data_plane.journal.client import JournalDataPlaneClient, keep_since
from headrace.data_plane.journal.restore import restore
from headrace.experience.rollouts import tell_of_one_turn
from headrace.utils.run_state import Progress


def group_of(sample_id: str) -> str:
    return sample_id.rpartition("_g")[0]


class Crashing:
    """A run in lives: each has a store of its own, and the journal as the crash before has left it."""

    def __init__(self, folder: Path, recipe: RecipeConfig, seed: int, *, slow_ms: float = 1.0) -> None:
        self.folder, self.recipe, self._draws, self._slow_ms = folder, recipe, random.Random(seed), slow_ms
        self.progress, self.position = Progress.at_start(), dict[str, list[int]]()
        self.saved_by: dict[str, Any] | None = None
        # What each step trained on, and the times at which each group was put that a step has taken.
        self.trained: dict[int, list[str]] = {}
        self.made: dict[str, set[float]] = {}
        self.lives = self.unwanted = 0

    def live(self, steps: int, save_period: int) -> None:
        """Go on from the checkpoint, for so many steps; then the process is gone, whatever it did."""
        self.trained = {step: ids for step, ids in self.trained.items() if step <= self.progress.step}
        client = JournalDataPlaneClient(LocalDataPlaneClient(), self.folder / str(self.lives), fsync="never")
        if self.position:
            keep = worth_restoring(self.recipe, self.progress, self.saved_by)
            report = restore(client, client.folder, self.position, later=True, keep=keep)
            self.unwanted += report.unwanted
        else:
            restore(client, client.folder, {})
            self.made.clear()
        moods = [
            MoodyGenerator(self._draws, slow_s=self._slow_ms / 1000, fails=0.1)
            for _ in range(self.recipe.asynchrony.collectors)
        ]
        first = self.progress.step
        with producing(self.recipe, moods, self.progress, store=client) as (producers, _):
            there = {group_of(sample_id) for sample_id in client.sample_ids("train")}
            assert len(producers.buffer.positions_there()) == len(there), "what is there is not made again"
            producers.publish(first)
            for step in range(first + 1, first + 1 + steps):
                self._note(step, train(producers, client, step))
                if step % save_period == 0:
                    self._save(client, producers, step)
            self.lives += 1
            # What a crash leaves: the files as they are while collectors write.
            shutil.copytree(client.folder, self.folder / str(self.lives))

    def _note(self, step: int, rows: KVBatchMeta) -> None:
        self.trained[step] = rows.sample_ids
        for sample_id, tag in zip(rows.sample_ids, rows.tags or []):
            self.made.setdefault(group_of(sample_id), set()).add(tag["made_at_s"])

    def _save(self, client: JournalDataPlaneClient, producers: Producers, step: int) -> None:
        with producers.tickets.without_drops():
            (first, ahead), self.position = producers.tickets.progress(), client.journal_position()
        told = {"step": step, "prompt_position": first, "prompts_ahead": ahead}
        self.progress = Progress.at_start().model_copy(update=told)
        self.saved_by = self.recipe.model_dump()
        keep_since(client, self.position)

    def ids(self) -> list[str]:
        return [sample_id for step in sorted(self.trained) for sample_id in self.trained[step]]


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    max_lag=st.integers(0, 2),
    on_stale=st.sampled_from(["wait", "drop"]),
    order=st.sampled_from(["oldest", "freshest"]),
    collectors=st.integers(1, 3),
    per_call=st.sampled_from([1, 2, 4]),
    lives=st.lists(st.integers(0, 5), min_size=2, max_size=4),
    save_period=st.integers(1, 3),
)
def test_whenever_a_run_crashes_no_group_is_trained_on_twice_and_none_is_lost(
    seed: int,
    max_lag: int,
    on_stale: str,
    order: str,
    collectors: int,
    per_call: int,
    lives: Sequence[int],
    save_period: int,
) -> None:
    recipe = recipe_of(
        max_lag=max_lag, on_stale=on_stale, order=order, collectors=collectors, prompts_per_call=per_call
    )
    with tempfile.TemporaryDirectory() as folder:
        run = Crashing(Path(folder), long(recipe), seed)
        for steps in lives:
            run.live(steps, save_period)
        run.live(4, 1)
    ids = run.ids()
    assert len(set(ids)) == len(ids) == run.progress.step * GROUP * GROUPS
    if on_stale == "wait":
        assert run.progress.prompt_position == run.progress.step * GROUPS
        assert run.unwanted == 0
        assert all(len(times) == 1 for times in run.made.values()), "what was put is not made again"


def test_what_a_run_that_goes_on_used_out_of_turn_is_known_from_its_start(tmp_path: Path) -> None:
    recipe = recipe_of(max_lag=1, on_stale="drop", prompts_per_call=2)
    at = Progress.at_start().model_copy(update={"step": 1, "prompt_position": 5, "prompts_ahead": [6, 9]})
    generator = MoodyGenerator(random.Random(0), slow_s=0, fails=0)
    with producing(recipe, [generator], at) as (producers, store):
        assert producers.tickets.progress() == (5, [6, 9])
        producers.publish(1)
        rows = train(producers, store, 2)
        assert rows.tags is not None
        assert [tag["position"] for tag in rows.tags[::GROUP]] == [5, 7, 8, 10]
        assert producers.tickets.progress() == (11, [])
        # Call 2 answers the positions 4 and 5 in every run.
        assert [group_of(sample_id).rpartition("@")[2] for sample_id in rows.sample_ids[::GROUP]] == [
            "2.0",
            "2.1",
            "3.0",
            "3.1",
        ]


def test_a_run_that_dropped_and_now_waits_makes_each_step_whole(tmp_path: Path) -> None:
    recipe = recipe_of(max_lag=0, on_stale="wait", prompts_per_call=GROUPS)
    at = Progress.at_start().model_copy(update={"step": 1, "prompt_position": 5, "prompts_ahead": [6, 9]})
    generator = MoodyGenerator(random.Random(0), slow_s=0, fails=0)
    with producing(recipe, [generator], at) as (producers, store):
        producers.publish(1)
        for step, positions in ((2, [5, 7, 8, 10]), (3, [11, 12, 13, 14])):
            rows = train(producers, store, step)
            assert [tag["position"] for tag in (rows.tags or [])[::GROUP]] == positions


def test_more_rows_in_the_making_than_the_store_has_room_for_are_waited_for() -> None:
    recipe = recipe_of(max_lag=0, on_stale="drop", collectors=2, prompts_per_call=GROUPS)
    moods = [MoodyGenerator(random.Random(n), slow_s=0.05, fails=0) for n in range(2)]
    with producing(recipe, moods) as (producers, store):
        producers.publish(0)
        for step in (1, 2, 3):
            train(producers, store, step)


def long(recipe: RecipeConfig) -> RecipeConfig:
    grpo = recipe.grpo.model_copy(update={"max_num_steps": 100})
    return recipe.model_copy(update={"grpo": grpo})


def lives_of(folder: Path, first: RecipeConfig, second: RecipeConfig) -> Crashing:
    """Return a run that crashed two steps after its checkpoint, and went on by another recipe."""
    run = Crashing(folder, first, seed=0)
    run.live(5, 3)
    run.recipe = second
    run.live(3, 3)
    return run


def test_groups_that_another_recipe_cannot_train_on_are_made_again(tmp_path: Path, caplog: Any) -> None:
    first = long(recipe_of(max_lag=1))

    def of(**changes: Any) -> RecipeConfig:
        return first.model_copy(update={"grpo": first.grpo.model_copy(update=changes)})

    tell_of_one_turn()  # which is said once in a process
    caplog.clear()
    same = lives_of(tmp_path / "same", first, first)
    assert (same.unwanted, caplog.messages) == (0, [])
    larger = lives_of(tmp_path / "larger", first, of(num_generations_per_prompt=GROUP + 1))
    assert "they are made again" in caplog.messages[0]
    assert [len(larger.trained[step]) for step in (3, 4)] == [GROUPS * GROUP, GROUPS * (GROUP + 1)]
    with_other_steps = Crashing(tmp_path / "steps", first, seed=0)
    with_other_steps.live(5, 3)
    with_other_steps.recipe = of(num_prompts_per_step=2)
    keep = worth_restoring(with_other_steps.recipe, with_other_steps.progress)
    tags = {"weight_version": 3, "weight_version_min": 3}
    assert keep({"position": 12, "made_for": 4, **tags})
    assert not keep({"position": 14, "made_for": 4, **tags}), "these are of step 5 now"


def test_a_run_with_less_room_knows_all_groups_that_are_there(tmp_path: Path) -> None:
    first, second = recipe_of(max_lag=3), recipe_of(max_lag=3, room=GROUPS)
    run = lives_of(tmp_path, *(long(recipe) for recipe in (first, second)))
    assert [len(run.trained[step]) for step in (4, 5, 6)] == [GROUPS * GROUP] * 3


def test_groups_that_nobody_has_judged_are_made_again_for_dynamic_sampling() -> None:
    keep = worth_restoring(recipe_of(max_refills=3, max_lag=1), Progress.at_start())
    tags = {"position": 0, "made_for": 1, "weight_version": 0, "weight_version_min": 0}
    assert keep({**tags, "trains": 1})
    assert not keep(tags), "no step would take them"


SAMPLERS = "headrace.algorithms.async_utils.staleness_sampler"
MINE, ANOTHER = {"sampler": f"{SAMPLERS}:RefillingSampler"}, {"sampler": f"{SAMPLERS}:WindowedSampler"}


@pytest.mark.parametrize(
    ("then", "now"),
    [
        (MINE, ANOTHER),
        (MINE, {"on_stale": "drop"}),
        ({"on_stale": "wait", "max_refills": 3}, {"on_stale": "drop", "max_refills": 3}),
        ({**MINE, "max_refills": 3}, MINE),
    ],
)
def test_groups_are_made_again_for_a_run_that_goes_on_by_another_rule_of_which_a_step_takes(
    then: dict[str, Any], now: dict[str, Any]
) -> None:
    tags = {"position": 0, "made_for": 1, "weight_version": 0, "weight_version_min": 0, "trains": 1}
    before, after = recipe_of(**then).model_dump(), recipe_of(**now)
    for written, is_kept in ((before, False), (after.model_dump(), True)):
        assert worth_restoring(after, Progress.at_start(), written)(tags) is is_kept
