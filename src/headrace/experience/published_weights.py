"""The policy's newest weights, for those who make samples while it trains."""

from collections.abc import Generator, Iterable
from typing import Any

import torch

from headrace.errors import HeadraceError


class PublishedWeights:
    """Keeps a copy of what a policy's `weight_stream` yields, in this process or in an actor of its own.

    A version is there as a whole or not at all: readers have the one before until the copy is complete.
    """

    def __init__(self) -> None:
        self._newest: tuple[int, list[Any]] | None = None

    def keep(self, items: Iterable[Any], version: int) -> None:
        """Copy weights, each on its device."""
        copies = [(item[0], item[1].clone()) if isinstance(item, tuple) else item for item in items]
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.current_stream().synchronize()  # readers have streams of their own
        self._newest = version, copies

    def newer_than(self, version: int) -> Generator[Any, None, None]:
        """Yield the version of the weights and then what `keep` got; nothing if they are not newer than `version`.

        Raises:
            HeadraceError: there are none, as in an actor that was just started again.
        """
        if self._newest is None:
            raise HeadraceError("no weights have been published here yet")
        newest, items = self._newest
        if newest > version:
            yield newest
            for item in items:
                if isinstance(item, tuple) and item[1].is_cuda:
                    # The reader's stream may lag behind the end of this loop, and with it the end of the copies.
                    item[1].record_stream(torch.cuda.current_stream())
                yield item

    def has_weights(self) -> bool:
        return self._newest is not None

    def shutdown(self) -> None:
        self._newest = None
