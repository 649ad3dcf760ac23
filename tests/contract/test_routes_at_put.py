"""A first write refuses routes that no router can have chosen, and the store stays as it was."""

import pytest
import torch

from headrace.data_plane.column_io import kv_first_write
from headrace.data_plane.interfaces import DataPlaneClient
from headrace.errors import SchemaError

LENGTHS = [3, 2]
MISSING = 255


def batch(routes: torch.Tensor) -> dict[str, object]:
    return {
        "input_ids": [torch.arange(n) for n in LENGTHS],
        "input_lengths": torch.tensor(LENGTHS),
        "routed_experts": list(torch.split(routes, LENGTHS)),
    }


def good_routes() -> torch.Tensor:
    """(5 tokens, 2 layers, 2): experts 3 and 7 everywhere, one row missing."""
    routes = torch.tensor([3, 7], dtype=torch.uint8).expand(5, 2, 2).clone()
    routes[2, 1] = MISSING
    return routes


FAULTS = {
    "an expert twice": ((4, 1), [7, 7]),
    "zero rows": ((4, 1), [0, 0]),
    "a row that is partly missing": ((4, 1), [3, MISSING]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_impossible_routes_are_refused_with_sample_token_and_layer(
    client: DataPlaneClient, fault: str
) -> None:
    client.register_partition("train", ["input_ids", "routed_experts"], 2, ["train"])
    routes = good_routes()
    place, row = FAULTS[fault]
    routes[place] = torch.tensor(row, dtype=torch.uint8)
    if fault == "a row that is partly missing":
        # 255 is expert 255 as well: beside another id only a sure sign where the mark is no id.
        routes = routes.to(torch.int16)
        routes[routes == MISSING] = -1
    with pytest.raises(SchemaError, match=r"b_g0.*token 1.*layer 1"):
        kv_first_write(batch(routes), sample_ids=["a_g0", "b_g0"], dp_client=client, partition_id="train")
    assert client.sample_ids("train") == []


def test_possible_routes_and_missing_rows_pass(client: DataPlaneClient) -> None:
    client.register_partition("train", ["input_ids", "routed_experts"], 2, ["train"])
    meta = kv_first_write(
        batch(good_routes()), sample_ids=["a_g0", "b_g0"], dp_client=client, partition_id="train"
    )
    stored = client.get_samples(meta.sample_ids, "train", ["routed_experts"])["routed_experts"]
    assert torch.equal(stored.values(), good_routes())
