"""What an engine is: it answers the prompts that a generator hands it, in this process or in one of its own.

Imports nothing heavy: an engine's process may run in another environment than the trainer, without transformers.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from headrace.config import GenerationConfig
from headrace.distributed.worker_groups.rank import Answer, Seat
from headrace.models.generation.interfaces import SamplingParams
from headrace.models.generation.weight_group import WeightRoute


@dataclass(frozen=True)
class EngineSpec:
    """What an engine is built from.

    `folder` holds the model's config and the tokenizer. `unknown_ids` are those that no token has.
    `implementations` are transformers' names of attention and experts. `device` is "cpu" or "cuda". `tied` has all
    names of each weight.
    """

    folder: Path
    cfg: GenerationConfig
    unknown_ids: list[int]
    record_routes: bool
    device: str
    implementations: dict[str, str] = field(default_factory=dict)
    tied: dict[str, list[str]] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        """The processes, each with a device, that an engine consists of."""
        return self.cfg.vllm.tensor_parallel if self.cfg.backend == "vllm" else 1


@dataclass(frozen=True)
class RayRoom:
    """Where engines live as Ray actors: on CPUs, or each on so many GPUs of one node as it has ranks.

    With `seats`, engine i joins the policy's rank i there, and again from the first.
    """

    device: str
    startup_timeout_s: float
    autoscales: bool = False
    seats: tuple[Seat, ...] = ()


@dataclass(frozen=True)
class Request:
    """Prompts of one `generate` call. `places` says where in that call they stand: what is drawn depends on it.

    `params` has all ids that end a completion.
    """

    prompts: Sequence[Sequence[int]]
    places: Sequence[int]
    params: SamplingParams
    seed: int

    def subset(self, places: Iterable[int]) -> "Request":
        """Return the request for the prompts at some of the places."""
        at = dict(zip(self.places, self.prompts))
        kept = list(places)
        return Request([at[place] for place in kept], kept, self.params, self.seed)


@dataclass(frozen=True)
class Completions:
    """Completions that are finished, of the prompts at `places`, one after the other.

    `lengths` (N) counts their new tokens, `token_ids` and `logprobs` have all of them. `routes`: per completion what
    the engine says of its experts, None: nothing. `cached_tokens` of the prompts were in the prefix cache.
    """

    places: list[int]
    lengths: npt.NDArray[np.int64]
    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    truncated: list[bool]
    routes: list[Any] | None = None
    cached_tokens: int = 0

    @classmethod
    def of(
        cls,
        places: Sequence[int],
        token_ids: Sequence[Sequence[int]],
        logprobs: Sequence[Sequence[float]],
        truncated: Sequence[bool],
        **more: Any,
    ) -> "Completions":
        return cls(
            list(places),
            np.array([len(row) for row in token_ids], dtype=np.int64),
            np.array([token for row in token_ids for token in row], dtype=np.int32),
            np.array([value for row in logprobs for value in row], dtype=np.float32),
            list(truncated),
            **more,
        )

    def rows(self) -> Iterator[tuple[int, list[int], list[float], bool, Any]]:
        """Yield place, token ids, logprobs, whether the limit cut it, and routes, per completion."""
        ends = np.cumsum(self.lengths)
        for row, (place, end) in enumerate(zip(self.places, ends.tolist())):
            part = slice(end - int(self.lengths[row]), end)
            routes = self.routes[row] if self.routes is not None else None
            yield (
                place,
                self.token_ids[part].tolist(),
                self.logprobs[part].tolist(),
                self.truncated[row],
                routes,
            )


class Engine(Protocol):
    """Answers requests. It draws the same tokens for a prompt whatever else it is asked beside it, but for rounding."""

    def answer(self, request: Request) -> Iterator[Completions]:
        """Yield every prompt's completion once, as they finish."""
        ...

    def update_weights(
        self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int
    ) -> dict[str, float] | None:
        """Load weights, all of them, for answers that look at nothing cached of old ones, unless their request says so.

        Returns:
            What there is to say of it.
        """
        ...

    def release(self, *, weights_follow: bool = False) -> None:
        """Free what is not needed until the next call, which is an update of the weights if these follow."""
        ...

    def take_metrics(self) -> dict[str, float]:
        """Return what happened since the last call of this."""
        ...

    def shutdown(self) -> None: ...


class EngineHandle(Protocol):
    """The asking end of an engine in another process. Calls are answered one after the other, the start first."""

    name: str

    @property
    def pid(self) -> int: ...

    def post(self, method: str, *args: Any, streams: bool = False) -> None:
        """Send a call; a process that is gone is noticed by `receive`."""
        ...

    @staticmethod
    def ready(engines: Sequence[Any], timeout_s: float | None = None) -> list[Any]:
        """Wait until `receive` of one of some engines has something to return, or so long; return all such."""
        ...

    def receive(self) -> Answer:
        """Wait for the next answer; of a process that has ended, what it still sent, and then that it is lost."""
        ...

    def ask_to_end(self) -> None:
        """Ask the process to end, and do not wait for it."""
        ...

    def end(self, *, timeout_s: float = 0.0) -> None:
        """Kill the process, unless it ends by itself within the time; called once."""
        ...


class ProcessEngine(Engine, Protocol):
    """An Engine for a process of its own, whose ranks may get weights by a route."""

    def receive_weights(self, route: WeightRoute, rank: int, version: int) -> list[list[float]]:
        """Do as `update_weights` with what comes; `rank` is the first of this engine's in the route's
        group, or its lane.

        Returns:
            The seconds of each bucket, for each rank of the engine.
        """
        ...


def sum_metrics(parts: Iterable[dict[str, float]]) -> dict[str, float]:
    """Return the metrics of engines that work side by side as one: the greatest of those named `_max`, else sums."""
    total: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            combine = max if name.endswith("_max") else float.__add__
            total[name] = combine(total[name], value) if name in total else float(value)
    return total
