"""Values survive the way between processes: elements, dtypes, shapes, and nothing that was not asked for."""

import multiprocessing
import os
import resource
import threading
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from headrace.config import OptimizerConfig
from headrace.data_plane.interfaces import KVBatchMeta
from headrace.data_plane.schema import FIELDS
from headrace.distributed.batched_data_dict import BatchedDataDict
from headrace.distributed.multimodal import PackedTensor
from headrace.distributed.ragged import nested_from_ragged, ragged_from_nested
from headrace.distributed.worker_groups.wire import Payload, decode, encode, receive, registered, send

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


def jagged(offsets: list[int], lengths: list[int] | None = None) -> torch.Tensor:
    given = None if lengths is None else torch.tensor(lengths)
    return torch.nested.nested_tensor_from_jagged(torch.arange(9), torch.tensor(offsets), lengths=given)


@pytest.mark.parametrize(
    ("sent", "rows"),
    [
        (jagged([0, 4, 9]), [[0, 1, 2, 3], [4, 5, 6, 7, 8]]),
        (jagged([0, 4, 9], [2, 0]), [[0, 1], []]),
        (jagged([5, 5, 7]), [[], [5, 6]]),
        (
            torch.nested.narrow(
                torch.arange(8).view(2, 4), 1, torch.tensor([0, 1]), torch.tensor([2, 2]), layout=torch.jagged
            ),
            [[0, 1], [5, 6]],
        ),
        (
            torch.nested.nested_tensor_from_jagged(
                torch.arange(5), torch.tensor([[0, 7], [2, 7], [5, 7]])[:, 0]
            ),
            [[0, 1], [2, 3, 4]],
        ),
        (
            nested_from_ragged(torch.arange(10).view(5, 2), torch.tensor([0, 2, 5]), ragged_dim=2),
            [[[0, 2], [1, 3]], [[4, 6, 8], [5, 7, 9]]],
        ),
        (
            nested_from_ragged(torch.arange(2.0, requires_grad=True), torch.tensor([0, 0, 2])),
            [[], [0.0, 1.0]],
        ),
        (nested_from_ragged(torch.empty(0, 3), torch.tensor([0])), []),
    ],
    ids=["whole", "lengths", "part of the values", "narrow", "apart", "ragged last", "weight", "no rows"],
)
def test_a_jagged_tensor_arrives_with_its_rows_whatever_holds_them(
    sent: torch.Tensor, rows: list[Any]
) -> None:
    back = decode(encode({"rows": sent}))["rows"]
    assert [row.tolist() for row in back.unbind()] == rows
    assert (back.dtype, back.dim(), back.requires_grad) == (sent.dtype, sent.dim(), False)
    assert ragged_from_nested(back)[2] == ragged_from_nested(sent)[2]


def test_columns_around_the_same_offsets_send_them_once_and_can_be_added_where_they_arrive() -> None:
    offsets = torch.tensor([0, 2, 5])
    payload = encode([nested_from_ragged(torch.full((5,), fill), offsets) for fill in (1.0, 2.0)])
    assert len(payload.buffers) == 3
    first, second = decode(payload)
    assert (first + second).values().tolist() == [3.0] * 5


@pytest.mark.parametrize("shape", [(1,), (1, 1)])
def test_a_single_number_that_was_expanded_is_sent(shape: tuple[int, ...]) -> None:
    assert decode(encode(torch.tensor(5.0).expand(shape))).tolist() == torch.full(shape, 5.0).tolist()


@pytest.mark.parametrize(
    "array",
    [
        np.ma.masked_array([1, 2, 3], [False, True, False]),
        np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
        np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")])[0],
        np.array([("a", None)], dtype=[("a", "U1"), ("b", "O")]),
        np.array(["text"], dtype=np.dtypes.StringDType()),
    ],
    ids=["masked", "fields", "a record", "objects in fields", "strings of any length"],
)
def test_arrays_that_are_more_than_their_numbers_are_refused(array: Any) -> None:
    with pytest.raises(TypeError, match=r"array .* cannot be sent to a worker"):
        encode({"column": array})


@pytest.mark.parametrize("dtype", ["M8[ns]", "m8[D]", ">i4", "U3", "S3", "V3", "?", "f2", "c16"])
def test_arrays_of_other_kinds_keep_their_dtype(dtype: str) -> None:
    array = np.zeros((2, 2), dtype)
    back = decode(encode([array, array[0, 0]]))
    assert (back[0].dtype, back[0].tolist()) == (array.dtype, array.tolist())
    assert (type(back[1]), back[1]) == (type(array[0, 0]), array[0, 0])


@registered
@dataclass(frozen=True)
class Scale:
    """A loss's like: built of values, and called."""

    factor: float
    weights: torch.Tensor

    def __call__(self, value: float) -> float:
        return self.factor * value


@registered
def shifted(value: float, *, by: float) -> float:
    return value + by


class Stranger:
    """A class that nobody has registered."""

    factor = 2.0


def test_registered_functions_and_objects_of_registered_classes_go_by_name_and_state() -> None:
    loss, shift, kind = decode(encode([Scale(3.0, torch.arange(2)), partial(shifted, by=1.0), Scale]))
    assert (loss(2.0), loss.weights.tolist(), shift(2.0)) == (6.0, [0, 1], 3.0)
    assert kind is Scale


def test_a_module_whose_name_begins_like_headrace_has_its_own_name_on_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "headrace_losses.py").write_text(
        "from headrace.distributed.worker_groups import registered\n\n\n@registered\ndef loss():\n    return 7\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert decode(encode(import_module("headrace_losses").loss))() == 7


def test_a_recipes_sections_batches_and_metas_come_back_with_all_that_they_hold() -> None:
    batch = BatchedDataDict({"input_ids": torch.arange(6).view(2, 3), "names": ["a", "b"]})
    batch.micro_batch_indices = [[[0, 1], [1, 2]]]
    ragged = torch.nested.as_nested_tensor([torch.arange(2), torch.arange(3)], layout=torch.jagged)
    media = PackedTensor([torch.ones(2), None])
    meta = KVBatchMeta("p", "train", ["a", "b"], sequence_lengths=[2, 3], tags=[{"x": 1}, {"x": {1: "y"}}])
    sections = OptimizerConfig(lr=0.5)
    back = decode(encode((batch, ragged, media, meta, sections, FIELDS["input_ids"], {"set": {1, 2}})))
    assert type(back[0]) is BatchedDataDict
    assert torch.equal(back[0]["input_ids"], batch["input_ids"])
    assert (back[0]["names"], back[0].micro_batch_indices) == (["a", "b"], [[[0, 1], [1, 2]]])
    assert [row.tolist() for row in back[1].unbind()] == [[0, 1], [0, 1, 2]]
    assert (len(back[2]), back[2].tensors[0].tolist(), back[2].tensors[1]) == (2, [1, 1], None)
    assert back[3:] == (meta, sections, FIELDS["input_ids"], {"set": {1, 2}})
    assert back[4].model_fields_set == {"lr"}


def test_names_that_rows_share_are_sent_once() -> None:
    rows = [{"truncated": i % 2 == 0, "reward": float(i), "tag": {"x": i}} for i in range(1000)]
    payload = encode(rows)
    assert decode(payload) == rows
    assert payload.head.count(b"truncated") == 1
    mixed = [{"a": 1}, {"b": 2}, {}, {"a": 1, "b": 2}, {"b": 2, "a": 1}]
    assert [list(row.items()) for row in decode(encode(mixed))] == [list(row.items()) for row in mixed]
    assert decode(encode([{}, {}])) == [{}, {}]


def test_keys_that_are_equal_and_not_the_same_stay_as_they_are() -> None:
    rows = [{1: "a"}, {True: "b"}, {1.0: "c"}, {"a": 0}]
    for first in rows:
        for second in rows:
            back = decode(encode([first, second]))
            assert [list(map(type, row)) for row in back] == [list(map(type, row)) for row in (first, second)]
            assert back == [first, second]


@pytest.mark.parametrize(
    "value",
    [lambda: None, Stranger(), Stranger, os.system, 2**70],
    ids=["a lambda", "an object", "a class", "a function", "an integer of 71 bits"],
)
def test_what_has_no_form_is_refused_before_it_is_sent(value: Any) -> None:
    with pytest.raises((TypeError, OverflowError)):
        encode({"f": value})


@pytest.mark.parametrize("node", [["named", "os:system"], ["object", "subprocess:Popen", {}]], ids=str)
def test_a_message_cannot_name_what_is_not_registered(node: Any) -> None:
    with pytest.raises(TypeError, match="came from another process"):
        decode(Payload(msgspec.msgpack.encode(node), []))


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


def test_a_message_waits_where_no_descriptor_is_left_for_a_while() -> None:
    """The limit is of the whole process: sender and receiver meet it by turns."""
    ours, theirs = multiprocessing.Pipe()
    message = torch.arange(1 << 18)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(int(file) for file in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (most + 64, hard))
    taken: list[int] = []

    def take_all() -> None:
        with suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))

    def free() -> None:
        while taken:
            os.close(taken.pop())

    try:
        for leaves in (0, 1, 2, 3):
            take_all()
            for file in (taken.pop() for _ in range(leaves)):
                os.close(file)
            threading.Timer(0.3, free).start()
            sender = threading.Thread(target=send, args=(ours, message))
            sender.start()
            assert torch.equal(receive(theirs), message)
            sender.join()
            free()
    finally:
        free()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
