"""Batches and packers as a caller of NeMo-RL uses them."""

import json
import socket
from multiprocessing import get_context
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from nemo_rl.data.multimodal_utils import PackedTensor
from nemo_rl.data.packing.algorithms import (
    ConcatenativePacker,
    FirstFitDecreasingPacker,
    FirstFitPacker,
    FirstFitShufflePacker,
    ModifiedFirstFitDecreasingPacker,
    PackingAlgorithm,
    SequencePacker,
    get_packer,
)
from nemo_rl.data_plane import codec
from nemo_rl.distributed.batched_data_dict import (
    _COUPLED_MULTIMODAL_KEYS,
    BatchedDataDict,
    DynamicBatchingArgs,
    SequencePackingArgs,
    SlicedDataDict,
)
from nemo_rl_names import calls

from headrace.distributed.batched_data_dict import BatchedDataDict as OwnBatch
from headrace.distributed.ragged import nested_from_ragged, offsets_from_lengths
from headrace.errors import ConfigError, SchemaError

MODULE = "distributed.batched_data_dict"


def packing(**changes: Any) -> SequencePackingArgs:
    return {
        "max_tokens_per_microbatch": 100,
        "input_key": "input_ids",
        "input_lengths_key": "input_lengths",
        "algorithm": "modified_first_fit_decreasing",
        "sequence_length_pad_multiple": 1,
        **changes,
    }


def tokens(lengths: list[int], width: int = 100) -> BatchedDataDict:
    return BatchedDataDict(
        {
            "input_ids": torch.arange(len(lengths)).unsqueeze(1).expand(-1, width).contiguous(),
            "input_lengths": torch.tensor(lengths),
        }
    )


@calls(
    MODULE, "BatchedDataDict", *(f"BatchedDataDict.{n}" for n in ("size", "get_dict", "slice", "chunk", "to"))
)
@calls(
    MODULE,
    *(f"BatchedDataDict.{n}" for n in ("select_indices", "reorder_data", "truncate_tensors", "get_batch")),
)
@calls(
    MODULE,
    "BatchedDataDict.shard_by_batch_size",
    "BatchedDataDict.make_microbatch_iterator",
    "SlicedDataDict",
)
def test_rows_are_cut_chosen_and_put_back() -> None:
    batch = BatchedDataDict[Any]({"x": torch.arange(8), "names": list("abcdefgh")})
    assert batch.size == 8
    assert batch.get_dict()["names"] == list("abcdefgh")
    assert batch.slice(2, 4)["x"].tolist() == [2, 3]
    assert batch.chunk(1, 4)["names"] == ["c", "d"]
    assert batch.select_indices([5, 0])["names"] == ["f", "a"]
    assert batch.get_batch(1, 4)["x"].tolist() == [4, 5, 6, 7]
    assert [m["x"].tolist() for m in batch.make_microbatch_iterator(4)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    shards = batch.shard_by_batch_size(2, 4, allow_uneven_shards=False)
    assert [shard["x"].tolist() for shard in shards] == [[0, 1, 4, 5], [2, 3, 6, 7]]
    taken = batch.select_indices([2, 0, 1])
    taken.reorder_data([2, 0, 1])
    assert taken["x"].tolist() == [0, 1, 2]
    wide = BatchedDataDict({"ids": torch.arange(6).view(2, 3)})
    wide.truncate_tensors(1, 2)
    assert wide.to("cpu")["ids"].tolist() == [[0, 1], [3, 4]]
    assert isinstance(SlicedDataDict({"x": torch.zeros(1)}), BatchedDataDict)


def test_a_batch_that_headrace_made_passes_as_one_of_the_callers() -> None:
    assert isinstance(OwnBatch({"x": torch.zeros(1)}), BatchedDataDict)
    assert not isinstance({"x": torch.zeros(1)}, BatchedDataDict)

    class Mine(BatchedDataDict):
        pass

    assert not isinstance(OwnBatch({"x": torch.zeros(1)}), Mine)
    assert isinstance(Mine({"x": torch.zeros(1)}).slice(0, 1), Mine)


@calls(
    MODULE,
    "BatchedDataDict.make_microbatch_iterator_for_packable_sequences",
    "BatchedDataDict.get_microbatch_iterator_for_packable_sequences_len",
)
@pytest.mark.parametrize(("order", "own"), [("packer", "planned"), ("largest_first", "longest_first")])
def test_packed_microbatches_come_in_the_order_that_either_spelling_names(order: str, own: str) -> None:
    batch = tokens([46, 24, 55, 88, 11, 14, 73, 17])
    shards, inverse = batch.shard_by_batch_size(2, sequence_packing_args=packing(microbatch_order=order))
    same, _ = batch.shard_by_batch_size(2, sequence_packing_args=packing(microbatch_order=own))
    assert [s.micro_batch_lengths for s in shards] == [s.micro_batch_lengths for s in same]
    for shard in shards:
        (loads,) = shard.micro_batch_lengths
        assert order == "packer" or loads == sorted(loads, reverse=True)
        parts = list(shard.make_microbatch_iterator_for_packable_sequences())
        assert [int(part["input_lengths"].sum()) for part in parts] == loads
        assert shard.get_microbatch_iterator_for_packable_sequences_len() == (len(loads), max(loads))
    joined = BatchedDataDict.from_batches(shards)
    joined.reorder_data(inverse)
    assert torch.equal(joined["input_ids"], batch["input_ids"])


@calls(
    MODULE,
    "BatchedDataDict.make_microbatch_iterator_with_dynamic_shapes",
    "BatchedDataDict.get_microbatch_iterator_dynamic_shapes_len",
)
def test_dynamic_microbatches_are_as_wide_as_their_longest_row_rounded() -> None:
    args: DynamicBatchingArgs = {
        "max_tokens_per_microbatch": 32,
        "sequence_length_round": 4,
        "input_key": "input_ids",
        "input_lengths_key": "input_lengths",
    }
    shards, _ = tokens([2, 8, 4, 16, 28, 32, 2, 32]).shard_by_batch_size(2, dynamic_batching_args=args)
    for shard in shards:
        parts = list(shard.make_microbatch_iterator_with_dynamic_shapes(sequence_dim=1))
        assert len(parts) == shard.get_microbatch_iterator_dynamic_shapes_len()
        for part in parts:
            rows, width = part["input_ids"].shape
            assert width % 4 == 0
            assert int(part["input_lengths"].max()) <= width <= 32 // rows
    assert sorted(int(n) for shard in shards for n in shard["input_lengths"]) == [2, 2, 4, 8, 16, 28, 32, 32]


# Joining.


@calls(MODULE, "BatchedDataDict.from_batches")
def test_batches_joined_with_unequal_columns_keep_all_columns_and_missing_rows_are_empty() -> None:
    jagged = nested_from_ragged(torch.arange(3), offsets_from_lengths(torch.tensor([1, 2])))
    first = {
        "ids": torch.tensor([[1, 2], [3, 4]]),
        "jagged": jagged,
        "score": torch.tensor([0.5, 1.5]),
        "names": ["a", "b"],
        "objects": np.array([{"k": 1}, None], dtype=object),
        "counts": np.array([[1, 2], [3, 4]]),
        "pixels": PackedTensor([torch.ones(2, 3), torch.ones(1, 3)], 0),
    }
    second = {"ids": torch.tensor([[5, 6, 7]]), "flag": torch.tensor([True])}
    joined = BatchedDataDict.from_batches(
        [first, second], {"ids": -1, "score": -9.0}, allow_missing_packed_tensors=True
    )
    assert joined["ids"].tolist() == [[1, 2, -1], [3, 4, -1], [5, 6, 7]]
    assert [row.tolist() for row in joined["jagged"].unbind()] == [[0], [1, 2], []]
    assert joined["score"].tolist() == [0.5, 1.5, -9.0]
    assert joined["names"] == ["a", "b", None]
    assert joined["objects"].tolist() == [{"k": 1}, None, None]
    assert joined["counts"].tolist() == [[1, 2], [3, 4], [0, 0]]
    assert joined["flag"].tolist() == [False, False, True]
    assert joined["pixels"].logical_segment_counts_by_row() == [1, 1, 0]
    routes = BatchedDataDict.from_batches(
        [second, {"ids": torch.zeros(1, 1).long(), "r": torch.ones(1, 2, 3)}]
    )
    assert routes["r"].tolist() == [[[0.0] * 3] * 2, [[1.0] * 3] * 2]


@pytest.mark.parametrize("pad_value", [300, -1, 0.5])
@pytest.mark.parametrize("column", [torch.ones(1, dtype=torch.uint8), torch.ones(1, 2, dtype=torch.uint8)])
def test_a_pad_value_that_a_missing_column_cannot_hold_is_refused_with_its_name(
    column: torch.Tensor, pad_value: float
) -> None:
    with pytest.raises(SchemaError, match=r"column 'mask': pad value .* does not fit in torch.uint8"):
        BatchedDataDict.from_batches([{"mask": column}, {"ids": torch.ones(2, 3)}], {"mask": pad_value})


def test_uneven_shards_are_one_or_more() -> None:
    batch = BatchedDataDict({"x": torch.arange(3)})
    with pytest.raises(ConfigError, match="shards=0; expected a whole number, 1 or more"):
        batch.shard_by_batch_size(0, allow_uneven_shards=True)
    shards = batch.shard_by_batch_size(2, allow_uneven_shards=True)
    assert [shard["x"].tolist() for shard in shards] == [[0, 1], [2]]


def test_an_empty_batch_says_nothing_about_columns_and_gives_no_rows() -> None:
    rows = {"ids": torch.tensor([[1, 2, 3]]), "routes": torch.ones(1, 3, 2)}
    for empty in ({}, {"ids": torch.zeros(0, 0, dtype=torch.int64)}):
        joined = BatchedDataDict.from_batches([BatchedDataDict(empty), BatchedDataDict(rows)])
        assert joined.size == 1
        assert torch.equal(joined["ids"], rows["ids"])
        assert torch.equal(joined["routes"], rows["routes"])


# Media.


@calls(MODULE, "BatchedDataDict.repeat_interleave")
def test_repeated_rows_share_media_where_that_is_asked_for() -> None:
    media = PackedTensor(torch.ones(1, 3, 2, 2), 0)
    image = torch.ones(1, 2)
    batch = BatchedDataDict(
        {
            "message_log": [[{"role": "user", "content": ["x"], "pixel_values": media}]],
            "vllm_images": [[image]],
            "idx": torch.tensor([7]),
        }
    )
    apart = batch.repeat_interleave(2)
    assert not apart["message_log"][0][0]["pixel_values"].deduplication_enabled
    assert apart["vllm_images"][0][0] is not apart["vllm_images"][1][0]
    shared = batch.repeat_interleave(2, share_immutable_media=True)
    first, second = (log[0] for log in shared["message_log"])
    assert first["pixel_values"] is not second["pixel_values"]
    assert first["pixel_values"].tensors[0] is second["pixel_values"].tensors[0]
    assert first["pixel_values"].deduplication_enabled
    assert first["content"] is not second["content"]
    assert shared["vllm_images"][0] is not shared["vllm_images"][1]
    assert shared["vllm_images"][0][0] is shared["vllm_images"][1][0] is image
    assert shared["idx"].tolist() == [7, 7]
    assert list(shared) == list(batch)


@calls(MODULE, "BatchedDataDict.get_multimodal_dict")
def test_media_for_the_model_are_cast_and_joined_and_shared_tensors_stay_shared() -> None:
    pixels = PackedTensor.concat([PackedTensor(torch.ones(2, 3), 0).enable_deduplication()] * 4)
    sizes = PackedTensor.concat([PackedTensor(torch.tensor([[8, 8]]), 0).enable_deduplication()] * 4)
    types = torch.ones(4, 5, dtype=torch.int64)
    batch = BatchedDataDict({"pixel_values": pixels, "imgs_sizes": sizes, "token_type_ids": types})
    packed = batch.get_multimodal_dict(as_tensors=False, device=None, pixel_dtype=torch.bfloat16)
    assert [t.dtype for t in packed["pixel_values"].tensors] == [torch.bfloat16]
    assert packed["imgs_sizes"] is sizes
    assert pixels.tensors[0].dtype == torch.float32
    joined = batch.get_multimodal_dict(as_tensors=True, device="cpu", pixel_dtype=torch.bfloat16)
    assert (joined["pixel_values"].shape, joined["imgs_sizes"].dtype) == ((8, 3), torch.int64)
    assert set(joined) == {"pixel_values", "imgs_sizes", "token_type_ids"}


def test_shared_media_beside_facts_of_other_rows_are_refused() -> None:
    assert ("pixel_values", "imgs_sizes") in _COUPLED_MULTIMODAL_KEYS
    pixels = PackedTensor([torch.ones(1, 1), torch.ones(1, 1)], 0).enable_deduplication()
    sizes = PackedTensor([torch.ones(1, 2), None], 0).enable_deduplication()
    batch = BatchedDataDict({"pixel_values": pixels, "imgs_sizes": sizes})
    with pytest.raises(ValueError, match=r"ordered per-row segment counts: \[1, 1\] and \[1, 0\]"):
        batch.get_multimodal_dict(as_tensors=True)


def test_shards_and_packed_rows_hold_shared_media_once() -> None:
    media = PackedTensor.concat([PackedTensor(torch.ones(1, 2), 0).enable_deduplication()] * 8)
    batch = tokens([5, 6, 7, 8, 9, 10, 11, 12], width=12)
    batch["pixel_values"] = media
    shards, _ = batch.shard_by_batch_size(2, sequence_packing_args=packing(max_tokens_per_microbatch=24))
    assert [len(shard["pixel_values"].tensors) for shard in shards] == [1, 1]
    assert sum(len(shard["pixel_values"]) for shard in shards) == 8


# Ranks.


def gather(rank: int, port: int, results: Any) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    own = BatchedDataDict({"ids": torch.full((rank + 1, rank + 2), rank), "names": [f"r{rank}"] * (rank + 1)})
    joined = own.all_gather(dist.group.WORLD)
    results.put((rank, joined["ids"].tolist(), joined["names"]))
    dist.destroy_process_group()


@calls(MODULE, "BatchedDataDict.all_gather")
def test_all_ranks_get_the_rows_of_all() -> None:
    assert BatchedDataDict({"ids": torch.ones(1)}).all_gather(None)["ids"].tolist() == [1.0]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = get_context("fork")
    results = context.Queue()
    ranks = [context.Process(target=gather, args=(rank, port, results)) for rank in range(2)]
    for process in ranks:
        process.start()
    got = sorted(results.get(timeout=60) for _ in ranks)
    for process in ranks:
        process.join(60)
    expected = ([[0, 0, 0], [1, 1, 1], [1, 1, 1]], ["r0", "r1", "r1"])
    assert got == [(0, *expected), (1, *expected)]


# Packers.

PACKERS = {
    "concatenative": ConcatenativePacker,
    "first_fit_decreasing": FirstFitDecreasingPacker,
    "first_fit_shuffle": FirstFitShufflePacker,
    "modified_first_fit_decreasing": ModifiedFirstFitDecreasingPacker,
}


@calls(
    "data.packing.algorithms",
    "get_packer",
    "PackingAlgorithm",
    *(kind.__name__ for kind in PACKERS.values()),
    "FirstFitPacker",
    *(f"SequencePacker.{n}" for n in ("pack", "reset_metrics", "compute_metrics", "print_metrics")),
    "SequencePacker.get_aggregated_metrics",
)
@pytest.mark.parametrize("name", PACKERS)
def test_a_packer_puts_every_sequence_into_a_bin_and_counts(name: str, capsys: Any) -> None:
    packer = get_packer(name.upper(), 10, collect_metrics=True, min_bin_count=4, bin_count_multiple=2)
    assert type(packer) is PACKERS[name] is type(get_packer(PackingAlgorithm(name), 10))
    assert isinstance(packer, SequencePacker)
    assert isinstance(packer, FirstFitPacker) == name.startswith("first_fit")
    lengths = [6, 3, 4, 7, 2]
    bins = packer.pack(lengths)
    assert sorted(row for rows in bins for row in rows) == [0, 1, 2, 3, 4]
    loads = [sum(lengths[row] for row in rows) for rows in bins]
    assert max(loads) <= 10
    assert len(bins) == 4
    metrics = packer.compute_metrics(lengths, bins)
    assert metrics == {
        "tokens": 22.0,
        "bins": 4.0,
        "fill": 0.55,
        "fullest_bin_tokens": float(max(loads)),
        "emptiest_bin_tokens": float(min(loads)),
        "least_bins": 3.0,
    }
    assert packer.get_aggregated_metrics() == {"tokens": 22.0, "bins": 4.0, "fill": 0.55}
    packer.print_metrics()
    assert capsys.readouterr().out == "tokens: 22\nbins: 4\nfill: 0.55\n"
    packer.reset_metrics()
    assert packer.get_aggregated_metrics() == {}


@pytest.mark.parametrize("lengths", [np.full(3, 200, np.uint8), torch.full((3,), 200, dtype=torch.uint8)])
def test_a_packer_counts_tokens_of_narrow_integers_as_tokens(lengths: Any) -> None:
    packer = get_packer("concatenative", 250, collect_metrics=True)
    bins = packer.pack(lengths)
    assert json.loads(json.dumps(packer.get_aggregated_metrics())) == {"tokens": 600, "bins": 3, "fill": 0.8}
    found = packer.compute_metrics(lengths, bins)
    assert json.loads(json.dumps(found)) == packer.compute_metrics([200] * 3, bins)
    assert found["tokens"] == 600


def test_first_fit_takes_sequences_in_their_order() -> None:
    assert FirstFitPacker(10).pack([6, 3, 4, 7, 2, 1]) == [[0, 1, 5], [2, 4], [3]]
    with pytest.raises(ConfigError, match="bin_capacity"):
        FirstFitPacker(10).pack([11])


def test_a_batch_that_is_made_of_columns_from_a_store_has_a_callers_methods() -> None:
    wire = codec.pack_jagged_fields({"x": torch.arange(6.0).view(3, 2)}, lengths=None)
    batch = codec.materialize(wire)
    assert isinstance(batch, BatchedDataDict)
    assert [part["x"].tolist() for part in batch.make_microbatch_iterator(1)] == [
        [[0, 1]],
        [[2, 3]],
        [[4, 5]],
    ]
    assert batch.chunk(2, 3)["x"].tolist() == [[4, 5]]
