import inspect
import logging
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from headrace.data_plane import (
    DataPlaneClient,
    DataPlaneEvent,
    KVBatchMeta,
    MetricsDataPlaneClient,
    build_data_plane_client,
    print_event,
)
from headrace.data_plane.adapters.local import LocalDataPlaneClient
from headrace.data_plane.codec import nest
from headrace.data_plane.object_codec import encode
from headrace.distributed.columns import object_array
from headrace.errors import ClaimTimeout, DataPlaneError, SampleNotFound, SchemaError


def measured() -> tuple[MetricsDataPlaneClient, list[DataPlaneEvent]]:
    events: list[DataPlaneEvent] = []
    return MetricsDataPlaneClient(LocalDataPlaneClient(), events.append), events


def wire(rows: int, **columns: object) -> TensorDict:
    return TensorDict(columns, batch_size=[rows])


def test_a_put_is_one_event_with_the_bytes_of_each_column() -> None:
    client, events = measured()
    log = object_array(["hello", None])
    fields = wire(2, x=nest([torch.ones(3), torch.ones(0)]), y=torch.ones(2, 4, dtype=torch.uint8), log=log)
    client.put_samples(["a", "b"], "p", fields=fields)
    (event,) = events
    assert (event.op, event.partition, event.rows, event.status) == ("put_samples", "p", 2, "ok")
    messages = len(encode("hello")) + len(encode(None))
    assert dict(event.columns) == {"x": 12, "y": 8, "log": messages}
    assert event.bytes == 20 + messages
    assert event.seconds > 0


def test_every_operation_is_one_event() -> None:
    client, events = measured()
    client.register_partition("p", ["x"], 2, ["t"])
    client.put_samples(["a", "b"], "p", fields=wire(2, x=torch.ones(2)))
    meta = client.claim_meta("p", "t", ["x"], 2)
    assert isinstance(meta, KVBatchMeta)
    assert client.claim_meta("p", "t", ["x"], 1, blocking=False) is None
    client.get_data(meta)
    client.get_samples(["a"], "p", ["x"])
    client.check_consumption_status("p", ["t"])
    client.clear_samples(["a"], "p")
    assert [(event.op, event.rows, event.bytes) for event in events] == [
        ("register_partition", 2, 0),
        ("put_samples", 2, 8),
        ("claim_meta", 2, 0),
        ("claim_meta", 0, 0),
        ("get_data", 2, 8),
        ("get_samples", 1, 4),
        ("check_consumption_status", 0, 0),
        ("clear_samples", 1, 0),
    ]


def test_an_error_is_an_event_and_still_raised() -> None:
    client, events = measured()
    with pytest.raises(SampleNotFound):
        client.get_samples(["a"], "p", ["x"])
    with pytest.raises(SchemaError):
        client.put_samples(["a", "a"], "p", fields=wire(2, x=torch.ones(2)))
    assert [(event.op, event.status, event.bytes) for event in events] == [
        ("get_samples", "error", 0),
        ("put_samples", "error", 0),
    ]
    assert client.snapshot()["ops"]["put_samples"]["errors"] == 1


def test_a_claim_in_vain_is_a_timeout_and_its_waiting_is_measured() -> None:
    client, events = measured()
    client.register_partition("p", ["x"], 1, ["t"])
    with pytest.raises(ClaimTimeout):
        client.claim_meta("p", "t", ["x"], 1, timeout_s=0.05)
    assert events[-1].status == "timeout"
    assert events[-1].seconds >= 0.05


def test_the_snapshot_sums_operations_and_columns() -> None:
    client, _ = measured()
    for ids in (["a", "b"], ["c", "d"]):
        client.put_samples(ids, "p", fields=wire(2, x=torch.ones(2), y=torch.ones(2, 3)))
    client.get_samples(["a", "b", "c"], "p", ["x"])
    client.get_data(KVBatchMeta("p", "t", ["a"]), ["x"])
    totals = client.snapshot()
    assert totals["bytes_by_column"] == {"put": {"x": 16, "y": 48}, "get": {"x": 16}}
    put = totals["ops"]["put_samples"]
    assert (put["count"], put["rows"], put["bytes"], put["errors"]) == (2, 4, 64, 0)
    assert put["seconds"] > 0


def test_the_bytes_held_are_those_of_the_store_where_an_overwrite_is_no_new_bytes() -> None:
    client, _ = measured()
    for _ in range(2):
        client.put_samples(list("abcd"), "p", fields=wire(4, x=torch.ones(4)))
    assert client.snapshot()["bytes_held"] == client.stored_bytes() == 16
    assert client.snapshot()["bytes_by_column"]["put"] == {"x": 32}
    client.put_samples(["a"], "other", fields=wire(1, x=torch.ones(1)))
    client.clear_samples(["b", "c", "d", "unknown"], "p")
    assert client.snapshot()["bytes_held"] == 8
    client.clear_samples(None, "p")
    assert client.snapshot()["bytes_held"] == 4
    client.register_partition("other", [], 1, [])
    assert client.snapshot()["bytes_held"] == 0


def public(kind: type) -> dict[str, Any]:
    return {name: member for name, member in inspect.getmembers(kind, callable) if not name.startswith("_")}


def test_the_wrapper_has_every_method_of_the_contract_as_it_is_called_there() -> None:
    mine = public(MetricsDataPlaneClient)
    for name, method in public(DataPlaneClient).items():
        assert inspect.signature(mine[name]) == inspect.signature(method), name
        assert mine[name] is not method, f"{name} does not reach the store"


def test_the_wrapper_hides_nothing_that_a_store_has() -> None:
    class Remote(LocalDataPlaneClient):
        capacity = 7

        def stored_blocks(self, doubled: bool = False) -> int:
            return 2 if doubled else 1

    client: Any = MetricsDataPlaneClient(Remote(), lambda _: None)
    client.put_samples(["a"], "p", fields=wire(1, x=torch.ones(1)))
    assert (client.partition_ids(), client.sample_ids("p")) == (["p"], ["a"])
    assert (client.stored_bytes(), client.stored_bytes("p"), client.stored_bytes("q")) == (4, 4, 0)
    assert (client.capacity, client.stored_blocks(), client.stored_blocks(doubled=True)) == (7, 1, 2)
    with pytest.raises(AttributeError, match="nothing"):
        client.nothing()
    copied = pickle.loads(pickle.dumps(MetricsDataPlaneClient.__new__(MetricsDataPlaneClient)))
    assert not hasattr(copied, "inner")


def test_a_refused_call_is_an_event_whatever_was_given() -> None:
    client, events = measured()
    for rows in ("8", None):
        with pytest.raises(DataPlaneError, match="num_samples"):
            client.register_partition("p", ["x"], rows, ["t"])  # type: ignore[arg-type]
    assert [(event.op, event.rows, event.status) for event in events] == [
        ("register_partition", 0, "error")
    ] * 2


def test_ids_of_any_kind_are_counted_where_they_can_be() -> None:
    client, events = measured()
    client.put_samples(np.array(["a", "b"]), "p", fields=wire(2, x=torch.zeros(2)))  # type: ignore[arg-type]
    client.get_samples((letter for letter in "ab"), "p", ["x"])  # type: ignore[arg-type]
    for ids in (None, 7):
        with pytest.raises(TypeError):
            client.get_samples(ids, "p", ["x"])  # type: ignore[arg-type]
    client.clear_samples(None, "p")
    assert [(event.rows, event.status) for event in events] == [
        (2, "ok"),
        (0, "ok"),
        (0, "error"),
        (0, "error"),
        (0, "ok"),
    ]


def test_the_snapshot_is_a_copy() -> None:
    client, _ = measured()
    client.put_samples(["a"], "p", fields=wire(1, x=torch.ones(1)))
    client.snapshot()["bytes_by_column"]["put"]["x"] = 0
    assert client.snapshot()["bytes_by_column"]["put"]["x"] == 4


def test_events_are_logged_and_not_printed(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.INFO, logger="headrace.data_plane"):
        print_event(DataPlaneEvent("put_samples", "train", 2, {"x": 8}, 0.0015, "ok"))
    assert caplog.messages == ["put_samples train: 2 rows, 1 columns, 8 bytes, 1.500 ms, ok"]
    assert capsys.readouterr().out == ""


def test_the_config_switches_observability_on(caplog: pytest.LogCaptureFixture) -> None:
    client = build_data_plane_client({"observability": {"enabled": True}}, bootstrap=True)
    with caplog.at_level(logging.INFO, logger="headrace.data_plane"):
        client.put_samples(["a"], "p")
    client.close()
    assert isinstance(client, MetricsDataPlaneClient)
    assert len(caplog.messages) == 1
