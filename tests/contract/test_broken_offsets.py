"""A nested tensor whose offsets do not fit its values is refused by every store before a byte moves; others are read
as torch reads them, however their offsets lie in memory."""

import pytest
import torch
from tensordict import TensorDict

from headrace.data_plane import kv_first_write, read_columns
from headrace.data_plane.interfaces import DataPlaneClient
from headrace.distributed.ragged import gather_spans, ragged_from_nested
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


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_offsets_that_lie_apart_in_memory_are_those_that_they_show(
    client: DataPlaneClient, dtype: torch.dtype
) -> None:
    # Followed as if they lay side by side, these would be 0, 1, 2: the first row would end after a token.
    offsets = torch.tensor([[0, 1], [2, 3], [6, 5]], dtype=dtype)[:, 0]
    ragged = torch.nested.nested_tensor_from_jagged(torch.arange(6), offsets)
    mask = torch.tensor([[1, 1, 0, 0, 0], [2, 2, 2, 2, 0]], dtype=torch.uint8)
    lengths = torch.tensor([2, 4])
    columns = {"input_ids": ragged, "extra": ragged, "token_mask": mask, "input_lengths": lengths}
    meta = kv_first_write(columns, sample_ids=["a", "b"], dp_client=client, partition_id="train")
    back = read_columns(client, meta, ["input_ids", "extra", "token_mask"])
    rows = [[0, 1, 0, 0], [2, 3, 4, 5]]
    assert back["input_ids"].tolist() == back["extra"].tolist() == rows
    assert back["token_mask"].tolist() == [[1, 1, 0, 0], [2, 2, 2, 2]]


def test_spans_of_any_integer_dtype_are_gathered_and_others_refused() -> None:
    values = torch.arange(10)
    starts, lengths = torch.tensor([7, 0], dtype=torch.int32), torch.tensor([3, 2], dtype=torch.int32)
    assert gather_spans(values, starts, lengths).tolist() == [7, 8, 9, 0, 1]
    with pytest.raises(SchemaError, match="row 1 begins at token 9 and has 2 tokens; there are 10"):
        gather_spans(values, torch.tensor([0, 9]), torch.tensor([1, 2]))
    with pytest.raises(SchemaError, match="1 starts and 3 lengths"):
        gather_spans(values, torch.tensor([0]), torch.tensor([3, 3, 3]))


def test_lengths_whose_sum_does_not_fit_in_64_bits_are_refused_by_row() -> None:
    # Four times 2**62 is 0 in 64 bits, and a start of 2**62 and as many tokens end before 0.
    huge = [2**62] * 4
    nested = torch.nested.nested_tensor_from_jagged(
        torch.arange(10), torch.tensor([*huge, 0, 5]), lengths=torch.tensor([*huge, 5])
    )
    with pytest.raises(SchemaError, match="row 0 begins at token"):
        ragged_from_nested(nested)


def test_offsets_that_are_no_integers_are_refused() -> None:
    nested = torch.nested.nested_tensor_from_jagged(torch.arange(5), torch.tensor([0.0, 2.5, 5.0]))
    with pytest.raises(SchemaError, match=r"torch.float32; expected integers"):
        ragged_from_nested(nested)
