"""Ranks of a test: processes forked from one that has imported the models, which would take each of them seconds."""

import multiprocessing
from collections.abc import Callable
from typing import Any

import torch.multiprocessing as mp

_IMPORTED = [
    "headrace.models.policy.workers.automodel_worker",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
]


def run_ranks(function: Callable[..., None], args: tuple[Any, ...], count: int) -> None:
    """Run `function(rank, *args)` in `count` processes to their end; the error of one is raised here."""
    multiprocessing.set_forkserver_preload(_IMPORTED)
    mp.start_processes(function, args, nprocs=count, start_method="forkserver")
