"""A nested tensor whose offsets do not fit its values is refused by every store before a byte moves."""

import pytest
import torch
from tensordict import TensorDict

from headrace.data_plane.interfaces import DataPlaneClient
from headrace.distributed.ragged import gather_spans
from headrace.errors import SchemaError


def nested(offsets: list[int]) -> torch.Tensor:
    return torch.nested.nested_tensor_from_jagged(torch.arange(10), torch.tensor(offsets))


@pytest.mark.parametrize("name", ["extra", "input_ids"])
@pytest.mark.parametrize("offsets", [[0, 4, 14], [0, 7, 4, 10], [-2, 4, 10]], ids=str)
def test_offsets_outside_the_values_are_refused_by_row(
    client: DataPlaneClient, name: str, offsets: list[int]
) -> None:
    client.register_partition("train", ["input_ids"], 3, ["train"])
    ids = [f"s{i}" for i in range(len(offsets) - 1)]
    fields = TensorDict({name: nested(offsets)}, batch_size=[len(ids)])
    with pytest.raises(SchemaError, match=r"row [01] begins at token"):
        client.put_samples(ids, "train", fields=fields)
    assert client.sample_ids("train") == []


def test_spans_of_any_integer_dtype_are_gathered_and_others_refused() -> None:
    values = torch.arange(10)
    starts, lengths = torch.tensor([7, 0], dtype=torch.int32), torch.tensor([3, 2], dtype=torch.int32)
    assert gather_spans(values, starts, lengths).tolist() == [7, 8, 9, 0, 1]
    with pytest.raises(SchemaError, match="row 1 begins at token 9 and has 2 tokens; there are 10"):
        gather_spans(values, torch.tensor([0, 9]), torch.tensor([1, 2]))
