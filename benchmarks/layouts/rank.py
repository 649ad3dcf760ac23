"""One rank: takes cases from the driver one after the other, each in a process group of its own."""

import gc
import os
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers.utils.logging import disable_progress_bar

from headrace.distributed.batched_data_dict import BatchedDataDict
from layouts.cases import (
    TRANSFORMERS,
    Case,
    Scale,
    attention_ratio,
    drawn_lengths,
    even_lengths,
    make_rows,
    packing_args,
    rows_per_gpu,
)
from layouts.trace import traced
from layouts.ways import Headrace, Plain, Way, microbatch_tokens, save_weights

WARM, DRAWS = 2, 3
Result = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """A case and where its model lies; without a case, the model is to be written there."""

    model: str
    case: Case | None
    directory: Path
    rendezvous: Path
    scale: Scale
    repeats: int


def serve(pipe: "Connection[Any, Any]", rank: int, ranks: int, cuda: bool) -> None:
    """Answer jobs with ("ok", result) or ("failed", why) until there are no more; after a failure the rank is done."""
    disable_progress_bar()
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    else:
        torch.set_num_threads(1)
    pipe.send(("ok", {}))
    while (job := pipe.recv()) is not None:
        try:
            pipe.send(("ok", run(job, rank, device)))
        except FAILURES:
            pipe.send(("failed", traceback.format_exc()))
            return


FAILURES = (ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, OSError, RuntimeError)
FAILURES += (TypeError, ValueError)
"""What a case may fail with while the others go on: too little memory, another release of a package."""


def run(job: Job, rank: int, device: torch.device) -> Result:
    """Run one job on this rank."""
    if job.case is None:
        save_weights(job.model, job.scale, job.directory, device)
        _free(device)
        return {}
    case = job.case
    # One GPU of headrace's needs no group, as a run with one worker has none. No device is named: torch would split the
    # default group for every mesh, and torch 2.11 breaks there (a segmentation fault) in a process that had another.
    if case.gpus > 1 or case.way == TRANSFORMERS:
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            init_method=f"file://{job.rendezvous}",
            rank=rank,
            world_size=case.gpus,
            timeout=timedelta(seconds=300),
        )
    try:
        return (_spread if case.kind == "spread" else _speed)(job, case, device)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        _free(device)


def _speed(job: Job, case: Case, device: torch.device) -> Result:
    """Time steps and scoring, and profile one step."""
    start = time.perf_counter()
    count = case.gpus * rows_per_gpu(case.model, job.scale)
    way = _build(job, case, device, count)
    rows = Rows(case, job.scale, even_lengths(count, job.scale)).planned()
    built = time.perf_counter() - start
    first = way.step(rows)
    for _ in range(WARM - 1):
        way.step(rows)
    _reset_peak(device)
    steps = [_timed(lambda: way.step(rows), device) for _ in range(job.repeats)]
    peak = _peak(device)
    way.score(rows)
    _reset_peak(device)
    scores = [_timed(lambda: way.score(rows), device) for _ in range(min(job.repeats, 3))]
    return {
        "step_s": steps,
        "score_s": scores,
        "peak_gib": peak,
        "score_peak_gib": _peak(device),
        "tokens": int(rows["input_lengths"].sum()),
        "microbatches": sum(map(len, rows.micro_batch_indices or [])),
        "loss": first[0],
        "grad_norm": first[1],
        "built_s": built,
        "profile": _profiled(lambda: way.step(rows), device),
    }


def _spread(job: Job, case: Case, device: torch.device) -> Result:
    """Profile a step on each of some drawn batches, planned by cost and dealt round."""
    count = case.gpus * rows_per_gpu(case.model, job.scale)
    way = _build(job, case, device, count)
    found: Result = {"planned": [], "dealt": []}
    for seed in range(DRAWS):
        rows = Rows(case, job.scale, drawn_lengths(count, job.scale, seed))
        for name, own in (("planned", rows.planned()), ("dealt", rows.dealt())):
            step = _step_on(way, own)
            if seed == 0:
                step()
            seconds = min(_timed(step, device) for _ in range(2))
            found[name].append({**_profiled(step, device), "step_s": seconds})
    return found


def _step_on(way: Way, rows: BatchedDataDict) -> Callable[[], Any]:
    return lambda: way.step(rows)


def _build(job: Job, case: Case, device: torch.device, count: int) -> Way:
    make = Plain if case.way == TRANSFORMERS else Headrace
    return make(case, job.scale, job.directory, device, count)


class Rows:
    """A global batch, and the share of this rank's replica, in two plans."""

    def __init__(self, case: Case, scale: Scale, lengths: np.ndarray[Any, Any]) -> None:
        self._replicas = case.gpus // case.replica
        self._own = (dist.get_rank() if dist.is_initialized() else 0) // case.replica
        self._rows = make_rows(lengths, scale)
        self._args: Any = packing_args(microbatch_tokens(case, scale), attention_ratio(case.model, scale))

    def planned(self) -> BatchedDataDict:
        """Return what headrace's planner gives, by cost."""
        return self._packed(self._rows, self._replicas)[self._own]

    def dealt(self) -> BatchedDataDict:
        """Return every n-th row, packed by this replica alone; the worker makes the numbers of microbatches equal."""
        own = self._rows.select_indices(range(self._own, self._rows.size, self._replicas))
        return self._packed(own, 1)[0]

    def _packed(self, rows: BatchedDataDict, shards: int) -> list[BatchedDataDict]:
        parts: Any = rows.shard_by_batch_size(shards, batch_size=rows.size, sequence_packing_args=self._args)
        shares: list[BatchedDataDict] = parts[0]
        return shares


def _timed(call: Callable[[], Any], device: torch.device) -> float:
    """Return the seconds of a call that all ranks begin together."""
    _meet(device)
    start = time.perf_counter()
    call()
    _wait(device)
    return time.perf_counter() - start


def _profiled(call: Callable[[], Any], device: torch.device) -> dict[str, Any]:
    """Return where the time of a call goes that all ranks begin together."""
    _meet(device)
    return traced(call, device)


def _meet(device: torch.device) -> None:
    if dist.is_initialized():
        dist.barrier()
    _wait(device)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()


def _peak(device: torch.device) -> float:
    return torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0


def _free(device: torch.device) -> None:
    torch._dynamo.reset()  # code compiled for the last case's model is of no use to the next
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
