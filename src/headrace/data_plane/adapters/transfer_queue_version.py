"""Which TransferQueue headrace can work with: its messages are no public interface, so the version has to be known."""

import platform
from importlib import metadata

from headrace.errors import ConfigError

PACKAGE = "TransferQueue"
TESTED = ("0.1.11",)
"""The versions over which `tests/contract` has passed."""


def check_version(process: object = None) -> None:
    """Refuse to work with another version, in this process; one that is not installed is for the import to tell.

    Raises:
        ConfigError: with the version, the node, and what to install.
    """
    try:
        found = metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        return
    if found not in TESTED:
        raise ConfigError(
            f"{PACKAGE} {found} is installed on {platform.node()}; data_plane.impl=transfer_queue is tested with "
            f"{' and '.join(TESTED)} alone, whose messages it speaks: pip install '{PACKAGE}=={TESTED[-1]}'"
        )
