"""Sleep of vLLM's engines: which verbs come in which order, and that nothing is drawn from weights that are gone.

In the environment of `make test-engines`. vLLM's CPU build ignores sleep; the worker here loses what a GPU loses.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from test_generators import GREEDY, PROMPTS, TOKENIZER, assert_scored, model_of

from headrace.algorithms.run import build_session, start_loop
from headrace.config import GenerationConfig, RecipeConfig, VLLMConfig
from headrace.environments.interfaces import StepResult
from headrace.environments.single_turn import conversation
from headrace.errors import GenerationError
from headrace.experience.types import Prompt
from headrace.models.generation.build import build_generator
from headrace.models.generation.engine_generator import EngineGenerator
from recorder import NeverStop, Recorder
from tiny_recipe import MODEL

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM (make test-engines)")
ARGS = {"enforce_eager": True, "max_model_len": 128, "worker_cls": "forgetful_worker.ForgetfulWorker"}
DISCARDED = (
    r"discarded for training \(generation\.vllm\.sleep_level=2\).* set generation\.vllm\.sleep_level=1"
)
UPDATED = ["wake_up weights", "load"]


class Sleeper:
    """A generator, and what its engine was told since the last look."""

    def __init__(self, generator: EngineGenerator, verbs: Path) -> None:
        self.generator, self._verbs = generator, verbs
        self.look()

    def look(self) -> list[str]:
        return look(self._verbs)

    def assert_answers(self, seed: int) -> None:
        """Assert that answers are those of `model_of(seed)`."""
        assert_scored(self.generator.generate(PROMPTS, GREEDY, seed=0), model_of(seed))

    def update(self, seed: int) -> None:
        self.generator.update_weights(model_of(seed).state_dict().items(), seed)


def look(verbs: Path) -> list[str]:
    told = verbs.read_text(encoding="utf-8").splitlines()
    verbs.write_text("", encoding="utf-8")
    return told


@contextmanager
def noting(verbs: Path) -> Iterator[None]:
    """Return a context in which engines that are started have the worker of these tests."""
    ours = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADRACE_VERBS", str(verbs))
        patch.setenv("PYTHONPATH", os.pathsep.join(ours))
        yield


@contextmanager
def asleep_at(level: int, placement: str, verbs: Path) -> Iterator[Sleeper]:
    keys = {"backend": "vllm", "placement": placement, "max_new_tokens": 12}
    cfg = GenerationConfig(**keys, vllm=VLLMConfig(args=ARGS, sleep_level=level))
    with noting(verbs):
        generator: Any = build_generator(cfg, model_of(0), TOKENIZER)
        try:
            yield Sleeper(generator, verbs)
        finally:
            generator.shutdown()


@pytest.fixture(scope="module", params=["in_place", "beside", "apart"])
def started(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sleeper]:
    with asleep_at(2, request.param, tmp_path_factory.mktemp("engine") / "verbs") as sleeper:
        yield sleeper


@pytest.fixture
def sleeper(started: Sleeper) -> Sleeper:
    """An engine at level 2 that is awake with the weights of model 0."""
    started.update(0)
    started.assert_answers(0)
    started.look()
    return started


def test_for_training_weights_are_discarded_and_each_update_brings_them_back_whole(sleeper: Sleeper) -> None:
    for seed in (1, 2):
        sleeper.generator.release(weights_follow=True)
        sleeper.update(seed)
        assert sleeper.look() == ["sleep 2", *UPDATED]
        sleeper.assert_answers(seed)
        assert sleeper.look() == ["wake_up kv_cache", "generate"]
        assert sleeper.generator.weight_version == seed


def test_where_no_update_follows_weights_are_kept_in_the_hosts_memory(sleeper: Sleeper) -> None:
    sleeper.generator.release()
    sleeper.assert_answers(0)
    assert sleeper.look() == ["sleep 1", "wake_up kv_cache weights", "generate"]


def test_without_the_update_that_was_promised_an_engine_says_so_and_stays_asleep(sleeper: Sleeper) -> None:
    sleeper.generator.release(weights_follow=True)
    for _ in range(2):
        with pytest.raises(GenerationError, match=DISCARDED):
            sleeper.generator.generate(PROMPTS, GREEDY, seed=0)
        sleeper.generator.release()
    weights = dict(model_of(1).named_parameters())
    del weights["model.norm.weight"]
    with pytest.raises(GenerationError, match=r"model\.norm\.weight"):
        sleeper.generator.update_weights(weights.items(), 1)
    with pytest.raises(GenerationError, match=DISCARDED):
        sleeper.generator.generate(PROMPTS, GREEDY, seed=0)
    assert sleeper.look() == ["sleep 2"]
    sleeper.update(2)
    sleeper.assert_answers(2)


def test_what_an_engine_keeps_asleep_at_level_1_stays_there_when_training_begins(sleeper: Sleeper) -> None:
    sleeper.generator.release()
    sleeper.generator.release(weights_follow=True)
    sleeper.assert_answers(0)
    assert sleeper.look() == ["sleep 1", "wake_up kv_cache weights", "generate"]


@pytest.mark.parametrize("started", ["in_place"], indirect=True)
@pytest.mark.parametrize("sleeps", [True, False])
def test_an_update_that_breaks_off_within_a_layer_leaves_an_engine_that_the_next_one_makes_whole(
    sleeper: Sleeper, sleeps: bool
) -> None:
    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in model_of(1).named_parameters():
            if name == "model.layers.0.self_attn.k_proj.weight":
                raise OSError("the sender is gone")
            yield name, tensor

    if sleeps:
        sleeper.generator.release(weights_follow=True)
    assert sleeper.generator._engine is not None
    with pytest.raises(OSError, match="the sender is gone"):
        sleeper.generator._engine.update_weights(broken(), 1)
    for _ in range(2):
        with pytest.raises(GenerationError, match="the last update of the engine's weights broke off"):
            sleeper.generator.generate(PROMPTS, GREEDY, seed=0)
        sleeper.generator.release()
    sleeper.update(2)
    sleeper.assert_answers(2)


@pytest.mark.parametrize("started", ["in_place"], indirect=True)
def test_the_worker_of_these_tests_loses_weights(sleeper: Sleeper) -> None:
    sleeper.generator.release(weights_follow=True)
    assert sleeper.generator._engine is not None
    sleeper.generator._engine._lacks_weights = None  # type: ignore[attr-defined]
    with pytest.raises(AssertionError):
        sleeper.assert_answers(0)


def test_at_level_1_weights_stay_in_the_hosts_memory_also_while_the_policy_trains(tmp_path: Path) -> None:
    with asleep_at(1, "beside", tmp_path / "verbs") as sleeper:
        sleeper.generator.release(weights_follow=True)
        sleeper.assert_answers(0)
        assert sleeper.look() == ["sleep 1", "wake_up kv_cache weights", "generate"]


class Letters:
    """An environment whose rewards differ within a group."""

    def prompts(self, split: str) -> list[Prompt]:
        return [Prompt(f"{split}{text}", conversation(text, None)) for text in "abcdefgh"]

    def step(self, prompts: Any, conversations: Any, truncated: Any) -> list[StepResult]:
        return [StepResult(sum(talk[-1].content.encode()) % 7 / 7) for talk in conversations]


def test_a_run_discards_weights_for_training_alone_and_checks_the_first_ones_that_come_back(
    tmp_path: Path,
) -> None:
    dense = {name: value for name, value in MODEL.items() if "exp" not in name and "moe" not in name}
    recipe = RecipeConfig.model_validate(
        {
            "run_dir": str(tmp_path / "run"),
            "code_path": [str(Path(__file__).parent)],
            "env": {"kind": "python", "target": "test_vllm_sleep:Letters"},
            "data": {"train_size": 8, "validation_size": 8},
            "policy": {
                "model": {
                    "config": {**dense, "model_type": "qwen3", "head_dim": 32, "max_position_embeddings": 128}
                },
                "tokenizer": {"builder": "characters"},
                "max_total_sequence_length": 24,
                "train_global_batch_size": 16,
                "optimizer": {"lr": 3e-3},
            },
            "generation": {
                "backend": "vllm",
                "max_new_tokens": 8,
                "vllm": {"args": ARGS, "sleep_level": 2},
                "guard": {"max_logprob_gap": 1e-3},
            },
            "grpo": {"num_prompts_per_step": 4, "num_generations_per_prompt": 4, "max_num_steps": 3},
            "validation": {"period": 1, "at_start": False, "at_end": False},
            "checkpointing": {"enabled": False},
            "logging": {"progress": "off", "trackers": []},
        }
    )
    recorder = Recorder()
    with noting(tmp_path / "verbs"):
        session = build_session(recipe)
        try:
            start_loop(session, recorder, NeverStop()).run()
        finally:
            session.close()
    both, cache, kept = "wake_up kv_cache weights", "wake_up kv_cache", ["generate", "sleep 1"]
    trained = ["generate", "sleep 2", *UPDATED]
    told = look(tmp_path / "verbs")
    assert told == [
        *["load", *kept, *UPDATED, cache, *kept],  # the guard, around the first weights
        *[
            both,
            *kept,
            both,
            *trained,
            cache,
            *kept,
            both,
        ],  # and around those of step 1, which is validated then
        *[*trained, cache],  # step 2, and after it a validation
        *trained,
    ]
    checked = ["mismatch/guard_gap_worst" in record.metrics for record in recorder.steps]
    assert checked == [True, False, False]
