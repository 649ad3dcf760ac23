"""When a completion ends: stop token ids, and stop strings, which may span tokens."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from headrace.errors import ConfigError
from headrace.models.generation.interfaces import SamplingParams
from headrace.models.tokenizers import vocabulary_of

_SPARE_TOKENS = 4
"""Tokens looked at beyond a stop string's bytes: room for tokens that decode to nothing."""


@dataclass(frozen=True)
class StopRule:
    """Decides after every step which rows have ended.

    `token_ids` (K) int64 end a row when they come last; `strings` end it when they appear in its text, in
    which special tokens count as they are written. The token that ends a row belongs to the completion.
    """

    token_ids: torch.Tensor
    strings: tuple[str, ...]
    tokenizer: Any

    @property
    def window(self) -> int:
        """How many last tokens can hold a stop string that the last one completes; 1 without strings."""
        # A token that is part of the string holds at least one of its bytes.
        return max((len(s.encode()) + _SPARE_TOKENS for s in self.strings), default=1)

    def ended(self, tail: torch.Tensor) -> torch.Tensor:
        """Return (b) bool from each row's last tokens (b, w): `window` generated ones, or all so far."""
        ended = (tail[:, -1:] == self.token_ids).any(-1)
        if not self.strings:
            return ended
        texts = self.tokenizer.batch_decode(
            tail.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        hits = [any(s in text for s in self.strings) for text in texts]
        return ended | torch.tensor(hits, device=tail.device)


def build_stop_rule(model: Any, tokenizer: Any, params: SamplingParams) -> StopRule:
    """Return the rule for a model: its and its tokenizer's end-of-text tokens, and what `params` adds.

    Raises:
        ConfigError: an empty stop string, or an id that the model has no score for.
    """
    vocabulary = vocabulary_of(model)
    for given in params.stop_token_ids:
        if not 0 <= given < vocabulary:
            raise ConfigError(
                f"generation.stop_token_ids holds {given}, outside the model's vocabulary of {vocabulary}, so that it "
                "never ends a completion; drop it"
            )
    if "" in params.stop_strings:
        raise ConfigError(
            "generation.stop_strings holds an empty string, which would end every completion; drop it"
        )
    configured = getattr(model.generation_config, "eos_token_id", None)
    ids = {*_as_ids(tokenizer.eos_token_id), *_as_ids(configured), *params.stop_token_ids}
    device = "cpu" if model.device.type == "meta" else model.device
    return StopRule(
        torch.tensor(sorted(ids), dtype=torch.int64, device=device), params.stop_strings, tokenizer
    )


def _as_ids(value: int | Iterable[int] | None) -> list[int]:
    if value is None:
        return []
    return [value] if isinstance(value, int) else list(value)
