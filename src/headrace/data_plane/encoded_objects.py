"""An object column together with its messages, so that measuring and storing it encode it once."""

from collections.abc import Sequence
from typing import Any, Self

import numpy as np

from headrace.data_plane.object_codec import ObjectArray, encode_column


class EncodedObjects(np.ndarray[Any, np.dtype[np.object_]]):
    """An object array that carries its encoded rows. What NumPy derives from it (a slice, a copy) has none."""

    messages: tuple[bytes, ...] | None

    def __array_finalize__(self, obj: object) -> None:
        self.messages = None

    @classmethod
    def of(cls, name: str, column: ObjectArray, sample_ids: Sequence[str] | None = None) -> Self:
        """Return the column around the same objects, which must not change as long as this is in use.

        Raises:
            SchemaError: an object that cannot be stored, with its column, row and sample.
        """
        encoded = column.view(cls)
        encoded.messages = messages_of(name, column, sample_ids)
        return encoded


def messages_of(name: str, column: ObjectArray, sample_ids: Sequence[str] | None = None) -> tuple[bytes, ...]:
    """Return one message per row, those that the column carries if it does.

    Raises:
        SchemaError: an object that cannot be stored, with its column, row and sample.
    """
    if isinstance(column, EncodedObjects) and column.messages is not None:
        return column.messages
    return tuple(encode_column(name, column, sample_ids))
