"""How many tokens each row of a partition has, as all its columns that say so must agree on."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from headrace.data_plane.adapters.local_chunks import Form, RowBlock, Rows
from headrace.data_plane.schema import INPUT_LENGTHS, PER_TOKEN_FIELDS
from headrace.errors import SchemaError

Keepers = Callable[[Rows], tuple[str, NDArray[np.bool_]] | None]
_UNKNOWN = -1


def says_length(name: str, form: Form) -> bool:
    """Return whether a column says how many tokens a row has: `input_lengths`, or ragged and declared per token."""
    if name == INPUT_LENGTHS:
        return form.kind == "dense"
    return name in PER_TOKEN_FIELDS and form.kind == "ragged" and form.ragged_dim == 1


class PartitionLengths:
    """Tokens by slot. A slot keeps its number when the last column that said it has gone: then it binds nobody."""

    def __init__(self) -> None:
        self._of: Rows = np.empty(0, np.int64)

    def forget(self, slots: Rows) -> None:
        """Let nothing be known of `slots`, which may be new."""
        if len(slots) and len(self._of) <= (last := int(slots.max())):
            more = max(last + 1, 2 * len(self._of)) - len(self._of)
            self._of = np.append(self._of, np.full(more, _UNKNOWN))
        self._of[slots] = _UNKNOWN

    def renumber(self, slots: Rows) -> None:
        """Let what is slot `slots[i]` now be slot i."""
        self._of = self._of[slots]

    def write(self, slots: Rows, blocks: Mapping[str, Sequence[RowBlock]]) -> None:
        """Take over the lengths of a put that `check` has let pass."""
        for name, parts in blocks.items():
            if says_length(name, parts[0].form):
                self._of[slots] = _read(parts)
                return

    def check(
        self,
        ids: Sequence[str],
        slots: Rows,
        blocks: Mapping[str, Sequence[RowBlock]],
        keepers: Keepers,
    ) -> None:
        """Hold the columns of a put to one length per row, and to the rows that are there; slot -1 is a new row.

        `keepers` gives a column outside the put that says the length of some of these slots, and of which, if there
        is one.

        Raises:
            SchemaError: two lengths of one row, with the sample, the columns and both lengths.
        """
        first: tuple[str, Rows] | None = None
        for name, parts in blocks.items():
            if not says_length(name, parts[0].form):
                continue
            lengths = _read(parts)
            if first is None:
                first = name, lengths
            elif len(rows := np.flatnonzero(lengths != first[1])):
                row = int(rows[0])
                raise _two_lengths(name, ids[row], lengths[row], first[0], first[1][row], "of the same put")
        if first is not None and len(self._of):
            self._check_held(ids, slots, *first, keepers)

    def _check_held(
        self, ids: Sequence[str], slots: Rows, name: str, lengths: Rows, keepers: Keepers
    ) -> None:
        held = self._of[slots]
        differs = np.flatnonzero((held != lengths) & (held != _UNKNOWN) & (slots >= 0))
        if len(differs) and (found := keepers(slots[differs])) is not None:
            keeper, keeps = found
            row = int(differs[int(keeps.argmax())])
            raise _two_lengths(name, ids[row], lengths[row], keeper, held[row], "that the store holds")


def _read(parts: Sequence[RowBlock]) -> Rows:
    numbers = [np.asarray(part.lengths().leaf()).reshape(-1) for part in parts]
    return numbers[0] if len(numbers) == 1 else np.concatenate(numbers)


def _two_lengths(name: str, sample: str, got: int, other: str, held: int, where: str) -> SchemaError:
    return SchemaError(
        f"column '{name}' has {got} tokens for sample '{sample}'; column '{other}' {where} says {held}. Write "
        "all columns of a sample that have one value per token with one length; to change it, overwrite them, and "
        f"'{INPUT_LENGTHS}', in one put"
    )
