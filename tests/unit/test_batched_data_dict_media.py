import pytest
import torch

from headrace.distributed.batched_data_dict import BatchedDataDict
from headrace.distributed.multimodal import PackedTensor
from headrace.errors import SchemaError


def images(*sizes, dim=0):
    rows = [None if n is None else torch.full((n, 3), float(i)) for i, n in enumerate(sizes)]
    return PackedTensor(rows, dim_to_pack=dim)


def test_rows_of_different_sizes_are_joined_only_when_asked():
    media = images(2, None, 3)
    assert len(media) == 3
    assert media.as_tensor()[:, 0].tolist() == [0, 0, 2, 2, 2]
    assert media.as_tensor("meta").device.type == "meta"


def test_a_single_tensor_is_one_row():
    media = PackedTensor(torch.zeros(4, 3), dim_to_pack=0)
    assert len(media) == 1
    assert media.as_tensor().shape == (4, 3)


def test_media_join_along_another_dimension():
    media = PackedTensor([torch.zeros(2, 5, 3), torch.zeros(2, 1, 3)], dim_to_pack=1)
    assert media.as_tensor().shape == (2, 6, 3)
    assert PackedTensor([torch.zeros(2, 5), torch.zeros(2, 1)], dim_to_pack=-1).as_tensor().shape == (2, 6)


def test_no_media_is_none():
    assert images(None, None).as_tensor() is None
    assert PackedTensor([]).as_tensor() is None


def test_rows_are_sliced_and_concatenated():
    media = images(1, None, 2)
    assert [None if t is None else len(t) for t in media.slice([2, 1, 2]).tensors] == [2, None, 2]
    assert [None if t is None else len(t) for t in media.slice(torch.tensor([2])).tensors] == [2]
    both = PackedTensor.concat([media, images(4)])
    assert [None if t is None else len(t) for t in both.tensors] == [1, None, 2, 4]


def test_flattened_concat_makes_one_row_of_each_column():
    flat = PackedTensor.flattened_concat([images(1, 2), images(None), images(3)])
    assert [None if t is None else len(t) for t in flat.tensors] == [3, None, 3]
    assert torch.equal(
        flat.as_tensor(), PackedTensor.concat([images(1, 2), images(None), images(3)]).as_tensor()
    )


def test_columns_that_join_along_different_dimensions_are_refused():
    with pytest.raises(SchemaError, match=r"dim_to_pack \[0, 1\]"):
        PackedTensor.concat([images(1), images(1, dim=1)])
    with pytest.raises(SchemaError, match="at least one column"):
        PackedTensor.concat([])


@pytest.mark.parametrize(
    "odd", [torch.zeros(2, 4), torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 3, 1)]
)
def test_a_row_that_does_not_join_is_refused_by_number(odd):
    with pytest.raises(SchemaError, match=r"row 2 \(shape"):
        PackedTensor([torch.zeros(1, 3), None, odd]).as_tensor()


def test_what_is_no_media_is_refused():
    with pytest.raises(SchemaError, match="row 1 is a list"):
        PackedTensor([None, [1.0]])
    with pytest.raises(SchemaError, match="no dimension dim_to_pack=2"):
        PackedTensor([torch.zeros(1, 3)], dim_to_pack=2).as_tensor()


def test_moving_media_leaves_the_original_where_it_is():
    media = images(1, None)
    moved = media.to("meta")
    assert moved.tensors[0].device.type == "meta"
    assert moved.tensors[1] is None
    assert media.tensors[0].device.type == "cpu"


def test_mixed_image_and_video_rows_stay_with_their_rows_through_packing():
    lengths = [6, 2, 5, 3]
    batch = BatchedDataDict(
        input_ids=torch.arange(4).reshape(4, 1).expand(4, 6).contiguous(),
        input_lengths=torch.tensor(lengths),
        pixel_values=images(1, None, 3, None),
        pixel_values_videos=images(None, 2, None, 4),
    )
    shards, inverse = batch.shard_by_batch_size(
        shards=2,
        sequence_packing_args={
            "max_tokens_per_microbatch": 8,
            "input_key": "input_ids",
            "input_lengths_key": "input_lengths",
            "algorithm": "modified_first_fit_decreasing",
            "sequence_length_pad_multiple": 1,
        },
    )
    for shard in shards:
        for microbatch in shard.microbatches("packed", 1):
            for i, row in enumerate(microbatch["input_ids"][:, 0].tolist()):
                image, video = (
                    microbatch["pixel_values"].tensors[i],
                    microbatch["pixel_values_videos"].tensors[i],
                )
                assert (image is None) == (row in (1, 3))
                assert (video is None) == (row in (0, 2))
                assert (video if image is None else image)[0, 0] == row
    joined = BatchedDataDict.from_batches(shards)
    joined.reorder_data(inverse)
    assert torch.equal(joined["pixel_values"].as_tensor(), batch["pixel_values"].as_tensor())


def test_the_multimodal_dict_has_media_and_the_columns_that_belong_to_them():
    batch = BatchedDataDict(
        input_ids=torch.zeros(2, 3),
        pixel_values=images(1, 2),
        pixel_values_videos=images(None, None),
        token_type_ids=torch.ones(2, 3),
    )
    assert set(batch.get_multimodal_dict()) == {"pixel_values", "pixel_values_videos", "token_type_ids"}
    assert batch.get_multimodal_dict()["pixel_values"] is batch["pixel_values"]
    tensors = batch.get_multimodal_dict(as_tensors=True)
    assert set(tensors) == {"pixel_values", "token_type_ids"}
    assert tensors["pixel_values"].shape == (3, 3)
    on_meta = batch.get_multimodal_dict(as_tensors=True, device="meta")
    assert {t.device.type for t in on_meta.values()} == {"meta"}
    assert BatchedDataDict(input_ids=torch.zeros(2, 3)).get_multimodal_dict(as_tensors=True) == {}
