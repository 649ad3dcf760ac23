# ruff: noqa: E402 - the tests' folder has to be on the path first
"""Sharded policies on several GPUs against one: torchrun --nproc-per-node N tests/gpu/parallel_check.py [--out FILE]

Every rank first trains and scores alone on its own GPU, in float32 and in bfloat16; then all ranks do so together, in
every layout of `CASES` that N ranks can have. What a layout's replica leaves of N is data parallel, so that on 4 ranks
`tensor` is tensor 2 x data 2, and on 8 `tensor_context` is tensor 2 x context 2 x data 2. How far the single bfloat16
run is from the single float32 run is what rounding does; a sharded bfloat16 run must be no further from it than 1.5
times that. Sharded float32 runs must give the single float32 run's numbers. A mixture of experts replays routes drawn
at random in all runs, since a router's tie falls either way by rounding. Sequences are packed; half precision attends
through torch's varlen_attn. With `--device cpu` tiny models do the same over gloo, in float32.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
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
LENGTHS = [1024, 300, 777, 512, 64, 900, 650, 1000, 128, 333, 1024, 480, 210, 700, 850, 96]
MB_TOKENS = 4096
TINY_SHARE = 32
"""By this `--device cpu` divides lengths and the token budget."""
_COMMON: dict[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 1024,
    "num_hidden_layers": 6,
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
TINY: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
}
TINY_MOE = {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "data": ({}, {}),
    "tensor": ({"tensor": 2}, {}),
    "tensor_sequence": ({"tensor": 2, "sequence_parallel": True}, {}),
    "context": ({"context": 2}, {}),
    "data_by_layer": ({"gathered_gib": 0}, {}),
    "data_offload_recompute": ({"cpu_offload": True, "gathered_gib": 0}, {"activation_checkpointing": True}),
    "tensor_recompute": ({"tensor": 2, "gathered_gib": 0}, {"activation_checkpointing": True}),
    "tensor_context": ({"tensor": 2, "context": 2}, {}),
    "tensor_context_sequence": ({"tensor": 2, "context": 2, "sequence_parallel": True}, {}),
    "tensor_of_4": ({"tensor": 4}, {}),
    "context_of_4_recompute": ({"context": 4}, {"activation_checkpointing": True}),
    "expert": ({"expert": 2}, {}),
    "expert_recompute": ({"expert": 2, "gathered_gib": 0}, {"activation_checkpointing": True}),
    "expert_context": ({"expert": 2, "context": 2}, {}),
    "expert_offload": ({"expert": 2, "cpu_offload": True}, {}),
    "expert_of_4": ({"expert": 4}, {}),
}
STORED: tuple[dict[str, Any], ...] = ({}, {"tensor": 2}, {"tensor": 2, "context": 2}, {"expert": 2})
"""Layouts whose checkpoints are read back."""


def on_cpu() -> bool:
    return not torch.cuda.is_initialized()


def fits(parallel: dict[str, Any], world: int, model: str) -> bool:
    """Return whether `world` ranks make whole replicas of a layout, and the model has experts where they share some."""
    replica, experts = parallel.get("tensor", 1) * parallel.get("context", 1), parallel.get("expert", 1)
    return world % replica == 0 and world % experts == 0 and (experts == 1 or "num_experts" in MODELS[model])


def laid_out(parallel: dict[str, Any], world: int) -> str:
    """Return how the ranks are laid out: tensor 2 x data 2."""
    sizes = {name: parallel.get(name, 1) for name in ("tensor", "context")}
    sizes["data"] = world // (sizes["tensor"] * sizes["context"])
    shown = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one rank"
    return shown + (f", experts over {parallel['expert']}" if "expert" in parallel else "")


def model_sizes(model: str) -> dict[str, Any]:
    """Return the config of a model: small on a GPU, tiny on a CPU."""
    moe = TINY_MOE if "num_experts" in MODELS[model] else {}
    return MODELS[model] | (TINY | moe if on_cpu() else {})


def row_lengths() -> list[int]:
    return [length // TINY_SHARE for length in LENGTHS] if on_cpu() else LENGTHS


def mb_tokens() -> int:
    return MB_TOKENS // TINY_SHARE if on_cpu() else MB_TOKENS


def batch(worker: AutomodelPolicyWorker) -> BatchedDataDict:
    """Return rows of random tokens whose last two thirds count, with routes where the worker replays them."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.tensor(row_lengths())
    shape, column = (len(sizes), int(sizes.max())), torch.arange(int(sizes.max()))
    there = column < sizes[:, None]
    ids = torch.randint(5, model_sizes("llama")["vocab_size"], shape, generator=generator)
    rows = BatchedDataDict(
        {
            "input_ids": torch.where(there, ids, 0),
            "input_lengths": sizes,
            "token_mask": (there & (column >= (sizes // 3)[:, None])).to(torch.uint8),
            "sample_mask": torch.ones(len(LENGTHS)),
            "advantages": torch.randn(shape, generator=generator) * there,
        }
    )
    if worker.cfg.router_replay.enabled:
        rows["routed_experts"] = routes(worker.model.config, there, generator)
    return rows


def routes(config: Any, there: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return experts of every token but the rows' last: uint8 [rows, longest, layers, top_k], else 255."""
    shape = (*there.shape, config.num_hidden_layers, config.num_experts)
    drawn = torch.rand(shape, generator=generator).topk(config.num_experts_per_tok).indices.to(torch.uint8)
    routed = torch.zeros_like(there)
    routed[:, :-1] = there[:, 1:]
    return drawn.masked_fill(~routed[..., None, None], 255)


def make_worker(
    model: str, precision: str, parallel: dict[str, Any], changes: dict[str, Any]
) -> AutomodelPolicyWorker:
    """Return a worker of this rank over all ranks, or of one process before there is a process group."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    cfg = PolicyConfig.model_validate(
        {
            "model": {"config": model_sizes(model)},
            "tokenizer": {"builder": "characters", "characters": CHARACTERS[:59]},
            "precision": precision,
            "device": "cpu" if on_cpu() else "cuda",
            "workers": world,
            "parallel": parallel,
            "max_total_sequence_length": max(row_lengths()),
            "train_global_batch_size": len(LENGTHS),
            "sequence_packing": {
                "enabled": True,
                "train_mb_tokens": mb_tokens(),
                "logprob_mb_tokens": mb_tokens(),
            },
            "optimizer": {"lr": 1e-5},
            "router_replay": {"enabled": "num_experts" in MODELS[model], "min_exact_fraction": 0},
            **changes,
        }
    )
    return AutomodelPolicyWorker(cfg, GenerationConfig(max_new_tokens=8), tokenizer=tiny_tokenizer(), seed=0)


def shards(worker: AutomodelPolicyWorker) -> tuple[list[BatchedDataDict], list[int]]:
    """Return the batch packed for the worker's replicas, and what restores its order."""
    args: Any = {
        "input_key": "input_ids",
        "input_lengths_key": "input_lengths",
        "max_tokens_per_microbatch": mb_tokens(),
        "algorithm": "first_fit_decreasing",
        "sequence_length_pad_multiple": 1,
    }
    parts, inverse = batch(worker).shard_by_batch_size(
        worker.dp_size, batch_size=len(LENGTHS), sequence_packing_args=args
    )
    return parts, inverse


def run(worker: AutomodelPolicyWorker) -> dict[str, Any]:
    """Score, then train; losses and logprobs are of the whole batch, on every rank."""
    own = dist.get_rank(worker.dp_group) if worker.dp_group else 0
    logprobs = worker.get_logprobs(shards(worker)[0][own])["logprobs"]
    losses, norms, seconds = [], [], []
    for _ in range(STEPS):
        part = shards(worker)[0][own]
        wait()
        start = time.perf_counter()
        result = worker.train(part, PolicyGradient())
        wait()
        seconds.append(time.perf_counter() - start)
        losses.append(total(result["loss"].to(worker.device), worker))
        norms.append(float(result["grad_norm"][0]))
    return {
        "loss": losses,
        "grad_norm": norms,
        "logprobs": all_rows(logprobs, worker),
        "step_s": min(seconds),
    }


def wait() -> None:
    if not on_cpu():
        torch.cuda.synchronize()


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
    rows: torch.Tensor = merge_rows([{"logprobs": part} for part in parts], shards(worker)[1])["logprobs"]
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
            found["loss_max"] < 1e-5 and found["grad_norm_relative"] < 1e-4 and found["logprob_mean"] < 3e-5
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
    worker.train(shards(worker)[0][own], PolicyGradient())
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


def check_model(model: str, alone: dict[str, dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield what every case of a model gives; `alone` are one rank's runs, by precision."""
    truth, world = alone["float32"], dist.get_world_size()
    rounding = gaps(alone["bfloat16"], truth) if "bfloat16" in alone else {}
    for precision, found in alone.items():
        single = {k: found[k] for k in ("loss", "grad_norm", "step_s")}
        yield {"model": model, "case": "one GPU", "precision": precision, "to_float32": rounding, **single}
    for name, (parallel, changes) in CASES.items():
        if not fits(parallel, world, model):
            continue
        for precision, single_run in alone.items():
            result = run(make_worker(model, precision, parallel, changes))
            found = gaps(result, truth)
            yield {
                "model": model,
                "case": name,
                "layout": laid_out(parallel, world),
                "precision": precision,
                "to_float32": found,
                "to_one_gpu": gaps(result, single_run),
                **{k: result[k] for k in ("loss", "grad_norm", "step_s")},
                "ok": within(precision, found, rounding),
            }
    for parallel in STORED:
        if fits(parallel, world, model):
            equal = check_checkpoint(model, parallel)
            yield {
                "model": model,
                "case": "checkpoint",
                "layout": laid_out(parallel, world),
                "precision": "bfloat16",
                "ok": equal,
            }


def start(device: str) -> int:
    """Return this rank, its device chosen."""
    rank = int(os.environ["LOCAL_RANK"])
    if device == "cuda":
        torch.cuda.set_device(rank)
        torch.cuda.init()
    else:
        torch.set_num_threads(1)
    return rank


def main() -> int:
    """Run every case and write the result; the exit status is 1 where a case fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args()
    rank = start(args.device)
    precisions = ("float32",) if on_cpu() else ("float32", "bfloat16")
    alone = {m: {p: run(make_worker(m, p, {}, {})) for p in precisions} for m in args.models}
    if on_cpu():
        dist.init_process_group("gloo")
    else:
        torch.cuda.empty_cache()
        dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    cases: list[dict[str, Any]] = []
    for model in args.models:
        for case in check_model(model, alone[model]):
            cases.append(case)
            if rank == 0:
                shown = (case.get(k, "") for k in ("model", "case", "layout", "precision", "to_float32"))
                print(*shown, "ok" if case.get("ok", True) else "FAILED", flush=True)
            if not on_cpu():
                torch.cuda.empty_cache()
    passed = all(case.get("ok", True) for case in cases)
    if rank == 0:
        report = {
            "gpus": dist.get_world_size(),
            "gpu": "cpu" if on_cpu() else torch.cuda.get_device_name(),
            "where": where(),
            "lengths": row_lengths(),
            "mb_tokens": mb_tokens(),
            "models": {name: model_sizes(name) for name in args.models},
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
