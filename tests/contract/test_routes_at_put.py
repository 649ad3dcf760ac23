"""Routes that no router can have chosen do not get into a store, which then stays as it was; possible ones do."""

from collections.abc import Callable

import pytest
import torch
from contract_batches import wire

from headrace.data_plane import DataPlaneClient, KVBatchMeta, kv_first_write, write_columns
from headrace.data_plane.codec import nest
from headrace.data_plane.routes_codec import RouteShape, missing_mark
from headrace.errors import SampleNotFound, SchemaError
from headrace.models.router_replay import Routes, install
from moe_families import tiny_moe

LENGTHS = [3, 2]
IDS = ["a_g0", "b_g0"]
EIGHT = RouteShape(num_layers=2, top_k=2, num_experts=8)
ROUTE_DTYPES = [torch.uint8, torch.int16, torch.uint16]

Write = Callable[[DataPlaneClient, torch.Tensor, RouteShape | None], KVBatchMeta]


def good_routes(dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """(5 tokens, 2 layers, 2): experts 3 and 7 everywhere, one row missing."""
    routes = torch.tensor([3, 7], dtype=dtype).expand(5, 2, 2).clone()
    routes[2, 1] = missing_mark(dtype)
    return routes


def first_write(
    client: DataPlaneClient, routes: torch.Tensor | None, shape: RouteShape | None = None
) -> KVBatchMeta:
    batch: dict[str, object] = {
        "input_ids": [torch.arange(n) for n in LENGTHS],
        "input_lengths": torch.tensor(LENGTHS),
    }
    if routes is not None:
        batch["routed_experts"] = list(torch.split(routes, LENGTHS))
    return kv_first_write(batch, sample_ids=IDS, dp_client=client, partition_id="train", route_shape=shape)


def later_write(client: DataPlaneClient, routes: torch.Tensor, shape: RouteShape | None) -> KVBatchMeta:
    column = list(torch.split(routes, LENGTHS))
    meta = first_write(client, None)
    return write_columns(client, meta, {"routed_experts": column}, route_shape=shape)


WRITERS: dict[str, Write] = {"first": first_write, "later": later_write}


def routes_of(client: DataPlaneClient, ids: list[str]) -> torch.Tensor:
    column: torch.Tensor = client.get_samples(ids, "train", ["routed_experts"])["routed_experts"]
    return column.values()


def assert_no_routes(client: DataPlaneClient) -> None:
    with pytest.raises(SampleNotFound):
        client.get_samples(IDS[:1], "train", ["routed_experts"])


def put(client: DataPlaneClient, ids: list[str], routes: torch.Tensor) -> None:
    """A put without any of the writers: two tokens per sample."""
    column = nest(list(torch.split(routes, 2)))
    client.put_samples(ids, "train", fields=wire(len(ids), routed_experts=column))


# Faults that are faults whatever the model is, and those that the number of experts gives away.
ALWAYS = {"an expert twice": [7, 7], "zero rows": [0, 0]}
OF_EIGHT = {**ALWAYS, "id out of range": [3, 8], "partly missing": [3, -1], "missing first": [-1, 3]}


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("dtype", ROUTE_DTYPES, ids=str)
def test_impossible_routes_are_refused_with_sample_token_and_layer(
    client: DataPlaneClient, dtype: torch.dtype, writer: str
) -> None:
    cases = [(row, EIGHT) for row in OF_EIGHT.values()] + [(row, None) for row in ALWAYS.values()]
    if dtype == torch.int16:  # -1 is never an id
        cases += [([3, -1], None), ([-2, 3], None)]
    for row, shape in cases:
        routes = good_routes(dtype)
        routes[4, 1] = torch.tensor([missing_mark(dtype) if entry == -1 else entry for entry in row])
        with pytest.raises(SchemaError, match=r"sample 'b_g0', token 1, layer 1: "):
            WRITERS[writer](client, routes, shape)
        assert_no_routes(client)


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("dtype", ROUTE_DTYPES, ids=str)
def test_possible_routes_and_missing_rows_pass(
    client: DataPlaneClient, dtype: torch.dtype, writer: str
) -> None:
    for shape in (None, EIGHT):
        meta = WRITERS[writer](client, good_routes(dtype), shape)
        assert torch.equal(routes_of(client, meta.sample_ids), good_routes(dtype))


@pytest.mark.parametrize(("dtype", "experts"), [(torch.uint8, 256), (torch.uint16, 65_536)])
def test_the_last_expert_of_all_that_a_dtype_holds_is_no_missing_mark(
    client: DataPlaneClient, dtype: torch.dtype, experts: int
) -> None:
    routes = good_routes(dtype)
    routes[4, 1] = torch.tensor([experts - 1, 3])
    for shape in (None, RouteShape(2, 2, experts)):
        meta = first_write(client, routes, shape)
        assert torch.equal(routes_of(client, meta.sample_ids), routes)


@pytest.mark.parametrize(
    ("dtype", "last"), [(torch.uint8, 254), (torch.uint16, 65_534), (torch.int16, 32_767)], ids=str
)
def test_routes_of_one_expert_per_token_pass(client: DataPlaneClient, dtype: torch.dtype, last: int) -> None:
    routes = torch.tensor([0, 1, last, missing_mark(dtype), 0], dtype=dtype).view(5, 1, 1)
    for shape in (None, RouteShape(1, 1, last + 1)):
        for write in WRITERS.values():
            meta = write(client, routes, shape)
            assert torch.equal(routes_of(client, meta.sample_ids), routes)
    with pytest.raises(SchemaError, match=rf"token 2, layer 0: experts \[{last}\], outside 0\.\.3"):
        first_write(client, routes, RouteShape(1, 1, 4))


def test_routes_recorded_by_a_top_1_model_pass(client: DataPlaneClient) -> None:
    model = tiny_moe("llama4_text", num_local_experts=4, num_experts_per_tok=1)
    replay, routes = install(model), Routes.record()
    with torch.no_grad():
        model(input_ids=torch.arange(5)[None], routes=routes, use_cache=False)
    assert routes.ids.dtype == torch.uint8
    for shape in (None, replay.shape):
        meta = first_write(client, routes.ids, shape)
        assert torch.equal(routes_of(client, meta.sample_ids), routes.ids)


@pytest.mark.parametrize("writer", WRITERS)
def test_other_axes_than_those_of_the_model_are_refused(client: DataPlaneClient, writer: str) -> None:
    for routes in (good_routes()[:, :1], good_routes()[:, :, :1], good_routes().repeat(1, 2, 1)):
        with pytest.raises(SchemaError, match=r"expected \(tokens, 2 layers, 2 experts per token\)"):
            WRITERS[writer](client, routes, EIGHT)
        assert_no_routes(client)


def test_other_axes_than_those_that_the_partition_holds_are_refused_by_every_put(
    client: DataPlaneClient,
) -> None:
    ids, routes = ["x", "y"], good_routes()[:4]
    put(client, ids, routes)
    puts = {"all rows": ids, "one row": ["x"], "a new row": ["z"], "all rows and a new one": ["z", "y", "x"]}
    for rows in puts.values():
        fitting = good_routes()[:2].repeat(len(rows), 1, 1)
        for other in (fitting[:, :1], fitting[:, :, :1], fitting.repeat(1, 2, 1)):
            got = rf"\({other.shape[1]}, {other.shape[2]}\) values"
            with pytest.raises(SchemaError, match=rf"of '{rows[0]}'.* has {got}.*'train' have \(2, 2\)"):
                put(client, rows, other)
    assert client.sample_ids("train") == ids
    assert torch.equal(routes_of(client, ids), routes)
    # The dtype alone may still change with all rows, and everything with no row left.
    put(client, ids, good_routes(torch.int16)[:2].repeat(2, 1, 1))
    client.clear_samples(ids, "train")
    put(client, ids, routes[:, :1])
    assert routes_of(client, ids).shape == (4, 1, 2)


def test_a_layer_that_is_lost_on_the_way_to_a_second_write_is_refused(client: DataPlaneClient) -> None:
    meta = first_write(client, good_routes())
    column = list(torch.split(good_routes()[:, :1], LENGTHS))
    with pytest.raises(SchemaError, match=r"of 'a_g0', 'b_g0' has \(1, 2\) values per token"):
        write_columns(client, meta, {"routed_experts": column})
    assert torch.equal(routes_of(client, IDS), good_routes())


def test_two_partitions_may_hold_routes_of_two_models(client: DataPlaneClient) -> None:
    for partition, routes in {"p": good_routes(), "q": good_routes()[:, :1]}.items():
        column = nest(list(torch.split(routes, LENGTHS)))
        client.put_samples(IDS, partition, fields=wire(2, routed_experts=column))
        got = client.get_samples(IDS, partition, ["routed_experts"])["routed_experts"]
        assert torch.equal(got.values(), routes)


@pytest.mark.parametrize("empty", [(0, 2), (2, 0)], ids=["no layers", "no experts"])
def test_tokens_without_layers_or_experts_are_refused_by_every_put(
    client: DataPlaneClient, empty: tuple[int, int]
) -> None:
    routes = torch.empty(5, *empty, dtype=torch.uint8)
    for write in (first_write, later_write):
        with pytest.raises(SchemaError, match=r"'routed_experts' has \(\d, \d\) values per token"):
            write(client, routes, None)
    with pytest.raises(SchemaError, match=r"'routed_experts' has \(\d, \d\) values per token"):
        put(client, IDS, routes[:4])
    assert_no_routes(client)


def test_samples_with_different_numbers_of_layers_are_refused_by_every_put(client: DataPlaneClient) -> None:
    layers = good_routes()[:3].repeat(1, 2, 1)[
        :, :3
    ]  # of two samples of three tokens each: one layer, and two
    routes = torch.nested.nested_tensor_from_jagged(layers, torch.tensor([0, 1, 3]), jagged_dim=2)
    with pytest.raises(
        SchemaError, match="'routed_experts' is ragged in dimension 2; tokens are dimension 1"
    ):
        client.put_samples(IDS, "train", fields=wire(2, routed_experts=routes))
    assert_no_routes(client)
