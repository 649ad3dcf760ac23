"""How many bytes live tensors take while a model runs, without the model: shapes run, values do not.

Fake tensors stand in for the model's, and every storage that an operation makes counts from then until nothing holds
it. What a kernel on CUDA takes inside, and never returns, is added where it matters: attention and the fused head.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.moe import ExpertsInterface

from headrace.models.automodel.attention import to_compute_dtype, varlen_knows_gqa

PLANNED = "headrace_planned"
_BLOCK = 512
"""Bytes that the allocator of CUDA rounds up to."""


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of storages that operations make, while they live: `live` now, `peak` at most."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def add(self, tensor: torch.Tensor) -> None:
        """Count a tensor that is there already."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        size = -(-storage.nbytes() // _BLOCK) * _BLOCK
        self.live += size
        self.peak = max(self.peak, self.live)
        self._known[key] = weakref.ref(storage, partial(self._forget, key, size))

    def _forget(self, key: int, size: int, _: Any) -> None:
        self._known.pop(key, None)
        self.live -= size

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, torch.Tensor):
                self.add(tensor)
        return out


class _Attention(torch.autograd.Function):
    """What flash-attention keeps and takes: q, k, v (T, H, D), its result, and a number per head and token."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        out = query.new_empty(*query.shape[:-1], value.shape[-1])
        sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        query, key, value, _, sums = ctx.saved_tensors
        inner = [torch.empty_like(query, dtype=torch.float32), torch.empty_like(sums)]
        if key.shape[1] != query.shape[1]:
            inner += [torch.empty_like(query), torch.empty_like(query)]
        grads = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        del inner
        return grads


def _attend(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, None]:
    rows, _heads, width, _dim = query.shape
    parts = [to_compute_dtype(x).transpose(1, 2).flatten(0, 1).contiguous() for x in (query, key, value)]
    group = parts[0].shape[1] // parts[1].shape[1]
    if group > 1 and not varlen_knows_gqa():
        parts[1:] = [x.repeat_interleave(group, dim=1) for x in parts[1:]]
    out: torch.Tensor = _Attention.apply(*parts)  # type: ignore[no-untyped-call]
    return out.view(rows, width, *out.shape[1:]), None


class _Grouped(torch.autograd.Function):
    """A grouped product: rows (N, a), each with one of the matrices (E, b, a), to (N, b)."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor, width: int) -> torch.Tensor:
        ctx.save_for_backward(rows, weight)
        return rows.new_empty(len(rows), width)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        rows, weight = ctx.saved_tensors
        return torch.empty_like(rows), torch.empty_like(weight) if ctx.needs_input_grad[1] else None, None


def _run_experts(
    module: Any, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    tokens, k = top_k_index.shape
    rows = to_compute_dtype(hidden).repeat_interleave(k, dim=0)
    up, down = (to_compute_dtype(w) for w in (module.gate_up_proj, module.down_proj))
    width = up.numel() // (up.shape[0] * hidden.shape[-1])
    gate, value = _Grouped.apply(rows, up, width).chunk(2, dim=-1)  # type: ignore[no-untyped-call]
    inner = torch.nn.functional.silu(gate) * value
    out = _Grouped.apply(inner, down, hidden.shape[-1])  # type: ignore[no-untyped-call]
    out = out * top_k_weights.reshape(-1, 1)
    total: torch.Tensor = out.view(tokens, k, -1).sum(1)
    return total.to(hidden.dtype)


class FusedHead(torch.autograd.Function):
    """What `fused_head` takes with its kernels: one copy of a chunk's scores, and the matrix in the compute dtype."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, chunk: int) -> torch.Tensor:
        matrix = weight.to(hidden.dtype)
        logits: torch.Tensor | None = None
        for start in range(0, len(hidden), chunk):
            del logits
            logits = hidden[start : start + chunk] @ matrix.t()
            sums = logits.new_empty(3, len(logits), dtype=torch.float32)
            del sums
        kept = hidden.new_empty(2, len(hidden), dtype=torch.float32)
        ctx.save_for_backward(hidden, weight, kept[0])
        ctx.chunk, ctx.last_logits = chunk, logits
        return kept[1]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        hidden, weight, _ = ctx.saved_tensors
        matrix = weight.to(hidden.dtype)
        grad_hidden, grad_weight = torch.empty_like(hidden), None
        logits, ctx.last_logits = ctx.last_logits, None
        for start in reversed(range(0, len(hidden), ctx.chunk)):
            part = hidden[start : start + ctx.chunk]
            logits = part @ matrix.t() if logits is None else logits
            grad_hidden[start : start + ctx.chunk] = logits @ matrix
            if ctx.needs_input_grad[1]:
                product = logits.t() @ part
                grad_weight = product.to(weight.dtype) if grad_weight is None else grad_weight.add_(product)
                del product
            logits = None
        return grad_hidden, grad_weight, None


AttentionInterface.register(PLANNED, _attend)
AttentionMaskInterface.register(PLANNED, lambda *_, **__: None)
ExpertsInterface.register(PLANNED, _run_experts)
