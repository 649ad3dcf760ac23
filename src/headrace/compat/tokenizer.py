"""What `nemo_rl.algorithms.utils` names that scripts need first: the tokenizer."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoProcessor, AutoTokenizer

from headrace.errors import ConfigError

__all__ = ["get_tokenizer"]


def get_tokenizer(tokenizer_config: Mapping[str, Any], get_processor: bool = False) -> Any:
    """Return the tokenizer that a config names, with a pad token; its processor with `get_processor`.

    Keys: `name` (a model on the hub, or a directory), `chat_template` (None: a message is its text alone; `default`
    or left out: the tokenizer's own; otherwise the template, or a file that holds it), `chat_template_kwargs`
    (defaults of `apply_chat_template`).

    Raises:
        ConfigError: no name, or one that cannot be loaded.
    """
    config = dict(tokenizer_config)
    if "name" not in config:
        raise ConfigError(f"tokenizer has the keys {sorted(config)}; expected 'name', a model or a directory")
    kind = AutoProcessor if get_processor else AutoTokenizer
    try:
        loaded = kind.from_pretrained(config["name"])
    except OSError as error:
        raise ConfigError(f"tokenizer.name={config['name']}: {str(error).splitlines()[0]}") from error
    tokenizer = loaded.tokenizer if get_processor else loaded
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    template = config.get("chat_template", "default")
    if template != "default":
        tokenizer.chat_template = _PLAIN_TEMPLATE if template is None else _template(str(template))
    if defaults := dict(config.get("chat_template_kwargs") or {}):
        _set_template_defaults(tokenizer, defaults)
    if get_processor:
        for name in ("pad_token", "eos_token", "bos_token", "pad_token_id", "eos_token_id", "bos_token_id"):
            setattr(loaded, name, getattr(tokenizer, name))
        loaded.name_or_path = tokenizer.name_or_path
    return loaded


_PLAIN_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def _template(text: str) -> str:
    return Path(text).read_text(encoding="utf-8") if text.endswith(".jinja") else text


def _set_template_defaults(tokenizer: Any, defaults: Mapping[str, Any]) -> None:
    own = tokenizer.apply_chat_template

    def apply_chat_template(*args: Any, **options: Any) -> Any:
        return own(*args, **{**defaults, **options})

    tokenizer.apply_chat_template = apply_chat_template
