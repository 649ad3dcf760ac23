"""Blocks of bytes, and the index that says where rows lie; no process but this one."""

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import Raw
from tensordict import TensorDict

from headrace import errors
from headrace.data_plane.codec import nest
from headrace.data_plane.store.blocks import BlockError, BlockRead, PackedColumns, pack, select_rows, unpack
from headrace.data_plane.store.claims import ClaimRequest, Registration
from headrace.data_plane.store.columns import Chunk, Put, checked_put, read_rows
from headrace.data_plane.wire import wire_tensordict
from headrace.distributed.columns import object_array
from headrace.errors import CapacityExceeded, DataPlaneError, SampleNotFound, SchemaError, TransportError
from reference import rows_of, same_bits, same_rows

pytest.importorskip("transfer_queue", reason="needs headrace[ray]")

from headrace.data_plane.adapters.transfer_queue_index import Indexes, IndexServer, operation_of, reply_to
from headrace.data_plane.adapters.transfer_queue_rows import SampleIndex
from headrace.data_plane.adapters.transfer_queue_socket import (
    Call,
    Done,
    Endpoint,
    Failed,
    IndexClient,
    calls,
    encoder,
    opened,
    sealed,
    wire_tags,
)
from headrace.distributed.ray_connection import Deadline

DTYPES = [torch.bool, torch.uint8, torch.int16, torch.uint16, torch.int64, torch.bfloat16, torch.float64]


def chunks_of(count: int, **columns: Any) -> Any:
    ids, wire = [f"s{i}" for i in range(count)], TensorDict(columns, batch_size=[count])
    return checked_put(ids, "p", wire, None)[1]


def plain(chunk: Chunk) -> Any:
    return wire_tensordict({"x": chunk.leaf([])}, chunk.rows)["x"]


def put(index: SampleIndex, partition: str, ids: list[str], packed: PackedColumns) -> None:
    stored = Put(partition, ids, None, {})
    index.commit(index.begin_put(b"me", stored, packed.columns, 60), range(len(packed.blocks)))


def numbers(rows: int = 1, **columns: torch.Tensor) -> PackedColumns:
    return pack(chunks_of(rows, **(columns or {"x": torch.zeros(rows)})))


def block_numbers(*puts: PackedColumns) -> list[int]:
    return sorted(block.number for packed in puts for block in packed.blocks)


def garbage(index: SampleIndex) -> list[int]:
    handed = index.hand_out(b"me")
    return sorted(handed.numbers) if handed else []


def bytes_of(packed: PackedColumns) -> list[torch.Tensor]:
    return [packed.buffer[a:b] for a, b in zip(packed.bounds, packed.bounds[1:])]


def column_of(packed: PackedColumns, name: str) -> Any:
    data = dict(zip([block.number for block in packed.blocks], bytes_of(packed)))
    parts = [unpack(block, data[block.number]) for block in packed.columns[name]]
    return plain(read_rows(parts, None))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dense_and_ragged_rows_survive_packing_bit_for_bit(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    dense = torch.randint(0, 2, (5, 3), generator=generator).to(dtype)
    rows = [torch.randint(0, 2, (n, 2), generator=generator).to(dtype) for n in (0, 3, 3, 1, 0)]
    packed = pack(chunks_of(5, dense=dense, rows=nest(rows)))
    assert same_bits(column_of(packed, "dense"), dense)
    assert same_rows(rows_of(column_of(packed, "rows")), rows)


def test_rows_without_elements_keep_their_shapes() -> None:
    rows = [torch.zeros(n, 0, 4) for n in (2, 0, 3)]
    packed = pack(chunks_of(3, empty=torch.zeros(3, 0), rows=nest(rows)))
    assert column_of(packed, "empty").shape == (3, 0)
    assert [tuple(row.shape) for row in rows_of(column_of(packed, "rows"))] == [
        (2, 0, 4),
        (0, 0, 4),
        (3, 0, 4),
    ]


def test_objects_survive_packing() -> None:
    values = [{"a": [1, None]}, "", b"\x00\xff", ("x", 2.5), []]
    assert list(column_of(pack(chunks_of(5, log=object_array(values))), "log")) == values


def test_rows_ragged_in_a_later_dimension_survive_packing() -> None:
    rows = [torch.randn(4, n) for n in (3, 5)]
    column = torch.nested.nested_tensor(rows, layout=torch.jagged)
    got = column_of(pack(chunks_of(2, x=column)), "x")
    assert all(torch.equal(a, b) for a, b in zip(got.unbind(), rows, strict=True))


def test_an_eighth_of_the_rows_lies_in_little_more_than_an_eighth_of_the_bytes() -> None:
    rows = [torch.zeros(1000 + 20 * i, dtype=torch.int64) for i in range(1024)]
    packed = pack(chunks_of(1024, x=nest(rows)))
    index, ids = SampleIndex(2048), [f"s{i}" for i in range(1024)]
    put(index, "p", ids, packed)
    located = index.locate("p", ids[512:640], ["x"])["x"]
    wanted = sum(row.numel() * 8 for row in rows[512:640])
    assert located.blocks["nbytes"].sum() < 1.6 * wanted


def test_a_row_larger_than_a_block_gets_a_block_of_its_own() -> None:
    rows = [torch.zeros(n, dtype=torch.uint8) for n in (10, 9_000_000, 10, 10)]
    packed = pack(chunks_of(4, x=nest(rows)))
    assert same_rows(rows_of(column_of(packed, "x")), rows)
    assert max(block.nbytes for block in packed.blocks) < 9_000_200


@pytest.mark.parametrize("fault", ["shorter", "longer", "another block", "another dtype", "padded"])
def test_bytes_that_are_not_the_blocks_own_are_refused(fault: str) -> None:
    first, other = (pack(chunks_of(2, x=torch.tensor([1, 2]))) for _ in range(2))
    data = bytes_of(first)[0]
    wrong = {
        "shorter": data[:-1],
        "longer": torch.cat([data, data[:1]]),
        "another block": bytes_of(other)[0],
        "another dtype": data.view(torch.int64),
        "padded": data[None],
    }[fault]
    assert plain(unpack(first.blocks[0], data)).tolist() == [1, 2]
    with pytest.raises(BlockError, match=f"block {first.blocks[0].number} "):
        unpack(first.blocks[0], wrong)


def test_what_the_index_is_told_is_a_vanishing_part_of_long_rows() -> None:
    def told(tokens: int) -> tuple[int, int]:
        packed = pack(chunks_of(64, x=nest([torch.zeros(tokens, dtype=torch.uint8)] * 64)))
        return len(encoder.encode(packed.columns)), len(packed.buffer)

    (short, _), (long, bulk) = told(40_000), told(400_000)
    assert long <= 4 * short
    assert long < 0.0001 * bulk


def test_blocks_become_garbage_when_their_last_row_goes() -> None:
    index, ids = SampleIndex(16), ["a", "b"]
    first, second = (numbers(2, x=torch.tensor([1, 2]), y=torch.zeros(2)) for _ in range(2))
    third = numbers(x=torch.tensor([1]))
    put(index, "p", ids, first)
    put(index, "p", ids, second)
    assert garbage(index) == block_numbers(first)
    put(index, "p", ["a"], third)
    index.clear("p", ["b"])
    assert garbage(index) == [second.columns["x"][0].number]
    index.clear("p", None)
    assert garbage(index) == sorted([second.columns["y"][0].number, *block_numbers(third)])
    assert garbage(index) == []


def test_blocks_of_a_registered_again_partition_are_garbage() -> None:
    index = SampleIndex(16)
    put(index, "p", ["a"], packed := numbers())
    index.register(Registration("p", 1, ()))
    assert garbage(index) == block_numbers(packed)


def test_a_put_that_cannot_be_committed_is_refused_before_its_blocks_are_stored() -> None:
    index = SampleIndex(2)
    put(index, "p", ["a", "z"], numbers(2))
    for ids, packed, error in (
        (["b"], numbers(), CapacityExceeded),
        (["a"], numbers(x=torch.tensor([1])), SchemaError),
    ):
        with pytest.raises(error):
            index.begin_put(b"me", Put("p", ids, None, {}), packed.columns, 60)
    with pytest.raises(SampleNotFound):
        index.locate("p", ["b"], ["x"])
    assert garbage(index) == []


def begin(index: SampleIndex, owner: bytes, sample: str, packed: PackedColumns, limit_s: float = 60) -> int:
    return index.begin_put(owner, Put("p", [sample], None, {}), packed.columns, limit_s)


def test_blocks_of_a_put_that_its_process_did_not_live_to_commit_are_garbage() -> None:
    alive = {b"me", b"it"}
    index = SampleIndex(16, alive.__contains__)
    packed = numbers()
    mine, its = begin(index, b"me", "k", numbers()), begin(index, b"it", "m", packed)
    assert garbage(index) == []
    alive.remove(b"it")
    handed = index.hand_out(b"me", at_once=True)
    assert handed is not None
    assert handed.numbers == block_numbers(packed)
    with pytest.raises(TransportError, match="put again"):
        index.commit(its, [0])
    index.commit(mine, [7])
    assert index.locate("p", ["k"], ["x"])["x"].blocks["slot"].tolist() == [7]
    assert index.sample_ids() == {"p": ["k"]}


def test_blocks_of_a_put_whose_time_is_over_are_garbage_and_it_is_not_committed() -> None:
    index = SampleIndex(16)
    late = begin(index, b"me", "k", packed := numbers(), limit_s=0)
    assert garbage(index) == block_numbers(packed)
    with pytest.raises(TransportError, match="took so long"):
        index.commit(late, [0])
    assert index.sample_ids() == {}


def test_garbage_that_a_process_did_not_come_to_drop_goes_to_another() -> None:
    alive = {b"me", b"it"}
    index = SampleIndex(16, alive.__contains__)
    puts = {sample: numbers() for sample in ("k", "m", "n")}
    for sample, packed in puts.items():
        index.commit(begin(index, b"it", sample, packed), [0])
        index.clear("p", [sample])
    first = index.hand_out(b"it")
    assert first is not None
    index.give_back([first.ticket])
    second = index.hand_out(b"it")
    assert second is not None
    assert sorted(first.numbers) == sorted(second.numbers) == block_numbers(*puts.values())
    alive.remove(b"it")
    third = index.hand_out(b"me", at_once=True)
    assert third is not None
    index.end([third.ticket])
    alive.remove(b"me")
    assert index.hand_out(b"another", at_once=True) is None


def test_a_column_over_several_blocks_is_read_in_any_order() -> None:
    values = torch.arange(400_000).view(400, 1000)
    packed = pack(chunks_of(400, x=values))
    index, ids = SampleIndex(1000), [f"s{i}" for i in range(400)]
    put(index, "p", ids, packed)
    data = dict(zip([block.number for block in packed.blocks], bytes_of(packed)))
    order = torch.randperm(400, generator=torch.Generator().manual_seed(0))[:77].tolist()
    located = index.locate("p", [ids[i] for i in order], ["x"])["x"]
    whole = BlockRead.of(located.form, located.blocks, None, gives_rows=False)
    chunks = [unpack(block, data[block.number]) for block in whole.blocks]
    assert located.places is not None
    block_of, row_of = (numbers.astype(np.int64) for numbers in located.places)
    got = plain(read_rows(chunks, (block_of, row_of)))
    assert len(packed.blocks) > 3
    assert torch.equal(got, values[order])


def test_the_index_refuses_to_mix_forms() -> None:
    index = SampleIndex(16)
    put(index, "p", ["a"], numbers())
    with pytest.raises(SchemaError, match="'x'"):
        put(index, "p", ["b"], numbers(x=torch.zeros(1, dtype=torch.int64)))


def ask(indexes: Indexes, operation: str, *arguments: object, store: str = "", owner: bytes = b"me") -> Any:
    """Return what a call returns that goes to the index and back as messages."""
    call = Call(owner, store, operation, Raw(encoder.encode(arguments)))
    call = opened(b"secret", sealed(b"secret", call), calls)
    frames, _ = reply_to(b"secret", call, indexes.run)
    reply = opened(b"secret", frames, operation_of(operation, store).reply)
    if isinstance(reply, Failed):
        raise getattr(errors, reply.kind)(reply.text)
    return reply.answer


def test_stores_of_one_cluster_are_apart() -> None:
    indexes = Indexes()
    one, two = (ask(indexes, "open_store", b"me", name, 4, "me", 1)[0] for name in ("one", "two"))
    assert (ask(indexes, "attach", "one"), ask(indexes, "attach", "two")) == ((one, 1), (two, 1))
    ticket = ask(indexes, "begin_put", b"me", Put("p", ["a"], None, {}), numbers().columns, 60.0, store=one)
    ask(indexes, "commit", ticket, [0], None, store=one)
    assert (ask(indexes, "sample_ids", store=one), ask(indexes, "sample_ids", store=two)) == (
        {"p": ["a"]},
        {},
    )
    with pytest.raises(DataPlaneError, match="'one' is open already, by me, which lives"):
        ask(indexes, "open_store", b"it", "one", 4, "it", 1)
    ask(indexes, "close_store", one)
    with pytest.raises(DataPlaneError, match="'one' is closed"):
        ask(indexes, "sample_ids", store=one)


def test_what_the_index_is_told_and_says_is_the_same_after_the_way_through_messages() -> None:
    indexes = Indexes()
    store = ask(indexes, "open_store", b"me", "one", 4, "me", 1)[0]
    column = {
        "input_ids": nest([torch.arange(3), torch.arange(5)]),
        "x": torch.zeros(2, 3, dtype=torch.bfloat16),
    }
    ids, wire = ["a_g0", "b_g0"], TensorDict(column, batch_size=[2])
    tags: list[dict[str, Any]] = [{"n": 1, "why": ("a", 2.5)}, {"mask": torch.tensor([1, 2]), "none": None}]
    put, chunks = checked_put(ids, "p", wire, tags)
    packed = pack(chunks)
    told = put._replace(tags=wire_tags(tags))
    registration = Registration("p", 2, ("train",), enums={"n": (1, "x")})
    ask(indexes, "register", registration, store=store)
    ticket = ask(indexes, "begin_put", b"me", told, packed.columns, 60.0, store=store)
    facts = ask(indexes, "commit", ticket, [4, 7], None, store=store)
    assert (facts.sample_ids, facts.sequence_lengths) == ([], [3, 5])
    claimed = ask(indexes, "claim", ClaimRequest("p", "train", ["x"], 2), 0.0, store=store)
    assert facts.tags == [], "all rows are new, so their tags are those of the put"
    again = ask(indexes, "begin_put", b"me", Put("p", ids, None, {}), {}, 60.0, store=store)
    for got in (claimed.tags, ask(indexes, "commit", again, [], None, store=store).tags):
        assert (got[0], got[1]["none"], got[1]["mask"].tolist()) == (tags[0], None, [1, 2])
        got[1]["mask"][0] = 5
    located = ask(indexes, "locate", "p", ids[::-1], ["input_ids", "x"], store=store)
    for (name, where), slot in zip(located.items(), (4, 7), strict=True):
        (block,) = packed.columns[name]
        whole = BlockRead.of(where.form, where.blocks, None, gives_rows=False)
        assert whole.blocks == [block._replace(slot=slot)]
        assert [part.tolist() for part in where.places] == [[0, 0], [1, 0]]
    with pytest.raises(SchemaError, match="tag 'n' of sample 'a_g0' is 3"):
        ask(
            indexes, "begin_put", b"me", told._replace(tags=[{"n": 3}, {}]), packed.columns, 60.0, store=store
        )


@pytest.mark.parametrize("operation", ["run", "__init__", "hand_out", "close", "begin_puts"])
def test_only_operations_that_are_listed_can_be_called(operation: str) -> None:
    indexes = Indexes()
    store = ask(indexes, "open_store", b"me", "one", 4, "me", 1)[0]
    for at in ("", store):
        call = Call(b"me", at, operation, Raw(encoder.encode(())))
        frames, _ = reply_to(b"secret", call, indexes.run)
        reply = opened(b"secret", frames, operation_of("sample_ids", store).reply)
        assert reply == Failed("DataPlaneError", f"the index of a store has no operation '{operation}'")


def test_a_name_goes_to_the_next_when_its_process_is_gone_with_the_blocks_to_drop() -> None:
    alive = {b"me", b"it"}
    indexes = Indexes(alive.__contains__)
    left, dropped = indexes.open_store(b"it", "one", 4, "it")
    assert dropped == []
    with pytest.raises(DataPlaneError, match="add --force"):
        indexes.drop_store("one", False)
    alive.remove(b"it")
    assert [(s.name, s.holder, s.is_alive) for s in indexes.list_stores()] == [("one", "it", False)]
    mine, dropped = indexes.open_store(b"me", "one", 4, "me")
    assert dropped == [left] != [mine]
    with pytest.raises(DataPlaneError, match="'one' is closed"):
        ask(indexes, "sample_ids", store=left)
    assert indexes.drop_store("one", True) == [left, mine], "nobody has dropped the blocks of the first yet"
    for handle in (left, mine):
        indexes.forget(handle)
    assert indexes.drop_store("one", True) == []


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_some_rows_of_a_block_are_those_rows_of_its_column(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    dense = torch.randint(0, 2, (5, 3), generator=generator).to(dtype)
    rows = [torch.randint(0, 2, (n, 2), generator=generator).to(dtype) for n in (0, 3, 3, 1, 40)]
    columns = chunks_of(
        5, dense=dense, rows=nest(rows), none=torch.zeros(5, 0), log=object_array(list("abcde"))
    )
    packed = pack(columns)
    for order in ([4, 0, 2], [], [0], [1, 2, 3]):
        some = [select_rows(frames, np.array(order, np.int64)) for frames in packed.frames]
        chunks = [unpack(block, part, len(order)) for block, part in zip(packed.blocks, some, strict=True)]
        got = dict(zip(packed.columns, map(plain, chunks), strict=True))
        assert same_bits(got["dense"], dense[order])
        assert same_rows(rows_of(got["rows"]), [rows[i] for i in order])
        assert (got["none"].shape, list(got["log"])) == ((len(order), 0), ["abcde"[i] for i in order])


def test_more_or_fewer_rows_than_asked_for_are_refused() -> None:
    packed = pack(chunks_of(3, x=torch.arange(3)))
    some = select_rows(packed.frames[0], np.array([0, 2]))
    with pytest.raises(BlockError, match=f"block {packed.blocks[0].number} "):
        unpack(packed.blocks[0], some)
    with pytest.raises(BlockError, match=f"block {packed.blocks[0].number} "):
        unpack(packed.blocks[0], some, 1)


@pytest.mark.parametrize("ragged", [False, True])
def test_rows_that_a_block_does_not_have_are_those_of_another_block(ragged: bool) -> None:
    rows = nest([torch.arange(n) for n in (2, 0, 1)]) if ragged else torch.arange(3)
    frames = pack(chunks_of(3, x=rows)).frames[0]
    with pytest.raises(BlockError, match="a block of 3 rows is asked for others"):
        select_rows(frames, np.array([0, 3]))


def test_a_message_without_the_secret_is_not_read_and_a_failed_request_holds_nothing() -> None:
    def within(seconds: float) -> Deadline:
        return Deadline(seconds, "a key")

    held: list[weakref.ref[torch.Tensor]] = []

    class Dividing(Indexes):
        def run(self, call: Call) -> Done[Any]:
            if call.operation == "hello":
                return Done(None)
            number = len(call.dropped)
            block = torch.ones(number + 1)
            held.append(weakref.ref(block))
            return Done([str(10 // number)])

    def asked(number: int) -> Any:
        what, dropped = "asking", list(range(number))
        return good.ask(
            "shared_columns", "p", [], what=what, deadline=within(10), store="s", dropped=dropped
        ).answer

    server = IndexServer("127.0.0.1", b"secret")
    endpoint = server.endpoint
    server.start(Dividing())
    good = IndexClient(endpoint, [], within(10), operation_of)
    with pytest.raises(TransportError, match="no answer within"):
        IndexClient(Endpoint("127.0.0.1", endpoint.port, b"x"), [], within(0.2), operation_of)
    assert asked(2) == ["5"]
    gc.disable()
    try:
        with pytest.raises(DataPlaneError, match="ZeroDivisionError"):
            asked(0)
        assert asked(5) == ["2"]
        assert [block() for block in held] == [None] * 3, "a request that failed keeps what it touched"
    finally:
        gc.enable()
    good.close()
