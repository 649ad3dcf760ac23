"""What the local store does beyond the contract."""

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from headrace.compat.noop import NoOpDataPlaneClient
from headrace.data_plane import build_data_plane_client
from headrace.data_plane.adapters.local import LocalDataPlaneClient
from headrace.data_plane.codec import nest
from headrace.data_plane.sharing import flat_rows
from headrace.data_plane.store.columns import Chunk, chunk_of_leaf, own_offsets, read_rows
from headrace.data_plane.wire import read_wire, wire_tensordict
from headrace.distributed.columns import object_array
from headrace.errors import ConfigError, DataPlaneError


def put(client: LocalDataPlaneClient, ids: list[str], **columns: object) -> None:
    client.put_samples(ids, "p", fields=TensorDict(columns, batch_size=[len(ids)]))


def test_a_client_made_directly_has_a_store_of_its_own() -> None:
    first, second = LocalDataPlaneClient(), NoOpDataPlaneClient()
    put(first, ["a"], x=torch.ones(1))
    assert (first.sample_ids("p"), second.sample_ids("p")) == (["a"], [])


def test_the_factory_starts_stores_by_name_and_attaches_to_them() -> None:
    first, second = (
        build_data_plane_client({"impl": "local", "store_name": name}, bootstrap=True) for name in ("a", "b")
    )
    attached = build_data_plane_client({"enabled": True, "impl": "local", "store_name": "b"}, bootstrap=False)
    second.put_samples(["a"], "p", tags=[{"r": 1}])
    assert attached.put_samples(["a"], "p").tags == [{"r": 1}]
    assert first.put_samples(["a"], "p").tags is None
    first.close()
    assert attached.put_samples(["a"], "p").tags == [{"r": 1}]
    second.close()


def test_a_name_is_free_when_the_client_that_started_its_store_has_gone() -> None:
    gone = build_data_plane_client({"store_name": "gone"}, bootstrap=True)
    attached = build_data_plane_client({"store_name": "gone"}, bootstrap=False)
    del gone
    with pytest.raises(DataPlaneError, match="no local store 'gone' to attach to"):
        build_data_plane_client({"store_name": "gone"}, bootstrap=False)
    again = build_data_plane_client({"store_name": "gone"}, bootstrap=True)
    attached.put_samples(["a"], "p")
    assert again.sample_ids("p") == []
    again.close()
    attached.close()


def test_attaching_without_a_store_says_who_starts_it() -> None:
    build_data_plane_client({}, bootstrap=True).close()
    with pytest.raises(DataPlaneError, match="bootstrap=True"):
        build_data_plane_client({}, bootstrap=False)


def test_what_is_left_in_the_store_can_be_listed() -> None:
    client = LocalDataPlaneClient()
    client.register_partition("val", [], 1, [])
    put(client, ["b", "a"], x=torch.ones(2, 3))
    assert client.partition_ids() == ["val", "p"]
    assert client.sample_ids("p") == ["b", "a"]
    assert (client.stored_bytes(), client.stored_bytes("p"), client.stored_bytes("val")) == (24, 24, 0)
    assert (client.sample_ids("nowhere"), client.stored_bytes("nowhere")) == ([], 0)


def test_clearing_rows_frees_their_memory_before_the_last_one_goes() -> None:
    client = LocalDataPlaneClient()
    ids = [f"s{i}" for i in range(512)]
    rows = nest([torch.ones(100) for _ in ids])
    put(client, ids, dense=torch.ones(512, 100), ragged=rows, log=object_array(["x" * 100] * 512))
    whole = client.stored_bytes()
    client.clear_samples(ids[:510], "p")
    assert client.stored_bytes() < whole / 100
    client.clear_samples(ids, "p")
    assert client.stored_bytes() == 0


def test_overwriting_rows_frees_the_old_ones() -> None:
    client = LocalDataPlaneClient()
    ids = [f"s{i}" for i in range(100)]
    for _ in range(5):
        put(client, ids, x=torch.ones(100, 10))
        put(client, ids[:60], x=torch.ones(60, 10))
    assert client.stored_bytes() == 4000


@pytest.mark.parametrize("kind", ["dense", "ragged", "objects"])
@pytest.mark.parametrize("pattern", ["whole", "in order", "interleaved", "reversed", "repeated", "none"])
def test_every_way_to_read_over_chunks_agrees_with_row_by_row(kind: str, pattern: str) -> None:
    rows = [[torch.full((n + c,), 10.0 * c + n) for n in range(4)] for c in range(3)]
    columns = {
        "dense": [torch.arange(4.0) + 10 * c for c in range(3)],
        "ragged": [nest(part) for part in rows],
        "objects": [object_array([row.tolist() for row in part]) for part in rows],
    }[kind]

    def chunk(column: Any) -> Chunk:
        leaf: Any = read_wire(TensorDict({"x": column}, batch_size=[4]))["x"]
        return chunk_of_leaf("x", leaf, list("abcd"), [])

    chunks = [chunk(column) for column in columns]
    picks = {
        "whole": [(0, r) for r in range(4)],
        "in order": [(c, r) for c in range(3) for r in range(1, 4)],
        "interleaved": [(c, r) for r in range(4) for c in range(3)],
        "reversed": [(c, r) for c in (2, 1, 0) for r in (3, 2, 1, 0)],
        "repeated": [(1, 2)] * 5,
        "none": [],
    }[pattern]
    chunk_of, row_of = (np.array([pick[i] for pick in picks], dtype=np.int64) for i in (0, 1))
    read = read_rows(chunks, (chunk_of, row_of))
    assert all(read.values.data_ptr() != chunk.values.data_ptr() for chunk in chunks if read.values.numel())
    leaf = wire_tensordict({"x": read.leaf([])}, len(picks))["x"]
    expected = {
        "dense": [10.0 * c + r for c, r in picks],
        "ragged": [rows[c][r].tolist() for c, r in picks],
        "objects": [rows[c][r].tolist() for c, r in picks],
    }[kind]
    assert leaf.shape[0] == len(picks)
    if picks:
        got = [row.tolist() for row in leaf.unbind()] if kind == "ragged" else leaf.tolist()
        assert got == expected


@pytest.mark.parametrize("order", [["a", "b", "c"], ["c", "a"]])
def test_columns_that_are_read_share_offsets_exactly_where_their_rows_have_equal_lengths(
    order: list[str],
) -> None:
    def rows(*lengths: int) -> torch.Tensor:
        return nest([torch.ones(n) for n in lengths])

    columns = {"x": rows(1, 2, 3), "y": rows(2, 2, 2), "z": rows(1, 2, 3), "dense": torch.ones(3)}
    client = LocalDataPlaneClient()
    client.put_samples(["a", "b", "c"], "p", fields=TensorDict(columns, batch_size=[3]))
    got = client.get_samples(order, "p", list(columns))
    again = client.get_samples(order, "p", ["x"])
    offsets = {name: got[name].offsets() for name in ("x", "y", "z")}
    assert offsets["x"] is offsets["z"]
    assert offsets["x"] is not offsets["y"]
    assert again["x"].offsets() is not offsets["x"]
    flat = flat_rows(got)
    held, places, known = flat["\0layout"]
    assert (held, [len(o) for o in known]) == (len(order), [len(order) + 1] * 2)
    assert places == {"x": (0, 1), "y": (1, 1), "z": (0, 1)}


def test_equal_offsets_of_a_call_become_one_copy() -> None:
    first, second = torch.tensor([0, 1, 3]), torch.tensor([0, 2])
    known: list[tuple[torch.Tensor, torch.Tensor]] = []
    own = [own_offsets(offsets, known) for offsets in (first, second, first.clone(), second)]
    assert own[0] is own[2]
    assert own[1] is own[3]
    assert own[0] is not first
    assert (own[0].tolist(), own[1].tolist()) == ([0, 1, 3], [0, 2])


def test_a_store_that_is_switched_off_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"data_plane\.enabled=false"):
        build_data_plane_client({"enabled": False, "impl": "local"}, bootstrap=True)


def test_an_unknown_key_is_named_with_the_one_that_was_meant() -> None:
    with pytest.raises(ConfigError, match=r"data_plane: .*storage_capacity"):
        build_data_plane_client({"storage_capcity": 4}, bootstrap=True)
