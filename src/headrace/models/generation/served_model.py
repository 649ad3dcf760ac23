"""What generators share whose engine is not of headrace: the model as files, and who sets which argument."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError


def refuse_own_args(key: str, args: Mapping[str, Any], own: Mapping[str, str]) -> None:
    """Refuse arguments of a recipe's `key` that headrace sets; `own` says what decides each."""
    if taken := sorted(own.keys() & args.keys()):
        raise ConfigError(
            f"{key}.{taken[0]}={args[taken[0]]}: headrace sets it; what decides it is {own[taken[0]]}"
        )


def write_description(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write what an engine reads beside weights: config, with the architecture's name, and tokenizer."""
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
