"""What `nemo_rl.data.interfaces` names: the forms of a datum, and of the functions that make one."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NotRequired, Protocol, TypedDict

import torch

from headrace.errors import ConfigError

LLMMessageLogType = list[dict[str, str | torch.Tensor]]
"""A conversation: messages with `role`, `content`, and, once tokenized, `token_ids`."""

FlatMessagesType = dict[str, list[str] | torch.Tensor]
"""The messages of a conversation, key by key."""


class DatumSpec(TypedDict):
    """One prompt: its messages, their tokens, and what the environment needs."""

    message_log: LLMMessageLogType
    length: int
    extra_env_info: dict[str, Any] | None
    loss_multiplier: float
    idx: int
    task_name: NotRequired[str]
    stop_strings: NotRequired[list[str]]


class PreferenceDatumSpec(TypedDict):
    """Two answers to one prompt, the better one and the other."""

    message_log_chosen: LLMMessageLogType
    message_log_rejected: LLMMessageLogType
    length_chosen: int
    length_rejected: int
    loss_multiplier: float
    idx: int


@dataclass
class TaskDataSpec:
    """How prompts of a task are made: texts around the question, and how videos are sampled.

    `prompt` and `system_prompt` are the texts of `prompt_file` and `system_prompt_file`.

    Raises:
        ConfigError: a file that cannot be read.
    """

    task_name: str | None = None
    prompt_file: str | Path | None = None
    system_prompt_file: str | Path | None = None
    num_frames: int | None = None
    video_sampling_style: str | None = None
    video_target_num_patches: int | None = None
    video_temporal_patch_size: int | None = None
    video_maintain_aspect_ratio: bool | None = None
    min_generation_tokens: int | None = None

    def __post_init__(self) -> None:
        self.prompt = _text("prompt_file", self.prompt_file)
        self.system_prompt = _text("system_prompt_file", self.system_prompt_file)

    def copy_defaults(self, from_spec: "TaskDataSpec") -> None:
        """Take over from `from_spec` what is not set here, but for the task's name."""
        names = {field.name for field in fields(self)} - {"task_name"} | {"prompt", "system_prompt"}
        for name in names:
            if getattr(self, name) is None:
                setattr(self, name, getattr(from_spec, name))


class TaskDataProcessFnCallable(Protocol):
    """Makes a datum of an example."""

    def __call__(
        self,
        datum_dict: dict[str, Any],
        task_data_spec: TaskDataSpec,
        tokenizer: Any,
        max_seq_length: int,
        idx: int,
    ) -> DatumSpec: ...


class TaskDataPreProcessFnCallable(Protocol):
    """Makes an example of a row of a data set."""

    def __call__(self, datum_dict: dict[str, Any]) -> dict[str, Any]: ...


def _text(key: str, path: str | Path | None) -> str | None:
    if path is None:
        return None
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{key}={path} cannot be read: {error}") from error
