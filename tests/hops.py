"""How long the ways through headrace are, counted while a tiny run takes one step.

    python tests/hops.py [--transfer-queue]

A *function* is one that has a name, in a file of the package. A *file between* two places is one that has a
function on the call stack from the first to the second, the files of both left out; the optimizer's is the
one that calls it. A *form* of the input ids is a kind of thing that holds them as an argument or a result: a
named type, or a bare list or tensor; dicts, lists and tuples of a form are that form. A *hop* of the
advantages is a function that is given them or returns them, up to the surrogate, outside the store and the
batch that holds them; a put and a get are one hop each.
"""

import dataclasses
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch

import headrace
from headrace.algorithms.run import build_session, start_loop
from headrace.data_plane import build_data_plane_client, kv_first_write, read_columns
from ray_session import SIMPLE, fresh_store
from recorder import NeverStop, Recorder
from tiny_recipe import tiny_recipe

ROOT = str(Path(headrace.__file__).parent)
STORE = "data_plane/"
BATCH = "distributed/batched_data_dict.py"
COLUMNS = ("input_ids", "token_mask", "generation_logprobs")

Watch = Callable[[FrameType, str, Any], None]


def file_of(frame: FrameType) -> str | None:
    """Return a frame's file below the package; None for code from outside."""
    name = frame.f_code.co_filename
    return name[len(ROOT) + 1 :] if name.startswith(ROOT) else None


def is_named(frame: FrameType) -> bool:
    return not frame.f_code.co_name.startswith("<")


def traced(run: Callable[[], Any], watch: Watch) -> Any:
    """Call `run` while `watch` sees each call and return of Python code, in all threads."""
    threading.setprofile(watch)
    sys.setprofile(watch)
    try:
        return run()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


def stack(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and its callers, the innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def files_between(frame: FrameType, start: str) -> list[str] | None:
    """Return the package's files between a function named `start` and the file of `frame`; None if it is no caller."""
    own, between = file_of(frame), []
    for caller in stack(frame.f_back):
        file = file_of(caller)
        if file is not None and caller.f_code.co_name == start:
            return [name for name in reversed(between) if name not in (own, file)]
        if file is not None and file not in between:
            between.append(file)
    return None


class Functions:
    """The named functions of the package that run, by file."""

    def __init__(self) -> None:
        self.seen: dict[str, set[str]] = {}

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        file = file_of(frame)
        if event == "call" and file is not None and is_named(frame):
            self.seen.setdefault(file, set()).add(frame.f_code.co_qualname)

    @property
    def count(self) -> int:
        return sum(map(len, self.seen.values()))


def put_and_get(store: Any) -> Functions:
    """Count the functions of a first write and a read of three columns of three rows, on the caller's side."""
    rows = [torch.arange(n) for n in (5, 9, 2)]
    batch = {
        "input_ids": rows,
        "token_mask": [torch.ones(len(row), dtype=torch.uint8) for row in rows],
        "generation_logprobs": [torch.zeros(len(row)) for row in rows],
        "input_lengths": torch.tensor([len(row) for row in rows]),
    }
    ids = ["a_g0", "a_g1", "b_g0"]

    def run() -> None:
        meta = kv_first_write(batch, sample_ids=ids, dp_client=store, partition_id="train")
        read_columns(store, meta, list(COLUMNS), pad_value_dict={"input_ids": 0})

    functions = Functions()
    store.register_partition("train", [*COLUMNS, "input_lengths"], 3, ["train"])
    run()  # what only the first call does (caches, registries) is not the way
    store.clear_samples(None, "train")
    store.register_partition("train", [*COLUMNS, "input_lengths"], 3, ["train"])
    traced(run, functions)
    store.clear_samples(None, "train")
    return functions


class Step:
    """What one training step shows of its ways."""

    def __init__(self) -> None:
        self.between: dict[str, list[str]] = {}
        self.loss = Functions()
        self.forms: dict[str, str] = {}
        self.hops: list[str] = []
        self._loss_depth = 0
        self._arrived = False
        self._marker: tuple[int, ...] = ()

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        if event not in ("call", "return"):
            return
        file, name = file_of(frame), frame.f_code.co_name
        if file is None:
            if event == "call" and name == "step" and "torch/optim/" in frame.f_code.co_filename:
                caller = next(f for f in stack(frame) if file_of(f) is not None)
                self._way("optimizer", caller, "run_step")
            return
        if file == "models/generation/hf.py":
            if event == "call" and name == "generate":
                self._way("rollout", frame, "run_step")
                self._marker = self._marker or tuple(_first_prompt(frame)[:3])
            elif event == "call" and name == "update_weights":
                self._way("weights", frame, "_one_step")
        if not is_named(frame):
            return
        self._count_loss(frame, event)
        self._arrived |= name == "surrogate"
        things = _arguments(frame) if event == "call" else {"return": arg}
        if self._marker:
            for kind in {kind for thing in things.values() for kind in self._kinds(thing)}:
                self.forms.setdefault(kind, f"{file} {frame.f_code.co_qualname}")
        if file != BATCH and any(_holds_advantages(key, thing) for key, thing in things.items()):
            self._hop(file, frame)

    def _way(self, name: str, frame: FrameType, start: str) -> None:
        files = files_between(frame, start)
        if files is not None:
            self.between.setdefault(name, files)

    def _count_loss(self, frame: FrameType, event: str) -> None:
        is_loss = frame.f_code.co_qualname == "PolicyGradientLoss.__call__"
        self._loss_depth += is_loss and event == "call"
        if self._loss_depth:
            self.loss(frame, event, None)
        self._loss_depth -= is_loss and event == "return"

    def _hop(self, file: str, frame: FrameType) -> None:
        hop = f"{file} {frame.f_code.co_qualname}"
        if file.startswith(STORE):
            callers = (caller for caller in stack(frame) if (file_of(caller) or "").startswith(STORE))
            writes = any(caller.f_code.co_name in ("put_samples", "write_columns") for caller in callers)
            hop = "put" if writes else "get"
        if hop not in self.hops and not self._arrived:
            self.hops.append(hop)

    def _kinds(self, thing: Any, depth: int = 0) -> Iterator[str]:
        """Yield the forms in which a thing holds the marked ids."""
        if isinstance(thing, torch.Tensor):
            if not thing.is_floating_point() and self._in_tensor(thing):
                yield "jagged tensor" if thing.is_nested else f"tensor of {thing.dim()} dimensions"
        elif isinstance(thing, np.ndarray) and thing.dtype.kind in "iu":
            if self._in_tensor(torch.from_numpy(thing.astype(np.int64))):
                yield f"tensor of {thing.ndim} dimensions"
        elif depth > 3:
            return
        elif isinstance(thing, list | tuple) and not hasattr(thing, "_fields"):
            if len(thing) >= 3 and all(isinstance(item, int) for item in thing[:3]):
                if self._in_tensor(torch.tensor([i for i in thing if isinstance(i, int)])):
                    yield "list of ids"
            else:
                for item in thing[:2]:
                    yield from self._kinds(item, depth + 1)
        elif type(thing) is dict:
            for item in list(thing.values())[:20]:
                yield from self._kinds(item, depth + 1)
        else:
            fields = _fields(thing)
            if any(True for item in fields.values() for _ in self._kinds(item, depth + 1)):
                yield type(thing).__name__

    def _in_tensor(self, tensor: torch.Tensor) -> bool:
        flat = (tensor.values() if tensor.is_nested else tensor).detach().reshape(-1)
        width = len(self._marker)
        if flat.numel() < width:
            return False
        return bool((flat.long().unfold(0, width, 1) == torch.tensor(self._marker)).all(dim=1).any())


def _first_prompt(frame: FrameType) -> list[int]:
    return next(
        [int(token) for token in value[0]]
        for value in frame.f_locals.values()
        if isinstance(value, list | tuple) and value and isinstance(value[0], list | tuple | torch.Tensor)
    )


def _arguments(frame: FrameType) -> dict[str, Any]:
    code = frame.f_code
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return {name: frame.f_locals[name] for name in names if name in frame.f_locals and name != "self"}


def _fields(thing: Any) -> dict[str, Any]:
    """Return what a record holds by name: a mapping's, a TensorDict's, a dataclass's or a named tuple's values."""
    if isinstance(thing, Mapping):
        return {str(key): value for key, value in thing.items()}
    if type(thing).__name__ == "TensorDict":
        return dict(thing.items())
    if dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        return {f.name: getattr(thing, f.name, None) for f in dataclasses.fields(thing)}
    return dict(thing._asdict()) if isinstance(thing, tuple) and hasattr(thing, "_asdict") else {}


def _holds_advantages(name: str, thing: Any) -> bool:
    if name == "advantages" and isinstance(thing, torch.Tensor):
        return True
    return isinstance(_fields(thing).get("advantages"), torch.Tensor)


def one_step(folder: Path, **changes: Any) -> Step:
    """Trace a step of the tiny recipe with rows in the local store."""
    recipe = tiny_recipe(folder, data_plane={"enabled": True, "impl": "local"}, **changes)
    session = build_session(recipe)
    step = Step()
    try:
        loop = start_loop(session, Recorder(), NeverStop())
        traced(lambda: loop._one_step(1, 2), step)
    finally:
        session.close()
    return step


def describe(name: str, functions: Functions) -> Iterator[str]:
    yield f"put and get, {name}: {functions.count} functions in {len(functions.seen)} files"
    for file, names in sorted(functions.seen.items()):
        yield f"    {file}: {', '.join(sorted(names))}"


def report() -> Iterator[str]:
    """Yield the counts, a line each."""
    local = build_data_plane_client({"enabled": True, "impl": "local"}, bootstrap=True)
    yield from describe("local", put_and_get(local))
    local.close()
    if "--transfer-queue" in sys.argv:
        import ray

        ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
        queue = build_data_plane_client({"enabled": True, **fresh_store(SIMPLE)}, bootstrap=True)
        yield from describe("TransferQueue, beside the index", put_and_get(queue))
        queue.close()
        ray.shutdown()
    with tempfile.TemporaryDirectory() as folder:
        step = one_step(Path(folder))
    for name, files in step.between.items():
        yield f"files between, {name}: {len(files)}: {', '.join(files)}"
    yield f"loss: {step.loss.count} functions in {len(step.loss.seen)} files: {', '.join(step.loss.seen)}"
    yield f"forms of input_ids: {len(step.forms)}"
    yield from (f"    {form}: {where}" for form, where in step.forms.items())
    yield f"hops of the advantages: {len(step.hops)}"
    yield from (f"    {hop}" for hop in step.hops)


if __name__ == "__main__":
    print("\n".join(report()))
