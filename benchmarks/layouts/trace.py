"""Where the time of one step goes: kernels that compute, and kernels of collectives that nothing overlaps."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.autograd import DeviceType

Span = tuple[int, int]
"""Begin and end, ns."""
_RANGES = ("nccl:", "FSDP::", "ProfilerStep")
"""Ranges that the program named: they lie on the GPU's time line as well, around kernels."""
_SHOWN, _NAME = 15, 90


def traced(call: Callable[[], Any], device: torch.device) -> dict[str, Any]:
    """Run a call under the profiler and return its seconds, those that it computes, and those that only communicate.

    On a GPU `compute_s` is the time in which any kernel but NCCL's runs, and `exposed_s` that in which only NCCL's do:
    waiting for slower ranks is part of it. On a CPU they are this thread's processor time, and the time in gloo.
    """
    cuda = device.type == "cuda"
    kinds = [torch.profiler.ProfilerActivity.CUDA if cuda else torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=kinds) as profiler:
        start, cpu = time.perf_counter(), time.thread_time()
        call()
        if cuda:
            torch.cuda.synchronize()
        seconds, cpu = time.perf_counter() - start, time.thread_time() - cpu
    named = spans(profiler.profiler.kineto_results.events(), cuda=cuda)
    communication, computation = split(named, cuda=cuda)
    return {
        "step_s": seconds,
        "compute_s": length(computation) if cuda else cpu,
        "exposed_s": exposed(communication, computation),
        "communication_s": length(communication),
        "longest_ms": longest(named),
    }


def spans(events: Iterable[Any], *, cuda: bool) -> list[tuple[str, Span]]:
    """Return the kernels of a trace, on a CPU its ops, by name."""
    device = DeviceType.CUDA if cuda else DeviceType.CPU
    return [
        (event.name(), (event.start_ns(), event.start_ns() + event.duration_ns()))
        for event in events
        if event.device_type() == device and not (cuda and event.is_user_annotation())
    ]


def split(named: Iterable[tuple[str, Span]], *, cuda: bool) -> tuple[list[Span], list[Span]]:
    """Return the spans of collectives, and of all other kernels; on a CPU there are none of those."""
    communication, computation = [], []
    for name, span in named:
        if name.lower().startswith("nccl" if cuda else "gloo:") and not name.startswith(_RANGES):
            communication.append(span)
        elif cuda and not name.startswith(_RANGES):
            computation.append(span)
    return communication, computation


def longest(named: Iterable[tuple[str, Span]]) -> dict[str, float]:
    """Return the names that took most time in all, with their ms."""
    total: Counter[str] = Counter()
    for name, (start, stop) in named:
        total[name[:_NAME]] += stop - start
    return {name: round(ns / 1e6, 3) for name, ns in total.most_common(_SHOWN)}


def union(parts: Iterable[Span]) -> list[Span]:
    """Return spans that cover the same time and do not touch, in order.

    >>> union([(5, 7), (1, 3), (2, 4)])
    [(1, 4), (5, 7)]
    """
    joined: list[Span] = []
    for start, stop in sorted(parts):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], stop))
        else:
            joined.append((start, stop))
    return joined


def length(parts: Sequence[Span]) -> float:
    """Return the seconds that spans cover."""
    return sum(stop - start for start, stop in union(parts)) / 1e9


def exposed(communication: Sequence[Span], computation: Sequence[Span]) -> float:
    """Return the seconds in which there is communication and no computation.

    >>> exposed([(0, 4), (6, 10)], [(1, 3), (9, 12)]) * 1e9
    5.0
    """
    return length([*communication, *computation]) - length(computation)
