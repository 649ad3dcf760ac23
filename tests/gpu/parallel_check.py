# ruff: noqa: E402 - the tests' folder has to be on the path first
"""Sharded policies on several GPUs against one: torchrun --nproc-per-node 2 tests/gpu/parallel_check.py [--out FILE]

Every rank first trains and scores alone on its own GPU, in float32 and in bfloat16; then all ranks do so together,
data, tensor, sequence and context parallel. How far the single bfloat16 run is from the single float32 run is what
rounding does; a sharded bfloat16 run must be no further from it than 1.5 times that. Sharded float32 runs must give
the single float32 run's numbers. Sequences are packed; half precision attends through torch's varlen_attn.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "src"), str(ROOT / "benchmarks")]

from run import where

from headrace.config import GenerationConfig, PolicyConfig
from headrace.distributed.batched_data_dict import BatchedDataDict
from headrace.models.policy.results import merge_rows
from headrace.models.policy.workers.automodel_worker import AutomodelPolicyWorker
from reference_training import PolicyGradient
from tiny_models import CHARACTERS, tiny_tokenizer

STEPS = 3
VOCABULARY = 32_000
LENGTHS = [1024, 300, 777, 512, 64, 900, 650, 1000, 128, 333, 1024, 480, 210, 700, 850, 96]
MB_TOKENS = 4096
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "initializer_range": 0.05,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "intermediate_size": 2816, **_COMMON},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "intermediate_size": 2816,
        "moe_intermediate_size": 512,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "tie_word_embeddings": True,
        **_COMMON,
    },
}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "data": ({}, {}),
    "tensor": ({"tensor": 2}, {}),
    "tensor_sequence": ({"tensor": 2, "sequence_parallel": True}, {}),
    "context": ({"context": 2}, {}),
    "data_offload_recompute": ({"cpu_offload": True}, {"activation_checkpointing": True}),
    "tensor_recompute": ({"tensor": 2}, {"activation_checkpointing": True}),
}


def batch() -> BatchedDataDict:
    """Return rows of random tokens whose last two thirds count."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.tensor(LENGTHS)
    shape, column = (len(LENGTHS), max(LENGTHS)), torch.arange(max(LENGTHS))
    there = column < sizes[:, None]
    ids = torch.randint(5, VOCABULARY, shape, generator=generator)
    return BatchedDataDict(
        {
            "input_ids": torch.where(there, ids, 0),
            "input_lengths": sizes,
            "token_mask": (there & (column >= (sizes // 3)[:, None])).to(torch.uint8),
            "sample_mask": torch.ones(len(LENGTHS)),
            "advantages": torch.randn(shape, generator=generator) * there,
        }
    )


def make_worker(
    model: str, precision: str, parallel: dict[str, Any], changes: dict[str, Any]
) -> AutomodelPolicyWorker:
    """Return a worker of this rank over all ranks, or of one process before there is a process group."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    cfg = PolicyConfig.model_validate(
        {
            "model": {"config": MODELS[model]},
            "tokenizer": {"builder": "characters", "characters": CHARACTERS[:59]},
            "precision": precision,
            "device": "cuda",
            "workers": world,
            "parallel": parallel,
            "max_total_sequence_length": 1024,
            "train_global_batch_size": len(LENGTHS),
            "sequence_packing": {
                "enabled": True,
                "train_mb_tokens": MB_TOKENS,
                "logprob_mb_tokens": MB_TOKENS,
            },
            "optimizer": {"lr": 1e-5},
            **changes,
        }
    )
    return AutomodelPolicyWorker(cfg, GenerationConfig(max_new_tokens=8), tokenizer=tiny_tokenizer(), seed=0)


def shards(count: int) -> tuple[list[BatchedDataDict], list[int]]:
    """Return the batch packed for `count` replicas, and what restores its order."""
    args: Any = {
        "input_key": "input_ids",
        "input_lengths_key": "input_lengths",
        "max_tokens_per_microbatch": MB_TOKENS,
        "algorithm": "first_fit_decreasing",
        "sequence_length_pad_multiple": 1,
    }
    parts, inverse = batch().shard_by_batch_size(count, batch_size=len(LENGTHS), sequence_packing_args=args)
    return parts, inverse


def run(worker: AutomodelPolicyWorker) -> dict[str, Any]:
    """Score, then train; losses and logprobs are of the whole batch, on every rank."""
    own = dist.get_rank(worker.dp_group) if worker.dp_group else 0
    logprobs = worker.get_logprobs(shards(worker.dp_size)[0][own])["logprobs"]
    losses, norms, seconds = [], [], []
    for _ in range(STEPS):
        part = shards(worker.dp_size)[0][own]
        torch.cuda.synchronize()
        start = time.perf_counter()
        result = worker.train(part, PolicyGradient())
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        losses.append(total(result["loss"].cuda(), worker))
        norms.append(float(result["grad_norm"][0]))
    return {
        "loss": losses,
        "grad_norm": norms,
        "logprobs": all_rows(logprobs, worker),
        "step_s": min(seconds),
    }


def total(loss: torch.Tensor, worker: AutomodelPolicyWorker) -> float:
    """Return the sum of the replicas' shares."""
    if worker.dp_group:
        dist.all_reduce(loss, group=worker.dp_group)
    return float(loss)


def all_rows(logprobs: torch.Tensor, worker: AutomodelPolicyWorker) -> torch.Tensor:
    """Return the logprobs of all replicas in the batch's order."""
    parts = [logprobs]
    if worker.dp_group and worker.dp_size > 1:
        gathered: list[Any] = [None] * worker.dp_size
        dist.all_gather_object(gathered, logprobs, group=worker.dp_group)
        parts = gathered
    rows: torch.Tensor = merge_rows([{"logprobs": part} for part in parts], shards(worker.dp_size)[1])[
        "logprobs"
    ]
    return rows


def gaps(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, float]:
    """Return how far two runs are apart."""
    gap = (ours["logprobs"] - theirs["logprobs"])[theirs["logprobs"] != 0].abs()
    return {
        "loss_max": max(abs(a - b) for a, b in zip(ours["loss"], theirs["loss"])),
        "grad_norm_relative": max(abs(a / b - 1) for a, b in zip(ours["grad_norm"], theirs["grad_norm"])),
        "logprob_mean": float(gap.mean()),
        "logprob_max": float(gap.max()),
    }


def within(precision: str, found: dict[str, float], rounding: dict[str, float]) -> bool:
    """Return whether a sharded run is as near to the single float32 run as it must be."""
    if precision == "float32":
        return (
            found["loss_max"] < 1e-4 and found["grad_norm_relative"] < 1e-3 and found["logprob_mean"] < 1e-4
        )
    return (
        found["logprob_mean"] < 1.5 * rounding["logprob_mean"] + 1e-4
        and found["loss_max"] < 3 * rounding["loss_max"] + 2e-3
        and found["grad_norm_relative"] < 3 * rounding["grad_norm_relative"] + 5e-3
    )


def check_checkpoint(model: str, parallel: dict[str, Any]) -> bool:
    """Return whether a saved worker and the one that goes on from its checkpoint take the same step."""
    folder: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    worker = make_worker(model, "bfloat16", parallel, {})
    own = dist.get_rank(worker.dp_group)
    worker.train(shards(worker.dp_size)[0][own], PolicyGradient())
    worker.save_checkpoint(Path(folder[0]))
    other = make_worker(model, "bfloat16", parallel, {})
    other.load_checkpoint(Path(folder[0]))
    equal = all(
        torch.equal(a.to_local(), b.to_local())
        for a, b in zip(worker.model.parameters(), other.model.parameters())
    )
    equal &= all(
        torch.equal(x[key].to_local(), y[key].to_local())
        for x, y in zip(worker.optimizer.state.values(), other.optimizer.state.values())
        for key in ("exp_avg", "exp_avg_sq")
    )
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])
    return equal


def main() -> int:
    """Run every case and write the result; the exit status is 1 where a case fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    args = parser.parse_args()
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    alone = {(m, p): run(make_worker(m, p, {}, {})) for m in args.models for p in ("float32", "bfloat16")}
    torch.cuda.empty_cache()
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    cases: list[dict[str, Any]] = []
    for model in args.models:
        truth = alone[model, "float32"]
        rounding = gaps(alone[model, "bfloat16"], truth)
        single = {k: alone[model, "bfloat16"][k] for k in ("loss", "grad_norm", "step_s")}
        cases.append(
            {"model": model, "case": "one GPU", "precision": "bfloat16", "to_float32": rounding, **single}
        )
        for name, (parallel, changes) in CASES.items():
            for precision in ("float32", "bfloat16"):
                result = run(make_worker(model, precision, parallel, changes))
                found = gaps(result, truth)
                case = {
                    "model": model,
                    "case": name,
                    "precision": precision,
                    "to_float32": found,
                    "to_one_gpu": gaps(result, alone[model, precision]),
                    **{k: result[k] for k in ("loss", "grad_norm", "step_s")},
                    "ok": within(precision, found, rounding),
                }
                cases.append(case)
                if rank == 0:
                    print(model, name, precision, "ok" if case["ok"] else "FAILED", found, flush=True)
                torch.cuda.empty_cache()
        for parallel in ({}, {"tensor": 2}):
            equal = check_checkpoint(model, parallel)
            cases.append({"model": model, "case": "checkpoint", "parallel": parallel, "ok": equal})
    passed = all(case.get("ok", True) for case in cases)
    if rank == 0:
        report = {
            "gpus": dist.get_world_size(),
            "gpu": torch.cuda.get_device_name(),
            "where": where(),
            "lengths": LENGTHS,
            "mb_tokens": MB_TOKENS,
            "models": {name: MODELS[name] for name in args.models},
            "passed": passed,
            "cases": cases,
        }
        if args.out is not None:
            args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        print("passed" if passed else "FAILED", flush=True)
    dist.destroy_process_group()
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
