"""The local client under the name that code written against it knows."""

from headrace.data_plane.adapters.local import LocalDataPlaneClient as NoOpDataPlaneClient

__all__ = ["NoOpDataPlaneClient"]
