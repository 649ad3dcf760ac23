"""Where a recipe's model and tokenizer lie: a directory, or what the Hugging Face hub has under a name.

A directory goes before a name of the hub. Files of the hub are kept in its own cache, and read from there where it
cannot be reached; `HF_HUB_OFFLINE=1` asks for nothing else.
"""

import re
from pathlib import Path

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from headrace.config import ModelConfig, PolicyConfig
from headrace.errors import ConfigError
from headrace.models.gguf import convert_gguf_package
from headrace.utils.paths import user_path

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_SAFETENSORS, _PICKLED = "*.safetensors", "pytorch_model*.bin"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.*", "*.model", "*.tiktoken")
_SMALL_FILES = ["*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken"]


def model_directory(cfg: ModelConfig, *, weights: bool = True) -> Path | None:
    """Return the directory of the model, downloaded or converted if it is not here; None: it is made from a config.

    Raises:
        ConfigError: nothing there, no config.json, no weights (without `weights` none are looked for), or a hub that
            cannot be reached, lets nobody in, or has no such name or revision.
    """
    if cfg.gguf_package is not None:
        return Path(convert_gguf_package(cfg.gguf_package, cfg.cache_dir))
    if cfg.path is None:
        return None
    wanted = [_SAFETENSORS] if weights else []
    directory = _find("policy.model", cfg.path, cfg.revision, wanted, code=cfg.trust_remote_code)
    if not (directory / "config.json").is_file():
        raise ConfigError(
            f"policy.model.path={cfg.path}: no config.json there; give the directory of a Hugging Face model, or its "
            "name on the hub"
        )
    if weights and not _has_weights(directory) and not user_path(cfg.path, "policy.model.path").is_dir():
        _find("policy.model", cfg.path, cfg.revision, [_PICKLED], code=cfg.trust_remote_code)
    if weights and not _has_weights(directory):
        raise ConfigError(
            f"policy.model.path={cfg.path}: no weights there (*.safetensors); copy them beside config.json"
        )
    return directory


def tokenizer_directory(cfg: PolicyConfig) -> tuple[str, Path]:
    """Return the directory of the tokenizer, and the recipe's key that names it."""
    own = cfg.tokenizer
    if own.path is not None:
        code = cfg.model.trust_remote_code
        directory = _find("policy.tokenizer", own.path, own.revision, [], code=code)
        return "policy.tokenizer.path", _with_tokenizer("policy.tokenizer.path", directory)
    found = model_directory(cfg.model, weights=False)
    if found is None:
        raise ConfigError(
            "policy.model.config has no tokenizer of its own; set policy.tokenizer.path, or "
            "policy.tokenizer.builder=characters"
        )
    key = "policy.model.path" if cfg.model.path else "policy.model.gguf_package"
    return key, _with_tokenizer(key, found)


def _with_tokenizer(key: str, directory: Path) -> Path:
    # Without any of them, transformers makes some tokenizers up, with an empty vocabulary.
    if not any(file for pattern in _TOKENIZER_FILES for file in directory.glob(pattern)):
        raise ConfigError(
            f"{key}={directory}: no tokenizer can be read there (no tokenizer.json); set policy.tokenizer.path"
        )
    return directory


def _has_weights(directory: Path) -> bool:
    return any(file for pattern in (_SAFETENSORS, _PICKLED) for file in directory.glob(pattern))


def _find(section: str, name: str, revision: str | None, weights: list[str], *, code: bool) -> Path:
    key = f"{section}.path"
    directory = user_path(name, key)
    if directory.is_dir():
        if revision is not None:
            raise ConfigError(
                f"{section}.revision={revision}: {key}={name} is a directory here, which has no revisions; remove it"
            )
        return directory
    if not _HUB_NAME.fullmatch(name) or name.startswith("."):
        raise ConfigError(
            f"{key}={name}: no such directory, and no name on the hub, which is OWNER/NAME; give a Hugging Face model "
            "directory or such a name"
        )
    patterns = [*_SMALL_FILES, *weights, *(["*.py"] if code else [])]
    at = "" if revision is None else f" --revision {revision}"
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except GatedRepoError as error:
        fault = "its owner has to let you in; ask for it on its page, and set HF_TOKEN"
        raise ConfigError(f"{key}={name}: {fault}") from error
    except RevisionNotFoundError as error:
        fault = "has no such branch, tag or commit; give another"
        raise ConfigError(f"{section}.revision={revision}: {name} on the hub {fault}") from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ConfigError(
            f"{key}={name}: no such directory, and the hub has no such model, or shows it to others only; check the "
            "name, or set HF_TOKEN"
        ) from error
    except (EntryNotFoundError, HfHubHTTPError, OSError) as error:
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "no answer"
        raise ConfigError(
            f"{key}={name}: no such directory, not whole in the cache {constants.HF_HUB_CACHE}, and the hub cannot be "
            f"reached ({why}); where there is network, run: hf download {name}{at}, and copy its cache here (HF_HOME)"
        ) from error
