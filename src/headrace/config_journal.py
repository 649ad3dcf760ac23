"""The part of a recipe that says whether what goes into the store is kept on disk: `data_plane.journal`."""

from collections.abc import Iterator
from typing import Literal

from pydantic import PositiveInt

from headrace.utils.section import Section


class JournalConfig(Section):
    """A journal of puts, claims and clears, from which the store's rows can be restored (docs/durability.md)."""

    enabled: bool = False
    """Write one. A checkpoint then remembers a position in it, and a run that goes on has the rows of then."""
    folder: str | None = None
    """Where; every process that puts or clears rows writes there. None: `journal` in the run directory."""
    segment_bytes: PositiveInt = 64 * 1024**2
    """Bytes of a file after which the next one begins; a file goes when all its rows are done with."""
    max_bytes: PositiveInt = 64 * 1024**3
    """Bytes that the folder holds at most; a put beyond them is refused."""
    fsync: Literal["groups", "never"] = "groups"
    """`groups`: wait for the disk whenever a group is whole, cleared or consumed. `never`: leave it to the system: what
    was written just before a machine dies is lost then, and what a process wrote before it died is not."""

    def faults(self) -> Iterator[str]:
        if self.max_bytes < 2 * self.segment_bytes:
            yield (
                f"max_bytes={self.max_bytes} holds fewer than two files of segment_bytes={self.segment_bytes}; raise "
                "the first, or lower the second"
            )
