"""What `nemo_rl.experience.interfaces` names: the completions of one prompt."""

from dataclasses import dataclass
from typing import Any

NEMO_GYM_TASK_INDEX_KEY = "_ng_task_index"
NEXT_NEMO_GYM_TASK_INDEX_KEY = "next_ng_task_index"

MessageLog = list[dict[str, Any]]


@dataclass
class Completion:
    """One answer: the conversation with its tokens, what the environment adds, whether it was cut off, its reward."""

    message_log: MessageLog
    env_extras: dict[str, Any] | None
    truncated: bool
    reward: float


@dataclass
class PromptGroupRecord:
    """A prompt with all completions that were sampled of it."""

    prompt_idx: int
    prompt: MessageLog
    extra_env_info: dict[str, Any] | None
    metadata: dict[str, Any]
    completions: list[Completion]
    rollout_metrics: dict[str, Any]
