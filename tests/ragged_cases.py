"""hypothesis strategies for ragged rows of every dtype the wire carries."""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from headrace.distributed.ragged import RowLayout

DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)


@dataclass
class RaggedCase:
    """A padded tensor with arbitrary bits everywhere, and the lengths of its rows."""

    padded: torch.Tensor
    lengths: list[int]

    @property
    def dtype(self) -> torch.dtype:
        return self.padded.dtype


def arbitrary(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Return a tensor of random bits (random truth values for bool)."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator, dtype=torch.uint8).bool()
    width = torch.empty(0, dtype=dtype).element_size()
    count = torch.Size(shape).numel()
    bits = torch.randint(0, 256, (count * width,), generator=generator, dtype=torch.uint8)
    return bits.view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)


@st.composite
def ragged_cases(draw: st.DrawFn, min_rows: int = 1) -> RaggedCase:
    """Ragged, equal-length and empty rows; up to 3 trailing dimensions; every dtype."""
    longest = draw(st.integers(0, 9))
    lengths = draw(
        st.one_of(
            st.lists(st.integers(0, longest), min_size=min_rows, max_size=7),
            st.integers(min_rows, 5).map(lambda n: [longest] * n),
        )
    )
    spare = draw(st.integers(0, 3))
    trailing = draw(st.lists(st.integers(1, 3), max_size=3))
    dtype = draw(st.sampled_from(DTYPES))
    width = max(lengths, default=0) + spare
    padded = arbitrary((len(lengths), width, *trailing), dtype, seed=draw(st.integers(0, 2**20)))
    return RaggedCase(padded, lengths)


def pad_ragged(
    values: torch.Tensor, offsets: torch.Tensor, width: int | None = None, pad_value: float = 0
) -> torch.Tensor:
    """Return ragged rows as (N, width, ...); `width` None: the longest row."""
    return RowLayout(offsets.diff(), width).pad(values, pad_value)


def strip_padding(padded: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (values, offsets) of padded (N, S, ...) rows; offsets are on the device of `padded`."""
    layout = RowLayout(lengths, padded.shape[1])
    return layout.strip(padded), layout.offsets_on(padded.device)
