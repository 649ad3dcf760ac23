"""Routed experts as vLLM and SGLang return them, read into the wire's form: (prompt + answer - 1, MoE layers, k).

An engine never computes the last sampled token, so it has no route. Neither engine is imported: readers take what
their documented outputs hold. Rows that the engine marks with -1, or with 255 or 65535 in unsigned ids (a prefix-cache
hit, say), are missing here too.

Source: vLLM, docs/training/routed_experts_replay.md (0.21) and SamplingParams.routed_experts_prompt_start (0.27);
SGLang, docs/basic_usage/openai_api_completions.md and its `routed_experts_dtype`.
"""

import base64
import binascii
import io
from collections.abc import Mapping
from tokenize import TokenError
from typing import Any, Literal, Protocol

import numpy as np
import torch

from headrace.data_plane.routes_codec import RouteShape, check_routes, pack_routes, signed_routes
from headrace.errors import GenerationError, ReplayError, SchemaError
from headrace.models.router_replay import LayerMap

LayerAxis = Literal["auto", "moe", "all"]

_SGLANG_DTYPES = {"int32": "<i4", "uint16": "<u2", "uint8": "|u1"}
_NPY = b"\x93NUMPY"
# What NumPy raises for a .npy header that was changed on the way, besides what it documents.
_DAMAGE = (ValueError, EOFError, OSError, TypeError, OverflowError, MemoryError, SyntaxError, TokenError)


class RoutedModelSpec(Protocol):
    """What readers know of the model; the handle that `router_replay.install` returns is one."""

    @property
    def shape(self) -> RouteShape: ...

    @property
    def layer_map(self) -> LayerMap: ...


def read_vllm(
    prompt_routed_experts: Any,
    routed_experts: Any,
    *,
    model: RoutedModelSpec,
    prompt_tokens: int,
    new_tokens: int,
    start: int = 0,
    earlier: torch.Tensor | None = None,
    layers: LayerAxis = "auto",
    name: str = "sample",
) -> torch.Tensor:
    """Return the routes of one vLLM completion.

    Args:
        prompt_routed_experts: `RequestOutput.prompt_routed_experts`, (prompt, layers, k); None where the engine has
            none, or where `routed_experts` holds prompt and answer together.
        routed_experts: `CompletionOutput.routed_experts`: of the answer (its tokens, or fewer), or of prompt and
            answer together.
        model: The model's routers.
        prompt_tokens: Tokens of the prompt.
        new_tokens: Sampled tokens.
        start: The request's `routed_experts_prompt_start`; `routed_experts` then begins with that token.
        earlier: Routes of the first `start` tokens, from earlier turns; None marks them missing.
        layers: Whether the layer axis counts MoE layers or all; "auto" takes what its size can only be.
        name: The sample, for messages.

    Arrays may be NumPy arrays, nested lists, or base64 text of a .npy file.

    Raises:
        GenerationError: no routes, or routes that do not fit the tokens or the model.
    """
    if routed_experts is None:
        raise GenerationError(
            f"{name}: vLLM returned no routed_experts; start it with enable_return_routed_experts=True (a request that "
            "was preempted has none either: generate it again)"
        )
    answer = _select(_rows(routed_experts, name), model, layers, name)
    if prompt_routed_experts is not None:
        prompt = _select(_rows(prompt_routed_experts, name), model, layers, name)
        _expect(prompt, prompt_tokens, f"{name}: prompt_routed_experts")
        return _finish(torch.cat([prompt, _fit(answer, new_tokens, name)]), model, name)
    rows = prompt_tokens + new_tokens - 1 - start
    if len(answer) not in (rows, rows + 1):
        raise GenerationError(
            f"{name}: routed_experts has {len(answer)} rows for {prompt_tokens} prompt and {new_tokens} new tokens, "
            f"and there is no prompt_routed_experts; expected {rows} rows of both together, from token {start}"
        )
    return _join(answer[:rows], start, earlier, model, name)


def read_sglang(
    meta_info: Mapping[str, Any],
    *,
    model: RoutedModelSpec,
    prompt_tokens: int,
    new_tokens: int,
    start: int = 0,
    earlier: torch.Tensor | None = None,
    layers: LayerAxis = "auto",
    name: str = "sample",
) -> torch.Tensor:
    """Return the routes of one SGLang answer.

    Args:
        meta_info: A response's `meta_info` (or `sgl_ext` of an OpenAI choice), whose `routed_experts` is base64 of
            ids, flat, in the order token, layer, k, of tokens [start, prompt + new - 1). They are int32 unless
            `routed_experts_dtype` says uint16 or uint8; a `routed_experts_start_len` there must be `start`.
        model: The model's routers.
        prompt_tokens: Tokens of the prompt.
        new_tokens: Sampled tokens.
        start: The request's `routed_experts_start_len`.
        earlier: Routes of the first `start` tokens, from earlier turns; None marks them missing.
        layers: Whether the layer axis counts MoE layers or all; "auto" takes what the size can only be. A flat payload
            does not say how many rows it has, so that "auto" refuses a size that other tokens with the other layer axis
            have as well: name the axis for a model with dense layers.
        name: The sample, for messages.

    Raises:
        GenerationError: no routes, bytes that are not such an array, routes that do not fit tokens or model, or a size
            that "auto" can read in two ways.
    """
    payload = meta_info.get("routed_experts")
    if payload is None:
        raise GenerationError(
            f"{name}: SGLang returned no routed_experts; start it with --enable-return-routed-experts and ask with "
            "return_routed_experts=true"
        )
    echoed = meta_info.get("routed_experts_start_len", start)
    if echoed != start:
        raise GenerationError(
            f"{name}: routed_experts begins with token {echoed}, as SGLang says (routed_experts_start_len); expected "
            f"{start}: pass start={echoed}, or ask for routed_experts_start_len={start}"
        )
    flat = _flat_ids(_decode(payload, name), meta_info.get("routed_experts_dtype", "int32"), name)
    tokens = prompt_tokens + new_tokens - 1 - start
    count, rest = divmod(len(flat), tokens * model.shape.top_k) if tokens > 0 else (0, 1)
    if rest or not count:
        raise GenerationError(
            f"{name}: routed_experts holds {len(flat)} ids; expected a multiple of {tokens} tokens (from {start} to "
            f"{prompt_tokens + new_tokens - 1}) x {model.shape.top_k} experts per token"
        )
    if layers == "auto":
        _refuse_two_readings(len(flat) // model.shape.top_k, tokens, model.layer_map, name)
    recorded = _signed(flat.reshape(tokens, count, model.shape.top_k))
    return _join(_select(recorded, model, layers, name), start, earlier, model, name)


def _join(
    rows: torch.Tensor, start: int, earlier: torch.Tensor | None, model: RoutedModelSpec, name: str
) -> torch.Tensor:
    """Return rows from token `start` on behind those of earlier turns, or behind missing ones, checked."""
    if earlier is None:
        head = torch.full((start, *rows.shape[1:]), -1, dtype=rows.dtype)
        return _finish(torch.cat([head, rows]), model, name)
    _expect(earlier, start, f"{name}: routes of earlier turns")
    later = _finish(rows, model, name)
    if (earlier.shape[1:], earlier.dtype) != (later.shape[1:], later.dtype):
        raise GenerationError(
            f"{name}: routes of earlier turns are {tuple(earlier.shape)} of {earlier.dtype}; expected them as they "
            f"were read, {(start, *later.shape[1:])} of {later.dtype}"
        )
    return torch.cat([earlier, later])


def _rows(value: Any, name: str) -> torch.Tensor:
    """Return (T, layers, k) as signed integers."""
    if isinstance(value, str | bytes):
        value = _load_npy(_decode(value, name), name)
    try:
        array = np.asarray(value)
    except (ValueError, TypeError) as error:
        raise GenerationError(f"{name}: routed experts are no array of three axes ({error})") from error
    if array.ndim != 3 or array.dtype.kind not in "iu":
        raise GenerationError(
            f"{name}: routed experts of shape {array.shape} and dtype {array.dtype}; expected integers "
            "(tokens, layers, k)"
        )
    if array.dtype.kind == "u" and array.dtype.itemsize < 4:
        return _signed(array)
    narrow = array.astype(np.int32)
    if not np.can_cast(array.dtype, np.int32) and (changed := np.argwhere(narrow != array).tolist()):
        token, layer, entry = changed[0]
        raise GenerationError(
            f"{name}, token {token}, layer {layer}: expert {array[token, layer, entry]} is no id of 32 bits"
        )
    return torch.from_numpy(narrow)


def _signed(array: np.ndarray) -> torch.Tensor:
    """Return a copy of ids in which missing rows are -1: an unsigned dtype marks them with its highest number."""
    ids = torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("=")))
    return signed_routes(ids) if array.dtype.kind == "u" else ids


def _decode(payload: Any, name: str) -> bytes:
    try:
        return base64.b64decode(payload, validate=True)
    except (binascii.Error, ValueError, TypeError) as error:
        raise GenerationError(f"{name}: routed_experts is not base64 ({error})") from error


def _flat_ids(content: bytes, dtype: Any, name: str) -> np.ndarray:
    if not isinstance(dtype, str) or dtype not in _SGLANG_DTYPES:
        raise GenerationError(
            f"{name}: routed_experts_dtype is {dtype!r}; expected one of {', '.join(_SGLANG_DTYPES)}"
        )
    wire = np.dtype(_SGLANG_DTYPES[dtype])
    if len(content) % wire.itemsize:
        raise GenerationError(
            f"{name}: routed_experts is base64 of {len(content)} bytes; expected {dtype} ids of {wire.itemsize} bytes"
        )
    return np.frombuffer(content, dtype=wire)


def _load_npy(content: bytes, name: str) -> Any:
    if not content.startswith(_NPY):
        raise GenerationError(f"{name}: routed_experts is base64 of something other than a .npy array")
    try:
        return np.load(io.BytesIO(content), allow_pickle=False)
    except _DAMAGE as error:
        raise GenerationError(f"{name}: routed_experts is a damaged .npy array ({error})") from error


def _select(rows: torch.Tensor, model: RoutedModelSpec, layers: LayerAxis, name: str) -> torch.Tensor:
    """Return the rows of the MoE layers."""
    try:
        axis = model.layer_map.payload_axis(rows.shape[1]) if layers == "auto" else layers
        return rows if axis == "moe" else model.layer_map.select(rows)
    except ReplayError as error:
        raise GenerationError(f"{name}: {error}") from error


def _refuse_two_readings(rows: int, tokens: int, layer_map: LayerMap, name: str) -> None:
    """Refuse a flat payload of `rows` (token, layer) rows that fits `tokens`, and fits others by the other layer axis.

    Example: of 4 layers 3 are mixtures. The 24 rows of 8 tokens and 3 layers are also those of 6 tokens and 4 layers.
    """
    moe, everything = len(layer_map.moe_layers), layer_map.num_layers
    if layer_map.is_sparse or not layer_map.has_one_router_per_layer:
        return
    for axis, other in ((moe, everything), (everything, moe)):
        if rows == tokens * axis and rows % other == 0:
            raise GenerationError(
                f"{name}: routed_experts holds {rows} rows: {tokens} tokens, as expected, with {axis} layers, or "
                f"{rows // other} tokens with {other} layers, of a model of {everything} decoder layers, {moe} of them "
                'mixtures of experts; say which one the engine sends: layers="moe" or layers="all"'
            )


def _fit(answer: torch.Tensor, new_tokens: int, name: str) -> torch.Tensor:
    """Return (new_tokens - 1) rows; an engine may add one for the last token, or leave out the end."""
    if len(answer) > new_tokens:
        raise GenerationError(f"{name}: routed_experts has {len(answer)} rows for {new_tokens} new tokens")
    wanted = max(new_tokens - 1, 0)
    short = wanted - len(answer)
    if short <= 0:
        return answer[:wanted]
    return torch.cat([answer, answer.new_full((short, *answer.shape[1:]), -1)])


def _expect(rows: torch.Tensor, tokens: int, what: str) -> None:
    if len(rows) != tokens:
        raise GenerationError(f"{what}: {len(rows)} rows; expected one for each of {tokens} tokens")


def _finish(rows: torch.Tensor, model: RoutedModelSpec, name: str) -> torch.Tensor:
    """Return checked rows in the wire's dtype."""
    shape = model.shape
    try:
        check_routes(
            rows,
            num_experts=shape.num_experts,
            num_layers=shape.num_layers,
            top_k=shape.top_k,
            sample_ids=[name],
        )
        return pack_routes([rows], num_experts=shape.num_experts)
    except SchemaError as error:
        raise GenerationError(
            f"{error}. Ids above the range are physical ones, of expert load balancing; have the engine return logical "
            "ids. Rows of zeros were never recorded"
        ) from error
