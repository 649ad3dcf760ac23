"""One length per sample: what a put may say about rows that the store holds."""

import pytest
import torch
from contract_batches import put_numbers, tokens, wire
from tensordict import TensorDict

from headrace.data_plane import DataPlaneClient
from headrace.data_plane.codec import nest
from headrace.errors import SampleNotFound, SchemaError
from reference import rows_of


def ids_of(*lengths: int) -> torch.Tensor:
    return tokens(*[range(length) for length in lengths])


def floats(*lengths: int) -> torch.Tensor:
    return nest([torch.arange(length, dtype=torch.float32) for length in lengths])


def put(client: DataPlaneClient, names: str, **columns: torch.Tensor) -> None:
    client.put_samples(list(names), "p", fields=wire(len(names), **columns))


def lengths(client: DataPlaneClient, names: str, column: str) -> list[int]:
    return [len(row) for row in rows_of(client.get_samples(list(names), "p", [column])[column])]


def test_a_later_column_has_the_lengths_of_the_rows_that_are_there(client: DataPlaneClient) -> None:
    put(client, "abc", input_ids=ids_of(2, 5, 0))
    put(client, "cab", prev_logprobs=floats(0, 2, 5))
    assert lengths(client, "abc", "prev_logprobs") == [2, 5, 0]


def test_another_length_is_refused_with_sample_column_and_both_lengths(client: DataPlaneClient) -> None:
    put(client, "abc", input_ids=ids_of(2, 5, 3))
    with pytest.raises(SchemaError) as caught:
        put(client, "cba", prev_logprobs=floats(3, 4, 2))
    for part in ("column 'prev_logprobs' has 4 tokens for sample 'b'", "column 'input_ids'", "says 5"):
        assert part in str(caught.value)
    with pytest.raises(SampleNotFound):
        client.get_samples(["a"], "p", ["prev_logprobs"])


@pytest.mark.parametrize(
    "columns",
    [
        {"token_mask": torch.nested.nested_tensor([[1] * 3], dtype=torch.uint8, layout=torch.jagged)},
        {"routed_experts": nest([torch.zeros(3, 2, 4, dtype=torch.uint8)])},
        {"input_lengths": torch.tensor([3])},
        {"input_ids": ids_of(3)},
    ],
    ids=lambda columns: next(iter(columns)),
)
def test_every_column_that_says_a_length_is_held_to_it(
    client: DataPlaneClient, columns: dict[str, torch.Tensor]
) -> None:
    put(client, "a", input_ids=ids_of(2), prev_logprobs=floats(2))
    with pytest.raises(SchemaError, match="has 3 tokens for sample 'a'"):
        put(client, "a", **columns)
    assert lengths(client, "a", "input_ids") == [2]


def test_a_dense_column_has_as_many_tokens_as_it_is_wide(client: DataPlaneClient) -> None:
    put(client, "ab", input_ids=ids_of(3, 5))
    with pytest.raises(
        SchemaError, match=r"'prev_logprobs' has 2 tokens for sample 'a'; column 'input_ids' .*3"
    ):
        put(client, "ab", prev_logprobs=torch.ones(2, 2))
    with pytest.raises(
        SchemaError, match=r"'prev_logprobs' has 2 tokens for sample 'c'; .* says 3.* pack padded rows"
    ):
        put(client, "cd", input_lengths=torch.tensor([3, 5]), prev_logprobs=torch.ones(2, 2))
    with pytest.raises(
        SchemaError, match=r"'prev_logprobs' has 2 tokens for sample 'd'; .* of the same put says 5"
    ):
        put(client, "cd", input_ids=ids_of(2, 5), prev_logprobs=torch.ones(2, 2))
    with pytest.raises(SchemaError, match="'routed_experts' has 4 tokens for sample 'a'"):
        put(client, "ab", routed_experts=torch.zeros(2, 4, 1, 2, dtype=torch.uint8))
    with pytest.raises(SampleNotFound):
        client.get_samples(["a"], "p", ["prev_logprobs"])
    assert client.sample_ids("p") == ["a", "b"]


def test_a_dense_column_of_the_right_width_is_taken_and_binds(client: DataPlaneClient) -> None:
    put(client, "ab", prev_logprobs=torch.ones(2, 3), advantages=torch.ones(2))
    with pytest.raises(SchemaError, match=r"4 tokens for sample 'b'; column 'prev_logprobs' .* says 3"):
        put(client, "ba", input_ids=ids_of(4, 3))
    fields = wire(2, input_ids=torch.ones(2, 3, dtype=torch.int64), input_lengths=torch.tensor([3, 3]))
    assert client.put_samples(["b", "a"], "p", fields=fields).sequence_lengths == [3, 3]
    put(client, "c", input_ids=torch.ones(1, 3, dtype=torch.int64))
    assert put_numbers(client, ["c"], x=0).sequence_lengths == [3]


@pytest.mark.parametrize("length", [-5, -1, 2**31])
def test_a_number_of_tokens_that_no_row_has_is_refused(client: DataPlaneClient, length: int) -> None:
    with pytest.raises(
        SchemaError, match=f"'input_lengths' is {length} in row 1; expected tokens, 0 to 2147483647"
    ):
        put(client, "ab", input_lengths=torch.tensor([2, length]))
    assert client.sample_ids("p") == []
    put(client, "ab", input_lengths=torch.tensor([2, 0]))
    with pytest.raises(SchemaError, match=r"1 tokens for sample 'b'; column 'input_lengths' .* says 0"):
        put(client, "b", input_ids=ids_of(1))


def test_a_stored_number_of_tokens_binds_as_the_tokens_do(client: DataPlaneClient) -> None:
    put(client, "ab", input_lengths=torch.tensor([2, 4]))
    with pytest.raises(SchemaError, match=r"3 tokens for sample 'b'; column 'input_lengths' .* says 4"):
        put(client, "ab", input_ids=ids_of(2, 3))


def test_columns_of_one_put_have_the_same_lengths(client: DataPlaneClient) -> None:
    with pytest.raises(
        SchemaError, match=r"3 tokens for sample 'b'; column 'input_ids' of the same put says 2"
    ):
        put(client, "ab", input_ids=ids_of(1, 2), prev_logprobs=floats(1, 3))
    with pytest.raises(SampleNotFound):
        client.get_samples(["a"], "p", ["input_ids"])


def test_a_put_of_all_columns_may_change_the_length(client: DataPlaneClient) -> None:
    for first, second in ((2, 5), (5, 3)):
        changed = {"input_ids": ids_of(first, second), "input_lengths": torch.tensor([first, second])}
        put(client, "ab", prev_logprobs=floats(first, second), **changed)
        assert lengths(client, "ba", "prev_logprobs") == [second, first]
    put(client, "b", generation_logprobs=floats(3))
    with pytest.raises(SchemaError, match="'generation_logprobs' has 2 tokens for sample 'a'"):
        put(client, "ba", generation_logprobs=floats(3, 2))


def test_a_column_that_is_left_with_the_old_length_forbids_the_change(client: DataPlaneClient) -> None:
    put(client, "ab", input_ids=ids_of(2, 5), prev_logprobs=floats(2, 5))
    put(client, "b", advantages=floats(5))
    put(client, "a", input_ids=ids_of(3), prev_logprobs=floats(3))
    with pytest.raises(SchemaError, match=r"4 tokens for sample 'b'; column 'advantages' .* says 5"):
        put(client, "ab", input_ids=ids_of(1, 4), prev_logprobs=floats(1, 4))
    assert lengths(client, "ab", "input_ids") == [3, 5]


def test_new_and_known_rows_of_one_put_are_told_apart(client: DataPlaneClient) -> None:
    put(client, "b", input_ids=ids_of(2))
    put(client, "abc", prev_logprobs=floats(7, 2, 1))
    with pytest.raises(SchemaError, match="1 tokens for sample 'a'"):
        put(client, "dabc", advantages=floats(9, 1, 2, 1))
    put_numbers(client, ["d"], x=0)
    put(client, "d", advantages=floats(4))


def test_a_cleared_row_binds_nobody(client: DataPlaneClient) -> None:
    put(client, "ab", input_ids=ids_of(2, 5))
    client.clear_samples(["a"], "p")
    put(client, "a", prev_logprobs=floats(3))
    with pytest.raises(SchemaError, match="'prev_logprobs' has 3 tokens for sample 'b'"):
        put(client, "b", prev_logprobs=floats(3))
    client.clear_samples(None, "p")
    put(client, "b", prev_logprobs=floats(3))


def test_rows_that_outlive_many_clears_keep_their_lengths(client: DataPlaneClient) -> None:
    names = [f"s{i}" for i in range(3000)]
    sizes = [i % 4 for i in range(3000)]
    client.put_samples(names, "p", fields=wire(3000, input_ids=ids_of(*sizes)))
    client.clear_samples([name for i, name in enumerate(names) if i % 7], "p")
    kept = [i for i in range(3000) if not i % 7][::-1]
    fields: TensorDict = wire(len(kept), prev_logprobs=floats(*[sizes[i] for i in kept]))
    client.put_samples([names[i] for i in kept], "p", fields=fields)
    with pytest.raises(SchemaError, match=r"'advantages' has 9 tokens for sample 's14'; .* says 2"):
        client.put_samples(["s14"], "p", fields=wire(1, advantages=floats(9)))


def test_one_value_for_all_tokens_and_undeclared_columns_say_no_length(client: DataPlaneClient) -> None:
    put(client, "ab", input_ids=ids_of(2, 5), note=floats(9, 9))
    put(client, "ab", advantages=torch.ones(2), extra=floats(1, 1), scores=torch.ones(2, 5))
    assert lengths(client, "ab", "extra") == [1, 1]


def test_partitions_have_lengths_of_their_own(client: DataPlaneClient) -> None:
    put(client, "a", input_ids=ids_of(2))
    client.put_samples(["a"], "q", fields=wire(1, prev_logprobs=floats(3)))
    client.register_partition("p", ["input_ids"], 1, [])
    put(client, "a", prev_logprobs=floats(4))
