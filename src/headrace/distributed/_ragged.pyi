"""The C extension; addresses are those of contiguous CPU memory that the caller holds, sizes are in bytes."""

def pad(values: int, offsets: int, rows: int, step: int, span: int, filler: bytes | None, out: int) -> None:
    """Write rows (tokens of `step` bytes) as `span` bytes each; the rest is from the start of `filler`, or zeros."""

def strip(padded: int, row_step: int, offsets: int, rows: int, step: int, out: int) -> None:
    """Write padded rows back to back; row i starts at byte `i * row_step`."""

def gather(values: int, starts: int, lengths: int, spans: int, step: int, out: int) -> None:
    """Write the spans of `lengths[i]` tokens from token `starts[i]` on back to back."""

def copy(source: int, nbytes: int, out: int) -> None:
    """Write bytes that nobody reads soon; they pass by the caches where the processor can do that."""

def narrow(given: int, item_bytes: int, rows: int, width: int, limit: int, out: int, out_bytes: int) -> bool:
    """Write rows of `width` signed integers as ones of fewer bytes, -1 as the pattern of all ones.

    Returns whether that was possible: sizes and width are of those it has, all integers are in -1 .. `limit` - 1, and
    every row is -1 throughout or nowhere; else what was written is of no use. `limit` fits in the integers.
    """
