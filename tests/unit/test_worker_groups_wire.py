"""Values survive the way between processes: elements, dtypes, shapes, and nothing that was not asked for."""

import multiprocessing
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.distributed.worker_groups.wire import decode, encode, receive, send

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.uint16,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.complex64,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (2, 3)], ids=str)
def test_a_tensor_comes_back_with_its_bytes(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    value = torch.arange(torch.Size(shape).numel()).to(dtype).reshape(shape)
    back = decode(encode(value))
    assert back.dtype == dtype
    assert back.shape == shape
    assert torch.equal(back.reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8))


def test_a_view_sends_its_own_elements_only() -> None:
    rows = torch.arange(1_000_000).reshape(1000, 1000)
    payload = encode({"rows": rows[3:5], "column": rows[:, 7]})
    assert sum(b.nbytes for b in payload.buffers) == (2000 + 1000) * 8
    assert len(payload.head) < 1000
    back = decode(payload)
    assert torch.equal(back["rows"], rows[3:5])
    assert torch.equal(back["column"], rows[:, 7])


def test_a_weight_arrives_detached() -> None:
    back = decode(encode({"w": torch.nn.Linear(2, 3).weight.mul(2)}))
    assert not back["w"].requires_grad


def test_a_tensor_named_twice_arrives_as_one() -> None:
    value = torch.arange(4)
    first, second = decode(encode([value, value]))
    assert first is second


def test_arrays_objects_and_plain_values_come_back() -> None:
    value = {
        "array": np.arange(6, dtype=np.int32).reshape(2, 3),
        "objects": np.array([{"a": 1}, None, "x"], dtype=object),
        "fixed": np.frombuffer(b"abcd", dtype=np.uint8),
        "plain": (1, 2.5, "text", [None]),
        "path": Path("/tmp/x"),
    }
    back = decode(encode(value))
    assert np.array_equal(back["array"], value["array"])
    assert back["objects"].tolist() == value["objects"].tolist()
    assert back["fixed"].tolist() == [97, 98, 99, 100]
    assert back["plain"] == value["plain"]
    assert back["path"] == value["path"]


def test_a_tensor_received_can_be_written_to() -> None:
    payload = encode(torch.zeros(4))
    for buffer in payload.buffers:
        buffer.flags.writeable = False
    back = decode(payload)
    back += 1
    assert back.tolist() == [1, 1, 1, 1]


def test_what_cannot_be_pickled_is_refused_before_it_is_sent() -> None:
    with pytest.raises((AttributeError, TypeError), match="pickle"):
        encode({"f": lambda: None})


@pytest.mark.parametrize("elements", [0, 7, (1 << 18) - 1, 1 << 18, 3_000_001])
def test_messages_of_any_size_pass_a_pipe_in_order_and_leave_no_descriptor(elements: int) -> None:
    ours, theirs = multiprocessing.Pipe()
    message = {"first": torch.arange(elements, dtype=torch.float32), "last": torch.tensor([1, 2])}
    before = len(os.listdir("/proc/self/fd"))
    received: list[Any] = []
    reader = threading.Thread(target=lambda: received.extend(receive(theirs) for _ in range(2)))
    reader.start()
    send(ours, message)
    send(ours, "next")
    reader.join(30)
    assert torch.equal(received[0]["first"], message["first"])
    assert received[0]["last"].tolist() == [1, 2]
    assert received[1] == "next"
    received[0]["first"] += 1
    assert len(os.listdir("/proc/self/fd")) <= before
    ours.close()
    theirs.close()
