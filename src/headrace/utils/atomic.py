"""Files and directories that appear whole or not at all.

Everything is written beside its target under a hidden name of headrace's own, synced to disk, and renamed. A
crash leaves the old content, or none, and at most a hidden entry that `remove_partials` sweeps away. What cannot be
written is a WriteError that names the path; the old content stays.
"""

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace.errors import WriteError

# Nobody else has such names: what carries them may be removed after a crash.
_PARTIAL = ".headrace-tmp"
_BACKUP = ".headrace-old"
_OWNER_ONLY = 0o600


@contextmanager
def naming(path: Path, draft: Path | None = None) -> Iterator[None]:
    """Let a block that writes `path`, by way of `draft`, fail with its name."""
    try:
        yield
    except WriteError as error:
        if draft is None:
            raise
        raise WriteError(str(error).replace(str(draft), str(path))) from error
    except OSError as error:
        raise write_error(path, error.strerror or str(error)) from error


def write_error(path: Path, reason: str) -> WriteError:
    return WriteError(
        f"{path}: cannot write it ({reason}); make room or give permission there, or choose another directory"
    )


def write_text(path: Path, text: str) -> None:
    """Replace a file's content by `text` (UTF-8), as `write_bytes` does."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, data: bytes) -> None:
    """Replace a file's content by `data`."""
    partial = partial_path(path)
    with naming(path):
        try:
            with open(partial, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
        sync(path.parent)


def append_line(path: Path, line: str) -> None:
    """Append one line in one write, so that a reader or a crash does not see half of it."""
    with naming(path), open(path, "ab", buffering=0) as file:
        rest = memoryview(f"{line}\n".encode())
        while rest:  # a second round only where a disk runs full, to raise its error
            rest = rest[file.write(rest) :]


@contextmanager
def writing_directory(path: Path) -> Iterator[Path]:
    """Yield an empty directory that replaces `path` when the block ends, and vanishes if it raises."""
    partial = partial_path(path)
    with naming(path, partial):
        partial.mkdir(parents=True)
        try:
            yield partial
            publish_directory(partial, path)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def publish_directory(partial: Path, path: Path) -> None:
    """Sync a finished directory to disk and move it to `path`, in place of what is there."""
    sync_tree(partial)
    backup = path.with_name(f".{path.name}{_BACKUP}")
    if path.exists():
        os.rename(path, backup)
    os.rename(partial, path)
    sync(path.parent)
    shutil.rmtree(backup, ignore_errors=True)


def remove(path: Path) -> None:
    """Remove what is there; a crash half-way leaves a hidden directory, never one that looks whole."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    partial = partial_path(path)
    os.rename(path, partial)
    shutil.rmtree(partial)


def partial_path(path: Path) -> Path:
    """Return a fresh hidden name beside `path`, for content that is not finished."""
    return path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(3)}{_PARTIAL}")


def remove_partials(directory: Path) -> None:
    """Clean up after a crash: remove unfinished entries, and put back what a replacement had moved aside.

    Only the process that writes in `directory` may call this.
    """
    if not directory.is_dir():
        return
    for entry in directory.iterdir():
        if not entry.name.startswith("."):
            continue
        target = entry.with_name(entry.name.removeprefix(".").removesuffix(_BACKUP))
        if entry.name.endswith(_BACKUP) and not target.exists():
            os.rename(entry, target)
        elif entry.name.endswith((_PARTIAL, _BACKUP)):
            remove(entry)


def sync_tree(directory: Path) -> None:
    """Sync all files to disk, and let those read them who may read the directory: safetensors asks for no umask."""
    mode = directory.stat().st_mode & 0o666
    for folder, _, files in os.walk(directory):
        for name in files:
            path = Path(folder) / name
            if path.lstat().st_mode & 0o777 == _OWNER_ONLY != mode:
                path.chmod(mode)
            sync(path)
        sync(Path(folder))


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
