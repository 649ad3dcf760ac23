"""How many tokens each row of a partition has, as all its columns that say so must agree on."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from headrace.data_plane.schema import INPUT_LENGTHS, PER_TOKEN_FIELDS
from headrace.data_plane.store.chunks import Chunk, Form, Rows
from headrace.errors import SchemaError

Lengths = NDArray[np.int64] | NDArray[np.int32]
Said = Mapping[str, Lengths]
"""What the columns of a put say: tokens per row by column; columns that share their offsets share one array."""
Keepers = Callable[[Rows], tuple[str, NDArray[np.bool_]] | None]
_UNKNOWN = -1


def says_length(name: str, form: Form) -> bool:
    """Return whether a column says how many tokens a row has: `input_lengths`, or declared with a value for each.

    One value per sample, which holds for all its tokens, says nothing.
    """
    if name == INPUT_LENGTHS:
        return form.kind == "dense"
    if name not in PER_TOKEN_FIELDS:
        return False
    return form.ragged_dim == 1 if form.kind == "ragged" else form.kind == "dense" and bool(form.trailing)


def said_lengths(chunks: Mapping[str, Chunk]) -> dict[str, Lengths]:
    """Return what columns say about the lengths of their rows."""
    said: dict[str, Lengths] = {}
    known: list[tuple[object, Lengths]] = []
    for name, chunk in chunks.items():
        form = chunk.form
        if not says_length(name, form):
            continue
        if form.kind == "dense" and name != INPUT_LENGTHS:
            said[name] = np.full(len(chunk), form.trailing[0], np.int64)
            continue
        offsets = chunk.offsets
        mine = next((lengths for key, lengths in known if key is offsets), None)
        if mine is None or offsets is None:
            mine = chunk.lengths()
            known.append((offsets, mine))
        said[name] = mine
    return said


class PartitionLengths:
    """Tokens by slot. A slot keeps its number when the last column that said it has gone: then it binds nobody."""

    def __init__(self) -> None:
        self._of: Rows = np.empty(0, np.int64)

    def renumber(self, slots: Rows) -> None:
        """Let what is slot `slots[i]` now be slot i."""
        self._of = self._of[slots]

    def of(self, slots: Rows) -> Rows:
        """Return the tokens of rows, -1 where nothing has been said."""
        return self._of[slots]

    def write(self, slots: Rows, said: Said, *, everyone: Rows | None, size: int) -> None:
        """Take over the lengths of a put that `check` has let pass; `everyone`: see `Column`; `size`: of all slots."""
        lengths = next(iter(said.values()), None)
        if lengths is not None and slots is everyone:
            self._of = lengths.astype(np.int64)
            return
        known = len(self._of)
        if known < size:
            grown = np.full(max(size, 2 * known), _UNKNOWN, np.int64)
            grown[:known] = self._of
            self._of = grown
        if lengths is not None:
            self._of[slots] = lengths

    def check(self, ids: Sequence[str], slots: Rows | None, said: Said, keepers: Keepers) -> None:
        """Hold the columns of a put to one length per row, and to the rows that are there; slot -1 is a new row.

        `keepers` gives a column outside the put that says the length of some of these slots, and of which, if there
        is one. Without `slots` all rows are new.

        Raises:
            SchemaError: two lengths of one row, with the sample, the columns and both lengths.
        """
        if not said:
            return
        (first, lengths), *others = said.items()
        for name, other in others:
            if other is not lengths and len(rows := np.flatnonzero(other != lengths)):
                row = int(rows[0])
                raise _two_lengths(name, ids[row], other[row], first, lengths[row], "of the same put")
        if slots is not None and len(self._of):
            self._check_held(ids, slots, first, lengths, keepers)

    def _check_held(
        self, ids: Sequence[str], slots: Rows, name: str, lengths: Lengths, keepers: Keepers
    ) -> None:
        held = self._of[slots]
        differs = np.flatnonzero((held != lengths) & (held != _UNKNOWN) & (slots >= 0))
        if len(differs) and (found := keepers(slots[differs])) is not None:
            keeper, keeps = found
            row = int(differs[int(keeps.argmax())])
            raise _two_lengths(name, ids[row], lengths[row], keeper, held[row], "that the store holds")


def _two_lengths(name: str, sample: str, got: int, other: str, held: int, where: str) -> SchemaError:
    return SchemaError(
        f"column '{name}' has {got} tokens for sample '{sample}'; column '{other}' {where} says {held}. Write "
        "all columns of a sample that have one value per token with one length; to change it, overwrite them, and "
        f"'{INPUT_LENGTHS}', in one put"
    )
