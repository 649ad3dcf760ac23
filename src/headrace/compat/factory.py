"""Stores from configs of a NeMo-RL recipe: without `bootstrap` the store is started, and events go to a callback."""

from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from types import SimpleNamespace
from typing import Any

from pydantic import BaseModel

from headrace.compat.observability import EventCallback, Logger, MetricsDataPlaneClient, log_event
from headrace.data_plane import factory
from headrace.data_plane.interfaces import DataPlaneClient
from headrace.errors import ConfigError
from headrace.utils.targets import load_callable

CALLBACK_KEY = "data_plane.observability.callback"


def build_data_plane_client(cfg: Any, *, bootstrap: bool = True) -> DataPlaneClient:
    """Return a client of the store that `cfg` describes, which is started unless `bootstrap` is False.

    With `observability.enabled`, every operation is an event for `observability.callback`: a function, a logger, or
    text `module:name`; without one, events are logged.

    Raises:
        ConfigError: no config, `enabled` is false, or a key or value that cannot be used.
        DataPlaneError: what `headrace.data_plane.build_data_plane_client` raises.
    """
    plain, observe = headrace_config(cfg)
    client = factory.build_data_plane_client(plain, bootstrap=bootstrap)
    return client if observe is None else MetricsDataPlaneClient(client, observe)


def headrace_config(cfg: Any) -> tuple[dict[str, Any], EventCallback | Logger | None]:
    """Return headrace's config of the store without observability, and who is to get its events; None: nobody.

    Raises:
        ConfigError: something without keys, or a key that has no counterpart.
    """
    plain = _keys(cfg)
    observability = _keys(plain.pop("observability", None) or {})
    if (address := plain.pop("controller_address", None)) is not None:
        raise ConfigError(
            f"data_plane.controller_address={address}: stores are found by their name; remove the key, and set "
            "data_plane.store_name where several runs share a cluster"
        )
    if (milliseconds := plain.pop("ack_timeout_ms", None)) is not None:
        plain.setdefault("timeout_s", milliseconds / 1000)
    if not observability.get("enabled"):
        return plain, None
    return plain, event_callback(observability.get("callback"))


def _keys(section: Any) -> dict[str, Any]:
    """Return the keys of a mapping, a model, a data class or a namespace."""
    if isinstance(section, BaseModel):
        return {name: getattr(section, name) for name in section.model_fields_set}
    if isinstance(section, SimpleNamespace) or is_dataclass(section):
        return dict(vars(section))
    if not isinstance(section, Mapping):
        raise ConfigError(
            f"data_plane is {section!r}; expected a mapping such as {{'enabled': True, 'impl': 'local'}}"
        )
    return dict(section)


def event_callback(callback: Any) -> EventCallback | Logger:
    """Return who gets events: `callback` itself, what a text names, or headrace's log.

    Raises:
        ConfigError: neither a function, nor a logger, nor such a text.
    """
    if callback is None:
        return log_event
    if isinstance(callback, str):
        named: Callable[..., Any] = load_callable(callback, CALLBACK_KEY)
        return named
    if not callable(callback) and not isinstance(callback, Logger):
        raise ConfigError(
            f"{CALLBACK_KEY} is a {type(callback).__name__}; expected a function, a logger, or text module:name"
        )
    listener: EventCallback | Logger = callback
    return listener
