"""The new lines of a file that another process appends to."""

import os
from contextlib import suppress
from pathlib import Path

import msgspec

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What a decoder raises of a line that is damaged."""


class LineTail:
    """Gives the lines of a file that have come since it was asked last; none of one that is not there or not readable.

    `restarts` counts how often it began anew: the file was replaced, as by a run that is continued, or cut.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0
        self.restarts = 0
        self._inode: int | None = None

    def has_news(self) -> bool:
        """Whether the file has changed; looks at its directory entry alone."""
        found = _stat(self.path)
        if found is None:
            return self._inode is not None
        return found.st_ino != self._inode or found.st_size != self.offset

    def read(self) -> list[tuple[int, bytes]]:
        """Return the new lines, each with its place in the file; a last one without its end waits."""
        found = _stat(self.path)
        if found is None:
            self._begin(None)
            return []
        if found.st_ino != self._inode or found.st_size < self.offset:
            self._begin(found.st_ino)
        lines: list[tuple[int, bytes]] = []
        with suppress(OSError), open(self.path, "rb") as file:
            file.seek(self.offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                lines.append((self.offset, line))
                self.offset += len(line)
        return lines

    def _begin(self, inode: int | None) -> None:
        if self._inode is not None:
            self.restarts += 1
        self._inode, self.offset = inode, 0


def _stat(path: Path) -> os.stat_result | None:
    try:
        return os.stat(path)
    except OSError:
        return None
