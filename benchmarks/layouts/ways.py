"""Two ways to train on the same packed rows: headrace's worker, and FSDP2 of transformers written plainly."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from headrace.algorithms.loss import NLLLoss
from headrace.config import GenerationConfig, PolicyConfig
from headrace.distributed.batched_data_dict import BatchedDataDict
from headrace.distributed.ragged import RowLayout
from headrace.models.automodel.attention import PACKED_ATTENTION
from headrace.models.automodel.data import Packing, pack
from headrace.models.policy.workers.automodel_worker import AutomodelPolicyWorker
from headrace.models.tokenizers import SPECIAL_TOKENS, build_character_tokenizer
from layouts.cases import COMPILED, MODELS, WHOLE, Case, Scale, model_config

LEARNING_RATE, BETAS, WEIGHT_DECAY, MAX_NORM = 1e-6, (0.9, 0.95), 0.01, 1.0


class Way(Protocol):
    """One rank of a way to train and to score; its rows are on the CPU, with their plan."""

    device: torch.device

    def step(self, rows: BatchedDataDict) -> tuple[float, float]:
        """Forward, backward, clip, update; return this rank's share of the loss, and the gradient's norm."""
        ...

    def score(self, rows: BatchedDataDict) -> torch.Tensor:
        """Return logprobs, on the CPU."""
        ...


def save_weights(name: str, scale: Scale, directory: Path, device: torch.device) -> None:
    """Draw bfloat16 weights on the device and write them as a model directory."""
    config = model_config(name, scale)
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(config.pop("model_type"), **config), dtype=torch.bfloat16
        )
    model.save_pretrained(directory)


class Headrace:
    """headrace's worker, as a policy has one per rank."""

    def __init__(self, case: Case, scale: Scale, directory: Path, device: torch.device, rows: int) -> None:
        self.device = device
        self.worker = AutomodelPolicyWorker(
            _policy(case, scale, directory, device, rows),
            GenerationConfig(max_new_tokens=8),
            tokenizer=build_character_tokenizer(_characters(scale.vocabulary)),
            seed=0,
        )
        self._loss = NLLLoss()

    def step(self, rows: BatchedDataDict) -> tuple[float, float]:
        result = self.worker.train(_copy(rows), self._loss)
        return float(result["loss"]), float(result["grad_norm"])

    def score(self, rows: BatchedDataDict) -> torch.Tensor:
        logprobs: torch.Tensor = self.worker.get_logprobs(_copy(rows))["logprobs"]
        return logprobs


class Plain:
    """A transformers model under `fully_shard`, in a plain loop over the same packed microbatches.

    Attention is the same as headrace's, through torch's `varlen_attn` on a GPU: transformers' own for packed rows would
    take a mask of T x T. Logits are whole, as the model returns them.
    """

    def __init__(self, case: Case, scale: Scale, directory: Path, device: torch.device, rows: int) -> None:
        self.device, self._packing = device, Packing()
        self._half = device.type == "cuda"
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        model.set_attn_implementation(PACKED_ATTENTION)
        if MODELS[case.model].recompute:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self._model = model.to(device).train()
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        compute = torch.bfloat16 if self._half else torch.float32
        policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
        for layer in self._model.model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(self._model, mesh=mesh, mp_policy=policy)
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=LEARNING_RATE, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True
        )

    def step(self, rows: BatchedDataDict) -> tuple[float, float]:
        total = (rows["token_mask"][:, 1:].sum()).to(self.device)
        dist.all_reduce(total)
        losses = []
        for part in _microbatches(rows):
            nll = self._nll(part)
            weights = RowLayout(part["input_lengths"], part["token_mask"].shape[1]).strip(part["token_mask"])
            loss = (nll * weights.to(self.device)[1:]).sum() / total
            # FSDP2 averages gradients over the ranks.
            (loss * dist.get_world_size()).backward()
            losses.append(loss.detach())
        norm: Any = torch.nn.utils.clip_grad_norm_(self._model.parameters(), MAX_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad()
        whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
        return float(torch.stack(losses).sum()), float(whole)

    @torch.no_grad()
    def score(self, rows: BatchedDataDict) -> torch.Tensor:
        return torch.cat([-self._nll(part) for part in _microbatches(rows)]).cpu()

    def _nll(self, part: BatchedDataDict) -> torch.Tensor:
        """Return the loss of every packed token but the first; at a row's first token it counts for nothing."""
        ids = part["input_ids"].to(self.device)
        kwargs = pack(ids, RowLayout(part["input_lengths"], ids.shape[1]), self._packing)
        logits = self._model(**kwargs, use_cache=False).logits[0, :-1]
        return F.cross_entropy(logits.float(), kwargs["input_ids"][0, 1:], reduction="none")


def _microbatches(rows: BatchedDataDict) -> list[BatchedDataDict]:
    return list(rows.get_batch(0).microbatches("packed", 1))


def _copy(rows: BatchedDataDict) -> BatchedDataDict:
    return copy.copy(rows)


def _characters(vocabulary: int) -> str:
    # As many as the vocabulary has room for: ids without a token have no share of the softmax.
    return "".join(map(chr, range(0x10000, 0x10000 + vocabulary - len(SPECIAL_TOKENS))))


def _policy(case: Case, scale: Scale, directory: Path, device: torch.device, rows: int) -> PolicyConfig:
    budget = microbatch_tokens(case, scale)
    cfg: Mapping[str, Any] = {
        "model": {"path": str(directory)},
        "tokenizer": {"builder": "characters", "characters": "ab"},
        "precision": "bfloat16" if device.type == "cuda" else "float32",
        "device": device.type,
        "workers": case.gpus,
        "parallel": case.parallel,
        "compile": case.way == COMPILED,
        **({"logprob_chunk_tokens": budget} if case.way == WHOLE else {}),
        "max_total_sequence_length": scale.longest,
        "train_global_batch_size": rows,
        "activation_checkpointing": MODELS[case.model].recompute,
        "max_grad_norm": MAX_NORM,
        "sequence_packing": {"enabled": True, "train_mb_tokens": budget, "logprob_mb_tokens": budget},
        "optimizer": {"lr": LEARNING_RATE, "betas": list(BETAS), "weight_decay": WEIGHT_DECAY},
    }
    return PolicyConfig.model_validate(cfg)


def microbatch_tokens(case: Case, scale: Scale) -> int:
    """Return the budget of a microbatch: context ranks share its tokens, so that each computes as many as ever."""
    return scale.mb_tokens * case.parallel.get("context", 1)
