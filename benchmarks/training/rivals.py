"""The same update written plainly with transformers, and TRL's.

All pad every row to the longest, as both do. The plain step scores with cross-entropy over all positions. TRL's is
`GRPOTrainer.training_step` per microbatch on inputs that are given in place of generated ones, then its accelerator's
clipping and step.
"""

import logging
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from headrace.models.tokenizers import build_character_tokenizer
from training.batch import (
    BETAS,
    CLIP,
    LEARNING_RATE,
    MAX_NORM,
    WEIGHT_DECAY,
    Batch,
    Case,
    load_model,
)


class Plain:
    """transformers: float32 weights under bfloat16 autocast, or bfloat16 weights with a float32 copy to update."""

    def __init__(self, case: Case, batch: Batch, directory: Path, *, master: bool = False) -> None:
        self._case, self._batch = case, batch
        self._model = load_model(case, directory, torch.bfloat16 if master else torch.float32)
        self._weights = list(self._model.parameters())
        self._master = [p.detach().float() for p in self._weights] if master else self._weights
        self._autocast = not master
        self._optimizer = torch.optim.AdamW(
            self._master, lr=LEARNING_RATE, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True
        )

    @torch.no_grad()
    def logprobs(self) -> torch.Tensor:
        """Return the logprobs of all tokens."""
        parts = [self._score(rows) for rows in self._microbatches()]
        return torch.where(self._batch.inside, F.pad(torch.cat(parts), (1, 0)).cpu(), 0.0)

    def step(self) -> tuple[float, float]:
        """Accumulate over microbatches, clip, update."""
        total = self._batch.mask[:, 1:].sum()
        losses = [self._accumulate(rows, float(total)) for rows in self._microbatches()]
        norm = torch.nn.utils.clip_grad_norm_(self._master, MAX_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        if self._master is not self._weights:
            with torch.no_grad():
                torch._foreach_copy_(self._weights, self._master)
        return float(torch.stack(losses).sum()), float(norm)

    def _microbatches(self) -> list[slice]:
        size = self._case.microbatch_rows
        return [slice(i, i + size) for i in range(0, self._case.rows, size)]

    def _score(self, rows: slice) -> torch.Tensor:
        ids = self._batch.ids[rows].to(self._case.device)
        mask = self._batch.inside[rows].to(self._case.device)
        with torch.autocast(self._case.device.type, torch.bfloat16, enabled=self._autocast):
            logits = self._model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1]
        losses = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        return -losses.view(ids.shape[0], -1)

    def _accumulate(self, rows: slice, total: float) -> torch.Tensor:
        device = self._case.device
        logprobs = self._score(rows)
        ratio = (logprobs - self._batch.old[rows, 1:].to(device)).exp()
        advantages = self._batch.advantages[rows, None].to(device)
        gain = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
        loss = -(gain * self._batch.mask[rows, 1:].to(device)).sum() / total
        loss.backward()
        if self._master is not self._weights:
            self._add_gradients()
        return loss.detach()

    def _add_gradients(self) -> None:
        for master, weight in zip(self._master, self._weights):
            if weight.grad is None:
                continue
            if master.grad is None:
                master.grad = weight.grad.float()
            else:
                master.grad.add_(weight.grad)
            weight.grad = None


class TRL:
    """TRL's GRPO update."""

    def __init__(self, case: Case, batch: Batch, directory: Path) -> None:
        self._case, self._batch = case, batch
        self._scratch = tempfile.TemporaryDirectory()
        self._trainer = _make_trainer(case, load_model(case, directory), self._scratch.name)
        self._trainer.create_optimizer()
        accelerator = self._trainer.accelerator
        self._model, self._optimizer = accelerator.prepare(self._trainer.model, self._trainer.optimizer)
        self._trainer.model_wrapped = self._model
        self._steps = case.rows // case.microbatch_rows
        self._trainer.current_gradient_accumulation_steps = self._steps

    @torch.no_grad()
    def logprobs(self) -> torch.Tensor:
        """Return the logprobs of generated tokens, which is all that TRL scores."""
        device, prompt = self._case.device, self._case.prompt
        ids, mask = (x.to(device) for x in (self._batch.ids, self._batch.inside.long()))
        width = ids.shape[1] - prompt
        scores, *_ = self._trainer._get_per_token_logps_and_entropies(
            self._model, ids, mask, width, batch_size=self._case.microbatch_rows
        )
        return torch.where(self._batch.mask, F.pad(scores.float().cpu(), (prompt, 0)), 0.0)

    def step(self) -> tuple[float, float]:
        """Run TRL's training steps of one accumulation, then clip and update as its loop does."""
        train = self._trainer.training_step
        losses = [train(self._model, inputs, None).float() for inputs in self._inputs()]
        norm = self._trainer.accelerator.clip_grad_norm_(self._model.parameters(), MAX_NORM)
        self._optimizer.step()
        self._model.zero_grad()
        return float(torch.stack(losses).sum()), float(norm)

    def _inputs(self) -> list[dict[str, torch.Tensor]]:
        prompt, size, batch = self._case.prompt, self._case.microbatch_rows, self._batch
        whole = {
            "prompt_ids": batch.ids[:, :prompt],
            "prompt_mask": batch.inside[:, :prompt].long(),
            "completion_ids": batch.ids[:, prompt:],
            "completion_mask": batch.inside[:, prompt:].long(),
            "advantages": batch.advantages,
            "old_per_token_logps": batch.old[:, prompt:],
        }
        moved = {name: column.to(self._case.device) for name, column in whole.items()}
        count = batch.mask[:, 1:].sum().to(self._case.device)
        return [
            {**{name: column[i : i + size] for name, column in moved.items()}, "num_items_in_batch": count}
            for i in range(0, self._case.rows, size)
        ]


def _make_trainer(case: Case, model: Any, scratch: str) -> Any:
    # Slow to import, and not needed by the other ways.
    from datasets import Dataset  # noqa: PLC0415
    from trl import GRPOConfig, GRPOTrainer  # noqa: PLC0415

    class GivenInputs(GRPOTrainer):  # type: ignore[misc]
        def _prepare_inputs(self, generation_batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            return generation_batch

    steps = case.rows // case.microbatch_rows
    args = GRPOConfig(
        output_dir=scratch,
        per_device_train_batch_size=case.microbatch_rows,
        gradient_accumulation_steps=steps,
        steps_per_generation=steps,
        num_generations=case.microbatch_rows,
        max_completion_length=case.longest - case.prompt,
        bf16=True,
        gradient_checkpointing=case.recompute,
        gradient_checkpointing_kwargs={"use_reentrant": False} if case.recompute else None,
        beta=0.0,
        epsilon=CLIP,
        loss_type="dapo",
        temperature=1.0,
        learning_rate=LEARNING_RATE,
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        weight_decay=WEIGHT_DECAY,
        max_grad_norm=MAX_NORM,
        optim="adamw_torch_fused" if case.device.type == "cuda" else "adamw_torch",
        use_cpu=case.device.type == "cpu",
        report_to="none",
        disable_tqdm=True,
    )
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return GivenInputs(
            model=model,
            args=args,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            train_dataset=Dataset.from_dict({"prompt": ["a"] * case.rows}),
            processing_class=build_character_tokenizer("abcdefgh"),
        )
