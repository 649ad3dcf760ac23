"""A client that passes its calls on to another one: what counts them, or writes them down, begins here."""

from collections.abc import Callable
from functools import update_wrapper
from typing import Any

from headrace.data_plane.interfaces import DataPlaneClient


def _passed_on(name: str) -> Callable[..., Any]:
    """Return a method of the contract's signature and docstring that passes its call on."""
    contract = getattr(DataPlaneClient, name)

    def call(self: "PassingClient", *args: Any, **kwargs: Any) -> Any:
        return self._pass(name, *args, **kwargs)

    update_wrapper(call, contract)
    call.__isabstractmethod__ = False  # type: ignore[attr-defined]
    return call


class PassingClient(DataPlaneClient):
    """Passes every call on to `inner`; what a store has beyond the contract is to be had here as well."""

    inner: DataPlaneClient
    register_partition = _passed_on("register_partition")
    claim_meta = _passed_on("claim_meta")
    renew_claim = _passed_on("renew_claim")
    release_claim = _passed_on("release_claim")
    finish_claim = _passed_on("finish_claim")
    claimed_ids = _passed_on("claimed_ids")
    mark_consumed = _passed_on("mark_consumed")
    get_data = _passed_on("get_data")
    check_consumption_status = _passed_on("check_consumption_status")
    put_samples = _passed_on("put_samples")
    write_samples = _passed_on("write_samples")
    get_samples = _passed_on("get_samples")
    clear_samples = _passed_on("clear_samples")
    wait_for_room = _passed_on("wait_for_room")
    partition_report = _passed_on("partition_report")
    partition_ids = _passed_on("partition_ids")
    sample_ids = _passed_on("sample_ids")
    stored_bytes = _passed_on("stored_bytes")
    close = _passed_on("close")

    def _pass(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.inner, name)(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or "inner" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__} has no attribute '{name}'")
        return getattr(self.inner, name)
