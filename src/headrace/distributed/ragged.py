"""Rows of different lengths, in three forms, and the ways between them.

Padded: (N, S, ...). Ragged: `values` (sum of lengths, ...) with `offsets` (N + 1), row i being
`values[offsets[i]:offsets[i + 1]]`. Nested: a `torch.jagged` tensor around `values` and `offsets`.

Every dtype works on every device, with at most one device synchronisation per call and none where lengths and
offsets are on the CPU, and on floating dtypes gradients flow. A result may share memory with its input where no
byte has to move. Lengths are checked on the CPU; make one RowLayout for columns that share their lengths.
"""

import logging
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from math import copysign, prod
from typing import Any
from weakref import ReferenceType, ref

import numpy as np
import torch
from torch.nested._internal.nested_tensor import NestedTensor

from headrace.distributed.offsets_reader import INTEGERS, OffsetsReader
from headrace.distributed.ragged_cpu import Bytes, Ints, PadValue, join_spans, pad_element, pad_rows
from headrace.distributed.ragged_kernel import load_kernel
from headrace.errors import SchemaError

# A copy of less finds room in the caches of one core.
_STREAMED_BYTES = 256 * 1024
# From here on malloc takes a buffer fresh from the system each time, so that huge pages pay.
_FRESH_BYTES = 32 * 1024 * 1024
# torch's public constructor of nested tensors, here and elsewhere, says this once in each process.
logging.getLogger("torch.fx._symbolic_trace").addFilter(
    lambda record: not record.getMessage().startswith("is_fx_tracing will return")
)
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def no_bytes(tensor: torch.Tensor) -> str | None:
    """Return why a dense tensor is no memory full of its elements, from which rows could be copied; None: it is."""
    if tensor.is_meta:
        return "on the device 'meta', which holds no values"
    if tensor.is_quantized:
        return f"quantized, of dtype {tensor.dtype}"
    return None if tensor.layout is torch.strided else f"of layout {tensor.layout}"


def byte_view(tensor: torch.Tensor) -> Bytes:
    """Return the elements of a CPU tensor in C order as flat bytes; shared with a contiguous tensor."""
    whole = (tensor.detach() if tensor.requires_grad else tensor).resolve_conj().resolve_neg()
    if not whole.is_contiguous():
        whole = whole.contiguous()
    # `view(-1)` keeps a stride of 0, as an expanded dimension of size 1 has it; that cannot be viewed as bytes.
    flat: Bytes = whole.as_strided((whole.numel(),), (1,)).view(torch.uint8).numpy()
    return flat


def memory_of(tensor: torch.Tensor) -> Bytes:
    """Return the bytes from a tensor's first element to its last, whose rows may lie apart."""
    reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return byte_view(tensor.as_strided((reach,), (1,)))


def row_lengths(lengths: torch.Tensor | Sequence[int], read: OffsetsReader | None = None) -> torch.Tensor:
    """Return lengths as int64 (N,) on the CPU, brought there by `read` if it is given."""
    if isinstance(lengths, torch.Tensor):
        if lengths.dim() != 1 or lengths.dtype not in INTEGERS:
            raise SchemaError(
                f"lengths have shape {tuple(lengths.shape)} and dtype {lengths.dtype}; expected integers (N,)"
            )
        if not lengths.is_cpu:
            lengths = (read or OffsetsReader())(lengths.detach())
        checked = lengths.detach().to(torch.int64).contiguous()
    else:
        checked = torch.tensor(list(lengths), dtype=torch.int64)
    numbers: Ints = checked.numpy()
    if numbers.min(initial=0) < 0:
        row = int(numbers.argmin())
        raise SchemaError(f"row {row} has length {numbers[row]}; expected 0 or more")
    return checked


def offsets_from_lengths(lengths: torch.Tensor) -> torch.Tensor:
    """Return (N + 1,) int64 offsets on the device of `lengths`: [3, 0, 2] gives [0, 3, 3, 5]."""
    if lengths.device.type == "cpu":
        # Half the time of torch's kernels after other work.
        counted = np.zeros(lengths.shape[0] + 1, np.int64)
        np.cumsum(lengths.numpy(), out=counted[1:])
        return torch.from_numpy(counted)
    offsets = torch.zeros(lengths.shape[0] + 1, dtype=torch.int64, device=lengths.device)
    torch.cumsum(lengths, 0, out=offsets[1:])
    return offsets


def ragged_indices(offsets: torch.Tensor, total: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each token's row and its position in the row, on the device of `offsets`.

    Give `total` (tokens) to avoid a device synchronisation. Offsets [0, 3, 3, 5] give rows [0, 0, 0, 2, 2]
    and positions [0, 1, 2, 0, 1].
    """
    total = int(offsets[-1]) if total is None else total
    numbers = torch.arange(len(offsets) - 1, device=offsets.device)
    rows = torch.repeat_interleave(numbers, offsets.diff(), output_size=total)
    return rows, torch.arange(total, device=offsets.device) - offsets[rows]


class RowLayout:
    """Where the tokens of ragged rows lie in a padded (N, width, ...) tensor.

    `lengths` (N,) are tokens per row, `width` is S of the padded form (None: the longest row), and `read` brings
    lengths on a device to the CPU.
    """

    def __init__(
        self,
        lengths: torch.Tensor | Sequence[int],
        width: int | None = None,
        read: OffsetsReader | None = None,
    ) -> None:
        self.lengths = row_lengths(lengths, read)
        self.rows = len(self.lengths)
        self.longest = int(self.lengths.numpy().max(initial=0))
        self.offsets = offsets_from_lengths(self.lengths)
        # Copies on the CPU go by these alone: `offsets` may become a caller's, who may write to them.
        self._offsets: Ints = self.offsets.numpy()
        self._address = self.offsets.data_ptr()
        self.total = int(self._offsets[-1])
        self.width = self.longest if width is None else width
        if self.longest > self.width:
            row = int(self.lengths.numpy().argmax())
            raise SchemaError(f"row {row} has length {self.longest}; the padded width is {width}")
        self.is_full = self.total == self.rows * self.width
        self._on_device: dict[torch.device, torch.Tensor] = {}
        self._positions: dict[torch.device, torch.Tensor] = {}

    def with_width(self, width: int) -> "RowLayout":
        """Return the same rows, around the same offsets, for a padded form of another width."""
        other = RowLayout(self.lengths, width)
        other.offsets, other._on_device = self.offsets, self._on_device
        return other

    def offsets_on(self, device: torch.device) -> torch.Tensor:
        """Return the offsets on a device, the same object each time; the copy does not wait for the device."""
        if device not in self._on_device:
            self._on_device[device] = moved(self.offsets, device)
        return self._on_device[device]

    def fits(self, offsets: torch.Tensor, device_offsets: torch.Tensor | None = None) -> bool:
        """Return whether offsets on the CPU are the layout's.

        If so, the first ones that are contiguous int64 become its own, and `offsets_on` returns those on a device,
        unless others are in use.
        """
        if self.offsets is not offsets and not torch.equal(self.offsets, offsets):
            return False
        for held in (offsets, device_offsets):
            if held is not None and held.dtype == torch.int64 and held.is_contiguous():
                self._on_device.setdefault(held.device, held)
        self.offsets = self._on_device.get(offsets.device, self.offsets)
        return True

    def pad(self, values: torch.Tensor, pad_value: PadValue = 0) -> torch.Tensor:
        """Return values (total, ...) as (N, width, ...), `pad_value` after each row's end."""
        if values.dim() < 1 or values.shape[0] != self.total:
            raise SchemaError(f"values have shape {tuple(values.shape)}; the lengths add up to {self.total}")
        shape = (self.rows, self.width, *values.shape[1:])
        if self.is_full:
            return values.reshape(shape)
        if not self.total or not values.numel():
            return moved(pad_element(pad_value, values.dtype), values.device).expand(shape).clone()
        if _is_for_torch(values):
            return self._pad_by_index(values, shape, pad_value)
        is_zero = pad_value == 0 and copysign(1, pad_value) > 0
        element = None if is_zero else bytes(byte_view(pad_element(pad_value, values.dtype)))
        if not values.is_cpu:
            padded: torch.Tensor = _device_kernels(values).pad(
                values, self.offsets_on(values.device), shape, element
            )
            return padded
        step = prod(values.shape[1:]) * values.element_size()
        filler = element * (self.width * step // len(element)) if element else None
        source, out = values.contiguous(), _fresh(shape, values.dtype)
        if kernel := load_kernel():
            span = self.width * step
            kernel.pad(source.data_ptr(), self._address, self.rows, step, span, filler, out.data_ptr())
        else:
            pad_rows(byte_view(source), self._offsets * step, filler, byte_view(out))
        return out

    def strip(self, padded: torch.Tensor) -> torch.Tensor:
        """Return padded (N, width, ...) as values (total, ...), without the padding."""
        if padded.dim() < 2 or tuple(padded.shape[:2]) != (self.rows, self.width):
            raise SchemaError(
                f"padded tensor has shape {tuple(padded.shape)}; expected ({self.rows}, {self.width}, ...)"
            )
        shape = (self.total, *padded.shape[2:])
        if self.is_full:
            return padded.reshape(shape)
        if not self.total or not padded.numel():
            return padded.new_empty(shape)
        if _is_for_torch(padded):
            return _take(padded.flatten(0, 1), self._padded_positions(padded.device))
        if not padded.is_cpu:
            bounds = self.offsets_on(padded.device)
            values: torch.Tensor = _device_kernels(padded).strip(padded, bounds, self.longest, self.total)
            return values
        # Rows may lie apart, if each is one piece of memory.
        source = padded if padded.is_contiguous() or padded[0].is_contiguous() else padded.contiguous()
        out = _fresh(shape, padded.dtype)
        row_step, step = source.stride(0) * source.itemsize, prod(padded.shape[2:]) * source.itemsize
        if kernel := load_kernel():
            kernel.strip(source.data_ptr(), row_step, self._address, self.rows, step, out.data_ptr())
        else:
            starts, sizes = np.arange(self.rows) * row_step, self.lengths.numpy() * step
            join_spans(memory_of(source), starts, sizes, byte_view(out))
        return out

    def _pad_by_index(
        self, values: torch.Tensor, shape: tuple[int, ...], pad_value: PadValue
    ) -> torch.Tensor:
        filler = moved(pad_element(pad_value, values.dtype), values.device)
        out = filler.expand(self.rows * self.width, *values.shape[1:]).clone()
        positions = self._padded_positions(values.device)
        if values.requires_grad:
            return out.index_copy(0, positions, values).view(shape)
        _words(out).index_copy_(0, positions, _words(values))
        return out.view(shape)

    def _padded_positions(self, device: torch.device) -> torch.Tensor:
        if device not in self._positions:
            rows, positions = ragged_indices(self.offsets_on(device), self.total)
            self._positions[device] = rows * self.width + positions
        return self._positions[device]


def gather_spans(values: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Return the spans `values[starts[i] : starts[i] + lengths[i]]` back to back; spans are on the CPU."""
    starts, lengths = starts.to(torch.int64), lengths.to(torch.int64)
    _check_spans(starts.numpy(), lengths.numpy(), values.shape[0])
    shape = (int(lengths.sum()), *values.shape[1:])
    if not shape[0] or not values.numel():
        return values.new_empty(shape)
    if _is_for_torch(values):
        rows, positions = ragged_indices(offsets_from_lengths(lengths), shape[0])
        return _take(values, moved(starts[rows] + positions, values.device))
    if not values.is_cpu:
        bounds = moved(torch.cat((starts, offsets_from_lengths(lengths))), values.device)
        first, offsets = bounds[: len(starts)], bounds[len(starts) :]
        gathered: torch.Tensor = _device_kernels(values).gather(
            values, first, offsets, int(lengths.max()), shape[0]
        )
        return gathered
    source, out = values.contiguous(), _fresh(shape, values.dtype)
    step = prod(values.shape[1:]) * values.element_size()
    if kernel := load_kernel():
        starts, lengths = starts.contiguous(), lengths.contiguous()
        spans = starts.data_ptr(), lengths.data_ptr(), len(starts)
        kernel.gather(source.data_ptr(), *spans, step, out.data_ptr())
    else:
        join_spans(byte_view(source), starts.numpy() * step, lengths.numpy() * step, byte_view(out))
    return out


def _check_spans(first: Ints, sizes: Ints, total: int) -> None:
    if len(first) != len(sizes):
        raise SchemaError(f"{len(first)} starts and {len(sizes)} lengths of spans; expected as many of each")
    # Not by their sum, which may be more than 64 bits hold.
    if not len(sizes) or (first.min() >= 0 and sizes.min() >= 0 and (first <= total - sizes).all()):
        return
    row = int(np.flatnonzero((first < 0) | (sizes < 0) | (first > total - sizes))[0])
    raise SchemaError(
        f"row {row} begins at token {int(first[row])} and has {int(sizes[row])} tokens; there are {total} tokens, so "
        "the offsets do not fit the values"
    )


def gather_rows(
    values: torch.Tensor, offsets: torch.Tensor, rows: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (values, offsets) of the ragged rows `rows`, in that order; all offsets and rows on the CPU."""
    lengths = offsets.diff()[rows]
    return gather_spans(values, offsets[rows], lengths), offsets_from_lengths(lengths)


def place_among(offsets: torch.Tensor, known: list[torch.Tensor]) -> int:
    """Return the number of offsets among those `known`, to which they are added if they are not there."""
    equal = (i for i, met in enumerate(known) if met is offsets or torch.equal(met, offsets))
    if (place := next(equal, len(known))) == len(known):
        known.append(offsets)
    return place


def gather_dense(values: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return `values[rows]` for any dtype; `rows` on the CPU."""
    return _take(values, moved(rows, values.device))


def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor on a device; from the CPU, without waiting for the device."""
    # A copy to the CPU that nobody waits for could be read too early.
    return tensor.to(device, non_blocking=device.type != "cpu")


# What attributes of a jagged tensor say, many times as fast as the attributes.


def is_nested(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, NestedTensor) or tensor.is_nested


def wants_grad(tensor: torch.Tensor) -> bool:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.requires_grad


# Columns of a call share their offsets: the last, and its longest row as torch keeps it, are remembered.
_longest_known: tuple[ReferenceType[torch.Tensor] | None, torch.Tensor] = None, torch.empty(0, 0)


def nested_from_ragged(
    values: torch.Tensor,
    offsets: torch.Tensor,
    ragged_dim: int = 1,
    host_offsets: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return a jagged nested tensor around `values` and `offsets`, without a copy.

    torch can add and compare nested tensors around the same `offsets` object. With `ragged_dim` d > 1 the
    tokens of `values` (first dimension) become dimension d of the result. The result knows its longest row, unless all
    offsets given lie on a device: `host_offsets` are the same on the CPU. `torch.nested.to_padded_tensor` without a
    size pads to that row, and to the tokens of all rows where it is not known.
    """
    global _longest_known
    host_offsets = offsets if host_offsets is None else host_offsets
    known, longest = _longest_known
    if host_offsets.is_cpu and (known is None or known() is not host_offsets):
        bounds: Ints = host_offsets.numpy()
        longest = torch.empty(int((bounds[1:] - bounds[:-1]).max(initial=0)), 0)
        _longest_known = ref(host_offsets), longest
    if offsets.device != values.device:
        offsets = moved(offsets, values.device)
    if ragged_dim != 1:
        values = values.movedim(0, ragged_dim - 1)
    if values.requires_grad:
        most = longest.shape[0] if host_offsets.is_cpu else None
        return torch.nested.nested_tensor_from_jagged(values, offsets, jagged_dim=ragged_dim, max_seqlen=most)
    # The public constructor takes three times as long.
    nested = NestedTensor(values, offsets=offsets, _ragged_idx=ragged_dim)
    if host_offsets.is_cpu:
        # Not by the constructor, which imports torch's compiler then.
        nested._metadata_cache["max_seqlen"] = longest
    return nested


def ragged_from_nested(nested: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return (values, offsets, ragged dimension) of a nested tensor; offsets start at 0: contiguous int64 on the CPU.

    Values are a view where the rows lie back to back, and a copy otherwise. Tokens are their first dimension.
    """
    return take_apart(nested, OffsetsReader((nested,)))[:3]


def take_apart(
    nested: torch.Tensor, read: OffsetsReader
) -> tuple[torch.Tensor, torch.Tensor, int, torch.Tensor | None]:
    """Do what `ragged_from_nested` does, with offsets read for all columns of a call at once.

    The last part is the same offsets on the device of the values, where that is not the CPU and they were there.
    """
    if not isinstance(nested, NestedTensor):
        parts = nested.unbind()
        sizes = torch.tensor([p.shape[0] for p in parts], dtype=torch.int64)
        return torch.cat(parts), offsets_from_lengths(sizes), 1, None
    jagged: Any = nested
    ragged_dim: int = jagged._ragged_idx
    # `values()` is `_values` as autograd sees it, and takes four hundred times as long.
    values: torch.Tensor = jagged.values() if wants_grad(nested) else jagged._values
    if ragged_dim != 1:
        values = values.movedim(ragged_dim - 1, 0)
    held, lengths = jagged._offsets, jagged._lengths
    is_piece = held.dtype == torch.int64 and held.is_contiguous()
    offsets: torch.Tensor = held if is_piece and held.is_cpu else read(held)
    total = values.shape[0]
    if lengths is None and (read.whole[0] is not offsets or read.whole[1] != total):
        bounds: Ints = offsets.numpy()
        if bounds[0] == 0 and bounds[-1] == total and (bounds[1:] >= bounds[:-1]).all():
            read.whole = offsets, total
    if lengths is None and read.whole[0] is offsets and read.whole[1] == total:
        return values, offsets, ragged_dim, held if is_piece and not held.is_cpu else None
    # torch takes any offsets, and copies by address would follow them out of the values: this checks them.
    sizes = offsets.diff() if lengths is None else read(lengths)
    gathered = gather_spans(values, offsets[: len(sizes)], sizes)
    return gathered, offsets_from_lengths(sizes), ragged_dim, None


def _fresh(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return memory of arbitrary content; where it is large, NumPy's, which asks for huge pages as torch does not."""
    size = prod(shape) * dtype.itemsize
    if size < _FRESH_BYTES:
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(np.empty(size, np.uint8)).view(dtype).view(shape)


@cache
def _triton_kernels() -> Any:
    if find_spec("triton") is None:
        return None
    from headrace.distributed import ragged_triton  # noqa: PLC0415 - imports triton

    return ragged_triton


def _device_kernels(tensor: torch.Tensor) -> Any:
    return _triton_kernels() if tensor.is_cuda and tensor.element_size() in _WORDS else None


def _is_for_torch(tensor: torch.Tensor) -> bool:
    """Whether only torch may copy it: autograd watches it, its bytes are not its numbers, or there is no kernel."""
    if (tensor.requires_grad and torch.is_grad_enabled()) or tensor.is_conj() or tensor.is_neg():
        return True
    return not tensor.is_cpu and _device_kernels(tensor) is None


def _words(tensor: torch.Tensor) -> torch.Tensor:
    # Copies do not look at the dtype; for some dtypes torch has no kernels, for words of their size it has.
    if tensor.requires_grad:
        return tensor
    return tensor.resolve_conj().resolve_neg().view(_WORDS.get(tensor.element_size(), tensor.dtype))


def _take(values: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    taken = _words(values).index_select(0, indices)
    return taken if values.requires_grad else taken.view(values.dtype)


def own_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements in fresh, contiguous CPU memory."""
    detached = tensor.detach().resolve_conj().resolve_neg()
    if not (detached.is_cpu and detached.is_contiguous()):
        return detached.cpu().contiguous()
    if detached.nbytes < _STREAMED_BYTES:
        return detached.clone()
    out = _fresh(tuple(detached.shape), detached.dtype)
    if kernel := load_kernel():
        kernel.copy(detached.data_ptr(), detached.nbytes, out.data_ptr())
    else:
        byte_view(out)[:] = byte_view(detached)
    return out
