"""The files of a journal: `FOLDER/WRITER/000001.journal`, each writer's own, appended to one after the other.

A position says how far each writer had come. What lies before it is the journal of that moment; a record that it, or a
crash, cuts in two is none.
"""

import json
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple
from weakref import finalize

from headrace.data_plane.journal.records import (
    FRAME_BYTES,
    HEAD_START,
    AnyHead,
    Frame,
    framed,
    is_whole,
    read_frame,
    read_head,
)
from headrace.errors import DataPlaneError
from headrace.utils import atomic

Position = Mapping[str, Sequence[int]]
"""Of each writer, the number of its last segment, and the bytes of it; a writer that is not there had none."""

_SUFFIX = ".journal"
_MAGIC = b"HRJOURN1"
_KEEP, _CLOCK = "keep.json", "clock.json"
_LOOK_BYTES = 16 * 1024**2
_MOST_BUFFERS = 512
"""The system takes 1,024 in one call."""


class Segment(NamedTuple):
    """One file of a writer."""

    writer: str
    number: int

    def path(self, folder: Path) -> Path:
        return folder / self.writer / f"{self.number:06d}{_SUFFIX}"


class Record(NamedTuple):
    """A record in a file: its head, and where the body is."""

    head: AnyHead
    segment: Segment
    frame: Frame
    start: int

    @property
    def end(self) -> int:
        return self.start + self.frame.nbytes

    def is_whole(self, folder: Path) -> bool:
        """Return whether the body is what was written."""
        try:
            self.body(folder)
        except DataPlaneError:
            return False
        return True

    def body(self, folder: Path) -> bytearray:
        """Read the body.

        Raises:
            DataPlaneError: it is not what was written.
        """
        body = bytearray(self.frame.body_bytes)
        path = self.segment.path(folder)
        with open(path, "rb", buffering=0) as file:
            file.seek(self.start + FRAME_BYTES + self.frame.head_bytes)
            rest = memoryview(body)
            while rest and (count := file.readinto(rest)):
                rest = rest[count:]
        if rest or not is_whole(self.frame, body):
            raise damaged(path, self.start)
        return body


def damaged(path: Path, start: int) -> DataPlaneError:
    return DataPlaneError(
        f"{path}: the record at byte {start} is damaged, and it is not one that a crash has cut short; copy the file "
        "from elsewhere, or remove it to go on without its rows"
    )


def segments(folder: Path) -> list[Segment]:
    """Return all files of a journal, each writer's in order."""
    if not folder.is_dir():
        return []
    found = [
        Segment(path.parent.name, int(path.stem))
        for path in folder.glob(f"*/*{_SUFFIX}")
        if path.stem.isdecimal()
    ]
    return sorted(found)


def size_of(folder: Path, segment: Segment) -> int:
    """Return the bytes of a file; 0 if it is gone."""
    try:
        return segment.path(folder).stat().st_size
    except FileNotFoundError:
        return 0


def position_of(folder: Path) -> dict[str, list[int]]:
    """Return how far all writers have come."""
    ends = {segment.writer: segment for segment in segments(folder)}
    return {writer: [segment.number, size_of(folder, segment)] for writer, segment in ends.items()}


def bound(segment: Segment, position: Position | None, size: int) -> int:
    """Return how many bytes of a file lie before a position; None: all."""
    if position is None:
        return size
    number, end = position.get(segment.writer, (-1, 0))
    return size if segment.number < number else min(size, end) if segment.number == number else 0


def cut(folder: Path, position: Position) -> int:
    """Remove what lies after a position; return the bytes that are gone."""
    gone = 0
    for segment in reversed(segments(folder)):
        size = size_of(folder, segment)
        gone += shorten(folder, segment, bound(segment, position, size))
    if not position:
        (folder / _KEEP).unlink(missing_ok=True)
    return gone


def shorten(folder: Path, segment: Segment, size: int) -> int:
    """Cut a file to a size, and remove one of which nothing is left; return the bytes that are gone."""
    path, gone = segment.path(folder), size_of(folder, segment) - size
    with atomic.naming(path):
        if size and gone:
            os.truncate(path, size)
        elif not size:
            path.unlink()
            with suppress(OSError):  # other files are in it
                path.parent.rmdir()
    return gone


def records(folder: Path, segment: Segment, start: int, stop: int) -> Iterator[Record]:
    """Yield the whole records of a file from byte `start` on that end by `stop`; bodies are not read.

    A last one that is cut in two is left out; a file that is gone has none.

    Raises:
        DataPlaneError: no file of a journal, or a damaged record that has others after it.
    """
    path = segment.path(folder)
    try:
        opened = open(path, "rb")  # noqa: SIM115
    except FileNotFoundError:
        return
    with opened as file:
        start = start or _begun(file.read(len(_MAGIC)), path)
        while (record := _record(file, segment, start, stop)) is not None:
            yield record
            start = record.end
        if start < stop and _has_record(file, segment, start, stop):
            raise damaged(path, start)


def _begun(magic: bytes, path: Path) -> int:
    if magic != _MAGIC and not _MAGIC.startswith(magic):
        raise DataPlaneError(
            f"{path}: no file of a journal of this version; remove it, or choose another folder"
        )
    return len(_MAGIC)


def _record(file: BinaryIO, segment: Segment, start: int, stop: int) -> Record | None:
    """Return the record at a byte; None: there is no whole one."""
    file.seek(start)
    data = file.read(FRAME_BYTES)
    if len(data) < FRAME_BYTES:
        return None
    frame = read_frame(data)
    if start + frame.nbytes > stop:
        return None
    head = read_head(frame, data, file.read(frame.head_bytes))
    return None if head is None else Record(head, segment, frame, start)


def _has_record(file: BinaryIO, segment: Segment, start: int, stop: int) -> bool:
    """Return whether there is a whole record somewhere behind a byte, whatever the sizes say that stand there."""
    for at in range(start + 1 + FRAME_BYTES, stop, _LOOK_BYTES):
        file.seek(at)
        # A little more, for one that begins at the end.
        data = file.read(min(_LOOK_BYTES + FRAME_BYTES, stop - at))
        starts = (at + head.start() - FRAME_BYTES for head in HEAD_START.finditer(data))
        if any(_record(file, segment, one, stop) for one in starts):
            return True
    return False


_clock_lock = threading.Lock()
_last = _ahead = 0


def now() -> int:
    """Return the time in ns, no two of a process alike, and none before an earlier one."""
    global _last
    with _clock_lock:
        _last = max(_last + 1, time.time_ns() + _ahead)
        return _last


def go_on_after(folder: Path, newest: int) -> None:
    """Let a journal's new records be of later times than its newest one, though the clock was set back since.

    The clocks of all its writers are put forward alike, for as long as the folder is there.
    """
    behind = newest - time.time_ns()
    if behind > 0:
        atomic.write_text(folder / _CLOCK, json.dumps({"ahead_ns": behind}))
        set_clock(folder)


def set_clock(folder: Path) -> None:
    """Put this process's clock forward as `go_on_after` says."""
    global _ahead
    with atomic.naming(folder), suppress(FileNotFoundError):
        told = json.loads((folder / _CLOCK).read_text(encoding="utf-8"))["ahead_ns"]
        with _clock_lock:
            _ahead = max(_ahead, told)


class Writer:
    """Appends records to files of its own, the first of which is made by the first record. Not thread-safe."""

    def __init__(self, folder: Path, name: str, *, segment_bytes: int, syncs: bool) -> None:
        self.folder, self.name = folder, name
        self._segment_bytes, self._syncs = segment_bytes, syncs
        self._file: int | None = None
        self._number = self._size = 0

    @property
    def segment(self) -> Segment:
        """The file in use."""
        return Segment(self.name, self._number)

    @property
    def is_full(self) -> bool:
        return self._file is None or self._size >= self._segment_bytes

    def append(self, head: AnyHead, body: Sequence[memoryview] = ()) -> int:
        """Write a record, whole or not at all; return its bytes.

        Raises:
            WriteError: a full disk, or no permission.
        """
        path = self.segment.path(self.folder)
        with atomic.naming(path):
            if self._file is None:
                self.begin()
            assert self._file is not None
            with ExitStack() as undo:
                # Also after Ctrl-C: nothing may be written behind a part of a record.
                undo.callback(lambda file: os.ftruncate(file, self._size), self._file)
                nbytes = self._write(framed(head, body))
                undo.pop_all()
            return nbytes

    def _write(self, buffers: list[memoryview]) -> int:
        assert self._file is not None
        rest = [buffer for buffer in buffers if len(buffer)]
        total = sum(map(len, rest))
        while rest:
            count = os.writev(self._file, rest[:_MOST_BUFFERS])
            while rest and count >= len(rest[0]):
                count -= len(rest.pop(0))
            if count:
                rest[0] = rest[0][count:]
        self._size += total
        return total

    def begin(self) -> None:
        """Begin the next file."""
        self.close()
        self._number += 1
        path = self.segment.path(self.folder)
        with atomic.naming(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o666)
            self._let_go = finalize(self, os.close, self._file)
            self._size = 0
            self._write([memoryview(_MAGIC)])
            if self._syncs:
                for directory in (path.parent, self.folder):
                    atomic.sync(directory)

    def sync(self) -> None:
        """Wait until all records are on the disk."""
        if self._file is not None and self._syncs:
            with atomic.naming(self.segment.path(self.folder)):
                os.fsync(self._file)

    def close(self) -> None:
        if self._file is not None:
            self.sync()
            self._let_go()
            self._file = None


def keep_since(folder: Path, position: Position) -> None:
    """Have all writers keep what a restore of this position needs."""
    folder.mkdir(parents=True, exist_ok=True)
    atomic.write_text(folder / _KEEP, json.dumps({writer: list(at) for writer, at in position.items()}))


def kept_position(folder: Path) -> Position | None:
    """Return the position that `keep_since` wrote last; None: nobody asks for more than what is in store now."""
    try:
        kept: Position = json.loads((folder / _KEEP).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return kept
