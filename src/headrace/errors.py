"""Every error that headrace raises on purpose, each below `HeadraceError`; those of the store below `DataPlaneError`.

A message says what was got, what was expected and which knob changes it.
"""


class HeadraceError(Exception):
    """Base of every error that headrace raises on purpose."""


class ConfigError(HeadraceError, ValueError):
    """A key, value or combination of values that cannot be used."""


class SchemaError(HeadraceError, ValueError):
    """A column or metadata object that breaks its declaration."""


class RewardError(HeadraceError, ValueError):
    """A reward that is missing, not finite, or of the wrong length; the message names the sample."""


class GenerationError(HeadraceError):
    """The generator returned less than it was asked for, or a value that is not finite."""


class GeneratorLost(GenerationError):
    """A generator that will not answer any more: its engines have died as often as they may be started again."""


class ReplayError(HeadraceError):
    """Router replay that replayed nothing, replayed twice, or replayed the wrong rows."""


class WriteError(HeadraceError, OSError):
    """A file or directory that cannot be written; the message names it, the reason and the remedy."""


class DataPlaneError(HeadraceError):
    """The store refused or failed an operation."""


class TransportError(DataPlaneError):
    """The store did not answer in time, or the connection to it is lost."""


class SampleNotFound(DataPlaneError, KeyError):
    """A sample id that the partition does not hold, or a column that a sample does not have yet."""

    __str__ = Exception.__str__  # a KeyError shows its text in quotes


class ClaimTimeout(DataPlaneError):
    """A blocking claim that found too few ready rows within its time-out."""


class ClaimExpired(DataPlaneError):
    """A claim whose lease ran out, or that was released or finished: its holder no longer has the rows."""


class CapacityExceeded(DataPlaneError):
    """A put that does not fit in the store's configured capacity."""
