"""The rollout's data, as small dataclasses."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True)
class Message:
    """One turn of a conversation, as text."""

    role: Role
    content: str


@dataclass(frozen=True)
class Prompt:
    """A task to solve.

    `uid` is unique in its dataset and stable over runs. `info` is what the environment needs to score a completion
    (values that msgpack can carry). `answer` is the right answer as text, if there is one; a supervised warm
    start uses it. `data_set` is the set of the recipe, or the environment, that it is of, and `place` where it stands
    there: fields, since a column of the data may have these names in `info`.
    """

    uid: str
    messages: tuple[Message, ...]
    info: dict[str, Any] = field(default_factory=dict)
    answer: str | None = None
    data_set: str = ""
    place: str = ""

    @property
    def named(self) -> str:
        """How messages name it."""
        return f"prompt '{self.uid}'" + (f" ({self.place})" if self.place else "")


@dataclass
class Rollout:
    """One sample: a prompt, everything generated for it, and its reward.

    `token_ids` (L), `token_mask` (L, 1 on generated assistant tokens, 0 on the rest) and `logprobs` (L, 0 where
    the mask is 0) are aligned; nothing is padded. `sample_id` is `<uid>_g<i>`. `truncated` is True where the
    token limit cut the last turn. `correct` and `answer` are the environment's words on the last completion, None where
    it has none.
    `routes` (at most L, MoE layers, k) are the experts that the first tokens used, in the wire's dtype; the last
    sampled token has none. None without router replay.
    `weight_version` is that of the weights that drew the last token, `weight_version_min` of those that drew the first.
    `token_versions` (L, -1 where the mask is 0) has it for each token where weights may change inside a sample; else it
    is empty.
    """

    sample_id: str
    prompt: Prompt
    group_index: int
    token_ids: list[int] = field(default_factory=list)
    token_mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    reward: float = 0.0
    truncated: bool = True
    turns: int = 0
    weight_version: int = 0
    weight_version_min: int = 0
    token_versions: list[int] = field(default_factory=list)
    correct: bool | None = None
    answer: str | None = None
    routes: torch.Tensor | None = None
    metrics: dict[str, float] = field(default_factory=dict)

    def append(self, ids: Sequence[int], logprobs: Sequence[float] | None = None) -> None:
        """Add tokens: generated ones with their `logprobs`, or, without, those of a prompt or an observation."""
        self.token_ids.extend(ids)
        self.token_mask.extend([int(logprobs is not None)] * len(ids))
        self.logprobs.extend([0.0] * len(ids) if logprobs is None else logprobs)

    @property
    def uid(self) -> str:
        """What a sample shares with its group and with no other sample: `a@7.0` of `a@7.0_g3`."""
        return self.sample_id.removesuffix(f"_g{self.group_index}")

    @property
    def prompt_tokens(self) -> int:
        """Tokens before the first generated one."""
        return self.token_mask.index(1) if 1 in self.token_mask else len(self.token_mask)

    @property
    def response_tokens(self) -> int:
        return sum(self.token_mask)

    @property
    def longest_turn_tokens(self) -> int:
        """Generated tokens of the longest turn; tokens of the environment stand between turns."""
        return max(map(len, bytes(self.token_mask).split(b"\0")))
