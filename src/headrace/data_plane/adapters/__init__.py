"""Adapters: where the bytes of a store lie. Which TransferQueue they were tested with is known before it is loaded."""

import platform
from importlib import metadata

from headrace.errors import ConfigError

TESTED = ("0.1.11",)
"""The versions of TransferQueue over which `tests/contract` has passed: its messages are no public interface."""


def check_version(process: object = None) -> None:
    """Refuse to work with another TransferQueue, in this process; one that is not installed is for the import to tell.

    Raises:
        ConfigError: with the version, the node, and what to install.
    """
    try:
        found = metadata.version("TransferQueue")
    except metadata.PackageNotFoundError:
        return
    if found not in TESTED:
        raise ConfigError(
            f"TransferQueue {found} is installed on {platform.node()}; data_plane.impl=transfer_queue is tested with "
            f"{' and '.join(TESTED)} alone, whose messages it speaks: pip install 'TransferQueue=={TESTED[-1]}'"
        )
