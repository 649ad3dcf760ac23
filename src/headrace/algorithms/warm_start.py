"""Supervised steps on right (and, by choice, some wrong) answers before RL, so that rewards are not all zero."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from headrace.algorithms.loss import NLLLoss
from headrace.algorithms.updates import OnNonFinite, check_finite
from headrace.config import OptimizerConfig, PolicyConfig, SchedulerConfig, WarmStartConfig
from headrace.data_plane.schema import SAMPLE_ID, pad_values
from headrace.distributed.batched_data_dict import BatchedDataDict
from headrace.distributed.columns import object_array
from headrace.distributed.ragged import offsets_from_lengths, pad_ragged
from headrace.environments.demonstrations import demonstrations, targets
from headrace.errors import ConfigError
from headrace.experience.chat import render_prompt, text_ids
from headrace.experience.types import Prompt
from headrace.models.policy.lm_policy import Policy
from headrace.utils.rounding import round_up
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
    policy scores under top-k or top-p, which the answers are learnt without.

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
            on_progress(i + 1, {"loss": float(result["loss"]), "grad_norm": float(result["grad_norm"])})
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
    """Refuse a prompt whose answer cannot be learned from, before a run begins.

    Raises:
        ConfigError: the first prompt with no single right answer, or with one that the tokenizer cannot write or that
            runs past `max_total_tokens`; or a tokenizer without end-of-text.
    """
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            "warm_start.enabled=true teaches answers to end, and the tokenizer has no end-of-text token; add one, or "
            "set warm_start.enabled=false"
        )
    for prompt in prompts:
        head = render_prompt(tokenizer, prompt.messages)
        for text in targets(prompt, copy_fraction=cfg.copy_fraction):
            try:
                tail = _answer_ids(tokenizer, text)
            except ConfigError as error:
                raise ConfigError(f"warm_start: the answer to {_named(prompt)}: {error}") from error
            if len(head) + len(tail) > max_total_tokens:
                raise ConfigError(
                    f"warm_start: {_named(prompt)} and its answer have {len(head)} + {len(tail)} tokens, more than "
                    f"policy.max_total_sequence_length={max_total_tokens}; raise it, or remove the row"
                )


def _named(prompt: Prompt) -> str:
    place = prompt.info.get("place")
    return f"prompt '{prompt.uid}'" + (f" ({place})" if place else "")


def _answer_ids(tokenizer: Any, text: str) -> list[int]:
    return [*text_ids(tokenizer, text), tokenizer.eos_token_id]


def _batch(policy: Policy, prompts: Sequence[Prompt], cfg: WarmStartConfig, seed: int) -> Any:
    """Return prompt + answer + end-of-text rows, padded; the mask is on the answer and the end-of-text."""
    tokenizer = policy.tokenizer
    drawn = demonstrations(prompts, copy_fraction=cfg.copy_fraction, seed=seed, count=cfg.batch_size)
    encoded = [
        (render_prompt(tokenizer, prompt.messages), _answer_ids(tokenizer, text)) for prompt, text in drawn
    ]
    rows = [torch.tensor([*head, *tail]) for head, tail in encoded]
    masks = [
        torch.cat([torch.zeros(len(h), dtype=torch.uint8), torch.ones(len(t), dtype=torch.uint8)])
        for h, t in encoded
    ]
    lengths = torch.tensor([len(r) for r in rows])
    offsets = offsets_from_lengths(lengths)
    width = round_up(int(lengths.max()), policy.cfg.make_sequence_length_divisible_by)
    pads = pad_values(int(tokenizer.pad_token_id))
    return BatchedDataDict(
        {
            "input_ids": pad_ragged(torch.cat(rows), offsets, width, pads["input_ids"]),
            "input_lengths": lengths,
            "token_mask": pad_ragged(torch.cat(masks), offsets, width, pads["token_mask"]),
            "sample_mask": torch.ones(len(rows)),
            SAMPLE_ID: object_array([prompt.uid for prompt, _ in drawn]),
        }
    )
