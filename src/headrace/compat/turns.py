"""Conversations of one prompt between a generator and an environment that have NeMo-RL's interfaces."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch

from headrace.compat.actors import call
from headrace.compat.batched_data_dict import BatchedDataDict
from headrace.compat.message_log import GENERATION_LOGPROBS, batched_message_log_to_flat_message
from headrace.data_plane.schema import INPUT_IDS, INPUT_LENGTHS


@dataclass
class Conversation:
    """One sample while it is made."""

    log: list[dict[str, Any]]
    info: Any
    stop_strings: list[str] | None = None
    reward: float = 0.0
    turns: int = 0
    truncated: bool = False
    done: bool = False
    new_tokens: int = 0


@dataclass(frozen=True)
class Talk:
    """Who talks, and for how long.

    `generation.generate(batch, greedy=False)` gets `input_ids`, `input_lengths` and `stop_strings`, and returns
    `output_ids` (N, S), `logprobs` (N, S), `unpadded_sequence_lengths` and `generation_lengths`, (N,) each.
    `environments[task].step(message_logs, infos)` returns observations, infos, next stop strings, rewards, whether the
    conversations end, and answers, N each; it may be an actor.
    """

    generation: Any
    tokenizer: Any
    environments: Mapping[str, Any]
    max_turns: int
    max_tokens: int

    def about(self, prompt: Mapping[str, Any], samples: int) -> dict[str, Any]:
        """Return a trajectory: the samples of a prompt as a batch, their metrics, and when it was made."""
        start = time.time()
        talks = [
            Conversation(
                [dict(m) for m in prompt["message_log"]],
                prompt.get("extra_env_info"),
                prompt.get("stop_strings"),
            )
            for _ in range(samples)
        ]
        environment = self.environments[prompt["task_name"]]
        for _ in range(self.max_turns):
            active = [talk for talk in talks if not talk.done]
            if not active:
                break
            self._answer(active)
            self._hear(active, environment)
        batch = BatchedDataDict(
            {
                "message_log": [talk.log for talk in talks],
                "extra_env_info": [talk.info for talk in talks],
                "total_reward": torch.tensor([talk.reward for talk in talks]),
                "truncated": torch.tensor([talk.truncated for talk in talks]),
                "loss_multiplier": torch.full((samples,), float(prompt.get("loss_multiplier", 1.0))),
                "length": torch.tensor([sum(len(m["token_ids"]) for m in prompt["message_log"])] * samples),
                "idx": [prompt.get("idx")] * samples,
                "task_name": [prompt["task_name"]] * samples,
            }
        )
        return {
            "batch": batch,
            "rollout_metrics": self._metrics(talks, time.time() - start),
            "timestamp": start,
        }

    def _answer(self, talks: Sequence[Conversation]) -> None:
        pads = {"token_ids": self.tokenizer.pad_token_id}
        flat, lengths = batched_message_log_to_flat_message([talk.log for talk in talks], pads)
        asked = {INPUT_IDS: flat["token_ids"], INPUT_LENGTHS: lengths}
        asked["stop_strings"] = [talk.stop_strings for talk in talks]
        made = call(self.generation.generate, BatchedDataDict(asked), greedy=False)
        for place, talk in enumerate(talks):
            start, stop = int(lengths[place]), int(made["unpadded_sequence_lengths"][place])
            ids = made["output_ids"][place, start:stop]
            answer = {
                "role": "assistant",
                "content": self.tokenizer.decode(ids, skip_special_tokens=True),
                "token_ids": ids,
                GENERATION_LOGPROBS: made["logprobs"][place, start:stop],
            }
            talk.log.append(answer)
            talk.turns += 1
            talk.new_tokens += len(ids)

    def _hear(self, talks: Sequence[Conversation], environment: Any) -> None:
        """Have the environment score the answers; what it says goes on the log if there is room for it."""
        told = call(environment.step, [talk.log for talk in talks], [talk.info for talk in talks])
        observations, infos, stops, rewards, ends, *_ = told
        for place, talk in enumerate(talks):
            talk.reward += float(rewards[place])
            talk.info = infos[place]
            talk.stop_strings = stops[place] if stops else None
            talk.done = bool(ends[place]) or talk.turns == self.max_turns
            if talk.done:
                continue
            observation = observations[place]
            ids = self.tokenizer(observation["content"], add_special_tokens=False, return_tensors="pt")[
                "input_ids"
            ][0]
            room = self.max_tokens - sum(len(m["token_ids"]) for m in talk.log)
            talk.truncated = talk.done = len(ids) >= room
            if not talk.done:
                talk.log.append({**observation, "token_ids": ids.to(torch.int64)})

    def _metrics(self, talks: Sequence[Conversation], seconds: float) -> dict[str, float]:
        return {
            "reward": fmean(talk.reward for talk in talks),
            "turns_per_sample": fmean(talk.turns for talk in talks),
            "gen_tokens_per_sample": fmean(talk.new_tokens for talk in talks),
            "truncation_rate": fmean(talk.truncated for talk in talks),
            "trajectory_duration_s": seconds,
        }
