"""torchao for the tests that need it, from a folder of its own.

transformers imports torchao wherever it is installed, which would take every process of the suite seconds.
"""

import sys
from pathlib import Path

import pytest

FOLDER = Path(sys.prefix) / "torchao"


def need_torchao() -> None:
    """Let this process import torchao, or skip."""
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    pytest.importorskip("torchao", reason="needs torchao (make setup puts it there)")
