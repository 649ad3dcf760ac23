"""Media of messages and Responses-API items: where they are named, how they are read, what processors make of them."""

import base64
import io
import re
import urllib.request
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import torch

from headrace.compat.packed_tensor import PackedTensor
from headrace.errors import SchemaError

if TYPE_CHECKING:
    from PIL.Image import Image

VLLM_MULTIMODAL_DATA_KEYS = frozenset({"vllm_images", "vllm_videos", "vllm_audios"})
NATIVE_MULTIMODAL_KEYS = VLLM_MULTIMODAL_DATA_KEYS | {"vllm_content"}
IMAGE_CONTENT_TYPES = frozenset({"input_image", "image", "image_url"})
VIDEO_CONTENT_TYPES = frozenset({"input_video", "video", "video_url"})
AUDIO_CONTENT_TYPES = frozenset({"input_audio", "audio", "audio_url"})
MULTIMODAL_CONTENT_TYPES = IMAGE_CONTENT_TYPES | VIDEO_CONTENT_TYPES | AUDIO_CONTENT_TYPES
MEDIA_TAGS = {"image": "<image>", "video": "<video>", "audio": "<audio>", "video-audio": "<video-audio>"}
MEDIA_TAGS_REVERSED = {tag: kind for kind, tag in MEDIA_TAGS.items()}
DEFAULT_MEDIA_EXTENSIONS = {
    "image": ["png", "jpeg", "jpg", "img"],
    "video": ["mp4"],
    "video-audio": ["mp4"],
    "audio": ["wav", "flac", "mp3"],
}
MEDIA_TAGS_TO_ALLOWED = {
    "speech": "audio",
    "speeches": "audio",
    "sound": "audio",
    "audios": "audio",
    "images": "image",
    "videos": "video",
}
MEDIA_TAG_PATTERN = re.compile("|".join(re.escape(tag) for tag in MEDIA_TAGS.values()))
_PLACEHOLDER_STYLE_PROCESSOR_NAMES = frozenset(
    {"NemotronNanoVLV2Processor", "NemotronH_Nano_Omni_Reasoning_V3Processor"}
)
_CONTENT_TYPES = {"image": IMAGE_CONTENT_TYPES, "video": VIDEO_CONTENT_TYPES, "audio": AUDIO_CONTENT_TYPES}
_PARTS_OF_PROCESSORS = ("image_processor", "video_processor", "feature_extractor")
_LOADED = ("http://", "https://", "data:")
_DOWNLOAD_TIMEOUT_S = 30.0
_SETTINGS = {
    "video": ("video_processor", ("fps", "num_frames")),
    "audio": ("feature_extractor", ("sampling_rate",)),
}

# Processors.


def uses_image_placeholder(processor: Any) -> bool:
    """Return whether the processor counts images by a placeholder in its text."""
    return type(processor).__name__ in _PLACEHOLDER_STYLE_PROCESSOR_NAMES


def get_multimodal_keys_from_processor(processor: Any) -> list[str]:
    """Return the names of the model inputs that are media: those of the processor's parts, not the tokenizer's."""
    text = set(getattr(getattr(processor, "tokenizer", None), "model_input_names", ()))
    parts = (getattr(processor, name, None) for name in _PARTS_OF_PROCESSORS)
    names = [name for part in parts for name in getattr(part, "model_input_names", ())]
    return [name for name in dict.fromkeys(names) if name not in text]


def get_multimodal_default_settings_from_processor(processor: Any) -> dict[str, dict[str, Any]]:
    """Return how the processor wants videos and audio loaded, for `load_media_from_message`."""
    settings: dict[str, dict[str, Any]] = {}
    for kind, (part_name, names) in _SETTINGS.items():
        part = getattr(processor, part_name, None)
        found = {name: getattr(part, name, None) for name in names}
        if known := {name: value for name, value in found.items() if value is not None}:
            settings[kind] = known
    return settings


def get_dim_to_pack_along(processor: Any, key: str) -> int:
    """Return the dimension along which media of a model input are joined."""
    return 1 if key == "pixel_values" and type(processor).__name__ == "SmolVLMProcessor" else 0


def get_pad_to_max_shape(processor: Any, key: str) -> bool:
    """Return whether images of different sizes are padded to one, since the processor keeps their sizes apart."""
    return key == "pixel_values" and uses_image_placeholder(processor)


def extract_multimodal_model_inputs(processor: Any, processed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the media that a processor made: PackedTensors of one row; token types stay tensors."""
    inputs: dict[str, Any] = {}
    media = set(get_multimodal_keys_from_processor(processor))
    for name, value in processed.items():
        if name in ("token_type_ids", "mm_token_type_ids"):
            inputs[name] = value
        elif name in media or name in ("pixel_values", "imgs_sizes", "num_frames"):
            inputs[name] = PackedTensor(
                torch.as_tensor(value),
                get_dim_to_pack_along(processor, name),
                pad_to_max_shape=get_pad_to_max_shape(processor, name),
            )
    return inputs


def attach_image_model_inputs_to_message(
    message: MutableMapping[str, Any],
    *,
    images: Sequence[Any],
    processor: Any,
    pad_dynamic_image_shapes: bool = False,
) -> None:
    """Add what the processor makes of `images` to a message; its text and tokens stay as they are.

    Without images or processor nothing happens. With `pad_dynamic_image_shapes`, images for which the processor
    gives tensors of different sizes are padded to the largest.
    """
    if not images or processor is None:
        return
    text = getattr(processor, "image_token", MEDIA_TAGS["image"]) * len(images)
    ragged = pad_dynamic_image_shapes and len(images) > 1
    processed = dict(processor(text=text, images=list(images), return_tensors=None if ragged else "pt"))
    if ragged:
        processed = _stacked(processed, processor)
    inputs = extract_multimodal_model_inputs(processor, processed)
    message.update({name: value for name, value in inputs.items() if isinstance(value, PackedTensor)})


def _stacked(processed: dict[str, Any], processor: Any) -> dict[str, Any]:
    """Make tensors of a processor's lists; images of several sizes are padded, and their own sizes kept."""
    result = {name: _as_tensor(value) for name, value in processed.items()}
    pixels = processed.get("pixel_values")
    if isinstance(pixels, list | tuple):
        images = [torch.as_tensor(image) for image in pixels]
        if uses_image_placeholder(processor) and "imgs_sizes" not in result:
            result["imgs_sizes"] = torch.tensor([list(image.shape[-2:]) for image in images])
        column = PackedTensor([image.unsqueeze(0) for image in images], 0, pad_to_max_shape=True)
        result["pixel_values"] = column.as_tensor()
    return result


def _as_tensor(value: Any) -> Any:
    if isinstance(value, torch.Tensor) or not isinstance(value, list | tuple):
        return value
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        return value  # rows of different lengths, which no tensor holds


# Sources.


def resolve_to_image(image_path_or_image: Any) -> "Image":
    """Return an RGB image: of an image, a path, or a `file:`, `data:`, `http:` or `https:` address.

    Raises:
        SchemaError: neither an image nor text.
    """
    from PIL import Image  # noqa: PLC0415

    source = image_path_or_image
    if isinstance(source, Image.Image):
        return source.convert("RGB")
    if not isinstance(source, str):
        raise SchemaError(
            f"got a {type(source).__name__} for an image; expected an image, a path or an address"
        )
    if source.startswith("data:"):
        _, _, encoded = source.partition(",")
        return Image.open(io.BytesIO(base64.b64decode(encoded))).convert("RGB")
    if source.startswith(("http://", "https://")):
        with urllib.request.urlopen(source, timeout=_DOWNLOAD_TIMEOUT_S) as reply:
            return Image.open(io.BytesIO(reply.read())).convert("RGB")
    if source.startswith("file:"):
        source = unquote(source.removeprefix("file:").removeprefix("//"))
    return Image.open(source).convert("RGB")


def image_to_data_url(image: "Image", fmt: str = "PNG") -> str:
    """Return an image as a `data:` address, encoded as `fmt`."""
    encoded = io.BytesIO()
    image.save(encoded, format=fmt)
    return f"data:image/{fmt.lower()};base64,{base64.b64encode(encoded.getvalue()).decode('ascii')}"


def extract_input_image_sources_from_responses_messages(messages: Any) -> list[Any]:
    """Return the images, paths or addresses that Responses-API messages name, in their order."""
    named = (_source(part, "image") for part in _content_parts(messages))
    return [source for source in named if source is not None]


def extract_input_images_from_responses_messages(messages: Any) -> "list[Image]":
    """Return the images that Responses-API messages name, loaded, in their order."""
    return [
        resolve_to_image(source) for source in extract_input_image_sources_from_responses_messages(messages)
    ]


def encode_images_in_examples(nemo_gym_examples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Replace local images of `responses_create_params.input` by `data:` addresses, in place; return the examples."""
    for example in nemo_gym_examples:
        request = example.get("responses_create_params") if isinstance(example, Mapping) else None
        for part in _content_parts(request.get("input") if isinstance(request, Mapping) else None):
            source = _source(part, "image")
            local = isinstance(source, str) and not source.startswith(_LOADED)
            if source and local and part.get("type") == "input_image":
                part["image_url"] = image_to_data_url(resolve_to_image(source))
    return nemo_gym_examples


def _content_parts(messages: Any) -> Iterator[dict[str, Any]]:
    """Yield the parts of all messages' contents; what has another form is passed over."""
    for message in messages if isinstance(messages, list | tuple) else ():
        content = message.get("content") if isinstance(message, Mapping) else None
        for part in content if isinstance(content, list | tuple) else ():
            if isinstance(part, dict):
                yield part


def _source(part: Mapping[str, Any], kind: str) -> Any:
    """Return what a part of the kind names as its source; None for parts of other kinds."""
    if part.get("type") not in _CONTENT_TYPES[kind]:
        return None
    source = next((part[key] for key in (kind, f"{kind}_url", "url") if part.get(key) is not None), None)
    return source.get("url") if isinstance(source, Mapping) else source


# Messages.


def get_media_from_message(message: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the sources of a message's media by kind (`image`, `video`, `audio`), kinds that it lacks left out."""
    media: dict[str, list[Any]] = {}
    for part in _content_parts([message]):
        for kind in _CONTENT_TYPES:
            source = _source(part, kind)
            if source is not None:
                media.setdefault(kind, []).append(source)
    return media


def load_media_from_message(
    message: Mapping[str, Any],
    processor: Any = None,
    multimodal_load_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, list[Any]]:
    """Return a message's media by kind, loaded: images as RGB, videos and audio by transformers' loaders.

    `multimodal_load_kwargs` are arguments of the loaders by kind; without them, the processor's own settings.
    """
    settings: Mapping[str, Mapping[str, Any]] = multimodal_load_kwargs or (
        {} if processor is None else get_multimodal_default_settings_from_processor(processor)
    )
    return {
        kind: [_load(kind, source, settings.get(kind, {})) for source in sources]
        for kind, sources in get_media_from_message(message).items()
    }


def _load(kind: str, source: Any, options: Mapping[str, Any]) -> Any:
    if kind == "image":
        return resolve_to_image(source)
    if not isinstance(source, str):
        return source  # frames or samples already
    from transformers.audio_utils import load_audio  # noqa: PLC0415
    from transformers.video_utils import load_video  # noqa: PLC0415

    if kind == "audio":
        return load_audio(source, **options)
    frames, _ = load_video(source, **options)
    return frames
