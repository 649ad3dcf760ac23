"""put_samples, get_samples, clear_samples."""

import threading

import numpy as np
import pytest
import torch
from contract_batches import Start, numbers, put_numbers, tokens, wire

from headrace.data_plane import DataPlaneClient, TagRule, kv_first_write
from headrace.errors import CapacityExceeded, SampleNotFound, SchemaError
from reference import rows_of


def test_rows_come_back_in_the_order_asked_repeats_included(client: DataPlaneClient) -> None:
    put_numbers(client, ["a", "b", "c"], x=0)
    assert numbers(client, ["c", "a", "c", "b"], "x") == [2, 0, 2, 1]


def test_rows_of_several_puts_come_back_in_the_order_asked(client: DataPlaneClient) -> None:
    for number, ids in enumerate((["a", "b"], ["c"], ["d", "e", "f"])):
        rows = [[10 * number + i] * (i + 1) for i in range(len(ids))]
        client.put_samples(ids, "p", fields=wire(len(ids), x=tokens(*rows)))
    for order in ("abcdef", "fedcba", "adbecf", "afafaf", "cd", "e", "bbcc", ""):
        got = rows_of(client.get_samples(list(order), "p", ["x"])["x"])
        first = {"a": [0], "b": [1, 1], "c": [10], "d": [20], "e": [21, 21], "f": [22, 22, 22]}
        assert [row.tolist() for row in got] == [first[letter] for letter in order]


def test_an_empty_request_gives_an_empty_batch_of_the_same_columns(client: DataPlaneClient) -> None:
    put_numbers(client, ["a"], x=0)
    client.put_samples(["a"], "p", fields=wire(1, y=tokens([1, 2])))
    got = client.get_samples([], "p", ["x", "y"])
    assert got.batch_size == torch.Size([0])
    assert (got["x"].shape, got["y"].shape[0]) == ((0,), 0)


def test_an_empty_put_is_fine(client: DataPlaneClient) -> None:
    meta = client.put_samples([], "p", fields=wire(0, x=torch.ones(0)))
    assert meta.size == 0


def test_an_empty_put_is_of_no_form(client: DataPlaneClient) -> None:
    put_numbers(client, ["a"], x=1)
    meta = client.put_samples([], "p", fields=wire(0, x=torch.ones(0, 3)))
    assert (meta.size, meta.fields) == (0, ["x"])
    assert numbers(client, ["a"], "x") == [1]


def test_a_repeated_id_is_refused_by_every_put(client: DataPlaneClient) -> None:
    with pytest.raises(SchemaError, match="repeated: 'a'"):
        put_numbers(client, ["a", "b", "a"], x=0)
    with pytest.raises(SampleNotFound):
        numbers(client, ["b"], "x")


@pytest.mark.parametrize(
    "part", ["an id", "a column", "a tag", "the name of a tag", "a partition", "a producer"]
)
def test_half_a_surrogate_pair_is_refused_at_the_put_and_nothing_is_written(
    client: DataPlaneClient, part: str
) -> None:
    def name(what: str, usual: str) -> str:
        return f"{usual}\ud800" if what == part else usual

    put_numbers(client, ["a"], x=0)
    fields = wire(1, **{name("a column", "y"): torch.ones(1)})
    tags = [{name("the name of a tag", "t"): name("a tag", "v")}]
    ids, producer = [name("an id", "b")], name("a producer", "r")
    with pytest.raises(SchemaError, match=r"\\ud800.*(no UTF-8 text|surrogates not allowed)"):
        client.put_samples(ids, name("a partition", "p"), fields=fields, tags=tags, producer=producer)
    assert client.sample_ids("p") == ["a"]


def test_half_a_surrogate_pair_in_a_registration_or_a_claim_is_refused(client: DataPlaneClient) -> None:
    half = "a\ud800"
    client.register_partition("p", ["x"], 4, ["t"])
    for act in (
        lambda: client.register_partition(half, ["x"], 4, ["t"]),
        lambda: client.register_partition("q", [half], 4, ["t"]),
        lambda: client.register_partition("q", ["x"], 4, [half]),
        lambda: client.register_partition("q", ["x"], 4, ["t"], group_tag=half),
        lambda: client.register_partition("q", ["x"], 4, ["t"], enums={half: ["a"]}),
        lambda: client.register_partition("q", ["x"], 4, ["t"], enums={"source": ["a", half]}),
        lambda: client.claim_meta("p", "t", ["x"], 1, blocking=False, lease_s=1, holder=half),
        lambda: client.claim_meta("p", "t", ["x"], 1, where=[TagRule("source", among=[half])]),
        lambda: client.claim_meta("p", "t", ["x"], 1, where=[TagRule(half, among=["a"])]),
    ):
        with pytest.raises(SchemaError, match=r"\\ud800.*no UTF-8 text"):
            act()
    assert client.partition_ids() == ["p"]


def test_a_tag_has_a_text_as_its_name(client: DataPlaneClient) -> None:
    with pytest.raises(SchemaError, match="tag 1 of row 0 has a name that is no text"):
        client.put_samples(["a"], "p", fields=wire(1, x=torch.ones(1)), tags=[{1: 2}])  # type: ignore[dict-item]


def test_unknown_ids_and_missing_columns_are_named_together(client: DataPlaneClient) -> None:
    put_numbers(client, ["a", "b"], x=0)
    put_numbers(client, ["a"], y=0)
    with pytest.raises(SampleNotFound) as caught:
        client.get_samples(["a", "b", "nobody"], "p", ["x", "y", "never"])
    message = str(caught.value)
    for part in ("'nobody'", "'y' is not written for 'b'", "no sample has column 'never'"):
        assert part in message


def test_an_unknown_partition_is_an_error_and_not_a_hang(client: DataPlaneClient) -> None:
    with pytest.raises(SampleNotFound, match="unknown partition 'nowhere'"):
        client.get_samples(["a"], "nowhere", ["x"])


def test_a_column_of_tags_only_rows_is_an_error(client: DataPlaneClient) -> None:
    client.put_samples(["a"], "p", tags=[{"state": "new"}])
    with pytest.raises(SampleNotFound, match="no sample has column 'x'"):
        client.get_samples(["a"], "p", ["x"])


def test_new_columns_are_added_to_rows_that_exist(client: DataPlaneClient) -> None:
    put_numbers(client, ["a", "b"], x=0)
    put_numbers(client, ["b", "a"], y=5)
    got = client.get_samples(["a", "b"], "p", ["x", "y"])
    assert (got["x"].tolist(), got["y"].tolist()) == ([0, 1], [6, 5])


def test_a_column_written_twice_keeps_the_last_value(client: DataPlaneClient) -> None:
    client.put_samples(["a", "b"], "p", fields=wire(2, x=tokens([1], [2, 2])))
    client.put_samples(["b", "c"], "p", fields=wire(2, x=tokens([3, 3, 3], [])))
    got = rows_of(client.get_samples(["a", "b", "c"], "p", ["x"])["x"])
    assert [row.tolist() for row in got] == [[1], [3, 3, 3], []]


def test_a_put_is_all_or_nothing(client: DataPlaneClient) -> None:
    put_numbers(client, ["a", "z"], x=0)
    bad = wire(2, y=torch.ones(2), x=torch.ones(2, dtype=torch.int64))
    with pytest.raises(SchemaError):
        client.put_samples(["a", "b"], "p", fields=bad, tags=[{"t": 1}, {"t": 1}])
    assert numbers(client, ["a"], "x") == [0]
    for ids, name in ((["a"], "y"), (["b"], "x")):
        with pytest.raises(SampleNotFound):
            client.get_samples(ids, "p", [name])
    assert client.put_samples(["a"], "p").tags is None


def test_a_put_that_exceeds_the_capacity_changes_nothing_and_says_so(start: Start) -> None:
    client = start(storage_capacity=4)
    put_numbers(client, ["a", "b", "c"], x=0)
    with pytest.raises(CapacityExceeded) as caught:
        put_numbers(client, ["d", "e"], "other", x=9)
    for part in ("2 new samples", "holds 3", "at most 4", "data_plane.storage_capacity"):
        assert part in str(caught.value)
    with pytest.raises(SampleNotFound):
        numbers(client, ["d"], "x", "other")
    put_numbers(client, ["c", "d"], x=5)
    assert numbers(client, ["a", "c", "d"], "x") == [0, 5, 6]


def test_cleared_rows_make_room(start: Start) -> None:
    client = start(storage_capacity=2)
    for step in range(5):
        put_numbers(client, [f"{step}a", f"{step}b"], x=step)
        client.clear_samples([f"{step}a", f"{step}b"], "p")


def test_clear_removes_the_named_rows_only(client: DataPlaneClient) -> None:
    put_numbers(client, ["a", "b", "c"], x=0)
    client.clear_samples(["b", "unknown"], "p")
    assert numbers(client, ["c", "a"], "x") == [2, 0]
    with pytest.raises(SampleNotFound, match="unknown sample ids 'b'"):
        numbers(client, ["a", "b"], "x")


def test_clear_of_none_removes_every_row(client: DataPlaneClient) -> None:
    put_numbers(client, ["a", "b"], x=0)
    client.clear_samples(None, "p")
    with pytest.raises(SampleNotFound):
        numbers(client, ["a"], "x")
    put_numbers(client, ["a"], x=7)
    assert numbers(client, ["a"], "x") == [7]


def test_clear_of_an_unknown_partition_is_ignored(client: DataPlaneClient) -> None:
    client.clear_samples(["a"], "nowhere")
    client.clear_samples(None, "nowhere")


def test_clearing_one_partition_never_touches_another(client: DataPlaneClient) -> None:
    put_numbers(client, ["a"], "p1", x=1)
    put_numbers(client, ["a"], "p2", x=2)
    client.clear_samples(None, "p1")
    assert numbers(client, ["a"], "x", "p2") == [2]


def test_what_was_produced_is_known_per_partition(client: DataPlaneClient) -> None:
    put_numbers(client, ["a"], "p1", x=1)
    client.clear_samples(["a"], "p1")
    put_numbers(client, ["a"], "p2", x=2)
    with pytest.raises(SampleNotFound, match="partition 'p1'"):
        numbers(client, ["a"], "x", "p1")


def test_many_partial_clears_leave_the_rest_as_it_was(client: DataPlaneClient) -> None:
    ids = [f"s{i}" for i in range(3000)]
    put_numbers(client, ids, x=0)
    client.put_samples(ids, "p", fields=wire(3000, y=tokens(*[[i] * (i % 3) for i in range(3000)])))
    for keep in (2, 3, 5):
        gone = [sample_id for i, sample_id in enumerate(ids) if i % keep]
        ids = [sample_id for i, sample_id in enumerate(ids) if not i % keep]
        client.clear_samples(gone, "p")
        got = client.get_samples(ids[::-1], "p", ["x", "y"])
        expected = [int(sample_id[1:]) for sample_id in ids[::-1]]
        assert got["x"].tolist() == expected
        assert [row.tolist() for row in rows_of(got["y"])] == [[n] * (n % 3) for n in expected]
    put_numbers(client, ["late"], x=-1)
    assert numbers(client, ["late", ids[-1]], "x") == [-1, int(ids[-1][1:])]


def test_ids_are_compared_as_text(client: DataPlaneClient) -> None:
    put_numbers(client, [0, 1], x=0)  # type: ignore[list-item]
    assert numbers(client, ["1", "0"], "x") == [1, 0]


def test_ids_may_be_an_array(client: DataPlaneClient) -> None:
    ids = np.array(["a", "b", "c"])
    assert client.put_samples(ids, "p", fields=wire(3, x=torch.arange(3))).sample_ids == ["a", "b", "c"]  # type: ignore[arg-type]
    client.write_samples(ids[:2], "p", wire(2, y=torch.arange(2)))  # type: ignore[arg-type]
    assert numbers(client, ids[::-1], "x") == [2, 1, 0]  # type: ignore[arg-type]
    client.clear_samples(ids[:0], "p")  # type: ignore[arg-type]
    client.clear_samples(ids[1:], "p")  # type: ignore[arg-type]
    assert client.sample_ids("p") == ["a"]


def test_one_text_in_place_of_ids_is_refused_by_every_write(client: DataPlaneClient) -> None:
    batch = {"input_lengths": torch.tensor([1, 1]), "input_ids": torch.zeros(2, 1, dtype=torch.int64)}
    with pytest.raises(SchemaError, match="sample_ids='ab' is a text; expected a list of names"):
        client.put_samples("ab", "p", fields=wire(2, x=torch.zeros(2)))
    with pytest.raises(SchemaError, match="sample_ids='ab' is a text; expected a list of names"):
        kv_first_write(batch, sample_ids="ab", dp_client=client, partition_id="p")
    client.put_samples(["c"], "p", fields=wire(1, x=torch.zeros(1)))
    assert client.sample_ids("p") == ["c"]


def test_tags_are_merged_and_readable(client: DataPlaneClient) -> None:
    first = client.put_samples(["a", "b"], "p", tags=[{"r": 1}, {"r": 2}])
    second = client.put_samples(["b", "c"], "p", tags=[{"kept": True}, {"r": 3}])
    assert first.tags == [{"r": 1}, {"r": 2}]
    assert second.tags == [{"r": 2, "kept": True}, {"r": 3}]
    client.clear_samples(["b"], "p")
    assert client.put_samples(["a", "b"], "p").tags == [{"r": 1}, {}]


def test_tags_of_the_caller_are_not_shared(client: DataPlaneClient) -> None:
    tags = [{"r": 1}]
    meta = client.put_samples(["a"], "p", tags=tags)
    tags[0]["r"] = 9
    assert meta.tags is not None
    meta.tags[0]["r"] = 8
    assert client.put_samples(["a"], "p").tags == [{"r": 1}]


@pytest.mark.parametrize(
    ("value", "says"), [(threading.Lock(), "type _thread.lock"), (2**70, "msgpack"), ([print], "builtin")]
)
def test_a_tag_that_cannot_be_stored_is_refused_before_anything_is(
    client: DataPlaneClient, value: object, says: str
) -> None:
    put_numbers(client, ["b"], x=1)
    with pytest.raises(SchemaError, match=f"tag 'bad' of row 1: .*{says}"):
        client.put_samples(["a", "b"], "p", fields=wire(2, x=torch.ones(2)), tags=[{"r": 1}, {"bad": value}])
    assert numbers(client, ["b"], "x") == [1]
    with pytest.raises(SampleNotFound):
        numbers(client, ["a"], "x")
    stored_blocks = getattr(client, "stored_blocks", lambda: 1)
    assert stored_blocks() == 1


def test_tags_hold_what_object_columns_hold(client: DataPlaneClient) -> None:
    given = {"list": [1, {"k": (2, None)}], "tensor": torch.tensor([1.5]), "number": np.float32(0.5)}
    (got,) = client.put_samples(["a"], "p", tags=[given]).tags or []
    assert (got["list"], got["tensor"].tolist(), got["number"]) == (given["list"], [1.5], 0.5)


def test_as_many_tags_as_rows_are_asked_for(client: DataPlaneClient) -> None:
    with pytest.raises(SchemaError, match="1 tags for 2"):
        client.put_samples(["a", "b"], "p", tags=[{}])


def test_a_put_returns_a_meta_that_names_what_it_wrote(client: DataPlaneClient) -> None:
    meta = client.put_samples(
        ["a", "b"],
        "p",
        fields=wire(2, input_ids=tokens([1, 2], [3]), input_lengths=torch.tensor([2, 1])),
    )
    assert (meta.partition_id, meta.sample_ids) == ("p", ["a", "b"])
    assert (meta.fields, meta.sequence_lengths) == (["input_ids", "input_lengths"], [2, 1])


def test_lengths_are_known_from_jagged_tokens_alone(client: DataPlaneClient) -> None:
    client.put_samples(["a", "b"], "p", fields=wire(2, input_ids=tokens([1, 2], [3])))
    assert put_numbers(client, ["b", "a"], x=0).sequence_lengths == [1, 2]


def test_a_put_tells_lengths_and_tags_as_all_puts_have_left_them(client: DataPlaneClient) -> None:
    fields = wire(2, input_ids=tokens([1, 2], [3]))
    meta = client.put_samples(["a", "b"], "p", fields=fields, tags=[{"r": 1}, {"r": 2}])
    assert (meta.sample_ids, meta.fields) == (["a", "b"], ["input_ids"])
    assert (meta.sequence_lengths, meta.tags) == ([2, 1], [{"r": 1}, {"r": 2}])
    full = client.put_samples(["b", "a"], "p")
    assert (full.sequence_lengths, full.tags) == ([1, 2], [{"r": 2}, {"r": 1}])
