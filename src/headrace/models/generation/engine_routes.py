"""Routed experts as vLLM and SGLang return them, read into the wire's form: (prompt + completion - 1, MoE layers, k).

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
from dataclasses import asdict, dataclass, replace
from tokenize import TokenError
from typing import Any, Literal

import numpy as np
import torch

from headrace.data_plane.routes_codec import check_routes, pack_routes, signed_routes
from headrace.errors import GenerationError, ReplayError, SchemaError
from headrace.models.router_replay import RouterReplay

LayerAxis = Literal["auto", "moe", "all"]

_SGLANG_DTYPES = {"int32": "<i4", "uint16": "<u2", "uint8": "|u1"}
_NPY = b"\x93NUMPY"
# What NumPy raises for a .npy header that was changed on the way, besides what it documents.
_DAMAGE = (ValueError, EOFError, OSError, TypeError, OverflowError, MemoryError, SyntaxError, TokenError)


@dataclass(frozen=True)
class _Reader:
    """What is known of one sample's payload; its methods raise GenerationError with the sample's name."""

    model: RouterReplay
    prompt_tokens: int
    new_tokens: int
    start: int
    earlier: torch.Tensor | None
    layers: LayerAxis
    name: str

    @property
    def rows(self) -> int:
        """How many rows prompt and completion have from token `start` on."""
        return self.prompt_tokens + self.new_tokens - 1 - self.start

    def error(self, text: str) -> GenerationError:
        return GenerationError(f"{self.name}: {text}")

    def select(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows of the MoE layers."""
        layer_map, layers = self.model.layer_map, self.layers
        try:
            axis = layer_map.payload_axis(rows.shape[1]) if layers == "auto" else layers
            return rows if axis == "moe" else layer_map.select(rows)
        except ReplayError as error:
            raise self.error(str(error)) from error

    def finish(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows from token `start` on, checked and in the wire's dtype, behind those of earlier turns."""
        earlier, shape = self.earlier, self.model.shape
        if earlier is None:
            rows = torch.cat([rows.new_full((self.start, *rows.shape[1:]), -1), rows])
        try:
            check_routes(rows, **asdict(shape), sample_ids=[self.name])
            rows = pack_routes([rows], num_experts=shape.num_experts)
        except SchemaError as error:
            raise GenerationError(
                f"{error}. Ids above the range are physical ones, of expert load balancing; have the engine return "
                "logical ids. Rows of zeros were never recorded"
            ) from error
        if earlier is None:
            return rows
        self.expect(earlier, self.start, "routes of earlier turns")
        if (earlier.shape[1:], earlier.dtype) != (rows.shape[1:], rows.dtype):
            raise self.error(
                f"routes of earlier turns are {tuple(earlier.shape)} of {earlier.dtype}; expected them as they were "
                f"read, {(self.start, *rows.shape[1:])} of {rows.dtype}"
            )
        return torch.cat([earlier, rows])

    def expect(self, rows: torch.Tensor, tokens: int, what: str) -> None:
        if len(rows) != tokens:
            raise self.error(f"{what}: {len(rows)} rows; expected one for each of {tokens} tokens")

    def array(self, value: Any) -> torch.Tensor:
        """Return (T, layers, k) as signed integers."""
        if isinstance(value, str | bytes):
            value = self.npy(self.decode(value))
        try:
            array = np.asarray(value)
        except (ValueError, TypeError) as error:
            raise self.error(f"routed experts are no array of three axes ({error})") from error
        if array.ndim != 3 or array.dtype.kind not in "iu":
            raise self.error(
                f"routed experts of shape {array.shape} and dtype {array.dtype}; expected integers (tokens, layers, k)"
            )
        if array.dtype.kind == "u" and array.dtype.itemsize < 4:
            return _signed(array)
        narrow = array.astype(np.int32)
        if not np.can_cast(array.dtype, np.int32) and (changed := np.argwhere(narrow != array).tolist()):
            token, layer, entry = changed[0]
            raise GenerationError(
                f"{self.name}, token {token}, layer {layer}: expert {array[token, layer, entry]} is no id of 32 bits"
            )
        return torch.from_numpy(narrow)

    def decode(self, payload: Any) -> bytes:
        try:
            return base64.b64decode(payload, validate=True)
        except (binascii.Error, ValueError, TypeError) as error:
            raise self.error(f"routed_experts is not base64 ({error})") from error

    def npy(self, content: bytes) -> Any:
        if not content.startswith(_NPY):
            raise self.error("routed_experts is base64 of something other than a .npy array")
        try:
            return np.load(io.BytesIO(content), allow_pickle=False)
        except _DAMAGE as error:
            raise self.error(f"routed_experts is a damaged .npy array ({error})") from error

    def flat_ids(self, content: bytes, dtype: Any) -> np.ndarray:
        if not isinstance(dtype, str) or dtype not in _SGLANG_DTYPES:
            raise self.error(
                f"routed_experts_dtype is {dtype!r}; expected one of {', '.join(_SGLANG_DTYPES)}"
            )
        wire = np.dtype(_SGLANG_DTYPES[dtype])
        if len(content) % wire.itemsize:
            raise self.error(
                f"routed_experts is base64 of {len(content)} bytes; expected {dtype} ids of {wire.itemsize} bytes"
            )
        return np.frombuffer(content, dtype=wire)

    def refuse_two_readings(self, rows: int) -> None:
        """Refuse a flat payload of `rows` (token, layer) rows that other tokens by the other layer axis have, too.

        Example: of 4 layers 3 are mixtures. The 24 rows of 8 tokens and 3 layers are also those of 6 tokens and 4
        layers.
        """
        layer_map = self.model.layer_map
        moe, everything = len(layer_map.moe_layers), layer_map.num_layers
        if layer_map.is_sparse or not layer_map.has_one_router_per_layer:
            return
        for axis, other in ((moe, everything), (everything, moe)):
            if rows == self.rows * axis and rows % other == 0:
                raise self.error(
                    f"routed_experts holds {rows} rows: {self.rows} tokens, as expected, with {axis} layers, or "
                    f"{rows // other} tokens with {other} layers, of a model of {everything} decoder layers, {moe} of "
                    'them mixtures of experts; say which one the engine sends: layers="moe" or layers="all"'
                )


def read_vllm(
    prompt_routed_experts: Any,
    routed_experts: Any,
    *,
    model: RouterReplay,
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
            none, or where `routed_experts` holds prompt and completion together.
        routed_experts: `CompletionOutput.routed_experts`: of the completion (its tokens, or fewer), or of prompt and
            completion together.
        model: The model's routers, as `router_replay.install` returns them.
        start: The request's `routed_experts_prompt_start`; `routed_experts` then begins with that token.
        earlier: Routes of the first `start` tokens, from earlier turns; None marks them missing.
        layers: Whether the layer axis counts MoE layers or all; "auto" takes what its size can only be.

    Arrays may be NumPy arrays, nested lists, or base64 text of a .npy file.

    Raises:
        GenerationError: no routes, or routes that do not fit the tokens or the model.
    """
    reader = _Reader(model, prompt_tokens, new_tokens, start, earlier, layers, name)
    if routed_experts is None:
        raise reader.error(
            "vLLM returned no routed_experts; start it with enable_return_routed_experts=True (a request that was "
            "preempted has none either: generate it again)"
        )
    completion = reader.select(reader.array(routed_experts))
    if prompt_routed_experts is not None:
        prompt = reader.select(reader.array(prompt_routed_experts))
        reader.expect(prompt, prompt_tokens, "prompt_routed_experts")
        if len(completion) > new_tokens:
            raise reader.error(f"routed_experts has {len(completion)} rows for {new_tokens} new tokens")
        # An engine may add a row for the last token, or leave out the end.
        end = completion.new_full((max(new_tokens - 1 - len(completion), 0), *completion.shape[1:]), -1)
        joined = torch.cat([prompt, completion[: max(new_tokens - 1, 0)], end])
        return replace(reader, start=0, earlier=None).finish(joined)
    rows = reader.rows
    if len(completion) not in (rows, rows + 1):
        raise reader.error(
            f"routed_experts has {len(completion)} rows for {prompt_tokens} prompt and {new_tokens} new tokens, and "
            f"there is no prompt_routed_experts; expected {rows} rows of both together, from token {start}"
        )
    return reader.finish(completion[:rows])


def read_sglang(
    meta_info: Mapping[str, Any],
    *,
    model: RouterReplay,
    prompt_tokens: int,
    new_tokens: int,
    start: int = 0,
    earlier: torch.Tensor | None = None,
    layers: LayerAxis = "auto",
    name: str = "sample",
) -> torch.Tensor:
    """Return the routes of one SGLang completion; arguments that are not named here are those of `read_vllm`.

    Args:
        meta_info: A response's `meta_info` (or `sgl_ext` of an OpenAI choice), whose `routed_experts` is base64 of
            ids, flat, in the order token, layer, k, of tokens [start, prompt + new - 1). They are int32 unless
            `routed_experts_dtype` says uint16 or uint8; a `routed_experts_start_len` there must be `start`.
        start: The request's `routed_experts_start_len`.
        layers: A flat payload does not say how many rows it has, so that "auto" refuses a size that other tokens with
            the other layer axis have as well: name the axis for a model with dense layers.

    Raises:
        GenerationError: no routes, bytes that are not such an array, routes that do not fit tokens or model, or a size
            that "auto" can read in two ways.
    """
    reader = _Reader(model, prompt_tokens, new_tokens, start, earlier, layers, name)
    payload = meta_info.get("routed_experts")
    if payload is None:
        raise reader.error(
            "SGLang returned no routed_experts; start it with --enable-return-routed-experts and ask with "
            "return_routed_experts=true"
        )
    echoed = meta_info.get("routed_experts_start_len", start)
    if echoed != start:
        raise reader.error(
            f"routed_experts begins with token {echoed}, as SGLang says (routed_experts_start_len); expected {start}: "
            f"pass start={echoed}, or ask for routed_experts_start_len={start}"
        )
    flat = reader.flat_ids(reader.decode(payload), meta_info.get("routed_experts_dtype", "int32"))
    tokens, top_k = reader.rows, model.shape.top_k
    count, rest = divmod(len(flat), tokens * top_k) if tokens > 0 else (0, 1)
    if rest or not count:
        raise reader.error(
            f"routed_experts holds {len(flat)} ids; expected a multiple of {tokens} tokens (from {start} to "
            f"{prompt_tokens + new_tokens - 1}) x {top_k} experts per token"
        )
    if layers == "auto":
        reader.refuse_two_readings(len(flat) // top_k)
    return reader.finish(reader.select(_signed(flat.reshape(tokens, count, top_k))))


def _signed(array: np.ndarray) -> torch.Tensor:
    """Return a copy of ids in which missing rows are -1: an unsigned dtype marks them with its highest number."""
    ids = torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("=")))
    return signed_routes(ids) if array.dtype.kind == "u" else ids
