"""The C extension that copies ragged rows, where it was built: `pip install` does that if there is a C compiler.

`HEADRACE_KERNEL=0` in the environment leaves it out. Every caller has a way in Python with the same result.
"""

import os
from functools import cache
from types import ModuleType

try:
    from headrace.distributed import _ragged as _built
except ImportError:
    _built = None  # type: ignore[assignment]


@cache
def load_kernel() -> ModuleType | None:
    """Return the extension, see `_ragged.pyi`; None if it is switched off or was not built."""
    return None if os.environ.get("HEADRACE_KERNEL") == "0" else _built
