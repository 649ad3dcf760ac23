"""Files that libraries write, and what they raise where they cannot."""

from pathlib import Path
from types import TracebackType

from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException

from headrace.errors import WriteError
from headrace.utils import atomic


class Saving:
    """A block that writes into `directory`; what libraries raise where they cannot becomes a WriteError."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def __enter__(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, WriteError):
            return
        # tokenizers has no class of its own for this.
        if isinstance(error, OSError | SafetensorError | CheckpointException) or type(error) is Exception:
            raise atomic.write_error(self._directory, _reason(error)) from error


def _reason(error: BaseException) -> str:
    """Return what the system said, where it is behind an error, or else what the error says."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    cause: BaseException | None = error
    while cause is not None and not (isinstance(cause, OSError) and cause.strerror):
        cause = cause.__context__
    return str(cause.strerror) if isinstance(cause, OSError) else " ".join(str(error).split())
