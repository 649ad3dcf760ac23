"""A cache of the Hugging Face hub as `hf download` leaves one, made of a directory, without a hub."""

import hashlib
import shutil
from pathlib import Path


def publish(cache: Path, name: str, source: Path, *, revision: str = "main") -> None:
    """Put the files of `source` into the cache under a model's name."""
    commit = hashlib.sha1(f"{name}{revision}".encode()).hexdigest()
    folder = cache / f"models--{name.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True, exist_ok=True)
    (folder / "refs" / revision).write_text(commit)
    shutil.copytree(source, folder / "snapshots" / commit)
