"""What libraries log while a run goes on: into a file of the run, not onto the terminal.

Errors go to both. What headrace and code of the user's own log stays on the terminal.
"""

import logging
import sys
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Self

_LIBRARIES = (
    *("absl", "accelerate", "datasets", "filelock", "fsspec", "httpx", "huggingface_hub", "matplotlib"),
    *(
        "mlflow",
        "opentelemetry",
        "peft",
        "ray",
        "tensorboard",
        "tensordict",
        "torch",
        "torchao",
        "transformers",
    ),
    *("transfer_queue", "urllib3", "wandb"),
)


class LibraryLogs:
    """A context in which warnings of libraries are lines of `path`, which is made with the first."""

    def __init__(self, path: Path) -> None:
        self._file = logging.FileHandler(path, delay=True, encoding="utf-8")
        self._file.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
        self._file.setLevel(logging.WARNING)
        self._errors = logging.StreamHandler()
        self._errors.setLevel(logging.ERROR)
        self._undo = ExitStack()

    def __enter__(self) -> Self:
        for name in sorted(logging.root.manager.loggerDict.keys() | set(_LIBRARIES)):
            if name.partition(".")[0] in _LIBRARIES:
                self._redirect(logging.getLogger(name), is_top="." not in name)
        self._undo.callback(setattr, warnings, "showwarning", warnings.showwarning)
        setattr(warnings, "showwarning", partial(self._warned, warnings.showwarning))  # noqa: B010  (typed as a function)
        return self

    def _warned(
        self, shown: Callable[..., None], message: Any, category: Any, filename: str, lineno: int, *rest: Any
    ) -> None:
        if "site-packages" not in filename:
            return shown(message, category, filename, lineno, *rest)
        text = f"{filename}:{lineno}: {category.__name__}: {message}"
        self._file.handle(logging.makeLogRecord({"name": "warnings", "levelname": "WARNING", "msg": text}))

    def _redirect(self, logger: logging.Logger, *, is_top: bool) -> None:
        """Let a library's logger write to the file alone; what else it writes to, but the terminal, it keeps."""
        self._undo.callback(setattr, logger, "handlers", logger.handlers)
        self._undo.callback(setattr, logger, "propagate", logger.propagate)
        logger.handlers = [handler for handler in logger.handlers if not _is_terminal(handler)]
        if is_top:
            logger.handlers += [self._file, self._errors]
        logger.propagate = not is_top

    def __exit__(self, *error: object) -> None:
        self._undo.close()
        self._file.close()


def _is_terminal(handler: logging.Handler) -> bool:
    streams = (sys.stderr, sys.stdout, sys.__stderr__, sys.__stdout__)
    return type(handler) is not logging.FileHandler and getattr(handler, "stream", None) in streams
