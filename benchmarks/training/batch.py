"""The batch and the model that every way of training gets, and what a way of training is."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

PROMPT_TOKENS_SHARE = 16
"""The longest row is this many prompts long; all prompts are equally long."""
CLIP = 0.2
LEARNING_RATE, BETAS, WEIGHT_DECAY, MAX_NORM = 1e-6, (0.9, 0.95), 0.01, 1.0


@dataclass(frozen=True)
class Case:
    """Sizes of a run; `microbatch_tokens` are the padded tokens of a microbatch, and the budget of a packed one."""

    rows: int
    longest: int
    fill: float
    microbatch_rows: int
    vocabulary: int
    sizes: Mapping[str, int]
    model_type: str = "qwen3"
    recompute: bool = False
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def microbatch_tokens(self) -> int:
        """Tokens of a microbatch, padding included."""
        return self.microbatch_rows * self.longest

    @property
    def prompt(self) -> int:
        """Tokens of each prompt."""
        return self.longest // PROMPT_TOKENS_SHARE

    def config(self) -> dict[str, Any]:
        """Return the transformers config of the model; weights are drawn at random."""
        return {
            "model_type": self.model_type,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": self.longest,
            "tie_word_embeddings": True,
            "pad_token_id": 0,
            **self.sizes,
        }


# The sizes of Qwen3-0.6B.
LARGE = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
TINY = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


@dataclass
class Batch:
    """Right-padded rows on the CPU: a prompt, then generated tokens that the loss counts.

    `old` are the logprobs (N, S) that ratios are taken to; they come from the model itself, moved a little.
    """

    ids: torch.Tensor
    lengths: torch.Tensor
    mask: torch.Tensor
    advantages: torch.Tensor
    old: torch.Tensor

    @property
    def tokens(self) -> int:
        """Tokens that are not padding."""
        return int(self.lengths.sum())

    @property
    def inside(self) -> torch.Tensor:
        """(N, S) bool: where there are tokens."""
        return torch.arange(self.ids.shape[1]) < self.lengths[:, None]

    def columns(self) -> dict[str, torch.Tensor]:
        """Return the columns that headrace's loss reads."""
        return {
            "input_ids": self.ids,
            "input_lengths": self.lengths,
            "token_mask": self.mask.to(torch.uint8),
            "sample_mask": torch.ones(len(self.lengths)),
            "advantages": self.advantages[:, None].expand(self.ids.shape).contiguous(),
            "prev_logprobs": self.old,
            "generation_logprobs": self.old,
        }


class Way(Protocol):
    """One way to score and to train; built with fresh weights, all alike."""

    def logprobs(self) -> torch.Tensor:
        """Return (N, S) on the CPU, column t for token t; 0 where the way does not score."""
        ...

    def step(self) -> tuple[float, float]:
        """Forward, backward and update; return the loss and the gradient's norm before clipping."""
        ...


def draw_lengths(case: Case) -> torch.Tensor:
    """Return lognormal lengths, the longest `case.longest`, whose mean is `case.fill` of that."""
    generator = torch.Generator().manual_seed(case.rows)
    draws = torch.empty(case.rows, dtype=torch.float64).log_normal_(0.0, 0.7, generator=generator)
    low, high = 1.0, 4.0 * case.longest
    for _ in range(60):
        middle = (low + high) / 2
        lengths = (draws * middle).clamp(2 * case.prompt, case.longest).long()
        lengths[0] = case.longest
        low, high = (middle, high) if lengths.sum() < case.fill * case.rows * case.longest else (low, middle)
    return lengths


def draw_batch(case: Case) -> Batch:
    """Return random rows; `old` is 0 until it is known."""
    generator = torch.Generator().manual_seed(1)
    lengths = draw_lengths(case)
    column = torch.arange(case.longest)
    inside = column < lengths[:, None]
    ids = torch.randint(5, case.vocabulary, inside.shape, generator=generator) * inside
    advantages = torch.randn(case.rows, generator=generator)
    return Batch(ids, lengths, inside & (column >= case.prompt), advantages, torch.zeros(inside.shape))


def set_old_logprobs(batch: Batch, logprobs: torch.Tensor) -> None:
    """Take the policy's own logprobs, moved so that ratios differ from 1 and some are clipped."""
    noise = torch.randn(logprobs.shape, generator=torch.Generator().manual_seed(2))
    batch.old = torch.where(batch.inside, logprobs + 0.1 * noise, 0.0)


def save_model(case: Case, directory: Path) -> int:
    """Draw float32 weights on the case's device, write them as a model directory, and return their number."""
    disable_progress_bar()
    torch.manual_seed(0)
    given = case.config()
    config = AutoConfig.for_model(given.pop("model_type"), **given)
    with case.device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(directory)
    return sum(p.numel() for p in model.parameters())


def load_model(case: Case, directory: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Return the model as transformers loads it, in evaluation mode: it has no dropout."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="sdpa")
    if case.recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
    return model.to(case.device)
