"""Rollouts beside training by NeMo-RL's collector, with a caller's own generator and environment, in real threads."""

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from nemo_rl.algorithms.async_utils import trajectory_collector as module
from nemo_rl.algorithms.async_utils.replay_buffer import ReplayBuffer, ReplayBufferImpl
from nemo_rl.algorithms.async_utils.trajectory_collector import AsyncTrajectoryCollector
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_names import calls

from headrace.errors import ConfigError, HeadraceError, SchemaError
from tiny_models import tiny_tokenizer


class Counting:
    """Answers with the two letters after the last one; waits while `gate` is closed."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.sizes: list[int] = []

    def generate(self, data: Any, greedy: bool = False) -> Any:
        assert self.gate.wait(30)
        ids, lengths = data["input_ids"], data["input_lengths"]
        self.sizes.append(len(ids))
        out = torch.nn.functional.pad(ids, (0, 2))
        for row, length in enumerate(lengths.tolist()):
            last = int(ids[row, length - 1])
            out[row, length : length + 2] = torch.tensor([last + 1, last + 2])
        return BatchedDataDict(
            {
                "output_ids": out,
                "logprobs": torch.full(out.shape, -0.5),
                "generation_lengths": torch.full_like(lengths, 2),
                "unpadded_sequence_lengths": lengths + 2,
            }
        )


class Game:
    """Pays 1 for each answer and says "z" until `turns` answers have come."""

    def __init__(self, turns: int = 1) -> None:
        self.turns = turns

    def step(self, logs: list[Any], infos: list[Any]) -> Any:
        answers = [sum(m["role"] == "assistant" for m in log) for log in logs]
        said = [{"role": "environment", "content": "z"}] * len(logs)
        return (
            said,
            infos,
            [None] * len(logs),
            [1.0] * len(logs),
            [a >= self.turns for a in answers],
            [None] * len(logs),
        )


def prompts(text: str) -> list[dict[str, Any]]:
    tokenizer = tiny_tokenizer()
    return [
        {
            "message_log": [
                {"role": "user", "content": letter, "token_ids": torch.tensor(tokenizer.encode(letter))}
            ],
            "extra_env_info": {"letter": letter},
            "loss_multiplier": 1.0,
            "idx": place,
            "task_name": "game",
        }
        for place, letter in enumerate(text)
    ]


def make(
    buffer: Any, *, generation: Any = None, turns: int = 1, age: int = 1, room: int = 64, **options: Any
) -> Any:
    config = {
        "grpo": {
            "num_prompts_per_step": 2,
            "num_generations_per_prompt": 2,
            "max_rollout_turns": turns,
            "async_grpo": {"max_trajectory_age_steps": age},
        },
        "policy": {"max_total_sequence_length": room},
    }
    return AsyncTrajectoryCollector(
        generation or Counting(), tiny_tokenizer(), {"game": Game(turns)}, config, buffer, **options
    )


def until(reached: Callable[[], bool], limit_s: float = 30.0) -> None:
    end = time.monotonic() + limit_s
    while not reached():
        assert time.monotonic() < end
        time.sleep(0.005)


METHODS = (
    "set_weight_version",
    "set_generation_window",
    "start_collection",
    "is_data_exhausted",
    "get_status",
    "get_weight_version",
    "check_health",
    "pause",
    "resume",
    "prepare_for_refit",
    "resume_after_refit",
    "wait_for_pending_generations",
    "get_dataloader_state",
    "get_efficiency_metrics",
    "drain_payload_metrics",
    "get_rollouts_state",
)


@calls("algorithms.async_utils.trajectory_collector", "AsyncTrajectoryCollector")
@calls(
    "algorithms.async_utils.trajectory_collector", *(f"AsyncTrajectoryCollector.{name}" for name in METHODS)
)
def test_prompts_are_rolled_out_for_the_steps_that_are_near_and_no_further() -> None:
    buffer = ReplayBufferImpl(16, False)
    collector = make(buffer, start_step=0, next_nemo_gym_task_index=3)
    assert collector.get_dataloader_state() == {}
    assert collector.get_rollouts_state() == {"next_ng_task_index": 3}
    collector.start_collection([prompts("ab"), prompts("cd"), prompts("ef")])
    until(lambda: buffer.size() == 4)
    time.sleep(0.05)
    assert sorted(buffer.get_debug_info()["target_weight_versions"]) == [0, 0, 1, 1]
    assert not collector.is_data_exhausted()
    with pytest.raises(ConfigError, match="a data loader already"):
        collector.start_collection([])
    assert buffer.sample(2, current_weight_version=0, max_age_steps=1) is not None
    collector.set_weight_version(1)
    until(collector.is_data_exhausted)
    assert sorted(buffer.get_debug_info()["target_weight_versions"]) == [1, 1, 2, 2]
    assert collector.get_status() == {
        "weight_version": 1,
        "running": True,
        "data_exhausted": True,
        "pending_groups": 0,
        "collected_groups": 6,
        "failed_groups": 0,
    }
    assert collector.check_health()
    assert collector.get_weight_version() == 1
    metrics = collector.get_efficiency_metrics()
    assert metrics["collected_groups"] == 6.0
    assert metrics["rollout_seconds"] > 0
    assert asyncio.run(collector.drain_payload_metrics()) == []


def test_a_trajectory_holds_the_conversations_of_a_prompt() -> None:
    buffer = ReplayBufferImpl(16, False)
    collector = make(buffer, turns=2)
    tokenizer = tiny_tokenizer()
    columns = {name: [prompt[name] for prompt in prompts("ab")] for name in prompts("ab")[0]}
    collector.start_collection([BatchedDataDict(columns)])
    until(collector.is_data_exhausted)
    sampled = buffer.sample(2, current_weight_version=0, max_age_steps=1)
    assert sampled is not None
    first = min(sampled["trajectories"], key=lambda t: t["batch"]["idx"][0])
    batch = first["batch"]
    assert batch.size == 2
    assert [m["content"] for m in batch["message_log"][0]] == ["a", "bc", "z", tokenizer.decode([31, 32])]
    assert [m["role"] for m in batch["message_log"][1]] == ["user", "assistant", "environment", "assistant"]
    assert batch["message_log"][0][1]["generation_logprobs"].tolist() == [-0.5, -0.5]
    assert batch["total_reward"].tolist() == [2.0, 2.0]
    assert batch["truncated"].tolist() == [False, False]
    assert batch["extra_env_info"] == [{"letter": "a"}] * 2
    metrics = first["rollout_metrics"]
    assert (metrics["reward"], metrics["turns_per_sample"], metrics["gen_tokens_per_sample"]) == (
        2.0,
        2.0,
        4.0,
    )


def test_a_conversation_without_room_for_the_next_turn_is_cut() -> None:
    buffer = ReplayBufferImpl(16, False)
    collector = make(buffer, turns=3, room=4)
    collector.start_collection([prompts("a")])
    until(collector.is_data_exhausted)
    (trajectory,) = buffer.state_dict()["trajectories"]
    assert trajectory["batch"]["truncated"].tolist() == [True, True]
    assert [len(log) for log in trajectory["batch"]["message_log"]] == [2, 2]


def test_a_pause_begins_nothing_and_a_refit_waits_for_what_has_begun() -> None:
    buffer, generation = ReplayBufferImpl(16, False), Counting()
    collector = make(buffer, generation=generation)
    collector.pause()
    collector.start_collection([prompts("ab")])
    time.sleep(0.05)
    assert (buffer.size(), collector.get_status()["pending_groups"]) == (0, 0)
    generation.gate.clear()
    collector.resume()
    until(lambda: collector.get_status()["pending_groups"] == 2)
    refit = threading.Thread(target=collector.prepare_for_refit)
    refit.start()
    time.sleep(0.05)
    assert refit.is_alive()
    generation.gate.set()
    refit.join(30)
    assert buffer.size() == 2
    assert not collector.get_status()["running"]
    collector.resume_after_refit()
    collector.wait_for_pending_generations()
    until(collector.is_data_exhausted)


def test_the_window_can_be_widened() -> None:
    buffer = ReplayBufferImpl(16, False)
    collector = make(buffer)
    collector.start_collection([prompts("abcdef")])
    until(lambda: buffer.size() == 4)
    collector.set_generation_window(weight_version=0, generation_lead_steps=2, max_trajectory_age_steps=2)
    until(collector.is_data_exhausted)
    assert buffer.get_existing_target_weights() == {0, 1, 2}


def test_a_rollout_or_a_data_loader_that_fails_is_told_by_the_health_check() -> None:
    collector = make(ReplayBufferImpl(4, False))
    collector.start_collection([[{**prompts("a")[0], "task_name": "nowhere"}]])
    until(lambda: collector.get_status()["failed_groups"] == 1)
    with pytest.raises(HeadraceError, match=r"a rollout failed: KeyError\('nowhere'\)"):
        collector.check_health()
    with pytest.raises(ConfigError, match="distillation is not served"):
        make(None, teacher_worker_groups={"t": 1})
    assert module._MAX_NEMO_GYM_STREAM_RETRIES == 3
    assert module._NEMO_GYM_RETRY_DELAY_BASE_SECONDS == 1.0
    assert module._REPLAY_BUFFER_MAX_BACKOFF_SECONDS == 0.5


def test_a_full_buffer_is_waited_for() -> None:
    buffer = ReplayBufferImpl(1, False)
    collector = make(buffer)
    collector.start_collection([prompts("ab")])
    until(lambda: buffer.size() == 1)
    time.sleep(0.05)
    assert not collector.is_data_exhausted()
    collector.prepare_for_refit()  # does not wait for room
    collector.resume_after_refit()
    buffer.clear()
    until(collector.is_data_exhausted)
    assert buffer.size() == 1


def test_buffer_and_collector_are_actors_where_callers_start_them_so(ray_cluster: str) -> None:
    ray = pytest.importorskip("ray")
    buffer = ReplayBuffer.options(num_cpus=0).remote(max_size=8, drop_incomplete_targets_on_restore=False)
    assert ray.get(buffer.add.remote({"batch": 1}, weight_version=0, target_weight_version=5)) == "success"
    assert ray.get(buffer.get_existing_target_weights.remote()) == {5}
    collector = make(buffer)
    collector.start_collection([prompts("ab")])
    until(collector.is_data_exhausted)
    assert ray.get(buffer.size.remote()) == 3
    taken = ray.get(buffer.sample.remote(2, 0, 1))
    assert [t["batch"]["total_reward"].tolist() for t in taken["trajectories"]] == [[1.0, 1.0]] * 2
    ray.kill(buffer)


@pytest.mark.parametrize("kept", [0, 10, 700])
def test_a_damaged_file_of_a_buffer_is_named_and_the_buffer_stays_as_it_is(tmp_path: Path, kept: int) -> None:
    buffer = ReplayBuffer(3, False)
    buffer.add({"batch": {}}, weight_version=0, target_weight_version=0)
    file = tmp_path / "buffer.pt"
    buffer.save_to_path(str(file))
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(SchemaError, match=r"buffer.pt: missing parts or damaged .*; restore another"):
        buffer.load_from_path(str(file))
    assert buffer.size() == 1
