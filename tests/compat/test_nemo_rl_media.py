"""Media as a caller of NeMo-RL uses them: shared tensors, padding to one shape, messages, placeholders."""

import copy
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from nemo_rl.data import multimodal_utils as media
from nemo_rl.data.multimodal_utils import PackedTensor
from nemo_rl.data_plane import kv_first_write, read_columns
from nemo_rl.data_plane.adapters.noop import NoOpDataPlaneClient
from nemo_rl_names import calls

Image = pytest.importorskip("PIL.Image")

MODULE = "data.multimodal_utils"
METHODS = (
    "as_tensor",
    "concat",
    "deduplication_enabled",
    "empty_like",
    "empty_rows_like",
    "enable_deduplication",
    "flattened_concat",
    "iter_logical_segments",
    "logical_segment_counts_by_row",
    "merge_segments",
    "slice",
    "to",
    "to_dtype",
)


def shared(value: float, **options: Any) -> PackedTensor:
    return PackedTensor(torch.tensor([[value]]), 0, **options).enable_deduplication()


def values(column: PackedTensor) -> list[float] | None:
    joined = column.as_tensor()
    return None if joined is None else joined.flatten().tolist()


@calls(MODULE, "PackedTensor", *(f"PackedTensor.{name}" for name in METHODS))
def test_copies_of_shared_media_are_held_once_and_others_apart() -> None:
    first, other = shared(1.0), shared(1.0)
    joined = PackedTensor.concat([first, copy.deepcopy(first), other])
    assert joined.deduplication_enabled
    assert (len(joined), len(joined.tensors)) == (3, 2)
    assert joined.logical_segment_counts_by_row() == [1, 1, 1]
    assert values(joined) == [1.0, 1.0, 1.0]
    assert [t.tolist() for t in joined.iter_logical_segments() if t is not None] == [[[1.0]]] * 3
    again = pickle.loads(pickle.dumps(joined))
    assert len(PackedTensor.concat([again, joined]).tensors) == 2
    assert len(joined.slice([0, -2]).tensors) == 1
    assert values(joined.to("cpu")) == [1.0, 1.0, 1.0]
    cast = joined.to_dtype(torch.bfloat16)
    assert cast.tensors[0].dtype == torch.bfloat16
    assert len(PackedTensor.concat([cast, joined.to_dtype(torch.bfloat16)]).tensors) == 2
    same = joined.to_dtype(torch.float32)
    assert same is not joined
    assert same.tensors[0] is joined.tensors[0]
    assert values(PackedTensor.empty_like(joined)) is None
    assert len(PackedTensor.empty_like(joined)) == 3
    wide = PackedTensor.concat([joined, PackedTensor.empty_rows_like(joined, 2)])
    assert wide.logical_segment_counts_by_row() == [1, 1, 1, 0, 0]
    assert list(PackedTensor.empty_rows_like(joined, 1).iter_logical_segments()) == [None]


def test_turns_that_diverge_keep_the_shared_beginning_once() -> None:
    seed = shared(1.0)
    rows = [
        PackedTensor.merge_segments([copy.deepcopy(seed), PackedTensor(torch.tensor([[value]]), 0)])
        for value in (2.0, 3.0)
    ]
    both = PackedTensor.flattened_concat(rows)
    assert (len(both), len(both.tensors)) == (2, 3)
    assert both.logical_segment_counts_by_row() == [2, 2]
    assert values(both) == [1.0, 2.0, 1.0, 3.0]
    assert values(both.slice([1])) == [1.0, 3.0]
    assert values(both.repeat(2)) == [1.0, 2.0, 1.0, 2.0, 1.0, 3.0, 1.0, 3.0]


def test_without_deduplication_rows_are_tensors_as_they_were_given() -> None:
    column = PackedTensor([torch.ones(2, 3), None], 0)
    assert not column.deduplication_enabled
    assert (len(column), column.logical_segment_counts_by_row()) == (2, [1, 0])
    assert column.slice([1]).tensors == [None]
    assert PackedTensor.concat([column, column]).tensors[3] is None
    old = PackedTensor.__new__(PackedTensor)
    old.__dict__ = {"tensors": [torch.ones(1)], "dim_to_pack": 0}
    assert (len(old), old.deduplication_enabled, values(old)) == (1, False, [1.0])


def test_media_of_different_shapes_are_padded_with_zeros_to_the_largest() -> None:
    images = [torch.ones(1, 3, 2, 4), 2 * torch.ones(1, 3, 4, 2)]
    packed = PackedTensor(images, 0, pad_to_max_shape=True)
    joined = packed.as_tensor()
    assert joined is not None
    assert joined.shape == (2, 3, 4, 4)
    assert torch.equal(joined[0, :, :2, :4], images[0][0])
    assert torch.equal(joined[1, :, :4, :2], images[1][0])
    assert joined.sum() == sum(image.sum() for image in images)
    assert packed.slice([0, 1]).pad_to_max_shape
    assert PackedTensor(
        [torch.ones(2, 3, 1), torch.ones(4, 3, 1)], -3, pad_to_max_shape=True
    ).as_tensor().shape == (
        6,
        3,
        1,
    )
    with pytest.raises(ValueError, match="same rank"):
        PackedTensor([torch.ones(1, 3, 4), torch.ones(1, 3)], 0, pad_to_max_shape=True).as_tensor()
    with pytest.raises(IndexError, match="dim_to_pack=3 is invalid"):
        PackedTensor([torch.ones(1, 3)], 3, pad_to_max_shape=True).as_tensor()


def test_shared_and_padded_media_come_back_from_the_store_row_by_row() -> None:
    seed = PackedTensor(torch.ones(1, 3, 2, 4), 0, pad_to_max_shape=True).enable_deduplication()
    tall = PackedTensor(2 * torch.ones(1, 3, 4, 2), 0, pad_to_max_shape=True)
    rows = [PackedTensor.merge_segments([seed]), PackedTensor.merge_segments([seed, tall])]
    pixels = PackedTensor.concat([*rows, PackedTensor.empty_rows_like(seed, 1)])
    client = NoOpDataPlaneClient()
    batch = {"input_ids": torch.ones(3, 2, dtype=torch.int64), "pixel_values": pixels}
    meta = kv_first_write(batch, sample_ids=["a", "b", "c"], dp_client=client, partition_id="p")
    back = read_columns(client, meta, ["pixel_values"])["pixel_values"]
    assert isinstance(back, PackedTensor)
    assert back.logical_segment_counts_by_row() == [1, 1, 0]
    assert torch.equal(back.as_tensor(), pixels.as_tensor())
    client.close()


# Processors.


class Part:
    """A part of a processor."""

    def __init__(self, *names: str, **settings: Any) -> None:
        self.model_input_names = list(names)
        vars(self).update(settings)


class Processor:
    """Counts images by their placeholder and gives the red of each; of images of several sizes, a list."""

    image_token = "<image>"
    tokenizer = Part("input_ids", "attention_mask")
    image_processor = Part("pixel_values", "image_grid_thw")
    video_processor = Part("pixel_values_videos", fps=2)
    feature_extractor = Part("input_features", "attention_mask", sampling_rate=16000)

    def __call__(self, *, text: str, images: Any, return_tensors: str | None) -> dict[str, Any]:
        assert text == "<image>" * len(images)
        pixels = [torch.full((1, i.height, i.width), float(i.getpixel((0, 0))[0])) for i in images]
        stacked = torch.stack(pixels) if return_tensors == "pt" else pixels
        return {"input_ids": torch.tensor([[1]]), "pixel_values": stacked}


class NemotronNanoVLV2Processor(Processor):
    """A processor that counts placeholders, by its name."""


@calls(
    MODULE,
    "uses_image_placeholder",
    "get_multimodal_keys_from_processor",
    "get_multimodal_default_settings_from_processor",
    "get_dim_to_pack_along",
    "get_pad_to_max_shape",
    "extract_multimodal_model_inputs",
)
def test_a_processor_says_what_its_media_are() -> None:
    processor, counting = Processor(), NemotronNanoVLV2Processor()
    assert {"NemotronNanoVLV2Processor"} <= media._PLACEHOLDER_STYLE_PROCESSOR_NAMES
    assert [media.uses_image_placeholder(p) for p in (processor, counting)] == [False, True]
    assert media.get_multimodal_keys_from_processor(processor) == [
        "pixel_values",
        "image_grid_thw",
        "pixel_values_videos",
        "input_features",
    ]
    assert media.get_multimodal_default_settings_from_processor(processor) == {
        "video": {"fps": 2},
        "audio": {"sampling_rate": 16000},
    }
    assert media.get_dim_to_pack_along(processor, "pixel_values") == 0
    assert media.get_pad_to_max_shape(counting, "pixel_values")
    assert not media.get_pad_to_max_shape(counting, "imgs_sizes")
    made = {
        "input_ids": torch.ones(1, 2),
        "pixel_values": torch.ones(2, 3),
        "token_type_ids": torch.ones(1, 2),
    }
    inputs = media.extract_multimodal_model_inputs(counting, made)
    assert set(inputs) == {"pixel_values", "token_type_ids"}
    assert (len(inputs["pixel_values"]), inputs["pixel_values"].pad_to_max_shape) == (1, True)


@calls(MODULE, "attach_image_model_inputs_to_message")
def test_images_are_attached_to_a_message_whose_tokens_stay() -> None:
    ids = torch.tensor([7, 8])
    message: dict[str, Any] = {"role": "user", "content": "", "token_ids": ids}
    red = Image.new("RGB", (2, 3), "red")
    for images, processor in (([], Processor()), ([red], None)):
        media.attach_image_model_inputs_to_message(message, images=images, processor=processor)
        assert set(message) == {"role", "content", "token_ids"}
    media.attach_image_model_inputs_to_message(message, images=[red], processor=Processor())
    assert message["token_ids"] is ids
    assert set(message) == {"role", "content", "token_ids", "pixel_values"}
    assert message["pixel_values"].as_tensor().unique().tolist() == [255.0]
    sized: dict[str, Any] = {}
    images = [Image.new("RGB", size, "red") for size in ((2, 3), (4, 1))]
    media.attach_image_model_inputs_to_message(
        sized, images=images, processor=NemotronNanoVLV2Processor(), pad_dynamic_image_shapes=True
    )
    assert sized["pixel_values"].as_tensor().shape == (2, 1, 3, 4)
    assert sized["imgs_sizes"].as_tensor().tolist() == [[3, 2], [1, 4]]


# Messages.


@calls(MODULE, "resolve_to_image", "image_to_data_url", "get_media_from_message", "load_media_from_message")
def test_images_are_read_from_wherever_they_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    Image.new("RGBA", (5, 6), "red").save(path)
    url = media.image_to_data_url(Image.new("RGB", (2, 2)), "PNG")
    assert url.startswith("data:image/png;base64,")
    sources = [str(path), f"file://{path}", url, Image.new("L", (1, 1))]
    images = [media.resolve_to_image(source) for source in sources]
    assert [(i.size, i.mode) for i in images] == [
        ((5, 6), "RGB"),
        ((5, 6), "RGB"),
        ((2, 2), "RGB"),
        ((1, 1), "RGB"),
    ]
    path.rename(spaced := tmp_path / "50% a b.png")
    for address in (spaced.as_uri(), spaced.as_uri().replace("file://", "file:"), str(spaced)):
        assert media.resolve_to_image(address).size == (5, 6)
    spaced.rename(path)
    with pytest.raises(ValueError, match="got a int for an image"):
        media.resolve_to_image(3)
    message = {
        "role": "user",
        "content": [
            {"type": "image", "image": str(path)},
            {"type": "text", "text": "?"},
            {"type": "video", "video": [torch.zeros(1)]},
            {"type": "image_url", "image_url": {"url": url}},
        ],
    }
    assert media.get_media_from_message(message) == {"image": [str(path), url], "video": [[torch.zeros(1)]]}
    loaded = media.load_media_from_message(message, Processor(), {"video": {"fps": 1}})
    assert [image.size for image in loaded["image"]] == [(5, 6), (2, 2)]
    assert media.get_media_from_message({"role": "user", "content": "text"}) == {}


@calls(
    MODULE,
    "extract_input_image_sources_from_responses_messages",
    "extract_input_images_from_responses_messages",
    "encode_images_in_examples",
)
def test_local_images_of_requests_become_addresses_that_hold_them(tmp_path: Path) -> None:
    path = str(tmp_path / "a.png")
    Image.new("RGB", (2, 3)).save(path)
    parts: list[Any] = [
        {"type": "input_image", "image_url": path},
        {"type": "input_image", "image_url": {"url": f"file://{path}"}},
        {"type": "input_image", "image_url": "https://example.org/a.png"},
        {"type": "input_text", "text": "?"},
        "odd",
    ]
    request = {"input": [{"role": "user", "content": parts}, {"role": "user", "content": "text"}, None]}
    assert media.extract_input_image_sources_from_responses_messages(request["input"]) == [
        path,
        f"file://{path}",
        "https://example.org/a.png",
    ]
    examples = [{"responses_create_params": request}, {}, {"responses_create_params": {"input": "text"}}]
    assert media.encode_images_in_examples(examples) is examples
    assert all(part["image_url"].startswith("data:image/png;base64,") for part in parts[:2])
    assert parts[2]["image_url"] == "https://example.org/a.png"
    images = media.extract_input_images_from_responses_messages([{"content": parts[:2]}])
    assert [image.size for image in images] == [(2, 3), (2, 3)]


def test_the_names_of_media_fit_together() -> None:
    assert media.MEDIA_TAGS_REVERSED["<image>"] == "image"
    assert set(media.MEDIA_TAGS_TO_ALLOWED.values()) <= set(media.MEDIA_TAGS)
    assert set(media.DEFAULT_MEDIA_EXTENSIONS) == set(media.MEDIA_TAGS)
    assert re.findall(media.MEDIA_TAG_PATTERN, "a <image> and <video-audio>") == ["<image>", "<video-audio>"]
    kinds = (media.IMAGE_CONTENT_TYPES, media.VIDEO_CONTENT_TYPES, media.AUDIO_CONTENT_TYPES)
    assert frozenset().union(*kinds) == media.MULTIMODAL_CONTENT_TYPES
    assert media.VLLM_MULTIMODAL_DATA_KEYS < media.NATIVE_MULTIMODAL_KEYS


# Tokens.

IMAGE, TEXT = 7, 1


class Chunk:
    """A part of a model whose forward takes the mask."""

    image_token_index = IMAGE

    def forward(self, input_ids: Any, *, media_token_validity_mask: Any = None) -> None: ...


class Opaque:
    """A part of a model whose forward says nothing of its parameters."""

    forward = print


@calls(
    MODULE,
    "build_media_token_validity_mask",
    "media_placeholder_token_id_from_chunks",
    "chunks_accept_media_token_validity_mask",
    "image_counts_by_row",
    "attach_media_token_validity_mask",
)
def test_media_tokens_of_rows_without_media_are_marked() -> None:
    ids = torch.tensor([[TEXT, IMAGE, TEXT], [IMAGE, TEXT, IMAGE]])
    mask = media.build_media_token_validity_mask(ids, IMAGE, [1, 0], base_mask=None)
    assert mask is not None
    assert mask.tolist() == [[True] * 3, [False, True, False]]
    base = torch.tensor([[False, True, True], [True, True, True]])
    refined = media.build_media_token_validity_mask(ids, IMAGE, [1, 0], base_mask=base)
    assert refined is not None
    assert refined.tolist() == [[False, True, True], [False, True, False]]
    assert media.build_media_token_validity_mask(ids, IMAGE, [1, 1]) is None
    assert media.build_media_token_validity_mask(ids[:0], IMAGE, []) is None
    with pytest.raises(ValueError, match=r"input_ids must be \[B, S\]"):
        media.build_media_token_validity_mask(ids[0], IMAGE, [0])
    with pytest.raises(ValueError, match="one entry per row"):
        media.build_media_token_validity_mask(ids, IMAGE, [0])
    assert media.media_placeholder_token_id_from_chunks([object(), Chunk()]) == IMAGE
    assert media.media_placeholder_token_id_from_chunks([]) is None
    assert media.chunks_accept_media_token_validity_mask([Opaque(), Chunk()])
    assert not media.chunks_accept_media_token_validity_mask([Opaque()])
    packed = PackedTensor([torch.ones(1, 2), None], 0)
    assert media.image_counts_by_row({"pixel_values": packed}, 2) == [1, 0]
    assert media.image_counts_by_row({"pixel_values": packed}, 3) is None
    assert media.image_counts_by_row({}, 2) == [0, 0]
    assert media.image_counts_by_row({"pixel_values": torch.ones(2)}, 2) is None
    batch: dict[str, Any] = {"input_ids": ids, "pixel_values": packed}
    media.attach_media_token_validity_mask(batch, IMAGE)
    assert torch.equal(batch["media_token_validity_mask"], mask)
    for untouched in ({"input_ids": ids[0]}, {"input_ids": ids[:1], "pixel_values": packed.slice([0])}):
        media.attach_media_token_validity_mask(untouched, IMAGE)
        assert "media_token_validity_mask" not in untouched
