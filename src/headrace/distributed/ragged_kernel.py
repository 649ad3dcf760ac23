"""A few lines of C for ragged rows, built on first use with the system's compiler; without one there is no kernel.

The library lies in the user's cache folder under the hashes of its source and of itself, so that it is built once per
machine, and a damaged one, which may end the process that loads it, is built again instead. `HEADRACE_KERNEL=0` in the
environment leaves it out. Every caller has a NumPy way with the same result.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

_SOURCE = Path(__file__).with_suffix(".c")
_FLAGS = ("-O3", "-shared", "-fPIC")
_BUILD_TIMEOUT_S = 30.0
_NARROWED = ((2, 1), (4, 1), (8, 1), (4, 2), (8, 2))
"""Bytes of the integers that can be made narrower, before and after."""
_WIDEST = 2048
"""Entries of a row of them at most, as the source has it."""
_ADDRESS, _COUNT = ctypes.c_void_p, ctypes.c_int64

_log = logging.getLogger(__name__)


class RaggedKernel:
    """The functions of the library; addresses are those of contiguous CPU memory that the caller holds."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._strip = library.headrace_strip
        self._strip.argtypes = (_ADDRESS, _COUNT, _ADDRESS, _COUNT, _COUNT, _ADDRESS)
        self._pad = library.headrace_pad
        self._pad.argtypes = (_ADDRESS, _ADDRESS, _COUNT, _COUNT, _COUNT, ctypes.c_char_p, _ADDRESS)
        self._gather = library.headrace_gather
        self._gather.argtypes = (_ADDRESS, _ADDRESS, _ADDRESS, _COUNT, _COUNT, _ADDRESS)
        self._copy = library.headrace_copy
        self._copy.argtypes = (_ADDRESS, _COUNT, _ADDRESS)
        for function in (self._strip, self._pad, self._gather, self._copy):
            function.restype = None
        self._narrow = {}
        for wide, small in _NARROWED:
            narrow = library[f"headrace_narrow_{8 * wide}_{8 * small}"]
            narrow.argtypes = (_ADDRESS, _COUNT, _COUNT, _COUNT, _ADDRESS)
            narrow.restype = ctypes.c_int
            self._narrow[wide, small] = narrow

    def strip(self, padded: int, row_step: int, offsets: int, rows: int, step: int, out: int) -> None:
        """Write padded rows back to back; row i starts at byte `i * row_step`, a token has `step` bytes."""
        self._strip(padded, row_step, offsets, rows, step, out)

    def pad(
        self, values: int, offsets: int, rows: int, step: int, span: int, filler: bytes | None, out: int
    ) -> None:
        """Write rows of `span` bytes; what a row leaves is copied from the start of `filler`, or zeros."""
        self._pad(values, offsets, rows, step, span, filler, out)

    def gather(self, values: int, starts: int, lengths: int, spans: int, step: int, out: int) -> None:
        """Write the spans of `lengths[i]` tokens from token `starts[i]` on back to back."""
        self._gather(values, starts, lengths, spans, step, out)

    def copy(self, source: int, nbytes: int, out: int) -> None:
        """Write bytes that nobody reads soon; they pass by the caches where the processor can do that."""
        self._copy(source, nbytes, out)

    def can_narrow(self, item_bytes: int, out_bytes: int, width: int) -> bool:
        """Return whether `narrow` takes integers of these sizes in rows of `width`."""
        return (item_bytes, out_bytes) in self._narrow and 0 < width <= _WIDEST

    def narrow(
        self, given: int, item_bytes: int, rows: int, width: int, limit: int, out: int, out_bytes: int
    ) -> bool:
        """Write rows of `width` signed integers as ones of fewer bytes, -1 as the pattern of all ones.

        Returns whether all are in -1 .. `limit` - 1, and every row is -1 throughout or nowhere; else what was written
        is of no use. `limit` fits in the integers.
        """
        refused: int = self._narrow[item_bytes, out_bytes](given, rows, width, limit, out)
        return not refused


@cache
def load_kernel() -> RaggedKernel | None:
    """Return the library, built if need be; None if it is switched off or cannot be built or loaded here."""
    if os.environ.get("HEADRACE_KERNEL") == "0":
        return None
    try:
        folder, key = _cache_folder(), _source_key()
        return _cached(folder, key) or _loaded(_built(folder, key))
    except (AttributeError, OSError, RuntimeError, subprocess.SubprocessError) as error:
        _log.info("no compiled copies of ragged rows, NumPy copies them: %s", error)
        return None


def _cached(folder: Path, key: str) -> RaggedKernel | None:
    """Return the first whole library of this source that loads here; there may be those of other systems."""
    for library in sorted(folder.glob(f"ragged_kernel.{key}.*.so")):
        try:
            if _name(key, library.read_bytes()) == library.name:
                return _loaded(library)
            # It stays until it is replaced: its name may be another process's whole one by now.
            _log.warning("%s is damaged and not loaded", library)
        except (AttributeError, OSError) as error:
            _log.info("%s does not load here: %s", library, error)
    return None


def _loaded(library: Path) -> RaggedKernel:
    return RaggedKernel(ctypes.CDLL(str(library)))


def _source_key() -> str:
    key = hashlib.sha256(_SOURCE.read_bytes() + " ".join((*_FLAGS, platform.machine())).encode())
    return key.hexdigest()[:16]


def _name(key: str, content: bytes) -> str:
    return f"ragged_kernel.{key}.{hashlib.sha256(content).hexdigest()[:16]}.so"


def _built(folder: Path, key: str) -> Path:
    """Build the library and return its file.

    Raises:
        OSError: no compiler, or a disk that is full.
        subprocess.SubprocessError: the compiler failed or hung.
    """
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))), None)
    if compiler is None:
        raise OSError("there is no C compiler")
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        fresh = Path(scratch) / "ragged_kernel.so"
        subprocess.run(
            [compiler, *_FLAGS, "-o", str(fresh), str(_SOURCE)],
            check=True,
            capture_output=True,
            timeout=_BUILD_TIMEOUT_S,
        )
        with fresh.open("rb+") as file:
            library = folder / _name(key, file.read())
            os.fsync(file.fileno())
        # Processes that build at once each replace the file by an equal one.
        fresh.replace(library)
    return library


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    folder = (Path(base) if base else Path.home() / ".cache") / "headrace"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    state = folder.stat()
    if hasattr(os, "getuid") and (state.st_uid != os.getuid() or state.st_mode & 0o022):
        raise OSError(f"{folder} belongs to another user, or others may write there (chmod go-w)")
    return folder
