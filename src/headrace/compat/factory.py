"""Stores from configs of a NeMo-RL recipe: without `bootstrap` the store is started, and events go to a callback."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel

from headrace.compat.observability import EventCallback, MetricsDataPlaneClient, log_event, record_with
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


def headrace_config(cfg: Any) -> tuple[dict[str, Any], EventCallback | None]:
    """Return headrace's config of the store without observability, and who is to get its events; None: nobody.

    Raises:
        ConfigError: something that is no mapping, or a key that has no counterpart.
    """
    if isinstance(cfg, BaseModel):
        cfg = cfg.model_dump(exclude_unset=True)
    if not isinstance(cfg, Mapping):
        raise ConfigError(
            f"data_plane is {cfg!r}; expected a mapping such as {{'enabled': True, 'impl': 'local'}}"
        )
    plain = dict(cfg)
    observability = plain.pop("observability", None) or {}
    if isinstance(observability, BaseModel):
        observability = observability.model_dump()
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


def event_callback(callback: Any) -> EventCallback:
    """Return the function that gets events: `callback` itself, a logger's record, or what a text names.

    Raises:
        ConfigError: something else.
    """
    if callback is None:
        return log_event
    if isinstance(callback, logging.Logger | logging.LoggerAdapter):
        return record_with(callback)
    if isinstance(callback, str):
        named: Callable[..., Any] = load_callable(callback, CALLBACK_KEY)
        return named
    if not callable(callback):
        raise ConfigError(
            f"{CALLBACK_KEY} is a {type(callback).__name__}; expected a function, a logger, or text module:name"
        )
    function: EventCallback = callback
    return function
