"""headrace's worker in one process: padded, dynamic or packed microbatches."""

import copy
from pathlib import Path
from typing import Any, Literal

import torch

from headrace.algorithms.loss import PolicyGradientLoss
from headrace.config import GenerationConfig, LossConfig, PolicyConfig
from headrace.distributed.batched_data_dict import BatchedDataDict
from headrace.models.policy.workers.automodel_worker import AutomodelPolicyWorker
from headrace.models.tokenizers import SPECIAL_TOKENS, build_character_tokenizer
from training.batch import BETAS, CLIP, LEARNING_RATE, MAX_NORM, WEIGHT_DECAY, Batch, Case

Kind = Literal["padded", "dynamic", "packed"]
_SECTIONS = {"dynamic": "dynamic_batching", "packed": "sequence_packing"}


class Ours:
    """The worker with rows that are on the CPU before every step, as a data plane hands them over."""

    def __init__(self, case: Case, batch: Batch, directory: Path, kind: Kind) -> None:
        self._case, self._batch, self._kind = case, batch, kind
        self._loss = PolicyGradientLoss(LossConfig(clip_low=CLIP, clip_high=CLIP))
        self._worker = AutomodelPolicyWorker(
            _policy(case, directory, kind),
            GenerationConfig(max_new_tokens=8),
            tokenizer=build_character_tokenizer(_characters(case)),
            seed=0,
        )

    def logprobs(self) -> torch.Tensor:
        """Return the worker's logprobs in the batch's order."""
        data, inverse = self._rows()
        found = self._worker.get_logprobs(data, self._case.microbatch_rows)
        if inverse is not None:
            found.reorder_data(inverse)
        scores: torch.Tensor = found["logprobs"]
        return scores

    def step(self) -> tuple[float, float]:
        """Take one step of the worker's `train`."""
        result = self._worker.train(self._rows()[0], self._loss)
        return float(result["loss"]), float(result["grad_norm"])

    def _rows(self) -> tuple[BatchedDataDict, list[int] | None]:
        data = BatchedDataDict(self._batch.columns())
        if self._kind == "padded":
            return data, None
        args: dict[str, Any] = {
            "input_key": "input_ids",
            "input_lengths_key": "input_lengths",
            "max_tokens_per_microbatch": self._case.microbatch_tokens,
        }
        if self._kind == "dynamic":
            args["sequence_length_round"] = 1
        else:
            args |= {"algorithm": "modified_first_fit_decreasing", "sequence_length_pad_multiple": 1}
        name = f"{_SECTIONS[self._kind]}_args"
        parts, inverse = data.shard_by_batch_size(1, batch_size=self._case.rows, **{name: args})
        return copy.copy(parts[0]), inverse


def _characters(case: Case) -> str:
    # As many as the vocabulary has room for: ids without a token have no share of the softmax.
    return "".join(map(chr, range(0x10000, 0x10000 + case.vocabulary - len(SPECIAL_TOKENS))))


def _policy(case: Case, directory: Path, kind: Kind) -> PolicyConfig:
    budget = {
        "enabled": True,
        "train_mb_tokens": case.microbatch_tokens,
        "logprob_mb_tokens": case.microbatch_tokens,
    }
    return PolicyConfig.model_validate(
        {
            "model": {"path": str(directory)},
            "tokenizer": {"builder": "characters", "characters": _characters(case)},
            "precision": "bfloat16",
            "device": case.device.type,
            "max_total_sequence_length": case.longest,
            "train_global_batch_size": case.rows,
            "train_micro_batch_size": case.microbatch_rows,
            "logprob_batch_size": case.microbatch_rows,
            "activation_checkpointing": case.recompute,
            "max_grad_norm": MAX_NORM,
            "optimizer": {"lr": LEARNING_RATE, "betas": list(BETAS), "weight_decay": WEIGHT_DECAY},
            **({_SECTIONS[kind]: budget} if kind in _SECTIONS else {}),
        }
    )
