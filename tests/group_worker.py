"""A small real worker for tests of worker groups: collectives over gloo, errors, and rows that it counts."""

import gc
import os
import time
import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from headrace.errors import ConfigError

BULK_ITEMS, BULK_BYTES = 32, 8 << 20


class GroupWorker:
    """Knows its rank; every method is plain torch.distributed."""

    def __init__(self, scale: float = 1.0, fail_on: int | None = None) -> None:
        self.rank, self.scale = dist.get_rank(), scale
        self.held: list[weakref.ref[torch.Tensor]] = []
        if fail_on == self.rank:
            raise ConfigError("policy.model: nothing there")

    def place(self) -> dict[str, Any]:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        return {
            "pid": os.getpid(),
            "threads": torch.get_num_threads(),
            **{n: int(os.environ[n]) for n in names},
        }

    def meeting(self) -> tuple[str, int]:
        return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])

    def total(self, shard: torch.Tensor, *, times: float = 1.0) -> torch.Tensor:
        """Sum over all ranks of what each was given."""
        value = shard.sum() * self.scale * times
        dist.all_reduce(value)
        return value

    def tag(self, shard: Any) -> tuple[int, Any]:
        return self.rank, shard

    def fail(self, rank: int, kind: type[Exception] = ConfigError) -> int:
        if self.rank == rank:
            raise kind("rows that do not fit")
        return self.rank

    def fail_holding(self, times: int = 1) -> None:
        """Fail while a frame holds a tensor; the cyclic collector is off until `still_held` is asked."""
        gc.disable()
        block = torch.ones(times)
        self.held.append(weakref.ref(block))
        raise ValueError(f"holds {block.numel()}")

    def stream_holding(self) -> Iterator[int]:
        yield 1
        self.fail_holding()

    def still_held(self) -> int:
        gc.enable()
        return sum(block() is not None for block in self.held)

    def fail_before_collective(self, rank: int) -> None:
        if self.rank == rank:
            raise ZeroDivisionError("before its peers")
        dist.all_reduce(torch.ones(1))

    def weights(self, count: int, fail_at: int = -1) -> Iterator[tuple[str, torch.Tensor]]:
        for i in range(count):
            if i == fail_at:
                raise ValueError(f"no weight {i}")
            value = torch.full((3,), float(i))
            dist.all_reduce(value)
            yield f"w{i}", value

    def few_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self.weights(5)

    def broken_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self.weights(5, fail_at=3)

    def take(self, items: Iterator[tuple[str, torch.Tensor]], version: int) -> None:
        """Keep what another group has sent; a version below 0 is refused after the first item."""
        self.taken: dict[str, Any] = {}
        for name, value in items:
            self.taken[name] = value.tolist()
            if version < 0:
                raise ConfigError("no such version")
        self.taken["version"] = version

    def bulk(self) -> Iterator[tuple[float, torch.Tensor]]:
        """Make BULK_ITEMS tensors of BULK_BYTES, each when it is asked for, with the time when it was."""
        for i in range(BULK_ITEMS):
            yield time.monotonic(), torch.full((BULK_BYTES,), i, dtype=torch.uint8)

    def take_bulk(self, items: Iterator[tuple[float, torch.Tensor]], version: int) -> None:
        """Look at each item and drop it; keep how many bytes were made and not yet taken, at most."""
        made, taken = [], []
        for i, (then, item) in enumerate(items):
            assert int(item.max()) == int(item.min()) == i
            made.append(then)
            taken.append(time.monotonic())
        waiting = [sum(then <= now for then in made) - i for i, now in enumerate(taken)]
        self.taken = {"items": len(made), "waiting": max(waiting) * BULK_BYTES}

    def show(self) -> dict[str, Any]:
        return self.taken

    def many(self, elements: int) -> torch.Tensor:
        return torch.zeros(elements)

    def sleep(self, seconds: float) -> int:
        time.sleep(seconds)
        return self.rank

    def nameless(self) -> Any:
        return lambda: None


def is_running(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until_gone(pids: list[int], limit_s: float = 10.0) -> bool:
    """Whether all processes end within the limit."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if not any(is_running(pid) for pid in pids):
            return True
        time.sleep(0.05)
    return False


def running_children() -> set[int]:
    """Processes that this one has started and that run, its resource tracker aside."""
    own = f"/proc/{os.getpid()}/task"
    listed = [pid for task in os.listdir(own) for pid in _read(f"{own}/{task}/children").split()]
    return {
        int(p) for p in listed if is_running(int(p)) and "resource_tracker" not in _read(f"/proc/{p}/cmdline")
    }


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except (FileNotFoundError, ProcessLookupError):
        return ""
