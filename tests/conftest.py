"""Puts `tests/` on the path, so that tests share reference code, and keeps the hub out of reach."""

import os
import sys
from pathlib import Path

from hypothesis import settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path.insert(0, str(Path(__file__).parent))
# A first example may build a kernel, and a busy machine takes its time.
settings.register_profile("headrace", deadline=None)
settings.load_profile("headrace")

from ray_session import mooncake_engine, ray_cluster, transfer_queue_engine  # noqa: E402, F401  (fixtures; need the path)
from wheel_session import installed_wheel  # noqa: E402, F401  (a fixture; needs the path)
