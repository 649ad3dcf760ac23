"""Routed experts as vLLM and SGLang return them, read into the wire's form: (prompt + answer - 1, MoE layers, k).

An engine never computes the last sampled token, so it has no route. Neither engine is imported: readers take what
their documented outputs hold. Rows that the engine marks with -1 (a prefix-cache hit, say) are missing here too.

Source: vLLM, docs/training/routed_experts_replay.md (0.21); SGLang, docs/basic_usage/openai_api_completions.md.
"""

import base64
import binascii
import io
from collections.abc import Mapping
from typing import Any, Literal, Protocol

import numpy as np
import torch

from headrace.data_plane.routes_codec import RouteShape, check_routes, pack_routes
from headrace.errors import GenerationError, ReplayError, SchemaError
from headrace.models.router_replay import LayerMap

LayerAxis = Literal["auto", "moe", "all"]

_NPY = b"\x93NUMPY"


class RoutedModelSpec(Protocol):
    """What readers know of the model; the handle that `router_replay.install` returns is one."""

    @property
    def shape(self) -> RouteShape:
        """MoE layers, k and experts."""
        ...

    @property
    def layer_map(self) -> LayerMap:
        """Which decoder layers are mixtures of experts."""
        ...


def read_vllm(
    prompt_routed_experts: Any,
    routed_experts: Any,
    *,
    model: RoutedModelSpec,
    prompt_tokens: int,
    new_tokens: int,
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
    total = prompt_tokens + new_tokens
    if len(answer) not in (total - 1, total):
        raise GenerationError(
            f"{name}: routed_experts has {len(answer)} rows for {prompt_tokens} prompt and {new_tokens} new tokens, "
            f"and there is no prompt_routed_experts; expected {total - 1} rows of both together"
        )
    return _finish(answer[: total - 1], model, name)


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
            int32 ids, flat, in the order token, layer, k, of tokens [start, prompt + new - 1).
        model: The model's routers.
        prompt_tokens: Tokens of the prompt.
        new_tokens: Sampled tokens.
        start: The request's `routed_experts_start_len`.
        earlier: Routes of the first `start` tokens, from earlier turns; None marks them missing.
        layers: Whether the layer axis counts MoE layers or all; "auto" takes what its size can only be.
        name: The sample, for messages.

    Raises:
        GenerationError: no routes, bytes that are not such an array, or routes that do not fit tokens or model.
    """
    payload = meta_info.get("routed_experts")
    if payload is None:
        raise GenerationError(
            f"{name}: SGLang returned no routed_experts; start it with --enable-return-routed-experts and ask with "
            "return_routed_experts=true"
        )
    flat = np.frombuffer(_decode(payload, name), dtype="<i4")
    tokens = prompt_tokens + new_tokens - 1 - start
    count, rest = divmod(len(flat), tokens * model.shape.top_k) if tokens > 0 else (0, 1)
    if rest or not count:
        raise GenerationError(
            f"{name}: routed_experts holds {len(flat)} ids; expected a multiple of {tokens} tokens (from {start} to "
            f"{prompt_tokens + new_tokens - 1}) x {model.shape.top_k} experts per token"
        )
    recorded = torch.from_numpy(flat.reshape(tokens, count, model.shape.top_k).copy())
    rows = _select(recorded, model, layers, name)
    if earlier is None:
        head = torch.full((start, *rows.shape[1:]), -1, dtype=rows.dtype)
        return _finish(torch.cat([head, rows]), model, name)
    _expect(earlier, start, f"{name}: routes of earlier turns")
    return torch.cat([earlier, _finish(rows, model, name)])


def _rows(value: Any, name: str) -> torch.Tensor:
    """Return (T, layers, k) as signed integers."""
    if isinstance(value, str | bytes):
        value = _load_npy(_decode(value, name), name)
    array = np.asarray(value)
    if array.ndim != 3 or array.dtype.kind not in "iu":
        raise GenerationError(
            f"{name}: routed experts of shape {array.shape} and dtype {array.dtype}; expected integers "
            "(tokens, layers, k)"
        )
    return torch.from_numpy(array.astype(np.int32))


def _decode(payload: str | bytes, name: str) -> bytes:
    try:
        return base64.b64decode(payload, validate=True)
    except (binascii.Error, ValueError) as error:
        raise GenerationError(f"{name}: routed_experts is not base64 ({error})") from error


def _load_npy(content: bytes, name: str) -> Any:
    if not content.startswith(_NPY):
        raise GenerationError(f"{name}: routed_experts is base64 of something other than a .npy array")
    try:
        return np.load(io.BytesIO(content), allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise GenerationError(f"{name}: routed_experts is a damaged .npy array ({error})") from error


def _select(rows: torch.Tensor, model: RoutedModelSpec, layers: LayerAxis, name: str) -> torch.Tensor:
    """Return the rows of the MoE layers."""
    try:
        axis = model.layer_map.payload_axis(rows.shape[1]) if layers == "auto" else layers
        return rows if axis == "moe" else model.layer_map.select(rows)
    except ReplayError as error:
        raise GenerationError(f"{name}: {error}") from error


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
