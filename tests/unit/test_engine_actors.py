"""Engines as Ray actors: what they draw, how weights reach them, and what a death costs."""

import logging
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.config import GenerationConfig
from headrace.errors import ConfigError
from headrace.models.generation.build import build_generator
from headrace.models.generation.engine import RayRoom
from headrace.models.generation.interfaces import SamplingParams
from tiny_models import tiny_model, tiny_tokenizer

PROMPTS = [[5, 6, 7], [8], [9, 10]]
ROOM = RayRoom("cpu", startup_timeout_s=240.0)


def test_actors_draw_with_new_weights_what_one_generator_in_place_draws_also_after_a_death(
    ray_cluster: str, caplog: pytest.LogCaptureFixture
) -> None:
    keys = {"max_new_tokens": 6, "batch_size": 2}
    cfg = GenerationConfig(**keys, placement="apart", engines=2)
    apart, in_place = (
        build_generator(c, tiny_model("qwen3_moe"), tiny_tokenizer(), record_routes=True, room=ROOM)
        for c in (cfg, GenerationConfig(**keys))
    )
    try:
        for version, dies in ((0, False), (1, False), (1, True)):
            if version and not dies:
                apart.release(weights_follow=True)  # type: ignore[call-arg]
                for generator in (apart, in_place):
                    generator.update_weights(tiny_model("qwen3_moe", seed=1).state_dict().items(), 1)
            if dies:
                os.kill(apart.pids[0], signal.SIGKILL)  # type: ignore[attr-defined]
            with caplog.at_level(logging.WARNING):
                ours, truth = (g.generate(PROMPTS, SamplingParams(6), seed=3) for g in (apart, in_place))
            assert ours.token_ids == truth.token_ids
            assert ours.routes is not None
            assert truth.routes is not None
            assert all(map(torch.equal, ours.routes, truth.routes))
            assert ours.metrics["engines_lost"] == dies
        assert "engine 0 has died" in caplog.text
    finally:
        apart.shutdown()


def test_an_engine_in_an_actor_leaves_no_folder(ray_cluster: str) -> None:
    import ray

    cfg = GenerationConfig(max_new_tokens=6, batch_size=2, placement="apart")
    apart: Any = build_generator(cfg, tiny_model("llama"), tiny_tokenizer(), room=ROOM)
    try:
        (engine,) = apart._engine.engines.values()
        asked = engine._actor.__ray_call__.remote(lambda actor: actor._worker._folder.name)
        folder = Path(ray.get(asked))
        assert (folder / "config.json").exists()
    finally:
        apart.shutdown()
    assert not folder.exists()


def test_actors_have_no_other_interpreter_than_rays(ray_cluster: str) -> None:
    cfg = GenerationConfig(placement="apart", python="/x/python")
    with pytest.raises(ConfigError, match=r"generation\.python=/x/python: engines apart are Ray actors"):
        build_generator(cfg, tiny_model("llama"), tiny_tokenizer(), room=ROOM)


def test_experts_are_not_refused_where_the_engines_have_gpus_and_this_process_has_none(
    ray_cluster: str,
) -> None:
    cfg, model = GenerationConfig(backend="vllm", placement="apart"), tiny_model("qwen3_moe")
    with pytest.raises(ConfigError, match="the run needs 1 GPUs and the Ray cluster has 0"):
        build_generator(cfg, model, tiny_tokenizer(), room=RayRoom("cuda", startup_timeout_s=10.0))
