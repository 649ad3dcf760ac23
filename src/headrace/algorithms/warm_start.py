"""Supervised steps on right (and, by choice, some wrong) completions before RL, so that rewards are not all zero."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from headrace.algorithms.loss import NLLLoss
from headrace.algorithms.updates import OnNonFinite, check_finite
from headrace.config import OptimizerConfig, PolicyConfig, SchedulerConfig, WarmStartConfig
from headrace.data_plane.schema import SAMPLE_ID
from headrace.distributed.batched_data_dict import BatchedDataDict
from headrace.distributed.columns import object_array
from headrace.distributed.ragged import nested_from_ragged, offsets_from_lengths
from headrace.errors import ConfigError
from headrace.experience.chat import render_prompt, text_ids
from headrace.experience.types import Prompt
from headrace.models.policy.lm_policy import Policy
from headrace.utils.seeding import derive_seed

_REPORT_EVERY = 20


def warm_start(
    policy: Policy,
    prompts: Sequence[Prompt],
    cfg: WarmStartConfig,
    *,
    seed: int,
    first: int,
    on_non_finite: OnNonFinite,
    filtered: bool,
    on_progress: Callable[[int, dict[str, float]], None],
    should_stop: Callable[[], bool],
) -> int:
    """Take supervised steps `first` to `cfg.steps` - 1; return how many are done in all.

    Step i draws its own batch from (seed, i), so a run that stops and goes on sees the same batches. `filtered`: the
    policy scores under top-k or top-p, which supervised steps do without.

    Raises:
        HeadraceError: a loss or gradient that is not finite, with `on_non_finite` "stop".
    """
    loss_fn = NLLLoss(filtered=filtered)
    for i in range(first, cfg.steps):
        if should_stop():
            return i
        batch = _batch(policy, prompts, cfg, derive_seed(seed, "warm-start", i))
        result = policy.train(batch, loss_fn, gbs=cfg.batch_size)
        check_finite(result, on_non_finite, f"warm-start step {i + 1}")
        if (i + 1) % _REPORT_EVERY == 0 or i + 1 == cfg.steps:
            on_progress(i + 1, {name: float(result[name]) for name in ("loss", "grad_norm")})
    return cfg.steps


def warm_start_optimizer(
    policy_cfg: PolicyConfig, cfg: WarmStartConfig
) -> tuple[OptimizerConfig, SchedulerConfig]:
    """Return the settings of the supervised steps: the policy's own, with the warm start's rate, falling to 0."""
    optimizer = policy_cfg.optimizer.model_copy(update={"lr": cfg.lr})
    decay_steps = max(cfg.steps - cfg.warmup_steps, 1)
    return optimizer, SchedulerConfig(
        kind="linear", warmup_steps=cfg.warmup_steps, decay_steps=decay_steps, min_lr_ratio=0.02
    )


def check_demonstrations(
    tokenizer: Any, prompts: Sequence[Prompt], cfg: WarmStartConfig, *, max_total_tokens: int
) -> None:
    """Refuse a prompt that cannot be learned from, before a run begins.

    Raises:
        ConfigError: the first prompt with no single right answer, or with one that the tokenizer cannot write or that
            runs past `max_total_tokens`; or a tokenizer without end-of-text.
    """
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            "warm_start.enabled=true teaches completions to end, and the tokenizer has no end-of-text token; add one, "
            "or set warm_start.enabled=false"
        )
    copies = [False] * (cfg.copy_fraction < 1) + [True] * (cfg.copy_fraction > 0)
    for prompt in prompts:
        head = len(render_prompt(tokenizer, prompt.messages))
        for text in [_target(prompt, copy) for copy in copies]:
            try:
                tail = len(_completion_ids(tokenizer, text))
            except ConfigError as error:
                raise ConfigError(f"warm_start: the answer to {prompt.named}: {error}") from error
            if head + tail > max_total_tokens:
                raise ConfigError(
                    f"warm_start: {prompt.named} and its answer have {head} + {tail} tokens, more than "
                    f"policy.max_total_sequence_length={max_total_tokens}; raise it, or remove the row"
                )


def demonstrations(
    prompts: Sequence[Prompt], *, copy_fraction: float, seed: int, count: int
) -> list[tuple[Prompt, str]]:
    """Draw `count` pairs of a prompt and the completion to learn.

    Each draw takes a prompt at random, with replacement. The completion is the prompt's answer or, with probability
    `copy_fraction`, its own last message. A model trained on such pairs holds both habits, and rewards then tell it
    which one to keep.

    Raises:
        ConfigError: no prompts, or a prompt without an answer, which the message names.
    """
    if not prompts:
        raise ConfigError("a warm start needs training prompts; got none")
    order = np.random.default_rng(derive_seed(seed, "demonstrations"))
    drawn = [prompts[i] for i in order.integers(len(prompts), size=count).tolist()]
    return [
        (prompt, _target(prompt, copy)) for prompt, copy in zip(drawn, order.random(count) < copy_fraction)
    ]


def _target(prompt: Prompt, copy: bool) -> str:
    if copy:
        return prompt.messages[-1].content
    if prompt.answer is None:
        raise ConfigError(
            f"prompt '{prompt.uid}' has no single right answer to learn from; set warm_start.enabled=false, "
            "or use an environment whose prompts have one"
        )
    return prompt.answer


def _completion_ids(tokenizer: Any, text: str) -> list[int]:
    return [*text_ids(tokenizer, text), tokenizer.eos_token_id]


def _batch(policy: Policy, prompts: Sequence[Prompt], cfg: WarmStartConfig, seed: int) -> Any:
    """Return prompt + completion + end-of-text rows, padded (N, S); the mask is on the last two."""
    tokenizer = policy.tokenizer
    drawn = demonstrations(prompts, copy_fraction=cfg.copy_fraction, seed=seed, count=cfg.batch_size)
    encoded = [
        (render_prompt(tokenizer, prompt.messages), _completion_ids(tokenizer, text))
        for prompt, text in drawn
    ]
    ids = torch.tensor([token for head, tail in encoded for token in (*head, *tail)])
    mask = [bit for head, tail in encoded for bit in [0] * len(head) + [1] * len(tail)]
    lengths = torch.tensor([len(head) + len(tail) for head, tail in encoded])
    offsets = offsets_from_lengths(lengths)
    rows = {
        "input_ids": nested_from_ragged(ids, offsets),
        "input_lengths": lengths,
        "token_mask": nested_from_ragged(torch.tensor(mask, dtype=torch.uint8), offsets),
        "sample_mask": torch.ones(len(drawn)),
        SAMPLE_ID: object_array([prompt.uid for prompt, _ in drawn]),
    }
    return policy.padded(BatchedDataDict(rows))
