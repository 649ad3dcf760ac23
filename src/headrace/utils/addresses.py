"""Why a server cannot listen."""

import errno
import socket


def is_of_the_host(error: Exception) -> bool:
    """Return whether an error of `bind` is over the address, and not over the port."""
    return isinstance(error, socket.gaierror) or getattr(error, "errno", None) == errno.EADDRNOTAVAIL
